"""UserRL's trips: parts with wishes in free text, and options in whatever form the record gives them.

Nothing of them can be read by rules: a judge says which part a query covers and which wish a question is about. Which
options are best, right or wrong the record says.
"""

from __future__ import annotations

import json
import random
from collections.abc import Generator, Mapping, Sequence
from functools import cached_property

from environments.gyms._shared import act
from environments.gyms._shared.records import Aspect, TravelRecord
from environments.gyms.travel.catalog import aspect_of
from environments.gyms.travel.game import Part, TravelGame, searched
from environments.gyms.travel.players import query
from environments.gyms.travel.scenarios import PATTERNS
from mua.environment.protocol import Move, Task
from mua.types import Json

UNTOLD = frozenset({"type", "reason"})
"""Fields of an option that say what it is worth; no list shows them."""
_VAGUE = ("Is there anything that matters to you?", "What are your preferences?")
_ATTEMPTS = 3


class RecordPart(Part):
    """One part of a record's trip."""

    @cached_property
    def sorts(self) -> Mapping[str, str]:
        return {option["id"]: sort for sort, option in self.data["offers"]}

    def listing(self) -> str:
        """The options as the policy reads them, a JSON object a line."""
        return "\n".join(
            json.dumps({key: value for key, value in option.items() if key not in UNTOLD}, ensure_ascii=False)
            for _, option in self.data["offers"]
        )


class RecordGame(TravelGame):
    """One of UserRL's travellers."""

    def _part(self, one: Json) -> Part:
        return RecordPart(aspect_of(one), one, {held["attribute"]: held for held in one["preferences"]})

    async def _covered(self, content: str) -> Part | str:
        facts = {name: _facts(part.data["arguments"]) for name, part in self._parts.items()}
        found = await searched(self, content, facts)
        if found is not None:
            return self._parts[found]
        parts = ", ".join(part.aspect.noun for part in self._parts.values())
        return f"Nothing fits yet. {self._ORDER} ({parts}), with all that you know of it: places, dates, guests."


def data_of(record: TravelRecord) -> Json:
    """``data`` of a task; the options of a part in an order without meaning."""
    rng = random.Random(f"travel/{record.id}")
    pattern = "".join(sorted(str(len(aspect.preferences)) for aspect in record.aspects.values()))
    level = PATTERNS[pattern][0] if pattern in PATTERNS else "medium"
    aspects = [_aspect(name, record.aspects[name], rng) for name in record.dimensions]
    return {"kind": pattern, "difficulty": level, "opening": record.initial_description, "aspects": aspects}


def record_gold(task: Task) -> Sequence[Move]:
    """A search for each part, then its best option."""
    searches = [act("search", query(aspect_of(one), one["arguments"])) for one in task.data["aspects"]]
    return [*searches, act("answer", ", ".join(one["best"] for one in task.data["aspects"]))]


def record_moves(task: Task, seed: int, loose: float) -> Generator[Move, str, None]:
    """Asks about each wish, lists the options, books; ``loose`` is how often it asks something vague first."""
    rng = random.Random(f"expert/{task.id}/{seed}")
    for one in task.data["aspects"]:
        noun = aspect_of(one).noun
        if rng.random() < loose:
            yield act("action", rng.choice(_VAGUE))
        for held in one["preferences"]:
            yield act("action", f"What do you want of the {noun} as to {held['attribute']}?")
        for _ in range(_ATTEMPTS):
            if "Options" in (yield act("search", query(aspect_of(one), one["arguments"]))):
                break
        yield act("answer", one["best"])


def _aspect(name: str, aspect: Aspect, rng: random.Random) -> Json:
    sorted_out = (("correct", aspect.options.correct), ("wrong", aspect.options.wrong), ("noise", aspect.options.noise))
    offers = [[_sort(sort, option["id"], aspect), dict(option)] for sort, options in sorted_out for option in options]
    rng.shuffle(offers)
    return {
        "aspect": name,
        "letter": aspect.letter,
        "arguments": dict(aspect.arguments),
        "preferences": list(_preferences(aspect).values()),
        "offers": offers,
        "best": aspect.best_id,
    }


def _sort(listed: str, one: str, aspect: Aspect) -> str:
    """best and correct as ``best_id`` and ``correct_ids`` say, whatever list the option stands in."""
    if one == aspect.best_id:
        return "best"
    if one in aspect.correct_ids:
        return "correct"
    return listed if listed != "correct" else "wrong"


def _preferences(aspect: Aspect) -> dict[str, Json]:
    """By what they are about, which two wishes may share."""
    found: dict[str, Json] = {}
    for held in aspect.preferences:
        times = sum(name.partition(" (")[0] == held.subcategory for name in found)
        name = f"{held.subcategory} ({times + 1})" if times else held.subcategory
        told = {"value": held.preference, "wish": f"wants: {held.preference}", "hint": held.implicit_elicitation}
        found[name] = {"attribute": name, **told}
    return found


def _facts(arguments: Json) -> str:
    return "; ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in arguments.items()
    )
