"""What the tests of service desks share: a desk that is opened, an episode that is played, what was said in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, get_args

from environments.kit.database import DatabaseEnvironment
from environments.kit.demonstrate import demonstrate, play
from mua.environment.domain import Domain, Expert, HasPersona
from mua.environment.protocol import Environment, Evaluation, Move, Split, Task, Transcript, UserMove
from mua.environment.registry import get_domain
from mua.environment.user import User
from mua.rollout.episode import EpisodeResult
from mua.types import Json, ToolSchema

SPLITS: tuple[Split, ...] = get_args(Split)
domain_of = lru_cache(maxsize=8)(get_domain)
"""Finding one looks through folders."""


def all_tasks(name: str) -> list[Task]:
    return [task for split in SPLITS for task in domain_of(name).tasks(split)]


def opened(task: Task, domain: Domain | None = None, seed: int = 0) -> Any:
    """``task`` at its start, in its own domain unless another is named."""
    environment = (domain or domain_of(task.domain)).environment()
    environment.reset(task, seed)
    return environment


class Opened:
    """An environment that was reset, as a domain of its own; closing is left to whoever opened it."""

    name = "opened"

    def __init__(self, opened: Any) -> None:
        self._opened = opened
        self.tools, self.call, self.evaluate = opened.tools, opened.call, opened.evaluate
        self.user_call = getattr(opened, "user_call", None)

    def environment(self) -> Opened:
        return self

    def user_tools(self) -> Sequence[ToolSchema]:
        return self._opened.user_tools() if self.user_call else ()

    def reset(self, task: Task, seed: int) -> None:
        return None

    def close(self) -> None:
        return None


async def played_with(environment: Environment, user: User, moves: Generator[Move, str, None]) -> EpisodeResult:
    """Any moves with any user, on an environment that has been reset."""
    task = Task("opened", "opened", "test", {})
    return await play(Opened(environment), task, 0, lambda opening, tools: moves, user)  # type: ignore[arg-type]


def judged(environment: DatabaseEnvironment, *texts: str) -> Evaluation:
    """The verdict where the agent said this and called nothing."""
    return environment.evaluate(Transcript([{"role": "assistant", "content": text} for text in texts]))


Turn: TypeAlias = Move | UserMove | dict[str, str]
"""What the agent says or calls, what the user does, or says: ``{"user": text}``."""


def conversation(task: Task, turns: Sequence[Turn], domain: Domain | None = None) -> Evaluation:
    """The verdict on these turns, whatever the tools answer."""
    environment, messages = opened(task, domain), list[Json]()
    for turn in turns:
        if isinstance(turn, str):
            messages.append({"role": "assistant", "content": turn})
        elif isinstance(turn, dict):
            messages.append({"role": "user", "content": turn["user"]})
        elif isinstance(turn, UserMove):
            environment.user_call(*turn)
            messages.append({"role": "user", "content": "", "actions": [{"name": turn[0], "arguments": turn[1]}]})
        else:
            answer = environment.call(*turn).text
            calls = [{"type": "function", "function": {"name": turn[0], "arguments": json.dumps(turn[1])}}]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages.append({"role": "tool", "content": answer})
    return environment.evaluate(Transcript(messages))


def played(domain: Domain, task: Task, seed: int = 0, loose: float = 0.0) -> EpisodeResult:
    return asyncio.run(demonstrate(domain, task, seed, loose))


def with_persona(
    task: Task,
    persona: str,
    seed: int = 0,
    moves: Generator[Move, str, None] | None = None,
    domain: Domain | None = None,
) -> EpisodeResult:
    """The expert, or other moves, with a person of this kind."""
    return asyncio.run(_with_persona(task, persona, seed, moves, domain))[1]


def at_its_end(task: Task) -> tuple[Environment, EpisodeResult]:
    """What the expert and a plain person leave behind."""
    return asyncio.run(_with_persona(task, "plain"))


async def _with_persona(
    task: Task,
    persona: str,
    seed: int = 0,
    moves: Generator[Move, str, None] | None = None,
    domain: Domain | None = None,
) -> tuple[Environment, EpisodeResult]:
    domain = domain or domain_of(task.domain)
    assert isinstance(domain, HasPersona)
    assert isinstance(domain, Expert)
    environment = opened(task, domain, seed)
    person = domain.scripted_user(task, seed, [persona])
    return environment, await played_with(environment, person, moves or domain.expert(task, seed))


def spoken(demonstration: EpisodeResult) -> Sequence[str]:
    """What the person said, in turn."""
    return [message["content"] for message in demonstration.messages if message["role"] == "user"]


def reworded(moves: Generator[Move, str, None], change: Callable[[str], str]) -> Generator[Move, str, None]:
    """The same moves with what is said put through ``change``."""
    answer = None
    while True:
        try:
            move = next(moves) if answer is None else moves.send(answer)
        except StopIteration:
            return
        answer = yield change(move) if isinstance(move, str) else move


def in_turn(moves: Sequence[Move]) -> Generator[Move, str, None]:
    """The moves, whatever comes back."""
    for move in moves:  # noqa: UP028 - a sequence cannot be sent what came back
        yield move
