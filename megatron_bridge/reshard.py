"""From the trainer's layout into whole Hugging Face tensors on a few ranks, bucket by bucket, and nothing more.

    every rank of the plan's group: its shards        feeder ranks: one bucket of whole tensors at a time
    holder of shard i ──── the pieces this feeder lacks, packed: one message ────► bucket[start:end]
    feeder itself     ──── what it holds, copied in memory ──────────────────────► bucket[start:end]

A *feeder* is a rank that hands weights on: to inference engines of its machine, or to a broadcast. Which piece of
which shard goes where is read off the same block copies that load and save a checkpoint, once, and kept. A rank sends
only what a feeder lacks, straight to it; there is no gather over the group, so a rank that is no feeder never holds
more than its shards and one message, and a feeder never more than its shards, the buckets it still keeps, and what it
receives for one bucket.

Every rank derives the same routes in the same order and posts all sends and receives of a bucket at once
(``batch_isend_irecv``), so no rank can wait for a message that its sender has not been told to send. Groups that each
hold the whole model (data-parallel replicas) work for themselves and serve their own feeders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from megatron_bridge.blocks import BlockCopy
from megatron_bridge.collective import gathered
from megatron_bridge.plain_files import BridgeError
from megatron_bridge.plan import ModelPlan, PlannedParameter, TensorSpec, as_matrix

ALIGNMENT = 256
"""Bytes every tensor of a bucket starts at a multiple of; any dtype may then be viewed in place."""


@dataclass(frozen=True, slots=True)
class BucketTensor:
    """Where one Hugging Face tensor lies in its bucket, in bytes."""

    spec: TensorSpec
    start: int

    @property
    def end(self) -> int:
        return self.start + self.spec.nbytes

    def view(self, flat: Tensor) -> Tensor:
        """The tensor, inside the bucket's buffer ``flat``, uint8 ``[nbytes]``."""
        return flat[self.start : self.end].view(self.spec.dtype).view(self.spec.shape)


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Some whole tensors in one flat uint8 buffer."""

    tensors: tuple[BucketTensor, ...]
    nbytes: int
    """Size of the buffer, padding included."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors alone."""
        return sum(slot.spec.nbytes for slot in self.tensors)


def lay_out(
    specs: Iterable[TensorSpec],
    limit: int,
    *,
    alignment: int = ALIGNMENT,
    together: Callable[[str], str] | None = None,
) -> list[BucketLayout]:
    """Divide tensors over buckets of at most ``limit`` bytes, in their order.

    Args:
        alignment: every tensor starts at a multiple of it, at least of 16. Or 1: no gaps; a tensor still starts at a
            multiple of its element size, because wider elements come first within a bucket.
        together: tensors it maps to the same key are never divided over two buckets.

    What is larger than ``limit`` by itself gets a bucket of its own.
    """
    units: dict[str, list[TensorSpec]] = defaultdict(list)
    for spec in specs:
        units[together(spec.name) if together else spec.name].append(spec)
    buckets: list[BucketLayout] = []
    pending: list[TensorSpec] = []
    for unit in units.values():
        if pending and _fill(pending + unit, alignment).nbytes > limit:
            buckets.append(_fill(pending, alignment))
            pending = []
        pending = pending + unit
    return [*buckets, *([_fill(pending, alignment)] if pending else [])]


def _fill(specs: list[TensorSpec], alignment: int) -> BucketLayout:
    slots, end = [], 0
    if alignment == 1:
        specs = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
    for spec in specs:
        slots.append(BucketTensor(spec, -(-end // alignment) * alignment))
        end = slots[-1].end
    return BucketLayout(tuple(slots), max(1, -(-end // alignment)) * alignment)


@dataclass(slots=True)
class Traffic:
    """Bytes of tensors (no padding, no headers) since the counters were last reset, on this rank."""

    sent: int = 0
    """To other ranks."""
    received: int = 0
    """From other ranks; the sum over all ranks is what was moved."""
    needed: int = 0
    """What this rank, as a feeder, had to get from others: the bytes of all tensors less those of its own shards."""
    peak: int = 0
    """Largest sum of one bucket's buffer and the messages alive beside it."""


@dataclass(frozen=True, slots=True)
class _ShardSlice:
    """A rectangle of a shard that belongs into a bucket."""

    parameter: PlannedParameter
    block: BlockCopy
    slot: BucketTensor

    @property
    def nbytes(self) -> int:
        return self.block.rows * self.block.cols * self.parameter.dtype.itemsize

    def in_shard(self, shard: Tensor) -> Tensor:
        block = self.block
        rows = as_matrix(shard)[block.shard_row : block.shard_row + block.rows]
        return rows[:, block.shard_col : block.shard_col + block.cols]

    def in_bucket(self, flat: Tensor) -> Tensor:
        block = self.block
        rows = as_matrix(self.slot.view(flat))[block.source_row : block.source_row + block.rows]
        return rows[:, block.source_col : block.source_col + block.cols]

    def in_message(self, message: Tensor, start: int) -> Tensor:
        part = message[start : start + self.nbytes].view(self.parameter.dtype)
        return part.view(self.block.rows, self.block.cols)


_Route = tuple[int, int]
"""Global ranks of a feeder and of the rank it gets pieces from."""


class Resharder:
    """The plan of slices from one layout to some feeder ranks. Build it once; it follows the parameters' values.

    Building is collective over ``plan.group``, and so is :meth:`assemble`: all its ranks take the buckets in order.

    Args:
        feeders: global ranks that get the whole tensors; those outside ``plan.group`` are other groups' concern.
        limit: upper bound of one bucket, in bytes.
        node: number of this rank's machine; a feeder prefers senders of its own.
        alignment, together: see :func:`lay_out`.
    """

    def __init__(
        self,
        plan: ModelPlan,
        feeders: Sequence[int],
        limit: int,
        *,
        node: int = 0,
        alignment: int = ALIGNMENT,
        together: Callable[[str], str] | None = None,
    ) -> None:
        self._plan = plan
        self._rank = distributed.get_rank()
        self.buckets = lay_out(plan.tensors(), limit, alignment=alignment, together=together)
        ranks = distributed.get_process_group_ranks(plan.group)
        self._routes = self._plan_routes([feeder for feeder in feeders if feeder in ranks], _Holders(plan, node))
        # NCCL connects a group by its first collective, in which all of its ranks must take part; a bucket needs few.
        distributed.all_reduce(torch.zeros(1, device=plan.device), group=plan.group)
        self.feeds = self._rank in feeders
        """Whether this rank gets whole tensors."""
        self.traffic = Traffic()
        self.reset()

    def reset(self) -> None:
        """Start the counters anew, for one pass over all buckets."""
        held = sum(piece.nbytes for routes in self._routes for piece in routes.get((self._rank, self._rank), ()))
        total = sum(layout.payload_bytes for layout in self.buckets)
        self.traffic = Traffic(needed=total - held if self.feeds else 0)

    def _plan_routes(self, feeders: list[int], holders: _Holders) -> list[dict[_Route, list[_ShardSlice]]]:
        """For every bucket: what this rank sends, receives or copies, by route, in the same order on both ends."""
        places = {slot.spec.name: (index, slot) for index, layout in enumerate(self.buckets) for slot in layout.tensors}
        routes: list[dict[_Route, list[_ShardSlice]]] = [defaultdict(list) for _ in self.buckets]
        for number, parameter in enumerate(self._plan.parameters):
            if parameter.tied_copy:
                continue
            for shard in range(len(parameter.owners)):
                for feeder in feeders:
                    source = holders.nearest(parameter.name, shard, feeder, number)
                    if self._rank not in (feeder, source):
                        continue
                    for block in parameter.packing.shard_blocks(len(parameter.owners), shard):
                        index, slot = places[block.source]
                        routes[index][feeder, source].append(_ShardSlice(parameter, block, slot))
        for bucket in routes:
            for pieces in bucket.values():  # wide elements first: no message needs padding
                pieces.sort(key=lambda piece: -piece.parameter.dtype.itemsize)
        return [dict(sorted(bucket.items())) for bucket in routes]

    @torch.no_grad()
    def assemble(self, index: int, allocate: Callable[[int], Tensor] | None = None) -> Tensor | None:
        """Bucket ``index`` with the parameters' current values; collective over the plan's group.

        Args:
            allocate: gives a uint8 buffer of at least so many bytes on the plan's device; by default a fresh one.

        Returns:
            on a feeder the buffer, uint8 ``[nbytes]`` of the layout, gaps undefined; None on the other ranks.
        """
        layout, routes = self.buckets[index], self._routes[index]
        flat = (allocate or self._fresh)(layout.nbytes)[: layout.nbytes] if self.feeds else None
        local = routes.get((self._rank, self._rank), [])
        outgoing = {route: pieces for route, pieces in routes.items() if route[0] != self._rank}
        incoming = {route: pieces for route, pieces in routes.items() if route[1] != self._rank}
        sent = self._pack(outgoing)
        received = {source: self._fresh(_size(pieces)) for (_, source), pieces in incoming.items()}
        operations = [self._operation(distributed.isend, message, peer) for peer, message in sent.items()]
        operations += [self._operation(distributed.irecv, message, peer) for peer, message in received.items()]
        works = distributed.batch_isend_irecv(operations) if operations else []
        for piece in local:
            assert flat is not None
            piece.in_bucket(flat).copy_(piece.in_shard(self._plan.local[piece.parameter.name].detach()))
        for work in works:
            work.wait()
        for (_, source), pieces in incoming.items():
            assert flat is not None
            start = 0
            for piece in pieces:
                piece.in_bucket(flat).copy_(piece.in_message(received[source], start))
                start += piece.nbytes
        buffers = {message.data_ptr(): message.nbytes for message in (*sent.values(), *received.values())}
        alive = sum(buffers.values()) + (0 if flat is None else flat.nbytes)
        self.traffic.sent += sum(message.nbytes for message in sent.values())
        self.traffic.received += sum(message.nbytes for message in received.values())
        self.traffic.peak = max(self.traffic.peak, alive)
        return flat

    def _pack(self, outgoing: dict[_Route, list[_ShardSlice]]) -> dict[int, Tensor]:
        """A message for each feeder; feeders that lack the same pieces share one."""
        packed: dict[tuple[tuple[str, BlockCopy], ...], Tensor] = {}
        messages = {}
        for (feeder, _), pieces in outgoing.items():
            key = tuple((piece.parameter.name, piece.block) for piece in pieces)
            if key not in packed:
                packed[key] = message = self._fresh(_size(pieces))
                start = 0
                for piece in pieces:
                    shard = self._plan.local[piece.parameter.name].detach()
                    piece.in_message(message, start).copy_(piece.in_shard(shard))
                    start += piece.nbytes
            messages[feeder] = packed[key]
        return messages

    def _operation(self, kind: Callable[..., distributed.Work | None], message: Tensor, peer: int) -> distributed.P2POp:
        return distributed.P2POp(kind, message, peer, self._plan.group)

    def _fresh(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._plan.device)


class _Holders:
    """Who holds which shard, and on which machine; collective over the plan's group."""

    def __init__(self, plan: ModelPlan, node: int) -> None:
        shards = gathered((node, plan.shard), plan.group)
        self._nodes: dict[int, int] = {}
        self._ranks: dict[tuple[str, int], list[int]] = defaultdict(list)
        for rank, (holder, held) in zip(distributed.get_process_group_ranks(plan.group), shards, strict=True):
            self._nodes[rank] = holder
            for name, shard in held.items():
                self._ranks[name, shard].append(rank)

    def nearest(self, name: str, shard: int, feeder: int, turn: int) -> int:
        """The feeder itself if it holds the shard, else one of its machine, else any; ``turn`` spreads the work."""
        ranks = self._ranks.get((name, shard))
        if not ranks:
            raise BridgeError(f"no rank holds shard {shard} of {name}")
        if feeder in ranks:
            return feeder
        near = [rank for rank in ranks if self._nodes[rank] == self._nodes[feeder]] or ranks
        return near[turn % len(near)]


def _size(pieces: list[_ShardSlice]) -> int:
    return sum(piece.nbytes for piece in pieces)
