"""What every training loop needs around it: where it continues, what it leaves behind, and when; and its report."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from mua.config.schema import ExperimentConfig
from mua.megatron.checkpoint import (
    BEST,
    best_checkpoint,
    checkpoint_folder,
    instead_of,
    latest_checkpoint,
    point_to,
    prune_checkpoints,
)
from mua.megatron.checkpoint_manifest import NAME as MANIFEST
from mua.megatron.model_card import exported_texts
from mua.observe import metrics_log
from mua.observe.metric_sinks import service_sink
from mua.observe.metrics_log import (
    METRICS_FILE,
    MetricsWriter,
    ending_of,
    evaluation_of,
    hyperparameters,
    memory_metrics,
    without_evaluation,
)
from mua.observe.output import REPORT_FILE
from mua.observe.progress import Progress
from mua.observe.provenance import changed_keys, provenance
from mua.observe.timeline import Timeline, TrainerPhase
from mua.rollout.runner import UnscoredEpisodes
from mua.tokens.chat_family import load_family_of
from mua.trainer.evaluation.evaluator import success_of
from mua.trainer.evaluation.store import files_digest
from mua.trainer.learner import Learner
from mua.trainer.observers import RunRecord
from mua.types import Group, Json
from mua.utils.atomic import replace_text
from mua.utils.errors import DamagedCheckpoint, EngineError, ModelError, MuaError, Preempted, RunStopped
from mua.utils.run_identity import claim_run
from mua.utils.strict_json import JsonError, read_file, read_json

SKIPPED = ("train/skipped", "train/critic/skipped")
"""Metrics: share of a step's updates that were left out because their gradient norm was not finite."""

_LOGGED = (
    "rollout/reward/mean",
    "rollout/success",
    "train/loss",
    "train/entropy",
    "train/grad_norm",
    "time/step_seconds",
)
"""Metrics of a step that the log has a line of."""

_IDENTITY = {
    "tokenizer": ("tokenizer*", "vocab*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "*.model",
                  "chat_template*", "additional_chat_templates/*"),
    "model": ("config.json", "*.safetensors"),
}  # fmt: skip
"""By what a run is known again: files of ``model.path``, by their contents wherever the folder lies."""

log = logging.getLogger(__name__)


class Run:
    """One run's output folder: checkpoints, metrics and progress. Only the leading process has one."""

    def __init__(self, config: ExperimentConfig, learner: Learner) -> None:
        self._config = config
        self._learner = learner
        self._identity = {
            what: files_digest(
                {path for pattern in patterns for path in config.model.path.glob(pattern) if path.is_file()}
            )
            for what, patterns in _IDENTITY.items()
        }
        self._provenance = provenance(config) | {"identity": self._identity}
        self.changes: list[str] = []
        """What of the configuration is another than when the checkpoint was written that the run continues from."""
        self._stop_token_ids: tuple[int, ...] | None = None
        self.checkpoints = config.output / "checkpoints"
        self.unlogged: dict[str, float] | None = None
        """Metrics of the step before :attr:`step`, if it was saved before its evaluation; they are still to be logged
        with it."""
        self.position: Json | None = None
        """Where the run's stream of tasks continues after its last step; part of every checkpoint."""
        self.best: Json | None = None
        """The step whose policy had the highest success on ``evaluation.split`` so far, and that success; part of every
        checkpoint. Of equal ones the first."""
        self._unscored = 0
        """Steps in a row with too few scored episodes; part of every checkpoint."""
        self.step = self._resume()
        """The next step to take, counted from 0; it is also the policy's version."""
        self.learned = True
        """Whether any step of the run could learn, so that there is something to save."""
        self.report = Report(config)
        self.store: RunRecord | None = None
        """What must hold every step before a checkpoint of them has its name."""
        if (gone := self._best_folder) is not None and not gone.is_dir():
            log.warning("%s was the best checkpoint and is gone; the best of what follows takes its place", gone)
            self.best = None
        self._point_to_best()
        self._unsaved: int | None = None
        self._unsaved_metrics: Mapping[str, float] | None = None
        self._skipped = 0
        """Steps in a row that changed nothing."""
        self.timeline = Timeline()
        self.progress = Progress(config.observe.progress)
        chosen = (config.observe.wandb, config.observe.mlflow)
        others = [
            service_sink(one, config.name, config.output, claim_run(config.output)) for one in chosen if one is not None
        ]
        resume_step = self.step - (self.unlogged is not None)
        self._metrics = MetricsWriter(config.output, config.observe.tensorboard, resume_step=resume_step, others=others)
        self._metrics.log_hyperparameters(hyperparameters(config))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.progress.close()
        self._metrics.close(ending_of(error))
        if error is None:
            self._finish_save()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step's metrics, with the memory in use; held-out figures are of the policy after it.

        Raises :class:`RunStopped` after too many steps in a row of which every update was left out.
        """
        of_step, held_out = without_evaluation(metrics), evaluation_of(metrics)
        with self.timeline.phase(TrainerPhase.RECORDS):
            self._metrics.log(step, {**of_step, **memory_metrics()})
        if held_out:
            self.log_evaluation(step + 1, held_out)
        shown = [f"{name} {metrics[name]:.4g}" for name in _LOGGED if name in metrics]
        log.info("step %d: %s", step, ", ".join(shown) or "nothing was learned")
        if step < self.step:
            return
        self._unsaved = step if self.learned else None
        found = [metrics[name] for name in SKIPPED if name in metrics]
        if not found:  # a step without any update, for want of anything to learn from, says nothing
            return
        self._skipped = self._skipped + 1 if max(found) == 1.0 else 0
        if self._skipped >= self._config.trainer.max_skipped_steps:
            raise RunStopped(
                f"trainer.max_skipped_steps: the gradient norm of the last {self._skipped} steps with an update, to "
                f"step {step}, was not finite, so they changed nothing; look at train/loss, train/grad_norm and "
                f"train/ratio in {self._config.output / METRICS_FILE}, and at the data and the weights of model.path; "
                "then lower optimizer.learning_rate, or begin again from an earlier checkpoint"
            )

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record held-out figures of the policy after ``step`` steps."""
        with self.timeline.phase(TrainerPhase.RECORDS):
            self._metrics.log_evaluation(step, evaluation_of(metrics))

    def log_episodes(self, step: int, groups: Iterable[Group]) -> None:
        """Record histograms, and texts where they are due, of the episodes of ``step``."""
        episodes = [trajectory for group in groups for trajectory in group.trajectories]
        wanted = metrics_log.due(step, self._config.trainer.steps, self._config.observe.texts)
        with self.timeline.phase(TrainerPhase.RECORDS):
            texts = metrics_log.texts_of(episodes) if wanted else {}
            self._metrics.log_details(step, metrics_log.histograms_of(episodes), texts)

    def scored(self, step: int, few: UnscoredEpisodes | None) -> None:
        """``step`` has its episodes; ``few`` where too few of them could be scored, so that it trains on nothing.

        Raises :class:`RunStopped`, passing if the commonest fault is, after too many such steps in a row, and where the
        run would end without having learned from anything.
        """
        if few is None:
            self._unscored, self.learned = 0, True
            return
        self.learned = self.learned and step > 0  # what continues has learned: nothing else is ever saved
        row = self._unscored + 1
        trainer, reason = self._config.trainer, few.reason(self._config.trainer.min_scored_share)
        patient = few.passing and not trainer.deterministic
        if row >= (min(trainer.max_unscored_steps, trainer.steps) if patient else 1):
            many = f" ({row} such steps in a row, trainer.max_unscored_steps)" if row > 1 else ""
            raise RunStopped(f"step {step}: {reason}{many}; {few.fix}", passing=few.passing)
        self._unscored = row
        log.warning("step %d trains on nothing: %s; %s", step, reason, few.fix)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> bool:
        """``metrics`` hold an evaluation after ``step``; whether no policy of the run was better before."""
        name = f"eval/{self._config.evaluation.split}_success"
        if name not in metrics or not self.learned:
            return False
        if self.best is not None and metrics[name] <= self.best["success"]:
            return False
        self.best = {"step": step + 1, "success": metrics[name]}
        self._point_to_best()
        return True

    def handed_over(self) -> tuple[int, Path | None]:
        """The step whose policy the run hands over (``trainer.export``), and its checkpoint where it is not the last.

        Waits for a checkpoint that is still being written.
        """
        last = self._config.trainer.steps
        if self._config.trainer.export == "last" or self.best is None or self.best["step"] == last:
            return last, None
        self._finish_save()
        return int(self.best["step"]), self._best_folder

    def export(self, step: int) -> None:
        """Have the learner write its policy, which learned from ``step`` steps, as ``<output>/hf``, with its card."""
        self._learner.save_hf(self._config.output / "hf", self._texts(step))

    def _texts(self, done: int) -> dict[str, str]:
        if self._stop_token_ids is None:
            try:
                self._stop_token_ids = load_family_of(self._config.model).stop_token_ids
            except ModelError as error:  # no reason to lose a checkpoint
                log.warning("%s: an export cannot say what ends a turn", error)
                self._stop_token_ids = ()
        return exported_texts(self._config, done, self._provenance, self._stop_token_ids)

    def due(self, every: int, step: int) -> bool:
        """Whether something done every so many steps is due after ``step``; the last step always is."""
        last = step + 1 == self._config.trainer.steps
        return last or (every > 0 and (step + 1) % every == 0)

    def save(self, step: int, unlogged: Mapping[str, float] | None = None) -> Path:
        """Checkpoint the state after ``step`` and drop the oldest beyond ``trainer.keep``, but not the best.

        ``unlogged`` are the metrics of a step whose evaluation is still due; the run that continues finds them in
        :attr:`unlogged`.

        Comes after :meth:`log`, so that a run killed in between repeats the step instead of missing its line. The time
        it takes is therefore in the next step's line.
        """
        done = step + 1
        folder = checkpoint_folder(self.checkpoints, done)
        if self.store is not None:
            self.store.before_checkpoint()
        with self.timeline.phase(TrainerPhase.CHECKPOINT):
            optional = {
                "unlogged": unlogged and dict(unlogged), "position": self.position, "best": self.best,
                "unscored": self._unscored or None,
            }  # fmt: skip
            state = {"step": done} | {name: value for name, value in optional.items() if value is not None}
            texts = self._texts(done)
            background = self._config.trainer.async_save
            self._learner.save(folder, state, self._provenance, background=background, texts=texts)
            self._point_to_best()
            self._prune(writing=folder if self._config.trainer.async_save else None)
        self._unsaved = None
        if self.store is not None:
            self.store.after_checkpoint(step, folder)
        return folder

    def completed(self, step: int, unlogged: Mapping[str, float]) -> None:
        """``step`` is done but for its evaluation: what leaves the run now saves it with its metrics (:meth:`save`)."""
        self._unsaved, self._unsaved_metrics = step if self.learned else None, unlogged

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

    def _finish_save(self) -> None:
        """Wait for a checkpoint that is being written in the background; only then may an older one go for it."""
        if self._config.trainer.async_save:
            self._learner.finish_save()
            self._point_to_best()
            self._prune()

    def _prune(self, writing: Path | None = None) -> None:
        """The best stays, and the one that is still pointed to while a better one is being written."""
        spare = {best_checkpoint(self.checkpoints), self._best_folder}
        prune_checkpoints(self.checkpoints, self._config.trainer.keep, writing=writing, spare=spare)

    @property
    def _best_folder(self) -> Path | None:
        return None if self.best is None else checkpoint_folder(self.checkpoints, self.best["step"])

    def _point_to_best(self) -> None:
        """Have ``checkpoints/best`` be the best checkpoint as soon as it is whole. What the run knows decides, not the
        link: a run that continues from an older checkpoint has not seen what was better later."""
        if self.best is None:
            (self.checkpoints / BEST).unlink(missing_ok=True)
        elif self._best_folder is not None and self._best_folder.is_dir():
            point_to(self.checkpoints, self._best_folder)

    def _resume(self) -> int:
        newest = latest_checkpoint(self.checkpoints)
        if newest is None:
            return 0
        if not self._config.trainer.resume:
            raise ModelError(
                f"{self.checkpoints}: holds checkpoints of an earlier run, and trainer.resume is false; "
                "choose another output folder, or remove them"
            )
        self._compare(newest)
        try:
            state = self._learner.load(newest)
        except DamagedCheckpoint as error:
            raise ModelError(f"{error}; {instead_of(newest)}") from error
        self.unlogged = state.get("unlogged")
        self.position = state.get("position")
        self.best, self._unscored = state.get("best"), state.get("unscored", 0)
        if not isinstance(state.get("step"), int):
            raise ModelError(f"{newest} is of no run: its state has no step; {instead_of(newest)}")
        log.info("continuing from %s", newest)
        for line in self.changes:
            log.warning("since step %d: %s", state["step"], line)
        return int(state["step"])

    def _compare(self, checkpoint: Path) -> None:
        """What the checkpoint was made with and what this start has. Raises :class:`ModelError` for another policy."""
        try:
            made: Any = read_json(read_file(checkpoint / MANIFEST))
        except (JsonError, OSError):
            return  # loading tells what is wrong with it
        if not isinstance(made, dict) or not isinstance(made.get("config"), dict):
            return
        own, old = self._config.model.path, made["config"].get("model", {}).get("path")
        for what, digest in made.get("identity", {}).items():
            if digest != self._identity.get(what, digest):
                raise ModelError(
                    f"model.path: {own} has another {what} ({self._identity[what]}) than {old} had ({digest}), with "
                    f"which {checkpoint} was made; set model.path to that, or choose another output folder to begin a "
                    "run from this one"
                )
        before, after = (
            one["config"] | {key: one.get(key, {}) for key in ("versions", "hooks")} for one in (made, self._provenance)
        )
        self.changes = changed_keys(before, after)


class Report:
    """``<output>/report.json``: ``split``, and ``first`` and ``final``, each with its ``step`` and metrics."""

    def __init__(self, config: ExperimentConfig) -> None:
        """Raises :class:`MuaError` where the file of an earlier part of the run cannot be read."""
        self._path = config.output / REPORT_FILE
        self._split = config.evaluation.report_split
        self._export = config.trainer.export
        fix = "remove it, and the report lacks the first policy"
        try:
            found = read_json(read_file(self._path)) if self._path.exists() else {}
        except (JsonError, OSError) as error:
            raise MuaError(f"{self._path}: cannot be read ({error}); {fix}") from None
        if not isinstance(found, dict) or not all(isinstance(found.get(name, {}), dict) for name in ("first", "final")):
            raise MuaError(f"{self._path}: not a report of a run; {fix}")
        self._parts = {name: found[name] for name in ("first", "final") if name in found}

    def first(self, metrics: Mapping[str, float]) -> None:
        """What the policy of step 0 reached; a report that was there is of an earlier run."""
        self._parts = {}
        self._write("first", {"step": 0, **metrics})

    def final(self, step: int, metrics: Mapping[str, float]) -> None:
        """What the policy after ``step`` steps reached, which the run hands over. Prints both."""
        self._write("final", {"step": step, "export": self._export, **metrics})
        for name, part in self._parts.items():
            print(f"report on {self._split}, {name} policy (step {part['step']}): {success_of(part, self._split)}")

    def _write(self, name: str, part: Json) -> None:
        self._parts[name] = part
        replace_text(self._path, json.dumps({"split": self._split, **self._parts}, indent=2) + "\n")
