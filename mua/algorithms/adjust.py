"""What a batch owes to log-probabilities of others than the engine: the trainer's, a reference's and a teacher's.

    make_batch ──► trainer scores it ──► adjusted: distance to reference and teacher is taken from the advantages,
                                                   the engine's mismatch is weighed or masked ──► optimizer steps

It happens on whole sequences and in numpy, before anything is packed or split over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from mua.algorithms.advantage import Floats
from mua.algorithms.correction import Band, Correction, correction_weights, in_band, mismatch_metrics
from mua.algorithms.distillation import distillation_advantages, reverse_kl
from mua.algorithms.objectives import kl_estimate
from mua.config.schema import AlgorithmConfig, DistillationConfig
from mua.types import TrainBatch, TrainSequence

Mask = npt.NDArray[np.bool_]


def adjusted(batch: TrainBatch, config: AlgorithmConfig, version: int) -> tuple[TrainBatch, dict[str, float]]:
    """``batch``, whose old and reference log-probabilities are the trainer's, with what is decided by them; metrics.

    A KL penalty in the reward (``algorithm.kl_in``) and the distance to the teacher (``algorithm.distillation``) are
    taken from the advantages, token by token; the policy's side is the old log-probabilities. Importance weights of the
    engine's mismatch (``algorithm.correction``) multiply what results. ``correction: band`` takes tokens out of the
    batch: their weights become 0, the others' what they would be had these never been sampled, and sequences without a
    token are dropped. With ``old_logprobs: engine`` the objective's ratio holds the mismatch already: nothing is
    multiplied, and the old log-probabilities are the engine's again.

    Args:
        batch: of :func:`mua.algorithms.batch.make_batch`.
        config: the section ``algorithm``.
        version: the policy version that is about to be trained; a token's age counts from it.
    """
    penalised = replace(batch, sequences=[_distilled(_penalised(s, config), config.distillation) for s in batch])
    metrics = _distance_to_teacher(batch) if config.distillation is not None else {}
    if not config.recomputes:
        return penalised, metrics
    metrics |= _mismatch_by_age(batch, version)
    corrected, of_correction = _corrected(penalised, config, version)
    if config.old_logprobs == "engine":
        corrected = replace(corrected, sequences=[replace(s, old_logprobs=s.behaviour_logprobs) for s in corrected])
    return corrected, metrics | of_correction


def _penalised(sequence: TrainSequence, config: AlgorithmConfig) -> TrainSequence:
    if config.kl_in != "reward" or config.kl_coefficient == 0 or config.advantage == "gae":  # GAE has taken it
        return sequence
    penalty = config.kl_coefficient * kl_to_reference(sequence, config.kl_estimator) * sequence.trained
    return replace(sequence, advantages=(sequence.advantages - penalty).astype(np.float32))


def kl_to_reference(sequence: TrainSequence, estimator: str) -> Floats:
    """Each token's estimate of KL(old policy || reference), ``[T]``."""
    assert sequence.reference_logprobs is not None, "a KL coefficient keeps a reference"
    difference = torch.from_numpy((sequence.old_logprobs - sequence.reference_logprobs).astype(np.float64))
    estimate: Floats = kl_estimate(estimator, difference).numpy()
    return estimate


def _distilled(sequence: TrainSequence, how: DistillationConfig | None) -> TrainSequence:
    if how is None:
        return sequence
    policy, teacher = _to_teacher(sequence)
    own = distillation_advantages(policy, teacher, sequence.trained, discount=how.discount)
    rewarded = 0.0 if how.only else sequence.advantages.astype(np.float64)
    return replace(sequence, advantages=(rewarded + how.coefficient * own).astype(np.float32))


def _distance_to_teacher(batch: TrainBatch) -> dict[str, float]:
    """Estimates k1 and k3 of KL(policy || teacher), and the largest difference of a token."""
    found = np.concatenate([reverse_kl(*_to_teacher(s), s.trained)[s.trained] for s in batch])
    return {
        "distillation/reverse_kl": float(found.mean()),
        "distillation/reverse_kl_k3": float((np.exp(-found) - 1 + found).mean()),
        "distillation/difference_max": float(np.abs(found).max()),
    }


def _to_teacher(sequence: TrainSequence) -> tuple[Floats, Floats]:
    """The policy's and the teacher's log-probabilities."""
    assert sequence.teacher_logprobs is not None, "rollouts of a distilled policy are scored by its teacher"
    return sequence.old_logprobs.astype(np.float64), sequence.teacher_logprobs.astype(np.float64)


def _corrected(batch: TrainBatch, config: AlgorithmConfig, version: int) -> tuple[TrainBatch, dict[str, float]]:
    if config.correction == "none":
        return batch, {}
    stays = [s.trained for s in batch]
    if config.correction == "band":
        band = Band(config.clip_low, config.clip_high, config.correction_cap, config.correction_decay)
        stays = [_in_band(s, band, version) for s in batch]
    removed = 1 - sum(m.sum() for m in stays) / max(1, sum(s.trained.sum() for s in batch))
    batch = without(batch, stays, config)
    if config.old_logprobs == "engine":
        return batch, {"correction/removed": removed}
    weighed, metrics = _weighed(batch, config)
    return weighed, metrics | {"correction/removed": removed}


def _weighed(batch: TrainBatch, config: AlgorithmConfig) -> tuple[TrainBatch, dict[str, float]]:
    how = Correction(config.correction, config.correction_level, config.correction_low, config.correction_high)
    weights = [correction_weights(*_sides(s), s.trained, how) for s in batch]
    of_trained = np.concatenate([w[s.trained] for s, w in zip(batch, weights, strict=True)] or [np.ones(0)])
    cut = (of_trained == how.high) | (of_trained == 0)
    shares = {"correction/weight": of_trained, "correction/cut": cut} if len(of_trained) else {}
    sequences = [
        replace(s, advantages=(s.advantages * w).astype(np.float32)) for s, w in zip(batch, weights, strict=True)
    ]
    return replace(batch, sequences=sequences), {name: float(values.mean()) for name, values in shares.items()}


def without(batch: TrainBatch, stays: Sequence[Mask], config: AlgorithmConfig) -> TrainBatch:
    """``batch`` as if the trained tokens outside ``stays`` (a mask ``[T]`` a sequence) had never been sampled.

    ``token_mean`` divides by the tokens left in the whole batch, ``sequence_mean`` by those left in the trajectory. The
    number of trajectories stays, also where one lost all its tokens.
    """
    gone = [s.trained & ~m for s, m in zip(batch, stays, strict=True)]
    taken = sum(int(m.sum()) for m in gone)
    tokens = batch.denominators["tokens"]
    before, lost = _by_trajectory(batch, [s.trained for s in batch]), _by_trajectory(batch, gone)
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


def _by_trajectory(batch: TrainBatch, masks: Sequence[Mask]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for sequence, mask in zip(batch, masks, strict=True):
        counts[sequence.trajectory] = counts.get(sequence.trajectory, 0) + int(mask.sum())
    return counts


def _in_band(sequence: TrainSequence, band: Band, version: int) -> Mask:
    old, behaviour = _sides(sequence)
    advantages = sequence.advantages.astype(np.float64)
    return sequence.trained & in_band(old - behaviour, advantages, _age(sequence, version), band)


def _mismatch_by_age(batch: TrainBatch, version: int) -> dict[str, float]:
    """The engine's mismatch by itself for tokens of the version that is trained, where only numerics differ, and for
    older ones, where the weights do too."""
    old, behaviour = (np.concatenate(side) for side in zip(*(_trained_sides(s) for s in batch), strict=True))
    age = np.concatenate([_age(s, version)[s.trained] for s in batch])
    found: dict[str, float] = {}
    for name, chosen in (("fresh", age <= 0), ("stale", age > 0)):
        values = mismatch_metrics(old[chosen], behaviour[chosen])
        found |= {f"mismatch_{name}/{key}": value for key, value in values.items()}
    return found


def _trained_sides(sequence: TrainSequence) -> tuple[Floats, Floats]:
    old, behaviour = _sides(sequence)
    return old[sequence.trained], behaviour[sequence.trained]


def _sides(sequence: TrainSequence) -> tuple[Floats, Floats]:
    """The trainer's and the engine's log-probabilities."""
    return sequence.old_logprobs.astype(np.float64), sequence.behaviour_logprobs.astype(np.float64)


def _age(sequence: TrainSequence, version: int) -> Floats:
    assert sequence.version is not None, "sampled sequences know the versions that sampled them"
    return version - sequence.version.astype(np.float64)
