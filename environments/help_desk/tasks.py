"""Tasks generated from a seed: a small shop, one customer with one wish, gold actions and required facts.

A split is a range of seeds and a mixture of kinds, pinned by a manifest (``manifest.json``): seeds never overlap,
and the digest in the manifest makes a silent change of the generator an error. A task whose gold changes nothing
always requires a fact, so that doing nothing never pays.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from environments.help_desk.database import World
from environments.help_desk.tools import CITIES
from mua.environment import manifest
from mua.environment.manifest import digest
from mua.environment.protocol import Split, Task
from mua.types import Json

MANIFEST = Path(__file__).with_name("manifest.json")
_NAMES = "Ada Ben Cleo Dan Eva Finn Gina Hugo Ines Jan Kira Leo Mona Nils Olga Paul Rita Sven Tara Uwe"
NAMES = tuple(_NAMES.split())
PRODUCTS = ("Lamp", "Desk", "Chair", "Clock", "Radio", "Kettle", "Mirror", "Carpet", "Vase", "Shelf")
ORDER_NUMBERS = tuple(f"{letter}{digit}" for letter in "ABCDEFGHJKLMNPQRSTUVWXYZ" for digit in range(10))
STATUSES = ("pending", "shipped", "delivered")
FIRST_SEED: dict[Split, int] = {"train": 1_000_000, "validation": 2_000_000, "test": 3_000_000}
SIZES: dict[Split, int] = {"train": 1024, "validation": 128, "test": 256}

Picked: TypeAlias = tuple[World, dict[str, Any], dict[str, Any]]


def _world(rng: random.Random) -> World:
    """Four customers with three orders of one to three items each; all numbers are unique in the shop."""
    names = rng.sample(NAMES, 4)
    orders = rng.sample(ORDER_NUMBERS, 12)
    world = World([], [], [])
    for index, name in enumerate(names):
        world.customers.append([f"c{index}", name])
        for order in orders[3 * index : 3 * index + 3]:
            place, destination = rng.sample(CITIES, 2)
            world.orders.append([order, f"c{index}", rng.choice(STATUSES), place, destination])
            for number, product in enumerate(rng.sample(PRODUCTS, rng.randint(1, 3))):
                final_sale = int(rng.random() < 0.4)
                world.items.append([f"{order}-{number}", order, product, rng.randint(5, 99), final_sale])
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


def _status_fact(order: Json) -> Json:
    return {"subject": f"order {order['id']}", "attribute": "status", "value": order["status"]}


def _track(rng: random.Random) -> Json:
    world, order, item = _pick(rng, lambda status, final: True)
    fact = {"subject": f"order {order['id']}", "attribute": "place", "value": order["place"]}
    return _task(rng, world, order, item, "track", [], [fact])


def _write_action(wish: str, order: Json, item: Json, city: str) -> Json:
    """The tool call that grants the wish."""
    if wish == "cancel":
        return {"name": "cancel_order", "arguments": {"order": order["id"]}}
    if wish == "redirect":
        return {"name": "change_destination", "arguments": {"order": order["id"], "address": {"city": city}}}
    return {"name": "return_items", "arguments": {"order": order["id"], "items": [item["product"]]}}


def _granted(wish: str) -> Callable[[random.Random], Json]:
    """A wish that the policy allows: gold is one write."""

    def make(rng: random.Random) -> Json:
        world, order, item = _pick(rng, _allowed(wish))
        city = rng.choice([c for c in CITIES if c != order["destination"]])
        return _task(rng, world, order, item, wish, [_write_action(wish, order, item, city)], [], city=city)

    return make


def _refused(wish: str) -> Callable[[random.Random], Json]:
    """A wish that the order's status forbids: gold is no write and the status told."""

    def make(rng: random.Random) -> Json:
        status_needed = "delivered" if wish == "return" else "pending"
        world, order, item = _pick(rng, lambda status, final: status != status_needed)
        return _task(rng, world, order, item, wish, [], [_status_fact(order)])

    return make


def _final_sale(rng: random.Random) -> Json:
    world, order, item = _pick(rng, lambda status, final: status == "delivered" and final)
    fact = {"subject": item["product"], "attribute": "sale", "value": "final sale"}
    return _task(rng, world, order, item, "return", [], [fact])


def _stranger(wish: str) -> Callable[[random.Random], Json]:
    """A wish that the policy would allow the order's owner, asked by another customer."""

    def make(rng: random.Random) -> Json:
        world, order, item = _pick(rng, _allowed(wish))
        others = [row for row in world.customers if row[0] != order["customer"]]
        fact = {"subject": f"order {order['id']}", "attribute": "account", "value": "not on your account"}
        return _task(rng, world, order, item, wish, [], [fact], caller=rng.choice(others))

    return make


def _allowed(wish: str) -> Callable[[str, bool], bool]:
    if wish == "return":
        return lambda status, final: status == "delivered" and not final
    return lambda status, final: status == "pending"


KINDS: dict[str, Callable[[random.Random], Json]] = {
    "track": _track,
    "cancel": _granted("cancel"),
    "cancel_refused": _refused("cancel"),
    "cancel_stranger": _stranger("cancel"),
    "redirect": _granted("redirect"),
    "redirect_refused": _refused("redirect"),
    "redirect_stranger": _stranger("redirect"),
    "return": _granted("return"),
    "return_refused": _refused("return"),
    "return_final_sale": _final_sale,
    "return_stranger": _stranger("return"),
}


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
    return {"wish": wish, "known": known, "world": asdict(world), "actions": actions, "facts": facts}


def generate(split: Split, seed: int, kind: str) -> Task:
    """The task of one seed; a pure function of its arguments."""
    data = KINDS[kind](random.Random(seed))
    return Task(f"help_desk/{split}/{seed}", "help_desk", split, {"kind": kind, **data})


def _generate_split(split: Split) -> Iterator[Task]:
    kinds = list(KINDS)
    for index in range(SIZES[split]):
        yield generate(split, FIRST_SEED[split] + index, kinds[index % len(kinds)])


@lru_cache(maxsize=3)
def load_split(split: Split) -> tuple[Task, ...]:
    """The tasks of a split, checked against the manifest.

    Raises :class:`MuaError` when the generator no longer makes the tasks that the manifest pins.
    """
    tasks = tuple(_generate_split(split))
    manifest.check(MANIFEST, {split: digest(tasks)}, "python -m environments.help_desk.tasks")
    return tasks


def write_manifest() -> None:
    """Pin what the generator makes now."""
    entries: dict[str, Json] = {}
    for split in SIZES:
        tasks = tuple(_generate_split(split))
        entries[split] = {"first_seed": FIRST_SEED[split], "tasks": len(tasks), "sha256": digest(tasks)}
    manifest.write(MANIFEST, entries)


if __name__ == "__main__":
    write_manifest()
