"""Control operations on several engines at once: a weight update, bucket by bucket, and proof of what they hold.

    thread (collectives)   assemble 1     assemble 2   assemble 3 ...
    engines                generate ..  │ load 1       load 2     ... │ generate ..

The first bucket is ready, and engines are in their process groups, before generation pauses. While the engines load one
bucket the next is put together, and no more: two buckets exist at a time. An engine that dies or falls silent is left
out of the rest (:class:`mua.engine.member.Targets`); when it was the last one, or all are
reached by one broadcast, the update breaks off and can be made again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from mua.engine.broadcast import Connect, Members, all_or_first_error
from mua.engine.member import Engine, EnginePlace, Targets
from mua.utils.errors import EngineError

if TYPE_CHECKING:
    from mua.engine.source import WeightBucket, WeightGenerator, WeightSource

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

    The engines' own machines hand them the buckets, or ``members`` are the groups they are broadcast in. Whatever
    fails, the other trainer ranks are told at the exit that no further bucket is wanted.
    """

    def __init__(self, targets: Targets, source: WeightSource, version: int, members: Members | None = None) -> None:
        self.report = SyncReport(version=version)
        self._targets = targets
        self._engines = list(targets.engines)
        self._source = source
        self._members = members
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._buckets: WeightGenerator | None = None
        self._first: WeightBucket | None = None

    async def __aenter__(self) -> Self:
        """Raises :class:`EngineGone` when an engine does not join its process groups."""
        try:
            groups = 0 if self._members is None else await self._members.admit(self._targets)
            self._buckets = self._source.buckets([EnginePlace(e.node, e.place) for e in self._engines], groups)
            step = await self._next()
            if isinstance(step, Connect):
                assert self._members is not None
                joining = asyncio.create_task(self._members.connect(self._targets, step))
                await all_or_first_error([joining, first := asyncio.ensure_future(self._next())])
                step = first.result()
            assert not isinstance(step, Connect), "engines are connected once"
            self._first = step
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._members is not None:
            self._members.forget()
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
        if self._members is not None:
            sent.moved += sent.bytes * self._members.ranks * len(self._engines)
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
        if self._members is not None:
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


async def checksums(targets: Targets) -> dict[Engine, dict[str, str]]:
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
