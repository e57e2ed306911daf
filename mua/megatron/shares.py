"""A batch goes to the ranks that use it: each gets the micro-batches of its data-parallel index, and no more of them
than its part of the model reads.

    rank 0                                                     every other rank
    Network.plan ──► Whole ──► Shares.share ── header, arrays ──► Shares.share ──► Share ──► its micro-batches
    scores of the batch ◄── Shares.scores ◄────── float32 ──────── last stages

==================  =======================================================================
first stage         ids of its sequences
last stage          ids, and to train what the loss reads
every stage         lengths and prefix trees; expert choices of its own layers and positions
==================  =======================================================================

A rank keeps what it got for as long as rank 0 keeps the array: what is scored first and trained on then has its ids and
expert choices sent once. Arrays that were sent are read-only from then on, so that no rank can have another version.

Without a group every rank has the whole batch, and takes its share of it without a message.
"""

from __future__ import annotations

import itertools
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from mua.megatron.microbatch import OF_LOSS, Columns, expert_rows, positions_of, predictions
from mua.megatron.packing import Alignment, LoadBalance, Packed, PackingPlan, PlannedMicrobatch
from mua.megatron.parallel import device
from mua.megatron.place import Place
from mua.types import ExpertArray, Float32Array, TrainSequence
from mua.utils.collective import gathered

_ALIGNMENT = 8
_IN_FLIGHT = 2
"""Shares that are on their way at a time: rank 0 holds a copy of each."""
_NAMES = ("ids", *OF_LOSS)


@dataclass(frozen=True, slots=True)
class Whole:
    """A batch where all of it is known. It is pickled as None: ranks get their shares instead."""

    sequences: Sequence[TrainSequence]
    packed: Packed
    training: bool
    """Whether the loss's columns are read, not only ids."""
    experts: bool
    """Whether the engine's expert choices are."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a batch."""

    plan: PackingPlan
    microbatches: tuple[PlannedMicrobatch, ...]
    """Its own."""
    merged_share: float
    balance: LoadBalance
    sequences: tuple[Sequence[TrainSequence] | Sequence[Columns], ...]
    """Of each of its micro-batches."""
    experts: tuple[ExpertArray | None, ...]
    """Of each of its micro-batches; see :func:`mua.megatron.microbatch.expert_rows`."""


_Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@dataclass(slots=True)
class _Sent:
    """Something that other ranks have got, under a number."""

    number: int
    of: tuple[weakref.ref[_Array], ...]
    """The batch's arrays that it is made of."""
    holders: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Header:
    """What a rank is told with its arrays: which numbers its share consists of, and which it may forget."""

    plan: PackingPlan
    microbatches: tuple[PlannedMicrobatch, ...]
    merged_share: float
    balance: LoadBalance
    columns: tuple[tuple[tuple[int | None, ...], ...], ...]
    """Of each of its micro-batches, of each sequence, by :data:`_NAMES`."""
    experts: tuple[int | None, ...]
    fresh: tuple[tuple[int, str, tuple[int, ...]], ...]
    """Number, dtype and shape of the arrays that follow."""
    forgotten: tuple[int, ...]


class Shares:
    """Gives every rank its share of a batch.

    Args:
        chunks: this rank's part of the model.
        group: a gloo group of all ranks, of which rank 0 alone has batches; None: all have them. Collective.
    """

    def __init__(self, chunks: Sequence[GPTModel], alignment: Alignment, group: dist.ProcessGroup | None) -> None:
        self._alignment = alignment
        self._group = group
        self.place = Place.of(chunks)
        self._places = [self.place] if group is None else gathered(self.place, group)
        self.sent = self.received = 0
        """Bytes that this rank has sent and received."""
        self._received_by = [0] * len(self._places)
        """On rank 0: bytes that went to each rank since :meth:`metrics`."""
        self._returned = 0
        self._known: dict[tuple[Any, ...], _Sent] = {}
        self._numbers = itertools.count()
        self._held: dict[int, _Array] = {}

    def share(self, whole: Whole | None) -> Share:
        """This rank's share of ``whole``, which only rank 0 has, or every rank. Collective.

        Raises:
            RuntimeError: the connection to another rank broke, or it did not answer in the group's time.
        """
        if whole is None:
            return self._receive()
        if self._group is not None:
            self._send(whole)
        planned = whole.packed.microbatches[self.place.data]
        return Share(
            whole.packed.plan,
            planned,
            whole.packed.merged_share,
            whole.packed.balance,
            tuple([whole.sequences[i] for i in one.sequences] for one in planned),
            tuple(self._rows(whole, one, self.place) for one in planned),
        )

    def scores(self, whole: Whole | None, values: Sequence[Tensor]) -> list[Float32Array]:
        """Of each sequence one number for each token, float32 ``[T]``, 0.0 for the first and, where ``whole`` is for
        training, for all that are not trained. Collective.

        Args:
            values: what a last stage found for the scored tokens of each of its micro-batches, float32 ``[N]``.

        Returns:
            in the order of the batch; on ranks that do not know it, nothing.
        """
        if whole is None:
            if self.place.reports:
                self._deliver(torch.cat([torch.zeros(0), *(one.cpu() for one in values)]))
            return []
        lengths = [len(sequence) for sequence in whole.sequences]
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        flat = np.zeros(int(bounds[-1]), dtype=np.float32)
        for rank, place in enumerate(self._places):
            if not place.reports:
                continue
            indices = self._scored(whole, place, bounds)
            if self._group is None or rank == dist.get_rank():
                flat[indices] = torch.cat([torch.zeros(0), *(one.cpu() for one in values)]).numpy()
            elif len(indices):
                found = torch.empty(len(indices), dtype=torch.float32)
                dist.recv(found, rank, group=self._group)
                self._returned += found.nbytes
                self.received += found.nbytes
                flat[indices] = found.numpy()
        if self._group is None and dist.get_world_size() > 1:
            summed = torch.from_numpy(flat).to(device())
            dist.all_reduce(summed)
            flat = summed.cpu().numpy()
        return [flat[start:end].copy() for start, end in itertools.pairwise(bounds)]

    def metrics(self) -> dict[str, float]:
        """On rank 0, since the last call: ``resources/batch/bytes_sent`` to the others, ``bytes_received_max`` by the
        one with most, ``bytes_returned`` with scores. Nothing where there is nobody to send to."""
        if len(self._places) == 1 or dist.get_rank() != 0:
            return {}
        found = {
            "resources/batch/bytes_sent": float(sum(self._received_by)),
            "resources/batch/bytes_received_max": float(max(self._received_by)),
            "resources/batch/bytes_returned": float(self._returned),
        }
        self._received_by = [0] * len(self._places)
        self._returned = 0
        return found

    # ---- on rank 0

    def _send(self, whole: Whole) -> None:
        forgotten = self._forget()
        for sequence in whole.sequences:
            for name in (*_NAMES, "experts"):
                if (array := getattr(sequence, name)) is not None:
                    array.flags.writeable = False
        under_way: deque[tuple[dist.Work, ...]] = deque()
        kept: deque[tuple[Tensor, ...]] = deque()
        for rank, place in enumerate(self._places):
            if rank == dist.get_rank():
                continue
            message = _message(*self._parts(whole, rank, place, tuple(forgotten.get(rank, ()))))
            size = torch.tensor([message.nbytes], dtype=torch.int64)
            kept.append((size, message))
            under_way.append(tuple(_work(dist.isend(one, rank, group=self._group)) for one in (size, message)))
            self._received_by[rank] += size.nbytes + message.nbytes
            self.sent += size.nbytes + message.nbytes
            while len(under_way) >= _IN_FLIGHT:
                _finish(under_way, kept)
        while under_way:
            _finish(under_way, kept)

    def _forget(self) -> dict[int, list[int]]:
        """Numbers that each rank may forget: an array that they are made of is gone here."""
        gone: dict[int, list[int]] = {}
        for key, sent in [*self._known.items()]:
            if any(one() is None for one in sent.of):
                del self._known[key]
                for rank in sent.holders:
                    gone.setdefault(rank, []).append(sent.number)
        return gone

    def _parts(self, whole: Whole, rank: int, place: Place, forgotten: tuple[int, ...]) -> tuple[_Header, list[_Array]]:
        """Header and new arrays of one rank."""
        new: list[tuple[int, _Array]] = []

        def number(key: tuple[Any, ...], of: Sequence[_Array], make: Callable[[], _Array]) -> int:
            sent = self._known.get(key)
            if sent is None:
                sent = self._known[key] = _Sent(next(self._numbers), tuple(map(weakref.ref, of)))
            if rank not in sent.holders:
                sent.holders.add(rank)
                new.append((sent.number, np.ascontiguousarray(make())))
            return sent.number

        names = () if not (place.first or place.last) else _NAMES if place.last and whole.training else ("ids",)

        def columns(sequence: TrainSequence) -> tuple[int | None, ...]:
            arrays = [getattr(sequence, name) for name in names]
            return tuple(None if a is None else number((id(a),), [a], lambda a=a: a) for a in arrays)  # type: ignore[misc]

        def experts(one: PlannedMicrobatch) -> int | None:
            recorded = _recorded(whole, one) if place.layers else []
            if not recorded:
                return None
            least = whole.packed.plan.least
            # The rows of a rank follow from its place, which stays, the arrays and how they are laid out.
            key = (*map(id, recorded), one.forest, least)
            return number(key, recorded, lambda: expert_rows(recorded, one.forest, self._alignment, least, place))

        planned = whole.packed.microbatches[place.data]
        header = _Header(
            whole.packed.plan,
            planned,
            whole.packed.merged_share,
            whole.packed.balance,
            tuple(tuple(columns(whole.sequences[i]) for i in one.sequences) for one in planned),
            tuple(experts(one) for one in planned),
            tuple((place_, array.dtype.str, array.shape) for place_, array in new),
            forgotten,
        )
        return header, [array for _, array in new]

    def _rows(self, whole: Whole, one: PlannedMicrobatch, place: Place) -> ExpertArray | None:
        recorded = _recorded(whole, one) if place.layers else []
        least = whole.packed.plan.least
        return expert_rows(recorded, one.forest, self._alignment, least, place) if recorded else None

    def _scored(self, whole: Whole, place: Place, bounds: Any) -> Any:
        """Where the scores of one rank belong in the sequences laid end to end, in the order in which it has them."""
        found = [np.zeros(0, dtype=np.int64)]
        for one in whole.packed.microbatches[place.data]:
            source = positions_of(place, one.forest, self._alignment, whole.packed.plan.least)
            tokens = [np.zeros(0, dtype=np.int64), *(np.arange(bounds[i], bounds[i + 1]) for i in one.sequences)]
            masks = [whole.sequences[i].trained for i in one.sequences] if whole.training else None
            found.append(np.concatenate(tokens)[predictions(one.forest, source, masks)[0]])
        return np.concatenate(found)

    # ---- on the others

    def _deliver(self, values: Tensor) -> None:
        if len(values):
            dist.send(values, 0, group=self._group)
            self.sent += values.nbytes

    def _receive(self) -> Share:
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, 0, group=self._group)
        message = torch.empty(int(size.item()), dtype=torch.uint8)
        dist.recv(message, 0, group=self._group)
        self.received += size.nbytes + message.nbytes
        header, arrays = _read(message)
        for number in header.forgotten:
            del self._held[number]
        self._held.update(zip((number for number, *_ in header.fresh), arrays, strict=True))

        def sequence(numbers: tuple[int | None, ...]) -> Columns:
            named = zip(_NAMES, numbers, strict=False)
            return Columns(**{name: self._held[number] for name, number in named if number is not None})

        return Share(
            header.plan,
            header.microbatches,
            header.merged_share,
            header.balance,
            tuple([sequence(numbers) for numbers in one] for one in header.columns),
            tuple(None if number is None else self._held[number] for number in header.experts),
        )


def _recorded(whole: Whole, one: PlannedMicrobatch) -> list[ExpertArray]:
    """The engine's choices for the sequences of a micro-batch; nothing where they are not wanted, or not all known."""
    found = [experts for i in one.sequences if whole.experts and (experts := whole.sequences[i].experts) is not None]
    return found if len(found) == len(one.sequences) else []


def _message(header: _Header, arrays: Sequence[_Array]) -> Tensor:
    """uint8: the length of the header, the header, then the arrays, each at a multiple of :data:`_ALIGNMENT`."""
    head = pickle.dumps(header)
    starts = _starts(len(head), [array.nbytes for array in arrays])
    message = np.zeros(starts[-1], dtype=np.uint8)
    message[:_ALIGNMENT] = np.array([len(head)], dtype=np.int64).view(np.uint8)
    message[_ALIGNMENT : _ALIGNMENT + len(head)] = np.frombuffer(head, dtype=np.uint8)
    for start, array in zip(starts, arrays, strict=False):
        message[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    return torch.from_numpy(message)


def _read(message: Tensor) -> tuple[_Header, list[_Array]]:
    """The header, and the arrays as views of the message."""
    whole: _Array = message.numpy()
    length = int(whole[:_ALIGNMENT].view(np.int64)[0])
    header: _Header = pickle.loads(whole[_ALIGNMENT : _ALIGNMENT + length].tobytes())
    kinds = [(np.dtype(kind), shape) for _, kind, shape in header.fresh]
    sizes = [kind.itemsize * int(np.prod(shape)) for kind, shape in kinds]
    starts = _starts(length, sizes)
    return header, [
        whole[start : start + size].view(kind).reshape(shape)
        for start, size, (kind, shape) in zip(starts, sizes, kinds, strict=False)
    ]


def _starts(header: int, sizes: Sequence[int]) -> list[int]:
    """Where each array begins, and where the message ends."""
    rounded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    return list(itertools.accumulate(rounded, initial=_ALIGNMENT + -(-header // _ALIGNMENT) * _ALIGNMENT))


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work


def _finish(under_way: deque[tuple[dist.Work, ...]], kept: deque[tuple[Tensor, ...]]) -> None:
    for work in under_way.popleft():
        work.wait()
    kept.popleft()
