"""Who has the memory when trainer and engines share their devices, and a ledger of it.

    rollout    engines: weights, KV cache    trainer: nothing (megatron.offload)
    train      engines: nothing              trainer: everything          (engine.memory_saver)
    sync       engines: weights              trainer: everything
    save       engines: weights              trainer: everything

Without ``megatron.offload`` the trainer keeps what it has, without ``engine.memory_saver`` the engines do; the phases
and their ledger are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mua.config.schema import ExperimentConfig
from mua.engine.sync import SyncReport
from mua.observe.metrics_log import process_memory
from mua.observe.timeline import Timeline, TrainerPhase
from mua.rollout.service import RolloutService
from mua.trainer.learner import Learner


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
        self._ledger: dict[str, float] = {}

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
        with self._timeline.phase(TrainerPhase.MEMORY):
            if self._offload and not self._rollouts.engines_up:
                self._learner.offload()  # an engine that starts takes what is free
            if self._rollouts.released:
                self._rollouts.resume_memory(["weights"])
        with self._timeline.phase(TrainerPhase.SYNC):
            self._rollouts.wait_for_engines()
        with self._timeline.phase(TrainerPhase.MEMORY):
            self._onload()
        self._note("sync_begin")
        with self._timeline.phase(TrainerPhase.SYNC):
            report = self._rollouts.update_weights(self._learner.weights(), version)
        self._note("sync_end")
        self._roll_out()
        return report

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A block that writes a checkpoint between a :meth:`sync` and the rollouts after it."""
        with self._timeline.phase(TrainerPhase.MEMORY):
            if self._offload and self._release:
                self._rollouts.release_memory(["kv_cache"])
            self._onload()
        yield
        self._note("save_end")
        self._roll_out()

    def take(self) -> dict[str, float]:
        """The ledger since the last call: ``memory/<phase>_<what>_gib``."""
        ledger, self._ledger = self._ledger, {}
        return ledger

    def _roll_out(self) -> None:
        with self._timeline.phase(TrainerPhase.MEMORY):
            if self._offload:
                self._learner.offload()
            if self._rollouts.released:
                self._rollouts.resume_memory(["kv_cache"])
        self._note("rollout_begin")

    def _onload(self) -> None:
        if self._offload:
            self._learner.onload()

    def _note(self, phase: str) -> None:
        self._ledger |= {f"memory/{phase}_{what}": value for what, value in process_memory().items()}
