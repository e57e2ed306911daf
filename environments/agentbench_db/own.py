"""Tasks of this project in AgentBench's form: eight made-up tables, questions by seeded templates.

``python -m environments.agentbench_db.own`` writes them to ``own/{train,validation,test}.jsonl``, where the domain
reads them when ``environment.data`` names nothing; a test compares the files with what is made here. Splits share no
table: each has rows of its own. Labels are computed from the rows, and the statements of ``sql`` stand beside them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from mua.environment.protocol import Split
from mua.types import Json

T = TypeVar("T")
FOLDER = Path(__file__).with_name("own")
SIZES: dict[Split, int] = {"train": 64, "validation": 16, "test": 120}
_NAMES = tuple(
    "Alder Birch Cedar Dogwood Elm Fir Ginkgo Hazel Ilex Juniper Katsura Larch Maple Nutmeg Oak Pine".split()  # noqa: SIM905
)
PLACES = ("Aldbrook", "Fenwick", "Marlow", "Stonehaven", "Westmere", "Oakridge")
_TABLES: tuple[tuple[str, str, str, str, tuple[int, int]], ...] = (
    ("Ferry Boats", "Boat", "Harbour", "Seats", (20, 400)),
    ("Town Libraries", "Library", "Town", "Books", (900, 40000)),
    ("Chess Club", "Player", "City", "Rating", (800, 2400)),
    ("Orchards", "Orchard", "Region", "Trees", (15, 900)),
    ("Radio Masts", "Mast", "County", "Height", (30, 310)),
    ("School Choirs", "Choir", "School", "Singers", (8, 90)),
    ("Mountain Huts", "Hut", "Valley", "Beds", (4, 120)),
    ("Tram Lines", "Line", "Depot", "Stops", (5, 60)),
)
"""Name of the table; its columns for a name, a place and a number; the range of the numbers."""


class _Table:
    """One made-up table: names, places and numbers, each name and number once."""

    def __init__(self, split: Split, index: int, rng: random.Random, given: Counter[str]) -> None:
        """``given``: how often each answer is one of this split's so far."""
        title, self.who, self.where, self.number, bounds = _TABLES[index % len(_TABLES)]
        self.title = f"{title} {split} {index + 1}"
        count = rng.randint(8, 14)
        names = rng.sample(_NAMES, count)
        numbers = rng.sample(range(*bounds), count)
        self.rows = [(name, rng.choice(PLACES), number) for name, number in zip(names, numbers, strict=True)]
        self.rng, self._given = rng, given

    def unlike(self, ways: Sequence[T], answer: Callable[[T], str]) -> T:
        """One of the ways to ask whose answer was given least often, so that no answer is right for many tasks."""
        least = min(self._given[answer(way)] for way in ways)
        chosen = self.rng.choice([way for way in ways if self._given[answer(way)] == least])
        self._given[answer(chosen)] += 1
        return chosen

    def record(self, kind: str, question: str, label: Sequence[str], sql: str) -> Json:
        heads = [self.who, self.where, self.number]
        table = {
            "table_name": self.title,
            "table_info": {
                "columns": [{"name": head, "type": "TEXT"} for head in heads],
                "rows": [[name, place, str(number)] for name, place, number in self.rows],
            },
        }
        about = f"The table is called {self.title}; its columns are {', '.join(heads)}."
        record: Json = {"description": question, "label": list(label), "table": table, "type": [kind], "heads": heads}
        record |= {"add_description": about, "source": "mua", "evidence": ""}
        if kind in ("INSERT", "UPDATE", "DELETE"):
            return {**record, "label": [sql], "answer_md5": ""}
        return {**record, "sql": {"query": sql, "length": len(sql)}}


def records(split: Split) -> Iterator[Json]:
    """The records of a split; the same every time."""
    rng, given = random.Random(f"agentbench_db/{split}"), Counter[str]()
    for index in range(SIZES[split]):
        yield _MAKERS[index % len(_MAKERS)](_Table(split, index, rng, given))


def _counting(table: _Table) -> Json:
    counts = Counter(row[1] for row in table.rows)
    ways = [(place, has) for place in sorted(counts) for has in (True, False)]
    number = {way: counts[way[0]] if way[1] else len(table.rows) - counts[way[0]] for way in ways}
    place, has = table.unlike(ways, lambda way: str(number[way]))
    sql = f"SELECT COUNT(*) FROM `{table.title}` WHERE `{table.where}` {'=' if has else '<>'} '{place}'"
    asked = f"How many rows {'have' if has else 'do not have'} {place} as {table.where}?"
    return table.record("counting", asked, [str(number[place, has])], sql)


def _sum(table: _Table) -> Json:
    total = sum(row[2] for row in table.rows)
    sql = f"SELECT SUM(`{table.number}`) FROM `{table.title}`"
    return table.record("aggregation-SUM", f"What is the sum of all {table.number}?", [str(float(total))], sql)


def _max(table: _Table) -> Json:
    most = max(row[2] for row in table.rows)
    sql = f"SELECT MAX(`{table.number}` + 0) FROM `{table.title}`"
    return table.record("aggregation-MAX", f"What is the largest value of {table.number}?", [str(most)], sql)


def _average(table: _Table) -> Json:
    mean = sum(row[2] for row in table.rows) / len(table.rows)
    sql = f"SELECT AVG(`{table.number}`) FROM `{table.title}`"
    return table.record("aggregation-AVG", f"What is the average of {table.number}?", [f"{mean:.4f}"], sql)


def _other(table: _Table) -> Json:
    name, place, _ = table.unlike(table.rows, lambda row: row[1])
    sql = f"SELECT `{table.where}` FROM `{table.title}` WHERE `{table.who}` = '{name}'"
    return table.record("other", f"Which {table.where} does {table.who} {name} have?", [place], sql)


def _comparison(table: _Table) -> Json:
    limit = sorted(row[2] for row in table.rows)[-4]
    names = [row[0] for row in table.rows if row[2] > limit]
    sql = f"SELECT `{table.who}` FROM `{table.title}` WHERE `{table.number}` + 0 > {limit}"
    return table.record("comparison", f"Which values of {table.who} have a {table.number} above {limit}?", names, sql)


def _ranking(table: _Table) -> Json:
    ranked = sorted(table.rows, key=lambda row: row[2], reverse=True)
    sql = f"SELECT `{table.who}` FROM `{table.title}` ORDER BY `{table.number}` + 0 DESC LIMIT 1 OFFSET 1"
    return table.record("ranking", f"Which {table.who} has the second largest {table.number}?", [ranked[1][0]], sql)


def _insert(table: _Table) -> Json:
    name = table.rng.choice([name for name in _NAMES if name not in {row[0] for row in table.rows}])
    place, number = table.rng.choice(PLACES), table.rows[0][2] + 1
    sql = f"INSERT INTO `{table.title}` VALUES ('{name}', '{place}', '{number}')"
    what = f"Add {table.who} {name} with {table.where} {place} and {table.number} {number} to the table."
    return table.record("INSERT", what, [], sql)


def _update(table: _Table) -> Json:
    name, _, number = table.rng.choice(table.rows)
    sql = f"UPDATE `{table.title}` SET `{table.number}` = '{number + 3}' WHERE `{table.who}` = '{name}'"
    return table.record("UPDATE", f"Set the {table.number} of {table.who} {name} to {number + 3}.", [], sql)


def _delete(table: _Table) -> Json:
    name = table.rng.choice(table.rows)[0]
    sql = f"DELETE FROM `{table.title}` WHERE `{table.who}` = '{name}'"
    return table.record("DELETE", f"Remove {table.who} {name} from the table.", [], sql)


_MAKERS = (_counting, _insert, _sum, _update, _max, _delete, _average, _other, _comparison, _ranking)


def write(folder: Path = FOLDER) -> None:
    """Write the files anew."""
    folder.mkdir(exist_ok=True)
    for split in SIZES:
        text = "".join(json.dumps(record) + "\n" for record in records(split))
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
