"""The rollout side of a run behind plain blocking calls: engines, episodes and scheduling on a loop of their own.

    trainer (main thread)                     rollout loop (its own thread)
    take()             ──── waits for ────►   GroupScheduler ─► EpisodeRunner ─► EnginePool
    update_weights(…)  ──── runs on  ─────►   EnginePool.update_weights
    release()          ───────────────────►   new groups start

The way of a task, from the domain that holds it to the group that is trained, through seven files of this folder (six
without a teacher)::

    Selection.shared_tasks                    the domains' tasks and shares
      └─► TaskStream.task(ordinal)            which task stands at a position        curriculum.py
            └─► GroupScheduler                a slot for the position's group        runner.py
                  └─► EpisodeRunner.group     ``group_size`` episodes, retries       runner.py
                        └─► EnvironmentManager.instance + UserFactory.make + TokenPolicy.agent
                              └─► Episode.run agent, tools and user take turns       episode.py, agent.py
                                    └─► EpisodeResult ─► Trajectory ─► Group (─► Teacher.scored, teacher.py)
                                          └─► take() ─► RolloutBatch ─► trainer

While the trainer waits for groups or for an evaluation, it pushes the current weights into any engine that was
restarted, because only the trainer has them. When an engine has used up its restarts, that wait ends in its error.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Self, TypeVar

import yaml
from sqlalchemy.engine import Connection

from mua.algorithms.batch import enough_scored, usable
from mua.config.load import dump_config
from mua.config.schema import AlgorithmConfig, ExperimentConfig
from mua.engine.cluster import Hosts
from mua.engine.pool import EnginePool
from mua.engine.router_client import EngineRouter, OwnRoom
from mua.engine.weight_transfer import SyncReport
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Split, Task
from mua.environment.selection import Selection
from mua.rollout.curriculum import TaskStream
from mua.rollout.interactive import SessionDesk
from mua.rollout.job_queue import JobQueue
from mua.rollout.rollout_worker import RolloutWorker, episode_differences, made_with, secrets_of, tasks_of
from mua.rollout.runner import (
    EpisodeRunner,
    GroupScheduler,
    Placed,
    Position,
    RolloutBatch,
    StepDemand,
    evaluation_places,
    sampled_tokens,
)
from mua.rollout.teacher import Teacher
from mua.store.faults import StoreError
from mua.store.recorder import NotedRequest, Recorder
from mua.store.starts import router_row
from mua.store.stored_groups import StoredGroup, configurations, finished_groups
from mua.tokens.chat_family import load_family_of
from mua.types import Group, Json, Trajectory
from mua.utils.errors import EngineError

if TYPE_CHECKING:
    from mua.engine.weight_transfer import WeightSource

Result = TypeVar("Result")
log = logging.getLogger(__name__)
_POLL_S = 0.2
_WATCHDOG_S = 120.0
"""A wait that lasts so long says what it waits for, and says it again as often."""


class RolloutService:
    """Owns the engines and everything that makes trajectories. Use as a context manager.

    ``interrupt`` is called again and again while the caller waits for engines to start, for groups or for an
    evaluation; what it raises gives up that wait. ``hosts`` tells where engines are. With ``teacher``
    the groups of training are scored by that of ``algorithm.distillation``, if there is one. ``recorder`` keeps what
    episodes do.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        interrupt: Callable[[], None] = lambda: None,
        *,
        hosts: Hosts | None = None,
        teacher: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self._interrupt = interrupt
        self._recorder = recorder
        self._config = config
        self._services = Services.from_config(config.user, config.judge)
        self.selection = Selection.from_config(config.environment, self._services)
        evaluated = config.evaluated_splits
        self.held_out = Selection.held_out(config, self._services) if evaluated else None
        """The domains of ``evaluation`` that training does not see."""
        self.family = load_family_of(config.model)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout loop", daemon=True)
        self._pool = EnginePool(
            config.engine,
            dtype=config.model.dtype,
            context_length=config.model.max_length,
            seed=config.seed,
            log_folder=config.output / "logs",
            hosts=hosts,
            fp32_lm_head=config.model.fp32_lm_head,
        )
        self._distillation = config.algorithm.distillation if teacher else None
        self._teacher: Teacher | None = None
        self._runner: EpisodeRunner | None = None
        self._scheduler: GroupScheduler | None = None
        self._stream: TaskStream | None = None
        self.position: Json = {}
        """Where the stream of tasks continues after the groups taken last; JSON-able."""
        self._offering = AsyncExitStack()
        """JobQueue, router and the trainer's own sampler, where samplers roll out."""
        self._job_queue: JobQueue | None = None
        self._kept: dict[int, StoredGroup] = {}
        """By ordinal, what an earlier start of the run has rolled out and this one may take."""
        self._of_step: dict[str, float] = {}
        self._weights: WeightSource | None = None
        self._version = 0
        self._on_episode: Callable[[], None] = lambda: None
        self.making_room: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered while restarted engines are given weights in the middle of a rollout: the trainer has to have them in
        place, beside engines that roll out."""

    # ---- life

    def __enter__(self) -> Self:
        async def begin() -> None:
            if self._distillation is not None:
                self._teacher = Teacher(self._distillation, self.family.codec)
                await self._teacher.meet()
            await self._start_runner()  # before the engines, which take longer to start
            await self._pool.start(self._config.model.path)

        self._thread.start()
        try:
            self._call(begin(), self._interrupt)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(finished=kind is None)

    def close(self, *, finished: bool = False) -> None:
        """Stop episodes and engines. Safe to call twice. Engine nodes are told whether the run has ``finished``."""
        if self._loop.is_closed():
            return
        if self._scheduler is not None:
            self._call(self._scheduler.stop())
        self._call(self._offering.aclose())
        for ended in (self._runner, self._teacher, self._services):
            if ended is not None:
                self._call(ended.close())
        self._call(self._pool.stop(finished=finished))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- training

    def schedule(self, step: int, position: Json | None) -> None:
        """Begin to roll out for the steps from ``step`` on.

        ``position`` is :attr:`position` after the step before; None begins the stream, or continues that of a run whose
        every step took ``groups_per_step`` groups.
        """
        algorithm, trainer = self._config.algorithm, self._config.trainer
        refill = algorithm.refill
        stream = TaskStream(self.selection.shared_tasks("train"), self._config.seed, algorithm.curriculum)
        start = Position(step * algorithm.groups_per_step)
        if position is not None:
            start = Position.from_json(position)
            stream.restore(position["curriculum"])

        if self._config.samplers.enabled:
            self._call(self._offer(), self._interrupt)

        def roll_out(ordinal: int) -> Coroutine[Any, Any, Group]:
            return self._roll_out(stream.task(ordinal), ordinal, self._kept.pop(ordinal, None))

        demand = StepDemand(
            algorithm.groups_per_step,
            trainer.steps,
            trainer.max_staleness,
            refill.max_extra_groups,
            refill.oversample,
            refill.max_cancellations,
            refill.carry_versions,
        )
        self._stream = stream
        self._kept = self._finished_before(step, start, demand)
        self._scheduler = GroupScheduler(
            roll_out, demand, step=step, position=start,
            usable=lambda group: not refill.on or usable(group, algorithm),
        )  # fmt: skip
        self._pool.restart_clocks()
        self._loop.call_soon_threadsafe(self._scheduler.start)

    def take(self, on_episode: Callable[[], None] | None = None) -> RolloutBatch:
        """Wait for the groups of the next step; ``on_episode`` is called as episodes end.

        Raises :class:`EngineError` when an engine has used up its restarts.
        """
        scheduler, stream = self._scheduler, self._stream
        assert scheduler is not None and stream is not None, "schedule() comes first"  # noqa: PT018

        async def take() -> RolloutBatch:
            batch = await scheduler.take()
            stream.observe(batch.groups)
            self.position = batch.position.to_json() | {"curriculum": stream.state()}
            chosen = refill_metrics(batch, self._config.algorithm) if self._config.algorithm.refill.on else {}
            self._of_step = chosen | stream.metrics()
            return batch

        self._on_episode = on_episode or (lambda: None)
        return self._attend(take())

    def release(self) -> None:
        """The weights trained on the groups taken last are in the engines: let new groups start."""
        assert self._scheduler is not None
        self._loop.call_soon_threadsafe(self._scheduler.release)

    # ---- weights

    def update_weights(self, weights: WeightSource, version: int) -> SyncReport:
        """Push ``weights`` into every engine as policy ``version``; also the source for restarted engines.

        See :meth:`mua.engine.pool.EnginePool.update_weights` for engines that fail on the way.
        """
        self._weights, self._version = weights, version
        return self._call(self._pool.update_weights(weights, version))

    def wait_for_engines(self) -> None:
        """Wait until an engine can take weights, should all have died."""
        self._call(self._pool.until_up(), self._interrupt)

    @property
    def engines_up(self) -> int:
        """Engines that can take weights now."""
        return self._pool.engines_up()

    def verify_weights(self, weights: WeightSource) -> list[str]:
        """Names of tensors whose value in the engines differs from the given one."""
        return self._call(self._pool.verify_weights(weights))

    # ---- memory

    @property
    def released(self) -> bool:
        """Whether engines have given memory back and not taken all of it again."""
        return self._pool.released

    def release_memory(self, tags: Sequence[str]) -> None:
        """Have the engines give memory back; see :meth:`mua.engine.pool.EnginePool.release_memory`."""
        self._call(self._pool.release_memory(tags))

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Have the engines take memory back; see :meth:`mua.engine.pool.EnginePool.resume_memory`."""
        self._call(self._pool.resume_memory(tags))

    # ---- evaluation

    def evaluation_tasks(self, split: Split) -> list[Task]:
        """What training is evaluated on: tasks of ``split``, of its own domains first, then of those held out."""
        selections = [self.selection, *filter(None, [self.held_out])]
        return [task for one in selections for task in one.sampled_tasks(split, self._config.evaluation.tasks)]

    def evaluate(
        self, tasks: Sequence[Task], *, samples: int, temperature: float, on_episode: Callable[[], None] | None = None
    ) -> list[Trajectory]:
        """``samples`` trajectories of each of ``tasks``, in their order; the episodes that ``mua eval`` plays too."""
        placed = [place for task in tasks for place in evaluation_places(task, samples)]
        found: dict[tuple[int, int], Trajectory] = {}

        def keep(place: Placed, trajectory: Trajectory) -> None:
            found[place.ordinal, place.sample] = trajectory
            if on_episode is not None:
                on_episode()

        self.each(placed, temperature=temperature, on_trajectory=keep)
        return [found[place.ordinal, place.sample] for place in placed]

    def each(
        self, episodes: Sequence[Placed], *, temperature: float, on_trajectory: Callable[[Placed, Trajectory], None]
    ) -> None:
        """Run ``episodes``; ``on_trajectory`` is called on another thread, one call at a time, as they end."""
        work = self._episodes.each(episodes, temperature=temperature, on_trajectory=on_trajectory)
        self._attend(work)

    def serve_sessions(self, opened: Callable[[Path], None]) -> None:
        """Serve the gateway's sessions to people, until ``interrupt`` raises; ``opened`` is told the address's file."""

        async def serve() -> None:
            desk = SessionDesk(self._config, self.selection, self._episodes)
            opened(await desk.open())
            try:
                await asyncio.Event().wait()
            finally:
                await desk.close()

        self._attend(serve())

    def meet_users(self, config: ExperimentConfig) -> None:
        """From now on episodes are with the users of ``config``, which is the same but for them; none may be under
        way."""
        self._call(self._episodes.close())
        self._call(self._services.close())
        self._config, self._services = config, Services.from_config(config.user, config.judge)
        self.selection = Selection.from_config(config.environment, self._services)
        self._call(self._start_runner())

    def metrics(self) -> dict[str, float]:
        """The counters of engines, teacher, users' and judges' endpoints since the last call; what the last step had to
        choose from, and what the curriculum knows."""
        of_teacher = self._teacher.metrics() if self._teacher is not None else {}
        of_samplers = {} if self._job_queue is None else {"rollout/samplers/alive": float(self._job_queue.alive)}
        return self._pool.metrics() | self._services.metrics() | of_teacher | of_samplers | self._of_step

    # ---- inside

    @property
    def _episodes(self) -> EpisodeRunner:
        assert self._runner is not None
        return self._runner

    async def _offer(self) -> None:
        """From now on samplers roll out the groups of training; one of them, perhaps, is in this process."""
        config, recorder = self._config, self._recorder
        assert recorder is not None, "samplers lease from a store, which has a recorder"
        stack, store, part = self._offering, recorder.writer.store, recorder.part
        router = EngineRouter(self._pool, config.samplers)
        await router.start()
        stack.push_async_callback(router.close)
        secrets, made = secrets_of(config), made_with(config)

        def presence() -> list[Json]:
            load = self._pool.load()
            figures = {"capacity": load.capacity, "running": load.running, "waiting": load.waiting}
            own = router_row(part, router.url, router.key, secrets, made, version=self._version, **figures)
            return [own, *self._pool.rows()]

        job_queue = JobQueue(
            store, recorder, config.samplers, outage_seconds=config.store.outage_seconds, presence=presence
        )  # fmt: skip
        self._job_queue = await stack.enter_async_context(job_queue)
        if config.samplers.inside:
            kind = "trainer"
            sampler = RolloutWorker(
                config, store, self._episodes, tasks_of(self.selection), OwnRoom(router, kind),
                run=recorder.run_id, part=part, kind=kind,
            )  # fmt: skip
            ending = asyncio.Event()
            working = asyncio.create_task(sampler.work(lambda: "the run ends" if ending.is_set() else None))
            working.add_done_callback(job_queue.own_sampler_ended)

            async def end() -> None:
                ending.set()
                await asyncio.gather(working, return_exceptions=True)

            stack.push_async_callback(end)

    async def _roll_out(self, task: Task, ordinal: int, kept: StoredGroup | None) -> Group:
        """The group of ``task`` with what the teacher thinks of it, if there is one.

        ``kept`` is what an earlier start has ended at its place; taken unless the store has it no more.
        """
        recorder, size = self._recorder, self._config.algorithm.group_size
        if kept is not None and (kept.domain, kept.task_id) == (task.domain, task.id):
            assert recorder is not None, "what is kept is in its store"
            store = recorder.writer.store

            def read() -> Group:
                with store.read() as connection:
                    return kept.read(connection)

            try:
                group = await asyncio.to_thread(read)
            except StoreError as error:
                log.warning("group %d is rolled out again: %s", kept.ordinal, error)
            else:
                version = self._version if kept.oldest is None else kept.oldest
                recorder.took_over(group, task.split, kept.members, version, task.labels)
                for _ in group.trajectories:
                    self._on_episode()
                return await self._score_by_teacher(group)
        if self._job_queue is not None:
            queue, version = self._job_queue, self._version
            group = await queue.group(task, ordinal, size, version, lambda: self._on_episode())
            return await self._score_by_teacher(group)
        if recorder is not None:
            recorder.opened(ordinal, task.domain, task.id, size, self._version, task.split, task.labels)
        try:
            temperature = self._config.rollout.temperature
            group = await self._episodes.group(
                task, ordinal, size, temperature=temperature, on_episode=lambda: self._on_episode()
            )
            group = await self._score_by_teacher(group)
        except BaseException:
            if recorder is not None:
                recorder.cancelled(ordinal)
            raise
        if recorder is not None:
            recorder.completed(group)
        return group

    async def _score_by_teacher(self, group: Group) -> Group:
        if self._teacher is None:
            return group
        asked: list[tuple[int, NotedRequest]] = []
        try:
            return await self._teacher.scored(group, lambda sample, request: asked.append((sample, request)))
        finally:
            if self._recorder is not None:
                self._recorder.taught(group, asked)

    def _finished_before(self, step: int, start: Position, demand: StepDemand) -> dict[int, StoredGroup]:
        """Groups that earlier starts have rolled out by policies that the steps from ``step`` on may train on."""
        recorder, config = self._recorder, self._config
        if recorder is None or recorder.part == 1 or not config.store.take_finished:
            return {}
        first = min(start.waiting, default=start.next)
        run, part, size = recorder.run_id, recorder.part, config.algorithm.group_size

        def look(connection: Connection) -> tuple[list[StoredGroup], dict[int, Json]]:
            groups = list(finished_groups(connection, run, part, first=first, size=size))
            return groups, configurations(connection, run, sorted({m.part for g in groups for m in g.members}))

        found, given = recorder.writer.store.patiently(look, config.store.outage_seconds)
        ours = yaml.safe_load(dump_config(config))
        others: set[int] = set()
        for number, theirs in given.items():
            different = list(episode_differences(theirs, ours))
            different += [] if step or theirs.get("model") == ours["model"] else ["model.path"]
            if different:
                log.warning("%s is not what it was: episodes of before are rolled out again", different[0])
                others.add(number)
        kept = {
            group.ordinal: group for group in found
            if not others & {member.part for member in group.members}
            and (group.oldest is None or group.oldest >= demand.oldest(group.ordinal - first, step))
        }  # fmt: skip
        if kept:
            log.info("%d groups that had ended before are taken as they are (store.take_finished)", len(kept))
        return kept

    async def _start_runner(self) -> None:
        every = self.selection if self.held_out is None else self.selection.beside(self.held_out)
        self._runner = EpisodeRunner(
            self._config,
            every,
            self.family,
            self._pool,
            self._services,
            pauses=self._pool.pauses,
            recorder=self._recorder,
        )
        await self._runner.start()

    def _attend(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Wait for ``work`` that needs engines: fill the restarted ones meanwhile, and leave when they are given up."""

        def look() -> None:
            self._interrupt()
            self._require_engines()
            if self._weights is not None and self._pool.awaiting_weights.is_set():
                with self.making_room():
                    self._call(self._pool.update_weights(self._weights, self._version, only_awaiting=True))

        self._loop.call_soon_threadsafe(self._pool.awaited, True)
        try:
            result = self._call(work, look)
        finally:
            self._loop.call_soon_threadsafe(self._pool.awaited, False)
        self._require_engines()
        return result

    def _require_engines(self) -> None:
        if (failure := self._pool.failure) is not None:
            raise EngineError(str(failure)) from failure

    def _call(self, work: Coroutine[Any, Any, Result], interrupt: Callable[[], None] = lambda: None) -> Result:
        """Run ``work`` on the loop and wait for it.

        What ``interrupt`` raises between two looks cancels ``work`` and is raised here.
        Whatever ``work`` waits for has a deadline of its own (a request, a tool, a user, an episode, an engine).
        """
        what = getattr(work, "__qualname__", repr(work))
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        started = reported = monotonic()
        try:
            while True:
                try:
                    return future.result(timeout=_POLL_S)
                except concurrent.futures.TimeoutError:
                    if future.done():
                        raise
                    interrupt()
                    if monotonic() - reported > _WATCHDOG_S:
                        reported = monotonic()
                        groups = self._scheduler.in_flight if self._scheduler is not None else 0
                        state = f"{groups} groups in flight, {self._pool.describe()}"
                        log.warning("waiting for %s for %.0f s: %s", what, reported - started, state)
        except BaseException:
            future.cancel()
            raise


def refill_metrics(rollout_batch: RolloutBatch, algorithm: AlgorithmConfig) -> dict[str, float]:
    """What a step took to find its groups: counts of groups, and of episodes that were rolled out and not trained.

    ``faulty`` groups are among the ``dropped``: infrastructure left them fewer than two scored members. ``missing``
    groups were not found among the most that a step may look at. ``cancelled`` groups start again, ``carried`` ones
    go on though a step earlier would have been the last to train them: ``engine/partial/saved_tokens`` are those of the
    step's groups that would have been sampled again, ``engine/partial/saved_share`` their share of all it rolled out.
    """
    trained = {group.ordinal for group in rollout_batch.usable}
    dropped = [group for group in rollout_batch.groups if group.ordinal not in trained]
    counts = {
        "dropped": len(dropped),
        "faulty": sum(not enough_scored(group, algorithm) for group in dropped),
        "refilled": max(0, len(rollout_batch.groups) - algorithm.groups_per_step),
        "extra_episodes": sum(len(group.trajectories) for group in dropped),
        "missing": algorithm.groups_per_step - len(rollout_batch.usable),
        "cancelled": rollout_batch.cancelled,
        "carried": rollout_batch.carried,
    }
    sampled = sum(sampled_tokens(group) for group in rollout_batch.groups)
    return {f"rollout/filters/{name}": float(count) for name, count in counts.items()} | {
        "engine/partial/saved_tokens": float(rollout_batch.saved_tokens),
        "engine/partial/saved_share": rollout_batch.saved_tokens / max(1, sampled),
    }
