"""Groups in flight, bounded by slots, and which of them a step trains on.

    slots = (max_staleness + 1) * groups_per_step + oversample

    ordinal 0 1 2 ...  ──► a slot each ──► episodes of the group ──► finished ──► take(): groups_per_step usable ones
                              ▲                                                     │            │
                              ├──────── refill: for max_extra_groups of a step ◄── unusable     ▼
                              └──────── release(), after the weight sync ◄──────────────────── trained

A group holds its slot from its start until the weights trained on its step are in the engines. The first
``max_extra_groups`` unusable groups of a step give theirs to others at once, so that every step uses up exactly
``groups_per_step`` slots, however many groups it looks at. Groups are taken in the order of the task stream (those of
a synchronous step, all of which it takes, as they finish). Hence no more than ``max_staleness`` further steps stand
before a group when it starts: no trajectory is older than ``max_staleness`` versions, and nothing is dropped for age.

With ``oversample`` a step takes the first usable groups that finish. That favors short episodes, and order no longer
bounds staleness: what could only be trained too late is cancelled as soon as the step is full, and its ordinal starts
again before any new one. A group that was cancelled ``max_cancellations`` times is waited for in the last step that
may train it, as long as that step has room, so that long tasks come late instead of never.

With ``carry`` a group that is under way when the step is full goes on, for so many versions beyond ``max_staleness``,
and none of what it sampled is thrown away. It stays where it is and holds its place among those of ``oversample``:
whether it runs meanwhile is the engines' business, which pause while the trainer has their memory. A run that is
killed starts it again, for its episodes are in memory.

A checkpoint remembers a :class:`Position`: the next ordinal, and those that were started and not taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from mua.types import Group, Json


@dataclass(frozen=True, slots=True)
class StepDemand:
    """How many groups a run's steps want, and how many may be under way for them."""

    groups: int
    """Usable groups that a step trains on."""
    steps: int
    """Steps of the whole run."""
    staleness: int = 0
    """Versions a group's start may lie behind the step that trains it."""
    extra: int = 0
    """Unusable groups of a step that others replace."""
    oversample: int = 0
    """Groups in flight beyond those that steps wait for."""
    max_cancellations: int = 1
    """Cancellations of one group after which a step waits for it."""
    carry: int = 0
    """Versions beyond ``staleness`` that a group which is under way may be overtaken by instead of being cancelled."""

    @property
    def most(self) -> int:
        """Groups that one step looks at before it trains on what is usable among them."""
        return self.groups + self.extra + self.oversample

    @property
    def in_order(self) -> bool:
        """Whether a step must take groups in the order of the stream."""
        return self.staleness > 0 and self.oversample == 0


@dataclass(frozen=True, slots=True)
class Position:
    """Where in the stream a run is."""

    next: int = 0
    """The first ordinal that was never started."""
    waiting: Mapping[int, int] = field(default_factory=dict)
    """Ordinals that were started and belong to no step yet, and how often each was cancelled."""

    def to_json(self) -> Json:
        return {"next": self.next, "waiting": [list(item) for item in sorted(self.waiting.items())]}

    @classmethod
    def from_json(cls, state: Json) -> Self:
        return cls(state["next"], dict(state["waiting"]))


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """What one step got."""

    groups: list[Group]
    """Everything that was rolled out to its end for the step, in the order of the stream."""
    usable: list[Group]
    """Those of them to train on; fewer than ``StepDemand.groups`` when :attr:`StepDemand.most` groups hold too few."""
    cancelled: int
    """Groups that were cancelled, or finished too late, and start again."""
    position: Position
    """Where the stream continues after this step."""
    carried: int = 0
    """Groups that go on only because of ``StepDemand.carry``."""
    saved_tokens: int = 0
    """Sampled tokens of :attr:`groups` that would have been sampled again without it."""


@dataclass(frozen=True, slots=True)
class _Flight:
    task: asyncio.Task[Group]
    step: int
    """The step that was next, and the version in the engines, when it started."""
    cancelled: int


class GroupScheduler:
    """Starts groups as slots are free and deals them out to steps. Belongs to one event loop.

    The order of calls is ``start``, then ``take`` and ``release`` for every step. ``roll_out(ordinal)`` makes one
    group; it is called in the order in which groups start. ``usable`` says whether a finished group deserves a place.
    """

    def __init__(
        self,
        roll_out: Callable[[int], Coroutine[Any, Any, Group]],
        demand: StepDemand,
        *,
        step: int = 0,
        position: Position | None = None,
        usable: Callable[[Group], bool] = lambda group: True,
    ) -> None:
        """Schedule the steps from ``step`` on; ``position`` is that of the step before."""
        position = position or Position()
        self._roll_out = roll_out
        self._demand = demand
        self._usable = usable
        self._step = step
        self._next = position.next
        self._waiting = dict(position.waiting)
        self._flights: dict[int, _Flight] = {}
        self._held = 0
        """Slots of groups that the current step has taken."""
        self._stopped = False

    def start(self) -> None:
        """Fill the free slots; what was cancelled starts before anything new."""
        steps = 0 if self._stopped else min(self._demand.staleness + 1, self._demand.steps - self._step)
        room = steps * self._demand.groups + self._demand.oversample - self._held if steps > 0 else 0
        while len(self._flights) < room:
            ordinal = min(self._waiting, default=self._next)
            cancelled = self._waiting.pop(ordinal, 0)
            self._next = max(self._next, ordinal + 1)
            task = asyncio.create_task(self._roll_out(ordinal), name=f"group {ordinal}")
            self._flights[ordinal] = _Flight(task, self._step, cancelled)

    async def take(self) -> RolloutBatch:
        """The groups of the next step, once enough of them have finished."""
        demand, taken, usable, saved = self._demand, list[Group](), list[Group](), 0
        while self._flights and len(usable) < demand.groups and len(taken) < demand.most:
            patience, places = demand.max_cancellations, demand.groups - len(usable)
            owed = [o for o, flight in self._flights.items() if self._overdue(flight) and flight.cancelled >= patience]
            candidates = owed if len(owed) >= places else list(self._flights)
            if demand.in_order:
                candidates = [min(self._flights)]
            await asyncio.wait([self._flights[o].task for o in candidates], return_when=asyncio.FIRST_COMPLETED)
            ordinal = min(o for o in candidates if self._flights[o].task.done())
            flight = self._flights.pop(ordinal)
            group = flight.task.result()
            taken.append(group)
            if (last := flight.step + demand.staleness) < self._step:
                saved += sampled_tokens(group, last)
            if self._usable(group):
                usable.append(group)
            self._held = len(usable) + max(0, len(taken) - len(usable) - demand.extra)
            self.start()
        overdue = [ordinal for ordinal, flight in self._flights.items() if self._overdue(flight)]
        await self._cancel(overdue)
        carried = sum(flight.step + demand.staleness <= self._step for flight in self._flights.values())
        return RolloutBatch(_sorted(taken), _sorted(usable), len(overdue), self.position, carried, saved)

    def release(self) -> None:
        """The weights trained on the groups taken last are in the engines: start new groups in their slots."""
        self._step += 1
        self._held = 0
        self.start()

    @property
    def position(self) -> Position:
        """Where a run that continues after the groups taken so far begins."""
        under_way = {ordinal: flight.cancelled for ordinal, flight in self._flights.items()}
        return Position(self._next, self._waiting | under_way)

    @property
    def in_flight(self) -> int:
        """Groups started and not yet taken."""
        return len(self._flights)

    async def stop(self) -> None:
        """Cancel what runs and wait until it is gone; nothing starts any more."""
        self._stopped = True
        await self._cancel(list(self._flights))

    def _overdue(self, flight: _Flight) -> bool:
        """Whether the current step is the last that may train the group."""
        oldest = self._step - self._demand.staleness - self._demand.carry
        return flight.step <= oldest or self._step + 1 >= self._demand.steps

    async def _cancel(self, ordinals: list[int]) -> None:
        """End these groups, finished ones included, and wait until they are gone; their ordinals wait to be started."""
        flights = {ordinal: self._flights[ordinal] for ordinal in ordinals}
        for flight in flights.values():
            flight.task.cancel()
        await asyncio.gather(*(flight.task for flight in flights.values()), return_exceptions=True)
        for ordinal, flight in flights.items():
            del self._flights[ordinal]
            self._waiting[ordinal] = flight.cancelled + 1


def sampled_tokens(group: Group, version: int | None = None) -> int:
    """Tokens that the policy sampled in ``group``, by policies up to ``version`` if one is given."""
    versions = [segment.version for t in group.trajectories for segment in t.segments]
    return sum(int(((v >= 0) & (v <= (v if version is None else version))).sum()) for v in versions)


def _sorted(groups: list[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: group.ordinal)
