"""From a task to a trajectory: instances what an episode needs, retries infrastructure faults, never scores them."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple

from mua.config.schema import ExperimentConfig
from mua.engine import Pauses, Sampler
from mua.environment.endpoint.services import Services
from mua.environment.manager import EnvironmentManager
from mua.environment.protocol import Task
from mua.environment.selection import Selection
from mua.environment.user import User
from mua.rollout.agent import EpisodeSetting, Policy, TokenPolicy
from mua.rollout.episode import Episode, EpisodeResult
from mua.rollout.external import ExternalEpisode
from mua.rollout.gateway.launch import check_agent
from mua.rollout.gateway.serving import GatewayServer
from mua.store.recorder import Recorder, noting
from mua.tokens.chat_family import ChatFamily
from mua.types import EVALUATION_ORDINALS, Group, Outcome, Trajectory
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
        policy: Policy | None = None,
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
            found = await self.trajectory(placed.task, placed.ordinal, placed.sample, temperature=temperature)
            on_trajectory(placed, found)

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
                        result = await self._attempt(setting, task, f"{ordinal}/{sample}/{attempt}", seed)
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

    def note(self) -> str:
        """A few words for a line of progress."""
        return f"{self.unscored} of {self.total} episodes failed, most as {self.outcome}"

    def reason(self, share: float = 0.0) -> str:
        """In a sentence how many could be scored, of which ``share`` should, and what became of the others."""
        if self.unscored == self.total:
            return f"not one of {self.total} episodes could be scored; most ended as {self.outcome}: {self.error}"
        return (
            f"only {self.total - self.unscored} of {self.total} episodes could be scored, and trainer.min_scored_share "
            f"is {share:g}; most of the others ended as {self.outcome}: {self.error}"
        )


def unscored_among(trajectories: Sequence[Trajectory]) -> UnscoredEpisodes | None:
    """What kept some of ``trajectories`` from being scored; None where all are."""
    unscored = [t for t in trajectories if not t.scored]
    if not unscored:
        return None
    ((outcome, passing), _) = Counter((t.outcome, t.passing) for t in unscored).most_common(1)[0]
    last = next(t for t in reversed(unscored) if (t.outcome, t.passing) == (outcome, passing))
    return UnscoredEpisodes(len(trajectories), len(unscored), outcome, last.error, passing)


def too_few_scored(trajectories: Sequence[Trajectory], share: float = 0.0) -> UnscoredEpisodes | None:
    """:func:`unscored_among`, where fewer than ``share`` of ``trajectories``, or none, could be scored; else None."""
    found = unscored_among(trajectories)
    if found is None or found.total - found.unscored >= max(1, share * found.total):
        return None
    return found


def require_scored(trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    """``trajectories``, of which at least one could be scored.

    Raises :class:`RunStopped`, with the commonest fault and what fixes it, where none could; it is passing if that is.
    """
    if (found := too_few_scored(trajectories)) is not None:
        raise RunStopped(f"{found.reason()}; {found.fix}", passing=found.passing)
    return trajectories
