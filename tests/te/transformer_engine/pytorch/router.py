"""Choice of experts with its scores, the scores of the balancing loss, and that loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: Any = 0,
    topk_indices: Tensor | None = None,
    qb_histogram: Tensor | None = None,
    qb_bin_bounds: Tensor | None = None,
    qb_histogram_mode: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Probabilities ``[tokens, experts]``, zero where not chosen, and bool ``[tokens, experts]``."""
    if any(value is not None for value in (topk_indices, qb_histogram, qb_bin_bounds, qb_histogram_mode)):
        raise NotImplementedError("the stand-in chooses the k best")
    if expert_bias is not None and score_function == "softmax":
        raise ValueError("Expert bias only support sigmoid or sqrtsoftplus score function!")
    whole = logits.float()
    if score_function == "softmax":
        scores = whole.softmax(-1) if use_pre_softmax else whole
    elif score_function == "sigmoid":
        scores = whole.sigmoid()
    else:
        raise NotImplementedError(f"the stand-in has no score function {score_function}")
    ranked = scores if expert_bias is None else scores + expert_bias.float()
    if num_groups and group_topk:
        ranked = _within_best_groups(ranked, topk, num_groups, group_topk)
    chosen = ranked.topk(topk, dim=-1).indices
    taken = scores.gather(-1, chosen)
    if score_function == "softmax" and not use_pre_softmax:
        taken = taken.softmax(-1)
    elif score_function == "sigmoid" and topk > 1:
        taken = taken / (taken.sum(-1, keepdim=True) + 1e-20)
    taken = taken * (scaling_factor or 1.0)
    probs = torch.zeros_like(whole).scatter(-1, chosen, taken).to(logits.dtype)
    return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(-1, chosen, True)


def _within_best_groups(scores: Tensor, topk: int, num_groups: int, group_topk: int) -> Tensor:
    """All but the groups whose best ``topk / group_topk`` experts together score most are out of the question."""
    grouped = scores.unflatten(-1, (num_groups, -1))
    best = grouped.topk(topk // group_topk, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
    kept = torch.zeros(grouped.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str, routing_map_format: Any = 0
) -> tuple[Tensor, Tensor]:
    whole = logits.float()
    if score_function == "softmax":
        scores = whole.softmax(-1)
    elif score_function == "sigmoid":
        scores = whole.sigmoid()
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    else:
        raise NotImplementedError(f"the stand-in has no score function {score_function}")
    chosen = scores.topk(topk, dim=-1).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, chosen, True), scores


def fused_moe_aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: Any, num_experts: int, topk: int, coeff: float
) -> Tensor:
    factor = num_experts * coeff / (topk * total_num_tokens * total_num_tokens)
    return (probs.float().sum(0) * tokens_per_expert).sum().mul(factor).to(probs.dtype)
