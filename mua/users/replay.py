"""A user that repeats what a recorded user said, whatever the agent answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from mua.errors import ConfigError, UserFault
from mua.types import Json, Trajectory
from mua.users.protocol import STOP_SIGNAL, UserReply

log = logging.getLogger(__name__)


class ReplayedUser:
    """Plays back ``texts`` in order; a :class:`mua.users.protocol.User`."""

    def __init__(self, task_id: str, texts: Sequence[str]) -> None:
        self._task_id = task_id
        self._texts = tuple(texts)
        self._said = 0

    @classmethod
    def from_trajectory(cls, trajectory: Trajectory) -> Self:
        """The user turns of ``trajectory.messages``."""
        return cls(trajectory.task_id, user_texts(trajectory.messages))

    async def open(self) -> UserReply:
        """The first recorded utterance."""
        return self._next()

    async def reply(self, agent_text: str) -> UserReply:
        """The next recorded utterance; :class:`mua.errors.UserFault` when there is none."""
        return self._next()

    async def close(self) -> None:
        """Holds nothing."""

    def _next(self) -> UserReply:
        if self._said == len(self._texts):
            raise UserFault(
                f"replay of task {self._task_id!r}: the recording has {len(self._texts)} user turns and the agent "
                "asks for one more; it took another course than the recorded agent"
            )
        text = self._texts[self._said]
        self._said += 1
        return UserReply(text, stop=STOP_SIGNAL in text)


def user_texts(messages: Sequence[Mapping[str, str]]) -> list[str]:
    """What the user said, in order."""
    return [message["content"] for message in messages if message["role"] == "user"]


def load_recordings(path: Path) -> dict[str, list[list[str]]]:
    """User texts of every recording in a trace file or a folder of them, by task id, in file order.

    A trace is JSON lines; of each line only ``task_id`` and ``messages`` (OpenAI form) are read. An unfinished last
    line, left by a killed run, is skipped with a logged warning. Raises :class:`mua.errors.ConfigError` naming file,
    line and key.
    """
    recordings: dict[str, list[list[str]]] = {}
    try:
        for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
            for task_id, texts in _read(file):
                recordings.setdefault(task_id, []).append(texts)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"user.replay: cannot read {path}: {error}; give a trace file (JSON lines)") from error
    if not recordings:
        raise ConfigError(f"user.replay: {path} holds no recording; give a trace file (JSON lines)")
    return recordings


def _read(file: Path) -> Iterator[tuple[str, list[str]]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip():
                    yield _recording(line, f"user.replay: {file}:{number}")
            except ConfigError as error:
                if line.endswith("\n"):
                    raise
                log.warning("%s; the line is unfinished and skipped", error)


def _recording(line: str, where: str) -> tuple[str, list[str]]:
    try:
        trace: Json = json.loads(line)
        return str(trace["task_id"]), user_texts(trace["messages"])
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not a JSON line ({error.msg} at column {error.colno})") from error
    except KeyError as error:
        raise ConfigError(f"{where}: no key {error} in this trace line") from error
    except TypeError as error:
        raise ConfigError(f"{where}: not a trace line; it needs task_id and messages in OpenAI form") from error
