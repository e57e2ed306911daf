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
from environments.kit.scripted import Fact, Part, ScriptedUser, Wish, grammar_of, reader_of
from environments.kit.task_manifest import PinnedTasks
from environments.retail.reading import MAIL, PRODUCTS
from environments.retail.shop import address, shop
from environments.retail.tools import REASONS, TOOLS
from environments.retail.verdict import IDENTIFIED
from environments.retail.wishes import EASY, MEDIUM, PARTS, Made, Maker, Scene, granted_beside, place
from mua.environment.protocol import Move, Split, Task
from mua.types import Json
from mua.users.personas import persona_of
from mua.utils.errors import MuaError

# The scripted customer: a task's wishes and what the customer knows, spoken by the grammar in ``voice.yaml``.

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


# The gold moves of a task: a shortest way to full reward, whatever is answered.

_DEED = {
    "cancelled": "I have cancelled order {name}.",
    "returned": "I have requested the return for order {name}.",
    "exchanged": "I have processed the exchange for order {name}.",
    "modified": "I have changed the item of order {name}.",
    "redirected": "I have changed the address of order {name}.",
    "paid anew": "I have changed the payment of order {name}.",
    "moved": "I have updated the address in your profile.",
}
_CAN = {
    "cancel": "I cannot cancel order {name}.",
    "return": "I cannot return order {name}.",
    "exchange": "I cannot exchange order {name}.",
    "change": "I cannot change the items of order {name}.",
    "payment": "I cannot change the payment of order {name}.",
    "address": "I cannot change the address of order {name}.",
}


def gold(task: Task) -> list[Move]:
    """Calls that look up, calls that change, and what has to be told."""
    who = task.data["customer"]
    found: list[Move] = [
        ("find_user_id_by_name_zip", {key: who[key] for key in ("first_name", "last_name", "zip")}),
        *((one["call"], one["arguments"]) for one in task.data["demands"] if "call" in one),
    ]
    for action in task.data["actions"]:
        found += _read(action["arguments"])
        found.append((action["name"], action["arguments"]))
    return [*found, *(_told(fact) for fact in task.data["facts"])]


def _read(arguments: Json) -> Iterator[Move]:
    if "order_id" in arguments:
        yield "get_order_details", {"order_id": arguments["order_id"]}


def _told(fact: Json) -> str:
    """The wording of a fact, the first one where one of several is enough."""
    fact = fact.get("any", [fact])[0]
    kind, _, thing = fact["thing"].partition(" ")
    name = f"#{thing.upper()}" if kind == "order" else thing.title()
    if fact["role"] == "deed":
        return _DEED[fact["value"]].format(name=name)
    if fact["role"] == "can":
        return _CAN[fact["value"]].format(name=name)
    return (
        f"Order {name} is {fact['value']}."
        if fact["role"] == "status"
        else f"The {name} costs ${float(fact['value']):.2f}."
    )


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


PINNED = PinnedTasks(
    Path(__file__).with_name("manifest.json"),
    generate,
    "python -m environments.retail.tasks",
    lambda: {"database": shop().digest()},
)


if __name__ == "__main__":
    PINNED.pin()
