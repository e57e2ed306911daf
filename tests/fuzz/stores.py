"""Stores in which one value is another: a wrong type, a wrong number, text that is no text, a blob of something else.

Whoever reads a store says what is wrong and goes on: ``verify`` ends with its findings, lists and overviews are
answered, ``export`` writes every other trajectory, ``show`` and ``diagnose`` end with a line at most. Not covered:
files that are no database any more (tests/unit/test_store_faults.py), PostgreSQL, whose columns refuse other types.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import sqlite3
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from mua.observe.diagnosis.verdict import diagnosed
from mua.store.database import Store
from mua.store.faults import StoreError
from mua.store.queries import TrajectoryFilter
from mua.store.tables import metadata
from mua.store.verification import verify
from mua.utils.errors import MuaError
from mua.view.page_answers import Answers, as_bytes
from mua.view.run_evidence import evidence_of
from mua.view.terminal import show
from mua.view.trajectory_lists import BadQuestion
from mua.view.viewed_runs import NotThere, opened_runs
from tests.fuzz._mutate import drawn, outcome, scratch
from tests.shop_run import write_shop
from workbench.stored import export

CASES = 10_000
RUN = "shop"
_VALUES: tuple[object, ...] = (
    None, 0, -1, 7, 2**31, 2**62, -(2**63), 0.5, -1e300, 9e999, "", "x", "7", "\x00", "\u202e", b"", b"\xff\xfe" * 9,
    "{}", "[]", "[1]", "null", "true", '{"a": NaN}', '{"kind": [1]}', '{"groups": 3}', '{"groups": [[1]]}', '"text"',
    '[["a"]]', "[" * 3000, '{"model": 5}', '{"model": {"path": []}}', '{"evaluation": {"level": "x"}}', "\u241bjson:{",
    '{"environment": {"name": 5}}', '[{"role": 5}]',
)  # fmt: skip


def run(cases: int, seed: int) -> list[str]:
    """Faults of ``cases`` stores, one line each."""
    logging.disable(logging.ERROR)
    failures = []
    for case, rng in drawn("stores", cases, seed):
        with scratch() as folder:
            path = folder / "store.sqlite"
            path.write_bytes(_store())
            if (changed := _change(path, rng)) is not None:
                failures += [f"{case}: {changed}: {fault}" for fault in _read(folder, rng)]
    logging.disable(logging.NOTSET)
    return failures


@cache
def _store() -> bytes:
    with scratch() as folder:
        write_shop(folder, RUN, step_count=4, groups=1)
        with Store.open(folder) as store:
            store.compact()
        with sqlite3.connect(folder / "store.sqlite") as raw:
            raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return (folder / "store.sqlite").read_bytes()


def _change(path: Path, rng: random.Random) -> str | None:
    """Change one value; which, or None where the database refuses it."""
    table = rng.choice([t for t in metadata.sorted_tables if t.name not in ("engines", "samplers", "writes")])
    column = rng.choice(list(table.columns))
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as raw:
        raw.text_factory = bytes
        rows = [row for (row,) in raw.execute(f"SELECT rowid FROM {table.name}")]
        if not rows:
            return None
        row = rng.choice(rows)
        (old,) = raw.execute(f"SELECT {column.name} FROM {table.name} WHERE rowid = ?", (row,)).fetchone()
        kind, value = "?", rng.choice(_VALUES)
        if rng.random() < 0.1:
            kind, value = "CAST(? AS TEXT)", b"a\xff\x80"
        elif rng.random() < 0.15:
            other = rng.choice(rows)
            (value,) = raw.execute(f"SELECT {column.name} FROM {table.name} WHERE rowid = ?", (other,)).fetchone()
            kind = "CAST(? AS TEXT)" if not isinstance(column.type, type(metadata)) and isinstance(value, bytes) and (
                b"\x28\xb5\x2f\xfd" not in value[:4]) else "?"  # fmt: skip
        elif isinstance(old, bytes) and len(old) > 4 and rng.random() < 0.3:
            broken = bytearray(old)
            broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
            kind = "?" if old[:4] == b"\x28\xb5\x2f\xfd" else "CAST(? AS TEXT)"
            value = bytes(broken)
        try:
            raw.execute(f"UPDATE {table.name} SET {column.name} = {kind} WHERE rowid = ?", (value, row))
        except (sqlite3.IntegrityError, sqlite3.OperationalError, OverflowError):
            return None
    return f"{table.name}.{column.name} = {str(value)[:60]!a}"


def _read(folder: Path, rng: random.Random) -> list[str]:
    try:
        Store.open(folder, write=False).close()
    except StoreError:
        return []  # the version of the schema, which nothing can be read without
    faults = []
    for reader in (_verify, _export, _view, _show, _diagnose):
        _, error, found = outcome(lambda reader=reader: reader(folder, rng), (MuaError,))  # type: ignore[misc]
        faults += [f"{reader.__name__[1:]}: {fault}" for fault in found]
        lost = isinstance(error, NotThere | BadQuestion)  # the id of the run itself
        if error is not None and not lost and reader in (_verify, _export, _view):
            faults.append(f"{reader.__name__[1:]} does not go on: {error}")
    return faults


def _verify(folder: Path, rng: random.Random) -> None:
    with Store.open(folder, write=False) as store, store.read() as connection:
        for finding in verify(connection):
            str(finding)


def _export(folder: Path, rng: random.Random) -> None:
    out = folder / "out.jsonl"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        export(str(folder), TrajectoryFilter(), out, False)
    with contextlib.closing(sqlite3.connect(folder / "store.sqlite")) as raw:
        (count,) = raw.execute("SELECT count(*) FROM trajectories").fetchone()
    written = out.read_bytes().count(b"\n")
    assert written >= count - 1, f"{written} of {count} trajectories are written"


def _view(folder: Path, rng: random.Random) -> None:
    with opened_runs([str(folder)]) as viewed:
        answers = Answers(viewed)
        key = viewed.keys()[0]

        def ask(path: str, *allowed: type[Exception], **given: str) -> Any:
            with contextlib.suppress(*allowed):
                found = answers.answer(path, {"run": key, **given})
                as_bytes(found)
                return found

        ask("runs")
        ask("run")
        ask("changes")
        ask("compare", a=key, b=key, ra="0", rb="0")
        for row in ask("steps")["steps"]:
            ask("step", NotThere, BadQuestion, step=str(row["step"]))
        for given in ({}, {"order": "gap"}, {"suspect": "any"}, {"said": "order"}, {"text": "a"}, {"kind": "refund"}):
            assert ask("trajectories", limit="500", **given) is not None
        rows = ask("trajectories")["rows"]
        for row in rng.sample(rows, min(5, len(rows))):
            ask("trajectory", MuaError, id=str(row["id"]))
            ask("tokens", MuaError, id=str(row["id"]), segment="0")


def _show(folder: Path, rng: random.Random) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for sample in range(2):
            show(str(folder), {}, run=None, name=None, sample=sample, model=None, as_json=bool(sample))


def _diagnose(folder: Path, rng: random.Random) -> None:
    with evidence_of(str(folder)) as (name, seen):
        found = diagnosed(name, seen)
    list(found.lines("x"))


_: Callable[[int, int], list[str]] = run
