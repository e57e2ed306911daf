"""Trains a tiny model under a layout and measures how far that is from a single process.

The run is the same everywhere: :data:`STEPS` optimizer steps on packed rows of unequal length with masks, each on its
own batch, then one step on a single short sequence, which leaves most ranks without any.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from mua.algorithms.losses import PolicyLoss
from mua.config.schema import MegatronConfig
from mua.megatron import layouts
from mua.types import Float32Array, TrainBatch
from tests.distributed import run_on_workers
from tests.megatron_support import OPTIMIZER, backend, exported, gradients, make_batch, write_model

STEPS = 3
TEMPERATURE = 0.8
LOSS = PolicyLoss(clip_low=0.2, clip_high=0.3, kl_coefficient=0.0)
ADAM = OPTIMIZER.model_copy(update={"epsilon": 1e-8})
LENGTHS = (17, 5, 40, 2, 23, 31, 8, 12, 29, 33, 9)
"""They fill four rows of 64, so that up to four data-parallel ranks have the rows of a single process."""

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"layers": 4},
    "dense, 6 layers": {"layers": 6},
    "moe": {"layers": 4, "experts": 8},
    "moe, 6 layers": {"layers": 6, "experts": 8},
}


@dataclass(frozen=True, slots=True)
class Differences:
    """The largest over all ranks, tensors and steps; each with the bound it is held to."""

    loss: float
    """Absolute, over the three steps."""
    gradient: float
    """Relative to the largest gradient, first step."""
    norm: float
    """Gradient norm, relative, first step."""
    weights: float
    """Absolute, after the last step, at a learning rate of 1e-2."""
    logprobs: float
    """Absolute, before the first step."""
    distributed_loss: float
    """As ``loss``, with the distributed optimizer and, for experts, their balancing losses."""
    distributed_weights: float
    """As ``weights``, in that second run."""
    alone: float
    """Loss of the step on a single sequence, absolute, both runs. It comes last, when weights have drifted apart."""
    load: float
    """Of the experts' load and balancing losses, relative, first step of the second run; 0 without experts."""

    def refused(self) -> dict[str, float]:
        """Those beyond their bound; a difference that is no number is beyond every bound."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if not value <= BOUNDS[name]}


BOUNDS = {
    "loss": 1e-5,
    "gradient": 1e-5,
    "norm": 1e-5,
    "weights": 3e-3,
    "logprobs": 2e-5,
    "distributed_loss": 1e-5,
    "distributed_weights": 3e-3,
    "alone": 1e-4,
    "load": 1e-5,
}


def model_of(kind: str, name: str) -> str:
    """Which of :data:`MODELS` the layout ``name`` divides; ``kind`` is ``dense`` or ``moe``."""
    return f"{kind}, 6 layers" if {"FIRST4", "PP4 FIRST2"} & {name[-6:], name[:10]} else kind


def write_references(folder: Path) -> None:
    """Every model of :data:`MODELS`, and what a single process makes of it."""
    for name, shape in MODELS.items():
        write_model(folder / name, **shape)
        (result,) = run_on_workers(1, single, str(folder / name))
        (folder / name / "reference.pickle").write_bytes(pickle.dumps(result))


def measure(folder: Path, kind: str, name: str, **settings: Any) -> Differences:
    """Runs a layout of :mod:`mua.megatron.layouts`, with more settings, on as many processes as it has ranks."""
    sizes = layouts.sizes(name)
    world = MegatronConfig(**sizes).world_size
    path = str(folder / model_of(kind, name))
    found: list[dict[str, float]] = run_on_workers(world, differences, path, sizes | settings, seconds=200.0)
    return Differences(**{key: float(max(rank[key] for rank in found)) for key in found[0]})


def single(folder: str) -> dict[str, Any]:
    """What a single process finds, without and with the distributed optimizer and balancing losses."""
    return {"plain": _train(folder, {}, distributed_optimizer=False), "second": _second(folder, {})}


def differences(folder: str, sizes: dict[str, Any]) -> dict[str, float]:
    """What one rank finds, as differences to the single process."""
    references = pickle.loads((Path(folder) / "reference.pickle").read_bytes())
    plain, reference = _train(folder, sizes, distributed_optimizer=False), references["plain"]
    second, expected = _second(folder, sizes), references["second"]
    largest = max(np.abs(values).max() for values in reference["gradients"].values())
    return {
        "loss": _apart(plain["loss"][:STEPS], reference["loss"][:STEPS]),
        "gradient": _furthest(plain["gradients"], reference["gradients"]) / float(largest),
        "norm": max(_norms_apart(plain, reference), _norms_apart(second, expected)),
        "weights": _furthest(plain["weights"], reference["weights"]),
        "logprobs": _apart(plain["logprobs"], reference["logprobs"]),
        "distributed_loss": _apart(second["loss"][:STEPS], expected["loss"][:STEPS]),
        "distributed_weights": _furthest(second["weights"], expected["weights"]),
        "alone": max(
            _apart(plain["loss"][STEPS:], reference["loss"][STEPS:]),
            _apart(second["loss"][STEPS:], expected["loss"][STEPS:]),
        ),
        "load": max((abs(second["load"][key] / value - 1) for key, value in expected["load"].items()), default=0.0),
    }


def _second(folder: str, sizes: dict[str, Any]) -> dict[str, Any]:
    # The balancing loss is made row by row. By tokens all layouts have the same rows; by operations, interleaved
    # pipelines, whose rows are padded to one length, have others.
    losses = {"moe_aux_loss": 0.3, "moe_z_loss": 0.1, "balance": "tokens"}
    sizes = sizes | losses if "moe" in Path(folder).name else sizes
    return _train(folder, sizes, distributed_optimizer=True)


def _train(folder: str, settings: dict[str, Any], distributed_optimizer: bool) -> dict[str, Any]:
    result: dict[str, Any] = {}
    with backend(Path(folder), distributed_optimizer=distributed_optimizer, optimizer=ADAM, **settings) as built:
        result["logprobs"] = np.concatenate(built.log_probabilities(_batch(0).sequences, TEMPERATURE))
        metrics = [built.train_step(_batch(0), LOSS)]
        if not distributed_optimizer:
            result["gradients"] = gradients(built)
        metrics += [built.train_step(_batch(step), LOSS) for step in range(1, STEPS)]
        result["weights"] = exported(built)
        result["load"] = {key: value for key, value in metrics[0].items() if key.startswith("moe/")}
        metrics.append(built.train_step(make_batch((9,), temperature=TEMPERATURE), LOSS))
    for key in ("loss", "grad_norm"):
        result[key] = np.array([step[key] for step in metrics])
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, result[key].tolist())
        assert all(other == everywhere[0] for other in everywhere), f"ranks report different {key}: {everywhere}"
    return result


def _batch(step: int) -> TrainBatch:
    return make_batch(LENGTHS, temperature=TEMPERATURE, seed=step)


def _apart(own: Float32Array, reference: Float32Array) -> float:
    return float(np.abs(own - reference).max())


def _norms_apart(own: dict[str, Any], reference: dict[str, Any]) -> float:
    return float(abs(own["grad_norm"][0] / reference["grad_norm"][0] - 1))


def _furthest(own: dict[str, Float32Array], reference: dict[str, Float32Array]) -> float:
    assert own.keys() == reference.keys()
    return max(_apart(own[name], reference[name]) for name in reference)
