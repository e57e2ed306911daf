"""Control operations on several engines at once: a weight update, bucket by bucket, and hashes of what they hold.

    thread (collectives)   assemble 1   assemble 2   assemble 3 ...
    engines                             load 1       load 2     ...

While the engines load one bucket the next is put together, and no more: two buckets exist at a time. An engine that
dies or falls silent is left out of the rest (:class:`Targets`); when it was the last one, or all are reached by one
broadcast, the update breaks off and can be made again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from time import monotonic
from typing import TYPE_CHECKING, Any

from mua.engine.broadcast import Broadcast, all_or_first_error
from mua.engine.client import EngineGone
from mua.engine.member import Engine
from mua.errors import EngineError

if TYPE_CHECKING:
    from mua.engine.feed import Feed, Shipment
    from mua.engine.weights import Bucket, SyncReport

_log = logging.getLogger(__name__)
_HASH_SECONDS = 300.0
"""Deadline of hashing, or overwriting, all weights."""
_LEAST_BYTES_PER_SECOND = 50e6
"""Whoever loads weights slower than that counts as stuck."""


class Targets:
    """The engines of one control operation; one that dies, or is silent for ``seconds``, is left out of the rest."""

    def __init__(self, engines: Sequence[Engine], seconds: float) -> None:
        self.engines = list(engines)
        self._stops = {engine: engine.stops for engine in engines}
        self.seconds = seconds
        self.lost: dict[Engine, EngineGone] = {}
        self._began = monotonic()
        self._ended: float | None = None

    @property
    def pause_seconds(self) -> float:
        """From the beginning to :meth:`end`, or until now."""
        return (monotonic() if self._ended is None else self._ended) - self._began

    def end(self) -> None:
        self._ended = monotonic()

    def same(self, engines: Iterable[Engine]) -> list[Engine]:
        """Those of ``engines`` that were not stopped since the beginning; the watch may have restarted the others."""
        return [engine for engine in engines if engine.stops == self._stops[engine]]

    def lose(self, engine: Engine, error: EngineGone) -> None:
        _log.warning("%s is left out: %s", engine.label, error)
        self.lost[engine] = error
        self.engines.remove(engine)

    async def each(self, work: Callable[[Engine], Awaitable[Any]], engines: Sequence[Engine] | None = None) -> None:
        """Run ``work`` on all that are left (of ``engines``) and wait for every one.

        Raises the first refusal, and :class:`EngineGone` when no engine is left.
        """
        asked = [engine for engine in self.engines if engines is None or engine in engines]
        results = await asyncio.gather(*(work(engine) for engine in asked), return_exceptions=True)
        for engine, result in zip(asked, results, strict=True):
            if isinstance(result, EngineGone):
                self.lose(engine, result)
        for result in results:
            if isinstance(result, BaseException) and (not isinstance(result, EngineGone) or not self.engines):
                raise result

    async def control(self, path: str, bodies: Callable[[Engine], dict[str, Any]], nbytes: int = 0) -> None:
        """POST to :meth:`each` engine, which has to load ``nbytes``; it must answer ``success``."""
        seconds = self.loading_seconds(nbytes)
        await self.each(lambda engine: engine.client.control(path, bodies(engine), timeout=seconds))

    async def take_part(self, engine: Engine, path: str, body: dict[str, Any], nbytes: int = 0) -> None:
        """POST to one of several engines that cannot do it without each other: every failure is a fault of all."""
        try:
            await engine.client.control(path, body, timeout=self.loading_seconds(nbytes))
        except EngineGone as error:
            self.lose(engine, error)
            raise
        except EngineError as error:  # its process group's, when another engine has left it
            raise EngineGone(str(error)) from error

    def loading_seconds(self, nbytes: int) -> float:
        """Deadline of a request after which an engine has taken ``nbytes``."""
        return self.seconds + nbytes / _LEAST_BYTES_PER_SECOND


async def _control_all(engines: Sequence[Engine], path: str, body: dict[str, Any]) -> list[Any]:
    """POST the same to all engines and wait for every answer, which must be ``success``. Raises the first error."""
    asked = (engine.client.control(path, body, timeout=_HASH_SECONDS) for engine in engines)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


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


async def push(targets: Targets, feed: Feed, version: int, *, ranks: int, broadcast: Broadcast | None = None) -> Sent:
    """Load all buckets of ``feed`` into idle (or paused) engines as policy ``version``; each has ``ranks`` TP ranks.

    The engines' own machines hand them the buckets, or ``broadcast`` does. Whatever fails is raised after the other
    trainer ranks were told that no further bucket is wanted. Raises :class:`EngineGone` when every engine was lost, or
    any that a broadcast reaches: the weights of all of them are unknown then.
    """
    sent = Sent(len(targets.engines))
    if not targets.engines:
        return sent
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
    shipments = feed.shipments([engine.node for engine in targets.engines])
    try:
        if broadcast is not None:
            await broadcast.join(targets, thread)
        await targets.control("/begin_weight_update", lambda _: {})
        await _ship(targets, shipments, version, sent, thread, broadcast)
        if not sent.names:
            raise EngineError("a weight update without tensors")
        await targets.control("/end_weight_update", lambda _: {}, sent.bytes)
    except BaseException:
        if broadcast is not None:
            broadcast.cancel()
        raise
    finally:
        await _close(shipments, thread)
    sent.finish(feed, ranks if broadcast is not None else 0)
    return sent


async def _ship(
    targets: Targets,
    shipments: Iterator[Shipment],
    version: int,
    sent: Sent,
    thread: Executor,
    broadcast: Broadcast | None,
) -> None:
    loop = asyncio.get_running_loop()
    engines = list(targets.engines)
    common = {"load_format": "flattened_bucket", "flush_cache": False, "weight_version": str(version)}

    def assemble() -> Shipment | None:
        started = monotonic()
        shipment = next(shipments, None)
        if shipment is not None:
            sent.assembling.append((started, monotonic()))
        return shipment

    async def load(shipment: Shipment) -> None:
        started = monotonic()
        if broadcast is None:
            await _hand_over(targets, dict(zip(engines, shipment.handles, strict=True)), shipment.bucket, common)
        else:
            await _broadcast(targets, broadcast, shipment.bucket, common, thread)
        sent.loading.append((started, monotonic()))

    shipment = await loop.run_in_executor(thread, assemble)
    while shipment is not None:
        sent.add(shipment)
        loading = asyncio.create_task(load(shipment))
        await asyncio.sleep(0)  # the requests, and a broadcast, go first
        try:
            shipment = await loop.run_in_executor(thread, assemble)
        except BaseException:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            raise
        await loading


async def _hand_over(
    targets: Targets, handles: dict[Engine, list[str]], bucket: Bucket, common: dict[str, Any]
) -> None:
    """Have every engine load one bucket from memory of its own machine."""
    await targets.control(
        "/update_weights_from_tensor",
        lambda engine: common | {"serialized_named_tensors": handles[engine]},
        bucket.payload_bytes,
    )


async def _broadcast(
    targets: Targets, broadcast: Broadcast, bucket: Bucket, common: dict[str, Any], thread: Executor
) -> None:
    """Send one bucket to all engines. Whoever does not take part stops all: what the others got is unknown."""
    path, body, nbytes = "/update_weights_from_distributed", common | broadcast.request(bucket), bucket.payload_bytes
    seconds = targets.loading_seconds(nbytes)
    transmission = asyncio.get_running_loop().run_in_executor(thread, broadcast.transmit, bucket.flat, seconds)
    receivers = [targets.take_part(engine, path, body, nbytes) for engine in targets.engines]
    try:
        await all_or_first_error([transmission, *receivers])
    except BaseException:
        broadcast.cancel()
        raise


async def _close(shipments: Iterator[Shipment], thread: Executor) -> None:
    """End the stream on its own thread, behind whatever still runs there."""

    def close() -> None:
        if hasattr(shipments, "close"):
            shipments.close()

    await asyncio.shield(asyncio.get_running_loop().run_in_executor(thread, close))
    thread.shutdown(wait=False)


async def checksums(engines: Sequence[Engine]) -> list[dict[str, str]]:
    """Of each engine: hash by parameter name, the hashes of tensor-parallel ranks joined by ``-``."""
    answers = await _control_all(engines, "/weights_checker", {"action": "checksum"})
    return [_joined([rank["checksums"] for rank in answer["ranks"]]) for answer in answers]


def _joined(ranks: list[dict[str, str]]) -> dict[str, str]:
    return {name: "-".join(rank[name] for rank in ranks) for name in ranks[0]}


async def overwrite_with_noise(engines: Sequence[Engine]) -> None:
    """Give every engine parameter random content, so that one an update never touches shows."""
    await _control_all(engines, "/weights_checker", {"action": "reset_tensors"})
