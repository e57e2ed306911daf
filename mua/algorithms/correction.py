"""Off-policy correction: weights for tokens that another policy sampled than the one that is trained.

Two ratios are kept apart. The *mismatch* ``q / m`` compares the trainer's log-probabilities ``q`` with the engine's
``m`` for the same ids: different kernels and precisions, and, in asynchronous runs, older weights. The *policy* ratio
``p / q`` belongs to the objective (:mod:`mua.algorithms.objectives`). What is here looks at the mismatch alone, on
whole sequences and in numpy, before anything is packed or split over ranks: no layout can change it. Before a batch's
first step the policy is the trainer's own ``q``, so that ``q / m`` is then the whole ratio of policy and engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from mua.algorithms.advantage import Floats
from mua.config.schema import AlgorithmConfig
from mua.types import TrainBatch, TrainSequence

Mask = npt.NDArray[np.bool_]
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before ``exp``: float32 overflows at 88, and an infinite ratio times a zero
advantage is NaN. Beyond e^20 a ratio carries no gradient, as in verl."""


def correction_weights(old: Floats, behavior: Floats, trained: Mask, config: AlgorithmConfig) -> Floats:
    """The weight of each token of one sequence, ``[T]``; 1 where nothing is trained.

    By ``algorithm.correction``, with ``low`` and ``high`` of ``correction_low`` and ``correction_high``:

    - ``truncate``: ``min(ratio, high)`` (truncated importance sampling);
    - ``mask``: the ratio inside ``[low, high]``, 0 outside (ICEPOP's band at token level; masked importance sampling at
      sequence level);
    - ``band``: like ``truncate``, of the tokens that :func:`in_band` leaves.

    By ``correction_level`` the ratio is each token's own (``token``), the product over the sequence's trained tokens
    (``sequence``), or its ``T``-th root (``geometric``).

    Args:
        old: the trainer's log-probabilities ``log q``, ``[T]``.
        behavior: the engine's ``log m``, ``[T]``.
        trained: which tokens were sampled, ``[T]``.
        config: the section ``algorithm``.
    """
    weights = np.ones(len(old), dtype=np.float64)
    if config.correction == "none" or not trained.any():
        return weights
    log_ratio = (old - behavior)[trained].astype(np.float64)
    if config.correction_level != "token":
        total = log_ratio.mean() if config.correction_level == "geometric" else log_ratio.sum()
        log_ratio = np.full_like(log_ratio, total)
    ratio = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if config.correction == "mask":
        ratio = np.where((ratio >= config.correction_low) & (ratio <= config.correction_high), ratio, 0.0)
    weights[trained] = np.minimum(ratio, config.correction_high)
    return weights


def band_bounds(age: Floats, config: AlgorithmConfig) -> tuple[Floats, Floats]:
    """AgentRL's band of admissible ratios (its ``importance_weight_cap_ratio`` and ``out_of_date_decay``).

    Lower and upper bound for tokens sampled ``age >= 0`` policy versions ago, each of the shape of ``age``:
    ``[1 - low cap d, 1 + high cap d]`` with ``d = exp(-age decay)``. ``low`` is ``clip_low`` (its epsilon), ``high``
    ``clip_high`` (epsilon + epsilon_higher), ``cap`` ``correction_cap``: how many times wider than these the band of a
    fresh token is (1 is AgentRL's ``strict_in_bound``), ``decay`` ``correction_decay``: how fast it narrows.
    """
    d = np.exp(-config.correction_decay * np.maximum(age, 0.0))
    return 1 - config.clip_low * config.correction_cap * d, 1 + config.clip_high * config.correction_cap * d


def in_band(log_ratio: Floats, advantages: Floats, age: Floats, config: AlgorithmConfig) -> Mask:
    """Which tokens stay, ``[N]``: not those whose ratio has left the band on the side their advantage pulls to.

    A token goes if ``A > 0`` and its ratio is above the upper bound, or ``A < 0`` and below the lower one. Tokens
    without an advantage stay, and so do those that are far off on the other side, which the objective pulls back.

    Args:
        log_ratio: ``log q - log m``, ``[N]``.
        advantages: ``[N]``.
        age: policy versions since each token was sampled, ``[N]``.
        config: see :func:`band_bounds`.
    """
    ratio = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    lower, upper = band_bounds(age, config)
    return ~(((advantages > 0) & (ratio > upper)) | ((advantages < 0) & (ratio < lower)))


def mismatch_metrics(old: Floats, behavior: Floats) -> dict[str, float]:
    """How far two engines are apart on the same tokens, ``[N]`` log-probabilities each; nothing of none.

    ``token_mult_prob_error`` is the mean of ``exp(|difference|)``, the multiplicative probability error (1: no
    difference); ``train_rollout_kl_k3`` the k3 estimate of KL(engine || trainer). The loss reports the same under the
    same names.
    """
    if not len(old):
        return {}
    difference = np.clip(old.astype(np.float64) - behavior.astype(np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    size = np.abs(difference)
    return {
        "tokens": float(len(old)),
        "train_rollout_logprob_abs_diff": float(size.mean()),
        "train_rollout_logprob_abs_diff_max": float(size.max()),
        "train_rollout_kl_k3": float((np.exp(difference) - difference - 1).mean()),
        "token_mult_prob_error": float(np.exp(size).mean()),
    }


def correct_mismatch(batch: TrainBatch, config: AlgorithmConfig, version: int) -> tuple[TrainBatch, dict[str, float]]:
    """``batch``, whose old log-probabilities are the trainer's, with the engine's mismatch weighed or masked; metrics.

    Importance weights multiply the advantages. ``correction: band`` takes tokens out of the batch, see
    :func:`drop_tokens`. With ``old_logprobs: engine`` the objective's ratio holds the mismatch already: nothing is
    multiplied, and the old log-probabilities are the engine's again.

    Args:
        version: the policy version that is about to be trained; a token's age counts from it.
    """
    # By itself for tokens of the version that is trained, where only numerics differ, and for older ones.
    old, behavior = (np.concatenate([_sides(s)[side][s.trained] for s in batch]) for side in (0, 1))
    age = np.concatenate([_age(s, version)[s.trained] for s in batch])
    metrics: dict[str, float] = {}
    for name, chosen in (("fresh", age <= 0), ("stale", age > 0)):
        found = mismatch_metrics(old[chosen], behavior[chosen])
        metrics |= {f"train/{name}/{key}": value for key, value in found.items()}
    if config.correction != "none":
        stays = [s.trained for s in batch]
        if config.correction == "band":
            stays = [
                s.trained & in_band(np.subtract(*_sides(s)), s.advantages.astype(np.float64), _age(s, version), config)
                for s in batch
            ]
        metrics["train/tis_masked_fraction"] = 1 - sum(m.sum() for m in stays) / max(
            1, sum(s.trained.sum() for s in batch)
        )
        batch = drop_tokens(batch, stays, config)
        if config.old_logprobs != "engine":
            weights = [correction_weights(*_sides(s), s.trained, config) for s in batch]
            if batch.sequences:
                used = np.concatenate([w[s.trained] for s, w in zip(batch, weights, strict=True)])
                metrics["train/tis"] = float(used.mean())
                metrics["train/tis_clipfrac"] = float(((used == config.correction_high) | (used == 0)).mean())
            batch = batch.with_advantages([s.advantages * w for s, w in zip(batch, weights, strict=True)])
    if config.old_logprobs == "engine":
        batch = replace(batch, sequences=[replace(s, old_logprobs=s.behavior_logprobs) for s in batch])
    return batch, metrics


def drop_tokens(batch: TrainBatch, stays: Sequence[Mask], config: AlgorithmConfig) -> TrainBatch:
    """``batch`` as if the trained tokens outside ``stays`` (a mask ``[T]`` per sequence) had never been sampled.

    Their weights become 0, the others' what they would be then: ``token_mean`` divides by the tokens left in the whole
    batch, ``sequence_mean`` by those left in the trajectory. Sequences without a token are dropped; the number of
    trajectories stays, also where one lost all its tokens.
    """
    gone = [s.trained & ~m for s, m in zip(batch, stays, strict=True)]
    taken, tokens = sum(int(m.sum()) for m in gone), batch.denominators["tokens"]
    before, lost = Counter[int](), Counter[int]()
    for sequence, out in zip(batch, gone, strict=True):
        before[sequence.trajectory] += int(sequence.trained.sum())
        lost[sequence.trajectory] += int(out.sum())
    left = []
    for sequence, out in zip(batch, gone, strict=True):
        if not (sequence.trained & ~out).any():
            continue
        scale = 1.0
        if config.aggregation == "token_mean":
            scale = tokens / (tokens - taken)
        elif config.aggregation == "sequence_mean":
            own = before[sequence.trajectory]
            scale = own / (own - lost[sequence.trajectory])
        weights = np.where(out, np.float32(0), sequence.weights * np.float32(scale))
        left.append(replace(sequence, weights=weights))
    return replace(batch, sequences=left, denominators=batch.denominators | {"tokens": tokens - taken})


def _sides(sequence: TrainSequence) -> tuple[Floats, Floats]:
    """The trainer's and the engine's log-probabilities."""
    return sequence.old_logprobs.astype(np.float64), sequence.behavior_logprobs.astype(np.float64)


def _age(sequence: TrainSequence, version: int) -> Floats:
    assert sequence.version is not None, "sampled sequences know the versions that sampled them"
    return version - sequence.version.astype(np.float64)
