"""Policies that do not understand the question: they search with its words and answer by form, place or frequency.

What is a person, a town or a year they tell by its form, and from the question which of these it asks for.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeAlias

from environments.gyms._shared import act
from environments.gyms.search.world import normal, read
from environments.kit.canned import Glance, Player, end_at_once
from mua.environment.protocol import Move, Task

# An agent that follows the question's chain of relations: it searches for a name, reads on, and answers.
#
# What it knows is how the question is built (``start`` and ``chain``), as a reader of the question does; every fact it
# takes from the documents that it finds.


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


MOST_SEARCHES, MOST_ANSWERS = 5, 3
_FORMS = {
    "year": re.compile(r"\b\d{4}\b"),
    "town": re.compile(r"\b[A-Z][a-z]+(?:berg|stad|mouth|haven|field|wick|ford|minster|dale|holm)\b(?! [A-Z])"),
    "company": re.compile(r"\b[A-Z][a-z]+(?:an|ex|or|ia|um) [A-Z][a-z]+s\b"),
    "person": re.compile(r"\b[A-Z][a-z]+ [A-Z][a-z]+\b"),
}
Play: TypeAlias = Generator[Move, str, None]
Walk: TypeAlias = Generator[Move, str, Sequence[str]]


def _answering(find: Callable[[Glance], Walk]) -> Player:
    def play(glance: Glance) -> Play:
        for one in (yield from find(glance))[:MOST_ANSWERS]:
            yield act("answer", one.strip(".?!"))

    return play


# Reading.


def _asked(opening: str) -> str:
    """The question, without what the user says around it."""
    return opening.replace("Please look it up.", "").rpartition(": ")[2].removeprefix("Can you find this out for me? ")


def _form(question: str) -> str:
    """What the question asks for, by its first words."""
    first = " ".join(question.split()[:6]).lower()
    return next((form for form in ("year", "town", "company") if form in first), "person")


def _of_form(text: str, form: str, without: str = "") -> list[str]:
    """In order, each once; not what stands in ``without``."""
    return list(dict.fromkeys(one for one in _FORMS[form].findall(text) if one not in without))


def _links(text: str, without: str) -> list[str]:
    """Names of people and towns."""
    return [name for form in ("person", "town") for name in _of_form(text, form, without)]


# Finding.


def _of_form_at_once(glance: Glance) -> Walk:
    question = _asked(glance.opening)
    return _of_form((yield act("search", question)), _form(question), question)


def _walk(choose: Callable[[Glance, Sequence[str]], str]) -> Callable[[Glance], Walk]:
    """From document to document, by links that ``choose`` picks; at the end what has the asked form."""

    def walk(glance: Glance) -> Walk:
        question = _asked(glance.opening)
        seen, query = question, question
        for _ in range(1 if len(question.split()) < 16 else 2):  # each step takes some words of the question
            text = _first_text((yield act("search", query)))
            seen, links = f"{seen} {query}", _links(text, f"{seen} {query}")
            if not links:
                break
            query = choose(glance, links)
        text = _first_text((yield act("search", query)))
        values = _of_form(text, _form(question), seen + query)
        return [choose(glance, values)] if values else []

    return walk


def _first_text(results: str) -> str:
    found = re.search(r"^\[\d+\] .+?: (.*)$", results, re.MULTILINE)
    return found[1] if found else ""


def _all_links(glance: Glance) -> Walk:
    """Looks up all that the first document names and counts what has the asked form."""
    question = _asked(glance.opening)
    first = _first_text((yield act("search", question)))
    found: Counter[str] = Counter()
    for link in _links(first, question)[: MOST_SEARCHES - 1]:
        found.update(_of_form(_first_text((yield act("search", link))), _form(question), question + link))
    return [value for value, _ in found.most_common()]


PLAYERS: Mapping[str, Player] = {
    "ends at once": end_at_once,
    "first of the asked form": _answering(_of_form_at_once),
    "a walk over first links": _answering(_walk(lambda glance, places: places[0])),
    "a walk at random": _answering(_walk(lambda glance, places: glance.rng.choice(places))),
    "what all links tell, by frequency": _answering(_all_links),
}
"""Policies that deserve nothing, by name."""
