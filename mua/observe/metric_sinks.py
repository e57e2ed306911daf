"""Where a run's metrics go besides its own files: TensorBoard, Weights & Biases, MLflow.

One interface for all: scalars, histograms, texts, hyperparameters. TensorBoard writes files. The two services may be
slow or away: a thread of its own talks to each and tries again what they did not take, in order; training never waits
for it, and what could not be handed over is said in the log and counted. Their packages are no dependencies.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from mua.config.storage import MlflowConfig, WandbConfig
from mua.utils.atomic import replace_text
from mua.utils.errors import ConfigError
from mua.utils.files import naming

log = logging.getLogger(__name__)

Plain: TypeAlias = str | int | float | bool
Values: TypeAlias = npt.NDArray[np.float64]
QUEUED = 256
"""Calls that wait for a service; more are dropped."""
CLOSING_SECONDS = 60.0
"""How long the end of a run waits for a service."""
RETRY_SECONDS = (1.0, 60.0)
"""Between two tries of what a service did not take: at first, at most."""
Ending: TypeAlias = Literal["finished", "left", "failed"]
"""How a run ends: at its last step; asked to, to be continued; by an error."""


class MetricSink(Protocol):
    """Takes what a run logs. Calls come from one thread, in the order of steps."""

    def scalars(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        """Values at ``step``; they may be infinite or no number. ``at``: when they were logged, seconds since 1970; now
        by default."""

    def histograms(self, step: int, values: Mapping[str, Values]) -> None:
        """Samples, each ``[N]`` with N above 0."""

    def texts(self, step: int, texts: Mapping[str, str]) -> None: ...

    def hyperparameters(self, values: Mapping[str, Plain]) -> None:
        """What this run was set to; once, before everything else."""

    def close(self, ending: Ending = "finished") -> None:
        """Hand over what is left. Safe to call twice."""


class TensorBoardSink:
    """Event files in ``folder``; points from ``purge_step`` on are dropped from it when it is read."""

    def __init__(self, folder: Path, purge_step: int | None, compared: Sequence[str] = ()) -> None:
        """``compared`` are the scalars that the table of hyperparameters shows beside them."""
        from torch.utils.tensorboard import SummaryWriter  # loads torch, which only runs that train have

        self._folder = folder
        self._compared = compared
        with naming(folder):
            self._board: Any = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=30)

    def scalars(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        with naming(self._folder):
            for name, value in values.items():
                self._board.add_scalar(name, value, step, walltime=at)
            self._board.flush()

    def histograms(self, step: int, values: Mapping[str, Values]) -> None:
        with naming(self._folder):
            for name, samples in values.items():
                self._board.add_histogram(name, samples, step)

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        with naming(self._folder):
            for name, text in texts.items():  # indented, so that no word of a policy is read as Markdown
                self._board.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), step)

    def hyperparameters(self, values: Mapping[str, Plain]) -> None:
        from torch.utils.tensorboard.summary import hparams

        with naming(self._folder):
            for summary in hparams(dict(values), dict.fromkeys(self._compared, 0.0)):
                self._board.file_writer.add_summary(summary)

    def close(self, ending: Ending = "finished") -> None:
        try:
            self._board.close()
        except OSError as error:
            log.warning("%s: %s", self._folder, error.strerror)


class ServiceSink:
    """Hands every call to ``make()``, a sink of a service, in a thread of its own.

    What a service did not take for a passing fault is tried again until it is taken, and what came later waits behind
    it; what it refuses (:func:`refused`) is dropped. Faults are told in the log, each kind once; training goes on.
    """

    def __init__(self, name: str, make: Callable[[], MetricSink]) -> None:
        self._name, self._make = name, make
        self._calls: queue.Queue[Callable[[MetricSink], None] | None] = queue.Queue(QUEUED)
        self._told: set[str] = set()
        self._dropped = 0
        self._ending: Ending = "finished"
        self._closing, self._until = threading.Event(), math.inf
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def scalars(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        # A service that took a call and whose answer was lost gets it again: with one time both are the same point.
        kept, when = dict(values), time.time() if at is None else at
        self._put(lambda sink: sink.scalars(step, kept, when))

    def histograms(self, step: int, values: Mapping[str, Values]) -> None:
        kept = dict(values)
        self._put(lambda sink: sink.histograms(step, kept))

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        kept = dict(texts)
        self._put(lambda sink: sink.texts(step, kept))

    def hyperparameters(self, values: Mapping[str, Plain]) -> None:
        kept = dict(values)
        self._put(lambda sink: sink.hyperparameters(kept))

    def close(self, ending: Ending = "finished") -> None:
        """Waits :data:`CLOSING_SECONDS` at most."""
        if self._closing.is_set():
            return
        self._ending, self._until = ending, time.monotonic() + CLOSING_SECONDS
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._calls.put(None, timeout=CLOSING_SECONDS)
        self._thread.join(max(0.0, self._until - time.monotonic()))
        if self._thread.is_alive():
            self._tell("late", f"did not take everything within {CLOSING_SECONDS:.0f} s; its last steps may lack")
        if self._dropped:
            log.warning("%s: %d calls were dropped; the run's own files have everything", self._name, self._dropped)

    def _put(self, call: Callable[[MetricSink], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._dropped += 1
            self._tell("full", "does not keep up: what comes now is not sent")

    def _work(self) -> None:
        made: list[MetricSink] = []
        self._handed(lambda: made.append(self._make()), "cannot be reached")
        while (call := self._calls.get()) is not None:
            if not made or not self._handed(partial(call, made[0]), "did not take a call"):
                self._dropped += 1
        if made:
            self._handed(lambda: made[0].close(self._ending), "did not close")

    def _handed(self, call: Callable[[], None], what: str) -> bool:
        """Makes ``call``, again and again for as long as a fault may pass; False where it is refused, or where the run
        has ended and the time of :meth:`close` is over."""
        wait, longest = RETRY_SECONDS
        while True:
            try:
                call()
                return True
            except Exception as error:
                no = refused(error)
                after = "and will not" if no else "it is tried again"
                self._tell(f"{what} {type(error).__name__}", f"{what}, {after}: {type(error).__name__}: {error}")
            if no or time.monotonic() + RETRY_SECONDS[0] > self._until:
                return False
            if self._closing.wait(wait):
                time.sleep(RETRY_SECONDS[0])
            wait = min(2 * wait, longest)

    def _tell(self, kind: str, words: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            log.warning("observe.%s: %s", self._name, words)


def refused(error: Exception) -> bool:
    """Whether a service would say the same again: what it was given is wrong, or who asks may not."""
    status = getattr(error, "get_http_status_code", lambda: None)()
    if isinstance(status, int):
        return 400 <= status < 500 and status not in (408, 429)
    return not isinstance(error, OSError)


def wandb_sink(config: WandbConfig, name: str | None, output: Path) -> MetricSink:
    """Weights & Biases. Raises :class:`ConfigError` where its package is not installed."""
    wandb = _package("wandb", "wandb")
    return ServiceSink("wandb", lambda: _Wandb(wandb, config, name, output))


def mlflow_sink(config: MlflowConfig, name: str | None, output: Path) -> MetricSink:
    """MLflow. Raises :class:`ConfigError` where its package is not installed."""
    mlflow = _package("mlflow", "mlflow")
    return ServiceSink("mlflow", lambda: _Mlflow(mlflow, config, name, output))


def _package(module: str, section: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"observe.{section}: the package {module} cannot be imported ({error}); pip install {module}, or remove "
            f"observe.{section} from the configuration"
        ) from None


class _Wandb:
    """``step`` is a figure of its own, the axis of all others: the service's own counter only goes up, and a run that
    goes on from a checkpoint takes steps again."""

    def __init__(self, wandb: Any, config: WandbConfig, name: str | None, output: Path) -> None:
        self._wandb = wandb
        kept = output / "wandb_run"
        chosen = kept.read_text(encoding="utf-8").strip() if kept.is_file() else uuid.uuid4().hex
        # The package's own variable wins, as its users know it.
        mode = os.environ.get("WANDB_MODE") or config.mode

        def begin(mode: str) -> Any:
            return wandb.init(
                project=config.project, entity=config.entity, name=config.name or name, mode=mode, id=chosen,
                resume="allow", dir=str(output), settings=wandb.Settings(console="off"),
            )  # fmt: skip

        try:
            self._run = begin(mode)
        except Exception as error:
            if mode != "online":
                raise
            log.warning(
                "observe.wandb: no run online (%s: %s): it is written to %s, for wandb sync",
                type(error).__name__, " ".join(str(error).split()), output / "wandb",
            )  # fmt: skip
            wandb.teardown()  # or its service still holds the id
            self._run = begin("offline")
        replace_text(kept, chosen + "\n")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        self._run.log({"step": step, **values})

    def histograms(self, step: int, values: Mapping[str, Values]) -> None:
        self._run.log({"step": step} | {name: self._wandb.Histogram(samples) for name, samples in values.items()})

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        tables = {
            name: self._wandb.Table(columns=["step", "text"], data=[[step, text]]) for name, text in texts.items()
        }
        self._run.log({"step": step} | tables)

    def hyperparameters(self, values: Mapping[str, Plain]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def close(self, ending: Ending = "finished") -> None:
        if ending == "left":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if ending == "finished" else 1)


class _Mlflow:
    _LONGEST = 6000
    """Characters of a parameter's value that MLflow takes."""

    def __init__(self, mlflow: Any, config: MlflowConfig, name: str | None, output: Path) -> None:
        self._client = mlflow.MlflowClient(tracking_uri=config.tracking_uri)
        self._entities = importlib.import_module("mlflow.entities")
        kept = output / "mlflow_run"
        self._set = kept.is_file()
        """Whether the hyperparameters are there: MLflow takes each once."""
        if self._set:
            self._run: str = kept.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run, status="RUNNING")
        else:
            found = self._client.get_experiment_by_name(config.experiment)
            local = (config.tracking_uri or "").startswith("sqlite:")
            files = (output.parent / "mlflow_artifacts").resolve().as_uri() if local else None  # else ./mlruns
            of = (
                self._client.create_experiment(config.experiment, artifact_location=files)
                if found is None
                else found.experiment_id
            )
            self._run = self._client.create_run(of, run_name=config.name or name).info.run_id
            replace_text(kept, self._run + "\n")

    def scalars(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        now = int((time.time() if at is None else at) * 1000)
        metrics = [
            self._entities.Metric(_allowed(name), value, now, step)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        self._client.log_batch(self._run, metrics=metrics)

    def histograms(self, step: int, values: Mapping[str, Values]) -> None:
        found = {name: histogram_of(samples) for name, samples in values.items()}
        self._client.log_dict(self._run, found, f"histograms/step_{step:06d}.json")

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self._client.log_text(self._run, text, f"{_allowed(name)}/step_{step:06d}.txt")

    def hyperparameters(self, values: Mapping[str, Plain]) -> None:
        if not self._set:
            for name, value in values.items():
                self._client.log_param(self._run, _allowed(name), str(value)[: self._LONGEST])
            self._set = True

    def close(self, ending: Ending = "finished") -> None:
        self._client.set_terminated(self._run, status={"finished": "FINISHED", "left": "KILLED"}.get(ending, "FAILED"))


def _allowed(name: str) -> str:
    """``name`` in the characters that MLflow takes."""
    return re.sub(r"[^\w\-. /]", "_", name, flags=re.ASCII)


def histogram_of(samples: Values, bins: int = 20) -> dict[str, list[float]]:
    """``edges`` (one more than bins) and ``counts`` of the finite ``samples``."""
    counts, edges = np.histogram(samples[np.isfinite(samples)], bins)
    return {"edges": edges.tolist(), "counts": counts.tolist()}
