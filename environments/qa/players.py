"""Policies that do not understand the question: they answer by form, place, frequency or heart; see
:mod:`environments.kit.canned`.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeAlias

from environments.kit.canned import Canned, Glance, Player, end_at_once, says, write_at_random
from environments.qa.episode import LOOKUP, OPEN
from environments.qa.world import PRODUCTS, PROFESSIONS, read
from mua.environment.protocol import Move, Task

# An agent that follows a question's chain of relations from page to page.
#
# What it knows is how the question is built (``start`` and ``chain``), as a reader of it does; every fact it reads.


def moves(task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, str | None]:
    """Gives what stands at the end of the chain. ``loose`` is how often it first looks the whole question up."""
    rng = random.Random(f"expert/{task.id}/{seed}")
    if rng.random() < loose:
        yield LOOKUP.name, {"query": task.data["question"]}
    known: str = task.data["start"]
    for relation in task.data["chain"]:
        listed = yield LOOKUP.name, {"query": known}
        if f". {known}: " not in listed:
            return None
        if (value := read((yield OPEN.name, {"title": known}), relation)) is None:
            return None
        known = value
    return known


_FORMS = {
    "year": r"\b1[789]\d\d\b",
    "profession": rf"\b(?:{'|'.join(PROFESSIONS)})\b",
    "product": rf"\b(?:{'|'.join(PRODUCTS)})\b",
    "river": r"\bRiver [A-Z]\w+\b",
    "company": r"\b[A-Z]\w+ (?:Brothers|Works|Mills|Limited)\b",
    "museum": r"\b[A-Z]\w+ (?:Museum|Gallery|Hall)\b",
    "town": r"\b[A-Z]\w+(?:burg|hafen|field|wick|stead|ford)\b",
    "person": r"\b[A-Z]\w+ [A-Z]\w+(?:sen|ak|ova|ier|man|ino)\b",
}
_ASKED = {
    "year": "In which year",
    "profession": "What is the profession",
    "product": "What does",
    "river": "Which river",
}
_NAMED = ("company", "museum", "town")
Play: TypeAlias = Generator[Move, str, None]
Walk: TypeAlias = Generator[Move, str, Sequence[str]]


def _answer(found: Sequence[str]) -> str:
    return f"<answer>{found[0]}</answer>" if found else "<answer>nobody knows</answer>"


def _answering(find: Callable[[Glance], Walk]) -> Player:
    def play(glance: Glance) -> Play:
        yield _answer((yield from find(glance)))

    return play


def _form(question: str) -> str:
    """What is asked for, by the question's first words."""
    form = next((form for form, begin in _ASKED.items() if begin in question), None)
    return form or next(
        (form for form in _NAMED if f"Name the {form}" in question or f"Name the twin {form}" in question), "person"
    )


def _of_form(text: str, form: str, without: str) -> list[str]:
    """In order, each once; not what stands in ``without``."""
    return list(dict.fromkeys(one for one in re.findall(_FORMS[form], text) if one not in without))


def _first_page(query: str) -> Generator[Move, str, str]:
    listed = yield LOOKUP.name, {"query": query}
    title = re.search(r"^1\. (.+?): ", listed, re.MULTILINE)
    return (yield OPEN.name, {"title": title[1]}) if title else ""


def _found_at_once(glance: Glance) -> Walk:
    """What has the asked form on the first page that the whole question finds."""
    text = yield from _first_page(glance.opening)
    return _of_form(text, _form(glance.opening), glance.opening)


def _walked(glance: Glance) -> Walk:
    """Three pages by names drawn at random, then something of the asked form."""
    text, seen = (yield from _first_page(glance.opening)), glance.opening
    for _ in range(2):
        names = [name for form in ("person", *_NAMED) for name in _of_form(text, form, seen)]
        if not names:
            break
        seen += (name := glance.rng.choice(names))
        text = yield from _first_page(name)
    found = _of_form(text, _form(glance.opening), seen)
    return [glance.rng.choice(found)] if found else []


def _by_words(glance: Glance) -> Walk:
    """The sentence of the first page that shares most words with the question, and what it names of the asked form."""
    text = yield from _first_page(glance.opening)
    words = set(re.findall(r"[a-z]{3,}", glance.opening))
    sentences = sorted(text.split(". ")[1:], key=lambda one: -len(words & set(re.findall(r"[a-z]{3,}", one))))
    return [value for one in sentences for value in _of_form(one, _form(glance.opening), glance.opening)]


def _every_value(glance: Glance) -> Play:
    """All of the asked form, one answer beside the other."""
    found = yield from _found_at_once(glance)
    yield " ".join(f"<answer>{value}</answer>" for value in found[:16])


def _recite(glance: Glance) -> Play:
    """The answer of the training question that shares most words with this one."""
    words = set(glance.opening.split())
    nearest = max(glance.training, key=lambda task: len(words & set(task.data["question"].split())))
    yield _answer([nearest.data["reference"]])


def _commonest(glance: Glance) -> Play:
    """The commonest answer of the training questions that ask for the same form."""
    form = _form(glance.opening)
    counts = Counter(task.data["reference"] for task in glance.training if task.data["form"] == form)
    yield _answer([value for value, _ in counts.most_common(1)])


CANNED: Mapping[str, Canned] = {
    "ends at once": Canned(end_at_once),
    "does not know": Canned(says("I do not know.", "<answer>unknown</answer>")),
    "first of the asked form": Canned(_answering(_found_at_once)),
    "a walk at random": Canned(_answering(_walked)),
    "the sentence most like the question": Canned(_answering(_by_words)),
    "every value, each an answer": Canned(_every_value),
    "recite training": Canned(_recite),
    "commonest of training": Canned(_commonest),
    "tools at random": Canned(write_at_random),
}
