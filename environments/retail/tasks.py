"""Tasks generated from a seed over the shop's database, pinned by ``manifest.json``.

The splits share neither tasks nor customers: each has users of its own. Half of a split is easy (one wish, one write
at most, everything known), a third medium (one wish that needs more looking up, a customer who forgot or changes its
mind, or a trap of the policy), the rest hard (two to four wishes with two writes at least). A wish that is refused or
only asks has another one beside it that is to be granted: every task grants something.

``python -m environments.retail.tasks`` pins what the generator makes now.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import cycle
from pathlib import Path

from environments.kit.database import ServiceDesk
from environments.kit.overlay import Overlay
from environments.kit.task_manifest import check_manifest, pin_manifest, tasks_digest
from environments.retail.shop import shop
from environments.retail.tools import TOOLS
from environments.retail.verdict import IDENTIFIED
from environments.retail.wishes import EASY, MEDIUM, PARTS, Made, Maker, Scene, granted_beside
from mua.environment.protocol import Split, Task
from mua.types import Json
from mua.utils.errors import MuaError

MANIFEST = Path(__file__).with_name("manifest.json")
SIZES: dict[Split, Mapping[str, int]] = {
    "train": {"easy": 400, "medium": 260, "hard": 140},
    "validation": {"easy": 60, "medium": 44, "hard": 24},
    "test": {"easy": 60, "medium": 44, "hard": 24},
}
_USERS: dict[Split, tuple[int, int]] = {"train": (0, 76), "validation": (76, 88), "test": (88, 100)}
"""Share of the customers that a split has for itself, in hundredths."""
_EASY_MIX = ("cancel", "return", "cancel", "return", "cancel_refused", "cancel", "return", "status", "return_refused")
_KNOWS_EMAIL = {"easy": 1.0, "medium": 0.7, "hard": 0.5}
"""How likely a customer can give its email; the others know only name and zip code."""
_TRIES = 2000


def generate(split: Split) -> Iterator[Task]:
    """The tasks of a split; the same at every call."""
    return _generate(ServiceDesk(shop(), TOOLS), f"retail/{split}", split, _users(split))


@lru_cache(maxsize=8)
def practice_tasks(number: int) -> tuple[Task, ...]:
    """As many tasks as the training split has, about a practice shop (from 1): its customers stand in no split.

    They are for demonstrations. A policy that sees the few customers of the training split again and again learns their
    numbers by heart instead of copying what it is told.
    """
    base = shop(number)
    return tuple(
        _generate(ServiceDesk(base, TOOLS), f"retail/practice-{number}", "train", sorted(base.tables["users"]))
    )


def _generate(desk: ServiceDesk, name: str, split: Split, users: Sequence[str]) -> Iterator[Task]:
    number = 0
    for difficulty, count in SIZES[split].items():
        seen: set[str] = set()
        for kind in _kinds(difficulty, count):
            yield Task(
                f"{name}/{number}", "retail", split, _data(desk, f"{name}/{number}", users, kind, difficulty, seen)
            )
            number += 1


def _kinds(difficulty: str, count: int) -> Iterator[str]:
    names = {"easy": _EASY_MIX, "medium": tuple(MEDIUM), "hard": ("several",)}[difficulty]
    return (kind for kind, _ in zip(cycle(names), range(count), strict=False))


def _data(desk: ServiceDesk, name: str, users: Sequence[str], kind: str, difficulty: str, seen: set[str]) -> Json:
    """Tries customers and wishes until one fits that no earlier task has."""
    rng = random.Random(name)
    for _ in range(_TRIES):
        scene = Scene(rng, desk.base, rng.choice(users))
        wishes = _several(scene) if kind == "several" else _one(scene, {**EASY, **MEDIUM}[kind])
        told = json.dumps([made.wish for made in wishes])
        if wishes and told not in seen and _works(desk, wishes):
            seen.add(told)
            return _assembled(scene, kind, difficulty, wishes)
    raise MuaError(f"{name}: no customer fits a task of kind {kind!r}; widen the generator")


@lru_cache(maxsize=3)
def _users(split: Split) -> list[str]:
    users = sorted(shop().tables["users"])
    random.Random("retail/users").shuffle(users)
    first, last = (len(users) * share // 100 for share in _USERS[split])
    return users[first:last]


def _one(scene: Scene, maker: Maker) -> list[Made]:
    """The wish, and one to be granted before or after it where it changes nothing."""
    made = maker(scene)
    if made is None or made.actions:
        return [] if made is None else [made]
    other = granted_beside(scene)
    return [] if other is None else scene.rng.sample([made, other], 2)


def _several(scene: Scene) -> list[Made]:
    """Two to four different wishes about different orders, at least two of them granted."""
    wanted = scene.rng.choice([2, 2, 3, 3, 4])
    found: list[Made] = []
    for name in scene.rng.sample(list(PARTS), len(PARTS)):
        if len(found) < wanted and (made := PARTS[name](scene)) is not None:
            found.append(made)
    return found if len(found) == wanted and sum(len(made.actions) for made in found) >= 2 else []


def _works(desk: ServiceDesk, wishes: Sequence[Made]) -> bool:
    """Whether all gold calls succeed one after the other."""
    state = Overlay(desk.base)
    actions = [action for made in wishes for action in made.actions]
    return not any(desk.call(state, action["name"], action["arguments"]).error for action in actions)


def _assembled(scene: Scene, kind: str, difficulty: str, wishes: Sequence[Made]) -> Json:
    user = scene.user
    email = user["email"] if scene.rng.random() < _KNOWS_EMAIL[difficulty] else None
    customer = {**user["name"], "email": email, "zip": user["address"]["zip"]}
    return {
        "kind": kind,
        "difficulty": difficulty,
        "customer": customer,
        "wishes": [made.wish for made in wishes],
        "actions": [action for made in wishes for action in made.actions],
        "facts": [fact for made in wishes for fact in made.facts],
        "demands": [IDENTIFIED, *(_demand(call) for made in wishes for call in _look_ups(made))],
        "forbidden": [call for made in wishes for call in made.forbidden],
        "instruction": instruction(customer, [made.wish for made in wishes]),
    }


def _look_ups(made: Made) -> list[Json]:
    """What has to be read for a wish before the last word."""
    order_id = made.wish.get("refused") or (made.wish["knows"].get("order") if not made.actions else None)
    order = [{"name": "get_order_details", "arguments": {"order_id": order_id}}] if order_id else []
    return [*order, *made.demands]


def _demand(call: Json) -> Json:
    return {"call": call["name"], "arguments": call["arguments"]}


def instruction(customer: Json, wishes: Sequence[Json]) -> str:
    """The page of whoever plays the customer."""
    email = f"Your email is {customer['email']}." if customer["email"] else "You do not remember your email."
    who = f"You are {customer['first_name']} {customer['last_name']}, zip code {customer['zip']}. {email}"
    what = [wish["goal"] for wish in wishes]
    manner = "You write to a shop. Tell numbers and details when you are asked for them. If you are refused, accept it."
    if len(what) > 1:
        what = [f"{number}. {goal}" for number, goal in enumerate(what, 1)]
        manner += " Bring up your wishes one after the other."
    return "\n".join([who, manner, *what])


@lru_cache(maxsize=3)
def load_split(split: Split) -> tuple[Task, ...]:
    """The tasks of a split, checked against the manifest together with the database they are about.

    Raises :class:`MuaError` when the generator no longer makes what the manifest pins.
    """
    tasks = tuple(generate(split))
    made = {"database": shop().digest(), split: tasks_digest(tasks)}
    check_manifest(MANIFEST, made, "python -m environments.retail.tasks")
    return tasks


def write_manifest() -> None:
    """Pin what the generator makes now."""
    entries: dict[str, Json] = {"database": {"sha256": shop().digest()}}
    for split in SIZES:
        tasks = tuple(generate(split))
        entries[split] = {"tasks": len(tasks), "sha256": tasks_digest(tasks)}
    pin_manifest(MANIFEST, entries)


if __name__ == "__main__":
    write_manifest()
