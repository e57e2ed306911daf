"""Every finished episode of an evaluation, on disk the moment it ends: what makes a run resumable.

One JSON line an episode, only ever appended::

    {"domain": ..., "task": ..., "task_digest": ..., "sample": 0, "policy": ..., "setting": ..., "trajectory": {...}}

What users and judges came to stands in lines of its own, one a run, ``{"roles": {...}, "policy": ...}``.

A line counts only where policy, setting and task are still what they were, so that a changed setting or a new
checkpoint starts afresh in the same folder and nothing is mixed. Of several lines of one episode the last scored one
counts: unscored ones are tried again by the next run.

Policy, setting and task are known by digests. Settings that change how fast, not what (concurrency, deadlines,
retries), are no part of them: a run may be continued with others.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import yaml

import mua
from mua.config.load import dump_config
from mua.config.schema import ContextConfig, ExperimentConfig
from mua.environment.protocol import Task
from mua.store.database import Store, store_url
from mua.store.faults import StoreError
from mua.store.recorder import Recorder
from mua.store.starts import begin_part, missing_steps, refuse_successor
from mua.store.tables import parts, runs
from mua.store.traces import describe_line_error, encode_trajectory, trajectory_from_json
from mua.store.writer import Update, Writer
from mua.tokens.codec import tokenizer_digest
from mua.types import Json, Trajectory
from mua.utils.errors import ModelError, MuaError
from mua.utils.files import LineFile
from mua.utils.hooks import hook_sources
from mua.utils.masking import masked_tree
from mua.utils.strict_json import MAX_FILE_DEPTH, JsonError, is_number, read_json

log = logging.getLogger(__name__)

FILE = "episodes.jsonl"
_OPERATIONAL = frozenset(
    {
        "concurrency", "max_retries", "max_instances", "workers", "isolation", "requests_per_minute",
        "tokens_per_minute", "cache", "fallbacks", "api_key", "structured_output", "price_per_million_in",
        "price_per_million_out",
    }
)  # fmt: skip
_SPEED = ("_seconds", "_faults")
_SELECTION = frozenset({"name", "mix", "difficulties"})
"""Which tasks are chosen; each is known by its own digest."""
_BLOCK, _BLOCKS = 1 << 16, 64


def setting_of(config: ExperimentConfig) -> Json:
    """Everything of the configuration that a result depends on, the policy apart; credentials masked."""
    rollout = config.rollout.model_dump(mode="json", exclude={"temperature"})
    environment = config.environment.model_dump(mode="json", exclude=set(_SELECTION))
    setting = {
        "mua": mua.__version__,
        "seed": config.seed,
        "temperature": config.evaluation.temperature,
        "environment": environment,
        "rollout": rollout,
        "user": config.user.model_dump(mode="json"),
        "judge": None if config.judge is None else config.judge.model_dump(mode="json"),
    }
    if config.agent is not None:  # by its command; what its program says is not looked into
        setting["agent"] = config.agent.model_dump(mode="json", exclude={"host", "port"})
    if hooks := hook_sources(config, of_episodes=True):
        setting["hooks"] = {path: hook["sha256"] for path, hook in hooks.items()}
    if config.context != ContextConfig():
        setting["context"] = config.context.model_dump(mode="json")
    return _without_speed(masked_tree(setting))


def policy_of(config: ExperimentConfig) -> Json:
    """Who is evaluated: a checkpoint by the digest of its files, an endpoint by address, model and request fields."""
    policy = config.evaluation.policy
    if policy.endpoint is not None and policy.kind == "endpoint":
        return {"kind": "endpoint", **_without_speed(masked_tree(policy.endpoint.model_dump(mode="json")))}
    model = config.model
    return {
        "kind": "engine",
        "path": str(model.path),
        "weights": folder_digest(model.path),
        "dtype": config.engine.dtype or model.dtype,
        "thinking": model.thinking,
        "deterministic": config.engine.deterministic,
    } | ({} if model.chat_family is None else {"chat_family": model.chat_family})


def folder_digest(folder: Path) -> str:
    """Of a model folder's configuration, tokenizer and weights. Raises :class:`ModelError` where there is none."""
    try:
        files = [path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".jinja", ".txt")]
    except OSError as error:
        raise ModelError(f"model.path: {folder}: {error.strerror}") from None
    return files_digest(files)


def files_digest(files: Iterable[Path]) -> str:
    """16 hexadecimal digits of the names and contents of files.

    Of a file over 4 MiB its size and 64 KiB at 64 places are read, evenly spread: a training step changes nearly every
    value, so two checkpoints differ there, and 64 GB of weights cost milliseconds.
    """
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            size = path.stat().st_size
            spread = [index * (size - _BLOCK) // (_BLOCKS - 1) for index in range(_BLOCKS)]
            for start in spread if size > _BLOCK * _BLOCKS else range(0, size, _BLOCK):
                file.seek(start)
                total.update(file.read(_BLOCK))
    return total.hexdigest()[:16]


def task_digest(task: Task) -> str:
    """Changes whenever anything the task holds does."""
    return json_digest(task.data)


def json_digest(value: Any) -> str:
    """16 hexadecimal digits of canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def policy_digest(policy: Json) -> str:
    """Of what is the policy's own: the same files at another place are the same policy."""
    return json_digest({key: value for key, value in policy.items() if key != "path"})


def _without_speed(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_speed(inner)
            for key, inner in value.items()
            if key not in _OPERATIONAL and not key.endswith(_SPEED)
        }
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


@contextmanager
def recording(
    config: ExperimentConfig, made: Json | None = None, *, from_step: int | None = None
) -> Iterator[Recorder | None]:
    """A block whose episodes are kept in the store of ``config.output``; None where none is wanted.

    Args:
        made: provenance of the run.
        from_step: of training, the next step to take: what an earlier start wrote of it and later ones is lost.
    """
    chosen = config.store
    if not chosen.enabled:
        yield None
        return
    config.output.mkdir(parents=True, exist_ok=True)
    made = {"tokenizer": tokenizer_digest(config.model.path)} | (made or {})
    with Store.open(store_url(config.output, chosen), busy_seconds=chosen.busy_seconds) as store:
        run, part, rounds = begin_part(
            store, config.output, config.name, yaml.safe_load(dump_config(config)), made,
            from_step=from_step, seconds=chosen.outage_seconds,
        )  # fmt: skip
        if from_step is not None:
            with store.read() as connection:
                if lacking := missing_steps(connection, run, from_step):
                    log.warning(
                        "store %s: lacks what steps %d to %d of this run did: it was begun, or restored, after them",
                        store.name, lacking[0], lacking[-1],
                    )  # fmt: skip
        with Writer.of(store, chosen, f"{run}/{part}") as writer:
            writer.guard = lambda connection: refuse_successor(connection, run, part)

            def end(state: str) -> None:
                ended = {"ended_at": time.time()}
                of_part = Update(parts, {"run_id": run, "part": part}, ended)
                writer.put([Update(runs, {"id": run}, ended | {"state": state}), of_part])

            try:
                yield Recorder(writer, run, part, round=rounds)
            except StoreError:
                raise
            except BaseException:
                with suppress(StoreError):
                    end("left")
                raise
            end("done")


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
                        try:
                            whole = isinstance(read_json(line, strict=False, depth=MAX_FILE_DEPTH), dict)
                        except JsonError:
                            whole = False
                        if not whole:  # what a killed run left
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
