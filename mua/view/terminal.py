"""``mua show``: one trajectory of a run for the terminal, with mask, advantages and verdict."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mua.observe.transcript import render_trajectory
from mua.store.queries import TrajectoryFilter
from mua.store.trajectories import read_trajectories
from mua.types import Json
from mua.utils.strict_json import printable
from mua.view.one_trajectory import advantage_by_turn, tokens, trajectory
from mua.view.page_answers import Answers
from mua.view.viewed_runs import NotThere, ViewedRun, opened_runs


def show(
    place: str, only: Mapping[str, str], *, run: str | None, name: str | None, sample: int | None, model: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Print the trajectory ``name``, or one that the filters ``only`` leave: the newest, or drawn by the seed
    ``sample``.

    Raises :class:`NotThere` where nothing is left, :class:`mua.view.trajectory_lists.BadQuestion`,
    :class:`mua.store.faults.StoreError`.
    """
    with opened_runs([place], model=model, tell=lambda line: print(line, file=sys.stderr)) as viewed:
        answers = Answers(viewed)
        chosen = viewed.get(_only_run(viewed.keys(), run))
        name = name or _chosen(answers, chosen, only, sample)
        with chosen.store.read() as connection:
            found = trajectory(connection, chosen, name)
            if as_json:
                print(json.dumps(found, default=lambda value: f"{len(value)} bytes"))
                return
            played = next(read_trajectories(connection, [name]))
            uses = [
                (number, tokens(connection, chosen, name, number)) for number in range(len(played.segments))
            ]  # fmt: skip
    if chosen.token_texts.fault:
        print(f"mua: {chosen.token_texts.fault}", file=sys.stderr)
    console = Console(width=None if sys.stdout.isatty() else 160)
    shown = render_trajectory(played, chosen.token_texts.decode)
    console.print(Text(printable(name), style="bold"))
    console.print(Group(shown, *_trained(uses), *_verdict(found)))


def _only_run(keys: list[str], run: str | None) -> str:
    if run is None and len(keys) > 1:
        raise NotThere(f"the store has {len(keys)} runs; name one with --run: {', '.join(keys)}")
    return run or keys[0]


def _chosen(answers: Answers, run: ViewedRun, only: Mapping[str, str], sample: int | None) -> str:
    if sample is None:
        rows = answers.answer("trajectories", {**only, "run": run.key, "limit": "1"})["rows"]
        found = [row["id"] for row in rows]
    else:
        with run.store.read() as connection:
            found = answers.lists.ids(connection, run, only)
        found = [random.Random(sample).choice(found)] if found else []
    if not found:
        said = TrajectoryFilter(run.id).shown() + "".join(f", {name} {value}" for name, value in only.items())
        raise NotThere(f"no trajectory: {said}")
    return str(found[0])


def _trained(uses: list[tuple[int, Json]]) -> list[RenderableType]:
    """Mean advantage and weight by turn, and the largest gap between engine and trainer."""
    table = Table("segment", "step", "turn", "advantage", title="trained on", title_justify="left")
    lines: list[RenderableType] = []
    for number, found in uses:
        for turn, advantage in advantage_by_turn(found["columns"]):
            table.add_row(str(number), str(found["step"]), str(turn), f"{advantage:+.4g}")
        weights = [value for value in found["columns"]["weights"] or () if value is not None]
        gaps = [abs(value) for value in found["columns"]["gap"] or () if value is not None]
        if weights:
            gap = f"{max(gaps):.3g}" if gaps else "not recorded"
            lines.append(Text(
                f"segment {number}: {len(weights)} trained tokens, weights {min(weights):.3g} to {max(weights):.3g}, "
                f"largest gap of engine and trainer {gap}", style="dim",
            ))  # fmt: skip
    return [table, *lines] if table.row_count else [Text("no step trained on it", style="dim")]


def _verdict(found: Json) -> list[RenderableType]:
    """The scores, which the header of a transcript does not have."""
    if not found["scores"]:
        return []
    table = Table("scorer", "value", "details", title="verdict", title_justify="left")
    for row in found["scores"]:
        value = "none" if row["value"] is None else f"{row['value']:.6g}"
        table.add_row(printable(row["scorer"]), value, printable(json.dumps(row["details"], ensure_ascii=False), 400))
    return [table]
