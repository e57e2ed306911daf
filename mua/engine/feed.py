"""Where the weights of an update come from: a stream of tensors, or all trainer ranks together.

    rank 0                               other ranks
    shipments(targets) ── announces ──►  follow(targets)
      "next"           ── broadcast ──►  Resharder.assemble(k) together: leaders get bucket k
      handles of every machine's own bucket ◄── leaders: one for each engine rank of their machine
    yields a Shipment                    ...
      "stop", when the update broke off ► returns

A bucket is given up when the one after the next is asked for: two exist at a time, one being loaded by the engines and
one being put together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_bridge.plan import ModelPlan
from megatron_bridge.reshard import ALIGNMENT, Resharder
from mua.config.schema import EngineConfig
from mua.engine.nodes import Nodes
from mua.engine.weights import Bucket, Buffers, buckets, loaded_together


@dataclass(frozen=True, slots=True)
class Shipment:
    """One bucket for some engines."""

    bucket: Bucket
    """As this rank holds it."""
    handles: list[list[str]]
    """Of each engine, for each of its tensor-parallel ranks, a payload that names memory of its own machine. Empty
    where engines are reached by broadcast."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes between trainer ranks in one update; see :class:`mua.engine.weights.SyncReport`."""

    moved: int = 0
    needed: int = 0


class Feed(ABC):
    """The weights of one policy version."""

    @abstractmethod
    def shipments(self, targets: Sequence[int]) -> Iterator[Shipment]:
        """All buckets, for engines on the machines numbered ``targets``. Advance and close it on one thread."""

    @abstractmethod
    def moved(self) -> Moved:
        """Bytes moved by the last complete iteration."""


class TensorFeed(Feed):
    """Full tensors under their Hugging Face names, in this process. Reaches engines of this machine, or a broadcast."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]], config: EngineConfig) -> None:
        self._tensors = tensors
        self._config = config

    def shipments(self, targets: Sequence[int]) -> Iterator[Shipment]:
        for bucket in buckets(self._tensors, self._config.bucket_bytes, alignment=_alignment(self._config)):
            yield Shipment(bucket, [_handles(bucket, self._config) for _ in targets])

    def moved(self) -> Moved:
        return Moved()


class TrainerFeed(Feed):
    """The trainer's shards, resharded by all ranks. One on every rank; rank 0's is the feed, the others follow it.

    Args:
        model: entered for every pass over the buckets: the plan of the model, the same each time, whose weights are in
            place inside. Collective.
        group: a gloo group of all ranks; None for a single process.
        announce: on rank 0, makes the other ranks call :meth:`follow` with the same targets.
        meet: before each collective of the group, brings all ranks there, however long rank 0's engines take.
    """

    def __init__(
        self,
        model: Callable[[], AbstractContextManager[ModelPlan]],
        config: EngineConfig,
        nodes: Nodes,
        group: dist.ProcessGroup | None,
        announce: Callable[[Sequence[int]], None],
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._meet = meet
        self._config = config
        self._nodes = nodes
        self._group = group
        self._announce = announce
        self._resharder: Resharder | None = None
        self._buffers: Buffers | None = None
        self._moved = Moved()

    def shipments(self, targets: Sequence[int]) -> Iterator[Shipment]:
        self._announce(targets)
        with self._prepared() as resharder:
            try:
                for index in range(len(resharder.buckets)):
                    self._go_on(True)
                    shipment = self._assemble(index, targets)
                    assert shipment is not None, "rank 0 feeds"
                    yield shipment
            except GeneratorExit:
                self._go_on(False)
                raise
            self._count()

    def follow(self, targets: Sequence[int]) -> None:
        """On every other rank: take part in one iteration over the buckets on rank 0."""
        with self._prepared() as resharder:
            for index in range(len(resharder.buckets)):
                if not self._go_on():
                    return
                self._assemble(index, targets)
            self._count()

    def moved(self) -> Moved:
        return self._moved

    @contextmanager
    def _prepared(self) -> Iterator[Resharder]:
        """The routes, planned the first time; the buckets' memory is given back at the end."""
        with self._model() as plan:
            if plan.device.type == "cuda":
                torch.cuda.set_device(plan.device)  # a setting of the thread, and this may be a new one
            if self._resharder is None or self._buffers is None:
                self._resharder = self._plan_routes(plan)
                largest = max(layout.nbytes for layout in self._resharder.buckets)
                self._buffers = Buffers(plan.device, largest)
            self._resharder.reset()
            try:
                yield self._resharder
            finally:
                self._buffers.clear()

    def _plan_routes(self, plan: ModelPlan) -> Resharder:
        config = self._config
        return Resharder(
            plan,
            self._nodes.leaders if config.transport == "colocated" else [0],
            config.bucket_bytes,
            node=self._nodes.own,
            alignment=_alignment(config),
            together=loaded_together,
        )

    def _assemble(self, index: int, targets: Sequence[int]) -> Shipment | None:
        assert self._resharder is not None
        assert self._buffers is not None
        flat = self._resharder.assemble(index, self._buffers.take)
        handles: list[list[str]] = []
        bucket = None
        if flat is not None:
            bucket = Bucket(self._resharder.buckets[index], flat)
            handles = [_handles(bucket, self._config) for target in targets if target == self._nodes.own]
        if self._nodes.several and self._config.transport == "colocated":
            handles = self._collect(handles, targets)
        return None if bucket is None else Shipment(bucket, handles)

    def _collect(self, own: list[list[str]], targets: Sequence[int]) -> list[list[str]]:
        """On rank 0 the handles of all machines, in order of ``targets``; nothing on the others."""
        leading = dist.get_rank() == 0
        gathered: list[Any] | None = [None] * dist.get_world_size() if leading else None
        dist.gather_object(own, gathered, dst=0, group=self._group)
        if gathered is None:
            return []
        by_node = {node: iter(gathered[leader]) for node, leader in enumerate(self._nodes.leaders)}
        return [next(by_node[target]) for target in targets]

    def _go_on(self, wanted: bool = False) -> bool:
        """Whether there is to be a next bucket, as rank 0 says."""
        if self._group is None:
            return wanted
        self._meet()
        said = torch.tensor([wanted], dtype=torch.uint8)
        dist.broadcast(said, src=0, group=self._group)
        return bool(said.item())

    def _count(self) -> None:
        """Sum the bytes over all ranks."""
        assert self._resharder is not None
        sums = torch.tensor([self._resharder.traffic.received, self._resharder.traffic.needed], dtype=torch.int64)
        if self._group is not None:
            self._meet()
            dist.all_reduce(sums, group=self._group)
        self._moved = Moved(*map(int, sums.tolist()))


def _alignment(config: EngineConfig) -> int:
    """A bucket that is broadcast has no gaps: its receivers derive the offsets from the shapes."""
    return ALIGNMENT if config.transport == "colocated" else 1


def _handles(bucket: Bucket, config: EngineConfig) -> list[str]:
    if config.transport == "broadcast":
        return []
    return [bucket.payload() for _ in range(config.tensor_parallel)]
