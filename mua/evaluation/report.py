"""An evaluation for people: a page of Markdown, and a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from mua.types import Json

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
        table(("", "tasks", "episodes", "unscored", "success", "reward"), _success_rows(result)),
        *_pass_tables(result),
        *[f"![{name}]({name})" for name in pictures],
        *_label_tables(result),
        "## Episodes",
        table(("", "turns", "effective turns", "time-weighted reward", "tool calls", "malformed"), _turn_rows(result)),
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


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table, all but the first column to the right."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' + '--:|' * (len(head) - 1)}"]
    lines += [f"| {' | '.join(_cell(value) for value in row)} |" for row in rows]
    return "\n".join(lines)


def with_bounds(interval: Json | None) -> str:
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
        [n, p["tasks"], p["episodes"], p["unscored"], with_bounds(p["success"]), with_bounds(p.get("reward"))]
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
        blocks += [f"### pass{sign}k", table(("", *[f"pass{sign}{k}" for k in ks]), rows)]
    return blocks


def _at(passes: Json, k: int) -> str:
    found = passes.get(str(k))
    return "-" if found is None else f"{found['mean']:.3f}"


def _label_tables(result: Json) -> list[str]:
    blocks = []
    for key, label in (("difficulties", "difficulty"), ("kinds", "kind")):
        rows = [
            [name, value, interval["episodes"] if interval else 0, with_bounds(interval)]
            for name, part in result["domains"].items()
            for value, interval in part[key].items()
            if value != "-"
        ]
        if rows:
            blocks += [f"## By {label}", table(("domain", label, "episodes", "success"), rows)]
    return blocks


def _turn_rows(result: Json) -> list[list[Any]]:
    names = ("turns", "effective_turns", "time_weighted_reward")
    counts = ("tool_calls", "malformed")
    judged = [(name, part) for name, part in parts(result) if part["success"] is not None]
    return [[name, *[part[n] for n in names], *[part["counts"][n] for n in counts]] for name, part in judged]


def _outcomes(result: Json) -> str:
    names = sorted(result["outcomes"])
    return table(("", *names), [[n, *[p["outcomes"].get(name, 0) for name in names]] for n, p in parts(result)])


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
    return ["### Tokens of an episode", table(("", *head), rows)]


def _costs(result: Json) -> list[str]:
    rows = [[name, f"{value:.4g}"] for name, value in {**result.get("cost", {}), **result["roles"]}.items()]
    return ["### Users, judges and cost", table(("", "value"), rows)] if rows else []


def _errors(result: Json) -> list[str]:
    if not result["errors"]:
        return []
    rows = [[error["domain"], error["task"], error["outcome"], error["error"]] for error in result["errors"]]
    return ["### Unscored episodes (the first ones)", table(("domain", "task", "outcome", "error"), rows)]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
    return " ".join(str(value).replace("|", "\\|").split())
