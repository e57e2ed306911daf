"""An evaluation in pictures: success with its intervals, and how it falls and rises with k."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mua.types import Json

# Okabe and Ito's palette: told apart by colour-blind readers and in print.
_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]


def draw(result: Json, folder: Path) -> list[Path]:
    """Write ``success.png`` and, with several episodes a task, ``passes.png``; their paths."""
    return [_bars(result, folder / "success.png"), *_curves(result, folder / "passes.png")]


def _bars(result: Json, png: Path) -> Path:
    rows = [(name, part["success"]) for name, part in result["domains"].items()]
    rows += [(label, part) for label, part in result["difficulties"].items() if label != "-"]
    rows = [(name, part) for name, part in [*rows, ("all", result["success"])] if part is not None]
    figure, axes = _figure(1.2 + 0.34 * len(rows))
    for place, (name, part) in enumerate(reversed(rows)):
        colour = _COLOURS[6] if name == "all" else _COLOURS[0] if name in result["domains"] else _COLOURS[2]
        mean = part["mean"]
        bounds = [[mean - part["low"]], [part["high"] - mean]]
        axes.barh(place, mean, xerr=bounds, color=colour, alpha=0.85, height=0.6, capsize=3, ecolor="#444444")
    axes.set_yticks(range(len(rows)), [name for name, _ in reversed(rows)])
    axes.set_xlim(0, 1)
    axes.set_xlabel(f"success, {result['level']:.0%} interval over tasks")
    axes.grid(axis="x", alpha=0.25)
    axes.set_title(f"{result['name']}: success on {result['split']}", loc="left")
    figure.savefig(png)
    return png


def _curves(result: Json, png: Path) -> list[Path]:
    if len(result["pass_hat"]) < 2:
        return []
    figure, axes = _figure(4.5)
    lines = list(result["domains"].items())
    for index, (name, part) in enumerate([*lines, ("all", result)] if len(lines) > 1 else lines):
        colour = _COLOURS[index % len(_COLOURS)]
        for key, style, sign in (("pass_hat", "-o", "^"), ("pass_at", "--s", "@")):
            points = {int(k): value for k, value in part.get(key, {}).items()}
            means = [value["mean"] for value in points.values()]
            axes.plot(list(points), means, style, color=colour, markersize=4, label=f"{name}, pass{sign}k")
            low, high = ([value[bound] for value in points.values()] for bound in ("low", "high"))
            axes.fill_between(list(points), low, high, color=colour, alpha=0.08)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("k")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(f"{result['name']}: all of k succeed (pass^k), one of k does (pass@k)", loc="left")
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    figure.savefig(png)
    return [png]


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
