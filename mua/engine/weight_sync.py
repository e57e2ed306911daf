"""The weights of a sync begin here, with the trainer. A weight passes twelve files from its parameter to SGLang:

    trainer    1  mua/trainer/learner.py            the model's weights are in place on the device
               2  megatron_bridge/plan.py           which rows of which Hugging Face tensors a shard holds
               3  megatron_bridge/engine_shards.py  which rows every engine rank keeps
               4  megatron_bridge/blocks.py         the copies from one to the other
               5  megatron_bridge/reshard.py        all ranks put one bucket together
               6  mua/engine/weight_sync.py         a handle of the bucket for every engine rank, or its broadcast
               7  mua/compat/shared_weights.py      the memory behind the handles (torch_private.py: the group)
    sync       8  mua/rollout/service.py            from the trainer's thread to the engines' loop
               9  mua/engine/pool.py                closes the gate, pauses the engines
              10  mua/engine/weight_transfer.py     asks for a bucket while the one before it is loaded
              11  mua/engine/engine_handle.py       every engine is told, over HTTP
    SGLang    12  mua/compat/sglang_shards.py       loads the bucket's rows into the engine's parameter

On the trainer's side rank 0 leads:

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

import contextlib
import logging
import os
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_bridge.engine_shards import EngineRanks, engine_parameters
from megatron_bridge.families import family_of
from megatron_bridge.family import HfConfig
from megatron_bridge.plan import ModelPlan, PlannedParameter
from megatron_bridge.reshard import Resharder, Target, engine_slices, whole_tensors
from mua.compat.sglang_shards import LOADER, RECEIPT_BYTES, refusal
from mua.compat.shared_weights import shared_buffer, shared_handle, slices_handle
from mua.compat.torch_private import outside_group
from mua.config.schema import EngineConfig
from mua.engine.cluster import Nodes, address_towards, trainer_address
from mua.engine.engine_handle import EnginePlace
from mua.engine.weight_transfer import WHOLE_TENSORS, Connect, WeightBucket, WeightGenerator
from mua.utils.collective import gathered
from mua.utils.errors import ConfigError, EngineError

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.0005
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


_Value = TypeVar("_Value")


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
            way.refusals.clear()
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
            yield WeightBucket(layout, of_engine, load_format=LOADER if self._slices else WHOLE_TENSORS)
        yield None
        read(0)
        self.refusals += [said for of_rank in self._gather(refused) for said in of_rank]

    def give_up(self) -> None:
        """The pass is not finished."""


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
            by_turns=False,
        )
        held = [self.resharder.held] if world == 1 else gathered(self.resharder.held)
        sizes = [layout.nbytes for layout in self.resharder.buckets]
        self._root_of = assign_roots({rank: held[rank] for rank in self._roots}, sizes)

    def steps(self, plan: ModelPlan, engines: Sequence[EnginePlace], groups: int) -> WeightGenerator:
        """Groups with ``engines`` if there are none, every bucket, then None."""
        if groups != self._groups:  # they are asked for one group after the other
            self._groups = groups
            own = self._own.listen() if self._rank in self._roots else None
            found = self._gather(own)
            size = 1 + len(engines) * self._config.tensor_parallel
            where = {self._name(rank): found[rank] for rank in self._roots} if len(found) > max(self._roots) else {}
            yield Connect({name: address for name, address in where.items() if address}, size, self._own.backend)
            if own is not None:
                self._own.form(self._name(self._rank), size)
        layouts = self.resharder.buckets
        buffers = Buffers(plan.device, max(layout.nbytes for layout in layouts))
        for index, (layout, root) in enumerate(zip(layouts, self._root_of, strict=True)):
            flats = self.resharder.assemble(index, lambda _, nbytes: buffers.take(nbytes), [root])
            yield WeightBucket(layout, group=self._name(root))
            if self._rank == root:
                self._own.send(flats[0])
        yield None
        self._own.finish()

    def _name(self, root: int) -> str:
        return f"mua-weights-{self._groups}-{root}"

    def give_up(self) -> None:
        """The next pass needs new groups: what is under way in these is unknown."""
        self._groups = -1
        self._own.leave()


class BroadcastRoot:
    """A root's side of its process group. It never raises: the engines' answers say whether an update succeeded."""

    def __init__(self, config: EngineConfig, *, cuda: bool) -> None:
        self._config = config
        self.backend = "nccl" if cuda else "gloo"
        self._host = ""
        self._meeting: socket.socket | None = None
        self._group: Any = None
        self._sending: tuple[Any, Any] | None = None
        """The broadcast under way, and its buffer."""

    def listen(self) -> tuple[str, int]:
        """Leave the group there was; where engines are to look for the next one. They may come at once."""
        self.leave()
        address = trainer_address(self._config)
        if int(os.environ.get("GROUP_RANK", "0")) > 0:  # not rank 0's machine
            address = address_towards(address, int(os.environ.get("MASTER_PORT", "1")))
        # On every address of this machine; a port that is looked for here and bound later may be taken in between.
        self._host, self._meeting = address, socket.create_server(("", 0), backlog=1024)
        return address, self._meeting.getsockname()[1]

    def form(self, name: str, size: int) -> None:
        """Wait until all engine ranks have come, or the deadline is over."""
        meeting, self._meeting = self._meeting, None
        assert meeting is not None
        limit = timedelta(seconds=self._config.control_seconds)
        try:
            self._group = outside_group(self.backend, self._host, meeting, world_size=size, name=name, timeout=limit)
        except RuntimeError as error:
            _log.warning("engines did not join the process group %s of the weights: %s", name, error)

    def send(self, flat: Any) -> None:
        """Start the broadcast of a buffer, uint8 ``[bytes]``, when the one before is through."""
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
        deadline = time.monotonic() + self._config.control_seconds
        try:
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError("an engine did not take part in time")
                time.sleep(_POLL_SECONDS)
            work.wait()
        except RuntimeError as error:
            _log.warning("a broadcast of weights was given up: %s", error)

    def leave(self) -> None:
        """What is under way will not be finished; the group is of no more use."""
        self._sending = None
        if self._meeting is not None:
            self._meeting.close()
        if self._group is not None:
            with contextlib.suppress(ValueError):  # whoever ended torch.distributed ended this group too
                dist.destroy_process_group(self._group)
        self._meeting = self._group = None


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


# ---- plans, the same of a run and of ``mua plan``


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
