"""What is known of places that decided a debate one way or the other: made up for each task, so that no argument can be
learned by heart.

On each theme there are four notes, one for each pair of: does it speak against the claim, is the place of the kind that
the holder lives in. Only one of the four is both.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from environments.gyms.persuade.topics import OTHER, Measure, Side, Theme, Topic, known_in
from mua.environment.protocol import Task

SETTINGS = ("harbour town", "mountain village", "market town", "mining town", "university town", "village on an island")
_ONSETS = (
    "Bar",
    "Dren",
    "Fel",
    "Gor",
    "Hal",
    "Kest",
    "Lum",
    "Mor",
    "Nor",
    "Pel",
    "Ros",
    "Sten",
    "Tam",
    "Ulm",
    "Vor",
    "Zell",
)
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
