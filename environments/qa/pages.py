"""The pages about a world: what is so of an entity, among much that does not matter."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from threading import Lock

from environments.kit.ranking import Document, ranking
from environments.qa.world import ASIDES, RELATIONS, Entity, words_of, world

SENTENCES = 28
"""Sentences of a page besides its facts: with them a page has about 1,650 characters."""
_BUILDING = Lock()


class Pages:
    """All pages of one world, and their index."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._index = ranking(documents)
        self._by_title: Mapping[str, Document] = {one.title.casefold(): one for one in documents}

    def lookup(self, query: str, count: int) -> list[Document]:
        """The best pages for ``query``, best first."""
        return self._index.best(query, count)

    def open(self, title: str) -> Document | None:
        """The page of that title, whatever its case."""
        return self._by_title.get(" ".join(title.split()).casefold())


def pages(key: str, sentences: int = SENTENCES) -> Pages:
    """A world's pages, built once a process and shared by all episodes."""
    with _BUILDING:
        return _built(key, sentences)


def page_of(entity: Entity, key: str, sentences: int = SENTENCES) -> Document:
    """The page about ``entity`` of the world ``key``; with fewer ``sentences`` a part of what all tell."""
    rng = random.Random(f"qa page/{entity.name}")
    known = RELATIONS[entity.kind]
    told = [rng.choice(known[relation].told).format(value) for relation, value in entity.facts.items()]
    by_kind: dict[str, list[str]] = {kind: [] for kind in RELATIONS}
    for one in world(key).values():
        if one.name != entity.name:
            by_kind[one.kind].append(one.name)
    words, facts = words_of(key), len(told)
    for aside in rng.sample(ASIDES, SENTENCES):
        person, other = rng.sample(by_kind["person"], 2)
        drawn = {kind: rng.choice(by_kind[kind]) for kind in ("town", "company", "museum")}
        drawn |= {kind: rng.choice(words[kind]) for kind in words}
        told.append(aside.format(person=person, other=other, year=rng.randint(1700, 1990), **drawn))
    told = told[: facts + sentences]
    rng.shuffle(told)
    article = "an" if entity.sort[0] in "aeiou" else "a"
    return Document(entity.name, " ".join([f"{entity.name} is {article} {entity.sort}.", *told]))


def read(text: str, relation: str) -> str | None:
    """The value that a page's text states for ``relation``."""
    for stated in _patterns(relation):
        if found := stated.search(text):
            return found.group(1)
    return None


@lru_cache(maxsize=64)
def _patterns(relation: str) -> Sequence[re.Pattern[str]]:
    wordings = [one for of in RELATIONS.values() if relation in of for one in of[relation].told]
    return [re.compile(r"(?:^|(?<=\. ))" + re.escape(one).replace(r"\{\}", "([^.]+)")) for one in wordings]


@lru_cache(maxsize=64)
def _built(key: str, sentences: int) -> Pages:
    return Pages([page_of(entity, key, sentences) for entity in world(key).values()])
