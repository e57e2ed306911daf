"""Policies that deserve nothing on database tasks; see :mod:`workbench.canned`.

They look at the tables at most as far as one statement that is the same for all tasks, and never at what is asked.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Generator, Mapping, Sequence

from environments.agentbench_db.episode import COMMIT, EXECUTE
from environments.agentbench_db.own import PLACES
from mua.environment.protocol import Move
from workbench.canned import Canned, Glance, Player, end_at_once, write_at_random

_TABLE = re.compile(r"table is called ([^;]+);")
_COLUMNS = re.compile(r"columns are ([^.]+)\.")


def commits(*answers: str) -> Player:
    """Hands these in, whatever is asked."""

    def play(glance: Glance) -> Generator[Move, str, None]:
        yield _commit(answers)

    return play


def the_question(glance: Glance) -> Generator[Move, str, None]:
    """Hands in the last word of the question."""
    yield _commit([_asked(glance.opening).rstrip(" ?.").split(" ")[-1]])


def every_word(glance: Glance) -> Generator[Move, str, None]:
    """Hands in all words of the question."""
    yield _commit(re.findall(r"\w+", _asked(glance.opening)))


def first_cell(glance: Glance) -> Generator[Move, str, None]:
    """Hands in the first cell of the table."""
    rows = yield from _rows(glance)
    yield _commit([rows[0][0]] if rows else ["0"])


def commonest(glance: Glance) -> Generator[Move, str, None]:
    """Hands in the value that stands in most cells."""
    cells = [cell for row in (yield from _rows(glance)) for cell in row]
    yield _commit([Counter(cells).most_common(1)[0][0]] if cells else ["0"])


def count_rows(glance: Glance) -> Generator[Move, str, None]:
    """Hands in the number of rows."""
    yield _commit([str(len((yield from _rows(glance))))])


def dump(glance: Glance) -> Generator[Move, str, None]:
    """Hands in every cell of the table."""
    yield _commit([cell for row in (yield from _rows(glance)) for cell in row] or ["0"])


def delete_all(glance: Glance) -> Generator[Move, str, None]:
    """Empties the table."""
    yield EXECUTE.name, {"query": f"DELETE FROM `{_table(glance)}`"}
    yield _commit(["done"])


def repeat_the_first_row(glance: Glance) -> Generator[Move, str, None]:
    """Writes the first row once more."""
    yield EXECUTE.name, {"query": f"INSERT INTO `{_table(glance)}` SELECT * FROM `{_table(glance)}` LIMIT 1"}
    yield _commit(["done"])


def at_random(glance: Glance) -> Generator[Move, str, None]:
    """Runs a statement drawn at random over a column drawn at random, and hands in the first value shown."""
    heads = found[1].split(", ") if (found := _COLUMNS.search(glance.opening)) else ["1"]
    what = glance.rng.choice(["MIN(`{}`)", "COUNT(DISTINCT `{}`)", "`{}`", "LENGTH(`{}`)", "MIN(`{}` + 0)"])
    query = f"SELECT {what.format(glance.rng.choice(heads))} FROM `{_table(glance)}`"
    rows = _read((yield EXECUTE.name, {"query": query}))
    yield _commit([rows[0][0]] if rows else ["0"])


def recite(glance: Glance) -> Generator[Move, str, None]:
    """Hands in the answer of the training question that shares most words with this one, and runs its statement."""
    words = set(_asked(glance.opening).split())
    task = max(glance.training, key=lambda task: len(words & set(task.data["question"].split())))
    if "label" not in task.data:
        yield EXECUTE.name, {"query": task.data["gold"]}
    yield _commit(task.data.get("label", ["done"]))


def _commit(answers: Sequence[str]) -> Move:
    return COMMIT.name, {"answers": list(answers)}


def _table(glance: Glance) -> str:
    found = _TABLE.search(glance.opening)
    return found[1] if found else "t"


def _asked(opening: str) -> str:
    return opening.rpartition("\n")[2].partition(": ")[2]


def _rows(glance: Glance) -> Generator[Move, str, list[list[str]]]:
    return _read((yield EXECUTE.name, {"query": f"SELECT * FROM `{_table(glance)}`"}))


def _read(shown: str) -> list[list[str]]:
    """The rows of a result as texts; none where it is no list of rows."""
    try:
        rows = ast.literal_eval(shown)
    except (ValueError, SyntaxError):
        return []
    return [[str(cell) for cell in row] for row in rows] if isinstance(rows, list) else []


CANNED: Mapping[str, Canned] = {
    "the last word": Canned(the_question),
    "every word": Canned(every_word),
    "first cell": Canned(first_cell),
    "commonest value": Canned(commonest),
    "number of rows": Canned(count_rows),
    "NULL": Canned(commits("NULL")),
    "nothing": Canned(commits()),
    **{str(number): Canned(commits(str(number))) for number in range(6)},
    **{place: Canned(commits(place)) for place in PLACES},
    "all places": Canned(commits(*PLACES)),
    "dump": Canned(dump),
    "delete all": Canned(delete_all),
    "repeat the first row": Canned(repeat_the_first_row),
    "statement at random": Canned(at_random),
    "recite training": Canned(recite),
    "tools at random": Canned(write_at_random),
    "end at once": Canned(end_at_once),
}
