"""Where the time of a training step goes: of the trainer, of the engines and of the episodes.

    trainer    ├ wait ┤ memory ├ batch ┤ logprobs ├ optimizer ┤ memory ├ sync ┤ evaluate ┤ records ├ checkpoint ┤ rest
    engine     ├ generating ┤ idle: trainer waits ┤ idle: trainer works ┤ paused ┤ released ┤ down
    episode    ├ start ┤ generating ├ engine slot ├ tools ├ user ├ scoring ┤ other

A clock is in one state at a time, so that the parts of a line add up to its whole however the states follow each other:
what no state claims is the trainer's ``rest`` and the episodes' ``other``, and both are shown. A clock is read when its
state changes, never per token.

The line of step ``k`` covers what lies between the moments at which line ``k - 1`` and line ``k`` were put together:
the record and the checkpoint of a step are therefore in the line after it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from statistics import fmean
from time import perf_counter

from mua.types import Group

Clock = Callable[[], float]


class TrainerPhase(StrEnum):
    """What the trainer's thread is doing in a step of reinforcement learning."""

    WAIT = "wait"
    """For the episodes of the step."""
    MEMORY = "memory"
    """Release and resume of the engines' memory, offload and onload of the trainer's, emptying of caches."""
    BATCH = "batch"
    """Filters, advantages, packing into a batch, metrics of the batch."""
    LOGPROBS = "logprobs"
    """Log-probabilities of the old policy and the reference, values of the critic."""
    OPTIMIZER = "optimizer"
    """Forward and backward passes and updates, of the policy and the critic."""
    SYNC = "sync"
    """Weights from the trainer to the engines, waiting for an engine included."""
    EVALUATE = "evaluate"
    RECORDS = "records"
    """Traces and metrics."""
    CHECKPOINT = "checkpoint"
    REST = "rest"
    """Everything else."""


TRAINING = (TrainerPhase.BATCH, TrainerPhase.LOGPROBS, TrainerPhase.OPTIMIZER)
"""What a trainer would still do if episodes, weights and memory cost nothing."""


class EngineActivity(StrEnum):
    """What one engine is doing."""

    GENERATING = "generating"
    """At least one request runs."""
    IDLE_AWAITED = "idle_trainer_waits"
    """Serves and has no request, while the trainer waits for episodes: they are in tools, users or scoring."""
    IDLE = "idle_trainer_works"
    """Serves and has no request, while the trainer does something else."""
    PAUSED = "paused"
    """Closed for a weight update or a move of memory."""
    RELEASED = "released"
    """Its memory is given back."""
    DOWN = "down"
    """Starting, stopped, or without the current weights."""


class StateClock:
    """Seconds in each of several states, of which exactly one holds at a time. Calls may come from several threads."""

    def __init__(self, state: str, clock: Clock = perf_counter) -> None:
        self._clock = clock
        self._state = state
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._since = clock()
        self._lock = threading.RLock()

    @property
    def state(self) -> str:
        return self._state

    def switch(self, state: str) -> None:
        """From now on ``state`` holds; the time since the last call belongs to the one before."""
        with self._lock:
            self._book()
            self._state = state

    def take(self) -> dict[str, float]:
        """Seconds by state since the last call. Their sum is the time that went by."""
        with self._lock:
            self._book()
            taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def _book(self) -> float:
        """Book the time since the last booking to the current state; that time in seconds."""
        now = self._clock()
        elapsed, self._since = now - self._since, now
        self._seconds[self._state] += elapsed
        return elapsed


class Timeline(StateClock):
    """The phases of one thread. Within a phase another one may begin; the outer one stands still meanwhile."""

    def __init__(self, clock: Clock = perf_counter) -> None:
        super().__init__(TrainerPhase.REST, clock)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A block that is the phase ``name``, also when it raises."""
        outer = self._state
        self.switch(name)
        try:
            yield
        finally:
            self.switch(outer)


class EngineClock(StateClock):
    """One engine: what it does, and how many requests run on it."""

    def __init__(self, slots: int, clock: Clock = perf_counter) -> None:
        super().__init__(EngineActivity.DOWN, clock)
        self._slots = slots
        self._running = 0
        self._slot_seconds = 0.0

    def note(self, activity: EngineActivity, running: int) -> None:
        """From now on the engine does ``activity`` and has ``running`` requests."""
        self.switch(activity)
        with self._lock:
            self._running = running

    def take_usage(self) -> tuple[dict[str, float], float, float]:
        """:meth:`take`, seconds of all requests that ran meanwhile, and the most there could have been."""
        with self._lock:
            taken = self.take()
            used, self._slot_seconds = self._slot_seconds, 0.0
        return taken, used, self._slots * sum(taken.values())

    def _book(self) -> float:
        elapsed = super()._book()
        self._slot_seconds += self._running * elapsed
        return elapsed


def trainer_metrics(seconds: Mapping[str, float], phases: Iterable[str] = TrainerPhase) -> dict[str, float]:
    """``time/<phase>_seconds`` of all ``phases`` and of others that occurred; their sum is the step."""
    return {f"time/{name}_seconds": seconds.get(name, 0.0) for name in dict.fromkeys((*phases, *seconds))}


def engine_metrics(clocks: Sequence[EngineClock]) -> dict[str, float]:
    """Shares of all engines' time since the last call, which sum to 1; the share of slots that were in use.

    ``time/engine_generating_seconds`` is the mean over the engines.
    """
    usage = [clock.take_usage() for clock in clocks]
    whole = sum(sum(seconds.values()) for seconds, _, _ in usage)
    if not whole:
        return {}
    spent = {activity: sum(seconds.get(activity, 0.0) for seconds, _, _ in usage) for activity in EngineActivity}
    slots = sum(most for _, _, most in usage)
    return {f"time/engine_{activity}": seconds / whole for activity, seconds in spent.items()} | {
        "time/engine_slots_used": sum(used for _, used, _ in usage) / slots,
        "time/engine_generating_seconds": spent[EngineActivity.GENERATING] / len(usage),
    }


_EPISODE_PARTS = {
    "start": "start", "generate": "generating", "engine_slot": "engine_slot", "tools": "tools", "user": "user",
    "evaluate": "scoring",
}  # fmt: skip
"""Stages that an episode times, and what they are called in the metrics."""


def episode_metrics(groups: Iterable[Group]) -> dict[str, float]:
    """Mean seconds of an episode in each part; ``time/episode_seconds`` is their sum.

    ``engine_slot`` is the wait for an engine that takes the request, and no part of ``generating``. ``scoring`` is the
    environment's evaluation and its judge's. ``start`` makes the environment and the user; ``other`` is what is left:
    attempts that failed, pauses between attempts, the event loop. Before all of that an episode waits for
    ``rollout.concurrency``: ``time/episode_queued_seconds``. Episodes that were given up have no parts and are not
    counted.
    """
    timed = [t.metrics for group in groups for t in group.trajectories if "seconds/episode" in t.metrics]
    if not timed:
        return {}
    whole = fmean(metrics["seconds/episode"] for metrics in timed)
    parts = {
        name: fmean(metrics.get(f"seconds/{key}", 0.0) for metrics in timed) for key, name in _EPISODE_PARTS.items()
    }
    parts["generating"] -= parts["engine_slot"]
    parts["other"] = whole - sum(parts.values())
    found = {f"time/episode_{name}_seconds": seconds for name, seconds in parts.items()}
    queued = fmean(metrics.get("seconds/queued", 0.0) for metrics in timed)
    return found | {"time/episode_seconds": whole, "time/episode_queued_seconds": queued}


def overlap_efficiency(seconds: Mapping[str, float], generating: float) -> float:
    """max(generation, training) / step.

    Training is the time of :data:`TRAINING`. Generation is the mean over the engines of the time in which at least one
    request ran. 1 says that the longer of the two hides everything else. In a synchronous step the two follow each
    other, and the rest of the step counts against it. An engine that one last request keeps busy counts as generating:
    ``time/engine_slots_used`` says how full it was.

    Args:
        seconds: of the trainer by phase; their sum is the step.
        generating: seconds.
    """
    step = sum(seconds.values())
    training = sum(seconds.get(phase, 0.0) for phase in TRAINING)
    return max(generating, training) / step if step else 0.0
