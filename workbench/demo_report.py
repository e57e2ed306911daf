"""The report of the demonstration: one HTML file with the table, the curve, failures next to successes, and the way on.

It is the page of ``mua view --export`` over the evaluations before and after and the training between them, with a part
in front: what that part shows can be opened, token by token, further down.
"""

from __future__ import annotations

import base64
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment

from mua.types import Json
from mua.view.html_page import export_page
from mua.view.page_answers import Answers
from mua.view.trajectory_lists import MOST_ROWS
from mua.view.viewed_runs import opened_runs

MEGABYTES = 6.0
"""Of trajectories in the file."""
TEMPLATE = Path(__file__).with_name("demo_report.html.jinja")


@dataclass(frozen=True)
class Kind:
    """Success of one kind of wish, as text: before, after, and that of others."""

    name: str
    tasks: int
    cells: Sequence[str]
    mean: float
    """After."""


@dataclass(frozen=True)
class Section:
    """The table of one seed."""

    title: str
    head: Sequence[str]
    kinds: Sequence[Kind]
    means: Sequence[tuple[str, Sequence[str]]]
    """Rows below it: label and cells."""


@dataclass(frozen=True)
class Shown:
    """An episode in the report."""

    title: str
    run: str
    trajectory: Json


@dataclass(frozen=True)
class Pair:
    """Two episodes side by side."""

    title: str
    about: str
    left: Shown
    right: Shown


def write_report(
    out: Path, sections: Sequence[Section], picture: Path, folder: Path, hopeful: Sequence[str], domain: str
) -> list[Pair]:
    """Write ``out``; the pairs of episodes that it shows.

    Args:
        sections: the tables.
        picture: a PNG of the curves.
        folder: of the seed whose episodes are shown: evaluations in ``before`` and ``after``, training in ``rl``.
        hopeful: kinds of wish that are to be granted, from which examples are taken where there are any.
        domain: that the policy was trained on.
    """
    places = [str(folder / name) for name in ("before", "after", "rl")]
    with opened_runs(places, tell=lambda line: print(line, file=sys.stderr)) as viewed:
        answers = Answers(viewed)
        names = viewed.keys()
        keys = {Path(viewed.get(key).folder or "").name: key for key in names}
        pairs = list(_pairs(answers, keys["before"], keys["after"], hopeful))
        lead = _lead(sections, picture, pairs, folder, domain)
        first = [(one.run, one.trajectory["id"]) for pair in pairs for one in (pair.left, pair.right)]
        export_page(answers, out, only={}, megabytes=MEGABYTES, first=first, lead=lead)
    return pairs


def _pairs(answers: Answers, before: str, after: str, hopeful: Sequence[str]) -> Iterator[Pair]:
    """The same task failed before and solved after; and a failure that is left, next to a success of its kind."""

    def episodes(key: str) -> dict[str, Json]:
        """The scored ones of the newest evaluation, by task."""
        found = answers.answer("trajectories", {"run": key, "limit": str(MOST_ROWS)})["rows"]
        return {row["task_id"]: row for row in found if row["scored"]}

    def shown(title: str, run: str, row: Json) -> Shown:
        return Shown(title, run, answers.answer("trajectory", {"run": run, "id": row["id"]}))

    old, new = episodes(before), episodes(after)
    turned = [row for task, row in new.items() if row["success"] and task in old and not old[task]["success"]]
    if turned:
        best = max(turned, key=lambda row: _interest(row, hopeful))
        yield Pair(
            f"The same task, before and after: {best['kind']}",
            "Left the policy after supervised fine-tuning, right after reinforcement learning, on a task that neither "
            "was trained on.",
            shown("before", before, old[best["task_id"]]),
            shown("after", after, best),
        )
    by_kind: defaultdict[str, dict[bool, list[Json]]] = defaultdict(lambda: {True: [], False: []})
    for row in new.values():
        by_kind[row["kind"]][bool(row["success"])].append(row)
    mixed = [rows for rows in by_kind.values() if rows[True] and rows[False]]
    if mixed:
        rows = max(mixed, key=lambda rows: (rows[True][0]["kind"] in hopeful, len(rows[False]), rows[True][0]["kind"]))
        failed, won = (max(rows[solved], key=lambda row: _interest(row, hopeful)) for solved in (False, True))
        yield Pair(
            f"What it still gets wrong: {failed['kind']}",
            f"Of {len(rows[True]) + len(rows[False])} tasks of this kind {len(rows[False])} fail after training. Left "
            "one of them, right one that it solves.",
            shown("failed", after, failed),
            shown("solved", after, won),
        )


def _interest(row: Json, hopeful: Sequence[str]) -> tuple[bool, int, str]:
    """Longer ones first: a conversation of one turn shows little."""
    return row["kind"] in hopeful, row["turns"], row["task_id"]


def _lead(sections: Sequence[Section], picture: Path, pairs: Sequence[Pair], folder: Path, domain: str) -> str:
    """The part in front. Whatever a policy, a user or a tool wrote is escaped, control characters too."""

    def line(*words: object) -> str:
        return shlex.join(["mua", *map(str, words)])

    policy, rl = folder / "rl" / "hf", folder / "rl"
    steps = {
        "Talk to it as its customer": [line("env", "play", domain, "--as", "user", "--policy", policy)],
        "Look at all of its episodes, or at one failure in the terminal": [
            line("view", rl),
            line("show", rl, "--only", "success=false", "--sample", "1"),
        ],
        "Train it longer, or otherwise: every key can be set": [
            line("config", "show", "demo"),
            line("demo", "trainer.steps=80", "--seeds", "1,2,3"),
        ],
        "Make a domain of your own, with its tools, users and reward": [
            line("env", "new", "my_shop"),
            line("env", "play", domain),
        ],
        "Train a large model: what it needs, then a job": [
            line("recipes"),
            line("plan", "qwen3-8b-1x8"),
            line("launch", "slurm", "qwen3-8b-1x8", "--dry-run"),
        ],
    }
    page = Environment(autoescape=True, finalize=_printable).from_string(TEMPLATE.read_text(encoding="utf-8"))
    image = base64.b64encode(picture.read_bytes()).decode()
    return page.render(sections=sections, image=image, pairs=pairs, steps=steps, domain=domain)


def _printable(said: object) -> object:
    if hasattr(said, "__html__"):  # a part that is escaped already
        return said
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in str(said))
