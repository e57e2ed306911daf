"""What tests of gyms share: playing moves, promises over all tasks, labeled sets, endpoints that play the oracles."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import SecretStr

from environments.gyms._shared import Gym, GymEnvironment, act
from mua.config.schema import EnvironmentConfig, LlmConfig
from mua.environment.endpoint.services import ChatClient, Services
from mua.environment.protocol import Evaluation, Move, Split, Task, ToolResult, Transcript
from mua.types import Json
from tests.chat_fixtures import chat_server, says
from tests.chat_server import Handler, Server, serving

SPLITS: tuple[Split, ...] = get_args(Split)
DATA = Path(__file__).parent / "data/gyms"


def all_tasks(gym: Gym) -> list[Task]:
    return [task for split in SPLITS for task in gym.tasks(split)]


def opened(gym: Gym, task: Task, seed: int = 0) -> GymEnvironment:
    environment = gym.environment()
    assert isinstance(environment, GymEnvironment)
    environment.reset(task, seed)
    return environment


async def played(environment: GymEnvironment, *moves: Move) -> list[ToolResult]:
    return [await environment.call(move[0], move[1]) for move in moves]  # type: ignore[arg-type]


async def say(environment: GymEnvironment, *texts: str) -> list[ToolResult]:
    """What each text brings as an action."""
    return await played(environment, *(act("action", text) for text in texts))


async def judged(environment: GymEnvironment) -> Evaluation:
    return await environment.evaluate(Transcript([]))


def scripts(gym: str) -> pytest.MarkDecorator:
    """The conversations of a gym in tests/data/gyms/scripts.yaml, whose form its head tells."""
    found = yaml.safe_load((DATA / "scripts.yaml").read_text(encoding="utf-8"))[gym]
    return pytest.mark.parametrize("script", found.values(), ids=found)


async def followed(environment: GymEnvironment, script: Json) -> None:
    """Every move brings what the script says, and so does the verdict in the end."""
    for turn in script["moves"]:
        (choice, content), *told = turn.items()
        expected = {"reward": 0.0, "terminal": False, "error": False} | dict(told)
        result = await environment.call(*act(choice, content))
        assert result.reward == pytest.approx(expected.pop("reward")), turn
        assert (result.terminal, result.error) == (expected.pop("terminal"), expected.pop("error")), turn
        assert result.text == expected.pop("text", result.text), turn
        assert expected.pop("says", "") in result.text, turn
        assert expected.pop("says_not", "\0") not in result.text, turn
        assert not expected, "what a move may be expected to bring"
    verdict, wanted = await judged(environment), dict(script.get("verdict", {}))
    details = wanted.pop("details", {})
    assert {key: getattr(verdict, key) for key in wanted} == wanted
    assert {key: verdict.details[key] for key in details} == {
        key: pytest.approx(value) if isinstance(value, float) else value for key, value in details.items()
    }


def labeled(name: str) -> list[Json]:
    """A labeled set from tests/data/gyms."""
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


def text_of(body: Json) -> str:
    """All that a request says."""
    return " ".join(str(message["content"]) for message in body["messages"])


def verdict(label: str) -> str:
    """A judge's reply."""
    return json.dumps({"reason": "r", "verdict": label})


def unasked(body: Json) -> str:
    """The endpoint of a role that is not to be asked."""
    raise AssertionError(f"nobody should have been asked: {text_of(body)}")


@asynccontextmanager
async def modeled(
    gym: Gym, user: Callable[[Json], str], judge: Callable[[Json], str] = unasked, **settings: Any
) -> AsyncIterator[Any]:
    """The gym under ``oracle: llm`` with two endpoints, whose words are made from each request's body."""
    async with chat_server(lambda body: says(user(body))) as one, chat_server(lambda body: says(judge(body))) as other:
        endpoints = [
            ChatClient(LlmConfig(base_url=server.base_url, model="m", max_retries=0)) for server in (one, other)
        ]
        config = EnvironmentConfig(name=gym.name, oracle="llm", **settings)
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
