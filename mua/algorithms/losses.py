"""What a loss is to the training backend, the losses, and the one place where their metrics become means.

A loss is called once per micro-batch, on this rank's trained tokens only, as flat float32 tensors of shape ``[N]``
(``N`` may be 0). Everything it returns can be added up (or maximized) over micro-batches and ranks in any order,
because the global denominators are already inside ``weights``.

Naming of ``LossTerms.sums``: keys that end in ``loss`` are already weighted, so their sum over the batch is the
value; ``tokens`` is the plain token count; every other key is a plain sum over tokens, a mean once divided by
``tokens``. :func:`finish_metrics` does that division, once per optimizer step, after all reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from mua.algorithms.gae import clipped_value_loss
from mua.algorithms.objectives import OBJECTIVES, PerToken, clamp_log_ratio, kl_estimate, sequence_log_ratio
from mua.config.schema import AlgorithmConfig
from mua.utils.hooks import call_hook, is_hook, wrong_result


@dataclass(frozen=True, slots=True)
class TokenTensors:
    """What the batch knows about each trained token. All ``[N]``, float32, without gradient."""

    weights: Tensor
    """Loss weight with the global denominator divided in (:class:`mua.types.TrainSequence`)."""
    advantages: Tensor
    behavior_logprobs: Tensor
    """Log-probability under the policy that sampled, as the engine reported it."""
    old_logprobs: Tensor
    """What the clipped ratio is taken against."""
    reference_logprobs: Tensor | None = None
    """Under the frozen reference policy; None when no reference is kept."""
    old_values: Tensor | None = None
    """The critic's values before this batch's first step; None without a critic."""
    returns: Tensor | None = None
    """What the critic's values are trained towards; None without a critic."""
    sequence: Tensor | None = None
    """int64 ``[N]``: which sequence of the micro-batch each token belongs to, from 0."""
    sequences: int = 0
    """Sequences of the micro-batch. A sequence lies in one micro-batch, but may be spread over several ranks."""
    add_up: Callable[[Tensor], Tensor] = lambda sums: sums
    """Adds a tensor with one value per sequence over the ranks that share the sequences, without gradient."""

    def mean_of_sequence(self, values: Tensor) -> Tensor:
        """For each token the mean of ``values`` (``[N]``) over its whole sequence, without gradient."""
        assert self.sequence is not None, "the training backend says which sequence a token belongs to"
        sums = values.new_zeros(2, self.sequences)
        sums[0].index_add_(0, self.sequence, values.detach())
        sums[1].index_add_(0, self.sequence, torch.ones_like(values))
        total, count = self.add_up(sums)
        return (total / count.clamp(min=1))[self.sequence]


@dataclass(frozen=True, slots=True)
class LossTerms:
    """What one micro-batch contributes."""

    loss: Tensor
    """Scalar with gradient: the weighted *sum* over the tokens given."""
    sums: dict[str, Tensor]
    """Detached scalars, added over micro-batches and ranks. Holds the plain count ``tokens``."""
    maxima: dict[str, Tensor]
    """Detached scalars, maximized over micro-batches and ranks."""


LossFunction: TypeAlias = Callable[[Tensor, Tensor, TokenTensors], LossTerms]
"""``(logprobs, entropy, tokens)`` of one micro-batch. ``logprobs`` (``[N]``, float32, with gradient) are of ``logits /
temperature`` under the current policy; ``entropy`` (``[N]``, nats) is that of the whole next-token distribution."""
ValueLossFunction: TypeAlias = Callable[[Tensor, TokenTensors], LossTerms]
"""``(values, tokens)`` of one micro-batch. ``values`` (``[N]``, float32, with gradient) are the critic's of what comes
before each trained token."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A policy objective with group-relative advantages, a KL penalty to the reference, and an entropy bonus.

    Per token: the objective (:mod:`mua.algorithms.objectives`; by default PPO's clipped surrogate, as in GRPO, arXiv
    2402.03300 eq. 4) plus ``kl_coefficient`` times an estimate of KL(policy || reference) with its gradient, minus
    ``entropy_coefficient`` times the entropy of the next-token distribution.
    """

    config: AlgorithmConfig
    """With ``old_logprobs: engine`` old ones equal ``behavior_logprobs``: the trainer's side of the difference of
    engine and trainer is then the current policy. Where it is ``on_policy``, a batch gets exactly one optimizer step:
    recomputed old ones would be the current policy's own. They are taken from this very forward pass, and
    ``tokens.old_logprobs`` is not read."""

    def __reduce__(self) -> tuple[object, ...]:
        """All ranks are sent the loss at every step: only what is not the default."""
        plain = AlgorithmConfig()
        return _policy_loss, ({name: value for name, value in self.config if value != getattr(plain, name)},)

    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: TokenTensors) -> LossTerms:
        """See :data:`LossFunction`. Raises ``ValueError`` without a reference."""
        config, current = self.config, logprobs.detach()
        if config.on_policy:
            tokens = replace(tokens, old_logprobs=current)
        log_ratio = logprobs - tokens.old_logprobs
        if config.loss == "gspo":
            log_ratio = sequence_log_ratio(logprobs, log_ratio, tokens.mean_of_sequence(log_ratio))
        if is_hook(config.loss):
            policy = self._of_hook(logprobs, entropy, tokens)
        else:
            policy = OBJECTIVES[config.loss](logprobs, log_ratio, tokens.advantages, config)
        loss = (tokens.weights * policy.loss).sum()
        ratio = clamp_log_ratio(log_ratio.detach()).exp()
        sums = {
            "train/pg_loss": loss.detach(),
            "train/ratio": ratio.sum(),
            "train/pg_clipfrac_low": policy.clipped_low.sum().float(),
            "train/pg_clipfrac_high": policy.clipped_high.sum().float(),
            "train/advantage_abs": tokens.advantages.abs().sum(),
        }
        if config.kl_in == "loss" and config.kl_coefficient > 0:
            if tokens.reference_logprobs is None:
                raise ValueError("algorithm.kl_coefficient is above 0 but the batch has no reference log-probabilities")
            divergence = kl_estimate(config.kl_estimator, logprobs - tokens.reference_logprobs)
            kl_loss = config.kl_coefficient * (tokens.weights * divergence).sum()
            sums |= {"train/kl_loss": kl_loss.detach(), "train/ref_kl": divergence.detach().sum()}
            loss = loss + kl_loss
        if config.entropy_coefficient > 0:
            bonus = config.entropy_coefficient * (tokens.weights * entropy).sum()
            sums["train/entropy_loss"] = -bonus.detach()
            loss = loss - bonus
        # How far the engine's log-probabilities are from the trainer's, for the same ids.
        difference = (current if config.old_logprobs == "engine" else tokens.old_logprobs) - tokens.behavior_logprobs
        # KL(old || current) on tokens sampled (nearly) from old.
        drift = current - tokens.old_logprobs
        sums |= _common_sums(loss, logprobs, entropy) | {
            "train/ppo_kl": -drift.sum(),
            "train/ppo_kl_k3": kl_estimate("k3", -drift).sum(),
            "train/train_rollout_logprob_abs_diff": difference.abs().sum(),
            "train/train_rollout_kl": -difference.sum(),
            "train/train_rollout_kl_k3": kl_estimate("k3", -difference).sum(),
            "train/train_rollout_ratio": clamp_log_ratio(difference).exp().sum(),
            "train/token_mult_prob_error": clamp_log_ratio(difference.abs()).exp().sum(),
        }
        # All are at least 0, so that 0 for no tokens leaves every maximum over micro-batches as it is.
        maxima = {"train/train_rollout_logprob_abs_diff_max": difference.abs(), "train/ratio_max": ratio}
        nothing = logprobs.new_zeros(())
        return LossTerms(loss, sums, {name: v.max() if v.numel() else nothing for name, v in maxima.items()})

    def _of_hook(self, logprobs: Tensor, entropy: Tensor, tokens: TokenTensors) -> PerToken:
        """Raises :class:`mua.utils.errors.MuaError` for what is no loss of each token."""
        key, path = "algorithm.loss", self.config.loss
        loss = call_hook(key, path, logprobs, entropy, tokens, self.config)
        if not isinstance(loss, Tensor) or loss.shape != logprobs.shape:
            shown = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise wrong_result(key, path, f"gave {shown} in the place of a tensor {list(logprobs.shape)}")
        if logprobs.numel() and not loss.requires_grad:
            raise wrong_result(key, path, "gave a loss without gradient")
        if not loss.isfinite().all() and logprobs.isfinite().all():  # a diverged policy is no fault of the hook
            raise wrong_result(key, path, "gave NaN or infinity")
        nothing = torch.zeros_like(loss, dtype=torch.bool)
        return PerToken(loss, nothing, nothing)


def _policy_loss(settings: Mapping[str, object]) -> PolicyLoss:
    return PolicyLoss(AlgorithmConfig().model_copy(update=dict(settings)))


@dataclass(frozen=True, slots=True)
class CrossEntropyLoss:
    """Negative log-likelihood of the trained tokens: ``-sum(weight * logprob)``."""

    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: TokenTensors) -> LossTerms:
        """See :class:`LossFunction`; advantages and old values are not read."""
        loss = -(tokens.weights * logprobs).sum()
        return LossTerms(loss, _common_sums(loss, logprobs, entropy), {})


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The critic's loss, :func:`mua.algorithms.gae.clipped_value_loss`, summed with the weights of the policy's."""

    clip: float | None

    def __call__(self, values: Tensor, tokens: TokenTensors) -> LossTerms:
        """See :class:`ValueLossFunction`. Raises ``ValueError`` without returns."""
        if tokens.old_values is None or tokens.returns is None:
            raise ValueError("the critic needs a batch with values and returns, see mua.algorithms.gae.with_gae")
        losses, clipped = clipped_value_loss(values, tokens.old_values, tokens.returns, self.clip)
        loss = (tokens.weights * losses).sum()
        sums = {
            "tokens": torch.tensor(float(values.numel()), device=values.device),
            "train/critic/vf_loss": loss.detach(),
            "train/critic/values": values.detach().sum(),
            "train/critic/returns": tokens.returns.sum(),
            "train/critic/vf_clipfrac": clipped.sum().float(),
        }
        return LossTerms(loss, sums, {})


def _common_sums(loss: Tensor, logprobs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    return {
        "tokens": torch.tensor(float(logprobs.numel()), device=logprobs.device),
        "train/loss": loss.detach(),
        "train/entropy": entropy.detach().sum(),
        "train/logprob": logprobs.detach().sum(),
    }


def finish_metrics(sums: Mapping[str, Tensor | float], maxima: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Turn the fully reduced sums and maxima of one optimizer step into metrics; see the module for the names.

    With no trained token there is no mean: only ``train/tokens`` and the weighted losses are returned. Raises
    ``ValueError`` when a name is both a sum and a maximum.
    """
    if shared := sums.keys() & maxima.keys():
        raise ValueError(f"metric names used both as sum and as maximum: {sorted(shared)}")
    tokens = float(sums["tokens"])
    finished = {"train/tokens": tokens}
    for name, value in sums.items():
        if name.endswith("loss"):
            finished[name] = float(value)
        elif name != "tokens" and tokens > 0:
            finished[name] = float(value) / tokens
    return finished | ({name: float(value) for name, value in maxima.items()} if tokens > 0 else {})
