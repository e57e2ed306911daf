"""A batch goes to the ranks that use it: each gets the micro-batches of its data-parallel index, and no more of them
than its part of the model reads.

    rank 0                                                                every other rank
    BatchSharder.plan ──► GlobalBatch ──► shard ── header with arrays ──► shard ──► RankBatch ──► its micro-batches
    scores of the batch ◄───────────── gather_scores ◄──── float32 ────── last stages

==================  =======================================================================
first stage         ids of its sequences
last stage          ids, and to train what the loss reads
every stage         lengths and prefix trees; expert choices of its own layers and positions
==================  =======================================================================

A rank keeps what it got for as long as rank 0 keeps the array: what is scored first and trained on then has its ids and
expert choices sent once, and is packed once. Arrays that were sent are read-only from then on, so that no rank can have
another version.

Without a group every rank has the whole batch, and takes its share of it without a message.
"""

from __future__ import annotations

import io
import itertools
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from mua.config.schema import MegatronConfig
from mua.megatron.architecture import Architecture, Workload
from mua.megatron.microbatch import OF_LOSS, Columns, Place, expert_rows, positions_of, predictions
from mua.megatron.packing import Alignment, Packed, PlannedMicrobatch, check_first_tokens, check_ids, pack
from mua.megatron.parallel import device
from mua.types import ExpertArray, Float32Array, TrainSequence
from mua.utils.collective import gathered

_IN_FLIGHT = 2
"""Shares that are on their way at a time: rank 0 holds a copy of each."""
_NAMES = ("ids", *OF_LOSS)


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """A batch where all of it is known. It is pickled as None: ranks get their shares instead."""

    sequences: Sequence[TrainSequence]
    packed: Packed
    training: bool
    """Whether the loss's columns are read, not only ids."""
    experts: bool
    """Whether the engine's expert choices are."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def recorded(self, planned: PlannedMicrobatch) -> list[ExpertArray]:
        """The engine's choices for the sequences of a micro-batch; nothing where not wanted, or not all known."""
        found = [self.sequences[i].experts for i in planned.sequences] if self.experts else []
        known = [experts for experts in found if experts is not None]
        return known if len(known) == len(found) else []


@dataclass(frozen=True, slots=True)
class RankBatch:
    """One rank's part of a batch."""

    packed: Packed
    """Of the whole batch; of a rank that was sent its share only with this rank's micro-batches."""
    microbatches: tuple[PlannedMicrobatch, ...]
    """Its own."""
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

    packed: Packed
    """With the rank's own micro-batches alone."""
    columns: tuple[tuple[tuple[int | None, ...], ...], ...]
    """Of each of its micro-batches, of each sequence, by :data:`_NAMES`."""
    experts: tuple[int | None, ...]
    fresh: dict[int, _Array]
    """Arrays that the rank does not have yet, by number."""
    forgotten: tuple[int, ...]


class BatchSharder:
    """Gives every rank its share of a batch.

    Args:
        chunks: this rank's part of the model, with the Hugging Face configuration attached.
        group: a gloo group of all ranks, of which rank 0 alone has batches; None: all have them. Collective.
    """

    def __init__(
        self, chunks: Sequence[GPTModel], megatron: MegatronConfig, group: dist.ProcessGroup | None = None
    ) -> None:
        self._megatron = megatron
        self._hf_config = chunks[0].hf_config
        self._workload = Workload.of(Architecture.from_hf(self._hf_config))
        self._alignment = Alignment.of(megatron)
        self._group = group
        self.place = Place.of(chunks)
        self._places = [self.place] if group is None else gathered(self.place, group)
        self.sent = self.received = 0
        """Bytes that this rank has sent and received."""
        self._received_by = [0] * len(self._places)
        """On rank 0: bytes that went to each rank since :meth:`metrics`."""
        self._returned = 0
        self._packed: Packed | None = None
        self._packed_ids: list[weakref.ref[_Array]] = []
        """Of the sequences that ``_packed`` holds."""
        self._known: dict[tuple[Any, ...], _Sent] = {}
        self._numbers = itertools.count()
        self._held: dict[int, _Array] = {}

    def plan(self, sequences: Sequence[TrainSequence], *, training: bool, experts: bool = False) -> GlobalBatch:
        """Which rank computes what of a batch, to train on it or to score it. Not collective.

        Sequences that are scored and then trained on are packed once.

        Args:
            experts: the engine's expert choices are read.

        Raises:
            MuaError: a sequence is longer than a micro-batch, holds a token the model lacks or, to train, trains its
                first token.
        """
        if training:
            check_first_tokens(sequences)
        check_ids(sequences, self._hf_config["vocab_size"])
        ids = [sequence.ids for sequence in sequences]
        same = len(ids) == len(self._packed_ids) and all(k() is a for k, a in zip(self._packed_ids, ids, strict=True))
        if self._packed is None or not same:
            self._packed = pack(ids, self._megatron, self._workload)
            self._packed_ids = [weakref.ref(array) for array in ids]
        return GlobalBatch(sequences, self._packed, training, experts)

    def shard(self, batch: GlobalBatch | None) -> RankBatch:
        """This rank's share of ``batch``, which only rank 0 has, or every rank. Collective.

        Raises:
            RuntimeError: the connection to another rank broke, or it did not answer in the group's time.
        """
        if batch is None:
            size = torch.empty(1, dtype=torch.int64)
            dist.recv(size, 0, group=self._group)
            message = torch.empty(int(size.item()), dtype=torch.uint8)
            dist.recv(message, 0, group=self._group)
            self.received += size.nbytes + message.nbytes
            header: _Header = pickle.loads(message.numpy().data)
            for number in header.forgotten:
                del self._held[number]
            self._held |= header.fresh

            def sequence(numbers: tuple[int | None, ...]) -> Columns:
                named = zip(_NAMES, numbers, strict=False)
                return Columns(**{name: self._held[number] for name, number in named if number is not None})

            return RankBatch(
                header.packed,
                header.packed.microbatches[0],
                tuple([sequence(numbers) for numbers in one] for one in header.columns),
                tuple(None if number is None else self._held[number] for number in header.experts),
            )
        if self._group is not None:
            self._send(batch)
        planned = batch.packed.microbatches[self.place.data]
        return RankBatch(
            batch.packed,
            planned,
            tuple([batch.sequences[i] for i in one.sequences] for one in planned),
            tuple(
                expert_rows(recorded, one, self._alignment, batch.packed.plan.least, self.place)
                if self.place.layers and (recorded := batch.recorded(one))
                else None
                for one in planned
            ),
        )

    def gather_scores(self, batch: GlobalBatch | None, values: Sequence[Tensor]) -> list[Float32Array]:
        """Of each sequence one number for each token, float32 ``[T]``, 0.0 for the first and, where ``batch`` is for
        training, for all that are not trained. Collective.

        Args:
            values: what a last stage found for the scored tokens of each of its micro-batches, float32 ``[N]``.

        Returns:
            in the order of the batch; on ranks that do not know it, nothing.
        """
        own = torch.cat([torch.zeros(0), *(one.cpu() for one in values)])
        if batch is None:
            if self.place.reports and len(own):
                dist.send(own, 0, group=self._group)
                self.sent += own.nbytes
            return []
        bounds = np.cumsum([0, *(len(sequence) for sequence in batch.sequences)])
        flat = np.zeros(int(bounds[-1]), dtype=np.float32)
        for rank, place in enumerate(self._places):
            if not place.reports:
                continue
            # Where its scores belong in the sequences laid end to end, in the order in which it has them.
            parts = [np.zeros(0, dtype=np.int64)]
            for one in batch.packed.microbatches[place.data]:
                source = positions_of(place, one, self._alignment, batch.packed.plan.least)
                tokens = [np.arange(bounds[i], bounds[i + 1]) for i in one.sequences]
                masks = [batch.sequences[i].trained for i in one.sequences] if batch.training else None
                if tokens:
                    parts.append(np.concatenate(tokens)[predictions(one, source, masks)[0]])
            indices = np.concatenate(parts)
            found = own
            if self._group is not None and rank != dist.get_rank() and len(indices):
                found = torch.empty(len(indices), dtype=torch.float32)
                dist.recv(found, rank, group=self._group)
                self._returned += found.nbytes
                self.received += found.nbytes
            if len(indices):
                flat[indices] = found.numpy()
        if self._group is None and dist.get_world_size() > 1:
            summed = torch.from_numpy(flat).to(device())
            dist.all_reduce(summed)
            flat = summed.cpu().numpy()
        return [flat[start:end].copy() for start, end in itertools.pairwise(bounds)]

    def metrics(self) -> dict[str, float]:
        """On rank 0, since the last call: ``train/batch/bytes_sent`` to the others, ``bytes_received_max`` by the
        one with most, ``bytes_returned`` with scores. Nothing where there is nobody to send to."""
        if len(self._places) == 1 or dist.get_rank() != 0:
            return {}
        found = {
            "train/batch/bytes_sent": float(sum(self._received_by)),
            "train/batch/bytes_received_max": float(max(self._received_by)),
            "train/batch/bytes_returned": float(self._returned),
        }
        self._received_by = [0] * len(self._places)
        self._returned = 0
        return found

    def _send(self, batch: GlobalBatch) -> None:
        """On rank 0: every other rank's share."""
        forgotten: dict[int, list[int]] = {}
        for key, sent in [*self._known.items()]:
            if any(one() is None for one in sent.of):  # an array that it is made of is gone here
                del self._known[key]
                for rank in sent.holders:
                    forgotten.setdefault(rank, []).append(sent.number)
        for sequence in batch.sequences:
            for name in (*_NAMES, "experts"):
                if (array := getattr(sequence, name)) is not None:
                    array.flags.writeable = False
        in_flight: deque[list[tuple[Any, Tensor]]] = deque()
        for rank, place in enumerate(self._places):
            if rank == dist.get_rank():
                continue
            data = io.BytesIO()
            pickle.dump(self._header(batch, rank, place, tuple(forgotten.get(rank, ()))), data, protocol=5)
            message = torch.frombuffer(data.getbuffer(), dtype=torch.uint8)
            size = torch.tensor([message.nbytes], dtype=torch.int64)
            in_flight.append([(dist.isend(one, rank, group=self._group), one) for one in (size, message)])
            self._received_by[rank] += size.nbytes + message.nbytes
            self.sent += size.nbytes + message.nbytes
            if len(in_flight) >= _IN_FLIGHT:
                for work, _ in in_flight.popleft():
                    work.wait()
        for work, _ in itertools.chain.from_iterable(in_flight):
            work.wait()

    def _header(self, batch: GlobalBatch, rank: int, place: Place, forgotten: tuple[int, ...]) -> _Header:
        """What one rank gets."""
        fresh: dict[int, _Array] = {}

        def number(key: tuple[Any, ...], of: Sequence[_Array], make: Callable[[], _Array]) -> int:
            sent = self._known.get(key)
            if sent is None:
                sent = self._known[key] = _Sent(next(self._numbers), tuple(map(weakref.ref, of)))
            if rank not in sent.holders:
                sent.holders.add(rank)
                fresh[sent.number] = np.ascontiguousarray(make())
            return sent.number

        names = () if not (place.first or place.last) else _NAMES if place.last and batch.training else ("ids",)

        def columns(sequence: TrainSequence) -> tuple[int | None, ...]:
            arrays = [getattr(sequence, name) for name in names]
            return tuple(None if a is None else number((id(a),), [a], lambda a=a: a) for a in arrays)  # type: ignore[misc]

        def experts(one: PlannedMicrobatch) -> int | None:
            recorded = batch.recorded(one) if place.layers else []
            if not recorded:
                return None
            least = batch.packed.plan.least
            # The rows of a rank follow from its place, which stays, the arrays and how they are laid out.
            key = (*map(id, recorded), one.forest, least)
            return number(key, recorded, lambda: expert_rows(recorded, one, self._alignment, least, place))

        planned = batch.packed.microbatches[place.data]
        header = _Header(
            replace(batch.packed, microbatches=(planned,)),
            tuple(tuple(columns(batch.sequences[i]) for i in one.sequences) for one in planned),
            tuple(experts(one) for one in planned),
            fresh,
            forgotten,
        )
        return header
