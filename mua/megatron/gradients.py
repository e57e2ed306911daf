"""Fingerprints and copies of the gradients that optimizer steps apply.

They are those of the global norm, before clipping: of every parameter once within the model-parallel ranks
(``get_grads_for_grad_norm``), with a distributed optimizer each rank's own shard.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class GradientWatch:
    """What is noted of each step's gradients, on every rank. Its methods are collective."""

    def __init__(self, *, keep: bool = False) -> None:
        """``keep``: a copy in host memory too, float32, for :func:`cosine`."""
        self._keep = keep
        self._digests: list[str] = []
        self._kept: list[list[Tensor]] = []

    def note(self, gradients: Sequence[Tensor]) -> None:
        """The gradients of one step on this rank, in a fixed order."""
        hashed = hashlib.blake2b(digest_size=16)
        for gradient in gradients:
            flat = gradient.detach().reshape(-1).cpu().contiguous()
            hashed.update(flat.view(torch.uint8).numpy().data)
        self._digests.append(hashed.hexdigest())
        if self._keep:
            self._kept.append([gradient.detach().float().cpu().clone() for gradient in gradients])

    def take(self) -> tuple[list[str], list[list[Tensor]]]:
        """A digest (32 hexadecimal digits over all ranks, in their order) of each step since the last call, the same on
        every rank; and this rank's copies, where they are kept."""
        own, self._digests = self._digests, []
        kept, self._kept = self._kept, []
        every: list[list[str]] = [own]
        if dist.is_initialized() and dist.get_world_size() > 1:
            every = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(every, own)
        joined = ["".join(parts) for parts in zip(*every, strict=True)]
        return [hashlib.blake2b(one.encode(), digest_size=16).hexdigest() for one in joined], kept


def cosine(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Of two gradients, each rank giving its part, in float64; NaN where one is 0 everywhere. Collective.

    A parameter that data-parallel ranks all hold counts as often as they are, in numerator and denominator alike.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for a, b in zip(first, second, strict=True):
        left, right = a.double().flatten(), b.double().flatten()
        sums += torch.stack([left @ right, left @ left, right @ right])
    if dist.is_initialized() and dist.get_world_size() > 1:
        every: list[Tensor] = [torch.zeros(0)] * dist.get_world_size()
        dist.all_gather_object(every, sums)
        sums = torch.stack(every).sum(0)
    product, left, right = sums.tolist()
    return product / math.sqrt(left * right) if left and right else math.nan
