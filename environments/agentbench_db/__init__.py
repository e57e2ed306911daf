"""AgentBench's database tasks: answer a question about tables, or change them, with SQL.

Two tools, as in AgentBench's function-calling form: ``execute_sql`` runs one statement, ``commit_final_answer`` hands
in the answer and ends the task. An answer is compared with the label, changed tables by a digest
(:mod:`environments.agentbench_db.scoring`). ``environment.data`` names a folder or file of AgentBench's records
(:mod:`environments.agentbench_db.records`); without it the domain has a few tasks of its own
(:mod:`environments.agentbench_db.own`). The database is SQLite, where AgentBench runs MySQL
(:mod:`environments.agentbench_db.sandbox` says what differs).

There is no user to talk with: the other side states the task, and points to the tools when the agent only talks.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from environments.agentbench_db.canned import CANNED
from environments.agentbench_db.episode import COMMIT, EXECUTE, DatabaseTaskEnvironment
from environments.agentbench_db.own import FOLDER
from environments.agentbench_db.records import NAME, load
from mua.environment.domain import Domain
from mua.environment.protocol import Environment, Isolation, Move, PromptStyle, Split, Task
from mua.environment.user import STOP_SIGNAL, User, UserReply
from mua.types import Json
from mua.utils.errors import ConfigError
from workbench.canned import Canned

if TYPE_CHECKING:
    from mua.config.schema import EnvironmentConfig
    from mua.environment.endpoint.services import Services

_SHORT = "You answer questions about a database, or change it, with SQL."
_FULL = """\
You work on a MySQL database for somebody who sees nothing but the answer that you hand in.

- execute_sql runs one statement and shows what MySQL gives. Every column is text: compare numbers as `col` + 0.
- Names with spaces stand in backticks. SHOW TABLES and DESCRIBE tell what there is.
- Think before each statement, and look at what came back before the next one.
- commit_final_answer ends the task: give each value of the answer by itself, exactly as the database has it. It counts
  as it stands, so hand in nothing that you have not seen. Where the tables were to be changed, change them first; the
  values do not matter then.
- Always act through these two tools. Text without a call reaches nobody.
"""
_NUDGE = "Nobody reads that. Use execute_sql, and hand in the answer with commit_final_answer."
_LEADS = ("Question", "Task", "What is asked", "To do")
PATIENCE = 3
"""Texts without a call after which the other side leaves."""


class TaskGiver:
    """States the task; a :class:`mua.environment.user.User`."""

    def __init__(self, opening: str) -> None:
        self._opening, self._left = opening, PATIENCE

    async def open(self) -> UserReply:
        return UserReply(self._opening)

    async def reply(self, agent_text: str) -> UserReply:
        self._left -= 1
        return UserReply(_NUDGE) if self._left > 0 else UserReply(f"{_NUDGE} {STOP_SIGNAL}", stop=True)

    async def close(self) -> None:
        """Holds nothing."""


class AgentBenchDatabase:
    """Implements :class:`mua.environment.domain.Domain`, ``Expert`` and ``Configurable``."""

    name = NAME
    user_in_tools = True
    isolation: Isolation = "process"  # statements of a policy are foreign code; a worker that hangs is replaced

    def __init__(self, tasks: dict[Split, tuple[Task, ...]] | None = None) -> None:
        self._tasks = tasks

    def tasks(self, split: Split) -> Sequence[Task]:
        return (self._tasks if self._tasks is not None else _own())[split]

    def environment(self) -> Environment:
        return DatabaseTaskEnvironment()

    def system_prompt(self, style: PromptStyle) -> str:
        return _SHORT if style == "short" else _FULL

    def persona(self, task: Task) -> str:
        return opening(task)

    def scripted_user(self, task: Task, seed: int) -> User:
        return TaskGiver(opening(task, random.Random(f"{task.id}/{seed}").choice(_LEADS)))

    def gold(self, task: Task) -> Sequence[Move]:
        """A write's statement, then the label: a question's own statement need not lead to it in published records."""
        if "label" in task.data:
            return [(COMMIT.name, {"answers": list(task.data["label"])})]
        return [(EXECUTE.name, {"query": task.data["gold"]}), (COMMIT.name, {"answers": ["done"]})]

    def expert(self, task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
        """Looks at the tables, runs the record's statement if it has one, and hands the label in."""
        for table in task.data["tables"]:
            yield EXECUTE.name, {"query": f"DESCRIBE `{table['name']}`"}
        if task.data["gold"]:
            yield EXECUTE.name, {"query": task.data["gold"]}
        answers: Json = {"answers": list(task.data.get("label", ["done"]))}
        yield COMMIT.name, answers

    def canned(self) -> Mapping[str, Canned]:
        """Policies that deserve nothing, on the tasks of its own."""
        return CANNED

    def configured(self, config: EnvironmentConfig, services: Services) -> Domain:
        """With ``data``; raises :class:`ConfigError` for options, of which there are none."""
        if config.options:
            raise ConfigError(f"environment.options.{min(config.options)}: domain {NAME!r} has no options")
        if config.data is None or (config.name != self.name and config.data.name != self.name):
            return self  # in a mix, only PATH/agentbench_db is its own
        return AgentBenchDatabase(load(config.data))


def opening(task: Task, lead: str = _LEADS[0]) -> str:
    """What the agent is told first."""
    data = task.data
    parts = (("Known", data["evidence"]), ("About the tables", data["about"]), (lead, data["question"]))
    return "\n".join(f"{label}: {text}" for label, text in parts if text)


@lru_cache(maxsize=1)
def _own() -> dict[Split, tuple[Task, ...]]:
    return load(FOLDER)


DOMAIN = AgentBenchDatabase()
