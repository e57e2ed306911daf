"""Groups in flight, bounded by slots.

    slots = (max_staleness + 1) * groups_per_step

    ordinal 0 1 2 ...  ──► a slot each ──► episodes of the group ──► done ──► take(n), in order of ordinals
                              ▲                                                   │
                              └────────── release(n), after the weight sync ◄── trained

A slot is held from the start of a group until the weights trained on it are in the engine. The group with ordinal
``o`` trains in step ``o // groups_per_step`` and starts only after the sync of step ``o // groups_per_step -
max_staleness - 1``: no trajectory is older than ``max_staleness`` versions, by construction, and nothing is ever
dropped for age. ``max_staleness`` 0 is synchronous training. Because groups are taken in the order of the stream,
long episodes are not underrepresented, and the next ordinal is all that a checkpoint must remember.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from mua.types import Group


class GroupScheduler:
    """Starts groups as slots are free. ``roll_out(ordinal)`` makes one group. Belongs to one event loop."""

    def __init__(self, roll_out: Callable[[int], Awaitable[Group]], *, slots: int, first: int, last: int) -> None:
        """Schedule the ordinals from ``first`` to ``last`` (exclusive)."""
        self._roll_out = roll_out
        self._next_start = first
        self._next_take = first
        self._last = last
        self._free = slots
        self._running: dict[int, asyncio.Task[Group]] = {}

    def start(self) -> None:
        """Fill the free slots."""
        while self._free and self._next_start < self._last:
            ordinal = self._next_start
            self._running[ordinal] = asyncio.create_task(self._group(ordinal), name=f"group {ordinal}")
            self._next_start += 1
            self._free -= 1

    async def take(self, count: int) -> list[Group]:
        """The next ``count`` groups of the stream, once all of them are done."""
        ordinals = range(self._next_take, min(self._next_take + count, self._last))
        groups = [await self._running[ordinal] for ordinal in ordinals]
        for ordinal in ordinals:
            del self._running[ordinal]
        self._next_take = ordinals.stop
        return groups

    def release(self, count: int) -> None:
        """Give back the slots of ``count`` groups and start new ones in them."""
        self._free += count
        self.start()

    @property
    def in_flight(self) -> int:
        """Groups started and not yet taken."""
        return len(self._running)

    async def stop(self) -> None:
        """Cancel what runs and wait until it is gone; nothing starts any more."""
        self._last = self._next_start
        running = list(self._running.values())
        self._running.clear()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _group(self, ordinal: int) -> Group:
        return await self._roll_out(ordinal)
