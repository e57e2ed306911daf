"""Weights by broadcast: one process group of rank 0 and every tensor-parallel rank of the engines.

    rank 0 (0) ── one broadcast a bucket ──► engine 0: ranks 1, 2 · engine 1: ranks 3, 4 · ...

The group lasts while the engines do. When another set of engines is to be filled (one was restarted, or only a
restarted one waits for weights) it is left and formed anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import Executor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mua.engine.member import Engine, Targets
from mua.engine.sglang_client import EngineGone
from mua.errors import EngineError
from mua.ports import free_port

if TYPE_CHECKING:
    from mua.engine.source import WeightBucket

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


class Broadcast:
    """Rank 0's side of the group. ``address`` is where the engines find this process."""

    def __init__(self, address: str, *, ranks: int, cuda: bool) -> None:
        self._address = address
        self.ranks = ranks
        """Of one engine, all of which receive every bucket."""
        self._backend = "nccl" if cuda else "gloo"
        self._members: dict[Engine, int] = {}
        self._group: Any = None
        self._formed = 0
        self._cancelled = threading.Event()

    @property
    def _name(self) -> str:
        return f"mua-weights-{self._formed}"

    async def join(self, targets: Targets, thread: Executor) -> None:
        """Have a group with exactly these engines. Raises :class:`EngineGone` when one does not come in time."""
        members = {engine: engine.stops for engine in targets.engines}
        if self._group is not None and members == self._members:
            return
        await self.leave()
        self._formed += 1
        self._cancelled.clear()
        port = free_port(self._address)
        size = 1 + self.ranks * len(members)
        body = {
            "master_address": self._address,
            "master_port": port,
            "world_size": size,
            "group_name": self._name,
            "backend": self._backend,
        }

        def form() -> None:
            from mua.compat.torch_outside_group import outside_group

            try:
                self._group = outside_group(
                    self._backend, self._address, port, world_size=size, name=self._name,
                    timeout=timedelta(seconds=targets.seconds),
                )  # fmt: skip
            except RuntimeError as error:
                raise EngineGone(f"engines did not join the process group of the weights: {error}") from error

        own = asyncio.get_running_loop().run_in_executor(thread, form)
        theirs = [
            targets.take_part(
                engine, "/init_weights_update_group", body | {"rank_offset": 1 + self.ranks * number}, targets.seconds
            )
            for number, engine in enumerate(members)
        ]
        await all_or_first_error([own, *theirs])
        self._members = members

    async def leave(self) -> None:
        """Dissolve the group with those of its engines that are still the same."""
        alive = [engine for engine, stops in self._members.items() if engine.up and engine.stops == stops]
        for engine in alive:
            try:
                await engine.client.control("/destroy_weights_update_group", {"group_name": self._name}, timeout=60.0)
            except EngineError as error:
                _log.warning("%s did not leave the process group of the weights: %s", engine.label, error)
        self.drop()

    def drop(self) -> None:
        """Forget the group without a word to the engines."""
        group, self._group, self._members = self._group, None, {}
        if group is not None:
            import torch.distributed as dist

            with contextlib.suppress(ValueError):  # whoever ended torch.distributed ended this group too
                dist.destroy_process_group(group)

    async def load(
        self, targets: Targets, bucket: WeightBucket, body: dict[str, Any], seconds: float, thread: Executor
    ) -> None:
        """Send one bucket to all engines. Whoever does not take part stops all: what the others got is unknown."""
        specs = [slot.spec for slot in bucket.layout.tensors]
        body = body | {
            "names": [spec.name for spec in specs],
            "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": self._name,
        }

        def transmit() -> None:
            """Blocks until all is sent, :meth:`cancel` is called or ``seconds`` are over."""
            import torch.distributed as dist

            deadline = time.monotonic() + seconds
            try:
                work: Any = dist.broadcast(bucket.flat, src=0, group=self._group, async_op=True)
                while not work.is_completed():
                    if self._cancelled.is_set() or time.monotonic() > deadline:
                        raise EngineGone("the broadcast of the weights was given up: an engine did not take part")
                    time.sleep(_POLL_SECONDS)
                work.wait()
            except RuntimeError as error:
                raise EngineGone(f"the broadcast of the weights failed: {error}") from error

        transmission = asyncio.get_running_loop().run_in_executor(thread, transmit)
        path = "/update_weights_from_distributed"
        try:
            receivers = [targets.take_part(engine, path, body, seconds) for engine in targets.engines]
            await all_or_first_error([transmission, *receivers])
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Give up what is under way; the next :meth:`join` forms a new group."""
        self._cancelled.set()
        self._members = {}
