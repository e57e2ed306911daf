"""The weights of a sync begin here, with the trainer, and go one way through three rooms:

    trainer       TrainerSource.buckets          all ranks put one bucket together (this module)
                          │ WeightBucket: a flat buffer, a handle of it for every engine rank
    engine sync   EnginePool.update_weights      closes the gate, empties the engines (pool.py)
                  └─► push                       asks for a bucket while the one before it is loaded (sync.py)
                          │ the handles over HTTP, or one broadcast (broadcast.py)
    engine        EngineClient.control ─► SGLang loads the bucket (sglang_client.py)

In the first room rank 0 leads:

    rank 0                               other ranks
    buckets(nodes)    ── announces ──►   follow(nodes)
      "next"          ── broadcast ──►   Resharder.assemble(k) together: leaders get bucket k
      handles of every machine's own bucket ◄── leaders: one for each engine rank of their machine
    yields a bucket                      ...
      "stop", when the update broke off ► returns

Two buckets exist at a time, one being loaded by the engines and one being put together.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_bridge.plan import ModelPlan
from megatron_bridge.reshard import ALIGNMENT, BucketLayout, Resharder
from mua.compat.shared_weights import shared_buffer, shared_handle
from mua.config.schema import EngineConfig
from mua.engine.host import Nodes


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Some named tensors in one flat uint8 buffer ``[layout.nbytes]``, which may be larger than what is in it."""

    layout: BucketLayout
    flat: torch.Tensor
    """Empty on a rank that hands nothing on."""
    handles: list[list[str]] = field(default_factory=list)
    """Of each engine, for each of its tensor-parallel ranks, a handle of memory of its own machine. Empty where
    engines are reached by broadcast."""


class WeightSource(Protocol):
    """The weights of one policy version; they may be asked for again."""

    moved: int
    """Bytes between trainer ranks in the last complete pass; see :class:`SyncReport`."""
    needed: int

    def buckets(self, nodes: Sequence[int]) -> Generator[WeightBucket, None, None]:
        """All weights, for one engine on each of the machines ``nodes``. Advance and close it on one thread.

        A bucket is given up when the one after the next is asked for.
        """
        ...


class TrainerSource:
    """The trainer's shards, resharded by all ranks, as a :class:`WeightSource`.

    One on every rank; rank 0's is the source, the others follow it.

    Args:
        model: entered for every pass over the buckets: the plan of the model, the same each time, whose weights are in
            place inside. Collective.
        group: a gloo group of all ranks; None for a single process.
        announce: on rank 0, makes the other ranks call :meth:`follow` with the same machines.
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
        self.moved = self.needed = 0
        self._model = model
        self._config = config
        self._nodes = nodes
        self._group = group
        self._announce = announce
        self._meet = meet
        self._colocated = config.transport != "broadcast"
        self._resharder: Resharder | None = None

    def buckets(self, nodes: Sequence[int]) -> Generator[WeightBucket, None, None]:
        """See :meth:`WeightSource.buckets`."""
        self._announce(nodes)
        yield from self._pass(nodes, leads=True)

    def follow(self, nodes: Sequence[int]) -> None:
        """On every other rank: take part in one pass over the buckets on rank 0."""
        for _ in self._pass(nodes):
            pass

    def _pass(self, nodes: Sequence[int], *, leads: bool = False) -> Generator[WeightBucket, None, None]:
        """Routes are planned the first time; the buckets' memory is given back at the end."""
        with self._model() as plan:
            if plan.device.type == "cuda":
                torch.cuda.set_device(plan.device)  # a setting of the thread, and this may be a new one
            if self._resharder is None:
                self._resharder = Resharder(
                    plan,
                    self._nodes.leaders if self._colocated else [0],
                    self._config.bucket_bytes,
                    node=self._nodes.own,
                    # What is broadcast has no gaps: its receivers derive the offsets from the shapes.
                    alignment=ALIGNMENT if self._colocated else 1,
                    together=loaded_together,
                )
            resharder = self._resharder
            resharder.reset()
            buffers = Buffers(plan.device, max(layout.nbytes for layout in resharder.buckets))
            try:
                for index in range(len(resharder.buckets)):
                    if not self._go_on(leads):
                        return
                    yield self._assemble(resharder, index, buffers, nodes)
            except GeneratorExit:
                self._go_on(False)
                raise
            sums = torch.tensor([resharder.traffic.received, resharder.traffic.needed], dtype=torch.int64)
            if self._group is not None:
                self._meet()
                dist.all_reduce(sums, group=self._group)
            self.moved, self.needed = map(int, sums.tolist())

    def _go_on(self, wanted: bool) -> bool:
        """Whether there is to be a next bucket, as rank 0 says."""
        if self._group is None:
            return wanted
        self._meet()
        said = torch.tensor([wanted], dtype=torch.uint8)
        dist.broadcast(said, src=0, group=self._group)
        return bool(said.item())

    def _assemble(self, resharder: Resharder, index: int, buffers: Buffers, nodes: Sequence[int]) -> WeightBucket:
        layout, flat = resharder.buckets[index], resharder.assemble(index, buffers.take)
        handles: list[list[str]] = []
        if flat is not None and self._colocated:
            ranks = range(self._config.tensor_parallel)
            handles = [[shared_handle(layout, flat) for _ in ranks] for node in nodes if node == self._nodes.own]
        if self._nodes.several and self._colocated:  # rank 0 gets those of all machines, in order of ``nodes``
            leading = dist.get_rank() == 0
            gathered: list[Any] | None = [None] * dist.get_world_size() if leading else None
            dist.gather_object(handles, gathered, dst=0, group=self._group)
            by_node = {n: iter(gathered[leader]) for n, leader in enumerate(self._nodes.leaders)} if gathered else {}
            handles = [next(by_node[node]) for node in nodes if by_node]
        return WeightBucket(layout, torch.empty(0, dtype=torch.uint8) if flat is None else flat, handles)


class Buffers:
    """Two buffers taken in turn, so that one is filled while engines read the other.

    On CPU the two are used again, because fresh shared memory costs more than copying into it; engines have read a
    bucket when they answer. On a GPU an answer only says that the copies were enqueued: every bucket gets fresh memory,
    and torch keeps what a receiver still has open.
    """

    def __init__(self, device: torch.device, largest: int) -> None:
        self._device = device
        self._largest = largest
        self._pair: deque[torch.Tensor] = deque(maxlen=2)

    def take(self, nbytes: int) -> torch.Tensor:
        """The buffer taken before the last one, at least ``nbytes`` long."""
        if self._device.type == "cpu" and len(self._pair) == 2:
            self._pair.rotate()
        else:
            self._pair.append(shared_buffer(self._largest if self._device.type == "cpu" else nbytes, self._device))
        return self._pair[-1]


_ONE_CALL = re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)\.")


def loaded_together(name: str) -> str:
    """A key that tensors share which SGLang fuses within one call of its loader, and would lose apart.

    Those are the two down projections of multi-head latent attention; of the others it takes one at a time.
    """
    return _ONE_CALL.sub(".fused_qkv_a_proj_with_mqa.", name)
