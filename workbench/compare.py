"""Two evaluations on the tasks they share: the difference of success, its interval, and a paired test.

Pairs are tasks, told apart by domain, id and digest: a task that changed between the two runs is left out, and said to
be. Each task counts with its share of successful episodes in either run, however many those are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table
from scipy.stats import fisher_exact

from mua.observe.safe_output import SafeConsole
from mua.trainer.evaluation.estimators import paired_test, percentile_interval
from mua.trainer.evaluation.report import markdown_table
from mua.types import Json
from mua.utils.errors import MuaError
from mua.utils.strict_json import MAX_FILE_DEPTH, pictured, printable, read_file, read_json

RESULT = "evaluation.json"
LEVEL = 0.95
DOUBT = 0.01
"""Probability of missing tasks as uneven as these, below which they are not called random."""
RESAMPLES = 10_000
_SEED = 20


@dataclass(frozen=True, slots=True)
class Pair:
    """One task's success in both runs."""

    domain: str
    task: str
    first: float
    second: float


def compare(first: Path, second: Path, out: Path, *, allow_missing: bool = False) -> Json:
    """Print the comparison of two runs (output folders, or their ``evaluation.json``) and write it into ``out``.

    The files are ``comparison.json`` and ``comparison.md``. Raises :class:`MuaError` where a result cannot be read, the
    runs share no task, or what is unscored is no random sample; the last is only said with ``allow_missing``.
    """
    one, other = load_result(first), load_result(second)
    reasons = missing_not_at_random(one, other)
    if reasons and not allow_missing:
        raise MuaError(
            f"{second}: unscored episodes are no random sample: {'; '.join(reasons)}; play them (the same mua eval "
            "again), or compare all the same with --allow-missing"
        )
    result = compared(one, other) | {"first": _named(one, first), "second": _named(other, second)}
    result["missing"] = reasons
    out.mkdir(parents=True, exist_ok=True)
    (out / "comparison.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    (out / "comparison.md").write_text(comparison_page(result), encoding="utf-8")
    SafeConsole().print(_console_table(result))
    for line in _remarks(result):
        print(line)
    print(f"written to {out / 'comparison.json'} and comparison.md")
    return result


def load_result(path: Path) -> Json:
    """An evaluation's result; ``path`` is its output folder or the file itself."""
    file = path / RESULT if path.is_dir() else path
    try:
        result = read_json(read_file(file), strict=False, depth=MAX_FILE_DEPTH)
        _check_result(result)
    except OSError as error:
        raise MuaError(f"{file}: {error.strerror}; give the output folder of mua eval") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = printable(f"{type(error).__name__}: {error}")
        raise MuaError(f"{file}: not a result of mua eval ({reason})") from None
    return result  # type: ignore[no-any-return]


def _check_result(result: Json) -> None:
    """Raises KeyError, TypeError or ValueError where what is compared is missing or impossible."""
    if not isinstance(result["name"], str) or not isinstance(result["per_task"], list):
        raise TypeError("name is a string, per_task a list")
    seen = set()
    for task in result["per_task"]:
        texts, counts = (task["domain"], task["task"], task["digest"]), (task["successes"], task["episodes"])
        if not all(isinstance(text, str) for text in texts) or not all(type(count) is int for count in counts):
            raise TypeError("a task's domain, task and digest are strings, its episodes and successes integers")
        if not 0 <= counts[0] <= counts[1] < 2**31:
            raise ValueError(f"{counts[0]} successes in {counts[1]} episodes")
        if texts[:2] in seen:
            raise ValueError(f"task {texts[1]!r} stands twice")
        seen.add(texts[:2])


def compared(one: Json, other: Json) -> Json:
    """The difference ``other - one``, over all common tasks and by domain."""
    pairs, changed = paired(one, other)
    if not pairs:
        raise MuaError(
            "the two runs share no scored task"
            + (f"; {changed} tasks have the same id but another content" if changed else "")
            + "; evaluate both on the same domains and split"
        )
    domains = sorted({pair.domain for pair in pairs})
    parts = {name: difference([pair for pair in pairs if pair.domain == name]) for name in domains}
    return {
        "all": difference(pairs),
        "domains": parts,
        "common": len(pairs),
        "only_in_first": len(one["per_task"]) - len(pairs) - changed,
        "only_in_second": len(other["per_task"]) - len(pairs) - changed,
        "changed": changed,
        "same_setting": one.get("setting_digest") == other.get("setting_digest"),
        "level": LEVEL,
    }


def paired(one: Json, other: Json) -> tuple[list[Pair], int]:
    """The tasks that both runs scored, and how many more share an id but not their content."""
    seconds = {(task["domain"], task["task"]): task for task in other["per_task"] if task["episodes"]}
    pairs, changed = [], 0
    for task in one["per_task"]:
        match = seconds.get((task["domain"], task["task"]))
        if match is None or not task["episodes"]:
            continue
        if match["digest"] != task["digest"]:
            changed += 1
            continue
        shares = (found["successes"] / found["episodes"] for found in (task, match))
        pairs.append(Pair(task["domain"], task["task"], *shares))
    return pairs, changed


def missing_not_at_random(one: Json, other: Json) -> list[str]:
    """Why tasks with unscored episodes cannot be a random sample of those that both runs played, in words.

    Three exact tests (Fisher 1922): that they depend on the run; of each run, that they depend on the kind of task
    (each kind against the others, corrected for their number); that they depend on what the other run achieved in them.
    """
    by_task = [{(t["domain"], t["task"], t["digest"]): t for t in run["per_task"]} for run in (one, other)]
    both = sorted(by_task[0].keys() & by_task[1].keys())
    lost = [np.array([found[key].get("unscored", 0) > 0 for key in both], bool) for found in by_task]
    kinds = np.array([f"{key[0]}: {by_task[0][key].get('kind', '-')}" for key in both])
    reasons = []
    if _unlikely(np.repeat([True, False], len(both)), np.concatenate(lost)) < DOUBT:
        reasons.append(f"{lost[0].sum()} tasks of the first run have some, {lost[1].sum()} of the second")
    for place, name in enumerate(("first", "second")):
        names = sorted(set(kinds))
        for kind in names if len(names) > 1 else ():
            own = kinds == kind
            if _unlikely(own, lost[place]) * len(names) < DOUBT:
                told = (
                    f"{(own & lost[place]).sum()} of {own.sum()} tasks of {printable(kind)} have some in the {name} run"
                )
                reasons.append(f"{told}, {(~own & lost[place]).sum()} of {(~own).sum()} of the others")
        scored = np.array([by_task[1 - place][key]["episodes"] > 0 for key in both], bool)
        won = np.array([2 * (t := by_task[1 - place][key])["successes"] >= max(1, t["episodes"]) for key in both], bool)
        if _unlikely(won[scored], lost[place][scored]) < DOUBT:
            reasons.append(f"those of the {name} run depend on whether the other run solves the task")
    return reasons


def _unlikely(one: npt.NDArray[np.bool_], other: npt.NDArray[np.bool_]) -> float:
    """Two-sided p-value of Fisher's exact test that two properties of tasks have nothing to do with each other."""
    table = [[int((a & b).sum()) for b in (other, ~other)] for a in (one, ~one)]
    return float(fisher_exact(table).pvalue)


def difference(pairs: Sequence[Pair]) -> Json:
    """Mean success of both, their difference with a paired bootstrap interval over tasks, and a two-sided test."""
    first, second = [pair.first for pair in pairs], [pair.second for pair in pairs]
    differences = np.subtract(second, first)
    interval = percentile_interval(differences, level=LEVEL, resamples=RESAMPLES, seed=_SEED)
    test = paired_test(first, second, seed=_SEED)
    return {
        "tasks": len(pairs),
        "first": float(np.mean(first)),
        "second": float(np.mean(second)),
        "difference": interval._asdict(),
        "better": int((differences > 0).sum()),
        "worse": int((differences < 0).sum()),
        "test": test.name,
        "p_value": test.p_value,
    }


def comparison_page(result: Json) -> str:
    """The comparison as Markdown."""
    head = ("", "tasks", "first", "second", "difference", "better", "worse", "p", "test")
    blocks = [
        "# Comparison",
        f"- first: {result['first']}\n- second: {result['second']}",
        markdown_table(head, _rows(result)),
        "\n".join(_remarks(result)),
    ]
    return pictured("\n\n".join(block for block in blocks if block) + "\n")


def _console_table(result: Json) -> Table:
    shown = Table("", "tasks", "first", "second", "difference", "better", "worse", "p", "test", title="success")
    for row in _rows(result):
        shown.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row))
    return shown


def _rows(result: Json) -> list[list[Any]]:
    parts = list(result["domains"].items())
    if len(parts) != 1:
        parts.append(("all", result["all"]))
    return [
        [
            name, part["tasks"], part["first"], part["second"], difference_text(part["difference"]), part["better"],
            part["worse"], part["p_value"], part["test"],
        ]
        for name, part in parts
    ]  # fmt: skip


def difference_text(found: Json) -> str:
    """``+0.133 (+0.046 to +0.225)``."""
    return f"{found['mean']:+.3f} ({found['low']:+.3f} to {found['high']:+.3f})"


def _remarks(result: Json) -> list[str]:
    lines = []
    lines += [f"Unscored episodes are no random sample: {reason}." for reason in result.get("missing", ())]
    if not result["same_setting"]:
        lines.append("The two runs differ in their setting (seed, budgets, user ...), not only in the policy.")
    alone = result["only_in_first"] + result["only_in_second"]
    if alone or result["changed"]:
        lines.append(f"Left out: {alone} tasks that only one run scored, {result['changed']} whose content changed.")
    return lines


def _named(result: Json, path: Path) -> str:
    return f"{result['name']} ({path})"
