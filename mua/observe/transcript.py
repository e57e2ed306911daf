"""One trajectory as a conversation in which the loss mask can be seen."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from mua.types import EVALUATION_ORDINALS, Outcome, Provenance, Segment, Trajectory
from mua.utils.strict_json import pictured

LEGEND = "⟦ ⟧, green and underlined: sampled by the policy, carries loss. Everything else is context."

_LABELS = {
    Provenance.SYSTEM: ("system", "magenta"),
    Provenance.USER: ("user", "cyan"),
    Provenance.TOOL: ("tool", "yellow"),
    Provenance.TEMPLATE: ("template", "dim"),
    Provenance.SAMPLED: ("agent", "green"),
}


def render_trajectory(trajectory: Trajectory, decode: Callable[[list[int]], str]) -> RenderableType:
    """The episode for a terminal: a header, then every token with its origin, in the order the engine saw them.

    ``decode`` turns ids into text and must keep special tokens. Legible without color: what carries loss stands in
    ⟦ ⟧. A character whose bytes are split between two origins shows as the replacement character.
    """
    verdict = "success" if trajectory.success else "no success"
    by_turn = ", ".join(f"{reward:g}" for reward in trajectory.turn_rewards) or "none"
    tokens = sum(map(len, trajectory.segments))
    evaluated = trajectory.ordinal >= EVALUATION_ORDINALS
    group = "this task, in an evaluation" if evaluated else f"group {trajectory.ordinal}"
    listed = {
        "outcome": f"{trajectory.outcome.value}, {verdict}{'' if trajectory.scored else ', not scored'}",
        "reward": f"{trajectory.reward:g} (by turn: {by_turn})",
        "turns": f"{len(trajectory.turn_rewards)}, {tokens} tokens, {trajectory.sampled_tokens} of them sampled",
        "sample": f"{trajectory.sample} of {group}, attempt {trajectory.attempts}",
    }
    error = [("error", trajectory.error)] if trajectory.error else []
    facts = Table.grid(padding=(0, 2))
    for name, value in [*listed.items(), *((n, str(v)) for n, v in trajectory.details.items()), *error]:
        facts.add_row(Text(name, style="dim"), Text(value))
    color = "green" if trajectory.success else "yellow"
    if not trajectory.scored or trajectory.outcome is Outcome.MALFORMED:
        color = "red"
    title = Text(f"task {trajectory.task_id}")
    parts: list[RenderableType] = [Panel(facts, title=title, border_style=color, expand=False)]
    for number, segment in enumerate(trajectory.segments, start=1):
        if len(trajectory.segments) > 1:
            parts.append(Rule(f"segment {number} of {len(trajectory.segments)}", style="dim"))
        parts.append(_segment(segment, decode))
    return Group(*parts, Text(LEGEND, style="dim"))


def _segment(segment: Segment, decode: Callable[[list[int]], str]) -> Table:
    """One row for each stretch of equal provenance and turn."""
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    changes = (np.diff(segment.provenance) != 0) | (np.diff(segment.turn) != 0)
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(segment)]
    for start, end in itertools.pairwise(bounds) if len(segment) else ():
        provenance = Provenance(int(segment.provenance[start]))
        label, color = _LABELS[provenance]
        turn = f"{int(segment.turn[start])} "
        text = pictured(decode(segment.ids[start:end].tolist()))
        marked = Text(text.strip("\n"))
        if provenance is Provenance.SAMPLED:
            text = text[:-1] + "⏎" if text.endswith("\n") else text
            marked = Text.assemble("⟦", (text, "green underline"), "⟧")
        elif provenance is Provenance.TEMPLATE:
            marked = Text(text.replace("\n", "⏎"), style="dim")
        table.add_row(Text(turn + label, style=color), marked)
    return table
