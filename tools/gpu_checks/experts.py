"""The experts of a layer as the product computes them, against one expert after the other in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.gpu_checks.child import Found, Place
from tools.gpu_checks.policies import exported, learner, random_policy, seconds_of

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03}
CLOSE = 0.02
"""Between the last chosen expert's logit and the next one's: below it rounding decides, and the token is left out."""


def grouped(place: Place) -> Found:
    """Output and gradient of a layer's experts, and how many times faster than one by one: 32 experts, top 8."""
    found, dtype = Found(), place.pick(torch.bfloat16, torch.float32)
    experts, top, tokens = place.pick((32, 2, 16384), (8, 2, 64))
    random_policy(place.work / "policy", place, experts=experts, layers=1, scale=place.pick(4, 1))
    with learner(place.work / "policy", str(dtype).removeprefix("torch.")) as built:
        weights = {name: value.to(dtype) for name, value in exported(built).items()}
        block: Any = built.policy.chunks[0].decoder.layers[0].mlp
        width = weights["model.layers.0.mlp.gate.weight"].shape[1]
        torch.manual_seed(0)
        hidden = torch.randn(tokens, 1, width, dtype=dtype, device=weights["model.norm.weight"].device).requires_grad_()
        gradient = torch.randn_like(hidden)
        ours, theirs = block(hidden)[0], _one_by_one(hidden[:, 0], weights, top)[:, None]
        by_ours, by_theirs = (torch.autograd.grad(output, hidden, gradient)[0] for output in (ours, theirs))
        clear = _clear(hidden[:, 0], weights, top)
        for what, left, right in (("output", ours, theirs), ("gradient", by_ours, by_theirs)):
            off = float((left - right)[clear].detach().float().norm() / right[clear].detach().float().norm())
            found.add(f"{what} off by", off, "of its norm")
            found.expect(off < TOLERANCE[dtype], f"{what} of grouped experts is off by {off:.3g} of its norm")
        found.add("tokens compared", int(clear.sum()))
        both = (lambda: block(hidden)[0], lambda: _one_by_one(hidden[:, 0], weights, top)[:, None])
        taken = [seconds_of(lambda: torch.autograd.grad(work(), hidden, gradient), place) for work in both]  # noqa: B023
        found.add("forward and backward", taken[0] * 1e3, "ms")
        found.add("times faster than one by one", taken[1] / taken[0])
        found.message = f"{type(block.experts).__name__}, {experts} experts"
        if place.cuda:
            found.expect(taken[0] < taken[1], "the product's experts are slower than one after the other")
    return found


def _routed(hidden: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    return (hidden @ weights["model.layers.0.mlp.gate.weight"].T).float()


def _clear(hidden: Tensor, weights: Mapping[str, Tensor], top: int) -> Tensor:
    """Of which tokens rounding does not choose the experts, bool ``[tokens]``."""
    highest = _routed(hidden, weights).topk(top + 1, dim=-1).values
    clear: Tensor = highest[:, top - 1] - highest[:, top] > CLOSE
    return clear


def _one_by_one(hidden: Tensor, weights: Mapping[str, Tensor], top: int) -> Tensor:
    """As transformers' Qwen3-MoE computes it: softmax over all experts, the chosen ones' shares made to add up to 1."""
    shares, chosen = _routed(hidden, weights).softmax(-1).topk(top, dim=-1)
    shares = (shares / shares.sum(-1, keepdim=True)).to(hidden.dtype)
    output = torch.zeros_like(hidden)
    for expert in range(len(weights["model.layers.0.mlp.gate.weight"])):
        gate, up, down = (
            weights[f"model.layers.0.mlp.experts.{expert}.{n}_proj.weight"] for n in ("gate", "up", "down")
        )
        tokens, slot = (chosen == expert).nonzero(as_tuple=True)
        taken = hidden[tokens]
        made = (F.silu(taken @ gate.T) * (taken @ up.T)) @ down.T * shares[tokens, slot, None]
        output = output.index_add(0, tokens, made)
    return output
