"""Tasks: one to three errands of one customer, with gold writes, look-ups, required facts and forbidden calls.

A split is a fixed list of recipes filled with customers of its own, so that no customer of one split is met in
another. ``manifest.json`` pins what the generator makes; a change of generator or airline that changes a task is an
error until it is pinned anew (``python -m environments.airline.tasks``).

A recipe names errands: ``add_bags?~ + refused_cancel`` is a request for bags by someone who forgot the number (``?``)
and changes their mind (``~``), and then a cancellation that the policy forbids.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle
from pathlib import Path

import yaml

from environments.airline.errands import FLIGHTS, SMALL, Caller, Errand, Unfit, day_words
from environments.airline.world import AHEAD, world
from environments.kit.scripted import Fact, Part, ScriptedUser, Wish, grammar_of, reader_of
from environments.kit.task_manifest import PinnedTasks
from mua.environment.protocol import Split, Task
from mua.types import Json
from mua.users.personas import persona_of
from mua.utils.errors import MuaError
from mua.utils.strict_json import read_file

# The scripted customer: the errands of a task one after the other, spoken by the grammar in ``voice.yaml``.

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


SIZES: dict[Split, int] = {"train": 400, "validation": 80, "test": 80}
_SHARE: dict[Split, range] = {"train": range(6), "validation": range(6, 8), "test": range(8, 10)}
"""Customers by their place in the table modulo ten."""
MAKERS = SMALL | FLIGHTS

_RECIPES: dict[str, list[str]] = yaml.safe_load(read_file(HERE / "recipes.yaml"))
_ATTEMPTS = 100
"""Draws for a task that is not in the split yet."""


def recipes(size: int) -> list[str]:
    """Two easy, two medium and one hard in turn, going round each list."""
    order = ("easy", "easy", "medium", "medium", "hard")
    going_round = {difficulty: cycle(listed) for difficulty, listed in _RECIPES.items()}
    return [next(going_round[order[index % len(order)]]) for index in range(size)]


def generate(split: Split, number: int, recipe: str, attempt: int = 0) -> Task:
    """The task of one number; a pure function of its arguments. Raises MuaError where no customer fits the recipe."""
    rng = random.Random(f"airline/{split}/{number}/{recipe}/{attempt}")
    users = [user for index, user in enumerate(world().tables["users"]) if index % 10 in _SHARE[split]]
    for user_id in rng.sample(users, len(users)):
        try:
            errands = _errands(Caller(world().tables, user_id, rng), recipe)
        except Unfit:
            continue
        return Task(f"airline/{split}/{number}", "airline", split, _data(user_id, errands))
    raise MuaError(f"no customer of split {split} fits the recipe {recipe!r}")


def _errands(caller: Caller, recipe: str) -> list[Errand]:
    parts = recipe.split(" + ")
    return [MAKERS[part.rstrip("?~")](caller, "?" in part, "~" in part) for part in parts]


def _data(user_id: str, errands: Sequence[Errand]) -> Json:
    weight = sum(errand.weight for errand in errands) + len(errands) - 1
    return {
        "kind": "+".join(errand.kind for errand in errands),
        "difficulty": "easy" if weight <= 1 else "medium" if weight <= 2 else "hard",
        "user": user_id,
        "actions": [action for errand in errands for action in errand.actions],
        "facts": [fact for errand in errands for fact in errand.told],
        "demands": [_profile(user_id), *(demand for errand in errands for demand in errand.demands)],
        "forbidden": [call for errand in errands for call in errand.forbidden],
        "instruction": _instruction(user_id, errands),
        "errands": [_told(errand) for errand in errands],
    }


def _told(errand: Errand) -> Json:
    """What the scripted user needs of an errand, and whether its wish is to be granted."""
    kept = ("kind", "verb", "values", "facts", "rules", "before", "denied")
    return {key: value for key, value in asdict(errand).items() if key in kept}


def _profile(user_id: str) -> Json:
    """The demand to look up who it is, by the user id that the customer gave."""
    return {"call": "get_user_details", "arguments": {"user_id": user_id}, "heard": ["user_id"]}


def _instruction(user_id: str, errands: Sequence[Errand]) -> str:
    name = world().tables["users"][user_id]["name"]
    wishes = " When that is settled: ".join(errand.story for errand in errands)
    return (
        f"You are {name['first_name']} {name['last_name']}, a customer of an airline; your user id is {user_id}. "
        f"{wishes} If you are refused something, accept it and go on."
    )


def make_split(split: Split) -> tuple[Task, ...]:
    """The tasks of a split as the generator makes them now, no two of them alike."""
    made: dict[str, Task] = {}
    for number, recipe in enumerate(recipes(SIZES[split])):
        for attempt in range(_ATTEMPTS):
            task = generate(split, number, recipe, attempt)
            if made.setdefault(task.data["instruction"], task) is task:
                break
        else:
            raise MuaError(f"split {split} has too few customers for the recipe {recipe!r}")
    return tuple(made.values())


PINNED = PinnedTasks(
    Path(__file__).with_name("manifest.json"),
    make_split,
    "python -m environments.airline.tasks",
    lambda: {"database": world().digest()},
)


if __name__ == "__main__":
    PINNED.pin()
