"""The debates, and what people care about in them: topics with two positions, themes with hints and measures."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from mua.environment.protocol import Split, Task
from mua.types import Json
from mua.utils.errors import MuaError

Side = Literal["for", "against"]
_FOLDER = Path(__file__).parent
OTHER: Mapping[Side, Side] = {"for": "against", "against": "for"}


@dataclass(frozen=True, slots=True)
class Measure:
    """Something that is counted in a place."""

    text: str
    more_is_better: bool
    lowest: int
    highest: int


@dataclass(frozen=True, slots=True)
class Theme:
    """Something that people care about."""

    name: str
    split: Split
    """In whose claims somebody may care about it."""
    heading: str
    words: re.Pattern[str]
    """Find that a text is about it."""
    hints: Sequence[str]
    """How somebody lets it be known that this is on their mind; in none of the words."""
    measures: Sequence[Measure]


@dataclass(frozen=True, slots=True)
class Topic:
    """One debate."""

    name: str
    positions: Mapping[Side, str]
    reasons: Mapping[Side, Sequence[str]]


@lru_cache(maxsize=1)
def topics() -> Mapping[str, Topic]:
    """The debates by name, in the order of ``topics.yaml``."""
    return {given["topic"]: _topic(given) for given in _read("topics.yaml")}


@lru_cache(maxsize=1)
def themes() -> Mapping[str, Theme]:
    """What people care about, by name; raises :class:`MuaError` for a hint that names its theme."""
    return {name: _theme(name, given) for name, given in _read("themes.yaml").items()}


@lru_cache(maxsize=8)
def known_in(split: Split) -> Sequence[Theme]:
    """The themes that there are notes on in the claims of a split: its own, and those of training."""
    return tuple(theme for theme in themes().values() if theme.split in ("train", split))


def _read(name: str) -> Any:
    return yaml.safe_load((_FOLDER / name).read_text(encoding="utf-8"))


def _topic(given: Mapping[str, Any]) -> Topic:
    sides: tuple[Side, ...] = ("for", "against")
    return Topic(
        given["topic"], {side: given[side] for side in sides}, {side: tuple(given[f"reasons_{side}"]) for side in sides}
    )


def _theme(name: str, given: Mapping[str, Any]) -> Theme:
    words = re.compile(rf"\b(?:{given['words']})", re.IGNORECASE)
    for hint in given["hints"]:
        if found := words.search(hint):
            raise MuaError(f"{_FOLDER / 'themes.yaml'}: {name}: a hint says {found.group()!r}; use none of the words")
    measures = tuple(Measure(text, better == "up", low, high) for text, better, low, high in given["measures"])
    return Theme(name, given["split"], given["heading"], words, tuple(given["hints"]), measures)


# What is known of places that decided a debate one way or the other: made up for each task, so that no argument can be
# learned by heart.
#
# On each theme there are four notes, one for each pair of: does it speak against the claim, is the place of the kind
# that the holder lives in. Only one of the four is both.

SETTINGS = ("harbour town", "mountain village", "market town", "mining town", "university town", "village on an island")
_ONSETS_TEXT = "Bar Dren Fel Gor Hal Kest Lum Mor Nor Pel Ros Sten Tam Ulm Vor Zell"
_ONSETS = tuple(_ONSETS_TEXT.split())
_MIDDLES = ("a", "e", "i", "o", "en", "er")
_ENDS = ("by", "dorf", "gard", "hult", "lin", "mark", "nes", "rup", "sund", "thal", "vik", "wald")
_PLACES = tuple(map("".join, product(_ONSETS, _MIDDLES, _ENDS)))
_LEAST_CHANGE = 0.15
"""Of the measure's range."""


@dataclass(frozen=True, slots=True)
class Note:
    """What was counted in one place, before and after it decided."""

    theme: Theme
    measure: Measure
    place: str
    setting: str
    side: Side
    """Which position the place decided for."""
    before: int
    after: int

    def against(self, claimed: Side) -> bool:
        """Whether it speaks against the claim: done as claimed and worse, or the opposite and better."""
        better = (self.after > self.before) == self.measure.more_is_better
        return better == (self.side != claimed)

    def text(self, topic: Topic) -> str:
        """As notes have it: figures, and no word on what they mean."""
        decided = f'{self.place}, a {self.setting}, decided: "{topic.positions[self.side]}"'
        return f"{decided} {self.measure.text.capitalize()}: {self.before} before, {self.after} after."


def notes(task: Task) -> dict[str, list[Note]]:
    """By theme, in an order that tells nothing."""
    rng = random.Random(f"persuade notes/{task.id}")
    known = known_in(task.split)
    places = iter(rng.sample(_PLACES, 4 * len(known)))
    return {theme.name: _on(theme, task.data["side"], task.data["setting"], places, rng) for theme in known}


def _on(theme: Theme, claimed: Side, home: str, places: Iterator[str], rng: random.Random) -> list[Note]:
    elsewhere = [setting for setting in SETTINGS if setting != home]
    made = [
        _note(theme, next(places), home if near else rng.choice(elsewhere), claimed, against, rng)
        for against, near in product((True, False), repeat=2)
    ]
    rng.shuffle(made)
    return made


def _note(theme: Theme, place: str, setting: str, claimed: Side, against: bool, rng: random.Random) -> Note:
    side: Side = rng.choice((claimed, OTHER[claimed]))
    measure = rng.choice(theme.measures)
    better = (side != claimed) == against
    low, high = _two_apart(measure, rng)
    before, after = (low, high) if better == measure.more_is_better else (high, low)
    return Note(theme, measure, place, setting, side, before, after)


def _two_apart(measure: Measure, rng: random.Random) -> tuple[int, int]:
    least = max(1, round(_LEAST_CHANGE * (measure.highest - measure.lowest)))
    low = rng.randint(measure.lowest, measure.highest - least)
    return low, rng.randint(low + least, measure.highest)


def looked_up(query: str, found: dict[str, list[Note]], topic: Topic) -> str:
    """The notes on the theme that a query names; where it names none or several, what there are notes on."""
    known = {name: some[0].theme for name, some in found.items()}
    exact = [name for name, theme in known.items() if theme.heading == query.strip(" .\"'").lower()]
    named = exact or [name for name, theme in known.items() if theme.words.search(query)]
    if len(named) == 1:
        return "\n".join(f"- {note.text(topic)}" for note in found[named[0]])
    headings = ", ".join(sorted(known[name].heading for name in named or known))
    if named:
        return f"Search for one thing at a time. There are notes on {headings}."
    return f"There are no notes on that. There are notes on {headings}."


def numbers(text: str) -> list[int]:
    """The figures of a text, in order; 1,200 counts as one."""
    return [int(found.replace(",", "")) for found in re.findall(r"\d{1,3}(?:,\d{3})+|\d+", text)]


# Claims by seed: a position with its holder's own argument, where the holder lives, and what would change their mind.
#
# Hidden from the policy are the holder's concerns: themes, each with a weight; the weights add up to the six steps from
# strongly agree to strongly disagree. Splits share neither topics nor the themes that somebody cares about.

NAME = "gyms/persuade"
SIZES: dict[Split, int] = {"train": 378, "validation": 42, "test": 42}
_TOPICS: dict[Split, int] = {"train": 32, "validation": 4, "test": 4}
LEVELS = 6
WEIGHTS: Mapping[str, Sequence[Sequence[int]]] = {
    "easy": ((3, 3), (4, 2)),
    "medium": ((2, 2, 2), (3, 2, 1)),
    "hard": ((2, 2, 1, 1), (3, 1, 1, 1)),
}
"""Weights of the concerns by difficulty; the more concerns, the longer the way."""


def generate_tasks(split: Split) -> Iterator[Task]:
    """The claims of a split."""
    for number, data in enumerate(_dealt()[split]):
        yield Task(f"{NAME}/{split}/{number}", NAME, split, data)


@lru_cache(maxsize=1)
def _dealt() -> dict[Split, list[Json]]:
    rng = random.Random("persuade claims")
    names = list(topics())
    rng.shuffle(names)
    dealt: dict[Split, list[Json]] = {}
    for split, size in SIZES.items():
        chosen, names = names[: _TOPICS[split]], names[_TOPICS[split] :]
        found = [(topics()[name], side, own) for name in chosen for side in get_args(Side) for own in _PAIRS]
        rng.shuffle(found)
        dealt[split] = [_claim(rng, split, *one, list(WEIGHTS)[number % 3]) for number, one in enumerate(found[:size])]
    return dealt


_PAIRS = tuple(combinations(range(4), 2))


def _claim(rng: random.Random, split: Split, topic: Topic, side: Side, own: tuple[int, int], difficulty: str) -> Json:
    weights = rng.choice(WEIGHTS[difficulty])
    cared_for = [name for name, theme in themes().items() if theme.split == split]
    concerns = [
        {"theme": name, "weight": weight}
        for name, weight in zip(rng.sample(cared_for, len(weights)), weights, strict=True)
    ]
    return {
        "kind": topic.name, "difficulty": difficulty, "side": side, "claim": topic.positions[side],
        "argument": " ".join(topic.reasons[side][reason] for reason in own), "setting": rng.choice(SETTINGS),
        "concerns": concerns,
    }  # fmt: skip
