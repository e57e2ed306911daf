"""What tests of gyms share: playing moves, promises over all tasks, labelled sets, endpoints that play the oracles."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import SecretStr

from environments.gyms._shared import Gym, GymEnvironment, act
from mua.config.schema import EnvironmentConfig, LlmConfig
from mua.endpoint.services import ChatClient, Services
from mua.environment.protocol import Evaluation, Move, Split, Task, ToolResult, Transcript
from mua.types import Json
from tests.chat_fixtures import chat_server, says
from tests.chat_server import Handler, Server, serving
from workbench.demonstrate import demonstrate, replay_gold

SPLITS: tuple[Split, ...] = get_args(Split)
DATA = Path(__file__).parent / "data/gyms"


def all_tasks(gym: Gym) -> list[Task]:
    return [task for split in SPLITS for task in gym.tasks(split)]


def opened(gym: Gym, task: Task, seed: int = 0) -> GymEnvironment:
    environment = gym.environment()
    assert isinstance(environment, GymEnvironment)
    environment.reset(task, seed)
    return environment


async def played(environment: GymEnvironment, moves: Sequence[Move]) -> list[ToolResult]:
    return [await environment.call(move[0], move[1]) for move in moves]  # type: ignore[arg-type]


async def judged(environment: GymEnvironment) -> Evaluation:
    return await environment.evaluate(Transcript([]))


async def gold_wins(gym: Gym, worth: Callable[[Task], float]) -> None:
    """The gold moves of every task solve it and earn exactly what it is worth."""
    for task in all_tasks(gym):
        played_out = await replay_gold(gym, task)
        assert played_out.evaluation.success, task.id
        assert played_out.ended, task.id
        assert played_out.reward == pytest.approx(worth(task)), task.id


async def idling_loses(gym: Gym) -> None:
    """Neither leaving at once nor finishing earns anything, on any task."""
    for task in all_tasks(gym):
        environment = opened(gym, task)
        assert not (await judged(environment)).success
        (result,) = await played(environment, [act("finish")])
        verdict = await judged(environment)
        assert (result.reward, result.terminal, verdict.reward, verdict.success) == (0.0, True, 0.0, False), task.id


async def expert_wins(gym: Gym, split: Split = "test") -> list[int]:
    """The expert solves every task of the split by talking; the numbers of its moves."""
    lengths = []
    for number, task in enumerate(gym.tasks(split)):
        demonstration = await demonstrate(gym, task, number)
        assert demonstration.evaluation.success, (task.id, demonstration.messages)
        lengths.append(sum(message["role"] == "assistant" for message in demonstration.messages))
    return lengths


async def repeats_itself(gym: Gym, count: int = 6) -> None:
    """The same task and seed give the same conversation, and loose experts still play to an end."""
    for task in gym.tasks("test")[:count]:
        for loose in (0.0, 0.7):
            first, second = [await demonstrate(gym, task, 3, loose) for _ in range(2)]
            assert first == second


def labelled(name: str) -> list[Json]:
    """A labelled set from tests/data/gyms."""
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@asynccontextmanager
async def served(gym: Gym, *script: Handler, **options: Any) -> AsyncIterator[tuple[Gym, Server]]:
    """``gym`` with the LLM oracle, both roles played by one server on this machine."""
    async with serving(*script) as server:
        config = LlmConfig(base_url=server.url, model="m", max_retries=0)
        services = Services(user=ChatClient(config), judge=ChatClient(config, "judge"))
        environment = EnvironmentConfig(name=gym.name, oracle="llm", options=options)
        yield gym.configured(environment, services), server
        await services.close()


@asynccontextmanager
async def modelled(
    gym: Gym, user: Callable[[Json], str], judge: Callable[[Json], str], data: Path | None = None
) -> AsyncIterator[Gym]:
    """The gym under ``oracle: llm`` with two endpoints, whose words are made from each request's body."""
    async with chat_server(lambda body: says(user(body))) as one, chat_server(lambda body: says(judge(body))) as other:
        endpoints = [
            ChatClient(LlmConfig(base_url=server.base_url, model="m", max_retries=0)) for server in (one, other)
        ]
        config = EnvironmentConfig(name=gym.name, oracle="llm", data=data)
        yield gym.configured(config, Services(user=endpoints[0], judge=endpoints[1]))
        for endpoint in endpoints:
            await endpoint.close()


@asynccontextmanager
async def real_oracle(gym: Gym) -> AsyncIterator[Gym]:
    """``gym`` with the model that the environment names as its oracle; skips without one."""
    url, model = os.environ.get("MUA_JUDGE_BASE_URL"), os.environ.get("MUA_JUDGE_MODEL")
    if not url or not model:
        pytest.skip("MUA_JUDGE_BASE_URL and MUA_JUDGE_MODEL name no endpoint to compare with")
    key = SecretStr(os.environ.get("MUA_JUDGE_API_KEY", "none"))
    config = LlmConfig(base_url=url, model=model, api_key=key, temperature=0.0)
    services = Services(user=ChatClient(config), judge=ChatClient(config, "judge"))
    yield gym.configured(EnvironmentConfig(name=gym.name, oracle="llm"), services)
    await services.close()


def sentences(messages: Sequence[Json]) -> str:
    """Everything that came back from tools, in lower case."""
    said = [message["content"] for message in messages if message["role"] == "tool"]
    return re.sub(r"\s+", " ", " ".join(said)).lower()
