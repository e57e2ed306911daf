"""A scripted agent that keeps to the policy: it solves every task, whoever the customer is.

It knows what the customer came for, which a person reads from the opening words, and learns everything else by asking
and by calling tools. Whatever the customer says is noted: what comes later puts right what came before, and the agent
starts over from the first look-up that this changes. Made loose, it departs now and then: it refuses without a
reason, skips the confirmation, takes the wrong reason or the wrong item.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from environments.kit.conduct import agrees
from environments.retail.reading import (
    Item,
    Order,
    Variant,
    address_in,
    noted,
    read_order,
    read_product,
    read_user,
    wanted_options,
)
from environments.retail.tools import REASONS
from mua.environment.protocol import Move, Task
from mua.types import Json

T = TypeVar("T")
Moves: TypeAlias = Generator[Move, str, T]

NEEDS: Mapping[str, tuple[str, ...]] = {
    "cancel": ("order", "reason"),
    "return": ("order", "item"),
    "refund_to": ("order", "item", "payment"),
    "exchange": ("order", "item", "wanted", "payment"),
    "change_items": ("order", "item", "wanted", "payment"),
    "payment": ("order", "payment"),
    "address": ("order", "address"),
    "home": ("address",),
    "status": ("order",),
    "price": ("product", "wanted"),
}
"""What has to be known for each wish."""
ASK: Mapping[str, str] = {
    "email": "What is your email address?",
    "who": "What is your full name, and what is your zip code?",
    "name": "What is your full name?",
    "zip": "What is your zip code?",
    "order": "What is the order number?",
    "reason": "What is the reason for the cancellation?",
    "item": "Which item is it?",
    "product": "Which product is it?",
    "wanted": "Which options would you like?",
    "payment": "Which payment method would you like to use?",
    "address": "What is the new address?",
}
_VAGUE = ("Sorry, that will not work.", "Sorry, it is too late for that.", "Sorry, no.")
"""How a loose tongue refuses; none of these counts as told."""
_INSISTS = re.compile(
    r"are you sure|no way|nothing be done|once more|exception|must be able|supervisor|think again|another look",
    re.IGNORECASE,
)
"""A customer that does not take a refusal."""
MOST_QUESTIONS = 12
"""How often it asks in one conversation, and how often it says the same for one wish."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What comes of a wish after the look-ups."""

    says: str
    """A refusal, an answer, or what is proposed."""
    call: Move | None = None
    """Made after a yes."""
    done: str = ""
    """Said after that."""
    lacks: str = ""
    """A fact that was of no use and is to be asked for again."""


class Expert:
    """The agent's conversation about one task, as a generator of moves fed with what came back."""

    def __init__(self, task: Task, seed: int, loose: float = 0.0) -> None:
        """``loose`` is the probability of each departure."""
        self._wishes: list[Json] = task.data["wishes"]
        self._loose = loose
        self._rng = random.Random(f"expert/{task.id}/{seed}")
        self._known: dict[str, str] = {}
        self._keys: tuple[str, ...] = ()
        self._user = ""
        self._plans: dict[str, Callable[[], Moves[Plan]]] = {
            "cancel": self._cancel,
            "return": self._return,
            "refund_to": self._return,
            "exchange": lambda: self._variant("exchange", "delivered", "exchange_delivered_order_items"),
            "change_items": lambda: self._variant("change", "pending", "modify_pending_order_items"),
            "payment": self._payment,
            "address": self._address,
            "home": self._home,
            "status": self._status,
            "price": self._price,
        }

    def moves(self) -> Moves[None]:
        """Yields a move and is sent the answer: the tool's result, or the customer's words."""
        heard = ""
        for number, wish in enumerate(self._wishes):
            self._known = {key: self._known[key] for key in ("email", "name", "zip") if key in self._known}
            if number:
                self._note(heard)
            heard = yield from self._wish(wish["verb"])

    def _wish(self, verb: str) -> Moves[str]:
        """One wish; what the customer said when it was settled."""
        if not self._user:
            yield from self._identify()
        for _ in range(MOST_QUESTIONS):
            for fact in NEEDS[verb]:
                yield from self._ask(fact)
            plan = yield from self._plans[verb]()
            if plan.lacks:
                self._known.pop(plan.lacks, None)
                self._note((yield plan.says))
                continue
            heard = yield plan.says if plan.call is None or not self._departs() else "One moment, please."
            if plan.call is None:
                if self._note(heard):
                    continue
                return (yield plan.says) if _INSISTS.search(heard) else heard
            if not self._note(heard) and (agrees(heard) or self._departs()):
                yield plan.call
                return (yield plan.done)
        return heard

    # ---- what the customer says

    def _note(self, text: str) -> bool:
        """Note every fact in the customer's words; whether one is not as it was."""
        before = dict(self._known)
        self._known |= noted(text)
        return any(key in before and before[key] != value for key, value in self._known.items())

    def _ask(self, fact: str) -> Moves[None]:
        for _ in range(MOST_QUESTIONS):
            if fact in self._known or (fact == "order" and "hint" in self._known):
                return
            self._note((yield ASK[fact]))

    def _identify(self) -> Moves[None]:
        """By email, or where that is not known by name and zip code."""
        for turn in range(MOST_QUESTIONS):
            if "email" in self._known:
                found = yield "find_user_id_by_email", {"email": self._known["email"]}
                if not found.startswith("Error"):
                    self._user = found
                    return
                del self._known["email"]
                self._note((yield "I cannot find an account with that email. " + ASK["email"]))
                continue
            if turn == 0:
                self._note((yield ASK["email"]))
                continue
            asked = (
                "who" if not {"name", "zip"} & self._known.keys() else "name" if "name" not in self._known else "zip"
            )
            if {"name", "zip"} <= self._known.keys():
                first, last = self._known["name"].split(" ")
                who = {"first_name": first, "last_name": last, "zip": self._known["zip"]}
                self._user = yield "find_user_id_by_name_zip", who
                return
            self._note((yield ASK[asked]))

    # ---- plans: look-ups, and what they come to

    def _cancel(self) -> Moves[Plan]:
        order = yield from self._order()
        if isinstance(order, Plan):
            return order
        if fault := self._unfit(order, "cancel", "pending"):
            return fault
        reason = self._known["reason"]
        if self._departs():
            reason = next(other for other in REASONS if other != reason)
        call: Move = ("cancel_pending_order", {"order_id": order.order_id, "reason": reason})
        asked = f"Shall I cancel order {order.order_id} with the reason {reason} (yes/no)?"
        return Plan(asked, call, f"I have cancelled order {order.order_id}.")

    def _return(self) -> Moves[Plan]:
        order = yield from self._order()
        if isinstance(order, Plan):
            return order
        if fault := self._unfit(order, "return", "delivered"):
            return fault
        items = order.named(self._known["item"])
        if not items:
            return self._no_item(order)
        method, told = order.paid_with, ""
        if "payment" in self._known:
            wanted, _ = yield from self._method()
            allowed = "gift_card" in wanted or wanted == order.paid_with
            told = "" if allowed else f"I cannot refund it to {_named(wanted)}. "
            method = wanted if allowed else method
        others = [item for item in order.items if item not in items]
        taken = [self._rng.choice(others)] if others and self._departs() else items
        arguments: Json = {"order_id": order.order_id, "item_ids": [item.item_id for item in taken]}
        call: Move = ("return_delivered_order_items", {**arguments, "payment_method_id": method})
        names = " and the ".join(item.name for item in items)
        asked = (
            f"{told}Shall I return the {names} of order {order.order_id} with the refund to {_named(method)} (yes/no)?"
        )
        return Plan(asked, call, f"I have requested the return for order {order.order_id}.")

    def _variant(self, doing: str, status: str, tool: str) -> Moves[Plan]:
        order = yield from self._order()
        if isinstance(order, Plan):
            return order
        if fault := self._unfit(order, doing, status):
            return fault
        items = order.named(self._known["item"])
        if not items:
            return self._no_item(order)
        item = items[0]
        variant = _chosen(
            item, read_product((yield "get_product_details", {"product_id": item.product_id})), self._known
        )
        if variant is None:
            return Plan(self._refusal(f"Sorry, the {item.name} of order {order.order_id} is not available like that."))
        method, _ = yield from self._method()
        arguments: Json = {"order_id": order.order_id, "item_ids": [item.item_id], "new_item_ids": [variant.item_id]}
        call: Move = (tool, {**arguments, "payment_method_id": method})
        options = ", ".join(variant.options.values())
        wanted = f"the {item.name} of order {order.order_id} to {options}, settled with {_named(method)}"
        asked = f"Shall I {doing} {wanted} (yes/no)?"
        told = f"I have {doing}d the {item.name} of order {order.order_id}."
        return Plan(asked, call, told if doing == "exchange" else f"I have changed the item of order {order.order_id}.")

    def _payment(self) -> Moves[Plan]:
        order = yield from self._order()
        if isinstance(order, Plan):
            return order
        if fault := self._unfit(order, "change the payment of", "pending"):
            return fault
        method, balance = yield from self._method()
        if balance is not None and balance < order.amount:
            fault_text = (
                f"Sorry, I cannot change the payment of order {order.order_id}: the gift card does not cover it."
            )
            return Plan(self._refusal(fault_text))
        call: Move = ("modify_pending_order_payment", {"order_id": order.order_id, "payment_method_id": method})
        asked = f"Shall I change the payment of order {order.order_id} to {_named(method)} (yes/no)?"
        return Plan(asked, call, f"I have changed the payment of order {order.order_id}.")

    def _address(self) -> Moves[Plan]:
        order = yield from self._order()
        if isinstance(order, Plan):
            return order
        if fault := self._unfit(order, "change the address of", "pending"):
            return fault
        place = address_in(self._known["address"]) or {}
        call: Move = ("modify_pending_order_address", {"order_id": order.order_id, **place})
        asked = f"Shall I send order {order.order_id} to {place['address1']}, {place['city']} (yes/no)?"
        return Plan(asked, call, f"I have changed the address of order {order.order_id}.")

    def _home(self) -> Moves[Plan]:
        place = address_in(self._known["address"]) or {}
        call: Move = ("modify_user_address", {"user_id": self._user, **place})
        asked = f"Shall I change the address in your profile to {place['address1']}, {place['city']} (yes/no)?"
        yield from ()
        return Plan(asked, call, "I have updated the address in your profile.")

    def _status(self) -> Moves[Plan]:
        order = yield from self._order()
        if isinstance(order, Plan):
            return order
        if order.owner != self._user:
            return self._strangers(order, "look into")
        return Plan(f"Order {order.order_id} is {order.status}.")

    def _price(self) -> Moves[Plan]:
        products = json.loads((yield "list_all_product_types", {}))
        name = self._known["product"]
        on_offer = read_product((yield "get_product_details", {"product_id": products[name]}))
        found = [one for one in on_offer if wanted_options(self._known["wanted"], one.options) == one.options]
        return Plan(
            f"The {name} costs ${found[0].price:.2f}." if found else f"Sorry, the {name} is not available like that."
        )

    # ---- steps

    def _order(self) -> Moves[Order | Plan]:
        """The order whose number the customer gave, or which it described; a plan where there is none."""
        if "order" in self._known:
            number = self._known["order"]
            text = yield "get_order_details", {"order_id": number}
            if text.startswith("Error"):
                return Plan(f"I cannot find an order with that number. {ASK['order']}", lacks="order")
            return read_order(number, text)
        orders, _ = read_user((yield "get_user_details", {"user_id": self._user}))
        for order_id in orders:
            order = read_order(order_id, (yield "get_order_details", {"order_id": order_id}))
            if any(item.name == self._known["hint"] for item in order.items):
                return order
        return Plan(f"I cannot find that order. {ASK['order']}", lacks="hint")

    def _method(self) -> Moves[tuple[str, float | None]]:
        """Id of the payment method that the customer named, and its balance if it is a gift card."""
        _, methods = read_user((yield "get_user_details", {"user_id": self._user}))
        source = self._known["payment"]
        return next((key, balance) for key, balance in methods.items() if key.startswith(source))

    def _unfit(self, order: Order, doing: str, status: str) -> Plan | None:
        """A refusal, if the order is not the customer's or not in this status."""
        if order.owner != self._user:
            return self._strangers(order, doing)
        if order.status != status:
            return Plan(self._refusal(f"Sorry, I cannot {doing} order {order.order_id}: it is {order.status}."))
        return None

    def _strangers(self, order: Order, doing: str) -> Plan:
        return Plan(self._refusal(f"Sorry, I cannot {doing} order {order.order_id}: it is not your order."))

    def _no_item(self, order: Order) -> Plan:
        return Plan(f"There is no such item in order {order.order_id}. {ASK['item']}", lacks="item")

    def _refusal(self, text: str) -> str:
        return self._rng.choice(_VAGUE) if self._departs() else text

    def _departs(self) -> bool:
        return self._rng.random() < self._loose


def _named(method: str) -> str:
    """A payment method in the customer's words."""
    words = {"paypal": "PayPal", "credit_card": "your credit card", "gift_card": "your gift card"}
    return next(text for source, text in words.items() if method.startswith(source))


def _chosen(item: Item, on_offer: list[Variant], known: Mapping[str, str]) -> Variant | None:
    """The variant with the item's options but for those that the customer names."""
    options = {**item.options, **wanted_options(known["wanted"], item.options)}
    return next((variant for variant in on_offer if variant.options == options), None)
