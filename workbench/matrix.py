"""Several policies, each with several populations of users, on the same tasks and seeds.

::

                      users B1      users B2     ...
    policy A1         cell          cell               a cell: one evaluation as ``mua eval`` makes it, in
    policy A2         cell          cell               <output>/<policy>/<users>, continued where it stopped

So a policy that was trained with users A meets users B in its evaluation. One service of engines plays a whole row.
Rows are compared within a column by pairs of tasks: differences are of the first policy.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import Any

from rich.table import Table

from mua.config.schema import ExperimentConfig
from mua.observe.output import prepare_output
from mua.observe.safe_output import SafeConsole
from mua.rollout.runner import Placed, without_gc_pauses
from mua.rollout.service import RolloutService
from mua.trainer.evaluation.evaluator import OnTrajectory, Roles, evaluated, play_at_endpoint, roles_of, servable
from mua.trainer.evaluation.report import interval_of, interval_text, markdown_table
from mua.types import Json
from mua.utils.atomic import replace_text
from mua.utils.errors import MuaError, RunStopped
from mua.utils.masking import masked_tree
from workbench.compare import difference, difference_text, paired

RESULT, PAGE = "matrix.json", "matrix.md"
MEAN = "all users"
Cells = Mapping[str, Mapping[str, ExperimentConfig]]
"""By policy and users."""

_NOTES = """\
Success of each policy (row) with each population of users (column): the mean over tasks of each task's share of
successful episodes. All cells are of the same tasks and seeds. Under "all users" a task counts with its mean over the
columns. Differences are those to the first policy, paired by task, with a bootstrap interval over tasks and the
p-value of a paired test; nothing is corrected for the number of comparisons."""


def evaluate_matrix(config: ExperimentConfig, cells: Cells) -> Json:
    """Play what is missing of every cell and write ``matrix.json`` and ``matrix.md`` into ``config.output``.

    Raises :class:`RunStopped` at the end where a cell has no scored episode; the others are written all the same.
    """
    results: dict[str, dict[str, Json]] = {}
    empty: dict[str, RunStopped] = {}
    for policy, row in cells.items():
        with _Row() as engines:
            for users, cell in row.items():
                print(f"{policy} with {users}", flush=True)
                try:
                    model = servable(cell.model_copy(update={"output": config.output})).model  # which cells share
                    cell.output.mkdir(parents=True, exist_ok=True)
                    cell = cell.model_copy(update={"model": model})
                    prepare_output(cell, "config-eval.yaml")
                    results.setdefault(policy, {})[users] = evaluated(cell, engines.play)
                except RunStopped as error:
                    empty[f"{policy} with {users}"] = error
    matrix = _matrix(config, cells, results)
    replace_text(config.output / RESULT, json.dumps(matrix, indent=2) + "\n")
    replace_text(config.output / PAGE, matrix_page(matrix))
    SafeConsole().print(_console_table(matrix))
    print(f"written to {config.output / RESULT} and {PAGE}")
    if empty:
        lines = "\n".join(f"{name}: {error}" for name, error in empty.items())
        raise RunStopped(lines, passing=all(error.passing for error in empty.values()))
    return matrix


def matrix_page(matrix: Json) -> str:
    """The matrix as Markdown."""
    columns, cells = [*matrix["users"], MEAN], matrix["cells"]
    rows = [[policy, *(interval_text(row[users].get("success")) for users in columns)] for policy, row in cells.items()]
    apart = [
        [policy, *(_difference(row[users].get("difference")) for users in columns)]
        for policy, row in list(cells.items())[1:]
    ]
    lost = [
        [policy, *(f"{row[users]['unscored']} of {row[users]['episodes']}" for users in matrix["users"])]
        for policy, row in cells.items()
    ]
    blocks = [
        f"# Policies and users: {matrix['name']}",
        f"- {matrix['tasks']} tasks of {matrix['split']}, {matrix['samples']} episodes a task, temperature "
        f"{matrix['temperature']:g}\n- intervals hold the true value with {matrix['level']:.0%} confidence",
        "## Success",
        markdown_table(("policy", *columns), rows),
        *([f"## Difference to {next(iter(cells))}", markdown_table(("policy", *columns), apart)] if apart else []),
        "## Unscored episodes",
        markdown_table(("policy", *matrix["users"]), lost),
        "## How to read this",
        _NOTES,
    ]
    return "\n\n".join(blocks) + "\n"


class _Row(ExitStack):
    """The engines of one policy, started when the first cell has something to play."""

    _rollouts: RolloutService | None = None

    def play(
        self, config: ExperimentConfig, episodes: Sequence[Placed], on_trajectory: OnTrajectory,
        seconds: float | None = None,
    ) -> Roles:  # fmt: skip
        """See :func:`mua.trainer.evaluation.evaluator.play_on_engine`."""
        if config.evaluation.policy.kind == "endpoint":
            return play_at_endpoint(config, episodes, on_trajectory, seconds)
        if self._rollouts is None:
            self._rollouts = self.enter_context(RolloutService(config))
        else:
            self._rollouts.meet_users(config)
        with without_gc_pauses():
            self._rollouts.each(episodes, temperature=config.evaluation.temperature, on_trajectory=on_trajectory)
        return roles_of(self._rollouts.metrics())


def _matrix(config: ExperimentConfig, cells: Cells, results: Mapping[str, Mapping[str, Json]]) -> Json:
    found = [result for row in results.values() for result in row.values()]
    tasks = [[(t["domain"], t["task"], t["digest"]) for t in result["per_task"]] for result in found]
    if any(each != tasks[0] for each in tasks):
        raise MuaError("the cells are not of the same tasks: something of the environment depends on the user")
    chosen, columns = config.evaluation, next(iter(cells.values()))
    first = next(iter(cells))
    return {
        "name": config.name,
        "split": chosen.split,
        "tasks": len(tasks[0]) if tasks else 0,
        "samples": chosen.samples,
        "temperature": chosen.temperature,
        "level": chosen.level,
        "policies": {name: next((r["policy"] for r in results.get(name, {}).values()), None) for name in cells},
        "users": {name: masked_tree(cell.user.model_dump(mode="json")) for name, cell in columns.items()},
        "cells": {name: _row(config, columns, results.get(name, {}), results.get(first, {})) for name in cells},
    }


def _row(
    config: ExperimentConfig, columns: Mapping[str, Any], row: Mapping[str, Json], first: Mapping[str, Json]
) -> Json:
    """A policy's cells, and what all of them together say. ``first`` is the row that differences are to."""
    found: Json = {users: _cell(row.get(users)) for users in columns}
    for users in columns:
        if users in row and users in first and row[users] is not first[users]:
            found[users]["difference"] = _apart(first[users], row[users])
    every = _over_users(row) if len(row) == len(columns) else {"per_task": []}
    of_first = _over_users(first) if len(first) == len(columns) else {"per_task": []}
    shares = [task["successes"] / task["episodes"] for task in every["per_task"]]
    found[MEAN] = {"success": interval_of(config.evaluation, shares)._asdict() if shares else None}
    if row is not first and shares and of_first["per_task"]:
        found[MEAN]["difference"] = _apart(of_first, every)
    return found


def _cell(result: Json | None) -> Json:
    if result is None:
        return {"success": None, "episodes": 0, "unscored": 0}
    return {name: result[name] for name in ("success", "reward", "episodes", "unscored", "outcomes", "setting_digest")}


def _over_users(row: Mapping[str, Json]) -> Json:
    """Per task the mean of its share of successes over all populations that scored it, where each of them did."""
    shares: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for result in row.values():
        for task in result["per_task"]:
            if task["episodes"]:
                shares[task["domain"], task["task"], task["digest"]].append(task["successes"] / task["episodes"])
    return {
        "per_task": [
            {"domain": domain, "task": task, "digest": digest, "episodes": 1, "successes": fmean(values)}
            for (domain, task, digest), values in shares.items()
            if len(values) == len(row)
        ]
    }


def _apart(first: Json, second: Json) -> Json | None:
    pairs, _ = paired(first, second)
    if not pairs:
        return None
    found = difference(pairs)
    return {**found["difference"], "p_value": found["p_value"], "test": found["test"], "tasks": found["tasks"]}


def _difference(found: Json | None) -> str:
    if found is None:
        return "-"
    return f"{difference_text(found)}, p {found['p_value']:.3g}"


def _console_table(matrix: Json) -> Table:
    columns = [*matrix["users"], MEAN]
    shown = Table("policy", *columns, title=f"success on {matrix['split']}")
    for policy, row in matrix["cells"].items():
        shown.add_row(policy, *(interval_text(row[users]["success"]) for users in columns))
    return shown
