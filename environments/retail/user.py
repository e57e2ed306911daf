"""The scripted customer: a task's wishes and what the customer knows, spoken by the grammar in ``voice.yaml``."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from environments.kit.scripted import Fact, Part, ScriptedUser, Wish, grammar_of, reader_of
from environments.retail.shop import address
from environments.retail.tools import REASONS
from environments.retail.wishes import place
from environments.retail.words import MAIL, PRODUCTS
from mua.environment.protocol import Task
from mua.types import Json
from mua.users.personas import persona_of

HERE = Path(__file__).parent
_RULES: Mapping[str, str] = {"no longer needed": "tell_not_needed", "ordered by mistake": "tell_by_mistake"}


def customer(task: Task, seed: int, personas: Sequence[str] = ()) -> ScriptedUser:
    """The customer of one episode."""
    key, part = f"{task.id}/{seed}", part_of(task)
    return ScriptedUser(
        key, task.split, reader_of(HERE), grammar_of(HERE), persona_of(key, personas), part.wishes, part.facts
    )


def part_of(task: Task) -> Part:
    """What the customer of ``task`` wants and knows."""
    who = task.data["customer"]
    facts = {
        "email": Fact(who["email"] or "", wrong=_wrong(task.id, "email", who["email"] or "")),
        "name": Fact(f"{who['first_name']} {who['last_name']}"),
        "zip": Fact(who["zip"]),
    }
    return Part([_wish(f"{task.id}/{number}", wish) for number, wish in enumerate(task.data["wishes"])], facts)


def _wish(key: str, wish: Json) -> Wish:
    facts = {fact: _fact(key, fact, value, wish) for fact, value in wish["knows"].items()}
    if wish["verb"] == "price" and "product" in facts:
        facts["item"] = facts["product"]
    before = {fact: _fact(key, fact, value, wish, errs=False) for fact, value in wish.get("before", {}).items()}
    change: Json = wish.get("change", {})
    rule = _RULES.get(change.get("value", ""), change.get("fact", ""))
    return Wish(
        wish["verb"],
        facts,
        change_of_mind=f"change_{rule.removeprefix('tell_')}" if change else "",
        values={"changed": str(change.get("value", ""))},
        before=before,
        goes_on=("refuses",) if wish.get("yields") else (),
        gives_way="gives_way" if wish.get("yields") else "",
    )


def _fact(key: str, fact: str, value: str | None, wish: Json, *, errs: bool = True) -> Fact:
    """One fact; of an order whose number is not known, what is in it."""
    if fact == "order" and value is None:
        return Fact(wish["hint"], "tell_hint")
    assert value is not None
    rule = _RULES.get(value, "") if fact == "reason" else ""
    return Fact(value, rule, _wrong(key, fact, value) if errs and "change" not in wish else "")


def _wrong(key: str, fact: str, value: str) -> str:
    """What somebody careless says at first; nobody errs about what the money is for or who they are."""
    rng = random.Random(f"wrong/{key}/{fact}")
    if not value:
        return ""
    if fact == "order":
        return f"#W{rng.randint(1000, 9999)}"
    if fact == "email":
        first, last = rng.sample(sorted(PRODUCTS), 2)
        return f"{first}.{last}@{rng.choice(MAIL)}".lower().replace(" ", "")
    if fact == "item" and " and the " not in value:
        return rng.choice([name for name in PRODUCTS if name != value])
    if fact == "address":
        return place(address(rng))
    assert fact != "reason" or value in REASONS
    return ""
