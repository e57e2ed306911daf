"""A simulation of a training run in time: which placement of trainer and engines is fastest, and what each waits for.

    tasks ──► GroupScheduler ──► episodes ──► engines ──► groups ──► trainer ──► sync ──► release
              (the real one)     turns with   slots, prefill,        seconds     engines
                                 pauses       decoding               per token   pause

The event loop's time is simulated: :class:`SimulatedLoop` jumps to the next moment at which something happens. So the
scheduler of groups is the one that training uses (:mod:`mua.rollout.scheduler`), the engine of a turn is chosen by the
pool's own rule, and what comes out are the metrics of :mod:`mua.observe.timeline`, by the same clocks. Modelled are:

* an engine: it holds at most :attr:`Setting.slots` requests and :attr:`Setting.cache_tokens` tokens; prefill goes
  before decoding; an iteration gives every running request one token and takes a time that depends on how many run and
  on their tokens. Tokens of a session that the engine still has, under the same weights, need no prefill; the sessions
  that were there longest ago give way to requests;
* a weight update: no engine works, and afterwards every running request is prefilled anew, as after SGLang's
  ``pause_generation`` with ``retract`` and an emptied cache;
* devices that trainer and engines share: engines are released while the trainer trains, or both work at
  :attr:`Setting.together` of their speed.

Not modelled: the CPU time of rollout and environments, faults, evaluation, popular experts.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean
from typing import Protocol

from mua.engine.engine_handle import Slots, least_loaded
from mua.observe.timeline import (
    EngineActivity,
    EngineClock,
    Timeline,
    TrainerPhase,
    engine_metrics,
    episode_metrics,
    overlap_efficiency,
    trainer_metrics,
)
from mua.rollout.scheduler import GroupScheduler, StepDemand
from mua.types import Group, Outcome, Trajectory

_NOTHING = 1e-12
"""Seconds of work that are none: rounding."""


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while anything can run, and then jumps to the next timer."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds


class _Jump(selectors.DefaultSelector):
    """Waits for nothing outside the loop."""

    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulation waits for something that never happens")
        self._loop.jump(max(0.0, timeout))
        return []


@dataclass(frozen=True, slots=True)
class SimulatedTurn:
    """One turn of the policy."""

    prompt: int
    """Tokens that are new to it: instructions, tool results, the user's words."""
    sampled: int
    pause: float
    """Seconds after it: tools or the user."""


@dataclass(frozen=True, slots=True)
class SimulatedEpisode:
    turns: Sequence[SimulatedTurn]
    start: float = 0.0
    """Seconds before the first turn."""
    end: float = 0.0
    """Seconds of scoring."""
    shared: int = 0
    """Tokens that the first prompts of all episodes begin with, which an engine prefills once after a weight update."""

    @property
    def tokens(self) -> int:
        return sum(turn.prompt + turn.sampled for turn in self.turns)


class EngineSpeed(Protocol):
    """How fast one engine is when nothing disturbs it."""

    def iteration(self, running: int, context: float) -> float:
        """Seconds in which each of ``running`` requests, which together hold ``context`` tokens, gets one token."""

    def prefill(self, tokens: int) -> float:
        """Seconds for ``tokens`` of one request that are not cached."""


@dataclass(frozen=True)
class Setting:
    """One run to simulate."""

    demand: StepDemand
    group_size: int
    episode: Callable[[int, int], SimulatedEpisode]
    """Of an ordinal and a sample."""
    speed: EngineSpeed
    engines: int
    slots: int
    """``engine.max_running_requests``."""
    cache_tokens: int | None = None
    """Tokens that one engine holds; None: as many as come."""
    concurrency: int = 1 << 30
    """``rollout.concurrency``."""
    score_seconds: float = 0.0
    """Log-probabilities, per token of the batch."""
    train_seconds: float = 0.0
    """Optimizer steps, per token of the batch."""
    step_seconds: float = 0.0
    """Of every step's optimizer steps, whatever its tokens."""
    sync_seconds: float = 0.0
    """Weight update: trainer and engines do nothing else."""
    switch_seconds: float = 0.0
    """Release of the engines' memory before training, and once more to take it back; with :attr:`released`."""
    batch_seconds: float = 0.0
    """Putting the batch together."""
    record_seconds: float = 0.0
    """Traces, metrics and checkpoint of a step."""
    released: bool = False
    """Whether engines stand still while the trainer trains: shared devices with ``engine.memory_saver``."""
    together: float = 1.0
    """Speed of trainer and of engines while both work, of what each has alone: 1 on devices of their own, 0.5 where
    they take turns on one device."""
    engine_devices: int | None = None
    """Devices of the engines, where several engines share one: those at work divide them evenly. None: one each."""
    oldest_first: bool = True
    """Whether requests of the groups that are trained first get a slot first, rather than those that came first."""


class _Shared:
    """Who works on the devices: the trainer's work takes longer while engines work on them too."""

    def __init__(self, setting: Setting) -> None:
        self.together = setting.together
        self._devices = setting.engine_devices or setting.engines
        self.engines: list[_SimulatedEngine] = []
        self.training = False
        self._left = self._since = 0.0
        self._done: asyncio.Event | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def work(self, seconds: float) -> None:
        """The trainer works for ``seconds`` of undisturbed time."""
        if seconds <= 0 or self.together == 1:
            await asyncio.sleep(seconds)
            return
        self._done, self._left, self._since = asyncio.Event(), seconds, _now()
        self._set_training(True)
        self.changed()
        await self._done.wait()
        self._done = None
        self._set_training(False)

    def _set_training(self, training: bool) -> None:
        for engine in self.engines:
            engine.advance()
        self.training = training
        self._set_rate()

    def changed(self) -> None:
        """An engine began or ended to work."""
        for engine in self.engines:
            engine.advance()
        self._set_rate()
        if self._done is None:
            return
        self._left -= (_now() - self._since) * self._rate
        self._since = _now()
        busy = sum(engine.working for engine in self.engines) / len(self.engines)
        self._rate = 1 - (1 - self.together) * busy
        if self._timer is not None:
            self._timer.cancel()
        self._timer = _loop().call_later(max(0.0, self._left) / self._rate, self._done.set)

    def _set_rate(self) -> None:
        """How fast engines work from now on; until now all have worked at the speed before."""
        working = sum(engine.working for engine in self.engines)
        speed = min(1.0, self._devices / max(1, working)) * (self.together if self.training else 1.0)
        if speed != self.speed:
            self.speed = speed
            for engine in self.engines:
                engine.plan()

    speed = 1.0
    """Of an engine at work, of what it has alone."""
    _rate = 1.0


@dataclass(eq=False, slots=True)
class _Session:
    """One episode at the engine that it was sent to first."""

    ordinal: int
    shared: int
    engine: _SimulatedEngine | None = None


@dataclass(slots=True)
class _Request:
    session: _Session
    context: int
    """Tokens before the turn, of which the engine may have some."""
    uncached: int
    sampled: int
    done: asyncio.Event = field(default_factory=asyncio.Event)
    prefill: float = 0.0
    """Seconds still to do."""
    until: float = 0.0
    """Level at which it is done."""

    @property
    def room(self) -> int:
        return self.context + self.sampled


class _SimulatedEngine:
    """``level`` counts the tokens that a request would have got that was there from the beginning."""

    def __init__(self, setting: Setting, shared: _Shared) -> None:
        self.in_flight = self.queued = 0
        self.slots = Slots(setting.slots)
        self.clock = EngineClock(setting.slots, _now)
        self._sessions: dict[_Session, int] = {}
        """Tokens of those that no request of runs now; the first was there longest ago."""
        self._kept = 0
        """Their sum."""
        self._primed = False
        """Whether it has what all episodes begin with."""
        self.paused = self.released = False
        self._setting, self._shared = setting, shared
        self._waiting: deque[_Request] = deque()
        self._prefills: deque[_Request] = deque()
        self._running: list[tuple[float, int, _Request]] = []
        self._held = 0
        self._context = self._level = 0.0
        self._since = _now()
        self._pace = 0.0
        """Seconds of undisturbed work per iteration, as of the last :meth:`plan`."""
        self._timer: asyncio.TimerHandle | None = None
        self._order = count()
        self._worked = False

    @property
    def working(self) -> bool:
        return not (self.paused or self.released) and bool(self._prefills or self._running)

    @asynccontextmanager
    async def slot(self, number: int) -> AsyncIterator[None]:
        self.queued += 1
        await self.slots.acquire(number)
        self.queued -= 1
        self.in_flight += 1
        yield
        self.in_flight -= 1
        self.slots.release()

    async def generate(self, session: _Session, context: int, sampled: int) -> None:
        kept = self._sessions.pop(session, 0)
        self._kept -= kept
        cached = max(kept, session.shared if self._primed else 0)
        self._primed = True
        request = _Request(session, context, max(1, context - cached), sampled)
        self.advance()
        self._waiting.append(request)
        self.plan()
        await request.done.wait()

    def empty_cache(self) -> None:
        """What runs is prefilled anew, with what it had sampled."""
        self._sessions.clear()
        self._kept, self._primed = 0, False
        for _, _, request in self._running:
            left = max(0.0, request.until - self._level)
            request.uncached = round(request.context + request.sampled - left)
            request.sampled = max(1, round(left))
            request.context = request.uncached
        self._waiting.extendleft(reversed([*self._prefills, *(request for _, _, request in self._running)]))
        for request in self._prefills:
            request.uncached = request.context
        self._prefills.clear()
        self._running.clear()
        self._held, self._context = 0, 0.0

    def advance(self) -> None:
        """Do the work of the time since the last call."""
        now = _now()
        seconds, self._since = now - self._since, now
        if not self.working:
            return
        seconds *= self._shared.speed
        if self._prefills:
            self._prefills[0].prefill -= seconds
        else:
            tokens = seconds / self._pace
            self._level += tokens
            self._context += tokens * len(self._running)

    def plan(self) -> None:
        """Take in what there is room for, end what is done, and come back when the next thing ends."""
        self._finish()
        self._take_in()
        self._finish()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.working:
            if self._prefills:
                left = self._prefills[0].prefill
            else:
                self._pace = self._setting.speed.iteration(len(self._running), self._context)
                left = (self._running[0][0] - self._level) * self._pace
            self._timer = _loop().call_later(max(0.0, left) / self._shared.speed, self._again)
        if self.working is not self._worked:
            self._worked = self.working
            self._shared.changed()

    def note(self, awaited: bool) -> None:
        if self.paused:
            activity = EngineActivity.PAUSED
        elif self.released:
            activity = EngineActivity.RELEASED
        elif self.in_flight:
            activity = EngineActivity.GENERATING
        else:
            activity = EngineActivity.IDLE_AWAITED if awaited else EngineActivity.IDLE
        self.clock.note(activity, self.in_flight)

    def _again(self) -> None:
        self.advance()
        self.plan()

    def _take_in(self) -> None:
        room = self._setting.cache_tokens
        while self._waiting and not (self.paused or self.released):
            if room is not None and self._held and self._held + self._waiting[0].room > room:
                return
            request = self._waiting.popleft()
            self._held += request.room
            while room is not None and self._sessions and self._held + self._kept > room:
                self._kept -= self._sessions.pop(next(iter(self._sessions)))
            request.prefill = self._setting.speed.prefill(request.uncached)
            self._prefills.append(request)

    def _finish(self) -> None:
        if self.paused or self.released:
            return
        while self._prefills and self._prefills[0].prefill <= _NOTHING:
            request = self._prefills.popleft()
            request.until = self._level + request.sampled
            self._context += request.context
            heapq.heappush(self._running, (request.until, next(self._order), request))
        while self._running and self._running[0][0] - self._level <= 1e-6:
            _, _, request = heapq.heappop(self._running)
            self._context -= request.room
            self._held -= request.room
            self._sessions[request.session] = request.room
            self._kept += request.room
            request.done.set()
        if not self._running:
            self._context = 0.0


class Simulation:
    """One run; :meth:`run` gives a line of metrics per step, by the names that a real run writes."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def run(self) -> list[dict[str, float]]:
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            return runner.run(self._train())

    async def _train(self) -> list[dict[str, float]]:
        setting = self._setting
        self._version, self._awaited = 0, False
        self._shared = _Shared(setting)
        self._engines = [_SimulatedEngine(setting, self._shared) for _ in range(setting.engines)]
        self._shared.engines = self._engines
        self._room = asyncio.Semaphore(setting.concurrency)
        self._timeline = Timeline(_now)
        scheduler = GroupScheduler(self._group, setting.demand)
        scheduler.start()
        self._note()
        lines = []
        for step in range(setting.demand.steps):
            line = await self._step(scheduler, step)
            seconds = self._timeline.take()
            line |= engine_metrics([engine.clock for engine in self._engines]) | trainer_metrics(seconds)
            generating = line.get("time/engine_generating_seconds", 0.0)
            line["time/overlap_efficiency"] = overlap_efficiency(seconds, generating)
            lines.append(line | {"step": step, "time/step_seconds": sum(seconds.values())})
        await scheduler.stop()
        return lines

    async def _step(self, scheduler: GroupScheduler, step: int) -> dict[str, float]:
        setting, phase = self._setting, self._timeline.phase
        with phase(TrainerPhase.WAIT):
            self._await(True)
            batch = await scheduler.take()
            self._await(False)
        members = [t for group in batch.usable for t in group.trajectories]
        tokens = sum(t.details["tokens"] for t in members)
        if setting.released:
            with phase(TrainerPhase.MEMORY):
                self._release(True)
                await asyncio.sleep(setting.switch_seconds)
        with phase(TrainerPhase.BATCH):
            await self._shared.work(setting.batch_seconds)
        with phase(TrainerPhase.LOGPROBS):
            await self._shared.work(setting.score_seconds * tokens)
        with phase(TrainerPhase.OPTIMIZER):
            await self._shared.work(setting.train_seconds * tokens + setting.step_seconds)
        if setting.released:
            with phase(TrainerPhase.MEMORY):
                await asyncio.sleep(setting.switch_seconds)
        with phase(TrainerPhase.SYNC):
            await self._sync()
        early = setting.demand.staleness > 0  # as in mua.trainer.rl
        if early:
            scheduler.release()
        with phase(TrainerPhase.RECORDS):
            await self._shared.work(setting.record_seconds)
        if not early:
            scheduler.release()
        ages: Counter[int] = Counter()
        for member in members:
            for version, sampled in member.details["sampled"]:
                ages[step - version] += sampled
        sampled = ages.total()
        return episode_metrics(batch.groups) | {
            "policy/tokens": float(tokens),
            "engine/sampled_tokens": float(sampled),
            "mismatch/version_lag/mean": sum(age * n for age, n in ages.items()) / sampled,
            "mismatch/version_lag/max": float(max(ages)),
        }

    async def _sync(self) -> None:
        for engine in self._engines:
            engine.advance()
            engine.paused, engine.released = True, False
            engine.empty_cache()
            engine.plan()
        self._note()
        await asyncio.sleep(self._setting.sync_seconds)
        self._version += 1
        for engine in self._engines:
            engine.advance()
            engine.paused = False
            engine.plan()
        self._note()

    def _release(self, released: bool) -> None:
        for engine in self._engines:
            engine.advance()
            engine.released = released
            engine.plan()
        self._note()

    def _await(self, awaited: bool) -> None:
        self._awaited = awaited
        self._note()

    def _note(self) -> None:
        for engine in self._engines:
            engine.note(self._awaited)

    async def _group(self, ordinal: int) -> Group:
        size = self._setting.group_size
        return Group(ordinal, "", list(await asyncio.gather(*(self._play(ordinal, sample) for sample in range(size)))))

    async def _play(self, ordinal: int, sample: int) -> Trajectory:
        wanted = _now()
        async with self._room:
            episode, began = self._setting.episode(ordinal, sample), _now()
            session = _Session(ordinal, episode.shared)
            await asyncio.sleep(episode.start)
            context, generating, pauses = 0, 0.0, 0.0
            sampled: list[tuple[int, int]] = []
            for turn in episode.turns:
                context += turn.prompt
                started = _now()
                await self._turn(session, context, turn.sampled)
                generating += _now() - started
                context += turn.sampled
                sampled.append((self._version, turn.sampled))
                pauses += turn.pause
                await asyncio.sleep(turn.pause)
            await asyncio.sleep(episode.end)
            metrics = {
                "seconds/queued": began - wanted, "seconds/episode": _now() - began, "seconds/start": episode.start,
                "seconds/generate": generating, "seconds/tools": pauses, "seconds/evaluate": episode.end,
            }  # fmt: skip
        details = {"tokens": context, "sampled": sampled}
        return Trajectory("", ordinal, sample, [], [], 0.0, True, Outcome.USER_STOP, metrics=metrics, details=details)

    async def _turn(self, session: _Session, context: int, sampled: int) -> None:
        engine = session.engine or least_loaded(self._engines)
        session.engine = engine
        async with engine.slot(session.ordinal if self._setting.oldest_first else 0):
            engine.note(self._awaited)
            await engine.generate(session, context, max(1, sampled))
        engine.note(self._awaited)


def simulate(setting: Setting) -> list[dict[str, float]]:
    """A line of metrics for every step of ``setting.demand``."""
    return Simulation(setting).run()


def mean_metrics(kept: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of every metric the mean over the steps; shares of time are weighted by it."""
    whole = sum(line["time/step_seconds"] for line in kept)
    found = {}
    for name in dict.fromkeys(name for line in kept for name in line):
        if name.startswith("time/engine_") and not name.endswith("_seconds"):  # a share of the step's time
            found[name] = sum(line.get(name, 0.0) * line["time/step_seconds"] for line in kept) / whole
        else:
            found[name] = fmean(line.get(name, 0.0) for line in kept)
    return found


def settled(lines: Sequence[dict[str, float]], staleness: int) -> Sequence[dict[str, float]]:
    """Without the steps at the beginning, where engines begin with all slots at once, and those at the end, for which
    no new groups start."""
    first = min(2 + staleness, len(lines) - 1)
    return lines[first : len(lines) - staleness] or lines[first:]


def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def _now() -> float:
    return asyncio.get_running_loop().time()
