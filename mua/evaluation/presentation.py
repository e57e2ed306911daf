"""An evaluation for people: a page of Markdown, a table for the terminal, plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from mua.types import Json

# Okabe and Ito's palette: told apart by colour-blind readers and in print.
_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
_TURNS = ("", "turns", "effective turns", "time-weighted reward", "tool calls", "malformed")
NOTES = """\
Success is the mean over tasks of each task's share of successful episodes. pass^k is the probability that k episodes
of a task all succeed, pass@k that one of k does, both estimated without bias from the episodes there are. Intervals
resample tasks (bootstrap; Wilson's where all tasks agree). Unscored episodes are faults of the infrastructure, not of
the policy: they count nowhere, and the same command plays them again."""


def markdown(result: Json, pictures: Sequence[str] = ()) -> str:
    """The whole page; ``pictures`` lie beside it."""
    blocks = [
        f"# Evaluation: {result['name']}",
        "\n".join(_facts(result)),
        "## Success",
        markdown_table(("", "tasks", "episodes", "unscored", "success", "reward"), _success_rows(result)),
        *_pass_tables(result),
        *[f"![{name}]({name})" for name in pictures],
        *_label_tables(result),
        "## Episodes",
        markdown_table(
            ("", "turns", "effective turns", "time-weighted reward", "tool calls", "malformed"), _turn_rows(result)
        ),
        "### Outcomes",
        _outcomes(result),
        *_tokens(result),
        *_costs(result),
        *_errors(result),
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
    lines = [f"| {' | '.join(head)} |", f"|{'---|' + '--:|' * (len(head) - 1)}"]
    lines += [f"| {' | '.join(_cell(value) for value in row)} |" for row in rows]
    return "\n".join(lines)


def interval_text(interval: Json | None) -> str:
    """``0.512 (0.430 to 0.590)``."""
    if interval is None:
        return "-"
    return f"{interval['mean']:.3f} ({interval['low']:.3f} to {interval['high']:.3f})"


def parts(result: Json) -> list[tuple[str, Json]]:
    """The domains and, where there are several, all together."""
    domains = list(result["domains"].items())
    return [*domains, ("all", result)] if len(domains) > 1 else domains


def _facts(result: Json) -> list[str]:
    policy = result["policy"]
    who = (
        f"{policy['model']} at {policy['base_url']}"
        if policy["kind"] == "endpoint"
        else f"{policy['path']} (weights {policy['weights']})"
    )
    return [
        f"- policy: {who}",
        f"- split: {result['split']}, {result['samples']} episodes a task, temperature {result['temperature']:g}",
        f"- setting: {result['setting_digest']}",
        f"- intervals hold the true value with {result['level']:.0%} confidence",
    ]


def _success_rows(result: Json) -> list[list[Any]]:
    rows = [
        [n, p["tasks"], p["episodes"], p["unscored"], interval_text(p["success"]), interval_text(p.get("reward"))]
        for n, p in parts(result)
    ]
    if len(result["domains"]) > 1 and result["domain_mean"] is not None:
        rows.append(["mean of domains", "", "", "", f"{result['domain_mean']:.3f}", ""])
    return rows


def _pass_tables(result: Json) -> list[str]:
    ks = sorted({int(k) for _, part in parts(result) for k in part.get("pass_hat", {})})
    if ks[-1:] == [1]:
        return []
    blocks = []
    for key, sign in (("pass_hat", "^"), ("pass_at", "@")):
        rows = [[name, *[_at(part.get(key, {}), k) for k in ks]] for name, part in parts(result)]
        blocks += [f"### pass{sign}k", markdown_table(("", *[f"pass{sign}{k}" for k in ks]), rows)]
    return blocks


def _at(passes: Json, k: int) -> str:
    found = passes.get(str(k))
    return "-" if found is None else f"{found['mean']:.3f}"


def _label_tables(result: Json) -> list[str]:
    blocks = []
    for key, label in (("difficulties", "difficulty"), ("kinds", "kind")):
        rows = [
            [name, value, interval["episodes"] if interval else 0, interval_text(interval)]
            for name, part in result["domains"].items()
            for value, interval in part[key].items()
            if value != "-"
        ]
        if rows:
            blocks += [f"## By {label}", markdown_table(("domain", label, "episodes", "success"), rows)]
    return blocks


def _turn_rows(result: Json) -> list[list[Any]]:
    names = ("turns", "effective_turns", "time_weighted_reward")
    counts = ("tool_calls", "malformed")
    judged = [(name, part) for name, part in parts(result) if part["success"] is not None]
    return [[name, *[part[n] for n in names], *[part["counts"][n] for n in counts]] for name, part in judged]


def _outcomes(result: Json) -> str:
    names = sorted(result["outcomes"])
    return markdown_table(
        ("", *names), [[n, *[p["outcomes"].get(name, 0) for name in names]] for n, p in parts(result)]
    )


def _tokens(result: Json) -> list[str]:
    names = [*result.get("tokens", {}), *result.get("usage", {})]
    if not names:
        return []
    head = [name.replace("_", " ") for name in names]
    rows = [
        [n, *[({**p["tokens"], **p["usage"]}).get(name, 0.0) for name in names]]
        for n, p in parts(result)
        if p["success"] is not None
    ]
    return ["### Tokens of an episode", markdown_table(("", *head), rows)]


def _costs(result: Json) -> list[str]:
    rows = [[name, f"{value:.4g}"] for name, value in {**result.get("cost", {}), **result["roles"]}.items()]
    return ["### Users, judges and cost", markdown_table(("", "value"), rows)] if rows else []


def _errors(result: Json) -> list[str]:
    if not result["errors"]:
        return []
    rows = [[error["domain"], error["task"], error["outcome"], error["error"]] for error in result["errors"]]
    return ["### Unscored episodes (the first ones)", markdown_table(("domain", "task", "outcome", "error"), rows)]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
    return " ".join(str(value).replace("|", "\\|").split())


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
