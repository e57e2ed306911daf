"""The report of the demonstration: one HTML file with the table, the curve, failures next to successes, and the way on.

It is the page of ``mua view --export`` over the evaluations before and after and the training between them, with a part
in front: what that part shows can be opened, token by token, further down.
"""

from __future__ import annotations

import base64
import html
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mua.types import Json
from mua.view.html_page import export_page
from mua.view.page_answers import Answers
from mua.view.trajectory_lists import MOST_ROWS
from mua.view.viewed_runs import opened_runs

MEGABYTES = 6.0
"""Of trajectories in the file."""
_UNTOLD = ("system",)


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
        lead = "".join(_lead(sections, picture, pairs, folder, domain))
        first = [(one.run, one.trajectory["id"]) for pair in pairs for one in (pair.left, pair.right)]
        export_page(answers, out, only={}, megabytes=MEGABYTES, first=first, lead=lead)
    return pairs


def _pairs(answers: Answers, before: str, after: str, hopeful: Sequence[str]) -> Iterator[Pair]:
    """The same task failed before and solved after; and a failure that is left, next to a success of its kind."""
    old, new = ({row["task_id"]: row for row in _rows(answers, key)} for key in (before, after))
    turned = [row for task, row in new.items() if row["success"] and task in old and not old[task]["success"]]
    if turned:
        best = max(turned, key=lambda row: _interest(row, hopeful))
        yield Pair(
            f"The same task, before and after: {best['kind']}",
            "Left the policy after supervised fine-tuning, right after reinforcement learning, on a task that neither "
            "was trained on.",
            _shown(answers, "before", before, old[best["task_id"]]),
            _shown(answers, "after", after, best),
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
            _shown(answers, "failed", after, failed),
            _shown(answers, "solved", after, won),
        )


def _rows(answers: Answers, key: str) -> list[Json]:
    """The scored episodes of the newest evaluation."""
    found = answers.answer("trajectories", {"run": key, "limit": str(MOST_ROWS)})["rows"]
    return [row for row in found if row["scored"]]


def _interest(row: Json, hopeful: Sequence[str]) -> tuple[bool, int, str]:
    """Longer ones first: a conversation of one turn shows little."""
    return row["kind"] in hopeful, row["turns"], row["task_id"]


def _shown(answers: Answers, title: str, run: str, row: Json) -> Shown:
    return Shown(title, run, answers.answer("trajectory", {"run": run, "id": row["id"]}))


# HTML. Whatever a policy, a user or a tool wrote is escaped.


def _lead(
    sections: Sequence[Section], picture: Path, pairs: Sequence[Pair], folder: Path, domain: str
) -> Iterator[str]:
    yield f"<h1>What a tiny policy learned: {_text(domain)}</h1>"
    yield (
        "<p>Success on the test split by kind of wish, with 95 % intervals. No task of this split was trained on or "
        "looked at before.</p>"
    )
    for section in sections:
        yield from _table(section)
    image = base64.b64encode(picture.read_bytes()).decode()
    yield f'<h2>Reward while it learned</h2><img alt="reward curve" src="data:image/png;base64,{image}">'
    for pair in pairs:
        yield f"<h2>{_text(pair.title)}</h2><p>{_text(pair.about)}</p>"
        yield f'<div class="beside">{_episode(pair.left)}{_episode(pair.right)}</div>'
    yield from _next(folder, domain)
    yield "<h2>The runs</h2><p>What follows is <code>mua view</code>: open a run, a step, a trajectory, a token.</p>"


def _table(section: Section) -> Iterator[str]:
    yield f"<h2>{_text(section.title)}</h2><div class='wide'><table class='rows'>"
    yield (
        "<tr><th>kind of wish</th><th>tasks</th>"
        + "".join(f"<th>{_text(name)}</th>" for name in section.head)
        + "<th></th></tr>"
    )
    for kind in section.kinds:
        cells = "".join(f"<td>{_text(cell)}</td>" for cell in kind.cells)
        bar = f'<span class="bar"><span style="width:{100 * kind.mean:.0f}%"></span></span>'
        yield f"<tr><td>{_text(kind.name)}</td><td class='right'>{kind.tasks}</td>{cells}<td>{bar}</td></tr>"
    for label, values in section.means:
        cells = "".join(f"<th>{_text(value)}</th>" for value in values)
        yield f"<tr><th>{_text(label)}</th><td></td>{cells}<td></td></tr>"
    yield "</table></div>"


def _episode(shown: Shown) -> str:
    found = shown.trajectory
    mark = '<span class="mark won">success</span>' if found["success"] else '<span class="mark lost">failed</span>'
    address = f"#/run/{_text(shown.run)}/t/{_text(found['id'])}"
    head = f"<h3>{_text(shown.title)} {mark} reward {found['reward']:.3g}, {found['turns']} turns</h3>"
    talk = "".join(_message(message) for message in found["messages"] or () if message.get("role") not in _UNTOLD)
    link = f'<p><a href="{address}">its tokens and log-probabilities</a></p>'
    return f"<section>{head}{talk}{_verdict(found['details'])}{link}</section>"


def _message(message: Json) -> str:
    role = str(message.get("role"))
    parts = [f'<div class="who">{_text(role)} {_text(str(message.get("name") or ""))}</div>']
    if message.get("content"):
        parts.append(f'<div class="text">{_text(str(message["content"]))}</div>')
    for call in message.get("tool_calls") or ():
        called = call.get("function") or {}
        parts.append(f'<div class="call">{_text(str(called.get("name")))}({_text(str(called.get("arguments")))})</div>')
    if message.get("tool_call_errors"):
        parts.append(f'<div class="fault">{_text(str(message["tool_call_errors"]))}</div>')
    known = role if role in ("assistant", "user", "tool") else "system"
    return f'<div class="message {known}">{"".join(parts)}</div>'


def _verdict(details: Json) -> str:
    """What the environment found, where it found anything."""
    rows = [
        f"<tr><th>{_text(str(name))}</th><td class='text'>{_text(str(value))}</td></tr>"
        for name, value in details.items()
        if value not in (None, [], {}, "", False)
    ]
    return f"<h3>the environment's verdict</h3><table class='facts'>{''.join(rows)}</table>" if rows else ""


def _next(folder: Path, domain: str) -> Iterator[str]:
    def line(*words: object) -> str:
        return html.escape(shlex.join(["mua", *map(str, words)]))

    policy, rl = folder / "rl" / "hf", folder / "rl"
    steps: Mapping[str, str] = {
        "Talk to it as its customer": line("env", "play", domain, "--as", "user", "--policy", policy),
        "Look at all of its episodes, or at one failure in the terminal": (
            f"{line('view', rl)}\n{line('show', rl, '--only', 'success=false', '--sample', '1')}"
        ),
        "Train it longer, or otherwise: every key can be set": (
            f"{line('config', 'show', 'demo')}\n{line('demo', 'trainer.steps=80', '--seeds', '1,2,3')}"
        ),
        "Make a domain of your own, with its tools, users and reward": (
            f"{line('env', 'new', 'my_shop')}\n{line('env', 'play', domain)}"
        ),
        "Train a large model: what it needs, then a job": (
            f"{line('recipes')}\n{line('plan', 'qwen3-8b-1x8')}\n{line('launch', 'slurm', 'qwen3-8b-1x8', '--dry-run')}"
        ),
    }
    yield "<h2>Where to go next</h2>"
    yield from (f"<p>{_text(about)}</p><pre>{commands}</pre>" for about, commands in steps.items())


def _text(said: str) -> str:
    """For HTML; control characters as escapes."""
    return html.escape("".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in said))
