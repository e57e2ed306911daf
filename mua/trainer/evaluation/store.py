"""Every finished episode of an evaluation, on disk the moment it ends: what makes a run resumable.

One JSON line an episode, only ever appended::

    {"domain": ..., "task": ..., "task_digest": ..., "sample": 0, "policy": ..., "setting": ..., "trajectory": {...}}

What users and judges came to stands in lines of its own, one a run, ``{"roles": {...}, "policy": ...}``.

A line counts only where policy, setting and task are still what they were, so that a changed setting or a new
checkpoint starts afresh in the same folder and nothing is mixed. Of several lines of one episode the last scored one
counts: unscored ones are tried again by the next run.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self

from mua.store.traces import describe_line_error, encode_trajectory, trajectory_from_json
from mua.types import Trajectory
from mua.utils.errors import MuaError
from mua.utils.files import LineFile
from mua.utils.strict_json import MAX_FILE_DEPTH, JsonError, is_number, read_json

log = logging.getLogger(__name__)

FILE = "episodes.jsonl"


class Key(NamedTuple):
    """Which episode a result belongs to, within one policy and setting."""

    domain: str
    task: str
    task_digest: str
    sample: int


class EpisodeStore(LineFile):
    """The episodes of one policy under one setting. Use as a context manager; one process at a time."""

    def __init__(self, path: Path, *, policy: str, setting: str) -> None:
        """``policy`` and ``setting`` are digests. Reads what is there; raises :class:`MuaError` for a broken line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path)
        self._policy = policy
        self._setting = setting
        self._found: dict[Key, Trajectory] = {}
        self.strange = 0
        """Lines of another policy or setting, which are left alone and count nowhere."""
        self.roles: dict[str, float] = {}
        """What users and judges of all runs came to: sums, but of times the last run's."""

    def __enter__(self) -> Self:
        try:
            try:
                fcntl.flock(self, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise MuaError(
                    f"{self.path}: another mua eval writes here; wait for it, or give this one another output"
                ) from None
            with self.path.open("rb+") as lines:
                for number, line in enumerate(lines, start=1):
                    if not line.endswith(b"\n"):
                        if not _is_record(line):  # what a killed run left
                            lines.seek(-len(line), os.SEEK_END)
                            lines.truncate()
                            break
                        lines.write(b"\n")
                    self._read(number, line)
            if self.strange:
                log.warning("%s: %d lines of another policy or setting count nowhere", self.path, self.strange)
        except BaseException:
            self.close()
            raise
        return self

    def __contains__(self, key: Key) -> bool:
        """Whether ``key`` has a scored result."""
        found = self._found.get(key)
        return found is not None and found.scored

    def get(self, key: Key) -> Trajectory | None:
        """The result, scored or not."""
        return self._found.get(key)

    def add(self, key: Key, trajectory: Trajectory) -> None:
        """Keep a result; it is with the operating system when this returns. Raises :class:`DiskError`."""
        plain = replace(trajectory, segments=[replace(segment, experts=None) for segment in trajectory.segments])
        record = {**key._asdict(), "policy": self._policy, "setting": self._setting}
        self.write(f'{json.dumps(record)[:-1]}, "trajectory": {encode_trajectory(plain)}}}')
        self._keep(key, plain)

    def add_roles(self, roles: dict[str, float]) -> None:
        """Keep what users and judges of this run came to."""
        if roles:
            record = {"roles": roles, "policy": self._policy, "setting": self._setting}
            self.write(json.dumps(record))
            self._keep_roles(roles)

    def _read(self, number: int, line: bytes) -> None:
        try:
            record = read_json(line, strict=False, depth=MAX_FILE_DEPTH)
            if not isinstance(record, dict):
                raise TypeError(f"a record cannot be a {type(record).__name__}")
            if (record["policy"], record["setting"]) != (self._policy, self._setting):
                self.strange += 1
                return
            if "roles" in record:
                roles = record["roles"]
                if not isinstance(roles, dict) or not all(map(is_number, roles.values())):
                    raise TypeError("roles are numbers by name")
                self._keep_roles(roles)
                return
            key = Key(**{name: record[name] for name in Key._fields})
            if [type(value) for value in key] != [str, str, str, int]:
                raise TypeError("domain, task and task_digest are strings, sample is an integer")
            self._keep(key, trajectory_from_json(record["trajectory"]))
        except (ValueError, KeyError, TypeError) as error:
            reason = describe_line_error(error)
            raise MuaError(f"{self.path}:{number}: not an episode ({reason}); remove the line or the file") from None

    def _keep(self, key: Key, trajectory: Trajectory) -> None:
        if trajectory.scored or key not in self:
            self._found[key] = trajectory

    def _keep_roles(self, roles: dict[str, float]) -> None:
        for name, value in roles.items():
            self.roles[name] = value if name.endswith("_seconds") else self.roles.get(name, 0.0) + value


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(read_json(line, strict=False, depth=MAX_FILE_DEPTH), dict)
    except JsonError:
        return False
