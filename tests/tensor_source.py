"""Weights for engines that come from tensors of this process instead of a trainer's shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_bridge.plan import TensorSpec
from megatron_bridge.reshard import ALIGNMENT, lay_out
from mua.compat.shared_weights import shared_buffer, shared_handle
from mua.config.schema import EngineConfig
from mua.engine.engine_handle import EnginePlace
from mua.engine.weight_sync import BroadcastRoot
from mua.engine.weight_transfer import Connect, WeightBucket, WeightGenerator


class TensorSource:
    """Implements :class:`mua.engine.weight_transfer.WeightSource` for engines of this machine, each of one rank.

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
        self._group = BroadcastRoot(EngineConfig(control_seconds=10.0), cuda=False)
        self._groups = 0

    def buckets(self, engines: Sequence[EnginePlace], groups: int = 0) -> WeightGenerator:
        self.made += 1
        if groups != self._groups:
            self._groups, name, size = groups, f"mua-weights-{groups}", 1 + len(engines)
            yield Connect({name: self._group.listen()}, size, self._group.backend)
            self._group.form(name, size)
        specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()]
        for layout in lay_out(specs, self.bucket_bytes, alignment=self.alignment):
            flat = shared_buffer(layout.nbytes, torch.device("cpu"))
            for slot in layout.tensors:
                slot.view(flat).copy_(self.tensors[slot.spec.name])
            handles = [[shared_handle(layout, flat)] for _ in engines]
            yield WeightBucket(layout, handles, group=f"mua-weights-{groups}")
            if groups:
                self._group.send(flat)
        self._group.finish()
