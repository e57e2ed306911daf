"""The order of one weight update: what is put together when, what is told to whom, and what a failure ends.

Engines are stand-ins that answer when told to. Real ones: tests/parity/test_engine_transports.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from megatron_bridge.plan import TensorSpec
from megatron_bridge.reshard import lay_out
from mua.engine import weight_transfer
from mua.engine.engine_handle import EngineGone, EnginePlace, Targets
from mua.engine.weight_sync import Buffers
from mua.engine.weight_transfer import SyncReport, WeightBucket, WeightGenerator, WeightSource, WeightTransfer
from mua.utils.errors import EngineError


class StandIn:
    """An engine and its client in one. ``fails_at``: the number of the bucket it fails with ``error``, or a path."""

    def __init__(self, fails_at: int | str | None = None, error: type[EngineError] = EngineError) -> None:
        self.label = "stand-in"
        self.node = self.place = 0
        self.released: set[str] = set()
        self.stops = 0
        self.client = self
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        """Of the buckets."""
        self.loaded = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._fails_at = fails_at
        self._error = error

    async def control(self, path: str, body: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        self.calls.append(path)
        if path == self._fails_at:
            raise EngineError("refused")
        if path == "/update_weights_from_tensor":
            self.bodies.append(body)
            await self.gate.wait()
            if self.loaded == self._fails_at:
                raise self._error("refused")
            self.loaded += 1
        return {"success": True}


def targets(*engines: StandIn) -> Targets:
    return Targets(list(engines), 60.0)  # type: ignore[arg-type]


async def push(crew: Targets, source: WeightSource, version: int) -> SyncReport:
    """The whole update of engines that are quiet already."""
    async with WeightTransfer(crew, source, version) as transfer:
        return await transfer.deliver()


class CountedSource:
    """``count`` buckets of one tensor each; remembers how far it got and whether it was closed.

    The handles name bucket and engine.
    """

    def __init__(self, count: int) -> None:
        self.moved, self.needed = 7, 5
        self.count = count
        self.made = 0
        self.closed = False
        self.threads: set[int] = set()

    def buckets(self, engines: Sequence[EnginePlace], groups: int = 0) -> WeightGenerator:
        try:
            for number in range(self.count):
                self.threads.add(threading.get_ident())
                (layout,) = lay_out([TensorSpec(f"t{number}", (8,), torch.float32)], 4096)
                self.made += 1
                handles = [[f"bucket {number} for {engine}"] for engine in range(len(engines))]
                yield WeightBucket(layout, handles)
        except GeneratorExit:
            self.threads.add(threading.get_ident())
            self.closed = True
            raise


class AtOnce(ThreadPoolExecutor):
    """Does what it is given within ``submit``: a loop without callbacks has nothing to wait for then."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*args, **kwargs))
        return done


async def test_one_bucket_is_put_together_while_another_loads_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_transfer, "ThreadPoolExecutor", AtOnce)
    engine, source = StandIn(), CountedSource(4)
    engine.gate.clear()
    update = asyncio.create_task(push(targets(engine), source, 1))
    for _ in range(100):  # far more turns of the loop than the whole update takes
        await asyncio.sleep(0)
    assert (source.made, engine.loaded) == (2, 0)
    engine.gate.set()
    sent = await update
    assert engine.calls == ["/begin_weight_update", *["/update_weights_from_tensor"] * 4, "/end_weight_update"]
    assert sent.names == ["t0", "t1", "t2", "t3"]
    assert (sent.version, sent.bytes, sent.buckets, sent.tensors, sent.moved, sent.needed) == (1, 128, 4, 4, 7, 5)
    assert 0 < sent.overlap_seconds <= sent.load_seconds


async def test_every_engine_gets_its_own_handles_of_every_bucket_and_the_new_version() -> None:
    engines, source = [StandIn(), StandIn()], CountedSource(3)
    await push(targets(*engines), source, 7)
    for number, engine in enumerate(engines):
        handles = [body["serialized_named_tensors"] for body in engine.bodies]
        assert handles == [[f"bucket {bucket} for {number}"] for bucket in range(3)]
        assert {body["weight_version"] for body in engine.bodies} == {"7"}
    assert len(source.threads) == 1
    assert threading.get_ident() not in source.threads


@pytest.mark.parametrize("path", ["/begin_weight_update", "/end_weight_update"])
async def test_a_refusal_by_one_engine_of_several_is_told(path: str) -> None:
    with pytest.raises(EngineError, match="refused"):
        await push(targets(StandIn(), StandIn(path), StandIn()), CountedSource(2), 1)


@pytest.mark.parametrize("fails_at", [0, 2])
async def test_a_refusal_closes_the_source_on_its_own_thread(fails_at: int) -> None:
    good, bad, source = StandIn(), StandIn(fails_at), CountedSource(6)
    with pytest.raises(EngineError, match="refused"):
        await push(targets(good, bad), source, 1)
    assert source.closed
    assert source.made == fails_at + 2
    assert len(source.threads) == 1
    assert "/end_weight_update" not in good.calls


async def test_the_others_take_all_buckets_when_one_engine_dies() -> None:
    good, bad, source = StandIn(), StandIn(2, EngineGone), CountedSource(6)
    crew = targets(good, bad)
    sent = await push(crew, source, 1)
    assert (len(sent.names), good.loaded, good.calls[-1]) == (6, 6, "/end_weight_update")
    assert (crew.engines, list(crew.lost)) == ([good], [bad])
    assert not source.closed


async def test_the_last_engine_that_dies_breaks_the_update_off() -> None:
    first, last, source = StandIn(1, EngineGone), StandIn(3, EngineGone), CountedSource(6)
    crew = targets(first, last)
    with pytest.raises(EngineGone):
        await push(crew, source, 1)
    assert (crew.engines, set(crew.lost)) == ([], {first, last})
    assert source.closed


async def test_an_update_that_is_given_up_closes_the_source_too() -> None:
    engine, source = StandIn(), CountedSource(6)
    engine.gate.clear()
    update = asyncio.create_task(push(targets(engine), source, 1))
    async with asyncio.timeout(30):
        while source.made < 2:
            await asyncio.sleep(0.01)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    assert source.closed


def test_two_buffers_take_turns() -> None:
    buffers = Buffers(torch.device("cpu"), 100)
    taken = [buffers.take(100).data_ptr() for _ in range(4)]
    assert taken[0] == taken[2] != taken[1] == taken[3]
