"""What every training loop needs around it: where it continues, what it leaves behind, and when."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from mua.config.schema import ExperimentConfig
from mua.errors import DamagedCheckpoint, EngineError, ModelError, Preempted, RunStopped
from mua.megatron.checkpoint import checkpoint_folder, instead_of, latest_checkpoint, prune_checkpoints
from mua.observe.memory import memory_metrics
from mua.observe.metrics import MetricsWriter
from mua.observe.progress import Progress
from mua.observe.timing import StageTimer
from mua.trainer.policy import Policy
from mua.types import Json

SKIPPED = ("skipped", "critic/skipped")
"""Metrics: share of a step's updates that were left out because their gradient norm was not finite."""

log = logging.getLogger(__name__)


class Run:
    """One run's output folder: checkpoints, metrics and progress. Only the leading process has one."""

    def __init__(self, config: ExperimentConfig, policy: Policy) -> None:
        self._config = config
        self._policy = policy
        self.checkpoints = config.output / "checkpoints"
        self.unlogged: dict[str, float] | None = None
        """Metrics of the step before :attr:`step`, if it was saved before its evaluation; they are still to be logged
        with it."""
        self.position: Json | None = None
        """Where the run's stream of tasks continues after its last step; part of every checkpoint."""
        self.step = self._resume()
        """The next step to take, counted from 0; it is also the policy's version."""
        self._unsaved: int | None = None
        self._unsaved_metrics: Mapping[str, float] | None = None
        self._skipped = 0
        """Steps in a row that changed nothing."""
        self.timer = StageTimer()
        self.progress = Progress(config.observe.progress)
        self._metrics = MetricsWriter(
            config.output, config.observe.tensorboard, resume_step=self.step - (self.unlogged is not None)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.close()
        self._metrics.close()
        if error is None:
            self._finish_save()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step's metrics, with the seconds of its stages and the memory in use."""
        self._metrics.log(step, {**metrics, **self.timer.take(), **memory_metrics()})
        if step >= self.step:
            self._unsaved = step
            self._count_skipped(step, metrics)

    def due(self, every: int, step: int) -> bool:
        """Whether something done every so many steps is due after ``step``; the last step always is."""
        last = step + 1 == self._config.trainer.steps
        return last or (every > 0 and (step + 1) % every == 0)

    def save(self, step: int, unlogged: Mapping[str, float] | None = None) -> Path:
        """Checkpoint the state after ``step`` and drop the oldest beyond ``trainer.keep``.

        ``unlogged`` are the metrics of a step whose evaluation is still due; the run that continues finds them in
        :attr:`unlogged`.

        Comes after :meth:`log`, so that a run killed in between repeats the step instead of missing its line. The time
        it takes is therefore in the next step's line.
        """
        done = step + 1
        folder = checkpoint_folder(self.checkpoints, done)
        with self.timer.stage("save"):
            optional = {"unlogged": unlogged and dict(unlogged), "position": self.position}
            state = {"step": done} | {name: value for name, value in optional.items() if value is not None}
            self._policy.save(folder, state)
            writing = folder if self._config.trainer.async_save else None
            prune_checkpoints(self.checkpoints, self._config.trainer.keep, writing=writing)
        self._unsaved = None
        return folder

    def completed(self, step: int, unlogged: Mapping[str, float]) -> None:
        """``step`` is done but for its evaluation: what leaves the run now saves it with its metrics (:meth:`save`)."""
        self._unsaved, self._unsaved_metrics = step, unlogged

    @contextmanager
    def saved_on_leaving(self) -> Iterator[None]:
        """A block that is left before the run's end: asked to, by a bound, or because engines are given up.

        The last completed step gets its checkpoint, if it has none: put what holds the devices' memory into the block.
        """
        try:
            yield
        except (Preempted, RunStopped, EngineError):
            if self._unsaved is not None:
                self.save(self._unsaved, self._unsaved_metrics)
            self._finish_save()
            if (newest := latest_checkpoint(self.checkpoints)) is not None:
                log.warning("leaving before the end; the same command continues from %s", newest)
            raise

    def _count_skipped(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise :class:`RunStopped` after too many steps in a row of which every update was left out.

        Steps without any update, for want of anything to learn from, say nothing.
        """
        found = [metrics[name] for name in SKIPPED if name in metrics]
        if not found:
            return
        self._skipped = self._skipped + 1 if max(found) == 1.0 else 0
        if self._skipped >= self._config.trainer.max_skipped_steps:
            raise RunStopped(
                f"trainer.max_skipped_steps: the gradient norm of the last {self._skipped} steps with an update, to "
                f"step {step}, was not finite, so they changed nothing; look at loss, grad_norm and the ratios in "
                f"{self._metrics.path}, and at the data and the weights of model.path; then lower "
                "optimizer.learning_rate, or begin again from an earlier checkpoint"
            )

    def _finish_save(self) -> None:
        """Wait for a checkpoint that is being written in the background; only then may an older one go for it."""
        if self._config.trainer.async_save:
            self._policy.finish_save()
            prune_checkpoints(self.checkpoints, self._config.trainer.keep)

    def _resume(self) -> int:
        newest = latest_checkpoint(self.checkpoints)
        if newest is None:
            return 0
        if not self._config.trainer.resume:
            raise ModelError(
                f"{self.checkpoints}: holds checkpoints of an earlier run, and trainer.resume is false; "
                "choose another output folder, or remove them"
            )
        try:
            state = self._policy.load(newest)
        except DamagedCheckpoint as error:
            raise ModelError(f"{error}; {instead_of(newest)}") from error
        self.unlogged = state.get("unlogged")
        self.position = state.get("position")
        if not isinstance(state.get("step"), int):
            raise ModelError(f"{newest} is of no run: its state has no step; {instead_of(newest)}")
        log.info("continuing from %s", newest)
        return int(state["step"])
