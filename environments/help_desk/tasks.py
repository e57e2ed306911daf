"""Tasks generated from a seed: a small shop, one customer with one wish, gold actions and required facts.

A split is a range of seeds and a mixture of kinds, pinned by a manifest (``manifest.json``): seeds never overlap,
and the digest in the manifest makes a silent change of the generator an error. Most wishes are to be granted. Every
task requires that something is told, and that the order was looked up, and whose it is, before the last word.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from environments.help_desk.database import CITIES, FIRST_ORDER, LAST_ORDER, NAMES, PRODUCTS, STATUSES, World
from environments.help_desk.verdict import facts_of
from environments.kit.scripted import Fact, Part, ScriptedUser, Wish, grammar_of, reader_of
from environments.kit.task_manifest import PinnedTasks
from mua.environment.protocol import Split, Task
from mua.types import Json
from mua.users.personas import persona_of

FIRST_SEED: dict[Split, int] = {"train": 1_000_000, "validation": 2_000_000, "test": 3_000_000}
SIZES: dict[Split, int] = {"train": 2048, "validation": 256, "test": 512}

Picked: TypeAlias = tuple[World, dict[str, Any], dict[str, Any]]


def _world(rng: random.Random) -> World:
    """Four customers with three orders of one to three items each; all numbers are unique in the shop."""
    names = rng.sample(NAMES, 4)
    orders = rng.sample(range(FIRST_ORDER, LAST_ORDER + 1), 12)
    world = World([], [], [])
    for index, name in enumerate(names):
        world.customers.append([f"c{index}", name])
        for number in orders[3 * index : 3 * index + 3]:
            order = str(number)
            place, destination = rng.sample(CITIES, 2)
            world.orders.append([order, f"c{index}", rng.choice(STATUSES), place, destination])
            for line, product in enumerate(rng.sample(PRODUCTS, rng.randint(1, 3))):
                final_sale = int(rng.random() < 0.4)
                world.items.append([f"{order}-{line}", order, product, rng.randint(5, 99), final_sale])
    return world


def _pick(rng: random.Random, accept: Callable[[str, bool], bool]) -> Picked:
    """A shop in which some order's status and some item's final-sale flag are acceptable, with that order and item."""
    while True:
        world = _world(rng)
        choices = [
            (world.order(row[0]), item)
            for row in world.orders
            for item in world.items_of(row[0])
            if accept(row[2], bool(item["final_sale"]))
        ]
        if choices:
            order, item = rng.choice(choices)
            return world, order, item


def _track(rng: random.Random) -> Json:
    world, order, item = _pick(rng, lambda status, final: True)
    return _task(
        rng, world, order, item, "track", [], facts_of(f"order {order['id']}", "place", order["place"].lower())
    )


def _write_action(wish: str, order: Json, item: Json, city: str) -> Json:
    """The tool call that grants the wish."""
    if wish == "cancel":
        return {"name": "cancel_order", "arguments": {"order": order["id"]}}
    if wish == "redirect":
        return {"name": "change_destination", "arguments": {"order": order["id"], "address": {"city": city}}}
    return {"name": "return_items", "arguments": {"order": order["id"], "items": [item["product"]]}}


def _granted(wish: str) -> Callable[[random.Random], Json]:
    """A wish that the policy allows: gold is one write, and that it was done is told."""

    def make(rng: random.Random) -> Json:
        world, order, item = _pick(rng, _allowed(wish))
        city = rng.choice([c for c in CITIES if c not in (order["destination"], order["place"])])
        facts = facts_of(f"order {order['id']}", "deed", _DEEDS[wish], "done")
        if wish == "return":
            facts[0]["things"] = [f"item {item['product'].lower()}"]
        return _task(rng, world, order, item, wish, [_write_action(wish, order, item, city)], facts, city=city)

    return make


def _refused(rng: random.Random) -> Json:
    """A wish that the order's status forbids: gold is no write and the status told."""
    wish = rng.choice(_CHANGES)
    status_needed = "delivered" if wish == "return" else "pending"
    world, order, item = _pick(rng, lambda status, final: status != status_needed)
    facts = facts_of(f"order {order['id']}", "status", order["status"])
    return {"case": f"{wish} {order['status']}", **_task(rng, world, order, item, wish, [], facts)}


def _final_sale(rng: random.Random) -> Json:
    world, order, item = _pick(rng, lambda status, final: status == "delivered" and final)
    return _task(rng, world, order, item, "return", [], facts_of(f"item {item['product']}", "sale", "final sale"))


def _stranger(rng: random.Random) -> Json:
    """A wish that the policy would allow the order's owner, asked by another customer."""
    wish = rng.choice(("track", *_CHANGES))
    world, order, item = _pick(rng, _allowed(wish))
    caller = rng.choice([row for row in world.customers if row[0] != order["customer"]])
    facts = facts_of(f"order {order['id']}", "account", "not yours")
    return _task(rng, world, order, item, wish, [], facts, caller=caller)


def _allowed(wish: str) -> Callable[[str, bool], bool]:
    if wish == "return":
        return lambda status, final: status == "delivered" and not final
    return lambda status, final: wish == "track" or status == "pending"


_CHANGES = ("cancel", "redirect", "return")
_DEEDS = {"cancel": "cancelled", "redirect": "redirected", "return": "returned"}
KINDS: dict[str, Callable[[random.Random], Json]] = {
    "track": _track,
    "cancel": _granted("cancel"),
    "redirect": _granted("redirect"),
    "return": _granted("return"),
    "refused_by_status": _refused,
    "refused_final_sale": _final_sale,
    "refused_stranger": _stranger,
}
GRANTED = ("track", "cancel", "redirect", "return")
MIXTURE = (*KINDS, "cancel", "redirect", "return")
"""The kinds of a split, in turn: three in ten tasks are to be refused."""


def _task(
    rng: random.Random,
    world: World,
    order: Json,
    item: Json,
    wish: str,
    actions: list[Json],
    facts: list[Json],
    *,
    city: str | None = None,
    caller: Sequence[Any] | None = None,
) -> Json:
    owner = next(row for row in world.customers if row[0] == order["customer"])
    known = {"order": order["id"], "name": (caller or owner)[1]}
    if wish == "redirect":
        known["city"] = city or rng.choice([c for c in CITIES if c != order["destination"]])
    if wish == "return":
        known["item"] = item["product"]
    task = {"wish": wish, "known": known, "world": asdict(world), "actions": actions, "facts": facts}
    return {**task, "demands": _demands(known, facts)}


def _demands(known: Json, facts: list[Json]) -> list[Json]:
    """What has to be looked up before the last word: whose the order is, and, where it is the caller's, the order."""
    owner = {"call": "check_owner", "arguments": {"order": known["order"], "name": known["name"]}}
    demands = [owner | {"heard": ["order", "name"]}]
    roles = {fact["role"] for fact in facts}
    if "account" not in roles:
        demands.append({"call": "get_order", "arguments": {"order": known["order"]}})
    if "sale" in roles:
        demands.append({"call": "get_item", "arguments": {"order": known["order"], "item": known["item"]}})
    return demands


def generate(split: Split, seed: int, kind: str) -> Task:
    """The task of one seed; a pure function of its arguments."""
    data = KINDS[kind](random.Random(seed))
    return Task(f"help_desk/{split}/{seed}", "help_desk", split, {"kind": kind, **data})


def _generate_split(split: Split) -> Iterator[Task]:
    for index in range(SIZES[split]):
        yield generate(split, FIRST_SEED[split] + index, MIXTURE[index % len(MIXTURE)])


PINNED = PinnedTasks(
    Path(__file__).with_name("manifest.json"), _generate_split, "python -m environments.help_desk.tasks"
)


# The scripted customer: one wish and what is known of it, spoken by the grammar in ``voice.yaml``.

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


if __name__ == "__main__":
    PINNED.pin()
