"""From the trainer's layout into what engines take, on the ranks that hand it to them, bucket by bucket.

    every rank of the plan's group: its shards        root ranks: one bucket at a time
    holder of shard i ──── the pieces this root lacks, packed: one message ────► bucket[start:end]
    root itself     ──── what it holds, copied in memory ──────────────────────► bucket[start:end]

A *root rank* is a rank that hands weights on: to the engine ranks of its GPU, or to a broadcast. What it gets is a
:class:`Target`: whole Hugging Face tensors, or the slices that one rank of an engine holds, in which case roots of
different engine ranks get different *variants* of the same buckets. Which piece of which shard goes where is read off
the same block copies that load and save a checkpoint, once, and kept. A rank sends only what a root lacks, straight
to it; there is no gather over the group, so a rank that is no root never holds more than its shards and one message
for each root, and a root never more than its shards, the buckets it still keeps, and what it receives for one.

Every rank derives the same routes in the same order and posts all sends and receives of a bucket at once
(``batch_isend_irecv``), so no rank can wait for a message that its sender has not been told to send. Groups that each
hold the whole model (data-parallel replicas) work for themselves and serve their own roots.

The tensors of a bucket come from all pipeline stages alike, so that the links of all stages carry each of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed

from megatron_bridge.blocks import BlockCopy
from megatron_bridge.engine_shards import EngineParameter
from megatron_bridge.plan import ModelPlan, PlannedParameter, TensorSpec, as_matrix
from mua.utils.collective import gathered
from mua.utils.errors import BridgeError

ALIGNMENT = 256
"""Bytes every tensor of a bucket starts at a multiple of; any dtype may then be viewed in place."""


@dataclass(frozen=True, slots=True)
class BucketTensor:
    """Where one tensor lies in its bucket, in bytes."""

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
    """Some tensors in one flat uint8 buffer."""

    tensors: tuple[BucketTensor, ...]
    nbytes: int
    """Size of the buffer, padding included."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors alone."""
        return sum(slot.spec.nbytes for slot in self.tensors)


def lay_out(specs: Iterable[TensorSpec], limit: int, *, alignment: int = ALIGNMENT) -> list[BucketLayout]:
    """Divide tensors over buckets of at most ``limit`` bytes, in their order.

    Args:
        alignment: every tensor starts at a multiple of it, at least of 16. Or 1: no gaps; a tensor still starts at a
            multiple of its element size, because wider elements come first within a bucket.

    What is larger than ``limit`` by itself gets a bucket of its own.
    """
    buckets: list[BucketLayout] = []
    pending: list[TensorSpec] = []
    for spec in specs:
        if pending and _fill([*pending, spec], alignment).nbytes > limit:
            buckets.append(_fill(pending, alignment))
            pending = []
        pending.append(spec)
    return [*buckets, *([_fill(pending, alignment)] if pending else [])]


def _fill(specs: list[TensorSpec], alignment: int) -> BucketLayout:
    slots, end = [], 0
    if alignment == 1:
        specs = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
    for spec in specs:
        slots.append(BucketTensor(spec, -(-end // alignment) * alignment))
        end = slots[-1].end
    return BucketLayout(tuple(slots), max(1, -(-end // alignment)) * alignment)


@dataclass(frozen=True, slots=True)
class Target:
    """What roots get: tensors of the same names and shapes, in one variant or several."""

    specs: tuple[TensorSpec, ...]
    """A name may come several times: as bands of rows, told apart by ``row``."""
    variants: tuple[Mapping[str, Sequence[tuple[TensorSpec, BlockCopy]]], ...]
    """For each variant and Hugging Face tensor, the blocks of it and the spec they fill; ``shard_row`` and
    ``shard_col`` count in that spec's matrix."""
    matrices: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Of what comes in bands, rows and columns in whole."""

    def filled(self, variant: int) -> dict[TensorSpec, int]:
        """Of every spec the bytes that come from Hugging Face tensors; the rest is padding, and zero."""
        found = dict.fromkeys(self.specs, 0)
        for placed in self.variants[variant].values():
            for spec, block in placed:
                found[spec] += block.rows * block.cols * spec.dtype.itemsize
        return found


def whole_tensors(specs: Iterable[TensorSpec]) -> Target:
    """The Hugging Face tensors themselves."""
    every = tuple(specs)
    block = lambda s: BlockCopy(s.name, 0, 0, 0, 0, s.shape[0], torch.Size(s.shape[1:]).numel())  # noqa: E731
    return Target(every, ({spec.name: ((spec, block(spec)),) for spec in every},))


def engine_slices(parameters: Iterable[EngineParameter], limit: int) -> Target:
    """What the ranks of an engine hold, a variant for each; parameters above ``limit`` bytes in bands of rows."""
    specs: list[TensorSpec] = []
    matrices = {}
    variants: list[dict[str, list[tuple[TensorSpec, BlockCopy]]]] = []
    for parameter in parameters:
        height = max(1, limit // max(1, parameter.cols * parameter.dtype.itemsize))
        bands = [
            TensorSpec(parameter.name, (min(height, parameter.rows - row), parameter.cols), parameter.dtype, row)
            for row in range(0, parameter.rows, height)
        ]
        specs += bands
        matrices[parameter.name] = parameter.rows, parameter.cols
        variants = variants or [defaultdict(list) for _ in parameter.blocks]
        for variant, blocks in zip(variants, parameter.blocks, strict=True):
            for block in blocks:
                for band in bands[block.shard_row // height : (block.shard_row + block.rows - 1) // height + 1]:
                    low = max(block.shard_row, band.row)
                    high = min(block.shard_row + block.rows, band.row + band.shape[0])
                    source_row = block.source_row + low - block.shard_row
                    part = BlockCopy(
                        block.source,
                        source_row,
                        block.source_col,
                        low - band.row,
                        block.shard_col,
                        high - low,
                        block.cols,
                    )
                    variant[block.source].append((band, part))
    return Target(tuple(specs), tuple(variants), matrices)


@dataclass(slots=True)
class Traffic:
    """Bytes of tensors (no padding, no headers) since the counters were last reset, on this rank."""

    sent: int = 0
    """To other ranks."""
    received: int = 0
    """From other ranks; the sum over all ranks is what was moved."""
    needed: int = 0
    """What this rank, as a root, had to get from others: the bytes of its target less those of its own shards."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a shard that belongs into a bucket."""

    parameter: PlannedParameter
    shard: int
    block: BlockCopy
    """From the shard (``source_row`` and ``source_col`` count in it) into the slot's matrix."""
    variant: int
    bucket: int
    slot: BucketTensor

    @property
    def nbytes(self) -> int:
        return self.block.rows * self.block.cols * self.parameter.dtype.itemsize

    def in_shard(self, shard: Tensor) -> Tensor:
        block = self.block
        rows = as_matrix(shard)[block.source_row : block.source_row + block.rows]
        return rows[:, block.source_col : block.source_col + block.cols]

    def in_bucket(self, flat: Tensor) -> Tensor:
        block = self.block
        rows = as_matrix(self.slot.view(flat))[block.shard_row : block.shard_row + block.rows]
        return rows[:, block.shard_col : block.shard_col + block.cols]

    def in_message(self, message: Tensor, start: int) -> Tensor:
        part = message[start : start + self.nbytes].view(self.parameter.dtype)
        return part.view(self.block.rows, self.block.cols)


@dataclass(frozen=True, slots=True)
class Route:
    """Pieces of one shard for one root, from one of the ranks that hold it."""

    root: int
    source: int
    pieces: list[Piece]


class Holders:
    """Who holds which shard, and on which machine.

    Args:
        ranks: of every rank its machine, and the shard it holds of each parameter.
    """

    def __init__(self, ranks: Mapping[int, tuple[int, Mapping[str, int]]]) -> None:
        self.nodes = {rank: node for rank, (node, _) in ranks.items()}
        self._ranks: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._near: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}
        for rank, (_, held) in ranks.items():
            for name, shard in held.items():
                self._ranks[name, shard].append(rank)

    def of(self, name: str, shard: int) -> tuple[int, ...]:
        """The ranks that hold a shard. Raises :class:`BridgeError` when there is none."""
        if not (ranks := self._ranks.get((name, shard))):
            raise BridgeError(f"no rank holds shard {shard} of {name}")
        return tuple(ranks)

    def choose(self, ranks: tuple[int, ...], root: int, turn: int) -> int:
        """The root itself if it is among ``ranks``, else one of its machine, else any; ``turn`` spreads the work."""
        if root in ranks:
            return root
        key = ranks, self.nodes[root]
        if key not in self._near:
            self._near[key] = tuple(rank for rank in ranks if self.nodes[rank] == self.nodes[root]) or ranks
        return self._near[key][turn % len(self._near[key])]

    def period(self, ranks: tuple[int, ...]) -> int:
        """After so many turns :meth:`choose` begins anew, whoever the root is."""
        nodes = [self.nodes[rank] for rank in ranks]
        return math.lcm(len(ranks), *(nodes.count(node) for node in set(nodes)))


class Routes:
    """The plan of slices: what goes from which rank to which, without any process group.

    Args:
        parameters: of the whole model, the same on every rank.
        target, buckets: what roots get; see :func:`bucket_layouts`.
    """

    def __init__(self, parameters: Sequence[PlannedParameter], target: Target, buckets: Sequence[BucketLayout]) -> None:
        self._parameters = [parameter for parameter in parameters if not parameter.tied_copy]
        self._target = target
        self._places = {slot.spec: (n, slot) for n, layout in enumerate(buckets) for slot in layout.tensors}
        self._pieces: dict[tuple[str, int, int], list[Piece]] = {}
        self._last: tuple[str, int, list[BlockCopy]] = ("", 0, [])

    def plan(self, roots: Mapping[int, Sequence[int]], holders: Holders, only: int | None = None) -> Iterator[Route]:
        """All routes to ``roots`` (the variants each gets), or those that rank ``only`` takes part in."""
        for number, parameter, shard in self.shards():
            ranks = holders.of(parameter.name, shard)
            for turn, (root, variants) in enumerate(roots.items()):
                source = holders.choose(ranks, root, number + turn)
                if only is not None and only not in (root, source):
                    continue
                pieces = [piece for variant in variants for piece in self.pieces(parameter, shard, variant)]
                if pieces:
                    yield Route(root, source, pieces)

    def shards(self) -> Iterator[tuple[int, PlannedParameter, int]]:
        """Every shard of every parameter, and the parameter's turn."""
        for number, parameter in enumerate(self._parameters):
            for shard in range(len(parameter.owners)):
                yield number, parameter, shard

    def pieces(self, parameter: PlannedParameter, shard: int, variant: int) -> list[Piece]:
        """Where the rectangles of one shard meet those of the target."""
        key = parameter.name, shard, variant
        if key not in self._pieces:
            if self._last[:2] != (parameter.name, shard):  # the blocks of the last shard asked for are known
                self._last = parameter.name, shard, parameter.packing.shard_blocks(len(parameter.owners), shard)
            self._pieces[key] = [
                Piece(parameter, shard, met, variant, *self._places[spec])
                for held in self._last[2]
                for spec, wanted in self._target.variants[variant].get(held.source, ())
                if (met := _meeting(held, wanted)) is not None
            ]
        return self._pieces[key]


def _meeting(held: BlockCopy, wanted: BlockCopy) -> BlockCopy | None:
    """Where two rectangles of one tensor overlap, as a copy from the first one's shard into the second one's."""
    row, col = max(held.source_row, wanted.source_row), max(held.source_col, wanted.source_col)
    rows = min(held.source_row + held.rows, wanted.source_row + wanted.rows) - row
    cols = min(held.source_col + held.cols, wanted.source_col + wanted.cols) - col
    if rows <= 0 or cols <= 0:
        return None
    return BlockCopy(
        held.source,
        row - held.source_row + held.shard_row,
        col - held.source_col + held.shard_col,
        row - wanted.source_row + wanted.shard_row,
        col - wanted.source_col + wanted.shard_col,
        rows,
        cols,
    )


def bucket_layouts(
    parameters: Sequence[PlannedParameter],
    target: Target,
    limit: int,
    *,
    alignment: int = ALIGNMENT,
    by_turns: bool = True,
) -> list[BucketLayout]:
    """The target's tensors in buckets (:func:`lay_out`), ``by_turns`` those of all pipeline stages alike."""
    if not by_turns:
        return lay_out(target.specs, limit, alignment=alignment)
    stage = {source: min(p.owners) for p in parameters for source in p.packing.sources if not p.tied_copy}
    at = {spec: stage[source] for source, placed in target.variants[0].items() for spec, _ in placed}
    queues: dict[int, list[TensorSpec]] = defaultdict(list)
    for spec in target.specs:
        queues[at.get(spec, 0)].append(spec)
    # Each list in its order, such that of each the same share of bytes has come at any time.
    placed: list[tuple[float, int, int, TensorSpec]] = []
    for number, queue in enumerate(queues.values()):
        total, end = sum(spec.nbytes for spec in queue), 0
        for spec in queue:
            placed.append((end / total, number, len(placed), spec))
            end += spec.nbytes
    ordered = [spec for *_, spec in sorted(placed, key=lambda one: one[:3])]
    return lay_out(ordered, limit, alignment=alignment)


_Pair = tuple[int, int]
"""Global ranks of a root and of the rank it gets pieces from."""


class Resharder:
    """The plan of slices from one layout to some root ranks. Build it once; it follows the parameters' values.

    Building is collective over ``plan.group``, and so is :meth:`assemble`: all its ranks take the buckets in order.

    Args:
        roots: global ranks that get something, and which variants of the target; those outside ``plan.group`` are
            other groups' concern.
        limit: upper bound of one bucket, in bytes.
        target: what they get; by default whole Hugging Face tensors, one variant.
        node: number of this rank's machine; a root prefers senders of its own.
        alignment, by_turns: see :func:`bucket_layouts`.
    """

    def __init__(
        self,
        plan: ModelPlan,
        roots: Mapping[int, Sequence[int]],
        limit: int,
        *,
        target: Target | None = None,
        node: int = 0,
        alignment: int = ALIGNMENT,
        by_turns: bool = True,
    ) -> None:
        self._plan = plan
        self._rank = distributed.get_rank()
        target = target or whole_tensors(plan.tensors())
        self.buckets = bucket_layouts(plan.parameters, target, limit, alignment=alignment, by_turns=by_turns)
        ranks = distributed.get_process_group_ranks(plan.group)
        self._variants = tuple(roots.get(self._rank, ()))
        self._filled = {variant: target.filled(variant) for variant in self._variants}
        holders = Holders(dict(zip(ranks, gathered((node, plan.shard), plan.group), strict=True)))
        self._pieces: list[dict[_Pair, list[Piece]]] = [defaultdict(list) for _ in self.buckets]
        own = {rank: variants for rank, variants in roots.items() if rank in ranks}
        for route in Routes(plan.parameters, target, self.buckets).plan(own, holders, self._rank):
            for piece in route.pieces:
                self._pieces[piece.bucket][route.root, route.source].append(piece)
        for bucket in self._pieces:
            for pieces in bucket.values():  # wide elements first: no message needs padding
                pieces.sort(key=lambda piece: -piece.parameter.dtype.itemsize)
        self._pieces = [dict(sorted(bucket.items())) for bucket in self._pieces]
        # NCCL connects a group by its first collective, in which all of its ranks must take part; a bucket needs few.
        distributed.all_reduce(torch.zeros(1, device=plan.device), group=plan.group)
        self.traffic = Traffic()

    def reset(self) -> None:
        """Start the counters anew, for one pass over all buckets."""
        self.traffic = Traffic()

    @property
    def held(self) -> list[int]:
        """Of every bucket the bytes that this rank, as a root, holds itself."""
        return [_size(pieces.get((self._rank, self._rank), [])) for pieces in self._pieces]

    @torch.no_grad()
    def assemble(
        self, index: int, allocate: Callable[[int, int], Tensor] | None = None, roots: Sequence[int] | None = None
    ) -> dict[int, Tensor]:
        """Bucket ``index`` with the parameters' current values; collective over the plan's group.

        Args:
            allocate: gives, for a variant, a uint8 buffer of at least so many bytes on the plan's device; by default a
                fresh one.
            roots: those of the resharder's that get it this time; None: all.

        Returns:
            by variant of this rank the buffer, uint8 ``[nbytes]`` of the layout, gaps undefined; none on other ranks.
        """
        layout, rank = self.buckets[index], self._rank
        routes = {pair: pieces for pair, pieces in self._pieces[index].items() if roots is None or pair[0] in roots}
        flats = {}
        for variant in self._variants if roots is None or rank in roots else ():
            flats[variant] = (allocate or (lambda _, n: self._fresh(n)))(variant, layout.nbytes)[: layout.nbytes]
            for slot in layout.tensors:
                if self._filled[variant][slot.spec] < slot.spec.nbytes:
                    slot.view(flats[variant]).zero_()
                self.traffic.needed += self._filled[variant][slot.spec]
        outgoing = {pair: pieces for pair, pieces in routes.items() if pair[0] != rank}
        incoming = {pair: pieces for pair, pieces in routes.items() if pair[1] != rank}
        # A message for each root; roots that lack the same pieces share one.
        packed: dict[tuple[tuple[str, BlockCopy], ...], Tensor] = {}
        sent = {}
        for (root, _), pieces in outgoing.items():
            key = tuple((piece.parameter.name, piece.block) for piece in pieces)
            if key not in packed:
                packed[key] = self._fresh(_size(pieces))
                start = 0
                for piece in pieces:
                    shard = self._plan.local[piece.parameter.name].detach()
                    piece.in_message(packed[key], start).copy_(piece.in_shard(shard))
                    start += piece.nbytes
            sent[root] = packed[key]
        received = {source: self._fresh(_size(pieces)) for (_, source), pieces in incoming.items()}
        operations = [
            distributed.P2POp(kind, message, peer, self._plan.group)
            for kind, messages in ((distributed.isend, sent), (distributed.irecv, received))
            for peer, message in messages.items()
        ]
        works = distributed.batch_isend_irecv(operations) if operations else []
        for piece in routes.get((rank, rank), ()):
            shard = self._plan.local[piece.parameter.name].detach()
            piece.in_bucket(flats[piece.variant]).copy_(piece.in_shard(shard))
            self.traffic.needed -= piece.nbytes
        for work in works:
            work.wait()
        for (_, source), pieces in incoming.items():
            start = 0
            for piece in pieces:
                piece.in_bucket(flats[piece.variant]).copy_(piece.in_message(received[source], start))
                start += piece.nbytes
        self.traffic.sent += sum(message.nbytes for message in sent.values())
        self.traffic.received += sum(message.nbytes for message in received.values())
        return flats

    def _fresh(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._plan.device)


def _size(pieces: list[Piece]) -> int:
    return sum(piece.nbytes for piece in pieces)
