"""The tables. ``docs/store.md`` explains them with queries; they are written here alone.

A new store is made from them. After a change ``python -m tools.store_migration`` writes the migration of older stores.

    runs ─┬─ parts                       a run, and each time that it was started
          ├─ versions, engines, samplers policy versions; who generates and who rolls out
          ├─ tasks ── episodes           groups and their members: the work to do and done
          ├─ trajectories ─┬─ segments   what came of it, token for token
          │                └─ scores
          ├─ requests ··· texts          every request to policy, user, judge, ...; bodies by their hash
          ├─ tool_calls
          └─ steps ── uses               which step trained on what, with which weights and advantages

An *episode key* is (run_id, part, round, ordinal, sample, attempt): ``part`` counts the starts of a run from 1,
``round`` is 0 for training and counts evaluations from 1, ``ordinal`` is the task's place in its stream, ``sample`` the
member of its group, ``attempt`` the try, from 1. Requests and tool calls are written with their key as they happen, and
so also for attempts that were given up; ``trajectories`` has the same key for what an episode ended as.

Every table has a primary key that its writer can name before it writes, so that nothing can be there twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.types import TypeDecorator

from mua.store.faults import DamagedData
from mua.utils.strict_json import MAX_FILE_DEPTH, read_json

_MARK = "\u241bjson:"
"""Begins a text that is stored as JSON, because it holds what a database's text cannot."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def json_text(value: object) -> str:
    """``value`` as JSON on one line; other characters than ASCII stay legible, unpaired surrogates are escaped.

    numpy scalars become Python's. Raises TypeError for what is no plain JSON.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=python_scalar)
    return _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def parsed_json(text: str | bytes) -> Any:
    """The value of :func:`json_text`. Raises :class:`mua.utils.strict_json.JsonError`."""
    return read_json(text, strict=False, depth=MAX_FILE_DEPTH)


def python_scalar(value: object) -> object:
    """A numpy scalar, which metrics and details may hold, as Python's. Raises TypeError for all else."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"the store cannot hold a {type(value).__name__}")


_damaged: ContextVar[set[str] | None] = ContextVar("_damaged", default=None)


@contextmanager
def reading_on() -> Iterator[set[str]]:
    """A block in which a value that is none of its column's reads as nothing (null, 0, an empty text); its column is in
    the set. Elsewhere it raises :class:`DamagedData`."""
    outer = _damaged.get()
    token = _damaged.set(found := set[str]() if outer is None else outer)
    try:
        yield found
    finally:
        _damaged.reset(token)


@contextmanager
def passing_over(what: str) -> Iterator[None]:
    """A block about ``what``, one of many. Within :func:`reading_on`, where it is not what was written, it is left out,
    and noted."""
    try:
        yield
    except (DamagedData, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        if (found := _damaged.get()) is None:
            raise
        found.add(f"{what} ({error})" if isinstance(error, DamagedData) else what)


class CheckedValue(TypeDecorator[Any]):
    """A column whose values are looked at as they are read: SQLite keeps anything anywhere, and files are damaged."""

    impl: Any = Text
    cache_ok = True
    kinds: tuple[type, ...] = (str,)
    empty: Any = ""
    column: Column[Any]

    def _set_parent(self, parent: Any, outer: bool = False, **more: Any) -> None:
        super()._set_parent(parent, outer, **more)
        self.column = parent

    def read(self, value: Any) -> Any:
        """What ``value`` stands for. Raises ValueError for one that cannot stand here."""
        if type(value) not in self.kinds:
            raise ValueError(f"a {type(value).__name__}")
        return value

    def result_processor(self, dialect: Dialect, coltype: object) -> Any:
        def checked(value: Any) -> Any:
            if value is None:
                return None
            try:
                return self.read(value)
            except ValueError as error:
                where = f"{self.column.table.name}.{self.column.name}"
                if (found := _damaged.get()) is None:
                    raise DamagedData(f"{where}: holds what it cannot hold ({error}); see mua store verify") from None
                found.add(where)
                return None if self.column.nullable and self.empty != b"" else self.empty

        return checked


class JsonText(CheckedValue):
    """A JSON value as text, so that NaN of a metric and NUL of a message pass; SQL reads it with its JSON functions."""

    cache_ok = True

    def __init__(self, shape: type = dict) -> None:
        super().__init__()
        self.shape, self.empty = shape, shape()

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json_text(value)

    def read(self, value: Any) -> Any:
        if not isinstance(found := parsed_json(super().read(value)), self.shape):
            raise ValueError(f"JSON of a {type(found).__name__}")
        return found


class FreeText(CheckedValue):
    """Text of any origin, stored as it is; as marked JSON where it holds NUL or an unpaired surrogate."""

    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or not (value.startswith(_MARK) or _UNSTORABLE.search(value)):
            return value
        return _MARK + json_text(value)

    def read(self, value: Any) -> Any:
        text = super().read(value)
        return super().read(parsed_json(text.removeprefix(_MARK))) if text.startswith(_MARK) else text


class Whole(CheckedValue):
    """Of 32 or 64 bits; on SQLite the type whose primary keys count by themselves."""

    cache_ok = True
    impl, kinds, empty = Integer, (int,), 0

    def __init__(self, big: bool = False) -> None:
        super().__init__()
        self.big = big

    def load_dialect_impl(self, dialect: Dialect) -> Any:
        return dialect.type_descriptor(BigInteger() if self.big and dialect.name != "sqlite" else Integer())


class Number(CheckedValue):
    """64 bits; moments are seconds since 1970 (UTC), durations plain."""

    cache_ok = True
    impl, kinds, empty = Double, (float, int), 0.0


class Blob(CheckedValue):
    """Compressed bytes."""

    cache_ok = True
    impl, kinds, empty = LargeBinary, (bytes,), b""


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _run(*, primary: bool = False) -> Column[str]:
    return Column("run_id", CheckedValue(), ForeignKey("runs.id"), primary_key=primary, nullable=False)


def _key() -> list[Column[int]]:
    """An episode key without its run."""
    bounded: list[Column[int]] = [Column(name, Whole(), nullable=False) for name in ("part", "round")]
    return [
        *bounded,
        Column("ordinal", Whole(big=True), nullable=False),
        Column("sample", Whole(), nullable=False),
        Column("attempt", Whole(), nullable=False),
    ]


runs = Table(
    "runs", metadata,
    Column("id", CheckedValue(), primary_key=True),
    Column("output", CheckedValue(), nullable=False),
    Column("name", CheckedValue()),
    Column("state", CheckedValue(), nullable=False),  # running | done | left | failed
    Column("started_at", Number(), nullable=False),
    Column("ended_at", Number()),
    Column("config", JsonText()),  # masked
    Column("provenance", JsonText()),
)  # fmt: skip
parts = Table(
    "parts", metadata,
    _run(primary=True),
    Column("part", Whole(), primary_key=True, autoincrement=False),
    Column("from_step", Whole(big=True), nullable=False),  # steps of earlier parts from here on are lost
    Column("started_at", Number(), nullable=False),
    Column("ended_at", Number()),
    Column("host", CheckedValue()),
    Column("pid", Whole()),
    Column("config", JsonText()),  # masked; of this start
)  # fmt: skip
versions = Table(
    "versions", metadata,
    _run(primary=True),
    Column("version", Whole(big=True), primary_key=True, autoincrement=False),
    Column("part", Whole(), primary_key=True, autoincrement=False),
    Column("synced_at", Number(), nullable=False),
    Column("checkpoint", CheckedValue()),
    Column("metrics", JsonText()),
)  # fmt: skip
engines = Table(
    "engines", metadata,
    _run(primary=True),
    Column("label", CheckedValue(), primary_key=True),
    Column("url", CheckedValue(), nullable=False),
    Column("state", CheckedValue(), nullable=False),
    Column("version", Whole(big=True), nullable=False),
    Column("capacity", Whole(), nullable=False),
    Column("running", Whole(), nullable=False, server_default=text("0")),
    Column("waiting", Whole(), nullable=False, server_default=text("0")),
    Column("seen_at", Number(), nullable=False),
    Column("details", JsonText()),
)  # fmt: skip
samplers = Table(
    "samplers", metadata,
    Column("id", CheckedValue(), primary_key=True),
    _run(),
    Column("host", CheckedValue(), nullable=False),
    Column("pid", Whole(), nullable=False),
    Column("state", CheckedValue(), nullable=False),
    Column("running", Whole(), nullable=False, server_default=text("0")),
    Column("started_at", Number(), nullable=False),
    Column("seen_at", Number(), nullable=False),
    Column("details", JsonText()),
    Index(None, "run_id", "seen_at"),
)  # fmt: skip
tasks = Table(
    "tasks", metadata,
    _run(primary=True),
    Column("round", Whole(), primary_key=True, autoincrement=False),
    Column("ordinal", Whole(big=True), primary_key=True, autoincrement=False),
    Column("kind", CheckedValue(), nullable=False),  # train | evaluation
    Column("domain", CheckedValue(), nullable=False),
    Column("task_id", FreeText(), nullable=False),
    Column("split", CheckedValue()),
    Column("size", Whole(), nullable=False),  # episodes of the group
    Column("state", CheckedValue(), nullable=False),  # open | complete | taken | cancelled
    Column("priority", Number(), nullable=False, server_default=text("0")),
    Column("part", Whole(), nullable=False, server_default=text("1")),  # that made it, or opened it again
    Column("version", Whole(big=True)),  # of the policy when it was opened
    Column("made_at", Number(), nullable=False),
    Column("ended_at", Number()),
    Column("taken_step", Whole(big=True)),
    Column("details", JsonText()),  # kind and difficulty of the task, where it has them
    Index(None, "run_id", "state", "round", "ordinal"),
)  # fmt: skip
episodes = Table(
    "episodes", metadata,
    Column("run_id", CheckedValue(), primary_key=True),
    Column("round", Whole(), primary_key=True, autoincrement=False),
    Column("ordinal", Whole(big=True), primary_key=True, autoincrement=False),
    Column("sample", Whole(), primary_key=True, autoincrement=False),
    Column("state", CheckedValue(), nullable=False),  # open | leased | done | cancelled
    Column("sampler", CheckedValue()),
    Column("lease", CheckedValue()),  # token of the claim; who writes a result must hold it
    Column("lease_until", Number()),
    Column("attempts", Whole(), nullable=False, server_default=text("0")),
    Column("trajectory_id", CheckedValue()),
    Column("details", JsonText()),
    ForeignKeyConstraint(
        ["run_id", "round", "ordinal"], ["tasks.run_id", "tasks.round", "tasks.ordinal"], name="fk_episodes_tasks"
    ),
    Index(None, "run_id", "state", "round", "ordinal", "sample"),
    Index(None, "run_id", "state", "lease_until"),
    Index(None, "sampler"),
)  # fmt: skip
trajectories = Table(
    "trajectories", metadata,
    Column("id", CheckedValue(), primary_key=True),  # mua.store.trajectories.EpisodeKey.trajectory_id
    _run(),
    *_key(),
    Column("domain", CheckedValue(), nullable=False),
    Column("task_id", FreeText(), nullable=False),
    Column("outcome", CheckedValue(), nullable=False),
    Column("scored", Boolean, nullable=False),
    Column("reward", Number(), nullable=False),
    Column("success", Boolean, nullable=False),
    Column("passing", Boolean, nullable=False),
    Column("error", FreeText()),
    Column("attempts", Whole(), nullable=False),
    Column("turns", Whole(), nullable=False),
    Column("turn_rewards", JsonText(list), nullable=False),
    Column("segments", Whole(), nullable=False),
    Column("tokens", Whole(big=True), nullable=False),
    Column("sampled_tokens", Whole(big=True), nullable=False),
    Column("version_low", Whole(big=True)),  # of sampled tokens; null: there are none
    Column("version_high", Whole(big=True)),
    Column("messages", Blob()),  # zstd of a JSON array; null: pruned
    Column("metrics", JsonText(), nullable=False),
    Column("details", JsonText(), nullable=False),
    Column("sampling", JsonText()),  # temperature and whatever else the log-probabilities are of
    Column("sampler", CheckedValue()),
    Column("started_at", Number()),
    Column("ended_at", Number(), nullable=False),
    Column("seconds", Number(), nullable=False, server_default=text("0")),  # of the episode
    Column("pruned", CheckedValue()),  # null | experts | arrays
    UniqueConstraint("run_id", "part", "round", "ordinal", "sample", "attempt"),
    Index(None, "run_id", "round", "ordinal", "sample"),
    Index(None, "run_id", "success", "reward"),
    Index(None, "run_id", "domain", "task_id"),
    # Of each order of a list, so that a page costs the same whatever the run has.
    Index(None, "run_id", "ended_at", "id"),
    Index(None, "run_id", "reward", "id"),
    Index(None, "run_id", "tokens", "id"),
    Index(None, "run_id", "turns", "id"),
    Index(None, "run_id", "seconds", "id"),
)  # fmt: skip
segments = Table(
    "segments", metadata,
    Column("trajectory_id", CheckedValue(), ForeignKey("trajectories.id"), primary_key=True),
    Column("number", Whole(), primary_key=True, autoincrement=False),  # from 0
    Column("tokens", Whole(), nullable=False),
    Column("sampled_tokens", Whole(), nullable=False),
    Column("arrays", Blob()),  # mua.store.blobs; null: pruned
    Column("experts", Blob()),
)  # fmt: skip
texts = Table(
    "texts", metadata,
    Column("hash", CheckedValue(), primary_key=True),  # mua.store.blobs.hash_text
    Column("body", Blob(), nullable=False),
)  # fmt: skip
requests = Table(
    "requests", metadata,
    Column("id", Whole(big=True), primary_key=True),
    _run(),
    *_key(),
    Column("role", CheckedValue(), nullable=False),  # policy | user | judge | teacher | summary | reader
    Column("number", Whole(), nullable=False),  # of this role in this attempt, from 0
    Column("trajectory_id", CheckedValue(), ForeignKey("trajectories.id")),
    Column("turn", Whole()),
    Column("endpoint", CheckedValue()),
    Column("model", CheckedValue()),
    Column("started_at", Number(), nullable=False),
    Column("seconds", Number()),
    Column("waited", Number()),
    Column("version", Whole(big=True)),
    Column("prompt_tokens", Whole()),
    Column("cached_tokens", Whole()),
    Column("completion_tokens", Whole()),
    Column("segment", Whole()),  # where prompt and reply are tokens of a segment: [0, start) and [start, end)
    Column("token_start", Whole()),
    Column("token_end", Whole()),
    Column("follows", Whole()),  # number of the request whose messages this one goes on from
    Column("kept", Whole()),  # so many of its messages
    Column("messages", JsonText(list)),  # hashes of the messages after these
    Column("tools", CheckedValue()),  # hash of the tools offered
    Column("reply", CheckedValue()),  # hash of the answer
    Column("finish", CheckedValue()),
    Column("sampling", JsonText()),
    Column("error", FreeText()),
    UniqueConstraint("run_id", "part", "round", "ordinal", "sample", "attempt", "role", "number"),
    Index(None, "trajectory_id"),
    Index(None, "run_id", "role", "started_at"),
)  # fmt: skip
tool_calls = Table(
    "tool_calls", metadata,
    Column("id", Whole(big=True), primary_key=True),
    _run(),
    *_key(),
    Column("trajectory_id", CheckedValue(), ForeignKey("trajectories.id")),
    Column("turn", Whole(), nullable=False),
    Column("number", Whole(), nullable=False),  # within the attempt, from 0
    Column("name", FreeText(), nullable=False),
    Column("arguments", FreeText()),  # as they were written, JSON or not
    Column("result", CheckedValue()),  # hash
    Column("error", FreeText()),
    Column("reward", Number()),
    Column("by_user", Boolean, nullable=False, server_default=text("false")),
    Column("started_at", Number(), nullable=False),
    Column("seconds", Number()),
    UniqueConstraint("run_id", "part", "round", "ordinal", "sample", "attempt", "number"),
    Index(None, "trajectory_id"),
    Index(None, "run_id", "name"),
)  # fmt: skip
scores = Table(
    "scores", metadata,
    Column("trajectory_id", CheckedValue(), ForeignKey("trajectories.id"), primary_key=True),
    Column("scorer", CheckedValue(), primary_key=True),
    Column("value", Number()),  # null: it could not be scored
    Column("details", JsonText()),
)  # fmt: skip
steps = Table(
    "steps", metadata,
    _run(primary=True),
    Column("step", Whole(big=True), primary_key=True, autoincrement=False),
    Column("part", Whole(), primary_key=True, autoincrement=False),
    Column("state", CheckedValue(), nullable=False),  # open | done
    Column("version", Whole(big=True), nullable=False),  # of the policy before it
    Column("metrics", JsonText()),
    Column("denominators", JsonText()),
    Column("gradient", CheckedValue()),  # digest
    Column("details", JsonText()),
    Column("started_at", Number(), nullable=False),
    Column("ended_at", Number()),
)  # fmt: skip
uses = Table(
    "uses", metadata,
    Column("run_id", CheckedValue(), primary_key=True),
    Column("step", Whole(big=True), primary_key=True, autoincrement=False),
    Column("part", Whole(), primary_key=True, autoincrement=False),
    Column("epoch", Whole(), primary_key=True, autoincrement=False),
    Column("trajectory_id", CheckedValue(), primary_key=True),
    Column("segment", Whole(), primary_key=True, autoincrement=False),
    Column("minibatch", Whole(), nullable=False, server_default=text("0")),
    Column("position", Whole(), nullable=False, server_default=text("0")),  # in its batch, from 0
    Column("source", CheckedValue()),  # masked URL of the store the trajectory is in; null: this one
    Column("tokens", Whole(), nullable=False),  # with a weight
    Column("arrays", Blob()),  # what the loss read besides the segment; null: pruned
    ForeignKeyConstraint(
        ["run_id", "step", "part"], ["steps.run_id", "steps.step", "steps.part"], name="fk_uses_steps"
    ),
    Index(None, "trajectory_id", "step"),
)  # fmt: skip
writes = Table(
    "writes", metadata,
    Column("writer", CheckedValue(), primary_key=True),
    Column("number", Whole(big=True), nullable=False),
    Column("at", Number(), nullable=False),
)  # fmt: skip
"""The last group of records that each writer has committed: whether one is in, when its commit was not answered."""
