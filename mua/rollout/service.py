"""The rollout side of a run behind plain blocking calls: engines, episodes and scheduling on a loop of their own.

    trainer (main thread)                     rollout loop (its own thread)
    take(n)            ──── waits for ────►   GroupScheduler ─► EpisodeRunner ─► EnginePool
    update_weights(…)  ──── runs on  ─────►   EnginePool.update_weights
    release(n)         ───────────────────►   new groups start

While the trainer waits in :meth:`RolloutService.take`, it pushes the current weights into any engine that was
restarted, because only the trainer has them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from mua.config.schema import ExperimentConfig
from mua.engine.host import Hosts
from mua.engine.pool import EnginePool
from mua.environment.protocol import Split
from mua.environment.selection import Selection
from mua.errors import DeadlineExceeded, MuaError
from mua.rollout.runner import EpisodeRunner, Placed
from mua.rollout.scheduler import GroupScheduler
from mua.rollout.stream import TaskStream
from mua.tokens.family import load_family
from mua.types import Group, Trajectory
from mua.users.services import Services

if TYPE_CHECKING:
    import torch

    from mua.engine.feed import Feed
    from mua.engine.weights import SyncReport

Result = TypeVar("Result")
log = logging.getLogger(__name__)
Weights = Callable[[], "Feed | Iterable[tuple[str, torch.Tensor]]"]
"""Makes what :meth:`mua.engine.pool.EnginePool.update_weights` takes, afresh for every update."""

_POLL_S = 0.2
_WATCHDOG_S = 120.0
"""A wait that lasts so long says what it waits for, and says it again as often."""
EVALUATION_ORDINALS = 1 << 40
"""Evaluation episodes get ordinals from here on, so that their seeds and sessions never meet training's."""


class RolloutService:
    """Owns the engines and everything that makes trajectories. Use as a context manager.

    ``interrupt`` is called again and again while the caller waits for engines to start, for groups or for an
    evaluation; what it raises gives up that wait. ``hosts`` are the other machines that run engines.
    """

    def __init__(
        self, config: ExperimentConfig, interrupt: Callable[[], None] = lambda: None, *, hosts: Hosts | None = None
    ) -> None:
        self._interrupt = interrupt
        self._config = config
        self._services = Services.from_config(config.user, config.judge)
        self.selection = Selection.from_config(config.environment, self._services)
        self.family = load_family(config.model.path, thinking=config.model.thinking)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout loop", daemon=True)
        self._pool = EnginePool(
            config.engine,
            dtype=config.model.dtype,
            context_length=config.model.max_length,
            seed=config.seed,
            log_folder=config.output / "logs",
            hosts=hosts,
        )
        self._runner: EpisodeRunner | None = None
        self._scheduler: GroupScheduler | None = None
        self._weights: Weights | None = None
        self._version = 0
        self._on_episode: Callable[[], None] = lambda: None

    # ---- life

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._call(self._pool.start(self._config.model.path), self._interrupt)
            self._call(self._start_runner())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop episodes and engines. Safe to call twice."""
        if self._loop.is_closed():
            return
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- training

    def schedule(self, first: int, last: int) -> None:
        """Begin to roll out the training stream, ordinals ``first`` to ``last`` (exclusive)."""
        algorithm, trainer = self._config.algorithm, self._config.trainer
        stream = TaskStream(self.selection.shared_tasks("train"), self._config.seed)
        temperature = self._config.rollout.temperature

        async def roll_out(ordinal: int) -> Group:
            return await self._episodes.group(
                stream.task(ordinal), ordinal, algorithm.group_size, temperature=temperature,
                on_episode=lambda: self._on_episode(),
            )  # fmt: skip

        slots = (trainer.max_staleness + 1) * algorithm.groups_per_step
        self._scheduler = GroupScheduler(roll_out, slots=slots, first=first, last=last)
        self._loop.call_soon_threadsafe(self._scheduler.start)

    def take(self, count: int, on_episode: Callable[[], None] | None = None) -> list[Group]:
        """Wait for the next ``count`` groups; ``on_episode`` is called as episodes end.

        Raises :class:`MuaError` when not one trajectory of them could be scored.
        """
        assert self._scheduler is not None, "schedule() comes first"
        self._on_episode = on_episode or (lambda: None)
        groups = self._call(self._scheduler.take(count), self._interrupt)
        require_scored([t for group in groups for t in group.trajectories])
        return groups

    def release(self, count: int) -> None:
        """The weights trained on the last ``count`` groups are in the engines: let new groups start."""
        assert self._scheduler is not None
        self._loop.call_soon_threadsafe(self._scheduler.release, count)

    # ---- weights

    def update_weights(self, weights: Weights, version: int) -> SyncReport:
        """Push ``weights()`` into every engine as policy ``version``; also the source for restarted engines."""
        self._weights, self._version = weights, version
        return self._call(self._pool.update_weights(weights(), version))

    def verify_weights(self, weights: Feed | Iterable[tuple[str, torch.Tensor]]) -> list[str]:
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

    def evaluate(
        self, split: Split, *, tasks: int | None, samples: int, temperature: float,
        on_episode: Callable[[], None] | None = None,
    ) -> list[Trajectory]:  # fmt: skip
        """Trajectories of each domain's first ``tasks`` tasks of ``split`` (None: all), ``samples`` of each."""
        chosen = self.selection.first_tasks(split, tasks)

        async def all_groups() -> list[Group]:
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(
                        self._episodes.group(
                            task, EVALUATION_ORDINALS + index, samples, temperature=temperature, on_episode=on_episode
                        )
                    )
                    for index, task in enumerate(chosen)
                ]
            return [done.result() for done in running]

        return [t for group in self._call(all_groups(), self._interrupt) for t in group.trajectories]

    def each(
        self, episodes: Sequence[Placed], *, temperature: float, on_trajectory: Callable[[Placed, Trajectory], None]
    ) -> None:
        """Run ``episodes``; ``on_trajectory`` is called on another thread, one call at a time, as they end."""
        work = self._episodes.each(episodes, temperature=temperature, on_trajectory=on_trajectory)
        self._call(work, self._interrupt)

    def task_count(self, split: Split, tasks: int | None = None) -> int:
        """How many tasks ``split`` has, counting at most ``tasks`` of each domain."""
        return len(self.selection.first_tasks(split, tasks))

    def metrics(self) -> dict[str, float]:
        """The counters of engines, users' and judges' endpoints since the last call."""
        return self._pool.metrics() | self._services.metrics()

    # ---- inside

    @property
    def _episodes(self) -> EpisodeRunner:
        assert self._runner is not None
        return self._runner

    async def _start_runner(self) -> None:
        self._runner = EpisodeRunner(self._config, self.selection, self.family, self._pool, self._services)

    async def _stop(self) -> None:
        if self._scheduler is not None:
            await self._scheduler.stop()
        if self._runner is not None:
            await self._runner.close()
        await self._services.close()
        await self._pool.stop()

    def _call(self, work: Coroutine[Any, Any, Result], interrupt: Callable[[], None] = lambda: None) -> Result:
        """Run ``work`` on the loop and wait for it; meanwhile fill restarted engines with the current weights.

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
                    self._fill_restarted_engines()
                    if monotonic() - reported > _WATCHDOG_S:
                        reported = monotonic()
                        log.warning("waiting for %s for %.0f s: %s", what, reported - started, self._state())
        except BaseException:
            future.cancel()
            raise

    def _state(self) -> str:
        """What is under way, in one line."""
        groups = self._scheduler.in_flight if self._scheduler is not None else 0
        return f"{groups} groups in flight, {self._pool.describe()}"

    def _fill_restarted_engines(self) -> None:
        if self._weights is None or not self._pool.awaiting_weights.is_set():
            return
        push = self._pool.update_weights(self._weights(), self._version, only_awaiting=True)
        future = asyncio.run_coroutine_threadsafe(push, self._loop)
        try:
            future.result(timeout=self._config.engine.start_seconds)
        except concurrent.futures.TimeoutError:
            raise DeadlineExceeded(
                f"engine.start_seconds: filling a restarted engine took longer than "
                f"{self._config.engine.start_seconds:g} s"
            ) from None


def report(trajectories: Sequence[Trajectory]) -> list[float]:
    """1.0 or 0.0 for each scored trajectory: success."""
    return [float(t.success) for t in trajectories if t.scored]


def require_scored(trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    """``trajectories``; raises :class:`MuaError`, with the last one's fault, when none of them could be scored."""
    if not any(t.scored for t in trajectories):
        last = trajectories[-1]
        reason = f"the last one ended as {last.outcome}: {last.error}"
        raise MuaError(f"not one of {len(trajectories)} episodes could be scored; {reason}")
    return trajectories
