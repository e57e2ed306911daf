"""One weight-update session over several engines, bucket by bucket, and hashes of what they hold.

    thread (collectives)   assemble 1   assemble 2   assemble 3 ...
    engines                             load 1       load 2     ...

While the engines load one bucket the next is put together, and no more: two buckets exist at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from time import monotonic
from typing import TYPE_CHECKING, Any

from mua.engine.broadcast import Broadcast, all_or_first_error
from mua.engine.member import Engine
from mua.errors import EngineError

if TYPE_CHECKING:
    from mua.engine.feed import Feed, Shipment
    from mua.engine.weights import SyncReport

CONTROL_SECONDS = 300.0
"""Deadline of one control call: one bucket, hashing all weights."""


async def everywhere(engines: Sequence[Engine], work: Callable[[Engine], Awaitable[Any]]) -> list[Any]:
    """Run ``work`` on all engines and wait for every one; raises the first error."""
    results = await asyncio.gather(*(work(engine) for engine in engines), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def control(engines: Sequence[Engine], path: str, body: dict[str, Any]) -> list[Any]:
    """POST the same to all engines; each must answer ``success``."""
    return await everywhere(engines, lambda engine: engine.client.control(path, body, timeout=CONTROL_SECONDS))


class Sent:
    """What one update session carried, and when."""

    def __init__(self, engines: int) -> None:
        self.names: list[str] = []
        self.bytes = 0
        self.buckets = 0
        self.moved = 0
        self.needed = 0
        self.assembling: list[tuple[float, float]] = []
        """Start and end of each bucket's assembly, monotonic seconds."""
        self.loading: list[tuple[float, float]] = []
        """Start and end of each bucket's loading."""
        self._engines = engines

    def add(self, shipment: Shipment) -> None:
        self.names += shipment.bucket.names
        self.bytes += shipment.bucket.payload_bytes
        self.buckets += 1

    def finish(self, feed: Feed, broadcast_ranks: int) -> None:
        """Add up what was moved; ``broadcast_ranks`` ranks of every engine received all bytes through a group."""
        moved = feed.moved()
        self.moved = moved.moved + self.bytes * broadcast_ranks * self._engines
        self.needed = moved.needed + (self.bytes * self._engines if broadcast_ranks else 0)

    def report(self, version: int, seconds: float, pause_seconds: float) -> SyncReport:
        from mua.engine.weights import SyncReport

        return SyncReport(
            bytes=self.bytes,
            tensors=len(self.names),
            buckets=self.buckets,
            seconds=seconds,
            pause_seconds=pause_seconds,
            version=version,
            moved=self.moved,
            needed=self.needed,
            assemble_seconds=sum(end - start for start, end in self.assembling),
            load_seconds=sum(end - start for start, end in self.loading),
            overlap_seconds=_overlap(self.assembling, self.loading),
        )

    def parameters(self) -> set[str]:
        """Engine parameters that the tensors feed."""
        from mua.engine.weights import engine_name

        return {engine_name(name) for name in self.names}

    def sources(self, parameters: set[str]) -> list[str]:
        """The sent tensors behind engine ``parameters``, then the parameters that none of them feeds."""
        from mua.engine.weights import engine_name

        fed = [name for name in self.names if engine_name(name) in parameters]
        return fed + sorted(parameters - self.parameters())


def _overlap(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float:
    """Seconds that lie in an interval of both lists; the intervals of one list do not overlap each other."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)


async def push(
    engines: Sequence[Engine], feed: Feed, version: int, *, ranks: int, broadcast: Broadcast | None = None
) -> Sent:
    """Load all buckets of ``feed`` into idle (or paused) engines as policy ``version``; each has ``ranks`` TP ranks.

    The engines' own machines hand them the buckets, or ``broadcast`` does. Whatever fails is raised after the other
    trainer ranks were told that no further bucket is wanted.
    """
    sent = Sent(len(engines))
    if not engines:
        return sent
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
    shipments = feed.shipments([engine.node for engine in engines])
    try:
        if broadcast is not None:
            await broadcast.join(engines, thread)
        await control(engines, "/begin_weight_update", {})
        await _ship(engines, shipments, version, sent, thread, broadcast)
        if not sent.names:
            raise EngineError("a weight update without tensors")
        await control(engines, "/end_weight_update", {})
    except BaseException:
        if broadcast is not None:
            broadcast.cancel()
        raise
    finally:
        await _close(shipments, thread)
    sent.finish(feed, ranks if broadcast is not None else 0)
    return sent


async def _ship(
    engines: Sequence[Engine],
    shipments: Iterator[Shipment],
    version: int,
    sent: Sent,
    thread: Executor,
    broadcast: Broadcast | None,
) -> None:
    loop = asyncio.get_running_loop()

    def assemble() -> Shipment | None:
        started = monotonic()
        shipment = next(shipments, None)
        if shipment is not None:
            sent.assembling.append((started, monotonic()))
        return shipment

    shipment = await loop.run_in_executor(thread, assemble)
    while shipment is not None:
        sent.add(shipment)
        loading = asyncio.create_task(_load(engines, shipment, version, sent, thread, broadcast))
        await asyncio.sleep(0)  # the requests, and a broadcast, go first
        try:
            shipment = await loop.run_in_executor(thread, assemble)
        except BaseException:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            raise
        await loading


async def _load(
    engines: Sequence[Engine],
    shipment: Shipment,
    version: int,
    sent: Sent,
    thread: Executor,
    broadcast: Broadcast | None,
) -> None:
    """Have all engines load one bucket."""
    started = monotonic()
    common = {"load_format": "flattened_bucket", "flush_cache": False, "weight_version": str(version)}
    transmission: list[Awaitable[None]] = []
    if broadcast is None:
        path = "/update_weights_from_tensor"
        bodies = [common | {"serialized_named_tensors": handles} for handles in shipment.handles]
    else:
        path = "/update_weights_from_distributed"
        bodies = [common | broadcast.request(shipment.bucket)] * len(engines)
        loop = asyncio.get_running_loop()
        transmission = [loop.run_in_executor(thread, broadcast.transmit, shipment.bucket.flat)]
    answers = [
        engine.client.control(path, body, timeout=CONTROL_SECONDS) for engine, body in zip(engines, bodies, strict=True)
    ]
    try:
        await all_or_first_error([*transmission, *answers])
    except BaseException:
        if broadcast is not None:
            broadcast.cancel()
        raise
    sent.loading.append((started, monotonic()))


async def _close(shipments: Iterator[Shipment], thread: Executor) -> None:
    """End the stream on its own thread, behind whatever still runs there."""

    def close() -> None:
        if hasattr(shipments, "close"):
            shipments.close()

    await asyncio.shield(asyncio.get_running_loop().run_in_executor(thread, close))
    thread.shutdown(wait=False)


async def checksums(engines: Sequence[Engine]) -> list[dict[str, str]]:
    """Of each engine: hash by parameter name, the hashes of tensor-parallel ranks joined by ``-``."""
    answers = await control(engines, "/weights_checker", {"action": "checksum"})
    return [_joined([rank["checksums"] for rank in answer["ranks"]]) for answer in answers]


def _joined(ranks: list[dict[str, str]]) -> dict[str, str]:
    return {name: "-".join(rank[name] for rank in ranks) for name in ranks[0]}


async def overwrite_with_noise(engines: Sequence[Engine]) -> None:
    """Give every engine parameter random content, so that one an update never touches shows."""
    await control(engines, "/weights_checker", {"action": "reset_tensors"})
