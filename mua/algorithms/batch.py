"""From groups of trajectories to a batch whose loss is a plain weighted sum.

The global denominators are divided into the per-token weights here, once. Whatever layout trains the batch
afterwards (data, context, pipeline, micro-batches) only adds up, so it cannot change the loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from mua.algorithms.advantage import group_relative_advantages
from mua.config.schema import AlgorithmConfig
from mua.types import Group, Segment, TrainBatch, TrainSequence, Trajectory


def make_batch(groups: Sequence[Group], config: AlgorithmConfig, temperature: float) -> TrainBatch:
    """The batch of one optimizer step.

    Unscored trajectories contribute nothing, not even to group statistics. The advantage of a trajectory is
    spread over every token it sampled, in all its segments; segments without a sampled token are left out.
    Weights of sampled tokens, with ``T_i`` sampled tokens in trajectory ``i`` and ``M`` trajectories that have
    any:

    - ``token_mean``: ``1 / sum_i T_i``;
    - ``sequence_mean``: ``1 / (M * T_i)``.

    With ``algorithm.skip_zero_advantage`` trajectories of advantage 0 are counted in these denominators and then left
    out: their loss has no gradient.

    ``old_logprobs`` are the engine's; a trainer that recomputes them replaces them. ``temperature`` is that of
    sampling. A batch whose advantages are all 0 is legal, and so is an empty one (nothing was scored).
    """
    members = [(t, a) for group in groups for t, a in _with_advantages(group, config) if t.sampled_tokens]
    tokens = sum(trajectory.sampled_tokens for trajectory, _ in members)
    sequences: list[TrainSequence] = []
    for trajectory, advantage in members:
        if config.skip_zero_advantage and advantage == 0:
            continue
        by_sequence = len(members) * trajectory.sampled_tokens
        weight = 1.0 / (tokens if config.aggregation == "token_mean" else by_sequence)
        sequences.extend(_train_sequence(s, weight, advantage) for s in trajectory.segments if s.loss_mask.any())
    return TrainBatch(sequences, temperature, {"tokens": float(tokens), "sequences": float(len(members))})


def sft_batch(segments: Sequence[Segment]) -> TrainBatch:
    """A supervised batch: every trained token weighs ``1 / tokens`` over the whole batch.

    The temperature is 1: cross-entropy is of the model's own distribution. Advantages are 0 and unused.
    """
    trained = [segment for segment in segments if segment.loss_mask.any()]
    tokens = sum(int(segment.loss_mask.sum()) for segment in trained)
    sequences = [_train_sequence(segment, 1.0 / tokens, 0.0) for segment in trained]
    return TrainBatch(sequences, 1.0, {"tokens": float(tokens), "sequences": float(len(trained))})


def split_minibatches(groups: Sequence[Group], n: int) -> list[list[Group]]:
    """Cut ``groups`` into ``n`` runs, in order, whose lengths differ by one at most.

    Whole groups, not trajectories, so that each part's group statistics are those of the full batch. Raises
    ``ValueError`` when there are fewer groups than parts.
    """
    if not 0 < n <= len(groups):
        raise ValueError(f"cannot cut {len(groups)} groups into {n} minibatches; algorithm.minibatches is too large")
    bounds = [len(groups) * i // n for i in range(n + 1)]
    return [list(groups[low:high]) for low, high in itertools.pairwise(bounds)]


def _with_advantages(group: Group, config: AlgorithmConfig) -> Iterator[tuple[Trajectory, float]]:
    scored = group.scored
    advantages = group_relative_advantages([t.reward for t in scored], divide_by_std=config.divide_by_std)
    return zip(scored, advantages.tolist(), strict=True)


def _train_sequence(segment: Segment, weight: float, advantage: float) -> TrainSequence:
    """The segment up to its last trained token: what follows (a tool's result, the user's goodbye) moves no loss."""
    end = int(np.flatnonzero(segment.loss_mask)[-1]) + 1
    mask = segment.loss_mask[:end].astype(np.float32)
    return TrainSequence(
        ids=segment.ids[:end],
        weights=mask * np.float32(weight),
        advantages=mask * np.float32(advantage),
        behaviour_logprobs=segment.logprobs[:end],
        old_logprobs=segment.logprobs[:end],
        experts=None if segment.experts is None else segment.experts[:end],
    )
