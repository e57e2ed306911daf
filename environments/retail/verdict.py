"""What is so at the shop when something is said: sheets of orders, products, customer and desk.

Held against it are the claims that ``claims.yaml`` finds (:mod:`environments.kit.language.claims`). :data:`RULES` is
what the policy wants before a change. Sheets are made when a statement asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from environments.kit.conduct import Called, Past, Rules
from environments.kit.database import Code
from environments.kit.language.claims import AGENT, Moment, Sheet, Thing, claim_reader
from environments.kit.overlay import Base, Overlay
from environments.retail.reading import CITIES
from mua.environment.protocol import Task
from mua.types import Json

_BY_EMAIL = {"call": "find_user_id_by_email", "heard": ["email"]}
_BY_NAME = {"call": "find_user_id_by_name_zip", "heard": ["first_name", "last_name", "zip"]}
IDENTIFIED: Json = {"any": [_BY_EMAIL, _BY_NAME]}
"""Before anything is told or changed."""
_READ = {"call": "get_order_details", "same": ["order_id"]}
_SAYS: Mapping[str, str] = {
    "cancel_pending_order": r"cancel|call|void|stop",
    "modify_pending_order_address": r"address|send|sent|ship|deliver|go(es)?\b|redirect",
    "modify_pending_order_payment": r"pa(y|id)|charge|bill|card",
    "modify_pending_order_items": r"chang|modif|swap|switch|exchang|replac|updat|instead",
    "return_delivered_order_items": r"return|back|refund",
    "exchange_delivered_order_items": r"exchang|swap|switch|replac|chang|instead",
}
"""Change of an order -> what a proposal of it says."""
RULES = Rules(
    {
        **{name: (IDENTIFIED, _READ, {"yes": ["order_id"], "says": says}) for name, says in _SAYS.items()},
        "modify_user_address": (IDENTIFIED, {"yes": ["address1"]}),
    }
)
ALLOWED: Mapping[str, str] = {
    "cancel": "pending",
    "address": "pending",
    "payment": "pending",
    "change": "pending",
    "return": "delivered",
    "exchange": "delivered",
}
"""Change of an order -> the status in which the policy allows it."""
VERBS = {"change_items": "change", "refund_to": "return"}
"""Verbs of wishes that are called otherwise on a sheet."""
_DEEDS: Mapping[str, tuple[str, str]] = {
    "cancel_pending_order": ("cancelled", "cancel"),
    "return_delivered_order_items": ("returned", "return"),
    "exchange_delivered_order_items": ("exchanged", "exchange"),
    "modify_pending_order_items": ("modified", "change"),
    "modify_pending_order_address": ("redirected", "address"),
    "modify_pending_order_payment": ("paid anew", "payment"),
}
"""Tool -> what an order is after it, and the change that was then possible."""
_COLORS = ("white", "yellow", "pink", "purple", "orange", "grey", "gray", "beige", "golden", "silver", "turquoise")
"""Colours that may be named although nothing has them."""
_NOTHING: frozenset[str] = frozenset()
_METHODS = {"paypal": "paypal", "credit_card": "credit card", "gift_card": "gift card"}


def code(*, binding: bool = True) -> Code:
    """What the shop wants of its agents; not ``binding`` on official data."""
    return Code(claim_reader(Path(__file__).parent), RULES, moment, binding)


def moment(task: Task, base: Base, state: Overlay, past: Past) -> Moment:
    """What is so now."""
    return _Now(task, base, state, past).moment()


class _Sheets(Mapping[Thing, Sheet]):
    """Sheets made when they are asked for."""

    def __init__(self, now: _Now) -> None:
        self._now = now
        self._made: dict[Thing, Sheet | None] = {}

    def __getitem__(self, thing: Thing) -> Sheet:
        if thing not in self._made:
            self._made[thing] = self._now.sheet(thing)
        found = self._made[thing]
        if found is None:
            raise KeyError(thing)
        return found

    def __iter__(self) -> Iterator[Thing]:
        return iter(self._now.focus)

    def __len__(self) -> int:
        return len(self._now.focus)


class _Now:
    """One moment of an episode."""

    def __init__(self, task: Task, base: Base, state: Overlay, past: Past) -> None:
        self._task, self._base, self._state, self._past = task, base, state, past
        heard = " ".join(past.heard).upper()
        called = [str(call.arguments.get("order_id", "")) for call in past.calls]
        named = [key for key in called + re.findall(r"#?W\d+", heard) if key]
        keys = dict.fromkeys(key if key.startswith("#") else f"#{key}" for key in named)
        self._orders = [key for key in keys if state.get("orders", key) is not None]
        self._caller = self._who()
        self._verified = any(self._identifies(call.name, call.arguments) for call in past.calls)
        talked = [f"order {key[1:].lower()}" for key in self._orders]
        bought = {f"item {item['name'].lower()}": None for key in self._orders for item in self._order(key)["items"]}
        self.focus: list[Thing] = [AGENT, "customer", *bought, *talked]

    def moment(self) -> Moment:
        return Moment(_Sheets(self), self.focus, _index(self._base).words, self._amounts())

    def sheet(self, thing: Thing) -> Sheet | None:
        """The sheet of a thing; None if there is no such thing."""
        kind, _, name = thing.partition(" ")
        if kind == AGENT:
            return {"deed": frozenset(self._handed_over()), "found": frozenset({"yes"} if self._verified else ())}
        if kind == "customer":
            return self._customer()
        if kind == "item":
            return self._item(name)
        key = f"#{name.upper()}"
        return self._order_sheet(key, self._order(key)) if self._state.get("orders", key) is not None else None

    # Who it is.

    def _who(self) -> str | None:
        who: Json | None = self._task.data.get("customer")
        if who is None:
            return next((self._order(key)["user_id"] for key in self._orders), None)
        return _index(self._base).users.get((who["first_name"].lower(), who["last_name"].lower(), who["zip"]))

    def _user(self) -> Json:
        return (self._state.get("users", self._caller) if self._caller else None) or {}

    def _identifies(self, tool: str, arguments: Json) -> bool:
        user = self._base.tables["users"].get(self._caller or "")
        if user is None:
            return False
        if tool == "find_user_id_by_email":
            return bool(user["email"].lower() == str(arguments["email"]).lower())
        return tool == "find_user_id_by_name_zip" and bool(user["address"]["zip"] == arguments["zip"])

    def _customer(self) -> Sheet:
        user = self._user()
        deeds = (
            {"moved", "readdressed", "done"}
            if any(call.name == "modify_user_address" for call in self._past.calls)
            else set()
        )
        deeds |= {"done"} if any(call.name in _DEEDS for call in self._past.calls) else set()
        deeds |= {"readdressed"} if any("redirected" in self._deeds(key) for key in self._orders) else set()
        sheet: dict[str, frozenset[str]] = {
            "verified": frozenset({"yes"} if self._verified else {"no"}),
            "deed": frozenset(deeds),
            "refund": _NOTHING if not any(self._refunds(key) for key in self._orders) else frozenset({"paid"}),
            "can": frozenset({"home"}),
            "found by": frozenset(self._found_by()),
            "covers": frozenset({"no"} if self._refused("payment") else {"yes"}),
        }
        if user:
            before = self._base.tables["users"][self._caller or ""]
            sheet |= {
                "first": frozenset({user["name"]["first_name"].lower()}),
                "last": frozenset({user["name"]["last_name"].lower()}),
                "email": frozenset({user["email"].lower()}),
                "city": frozenset({user["address"]["city"].lower()}),
                "zip": frozenset({user["address"]["zip"]}),
                "street": frozenset({user["address"]["address1"].lower()}),
                "flat": frozenset({user["address"]["address2"].lower()}),
                "orders": frozenset({str(len(user["orders"]))}),
                "methods": frozenset(_method(key) for key in user["payment_methods"]),
                "ending": frozenset(one["last_four"] for one in user["payment_methods"].values() if "last_four" in one),
                "balance": frozenset(
                    _sum(one["balance"])
                    for one in (*user["payment_methods"].values(), *before["payment_methods"].values())
                    if "balance" in one
                ),
            }
        return sheet

    def _found_by(self) -> Iterator[str]:
        for call in self._past.calls:
            if call.name == "find_user_id_by_email":
                yield "email"
            if call.name == "find_user_id_by_name_zip":
                yield from ("name", "zip")

    def _handed_over(self) -> Iterator[str]:
        if any(call.name == "transfer_to_human_agents" for call in self._past.calls):
            yield "transferred"

    # Orders.

    def _order(self, key: str) -> Json:
        found = self._state.get("orders", key)
        assert found is not None
        return found

    def _order_sheet(self, key: str, order: Json) -> Sheet:
        was: Json = self._base.tables["orders"][key]
        deeds = self._deeds(key)
        deeds |= {"swapped"} if deeds & {"exchanged", "modified"} else set()
        read = any(call.name in ("get_order_details", *_DEEDS) for call in self._calls_on(key))
        mine = order["user_id"] == self._caller
        paid = was["payment_history"][0]
        payments = [one for one in order["payment_history"] if one["transaction_type"] == "payment"]
        statuses = {order["status"], *(["pending"] if "pending" in order["status"] else [])}
        sheet: dict[str, frozenset[str]] = {
            "status": frozenset(statuses),
            "was": frozenset({was["status"], order["status"]}),
            "gone": frozenset({"yes"} if "pending" not in was["status"] and was["status"] != "cancelled" else ()),
            "account": frozenset({"yours" if mine else "not yours"}),
            "verified": frozenset({"yes"} if self._verified else {"no"}),
            "read": frozenset({"yes"} if read else {"no"}),
            "deed": frozenset(deeds | ({"done"} if deeds else set())),
            "items": frozenset(item["name"].lower() for one in (order, was) for item in one["items"]),
            "count": frozenset({str(len(order["items"]))}),
            "option": frozenset().union(*(self._options(item["name"]) for item in order["items"])),
            "total": frozenset({_sum(paid["amount"]), _sum(sum(item["price"] for item in order["items"]))}),
            "paid with": frozenset(self._payers(order)),
            "paid now": frozenset(self._called(order, payments[-1]["payment_method_id"]) if payments else ()),
            "refund": frozenset({"paid"} if self._refunds(key) else ()),
            "refund amount": self._refunded(order, was),
            "charged": frozenset(
                _sum(amount)
                for amount in (*(one["amount"] for one in payments), order.get("exchange_price_difference", 0))
            ),
            "exists": frozenset({"yes"}),
            "refund to": frozenset(self._refund_methods(key)),
            "city": frozenset({order["address"]["city"].lower()}),
            "zip": frozenset({order["address"]["zip"]}),
            "street": frozenset({order["address"]["address1"].lower()}),
            "flat": frozenset({order["address"]["address2"].lower()}),
            "when": _NOTHING,
            "reason": frozenset({order["cancel_reason"]} if "cancel_reason" in order else ()),
            "first": frozenset({self._owner(order)["first_name"].lower()}),
            "last": frozenset({self._owner(order)["last_name"].lower()}),
        }
        if deeds & {"exchanged", "modified"}:
            sheet["difference"] = self._difference(order, was)
            last = order.get("exchange_payment_method_id", order["payment_history"][-1]["payment_method_id"])
            sheet["difference by"] = frozenset(self._called(order, last))
        if self._verified and read:
            done = {_DEEDS[call.name][1] for call in self._calls_on(key) if call.name in _DEEDS}
            sheet["can"] = frozenset((self._possible(key, was) if mine else set()) | done)
        return sheet

    def _owner(self, order: Json) -> Json:
        found: Json = self._base.tables["users"][order["user_id"]]["name"]
        return found

    def _calls_on(self, key: str) -> list[Called]:
        return [call for call in self._past.calls if call.arguments.get("order_id") == key]

    def _deeds(self, key: str) -> set[str]:
        """What was done to an order, now or before this conversation."""
        made = {_DEEDS[call.name][0] for call in self._calls_on(key) if call.name in _DEEDS}
        standing = {"cancelled": "cancelled", "return requested": "returned", "exchange requested": "exchanged"}
        status = self._order(key)["status"]
        return made | {standing[status]} if status in standing else made

    def _possible(self, key: str, was: Json) -> set[str]:
        """The changes that the policy allows, less those that this task has to be refused."""
        refused = {
            VERBS.get(wish["verb"], wish["verb"])
            for wish in self._task.data.get("wishes", ())
            if wish.get("refused") == key or (wish.get("yields") and wish["knows"].get("order") in (key, None))
        }
        status = (self._order(key) if self._deeds(key) else was)["status"]
        return {verb for verb, needed in ALLOWED.items() if status == needed} - refused

    def _refused(self, verb: str) -> bool:
        """Whether a wish with this verb has to be refused for another reason than the order's status."""
        wishes = [wish for wish in self._task.data.get("wishes", ()) if wish["verb"] == verb and "refused" in wish]
        orders = self._base.tables["orders"]
        return any(orders[wish["refused"]]["status"] == "pending" for wish in wishes)

    def _refunds(self, key: str) -> bool:
        order = self._order(key)
        deeds = self._deeds(key)
        return bool(deeds & {"returned", "cancelled"}) or any(
            one["transaction_type"] == "refund" for one in order["payment_history"]
        )

    def _called(self, order: Json, method: str) -> Iterator[str]:
        """What people call a payment method: what it is, and the brand of a card."""
        yield _method(method)
        owner = self._base.tables["users"][order["user_id"]]
        if brand := owner["payment_methods"].get(method, {}).get("brand"):
            yield from ("card", brand.lower())

    def _payers(self, order: Json) -> Iterator[str]:
        for one in order["payment_history"]:
            if one["transaction_type"] == "payment":
                yield from self._called(order, one["payment_method_id"])
        if "exchange_payment_method_id" in order:
            yield from self._called(order, order["exchange_payment_method_id"])

    def _refunded(self, order: Json, was: Json) -> frozenset[str]:
        """What went back, or goes back; before anything was done, what could."""
        returned = [item["price"] for item in was["items"] if item["item_id"] in order.get("return_items", ())]
        found = {one["amount"] for one in order["payment_history"] if one["transaction_type"] == "refund"}
        found |= {sum(returned)} if returned else set()
        found |= {-order["exchange_price_difference"]} if order.get("exchange_price_difference", 0) < 0 else set()
        if order == was:
            prices = [item["price"] for item in order["items"]]
            found |= {*prices, sum(prices), *(order["payment_history"][0]["amount"],)}
        return frozenset(_sum(amount) for amount in found)

    def _difference(self, order: Json, was: Json) -> frozenset[str]:
        change = order.get("exchange_price_difference", order["payment_history"][-1]["amount"])
        return frozenset({_sum(abs(change))})

    def _refund_methods(self, key: str) -> Iterator[str]:
        order = self._order(key)
        for one in order["payment_history"]:
            if one["transaction_type"] == "refund":
                yield from self._called(order, one["payment_method_id"])
        for field in ("return_payment_method_id", "exchange_payment_method_id"):
            if field in order:
                yield from self._called(order, order[field])

    # Products and items.

    def _item(self, name: str) -> Sheet | None:
        product = _index(self._base).products.get(name)
        if product is None:
            return None
        lines = [(key, item) for key in self._orders for item in self._lines(key) if item["name"].lower() == name]
        asked = self._asked_price(product)
        sheets = [self._order_sheet(key, self._order(key)) for key, _ in lines]
        found: dict[str, frozenset[str]] = {
            role: frozenset().union(*(sheet[role] for sheet in sheets)) for role in (_OF_ITEM if sheets else ())
        }
        found["deed"] = self._item_deeds(name, lines)
        held = frozenset(_sum(item["price"]) for _, item in lines)
        read = any(call.arguments.get("product_id") == product["product_id"] for call in self._past.calls)
        found["price"] = held | (asked or (frozenset(_prices(product)) if read or not held else _NOTHING))
        found["option"] = self._options(product["name"])
        if new := self._chosen(product):
            found["new option"] = frozenset(str(value) for one in new for value in one["options"].values())
            found["new price"] = frozenset(_sum(one["price"]) for one in new)
        if self._refused_variant(product):
            found["available"] = frozenset({"no"})
        if sheets and all("can" in sheet for sheet in sheets):
            found["can"] = frozenset().union(*(sheet["can"] for sheet in sheets))
        return found

    def _lines(self, key: str) -> list[Json]:
        """Items of an order as they were and as they are."""
        return [*self._base.tables["orders"][key]["items"], *self._order(key)["items"]]

    def _item_deeds(self, name: str, lines: Sequence[tuple[str, Json]]) -> frozenset[str]:
        deeds = set()
        for key, item in lines:
            order, ids = self._order(key), {item["item_id"]}
            deeds |= {"cancelled"} if order["status"] == "cancelled" else set()
            deeds |= {"returned"} if ids & set(order.get("return_items", ())) else set()
            deeds |= (
                {"exchanged"}
                if ids & {*order.get("exchange_items", ()), *order.get("exchange_new_items", ())}
                else set()
            )
            old = {one["item_id"] for one in self._base.tables["orders"][key]["items"]}
            new = {one["item_id"] for one in order["items"]}
            deeds |= {"modified"} if ids & (old ^ new) else set()
        deeds |= {"swapped"} if deeds & {"exchanged", "modified"} else set()
        return frozenset(deeds | ({"done"} if deeds else set()))

    def _options(self, name: str) -> frozenset[str]:
        """Options of a product's items under discussion, and of what they were exchanged for or asked to become."""
        product = _index(self._base).products[name.lower()]
        held = [item for key in self._orders for item in self._lines(key) if item["name"] == name]
        found = {value for item in held for value in item["options"].values()}
        for key in self._orders:
            new = set(self._order(key).get("exchange_new_items", ()))
            found |= {
                v for one in product["variants"].values() if one["item_id"] in new for v in one["options"].values()
            }
        if any(call.arguments.get("product_id") == product["product_id"] for call in self._past.calls):
            found |= {value for one in product["variants"].values() for value in one["options"].values()}
        return frozenset(found or {v for one in product["variants"].values() for v in one["options"].values()})

    def _chosen(self, product: Json) -> list[Json]:
        """The variants that items of a product under discussion have become, or are to become."""
        ids: set[str] = set()
        for key in self._orders:
            order = self._order(key)
            old = {one["item_id"] for one in self._base.tables["orders"][key]["items"]}
            ids |= {*order.get("exchange_new_items", ()), *({one["item_id"] for one in order["items"]} - old)}
        return [one for one in product["variants"].values() if one["item_id"] in ids]

    def _asked_price(self, product: Json) -> frozenset[str]:
        """The price of the variant that the customer asks for, where it asks for one."""
        for wish in self._task.data.get("wishes", ()):
            if wish["verb"] == "price" and wish["knows"]["product"] == product["name"]:
                wanted = _pairs(wish["knows"]["wanted"])
                return frozenset(_sum(one["price"]) for one in product["variants"].values() if one["options"] == wanted)
        return frozenset()

    def _refused_variant(self, product: Json) -> bool:
        """Whether a customer wants a variant of it that cannot be had."""
        return any(
            "wanted" in wish["knows"] and wish["knows"].get("item") == product["name"] and "refused" in wish
            for wish in self._task.data.get("wishes", ())
        )

    def _amounts(self) -> frozenset[float]:
        """Every sum that there is in the orders under discussion, and what their products cost."""
        found: set[float] = set()
        for key in self._orders:
            was, order = self._base.tables["orders"][key], self._order(key)
            items = [*was["items"], *order["items"]]
            found |= {item["price"] for item in items}
            found |= {abs(one["amount"]) for one in order["payment_history"]}
            found |= {round(sum(item["price"] for item in one["items"]), 2) for one in (was, order)}
            found |= {
                round(
                    sum(item["price"] for item in order["items"] if item["item_id"] in order.get("return_items", ())), 2
                )
            }
            found.add(abs(order.get("exchange_price_difference", 0.0)))
            for item in items:
                variants = self._base.tables["products"][item["product_id"]]["variants"].values()
                found |= {one["price"] for one in variants}
                found |= {round(abs(one["price"] - item["price"]), 2) for one in variants}
        found |= self._product_prices()
        for user in (self._user(), self._base.tables["users"].get(self._caller or "", {})):
            found |= {float(one["balance"]) for one in user.get("payment_methods", {}).values() if "balance" in one}
        return frozenset(found | {0.0})

    def _product_prices(self) -> set[float]:
        read = {call.arguments.get("product_id") for call in self._past.calls}
        return {
            one["price"]
            for product in self._base.tables["products"].values()
            if product["product_id"] in read
            for one in product["variants"].values()
        }


_OF_ITEM = ("status", "was", "gone", "city", "street", "zip", "account", "read", "paid with", "refund", "refund to")


def _pairs(options: str) -> dict[str, str]:
    """``color red, size large`` as a mapping."""
    return dict(part.split(" ", 1) for part in options.split(", "))  # type: ignore[misc]


def _sum(amount: float) -> str:
    """A sum of money as claims have it."""
    return f"{round(amount, 2):g}"


def _method(key: str) -> str:
    return next((words for source, words in _METHODS.items() if key.startswith(source)), key)


def _prices(product: Json) -> set[str]:
    return {_sum(one["price"]) for one in product["variants"].values()}


@dataclass(frozen=True, slots=True)
class _Index:
    """What is looked up in a base again and again; it holds the base, so that nothing else gets its identity."""

    base: Base
    words: Mapping[str, Sequence[str]]
    users: Mapping[tuple[str, str, str], str]
    """First name, last name and zip code -> user id."""
    products: Mapping[str, Json]
    """By their names in lower case."""


_indices: dict[int, _Index] = {}


def _index(base: Base) -> _Index:
    """Made once a base."""
    if id(base) not in _indices:
        users, products = base.tables["users"], base.tables["products"].values()
        _indices[id(base)] = _Index(
            base,
            _words(base),
            {
                (one["name"]["first_name"].lower(), one["name"]["last_name"].lower(), one["address"]["zip"]): key
                for key, one in users.items()
            },
            {one["name"].lower(): one for one in products},
        )
    return _indices[id(base)]


def _words(base: Base) -> Mapping[str, Sequence[str]]:
    """The words of a shop's products, options, cities and people."""
    products, users = base.tables["products"].values(), base.tables["users"].values()
    variants = [one["options"].values() for product in products for one in product["variants"].values()]
    return {
        "item": sorted({product["name"] for product in products}),
        "option": sorted({*_COLORS, *(str(value) for options in variants for value in options)}),
        "city": sorted({*(city for city, _, _ in CITIES), *(user["address"]["city"] for user in users)}),
        "first": sorted({user["name"]["first_name"] for user in users}),
        "last": sorted({user["name"]["last_name"] for user in users}),
    }
