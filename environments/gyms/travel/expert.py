"""An agent that books every trip well: it lists options, asks about what tells them apart, and takes the cheapest.

The trip's facts it reads from the opening (here: from ``task.data["aspects"][i]["arguments"]``, which the opening
states); every wish it learns from the traveller's words, which it understands by the catalog.
"""

from __future__ import annotations

import random
import re
from collections.abc import Generator, Mapping, Sequence

from environments.gyms._shared import act
from environments.gyms.travel.catalog import Aspect, catalog
from environments.gyms.travel.wording import COMPLETE
from mua.environment.protocol import Move, Task

_OPTION = re.compile(r"^([A-Z]\d+): (.+?), (.+?), (\d+) EUR; (.+)$", re.MULTILINE)
_BROAD = ("Is there anything that matters to you?", "What are your preferences?", "Tell me what you like.")

Wishes = dict[tuple[str, str], str]
"""(aspect, attribute) -> value."""


def moves(task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
    """``loose`` is how often it asks a vague question first, or leaves a question out."""
    rng = random.Random(f"expert/{task.id}/{seed}")
    aspects = {one["aspect"]: one["arguments"] for one in task.data["aspects"]}
    wishes: Wishes = {}
    for name, arguments in aspects.items():
        aspect = catalog()[name]
        listed = ""
        while "Options" not in listed:
            listed = yield act("search", query(aspect, arguments))
        options = [option for option in _options(listed) if _fits(option, arguments)]
        yield from _ask(rng, aspect, options, list(aspects), wishes, loose)
        yield act("answer", _cheapest(options, {key: value for key, value in wishes.items() if key[0] == name}))


def query(aspect: Aspect, arguments: Mapping[str, str]) -> str:
    """A search that states every argument."""
    return f"{aspect.noun}: " + ", ".join(f"{name} {value}" for name, value in arguments.items())


def _ask(
    rng: random.Random,
    aspect: Aspect,
    options: Sequence[Mapping[str, str]],
    aspects: Sequence[str],
    wishes: Wishes,
    loose: float,
) -> Generator[Move, str, None]:
    """Ask about one attribute after another until the traveller says that there is nothing more."""
    done = COMPLETE.format(noun=aspect.noun)
    if rng.random() < loose:
        wishes |= _understood((yield act("action", rng.choice(_BROAD))), aspects)
    for attribute in sorted(aspect.attributes.values(), key=lambda one: _evenness(options, one.name)):
        if (aspect.name, attribute.name) in wishes or rng.random() < loose / 4:
            continue
        heard = yield act("action", attribute.question)
        wishes |= _understood(heard, aspects)
        if done in heard:
            return


def _evenness(options: Sequence[Mapping[str, str]], attribute: str) -> int:
    """How often the commonest value occurs, negative: held preferences are what most options share."""
    values = [option[attribute] for option in options]
    return -max(values.count(value) for value in values)


def _understood(heard: str, aspects: Sequence[str]) -> Wishes:
    """The wishes that the words let know."""
    return {
        (name, attribute): value
        for name in aspects
        for hint, attribute, value in catalog()[name].hints()
        if hint in heard
    }


def _options(listed: str) -> list[dict[str, str]]:
    rows = []
    for match in _OPTION.finditer(listed):
        values = dict(pair.split(": ", 1) for pair in match[5].split("; "))
        rows.append({"id": match[1], "place": match[2], "on": match[3], "price": match[4], **values})
    return rows


def _fits(option: Mapping[str, str], arguments: Mapping[str, str]) -> bool:
    """For the right place, and beginning on the right day."""
    first = next(value for name, value in arguments.items() if "date" in name)
    return option["place"] in arguments.values() and option["on"] == first


def _cheapest(options: Sequence[Mapping[str, str]], wishes: Wishes) -> str:
    fitting = [o for o in options if all(o[attribute] == value for (_, attribute), value in wishes.items())]
    return min(fitting or options, key=lambda option: int(option["price"]))["id"]
