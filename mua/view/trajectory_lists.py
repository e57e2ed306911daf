"""Lists of trajectories a page at a time: filters and orders of the store, and three that need more than its rows.

=========== ===========================================================================================================
``gap``     the largest difference of a trained token's log-probability between engine and trainer, of the newest step
            that trained on it; only where the trainer's own were recorded (docs/replay.md)
``said``    words in a conversation, read newest first for :data:`SEARCH_SECONDS` at most
``suspect`` suspected reward hacking: scored successes that one of :data:`SUSPICIONS` holds for
=========== ===========================================================================================================
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import sqlalchemy as sa
from pydantic import Field, TypeAdapter, ValidationError
from sqlalchemy.engine import Connection

from mua.store.blobs import decompress, unpack_arrays, unpack_messages
from mua.store.queries import (
    Count,
    Order,
    TrajectoryFilter,
    changes,
    count_trajectories,
    list_trajectories,
    same_task,
    trajectory_ids,
)
from mua.store.tables import json_text, passing_over, segments, tasks, tool_calls, trajectories, uses
from mua.types import Json
from mua.utils.errors import MuaError
from mua.view.run_overview import kind_of
from mua.view.viewed_runs import ViewedRun

MOST_ROWS = 500
"""Of one page."""
SEARCH_SECONDS = 5.0
MOST_FOUND = 1000
"""Trajectories that a search in conversations, an order by gap or a list of suspects looks at, at most."""
NEWEST = 20_000
"""Trajectories that are searched, and whose gaps and suspicions are computed: the newest."""
SUSPICIONS = {
    "no tool": "called no tool, and another success of the same task did",
    "short": "sampled less than a quarter of the median tokens of at least five successes of its kind of task",
    "verdict": "the verdict still lists something under one of " "database, unsaid, untrue, unmet, forbidden, missing, "
               "violations, errors",
    "repeated": "everything the policy said and called is the same, word for word, as in successes of at least two "
                "other tasks",
}  # fmt: skip
_UNMET = ("database", "unsaid", "untrue", "unmet", "forbidden", "missing", "violations", "errors")
Read = TypeVar("Read")


class BadQuestion(MuaError):
    """A parameter of a question is not one that there is. The message names it."""


@dataclass(frozen=True, slots=True)
class ListQuestion:
    """What a list shows."""

    filter: TrajectoryFilter = field(default_factory=TrajectoryFilter)
    order: Order | Literal["gap"] = "newest"
    limit: Annotated[int, Field(gt=0, le=MOST_ROWS)] = 50
    offset: Count = 0
    said: str | None = None
    suspect: Literal["any", "no tool", "short", "verdict", "repeated"] | None = None
    """One of :data:`SUSPICIONS`, or any of them."""


_OF_LIST = ("order", "limit", "offset", "said", "suspect")
_FILTERS = {one.name for one in fields(TrajectoryFilter)} - {"run", "ids", "min_reward", "min_version"}
_READ_FILTER, _READ_QUESTION = TypeAdapter(TrajectoryFilter), TypeAdapter(ListQuestion)


def filter_of(run: str | None, given: Mapping[str, str]) -> TrajectoryFilter:
    """From names and values as text, with the run's id. Raises :class:`BadQuestion` for an unknown or wrong one."""
    if unknown := given.keys() - _FILTERS:
        raise BadQuestion(f"{min(unknown)}: no filter of trajectories; there are {', '.join(sorted(_FILTERS))}")
    return replace(_read(_READ_FILTER, given), run=run)


def question_of(run: ViewedRun, given: Mapping[str, str]) -> ListQuestion:
    """From the parameters of an address. Raises :class:`BadQuestion` for an unknown or wrong one."""
    asked = _read(_READ_QUESTION, {name: given[name] for name in _OF_LIST if name in given})
    own = {name: value for name, value in given.items() if name not in (*_OF_LIST, "run")}
    return replace(asked, filter=filter_of(run.id, own))


def _read(reader: TypeAdapter[Read], given: Mapping[str, str]) -> Read:
    try:
        return reader.validate_strings({name: value for name, value in given.items() if value})
    except ValidationError as error:
        wrong = error.errors()[0]
        raise BadQuestion(f"{wrong['loc'][0]}: {wrong['msg']}, not {str(wrong['input'])[:40]!r}") from None


def whole_number(name: str, value: str) -> int:
    """Raises :class:`BadQuestion`."""
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise BadQuestion(f"{name}: a whole number from 0 on, not {value[:40]!r}")
    return int(value)


class TrajectoryLists:
    """Answers :class:`ListQuestion` s, and remembers gaps and suspicions until something new is in the store."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], tuple[Json, dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def page(self, connection: Connection, run: ViewedRun, asked: ListQuestion) -> Json:
        """``total``, counted as in a list, and the ``rows`` of one page; ``searched`` says of how many a search in
        conversations read."""
        chosen, searched = self.narrowed(connection, run, asked)
        order: Any = asked.order
        if asked.order == "gap":
            gaps = self.gaps(connection, run)
            widest = sorted(gaps, key=lambda name: (-gaps[name], name))[:MOST_FOUND]
            place = {name: at for at, name in enumerate(widest)}
            rows = list(list_trajectories(connection, _within(chosen, widest)))
            rows.sort(key=lambda row: place[row["id"]])
            total, rows = len(rows), rows[asked.offset : asked.offset + asked.limit]
        else:
            total = count_trajectories(connection, chosen)
            rows = list(list_trajectories(connection, chosen, asked.limit, offset=asked.offset, order=order))
        self._complete(connection, run, rows)
        return {"total": total, "rows": rows, "searched": searched}

    def narrowed(
        self, connection: Connection, run: ViewedRun, asked: ListQuestion
    ) -> tuple[TrajectoryFilter, Json | None]:
        """The filter that also says what the words in conversations and the suspicions leave, and what was read."""
        chosen, searched = asked.filter, None
        if asked.suspect:
            held = [n for n, why in self.suspects(connection, run).items() if asked.suspect in ("any", *why)]
            chosen = _within(chosen, held[:MOST_FOUND])
        if asked.said:
            found, searched = search_conversations(connection, chosen, asked.said)
            chosen = _within(chosen, found)
        return chosen, searched

    def ids(self, connection: Connection, run: ViewedRun, given: Mapping[str, str]) -> list[str]:
        """What the filters ``given`` leave, in the order of the run's stream. Raises :class:`BadQuestion`."""
        return trajectory_ids(connection, self.narrowed(connection, run, question_of(run, given))[0])

    def rows_of(self, connection: Connection, run: ViewedRun, ids: list[str]) -> list[Json]:
        """The rows of ``ids``, with their suspicions."""
        self.suspects(connection, run)
        rows = list(list_trajectories(connection, _within(TrajectoryFilter(run=run.id), ids)))
        self._complete(connection, run, rows)
        return rows

    def gaps(self, connection: Connection, run: ViewedRun) -> dict[str, float]:
        """The largest gap of each of the newest trajectories that have one, by id."""

        def newest_gaps() -> dict[str, float]:
            newest = sa.select(uses.c.trajectory_id).where(uses.c.run_id == run.id, uses.c.epoch == 0)
            ids = connection.execute(newest.order_by(uses.c.step.desc()).limit(NEWEST)).scalars()
            return gaps_of(connection, list(dict.fromkeys(ids)))

        return self._remembered("gaps", connection, run, newest_gaps)

    def suspects(self, connection: Connection, run: ViewedRun) -> dict[str, list[str]]:
        """Which of :data:`SUSPICIONS` hold, by id, of the newest trajectories; newest first."""
        return self._remembered("suspects", connection, run, lambda: suspicions(connection, run.id))

    def _remembered(
        self, what: str, connection: Connection, run: ViewedRun, make: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        state = changes(connection, run.id)
        with self._lock:
            if self._kept.get((what, run.key), (None,))[0] != state:
                self._kept[what, run.key] = state, make()
            return self._kept[what, run.key][1]

    def _complete(self, connection: Connection, run: ViewedRun, rows: list[Json]) -> None:
        """What a row shows beyond its own columns; suspicions where somebody asked for them before."""
        with self._lock:
            suspects = self._kept.get(("suspects", run.key), ({}, {}))[1]
        ids = [row["id"] for row in rows]
        gaps = gaps_of(connection, ids)
        c = tool_calls.c
        called = (
            sa.select(c.trajectory_id, sa.func.count(), sa.func.count(c.error))
            .where(c.trajectory_id.in_(ids))
            .group_by(c.trajectory_id)
        )
        calls = {name: (count, errors) for name, count, errors in connection.execute(called)}
        labels = sa.select(trajectories.c.id, tasks.c.details, tasks.c.split, tasks.c.taken_step)
        joined = labels.select_from(trajectories.join(tasks, same_task())).where(trajectories.c.id.in_(ids))
        of_task = {name: rest for name, *rest in connection.execute(joined)}
        for row in rows:
            details, split, taken = of_task.get(row["id"], (None, None, None))
            row |= {"kind": kind_of(details), "split": split, "step": taken, "gap": gaps.get(row["id"]),
                    "suspect": suspects.get(row["id"], [])}  # fmt: skip
            row["tool_calls"], row["tool_errors"] = calls.get(row["id"], (0, 0))


def _within(chosen: TrajectoryFilter, ids: list[str]) -> TrajectoryFilter:
    before = None if chosen.ids is None else set(chosen.ids)
    return replace(chosen, ids=tuple(name for name in ids if before is None or name in before))


def gaps_of(connection: Connection, ids: list[str]) -> dict[str, float]:
    """Largest absolute difference between the log-probability of engine and trainer over the trained tokens of each
    of ``ids`` that has the trainer's; of several steps the newest."""
    found: dict[str, tuple[int, float]] = {}
    for at in range(0, len(ids), MOST_ROWS):
        some = ids[at : at + MOST_ROWS]
        both = (uses.c.trajectory_id == segments.c.trajectory_id) & (uses.c.segment == segments.c.number)
        chosen = (
            sa.select(uses.c.trajectory_id, uses.c.step, uses.c.arrays, segments.c.arrays)
            .select_from(uses.join(segments, both))
            .where(uses.c.trajectory_id.in_(some), uses.c.epoch == 0, uses.c.arrays.is_not(None),
                   segments.c.arrays.is_not(None), uses.c.source.is_(None))
        )  # fmt: skip
        for name, step, read, sampled in connection.execute(chosen):
            with passing_over(f"uses of {name}"):
                own = unpack_arrays(read, f"uses of {name}")
                if "old_logprobs" not in own or not (trained := own["weights"] != 0).any():
                    continue
                engine = unpack_arrays(sampled, f"segments of {name}")["logprobs"]
                gap = float(np.abs(own["old_logprobs"] - engine)[trained].max())
                before = found.get(name, (-1, 0.0))
                if np.isfinite(gap) and step >= before[0]:
                    found[name] = step, max(gap, before[1]) if step == before[0] else gap
    return {name: gap for name, (_, gap) in found.items()}


def search_conversations(connection: Connection, chosen: TrajectoryFilter, words: str) -> tuple[list[str], Json]:
    """Ids of the trajectories whose messages hold ``words``, whatever the case, newest first; how many were read."""
    needle = json_text(words)[1:-1].lower()
    deadline, read, found = time.monotonic() + SEARCH_SECONDS, 0, []
    c = trajectories.c
    newest = sa.select(c.id).where(chosen.condition()).order_by(c.ended_at.desc(), c.id.desc()).limit(NEWEST)
    ids = list(connection.execute(newest).scalars())
    for at in range(0, len(ids), MOST_ROWS):
        some = ids[at : at + MOST_ROWS]
        blobs = dict(connection.execute(sa.select(c.id, c.messages).where(c.id.in_(some))).all())
        for name in some:
            read += 1
            with passing_over(f"messages of {name}"):
                blob = blobs.get(name)
                said = "" if blob is None else decompress(blob, f"messages of {name}").decode("utf-8", "replace")
                if needle in said.lower():
                    found.append(name)
        if len(found) >= MOST_FOUND or time.monotonic() > deadline:
            break
    return found[:MOST_FOUND], {"read": read, "of": len(ids)}


def suspicions(connection: Connection, run: str) -> dict[str, list[str]]:
    """Which of :data:`SUSPICIONS` hold of the newest scored successes of ``run``, by id, newest first."""
    rows = list(_successes(connection, run))
    used = {(row["domain"], row["task_id"]) for row in rows if row["calls"]}
    lengths: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    same: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        lengths[row["domain"], row["kind"]].append(row["sampled_tokens"])
        same[row["said"]].add(row["task_id"])
    usual = {key: median(values) for key, values in lengths.items() if len(values) >= 5}
    found = {}
    for row in rows:
        holds = {
            "no tool": not row["calls"] and (row["domain"], row["task_id"]) in used,
            "short": 4 * row["sampled_tokens"] < usual.get((row["domain"], row["kind"]), 0),
            "verdict": any(row["details"].get(name) for name in _UNMET),
            "repeated": len(same[row["said"]]) >= 3,
        }
        if any(holds.values()):
            found[row["id"]] = [name for name, true in holds.items() if true]
    return found


def _successes(connection: Connection, run: str) -> Iterator[Json]:
    """The newest scored successes, with their tool calls and a digest of what the policy said and called."""
    t = trajectories.c
    calls = sa.select(sa.func.count()).where(tool_calls.c.trajectory_id == t.id, ~tool_calls.c.by_user)
    chosen = (
        sa.select(t.id, t.domain, t.task_id, t.sampled_tokens, t.details, t.messages, tasks.c.details.label("labels"),
                  calls.scalar_subquery().label("calls"))
        .select_from(trajectories.outerjoin(tasks, same_task()))
        .where(t.run_id == run, t.scored, t.success)
        .order_by(t.ended_at.desc(), t.id.desc())
        .limit(NEWEST)
    )  # fmt: skip
    for found in connection.execute(chosen.execution_options(yield_per=MOST_ROWS)).mappings():
        row = dict(found)
        messages = None
        with passing_over(f"messages of {row['id']}"):
            blob = row.pop("messages")
            messages = None if blob is None else unpack_messages(blob, f"messages of {row['id']}")
        agent = [message for message in messages or () if message.get("role") == "assistant"]
        # What is called, without the calls' ids, which are never the same.
        called = ([c.get("function") if isinstance(c, dict) else c for c in m.get("tool_calls") or ()] for m in agent)
        spoken = [[m.get("content"), functions] for m, functions in zip(agent, called, strict=True)]
        said = json_text(spoken) if agent else row["id"]
        row["said"] = hashlib.blake2b(said.encode(), digest_size=16).hexdigest()
        if not row["calls"]:  # of an imported run the conversation alone says what was called
            row["calls"] = sum(len(m.get("tool_calls") or ()) for m in agent)
        row["kind"] = kind_of(row.pop("labels"))
        row["details"] = row["details"] if isinstance(row["details"], dict) else {}
        yield row
