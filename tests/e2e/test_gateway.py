"""Two RL steps from an unmodified agent library, on the real engine and Megatron, beside the built-in agent's.

The same policy and seeds: what the built-in episode saw and sampled, the agent's session saw and sampled, token for
token, as long as both ask the same (a cut or malformed turn is answered by each in its own way). Not covered:
smolagents, whose own instructions are longer than the tiny policy's context (test_gateway_libraries.py), whether a
policy learns from an agent of its own, retail (docs/benchmarks/gateway.md).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from e2e_support import DETERMINISTIC, GROUPS, SIZE, metrics_of, mua

from mua.store.traces import read_traces
from mua.types import Trajectory
from tests.agents_support import agreed, command_of, differing

pytestmark = pytest.mark.timeout(900)


def _by_place(output: Path, step: int) -> dict[tuple[int, int], Trajectory]:
    (path,) = sorted((output / "traces").glob(f"*{step}.jsonl"))
    return {(t.ordinal, t.sample): t for t in read_traces(path)}


@pytest.mark.parametrize(
    "library",
    [
        pytest.param("openai_agents", marks=pytest.mark.slow),
        pytest.param("pydantic_ai", marks=pytest.mark.grid),
        pytest.param("langgraph", marks=pytest.mark.grid),
    ],
)
def test_the_agent_is_sampled_as_the_built_in_one_is_and_trains(
    library: str, recipe: Path, trained: Path, tmp_path: Path
) -> None:
    agent = json.dumps({"command": command_of(library)})
    mua("train", recipe, "trainer.steps=2", f"agent={agent}", *DETERMINISTIC, cwd=tmp_path)
    played = tmp_path / "out"
    mine, built_in = _by_place(played, 0), _by_place(trained, 0)
    assert mine.keys() == built_in.keys()
    assert len(mine) == GROUPS * SIZE
    for place, trajectory in built_in.items():
        assert not differing(mine[place], trajectory), place
    assert any(_turns_before(t) >= 2 for t in built_in.values()), "no episode is long enough to compare"
    steps = metrics_of(played)
    assert len(steps) == 2
    assert all(np.isfinite(step["train/grad_norm"]) for step in steps)
    for trajectory in (*mine.values(), *_by_place(played, 1).values()):
        assert trajectory.scored, trajectory.error
        assert len(trajectory.segments) == 1
        assert trajectory.metrics.get("gateway/rewritten", 0) == trajectory.metrics.get("gateway/forked", 0) == 0
        assert len(trajectory.turn_rewards) == trajectory.segments[0].turn[trajectory.segments[0].loss_mask].max() + 1


def _turns_before(trajectory: Trajectory) -> int:
    segment = trajectory.segments[0]
    return len(set(segment.turn[: agreed(trajectory)][segment.loss_mask[: agreed(trajectory)]].tolist()))
