"""The product's learner against transformers on the same weights: log-probabilities and gradients.

The reference is transformers in float32. What bfloat16 costs by itself, transformers in bfloat16 shows: the learner may
be off by as much, with a margin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from mua.types import Float32Array, TrainSequence
from tools.gpu_checks.child import Found, Place
from tools.gpu_checks.policies import batch, exported, learner, likelihood, random_policy, sequences

_Computed: TypeAlias = tuple[list[Float32Array], dict[str, Tensor]]
"""Log-probabilities of every sequence, and the gradient by Hugging Face name."""
MARGIN = 2.0
"""Times what transformers itself loses in bfloat16."""
FLOAT32 = 1e-4
"""Nats, and share of a gradient's norm, in float32."""


def dense(place: Place) -> Found:
    return _parity(place, experts=0)


def experts(place: Place) -> Found:
    return _parity(place, experts=8)


def _parity(place: Place, experts: int) -> Found:
    found = Found()
    theirs = random_policy(place.work / "policy", place, experts=experts)
    given = sequences(place.pick((1024, 1, 100, 517, 2, 2048), (17, 2, 40, 9)))
    longest = max(given, key=len)
    for sequence in given:  # where prefixes are merged, these are computed once
        sequence.ids[: len(sequence) // 2] = longest.ids[: len(sequence) // 2]
    exact, exact_gradients = _transformers(theirs, given)
    for dtype in place.pick(("bfloat16",), ("float32", "bfloat16")):
        loses, loses_gradients = FLOAT32, FLOAT32
        if dtype == "bfloat16":
            rounded, rounded_gradients = _transformers(theirs.bfloat16(), given)
            loses = MARGIN * _mean_error(rounded, exact)
            loses_gradients = MARGIN * _gradient_error(rounded_gradients, exact_gradients)
        for merged in (False, True):
            how = f"{dtype}, prefixes merged" if merged else dtype
            _held(found, how, _learner(place, dtype, given, merged), (exact, exact_gradients), loses, loses_gradients)
    return found


def _held(found: Found, how: str, ours: _Computed, exact: _Computed, loses: float, loses_gradients: float) -> None:
    """Of one way of computing it the errors, beside what rounding loses."""
    error, of_gradients = _mean_error(ours[0], exact[0]), _gradient_error(ours[1], exact[1])
    found.add(f"{how}: log-probabilities off by", error, f"of {loses:.2g} nats on average")
    found.add(f"{how}: gradients off by", of_gradients, f"of {loses_gradients:.2g} of their norm")
    found.expect(error <= loses, f"{how}: log-probabilities are off by {error:.3g} nats, {loses:.3g} are rounding")
    found.expect(
        of_gradients <= loses_gradients,
        f"{how}: gradients are off by {of_gradients:.3g} of their norm, {loses_gradients:.3g} are rounding",
    )


def _learner(place: Place, dtype: str, given: Sequence[TrainSequence], merged: bool) -> _Computed:
    layout = {"distributed_optimizer": False, "merge_prefixes": merged}
    with learner(place.work / "policy", dtype, learning_rate=0.0, **layout) as built:
        logprobs = built.log_probabilities(given, 1.0)
        built.train_step(batch(given), likelihood)
        return logprobs, exported(built, lambda parameter: parameter.main_grad)


def _transformers(model: torch.nn.Module, given: Sequence[TrainSequence]) -> _Computed:
    """Of each sequence by itself, without padding."""
    model.zero_grad()
    found, device = [], next(model.parameters()).device
    for sequence in given:
        logprobs = _logprobs(model, sequence.ids)
        if len(logprobs):
            (-(torch.from_numpy(sequence.weights[1:]).to(device) * logprobs).sum()).backward()
        found.append(np.concatenate([np.zeros(1, np.float32), logprobs.detach().cpu().numpy()]))
    gradients = [(name, p.grad.float().clone()) for name, p in model.named_parameters() if p.grad is not None]
    return found, {name: value for fused, gradient in gradients for name, value in _single(fused, gradient)}


@torch.no_grad()
def scored(model: torch.nn.Module, sequences: Sequence[np.ndarray]) -> list[Float32Array]:
    """Log-probabilities of each sequence's tokens but the first, by transformers, each sequence by itself."""
    return [_logprobs(model, ids).cpu().numpy() for ids in sequences]


def _logprobs(model: torch.nn.Module, ids: np.ndarray) -> Tensor:
    given = torch.from_numpy(ids.astype(np.int64)).to(next(model.parameters()).device)[None]
    return torch.log_softmax(model(given).logits[0, :-1].float(), -1).gather(1, given[0, 1:, None])[:, 0]


def _mean_error(ours: Sequence[Float32Array], theirs: Sequence[Float32Array]) -> float:
    return float(np.abs(np.concatenate(list(ours)) - np.concatenate(list(theirs))).mean())


def _gradient_error(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The norm of the difference over that of the gradient, all tensors together."""
    if ours.keys() != theirs.keys():
        raise AssertionError(f"tensors of one side only: {sorted(ours.keys() ^ theirs.keys())[:4]}")
    squares = sum(float((ours[name].to(theirs[name].device) - theirs[name]).square().sum()) for name in theirs)
    return float((squares / sum(float(value.square().sum()) for value in theirs.values())) ** 0.5)


def _single(name: str, gradient: Tensor) -> list[tuple[str, Tensor]]:
    """transformers 5 holds all experts of a layer in two tensors, ``gate_up_proj`` and ``down_proj``; files do not."""
    if gradient.ndim != 3:
        return [(name, gradient)]
    prefix, _, kind = name.rpartition(".")
    if kind == "down_proj":
        return [(f"{prefix}.{index}.down_proj.weight", one) for index, one in enumerate(gradient)]
    parts = [
        (f"{prefix}.{index}.{which}.weight", half)
        for index, one in enumerate(gradient)
        for which, half in zip(("gate_proj", "up_proj"), one.chunk(2), strict=True)
    ]
    return parts
