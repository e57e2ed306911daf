"""The verdict on a help desk episode: the database, what had to be told, what was said besides, and in which order.

All four come from data: the task's gold actions, facts and demands, ``claims.yaml`` (how facts are put into words) and
:data:`RULES` (what the policy wants before a change).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from environments.help_desk.database import Database, Snapshot, World, difference
from environments.help_desk.words import CITIES
from mua.environment.conduct import Called, Past, Rules, conduct, untold
from mua.environment.protocol import Evaluation, Task, ToolResult, Transcript
from mua.language.claims import AGENT, ClaimReader, Moment, Sheet, Thing
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
    unsaid = untold(task.data["facts"], found.claims.true)
    success = not wrong_rows and not unsaid and found.sound
    return Evaluation(float(success), success, {"database": wrong_rows, "unsaid": unsaid, **found.details()})


_NOTHING: frozenset[str] = frozenset()
_ITEM_ROLES = ("sale", "price", "deed", "can", "refund", "status", "was", "gone", "place", "destination")
_GONE = ("shipped", "delivered")
_DONE_BY = {"cancelled": "cancel", "redirected": "redirect", "returned": "return"}


def possible(status: str, returnable: bool) -> set[str]:
    """The changes that the policy allows for an order, or an item of it."""
    found = {"cancel", "redirect"} if status == "pending" else set[str]()
    return found | ({"return"} if status == "delivered" and returnable else set())


class Replayed:
    """An episode gone through again. Implements :class:`mua.environment.conduct.Replay`."""

    def __init__(self, desk: HelpDesk, task: Task) -> None:
        self._desk = desk
        self._task = task
        world = World(**task.data["world"])
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
        focus = [order for order in self._under_discussion(past) if order in orders]
        sheets: dict[Thing, Sheet] = {}
        for order, row in orders.items():
            sheets[f"order {order.lower()}"] = self._order(row, past, database)
        sheets |= self._items(focus or list(orders), database)
        items = [thing for thing in sheets if thing.startswith("item ")]
        talked = [f"order {order.lower()}" for order in focus]
        verified = {sheets[thing]["verified"] for thing in talked} or {frozenset({"no"})}
        sheets["customer"] = {"verified": frozenset().union(*verified), "name": frozenset({self._caller()})}
        handed_over = any(call.name == "transfer_to_human" for call in past.calls)
        sheets[AGENT] = {"deed": frozenset({"transferred"} if handed_over else ())}
        return Moment(sheets, ["customer", *items, *talked], self._words, self._amounts(focus, database))

    def _under_discussion(self, past: Past) -> list[str]:
        """Orders that calls were about, else those the customer named, the latest last."""
        called = [call.arguments["order"] for call in past.calls if "order" in call.arguments]
        return list(dict.fromkeys(called)) or [
            order for order in (self._task.data["known"]["order"],) if past.has_heard(order)
        ]

    def _order(self, row: Json, past: Past, database: Database) -> Sheet:
        initial = World(**self._task.data["world"]).order(row["id"])
        deeds = {"cancelled"} if row["status"] == "cancelled" else set[str]()
        deeds |= {"redirected"} if row["destination"] != initial["destination"] else set()
        items = database.rows("SELECT product, returned, final_sale FROM items WHERE order_id = ?", row["id"])
        deeds |= {"returned"} if any(item["returned"] for item in items) else set()
        deeds |= {"done"} if deeds else set()
        owner = database.rows("SELECT name FROM customers WHERE id = ?", row["customer"])[0]["name"].lower()
        mine = owner == self._caller()
        calls = [call for call in past.calls if call.arguments.get("order") == row["id"]]
        checked = any(call.name == "check_owner" and str(call.arguments["name"]).lower() == owner for call in calls)
        sheet = {
            "status": frozenset({row["status"]}),
            "was": frozenset({initial["status"], row["status"]}),
            "gone": frozenset({"yes"} if initial["status"] in _GONE else ()),
            "place": frozenset({row["place"].lower()}),
            "destination": frozenset({row["destination"].lower()}),
            "account": frozenset({"yours" if mine else "not yours"}),
            "verified": frozenset({"yes"} if checked else {"no"}),
            "read": frozenset({"yes"} if calls else {"no"}),
            "deed": frozenset(deeds),
            "items": frozenset(item["product"].lower() for item in items),
            "count": frozenset({str(len(items))}),
            "name": frozenset({owner}),
            "refund": _NOTHING,
            "when": _NOTHING,
        }
        if checked and mine:
            returnable = any(not item["final_sale"] for item in items)
            sheet["can"] = frozenset(
                {*possible(row["status"], returnable), *(_DONE_BY[deed] for deed in deeds - {"done"})}
            )
        return sheet

    def _items(self, orders: Sequence[str], database: Database) -> dict[Thing, Sheet]:
        """The items of some orders by their products; one that is in several is as it is in any of them."""
        found: dict[Thing, dict[str, set[str]]] = {}
        for order in orders:
            held = database.rows("SELECT status, place, destination FROM orders WHERE id = ?", order)[0]
            status = held["status"]
            for row in database.rows("SELECT * FROM items WHERE order_id = ?", order):
                sheet = found.setdefault(f"item {row['product'].lower()}", {role: set() for role in _ITEM_ROLES})
                sheet["sale"].add("final sale" if row["final_sale"] else "returnable")
                for role, value in held.items():
                    sheet[role].add(value.lower())
                sheet["was"].add(status)
                sheet["gone"] |= {"yes"} if status in _GONE else set()
                sheet["price"].add(f"{row['price']:g}")
                sheet["deed"] |= {"returned", "done"} if row["returned"] else set()
                sheet["deed"] |= {"cancelled", "done"} if status == "cancelled" else set()
                sheet["can"] |= possible(status, not row["final_sale"]) | ({"return"} if row["returned"] else set())
        return {thing: {role: frozenset(values) for role, values in sheet.items()} for thing, sheet in found.items()}

    def _amounts(self, orders: Sequence[str], database: Database) -> frozenset[float]:
        """Prices of the orders under discussion, and each order's sum; refunds are of what was returned."""
        found: set[float] = set()
        for order in orders:
            prices = [row["price"] for row in database.rows("SELECT price FROM items WHERE order_id = ?", order)]
            found |= {float(price) for price in prices} | {float(sum(prices))}
        return frozenset(found or {-1.0})

    def _caller(self) -> str:
        return str(self._task.data["known"]["name"]).lower()


def facts_of(thing: str, role: str, value: str, *others: str) -> list[Json]:
    """One required fact; ``others`` are values that tell it as well."""
    fact: Json = {"thing": thing.lower(), "role": role, "value": value}
    return [fact | ({"or": list(others)} if others else {})]
