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
from typing import Any

import numpy as np
import sqlalchemy as sa
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


class JsonText(TypeDecorator[Any]):
    """A JSON value as text, so that NaN of a metric and NUL of a message pass; SQL reads it with its JSON functions."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json_text(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else parsed_json(value)


class FreeText(TypeDecorator[str]):
    """Text of any origin, stored as it is; as marked JSON where it holds NUL or an unpaired surrogate."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or not (value.startswith(_MARK) or _UNSTORABLE.search(value)):
            return value
        return _MARK + json_text(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or not value.startswith(_MARK):
            return value
        text = parsed_json(value.removeprefix(_MARK))
        return text if isinstance(text, str) else value


BigInt = BigInteger().with_variant(Integer(), "sqlite")
"""64 bits; on SQLite the type whose primary keys count by themselves."""
Seconds: sa.Double[float] = Double()
"""Since 1970 (UTC) for moments, plain for durations."""
Blob = LargeBinary()


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _run(*, primary: bool = False) -> Column[str]:
    return Column("run_id", Text, ForeignKey("runs.id"), primary_key=primary, nullable=False)


def _key() -> list[Column[int]]:
    """An episode key without its run."""
    bounded: list[Column[int]] = [Column(name, Integer, nullable=False) for name in ("part", "round")]
    return [
        *bounded,
        Column("ordinal", BigInt, nullable=False),
        Column("sample", Integer, nullable=False),
        Column("attempt", Integer, nullable=False),
    ]


runs = Table(
    "runs", metadata,
    Column("id", Text, primary_key=True),
    Column("output", Text, nullable=False),
    Column("name", Text),
    Column("state", Text, nullable=False),  # running | done | left | failed
    Column("started_at", Seconds, nullable=False),
    Column("ended_at", Seconds),
    Column("config", JsonText),  # masked
    Column("provenance", JsonText),
)  # fmt: skip
parts = Table(
    "parts", metadata,
    _run(primary=True),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("from_step", BigInt, nullable=False),  # steps of earlier parts from here on are lost
    Column("started_at", Seconds, nullable=False),
    Column("ended_at", Seconds),
    Column("host", Text),
    Column("pid", Integer),
    Column("config", JsonText),  # masked; of this start
)  # fmt: skip
versions = Table(
    "versions", metadata,
    _run(primary=True),
    Column("version", BigInt, primary_key=True, autoincrement=False),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("synced_at", Seconds, nullable=False),
    Column("checkpoint", Text),
    Column("metrics", JsonText),
)  # fmt: skip
engines = Table(
    "engines", metadata,
    _run(primary=True),
    Column("label", Text, primary_key=True),
    Column("url", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("version", BigInt, nullable=False),
    Column("capacity", Integer, nullable=False),
    Column("running", Integer, nullable=False, server_default=text("0")),
    Column("waiting", Integer, nullable=False, server_default=text("0")),
    Column("seen_at", Seconds, nullable=False),
    Column("details", JsonText),
)  # fmt: skip
samplers = Table(
    "samplers", metadata,
    Column("id", Text, primary_key=True),
    _run(),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("running", Integer, nullable=False, server_default=text("0")),
    Column("started_at", Seconds, nullable=False),
    Column("seen_at", Seconds, nullable=False),
    Column("details", JsonText),
    Index(None, "run_id", "seen_at"),
)  # fmt: skip
tasks = Table(
    "tasks", metadata,
    _run(primary=True),
    Column("round", Integer, primary_key=True, autoincrement=False),
    Column("ordinal", BigInt, primary_key=True, autoincrement=False),
    Column("kind", Text, nullable=False),  # train | evaluation
    Column("domain", Text, nullable=False),
    Column("task_id", FreeText, nullable=False),
    Column("split", Text),
    Column("size", Integer, nullable=False),  # episodes of the group
    Column("state", Text, nullable=False),  # open | complete | taken | cancelled
    Column("priority", Double, nullable=False, server_default=text("0")),
    Column("part", Integer, nullable=False, server_default=text("1")),  # that made it, or opened it again
    Column("version", BigInt),  # of the policy when it was opened
    Column("made_at", Seconds, nullable=False),
    Column("ended_at", Seconds),
    Column("taken_step", BigInt),
    Column("details", JsonText),  # kind and difficulty of the task, where it has them
    Index(None, "run_id", "state", "round", "ordinal"),
)  # fmt: skip
episodes = Table(
    "episodes", metadata,
    Column("run_id", Text, primary_key=True),
    Column("round", Integer, primary_key=True, autoincrement=False),
    Column("ordinal", BigInt, primary_key=True, autoincrement=False),
    Column("sample", Integer, primary_key=True, autoincrement=False),
    Column("state", Text, nullable=False),  # open | leased | done | cancelled
    Column("sampler", Text),
    Column("lease", Text),  # token of the claim; who writes a result must hold it
    Column("lease_until", Seconds),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("trajectory_id", Text),
    Column("details", JsonText),
    ForeignKeyConstraint(
        ["run_id", "round", "ordinal"], ["tasks.run_id", "tasks.round", "tasks.ordinal"], name="fk_episodes_tasks"
    ),
    Index(None, "run_id", "state", "round", "ordinal", "sample"),
    Index(None, "run_id", "state", "lease_until"),
    Index(None, "sampler"),
)  # fmt: skip
trajectories = Table(
    "trajectories", metadata,
    Column("id", Text, primary_key=True),  # mua.store.trajectories.EpisodeKey.trajectory_id
    _run(),
    *_key(),
    Column("domain", Text, nullable=False),
    Column("task_id", FreeText, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("scored", Boolean, nullable=False),
    Column("reward", Double, nullable=False),
    Column("success", Boolean, nullable=False),
    Column("passing", Boolean, nullable=False),
    Column("error", FreeText),
    Column("attempts", Integer, nullable=False),
    Column("turns", Integer, nullable=False),
    Column("turn_rewards", JsonText, nullable=False),
    Column("segments", Integer, nullable=False),
    Column("tokens", BigInt, nullable=False),
    Column("sampled_tokens", BigInt, nullable=False),
    Column("version_low", BigInt),  # of sampled tokens; null: there are none
    Column("version_high", BigInt),
    Column("messages", Blob),  # zstd of a JSON array; null: pruned
    Column("metrics", JsonText, nullable=False),
    Column("details", JsonText, nullable=False),
    Column("sampling", JsonText),  # temperature and whatever else the log-probabilities are of
    Column("sampler", Text),
    Column("started_at", Seconds),
    Column("ended_at", Seconds, nullable=False),
    Column("seconds", Double, nullable=False, server_default=text("0")),  # of the episode
    Column("pruned", Text),  # null | experts | arrays
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
    Column("trajectory_id", Text, ForeignKey("trajectories.id"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),  # from 0
    Column("tokens", Integer, nullable=False),
    Column("sampled_tokens", Integer, nullable=False),
    Column("arrays", Blob),  # mua.store.blobs; null: pruned
    Column("experts", Blob),
)  # fmt: skip
texts = Table(
    "texts", metadata,
    Column("hash", Text, primary_key=True),  # mua.store.blobs.hash_text
    Column("body", Blob, nullable=False),
)  # fmt: skip
requests = Table(
    "requests", metadata,
    Column("id", BigInt, primary_key=True),
    _run(),
    *_key(),
    Column("role", Text, nullable=False),  # policy | user | judge | teacher | summary | reader
    Column("number", Integer, nullable=False),  # of this role in this attempt, from 0
    Column("trajectory_id", Text, ForeignKey("trajectories.id")),
    Column("turn", Integer),
    Column("endpoint", Text),
    Column("model", Text),
    Column("started_at", Seconds, nullable=False),
    Column("seconds", Double),
    Column("waited", Double),
    Column("version", BigInt),
    Column("prompt_tokens", Integer),
    Column("cached_tokens", Integer),
    Column("completion_tokens", Integer),
    Column("segment", Integer),  # where prompt and reply are tokens of a segment: [0, start) and [start, end)
    Column("token_start", Integer),
    Column("token_end", Integer),
    Column("follows", Integer),  # number of the request whose messages this one goes on from
    Column("kept", Integer),  # so many of its messages
    Column("messages", JsonText),  # hashes of the messages after these
    Column("tools", Text),  # hash of the tools offered
    Column("reply", Text),  # hash of the answer
    Column("finish", Text),
    Column("sampling", JsonText),
    Column("error", FreeText),
    UniqueConstraint("run_id", "part", "round", "ordinal", "sample", "attempt", "role", "number"),
    Index(None, "trajectory_id"),
    Index(None, "run_id", "role", "started_at"),
)  # fmt: skip
tool_calls = Table(
    "tool_calls", metadata,
    Column("id", BigInt, primary_key=True),
    _run(),
    *_key(),
    Column("trajectory_id", Text, ForeignKey("trajectories.id")),
    Column("turn", Integer, nullable=False),
    Column("number", Integer, nullable=False),  # within the attempt, from 0
    Column("name", FreeText, nullable=False),
    Column("arguments", FreeText),  # as they were written, JSON or not
    Column("result", Text),  # hash
    Column("error", FreeText),
    Column("reward", Double),
    Column("by_user", Boolean, nullable=False, server_default=text("false")),
    Column("started_at", Seconds, nullable=False),
    Column("seconds", Double),
    UniqueConstraint("run_id", "part", "round", "ordinal", "sample", "attempt", "number"),
    Index(None, "trajectory_id"),
    Index(None, "run_id", "name"),
)  # fmt: skip
scores = Table(
    "scores", metadata,
    Column("trajectory_id", Text, ForeignKey("trajectories.id"), primary_key=True),
    Column("scorer", Text, primary_key=True),
    Column("value", Double),  # null: it could not be scored
    Column("details", JsonText),
)  # fmt: skip
steps = Table(
    "steps", metadata,
    _run(primary=True),
    Column("step", BigInt, primary_key=True, autoincrement=False),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("state", Text, nullable=False),  # open | done
    Column("version", BigInt, nullable=False),  # of the policy before it
    Column("metrics", JsonText),
    Column("denominators", JsonText),
    Column("gradient", Text),  # digest
    Column("details", JsonText),
    Column("started_at", Seconds, nullable=False),
    Column("ended_at", Seconds),
)  # fmt: skip
uses = Table(
    "uses", metadata,
    Column("run_id", Text, primary_key=True),
    Column("step", BigInt, primary_key=True, autoincrement=False),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("epoch", Integer, primary_key=True, autoincrement=False),
    Column("trajectory_id", Text, primary_key=True),
    Column("segment", Integer, primary_key=True, autoincrement=False),
    Column("minibatch", Integer, nullable=False, server_default=text("0")),
    Column("position", Integer, nullable=False, server_default=text("0")),  # in its batch, from 0
    Column("source", Text),  # masked URL of the store the trajectory is in; null: this one
    Column("tokens", Integer, nullable=False),  # with a weight
    Column("arrays", Blob),  # what the loss read besides the segment; null: pruned
    ForeignKeyConstraint(
        ["run_id", "step", "part"], ["steps.run_id", "steps.step", "steps.part"], name="fk_uses_steps"
    ),
    Index(None, "trajectory_id", "step"),
)  # fmt: skip
writes = Table(
    "writes", metadata,
    Column("writer", Text, primary_key=True),
    Column("number", BigInt, nullable=False),
    Column("at", Seconds, nullable=False),
)  # fmt: skip
"""The last group of records that each writer has committed: whether one is in, when its commit was not answered."""
