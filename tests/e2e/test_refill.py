"""Steps that choose their groups, with the real engine: refilled under a curriculum, resumed, replayed; oversampled.

The range filter drops groups whose graded rewards are too close, so that some steps roll out more groups than they
train. Does not cover whether refilling or a curriculum learns better; what steps may take is a property test
(tests/unit/test_rollout_scheduler.py).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from e2e_support import DETERMINISTIC, GROUPS, SIZE, killed, metrics_of, mua, replayed

from mua.store.traces import read_traces

pytestmark = pytest.mark.timeout(900)

STEPS, EXTRA, LEAST = 4, 12, 0.025
"""About four groups in ten are good: of the steps some need a refill, and some find what they need."""
REFILL = (
    f"trainer.steps={STEPS}",
    "environment.name=few_desk",
    f"algorithm.filters=[{{kind: range, minimum: {LEAST}}}]",
    f"algorithm.refill.max_extra_groups={EXTRA}",
    "algorithm.curriculum.kind=success_rate",
    "algorithm.shaping.malformed_turn=0.1",
    *DETERMINISTIC,
)


def rewards_by_group(path: Path) -> list[tuple[int, list[float]]]:
    """(ordinal, rewards) of every group of a trace file, in its order."""
    groups: dict[int, list[float]] = {}
    for trajectory in read_traces(path):
        groups.setdefault(trajectory.ordinal, []).append(trajectory.reward)
    return list(groups.items())


def told(output: Path) -> list[tuple[int, int, str, list[dict]]]:
    return [(t.ordinal, t.sample, t.task_id, t.messages) for t in read_traces(output / "traces")]


@pytest.mark.slow
def test_steps_are_refilled_and_a_killed_run_continues_with_the_same_tasks(recipe: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    mua("train", recipe, *REFILL, cwd=whole)
    lines = metrics_of(whole / "out")
    assert any(line["rollout/filters/refilled"] > 0 for line in lines), "no step needed a refill; change LEAST"
    assert any(line["rollout/filters/missing"] == 0 for line in lines), "no step was filled; change LEAST"
    next_ordinal = 0
    for step, line in enumerate(lines):
        groups = rewards_by_group(whole / "out" / "traces" / f"step_{step:06d}.jsonl")
        assert [ordinal for ordinal, _ in groups] == list(range(next_ordinal, next_ordinal + len(groups)))
        next_ordinal += len(groups)
        good = sum(max(rewards) - min(rewards) >= LEAST for _, rewards in groups)
        assert line["rollout/filters/dropped"] == len(groups) - good
        assert line["rollout/filters/refilled"] == len(groups) - GROUPS
        assert line["rollout/filters/missing"] == GROUPS - good
        assert line["rollout/filters/extra_episodes"] == SIZE * line["rollout/filters/dropped"]
        assert good == GROUPS or len(groups) == GROUPS + EXTRA
        assert line["rollout/off_policy_level/max"] == 0
        assert line["rollout/curriculum/known"] == min(1.0, next_ordinal / 5)

    two_steps = cut / "out" / "checkpoints" / "step_00000002"
    killed("train", recipe, "rollout.concurrency=1", *REFILL, cwd=cut, when=two_steps.is_dir)
    assert len(metrics_of(cut / "out")) < STEPS
    mua("train", recipe, *REFILL, cwd=cut)
    assert told(cut / "out") == told(whole / "out")
    weights = Path("out") / "hf" / "model.safetensors"
    assert (cut / weights).read_bytes() == (whole / weights).read_bytes()
    names = ("filters/", "curriculum/", "tokens")
    for ours, theirs in zip(metrics_of(cut / "out"), lines, strict=True):
        ours, theirs = ({k: v for k, v in line.items() if k.startswith(names)} for line in (ours, theirs))
        assert ours == theirs
    refilled = max(range(STEPS), key=lambda step: lines[step]["rollout/filters/refilled"])
    assert replayed(cut / "out", refilled, cwd=cut)["groups"] == GROUPS - lines[refilled]["rollout/filters/missing"]


@pytest.mark.parametrize(
    "staleness", [pytest.param(0, marks=pytest.mark.grid), pytest.param(1, marks=pytest.mark.slow)]
)
def test_an_oversampled_run_trains_no_group_twice_and_nothing_stale(
    recipe: Path, tmp_path: Path, staleness: int
) -> None:
    chosen = ["trainer.steps=3", "algorithm.refill.oversample=2", f"trainer.max_staleness={staleness}"]
    if staleness:  # and what would be too old goes on for a version more
        chosen += ["algorithm.correction=truncate", "algorithm.refill.carry_versions=1"]
    mua("train", recipe, *chosen, "rollout.concurrency=4", cwd=tmp_path)
    lines = metrics_of(tmp_path / "out")
    assert all(line["rollout/off_policy_level/max"] <= 2 * staleness for line in lines)
    assert sum(line["rollout/filters/cancelled"] for line in lines) > 0
    assert (sum(line["rollout/filters/carried"] for line in lines) > 0) == bool(staleness)
    for step, line in enumerate(lines):
        rolled_out = rewards_by_group(tmp_path / "out" / "traces" / f"step_{step:06d}.jsonl")
        assert len(rolled_out) - line["rollout/filters/dropped"] == GROUPS - line["rollout/filters/missing"]
    seen = Counter((t.ordinal, t.sample) for t in read_traces(tmp_path / "out" / "traces"))
    assert set(seen.values()) == {1}
