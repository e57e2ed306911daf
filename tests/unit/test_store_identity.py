"""Which run a folder holds, and who may go on with it: copies, moves, starts elsewhere; what pruning takes for gone.

The store is real, the starts are processes. Not here: trackers' own services.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from mua.cli import app
from mua.config.storage import StoreConfig
from mua.store import starts, writer
from mua.store.database import Store
from mua.store.faults import StoreError
from mua.store.retention import pruning
from mua.store.starts import begin_part, refuse_successor
from mua.store.tables import parts, runs, tasks, texts
from mua.store.writer import Insert, Writer, execute
from mua.utils.run_identity import RUN_FILE, claim_run, known_run
from mua.view.viewed_runs import opened_runs
from tests.store_support import count, write_run


def begin(store: Store, folder: Path, step: int = 0) -> tuple[str, int]:
    return begin_part(store, folder, "test", {}, {}, from_step=step, seconds=5)[:2]


@pytest.mark.parametrize("name", ["a", " of an older version ", "a\nb"])
def test_a_folder_keeps_its_run_and_its_copy_does_not(tmp_path: Path, name: str) -> None:
    first, second = tmp_path / name, tmp_path / "copy"
    first.mkdir()
    (first / RUN_FILE).write_text("r\n")  # older versions wrote no place
    assert claim_run(first) == claim_run(first) == "r"
    shutil.copytree(first, second)
    assert claim_run(second) == claim_run(second) != "r"


@pytest.mark.parametrize("how", [shutil.copytree, shutil.move, os.rename])
def test_a_copied_or_moved_folder_is_a_run_of_its_own(tmp_path: Path, how: Any) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    with Store.open(tmp_path / "shared.sqlite") as store:
        run, _ = begin(store, first)
        row = {"run_id": run, "round": 0, "ordinal": 0, "kind": "train", "domain": "d", "task_id": "t", "size": 1,
               "state": "open", "part": 1, "made_at": 1.0}  # fmt: skip
        with store.begin() as connection:
            execute(connection, [Insert(tasks, [row])])
        how(first, second)
        other, part = begin(store, second, 3)
        assert (other != run, part) == (True, 1)
        assert begin(store, second, 4) == (other, 2), "it goes on as what it became"
        assert count(store, tasks, tasks.c.state == "cancelled") == 0
        with store.read() as connection:
            outputs = dict(connection.execute(sa.select(runs.c.id, runs.c.output)).all())
        assert outputs == {run: str(first), other: str(second)}
    if how is shutil.copytree:
        assert claim_run(first) == run


def test_a_folder_reached_by_a_link_or_restored_in_its_place_is_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    run = claim_run(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert claim_run(tmp_path / "link") == run
    shutil.copytree(tmp_path / "a", tmp_path / "backup")
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "backup").rename(tmp_path / "a")
    assert claim_run(tmp_path / "a") == run


STARTED = """
import sys, time
from pathlib import Path
from mua.store.database import Store
from mua.store.starts import begin_part
with Store.open(sys.argv[1]) as store:
    print(*begin_part(store, Path(sys.argv[1]), "test", {}, {}, from_step=0, seconds=5), flush=True)
    sys.stdin.read()
"""


@contextmanager
def started(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", STARTED, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_a_live_run_of_this_machine_is_not_taken_over(tmp_path: Path) -> None:
    with started(tmp_path) as process, Store.open(tmp_path) as store:
        with pytest.raises(StoreError, match=f"goes on in process {process.pid} on "):
            begin(store, tmp_path)
        assert count(store, parts) == 1
        process.kill()
        process.wait()
        assert begin(store, tmp_path)[1] == 2, "it was killed, and goes on at once"


def test_a_live_run_of_another_machine_is_not_taken_over_and_a_silent_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(starts, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(writer, "IDLE_SECONDS", 0.05)
    with Store.open(tmp_path) as store:
        monkeypatch.setattr("socket.gethostname", lambda: "node-a")
        run, part = begin(store, tmp_path)
        guard = lambda connection: refuse_successor(connection, run, part)  # noqa: E731
        first = Writer(store, every_seconds=0.01, name=f"{run}/{part}")
        first.guard = guard
        monkeypatch.setattr("socket.gethostname", lambda: "node-b")
        with pytest.raises(StoreError, match=r"goes on in process .* on node-a"):
            begin(store, tmp_path)
        first.close()
        assert begin(store, tmp_path) == (run, 2)
        late = Writer(store, every_seconds=0.01, name=f"{run}/{part}")
        late.guard = guard
        late.put([Insert(texts, [{"hash": "late", "body": b"x"}])])
        with pytest.raises(StoreError, match="part 2 goes on elsewhere"):
            late.close()
        assert count(store, texts) == 0


def pruned(*words: object) -> tuple[int, Any]:
    command = ["store", "prune", *map(str, words), "--keep-arrays-steps", "1", "--no-keep-successes", "--json"]
    result = CliRunner().invoke(app, command)
    return result.exit_code, json.loads(result.stdout)["protected_from_step"] if not result.exit_code else result.stderr


def test_pruning_looks_for_checkpoints_where_it_was_told_and_nowhere_else(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        folder.mkdir()
        with Store.open(folder) as store:
            write_run(store)
            with store.begin() as connection:
                connection.execute(sa.update(runs).values(output=str(run)))
    (run / "checkpoints" / "step_00000002").mkdir(parents=True)
    (run / "store_run").write_text(f"r\n{run}\n")
    assert pruned(run, "--dry-run") == (0, 2)
    assert pruned(run / "store.sqlite", "--dry-run") == (0, 2), "where the store says"
    status, said = pruned(other)
    assert (status, str(other) in said, "--output" in said) == (2, True, True)
    run.rename(tmp_path / "moved")
    assert pruned(tmp_path / "moved", "--dry-run") == (0, 2)
    assert pruned(tmp_path / "moved" / "store.sqlite")[0] == 2
    run.mkdir()  # something else stands there now
    (run / "checkpoints" / "step_00000009").mkdir(parents=True)
    assert pruned(other / "store.sqlite")[0] == 2
    assert pruned(other / "store.sqlite", "--output", tmp_path / "moved", "--dry-run") == (0, 2)
    assert pruned(other, "--no-checkpoints") == (0, None)
    with Store.open(tmp_path / "moved") as store, Writer(store) as own:
        own.put(pruning("r", StoreConfig(keep_arrays_steps=0, keep_successes=False), run / "nowhere"))
    with Store.open(tmp_path / "moved", write=False) as store, store.read() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM segments WHERE arrays IS NULL")).scalar() == 0


def test_a_moved_folder_that_went_on_is_looked_at_as_what_it_is_now(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with Store.open(tmp_path / "a") as store:
        old, _ = begin(store, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    with opened_runs([str(tmp_path / "b")]) as viewed:
        assert viewed.get().id == old
    with Store.open(tmp_path / "b") as store:
        new, _ = begin(store, tmp_path / "b", 4)
    with opened_runs([str(tmp_path / "b")]) as viewed:
        assert (viewed.get().id, viewed.get().folder) == (new, tmp_path / "b")
        assert (viewed.get(old).id, viewed.get(old).folder) == (old, None)
    assert known_run(tmp_path / "b") == new
