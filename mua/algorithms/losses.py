"""Per-token losses over flat tensors, and the one place where their metrics become means.

Naming of ``LossTerms.sums``: keys under ``loss/`` are already weighted, so their sum over the batch is the
value; ``tokens`` is the plain token count; every other key is a plain sum over tokens, a mean once divided by
``tokens``. :func:`finish_metrics` does that division, once per optimizer step, after all reductions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from mua.algorithms.gae import clipped_value_loss
from mua.algorithms.loss_protocol import LossTerms, TokenTensors
from mua.algorithms.objectives import OBJECTIVES, Bounds, PerToken, bounded, kl_estimate, sequence_log_ratio
from mua.config.schema import AlgorithmConfig

_WEIGHTED = "loss/"


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A policy objective with group-relative advantages, a KL penalty to the reference, and an entropy bonus.

    Per token: the objective (:mod:`mua.algorithms.objectives`; by default PPO's clipped surrogate, as in GRPO, arXiv
    2402.03300 eq. 4) plus ``kl_coefficient`` times an estimate of KL(policy || reference) with its gradient, minus
    ``entropy_coefficient`` times the entropy of the next-token distribution.
    """

    clip_low: float
    clip_high: float
    kl_coefficient: float
    old_logprobs: Literal["engine", "recompute"] = "recompute"
    """Where ``old`` comes from. With ``engine`` it equals ``behaviour_logprobs``, so the trainer's side of the
    engine/trainer difference is then the current policy instead of ``old``."""
    on_policy: bool = False
    """The batch gets exactly one optimizer step, so that recomputing ``old`` would give the current policy's own
    log-probabilities: they are taken from this very forward pass, and ``tokens.old_logprobs`` is not read."""
    objective: str = "grpo"
    dual_clip: float | None = None
    kl_estimator: str = "k3"
    entropy_coefficient: float = 0.0

    @classmethod
    def from_config(cls, config: AlgorithmConfig) -> Self:
        """The configured loss; on-policy when ``old`` is recomputed and a batch is one step."""
        return cls(
            config.clip_low,
            config.clip_high,
            config.kl_coefficient if config.kl_in == "loss" else 0.0,
            config.old_logprobs,
            on_policy=config.on_policy,
            objective=config.loss,
            dual_clip=config.dual_clip,
            kl_estimator=config.kl_estimator,
            entropy_coefficient=config.entropy_coefficient,
        )

    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: TokenTensors) -> LossTerms:
        """See :class:`mua.algorithms.loss_protocol.LossFunction`. Raises ``ValueError`` without a reference."""
        if self.on_policy:
            tokens = replace(tokens, old_logprobs=logprobs.detach())
        log_ratio = self._log_ratio(logprobs, tokens)
        bounds = Bounds(self.clip_low, self.clip_high, self.dual_clip)
        policy = OBJECTIVES[self.objective](logprobs, log_ratio, tokens.advantages, bounds)
        loss = (tokens.weights * policy.loss).sum()
        ratio = bounded(log_ratio.detach()).exp()
        sums = _policy_sums(policy, ratio, tokens.advantages) | {"loss/policy": loss.detach()}
        if self.kl_coefficient > 0:
            divergence = kl_estimate(self.kl_estimator, logprobs - _reference(tokens))
            kl_loss = self.kl_coefficient * (tokens.weights * divergence).sum()
            sums |= {"loss/kl": kl_loss.detach(), "actor/reference_kl": divergence.detach().sum()}
            loss = loss + kl_loss
        if self.entropy_coefficient > 0:
            bonus = self.entropy_coefficient * (tokens.weights * entropy).sum()
            sums["loss/entropy"] = -bonus.detach()
            loss = loss - bonus
        mismatch, maxima = self._mismatch(logprobs.detach(), tokens)
        sums |= _common_sums(loss, logprobs, entropy) | _old_kl(logprobs.detach(), tokens) | mismatch
        return LossTerms(loss, sums, maxima | {"actor/ratio_max": _maximum(ratio)})

    def _log_ratio(self, logprobs: Tensor, tokens: TokenTensors) -> Tensor:
        log_ratio = logprobs - tokens.old_logprobs
        if self.objective != "gspo":
            return log_ratio
        return sequence_log_ratio(logprobs, log_ratio, tokens.mean_of_sequence(log_ratio))

    def _mismatch(self, logprobs: Tensor, tokens: TokenTensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """How far the engine's log-probabilities are from the trainer's, for the same ids."""
        trainer = logprobs if self.old_logprobs == "engine" else tokens.old_logprobs
        difference = trainer - tokens.behaviour_logprobs
        sums = {
            "mismatch/logprob_difference": difference.abs().sum(),
            "mismatch/kl": -difference.sum(),
            "mismatch/kl_k3": kl_estimate("k3", -difference).sum(),
            "mismatch/ratio": bounded(difference).exp().sum(),
            "mismatch/probability_error": bounded(difference.abs()).exp().sum(),
        }
        return sums, {"mismatch/logprob_difference_max": _maximum(difference.abs())}


@dataclass(frozen=True, slots=True)
class CrossEntropyLoss:
    """Negative log-likelihood of the trained tokens: ``-sum(weight * logprob)``."""

    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: TokenTensors) -> LossTerms:
        """See :class:`mua.algorithms.loss_protocol.LossFunction`; advantages and old values are not read."""
        loss = -(tokens.weights * logprobs).sum()
        return LossTerms(loss, _common_sums(loss, logprobs, entropy), {})


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The critic's loss, :func:`mua.algorithms.gae.clipped_value_loss`, summed with the weights of the policy's."""

    clip: float | None

    def __call__(self, values: Tensor, tokens: TokenTensors) -> LossTerms:
        """See :class:`mua.algorithms.loss_protocol.ValueLossFunction`. Raises ``ValueError`` without returns."""
        if tokens.old_values is None or tokens.returns is None:
            raise ValueError("the critic needs a batch with values and returns, see mua.algorithms.gae.with_gae")
        terms = clipped_value_loss(values, tokens.old_values, tokens.returns, self.clip)
        loss = (tokens.weights * terms.loss).sum()
        sums = {
            "tokens": torch.tensor(float(values.numel()), device=values.device),
            "loss/value": loss.detach(),
            "critic/value": values.detach().sum(),
            "critic/return": tokens.returns.sum(),
            "critic/clip_fraction": terms.clipped.sum().float(),
        }
        return LossTerms(loss, sums, {})


def finish_metrics(sums: Mapping[str, Tensor | float], maxima: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Turn the fully reduced sums and maxima of one optimizer step into metrics; see the module for the names.

    With no trained token there is no mean: only ``tokens`` and the weighted losses are returned. Raises
    ``ValueError`` when a name is both a sum and a maximum.
    """
    if shared := sums.keys() & maxima.keys():
        raise ValueError(f"metric names used both as sum and as maximum: {sorted(shared)}")
    tokens = float(sums["tokens"])
    finished = {"tokens": tokens}
    for name, value in sums.items():
        if name.startswith(_WEIGHTED):
            finished[name] = float(value)
        elif name != "tokens" and tokens > 0:
            finished[name] = float(value) / tokens
    return finished | ({name: float(value) for name, value in maxima.items()} if tokens > 0 else {})


def _common_sums(loss: Tensor, logprobs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    return {
        "tokens": torch.tensor(float(logprobs.numel()), device=logprobs.device),
        "loss/total": loss.detach(),
        "actor/entropy": entropy.detach().sum(),
        "actor/logprob": logprobs.detach().sum(),
    }


def _policy_sums(policy: PerToken, ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    return {
        "actor/ratio": ratio.sum(),
        "actor/clip_fraction_low": policy.at_low.sum().float(),
        "actor/clip_fraction_high": policy.at_high.sum().float(),
        "actor/advantage_abs": advantages.abs().sum(),
    }


def _old_kl(logprobs: Tensor, tokens: TokenTensors) -> dict[str, Tensor]:
    """KL(old || current) on tokens sampled (nearly) from old: estimators k1 and k3."""
    log_ratio = logprobs - tokens.old_logprobs
    return {"actor/ppo_kl": -log_ratio.sum(), "actor/ppo_kl_k3": kl_estimate("k3", -log_ratio).sum()}


def _maximum(values: Tensor) -> Tensor:
    """The largest of non-negative values; 0 of none, which leaves every maximum over micro-batches as it is."""
    return values.max() if values.numel() else values.new_zeros(())


def _reference(tokens: TokenTensors) -> Tensor:
    if tokens.reference_logprobs is None:
        raise ValueError("algorithm.kl_coefficient is above 0 but the batch has no reference log-probabilities")
    return tokens.reference_logprobs
