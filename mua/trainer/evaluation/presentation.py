"""An evaluation for people: a page of Markdown, a table for the terminal, plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from mua.types import Json

NOTES = """\
Success is the mean over tasks of each task's share of successful episodes. pass^k is the probability that k episodes
of a task all succeed, pass@k that one of k does, both estimated without bias from the episodes there are. Intervals
resample tasks (bootstrap; Wilson's where all tasks agree). Unscored episodes are faults of the infrastructure, not of
the policy: they count nowhere, and the same command plays them again."""
_TURNS, _COUNTS = ("turns", "effective_turns", "time_weighted_reward"), ("tool_calls", "malformed")
# Okabe and Ito's palette: told apart by colour-blind readers and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def markdown(result: Json, pictures: Sequence[str] = ()) -> str:
    """The whole page; ``pictures`` lie beside it."""
    policy, shown = result["policy"], _parts(result)
    who = (
        f"{policy['model']} at {policy['base_url']}"
        if policy["kind"] == "endpoint"
        else f"{policy['path']} (weights {policy['weights']})"
    )
    success = [
        [n, p["tasks"], p["episodes"], p["unscored"], interval_text(p["success"]), interval_text(p.get("reward"))]
        for n, p in shown
    ]
    if len(result["domains"]) > 1 and result["domain_mean"] is not None:
        success.append(["mean of domains", "", "", "", f"{result['domain_mean']:.3f}", ""])
    outcomes = sorted(result["outcomes"])
    scored = [(name, part) for name, part in shown if part["success"] is not None]
    turns = [[name, *[part[n] for n in _TURNS], *[part["counts"][n] for n in _COUNTS]] for name, part in scored]
    tokens = [*result.get("tokens", {}), *result.get("usage", {})]
    read = [[name, *[{**part["tokens"], **part["usage"]}.get(n, 0.0) for n in tokens]] for name, part in scored]
    costs = [[name, f"{value:.4g}"] for name, value in {**result.get("cost", {}), **result["roles"]}.items()]
    errors = [[error[key] for key in ("domain", "task", "outcome", "error")] for error in result["errors"]]
    blocks = [
        f"# Evaluation: {result['name']}",
        f"- policy: {who}\n"
        f"- split: {result['split']}, {result['samples']} episodes a task, temperature {result['temperature']:g}\n"
        f"- setting: {result['setting_digest']}\n"
        f"- intervals hold the true value with {result['level']:.0%} confidence",
        "## Success",
        markdown_table(("", "tasks", "episodes", "unscored", "success", "reward"), success),
        *_pass_tables(shown),
        *[f"![{name}]({name})" for name in pictures],
        *_label_tables(result),
        "## Episodes",
        markdown_table(("", "turns", "effective turns", "time-weighted reward", "tool calls", "malformed"), turns),
        "### Outcomes",
        markdown_table(("", *outcomes), [[n, *[p["outcomes"].get(one, 0) for one in outcomes]] for n, p in shown]),
        *_titled("### Tokens of an episode", ("", *(name.replace("_", " ") for name in tokens)), read),
        *_titled("### Users, judges and cost", ("", "value"), costs),
        *_titled("### Unscored episodes (the first ones)", ("domain", "task", "outcome", "error"), errors),
        "## How to read this",
        NOTES,
    ]
    return "\n\n".join(blocks) + "\n"


def console_table(result: Json) -> Table:
    """Success by domain, or by kind where there is one domain alone."""
    title, level = f"success on {result['split']}", f"{result['level']:.0%} interval".replace("%", " %")
    several = len(result["domains"]) > 1
    shown = Table("domain" if several else "kind", "episodes", "success", level, title=title)
    rows = [(name, part["success"]) for name, part in result["domains"].items()]
    for name, interval in [*(rows if several else result["kinds"].items()), ("all", result["success"])]:
        if interval is not None:
            bounds = f"{interval['low']:.3f} to {interval['high']:.3f}"
            shown.add_row(name, str(interval["episodes"]), f"{interval['mean']:.3f}", bounds)
    return shown


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table, all but the first column to the right."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
        return " ".join(str(value).replace("|", "\\|").split())

    lines = [f"| {' | '.join(head)} |", f"|{'---|' + '--:|' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(cell, row))} |" for row in rows)])


def interval_text(interval: Json | None) -> str:
    """``0.512 (0.430 to 0.590)``."""
    if interval is None:
        return "-"
    return f"{interval['mean']:.3f} ({interval['low']:.3f} to {interval['high']:.3f})"


def draw(result: Json, folder: Path) -> list[Path]:
    """Write ``success.png`` and, with several episodes a task, ``passes.png``; their paths."""
    pictures = [folder / "success.png"]
    _draw_success(result, pictures[0])
    if len(result["pass_hat"]) > 1:
        pictures.append(folder / "passes.png")
        _draw_passes(result, pictures[1])
    return pictures


def new_figure(height: float) -> tuple[Any, Any]:
    """A figure of 8 by ``height`` inches and its axes, without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _parts(result: Json) -> list[tuple[str, Json]]:
    """The domains and, where there are several, all together."""
    domains = list(result["domains"].items())
    return [*domains, ("all", result)] if len(domains) > 1 else domains


def _titled(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A table under its title, if it has rows and columns."""
    return [title, markdown_table(head, rows)] if rows and len(head) > 1 else []


def _pass_tables(shown: Sequence[tuple[str, Json]]) -> list[str]:
    ks = sorted({int(k) for _, part in shown for k in part.get("pass_hat", {})})
    if ks[-1:] == [1]:
        return []
    blocks = []
    for key, sign in (("pass_hat", "^"), ("pass_at", "@")):
        found = [(name, part.get(key, {})) for name, part in shown]
        rows = [[name, *[means[str(k)]["mean"] if str(k) in means else "-" for k in ks]] for name, means in found]
        blocks += [f"### pass{sign}k", markdown_table(("", *[f"pass{sign}{k}" for k in ks]), rows)]
    return blocks


def _label_tables(result: Json) -> list[str]:
    blocks = []
    for key, label in (("difficulties", "difficulty"), ("kinds", "kind")):
        rows = [
            [name, value, interval["episodes"] if interval else 0, interval_text(interval)]
            for name, part in result["domains"].items()
            for value, interval in part[key].items()
            if value != "-"
        ]
        blocks += _titled(f"## By {label}", ("domain", label, "episodes", "success"), rows)
    return blocks


def _draw_success(result: Json, png: Path) -> None:
    rows = [(name, part["success"]) for name, part in result["domains"].items()]
    rows += [(label, part) for label, part in result["difficulties"].items() if label != "-"]
    rows = [(name, part) for name, part in [*rows, ("all", result["success"])] if part is not None]
    figure, axes = new_figure(1.2 + 0.34 * len(rows))
    for place, (name, part) in enumerate(reversed(rows)):
        colour = COLOURS[6] if name == "all" else COLOURS[0] if name in result["domains"] else COLOURS[2]
        mean = part["mean"]
        bounds = [[mean - part["low"]], [part["high"] - mean]]
        axes.barh(place, mean, xerr=bounds, color=colour, alpha=0.85, height=0.6, capsize=3, ecolor="#444444")
    axes.set_yticks(range(len(rows)), [name for name, _ in reversed(rows)])
    axes.set_xlim(0, 1)
    axes.set_xlabel(f"success, {result['level']:.0%} interval over tasks")
    axes.grid(axis="x", alpha=0.25)
    axes.set_title(f"{result['name']}: success on {result['split']}", loc="left")
    figure.savefig(png)


def _draw_passes(result: Json, png: Path) -> None:
    figure, axes = new_figure(4.5)
    for index, (name, part) in enumerate(_parts(result)):
        colour = COLOURS[index % len(COLOURS)]
        for key, style, sign in (("pass_hat", "-o", "^"), ("pass_at", "--s", "@")):
            points = {int(k): value for k, value in part.get(key, {}).items()}
            means, low, high = ([value[n] for value in points.values()] for n in ("mean", "low", "high"))
            axes.plot(list(points), means, style, color=colour, markersize=4, label=f"{name}, pass{sign}k")
            axes.fill_between(list(points), low, high, color=colour, alpha=0.08)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("k")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(f"{result['name']}: all of k succeed (pass^k), one of k does (pass@k)", loc="left")
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    figure.savefig(png)
