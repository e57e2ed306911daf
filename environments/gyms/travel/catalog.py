"""What travellers may care about, read once a process from ``catalog.yaml``."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml

from environments.gyms._shared.oracles import is_list
from mua.environment.protocol import Task
from mua.types import Json
from mua.utils.errors import MuaError
from mua.utils.strict_json import read_file

_FILE = Path(__file__).with_name("catalog.yaml")


@dataclass(frozen=True, slots=True)
class Value:
    """One thing that may be wanted of an attribute."""

    name: str
    wish: str
    """What the traveller wants, plainly: "wants one stop, and a short one"."""
    hints: Sequence[str]
    """Ways to let it be known without saying it."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """Something that every option of an aspect states."""

    name: str
    asked: re.Pattern[str]
    question: str
    """Empty where nobody cares about the attribute."""
    cues: Sequence[str]
    """Sentences by which a traveller lets on that there is a wish, and not which; none where nobody cares."""
    values: Sequence[Value]


@dataclass(frozen=True, slots=True)
class Aspect:
    """One part of a trip."""

    name: str
    letter: str
    noun: str
    named: re.Pattern[str]
    attributes: Mapping[str, Attribute]
    """By name, in the order of the names: an option states them all."""
    search: Mapping[str, str]
    """What a search states -> the fact of the trip that it is."""
    day: str
    """The fact of the trip that an option's day is."""
    prices: tuple[int, int]
    """EUR."""
    needs: Sequence[str]
    """How an opening asks for it."""
    unseen: bool
    """Stands in the test split alone, which has no other."""

    def cared_for(self) -> list[str]:
        """The attributes that somebody may care about."""
        return [name for name, attribute in self.attributes.items() if attribute.cues]

    def hints(self) -> Iterator[tuple[str, str, str]]:
        """Every (hint, attribute, value)."""
        for attribute in self.attributes.values():
            for value in attribute.values:
                for hint in value.hints:
                    yield hint, attribute.name, value.name


@lru_cache(maxsize=1)
def catalog() -> Mapping[str, Aspect]:
    """The aspects by name."""
    given = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return {name: _aspect(name, one) for name, one in given.items()}


def aspect_of(one: Json) -> Aspect:
    """The aspect of one entry of ``task.data["aspects"]``: the catalog's, or a record's, of which little is known."""
    if "letter" not in one:
        return catalog()[one["aspect"]]
    noun = one["aspect"].replace("_", " ")
    return Aspect(
        one["aspect"], one["letter"], noun, _pattern(rf"\b{re.escape(noun)}s?\b"), {}, {}, "", (0, 0), (), False
    )


def _aspect(name: str, given: Json) -> Aspect:
    try:
        attributes = [_attribute(inner, one) for inner, one in given["attributes"].items()]
        attributes += [_other(inner, *one) for inner, one in given["others"].items()]
        return Aspect(
            name,
            given["letter"],
            given["noun"],
            _pattern(given["named"]),
            {one.name: one for one in sorted(attributes, key=lambda one: one.name)},
            given["search"],
            given["day"],
            (given["prices"][0], given["prices"][1]),
            given["needs"],
            given.get("unseen", False),
        )
    except (KeyError, TypeError) as error:
        raise MuaError(f"{_FILE}: {name}: {type(error).__name__}: {error}; see the head of the file") from error


def _attribute(name: str, given: Json) -> Attribute:
    values = [Value(value, *_texts(value, texts)) for value, texts in given["values"].items()]
    return Attribute(name, _pattern(given["asked"]), given["question"], tuple(given["cues"]), tuple(values))


def _other(name: str, asked: str, *values: str) -> Attribute:
    return Attribute(name, _pattern(asked), "", (), tuple(Value(value, "", ()) for value in values))


def _texts(value: str, texts: Sequence[Any]) -> tuple[str, tuple[str, ...]]:
    if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
        raise MuaError(f"{_FILE}: {value}: give a wish and at least one hint, in quotes if they hold a colon")
    return texts[0], tuple(texts[1:])


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE)


# The rules that understand the agent: what a query covers, and what a question is about.

Span: TypeAlias = tuple[int, int]
Kind = Literal["chat", "hit", "miss", "vague"]
"""Small talk; a concrete question about something that matters; about something that does not; no concrete question."""
MOST_TOPICS = 2
"""A question about more attributes than this is vague: else one text could ask for everything."""

_QUESTION = re.compile(
    r"\?|^\s*(what|which|where|when|how|do|does|would|will|should|is|are|any|may|can|could)\b"
    r"|\b(tell me|let me know|please (say|describe|specify)|i (would like|want|need) to know)\b",
    re.IGNORECASE,
)
_SMALL_TALK = re.compile(r"\b(how are you|how do you do|nice to meet|looking forward to it|isn't it)\b", re.IGNORECASE)
_SHORT_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTHS = {name: number for number, name in enumerate(_SHORT_MONTHS, 1)}
_MONTH = rf"({'|'.join(_SHORT_MONTHS)})[a-z]*\.?"
_DATES = (
    re.compile(rf"\b(?P<day>\d{{1,2}})(?:st|nd|rd|th)?(?: of)? (?P<month>{_MONTH})", re.IGNORECASE),
    re.compile(rf"\b(?P<month>{_MONTH}) (?:the )?(?P<day>\d{{1,2}})(?:st|nd|rd|th)?\b", re.IGNORECASE),
    re.compile(r"\b\d{4}-(?P<month>\d{1,2})-(?P<day>\d{1,2})\b"),
)
_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a text asks for."""

    kind: Kind
    aspect: str = ""
    attribute: str = ""
    """The first attribute that is asked for and has not been told; of a miss, the first that does not matter."""


def classify(text: str, pending: Mapping[str, Sequence[str]], told: Mapping[str, Sequence[str]] | None = None) -> Asked:
    """What ``text`` asks for, given the attributes that still matter for each aspect of the trip.

    A question that is also about something that does not matter misses, so that nobody finds out by asking for two
    things at once; what was ``told`` before may be mentioned.
    """
    if not _QUESTION.search(text) or _SMALL_TALK.search(text):
        return Asked("chat")
    if is_list(text):
        return Asked("vague")
    topics = list(_topics(text, [catalog()[name] for name in pending]))
    if not topics or len(topics) > MOST_TOPICS:
        return Asked("vague")
    known = {(aspect, attribute) for aspect, those in (told or {}).items() for attribute in those}
    new = [topic for topic in topics if topic not in known]
    beside = [(aspect, attribute) for aspect, attribute in new if attribute not in pending[aspect]]
    if new and not beside:
        return Asked("hit", *new[0])
    return Asked("miss", *(beside or topics)[0])


def named(text: str, aspects: Sequence[Aspect]) -> list[Aspect]:
    """The aspects that ``text`` names."""
    return [aspect for aspect in aspects if aspect.named.search(text)]


def missing(text: str, arguments: Mapping[str, str]) -> list[str]:
    """The search arguments that ``text`` does not state: cities by name, dates in any usual form, numbers or words."""
    dates, rest = _dates(text)
    return [name for name, value in arguments.items() if not _states(value, dates, rest)]


def _topics(text: str, aspects: Sequence[Aspect]) -> list[tuple[str, str]]:
    """(aspect, attribute) that the text is about; of the aspects it names, or of all where it names none.

    Words inside a longer match count for that one alone: a "child seat" is no seat, a "dinner table" no table.
    """
    spans = {
        (aspect.name, attribute.name): [match.span() for match in attribute.asked.finditer(text)]
        for aspect in named(text, aspects) or aspects
        for attribute in aspect.attributes.values()
    }
    names = [match.span() for aspect in aspects for match in aspect.named.finditer(text)]
    longest = [*names, *(span for found in spans.values() for span in found)]
    return [topic for topic, found in spans.items() if any(not _inside(span, names, longest) for span in found)]


def _inside(span: Span, names: Sequence[Span], others: Sequence[Span]) -> bool:
    """Whether ``span`` is a name, or lies within a longer one."""
    first, last = span
    return span in names or any(a <= first and last <= b and (a, b) != span for a, b in others)


def _dates(text: str) -> tuple[set[tuple[int, int]], str]:
    """Every (month, day) in ``text``, and the text without them."""
    found = set()
    for pattern in _DATES:
        for match in pattern.finditer(text):
            month = match["month"].lower()
            found.add((int(month) if month.isdigit() else _MONTHS[month[:3]], int(match["day"])))
        text = pattern.sub(" ", text)
    return found, text


def _states(value: str, dates: set[tuple[int, int]], rest: str) -> bool:
    if value.isdigit():
        return re.search(rf"\b({value}|{_NUMBERS[int(value) - 1]})\b", rest, re.IGNORECASE) is not None
    if value[0].isdigit():
        return _dates(value)[0] <= dates
    return re.search(rf"\b{re.escape(value)}\b", rest, re.IGNORECASE) is not None


# What the traveller says: the trip, answers that tell nothing, and the frame around wishes.

SAYINGS: Json = yaml.safe_load(read_file(Path(__file__).with_name("sayings.yaml")))
_FRAMES = SAYINGS["frames"]
_BUDGETS = SAYINGS["budgets"]
"""What UserRL's openings end with, as to the sense."""
IMPATIENT = "I have been asked too much that is beside the point; please book."
CHAT = SAYINGS["chat"]
MISS = SAYINGS["miss"]
VAGUE = SAYINGS["vague"]
AGAIN = SAYINGS["again"]
VOLUNTEERED = SAYINGS["volunteered"]
COMPLETE = "That is all that matters to me about the {noun}."
BOOKED = SAYINGS["booked"]


def openings(task: Task) -> list[str]:
    """First utterances: the whole trip, and of the wishes what they are about."""
    if "opening" in task.data:
        return [f"{task.data['opening']} {budget}" for budget in _BUDGETS]
    rng = random.Random(f"openings/{task.id}")
    return [frame.format(needs=" ".join(_need(rng, one) for one in task.data["aspects"])) for frame in _FRAMES]


def persona(task: Task) -> str:
    """What an LLM that plays the traveller is told, wishes and all."""
    lines = [_persona_of(one) for one in task.data["aspects"]]
    return (
        "You are a traveller who writes to a booking agent.\n" + "\n".join(lines) + "\n"
        "You tell a wish only when the agent asks about that very thing, one wish at a time, and you hint at it "
        "instead of stating it. When a question asks for everything at once, you ask for a more precise one."
    )


def facts(task: Task) -> str:
    """The trip, and no wish itself."""
    return openings(task)[0]


def wish(preference: Json, aspect: Aspect) -> str:
    """What is wanted, plainly."""
    if "wish" in preference:
        return str(preference["wish"])
    values = aspect.attributes[preference["attribute"]].values
    return next(value.wish for value in values if value.name == preference["value"])


def hint(preference: Json, aspect: Aspect) -> str:
    """The sentence by which a wish becomes known."""
    if "wish" in preference:
        return str(preference["hint"])
    values = aspect.attributes[preference["attribute"]].values
    return next(value.hints[preference["hint"]] for value in values if value.name == preference["value"])


def cue(preference: Json, aspect: Aspect) -> str:
    """The sentence of the opening by which the traveller lets on that there is a wish."""
    return aspect.attributes[preference["attribute"]].cues[preference["cue"]]


def _need(rng: random.Random, one: Json) -> str:
    aspect = catalog()[one["aspect"]]
    need = rng.choice(aspect.needs).format(**one["arguments"])
    return " ".join([need, *(cue(preference, aspect) for preference in one["preferences"])])


def _persona_of(one: Json) -> str:
    aspect = aspect_of(one)
    arguments = ", ".join(f"{name} {value}" for name, value in one["arguments"].items())
    wishes = "; ".join(f"the traveller {wish(preference, aspect)}" for preference in one["preferences"])
    return f"You need a {aspect.noun} ({arguments}). Your wishes for it: {wishes}."
