"""What the chaos run draws, sees and counts, without a run: ``tests/e2e/test_chaos_runs.py`` has the real thing.

Does not cover how the faults strike.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mua.store.traces import TraceWriter, read_traces
from mua.types import Outcome, Provenance, Segment, Trajectory
from tools.chaos import Outcome as RunOutcome
from tools.chaos import moments, page, table
from tools.faults.account import faults_of
from tools.faults.draw import ENDS, STEPS, Fault, Kind, Mode, Phase, draw, kinds_of
from tools.faults.supervise import Pace, Struck
from tools.faults.watch import Place, Watch
from tools.faults.workshop import GROUPS, SIZE, UPDATES

SEEDS = range(200)

# ---- drawing


@pytest.mark.parametrize("mode", list(Mode))
def test_a_seed_draws_the_same_faults_in_the_order_in_which_they_strike(mode: Mode) -> None:
    for seed in SEEDS:
        faults = draw(mode, 8, seed)
        assert draw(mode, 8, seed) == faults
        assert len(faults) == 8
        assert [fault.step for fault in faults] == sorted(fault.step for fault in faults)
        for before, fault in zip([None, *faults], faults, strict=False):
            if fault.phase is Phase.RESUME:
                assert before is not None
                assert before.kind in ENDS
            assert (fault.phase is not Phase.START) or before is None


@pytest.mark.parametrize("mode", list(Mode))
def test_every_kind_and_phase_of_a_mode_is_drawn(mode: Mode) -> None:
    faults = [fault for seed in SEEDS for fault in draw(mode, 8, seed)]
    assert {fault.kind for fault in faults} == set(kinds_of(mode, disk=True))
    assert {fault.phase for fault in faults} == set(Phase)
    assert {fault.step for fault in faults} == set(range(STEPS + 1))


def test_no_kind_comes_again_before_all_have_come() -> None:
    kinds = kinds_of(Mode.SYNC, disk=True)
    for seed in SEEDS:
        assert {fault.kind for fault in draw(Mode.SYNC, len(kinds), seed)} == set(kinds)


def test_without_a_disk_of_its_own_none_is_filled() -> None:
    assert Kind.DISK not in {fault.kind for seed in SEEDS for fault in draw(Mode.SYNC, 9, seed, disk=False)}


# ---- watching


@pytest.fixture
def watched(tmp_path: Path) -> tuple[Watch, list[Place], Callable[[str, str], None]]:
    """A watch of an attempt, the places it has seen, and a function that appends a line to a file of the run."""
    output, places = tmp_path / "out", []
    (output / "logs").mkdir(parents=True)
    (output / "checkpoints").mkdir()

    def write(name: str, line: str) -> None:
        with (tmp_path / name).open("a") as file:
            file.write(line)

    return Watch(output, tmp_path / "stderr", places.append), places, write


def test_places_follow_what_the_run_writes(
    watched: tuple[Watch, list[Place], Callable[[str, str], None]], tmp_path: Path
) -> None:
    watch, places, write = watched
    checkpoints = tmp_path / "out" / "checkpoints"

    def seen() -> list[tuple[Phase, int]]:
        watch.look()
        new = [(place.phase, place.step) for place in places]
        places.clear()
        return new

    engine, metrics = "out/logs/engine-0.log", "out/metrics.jsonl"
    assert seen() == [(Phase.START, 0)]
    write(engine, "Cache flushed successfully!\nPrefill batch, #new-seq: 1, #new-token: 1, x\n")
    assert seen() == [], "a probe is no episode"
    write(engine, "Prefill batch, #new-seq: 2, #new-token: 88, x\n")
    assert seen() == [(Phase.ROLLOUT, 0)]
    write("stderr", "  episodes of step 0 8/8, 1")
    assert seen() == [], "half a line"
    write("stderr", " s\n")
    assert seen() == [(Phase.TRAIN, 0)]
    write(engine, "Cache flushed successfully!\n")
    assert seen() == [(Phase.SYNC, 0)]
    write(metrics, '{"step": 0, "loss": 1}\n')
    assert seen() == [(Phase.ROLLOUT, 1)], "no checkpoint is due"
    write("stderr", "  episodes of step 1 8/8, 1 s\n")
    write(metrics, '{"step": 1, "loss": 1}\n')
    (checkpoints / ".step_00000002.partial").mkdir()
    assert seen() == [(Phase.TRAIN, 1), (Phase.SAVE, 1)]
    (checkpoints / ".step_00000002.partial").rename(checkpoints / "step_00000002")
    assert seen() == [(Phase.ROLLOUT, 2)]


def test_an_attempt_that_finds_a_checkpoint_resumes_and_ignores_old_lines(tmp_path: Path) -> None:
    output = tmp_path / "out"
    (output / "logs").mkdir(parents=True)
    (output / "checkpoints" / "step_00000002").mkdir(parents=True)
    (output / "logs" / "engine-0.log").write_text("Prefill batch, #new-seq: 2, #new-token: 88, x\n")
    (output / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n')
    watch = Watch(output, tmp_path / "stderr", lambda place: None)
    watch.look()
    assert (watch.place.phase, watch.place.step) == (Phase.RESUME, 2)
    (output / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    watch.look()
    assert watch.place.phase is Phase.RESUME


# ---- counting

SAMPLED = np.array([3, 4], dtype=np.int32)


def episode(ordinal: int, sample: int) -> Trajectory:
    segment = Segment(
        ids=SAMPLED + ordinal,
        provenance=np.full(2, Provenance.SAMPLED, dtype=np.uint8),
        logprobs=np.array([-0.5, -0.25], dtype=np.float32),
        version=np.zeros(2, dtype=np.int32),
        turn=np.zeros(2, dtype=np.int32),
    )
    return Trajectory(f"task {ordinal}", ordinal, sample, [segment], [0.5], 0.5, False, Outcome.USER_STOP)


@pytest.fixture
def finished(tmp_path: Path) -> tuple[Path, Path]:
    """Outputs of a run under faults and of the undisturbed one, alike."""
    for name in ("faults", "undisturbed"):
        output = tmp_path / name
        writer = TraceWriter(output / "traces")
        for step in range(STEPS):
            ordinals = range(step * GROUPS, (step + 1) * GROUPS)
            writer.write(step, [episode(ordinal, sample) for ordinal in ordinals for sample in range(SIZE)])
        line = {
            "rollout/tokens/sampled": 2.0,
            "rollout/trajectories/count": GROUPS * SIZE,
            "mismatch/version_lag/max": 0,
        }
        line |= {"policy/loss": 0.5}
        lines = [json.dumps({"step": step} | line) for step in range(STEPS)]
        (output / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        state = {"extra": {"step": STEPS, "position": {"next": STEPS * GROUPS}}, "steps": STEPS * UPDATES}
        folder = output / "checkpoints" / f"step_{STEPS:08d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps(state))
        (output / "hf").mkdir()
        (output / "hf" / "model.safetensors").write_bytes(b"weights")
    return tmp_path / "faults", tmp_path / "undisturbed"


def rewrite(output: Path, step: int, change: Callable[[list[Trajectory]], list[Trajectory]]) -> None:
    writer = TraceWriter(output / "traces")
    writer.write(step, change(list(read_traces(writer.path(step)))))


def found(finished: tuple[Path, Path]) -> str:
    return "; ".join(faults_of(*finished, bits=True, staleness=0))


def test_a_run_like_the_undisturbed_one_has_no_fault(finished: tuple[Path, Path]) -> None:
    assert found(finished) == ""


def test_a_lost_episode_is_found(finished: tuple[Path, Path]) -> None:
    rewrite(finished[0], 2, lambda all_: all_[1:])
    assert f"episode 0 of task {2 * GROUPS} is in no step" in found(finished)


def test_an_unscored_episode_is_lost(finished: tuple[Path, Path]) -> None:
    rewrite(finished[0], 1, lambda all_: [replace(all_[0], outcome=Outcome.ENGINE_ERROR), *all_[1:]])
    assert f"episode 0 of task {GROUPS} is lost: engine_error" in found(finished)


def test_an_episode_trained_twice_is_found(finished: tuple[Path, Path]) -> None:
    rewrite(finished[0], 3, lambda all_: [*all_, episode(0, 0)])
    assert "episode 0 of task 0 is trained twice: in steps 0 and 3" in found(finished)


def test_another_task_in_the_place_of_one_is_found(finished: tuple[Path, Path]) -> None:
    rewrite(finished[0], 0, lambda all_: [replace(all_[0], task_id="another"), *all_[1:]])
    assert "episode 0 of task 0 is another, not task 0" in found(finished)


def test_traces_of_another_rollout_than_was_trained_are_found(finished: tuple[Path, Path]) -> None:
    def longer(all_: list[Trajectory]) -> list[Trajectory]:
        return [replace(all_[0], segments=all_[0].segments * 2), *all_[1:]]

    rewrite(finished[0], 4, longer)
    assert f"step 4 sampled {2 * GROUPS * SIZE} tokens, its traces hold {2 * GROUPS * SIZE + 2}" in found(finished)
    assert f"episode 0 of task {4 * GROUPS} in step 4 differs" in found(finished)


def test_a_step_missing_or_repeated_in_the_metrics_is_found(finished: tuple[Path, Path]) -> None:
    path = finished[0] / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], lines[1], *lines[2:]]))
    assert "metrics.jsonl has the steps [0, 1, 1, 2, 3, 4, 5]" in found(finished)


def test_an_optimizer_step_too_many_is_found(finished: tuple[Path, Path]) -> None:
    path = finished[0] / "checkpoints" / f"step_{STEPS:08d}" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"steps": STEPS * UPDATES + 1}))
    assert "optimizer steps, not" in found(finished)


def test_weights_that_differ_by_a_bit_and_metrics_are_found(finished: tuple[Path, Path]) -> None:
    (finished[0] / "hf" / "model.safetensors").write_bytes(b"weightt")
    path = finished[0] / "metrics.jsonl"
    path.write_text(path.read_text().replace("0.5", "0.50000001", 1))
    assert "model.safetensors differs" in found(finished)
    assert "step 0: policy/loss differ from the undisturbed run" in found(finished)
    assert faults_of(*finished, bits=False, staleness=0) == []


def test_what_an_interrupted_save_leaves_behind_is_found(finished: tuple[Path, Path]) -> None:
    (finished[0] / "checkpoints" / ".step_00000004.partial").mkdir()
    assert ".step_00000004.partial is left behind" in found(finished)


# ---- reporting


def struck(kind: Kind, phase: Phase, survived: str, lost: float) -> Struck:
    fault = Fault(kind, phase, 2, 0.5, 1)
    return Struck(fault, Place(phase, 2, 0.0), 10.0, "so", 1.0, survived, lost)


def test_the_table_tells_kinds_modes_ways_and_seconds() -> None:
    runs = [
        RunOutcome(Mode.SYNC, 1, 2, [struck(Kind.DISK, Phase.SAVE, "room was made", 4.0)] * 2, 2, 60.0, []),
        RunOutcome(Mode.RANKS, 2, 1, [struck(Kind.DISK, Phase.SYNC, "the run went on", 1.0)], 1, 60.0, ["lost"]),
    ]
    assert "| full disk | 2 | 1 | room was made (2), the run went on (1) | 4, 4 |" in table(runs)
    assert moments(runs) == "sync 1, checkpoint 2"
    text = page(runs, "python -m tools.chaos", 120.0)
    assert "3 faults struck 2 runs of 6 steps within 2 minutes, 1.5 each;\n1 runs failed." in text
    assert f"- `{runs[1].command}`: lost" in text
    assert "bit for bit" not in text


def test_seconds_are_told_by_the_way_of_the_undisturbed_run() -> None:
    reached = {(0, Phase.START.order): 0.0, (0, Phase.ROLLOUT.order): 10.0, (0, Phase.TRAIN.order): 12.0}
    pace = Pace(reached | {(1, Phase.ROLLOUT.order): 13.0}, end=20.0)
    assert pace.length(Phase.ROLLOUT, 0) == 2.0
    assert pace.length(Phase.RESUME, 1) == 10.0
    assert pace.position(Place(Phase.ROLLOUT, 0, 100.0), 101.5) == 11.5
    assert pace.position(Place(Phase.ROLLOUT, 0, 100.0), 190.0) == 12.0
    assert pace.position(Place(Phase.RESUME, 1, 100.0), 105.0) == 13.0
