"""What lies on one GPU in each phase of a colocated step, where trainer and engine share it.

    rollout ─► log-probabilities ─► training ─► optimizer step ─► resharding ─► rollout …

As :mod:`mua.trainer.memory_phases` does it: with ``engine.memory_saver`` the engine has no memory while the trainer
trains, with ``megatron.offload`` the trainer none while the engine rolls out; otherwise each keeps what it has.
"""

from __future__ import annotations

from dataclasses import dataclass

from mua.config.schema import ExperimentConfig
from mua.plan.activations import Activations
from mua.plan.compute import scoring_passes
from mua.plan.engine import EngineBytes
from mua.plan.ranks import RankBytes

BUCKETS = 2
"""Buckets of a weight synchronisation under way at once: one being filled, one being read."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The GPU of one trainer rank at the peak of one phase; parts in bytes."""

    name: str
    rank: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def reference_bytes(rank: RankBytes, config: ExperimentConfig) -> int:
    """The frozen copy of the initial weights that a KL term needs."""
    element = 2 if config.model.dtype == "bfloat16" else 4
    return rank.weights * element if config.algorithm.kl_coefficient > 0 else 0


def trainer_at_start(rank: RankBytes, config: ExperimentConfig) -> int:
    """What the trainer holds when the engines of a new run start and measure what is free: all but Adam's moments.

    A run that is resumed has those too by then, so its KV cache is smaller.
    """
    networks = [rank.bytes, *([] if rank.critic is None else [rank.critic])]
    return sum(held.total - held.moments for held in networks) + reference_bytes(rank, config)


def phases(rank: RankBytes, kept: Activations, engine: EngineBytes, config: ExperimentConfig) -> list[Phase]:
    """Every phase of a step on the GPU of ``rank``; the critic's passes take no more than the policy's."""
    trainer = {
        "weights": rank.bytes.parameters,
        "gradients": rank.bytes.gradients,
        "optimizer": rank.bytes.main_weights + rank.bytes.moments,
        "reference": reference_bytes(rank, config),
        "critic": 0 if rank.critic is None else rank.critic.total,
    }
    serving = {"engine weights": engine.weights, "KV cache": engine.cache}
    released = config.engine.memory_saver
    idle = {} if released else serving
    loaded = {"engine weights": engine.weights} if released else serving
    scoring = {"activations": kept.layer, "output": kept.scoring}
    training = {"activations": kept.kept + kept.working, "output": kept.output}
    found = [Phase("rollout", rank.rank, serving if config.megatron.offload else trainer | serving)]
    if scoring_passes(config.algorithm):
        found.append(Phase("log-probabilities", rank.rank, trainer | idle | scoring))
    return [
        *found,
        Phase("training", rank.rank, trainer | idle | training),
        Phase("optimizer step", rank.rank, trainer | idle),
        Phase("resharding", rank.rank, trainer | loaded | {"buckets": BUCKETS * config.engine.bucket_bytes}),
    ]
