"""What the tests of the telecom domain share: all its tasks, ways to act on them, and a user with a phone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from environments.kit.database import DatabaseEnvironment
from environments.telecom import DOMAIN, TelecomDomain
from environments.telecom.faults import SOLVED
from environments.telecom.tasks import RECIPES, gold_moves
from environments.telecom.user import PhoneUser, customer
from mua.environment.protocol import Evaluation, Move, Task, ToolResult
from mua.types import Json, ToolSchema
from tests.desk_support import all_tasks, conversation, opened

ALL = all_tasks("telecom")
KINDS = {recipe.kind for recipe in RECIPES}


def first(kind: str, *faults: str) -> Task:
    """A task of this kind, with these faults among its own."""
    return next(task for task in ALL if task.data["kind"] == kind and set(faults) <= set(task.data["faults"]))


def with_fault(name: str) -> Task:
    return next(task for task in ALL if task.data["kind"] in SOLVED and task.data["faults"] == [name])


def do(environment: DatabaseEnvironment, action: Json) -> ToolResult:
    run = environment.user_call if action.get("requestor") == "user" else environment.call
    return run(action["name"], action["arguments"])


def user(name: str, **arguments: Json | bool | str) -> Json:
    return {"requestor": "user", "name": name, "arguments": arguments}


def agent(name: str, **arguments: Json | bool | str | int) -> Json:
    return {"name": name, "arguments": arguments}


def moves_of(task: Task, actions: Sequence[Json], texts: Sequence[str] | None = None) -> list[Move]:
    """Gold's reads and looks with other actions, and with these texts in the end instead of gold's."""
    changed = replace(task, data={**task.data, "actions": list(actions)})
    moves, told = gold_moves(changed), len(task.data["facts"])
    return moves if texts is None else [*moves[: len(moves) - told], *texts]


def judged(
    task: Task, actions: Sequence[Json], texts: Sequence[str] | None = None, domain: TelecomDomain = DOMAIN
) -> Evaluation:
    return conversation(task, moves_of(task, actions, texts), domain)


class Phone:
    """The user's side of an environment. Implements :class:`mua.environment.user.UserTools`."""

    def __init__(self, environment: DatabaseEnvironment) -> None:
        self._environment = environment
        self.called: list[tuple[str, Json]] = []

    def schemas(self) -> Sequence[ToolSchema]:
        return self._environment.user_tools()

    async def call(self, name: str, arguments: Json) -> ToolResult:
        self.called.append((name, arguments))
        return self._environment.user_call(name, arguments)


def person(task: Task, seed: int = 0, persona: str = "brief") -> tuple[PhoneUser, Phone]:
    who, phone = customer(task, seed, [persona]), Phone(opened(task))
    who.take_tools(phone)
    return who, phone
