"""Engine side of a weight update: bucket by bucket into all engines at once, and proof of what they hold.

    thread (collectives)   assemble 1     assemble 2   assemble 3 ...
    engines                generate ..  │ load 1       load 2     ... │ generate ..

The first bucket is ready, and engines are in their process groups, before generation pauses. While the engines load one
bucket the next is put together, and no more: two buckets exist at a time. An engine that dies or falls silent is left
out of the rest (:class:`mua.engine.engine_handle.Targets`); when it was the last one, or all are
reached by one broadcast, the update breaks off and can be made again.

Where the buckets come from: mua/engine/weight_sync.py.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, Self

from mua.engine.engine_handle import EngineHandle, EnginePlace, Targets
from mua.utils.errors import EngineError

if TYPE_CHECKING:
    from megatron_bridge.reshard import BucketLayout

_log = logging.getLogger(__name__)
WHOLE_TENSORS = "flattened_bucket"
"""SGLang's ``load_format`` of whole Hugging Face tensors in one buffer."""
_HASH_SECONDS = 300.0
"""Deadline of hashing, or overwriting, all weights."""
_METRICS = (
    "bytes", "tensors", "buckets", "version", "seconds", "pause_seconds", "assemble_seconds", "load_seconds",
    "overlap_seconds",
)  # fmt: skip


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

    def metrics(self) -> dict[str, float]:
        """``engine/sync/<name>`` of everything that is a number."""
        found = {f"engine/sync/{name}": float(getattr(self, name)) for name in _METRICS}
        found |= {f"engine/sync/pause_{part}_seconds": seconds for part, seconds in self.pauses.items()}
        found |= {"engine/sync/bytes_moved": float(self.moved), "engine/sync/bytes_needed": float(self.needed)}
        return found | {"engine/sync/gigabytes_per_second": self.bytes / max(self.seconds, 1e-9) / 1e9}


class WeightTransfer:
    """One weight update on its way: entered, its first bucket is ready; :meth:`deliver` loads all into quiet engines.

    The engines' own machines hand them the buckets, or ``groups`` are what they are broadcast in. Whatever
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
        self._first: WeightBucket | Connect | None = None

    async def __aenter__(self) -> Self:
        """Raises :class:`EngineGone` when an engine does not join its process groups."""
        try:
            number = 0 if self._groups is None else await self._groups.admit(self._targets)
            self._buckets = self._source.buckets([EnginePlace(e.node, e.place) for e in self._engines], number)
            self._first = await self._next(self._buckets)
            if isinstance(self._first, Connect):
                assert self._groups is not None
                joining = asyncio.create_task(self._groups.connect(self._targets, self._first))
                await all_or_first_error([joining, first := asyncio.ensure_future(self._next(self._buckets))])
                self._first = first.result()
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
        assert self._buckets is not None
        with sent.pausing("begin"):
            await self._targets.control("/begin_weight_update", lambda _: {}, self._targets.seconds)
        with sent.pausing("load"):
            while bucket is not None:
                assert isinstance(bucket, WeightBucket), "engines are connected once, before the first bucket"
                new = [slot.spec.name for slot in bucket.layout.tensors if slot.spec.row == 0]
                sent.names += dict.fromkeys(new)
                sent.tensors += len(new)
                sent.bytes += bucket.layout.payload_bytes
                sent.buckets += 1
                loading = asyncio.create_task(self._load(bucket))
                await asyncio.sleep(0)  # the requests go first
                try:
                    bucket = await self._next(self._buckets)
                except BaseException:
                    loading.cancel()
                    await asyncio.gather(loading, return_exceptions=True)
                    raise
                await loading
            await self._next(self._buckets)  # what there is to settle, now that all is loaded
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

    async def _next(self, buckets: WeightGenerator) -> WeightBucket | Connect | None:
        """One step of the source, on its thread."""

        def assemble() -> WeightBucket | Connect | None:
            started = monotonic()
            step = next(buckets, None)
            if step is not None:
                self.report.assembling.append((started, monotonic()))
            return step

        return await asyncio.get_running_loop().run_in_executor(self._thread, assemble)

    async def _load(self, bucket: WeightBucket) -> None:
        """Have every engine load a bucket. The first one empties their prefix caches: nothing runs on them now."""
        targets, started = self._targets, monotonic()
        seconds = targets.loading_seconds(bucket.layout.payload_bytes)
        common: dict[str, Any] = {"load_format": bucket.load_format, "weight_version": str(self.report.version)}
        # A cache that is released is empty, and not there.
        flushed = {e: self.report.buckets == 1 and "kv_cache" not in e.released for e in self._engines}
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
                [targets.take_part(e, path, common | {"flush_cache": flushed[e]}, seconds) for e in targets.engines]
            )
        else:
            handles = dict(zip(self._engines, bucket.handles, strict=True))
            await targets.control(
                "/update_weights_from_tensor",
                lambda engine: (
                    common | {"flush_cache": flushed[engine]} | {"serialized_named_tensors": handles[engine]}
                ),
                seconds,
            )
        self.report.loading.append((started, monotonic()))


class WeightGroups:
    """Which engines are in the process groups of a broadcast; rank 0 asks them to come and go.

    root a (rank 0 of its group) ── its buckets ──► engine 0: ranks 1, 2 · engine 1: ranks 3, 4 · ...
    root b (rank 0 of its group) ── its buckets ──► the same engine ranks

    The groups last while the engines do. When another set of engines is to be filled (one was restarted, has joined or
    left, or only a restarted one waits for weights) they are left and formed anew.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        """Of one engine, all of which receive every bucket."""
        self.number = 0
        """Of the set of engines; another set has another."""
        self._engines: dict[EngineHandle, int] = {}
        self._names: list[str] = []

    async def admit(self, targets: Targets) -> int:
        """The number of the groups of exactly these engines; where others are in them, these leave first."""
        engines = {engine: engine.stops for engine in targets.engines}
        if engines != self._engines:
            for engine, stops in self._engines.items():
                for name in self._names if engine.up and engine.stops == stops else ():
                    try:
                        await engine.client.control("/destroy_weights_update_group", {"group_name": name}, timeout=60.0)
                    except EngineError as error:
                        _log.warning("%s did not leave a process group of the weights: %s", engine.label, error)
            self.number, self._engines, self._names = self.number + 1, engines, []
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

    def forget(self) -> None:
        """Give the groups up without a word to the engines; the next update forms new ones."""
        self._engines, self._names = {}, []


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


# ---- proof


async def checksums(targets: Targets) -> dict[EngineHandle, dict[str, str]]:
    """Of each engine: hash by parameter name, the hashes of tensor-parallel ranks joined by ``-``."""
    answers = await targets.control("/weights_checker", lambda _: {"action": "checksum"}, _HASH_SECONDS)
    ranks = {engine: [rank["checksums"] for rank in answer["ranks"]] for engine, answer in answers.items()}
    return {engine: {name: "-".join(rank[name] for rank in of) for name in of[0]} for engine, of in ranks.items()}


async def find_differences(targets: Targets, load: Callable[[], Awaitable[SyncReport]]) -> tuple[list[str], bool]:
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
