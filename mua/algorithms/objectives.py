"""Policy objectives: what each trained token contributes to the loss, given its ratios and its advantage.

Notation, per token: ``p`` the current policy, ``q`` the old one (the trainer's log-probabilities before this batch's
first step), ``m`` the engine's when it sampled. ``r = p / q`` is the policy ratio, ``q / m`` the mismatch of the two
engines plus staleness (:mod:`mua.algorithms.correction`), ``A`` the advantage, ``sg`` stops the gradient.

Every function takes flat float32 tensors ``[N]`` and gives the loss of each token (to be minimized), and which tokens
lost their gradient at the lower or the upper bound. All are pure; none knows about batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mua.algorithms.correction import MAX_LOG_RATIO
from mua.config.schema import AlgorithmConfig
from mua.types import TrainSequence


@dataclass(frozen=True, slots=True)
class PerToken:
    """What an objective gives."""

    loss: Tensor
    """``[N]``, with gradient."""
    clipped_low: Tensor
    """``[N]`` bool: no gradient because the ratio is below its lower bound."""
    clipped_high: Tensor
    """``[N]`` bool: no gradient because the ratio is above its upper bound."""


Objective: TypeAlias = Callable[[Tensor, Tensor, Tensor, AlgorithmConfig], PerToken]
"""``(logprobs, log_ratio, advantages, config)``; ``log_ratio = log p - log q``, with gradient like ``logprobs``. Of the
section ``algorithm`` they read the distances of the ratio from 1 at which they stop pulling (``clip_low`` and
``clip_high``: low and high below), ``dual_clip`` and ``ce_gppo_beta1`` and ``2``."""


def ppo(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> PerToken:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)``.

    PPO (arXiv 1707.06347, eq. 7) with DAPO's asymmetric bounds (arXiv 2503.14476); with ``dual_clip`` = c the loss of
    tokens with ``A < 0`` is at most ``-c A`` (dual clip, arXiv 1912.09729), so that a token grown ever likelier does
    not take over the batch.

    With ``ce_gppo_beta1`` = b1 tokens that a plain clip silences below the lower bound (``A < 0``,
    ``r < 1 - low``) have the loss ``-b1 (1 - low) / sg(r) r A``, with ``ce_gppo_beta2`` = b2 those above the
    upper one (``A > 0``, ``r > 1 + high``) ``-b2 (1 + high) / sg(r) r A``. Whatever their ratio, their gradient is b1
    or b2 times that of a token at the bound. This is what AgentRL's ``beta1`` and ``beta2`` are meant to be (CE-GPPO,
    arXiv 2509.20712); there the replaced branch has no live ratio, so that its gradient is 0 or that of no clip at all.
    """
    ratio = clamp_log_ratio(log_ratio).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages)
    clipped_low = (advantages < 0) & (ratio < 1 - config.clip_low)
    clipped_high = (advantages > 0) & (ratio > 1 + config.clip_high)
    # A ratio that is clamped for exp has no gradient: log p has, and with r / sg(r) in its place the same one.
    live = 1 + logprobs - logprobs.detach()
    if config.ce_gppo_beta1 is not None:
        loss = torch.where(clipped_low, -config.ce_gppo_beta1 * (1 - config.clip_low) * live * advantages, loss)
        clipped_low = torch.zeros_like(clipped_low)
    if config.ce_gppo_beta2 is not None:
        loss = torch.where(clipped_high, -config.ce_gppo_beta2 * (1 + config.clip_high) * live * advantages, loss)
        clipped_high = torch.zeros_like(clipped_high)
    if config.dual_clip is not None:
        ceiling = -config.dual_clip * advantages
        over = (advantages < 0) & (loss > ceiling)
        loss, clipped_high = torch.where(over, ceiling, loss), clipped_high | over
    return PerToken(loss, clipped_low, clipped_high)


def cispo(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> PerToken:
    """``-sg(clip(r, 1 - low, 1 + high)) A log p``: the weight is clipped, no token loses its gradient.

    MiniMax-M1 (arXiv 2506.13585), which leaves the lower bound open: ``clip_low`` of 1 or more does that.
    """
    weight = clamp_log_ratio(log_ratio).exp().detach().clamp(max(0.0, 1 - config.clip_low), 1 + config.clip_high)
    return _never_bounded(-weight * advantages * logprobs)


def minirl(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> PerToken:
    """``-M sg(r) A log p`` with ``M = 0`` where ``A > 0, r > 1 + high`` or ``A < 0, r < 1 - low``.

    MiniRL (arXiv 2512.01374). Its weight is ``p / m``: the part ``q / m`` is the correction, multiplied into the
    advantage beforehand, and its cap is that of the correction. The mask is on ``p / q``, the trainer's own ratio.
    AgentRL's variant masks on ``p / m``: it is this function with the engine's log-probabilities as the old ones.
    """
    ratio = clamp_log_ratio(log_ratio).exp().detach()
    clipped_low = (advantages < 0) & (ratio < 1 - config.clip_low)
    clipped_high = (advantages > 0) & (ratio > 1 + config.clip_high)
    kept = (~(clipped_low | clipped_high)).to(ratio.dtype)
    return PerToken(-kept * ratio * advantages * logprobs, clipped_low, clipped_high)


def sapo(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> PerToken:
    """``-(4 / tau) sigmoid(tau (r - 1)) A``: a soft gate in the place of a clip (SAPO, arXiv 2511.20347).

    ``tau`` is ``clip_high`` for ``A > 0`` and ``clip_low`` otherwise (published: 1.0 and 1.05): the larger, the
    sooner a token's gradient fades as its ratio leaves 1. At ``r = 1`` the gradient is that of ``-r A``.
    """
    ratio = clamp_log_ratio(log_ratio).exp()
    tau = torch.full_like(advantages, config.clip_low).masked_fill(advantages > 0, config.clip_high)
    return _never_bounded(-(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages)


def reinforce(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> PerToken:
    """``-A log p`` (Williams 1992); no ratio, no bound: only for batches that get one step."""
    return _never_bounded(-advantages * logprobs)


def cross_entropy(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> PerToken:
    """``-log p``: imitation of whatever is in the batch; advantages and who sampled it are not read.

    With filters and ``algorithm.minimal_advantage`` it is fine-tuning on the samples that they let through (rejection
    sampling).
    """
    return _never_bounded(-logprobs)


def _never_bounded(loss: Tensor) -> PerToken:
    nothing = torch.zeros_like(loss, dtype=torch.bool)
    return PerToken(loss, nothing, nothing)


OBJECTIVES: dict[str, Objective] = {
    "grpo": ppo,
    "gspo": ppo,
    "cispo": cispo,
    "minirl": minirl,
    "sapo": sapo,
    "reinforce": reinforce,
    "cross_entropy": cross_entropy,
}
"""By the names of ``algorithm.loss``. ``gspo`` is ``ppo`` on :func:`sequence_log_ratio`."""


def sequence_log_ratio(logprobs: Tensor, log_ratio: Tensor, mean_log_ratio: Tensor) -> Tensor:
    """GSPO's log-ratio of each token, ``[N]``: the sequence's mean as value, the token's own as gradient.

    ``s = exp(mean_t log r_t)`` is the sequence's ratio; ``log s + log p - sg(log p)`` has that value, and its gradient
    is the token's (GSPO-token, arXiv 2507.18071): summed with weights ``1 / T`` over the sequence, that of ``s``.

    Args:
        logprobs: of the tokens, with gradient.
        log_ratio: ``log p - log q``; only for its shape and device.
        mean_log_ratio: of each token's sequence, ``[N]``, without gradient.
    """
    return mean_log_ratio.detach().to(log_ratio) + logprobs - logprobs.detach()


def kl_estimate(name: str, log_ratio: Tensor) -> Tensor:
    """Estimators of KL(p || ref) on samples of ``p`` with ``log_ratio = log p - log ref``, ``[N]`` (Schulman 2020).

    - ``k1``: ``log_ratio``, unbiased, of high variance; as a loss its gradient vanishes in expectation, so it belongs
      into the reward;
    - ``k2``: ``log_ratio^2 / 2``, whose gradient is that of the reverse KL in expectation;
    - ``k3``: ``exp(-log_ratio) - 1 + log_ratio``, unbiased and never negative.
    """
    x = clamp_log_ratio(log_ratio)
    if name == "k1":
        return x
    return x.square() / 2 if name == "k2" else (-x).exp() - 1 + x


def kl_to_reference(sequence: TrainSequence, estimator: str) -> npt.NDArray[np.float64]:
    """Each token's estimate of KL(old policy || reference), ``[T]``."""
    assert sequence.reference_logprobs is not None, "a KL coefficient keeps a reference"
    difference = torch.from_numpy((sequence.old_logprobs - sequence.reference_logprobs).astype(np.float64))
    return np.asarray(kl_estimate(estimator, difference).numpy())


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """``log_ratio`` clamped to what ``exp`` can take."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
