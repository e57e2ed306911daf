"""Where a run's metrics go besides its own files: TensorBoard, Weights & Biases, MLflow.

All are given the same: scalars, histograms, texts, hyperparameters. TensorBoard writes files. The two services may be
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
Kind: TypeAlias = Literal["scalars", "histograms", "texts", "hyperparameters"]
QUEUED = 256
"""Calls that wait for a service; more are dropped."""
CLOSING_SECONDS = 60.0
"""How long the end of a run waits for a service."""
RETRY_SECONDS = (1.0, 60.0)
"""Between two tries of what a service did not take: at first, at most."""
Ending: TypeAlias = Literal["finished", "left", "failed"]
"""How a run ends: at its last step; asked to, to be continued; by an error."""
LONGEST_PARAMETER = 6000
"""Characters of a parameter's value that MLflow takes."""


class MetricSink(Protocol):
    """Takes what a run logs. Calls come from one thread, in the order of steps."""

    def write(self, kind: Kind, step: int, values: Mapping[str, Any], at: float | None = None) -> None:
        """What was logged at ``step``, by name; ``at`` seconds since 1970, now by default.

        Scalars may be infinite or no number; a histogram is samples, ``[N]`` with N above 0; hyperparameters come once,
        before everything else.
        """

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
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # texts of episodes stand in it
            self._board: Any = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=30)

    def write(self, kind: Kind, step: int, values: Mapping[str, Any], at: float | None = None) -> None:
        from torch.utils.tensorboard.summary import hparams

        with naming(self._folder):
            if kind == "hyperparameters":
                for summary in hparams(dict(values), dict.fromkeys(self._compared, 0.0)):
                    self._board.file_writer.add_summary(summary)
                return
            for name, value in values.items():
                if kind == "scalars":
                    self._board.add_scalar(name, value, step, walltime=at)
                elif kind == "histograms":
                    self._board.add_histogram(name, value, step)
                else:  # indented, so that no word of a policy is read as Markdown
                    self._board.add_text(name, "\n".join(f"    {line}" for line in value.splitlines()), step)
            self._board.flush()

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
        self._calls: queue.Queue[tuple[Kind, int, Mapping[str, Any], float] | None] = queue.Queue(QUEUED)
        self._told: set[str] = set()
        self._dropped = 0
        self._ending: Ending = "finished"
        self._closing, self._until = threading.Event(), math.inf
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def write(self, kind: Kind, step: int, values: Mapping[str, Any], at: float | None = None) -> None:
        # A service that took a call and whose answer was lost gets it again: with one time both are the same point.
        try:
            self._calls.put_nowait((kind, step, dict(values), time.time() if at is None else at))
        except queue.Full:
            self._dropped += 1
            self._tell("full", "does not keep up: what comes now is not sent")

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

    def _work(self) -> None:
        made: list[MetricSink] = []
        self._hand_over(lambda: made.append(self._make()), "cannot be reached")
        while (call := self._calls.get()) is not None:
            if not made or not self._hand_over(partial(made[0].write, *call), "did not take a call"):
                self._dropped += 1
        if made:
            self._hand_over(lambda: made[0].close(self._ending), "did not close")

    def _hand_over(self, call: Callable[[], None], what: str) -> bool:
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


def service_sink(config: WandbConfig | MlflowConfig, name: str | None, output: Path, run: str) -> MetricSink:
    """Weights & Biases or MLflow, where a run with the id ``run`` goes on or begins.

    Raises :class:`ConfigError` where its package is not installed.
    """
    module, kind = ("wandb", _Wandb) if isinstance(config, WandbConfig) else ("mlflow", _Mlflow)
    try:
        package = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"observe.{module}: the package {module} cannot be imported ({error}); pip install {module}, or remove "
            f"observe.{module} from the configuration"
        ) from None
    return ServiceSink(module, lambda: kind(package, config, name, output, run))


class _Wandb:
    """``step`` is a figure of its own, the axis of all others: the service's own counter only goes up, and a run that
    goes on from a checkpoint takes steps again."""

    def __init__(self, wandb: Any, config: Any, name: str | None, output: Path, run: str) -> None:
        self._wandb = wandb
        (output / "wandb").mkdir(mode=0o700, exist_ok=True)
        # The package's own variable wins, as its users know it.
        mode = os.environ.get("WANDB_MODE") or config.mode

        def begin(mode: str) -> Any:
            return wandb.init(
                project=config.project, entity=config.entity, name=config.name or name, mode=mode, id=run,
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
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, kind: Kind, step: int, values: Mapping[str, Any], at: float | None = None) -> None:
        if kind == "hyperparameters":
            self._run.config.update(dict(values), allow_val_change=True)
            return
        if kind == "histograms":
            values = {name: self._wandb.Histogram(samples) for name, samples in values.items()}
        elif kind == "texts":
            columns = ["step", "text"]
            values = {n: self._wandb.Table(columns=columns, data=[[step, text]]) for n, text in values.items()}
        self._run.log({"step": step, **values})

    def close(self, ending: Ending = "finished") -> None:
        if ending == "left":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if ending == "finished" else 1)


class _Mlflow:
    def __init__(self, mlflow: Any, config: Any, name: str | None, output: Path, run: str) -> None:
        self._client = mlflow.MlflowClient(tracking_uri=config.tracking_uri)
        self._entities = importlib.import_module("mlflow.entities")
        kept = output / "mlflow_run"  # its own id of ours; of a folder that was copied the second word is another run
        known = kept.read_text(encoding="utf-8").split() if kept.is_file() else []
        self._set = known[1:] in ([], [run]) and bool(known)
        """Whether the hyperparameters are there: MLflow takes each once."""
        if self._set:
            self._run: str = known[0]
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
            replace_text(kept, f"{self._run} {run}\n")

    def write(self, kind: Kind, step: int, values: Mapping[str, Any], at: float | None = None) -> None:
        allowed = {re.sub(r"[^\w\-. /]", "_", name, flags=re.ASCII): value for name, value in values.items()}
        if kind == "scalars":
            now, make = int((time.time() if at is None else at) * 1000), self._entities.Metric
            finite = [make(name, value, now, step) for name, value in allowed.items() if math.isfinite(value)]
            self._client.log_batch(self._run, metrics=finite)
        elif kind == "histograms":
            found = {name: histogram_of(samples) for name, samples in values.items()}
            self._client.log_dict(self._run, found, f"histograms/step_{step:06d}.json")
        elif kind == "texts":
            for name, text in allowed.items():
                self._client.log_text(self._run, text, f"{name}/step_{step:06d}.txt")
        elif not self._set:
            for name, value in allowed.items():
                self._client.log_param(self._run, name, str(value)[:LONGEST_PARAMETER])
            self._set = True

    def close(self, ending: Ending = "finished") -> None:
        self._client.set_terminated(self._run, status={"finished": "FINISHED", "left": "KILLED"}.get(ending, "FAILED"))


def histogram_of(samples: Values, bins: int = 20) -> dict[str, list[float]]:
    """``edges`` (one more than bins) and ``counts`` of the finite ``samples``."""
    counts, edges = np.histogram(samples[np.isfinite(samples)], bins)
    return {"edges": edges.tolist(), "counts": counts.tolist()}
