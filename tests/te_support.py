"""The rehearsal of a layout on Transformer Engine's layers, held against a single process of local ones.

What :mod:`tests.layout_support` measures, and checkpoints that change implementation on their way. Every function runs
on ranks of ``tests/te_ranks.py``, which can build both.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mua.megatron import layouts
from tests import layout_support
from tests.layout_support import Differences, batch, held_to, of_second
from tests.megatron_support import backend, exported
from tests.te_ranks import run_with_transformer_engine

LOCAL, FUSED = "local", "transformer_engine"
REHEARSED = {
    "dense": ("single", "TP2", "PP2", "CP2", "DP2", "PP2 VPP2", "TP2 CP2", "TP2 PP2", "TP2 PP2 DP2"),
    "moe": (
        "single", "TP2 ETP1", "DP2 EP2", "TP2 EP2 ETP1", "CP2 EP2", "PP2 CP2 EP2", "TP2 PP2 EP2 ETP1",
        "TP2 PP2 DP2 EP4 ETP1",
    ),
}  # fmt: skip
"""Layouts of ``mua.megatron.layouts``."""


@dataclass(frozen=True, slots=True)
class Rehearsal(Differences):
    """Those of the layout, and of the second of two steps with a checkpoint between them."""

    from_local: float = held_to(3e-3)
    """Weights after it, absolute, where the first step was made by local layers."""
    to_local: float = held_to(3e-3)
    """Likewise where the second was."""


def rehearse(folder: Path, kind: str, name: str) -> Rehearsal:
    """Trains under the layout on Transformer Engine's layers; the largest difference over all ranks."""
    path, sizes = layout_support.model_for(folder, kind, name), layouts.sizes(name)
    checkpoints = folder / f"checkpoints {kind} {name}"
    found = run_with_transformer_engine(
        layout_support.world_of(name), rehearsed, str(path), sizes, str(checkpoints), seconds=300.0
    )
    return Rehearsal(**{key: float(max(rank[key] for rank in found)) for key in found[0]})


def rehearsed(folder: str, sizes: dict[str, Any], checkpoints: str) -> dict[str, float]:
    """What one rank finds."""
    found = layout_support.differences(folder, sizes | {"implementation": FUSED})
    for key, before, after in (("from_local", LOCAL, FUSED), ("to_local", FUSED, LOCAL)):
        where = f"{checkpoints}/{key}/step_00000001"
        found[key] = carried(folder, sizes | {"implementation": before}, sizes | {"implementation": after}, where)
    return found


def carried(folder: str, before: dict[str, Any], after: dict[str, Any], where: str) -> float:
    """Two steps with the checkpoint ``where`` between them; how far weights are from an uninterrupted run's."""
    expected = pickle.loads((Path(folder) / "reference.pickle").read_bytes())["second"]["weights"]
    with backend(Path(folder), **of_second(folder, before)) as built:
        built.train_step(batch(0), layout_support.LOSS)
        built.save(Path(where), {"next": 1})
    with backend(Path(folder), **of_second(folder, after)) as built:
        assert built.load(Path(where)) == {"next": 1}
        built.train_step(batch(1), layout_support.LOSS)
        return layout_support.furthest(exported(built), expected)
