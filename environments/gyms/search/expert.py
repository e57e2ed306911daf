"""An agent that follows the question's chain of relations: it searches for a name, reads on, and answers.

What it knows is how the question is built (``start`` and ``chain``), as a reader of the question does; every fact it
takes from the documents that it finds.
"""

from __future__ import annotations

import random
import re
from collections.abc import Generator

from environments.gyms._shared import act
from environments.gyms.search.answers import normal
from environments.gyms.search.documents import read
from mua.environment.protocol import Move, Task

MOST_SEARCHES = 5


def moves(task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
    """``loose`` is how often it starts with a search for the whole question, which wastes one."""
    rng = random.Random(f"expert/{task.id}/{seed}")
    if rng.random() < loose:
        yield act("search", task.data["question"])
    known = task.data["start"]
    for relation in task.data["chain"]:
        if (value := _value((yield act("search", known)), known, relation)) is None:
            return
        known = value
    yield act("answer", known)


def given_moves(task: Task) -> Generator[Move, str, None]:
    """Searches for the question and for the names in it until the answer stands in what was found; else it leaves."""
    question = task.data["question"]
    names = re.findall(r"[A-Z][\w'-]+(?: (?:of |the |de )?[A-Z][\w'-]+)*", question.partition(" ")[2])
    for query in list(dict.fromkeys([question, *names]))[:MOST_SEARCHES]:
        found = yield act("search", query)
        if f" {normal(task.data['answer'])} " in f" {normal(found)} ":
            yield act("answer", task.data["answer"])
            return
    yield act("finish")


def _value(results: str, name: str, relation: str) -> str | None:
    """What the result about ``name`` says about ``relation``."""
    for line in results.splitlines():
        if (found := re.match(r"\[\d+\] (.+?): (.*)", line)) and found.group(1) == name:
            return read(found.group(2), relation)
    return None
