"""Weights for engines that come from tensors of this process instead of a trainer's shards."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import torch

from megatron_bridge.plan import TensorSpec
from megatron_bridge.reshard import ALIGNMENT, lay_out
from mua.compat.shared_weights import shared_buffer, shared_handle
from mua.engine.source import WeightBucket


class TensorSource:
    """Implements :class:`mua.engine.source.WeightSource` for engines of this machine, each of one rank.

    ``alignment`` is 1 for a broadcast. ``made`` counts the passes.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], *, bucket_bytes: int = 2**29, alignment: int = ALIGNMENT
    ) -> None:
        self.moved = self.needed = 0
        self.tensors = dict(tensors)
        self.bucket_bytes = bucket_bytes
        self.alignment = alignment
        self.made = 0

    def buckets(self, nodes: Sequence[int]) -> Generator[WeightBucket, None, None]:
        self.made += 1
        specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()]
        for layout in lay_out(specs, self.bucket_bytes, alignment=self.alignment):
            flat = shared_buffer(layout.nbytes, torch.device("cpu"))
            for slot in layout.tensors:
                slot.view(flat).copy_(self.tensors[slot.spec.name])
            yield WeightBucket(layout, flat, [[shared_handle(layout, flat)] for _ in nodes])
