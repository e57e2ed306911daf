"""How well untrue statements are told from true ones, on the labeled sentences in tests/data/claims.

    python -m tools.bench.claims [--set heldout|fresh] [--domain retail] [--show]

A sentence is said in a scene: a task, what the customer has said and what the agent has called by then. It is called
untrue if any claim that is read in it is. Of ``true`` and ``false`` sentences those are unread that hold no claim.

* precision: of the sentences called untrue, those that are labeled ``false``
* recall: of the sentences labeled ``false``, those called untrue

``--set`` takes the sentences of a folder below, which are said in the same scenes. ``--show`` prints the sentences that
are told wrongly or not read, and ``--write`` puts the tables of all sets into docs/benchmarks/claims.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from environments.help_desk.tasks import HERE
from environments.help_desk.tools import HelpDesk
from environments.help_desk.verdict import Replayed
from environments.kit.conduct import Called, Past, Replay
from environments.kit.database import Again, DatabaseEnvironment
from environments.kit.language.claims import ClaimReader, Moment, Review, claim_reader
from mua.environment.protocol import Task, UserControlled
from mua.environment.registry import get_domain
from tools import kit

DATA = kit.ROOT / "tests" / "data" / "claims"
SETS = ("", "heldout", "fresh")
"""Folders of sentences; the first is the one that development looks at."""
_TITLES = {"": "Development", "heldout": "Held out at first", "fresh": "Fresh"}
PAGE = kit.ROOT / "docs" / "benchmarks" / "claims.md"


@dataclass(frozen=True, slots=True)
class Judged:
    """One labeled sentence and what was read in it."""

    scene: str
    say: str
    label: str
    review: Review

    @property
    def untrue(self) -> bool:
        return bool(self.review.false)

    @property
    def unread(self) -> bool:
        return self.label != "irrelevant" and not self.review.false and not self.review.true

    @property
    def wrong(self) -> bool:
        return self.untrue != (self.label == "false")


@dataclass(frozen=True, slots=True)
class Score:
    """What a set of sentences came to."""

    sentences: int
    precision: float
    recall: float
    unread: float
    """Share of the ``true`` and ``false`` sentences in which nothing was read."""


def sets(folder: Path = DATA) -> list[str]:
    """The domains that have sentences in ``folder`` and a checker."""
    return [path.stem for path in sorted(folder.glob("*.jsonl")) if _checker(path.stem) is not None]


def judged(name: str, folder: Path = DATA) -> Iterator[Judged]:
    """Every sentence of a domain, read in its scene."""
    scenes = yaml.safe_load((DATA / f"{name}-scenes.yaml").read_text(encoding="utf-8"))
    for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        reader, moment = _at(name, folder, row["scene"], json.dumps(scenes[row["scene"]]))
        yield Judged(row["scene"], row["say"], row["label"], reader.review(row["say"], moment))


def score(rows: Sequence[Judged]) -> Score:
    """Precision, recall and what was not read; 1 where there is nothing to count."""
    called = [row for row in rows if row.untrue]
    false = [row for row in rows if row.label == "false"]
    stated = [row for row in rows if row.label != "irrelevant"]
    right = sum(row.label == "false" for row in called)
    return Score(
        len(rows),
        right / len(called) if called else 1.0,
        right / len(false) if false else 1.0,
        sum(row.unread for row in stated) / max(1, len(stated)),
    )


@cache
def _at(name: str, folder: Path, scene: str, data: str) -> tuple[ClaimReader, Moment]:
    """The reader, and what is so in a scene."""
    state = json.loads(data)
    task = Task(f"{name}/{scene}", name, "test", state["task"])
    found = _checker(name, task)
    assert found is not None
    reader, replay, users = found
    past = Past(heard=state["heard"])
    for call in state["calls"]:
        called = Called(call["name"], call["arguments"], by_user=call["name"] in users)
        result = replay.call(called)
        assert not result.error, (scene, call, result.text)
        past.calls.append(called)
    return reader, replay.moment(past)


def _checker(name: str, task: Task | None = None) -> tuple[ClaimReader, Replay, set[str]] | None:
    """The claim reader of a domain, a fresh replay and the user's tools; None for a domain that checks no claims."""
    domain = get_domain(name)
    task = task or domain.tasks("test")[0]
    environment = domain.environment()
    environment.reset(task, 0)
    if isinstance(environment, HelpDesk):
        return claim_reader(HERE), Replayed(environment, task), set()
    assert isinstance(environment, DatabaseEnvironment)
    desk, code = environment.desk, environment.desk.code
    if code is None:
        return None
    users = {tool.name for tool in environment.user_tools()} if isinstance(environment, UserControlled) else set()
    return code.claims, Again(desk, code, task, desk.base_of(task)), users


def _row(name: str, found: Score) -> str:
    shares = (found.precision, found.recall, found.unread)
    return kit.row(name, found.sentences, *(f"{share:.3f}" for share in shares))


def table(folder: Path) -> str:
    """The table of all domains."""
    head = kit.head("domain", "sentences", "precision", "recall", "unread")
    return "\n".join([head, *(_row(name, score(list(judged(name, folder)))) for name in sets(folder))])


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--set", choices=SETS, default="", help="another folder of sentences")
    parser.add_argument("--domain", help="one domain only")
    parser.add_argument("--show", action="store_true", help="print what is told wrongly or not read")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(kit.ROOT)}")
    given = parser.parse_args()
    if given.domain:
        rows = list(judged(given.domain, DATA / given.set))
        for row in (row for row in rows if given.show and (row.wrong or row.unread)):
            read = f"true={[str(c) for c in row.review.true]} false={[str(c) for c in row.review.false]}"
            print(f"{'WRONG' if row.wrong else 'unread'} {row.label} [{row.scene}] {row.say!r}\n      {read}")
        print(_row(given.domain, score(rows)))
        return
    if given.write:
        head, _, _ = PAGE.read_text(encoding="utf-8").partition("\n## Figures")
        tables = "\n".join(f"### {_TITLES[one]}\n\n{table(DATA / one)}\n" for one in SETS)
        PAGE.write_text(f"{head}\n## Figures\n\n{tables}", encoding="utf-8")
    else:
        print(table(DATA / given.set))


if __name__ == "__main__":
    main()
