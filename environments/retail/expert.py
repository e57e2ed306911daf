"""A scripted agent that keeps to the policy: it solves every task.

It knows what the customer came for, which a person reads from the opening words, and learns everything else by asking
and by calling tools. Made loose, it departs now and then: it refuses without naming the order, skips the confirmation,
takes the wrong reason or the wrong item. Conversations of such an agent are what supervised training gets to see, and
what reinforcement learning has to improve on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Generator
from typing import TypeAlias, TypeVar

from environments.retail.reading import (
    EMAIL,
    NAME,
    ORDER,
    ZIP,
    Item,
    Order,
    Variant,
    address_in,
    hinted,
    read_order,
    read_product,
    read_user,
    reason_in,
    source_in,
    wanted_options,
)
from environments.retail.tools import REASONS
from mua.environment.protocol import Move, Task
from mua.errors import MuaError
from mua.types import Json

T = TypeVar("T")
Moves: TypeAlias = Generator[Move, str, T]

NEEDS = {
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
"""What has to be asked for each wish."""
_PHRASES = {
    "email": "your email",
    "order": "order number",
    "reason": "the reason",
    "item": "which item",
    "product": "which product",
    "wanted": "which option",
    "payment": "which payment method",
    "address": "which address",
}
_VAGUE = ("Sorry, that will not work.", "Sorry, it is too late for that.", "Sorry, no.")
"""How a loose tongue refuses; none of these counts as told."""
_MOST_CHANGES = 3
"""Changes of mind that the agent goes along with."""


def question(facts: tuple[str, ...]) -> str:
    """One question for all of them: ``Your email, order number and the reason?``"""
    phrases = [_PHRASES[fact] for fact in facts]
    text = " and ".join([", ".join(phrases[:-1]), phrases[-1]]) if len(phrases) > 1 else phrases[0]
    return f"{text[0].upper()}{text[1:]}?"


class Expert:
    """The agent's conversation about one task, as a generator of moves fed with what came back."""

    def __init__(self, task: Task, seed: int, loose: float = 0.0) -> None:
        """``loose`` is the probability of each departure."""
        self._verbs: list[str] = [wish["verb"] for wish in task.data["wishes"]]
        self._loose = loose
        self._rng = random.Random(f"expert/{task.id}/{seed}")
        self._user = ""

    def moves(self) -> Moves[None]:
        """Yields a move and is sent the answer: the tool's result, or the customer's words."""
        for number, verb in enumerate(self._verbs):
            needs = NEEDS[verb]
            text = yield question(needs if number else ("email", *needs))
            if not number:
                self._user = yield from self._identified(text)
            yield from getattr(self, f"_{verb}")(text)

    # ---- wishes; each is given what the customer answered and ends with telling how it went

    def _cancel(self, text: str) -> Moves[None]:
        order = yield from self._order(text)
        if fault := self._unfit(order, "cancel", "pending"):
            yield fault
            return
        reason = reason_in(text) or REASONS[0]
        for _ in range(_MOST_CHANGES):
            answer = yield from self._confirmed(f"Cancel {order.order_id}, {reason}")
            if answer is None:
                break
            reason = reason_in(answer) or reason
        if self._departs():
            reason = next(other for other in REASONS if other != reason)
        yield "cancel_pending_order", {"order_id": order.order_id, "reason": reason}
        yield f"Done, {order.order_id} is cancelled."

    def _return(self, text: str) -> Moves[None]:
        order = yield from self._order(text)
        if fault := self._unfit(order, "return", "delivered"):
            yield fault
            return
        items = order.named(hinted(text)[1])
        for _ in range(_MOST_CHANGES):
            names = " and ".join(item.name for item in items)
            answer = yield from self._confirmed(f"Return {names} of {order.order_id}, refund to {order.paid_with}")
            if answer is None:
                break
            items = order.named(answer) or items
        yield from self._take_back(order, items, order.paid_with)

    def _refund_to(self, text: str) -> Moves[None]:
        order = yield from self._order(text)
        if fault := self._unfit(order, "return", "delivered"):
            yield fault
            return
        items, method = order.named(hinted(text)[1]), (yield from self._method(text))[0]
        if "gift_card" in method or method == order.paid_with:
            yield from self._confirmed(f"Return {items[0].name} of {order.order_id}, refund to {method}")
        else:
            method = order.paid_with
            told = f"I cannot refund {order.order_id} to that. Use the original {method} instead"
            yield from self._confirmed(told)
        yield from self._take_back(order, items, method)

    def _take_back(self, order: Order, items: list[Item], method: str) -> Moves[None]:
        others = [item for item in order.items if item not in items]
        if others and self._departs():
            items = [self._rng.choice(others)]
        arguments: Json = {"order_id": order.order_id, "item_ids": [item.item_id for item in items]}
        yield "return_delivered_order_items", {**arguments, "payment_method_id": method}
        yield f"Done, the return for {order.order_id} is requested."

    def _exchange(self, text: str) -> Moves[None]:
        yield from self._another_variant(text, "exchange_delivered_order_items", "exchange", "delivered")

    def _change_items(self, text: str) -> Moves[None]:
        yield from self._another_variant(text, "modify_pending_order_items", "change", "pending")

    def _another_variant(self, text: str, tool: str, doing: str, status: str) -> Moves[None]:
        order = yield from self._order(text)
        if fault := self._unfit(order, doing, status):
            yield fault
            return
        item = order.named(hinted(text)[1])[0]
        on_offer = read_product((yield "get_product_details", {"product_id": item.product_id}))
        variant = _chosen(item, on_offer, text)
        if variant is None:
            yield self._refusal(f"Sorry, I cannot {doing} it in {order.order_id}: that is not available.")
            return
        method = (yield from self._method(text))[0]
        for _ in range(_MOST_CHANGES):
            options = ", ".join(variant.options.values())
            answer = yield from self._confirmed(f"{doing.title()} {item.name} of {order.order_id}: {options}, {method}")
            if answer is None:
                break
            variant = _chosen(item, on_offer, answer) or variant
        arguments: Json = {"order_id": order.order_id, "item_ids": [item.item_id], "new_item_ids": [variant.item_id]}
        yield tool, {**arguments, "payment_method_id": method}
        yield f"Done, {order.order_id} is {doing}d."

    def _payment(self, text: str) -> Moves[None]:
        order = yield from self._order(text)
        if fault := self._unfit(order, "change", "pending"):
            yield fault
            return
        method, balance = yield from self._method(text)
        if balance is not None and balance < order.amount:
            yield self._refusal(f"Sorry, I cannot pay {order.order_id} with it: the balance is too low.")
            return
        yield from self._confirmed(f"Pay {order.order_id} with {method}")
        yield "modify_pending_order_payment", {"order_id": order.order_id, "payment_method_id": method}
        yield f"Done, {order.order_id} is changed."

    def _address(self, text: str) -> Moves[None]:
        order = yield from self._order(text)
        if fault := self._unfit(order, "change", "pending"):
            yield fault
            return
        place = address_in(text) or {}
        yield from self._confirmed(f"Send {order.order_id} to {place['address1']}, {place['city']}")
        yield "modify_pending_order_address", {"order_id": order.order_id, **place}
        yield f"Done, {order.order_id} is changed."

    def _home(self, text: str) -> Moves[None]:
        place = address_in(text) or {}
        yield from self._confirmed(f"Change your profile to {place['address1']}, {place['city']}")
        yield "modify_user_address", {"user_id": self._user, **place}
        yield "Done, your profile is changed."

    def _status(self, text: str) -> Moves[None]:
        order = yield from self._order(text)
        if self._departs():
            yield f"It is {order.status}."
        else:
            yield f"Order {order.order_id} is {order.status}."

    def _price(self, text: str) -> Moves[None]:
        products = json.loads((yield "list_all_product_types", {}))
        name = next(name for name in products if name in text)
        on_offer = read_product((yield "get_product_details", {"product_id": products[name]}))
        found = [variant for variant in on_offer if wanted_options(text, variant.options) == variant.options]
        yield f"The {name} costs {found[0].price:.2f}." if found else f"Sorry, the {name} is not available like that."

    # ---- steps

    def _identified(self, text: str) -> Moves[str]:
        if (email := EMAIL.search(text)) is not None:
            return (yield "find_user_id_by_email", {"email": email[0]})
        text = yield "Your name and zip code?"
        name, zip_code = NAME.search(text), ZIP.search(text)
        if name is None or zip_code is None:
            raise MuaError(f"retail: the customer gave neither email nor name and zip code: {text!r}")
        who = {"first_name": name[1], "last_name": name[2], "zip": zip_code[0]}
        return (yield "find_user_id_by_name_zip", who)

    def _order(self, text: str) -> Moves[Order]:
        """The order whose number the customer gave, or which it described."""
        if (number := ORDER.search(text)) is not None:
            return read_order(number[0], (yield "get_order_details", {"order_id": number[0]}))
        product, _ = hinted(text)
        orders, _ = read_user((yield "get_user_details", {"user_id": self._user}))
        for order_id in orders:
            order = read_order(order_id, (yield "get_order_details", {"order_id": order_id}))
            if any(item.name == product for item in order.items):
                break
        return order

    def _method(self, text: str) -> Moves[tuple[str, float | None]]:
        """Id of the payment method that the customer named, and its balance if it is a gift card."""
        _, methods = read_user((yield "get_user_details", {"user_id": self._user}))
        source = source_in(text) or ""
        return next((key, balance) for key, balance in methods.items() if key.startswith(source))

    def _confirmed(self, what: str) -> Moves[str | None]:
        """None if the customer agrees; else what it said instead."""
        if self._departs():
            return None
        answer = yield f"{what} (yes/no)?"
        return None if answer.startswith("Yes") else answer

    def _unfit(self, order: Order, doing: str, status: str) -> str | None:
        """A refusal, if the order is not the customer's or not in this status."""
        if order.owner != self._user:
            return self._refusal(f"Sorry, I cannot {doing} {order.order_id}: it is not your order.")
        if order.status != status:
            return self._refusal(f"Sorry, I cannot {doing} {order.order_id}: it is {order.status}.")
        return None

    def _refusal(self, text: str) -> str:
        return self._rng.choice(_VAGUE) if self._departs() else text

    def _departs(self) -> bool:
        return self._rng.random() < self._loose


def _chosen(item: Item, on_offer: list[Variant], text: str) -> Variant | None:
    """The variant with the item's options but for those that the customer names."""
    options = {**item.options, **wanted_options(text, item.options)}
    return next((variant for variant in on_offer if variant.options == options), None)
