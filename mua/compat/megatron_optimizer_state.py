"""A distributed optimizer's state in a checkpoint, without a copy of the whole of it on every rank.

Upstream: megatron-core 0.19.2, ``megatron/core/optimizer/distrib_optimizer.py``. Its ``fully_reshardable`` form, the
only one that any layout can read, gathers main weights and moments of the whole data-parallel group into the host
memory of every rank of it, 12 bytes per parameter of a model-parallel shard on each, and as many again for copies on
the way; the first rank alone writes. A rank that loads takes as much. On one H200 a save took 33 bytes of host memory
per parameter, and a policy of 2.4 billion could not be saved on a machine of 126 GiB (docs/benchmarks/gpu.md).

Here a parameter's state belongs to the rank that holds most of it. It comes from there as it is, on its device, and
:func:`mua.compat.megatron_checkpoint.write_bucket` copies it to the host as it is written. Of the few parameters that
lie on several ranks the others send their parts. A rank loads what it holds a part of. The files hold the same tensors
under the same names.
Goes when: ``tests/unit/test_megatron_compat.py::test_upstream_still_gathers_the_optimizer_on_every_rank`` fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """Elements ``start`` to ``end`` of a parameter, whose state a rank of the data-parallel group holds."""

    rank: int
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


def pieces_of(first: int, end: int, shard: int) -> list[HeldPiece]:
    """The ranks' pieces of the elements ``first`` to ``end`` of a bucket of which each rank holds ``shard``, in order.

    The elements of a piece count from the parameter's first.
    """
    ranks = range(first // shard, -(-end // shard))
    return [HeldPiece(rank, max(first, rank * shard) - first, min(end, (rank + 1) * shard) - first) for rank in ranks]


def owner_of(pieces: Sequence[HeldPiece]) -> int:
    """The rank that writes a parameter: the first of those with most of it."""
    return max(pieces, key=lambda piece: piece.size).rank


def repair(module: Any) -> None:
    """Replaces the state in model space of the imported ``megatron.core.optimizer.distrib_optimizer``."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    upstream = module.DistributedOptimizer.sharded_param_state_fully_reshardable

    @wraps(upstream)
    def of_owners(
        self: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> dict[int, dict[str, Any]]:
        """By a parameter's number its sharded tensors by name: the owner's to save, or those of every holder to load.

        Parameters without any are left out: upstream takes an empty entry for state that ranks should have in common,
        and warns of each. Collective over the data-parallel group when saving.
        """
        described = {
            entry.data: entry
            for entry in nested_values(extract_sharded_tensors_and_factories(model_sharded_state_dict)[0])
        }
        found: dict[int, dict[str, Any]] = {}
        rank, ranks = self.data_parallel_group.rank(), self.data_parallel_group.size()
        index = -1
        for buffer in self.buffers:
            for parameter, (start, end, number) in buffer.param_index_map.items():
                index += 1
                bucket = buffer.buckets[number]
                pieces = pieces_of(start - bucket.offset, end - bucket.offset, bucket.grad_data.numel() // ranks)
                entry, owner = described[parameter], owner_of(pieces)
                if is_loading:
                    held = any(piece.rank == rank for piece in pieces)
                    names = ("param", *self.optimizer_state_keys) if held else ()
                    state = {name: torch.empty(parameter.numel(), dtype=torch.float32) for name in names}
                else:
                    state = _collected(self, parameter, pieces, owner)
                if not state:
                    continue
                replica = (*entry.replica_id[:-1], 0 if rank == owner else 1 + rank)
                found[index] = {
                    name: _described(entry, name, value.reshape(entry.data.shape), replica)
                    for name, value in state.items()
                }
        return found

    def _described(entry: Any, name: str, value: Tensor, replica: tuple[int, ...]) -> Any:
        changed: dict[str, Any] = {
            "key": f"optimizer.state.{name}.{entry.key}", "data": value, "replica_id": replica
        }  # fmt: skip
        if not isinstance(entry, ShardedTensorFactory):
            changed["dtype"] = value.dtype
        described = replace(entry, **changed)
        described.validate_metadata_integrity()
        return described

    module.DistributedOptimizer.sharded_param_state_fully_reshardable = of_owners


@torch.no_grad()
def _collected(optimizer: Any, parameter: Any, pieces: Sequence[HeldPiece], owner: int) -> dict[str, Tensor]:
    """On ``owner`` a parameter's main weight and moments, flat float32; nothing on other ranks, which send theirs.

    What lies on one rank is not copied, but for what a precision-aware optimizer makes anew: that waits on the host.
    """
    group = optimizer.data_parallel_group
    rank, alone = group.rank(), len(pieces) == 1
    if alone and rank != owner:
        return {}
    own: dict[str, Tensor] = {}
    if any(piece.rank == rank for piece in pieces):
        own = {
            name: value.detach() for name, value in optimizer._get_main_param_and_optimizer_states(parameter).items()
        }
    made = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 or not alone
    state = {}
    for name in ("param", *optimizer.optimizer_state_keys):
        whole = own[name].float() if alone else _gathered(own.get(name), parameter, pieces, owner, group)
        if rank == owner:
            state[name] = whole.cpu() if made else whole
    return state


def _gathered(part: Tensor | None, parameter: Tensor, pieces: Sequence[HeldPiece], owner: int, group: Any) -> Tensor:
    """One tensor of a parameter from the ranks' parts of it; on others than ``owner`` it holds nothing of use."""
    rank, options = group.rank(), {"dtype": torch.float32, "device": parameter.device}
    whole = torch.empty(parameter.numel() if rank == owner else 0, **options)  # type: ignore[call-overload]
    for piece in pieces:
        if rank == piece.rank:
            assert part is not None
            sent = part.to(parameter.device, torch.float32).contiguous()
        else:
            sent = torch.empty(piece.size, **options)  # type: ignore[call-overload]
        if piece.rank != owner:
            dist.broadcast(sent, dist.get_global_rank(group, piece.rank), group=group)
        if rank == owner:
            whole[piece.start : piece.end] = sent
    return whole
