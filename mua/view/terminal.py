"""``mua show``: one trajectory of a run for the terminal, with mask, advantages and verdict."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mua.observe.safe_output import SafeConsole
from mua.observe.transcript import render_trajectory
from mua.store.queries import TrajectoryFilter
from mua.store.tables import reading_on
from mua.store.trajectories import read_trajectories
from mua.types import Json
from mua.utils.strict_json import printable
from mua.view.one_trajectory import advantage_by_turn, tokens, trajectory
from mua.view.page_answers import Answers
from mua.view.viewed_runs import NotThere, opened_runs


def show(
    place: str, only: Mapping[str, str], *, run: str | None, name: str | None, sample: int | None, model: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Print the trajectory ``name``, or one that the filters ``only`` leave: the newest, or drawn by the seed
    ``sample``.

    Raises :class:`NotThere` where nothing is left, :class:`mua.view.trajectory_lists.BadQuestion`,
    :class:`mua.store.faults.StoreError`.
    """
    tell = lambda line: print(f"mua: {line}", file=sys.stderr)  # noqa: E731
    with reading_on() as damaged, opened_runs([place], model=model, tell=tell) as viewed:
        answers, chosen = Answers(viewed), viewed.get(run)
        with chosen.store.read() as connection:
            if name is None and sample is None:
                newest = answers.answer("trajectories", {**only, "run": chosen.key, "limit": "1"})["rows"]
                name = newest[0]["id"] if newest else None
            elif name is None and (ids := answers.lists.ids(connection, chosen, only)):
                name = random.Random(sample).choice(ids)
            if name is None:
                said = TrajectoryFilter(chosen.id).shown() + "".join(f", {key} {value}" for key, value in only.items())
                raise NotThere(f"no trajectory: {said}")
            found = trajectory(connection, chosen, name)
            if as_json:
                print(json.dumps(found, default=lambda value: f"{len(value)} bytes"))
                return
            played = next(read_trajectories(connection, [name]))
            uses = [tokens(connection, chosen, name, number) for number in range(len(played.segments))]
    if chosen.token_texts.fault:
        tell(chosen.token_texts.fault)
    if damaged:
        tell(f"{', '.join(sorted(damaged))}: damaged, shown as nothing (mua store verify)")
    verdict = Table("scorer", "value", "details", title="verdict", title_justify="left")
    for row in found["scores"]:
        value = "none" if row["value"] is None else f"{row['value']:.6g}"
        verdict.add_row(printable(row["scorer"]), value, printable(json.dumps(row["details"], ensure_ascii=False), 400))
    console = SafeConsole(width=None if sys.stdout.isatty() else 160)
    console.print(Text(name, style="bold"))
    shown = render_trajectory(played, chosen.token_texts.decode)
    console.print(Group(shown, *_trained(uses), *([verdict] if verdict.row_count else ())))


def _trained(uses: list[Json]) -> Iterator[RenderableType]:
    """Mean advantage by turn of each segment, and its largest gap between engine and trainer."""
    table = Table("segment", "step", "turn", "advantage", title="trained on", title_justify="left")
    lines: list[RenderableType] = []
    for number, found in enumerate(uses):
        for turn, advantage in advantage_by_turn(found["columns"]):
            table.add_row(str(number), str(found["step"]), str(turn), f"{advantage:+.4g}")
        weights = [value for value in found["columns"]["weights"] or () if value is not None]
        gaps = [abs(value) for value in found["columns"]["gap"] or () if value is not None]
        if weights:
            gap = f"{max(gaps):.3g}" if gaps else "not recorded"
            text = f"segment {number}: {len(weights)} trained tokens, weights {min(weights):.3g} to {max(weights):.3g}"
            lines.append(Text(f"{text}, largest gap of engine and trainer {gap}", style="dim"))
    lines.insert(0, table)
    yield from lines if table.row_count else [Text("no step trained on it", style="dim")]
