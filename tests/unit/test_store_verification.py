"""``verify`` finds a planted fault of each kind and nothing in a whole store; pruning; exports; ``mua store``;
what ``mua view`` asks, of both databases.

Not here: stores that runs of the trainer wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from mua.cli import app
from mua.config.storage import StoreConfig
from mua.store.blobs import compress, pack_arrays
from mua.store.database import Store
from mua.store.queries import TrajectoryFilter, list_steps, trajectory_ids
from mua.store.retention import prune, pruning
from mua.store.tables import parts, segments, steps, trajectories, uses
from mua.store.traces import export_parquet, read_traces
from mua.store.trajectories import read_trajectories
from mua.store.verification import verify
from mua.store.writer import Insert, Writer, execute
from mua.types import Trajectory
from mua.view.page_answers import Answers, as_bytes
from mua.view.viewed_runs import ViewedRuns
from tests.store_support import count, played, spoil, write_run
from tests.unit.test_store import same, store

__all__ = ["store"]

ONE = "r/1/0/0/0/1"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("template") / "store.sqlite"
    with Store.open(path) as made:
        write_run(made)
        made.compact()
        with made.begin() as connection:
            connection.exec_driver_sql("SELECT 1")
    return path.read_bytes()


@pytest.fixture
def filled(template: bytes, tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "store.sqlite").write_bytes(template)
    with Store.open(tmp_path) as opened:
        yield opened


def found(opened: Store) -> list[str]:
    with opened.read() as connection:
        return [str(finding) for finding in verify(connection)]


def whole(opened: Store) -> dict[str, Trajectory]:
    with opened.read() as connection:
        ids = trajectory_ids(connection, TrajectoryFilter())
        return dict(zip(ids, read_trajectories(connection, ids), strict=True))


def test_whole_store_has_no_faults(store: Store) -> None:
    write_run(store)
    write_run(store, "s", 1)
    assert found(store) == []
    page = (Path(__file__).parents[2] / "docs" / "store.md").read_text().replace("'r7'", "'r'")
    queries = re.findall(r"^SELECT[^;]*;", page, re.MULTILINE)
    assert len(queries) == 4
    with store.read() as connection:
        assert all(connection.exec_driver_sql(query).all() for query in queries), "the page's questions have answers"
    assert len(whole(store)) == 10
    same(whole(store)["s/1/0/0/1/1"], played(0, 1, 0, success=True))


def test_what_the_view_asks_is_answered_by_both_databases(store: Store) -> None:
    write_run(store)
    write_run(store, "s", 2)
    answers = Answers(ViewedRuns([(store, None)], None))

    def ask(path: str, **given: str) -> Any:
        return json.loads(as_bytes(answers.answer(path, {"run": "r", **given})))

    assert [row["key"] for row in ask("runs")["runs"]] == ["r", "s"]
    whole = ask("run")
    assert whole["outcomes"] == [{"evaluation": False, "outcome": "user_stop", "scored": True, "episodes": 8, "won": 4}]
    assert whole["kinds"][0]["won"] == 4
    assert whole["tools"][0]["calls"] == 8
    assert [row["trajectories"] for row in ask("steps")["steps"]] == [2] * 4
    assert len(ask("step", step="2")["groups"]) == 1
    for given in (
        {"success": "true"}, {"text": "LOOK", "success": "true"}, {"said": "hello", "success": "true"},
        {"tool_error": "false", "order": "reward", "success": "true"}, {"order": "gap", "success": "true"},
    ):  # fmt: skip
        assert ask("trajectories", **given)["total"] == 4, given
    assert ask("trajectories", kind="none")["total"] == ask("trajectories", tool_error="true")["total"] == 0
    ask("trajectories", suspect="any", order="seconds")
    assert len(ask("trajectory", id=ONE)["requests"]) == 3
    assert len(ask("tokens", id=ONE, segment="0")["columns"]["weights"]) == 12
    assert ask("compare", a="r", b="s", ra="0", rb="0")["common"] == 2
    assert ask("changes")["step"] == 3


_NAN = pack_arrays({"weights": np.full(12, np.nan, np.float32)})
_SHORT = pack_arrays({"weights": np.zeros(11, np.float32)})
_ALL = pack_arrays({"weights": np.ones(12, np.float32)})
PLANTED = {
    "trajectory deleted": ("names no row of trajectories", "DELETE FROM trajectories WHERE id = ?", ONE),
    "task deleted": ("names no row of tasks", "DELETE FROM tasks WHERE ordinal = ?", 0),
    "text deleted": ("names no row of texts", "DELETE FROM texts WHERE hash = (SELECT min(reply) FROM requests)"),
    "message deleted": (
        "is not in the store",
        "DELETE FROM texts WHERE hash NOT IN (SELECT reply FROM requests WHERE reply IS NOT NULL) "
        "AND hash NOT IN (SELECT result FROM tool_calls)",
    ),
    "text exchanged": ("its content has another hash", "UPDATE texts SET body = ?", compress(b'"other"')),
    "part unknown": ("names no row of parts", "UPDATE trajectories SET part = 9 WHERE id = ?", ONE),
    "segment deleted": ("names no segment of this store", "DELETE FROM segments WHERE trajectory_id = ?", ONE),
    "blob damaged": ("arrays: damaged", "UPDATE segments SET arrays = x'28b52ffd00' WHERE trajectory_id = ?", ONE),
    "blob lost": ("has no arrays, and was not pruned", "UPDATE segments SET arrays = NULL"),
    "length wrong": ("of 11 tokens", "UPDATE segments SET tokens = 11 WHERE trajectory_id = ?", ONE),
    "count wrong": ("its row says 5", "UPDATE segments SET sampled_tokens = 5 WHERE trajectory_id = ?", ONE),
    "version wrong": ("says versions", "UPDATE trajectories SET version_high = 7 WHERE id = ?", ONE),
    "outcome wrong": ("do not agree", "UPDATE trajectories SET scored = 0 WHERE id = ?", ONE),
    "turns wrong": ("turn rewards for 3 turns", "UPDATE trajectories SET turns = 3 WHERE id = ?", ONE),
    "messages damaged": ("messages: damaged", "UPDATE trajectories SET messages = x'00' WHERE id = ?", ONE),
    "key wrong": ("not that of its episode key", "UPDATE trajectories SET attempt = 4 WHERE id = ?", ONE),
    "experts exchanged": ("expert choices do not fit", "UPDATE segments SET experts = arrays"),
    "range wrong": ("tokens [3, 60)", "UPDATE requests SET token_end = 60 WHERE role = 'policy'"),
    "range and count": ("has 9 new tokens", "UPDATE requests SET completion_tokens = 9 WHERE role = 'policy'"),
    "follows nobody": ("goes on from request 5", "UPDATE requests SET follows = 5 WHERE number = 1"),
    "gap of steps": ("step 3 stands where 2 should", "DELETE FROM steps WHERE step = 2"),
    "open step": ("is open, and later ones are there", "UPDATE steps SET state = 'open' WHERE step = 1"),
    "part missing": ("not counted from 1", "UPDATE parts SET part = 2"),
    "weights not finite": ("not finite", "UPDATE uses SET arrays = ?", _NAN),
    "weights too short": ('{"weights": 11} for a segment of 12', "UPDATE uses SET arrays = ?", _SHORT),
    "trained on the prompt": ("did not sample", "UPDATE uses SET arrays = ?, tokens = 12", _ALL),
    "tokens of a use": ("says 3 trained tokens", "UPDATE uses SET tokens = 3 WHERE trajectory_id = ?", ONE),
    "episode not done": ("1 of 2 episodes done", "UPDATE episodes SET state = 'open' WHERE ordinal = 1 AND sample = 0"),
    "episode lost": ("with 1 of 1 episodes", "DELETE FROM episodes WHERE ordinal = 1 AND sample = 0"),
    "episode without result": ("names no trajectory", "UPDATE episodes SET trajectory_id = NULL WHERE sample = 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_found(filled: Store, name: str) -> None:
    text, statement, *values = PLANTED[name]
    spoil(filled, statement, *values)
    assert any(text in line for line in found(filled)), found(filled)


def test_lost_steps_of_an_earlier_start_are_no_gap(filled: Store) -> None:
    again = {"run_id": "r", "part": 2, "from_step": 2, "started_at": 5.0}
    step = {"run_id": "r", "step": 2, "part": 2, "state": "done", "version": 2, "started_at": 5.0}
    with filled.begin() as connection:
        execute(connection, [Insert(parts, [again]), Insert(steps, [step])])
        assert [row["lost"] for row in list_steps(connection, "r")] == [False, False, True, False, True]
    assert found(filled) == []


def test_pruning_keeps_what_rules_and_checkpoints_keep(filled: Store) -> None:
    before = whole(filled)
    rules = StoreConfig(keep_arrays_steps=1, keep_experts_steps=1)
    with filled.read() as connection:
        dry = prune(connection, "r", rules, protect=2, dry=True)
    assert whole(filled).keys() == before.keys()
    with filled.begin() as connection:
        dropped = prune(connection, "r", rules, protect=2)
    assert dropped == dry
    assert dropped.arrays == ["r/1/0/0/0/1", "r/1/0/1/0/1"]  # the successes of these steps stay
    assert dropped.experts == ["r/1/0/0/1/1", "r/1/0/1/1/1"]
    assert dropped.uses == 4
    assert found(filled) == []
    with filled.read() as connection:
        kept = trajectory_ids(connection, TrajectoryFilter(kept=True))
    assert len(kept) == 6
    assert count(filled, trajectories) == 8, "rows of what happened stay"
    assert count(filled, uses) == 8
    with filled.begin() as connection:
        assert not prune(connection, "r", rules, protect=2), "twice drops nothing more"
        assert prune(connection, "r", StoreConfig(keep_arrays_steps=1, keep_successes=False)).uses == 2
    assert count(filled, segments, segments.c.arrays.is_not(None)) == 2
    with pytest.raises(Exception, match="tokens were pruned"):
        whole(filled)


def test_pruning_of_a_run_goes_through_its_writer(filled: Store, tmp_path: Path) -> None:
    for step in (2, 4):
        (tmp_path / "checkpoints" / f"step_{step:08}").mkdir(parents=True)
    rules = StoreConfig(keep_arrays_steps=0, keep_successes=False)
    with Writer(filled) as writer:
        writer.put([Insert(parts, [{"run_id": "r", "part": 2, "from_step": 4, "started_at": 9.0}])])
        writer.put(pruning("r", rules, tmp_path))
        assert pruning("r", StoreConfig(), tmp_path) == []
    assert found(filled) == []
    with filled.read() as connection:
        kept = trajectory_ids(connection, TrajectoryFilter(kept=True))
    assert {name.split("/")[3] for name in kept} == {"2", "3"}, "the checkpoint after two steps may be gone on from"


def test_pruning_leaves_groups_that_no_step_has_taken(filled: Store) -> None:
    spoil(filled, "UPDATE tasks SET state = 'complete', taken_step = NULL WHERE ordinal = 0")
    spoil(filled, "DELETE FROM uses WHERE trajectory_id LIKE 'r/1/0/0/%'")
    with filled.begin() as connection:
        dropped = prune(connection, "r", StoreConfig(keep_arrays_steps=0, keep_successes=False))
    assert len(dropped.arrays) == 6
    assert not any(name.startswith("r/1/0/0/") for name in dropped.arrays)


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["store", *map(str, words)], catch_exceptions=False)
    return result.exit_code, result.output


def test_export_comes_back(filled: Store, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert run("export", tmp_path, out, "--only", "success=true")[0] == 0
    exported = list(read_traces(out))
    stored = [t for t in whole(filled).values() if t.success]
    assert len(exported) == 4
    for ours, theirs in zip(stored, exported, strict=True):
        same(ours, theirs)
    export_parquet(tmp_path / "out.parquet", stored)
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    for ours, row in zip(stored, table, strict=True):
        assert np.array_equal(np.array(row["logprobs"][0], np.float32), ours.segments[0].logprobs)
        assert np.array_equal(np.array(row["experts"][0], np.uint8), ours.segments[0].experts)
        assert json.loads(row["messages_json"]) == ours.messages
        assert row["reward"] == ours.reward
        assert json.loads(row["task_json"]) == ours.task_id
    status, output = run("export", tmp_path, tmp_path / "out.csv")
    assert status == 2
    assert ".jsonl or .parquet" in output


def test_what_was_exported_can_be_imported(filled: Store, tmp_path: Path) -> None:
    assert run("export", tmp_path, tmp_path / "step_000007.jsonl")[0] == 0
    other = tmp_path / "other.sqlite"
    status, output = run("import", other, tmp_path / "step_000007.jsonl", "--run", "again")
    assert status == 0, output
    with Store.open(other) as imported:
        assert found(imported) == []
        for ours, theirs in zip(whole(filled).values(), whole(imported).values(), strict=True):
            same(ours, theirs)
    dry = json.loads(run("prune", other, "--keep-arrays-steps", 0, "--no-keep-successes", "--dry-run", "--json")[1])
    assert dry["dropped"]["arrays"] == 8, "what was imported has no steps, but the one that took it"
    status, output = run("import", other, tmp_path / "step_000007.jsonl", "--run", "again")
    assert status == 2
    assert "give --run an id that the store does not have" in output
    assert run("import", tmp_path / "o.sqlite", tmp_path / "nothing", "--run", "x")[0] == 2


def test_command_line(filled: Store, tmp_path: Path) -> None:
    assert json.loads(run("ls", tmp_path, "--json")[1])[0]["trajectories"] == 8
    for table, rows in {"runs": 1, "steps": 4, "tasks": 4, "trajectories": 8}.items():
        status, output = run("ls", tmp_path, table)
        assert status == 0
        assert f"{rows} {table}" in output
    listed = json.loads(run("ls", tmp_path, "trajectories", "--only", "step=2", "--only", "success=true", "--json")[1])
    assert [row["id"] for row in listed] == ["r/1/0/2/1/1"]
    assert listed[0]["trained"] == 1
    assert json.loads(run("verify", tmp_path, "--json")[1])["faults"] == []
    assert run("verify", tmp_path)[0] == 0
    dry = json.loads(run("prune", tmp_path, "--keep-arrays-steps", 2, "--no-checkpoints", "--dry-run", "--json")[1])
    assert dry["dropped"] == {"experts": 2, "arrays": 2, "uses": 4}
    assert dry["bytes_before"] == dry["bytes_after"]
    filled.close()
    done = json.loads(run("prune", tmp_path, "--keep-arrays-steps", 2, "--no-checkpoints", "--json")[1])
    assert done["bytes_after"]["tokens"] < done["bytes_before"]["tokens"]
    with Store.open(tmp_path) as again:
        spoil(again, "DELETE FROM trajectories WHERE id = ?", ONE)
    status, output = run("verify", tmp_path)
    assert status == 1
    assert ONE in output
