"""The search gym's corpus: one short document for each entity of the world, and reading a fact out of one.

A relation has several wordings; which one a document uses depends on its entity, so that a searcher meets other words
than the question's.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from environments.gyms.search.world import Entity, world

_WORDINGS: Mapping[tuple[str, str], Sequence[str]] = {
    ("town", "river"): ("It lies on the river {}.", "The river {} runs through it."),
    ("town", "region"): ("It belongs to the region of {}.", "Its region is {}."),
    ("town", "founded"): ("It was founded in {}.", "Its charter dates from {}."),
    ("town", "mayor"): ("Its mayor is {}.", "The office of mayor is held by {}."),
    ("school", "town"): ("It stands in {}.", "Its campus is in {}."),
    ("school", "founded"): ("It was founded in {}.", "Teaching began in {}."),
    ("school", "rector"): ("Its rector is {}.", "It is headed by rector {}."),
    ("person", "birthplace"): ("Born in {}.", "Came to the world in {}."),
    ("person", "born"): ("The year of birth was {}.", "The birth register says {}."),
    ("person", "school"): ("Studied at the {}.", "Took a degree at the {}."),
    ("person", "employer"): ("Was employed by {}.", "Spent a career with {}."),
    ("company", "founder"): ("It was founded by {}.", "It goes back to {}, who set it up."),
    ("company", "seat"): ("Its head office is in {}.", "It is based in {}."),
    ("company", "founded"): ("It exists since {}.", "It was entered in the register in {}."),
    ("company", "product"): ("It makes {}.", "It is known for its {}."),
    ("work", "author"): ("It was created by {}.", "It is the work of {}."),
    ("work", "year"): ("It dates from {}.", "It appeared in {}."),
    ("work", "first_shown"): ("It was first shown in {}.", "The first audience saw it in {}."),
    ("event", "winner"): ("It was won by {}.", "First prize went to {}."),
    ("event", "place"): ("It was held in {}.", "The venue was in {}."),
    ("event", "sponsor"): ("It was paid for by {}.", "The main sponsor was {}."),
}


@dataclass(frozen=True, slots=True)
class Document:
    """What a search finds."""

    title: str
    text: str


@lru_cache(maxsize=1)
def corpus() -> tuple[Document, ...]:
    """One document for each entity."""
    return tuple(_document(entity) for entity in world().values())


def read(text: str, relation: str) -> str | None:
    """The value that a document's text states for ``relation``."""
    for wording in _of_any_kind(relation):
        if found := re.search(re.escape(wording).replace(r"\{\}", r"([^.]+?)"), text):
            return found.group(1)
    return None


@lru_cache(maxsize=64)
def _of_any_kind(relation: str) -> tuple[str, ...]:
    return tuple(wording for (_, one), wordings in _WORDINGS.items() if one == relation for wording in wordings)


def _document(entity: Entity) -> Document:
    rng = random.Random(entity.name)
    sentences = [rng.choice(_WORDINGS[entity.kind, relation]).format(value) for relation, value in entity.facts.items()]
    rng.shuffle(sentences)
    article = "an" if entity.sort[0] in "aeio" else "a"
    return Document(entity.name, " ".join([f"{entity.name} is {article} {entity.sort}.", *sentences]))
