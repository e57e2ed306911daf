"""Objectives that look at whole sequences, and terms beside them, under layouts that cut sequences up.

Real Megatron on gloo. Does not cover the objectives' own formulas (tests/unit/test_algorithms_objectives.py) or the
layouts themselves (test_megatron_layouts.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mua.algorithms.losses import PolicyLoss
from mua.megatron import layouts
from tests.distributed import run_on_workers
from tests.layout_support import world_of
from tests.megatron_support import assert_gradients_alike, backend, gradients, make_batch, write_model

LOSSES = {
    "grpo": PolicyLoss(0.2, 0.3, 0.0),
    "gspo": PolicyLoss(0.2, 0.3, 0.0, objective="gspo"),
    "entropy": PolicyLoss(0.2, 0.3, 0.0, objective="cispo", entropy_coefficient=0.05),
}


def one_step(folder: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Loss, gradient norm and gradients of every loss's first step."""
    found = {}
    for name, loss in LOSSES.items():
        with backend(Path(folder), distributed_optimizer=False, **sizes) as built:
            metrics = built.train_step(make_batch(), loss)
            found[name] = {
                "loss": metrics["policy/loss"],
                "norm": metrics["policy/grad_norm"],
                "gradients": gradients(built),
            }
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, layers=2)
    return path


@pytest.fixture(scope="module")
def single(folder: Path) -> dict[str, Any]:
    (found,) = run_on_workers(1, one_step, str(folder), {})
    return found


@pytest.mark.parametrize("name", ["CP2", pytest.param("TP2 DP2", marks=pytest.mark.slow)])
def test_a_layout_is_a_single_process(name: str, folder: Path, single: dict[str, Any]) -> None:
    sizes = layouts.sizes(name)
    for rank in run_on_workers(world_of(name), one_step, str(folder), sizes):
        for loss, expected in single.items():
            found = rank[loss]
            assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
            assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
            assert_gradients_alike(found["gradients"], expected["gradients"])


def test_a_gradient_of_gspo_differs_from_one_of_grpo(folder: Path, single: dict[str, Any]) -> None:
    """The comparison above could not tell them apart if the sequence's mean were not used."""
    assert single["gspo"]["loss"] != pytest.approx(single["grpo"]["loss"], abs=1e-3)
    assert single["gspo"]["norm"] != pytest.approx(single["grpo"]["norm"], rel=1e-3)
