"""Who has the memory when trainer and engines share their devices, and what is in use in each phase.

    rollout    engines: weights, KV cache    trainer: nothing (megatron.offload)
    train      engines: nothing              trainer: everything          (engine.memory_saver)
    sync       engines: weights              trainer: everything
    save       engines: weights              trainer: everything

Without ``megatron.offload`` the trainer keeps what it has, without ``engine.memory_saver`` the engines do; the phases
and their figures are the same. Before engines take memory, to resume or to start, every rank gives back what torch has
cached: that is as large as a step's activations, and no other process can use it.

An engine that died while memory is released starts when the others have all of theirs. When none is left to take the
weights, one starts at once, with the trainer's memory given back for as long as that takes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from mua.config.schema import ExperimentConfig
from mua.engine.engine_handle import EngineGone
from mua.engine.weight_transfer import SyncReport
from mua.megatron import device_memory
from mua.observe.metrics_log import process_memory
from mua.observe.timeline import Timeline, TrainerPhase
from mua.rollout.service import RolloutService
from mua.trainer.learner import Learner

log = logging.getLogger(__name__)


class Phases:
    """Moves memory between trainer and engines, and notes what is in use before and after each phase."""

    def __init__(
        self, config: ExperimentConfig, learner: Learner, rollouts: RolloutService, timeline: Timeline | None = None
    ) -> None:
        self._offload = config.megatron.offload
        self._release = config.engine.memory_saver
        self._learner = learner
        self._rollouts = rollouts
        self._timeline = timeline or Timeline()
        self._in_use: dict[str, float] = {}
        rollouts.making_room = self.beside_engines

    @contextmanager
    def training(self) -> Iterator[None]:
        """A block that trains. The engines answer nothing until the :meth:`sync` that follows."""
        self._note("rollout_end")
        with self._timeline.phase(TrainerPhase.MEMORY):
            if self._release:
                self._rollouts.release_memory(["kv_cache", "weights"])
            self._onload()
        self._note("train_begin")
        yield
        self._note("train_end")

    def sync(self, version: int) -> SyncReport:
        """Give the engines the current weights as policy ``version``, and the memory to roll out."""
        while True:
            with self._timeline.phase(TrainerPhase.MEMORY):
                if self._offload and self._release:  # those that have just started, or rolled out, have all
                    self._rollouts.release_memory(["kv_cache"])
                self._make_room(for_starts=not self._rollouts.engines_up)
                if self._rollouts.released:
                    self._rollouts.resume_memory(["weights"])
            if not self._rollouts.engines_up:
                with self._timeline.phase(TrainerPhase.MEMORY):
                    self._make_room(for_starts=True)
                with self._timeline.phase(TrainerPhase.SYNC):
                    self._rollouts.wait_for_engines()
            with self._timeline.phase(TrainerPhase.MEMORY):
                self._onload()
            self._note("sync_begin")
            try:
                with self._timeline.phase(TrainerPhase.SYNC):
                    report = self._rollouts.update_weights(self._learner.weights(), version)
                break
            except EngineGone as error:
                log.warning("the weights of version %d reached no engine: %s; sending them again", version, error)
        self._note("sync_end")
        self._roll_out()
        return report

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A block that writes a checkpoint between a :meth:`sync` and the rollouts after it."""
        with self.beside_engines():
            yield
            self._note("save_end")

    @contextmanager
    def beside_engines(self) -> Iterator[None]:
        """A block that needs what the trainer has while engines roll out, or are about to: their caches make room.

        To write or read a checkpoint, or to give a restarted engine its weights. Requests that run are retracted and go
        on afterwards.
        """
        with self._timeline.phase(TrainerPhase.MEMORY):
            if self._offload and self._release:
                self._rollouts.release_memory(["kv_cache"])
            self._onload()
        yield
        self._roll_out()

    def take(self) -> dict[str, float]:
        """What was in use since the last call: ``memory/<phase>_<what>_gib``, of this rank.

        On a device ``what`` is ``device_allocated`` (tensors), ``device_reserved`` (with what torch caches) and
        ``device_free``, of all processes; without one it is ``resident``.
        """
        in_use, self._in_use = self._in_use, {}
        return in_use

    def _make_room(self, *, for_starts: bool) -> None:
        """Before engines take memory: an engine that starts takes what is free, one that resumes what it had."""
        if self._offload and for_starts:
            self._learner.offload()
        else:
            self._learner.give_back()

    def _roll_out(self) -> None:
        with self._timeline.phase(TrainerPhase.MEMORY):
            self._make_room(for_starts=True)
            if self._rollouts.released:
                self._rollouts.resume_memory(["kv_cache"])
        self._note("rollout_begin")

    def _onload(self) -> None:
        if self._offload:
            self._learner.onload()

    def _note(self, phase: str) -> None:
        found = device_memory.in_use() or process_memory()
        self._in_use |= {f"memory/{phase}_{what}": value for what, value in found.items()}
