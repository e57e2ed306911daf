"""Users by configuration: one factory a run, one user an episode.

A kind of user of your own is a hook (:mod:`mua.utils.hooks`). It gets a :class:`Placement` and gives a
:class:`mua.environment.user.User`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mua.config.schema import UserConfig
from mua.environment.domain import Domain, scripted_user
from mua.environment.endpoint.services import ChatClient, Services
from mua.environment.protocol import Task
from mua.environment.selection import Selection
from mua.environment.user import STOP_SIGNAL, User, UserReply, UserTools
from mua.types import Json
from mua.users.llm import LlmUser
from mua.users.personas import load_prompt, personas_named, style_of
from mua.users.task_check import Vocabulary
from mua.utils.errors import ConfigError, UserFault, UserFaultKind
from mua.utils.hooks import call_hook, check_attributes, is_hook, load_hook
from mua.utils.strict_json import MAX_FILE_DEPTH, JsonError, open_file, read_json


@dataclass(frozen=True, slots=True)
class Placement:
    """What a factory of users is told of one episode."""

    domain: Domain
    task: Task
    seed: int
    """Varies wording or sampling; the same for the same episode."""
    options: Mapping[str, Any]
    """``user.options``, as they are written."""
    endpoint: ChatClient | None
    """The pool of ``user.llm``, shared and kept open by the run; None where the section is absent."""


class UserFactory:
    """Makes the users of one run; holds what they share. Belongs to one event loop.

    Raises :class:`ConfigError` when the replay file, the prompt or a factory of your own cannot be had, or
    for a persona that there is not.
    """

    def __init__(self, config: UserConfig, selection: Selection, services: Services) -> None:
        personas_named(config.personas)
        self._config = config
        self._selection = selection
        self._endpoint = services.user
        self._recordings = load_recordings(config.replay) if config.kind == "replay" and config.replay else {}
        self._prompt = load_prompt(config.prompt)
        if is_hook(config.kind):
            load_hook("user.kind", config.kind)
        self._vocabularies: dict[str, Vocabulary] = {}

    def make(self, task: Task, seed: int) -> User:
        """The user of one episode. ``seed`` varies wording or sampling, or picks among several recordings.

        Raises :class:`ConfigError` when there is no recording of ``task``.
        """
        domain, config = self._selection.domain(task), self._config
        if config.kind == "replay":
            if not (recordings := self._recordings.get(task.id)):
                raise ConfigError(
                    f"user.replay: {config.replay} has no recording of task {task.id!r}; "
                    "choose the split and tasks that were recorded"
                )
            return ReplayedUser(task.id, recordings[seed % len(recordings)])
        if getattr(domain, "user_in_tools", False):
            return scripted_user(domain, task, seed, config.personas)
        if is_hook(config.kind):
            placement = Placement(domain, task, seed, config.options, self._endpoint)
            user: User = call_hook("user.kind", config.kind, placement)
            check_attributes("user.kind", config.kind, user)
            return user
        if self._endpoint is None:
            return scripted_user(domain, task, seed, config.personas)
        if config.check != "off" and domain.name not in self._vocabularies:
            self._vocabularies[domain.name] = Vocabulary(domain)
        return LlmUser(
            self._endpoint,
            domain.persona(task),
            seed,
            style_of(seed, manners=config.manners, temperatures=config.temperatures),
            leak_words=config.leak_words,
            tool_rounds=config.tool_rounds,
            check=config.check,
            facts=None if config.check == "off" else self._vocabularies[domain.name].of(task),
            prompt=self._prompt,
        )

    def recites_data(self, task: Task) -> bool:
        """Whether the user of ``task`` says what a data set holds, code or calls perhaps: its words are no fault."""
        domain = self._selection.domain(task)
        scripted = self._config.kind == "scripted" or getattr(domain, "user_in_tools", False)
        return scripted and (getattr(domain, "needs_data", False) or self._selection.config.data is not None)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One message of the user."""

    text: str
    actions: tuple[Json, ...] = ()
    """Calls of the user's own tools made before it, each with ``name`` and ``arguments``."""


class ReplayedUser:
    """Plays back ``turns`` in order; a :class:`mua.environment.user.User` and ``ToolUser``."""

    def __init__(self, task_id: str, turns: Sequence[RecordedTurn | str]) -> None:
        """A text alone is a turn in which nothing was done."""
        self._task_id = task_id
        self._turns = tuple(RecordedTurn(turn) if isinstance(turn, str) else turn for turn in turns)
        self._said = 0
        self._tools: UserTools | None = None

    def take_tools(self, tools: UserTools) -> None:
        """The tools of the new episode, on which recorded actions are made again."""
        self._tools = tools

    async def open(self) -> UserReply:
        """The first recorded turn."""
        return await self.reply("")

    async def close(self) -> None:
        """Holds nothing."""

    async def reply(self, agent_text: str) -> UserReply:
        """The next recorded turn; :class:`UserFault` when there is none or its actions have no tools."""
        if self._said == len(self._turns):
            raise UserFault(
                f"replay of task {self._task_id!r}: the recording has {len(self._turns)} user turns and the agent "
                "asks for one more; it took another course than the recorded agent",
                UserFaultKind.NO_RECORDING,
            )
        turn = self._turns[self._said]
        self._said += 1
        for action in turn.actions:
            if self._tools is None:
                raise UserFault(
                    f"replay of task {self._task_id!r}: in the recording the user acts with tools of its own, which "
                    "this environment does not give it; replay it in the domain it was recorded in",
                    UserFaultKind.NO_RECORDING,
                )
            await self._tools.call(action["name"], action["arguments"])
        return UserReply(turn.text, stop=STOP_SIGNAL in turn.text)


def user_turns(messages: Sequence[Mapping[str, Any]]) -> list[RecordedTurn]:
    """What the user said and did, in order."""
    turns = []
    for message in messages:
        if message["role"] == "user":
            actions = [
                {"name": _text(one["name"]), "arguments": one["arguments"]} for one in message.get("actions", ())
            ]
            if not all(isinstance(action["arguments"], dict) for action in actions):
                raise TypeError("the arguments of an action are an object")
            turns.append(RecordedTurn(_text(message["content"]), tuple(actions)))
    return turns


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text cannot be a {type(value).__name__}")
    return value


def load_recordings(path: Path) -> dict[str, list[list[RecordedTurn]]]:
    """User turns of every recording in a trace file or a folder of them, by task id, in file order.

    A trace is JSON lines; of each line only ``task_id`` and ``messages`` (OpenAI form) are read. An unfinished last
    line, left by a killed run, is skipped with a logged warning. Raises :class:`ConfigError` naming file,
    line and key.
    """
    recordings: dict[str, list[list[RecordedTurn]]] = {}
    try:
        for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
            with open_file(file) as lines:
                for number, line in enumerate(lines, start=1):
                    if not line.strip():
                        continue
                    try:
                        trace: Json = read_json(line, strict=False, depth=MAX_FILE_DEPTH)
                        task_id, turns = _text(trace["task_id"]), user_turns(trace["messages"])
                    except (JsonError, KeyError, TypeError, AttributeError) as error:
                        why = f"no key {error}" if isinstance(error, KeyError) else error
                        form = "it needs task_id and messages in OpenAI form"
                        fault = f"user.replay: {file}:{number}: not a trace line ({why}); {form}"
                        if line.endswith(b"\n"):
                            raise ConfigError(fault) from error
                        log.warning("%s; the line is unfinished and skipped", fault)
                    else:
                        recordings.setdefault(task_id, []).append(turns)
    except OSError as error:
        raise ConfigError(f"user.replay: cannot read {path}: {error}; give a trace file (JSON lines)") from error
    if not recordings:
        raise ConfigError(f"user.replay: {path} holds no recording; give a trace file (JSON lines)")
    return recordings
