"""The verdict on a help desk episode: the database, what had to be told, what was said besides, and in which order.

All four come from data: the task's gold actions, facts and demands, ``claims.yaml`` (how facts are put into words) and
:data:`RULES` (what the policy wants before a change).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from environments.help_desk.database import CITIES, Database, Snapshot, World, difference
from environments.kit.conduct import Called, Past, Rules, conduct, untold
from environments.kit.language.claims import AGENT, Moment, Sheet, Thing, claim_reader
from mua.environment.protocol import Evaluation, Task, ToolResult, Transcript
from mua.environment.tool_arguments import fitted
from mua.types import Json, ToolSchema

_OWNER = {"call": "check_owner", "same": ["order"], "heard": ["order", "name"]}
_READ = {"call": "get_order", "same": ["order"]}
RULES = Rules(
    {
        "cancel_order": (_OWNER, _READ),
        "change_destination": (_OWNER, _READ),
        "return_items": (_OWNER, _READ, {"call": "get_item", "same": ["order"]}),
    }
)


class Desk(Protocol):
    """What is used of a help desk, which itself asks for the verdict."""

    @property
    def database(self) -> Database: ...
    def tools(self) -> Sequence[ToolSchema]: ...
    def call(self, name: str, arguments: Json) -> ToolResult: ...


def judged(task: Task, transcript: Transcript, desk: Desk, state: Snapshot, gold: Snapshot) -> Evaluation:
    """1 exactly when all of it is so: see the module. ``desk`` is a fresh one, on which the episode is gone through."""
    wrong_rows = difference(state, gold)
    found = conduct(transcript, Replayed(desk, task), claim_reader(Path(__file__).parent), RULES, task.data["demands"])
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


class _Item(NamedTuple):
    """A row of items, from its product on."""

    product: str
    price: int
    final_sale: int
    returned: int


@dataclass(frozen=True, slots=True)
class _Held:
    """A row of orders with its owner's name, in lower case, and its items."""

    id: str
    owner: str
    status: str
    place: str
    destination: str
    items: list[_Item] = field(default_factory=list)


class Replayed:
    """An episode gone through again. Implements :class:`environments.kit.conduct.Replay`."""

    def __init__(self, desk: Desk, task: Task) -> None:
        self._desk = desk
        self._task = task
        world = World(**task.data["world"])
        self._initial = {row[0]: world.order(row[0]) for row in world.orders}
        self._words: dict[str, Sequence[str]] = {
            "city": CITIES,
            "item": sorted({row[2] for row in world.items}),
            "name": sorted({row[1] for row in world.customers}),
        }

    def call(self, called: Called) -> ToolResult:
        """Run a call with the arguments as the tool took them when it was called."""
        schema = next((one for one in self._desk.tools() if one.name == called.name), None)
        return self._desk.call(called.name, fitted(schema, called.arguments) if schema else called.arguments)

    def moment(self, past: Past) -> Moment:
        held = self._held()
        focus = [order for order in self._under_discussion(past) if order in held]
        sheets: dict[Thing, Sheet] = {}
        for order, one in held.items():
            sheets[f"order {order.lower()}"] = self._order(one, past)
        sheets |= _items([held[order] for order in focus] or list(held.values()))
        items = [thing for thing in sheets if thing.startswith("item ")]
        talked = [f"order {order.lower()}" for order in focus]
        verified = {sheets[thing]["verified"] for thing in talked} or {frozenset({"no"})}
        sheets["customer"] = {"verified": frozenset().union(*verified), "name": frozenset({self._caller()})}
        handed_over = any(call.name == "transfer_to_human" for call in past.calls)
        sheets[AGENT] = {"deed": frozenset({"transferred"} if handed_over else ())}
        return Moment(sheets, ["customer", *items, *talked], self._words, _amounts([held[order] for order in focus]))

    def _held(self) -> dict[str, _Held]:
        """Every order by its number, with its items, as they are now."""
        state = self._desk.database.snapshot()
        found = dict[str, _Held]()
        for order, customer, status, place, destination in state["orders"].values():
            found[order] = _Held(order, state["customers"][customer][1].lower(), status, place, destination)
        for _, order, *item in state["items"].values():
            found[order].items.append(_Item(*item))
        return found

    def _under_discussion(self, past: Past) -> list[str]:
        """Orders that calls were about, else those the customer named, the latest last."""
        called = [call.arguments["order"] for call in past.calls if "order" in call.arguments]
        return list(dict.fromkeys(called)) or [
            order for order in (self._task.data["known"]["order"],) if past.has_heard(order)
        ]

    def _order(self, held: _Held, past: Past) -> Sheet:
        initial = self._initial[held.id]
        deeds = {"cancelled"} if held.status == "cancelled" else set[str]()
        deeds |= {"redirected"} if held.destination != initial["destination"] else set()
        deeds |= {"returned"} if any(item.returned for item in held.items) else set()
        deeds |= {"done"} if deeds else set()
        mine = held.owner == self._caller()
        calls = [call for call in past.calls if call.arguments.get("order") == held.id]
        checked = any(call.name == "check_owner" and call.arguments["name"].lower() == held.owner for call in calls)
        sheet = {
            "status": frozenset({held.status}),
            "was": frozenset({initial["status"], held.status}),
            "gone": frozenset({"yes"} if initial["status"] in _GONE else ()),
            "place": frozenset({held.place.lower()}),
            "destination": frozenset({held.destination.lower()}),
            "account": frozenset({"yours" if mine else "not yours"}),
            "verified": frozenset({"yes"} if checked else {"no"}),
            "read": frozenset({"yes"} if calls else {"no"}),
            "deed": frozenset(deeds),
            "items": frozenset(item.product.lower() for item in held.items),
            "count": frozenset({str(len(held.items))}),
            "name": frozenset({held.owner}),
            "refund": _NOTHING,
            "when": _NOTHING,
        }
        if checked and mine:
            returnable = any(not item.final_sale for item in held.items)
            sheet["can"] = frozenset(
                {*possible(held.status, returnable), *(_DONE_BY[deed] for deed in deeds - {"done"})}
            )
        return sheet

    def _caller(self) -> str:
        return str(self._task.data["known"]["name"]).lower()


def _items(orders: Sequence[_Held]) -> dict[Thing, Sheet]:
    """The items of some orders by their products; one that is in several is as it is in any of them."""
    found: dict[Thing, dict[str, set[str]]] = {}
    for order in orders:
        for item in order.items:
            sheet = found.setdefault(f"item {item.product.lower()}", {role: set() for role in _ITEM_ROLES})
            sheet["sale"].add("final sale" if item.final_sale else "returnable")
            sheet["status"].add(order.status)
            sheet["place"].add(order.place.lower())
            sheet["destination"].add(order.destination.lower())
            sheet["was"].add(order.status)
            sheet["gone"] |= {"yes"} if order.status in _GONE else set()
            sheet["price"].add(f"{item.price:g}")
            sheet["deed"] |= {"returned", "done"} if item.returned else set()
            sheet["deed"] |= {"cancelled", "done"} if order.status == "cancelled" else set()
            sheet["can"] |= possible(order.status, not item.final_sale) | ({"return"} if item.returned else set())
    return {thing: {role: frozenset(values) for role, values in sheet.items()} for thing, sheet in found.items()}


def _amounts(orders: Sequence[_Held]) -> frozenset[float]:
    """Prices of the orders under discussion, and each order's sum."""
    found = {float(item.price) for order in orders for item in order.items}
    return frozenset(found | {float(sum(item.price for item in order.items)) for order in orders} or {-1.0})


def facts_of(thing: str, role: str, value: str, *others: str) -> list[Json]:
    """One required fact; ``others`` are values that tell it as well."""
    fact: Json = {"thing": thing.lower(), "role": role, "value": value}
    return [fact | ({"or": list(others)} if others else {})]
