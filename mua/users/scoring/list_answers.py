"""Answers that are several things, in any order or in one: each item of the answer is paired with one of the reference.

Whoever lists more than was asked for is wrong (``graded``: loses precision), so that listing everything earns nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from pydantic import Field
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from mua.config.section import Section
from mua.environment.endpoint.services import Services
from mua.users.scoring.scorer import AnswerScore, ChecksTogether, Question, Scorer, make_scorer, options_of
from mua.utils.strict_json import JsonError, read_json

MOST_ITEMS = 64
"""Items of a reference, and of an answer beyond those of its reference: pairs of both are compared."""
_BRACKETS = re.compile(r"(?:\\left)?\s?(?:\\\{|[\[({])(?P<inner>.*)(?:\\right)?\s?(?:\\\}|[\])}])", re.DOTALL)
_BULLET = re.compile(r"^\s{0,8}(?:[-*•]|\d{1,3}[.)])\s+")
_AND = re.compile(r"(?:^|\s)(?:and|&|\\text\s?\{\s?and\s?\})\s")
_TOKEN = re.compile(r"\\.|[()\[\]{},;\n]", re.DOTALL)
_THOUSANDS = re.compile(r"(?<!\d)\d{1,3}(?:,\d{3})+(?!\d)")


def readings(text: str) -> list[list[str]]:
    """The items of ``text`` in each way it can be read: a comma may separate thousands, an "and" may be part of a name.

    A JSON list is read as one. Separators are line ends and semicolons, and commas where there are none of those, all
    outside of brackets.
    """
    text = text.strip()
    if text.startswith("["):
        try:
            value = read_json(text)
        except JsonError:
            value = None
        if isinstance(value, list) and all(isinstance(one, str | int | float) for one in value):
            return [[str(one) for one in value]]
    # (1, 2), (3, 4) is not one bracket.
    if (outer := _BRACKETS.fullmatch(text)) and min((depth for _, _, depth in _signs(outer["inner"])), default=0) >= 0:
        text = outer["inner"].removesuffix("\\right")
    found: list[list[str]] = []
    thousands = {place for number in _THOUSANDS.finditer(text) for place in range(*number.span())}
    outside = [(place, sign) for place, sign, depth in _signs(text) if sign in ";\n," and depth <= 0]
    strong = [place for place, sign in outside if sign != ","]
    for protected in (thousands, frozenset[int]()):
        places = [-1, *(strong or [place for place, _ in outside if place not in protected]), len(text)]
        items = [text[begin + 1 : end] for begin, end in pairwise(places)]
        for split in (items, [part for item in items for part in _AND.split(item)]):
            kept = [one for one in (_BULLET.sub("", item).strip() for item in split) if one]
            if kept and kept not in found:
                found.append(kept)
    return found


def _signs(text: str) -> Iterator[tuple[int, str, int]]:
    """Brackets and separators: place, sign, and how many brackets are open after it."""
    depth = 0
    for token in _TOKEN.finditer(text):
        sign = token.group()
        depth += (sign in ("(", "[", "{", "\\{")) - (sign in (")", "]", "}", "\\}"))
        yield token.start(), sign, depth


class ListOptions(Section):
    """Options of scorer ``list``."""

    items: Literal["exact", "numeric", "symbolic", "fuzzy"] = "exact"
    """What compares two items."""
    item_options: dict[str, Any] = Field(default_factory=dict)
    """Options of that scorer."""
    ordered: bool = False
    """The items must come in the reference's order."""
    graded: bool = False
    """Pay the F1 of the items in place of 1 or 0."""


class ListScorer(Scorer):
    """Several things. The reference is a list, whose items may be lists
    of accepted names."""

    def __init__(self, options: Mapping[str, Any], services: Services) -> None:
        self._options = options_of(ListOptions, options, "list")
        self._inner = make_scorer(self._options.items, self._options.item_options, services)

    def check(self, question: Question) -> None:
        reference = question.reference
        if not isinstance(reference, list) or not 0 < len(reference) <= MOST_ITEMS:
            raise question.wrong(f"the right answer must be a list of 1 to {MOST_ITEMS} items for scorer 'list'")
        for item in reference:
            self._inner.check(replace(question, reference=item))

    def check_together(self, questions: Sequence[Question]) -> None:
        if isinstance(self._inner, ChecksTogether):
            items = [replace(question, reference=item) for question in questions for item in question.reference]
            self._inner.check_together(items)

    def correct(self, question: Question) -> str:
        items = [self._inner.correct(replace(question, reference=item)) for item in question.reference]
        return json.dumps(items, ensure_ascii=False)

    async def score(self, answer: str, question: Question) -> AnswerScore:
        wanted = [replace(question, reference=item) for item in question.reference]
        best = 0.0
        for items in readings(answer):
            if len(items) > len(wanted) + MOST_ITEMS or (len(items) != len(wanted) and not self._options.graded):
                continue
            if self._options.ordered:
                pairs = zip(items, wanted, strict=False)
                paired = sum([(await self._inner.score(item, one)).right for item, one in pairs])
            else:  # how many items have a partner of their own in the reference
                table = [[(await self._inner.score(item, one)).right for one in wanted] for item in items]
                matched = maximum_bipartite_matching(csr_array(np.array(table, dtype=np.int8)), perm_type="column")
                paired = int((matched >= 0).sum())
            best = max(best, 2 * paired / (len(items) + len(wanted)))
        right = best == 1.0
        return AnswerScore(best if self._options.graded else float(right), right, {"f1": round(best, 4)})

    async def close(self) -> None:
        await self._inner.close()
