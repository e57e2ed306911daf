"""What the page may ask, in one place for the server and for the page in a file: a path, parameters, plain JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, TypeAlias

import orjson
from sqlalchemy.engine import Connection

from mua.store.queries import changes
from mua.store.tables import reading_on
from mua.types import Json
from mua.view.one_trajectory import tokens, trajectory
from mua.view.run_overview import compared, curves, one_step, overview, step_lines, step_list
from mua.view.trajectory_lists import SUSPICIONS, BadQuestion, TrajectoryLists, question_of, whole_number
from mua.view.viewed_runs import ViewedRun, ViewedRuns

Parameters: TypeAlias = Mapping[str, str]
MOST_CURVES = 40
"""In one answer."""


class Answers:
    """Answers of the runs that are looked at. Blocks; safe in threads."""

    def __init__(self, viewed: ViewedRuns) -> None:
        self.viewed = viewed
        self.lists = TrajectoryLists()
        self._of_run: dict[str, Callable[[Connection, ViewedRun, Parameters], Any]] = {
            "run": lambda c, run, _: overview(c, run) | {"suspicions": SUSPICIONS},
            "changes": lambda c, run, _: changes(c, run.id),
            "curves": lambda c, run, given: {
                "curves": curves(step_lines(c, run), list(filter(None, _text(given, "names").split(",")))[:MOST_CURVES])
            },
            "steps": lambda c, run, _: {"steps": step_list(c, run)},
            "step": lambda c, run, given: one_step(c, run, _number(given, "step")),
            "trajectories": lambda c, run, given: self.lists.page(c, run, question_of(run, given)),
            "trajectory": lambda c, run, given: trajectory(c, run, _text(given, "id")),
            "tokens": lambda c, run, given: tokens(
                c, run, _text(given, "id"), _number(given, "segment"),
                _number(given, "use") if given.get("use") else None,
            ),
        }  # fmt: skip

    def answer(self, path: str, given: Parameters) -> Json:
        """Plain JSON; where something in the store cannot be read, ``damaged`` says which columns, and the rest is
        there. Raises :class:`MuaError`: :class:`mua.view.viewed_runs.NotThere`,
        :class:`mua.view.trajectory_lists.BadQuestion`, or what is wrong with the store."""
        with reading_on() as damaged:
            found = self._answer(path, given)
        return found | {"damaged": sorted(damaged)} if damaged else found

    def _answer(self, path: str, given: Parameters) -> Json:
        if path == "runs":
            return {"runs": self.viewed.refresh()}
        if path == "compare":
            first, second = (self.viewed.get(_text(given, side)) for side in ("a", "b"))
            rounds = [_number(given, name) for name in ("ra", "rb")]
            with first.store.read() as one, second.store.read() as other:
                return compared((one, first, rounds[0]), (other, second, rounds[1]))
        if path not in self._of_run:
            raise BadQuestion(f"{path[:40]}: nothing that can be asked")
        run = self.viewed.get(_text(given, "run"))
        with run.store.read() as connection:
            return self._of_run[path](connection, run, given)


def _text(given: Parameters, name: str) -> str:
    if not given.get(name):
        raise BadQuestion(f"{name}: missing")
    return given[name]


def _number(given: Parameters, name: str) -> int:
    return whole_number(name, _text(given, name))


def as_bytes(value: Any) -> bytes:
    """JSON that browsers read: what is no finite number becomes null, an unpaired surrogate is escaped."""
    try:
        return orjson.dumps(value, default=_blob)
    except (TypeError, ValueError):  # a surrogate, or an integer of over 64 bits
        return json.dumps(_plain(value), allow_nan=False).encode()


def _blob(value: object) -> object:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, Decimal):  # what PostgreSQL sums and averages integers to
        return float(value)
    raise TypeError(f"no JSON: {type(value).__name__}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return _blob(value) if isinstance(value, bytes | Decimal) else value
