"""The scripted customer: one wish and what is known of it, spoken by the grammar in ``voice.yaml``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from environments.help_desk.words import CITIES, FIRST_ORDER, LAST_ORDER, PRODUCTS
from environments.kit.scripted import Fact, Part, ScriptedUser, Wish, grammar_of, reader_of
from mua.environment.protocol import Task
from mua.users.personas import persona_of

HERE = Path(__file__).parent
_REASONS = {"redirect": "tell_moving", "track": "tell_waiting"}
"""Why somebody wants what is no change of mind."""


def customer(task: Task, seed: int, personas: Sequence[str] = ()) -> ScriptedUser:
    """The customer of one episode."""
    key, part = f"{task.id}/{seed}", part_of(task)
    return ScriptedUser(
        key, task.split, reader_of(HERE), grammar_of(HERE), persona_of(key, personas), part.wishes, part.facts
    )


def part_of(task: Task) -> Part:
    """What the customer of ``task`` wants and knows."""
    known = {fact: Fact(value, wrong=_wrong(task, fact, value)) for fact, value in task.data["known"].items()}
    own = {fact: known.pop(fact) for fact in ("order", "name")}
    verb = task.data["wish"]
    return Part([Wish(verb, {**known, "reason": Fact("it", _REASONS.get(verb, ""))})], own)


def _wrong(task: Task, fact: str, value: str) -> str:
    """What somebody careless says at first: another number, item or city; nobody gets their own name wrong."""
    rng = random.Random(f"wrong/{task.id}/{fact}")
    others = {"order": [str(rng.randint(FIRST_ORDER, LAST_ORDER))], "item": PRODUCTS, "city": CITIES}.get(fact, ())
    return rng.choice([other for other in others if other != value] or [""])
