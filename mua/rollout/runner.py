"""From a task to a trajectory and a group: makes what an episode needs, retries faults of the infrastructure, never
scores them; and which groups are under way, and which of them a step trains on.

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
import gc
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple, Self

from mua.config.schema import ExperimentConfig
from mua.engine import Pauses, Sampler
from mua.environment.endpoint.services import Services
from mua.environment.manager import EnvironmentManager
from mua.environment.protocol import Task
from mua.environment.selection import Selection
from mua.environment.user import User
from mua.rollout.agent import ChatPolicy, EpisodeSetting, TokenPolicy
from mua.rollout.episode import Episode, EpisodeResult
from mua.rollout.external import ExternalEpisode, check_agent
from mua.rollout.gateway.serving import GatewayServer
from mua.store.recorder import Recorder, noting
from mua.tokens.chat_family import ChatFamily
from mua.types import EVALUATION_ORDINALS, Group, Json, Outcome, Trajectory
from mua.users.factory import UserFactory
from mua.users.judge import Judge
from mua.utils.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineError,
    EnvironmentFault,
    JudgeFault,
    MuaError,
    RunStopped,
    UserFault,
    UserFaultKind,
    one_line,
)
from mua.utils.hooks import is_hook
from mua.utils.seeds import derived_seed

log = logging.getLogger(__name__)

_FAULTS: dict[type[MuaError], Outcome] = {
    EngineError: Outcome.ENGINE_ERROR,
    EnvironmentFault: Outcome.ENVIRONMENT_ERROR,
    UserFault: Outcome.USER_ERROR,
    JudgeFault: Outcome.JUDGE_ERROR,
    DeadlineExceeded: Outcome.TIMEOUT,
}
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class Placed(NamedTuple):
    """An episode to run: which task, and where it stands among others (which its seeds depend on)."""

    task: Task
    ordinal: int
    sample: int


def evaluation_places(task: Task, samples: int) -> list[Placed]:
    """The episodes of one task in every evaluation, be it within training or by ``mua eval``.

    Where they stand, and so their seeds, depends on the task alone: other tasks or domains beside it change nothing,
    and two policies meet the same users.
    """
    ordinal = EVALUATION_ORDINALS + derived_seed("evaluation", task.domain, task.id)
    return [Placed(task, ordinal, sample) for sample in range(samples)]


class EpisodeRunner:
    """Runs episodes of the selected domains, at most ``rollout.concurrency`` at once. Belongs to one event loop."""

    def __init__(
        self,
        config: ExperimentConfig,
        selection: Selection,
        family: ChatFamily | None,
        sampler: Sampler | None,
        services: Services,
        policy: TokenPolicy | ChatPolicy | None = None,
        *,
        pauses: Pauses | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """``policy`` comes in the place of ``family`` and ``sampler``, which are a checkpoint's. ``pauses`` are those
        of the sampler, in which no episode's time passes."""
        if policy is None:
            assert family is not None, "a checkpoint's chat family and engine, or a policy"
            assert sampler is not None, "a checkpoint's chat family and engine, or a policy"
            policy = TokenPolicy(family, sampler, config.engine.routed_experts)
        self._config = config
        self._recorder = recorder
        self._selection = selection
        self._environments = {
            name: EnvironmentManager(domain, config.environment) for name, domain in selection.domains.items()
        }
        self._users = UserFactory(config.user, selection, services)
        self._slots = asyncio.Semaphore(config.rollout.concurrency)
        self._starts = asyncio.Lock()
        self._policy = policy
        self._pauses = pauses or Pauses()
        self.gateway = None if config.agent is None else GatewayServer(config.agent)
        """Where agents of the configuration ask for turns; None without ``agent``."""
        self._judge: Judge | None = None
        """Who scores the episodes of the configuration's agent beside the domain."""
        if config.agent is not None:
            check_agent(config.agent)
            if config.agent.judge is not None:
                if services.judge is None:
                    raise ConfigError("agent.judge asks the endpoint of judge.llm; add the section judge")
                self._judge = Judge(services.judge)
            if not isinstance(policy, TokenPolicy):
                raise ConfigError(
                    "agent: an agent of its own plays with a checkpoint through the engine, no other policy"
                )
            if config.context.strategy != "off" or config.context.stop_on_repetition is not None:
                raise ConfigError("context: an agent of its own keeps its context itself; leave the section out")
        self._setting = EpisodeSetting(
            budgets=config.rollout,
            temperature=config.rollout.temperature,
            system_prompt=selection.system_prompt,
            show_tools=config.environment.prompt == "full",
            deterministic=config.engine.deterministic,
            context=config.context,
            reward=config.environment.reward if is_hook(config.environment.reward) else None,
        )

    async def start(self) -> None:
        """Open what episodes need and can be refused: the tool servers. Without it the first episodes do so."""
        for manager in self._environments.values():
            await manager.start()

    async def close(self) -> None:
        if self.gateway is not None:
            await self.gateway.close()
        for manager in self._environments.values():
            await manager.close()

    async def group(
        self, task: Task, ordinal: int, size: int, *, temperature: float, on_episode: Callable[[], None] | None = None
    ) -> Group:
        """``size`` trajectories of ``task``; ``on_episode`` is called after each."""

        async def one(sample: int) -> Trajectory:
            trajectory = await self.trajectory(task, ordinal, sample, temperature=temperature)
            if on_episode is not None:
                on_episode()
            return trajectory

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(sample)) for sample in range(size)]
        return Group(ordinal, task.id, [done.result() for done in tasks])

    async def each(
        self, episodes: Iterable[Placed], *, temperature: float, on_trajectory: Callable[[Placed, Trajectory], None]
    ) -> None:
        """One trajectory for each of ``episodes``, given to ``on_trajectory`` as they end."""
        episodes = list(episodes)
        if self._recorder is not None:
            of = [(p.ordinal, p.task.domain, p.task.id, p.task.split, p.task.labels) for p in episodes]
            self._recorder.evaluation(of)

        async def one(placed: Placed) -> None:
            on_trajectory(placed, await self.trajectory(*placed, temperature=temperature))

        async with asyncio.TaskGroup() as group:
            for placed in episodes:
                group.create_task(one(placed))
        if self._recorder is not None:
            self._recorder.evaluated()

    async def trajectory(
        self, task: Task, ordinal: int, sample: int, *, temperature: float, recorder: Recorder | None = None
    ) -> Trajectory:
        """One trajectory, unscored when every attempt met an infrastructure fault. ``recorder`` keeps it in the place
        of the runner's."""
        recorder = recorder or self._recorder
        # The groups that are trained first go first. While an evaluation runs the trainer waits for it.
        order = -1 if ordinal >= EVALUATION_ORDINALS else ordinal
        setting = replace(self._setting, temperature=temperature, order=order)
        faults: Counter[str] = Counter()
        """Those of the users, by kind."""
        wanted = perf_counter()
        async with self._slots:
            began = perf_counter()
            async with self._starts:
                # One episode begins in a turn of the event loop: when hundreds are started at once, the first of them
                # send their requests while the others are still being prepared.
                await asyncio.sleep(0)
            for attempt in range(self._config.rollout.max_retries + 1):
                # A fault must leave no trace in a deterministic run; elsewhere another seed may avoid the next one.
                again = 0 if self._config.trainer.deterministic else attempt
                seed = derived_seed(self._config.seed, ordinal, sample, again)
                record = None  # where this attempt notes what it does
                if recorder is not None:
                    evaluation, sampling = ordinal >= EVALUATION_ORDINALS, self._config.rollout.sampling(temperature)
                    record = recorder.episode(ordinal, sample, sampling, evaluation=evaluation)
                try:
                    with noting(record):
                        final = replace(setting, last_attempt=attempt == self._config.rollout.max_retries)
                        result = await self._attempt(final, task, f"{ordinal}/{sample}/{attempt}", seed)
                except tuple(_FAULTS) as fault:
                    if record is not None and attempt < self._config.rollout.max_retries:
                        record.failed()
                    log.warning("task %s, attempt %d: %s", task.id, attempt + 1, fault)
                    last = fault
                    if isinstance(fault, UserFault):
                        faults[f"user_faults/{fault.kind}"] += 1
                    if attempt < self._config.rollout.max_retries:
                        # Jittered, so that retries do not arrive together.
                        longest = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
                        await asyncio.sleep(longest * random.uniform(0.5, 1.0))
                except BaseException:  # the group is cancelled, or the run ends
                    if record is not None:
                        record.failed()
                    raise
                else:
                    clock = {"seconds/queued": began - wanted, "seconds/episode": perf_counter() - began}
                    trajectory = Trajectory(
                        task_id=task.id,
                        ordinal=ordinal,
                        sample=sample,
                        segments=result.segments,
                        turn_rewards=result.turn_rewards,
                        reward=result.reward,
                        success=result.evaluation.success,
                        outcome=result.outcome,
                        messages=result.messages,
                        metrics=result.metrics | clock | {name: float(count) for name, count in faults.items()},
                        details=result.evaluation.details,
                        attempts=attempt + 1,
                        domain=task.domain,
                        sampling=setting.budgets.sampling(temperature),
                    )
                    if record is not None:
                        await record.ended(trajectory, result.evaluation.reward)
                    return trajectory
        outcome = next(outcome for kind, outcome in _FAULTS.items() if isinstance(last, kind))
        trajectory = Trajectory(
            task.id, ordinal, sample, [], [], 0.0, False, outcome,
            attempts=self._config.rollout.max_retries + 1, error=str(last), domain=task.domain,
            passing=last.passing, metrics={name: float(count) for name, count in faults.items()},
        )  # fmt: skip
        if record is not None:
            await record.ended(trajectory, None)
        return trajectory

    async def _attempt(self, setting: EpisodeSetting, task: Task, session: str, seed: int) -> EpisodeResult:
        limit, began = setting.budgets.episode_seconds, perf_counter()
        try:
            async with (
                self._pauses.deadline(limit).timeout() as deadline,
                self._environments[task.domain].instance(task, seed) as environment,
                self._user(task, seed) as user,
            ):
                started, guarded = perf_counter(), not self._users.recites_data(task)
                if self.gateway is None:
                    agent = self._policy.agent(setting, session=session, seed=seed)
                    result = await Episode(setting, environment, user, agent, guarded=guarded).run()
                else:  # the agent of the configuration
                    await self.gateway.start()
                    assert isinstance(self._policy, TokenPolicy), "checked at the start"
                    episode = ExternalEpisode(
                        setting, environment, user, self._policy,
                        config=self.gateway.config, session=session, seed=seed, guarded=guarded, judge=self._judge,
                    )  # fmt: skip
                    result = await episode.play(self.gateway, self._config.output / "logs" / "agents")
                result.metrics["seconds/start"] = started - began
                return result
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(f"rollout.episode_seconds: the episode took longer than {limit:g} s") from None

    @asynccontextmanager
    async def _user(self, task: Task, seed: int) -> AsyncIterator[User]:
        """The user; what goes wrong when it is closed costs no episode that has ended."""
        try:
            user = self._users.make(task, seed)
        except MuaError:
            raise
        except Exception as error:
            raise UserFault(f"the user cannot be made: {one_line(error)}", UserFaultKind.CRASHED) from error
        try:
            yield user
        finally:
            try:
                async with asyncio.timeout(self._config.rollout.user_seconds):
                    await user.close()
            except Exception as error:
                log.warning("a user did not close: %s", one_line(error))


@contextmanager
def without_gc_pauses() -> Iterator[None]:
    """What is alive on entering is not looked through again by the garbage collector before the end.

    A full collection walks over every object that the libraries, the model and the tasks have made, while no episode
    of the event loop goes on: some 0.1 s for the half a million objects of a small run.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


_FIXES = {
    Outcome.USER_ERROR: "check whoever plays the user: of user.llm that base_url, model and api_key are right and that "
    "it answers within request_seconds",
    Outcome.JUDGE_ERROR: "check that judge.llm answers (base_url, model, api_key, request_seconds) with verdicts that "
    "can be read",
    Outcome.ENVIRONMENT_ERROR: "fix the environment (mua env play shows one task), or raise environment.call_seconds "
    "or .reset_seconds if it is slow",
    Outcome.ENGINE_ERROR: "look at the engine's log in the folder logs of the output, or, of a policy at an endpoint, "
    "check evaluation.policy.endpoint",
    Outcome.TIMEOUT: "raise the deadline that is named, or give what it waits for less to do at once "
    "(rollout.concurrency, the endpoint's concurrency) or more machines",
}


@dataclass(frozen=True, slots=True)
class UnscoredEpisodes:
    """Episodes of which some could not be scored."""

    total: int
    unscored: int
    outcome: Outcome
    """The commonest of the unscored ones."""
    error: str | None
    """What the last of these met."""
    passing: bool
    """Whether it may pass by itself."""

    @property
    def fix(self) -> str:
        """What a person does about the commonest fault."""
        return _FIXES[self.outcome]

    def reason(self, share: float = 0.0) -> str:
        """In a sentence how many could be scored, of which ``share`` should, and what became of the others."""
        if self.unscored == self.total:
            return f"not one of {self.total} episodes could be scored; most ended as {self.outcome}: {self.error}"
        return (
            f"only {self.total - self.unscored} of {self.total} episodes could be scored, and trainer.min_scored_share "
            f"is {share:g}; most of the others ended as {self.outcome}: {self.error}"
        )


def too_few_scored(trajectories: Sequence[Trajectory], share: float = 0.0) -> UnscoredEpisodes | None:
    """What kept some of ``trajectories`` from being scored, where fewer than ``share`` of them, or none, are."""
    unscored = [t for t in trajectories if not t.scored]
    if not unscored or len(trajectories) - len(unscored) >= max(1, share * len(trajectories)):
        return None
    ((outcome, passing), _) = Counter((t.outcome, t.passing) for t in unscored).most_common(1)[0]
    last = next(t for t in reversed(unscored) if (t.outcome, t.passing) == (outcome, passing))
    return UnscoredEpisodes(len(trajectories), len(unscored), outcome, last.error, passing)


def require_scored(trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    """``trajectories``, of which at least one could be scored.

    Raises :class:`RunStopped`, with the commonest fault and what fixes it, where none could; it is passing if that is.
    """
    if (found := too_few_scored(trajectories)) is not None:
        raise RunStopped(f"{found.reason()}; {found.fix}", passing=found.passing)
    return trajectories


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

    def oldest(self, place: int, step: int) -> int:
        """The oldest version that may have sampled the group which is ``place`` groups behind the first of ``step``."""
        if not self.in_order or self.extra:  # which step takes it is not known
            return step
        return step + place // self.groups - self.staleness


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
        every, chosen = (sorted(groups, key=lambda group: group.ordinal) for groups in (taken, usable))
        carried = sum(flight.step + demand.staleness <= self._step for flight in self._flights.values())
        return RolloutBatch(every, chosen, len(overdue), self.position, carried, saved)

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
