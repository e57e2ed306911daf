"""Control operations on several engines at once: a weight update, bucket by bucket, and proof of what they hold.

    thread (collectives)   assemble 1   assemble 2   assemble 3 ...
    engines                             load 1       load 2     ...

While the engines load one bucket the next is put together, and no more: two buckets exist at a time. An engine that
dies or falls silent is left out of the rest (:class:`mua.engine.member.Targets`); when it was the last one, or all are
reached by one broadcast, the update breaks off and can be made again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from mua.engine.broadcast import Broadcast
from mua.engine.member import Engine, Targets
from mua.errors import EngineError

if TYPE_CHECKING:
    from mua.engine.source import WeightBucket, WeightSource

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
    """Payload of all tensors, padding excluded, once (not per engine)."""
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

    def metrics(self) -> dict[str, float]:
        """``sync/<name>`` of everything that is a number."""
        found = {f"sync/{name}": float(getattr(self, name)) for name in _METRICS}
        found |= {"sync/bytes_moved": float(self.moved), "sync/bytes_needed": float(self.needed)}
        return found | {"sync/gigabytes_per_second": self.bytes / max(self.seconds, 1e-9) / 1e9}


async def push(targets: Targets, source: WeightSource, version: int, broadcast: Broadcast | None = None) -> SyncReport:
    """Load all buckets of ``source`` into idle (or paused) engines as policy ``version``.

    The engines' own machines hand them the buckets, or ``broadcast`` does. Whatever fails is raised after the other
    trainer ranks were told that no further bucket is wanted. Raises :class:`EngineGone` when every engine was lost, or
    any that a broadcast reaches: the weights of all of them are unknown then.
    """
    sent, engines = SyncReport(version=version), list(targets.engines)
    if not engines:
        return sent
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
    buckets = source.buckets([engine.node for engine in engines])

    async def load(bucket: WeightBucket) -> None:
        body = {"load_format": "flattened_bucket", "flush_cache": False, "weight_version": str(version)}
        seconds, started = targets.loading_seconds(bucket.layout.payload_bytes), monotonic()
        if broadcast is not None:
            await broadcast.load(targets, bucket, body, seconds, thread)
        else:
            handles = dict(zip(engines, bucket.handles, strict=True))
            of_engine = lambda engine: body | {"serialized_named_tensors": handles[engine]}  # noqa: E731
            await targets.control("/update_weights_from_tensor", of_engine, seconds)
        sent.loading.append((started, monotonic()))

    try:
        if broadcast is not None:
            await broadcast.join(targets, thread)
        await targets.control("/begin_weight_update", lambda _: {}, targets.seconds)
        await _one_behind_the_other(buckets, load, sent, thread)
        if not sent.names:
            raise EngineError("a weight update without tensors")
        await targets.control("/end_weight_update", lambda _: {}, targets.loading_seconds(sent.bytes))
    except BaseException:
        if broadcast is not None:
            broadcast.cancel()
        raise
    finally:
        # On its own thread, behind whatever still runs there.
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(thread, buckets.close))
        thread.shutdown(wait=False)
    sent.moved, sent.needed = source.moved, source.needed
    if broadcast is not None:
        sent.moved += sent.bytes * broadcast.ranks * len(engines)
        sent.needed += sent.bytes * len(engines)
    return sent


async def _one_behind_the_other(
    buckets: Generator[WeightBucket, None, None],
    load: Callable[[WeightBucket], Coroutine[Any, Any, None]],
    sent: SyncReport,
    thread: Executor,
) -> None:
    """Load every bucket; while one is loaded the next is put together on ``thread``."""
    loop = asyncio.get_running_loop()

    def assemble() -> WeightBucket | None:
        started = monotonic()
        bucket = next(buckets, None)
        if bucket is not None:
            sent.assembling.append((started, monotonic()))
        return bucket

    bucket = await loop.run_in_executor(thread, assemble)
    while bucket is not None:
        sent.names += [slot.spec.name for slot in bucket.layout.tensors]
        sent.bytes += bucket.layout.payload_bytes
        sent.tensors += len(bucket.layout.tensors)
        sent.buckets += 1
        loading = asyncio.create_task(load(bucket))
        await asyncio.sleep(0)  # the requests, and a broadcast, go first
        try:
            bucket = await loop.run_in_executor(thread, assemble)
        except BaseException:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            raise
        await loading


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
