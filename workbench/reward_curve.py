"""The reward curve of one or several runs as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mua.observe.metrics_log import read_metrics
from mua.trainer.evaluation.report import COLOURS, new_figure
from mua.utils.errors import MuaError


def plot_reward_curve(
    metrics_files: Mapping[str, Path],
    png: Path,
    *,
    metric: str = "rollout/reward/mean",
    baseline: float | None = None,
    baseline_label: str = "after SFT",
    title: str = "Mean reward of the training rollouts",
    window: int = 5,
) -> Path:
    """Draw ``metric`` over steps, one line for each labeled ``metrics.jsonl``, and give the path of the picture.

    The faint line is the value of each step, the strong one its mean over the last ``window`` steps (fewer at the
    start). ``baseline`` is drawn as a dashed level. Raises :class:`MuaError` if a file never logged ``metric``.
    """
    figure, axes = new_figure(4.5)
    for index, (label, path) in enumerate(metrics_files.items()):
        color = COLOURS[index % len(COLOURS)]
        steps, values = _series(path, metric)
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
        axes.plot(steps, _trailing_mean(values, window), color=color, linewidth=2, label=label)
    if baseline is not None:
        axes.axhline(baseline, color="#444444", linestyle="--", linewidth=1.2, label=baseline_label)
    axes.set_title(title, loc="left")
    axes.set_xlabel("training step")
    axes.set_ylabel(metric)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="best")
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png)
    return png


def _series(path: Path, metric: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    points = [(line["step"], line[metric]) for line in read_metrics(path) if line.get(metric) is not None]
    if not points:
        raise MuaError(f"{path}: no line holds {metric}, so there is nothing to draw")
    steps, values = np.asarray(points, dtype=np.float64).T
    return steps, values


def _trailing_mean(values: npt.NDArray[np.float64], window: int) -> npt.NDArray[np.float64]:
    return np.asarray([values[max(0, end - window) : end].mean() for end in range(1, len(values) + 1)])
