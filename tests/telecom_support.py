"""What the tests of the telecom domain share: all its tasks, ways to act on them, and a user with a phone."""

from __future__ import annotations

from collections.abc import Sequence

from environments.telecom import DOMAIN, TelecomDomain
from environments.telecom.faults import SOLVED
from environments.telecom.recipes import RECIPES
from environments.telecom.tasks import load_split
from environments.telecom.user import PhoneUser
from mua.environment.database import DatabaseEnvironment
from mua.environment.protocol import (
    Evaluation,
    Split,
    Task,
    ToolResult,
    ToolSchema,
    Transcript,
)
from mua.types import Json

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
ALL = [task for split in SPLITS for task in load_split(split)]
KINDS = {recipe.kind for recipe in RECIPES}


def opened(task: Task, domain: TelecomDomain = DOMAIN) -> DatabaseEnvironment:
    environment = domain.environment()
    environment.reset(task, 0)
    assert isinstance(environment, DatabaseEnvironment)
    return environment


def first(kind: str, *faults: str) -> Task:
    """A task of this kind, with these faults among its own."""
    return next(task for task in ALL if task.data["kind"] == kind and set(faults) <= set(task.data["faults"]))


def with_fault(name: str) -> Task:
    return next(task for task in ALL if task.data["kind"] in SOLVED and task.data["faults"] == [name])


def do(environment: DatabaseEnvironment, action: Json) -> ToolResult:
    run = environment.user_call if action.get("requestor") == "user" else environment.call
    result = run(action["name"], action["arguments"])
    return result


def user(name: str, **arguments: Json | bool | str) -> Json:
    return {"requestor": "user", "name": name, "arguments": arguments}


def agent(name: str, **arguments: Json | bool | str | int) -> Json:
    return {"name": name, "arguments": arguments}


def gold_texts(task: Task) -> list[str]:
    return [move for move in DOMAIN.gold(task) if isinstance(move, str)]


def judged(task: Task, actions: Sequence[Json], texts: Sequence[str] | None = None) -> Evaluation:
    environment = opened(task)
    for action in actions:
        do(environment, action)
    said = gold_texts(task) if texts is None else texts
    return environment.evaluate(Transcript([{"role": "assistant", "content": text} for text in said]))


class Phone:
    """The user's side of an environment. Implements :class:`mua.users.protocol.UserTools`."""

    def __init__(self, environment: DatabaseEnvironment) -> None:
        self._environment = environment
        self.called: list[tuple[str, Json]] = []

    def schemas(self) -> Sequence[ToolSchema]:
        return self._environment.user_tools()

    async def call(self, name: str, arguments: Json) -> ToolResult:
        self.called.append((name, arguments))
        return self._environment.user_call(name, arguments)


def person(task: Task, seed: int = 0) -> tuple[PhoneUser, Phone]:
    who, phone = PhoneUser(task, seed), Phone(opened(task))
    who.take_tools(phone)
    return who, phone
