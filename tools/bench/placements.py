"""Which placement of trainer and engines is fastest, by a simulation of training in time; nothing is measured.

    python -m tools.bench.placements [RECIPE ...] [--spread 0.2 1.0] [--pause 0.5 10] [--staleness 2]

    tasks ──► GroupScheduler ──► episodes ──► engines ──► groups ──► trainer ──► sync ──► release
              (the real one)     turns with   slots, prefill,        seconds     engines
                                 pauses       decoding               per token   pause

    in turns     every GPU holds trainer and engine, and one of them works           staleness 0
    at once      every GPU holds trainer and engine, and both work                   staleness >= 1
    separate     some GPUs train, the others generate                                staleness >= 1

The event loop's clock is simulated: :class:`SimulatedLoop` jumps to the next moment at which something happens. The
scheduler of groups, the choice of an engine and the clocks are those of a run. An engine holds at most
:attr:`Setting.slots` requests and :attr:`Setting.cache_tokens` tokens; prefill goes before decoding. Tokens of a
session that the engine has, under the same weights, need no prefill. After a weight update every running request is
prefilled anew. Not modeled: CPU time of rollout and environments, faults, evaluation, popular experts. What a GPU does
in a second follows from its datasheet and from the assumptions in the section ``cluster`` (docs/planning.md).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import selectors
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Protocol

from mua.config.load import load_config
from mua.config.schema import ExperimentConfig
from mua.engine.engine_handle import Slots
from mua.launch.plan.gpu_memory import EngineBytes, engine_bytes, reference_bytes
from mua.launch.plan.layout import gpus_per_node
from mua.launch.plan.links import plan_sync
from mua.launch.plan.planner import (
    GPUS,
    Plan,
    bubble,
    episode_tokens,
    forward_flops,
    make_plan,
    memory_options,
    stage_plans,
)
from mua.megatron.architecture import Architecture, Workload
from mua.megatron.layouts import is_proven, problems
from mua.observe.timeline import EngineActivity, EngineClock, Timeline, TrainerPhase, engine_metrics, trainer_metrics
from mua.rollout.runner import GroupScheduler, StepDemand
from mua.types import Group, Outcome, Trajectory
from mua.utils.seeds import derived_seed
from tools import kit

STEPS = 5
"""Of a simulation, without those in which it settles."""
ROUNDING = 2e-9
"""Seconds of work that are none: a loop runs timers that are due in less than 1e-9 s."""
COLUMNS = (
    "recipe", "spread of lengths", "seconds between turns", "placement", "staleness", "GPUs that train",
    "that generate", "generation alone, s", "training alone, s", "step, s", "max / step", "trainer waits",
    "engines work", "lag",
)  # fmt: skip


# ---- simulated time


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while anything can run, and then jumps to the next timer."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now


class _Jump(selectors.DefaultSelector):
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulation waits for something that never happens")
        self._loop.now += max(0.0, timeout)
        return []


def now() -> float:
    return asyncio.get_running_loop().time()


async def wait(event: asyncio.Event, seconds: float | None) -> float:
    """Until ``event``, at most ``seconds``; how long it took."""
    began = now()
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return now() - began


# ---- what is simulated


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


class EngineSpeed(Protocol):
    """How fast one engine is when nothing disturbs it."""

    def iteration(self, running: int, context: float) -> float:
        """Seconds in which each of ``running`` requests, which together hold ``context`` tokens, gets one token."""

    def prefill(self, tokens: int) -> float:
        """Seconds for ``tokens`` of one request that are not cached."""


@dataclass(frozen=True)
class Setting:
    """One run to simulate. Seconds are of undisturbed work."""

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
    sync_seconds: float = 0.0
    """Weight update: trainer and engines do nothing else."""
    switch_seconds: float = 0.0
    """Release of the engines' memory before training, and once more to take it back; with :attr:`released`."""
    released: bool = False
    """Whether engines stand still while the trainer trains: shared devices with ``engine.memory_saver``."""
    together: float = 1.0
    """Speed of trainer and engines while both work, of what each has alone: 1 on devices of their own, 0.5 where they
    take turns on one device."""


@dataclass(eq=False, slots=True)
class _Request:
    session: object
    context: float
    """Tokens that it has."""
    uncached: int
    """Those of them that the engine has not."""
    left: float
    """Tokens still to sample."""
    prefill: float = 0.0
    """Seconds still to do."""
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def room(self) -> float:
        return self.context + self.left


class _SimulatedEngine:
    def __init__(self, simulation: Simulation) -> None:
        self._setting, self._simulation = simulation.setting, simulation
        self.in_flight = self.queued = 0
        self.slots = Slots(self._setting.slots)
        self.clock = EngineClock(self._setting.slots, now)
        self.changed = asyncio.Event()
        self.paused = self.released = self.updated = False
        self._waiting: deque[_Request] = deque()
        self._prefills: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._sessions: dict[object, float] = {}
        """Tokens of those that no request of runs now; the first was there longest ago."""
        self._primed = self._worked = False

    @property
    def working(self) -> bool:
        return not (self.paused or self.released) and bool(self._prefills or self._running)

    def note(self) -> None:
        if self.paused or self.released:
            activity = EngineActivity.PAUSED if self.paused else EngineActivity.RELEASED
        elif self.in_flight:
            activity = EngineActivity.GENERATING
        else:
            activity = EngineActivity.IDLE_AWAITED if self._simulation.awaited else EngineActivity.IDLE
        self.clock.note(activity, self.in_flight)

    async def generate(self, ordinal: int, session: object, shared: int, context: int, sampled: int) -> None:
        """One turn of a session. Groups that are trained first get a slot first."""
        self.queued += 1
        await self.slots.acquire(ordinal)
        self.queued -= 1
        self.in_flight += 1
        self.note()
        cached = max(self._sessions.pop(session, 0), shared if self._primed else 0)
        self._primed = True
        request = _Request(session, context, max(1, round(context - cached)), sampled)
        self._waiting.append(request)
        self.changed.set()
        await request.done.wait()
        self.in_flight -= 1
        self.slots.release()
        self.note()

    async def work(self) -> None:
        """One piece of work after the other; whatever changes ends a piece."""
        while True:
            self.changed.clear()
            if self.updated:
                self._empty_cache()
            if not (self.paused or self.released):
                self._finish()
                self._take_in()
            if self.working is not self._worked:
                self._worked = self.working
                self._simulation.wake()
            speed, pace = self._simulation.engine_speed(), 1.0
            seconds: float | None = None
            if self.working and self._prefills:
                seconds = self._prefills[0].prefill
            elif self.working:
                pace = self._setting.speed.iteration(len(self._running), sum(r.context for r in self._running))
                seconds = min(r.left for r in self._running) * pace
            elapsed = await wait(self.changed, None if seconds is None else seconds / speed) * speed
            if seconds is None:
                continue
            if self._prefills:
                self._prefills[0].prefill -= elapsed
                continue
            for request in self._running:
                request.left -= elapsed / pace
                request.context += elapsed / pace

    def _finish(self) -> None:
        while self._prefills and self._prefills[0].prefill <= ROUNDING:
            self._running.append(self._prefills.popleft())
        for request in [r for r in self._running if r.left <= 1e-6]:
            self._running.remove(request)
            self._sessions[request.session] = request.room
            request.done.set()

    def _take_in(self) -> None:
        """Requests that the cache has room for; sessions that nobody asks for give way."""
        room = self._setting.cache_tokens
        while self._waiting:
            held = sum(r.room for r in (*self._prefills, *self._running))
            if room is not None and held and held + self._waiting[0].room > room:
                return
            request = self._waiting.popleft()
            while room is not None and self._sessions and held + request.room + sum(self._sessions.values()) > room:
                del self._sessions[next(iter(self._sessions))]
            request.prefill = self._setting.speed.prefill(request.uncached)
            self._prefills.append(request)

    def _empty_cache(self) -> None:
        """What runs is prefilled anew, with what it had sampled."""
        self.updated = self._primed = False
        self._sessions.clear()
        again = [*self._prefills, *sorted(self._running, key=lambda request: request.left)]
        for request in again:
            request.context = request.uncached = round(request.context)
            request.left = max(1, round(request.left))
        self._waiting.extendleft(reversed(again))
        self._prefills.clear()
        self._running.clear()


class Simulation:
    """One run; :meth:`run` gives a line of metrics per step, by the names that a real run writes."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.awaited = self._training = False
        self._version = 0

    def run(self) -> list[dict[str, float]]:
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            return runner.run(self._train())

    def wake(self) -> None:
        """Something changed: engines and trainer look at what they do, and how fast."""
        for engine in self._engines:
            engine.note()
            engine.changed.set()
        self._changed.set()

    def engine_speed(self) -> float:
        """Of an engine at work, of what it has alone."""
        return self.setting.together if self._training else 1.0

    async def _train(self) -> list[dict[str, float]]:
        setting = self.setting
        self._changed = asyncio.Event()
        self._engines = [_SimulatedEngine(self) for _ in range(setting.engines)]
        self._room = asyncio.Semaphore(setting.concurrency)
        self._timeline = Timeline(now)
        work = [asyncio.create_task(engine.work()) for engine in self._engines]
        scheduler = GroupScheduler(self._group, setting.demand)
        scheduler.start()
        self.wake()
        lines = []
        for step in range(setting.demand.steps):
            line = await self._step(scheduler, step)
            seconds = self._timeline.take()
            line |= engine_metrics([engine.clock for engine in self._engines]) | trainer_metrics(seconds)
            lines.append(line | {"step": step, "time/step_seconds": sum(seconds.values())})
        await scheduler.stop()
        for task in work:
            task.cancel()
        return lines

    async def _step(self, scheduler: GroupScheduler, step: int) -> dict[str, float]:
        setting, phase = self.setting, self._timeline.phase
        with phase(TrainerPhase.WAIT):
            self._set(awaited=True)
            batch = await scheduler.take()
            self._set(awaited=False)
        members = [t for group in batch.usable for t in group.trajectories]
        tokens = sum(t.details["tokens"] for t in members)
        switch = setting.switch_seconds if setting.released else 0.0
        with phase(TrainerPhase.MEMORY):
            self._set(released=setting.released)
            await asyncio.sleep(switch)
        with phase(TrainerPhase.LOGPROBS):
            await self._compute(setting.score_seconds * tokens)
        with phase(TrainerPhase.OPTIMIZER):
            await self._compute(setting.train_seconds * tokens)
        with phase(TrainerPhase.MEMORY):
            await asyncio.sleep(switch)
        with phase(TrainerPhase.SYNC):
            self._set(paused=True, released=False, updated=True)
            await asyncio.sleep(setting.sync_seconds)
            self._version += 1
            self._set(paused=False)
        scheduler.release()
        ages: Counter[int] = Counter()
        for member in members:
            for version, sampled in member.details["sampled"]:
                ages[step - version] += sampled
        lag = sum(age * count for age, count in ages.items()) / ages.total()
        return {"tokens": tokens, "rollout/off_policy_level/mean": lag, "rollout/off_policy_level/max": max(ages)}

    def _set(self, *, awaited: bool | None = None, **states: bool) -> None:
        """Whether the trainer waits for episodes, and what the engines are from now on."""
        self.awaited = self.awaited if awaited is None else awaited
        for engine, (name, state) in itertools.product(self._engines, states.items()):
            setattr(engine, name, state)
        self.wake()

    async def _compute(self, seconds: float) -> None:
        """The trainer works, which takes longer while engines work on its devices."""
        self._training = True
        self.wake()
        while seconds > ROUNDING:
            self._changed.clear()
            busy = sum(engine.working for engine in self._engines) / len(self._engines)
            speed = 1 - (1 - self.setting.together) * busy
            seconds -= speed * await wait(self._changed, seconds / speed)
        self._training = False
        self.wake()

    async def _group(self, ordinal: int) -> Group:
        size = self.setting.group_size
        return Group(ordinal, "", list(await asyncio.gather(*(self._play(ordinal, sample) for sample in range(size)))))

    async def _play(self, ordinal: int, sample: int) -> Trajectory:
        async with self._room:
            episode, session = self.setting.episode(ordinal, sample), object()
            engine: _SimulatedEngine | None = None
            await asyncio.sleep(episode.start)
            context, sampled = 0, list[tuple[int, int]]()
            for turn in episode.turns:
                context += turn.prompt
                engine = engine or min(self._engines, key=lambda one: one.in_flight + one.queued)
                await engine.generate(ordinal, session, episode.shared, context, max(1, turn.sampled))
                context += turn.sampled
                sampled.append((self._version, turn.sampled))
                await asyncio.sleep(turn.pause)
            await asyncio.sleep(episode.end)
        details = {"tokens": context, "sampled": sampled}
        return Trajectory("", ordinal, sample, [], [], 0.0, True, Outcome.USER_STOP, details=details)


def simulate(setting: Setting) -> dict[str, float]:
    """Means over the steps, without those at the beginning, where engines begin with all slots at once, and those at
    the end, for which no new groups start. Shares of the engines' time are weighted by the steps'."""
    lines, staleness = Simulation(setting).run(), setting.demand.staleness
    first = min(2 + staleness, len(lines) - 1)
    kept = lines[first : len(lines) - staleness] or lines[first:]
    whole, found = sum(line["time/step_seconds"] for line in kept), {}
    for name in dict.fromkeys(name for line in kept for name in line):
        if name.startswith("time/engine_") and not name.endswith("_seconds"):
            found[name] = sum(line.get(name, 0.0) * line["time/step_seconds"] for line in kept) / whole
        else:
            found[name] = fmean(line.get(name, 0.0) for line in kept)
    return found


# ---- placements


@dataclass(frozen=True)
class Placement:
    """One way to divide the GPUs, and what the simulation says of it."""

    name: str
    staleness: int
    trainer_gpus: int
    engine_gpus: int
    generation_seconds: float
    """Of a step's episodes on these engines if nothing else took time."""
    training_seconds: float
    """Of a step's batch on these GPUs, log-probabilities included, if nothing else ran on them."""
    found: dict[str, float]

    @property
    def step_seconds(self) -> float:
        return self.found["time/step_seconds"]


def compare_placements(plan: Plan, staleness: Sequence[int] = (1, 2)) -> list[Placement]:
    """The placements of ``plan``'s GPUs that fit; of separate ones the fastest split. The fastest first.

    Of a configuration whose placement is separate, only that.
    """
    apart = plan.config.placement == "separate"
    splits = [plan.config] if apart else list(_splits(plan))
    found = [] if apart else [_colocated(plan, stale) for stale in (0, *staleness)]
    for stale in staleness if splits else ():
        found.append(min((_separate(plan, config, stale) for config in splits), key=lambda one: one.step_seconds))
    return sorted(found, key=lambda one: one.step_seconds)


def draw_episode(config: ExperimentConfig, ordinal: int, sample: int) -> SimulatedEpisode:
    """Of the mean length, turns and pauses that ``cluster`` expects, log-normally spread; within ``rollout``'s budgets.

    An episode that is f times as long as the mean has sqrt(f) times the turns, each of which is sqrt(f) times as long.
    """
    cluster, budgets = config.cluster, config.rollout
    chance = random.Random(derived_seed("episode", ordinal, sample))
    spread = cluster.length_spread
    longer = chance.lognormvariate(-spread * spread / 2, spread) ** 0.5
    count = max(1, min(round(cluster.episode_turns * longer), budgets.max_turns))
    whole = mean_episode_tokens(config)
    sampled = whole * cluster.sampled_share / cluster.episode_turns * longer
    given = whole * (1 - cluster.sampled_share)
    turns, room = [], budgets.max_tokens
    for number in range(count):
        # Half of what is given is the first prompt: instructions and tools.
        prompt = round(given / 2 if number == 0 else given / 2 / max(1, cluster.episode_turns - 1))
        own = min(round(sampled * chance.uniform(0.5, 1.5)), budgets.max_turn_tokens)
        if prompt + own > room:
            break
        room -= prompt + own
        pause = cluster.pause_seconds * chance.lognormvariate(-0.5, 1.0)  # most are short, a few long
        turns.append(SimulatedTurn(prompt, max(1, own), pause))
    return SimulatedEpisode(turns, shared=turns[0].prompt if turns else 0)


def mean_episode_tokens(config: ExperimentConfig) -> int:
    """``cluster.episode_tokens`` or, as there must be room for longer ones, half of ``rollout.max_tokens``."""
    return config.cluster.episode_tokens or config.rollout.max_tokens // 2


class GpuSpeed:
    """One server: what it reads over the bandwidth it reaches, its operations over the speed it reaches; the longer of
    the two. Experts are taken as chosen at random."""

    def __init__(self, architecture: Architecture, config: ExperimentConfig, engine: EngineBytes) -> None:
        a, gpu, cluster = architecture, GPUS[config.cluster.gpu], config.cluster
        self._engine, self._work = engine, Workload.of(a)
        self._expert_share = a.expert_parameters / a.parameters
        self._chosen = a.top_k / a.experts if a.experts else 1.0
        self._bandwidth = gpu.bandwidth * cluster.decode_share
        self._flops = gpu.flops * cluster.prefill_mfu * config.engine.tensor_parallel

    def iteration(self, running: int, context: float) -> float:
        read = self._engine.weights * (1 - self._expert_share * (1 - self._chosen) ** running)
        reading = (read + context * self._engine.token) / self._bandwidth
        return max(reading, (running * self._work.per_token + context * self._work.per_pair) / self._flops)

    def prefill(self, tokens: int) -> float:
        return self._work.operations([(0, tokens)]) / self._flops


def _setting(plan: Plan, config: ExperimentConfig, engine: EngineBytes, engines: int, staleness: int) -> Setting:
    """What all placements share; ``config`` has the trainer's layout."""
    algorithm, work, cluster = config.algorithm, plan.compute, config.cluster
    speed = config.megatron.world_size * GPUS[cluster.gpu].flops * cluster.train_mfu * (1 - bubble(config))
    # Operations per token at the length that is simulated, not at the longest.
    of_length = forward_flops(plan.architecture, 1, mean_episode_tokens(config))
    of_length /= forward_flops(plan.architecture, 1, episode_tokens(config)) * work.tokens * speed
    return Setting(
        StepDemand(algorithm.groups_per_step, STEPS + 2 + 2 * staleness, staleness),
        algorithm.group_size,
        partial(draw_episode, config),
        GpuSpeed(plan.architecture, config, engine),
        engines=engines,
        slots=config.engine.max_running_requests,
        cache_tokens=engine.tokens,
        concurrency=max(config.rollout.concurrency, work.episodes * (staleness + 1)),
        score_seconds=work.score_flops * of_length,
        train_seconds=work.train_flops * of_length,
        sync_seconds=plan_sync(plan.architecture, config).seconds if config is not plan.config else plan.sync.seconds,
    )


def _colocated(plan: Plan, staleness: int) -> Placement:
    setting = _setting(plan, plan.config, plan.engine, plan.servers, staleness)
    if staleness == 0 and plan.config.engine.memory_saver:
        setting = replace(setting, released=True, switch_seconds=plan.config.cluster.switch_seconds)
    elif staleness:
        setting = replace(setting, together=0.5)
    return _simulated("at once" if staleness else "in turns", setting, plan.gpus, plan.gpus)


def _separate(plan: Plan, config: ExperimentConfig, staleness: int) -> Placement:
    """``config`` has the layout of the trainer's GPUs; the others generate."""
    engine_gpus = plan.gpus - config.megatron.world_size
    engine = engine_bytes(plan.architecture, config, plan.gpu.memory - plan.reserve)
    setting = _setting(plan, config, engine, engine_gpus // config.engine.tensor_parallel, staleness)
    return _simulated("separate", setting, config.megatron.world_size, engine_gpus)


def _simulated(name: str, setting: Setting, trainer_gpus: int, engine_gpus: int) -> Placement:
    found, staleness = simulate(setting), setting.demand.staleness
    # Nothing overlaps with a step that is trained in turns; its generation alone is what the step waits for.
    alone = found["time/wait_seconds"]
    if staleness:
        free = replace(setting, score_seconds=0.0, train_seconds=0.0, sync_seconds=0.0, together=1.0)
        alone = simulate(free)["time/step_seconds"]
    training = (setting.score_seconds + setting.train_seconds) * found["tokens"]
    return Placement(name, staleness, trainer_gpus, engine_gpus, alone, training, found)


def _splits(plan: Plan) -> Iterator[ExperimentConfig]:
    """The configuration with fewer data-parallel (and, where they need them, expert-parallel) ranks and engines on the
    other GPUs: whole nodes, or a part of the only one. As far as the layout is a proven one and fits the memory."""
    config, layout, architecture = plan.config, plan.config.megatron, plan.architecture
    per_node, tp = gpus_per_node(config), config.engine.tensor_parallel
    for data in range(1, layout.data_parallel):
        for expert in dict.fromkeys((layout.expert_parallel, layout.expert_parallel // 2, layout.expert_parallel // 4)):
            changed = layout.model_copy(update={"data_parallel": data, "expert_parallel": expert})
            rest, nodes = plan.gpus - changed.world_size, config.cluster.nodes
            if expert < 1 or any(problems(architecture, changed)) or rest % (tp if nodes == 1 else per_node):
                continue
            place = {"nodes": rest // per_node, "count": per_node // tp} if nodes > 1 else {"count": rest // tp}
            engine = config.engine.model_copy(update=place | {"transport": "broadcast", "memory_saver": False})
            split = config.model_copy(update={"placement": "separate", "megatron": changed, "engine": engine})
            if is_proven(changed, moe=architecture.experts > 0) and fits(plan, split):
                yield split
                break


def fits(plan: Plan, config: ExperimentConfig) -> bool:
    """Whether a trainer alone on its GPUs has room, in the layout of ``config``."""
    layout = config.megatron
    firsts = range(0, layout.world_size, layout.world_size // layout.pipeline_parallel)
    needed = max(
        stage.rank.bytes.total + reference_bytes(stage.rank, config) + stage.activations[layout.recompute].total
        for stage in stage_plans(plan.architecture, config, firsts, memory_options(plan.architecture, config))
    )
    return needed + plan.reserve <= plan.gpu.memory


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("recipes", nargs="*", default=["qwen3-32b-4x8-h200", "qwen3-30b-a3b-2x8"])
    parser.add_argument("--spread", type=float, nargs="+", default=[0.2, 1.0])
    parser.add_argument("--pause", type=float, nargs="+", default=[0.5, 10.0])
    parser.add_argument("--staleness", type=int, nargs="+", default=[2])
    arguments = parser.parse_args()
    os.chdir(kit.ROOT)  # recipes name files relative to it
    print(kit.head(*COLUMNS))
    for recipe, spread, pause in itertools.product(arguments.recipes, arguments.spread, arguments.pause):
        overrides = [f"cluster.length_spread={spread}", f"cluster.pause_seconds={pause}"]
        plan = make_plan(load_config(Path(recipe), overrides))
        for one in compare_placements(plan, arguments.staleness):
            waiting, working = one.found["time/wait_seconds"] / one.step_seconds, one.found["time/engine_generating"]
            seconds = (one.generation_seconds, one.training_seconds, one.step_seconds)
            shares = (max(seconds[:2]) / one.step_seconds, waiting, working)
            where = (recipe, f"{spread:g}", f"{pause:g}", one.name, one.staleness, one.trainer_gpus, one.engine_gpus)
            numbers = [f"{s:.0f}" for s in seconds] + [f"{share:.0%}" for share in shares]
            print(kit.row(*where, *numbers, f"{one.found['rollout/off_policy_level/mean']:.1f}"), flush=True)


if __name__ == "__main__":
    main()
