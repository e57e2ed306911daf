"""The page: its modules and style, put together for the server (links) or for a file (all inside).

``mua view --export`` writes the page with its answers in it, one file that opens anywhere, without a network::

    index     runs, overviews, steps, rows of the trajectories that are in the file, comparisons
    t/<n>     one trajectory with its tokens, unpacked when it is opened

Each is JSON, compressed with gzip, as base64.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from mua.store.tables import tool_calls, uses
from mua.types import Json
from mua.utils.atomic import replacing
from mua.utils.files import naming, private_opener
from mua.view.page_answers import Answers, as_bytes
from mua.view.run_overview import curves, step_lines
from mua.view.trajectory_lists import MOST_ROWS, BadQuestion
from mua.view.viewed_runs import ViewedRun

STATIC = Path(__file__).with_name("static")
MODULES = {
    "preact": "vendor/preact.mjs",
    "preact/hooks": "vendor/preact_hooks.mjs",
    "htm": "vendor/htm.mjs",
    "uplot": "vendor/uplot.mjs",
    **{f"view/{name}": f"{name}.js" for name in (
        "app", "api", "charts", "compare", "embedded", "list", "overview", "steps", "trajectory", "ui",
    )},
}  # fmt: skip
"""What modules import each other as, and the file of each: the browser's import map, so nothing has to be built."""
STYLES = ("vendor/uplot.css", "style.css")
_START = 'import "view/app";'


def served_page() -> tuple[str, str]:
    """The page of a server, and its Content-Security-Policy: only its own files, no script but these."""
    imports = json.dumps({"imports": {name: f"/static/{file}" for name, file in MODULES.items()}})
    styles = "".join(f'<link rel="stylesheet" href="/static/{file}">' for file in STYLES)
    policy = (
        f"default-src 'none'; script-src 'self' {_digest(imports)} {_digest(_START)}; style-src 'self'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return _page("mua view", styles, imports, ""), policy


def whole_page(title: str, blobs: Iterable[tuple[str, bytes]], lead: str = "") -> Iterable[str]:
    """The pieces of a page that needs nothing else; ``blobs`` are bytes by name, which its modules find there.

    The bytes stand in it as base64, in which no markup can occur. ``lead`` is HTML that stands before the list of runs.
    """
    sources = {name: (STATIC / file).read_bytes() for name, file in MODULES.items()}
    imports = json.dumps({
        "imports": {
            name: f"data:text/javascript;base64,{base64.b64encode(source).decode()}" for name, source in sources.items()
        }
    })  # fmt: skip
    styles = "".join(f"<style>{(STATIC / file).read_text(encoding='utf-8')}</style>" for file in STYLES)
    policy = (
        f"default-src 'none'; script-src data: {_digest(imports)} {_digest(_START)}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    before, after = _page(
        title, styles, imports, f'<meta http-equiv="Content-Security-Policy" content="{policy}">', lead
    ).split("<!-- data -->")
    yield before
    for name, content in blobs:
        text = base64.b64encode(content).decode()
        yield f'<script type="application/octet-stream" data-name="{html.escape(name)}">{text}</script>\n'
    yield after


def _page(title: str, styles: str, imports: str, policy: str, lead: str = "") -> str:
    lead = f'<section id="lead">{lead}</section>' if lead else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{policy}<title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">{styles}'
        f'<script type="importmap">{imports}</script></head><body>{lead}<div id="app"></div>\n<!-- data -->'
        f'<script type="module">{_START}</script></body></html>\n'
    )


def _digest(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


MEGABYTES = 20.0
"""Of trajectories in a file, as it lies on the disk; a browser opens several times as much, slowly."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What is in the file."""

    trajectories: int
    of: int
    """That the filters leave, over all runs."""
    pruned: int
    """Of those in the file, whose tokens or messages are gone."""
    bytes: int


def export_page(
    answers: Answers,
    out: Path,
    *,
    only: Mapping[str, str],
    most: int | None = None,
    megabytes: float = MEGABYTES,
    first: Sequence[tuple[str, str]] = (),
    lead: str = "",
) -> Exported:
    """Write ``out`` with the trajectories that the filters ``only`` leave (as mua.view.trajectory_lists.question_of).

    Of more than ``most``, or than fit into ``megabytes``, a sample spread evenly over each run is in the file, and its
    page says so. ``first`` are runs' keys and trajectories' ids that are in it in any case, and ``lead`` is HTML that
    stands before the list of runs. Raises :class:`BadQuestion`, :class:`DiskError`.
    """
    for name in only:
        if name in ("order", "limit", "offset", "run"):
            raise BadQuestion(f"{name}: no filter of an export")
    names = answers.viewed.keys()
    runs = [answers.viewed.get(key) for key in names]
    chosen = {}
    for run in runs:
        with run.store.read() as connection:
            chosen[run.key] = answers.lists.ids(connection, run, only)
    wanted = sum(map(len, chosen.values()))
    packed: dict[str, list[tuple[str, bytes]]] = {run.key: [] for run in runs}
    numbers, size, pruned = itertools.count(), 0, 0
    for run, name in _spread(runs, chosen, most, first):
        given = {"run": run.key, "id": name}
        trajectory = answers.answer("trajectory", given)
        of_segments = [
            answers.answer("tokens", given | {"segment": str(part["number"])}) if part["kept"] else None
            for part in trajectory["segment_list"]
        ]
        gone = trajectory["messages"] is None or None in of_segments
        blob = gzip.compress(as_bytes({"trajectory": trajectory, "tokens": of_segments}), 6, mtime=0)
        if size and size + 4 * len(blob) / 3 > megabytes * 2**20:
            break
        size, pruned = size + 4 * len(blob) // 3, pruned + gone
        packed[run.key].append((name, blob))
    keys = {(run.key, name): str(next(numbers)) for run in runs for name, _ in packed[run.key]}
    count = len(keys)
    note = f"This file holds {count:,} of {wanted:,} trajectories" + (
        f" that {', '.join(f'{name}={value}' for name, value in only.items())} leaves" if only else ""
    ) + (", a sample spread evenly over each run." if count < wanted else ".")  # fmt: skip
    index = _index(answers, runs, {run.key: [name for name, _ in packed[run.key]] for run in runs}, keys, note)
    blobs = itertools.chain(
        [("index", gzip.compress(as_bytes(index), 6, mtime=0))],
        ((f"t/{keys[run.key, name]}", blob) for run in runs for name, blob in packed[run.key]),
    )
    pieces = whole_page(f"mua view: {', '.join(run.key for run in runs)}", blobs, lead)
    with naming(out), replacing(out) as new, open(new, "w", encoding="utf-8", opener=private_opener) as file:
        file.writelines(pieces)
    return Exported(count, wanted, pruned, out.stat().st_size)


def _spread(
    runs: Sequence[ViewedRun], chosen: Mapping[str, list[str]], most: int | None, first: Sequence[tuple[str, str]]
) -> Iterator[tuple[ViewedRun, str]]:
    """Trajectories of all runs in turn, each run's in an order whose every beginning lies evenly over it; ``first``
    before all."""
    by_key = {run.key: run for run in runs}
    orders = []
    for run in runs:  # van der Corput's sequence: ever finer halves
        width = max(1, (len(chosen[run.key]) - 1).bit_length())
        places = (int(f"{number:0{width}b}"[::-1], 2) for number in range(2**width))
        orders.append([(run.key, chosen[run.key][at]) for at in places if at < len(chosen[run.key])])
    turns = (pair for row in itertools.zip_longest(*orders) for pair in row if pair is not None)
    every = dict.fromkeys(itertools.chain(first, turns))
    yield from ((by_key[key], name) for key, name in itertools.islice(every, most))


def _index(
    answers: Answers, runs: Sequence[ViewedRun], kept: Mapping[str, list[str]], keys: Mapping[tuple[str, str], str],
    note: str,
) -> Json:  # fmt: skip
    of_run: dict[str, Json] = {}
    for run in runs:
        given = {"run": run.key}
        listed = answers.answer("steps", given)
        with run.store.read() as connection:
            lines = step_lines(connection, run)
        of_run[run.key] = {
            "run": answers.answer("run", given),
            "changes": answers.answer("changes", given),
            "steps": listed,
            "step": {
                str(row["step"]): answers.answer("step", given | {"step": str(row["step"])}) for row in listed["steps"]
            },
            "curves": curves(lines, sorted({name for line in lines for name in line if name != "step"})),
            "rows": _rows(answers, run, kept[run.key], keys),
        }
    everything = answers.answer("runs", {})["runs"]
    rounds = {key: one["run"]["evaluations"] for key, one in of_run.items()}
    comparisons = {}  # of every two runs: training, and the newest evaluation of each
    for a, b in itertools.permutations(of_run, 2):
        newest = tuple(str(rounds[key][-1]["round"]) if rounds[key] else "0" for key in (a, b))
        for ra, rb in {("0", "0"), newest}:
            comparisons[f"{a} {b} {ra} {rb}"] = answers.answer("compare", {"a": a, "b": b, "ra": ra, "rb": rb})
    return {
        "note": note,
        "runs": [row for row in everything if row["key"] in of_run],
        "of_run": of_run,
        "compared": comparisons,
    }


def _rows(answers: Answers, run: ViewedRun, names: list[str], keys: Mapping[tuple[str, str], str]) -> list[Json]:
    rows: list[Json] = []
    with run.store.read() as connection:
        for at in range(0, len(names), MOST_ROWS):
            some = names[at : at + MOST_ROWS]
            rows += answers.lists.rows_of(connection, run, some)
            steps: defaultdict[str, list[int]] = defaultdict(list)
            for name, step in connection.execute(
                sa.select(uses.c.trajectory_id, uses.c.step).where(uses.c.trajectory_id.in_(some)).distinct()
            ):
                steps[name].append(step)
            called: defaultdict[str, list[str]] = defaultdict(list)
            for name, tool in connection.execute(
                sa.select(tool_calls.c.trajectory_id, tool_calls.c.name)
                .where(tool_calls.c.trajectory_id.in_(some)).distinct()
            ):  # fmt: skip
                called[name].append(tool)
            for row in rows[at:]:
                row |= {"key": keys[run.key, row["id"]], "steps": steps[row["id"]], "tools": called[row["id"]]}
    return rows
