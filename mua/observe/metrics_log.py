"""What a run logs, for people (TensorBoard) and programs (JSON lines): scalars, samples, texts, hyperparameters."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import psutil
import yaml

from mua.observe.catalog import STRICT, unknown
from mua.observe.metric_sinks import Ending, MetricSink, Plain, TensorBoardSink, Values, histogram_of
from mua.types import Trajectory
from mua.utils.atomic import replace_text
from mua.utils.errors import MuaError, Preempted
from mua.utils.files import PRIVATE, LineFile, naming
from mua.utils.strict_json import JsonError, is_number, open_file, read_json

if TYPE_CHECKING:
    from mua.config.schema import ExperimentConfig

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
DETAILS_FILE = "details.jsonl"
COMPARED = ("rollout/success", "rollout/reward/mean", "eval/validation_success", "train/loss")
"""What TensorBoard's table of hyperparameters shows of a run."""
EVALUATION = "eval/"
"""How the names of held-out figures begin. They are of the policy after so many steps, and stand at that number on the
axis of steps: 0 is before training."""
TENSORBOARD_FOLDER = "tensorboard"
GIB = float(1 << 30)
LONGEST_TEXT = 8000
"""Characters of an episode's text; the middle of a longer one is left out."""
_LONGEST_MESSAGE = 2000
ALWAYS = (
    "seed", "model.path", "model.dtype", "optimizer.learning_rate", "optimizer.schedule", "algorithm.advantage",
    "algorithm.loss", "algorithm.group_size", "algorithm.groups_per_step", "algorithm.minibatches", "algorithm.epochs",
    "algorithm.kl_coefficient", "rollout.temperature", "trainer.steps", "trainer.max_staleness",
)  # fmt: skip
"""Told whatever they are; of the rest what differs from its default."""
_LONGEST_VALUE = 200


class MetricsWriter:
    """Writes ``<output>/metrics.jsonl`` (one line a :meth:`log`), ``<output>/evaluations.jsonl`` (one line a policy
    that was evaluated), ``<output>/details.jsonl`` (histograms, texts, hyperparameters) and, by choice,
    ``<output>/tensorboard``; and hands all of it to ``others``.

    A run passes the first step it will take as ``resume_step``: lines at or after it, written by a run that died, are
    dropped from the files, evaluations of policies of later steps too, and TensorBoard is told to drop its points, so
    that curves have no second strand. 0 starts the curves anew; None keeps all that is there. Values that are not
    finite are written as null (JSON has none).

    Every name must be in :mod:`mua.observe.catalog`.
    """

    def __init__(
        self, output: Path, tensorboard: bool, resume_step: int | None = None, others: Sequence[MetricSink] = ()
    ) -> None:
        output.mkdir(parents=True, exist_ok=True)
        path = output / METRICS_FILE
        drop_from(path, resume_step)
        _drop_details(output / DETAILS_FILE, resume_step)
        self._file, self._details = LineFile(path), LineFile(output / DETAILS_FILE)
        self._evaluations_file = output / EVALUATIONS_FILE
        if resume_step == 0:
            self._evaluations_file.unlink(missing_ok=True)
        self._evaluations: dict[int, dict[str, float | None]] = {}
        for line in read_metrics(self._evaluations_file) if self._evaluations_file.exists() else ():
            if resume_step is None or line["step"] <= resume_step:
                self._evaluations[line["step"]] = {name: value for name, value in line.items() if name != "step"}
        self._sinks: list[MetricSink] = [*others]
        if tensorboard:
            board = TensorBoardSink(output / TENSORBOARD_FOLDER, resume_step, COMPARED)
            self._sinks.insert(0, board)
            for step, values in self._evaluations.items():  # of the policy that goes on: purged with its next step
                if resume_step is not None and step >= resume_step:
                    known = {name: math.nan if v is None else v for name, v in values.items()}
                    board.write("scalars", step, known)
        self._told: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record ``metrics`` at ``step``; flushed, so that a crash afterwards loses nothing.

        Raises :class:`DiskError`; a line is there whole or not at all.
        """
        values = {name: float(value) for name, value in metrics.items()}
        self._check(values)
        self._file.write(json.dumps({"step": step, **_finite(values)}))
        for sink in self._sinks:
            sink.write("scalars", step, values)

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record held-out figures of the policy after ``step`` steps; what the file has of it is replaced.

        Raises :class:`DiskError`; the file has them or is as it was.
        """
        values = {name: float(value) for name, value in metrics.items()}
        self._check(values)
        self._evaluations[step] = self._evaluations.get(step, {}) | _finite(values)
        lines = (json.dumps({"step": at} | self._evaluations[at]) + "\n" for at in sorted(self._evaluations))
        with naming(self._evaluations_file):
            replace_text(self._evaluations_file, "".join(lines))
        for sink in self._sinks:
            sink.write("scalars", step, values)

    def log_details(self, step: int, histograms: Mapping[str, Values], texts: Mapping[str, str]) -> None:
        """Record samples by name, each ``[N]``, and texts by name at ``step``. Raises :class:`DiskError`."""
        histograms = {name: values for name, values in histograms.items() if np.isfinite(values).any()}
        self._check([*histograms, *texts])
        counted = {name: histogram_of(values) for name, values in histograms.items()}
        self._details.write(json.dumps({"step": step, "histograms": counted, "texts": dict(texts)}))
        for sink in self._sinks:
            if histograms:
                sink.write("histograms", step, histograms)
            if texts:
                sink.write("texts", step, texts)

    def log_hyperparameters(self, values: Mapping[str, Plain]) -> None:
        """Record what the run is set to, from here on. Raises :class:`DiskError`."""
        self._details.write(json.dumps({"hyperparameters": dict(values)}))
        for sink in self._sinks:
            sink.write("hyperparameters", 0, values)

    def _check(self, names: Iterable[str]) -> None:
        """Raises ``LookupError`` for a name that the catalog lacks where tests ask for it; else says it once."""
        if not (lacking := [name for name in unknown(names) if name not in self._told]):
            return
        if os.environ.get(STRICT) == "1":
            raise LookupError(f"mua/observe/catalog.py lacks the metrics {', '.join(lacking)}")
        self._told.update(lacking)
        log.warning("metrics that docs/metrics.md does not explain: %s", ", ".join(lacking))

    def close(self, ending: Ending = "finished") -> None:
        """Every step is on disk already, so that a disk which is full now costs nothing but a line in the log."""
        self._file.close()
        self._details.close()
        for sink in self._sinks:
            sink.close(ending)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(ending_of(error))


def ending_of(error: BaseException | None) -> Ending:
    """How a run ends that is left with ``error``."""
    if error is None:
        return "finished"
    return "left" if isinstance(error, (Preempted, KeyboardInterrupt)) else "failed"


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``; an unfinished last line, of a run that was killed or writes now, is skipped.

    Raises :class:`MuaError` naming file and line for any other that holds no metrics of a step.
    """
    with open_file(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # what is written meanwhile is the rest of this line, not a line
            wrong = None
            try:
                found = read_json(line, strict=False)
            except JsonError as error:
                wrong = str(error)
            else:
                if not isinstance(found, dict) or type(found.get("step")) is not int:
                    wrong = "no step"
                elif not all(value is None or is_number(value) for value in found.values()):
                    wrong = "a value is no number"
            if wrong is not None:
                raise MuaError(f"{path}:{number}: not a line of metrics: {wrong}; remove it")
            yield found


def drop_from(path: Path, step: int | None) -> None:
    """Rewrite a ``metrics.jsonl`` without the lines at or after ``step``, and without an unfinished one, atomically."""
    if not path.exists():
        return
    kept = [line for line in read_metrics(path) if step is None or line["step"] < step]
    replace_text(path, "".join(json.dumps(line) + "\n" for line in kept))


def _drop_details(path: Path, step: int | None) -> None:
    """As :func:`drop_from`, of ``details.jsonl``; hyperparameters stay. A line that cannot be read goes."""
    if step is None or not path.exists():
        return
    kept = []
    with open_file(path) as file:
        for line in file:
            try:
                found = read_json(line, strict=False)
            except JsonError:
                continue
            at = found.get("step", -1) if isinstance(found, dict) else step
            if line.endswith(b"\n") and type(at) is int and at < step:
                kept.append(line.decode())
    replace_text(path, "".join(kept) if step else "", mode=PRIVATE)


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def evaluation_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """The held-out figures of ``metrics``."""
    return {name: value for name, value in metrics.items() if name.startswith(EVALUATION)}


def without_evaluation(metrics: Mapping[str, float]) -> dict[str, float]:
    """``metrics`` without held-out figures, which are of the policy after the step."""
    return {name: value for name, value in metrics.items() if not name.startswith(EVALUATION)}


def memory_metrics() -> dict[str, float]:
    """Memory in GiB: resident set sizes, and CUDA's allocator where torch runs on a GPU.

    ``memory/children_gib`` sums the resident sets of all descendants (engines, trainer ranks); pages that
    processes share are counted once for each of them.
    """
    me = psutil.Process()
    metrics = {"memory/process_gib": _resident(me) / GIB}
    metrics["memory/children_gib"] = sum(map(_resident, me.children(recursive=True))) / GIB
    torch = sys.modules.get("torch")  # whoever uses a GPU has loaded it; metrics alone must not
    if torch is not None and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        metrics |= {
            "memory/cuda_allocated_gib": torch.cuda.memory_allocated() / GIB,
            "memory/cuda_peak_gib": torch.cuda.max_memory_allocated() / GIB,
            "memory/cuda_device_used_gib": (total - free) / GIB,
        }
    return metrics


def process_memory() -> dict[str, float]:
    """Resident set of this process in GiB."""
    return {"resident_gib": _resident(psutil.Process()) / GIB}


def _resident(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):  # a child may end between being listed and being asked
        return int(process.memory_info().rss)
    return 0


# ---- what a step's episodes leave beside scalars: histograms, and two of them as texts


def histograms_of(trajectories: Iterable[Trajectory]) -> dict[str, Values]:
    """Samples of the scored ones, by name; none where there are none."""
    scored = [t for t in trajectories if t.scored]
    if not scored:
        return {}
    return {
        "rollout/reward/histogram": np.array([t.reward for t in scored], np.float64),
        "rollout/response_len/histogram": np.array([t.sampled_tokens for t in scored], np.float64),
        "rollout/turns/histogram": np.array([len(t.turn_rewards) for t in scored], np.float64),
    }


def texts_of(trajectories: Sequence[Trajectory]) -> dict[str, str]:
    """The first scored episode that succeeded, and the first that did not."""
    found: dict[str, str] = {}
    for trajectory in trajectories:
        name = f"rollout/episodes/{'solved' if trajectory.success else 'failed'}"
        if trajectory.scored and name not in found:
            found[name] = text_of_episode(trajectory)
    return found


def due(step: int, steps: int, texts: int) -> bool:
    """Whether the texts of ``step``, of so many ``steps``, are among the ``texts`` that a run leaves."""
    return texts > 0 and step % math.ceil(steps / texts) == 0


def text_of_episode(trajectory: Trajectory) -> str:
    """Verdict and conversation in plain text, within :data:`LONGEST_TEXT` characters."""
    verdict = "success" if trajectory.success else "no success"
    where = f" in {trajectory.domain}" if trajectory.domain else ""
    head = f"task {trajectory.task_id}{where}: {trajectory.outcome.value}, {verdict}, reward {trajectory.reward:g}"
    lines = [head]
    for message in trajectory.messages:
        who, content = str(message.get("role", "?")), message.get("content")
        if who != "system":  # the same in every episode of a domain
            said = content if isinstance(content, str) else str(content or "")
            lines.append(f"{who}: {_cut(said, _LONGEST_MESSAGE)}")
            for call in message.get("tool_calls") or ():
                lines.append(f"{who} calls: {_cut(str(call.get('function', call)), _LONGEST_MESSAGE)}")
    return _cut("\n\n".join(lines), LONGEST_TEXT)


def _cut(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    half = longest // 2 - 20
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


# ---- what a run was set to, flat: for tables that compare runs


def hyperparameters(config: ExperimentConfig) -> dict[str, str | int | float | bool]:
    """By key, secrets masked; lists and what is longer than a table's cell as short text, null as ``null``."""
    from mua.config.load import dump_config  # loads torch, which metrics alone do not need

    masked = dict(_flat(yaml.safe_load(dump_config(config))))
    changed = {key for key, _ in _flat(config.model_dump(mode="json", exclude_defaults=True))}
    found: dict[str, str | int | float | bool] = {}
    for key, value in masked.items():
        if key in changed or key in ALWAYS:
            text = "null" if value is None else str(value)
            short = text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
            found[key] = value if isinstance(value, bool | int | float) else short
    return found


def _flat(tree: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from _flat(value, f"{above}.{name}" if above else str(name))
    else:
        yield above, tree
