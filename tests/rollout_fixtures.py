"""A policy that follows a script, and a help desk that can be made to fail, for the tests of the rollout.

:class:`ScriptedSampler` stands for the policy's choices only: it turns texts into ids with the real chat family, as
an engine that sampled them would return them. The real engine is covered by the tests under tests/e2e.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from environments.help_desk import HelpDeskDomain
from environments.help_desk.database import difference
from environments.help_desk.tools import HelpDesk, gold_snapshot
from mua.config.schema import EnvironmentConfig, ExperimentConfig
from mua.engine import SamplingParams
from mua.environment.domain import Domain
from mua.environment.protocol import Environment, Evaluation, Isolation, Task, ToolResult, Transcript
from mua.environment.selection import Selection
from mua.environment.user import User, UserReply
from mua.tokens.chat_family import ChatFamily
from mua.tokens.codec import fixed
from mua.types import Generation, Int32Array, Json, Provenance

VERSION = 5
Script = Callable[[str, int], str]
"""What the policy says in (session, turn); it may raise what an engine raises."""


@dataclass(frozen=True)
class Request:
    """One call of the sampler and what it gave."""

    prompt: list[int]
    params: SamplingParams
    session: str
    deadline_s: float
    generation: Generation


class ScriptedSampler:
    """Implements :class:`mua.engine.Sampler`; remembers every request in ``requests``."""

    def __init__(self, family: ChatFamily, script: Script) -> None:
        self._family = family
        self._script = script
        self._turns: defaultdict[str, int] = defaultdict(int)
        self.requests: list[Request] = []

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str, deadline_s: float
    ) -> Generation:
        turn = self._turns[session]
        self._turns[session] += 1
        ids = sampled_ids(self._family, self._script(session, turn))
        kept = ids[: params.max_new_tokens]
        n = len(kept)
        generation = Generation(
            ids=kept,
            logprobs=-0.01 * np.arange(1, n + 1, dtype=np.float32) - len(self.requests),
            finish="stop" if n == len(ids) else "length",
            version=VERSION,
            versions=np.full(n, VERSION, np.int32),
            cached_tokens=len(prompt_ids) // 2,
        )
        self.requests.append(Request(list(prompt_ids), params, session, deadline_s, generation))
        return generation


class ScriptedPool(ScriptedSampler):
    """A scripted sampler in the place of a whole :class:`mua.engine.pool.EnginePool`."""

    failure = None
    pauses = None

    async def start(self, model: Path) -> None:
        pass

    async def stop(self, *, finished: bool = False) -> None:
        pass

    def restart_clocks(self) -> None:
        pass

    def awaited(self, awaited: bool) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}


def sampled_ids(family: ChatFamily, text: str) -> Int32Array:
    """Ids of a turn that says ``text`` and ends, control tokens in it included."""
    return family.codec.encode([fixed(text + family.end_of_turn, Provenance.SAMPLED)])[0]


def lines(*texts: str) -> Script:
    """The same texts in every session, one a turn."""
    return lambda session, turn: texts[turn]


def call(name: str, /, **arguments: Any) -> str:
    """A tool call as the policy writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class FixedUser:
    """Says given utterances and remembers what it was told. Implements :class:`mua.environment.user.User`."""

    def __init__(self, *replies: str | Exception, opening: str = "Help me.") -> None:
        self._opening = opening
        self._replies = list(replies)
        self.told: list[str] = []
        self.closed = 0

    async def open(self) -> UserReply:
        return UserReply(self._opening)

    async def reply(self, agent_text: str) -> UserReply:
        self.told.append(agent_text)
        reply = self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return UserReply(reply, stop=reply == "bye")

    async def close(self) -> None:
        self.closed += 1


class _Desk(HelpDesk):
    """A help desk whose every tool call passes through its domain first, and that is judged by its database alone.

    What was looked up and said on the way has tests of its own; here a deed in one call is a success.
    """

    def __init__(self, domain: TestDesk, number: int) -> None:
        super().__init__()
        self._domain = domain
        self._number = number

    def call(self, name: str, arguments: Json) -> ToolResult:
        return self._domain.on_call(self._number, super().call(name, arguments))

    def evaluate(self, transcript: Transcript) -> Evaluation:
        assert self._task is not None
        rows = difference(self.database.snapshot(), gold_snapshot(self._task))
        success = not rows and bool(self._task.data["actions"])
        return Evaluation(float(success), success, {"database": rows})

    def close(self) -> None:
        if self._database is not None:
            self._domain.count(-1)
        super().close()

    def reset(self, task: Task, seed: int) -> None:
        super().reset(task, seed)
        self._domain.count(1)
        self._domain.seeds.append(seed)


class TestDesk(HelpDeskDomain):
    """The help desk, with a hook on tool calls and on users; counts its environments."""

    __test__ = False
    isolation: Isolation = "thread"

    def __init__(self) -> None:
        self.on_call: Callable[[int, ToolResult], ToolResult] = lambda number, result: result
        """Gets the number of the environment (from 0) and the real result; may raise or hang."""
        self.user: Callable[[Task, int], User] = partial(super().scripted_user, personas=["brief"])
        self.made = 0
        self.alive = 0
        self.seeds: list[int] = []
        self._lock = threading.Lock()

    def environment(self) -> Environment:
        with self._lock:
            self.made += 1
            return _Desk(self, self.made - 1)

    def count(self, change: int) -> None:
        """Add to the number of environments alive; they are reset and closed in worker threads."""
        with self._lock:
            self.alive += change

    def scripted_user(self, task: Task, seed: int, personas: Sequence[str] = ()) -> User:
        return self.user(task, seed)


def experiment(**sections: Json) -> ExperimentConfig:
    """A configuration for episodes at the help desk; ``sections`` are merged in."""
    base: dict[str, Any] = {
        "name": "test",
        "output": "unused",
        "model": {"path": "unused", "max_length": 8192},
        "environment": {"name": "help_desk", "prompt": "short"},
        "rollout": {"max_tokens": 8000},
        "trainer": {"steps": 1},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return ExperimentConfig.model_validate(base)


def only(domain: Domain) -> Selection:
    """A selection of one domain, under the name that its tasks carry."""
    return Selection({domain.name: domain}, EnvironmentConfig(name=domain.name, prompt="short"))
