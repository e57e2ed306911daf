"""Bytes that ``mua plan`` foresees for each rank equal those a real multi-process training step leaves behind.

Counted are the storages of weights, gradient buffers, main weights and moments. Activations are an estimate
(``tests/unit/test_plan_activations.py``); the allocator's rounding and CUDA's own memory are not covered.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planned_support import Case, measured, planned, write_models

QUICK = [
    Case("dense", "single"),
    Case("dense, tied", "PP2"),
    Case("dense, tied", "TP2", distributed=False),
    Case("dense", "TP2 DP2"),
    Case("dense", "PP2 VPP2 DP2", dtype="float32"),
    Case("dense", "TP2 CP2", distributed=False, dtype="float32"),
    Case("experts", "DP2 EP2"),
    Case("experts", "TP2 DP2 EP2"),
    Case("experts", "PP2 CP2 EP2", distributed=False),
]
SLOW = [
    Case("dense", "TP2 PP2 VPP2 DP2"),
    Case("dense, tied", "TP2 PP2 DP2", dtype="float32"),
    Case("dense", "PP2 FIRST1", distributed=False),
    Case("experts", "TP2 PP2 DP2 EP2 ETP1"),
    Case("experts", "TP2 PP2 DP2 EP2 ETP1", distributed=False),
    Case("experts", "TP2 DP2 EP4 ETP1", dtype="float32"),
    Case("experts", "TP2 CP2 DP2 EP2"),
]
CRITICS = [Case("dense, tied", "PP2", critic=True), Case("experts", "TP2 DP2 EP2", critic=True)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.mark.parametrize(
    "case",
    [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in (*SLOW, *CRITICS))],
    ids=lambda case: case.title,
)
def test_plan_is_exact(models: Path, case: Case) -> None:
    assert planned(models, case) == measured(models, case)
