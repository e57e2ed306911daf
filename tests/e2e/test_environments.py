"""One run over several environments, with one held out: batches, metrics and evaluations keep them apart.

The policy is far too small to win a game; only the graded desk gives it gradients. What the numbers are is covered by
tests/unit/test_evaluation_in_training.py and test_algorithms_metrics.py.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from e2e_support import evaluations_of, metrics_of, mua

from mua.store.traces import read_traces

pytestmark = pytest.mark.timeout(900)

TRAINED = {"graded_desk": 0.5, "gyms/function": 0.25, "gyms/telepathy": 0.25}
HELD_OUT = "gyms/intention"
SETTINGS = [
    'environment.name=""',
    "environment.mix={graded_desk: 2, gyms/function: 1, gyms/telepathy: 1}",
    "environment.options={telepathy.max_actions: 3}",
    "algorithm.groups_per_step=8",
    "algorithm.advantage=reinforce_plus_plus",
    "algorithm.whiten=environment",
    "trainer.steps=2",
    "trainer.evaluate_every=2",
    "trainer.evaluate_first=true",
    f"evaluation={{domains: [{HELD_OUT}], options: {{intention.max_actions: 4}}, tasks: 3, samples: 2}}",
]


@pytest.mark.slow
def test_environments_are_trained_together_and_judged_apart(recipe: Path, tmp_path: Path) -> None:
    mua("train", recipe, *SETTINGS, cwd=tmp_path)
    first, last = metrics_of(tmp_path / "out")
    for line in (first, last):
        shares = {
            name: line[f"rollout/domain/{name}/share"] for name in TRAINED if f"rollout/domain/{name}/share" in line
        }
        assert math.isclose(sum(shares.values()), 1.0)
        assert line["rollout/domain/graded_desk/reward/std"] > 0
        assert line["train/grad_norm"] > 0
        assert not [name for name in line if name.startswith(f"rollout/domain/{HELD_OUT}")]
    held_out, prefix = evaluations_of(tmp_path / "out"), "evaluation"
    for line in (held_out[0], held_out[2]):
        for name in ("validation", "held_out_validation", *(f"{domain}/validation" for domain in (*TRAINED, HELD_OUT))):
            bounds = [line[f"{prefix}/{name}_success{bound}"] for bound in ("_low", "", "_high")]
            assert 0 <= bounds[0] <= bounds[1] <= bounds[2] <= 1
            assert line[f"{prefix}/{name}_unscored"] == 0
        assert line[f"{prefix}/held_out_validation_success"] == line[f"{prefix}/{HELD_OUT}/validation_success"]
        own = [line[f"{prefix}/{domain}/validation_success"] for domain in TRAINED]
        assert math.isclose(line[f"{prefix}/validation_success"], sum(own) / len(own))  # three tasks of each
    assert {t.domain for t in read_traces(tmp_path / "out" / "traces")} <= set(TRAINED)
