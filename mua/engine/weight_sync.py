"""The weights of a sync begin here, with the trainer, and go one way through three rooms:

    trainer       TrainerSource.buckets          all ranks put one bucket together (this module)
                          │ WeightBucket: a handle of memory for every engine rank, or the group it is broadcast in
    engine sync   EnginePool.update_weights      closes the gate, empties the engines (pool.py)
                  └─► WeightTransfer             asks for a bucket while the one before it is loaded (sync.py)
                          │ the handles over HTTP, or a broadcast by the root itself (broadcast.py)
    engine        EngineClient.control ─► SGLang loads the bucket (sglang_client.py)

In the first room rank 0 leads:

    rank 0                               other ranks
    buckets(engines)  ── announces ──►   follow(engines)
      "next"          ── broadcast ──►   Resharder.assemble(k) together: the ranks that feed engines get bucket k
      handles ◄──── each root: for the engine ranks on its own GPU
    yields a bucket                      ...
      "stop", when the update broke off ► returns

Colocated, the trainer rank that shares a GPU with an engine rank feeds it: rank r of the engine in place i of a machine
is on GPU i t + r, t being engine.tensor_parallel. Its bucket lies on that GPU and holds what this engine rank needs,
and nothing else. By broadcast, every root sends the buckets of which it holds the most itself.

Two buckets exist at a time, one being loaded by the engines and one being put together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import Any, Protocol, Self, TypeVar

import torch
import torch.distributed as dist

from megatron_bridge.engine_shards import EngineRanks, engine_parameters
from megatron_bridge.families import family_of
from megatron_bridge.family import HfConfig
from megatron_bridge.plan import ModelPlan, PlannedParameter
from megatron_bridge.reshard import BucketLayout, Resharder, Target, engine_slices, whole_tensors
from mua.compat.sglang_shards import LOADER, RECEIPT_BYTES, refusal
from mua.compat.shared_weights import shared_buffer, shared_handle, slices_handle
from mua.config.schema import EngineConfig
from mua.engine.cluster import Nodes, address_towards, trainer_address
from mua.engine.engine_handle import EngineHandle, EnginePlace, Targets
from mua.utils.collective import gathered
from mua.utils.errors import ConfigError, EngineError

_log = logging.getLogger(__name__)
_OTHER_LAYOUT = frozenset(
    {
        "quantization", "torchao_config", "load_format", "enable_dp_attention", "dp_size", "data_parallel_size",
        "pp_size", "pipeline_parallel_size", "moe_a2a_backend", "moe_runner_backend", "enable_eplb",
        "ep_num_redundant_experts", "enable_lora", "moe_dense_tp_size", "enable_dp_lm_head",
    }
)  # fmt: skip
"""Arguments under which an engine keeps parameters otherwise than :mod:`megatron_bridge.engine_shards` says."""
_LEAST_BAND_BYTES = 1 << 16
"""Of a parameter in bands; shorter copies would cost more than their bytes."""
_EXPERT_RANKS = ("ep_size", "expert_parallel_size", "ep")


def engine_target(
    parameters: Sequence[PlannedParameter], hf_config: HfConfig, config: EngineConfig
) -> tuple[Target, bool]:
    """What colocated engine ranks are handed, and whether it is slices, a variant for each rank.

    Args:
        parameters: of the whole model; what is in one bucket comes from as many of their owners as possible.

    Raises:
        ConfigError: slices are asked for and not possible.
        BridgeError: the model does not divide by the engine's ranks.
    """
    specs = [spec for parameter in parameters if not parameter.tied_copy for spec in parameter.sources()]
    extra = {key.replace("-", "_"): value for key, value in config.extra.items()}
    family = family_of(hf_config)
    reason = "engine.load says so" if config.load == "tensors" else ""
    if family.engine is None:
        reason = reason or f"the family {family.model_type!r} has no table of SGLang's parameters"
    if others := sorted(_OTHER_LAYOUT & {key for key, value in extra.items() if value is not False}):
        reason = reason or f"engine.extra.{others[0]} changes how the engine keeps its weights"
    if reason:
        if config.load == "slices":
            raise ConfigError(f"engine.load: slices is not possible: {reason}; set it to auto or tensors")
        _log.info("engines are handed whole tensors: %s", reason)
        return whole_tensors(specs), False
    assert family.engine is not None
    experts = next((int(extra[key]) for key in _EXPERT_RANKS if key in extra), 1)
    ranks = EngineRanks(config.tensor_parallel, experts)
    held = engine_parameters(family.engine, specs, hf_config, ranks)
    owners = len({min(parameter.owners) for parameter in parameters})
    return engine_slices(held, max(config.bucket_bytes // owners, _LEAST_BAND_BYTES)), True


def broadcast_roots(config: EngineConfig, world: int) -> list[int]:
    """Global ranks that broadcast, evenly over pipeline stages and machines."""
    count = min(config.broadcast_roots, world)
    return [world * number // count for number in range(count)]


def assign_roots(held: Mapping[int, Sequence[int]], sizes: Sequence[int]) -> list[int]:
    """The root of every bucket: the one that holds the most of it, and of those the one with the least to do.

    Args:
        held: of every root the bytes of each bucket that it holds itself.
        sizes: bytes of the buckets.
    """
    duties, found = dict.fromkeys(held, 0), []
    for index, size in enumerate(sizes):
        found.append(max(held, key=lambda rank: (held[rank][index], -duties[rank], -rank)))
        duties[found[-1]] += size
    return found


_ONE_CALL = re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)\.")


def fused_key(name: str) -> str:
    """A key that tensors share which SGLang fuses within one call of its loader, and would lose apart.

    Those are the two down projections of multi-head latent attention; of the others it takes one at a time.
    """
    return _ONE_CALL.sub(".fused_qkv_a_proj_with_mqa.", name)


_Value = TypeVar("_Value")
WHOLE_TENSORS = "flattened_bucket"
"""SGLang's ``load_format`` of whole Hugging Face tensors in one buffer."""


@dataclass(frozen=True, slots=True)
class Connect:
    """Engines are to join these process groups, while their roots wait for them."""

    groups: Mapping[str, tuple[str, int]]
    """By name the address and port of the root."""
    size: int
    """Processes in each: the root and all engine ranks."""
    backend: str
    """gloo or nccl."""


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Some named tensors in one flat uint8 buffer ``[layout.nbytes]``, in one variant or several."""

    layout: BucketLayout
    handles: list[list[str]] = field(default_factory=list)
    """Of each engine, for each of its tensor-parallel ranks, a handle of memory of its own GPU. Empty where engines are
    reached by broadcast."""
    group: str = ""
    """Name of the process group it is broadcast in."""
    load_format: str = WHOLE_TENSORS
    """How SGLang is to take it."""
    flat: torch.Tensor | None = field(default=None, repr=False)
    """The buffer, where rank 0 feeds an engine itself."""


WeightGenerator = Generator[WeightBucket | Connect | None, None, None]


class WeightSource(Protocol):
    """The weights of one policy version; they may be asked for again."""

    moved: int
    """Bytes between trainer ranks in the last complete pass; see :class:`SyncReport`."""
    needed: int

    def buckets(self, engines: Sequence[EnginePlace], groups: int = 0) -> WeightGenerator:
        """All weights for these engines. Advance and close it on one thread.

        By broadcast, a first :class:`Connect` is yielded where ``groups``, which numbers the sets of engines, is a new
        one. After the last bucket, None may be yielded: the next advance, when all is loaded, settles the pass, and
        raises :class:`EngineError` where an engine refused a bucket. A bucket is broadcast during the advance after
        it, and given up when the one after the next is asked for.
        """
        ...


class TrainerSource:
    """The trainer's shards, resharded by all ranks, as a :class:`WeightSource`.

    One on every rank; rank 0's is the source, the others follow it.

    Args:
        model: entered for every pass over the buckets: the plan of the model, the same each time, whose weights are in
            place inside. Collective.
        group: a gloo group of all ranks; None for a single process.
        announce: on rank 0, makes the other ranks call :meth:`follow` with the same arguments.
        meet: before each collective of the group, brings all ranks there, however long rank 0's engines take.
    """

    def __init__(
        self,
        model: Callable[[], AbstractContextManager[ModelPlan]],
        config: EngineConfig,
        nodes: Nodes,
        group: dist.ProcessGroup | None,
        announce: Callable[[Sequence[EnginePlace], int], None],
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        self.moved = self.needed = 0
        self._model = model
        self._config = config
        self._nodes = nodes
        self._group = group
        self._announce = announce
        self._meet = meet
        self._way: _Colocated | _Broadcast | None = None

    def buckets(self, engines: Sequence[EnginePlace], groups: int = 0) -> WeightGenerator:
        """See :meth:`WeightSource.buckets`."""
        self._announce(engines, groups)
        yield from self._pass(engines, groups, leads=True)

    def follow(self, engines: Sequence[EnginePlace], groups: int = 0) -> None:
        """On every other rank: take part in one pass over the buckets on rank 0."""
        for _ in self._pass(engines, groups):
            pass

    def _pass(self, engines: Sequence[EnginePlace], groups: int, *, leads: bool = False) -> WeightGenerator:
        """Routes are planned the first time; the buckets' memory is given back at the end."""
        with self._model() as plan:
            if plan.device.type == "cuda":
                torch.cuda.set_device(plan.device)  # a setting of the thread, and this may be a new one
            if self._way is None:
                colocated = self._config.transport != "broadcast"
                self._way = (_Colocated if colocated else _Broadcast)(plan, self._config, self._nodes, self._gathered)
            way = self._way
            way.resharder.reset()
            steps = way.steps(plan, [EnginePlace(*engine) for engine in engines], groups)
            try:
                while self._go_on(leads):
                    try:
                        step = next(steps)
                    except StopIteration:
                        break
                    yield step
                else:  # rank 0 has given up
                    way.give_up()
                    return
            except GeneratorExit:
                way.give_up()
                self._go_on(False)
                raise
            traffic = way.resharder.traffic
            sums = torch.tensor([traffic.received, traffic.needed], dtype=torch.int64)
            if self._group is not None:
                self._meet()
                dist.all_reduce(sums, group=self._group)
            self.moved, self.needed = map(int, sums.tolist())
            if leads and way.refusals:
                raise EngineError(f"{way.refusals[0]}; set engine.load: tensors", passing=False)

    def _go_on(self, wanted: bool) -> bool:
        """Whether there is to be a next step, as rank 0 says."""
        if self._group is None:
            return wanted
        self._meet()
        said = torch.tensor([wanted], dtype=torch.uint8)
        dist.broadcast(said, src=0, group=self._group)
        return bool(said.item())

    def _gathered(self, value: _Value) -> list[_Value]:
        """Every rank's value, on rank 0 and, of this rank alone, on the others."""
        if self._group is None:
            return [value]
        box: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(value, box, dst=0, group=self._group)
        return box if box is not None else [value]


class _Colocated:
    """Each trainer rank hands the engine ranks on its GPU what they need; on CPU GPUs are local ranks.

    A CPU may have more engine ranks than trainer ranks; these take turns then.
    """

    def __init__(self, plan: ModelPlan, config: EngineConfig, nodes: Nodes, gather: Callable[..., list[Any]]) -> None:
        self.refusals: list[str] = []
        """Of the last pass, on rank 0: what engines would not take, and why."""
        self._gather = gather
        self._tp = config.tensor_parallel
        self._target, self._slices = engine_target(plan.parameters, plan.hf_config, config)
        self._rank = dist.get_rank()
        self._root: dict[tuple[EnginePlace, int], tuple[int, int]] = {}
        """Of every engine rank the trainer rank that feeds it, and the variant it gets."""
        for node, ranks in enumerate(nodes.ranks):
            if plan.device.type == "cuda" and config.count * self._tp > len(ranks):
                raise ConfigError(
                    f"engine.count {config.count} x engine.tensor_parallel {self._tp}: engines take GPU 0 to "
                    f"{config.count * self._tp - 1} of machine {node}, and the trainer has {len(ranks)} ranks there; "
                    "colocated engines need a trainer rank on each of their GPUs"
                )
            for place in range(config.count):
                for rank in range(self._tp):
                    root = ranks[(place * self._tp + rank) % len(ranks)]
                    self._root[EnginePlace(node, place), rank] = root, rank if self._slices else 0
        roots = defaultdict(set)
        for root, variant in self._root.values():
            roots[root].add(variant)
        self.resharder = Resharder(
            plan,
            {rank: sorted(variants) for rank, variants in sorted(roots.items())},
            config.bucket_bytes,
            target=self._target,
            node=nodes.own,
            together=None if self._slices else fused_key,
        )

    def steps(self, plan: ModelPlan, engines: Sequence[EnginePlace], groups: int) -> WeightGenerator:
        """Every bucket for ``engines``, then None, then what the engines said of them."""
        del groups  # nothing is broadcast
        receivers = [(number, rank) for number in range(len(engines)) for rank in range(self._tp)]
        of_receiver = {(number, rank): self._root[engines[number], rank] for number, rank in receivers}
        roots = sorted({root for root, _ in of_receiver.values()})
        own = {to: variant for to, (root, variant) in of_receiver.items() if root == self._rank}
        room = RECEIPT_BYTES * len(own)
        largest = max(layout.nbytes for layout in self.resharder.buckets) + room
        buffers = {variant: Buffers(plan.device, largest, reuse=self._slices) for variant in own.values()}
        receipts: deque[list[tuple[str, torch.Tensor]]] = deque()
        refused: list[str] = []

        def read(count: int) -> None:
            while len(receipts) > count:
                refused.extend(f"{who}: {said}" for who, told in receipts.popleft() if (said := refusal(told.cpu())))

        for index, layout in enumerate(self.resharder.buckets):
            read(1)  # the buffers of the bucket before the last one are filled again
            flats = self.resharder.assemble(index, lambda v, n: buffers[v].take(n + room), roots)
            handles, told = {}, []
            for place, ((number, rank), variant) in enumerate(own.items()):
                start = layout.nbytes + place * RECEIPT_BYTES
                whole = buffers[variant].last
                if self._slices:
                    whole[start : start + RECEIPT_BYTES].zero_()
                    told.append((f"{engines[number]} rank {rank}", whole[start : start + RECEIPT_BYTES]))
                    handles[number, rank] = slices_handle(layout, self._target.matrices, whole, start)
                else:
                    handles[number, rank] = shared_handle(layout, flats[variant])
            receipts.append(told)
            every = {to: handle for of_rank in self._gather(handles) for to, handle in of_rank.items()}
            of_engine = [[every.get((n, rank), "") for rank in range(self._tp)] for n in range(len(engines))]
            load_format, flat = LOADER if self._slices else WHOLE_TENSORS, next(iter(flats.values()), None)
            yield WeightBucket(layout, of_engine, load_format=load_format, flat=flat)
        yield None
        read(0)
        self.refusals = [said for of_rank in self._gather(refused) for said in of_rank]

    def give_up(self) -> None:
        """The pass is not finished."""
        self.refusals = []


class _Broadcast:
    """Some trainer ranks, spread evenly over stages and machines, broadcast whole tensors to all engine ranks."""

    def __init__(self, plan: ModelPlan, config: EngineConfig, nodes: Nodes, gather: Callable[..., list[Any]]) -> None:
        self.refusals: list[str] = []
        self._gather = gather
        self._config = config
        self._rank, world = dist.get_rank(), dist.get_world_size()
        self._roots = broadcast_roots(config, world)
        self._own = BroadcastRoot(config, cuda=plan.device.type == "cuda")
        self._groups = 0
        self.resharder = Resharder(
            plan,
            dict.fromkeys(self._roots, (0,)),
            config.bucket_bytes,
            node=nodes.own,
            alignment=1,  # what is broadcast has no gaps: its receivers derive the offsets from the shapes
            together=fused_key,
            by_turns=False,
        )
        held = [self.resharder.held] if world == 1 else gathered(self.resharder.held)
        sizes = [layout.nbytes for layout in self.resharder.buckets]
        self._root_of = assign_roots({rank: held[rank] for rank in self._roots}, sizes)

    def steps(self, plan: ModelPlan, engines: Sequence[EnginePlace], groups: int) -> WeightGenerator:
        """Groups with ``engines`` if there are none, every bucket, then None."""
        if groups != self._groups:
            yield from self._connect(len(engines), groups)
        layouts = self.resharder.buckets
        buffers = Buffers(plan.device, max(layout.nbytes for layout in layouts))
        for index, (layout, root) in enumerate(zip(layouts, self._root_of, strict=True)):
            flats = self.resharder.assemble(index, lambda _, nbytes: buffers.take(nbytes), [root])
            yield WeightBucket(layout, group=self._name(root))
            if self._rank == root:
                self._own.send(flats[0])
        yield None
        self._own.finish()

    def _connect(self, engines: int, groups: int) -> WeightGenerator:
        """Every root in a group with the ranks of ``engines``; they are asked for one group after the other."""
        self._groups = groups
        own = self._own.listen() if self._rank in self._roots else None
        found = self._gather(own)
        size = 1 + engines * self._config.tensor_parallel
        where = {self._name(rank): found[rank] for rank in self._roots} if len(found) > max(self._roots) else {}
        yield Connect({name: address for name, address in where.items() if address}, size, self._own.backend)
        if own is not None:
            self._own.form(self._name(self._rank), size)

    def _name(self, root: int) -> str:
        return f"mua-weights-{self._groups}-{root}"

    def give_up(self) -> None:
        """The next pass needs new groups: what is under way in these is unknown."""
        self._groups = -1
        self._own.abandon()


class Buffers:
    """Two buffers taken in turn, so that one is filled while engines read the other.

    Fresh shared memory costs more than copying into it. Engines have read a bucket when they answer on a CPU; on a GPU
    only where ``reuse`` says so. Else an answer says that the copies were enqueued, every bucket gets fresh memory, and
    torch keeps what a receiver still has open.
    """

    def __init__(self, device: torch.device, largest: int, *, reuse: bool = False) -> None:
        self._device = device
        self._largest = largest
        self._reuse = reuse or device.type == "cpu"
        self._pair: deque[torch.Tensor] = deque(maxlen=2)

    @property
    def last(self) -> torch.Tensor:
        """The buffer taken last, in whole."""
        return self._pair[-1]

    def take(self, nbytes: int) -> torch.Tensor:
        """The buffer taken before the last one, at least ``nbytes`` long."""
        if self._reuse and len(self._pair) == 2:
            self._pair.rotate()
        else:
            self._pair.append(shared_buffer(self._largest if self._reuse else nbytes, self._device))
        return self._pair[-1]


_HASH_SECONDS = 300.0
"""Deadline of hashing, or overwriting, all weights."""
_METRICS = (
    "bytes", "tensors", "buckets", "version", "seconds", "pause_seconds", "assemble_seconds", "load_seconds",
    "overlap_seconds",
)  # fmt: skip


@dataclass(slots=True)
class SyncReport:
    """What one weight update moved and how long it took."""

    bytes: int = 0
    """Payload of all tensors, alignment excluded, once (not per engine): where engine ranks are handed slices, what one
    of them gets."""
    tensors: int = 0
    buckets: int = 0
    seconds: float = 0.0
    """From the call to the return."""
    pause_seconds: float = 0.0
    """While no engine generated: from the closed gate to the open one."""
    version: int = 0
    """Policy version that the engines have now."""
    moved: int = 0
    """Bytes that went from one process to another through a process group. Handles of shared memory move nothing."""
    needed: int = 0
    """The least that any plan has to move: of each rank that hands weights on, all bytes less those of its own shards;
    and all bytes once for each engine where engines are reached by broadcast."""
    pauses: dict[str, float] = field(default_factory=dict, repr=False)
    """Seconds of each part of the pause; see docs/resharding.md."""
    names: list[str] = field(default_factory=list, repr=False)
    assembling: list[tuple[float, float]] = field(default_factory=list, repr=False)
    """Start and end of each bucket's assembly, other ranks' messages included, in monotonic seconds."""
    loading: list[tuple[float, float]] = field(default_factory=list, repr=False)
    """Start and end of each bucket's loading: from the first request to the last engine's answer."""

    @property
    def assemble_seconds(self) -> float:
        """Sum over the buckets."""
        return sum(end - start for start, end in self.assembling)

    @property
    def load_seconds(self) -> float:
        """Sum over the buckets."""
        return sum(end - start for start, end in self.loading)

    @property
    def overlap_seconds(self) -> float:
        """While one bucket was put together and another was loaded."""
        return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in self.assembling for b in self.loading)

    @contextmanager
    def pausing(self, part: str) -> Iterator[None]:
        """Adds the time inside to a part of the pause."""
        started = monotonic()
        try:
            yield
        finally:
            self.pauses[part] = self.pauses.get(part, 0.0) + monotonic() - started

    def add(self, bucket: WeightBucket) -> None:
        """Count a bucket that is sent."""
        self.names += dict.fromkeys(slot.spec.name for slot in bucket.layout.tensors if slot.spec.row == 0)
        self.bytes += bucket.layout.payload_bytes
        self.tensors += sum(slot.spec.row == 0 for slot in bucket.layout.tensors)
        self.buckets += 1

    def metrics(self) -> dict[str, float]:
        """``engine/sync/<name>`` of everything that is a number."""
        found = {f"engine/sync/{name}": float(getattr(self, name)) for name in _METRICS}
        found |= {f"engine/sync/pause_{part}_seconds": seconds for part, seconds in self.pauses.items()}
        found |= {"engine/sync/bytes_moved": float(self.moved), "engine/sync/bytes_needed": float(self.needed)}
        return found | {"engine/sync/gigabytes_per_second": self.bytes / max(self.seconds, 1e-9) / 1e9}


class WeightTransfer:
    """One weight update on its way: entered, its first bucket is ready; :meth:`deliver` loads all into quiet engines.

    The engines' own machines hand them the buckets, or ``groups`` are the groups they are broadcast in. Whatever
    fails, the other trainer ranks are told at the exit that no further bucket is wanted.
    """

    def __init__(
        self, targets: Targets, source: WeightSource, version: int, groups: WeightGroups | None = None
    ) -> None:
        self.report = SyncReport(version=version)
        self._targets = targets
        self._engines = list(targets.engines)
        self._source = source
        self._groups = groups
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._buckets: WeightGenerator | None = None
        self._first: WeightBucket | None = None

    async def __aenter__(self) -> Self:
        """Raises :class:`EngineGone` when an engine does not join its process groups."""
        try:
            number = 0 if self._groups is None else await self._groups.admit(self._targets)
            self._buckets = self._source.buckets([EnginePlace(e.node, e.place) for e in self._engines], number)
            step = await self._next()
            if isinstance(step, Connect):
                assert self._groups is not None
                joining = asyncio.create_task(self._groups.connect(self._targets, step))
                await all_or_first_error([joining, first := asyncio.ensure_future(self._next())])
                step = first.result()
            assert not isinstance(step, Connect), "engines are connected once"
            self._first = step
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._groups is not None:
            self._groups.forget()
        if self._buckets is not None:  # closed on its own thread, behind whatever still runs there
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, self._buckets.close))
        self._thread.shutdown(wait=False)

    async def deliver(self) -> SyncReport:
        """Load all buckets.

        Raises :class:`EngineGone` when every engine was lost, or any that a broadcast reaches: the weights of all of
        them are unknown then; and :class:`EngineError` where an engine refused.
        """
        sent, bucket = self.report, self._first
        with sent.pausing("begin"):
            await self._targets.control("/begin_weight_update", lambda _: {}, self._targets.seconds)
        with sent.pausing("load"):
            while bucket is not None:
                sent.add(bucket)
                loading = asyncio.create_task(self._load(bucket))
                await asyncio.sleep(0)  # the requests go first
                try:
                    step = await self._next()
                except BaseException:
                    loading.cancel()
                    await asyncio.gather(loading, return_exceptions=True)
                    raise
                await loading
                assert not isinstance(step, Connect), "engines are connected before the first bucket"
                bucket = step
            await self._next()  # what there is to settle, now that all is loaded
        if not sent.names:
            raise EngineError("a weight update without tensors")
        with sent.pausing("end"):
            seconds = self._targets.loading_seconds(sent.bytes)
            await self._targets.control("/end_weight_update", lambda _: {}, seconds)
        sent.moved, sent.needed = self._source.moved, self._source.needed
        if self._groups is not None:
            sent.moved += sent.bytes * self._groups.ranks * len(self._engines)
            sent.needed += sent.bytes * len(self._engines)
        return sent

    async def _next(self) -> WeightBucket | Connect | None:
        """One step of the source, on its thread."""
        assert self._buckets is not None
        buckets = self._buckets

        def assemble() -> WeightBucket | Connect | None:
            started = monotonic()
            step = next(buckets, None)
            if step is not None:
                self.report.assembling.append((started, monotonic()))
            return step

        return await asyncio.get_running_loop().run_in_executor(self._thread, assemble)

    async def _load(self, bucket: WeightBucket) -> None:
        """Have every engine load a bucket. The first one empties their prefix caches: nothing runs on them now."""
        first = self.report.buckets == 1
        common: dict[str, Any] = {"load_format": bucket.load_format, "weight_version": str(self.report.version)}
        # A cache that is released is empty, and not there.
        body = lambda e: common | {"flush_cache": first and "kv_cache" not in e.released}  # noqa: E731
        seconds, started = self._targets.loading_seconds(bucket.layout.payload_bytes), monotonic()
        if self._groups is not None:
            specs = [slot.spec for slot in bucket.layout.tensors]
            common |= {
                "names": [spec.name for spec in specs],
                "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in specs],
                "shapes": [list(spec.shape) for spec in specs],
                "group_name": bucket.group,
            }
            path = "/update_weights_from_distributed"
            # Whoever does not take part stops all: what the others got is unknown.
            await all_or_first_error(
                [self._targets.take_part(engine, path, body(engine), seconds) for engine in self._targets.engines]
            )
        else:
            handles = dict(zip(self._engines, bucket.handles, strict=True))
            of_engine = lambda engine: body(engine) | {"serialized_named_tensors": handles[engine]}  # noqa: E731
            await self._targets.control("/update_weights_from_tensor", of_engine, seconds)
        self.report.loading.append((started, monotonic()))


async def checksums(targets: Targets) -> dict[EngineHandle, dict[str, str]]:
    """Of each engine: hash by parameter name, the hashes of tensor-parallel ranks joined by ``-``."""
    answers = await targets.control("/weights_checker", lambda _: {"action": "checksum"}, _HASH_SECONDS)
    ranks = {engine: [rank["checksums"] for rank in answer["ranks"]] for engine, answer in answers.items()}
    return {engine: {name: "-".join(rank[name] for rank in of) for name in of[0]} for engine, of in ranks.items()}


async def differing(targets: Targets, load: Callable[[], Awaitable[SyncReport]]) -> tuple[list[str], bool]:
    """Names of tensors that the engines do not hold as ``load`` gives them, and whether it gives them everything.

    The proof: hash every engine parameter, overwrite all of them with noise, load, hash again. A parameter whose hash
    changed did not hold what was loaded. One that is never loaded is noise now and shows too, under the engine's own
    name. Where the engine fuses tensors (q, k, v; gate, up; experts) all parts of the fused parameter are named.
    """
    before = await checksums(targets)
    await targets.control("/weights_checker", lambda _: {"action": "reset_tensors"}, _HASH_SECONDS)
    sent = await load()
    after = await checksums(targets)
    for error in targets.lost.values():
        raise error
    changed = {name for engine, hashes in before.items() for name in hashes if hashes[name] != after[engine][name]}
    noise = changed - {engine_name(name) for name in sent.names}
    return [name for name in sent.names if engine_name(name) in changed] + sorted(noise), not noise


_FUSED = (
    (re.compile(r"\.(q_proj|k_proj|v_proj)\."), ".qkv_proj."),
    (re.compile(r"\.experts\.\d+\.(gate_proj|up_proj)\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.(gate_proj|up_proj)\."), ".gate_up_proj."),
)


def engine_name(name: str) -> str:
    """The engine's parameter that holds the Hugging Face tensor ``name``: SGLang fuses qkv, gate/up and experts."""
    for pattern, replacement in _FUSED:
        fused, found = pattern.subn(replacement, name)
        if found:
            return fused
    return name


_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.0005


async def all_or_first_error(work: Sequence[Awaitable[Any]]) -> None:
    """Wait for all; the first error ends the wait, because what is left may wait for the one that failed."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class BroadcastRoot:
    """A root's side of its process group. It never raises: the engines' answers say whether an update succeeded."""

    def __init__(self, config: EngineConfig, *, cuda: bool) -> None:
        self._config = config
        self._seconds = config.control_seconds
        self.backend = "nccl" if cuda else "gloo"
        self._host = ""
        self._meeting: socket.socket | None = None
        self._group: Any = None
        self._sending: tuple[Any, Any] | None = None
        """The broadcast under way, and its buffer."""

    def listen(self) -> tuple[str, int]:
        """Leave the group there was; where engines are to look for the next one. They may come at once."""
        from mua.compat.torch_outside_group import meeting_socket

        self._drop()
        address = trainer_address(self._config)
        if int(os.environ.get("GROUP_RANK", "0")) > 0:  # not rank 0's machine
            address = address_towards(address, int(os.environ.get("MASTER_PORT", "1")))
        self._host, self._meeting = address, meeting_socket()
        return address, self._meeting.getsockname()[1]

    def form(self, name: str, size: int) -> None:
        """Wait until all engine ranks have come, or the deadline is over."""
        from mua.compat.torch_outside_group import outside_group

        meeting, self._meeting = self._meeting, None
        assert meeting is not None
        limit = timedelta(seconds=self._seconds)
        try:
            self._group = outside_group(self.backend, self._host, meeting, world_size=size, name=name, timeout=limit)
        except RuntimeError as error:
            _log.warning("engines did not join the process group %s of the weights: %s", name, error)

    def send(self, flat: Any) -> None:
        """Start the broadcast of a buffer, uint8 ``[bytes]``, when the one before is through."""
        import torch.distributed as dist

        self.finish()
        if self._group is not None:
            try:
                self._sending = dist.broadcast(flat, src=0, group=self._group, async_op=True), flat
            except RuntimeError as error:
                _log.warning("a broadcast of weights did not start: %s", error)

    def finish(self) -> None:
        """Wait for what is under way. Engines that answered have received it; others are given up by rank 0."""
        if self._sending is None:
            return
        (work, _), self._sending = self._sending, None
        deadline = time.monotonic() + self._seconds
        try:
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError("an engine did not take part in time")
                time.sleep(_POLL_SECONDS)
            work.wait()
        except RuntimeError as error:
            _log.warning("a broadcast of weights was given up: %s", error)

    def abandon(self) -> None:
        """What is under way will not be finished; the group is of no more use."""
        self._sending = None
        self._drop()

    def _drop(self) -> None:
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.close()
        group, self._group = self._group, None
        if group is not None:
            import torch.distributed as dist

            with contextlib.suppress(ValueError):  # whoever ended torch.distributed ended this group too
                dist.destroy_process_group(group)


class WeightGroups:
    """Which engines are in the groups; rank 0 asks them to come and go."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        """Of one engine, all of which receive every bucket."""
        self.number = 0
        """Of the set of engines; another set has another."""
        self._members: dict[EngineHandle, int] = {}
        self._names: list[str] = []

    async def admit(self, targets: Targets) -> int:
        """The number of the groups of exactly these engines; if they are not there yet, a new one."""
        members = {engine: engine.stops for engine in targets.engines}
        if members != self._members:
            await self.leave()
            self.number += 1
            self._members = members
        return self.number

    async def connect(self, targets: Targets, groups: Connect) -> None:
        """Have the engines join. Raises :class:`EngineGone` when one does not come in time."""
        self._names = list(groups.groups)
        path = "/init_weights_update_group"
        for name, (address, port) in groups.groups.items():
            body = {"master_address": address, "master_port": port, "world_size": groups.size, "group_name": name}
            body |= {"backend": groups.backend}
            joining = [
                targets.take_part(engine, path, body | {"rank_offset": 1 + self.ranks * number}, targets.seconds)
                for number, engine in enumerate(targets.engines)
            ]
            await all_or_first_error(joining)

    async def leave(self) -> None:
        """Dissolve the groups with those of their engines that are still the same."""
        alive = [engine for engine, stops in self._members.items() if engine.up and engine.stops == stops]
        for engine in alive:
            for name in self._names:
                try:
                    await engine.client.control("/destroy_weights_update_group", {"group_name": name}, timeout=60.0)
                except EngineError as error:
                    _log.warning("%s did not leave a process group of the weights: %s", engine.label, error)
        self.forget()

    def forget(self) -> None:
        """Give the groups up without a word to the engines; the next update forms new ones."""
        self._members, self._names = {}, []
