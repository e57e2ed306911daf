"""The verdict on a help desk episode: the database, what had to be told, what was said besides, and in which order.

All four come from data: the task's gold actions, facts and demands, ``claims.yaml`` (how facts are put into words) and
:data:`RULES` (what the policy wants before a change).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from environments.help_desk.database import Snapshot, World, difference
from environments.help_desk.words import CITIES
from mua.environment.conduct import Called, Past, Rules, conduct
from mua.environment.protocol import Evaluation, Task, ToolResult, Transcript
from mua.language.claims import Claim, ClaimReader, Moment, Sheet, Thing
from mua.language.patterns import load
from mua.types import Json

if TYPE_CHECKING:
    from environments.help_desk.tools import HelpDesk

_OWNER = {"call": "check_owner", "same": ["order"], "heard": ["order", "name"]}
_READ = {"call": "get_order", "same": ["order"]}
RULES = Rules(
    {
        "cancel_order": (_OWNER, _READ),
        "change_destination": (_OWNER, _READ),
        "return_items": (_OWNER, _READ, {"call": "get_item", "same": ["order"]}),
    }
)


@lru_cache(maxsize=1)
def claim_reader() -> ClaimReader:
    """What finds the claims of an agent at this desk."""
    return ClaimReader(load(Path(__file__).with_name("claims.yaml")))


def judged(task: Task, transcript: Transcript, desk: HelpDesk, state: Snapshot, gold: Snapshot) -> Evaluation:
    """1 exactly when all of it is so: see the module. ``desk`` is a fresh one, on which the episode is gone through."""
    wrong_rows = difference(state, gold)
    found = conduct(transcript, Replayed(desk, task), claim_reader(), RULES, task.data["demands"])
    unsaid = missing(task.data["facts"], found.claims.true)
    success = not wrong_rows and not unsaid and found.sound
    return Evaluation(float(success), success, {"database": wrong_rows, "unsaid": unsaid, **found.details()})


def missing(facts: Sequence[Json], told: Sequence[Claim]) -> list[str]:
    """The required facts that no true statement told.

    A fact has ``thing`` (or one of ``things``), ``role`` and ``value`` (or one of ``or``).
    """
    said = {(claim.thing, claim.role, claim.value) for claim in told if not claim.denied}
    lines = []
    for fact in facts:
        things, values = [fact["thing"], *fact.get("things", ())], [fact["value"], *fact.get("or", ())]
        if not any((thing, fact["role"], value) in said for thing in things for value in values):
            lines.append(f"{fact['thing']}: {fact['role']} {fact['value']}")
    return lines


class Replayed:
    """An episode gone through again. Implements :class:`mua.environment.conduct.Replay`."""

    def __init__(self, desk: HelpDesk, task: Task) -> None:
        self._desk = desk
        self._task = task
        world = World(**task.data["world"])
        self._owners = {row[0]: row[1].lower() for row in world.customers}
        self._destinations = {row[0]: row[4] for row in world.orders}
        self._words: dict[str, Sequence[str]] = {
            "city": CITIES,
            "item": sorted({row[2] for row in world.items}),
            "name": sorted({row[1] for row in world.customers}),
        }

    def call(self, called: Called) -> ToolResult:
        return self._desk.call(called.name, called.arguments)

    def moment(self, past: Past) -> Moment:
        database = self._desk.database
        orders = {row["id"]: row for row in database.rows("SELECT * FROM orders")}
        items: dict[str, list[Json]] = {order: [] for order in orders}
        for item in database.rows("SELECT * FROM items"):
            items[item["order_id"]].append(item)
        focus = [order for order in self._under_discussion(past) if order in orders]
        sheets: dict[Thing, Sheet] = {
            f"order {order.lower()}": self._order(row, items[order], past) for order, row in orders.items()
        }
        talked = [f"order {order.lower()}" for order in focus]
        verified = [sheets[thing]["verified"] for thing in talked] or [frozenset({"no"})]
        sheets["customer"] = {"verified": frozenset().union(*verified), "name": frozenset({self._caller()})}
        named = _items([item for order in focus or orders for item in items[order]])
        prices = [[float(item["price"]) for item in items[order]] for order in focus]
        amounts = frozenset(price for each in prices for price in [*each, sum(each)]) or frozenset({-1.0})
        return Moment(sheets | named, ["customer", *named, *talked], self._words, amounts)

    def _under_discussion(self, past: Past) -> list[str]:
        """Orders that calls were about, else the one the customer named; the latest last."""
        called = [call.arguments["order"] for call in past.calls if "order" in call.arguments]
        known = self._task.data["known"]["order"]
        return list(dict.fromkeys(called)) or ([known] if past.has_heard(known) else [])

    def _order(self, row: Json, items: Sequence[Json], past: Past) -> Sheet:
        deeds = {"cancelled"} if row["status"] == "cancelled" else set[str]()
        deeds |= {"redirected"} if row["destination"] != self._destinations[row["id"]] else set()
        deeds |= {"returned"} if any(item["returned"] for item in items) else set()
        deeds |= {"done"} if deeds else set()
        owner = self._owners[row["customer"]]
        calls = [call for call in past.calls if call.arguments.get("order") == row["id"]]
        checked = any(call.name == "check_owner" and str(call.arguments["name"]).lower() == owner for call in calls)
        return {
            "status": frozenset({row["status"]}),
            "place": frozenset({row["place"].lower()}),
            "destination": frozenset({row["destination"].lower()}),
            "account": frozenset({"yours" if owner == self._caller() else "not yours"}),
            "verified": frozenset({"yes"} if checked else {"no"}),
            "read": frozenset({"yes"} if calls else {"no"}),
            "deed": frozenset(deeds),
            "items": frozenset(item["product"].lower() for item in items),
            "name": frozenset({owner}),
        }

    def _caller(self) -> str:
        return str(self._task.data["known"]["name"]).lower()


def _items(rows: Sequence[Json]) -> dict[Thing, Sheet]:
    """What is so of the items of some orders; two of a name share their facts."""
    found: dict[Thing, dict[str, set[str]]] = {}
    for row in rows:
        sheet = found.setdefault(f"item {row['product'].lower()}", {"sale": set(), "deed": set()})
        sheet["sale"].add("final sale" if row["final_sale"] else "returnable")
        sheet["deed"] |= {"returned", "done"} if row["returned"] else set()
    return {thing: {role: frozenset(values) for role, values in sheet.items()} for thing, sheet in found.items()}


def facts_of(thing: str, role: str, value: str, *others: str) -> list[Json]:
    """One required fact; ``others`` are values that tell it as well."""
    fact: Json = {"thing": thing.lower(), "role": role, "value": value}
    return [fact | ({"or": list(others)} if others else {})]
