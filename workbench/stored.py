"""``mua store``: what is in a store, for people and as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import yaml
from rich.table import Table
from sqlalchemy.engine import Connection

from mua.config.load import dump_config, load_config
from mua.config.storage import StoreConfig
from mua.observe.safe_output import SafeConsole
from mua.store.database import HEAD, Store
from mua.store.faults import StoreError, StoreFull, shown
from mua.store.queries import (
    TrajectoryFilter,
    list_runs,
    list_steps,
    list_tasks,
    list_trajectories,
    single_run,
    stored_bytes,
    trajectory_ids,
)
from mua.store.retention import Dropped, oldest_checkpoint, prune
from mua.store.tables import json_text, reading_on, requests, runs, trajectories, uses
from mua.store.traces import exporter, import_writes
from mua.store.trajectories import read_trajectories
from mua.store.verification import verify
from mua.store.writer import execute
from mua.types import Trajectory
from mua.utils.strict_json import printable

TABLES = ("runs", "steps", "tasks", "trajectories")
_COLUMNS = {
    "runs": ("id", "name", "state", "started_at", "parts", "steps", "tasks", "trajectories", "output"),
    "steps": ("run_id", "step", "part", "state", "lost", "trajectories", "tokens", "ended_at"),
    "tasks": ("run_id", "round", "ordinal", "kind", "domain", "task_id", "state", "size", "taken_step"),
    "trajectories": ("id", "domain", "task_id", "outcome", "success", "reward", "turns", "sampled_tokens", "trained"),
}
_MOMENTS = ("started_at", "ended_at", "made_at", "seen_at")


def list_table(url: str, table: str, chosen: TrajectoryFilter, limit: int | None, as_json: bool) -> None:
    """Print the rows of ``table`` (one of :data:`TABLES`)."""
    with _opened(url) as store, store.read() as connection:
        if table == "runs":
            found = list_runs(connection)
        elif table == "steps":
            found = list_steps(connection, chosen.run, limit)
        elif table == "tasks":
            found = list_tasks(connection, chosen.run, limit=limit)
        else:
            found = list_trajectories(connection, chosen, limit)
        if as_json:
            _print_json(list(found))
            return
        rows = list(found)
    shown = Table(*_COLUMNS[table])
    for row in rows:
        shown.add_row(*(_cell(name, row[name]) for name in _COLUMNS[table]))
    _console().print(shown)
    print(f"{len(rows)} {table}" + (f" (at most {limit}; --limit shows more)" if len(rows) == limit else ""))


def export(url: str, chosen: TrajectoryFilter, out: Path, as_json: bool) -> int:
    """Write the trajectories of a filter into ``out`` (``.jsonl`` or ``.parquet``); how many were left out, because
    they are damaged or were pruned."""
    write, left_out = exporter(out), list[str]()

    def readable(connection: Connection) -> Iterator[Trajectory]:
        with reading_on():
            ids = trajectory_ids(connection, chosen)
        for name in ids:
            try:
                yield next(read_trajectories(connection, [name]))
            except StoreError as error:
                left_out.append(f"{name}: {error}")

    with _opened(url) as store, store.read() as connection:
        count = write(out, readable(connection))
    for line in left_out:
        print(f"mua: left out {printable(line)}", file=sys.stderr)
    if as_json:
        _print_json({"trajectories": count, "left_out": len(left_out), "file": str(out)})
    else:
        print(f"{count} trajectories written to {out}")
    return len(left_out)


def import_traces(url: str, files: Sequence[Path], run: str, config: Path | None) -> int:
    """Write the trajectories of trace files into a store as a run of their own: all of them, or none. Their number."""
    for path in files:
        if not path.exists():
            raise StoreError(f"{path}: no such file or folder")
    made_with = None if config is None else yaml.safe_load(dump_config(load_config(config, ())))
    try:
        with Store.open(url) as store, store.begin() as connection:
            execute(connection, import_writes(run, files, config=made_with))
            chosen = sa.select(sa.func.count()).select_from(trajectories).where(trajectories.c.run_id == run)
            count = connection.execute(chosen).scalar_one()
    except sa.exc.IntegrityError as error:
        raise StoreError(
            f"run {run}: cannot be imported ({error.orig}); give --run an id that the store does not have, and each "
            "trajectory once"
        ) from None
    print(f"{count} trajectories imported as run {run} into {shown(url)}")
    return int(count)


def verify_store(url: str, as_json: bool) -> int:
    """Print what is wrong with a store; how much it is."""
    began, found = time.monotonic(), []
    with _opened(url) as store, store.read() as connection:
        for finding in verify(connection):
            found.append(finding)
            if not as_json:
                print(printable(str(finding), 1000))
        counts = {
            table.name: connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for table in (runs, trajectories, requests, uses)
        }
    if as_json:
        faults = [{"kind": f.kind, "where": f.where, "what": f.what} for f in found]
        _print_json({"schema": HEAD, "faults": faults, "checked": counts, "seconds": time.monotonic() - began})
    else:
        checked = ", ".join(f"{count} {name}" for name, count in counts.items())
        print(f"{len(found)} faults in {checked}")
    return len(found)


def prune_store(
    url: str, run: str | None, rules: StoreConfig, dry: bool, as_json: bool, *, output: Path | None, checkpoints: bool
) -> None:
    """Drop what ``rules`` do not keep of a run's blobs, and give the room back to the disk.

    ``output`` is the run's folder, by default ``url`` if that is one; without ``checkpoints`` none is looked for.
    """
    if output is None and "://" not in url and Path(url).is_dir():
        output = Path(url)

    def pruned(journal: bool) -> tuple[str, int | None, Dropped, dict[str, int], dict[str, int]]:
        with Store.open(url, create=False, write=not dry, journal=journal) as store:
            with store.read() as connection:
                name = single_run(connection, run)
                before = stored_bytes(connection)
                protect = oldest_checkpoint(connection, name, output) if checkpoints else None
            with store.read() if dry else store.begin() as connection:
                dropped = prune(connection, name, rules, protect=protect, dry=dry)
            with store.read() as connection:
                return name, protect, dropped, before, stored_bytes(connection)

    try:
        name, protect, dropped, before, after = pruned(journal=True)
    except StoreFull:
        print("mua: the disk is full: pruning in memory; do not interrupt this", file=sys.stderr)
        name, protect, dropped, before, after = pruned(journal=False)
    if dropped and not dry:
        for journal in (True, False):
            try:
                with Store.open(url, create=False, journal=journal) as store:
                    store.compact()
                break
            except StoreError as error:
                if not journal:
                    print(f"mua: the file stays as large as it is, with room in it: {error}", file=sys.stderr)
    result = {"run": name, "dry_run": dry, "protected_from_step": protect, "dropped": dropped.as_json(),
              "bytes_before": before, "bytes_after": after}  # fmt: skip
    if as_json:
        _print_json(result)
        return
    what = ", ".join(f"{name} of {n}" for name, n in (("expert choices", len(dropped.experts)),
                                                       ("tokens", len(dropped.arrays))))  # fmt: skip
    print(f"run {name}: {'would drop' if dry else 'dropped'} {what} trajectories, arrays of {dropped.uses} uses")
    if not dry:
        print(f"blobs: {sum(before.values()):,} bytes before, {sum(after.values()):,} after")


def migrate_store(url: str) -> str:
    """Bring a store's schema to this program's version, which is returned."""
    with Store.open(url, create=False) as store:
        print(f"store {store.name}: schema version {HEAD}")
    return str(HEAD)


def _opened(url: str) -> Store:
    return Store.open(url, create=False, write=False)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in _MOMENTS:
        return datetime.fromtimestamp(value, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
    if isinstance(value, float):
        return f"{value:.4g}"
    return printable(value if isinstance(value, str) else json_text(value), 80)


def _print_json(value: Any) -> None:
    print(json.dumps(value, default=_no_blobs))


def _no_blobs(value: object) -> object:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return str(value)


def _console() -> SafeConsole:
    return SafeConsole(width=None if sys.stdout.isatty() else 200)
