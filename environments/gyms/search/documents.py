"""The search gym's corpus: one short document for each entity of the world, and reading a fact out of one.

A relation has two wordings; which one a document uses depends on its entity, and neither has the question's words.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import lru_cache

from environments.gyms.search.relations import relations
from environments.gyms.search.world import Entity, world
from environments.kit.ranking import Document


@lru_cache(maxsize=1)
def corpus() -> tuple[Document, ...]:
    """One document for each entity."""
    return tuple(_document(entity) for entity in world().values())


def read(text: str, relation: str) -> str | None:
    """The value that a document's text states for ``relation``."""
    for stated in _patterns(relation):
        if found := stated.search(text):
            return found.group(1).strip()
    return None


@lru_cache(maxsize=64)
def _patterns(relation: str) -> Sequence[re.Pattern[str]]:
    """How documents of any kind state a relation of this name."""
    wordings = [one for of in relations().values() if relation in of for one in of[relation].wordings]
    return [re.compile(r"(?:^|(?<=\. ))" + re.escape(one).replace(r"\{\}", r"([^.]+?)")) for one in wordings]


def _document(entity: Entity) -> Document:
    rng = random.Random(entity.name)
    known = relations()[entity.kind]
    sentences = [rng.choice(known[relation].wordings).format(value) for relation, value in entity.facts.items()]
    rng.shuffle(sentences)
    article = "an" if entity.sort[0] in "aeio" else "a"
    return Document(entity.name, " ".join([f"{entity.name} is {article} {entity.sort}.", *sentences]))
