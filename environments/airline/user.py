"""The scripted customer: the errands of a task one after the other, spoken by the grammar in ``voice.yaml``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from environments.airline.errands import day_words
from environments.airline.world import AHEAD, world
from environments.kit.scripted import Fact, Part, ScriptedUser, Wish, grammar_of, reader_of
from mua.environment.protocol import Task
from mua.types import Json
from mua.users.personas import persona_of

HERE = Path(__file__).parent


def customer(task: Task, seed: int, personas: Sequence[str] = ()) -> ScriptedUser:
    """The customer of one episode."""
    key, part = f"{task.id}/{seed}", part_of(task)
    persona = persona_of(key, personas)
    own = {"user_id": part.facts["user_id"]} if persona.volunteers else part.facts  # nobody opens with a birthday
    return ScriptedUser(key, task.split, reader_of(HERE), grammar_of(HERE), persona, part.wishes, own)


def part_of(task: Task) -> Part:
    """What the customer of ``task`` wants and knows."""
    wishes = [_wish(errand, f"{task.id}/{place}") for place, errand in enumerate(task.data["errands"])]
    return Part(wishes, _own(task.data["user"], task.id))


def _own(user_id: str, key: str) -> dict[str, Fact]:
    """What the customer knows whatever the wish is."""
    record = world().tables["users"][user_id]
    name = f"{record['name']['first_name']} {record['name']['last_name']}"
    return {
        "user_id": Fact(user_id, wrong=_wrong(key, "user_id", user_id)),
        "name": Fact(name),
        "birth_date": Fact(record["dob"]),
    }


def _wish(errand: Json, key: str) -> Wish:
    known = {name: _fact(errand, name, value, key) for name, value in errand["facts"].items()}
    if "flight" in known:  # asked for one of several flights, or for what matters in the choice
        known["preference"] = Fact(known["flight"].value, "tell_flight")
    before = {name: _fact(errand, name, value, key) for name, value in errand["before"].items()}
    change = next(iter(before), "")
    values = {**errand["values"], "value": errand["facts"][change]} if change else errand["values"]
    return Wish(errand["verb"], known, values, f"change_{change}" if change else "", before)


def _fact(errand: Json, name: str, value: str, key: str) -> Fact:
    rule = errand["rules"].get(name, "")
    certain = rule or name in errand["before"] or (name == "date" and errand["verb"] != "change_day")
    return Fact(value, rule, "" if certain else _wrong(key, name, value))


def _wrong(key: str, name: str, value: str) -> str:
    """What somebody careless says at first: a mistyped id or number, another count of bags, another day."""
    rng = random.Random(f"wrong/{key}/{name}")
    if name == "user_id":
        return value[:-1] + str((int(value[-1]) + rng.randint(1, 9)) % 10)
    if name == "reservation":
        return value[:-1] + rng.choice([letter for letter in "ABCDEFGHJKLMNPQRSTUVWXYZ" if letter != value[-1]])
    if name == "bags":
        return rng.choice([bags for count in range(2, 9) if (bags := f"{count} bags") != value])
    if name == "date":
        days = [day_words(day) for day in AHEAD]
        return rng.choice([day for day in days if day not in value])
    return ""
