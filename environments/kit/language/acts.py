"""What an agent does with a message, as the person it talks to takes it.

::

    message ─ sentences ─ words and rules ─┬─ features ─ linear model ─┬─ chance of each act      ─┬─ Acts
                          of the domain    └─ tokens ─── network ──────┴─ chance of each fact's ───┘
                                                                          being asked for

What the sentences are about comes from the domain's words (``environments/<domain>/words.yaml``), their mood from
English that all domains share (``general.yaml``); how the two go together has been learnt from labelled messages of
all domains, twice: by weights of features with everything masked that is a domain's own
(:mod:`environments.kit.language.model`), and by a small network that knows what words mean
(:mod:`environments.kit.language.network`). The network is asked where the linear model is not sure, for messages up to
:data:`LONGEST` words; then their log odds are added. A message for which no act is likely enough is not understood:
better that than a wrong yes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from environments.kit.language.features import Read, act_features, fact_features, in_question, read, tokens
from environments.kit.language.lexicon import Lexicon
from environments.kit.language.model import ACTS, Model, learnt
from environments.kit.language.rules import Rules
from environments.kit.language.text import Sentence, sentences
from mua.types import Json

LIKELY = 0.45
"""Chance from which on an act counts."""
LEAST = 0.2
"""Chance that the likeliest act must have for a message to be understood at all."""
ASKED, ASKED_JOINTLY = 0.5, 0.2
"""Chance that a fact is asked for, alone and together with the chance that anything is."""
ASKS_SOMETHING, FACT_AT_LEAST = 0.5, 0.005
"""A message that surely asks for something asks for the likeliest fact, if it is not quite unlikely."""
BOTH = 0.7
"""Chance that done and refused must each have for both to count."""
WEIGHED, MEANT = 0.5, 0.5
"""What the log odds of the linear model and of the network count."""
SURE = 0.02
"""Distance from 0 or 1 below which the linear model is sure."""
LONGEST = 150
"""Words of a message that the network reads."""
_LEAST = 1e-6
_ACT = "act "
FLAGS = {
    "propose": "proposes",
    "done": "done",
    "refuse": "refuses",
    "inform": "informs",
    "transfer": "transfers",
    "offer": "offers",
    "wait": "waits",
}
"""What a message does, by act."""


@dataclass(frozen=True, slots=True)
class Acts:
    """What one message does; several at once are usual."""

    asks: frozenset[str] = frozenset()
    """Facts that the hearer is asked for."""
    proposes: bool = False
    """Wants a yes before it goes on."""
    done: bool = False
    """Says that the wish has been carried out."""
    refuses: bool = False
    informs: bool = False
    """Tells what the hearer wanted to know."""
    transfers: bool = False
    offers: bool = False
    """Asks whether there is anything else."""
    waits: bool = False
    """A greeting, thanks, a moment please: nothing to answer."""
    instructs: tuple[str, ...] = ()
    """The hearer's own tools that it is asked to use, in order of mention."""
    confirms: str = ""
    """The fact whose value a question repeats for a yes ("Is your order number K7?"); "" for none."""

    @property
    def understood(self) -> bool:
        """Whether any sense could be made of it."""
        return self != Acts()


class Reader:
    """Reads messages with one domain's words."""

    def __init__(self, words: Json, model: Model | None = None) -> None:
        """``words``: the domain's file (``facts``, ``deeds``, ``answers``, ``against``, ``values``, ``lists``,
        ``instructions``); ``model``: what has been learnt, by default
        :func:`environments.kit.language.model.learnt`."""
        self._words = Lexicon(words)
        self._rules = Rules(self._words)
        self._model = model or learnt()
        self.read = lru_cache(maxsize=4096)(self._read)

    def _read(self, message: str, wish: str) -> Acts:
        """What ``message`` does to somebody with this wish."""
        repaired = tuple(Sentence(self._model.repaired(one.text), one.question) for one in sentences(message))
        found = read(self._words, self._rules, repaired, wish)
        words = [word for one in repaired for word in one.text.split() if word.isalpha()]
        if not found or sum(word in self._model.known for word in words) < 0.4 * len(words):
            return Acts()  # too few of its words are known for it to be English
        every = self._chances(found, wish)
        chances = {act: every.pop(f"{_ACT}{act}") for act in ACTS}
        asking = 1 - (1 - chances.pop("ask")) * (1 - chances.pop("instruct"))
        names = self._asked(every, asking, max(chances.values()))
        acts = _likely(chances, tells=wish in self._words.answers, asks=bool(names))
        return Acts(
            asks=frozenset(name for name in names if name in self._words.facts),
            instructs=tuple(name for name in _in_order(names, found) if name in self._words.tools),
            confirms=self._confirmed(found) if "propose" in acts else "",
            **{FLAGS[act]: True for act in acts},
        )

    def _chances(self, found: Sequence[Read], wish: str) -> dict[str, float]:
        """The chance of each act, under a name of its own, and of each fact's being asked for (none if surely nothing
        is). The network, which takes four times as long, is asked where the linear model is not sure of everything."""
        acts = self._model.acts.chance([act_features(self._words, one, wish) for one in found]).tolist()
        linear = {f"{_ACT}{act}": one for act, one in zip(ACTS, acts, strict=True)}
        if all(map(_sure, acts)) and not any(linear[f"{_ACT}{act}"] > SURE for act in ("ask", "instruct")):
            return linear
        names = in_question(self._words, found)
        for name in names:
            asked = [fact_features(self._words, one, wish, name) for one in found]
            linear[name] = float(self._model.facts.chance(asked)[0])
        odds = {} if all(map(_sure, linear.values())) else self._odds(found, wish, names)
        return {name: _both(chance, odds.get(name)) for name, chance in linear.items()}

    def _odds(self, found: Sequence[Read], wish: str, names: Sequence[str]) -> dict[str, float]:
        """The network's log odds of acts and of those facts that it knows, by name; none where there is no network, or
        the message is long: what it takes grows faster than the message, which has much for the linear model to see."""
        network = self._model.network
        if network is None or len((message := tokens(self._words, found, wish)).words) > LONGEST:
            return {}
        acts, facts = network.read(message, wish, names)
        return {**facts, **dict(zip((f"{_ACT}{act}" for act in ACTS), acts.tolist(), strict=True))}

    def _asked(self, chances: Mapping[str, float], asking: float, other: float) -> set[str]:
        """Facts and tools that are asked for, of those with ``chances``."""
        if asking < ASKED_JOINTLY:
            return set()
        asked = {name for name, chance in chances.items() if chance > ASKED and chance * asking > ASKED_JOINTLY}
        if not asked and asking > max(ASKS_SOMETHING, other):
            name = max(chances, key=lambda one: chances[one])
            asked = {name} if chances[name] > FACT_AT_LEAST else set()
        return asked

    def _confirmed(self, found: Sequence[Read]) -> str:
        for one in found:
            text = one.place.sentence.text
            for mention in one.mentions:
                if self._words.value.match(text[mention.end :].lstrip(" :#")):
                    return mention.name
        return ""


def _sure(chance: float) -> bool:
    return min(chance, 1 - chance) < SURE


def _both(chance: float, odds: float | None) -> float:
    """The linear model's chance and the network's log odds as one chance."""
    if odds is None:
        return chance
    chance = min(max(chance, _LEAST), 1 - _LEAST)
    return 1 / (1 + math.exp(-(WEIGHED * math.log(chance / (1 - chance)) + MEANT * odds)))


def _likely(chances: Mapping[str, float], *, tells: bool, asks: bool) -> set[str]:
    """The acts that count; ``tells``: the wish is to be told something, which cannot be done, only told."""
    chance = dict(chances)
    told, done = (max(chance["inform"], 0.9 * chance["done"]), 0.0) if tells else (0.0, chance["done"])
    chance |= {"inform": told, "done": done}
    found = {act for act, likely in chance.items() if likely > LIKELY}
    if {"done", "refuse"} <= found and min(chance["done"], chance["refuse"]) < BOTH:
        found.discard(min("done", "refuse", key=lambda act: chance[act]))
    best = max(chance, key=lambda act: chance[act])
    if not found and not asks and chance[best] > LEAST:
        return {best}
    if "offer" in found and not found - {"offer", "wait"}:
        settled = max("done", "refuse", "inform", key=lambda act: chance[act])
        found |= {settled} if chance[settled] > ASKED_JOINTLY else set()
    return found


def _in_order(names: set[str], found: Sequence[Read]) -> list[str]:
    """Names by the place of their first mention."""
    first = {
        mention.name: (at, mention.start)
        for at, one in reversed(list(enumerate(found)))
        for mention in sorted(one.mentions, key=lambda mention: -mention.start)
    }
    return sorted(names, key=lambda name: (first.get(name, (len(found), 0)), name))
