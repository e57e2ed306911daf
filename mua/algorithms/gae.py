"""Generalized advantage estimation over what the policy sampled, and the loss of the critic that it needs.

The states of a trajectory are those in which the policy chose a token. What users, tools and the chat template write
belongs to the way from one state to the next, and so does the beginning of a new segment. Notation: ``n = 1..N`` counts
the sampled tokens of all segments in order; ``V_n`` is the critic's value of everything before token ``n``, with
``V_(N+1) = 0``; ``r_n`` the reward that followed token ``n``, which is that of its turn where ``n`` is the turn's last
token, else 0; ``g_n`` the discount of the state after token ``n``: ``gamma`` where another turn begins, else 1.

    d_n = r_n + g_n V_(n+1) - V_n          A_n = d_n + g_n lambda A_(n+1)          R_n = A_n + V_n

(GAE, arXiv 1506.02438, equations 11 to 16, for a discount that depends on the step.)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mua.algorithms.advantage import Floats, whiten
from mua.algorithms.objectives import kl_to_reference
from mua.config.schema import AlgorithmConfig
from mua.types import Float32Array, TrainBatch, TrainSequence

Integers: TypeAlias = npt.NDArray[np.int32]


def rewards_of_tokens(turn_rewards: Floats, turns: Integers) -> Floats:
    """The reward that followed each sampled token, ``[N]``: a turn's reward follows the last token of the turn.

    The reward of a turn in which nothing was sampled goes to the last token before it; what came before the first
    token no choice could change, so it is left out.

    Args:
        turn_rewards: ``[turns]``.
        turns: number of each token's turn, never falling, ``[N]``.
    """
    rewards = np.zeros(len(turns))
    places = np.searchsorted(turns, np.arange(len(turn_rewards)), side="right") - 1
    np.add.at(rewards, places[places >= 0], turn_rewards[places >= 0])
    return rewards


def discounts_of_tokens(turns: Integers, gamma: float) -> Floats:
    """``g_n``: ``gamma`` to the power of the turns that lie between a token and the next, ``[N]``; the last is 0."""
    return np.append(gamma ** np.diff(turns).astype(np.float64), np.zeros(min(len(turns), 1)))


def gae(rewards: Floats, values: Floats, discounts: Floats, lam: float) -> Floats:
    """``A_n`` of one trajectory, ``[N]`` float64; the returns ``R_n`` are their sum with ``values``.

    ``lam`` 1 gives the discounted rewards to come minus the value, ``lam`` 0 the one-step error ``d_n``.

    Args:
        rewards: ``r_n``, ``[N]``.
        values: ``V_n``, ``[N]``.
        discounts: ``g_n``, ``[N]``; the last is not read, as no state follows.
        lam: in [0, 1].
    """
    advantages, ahead, value_ahead = np.zeros(len(rewards)), 0.0, 0.0
    for n in range(len(rewards) - 1, -1, -1):
        error = rewards[n] + discounts[n] * value_ahead - values[n]
        ahead = advantages[n] = error + discounts[n] * lam * ahead
        value_ahead = values[n]
    return advantages


def estimate_advantages(
    batches: Sequence[TrainBatch], config: AlgorithmConfig
) -> tuple[list[TrainBatch], dict[str, float]]:
    """All minibatches of a step with advantages and returns, and what the critic knew before it learned from them.

    Sequences hold ``values`` and ``turns``, those of a trajectory side by side in order; batches ``turn_rewards``. With
    ``kl_in: reward`` each token's KL term is taken from its reward, so that it reaches the tokens before it (arXiv
    1909.08593, section 2). With ``gae_whiten`` advantages get zero mean and unit variance over all trained tokens of
    all batches. ``advantage_scale`` comes last.

    Returns:
        the batches, and ``train/critic/vf_explained_var`` (1 - Var(R - V) / Var(R) over trained tokens, left out where
        the
        returns do not vary), ``train/critic/old_values``, ``train/critic/advantage_std`` (before whitening).

    Raises:
        ValueError: a sequence comes without values or turns.
    """
    estimated = [_estimated(batch, config) for batch in batches]
    trained = [s for batch in estimated for s in batch]
    if not any(s.trained.any() for s in trained):
        return estimated, {}
    advantages, values, returns = (
        np.concatenate([_known(getattr(s, name), name)[s.trained] for s in trained]).astype(np.float64)
        for name in ("advantages", "values", "returns")
    )
    metrics = {"train/critic/old_values": float(values.mean()), "train/critic/advantage_std": float(advantages.std())}
    if (variance := float(returns.var())) > 0:
        metrics["train/critic/vf_explained_var"] = 1.0 - float((returns - values).var()) / variance
    if config.gae_whiten:
        advantages = whiten(advantages, np.ones(len(advantages), dtype=np.int64))
    spread = iter(np.split(advantages * config.advantage_scale, np.cumsum([s.trained.sum() for s in trained])))
    return [batch.with_advantages([_on_trained(s, next(spread)) for s in batch]) for batch in estimated], metrics


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """``max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2``, ``[N]``.

    The value is held to its old one as PPO's policy is (arXiv 1707.06347; this form is that of the authors' PPO2,
    described in arXiv 2005.12729, section 3). None for ``clip`` gives the plain squared error.

    Returns:
        the loss of each token, with gradient, and whether it has none because the value has left its old one far
        enough, both ``[N]``.
    """
    plain = (values - returns).square()
    if clip is None:
        return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
    near = old_values + (values - old_values).clamp(-clip, clip)
    held = (near - returns).square()
    return torch.maximum(plain, held) / 2, held > plain


def _estimated(batch: TrainBatch, config: AlgorithmConfig) -> TrainBatch:
    """Advantages, not yet whitened, and returns."""
    sequences: list[TrainSequence] = []
    for trajectory, members in itertools.groupby(batch, key=lambda s: s.trajectory):
        segments = list(members)
        turns = np.concatenate([_known(s.turns, "turn")[s.trained] for s in segments])
        values = np.concatenate([_known(s.values, "critic's value")[s.trained] for s in segments]).astype(np.float64)
        rewards = rewards_of_tokens(batch.turn_rewards[trajectory], turns)
        if config.kl_coefficient and config.kl_in == "reward":
            divergences = [kl_to_reference(s, config.kl_estimator)[s.trained] for s in segments]
            rewards -= config.kl_coefficient * np.concatenate(divergences)
        advantages = gae(rewards, values, discounts_of_tokens(turns, config.discount), config.gae_lambda)
        start = 0
        for segment in segments:
            own = slice(start, start := start + int(segment.trained.sum()))
            returns = _on_trained(segment, advantages[own] + values[own])
            sequences.append(replace(segment, advantages=_on_trained(segment, advantages[own]), returns=returns))
    return replace(batch, sequences=sequences)


def _on_trained(sequence: TrainSequence, values: Floats) -> Float32Array:
    """``values`` on its trained tokens, 0 elsewhere, ``[T]``."""
    placed = np.zeros(len(sequence), dtype=np.float32)
    placed[sequence.trained] = values
    return placed


def _known(array: npt.NDArray[Any] | None, what: str) -> npt.NDArray[Any]:
    if array is None:
        raise ValueError(f"GAE needs the {what} of every token")
    return array
