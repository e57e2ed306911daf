"""An agent that books every trip well: it asks about what the traveller lets on, lists options, and takes the cheapest.

The trip's facts it reads from the opening (here: from ``task.data["aspects"][i]["arguments"]``, which the opening
states), and so what is on the traveller's mind; every wish it learns from the traveller's words. It understands both by
the catalog.
"""

from __future__ import annotations

import random
import re
from collections.abc import Generator, Mapping, Sequence

from environments.gyms._shared import act
from environments.gyms.travel.catalog import Aspect, catalog
from environments.gyms.travel.wording import COMPLETE, openings
from mua.environment.protocol import Move, Task

_OPTION = re.compile(r"^([A-Z]\d+): (.+?), (.+?), (\d+) EUR; (.+)$", re.MULTILINE)
_STATED = re.compile(r"^id: place, day, price; (.+)$", re.MULTILINE)
_BROAD = ("Is there anything that matters to you?", "What are your preferences?", "Tell me what you like.")

Wishes = dict[tuple[str, str], str]
"""(aspect, attribute) -> value."""


def moves(task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
    """``loose`` is how often it asks a vague question first, or leaves a question out."""
    rng = random.Random(f"expert/{task.id}/{seed}")
    aspects = {one["aspect"]: one["arguments"] for one in task.data["aspects"]}
    opening = openings(task)[0]
    wishes: Wishes = {}
    for name, arguments in aspects.items():
        aspect = catalog()[name]
        yield from _ask(rng, aspect, _on_the_mind(aspect, opening, rng, loose), list(aspects), wishes)
        listed = ""
        while "Options" not in listed:
            listed = yield act("search", query(aspect, arguments))
        options = [option for option in options_of(listed) if _fits(option, arguments)]
        yield act("answer", _cheapest(options, {key: value for key, value in wishes.items() if key[0] == name}))


def query(aspect: Aspect, arguments: Mapping[str, str]) -> str:
    """A search that states every argument."""
    return f"{aspect.noun}: " + ", ".join(f"{name} {value}" for name, value in arguments.items())


def _on_the_mind(aspect: Aspect, opening: str, rng: random.Random, loose: float) -> list[str]:
    """Questions about what the opening lets on; a ``loose`` agent leaves some out and asks a broad one."""
    told = [one for one in aspect.attributes.values() if any(cue in opening for cue in one.cues)]
    questions = [one.question for one in told if rng.random() >= loose / 4]
    return [rng.choice(_BROAD), *questions] if rng.random() < loose else questions


def _ask(
    rng: random.Random, aspect: Aspect, questions: Sequence[str], aspects: Sequence[str], wishes: Wishes
) -> Generator[Move, str, None]:
    """Ask until the traveller says that there is nothing more."""
    for question in rng.sample(questions, len(questions)):
        heard = yield act("action", question)
        wishes |= _understood(heard, aspects)
        if COMPLETE.format(noun=aspect.noun) in heard:
            return


def _understood(heard: str, aspects: Sequence[str]) -> Wishes:
    """The wishes that the words let know."""
    return {
        (name, attribute): value
        for name in aspects
        for hint, attribute, value in catalog()[name].hints()
        if hint in heard
    }


def options_of(listed: str) -> list[dict[str, str]]:
    """The options in a list of them: id, place, on, price and what they state."""
    stated = _STATED.search(listed)
    names = stated[1].split("; ") if stated else []
    rows = []
    for match in _OPTION.finditer(listed):
        values = dict(zip(names, match[5].split("; "), strict=True))
        rows.append({"id": match[1], "place": match[2], "on": match[3], "price": match[4], **values})
    return rows


def _fits(option: Mapping[str, str], arguments: Mapping[str, str]) -> bool:
    """For the right place, and beginning on the right day."""
    first = next(value for name, value in arguments.items() if "date" in name)
    return option["place"] in arguments.values() and option["on"] == first


def _cheapest(options: Sequence[Mapping[str, str]], wishes: Wishes) -> str:
    fitting = [o for o in options if all(o[attribute] == value for (_, attribute), value in wishes.items())]
    return min(fitting or options, key=lambda option: int(option["price"]))["id"]
