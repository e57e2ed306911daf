"""On-policy distillation: the policy learns, on its own samples, to say what a teacher would say.

Of each sampled token the teacher gives its log-probability ``log t``; ``log p - log t`` estimates the reverse KL
divergence KL(p || t) of that position. The gradient of the divergence needs no more than this, because its score
function form is ``E[(log p - log t) grad log p]`` (the derivative of ``log p`` itself has mean 0): the divergence with
its sign turned is an advantage like any other, and every objective, bound and correction applies.

What a token answers for is a choice (``discount``):

- 0: its own divergence. This is the gradient of the divergence summed over positions with the prefixes held fixed: GKD
  (arXiv 2306.13649) with reverse KL on the student's samples, by policy gradient as in "On-Policy Distillation"
  (Thinking Machines, 2025);
- 1: also those of all later tokens of its segment: the gradient of the divergence of whole sequences, MiniLLM's (arXiv
  2306.08543, equation 2). Unbiased for it and of much higher variance.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mua.algorithms.advantage import Floats
from mua.algorithms.correction import MAX_LOG_RATIO
from mua.config.schema import DistillationConfig
from mua.types import TrainBatch


def reverse_kl(policy: Floats, teacher: Floats, trained: npt.NDArray[np.bool_]) -> Floats:
    """``log p - log t`` of each token, ``[T]``, held to +-20 nats (as ratios are); 0 where nothing is trained."""
    difference: Floats = np.clip(policy - teacher, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return np.where(trained, difference, 0.0)


def distillation_advantages(
    policy: Floats, teacher: Floats, trained: npt.NDArray[np.bool_], *, discount: float = 0.0
) -> Floats:
    """``A_i = -sum_{j >= i} discount^(j - i) (log p_j - log t_j)`` over the trained tokens of one segment, ``[T]``.

    Tokens in between that nobody trains (a user's, a tool's) are not counted: ``i`` and ``j`` number trained tokens.

    Args:
        policy: log-probabilities of the policy that is trained, ``[T]``.
        teacher: the teacher's for the same ids, ``[T]``.
        trained: which tokens were sampled, ``[T]``.
        discount: in [0, 1]; 0 leaves each token its own term alone.
    """
    own = reverse_kl(policy, teacher, trained)
    advantages, ahead = np.zeros_like(own), 0.0
    for place in np.flatnonzero(trained)[::-1]:
        ahead = own[place] + discount * ahead
        advantages[place] = -ahead
    return advantages


def distill(batch: TrainBatch, how: DistillationConfig) -> tuple[TrainBatch, dict[str, float]]:
    """``batch`` with the distance to the teacher in its advantages; the policy's side is the old log-probabilities.

    Returns:
        the batch, and over trained tokens estimates k1 and k3 of KL(policy || teacher) and the largest difference.
    """
    advantages, divergences = [], []
    for sequence in batch:
        assert sequence.teacher_logprobs is not None, "rollouts of a distilled policy are scored by its teacher"
        policy, teacher = sequence.old_logprobs.astype(np.float64), sequence.teacher_logprobs.astype(np.float64)
        divergences.append(reverse_kl(policy, teacher, sequence.trained)[sequence.trained])
        own = distillation_advantages(policy, teacher, sequence.trained, discount=how.discount)
        rewarded = 0.0 if how.only else sequence.advantages.astype(np.float64)
        advantages.append(rewarded + how.coefficient * own)
    found = np.concatenate(divergences)
    metrics = {
        "train/opd_reverse_kl": float(found.mean()),
        "train/opd_reverse_kl_k3": float((np.exp(-found) - 1 + found).mean()),
        "train/opd_difference_max": float(np.abs(found).max()),
    }
    return batch.with_advantages(advantages), metrics
