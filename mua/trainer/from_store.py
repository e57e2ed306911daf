"""Reinforcement learning on stored groups: the loop of :mod:`mua.trainer.rl` without engines.

store ──► groups ──► schedule ──► batch ──► optimizer steps       what each step trains on is known
          complete   drawn once,  the same functions as when       before the first
          ones       by seed      they are rolled out
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import logging
from contextlib import ExitStack
from typing import Self

from mua.algorithms.rollout_metrics import rollout_metrics
from mua.config.schema import ExperimentConfig
from mua.observe.timeline import TrainerPhase, trainer_metrics
from mua.rollout.runner import too_few_scored
from mua.rollout.teacher import Teacher
from mua.store.database import Store
from mua.store.stored_groups import StoredGroup, recorded_run, stored_groups
from mua.tokens.chat_family import load_family_of
from mua.tokens.codec import check_recorded_tokenizer
from mua.trainer.control_tokens import control_token_metrics, report_untrained
from mua.trainer.learner import Learner
from mua.trainer.observers import DoneStep, HookObserver, Learned
from mua.trainer.preempt import Preemption
from mua.trainer.ranks import init_distributed, is_rank0
from mua.trainer.rl import learn
from mua.trainer.run_folder import Run
from mua.types import Group, Json
from mua.utils.errors import ConfigError
from mua.utils.hooks import check_hooks
from mua.utils.seeds import derived_seed

log = logging.getLogger(__name__)


def train_offline(config: ExperimentConfig, preemption: Preemption = Preemption()) -> None:
    """Train the policy of ``config`` on the groups of ``config.offline``; its Hugging Face folder is ``<output>/hf``.

    Raises :class:`Preempted` on every rank when ``preemption`` is requested before the last step is done;
    the same call continues the run.
    """
    check_hooks(config)
    init_distributed(config)
    learner = Learner.for_rl(config)
    if not is_rank0():
        learner.worker_loop()
        preemption.check()
        return
    family = load_family_of(config.model)
    report_untrained(config.model, family)
    with learner, Run(config, learner) as run:
        steps, by_std = config.trainer.steps, config.algorithm.divide_by_std
        with (
            run.saved_on_leaving(),
            StoredBatches(config, run.position) as batches,
            run.progress.stage("train", total=steps - run.step) as progress,
        ):
            for step in range(run.step, steps):
                preemption.check()
                with run.timeline.phase("read"):
                    groups = batches.read(step)
                members = [trajectory for group in groups for trajectory in group.trajectories]
                few = too_few_scored(members, config.trainer.min_scored_share)
                run.scored(step, few)
                version = batches.newest_version + 1 + step
                done = DoneStep(step, groups, [] if few else groups, few, Learned())
                done.metrics |= learn(config, learner, done.usable, version=version, timeline=run.timeline)
                done.metrics |= rollout_metrics(groups, divide_by_std=by_std, version=version)
                segments = [segment for trajectory in members for segment in trajectory.segments]
                streams = ((segment.ids, segment.logprobs, segment.loss_mask) for segment in segments)
                done.metrics |= control_token_metrics("rollout", family, streams)
                done.metrics |= trainer_metrics(run.timeline.take(), (TrainerPhase.BATCH,))
                if config.trainer.after_step is not None:
                    HookObserver(config.trainer.after_step).stepped(done)
                run.position = batches.position
                run.log(step, done.metrics)
                run.log_episodes(step, groups)
                if run.learned and run.due(config.trainer.save_every, step):
                    run.save(step)
                progress.advance(note=done.note)
        run.export(steps)


class StoredBatches:
    """The groups of each step, read when the step comes. Use as a context manager."""

    def __init__(self, config: ExperimentConfig, position: Json | None = None) -> None:
        """``position`` is :attr:`position` of the run that this one continues.

        Raises :class:`ConfigError` where the store has too few groups for the steps of the run, other ones than the run
        began with, or tokens of another tokenizer; :class:`mua.store.faults.StoreError` where it cannot be read.
        """
        assert config.offline is not None
        self._config, self._source = config, config.offline
        self._stack = ExitStack()
        try:
            self._store = self._stack.enter_context(Store.open(self._source.store, create=False, write=False))
            self._choose(position)
            self._teacher: tuple[asyncio.Runner, Teacher] | None = None
            if (distillation := config.algorithm.distillation) is not None and not self._source.recorded_teacher:
                runner, codec = self._stack.enter_context(asyncio.Runner()), load_family_of(config.model).codec

                async def meet() -> Teacher:  # on the loop that it belongs to
                    teacher = Teacher(distillation, codec)
                    self._stack.callback(lambda: runner.run(teacher.close()))
                    await teacher.meet()
                    return teacher

                self._teacher = runner, runner.run(meet())
        except BaseException:
            self._stack.close()
            raise

    def _choose(self, position: Json | None) -> None:
        config, source = self._config, self._source
        until = None if position is None else position["until"]
        with self._store.read() as connection:
            check_recorded_tokenizer(config.model.path, recorded_run(connection, source))
            groups, until = stored_groups(connection, source, rollout=config.rollout, until=until)
        self.newest_version = max((group.newest for group in groups if group.newest is not None), default=-1)
        """Of the policies that sampled; the one that is trained counts on from it, so that no token's age is below what
        it really is known to be."""
        per_step, steps = config.algorithm.groups_per_step, config.trainer.steps
        order = use_schedule(len(groups), per_step, steps, source.max_uses, source.apart, config.seed)
        self._steps: list[list[StoredGroup]] = [[groups[i] for i in chosen] for chosen in order]
        ids = "\n".join(member.trajectory_id for group in groups for member in group.members)
        self.position: Json = {"until": until, "groups": hashlib.sha256(ids.encode()).hexdigest()}
        if position is not None and position["groups"] != self.position["groups"]:
            raise ConfigError(
                f"offline.store: the groups of {self._store.name} are not those that this run began with (some were "
                "pruned, or the section offline was changed); restore them, or begin anew in another output folder"
            )

    def read(self, step: int) -> list[Group]:
        """The groups of ``step``, with what the teacher says of them, if there is one.

        Raises :class:`ConfigError` where a recorded teacher is asked for and was not recorded.
        """
        with self._store.read() as connection:
            groups = [group.read(connection) for group in self._steps[step]]
        if self._teacher is not None:
            runner, teacher = self._teacher
            return [runner.run(teacher.scored(group)) for group in groups]
        for group in groups if self._config.algorithm.distillation is not None else ():
            for trajectory in group.scored:
                if any(s.teacher_logprobs is None and s.loss_mask.any() for s in trajectory.segments):
                    raise ConfigError(
                        f"offline.recorded_teacher: no teacher's log-probabilities were stored of group "
                        f"{group.ordinal} (task {trajectory.task_id}); set it to false, so that "
                        "algorithm.distillation.base_url is asked"
                    )
        return groups

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def use_schedule(groups: int, per_step: int, steps: int, max_uses: int, apart: int, seed: int) -> list[list[int]]:
    """Which groups each step trains on, ``[steps][per_step]``.

    Always the least used of those whose last use is at least ``apart`` steps ago, drawn by ``seed`` among equals: no
    group is used a second time before every other one that may be was used once.

    Raises :class:`ConfigError` with the number of steps that there are, where ``steps`` are more.
    """

    def draw(group: int, use: int) -> int:
        return derived_seed("offline", seed, use, group)

    free = [(0, draw(group, 0), group) for group in range(groups)]
    heapq.heapify(free)
    resting: list[tuple[int, int, int]] = []
    schedule: list[list[int]] = []
    for step in range(steps):
        while resting and resting[0][0] <= step:
            _, group, use = heapq.heappop(resting)
            heapq.heappush(free, (use, draw(group, use), group))
        if len(free) < per_step:
            raise ConfigError(
                f"offline: {groups} groups, each used at most {max_uses} times (offline.max_uses) and {apart} steps "
                f"apart (offline.apart), are enough for {step} steps of algorithm.groups_per_step {per_step}; "
                f"trainer.steps is {steps}"
            )
        chosen = [heapq.heappop(free) for _ in range(per_step)]
        schedule.append([group for _, _, group in chosen])
        for use, _, group in chosen:
            if use + 1 < max_uses:
                heapq.heappush(resting, (step + apart, group, use + 1))
    return schedule
