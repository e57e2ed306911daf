"""The report of an evaluation: numbers of tasks, domains, difficulties and kinds; a page, a table and plots.

Every mean is a mean over tasks of the task's mean over its scored episodes. Unscored episodes (the infrastructure's
faults) enter no number but their own count: they are no failures of the policy.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from mua.config.schema import EvaluationConfig
from mua.environment.protocol import Task
from mua.trainer.evaluation.estimators import (
    MAX_K,
    Interval,
    bootstrap,
    effective_turns,
    pass_at,
    pass_hat,
    time_weighted_reward,
)
from mua.trainer.evaluation.store import task_digest
from mua.types import Json, Provenance, Trajectory
from mua.utils.strict_json import pictured, printable

_SEED = 20
"""Of every bootstrap, so that the same episodes give the same report."""
_ERRORS = 10
"""Unscored episodes that are named."""
_ORDER = {"easy": "0", "medium": "1", "hard": "2"}
_PER_EPISODE = ("tool_calls", "malformed", "user_actions")
_USAGE = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")


@dataclass(frozen=True, slots=True)
class TaskResult:
    """All episodes of one task."""

    task: Task
    episodes: Sequence[Trajectory]

    @property
    def scored(self) -> list[Trajectory]:
        return [episode for episode in self.episodes if episode.scored]

    @property
    def successes(self) -> int:
        return sum(episode.success for episode in self.scored)

    @property
    def success(self) -> float:
        """Share of the scored episodes, of which there must be one."""
        return self.mean(lambda episode: episode.success)

    def mean(self, value: Callable[[Trajectory], float]) -> float:
        """Over the scored episodes, of which there must be one."""
        return fmean(map(value, self.scored))

    def label(self, name: str) -> str:
        """``kind`` or ``difficulty`` of the task, "-" where it has none."""
        return str(self.task.data.get(name, "-"))

    def as_json(self) -> Json:
        """What a comparison with another run needs."""
        return {
            "domain": self.task.domain,
            "task": self.task.id,
            "digest": task_digest(self.task),
            "kind": self.label("kind"),
            "difficulty": self.label("difficulty"),
            "episodes": len(self.scored),
            "unscored": len(self.episodes) - len(self.scored),
            "successes": self.successes,
            "reward": self.mean(lambda episode: episode.reward) if self.scored else None,
        }


def summarize(config: EvaluationConfig, results: Sequence[TaskResult]) -> Json:
    """The report's content. Sections without a scored episode hold their counts alone."""
    domains = _split_by(results, lambda result: result.task.domain)
    sections = {
        name: {
            **_section(config, members),
            "difficulties": _successes(config, members, "difficulty"),
            "kinds": _successes(config, members, "kind"),
        }
        for name, members in domains.items()
    }
    scored = [[result.success for result in members if result.scored] for members in domains.values()]
    lost = [
        {"domain": result.task.domain, "task": result.task.id, "outcome": str(episode.outcome), "error": episode.error}
        for result in results
        for episode in result.episodes
        if not episode.scored
    ]
    return {
        "split": config.split,
        "samples": config.samples,
        "temperature": config.temperature,
        "level": config.level,
        **_section(config, results),
        # Each domain counts alike however many tasks it has; None where one has none scored.
        "domain_mean": fmean(map(fmean, scored)) if scored and all(scored) else None,
        "domains": sections,
        "difficulties": _successes(config, results, "difficulty"),
        "kinds": {
            f"{name}: {kind}" if len(sections) > 1 else kind: success
            for name, section in sections.items()
            for kind, success in section["kinds"].items()
        },
        "missing": _missing(results),
        "errors": lost[:_ERRORS],
        "per_task": [result.as_json() for result in results],
    }


def _missing(results: Sequence[TaskResult]) -> list[Json]:
    """Kinds of task with unscored episodes, those of which most is missing first."""
    found = []
    for (domain, kind), members in _split_by(results, lambda r: (r.task.domain, r.label("kind"))).items():
        episodes = sum(len(result.episodes) for result in members)
        if unscored := episodes - sum(len(result.scored) for result in members):
            found.append({"domain": domain, "kind": kind, "episodes": episodes, "unscored": unscored})
    return sorted(found, key=lambda one: one["unscored"] / one["episodes"], reverse=True)


def unscored_lines(result: Json) -> list[str]:
    """What unscored episodes leave open: bounds of success, which kinds are missing, the first reason."""
    if not result["unscored"]:
        return []
    first, bounds, kinds = result["errors"][0], result["bounds"], result["missing"]
    told = "; ".join(f"{one['kind']} {one['unscored']} of {one['episodes']}" for one in kinds[:_ERRORS])
    more = f"; and {len(kinds) - _ERRORS} more" if len(kinds) > _ERRORS else ""
    return [
        f"{result['unscored']} of {result['episodes']} episodes could not be scored and count nowhere; the same "
        f"command tries them again. The first: task {first['task']}, {first['outcome']}: {first['error']}",
        f"success is {bounds['low']:.3f} with all of them as failures, {bounds['high']:.3f} as successes",
        f"missing of each kind: {told}{more}",
    ]


def _bounds(results: Sequence[TaskResult]) -> Json:
    """Success over tasks with the unscored episodes as failures and as successes."""
    played = [result for result in results if result.episodes]
    lost = [len(result.episodes) - len(result.scored) for result in played]
    low = [result.successes / len(result.episodes) for result in played]
    high = [(result.successes + many) / len(result.episodes) for result, many in zip(played, lost, strict=True)]
    return {"low": fmean(low) if low else None, "high": fmean(high) if high else None}


def _split_by(results: Iterable[TaskResult], key: Callable[[TaskResult], Any]) -> dict[Any, list[TaskResult]]:
    parts: defaultdict[Any, list[TaskResult]] = defaultdict(list)
    for result in results:
        parts[key(result)].append(result)
    return dict(sorted(parts.items(), key=lambda item: _ORDER.get(item[0], item[0])))


def _successes(config: EvaluationConfig, results: Sequence[TaskResult], label: str) -> dict[str, Json]:
    parts = _split_by(results, lambda result: result.label(label))
    return {name: _section(config, members)["success"] for name, members in parts.items()}


def _section(config: EvaluationConfig, results: Sequence[TaskResult]) -> Json:
    episodes = [episode for result in results for episode in result.episodes]
    scored = [result for result in results if result.scored]
    counts = {
        "tasks": len(results),
        "episodes": len(episodes),
        "unscored": sum(not episode.scored for episode in episodes),
        "bounds": _bounds(results),
        "outcomes": dict(sorted(Counter(str(episode.outcome) for episode in episodes).items())),
    }
    if not scored:
        return {**counts, "success": None}
    success = interval_of(config, [result.success for result in scored])
    reward = interval_of(config, [result.mean(lambda episode: episode.reward) for result in scored])
    return {
        **counts,
        "success": success._asdict() | {"episodes": sum(len(result.scored) for result in scored)},
        "reward": reward._asdict(),
        "pass_hat": _passes(config, scored, pass_hat),
        "pass_at": _passes(config, scored, pass_at),
        **_shapes(scored),
    }


def _passes(
    config: EvaluationConfig, scored: Sequence[TaskResult], estimate: Callable[[int, int, int], float]
) -> dict[str, Json]:
    """The estimate for every k that some task has enough episodes for, over those tasks."""
    found = {}
    for k in range(1, min(config.samples, MAX_K) + 1):
        enough = [result for result in scored if len(result.scored) >= k]
        if enough:
            values = [estimate(len(result.scored), result.successes, k) for result in enough]
            found[str(k)] = interval_of(config, values)._asdict() | {"tasks": len(enough)}
    return found


def interval_of(config: EvaluationConfig, values: Sequence[float]) -> Interval:
    """Mean over tasks of a value of each, with its interval: the one way of every evaluation to compute it."""
    return bootstrap(values, level=config.level, resamples=config.resamples, seed=_SEED)


def _shapes(scored: Sequence[TaskResult]) -> Json:
    """Turns, tokens, tools and seconds of an episode."""

    def mean(value: Callable[[Trajectory], float]) -> float:
        return fmean(result.mean(value) for result in scored)

    def metric(name: str) -> float:
        return mean(lambda episode: episode.metrics.get(name, 0.0))

    def tokens(kind: Provenance) -> float:
        return mean(lambda episode: sum(int((part.provenance == kind).sum()) for part in episode.segments))

    names = sorted({name for result in scored for episode in result.scored for name in episode.metrics})
    metrics = {name: metric(name) for name in names}
    by_kind = {kind.name.lower(): tokens(kind) for kind in Provenance}
    return {
        "turns": mean(lambda episode: len(episode.turn_rewards)),
        "effective_turns": mean(lambda episode: effective_turns(episode.turn_rewards)),
        "time_weighted_reward": mean(lambda episode: time_weighted_reward(episode.turn_rewards)),
        "tokens": by_kind if any(by_kind.values()) else {},
        "usage": {name: metrics[name] for name in _USAGE if name in metrics},
        "counts": {name: metrics.get(name, 0.0) for name in _PER_EPISODE},
        "cost": {name: value for name, value in metrics.items() if name.endswith("cost")},
        "seconds": {n.removeprefix("seconds/"): value for n, value in metrics.items() if n.startswith("seconds/")},
    }


def training_metrics(
    trajectories: Sequence[Trajectory], trained: Collection[str], split: str, config: EvaluationConfig
) -> dict[str, float]:
    """Success with its interval (``evaluation.level``), and the share of unscored episodes.

    ``eval/<split>_...`` is over all tasks of the domains that are ``trained`` on, and
    ``eval/held_out_<split>_...`` over those of the others; where there are several domains,
    ``eval/<domain>/<split>_...`` is of each. A part without a scored episode has no success: the infrastructure's
    faults are no failures of the policy.
    """
    parts = {
        f"eval/{split}": [t for t in trajectories if t.domain in trained],
        f"eval/held_out_{split}": [t for t in trajectories if t.domain not in trained],
    }
    domains = {t.domain for t in trajectories}
    for domain in sorted(domains) if len(domains) > 1 else ():
        parts[f"eval/{domain}/{split}"] = [t for t in trajectories if t.domain == domain]
    metrics: dict[str, float] = {}
    for prefix, episodes in parts.items():
        # The task is the unit: samples of one task are no independent trials, so each task counts once, with its mean.
        by_task: defaultdict[Hashable, list[float]] = defaultdict(list)
        for episode in episodes:
            if episode.scored:
                by_task[episode.domain, episode.task_id].append(float(episode.success))
        if episodes:
            metrics[f"{prefix}_unscored"] = sum(not episode.scored for episode in episodes) / len(episodes)
        if by_task:
            interval = interval_of(config, [fmean(values) for values in by_task.values()])
            bounds = {"success": interval.mean, "success_low": interval.low, "success_high": interval.high}
            metrics |= {f"{prefix}_{name}": value for name, value in bounds.items()}
    return metrics


NOTES = """\
Success is the mean over tasks of each task's share of successful episodes. pass^k is the probability that k episodes
of a task all succeed, pass@k that one of k does, both estimated without bias from the episodes there are. Intervals
resample tasks (bootstrap; Wilson's where all tasks agree). Unscored episodes are faults of the infrastructure, not of
the policy: they count nowhere, and the same command plays them again."""
_TURNS, _COUNTS = ("turns", "effective_turns", "time_weighted_reward"), ("tool_calls", "malformed")
# Okabe and Ito's palette: told apart by color-blind readers and in print.
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
        *[f"- {printable(line, 600)}" for line in unscored_lines(result)],
        *_titled("### Unscored episodes (the first ones)", ("domain", "task", "outcome", "error"), errors),
        "## How to read this",
        NOTES,
    ]
    return pictured("\n\n".join(blocks) + "\n")


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
        color = COLOURS[6] if name == "all" else COLOURS[0] if name in result["domains"] else COLOURS[2]
        mean = part["mean"]
        bounds = [[mean - part["low"]], [part["high"] - mean]]
        axes.barh(place, mean, xerr=bounds, color=color, alpha=0.85, height=0.6, capsize=3, ecolor="#444444")
    axes.set_yticks(range(len(rows)), [name for name, _ in reversed(rows)])
    axes.set_xlim(0, 1)
    axes.set_xlabel(f"success, {result['level']:.0%} interval over tasks")
    axes.grid(axis="x", alpha=0.25)
    axes.set_title(f"{result['name']}: success on {result['split']}", loc="left")
    figure.savefig(png)


def _draw_passes(result: Json, png: Path) -> None:
    figure, axes = new_figure(4.5)
    for index, (name, part) in enumerate(_parts(result)):
        color = COLOURS[index % len(COLOURS)]
        for key, style, sign in (("pass_hat", "-o", "^"), ("pass_at", "--s", "@")):
            points = {int(k): value for k, value in part.get(key, {}).items()}
            means, low, high = ([value[n] for value in points.values()] for n in ("mean", "low", "high"))
            axes.plot(list(points), means, style, color=color, markersize=4, label=f"{name}, pass{sign}k")
            axes.fill_between(list(points), low, high, color=color, alpha=0.08)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("k")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(f"{result['name']}: all of k succeed (pass^k), one of k does (pass@k)", loc="left")
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    figure.savefig(png)
