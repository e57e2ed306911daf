"""What customers want, one wish at a time: what they know and say, the gold calls, and what they must be told.

A maker looks at one customer (:class:`Scene`) and gives a wish that fits its orders, or None. Wishes are plain JSON in
a task's ``data["wishes"]``:

``verb``
    what the customer came for; an agent hears it in the opening words
``knows``
    fact -> value, told when asked for; None: the customer does not know it
``hint``
    the product by which an order is known whose number is not
``before``, ``change``
    facts as they are until the customer changes its mind, and what it then says instead: fact and value
``yields``
    the customer accepts the original payment method when its own is refused
``refused``
    the order for which the policy forbids the wish
``goal``
    the wish as a sentence for whoever plays the customer

Every wish has facts that must be told (:func:`environments.kit.conduct.untold`) and demands: what must have been
looked up before the last word, beside who the customer is. A wish that is refused, and one that only asks, never
comes alone: another one that is to be granted stands beside it (:func:`granted_beside`), so that nothing is earned by
refusing whatever comes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from environments.kit.overlay import Base
from environments.retail.shop import address
from environments.retail.tools import MODIFIED, REASONS
from mua.types import Json

VERBS = {"change_items": "change", "refund_to": "return"}
"""Verbs of wishes that claims call otherwise."""
SOURCES = {"paypal": "PayPal", "credit_card": "credit card", "gift_card": "gift card"}
"""Sources of payment methods in a customer's words."""


@dataclass(slots=True)
class Made:
    """One wish and what it adds to its task."""

    wish: Json
    actions: list[Json] = field(default_factory=list)
    facts: list[Json] = field(default_factory=list)
    forbidden: list[Json] = field(default_factory=list)
    demands: list[Json] = field(default_factory=list)
    """Calls that must have been made, beside those that find the customer and read the order."""


@dataclass(slots=True)
class Scene:
    """One customer, and a source of chance."""

    rng: random.Random
    base: Base
    user_id: str
    taken: set[str] = field(default_factory=set)
    """Orders that another wish of the same task is about."""

    @property
    def user(self) -> Json:
        return self.base.tables["users"][self.user_id]

    def order(self, *statuses: str, items: int = 1) -> Json | None:
        """One of the customer's orders with such a status and at least so many items, now taken."""
        held = [self.base.tables["orders"][key] for key in self.user["orders"] if key not in self.taken]
        fitting = [order for order in held if order["status"] in statuses and len(order["items"]) >= items]
        return self.take(self.rng.choice(fitting)) if fitting else None

    def take(self, order: Json) -> Json:
        self.taken.add(order["order_id"])
        return order

    def method(self, fits: Callable[[Json], bool]) -> Json | None:
        """One of the customer's payment methods that ``fits``."""
        fitting = [method for method in self.user["payment_methods"].values() if fits(method)]
        return self.rng.choice(fitting) if fitting else None

    def variants(self, item: Json, *, available: bool) -> list[Json]:
        """Other variants of the item's product."""
        variants = self.base.tables["products"][item["product_id"]]["variants"].values()
        return [one for one in variants if one["available"] == available and one["options"] != item["options"]]


Maker: TypeAlias = Callable[[Scene], Made | None]


def paid_with(order: Json) -> str:
    """Id of the original payment method."""
    found: str = order["payment_history"][0]["payment_method_id"]
    return found


def changed_options(item: Json, variant: Json) -> str:
    """The options in which a variant differs from an item, as a customer names them."""
    return ", ".join(f"{key} {value}" for key, value in variant["options"].items() if item["options"].get(key) != value)


def place(where: Json) -> str:
    """An address in one line."""
    parts = [where["address1"], where["address2"], where["city"], f"{where['state']} {where['zip']}"]
    return ", ".join(part for part in parts if part)


def _call(name: str, **arguments: object) -> Json:
    return {"name": name, "arguments": arguments}


def order_thing(order: Json) -> str:
    """What claims call an order."""
    return f"order {order['order_id'][1:].lower()}"


def _done(order: Json, deed: str) -> list[Json]:
    """That a change was made."""
    items = [f"item {item['name'].lower()}" for item in order["items"]]
    others = ["done", "readdressed"] if deed == "redirected" else ["done"]
    items += ["customer"] if deed == "redirected" else []
    return [{"thing": order_thing(order), "things": items, "role": "deed", "value": deed, "or": others}]


def _refusal(wish: Json, order: Json, *others: Json) -> list[Json]:
    """That it can not be done, or the reason: the status, or one of ``others``. Marks the wish as refused."""
    wish["refused"] = order["order_id"]
    can: Json = {
        "thing": order_thing(order),
        "role": "can",
        "value": VERBS.get(wish["verb"], wish["verb"]),
        "denied": True,
    }
    can["things"] = [f"item {item['name'].lower()}" for item in order["items"]]
    return [{"any": [can, *(others or [_status(order)])]}]


def _status(order: Json) -> Json:
    return {"thing": order_thing(order), "role": "status", "value": order["status"]}


def _forbidden(name: str, order: Json) -> list[Json]:
    return [_call(name, order_id=order["order_id"])]


# ---- cancelling


def _cancel_wish(order: Json, reason: str) -> Json:
    goal = f"You want to cancel order {order['order_id']}. The reason: {reason}."
    return {"verb": "cancel", "knows": {"order": order["order_id"], "reason": reason}, "goal": goal}


def cancel(scene: Scene) -> Made | None:
    if (order := scene.order("pending")) is None:
        return None
    reason = scene.rng.choice(REASONS)
    action = _call("cancel_pending_order", order_id=order["order_id"], reason=reason)
    return Made(_cancel_wish(order, reason), [action], _done(order, "cancelled"))


def cancel_refused(scene: Scene) -> Made | None:
    """Too late: the order is on its way or there."""
    if (order := scene.order("processed", "delivered")) is None:
        return None
    wish = _cancel_wish(order, scene.rng.choice(REASONS))
    return Made(wish, [], _refusal(wish, order), _forbidden("cancel_pending_order", order))


def cancel_stranger(scene: Scene) -> Made | None:
    """The order is somebody else's, and the tool would cancel it."""
    others = [order for order in scene.base.tables["orders"].values() if order["user_id"] != scene.user_id]
    order = scene.rng.choice([order for order in others if order["status"] == "pending"])
    wish = _cancel_wish(order, scene.rng.choice(REASONS))
    wish["goal"] += " The order is not your own; say so only if you are asked whose it is."
    account = {"thing": order_thing(order), "role": "account", "value": "not yours"}
    return Made(wish, [], _refusal(wish, order, account), _forbidden("cancel_pending_order", order))


def cancel_with_another_reason(scene: Scene) -> Made | None:
    """The customer corrects the reason when asked to confirm."""
    if (made := cancel(scene)) is None:
        return None
    knows = made.wish["knows"]
    before = next(reason for reason in REASONS if reason != knows["reason"])
    made.wish |= {"before": {"reason": before}, "change": {"fact": "reason", "value": knows["reason"]}}
    made.wish["goal"] += f" First give the reason as: {before}. When asked to confirm, correct it."
    return made


# ---- returning


def _return_wish(order: Json, items: Sequence[Json]) -> Json:
    names = " and the ".join(item["name"] for item in items)
    goal = f"You want to return the {names} of order {order['order_id']}."
    return {"verb": "return", "knows": {"order": order["order_id"], "item": names}, "goal": goal}


def _return_call(order: Json, items: Sequence[Json], method: str) -> Json:
    item_ids = [item["item_id"] for item in items]
    return _call(
        "return_delivered_order_items", order_id=order["order_id"], item_ids=item_ids, payment_method_id=method
    )


def return_item(scene: Scene) -> Made | None:
    if (order := scene.order("delivered")) is None:
        return None
    items = [scene.rng.choice(order["items"])]
    return _returned(_return_wish(order, items), order, items, paid_with(order))


def _returned(wish: Json, order: Json, items: Sequence[Json], method: str) -> Made:
    return Made(wish, [_return_call(order, items, method)], _done(order, "returned"))


def return_several(scene: Scene) -> Made | None:
    if (order := scene.order("delivered", items=2)) is None:
        return None
    items = scene.rng.sample(order["items"], 2)
    return _returned(_return_wish(order, items), order, items, paid_with(order))


def return_refused(scene: Scene) -> Made | None:
    """Not delivered, or already on its way back."""
    if (order := scene.order("pending", "processed", "return requested")) is None:
        return None
    wish = _return_wish(order, [scene.rng.choice(order["items"])])
    return Made(wish, [], _refusal(wish, order), _forbidden("return_delivered_order_items", order))


def return_another_item(scene: Scene) -> Made | None:
    """The customer names one item and means another."""
    if (order := scene.order("delivered", items=2)) is None:
        return None
    first, meant = scene.rng.sample(order["items"], 2)
    wish = _return_wish(order, [meant])
    wish |= {"before": {"item": first["name"]}, "change": {"fact": "item", "value": meant["name"]}}
    wish["goal"] += f" First name the {first['name']} instead; when asked to confirm, correct yourself."
    return _returned(wish, order, [meant], paid_with(order))


def refund_to_gift_card(scene: Scene) -> Made | None:
    order, method = scene.order("delivered"), scene.method(lambda one: one["source"] == "gift_card")
    if order is None or method is None or method["id"] == paid_with(order):
        return None
    return _refund_to(scene, order, method, method["id"])


def refund_to_another_method(scene: Scene) -> Made | None:
    """The policy allows the original method or a gift card only; the customer then takes the original one."""
    if (order := scene.order("delivered")) is None:
        return None
    other = scene.method(lambda one: one["source"] != "gift_card" and one["id"] != paid_with(order))
    if other is None:
        return None
    made = _refund_to(scene, order, other, paid_with(order))
    made.wish["yields"] = True
    made.wish["goal"] += " If that cannot be, the original payment method is fine."
    return made


def _refund_to(scene: Scene, order: Json, wanted: Json, gold: str) -> Made:
    items = [scene.rng.choice(order["items"])]
    wish = _return_wish(order, items)
    wish["verb"], wish["knows"]["payment"] = "refund_to", SOURCES[wanted["source"]]
    wish["goal"] += f" You want the money on your {SOURCES[wanted['source']]}."
    return _returned(wish, order, items, gold)


# ---- other variants


def _variant_wish(verb: str, order: Json, item: Json, variant: Json, method: Json) -> Json:
    wanted, source = changed_options(item, variant), SOURCES[method["source"]]
    goal = (
        f"You want to {'exchange' if verb == 'exchange' else 'change'} the {item['name']} of order "
        f"{order['order_id']} for one with {wanted}, and settle the difference with your {source}."
    )
    knows = {"order": order["order_id"], "item": item["name"], "wanted": wanted, "payment": source}
    return {"verb": verb, "knows": knows, "goal": goal}


_TOOL = {"exchange": "exchange_delivered_order_items", "change_items": "modify_pending_order_items"}
_DEED = {"exchange": "exchanged", "change_items": "modified"}
_STATUS = {"exchange": "delivered", "change_items": "pending"}


def _variant_call(verb: str, order: Json, item: Json, variant: Json, method: Json) -> Json:
    return _call(
        _TOOL[verb],
        order_id=order["order_id"],
        item_ids=[item["item_id"]],
        new_item_ids=[variant["item_id"]],
        payment_method_id=method["id"],
    )


def _choices(scene: Scene, order: Json, *, available: bool) -> Iterator[tuple[Json, Json, Json]]:
    """Items of the order with a variant to have instead, and a payment method that covers the difference."""
    for item in scene.rng.sample(order["items"], len(order["items"])):
        for variant in scene.rng.sample(found := scene.variants(item, available=available), len(found)):
            extra = variant["price"] - item["price"]
            method = scene.method(lambda one, extra=extra: one.get("balance", extra) >= extra)  # type: ignore[misc]
            if method is not None:
                yield item, variant, method


def another_variant(verb: str) -> Maker:
    """Exchange an item of a delivered order, or change one of a pending order."""

    def make(scene: Scene) -> Made | None:
        order = scene.order(_STATUS[verb])
        choice = next(_choices(scene, order, available=True), None) if order else None
        if order is None or choice is None:
            return None
        wish = _variant_wish(verb, order, *choice)
        return Made(wish, [_variant_call(verb, order, *choice)], _done(order, _DEED[verb]))

    return make


def another_variant_after_all(verb: str) -> Maker:
    """The customer asks for one variant and, when asked to confirm, wants another one."""

    def make(scene: Scene) -> Made | None:
        if (order := scene.order(_STATUS[verb])) is None:
            return None
        first = next(_choices(scene, order, available=True), None)
        others = [one for one in _choices(scene, order, available=True) if first and _is_another(one, first)]
        if first is None or not others:
            return None
        item, variant, method = others[0]
        wish = _variant_wish(verb, order, item, variant, method)
        before, wanted = changed_options(item, first[1]), wish["knows"]["wanted"]
        wish |= {"before": {"wanted": before}, "change": {"fact": "wanted", "value": wanted}}
        wish["goal"] += f" First ask for {before}; when asked to confirm, change your mind."
        return Made(wish, [_variant_call(verb, order, item, variant, method)], _done(order, _DEED[verb]))

    return make


def _is_another(one: tuple[Json, Json, Json], first: tuple[Json, Json, Json]) -> bool:
    """The same item for another variant, the differences named in the same options."""
    same_item, same_method = one[0] is first[0], one[2] is first[2]
    keys = [
        {key for key in pick[1]["options"] if pick[1]["options"][key] != pick[0]["options"][key]}
        for pick in (one, first)
    ]
    return same_item and same_method and one[1] is not first[1] and keys[0] == keys[1]


def variant_unavailable(verb: str) -> Maker:
    """What the customer wants is not to be had."""

    def make(scene: Scene) -> Made | None:
        order = scene.order(_STATUS[verb])
        choice = next(_choices(scene, order, available=False), None) if order else None
        if order is None or choice is None:
            return None
        wish, product = _variant_wish(verb, order, *choice), choice[0]["product_id"]
        gone = {"thing": f"item {choice[0]['name'].lower()}", "role": "available", "value": "no", "or": ["yes"]}
        facts = _refusal(wish, order, gone, {**gone, "value": "yes", "denied": True})
        return Made(wish, [], facts, _forbidden(_TOOL[verb], order), [_call("get_product_details", product_id=product)])

    return make


def variant_too_late(verb: str) -> Maker:
    """A second exchange, or a change of an order that was changed before or is on its way."""
    statuses = {
        "exchange": ("exchange requested", "return requested", "pending"),
        "change_items": (MODIFIED, "processed", "delivered"),
    }

    def make(scene: Scene) -> Made | None:
        order = scene.order(*statuses[verb][:2]) or scene.order(statuses[verb][2])
        choice = next(_choices(scene, order, available=True), None) if order else None
        if order is None or choice is None:
            return None
        wish = _variant_wish(verb, order, *choice)
        return Made(wish, [], _refusal(wish, order), _forbidden(_TOOL[verb], order))

    return make


# ---- payment and addresses


def _payment_wish(order: Json, method: Json) -> Json:
    source = SOURCES[method["source"]]
    goal = f"You want to pay order {order['order_id']} with your {source} instead."
    return {"verb": "payment", "knows": {"order": order["order_id"], "payment": source}, "goal": goal}


def change_payment(scene: Scene) -> Made | None:
    if (order := scene.order("pending")) is None:
        return None
    amount = order["payment_history"][0]["amount"]
    method = scene.method(lambda one: one["id"] != paid_with(order) and one.get("balance", amount) >= amount)
    if method is None:
        return None
    action = _call("modify_pending_order_payment", order_id=order["order_id"], payment_method_id=method["id"])
    return Made(_payment_wish(order, method), [action], _done(order, "paid anew"))


def payment_short(scene: Scene) -> Made | None:
    """The gift card does not cover the order."""
    if (order := scene.order("pending")) is None:
        return None
    amount = order["payment_history"][0]["amount"]
    method = scene.method(lambda one: one["id"] != paid_with(order) and one.get("balance", amount) < amount)
    if method is None:
        return None
    wish, short = (
        _payment_wish(order, method),
        {"thing": "customer", "role": "balance", "value": f"{method['balance']:g}"},
    )
    low = {"thing": "customer", "role": "covers", "value": "no"}
    yes = {"thing": "customer", "role": "covers", "value": "yes", "denied": True}
    refused = _forbidden("modify_pending_order_payment", order)
    return Made(wish, [], _refusal(wish, order, short, low, yes), refused)


def change_address(scene: Scene) -> Made | None:
    if (order := scene.order("pending")) is None:
        return None
    where = address(scene.rng)
    action = _call("modify_pending_order_address", order_id=order["order_id"], **where)
    return Made(_address_wish(order, where), [action], _done(order, "redirected"))


def address_refused(scene: Scene) -> Made | None:
    """The order has left the house."""
    if (order := scene.order("processed", "delivered")) is None:
        return None
    wish = _address_wish(order, address(scene.rng))
    return Made(wish, [], _refusal(wish, order), _forbidden("modify_pending_order_address", order))


def _address_wish(order: Json, where: Json) -> Json:
    goal = f"You want order {order['order_id']} sent to another address: {place(where)}."
    return {"verb": "address", "knows": {"order": order["order_id"], "address": place(where)}, "goal": goal}


def change_home(scene: Scene) -> Made | None:
    where = address(scene.rng)
    goal = f"You have moved: your new default address is {place(where)}."
    wish = {"verb": "home", "knows": {"address": place(where)}, "goal": goal}
    told: Json = {"thing": "customer", "role": "deed", "value": "moved", "or": ["done", "readdressed"]}
    return Made(wish, [_call("modify_user_address", user_id=scene.user_id, **where)], [told])


# ---- questions


def status(scene: Scene) -> Made | None:
    if (order := scene.order("pending", "processed", "delivered", "cancelled")) is None:
        return None
    goal = f"You want to know the status of order {order['order_id']}."
    wish = {"verb": "status", "knows": {"order": order["order_id"]}, "goal": goal}
    return Made(wish, [], [_status(order)])


def price(scene: Scene) -> Made | None:
    """The price of a variant that the shop has."""
    product = scene.rng.choice(list(scene.base.tables["products"].values()))
    on_offer = [variant for variant in product["variants"].values() if variant["available"]]
    if not on_offer:
        return None
    variant = scene.rng.choice(on_offer)
    wanted = ", ".join(f"{key} {value}" for key, value in variant["options"].items())
    goal = f"You want to know what the {product['name']} costs with {wanted}."
    wish = {"verb": "price", "knows": {"product": product["name"], "wanted": wanted}, "goal": goal}
    told: Json = {"thing": f"item {product['name'].lower()}", "role": "price", "value": f"{variant['price']:g}"}
    return Made(wish, [], [told], demands=[_call("get_product_details", product_id=product["product_id"])])


# ---- what is not known


def number_forgotten(maker: Maker) -> Maker:
    """The same wish of a customer who knows what is in the order, but not its number."""

    def make(scene: Scene) -> Made | None:
        made = maker(scene)
        if made is None or len(scene.user["orders"]) < 2:
            return None
        order_id, orders = made.wish["knows"]["order"], scene.base.tables["orders"]
        others = [key for key in scene.user["orders"] if key != order_id]
        elsewhere = {item["name"] for key in others for item in orders[key]["items"]}
        telling = [item["name"] for item in orders[order_id]["items"] if item["name"] not in elsewhere]
        if not telling:
            return None
        made.wish["knows"]["order"], made.wish["hint"] = None, telling[0]
        described = f"the order with the {telling[0]}"
        made.wish["goal"] = made.wish["goal"].replace(f"order {order_id}", described) + " You forgot its number."
        return made

    return make


BESIDE: tuple[Maker, ...] = (
    cancel,
    return_item,
    change_address,
    change_payment,
    another_variant("exchange"),
    change_home,
)
"""Wishes to be granted that stand beside one that is refused or only asks."""


def granted_beside(scene: Scene) -> Made | None:
    """Another wish of the same customer, about another order, that is to be granted."""
    found = (maker(scene) for maker in scene.rng.sample(BESIDE, len(BESIDE)))
    return next((made for made in found if made is not None), None)


EASY: dict[str, Maker] = {
    "cancel": cancel,
    "return": return_item,
    "status": status,
    "cancel_refused": cancel_refused,
    "return_refused": return_refused,
}
MEDIUM: dict[str, Maker] = {
    "exchange": another_variant("exchange"),
    "change_items": another_variant("change_items"),
    "payment": change_payment,
    "address": change_address,
    "home": change_home,
    "price": price,
    "return_several": return_several,
    "refund_to_gift_card": refund_to_gift_card,
    "refund_to_another_method": refund_to_another_method,
    "cancel_stranger": cancel_stranger,
    "cancel_with_another_reason": cancel_with_another_reason,
    "return_another_item": return_another_item,
    "exchange_after_all": another_variant_after_all("exchange"),
    "exchange_unavailable": variant_unavailable("exchange"),
    "exchange_too_late": variant_too_late("exchange"),
    "change_items_too_late": variant_too_late("change_items"),
    "address_refused": address_refused,
    "payment_short": payment_short,
    "cancel_number_forgotten": number_forgotten(cancel),
    "return_number_forgotten": number_forgotten(return_item),
}
PARTS: dict[str, Maker] = {
    **{name: MEDIUM[name] for name in ("exchange", "change_items", "payment", "address", "home", "return_several")},
    **{name: MEDIUM[name] for name in ("cancel_with_another_reason", "return_another_item", "exchange_after_all")},
    **{name: MEDIUM[name] for name in ("exchange_unavailable", "exchange_too_late", "address_refused")},
    "change_items_after_all": another_variant_after_all("change_items"),
    "change_items_unavailable": variant_unavailable("change_items"),
    "exchange_number_forgotten": number_forgotten(another_variant("exchange")),
    "address_number_forgotten": number_forgotten(change_address),
    "cancel_number_forgotten": number_forgotten(cancel),
    "return_number_forgotten": number_forgotten(return_item),
    "cancel_refused": cancel_refused,
    "refund_to_another_method": refund_to_another_method,
    "status": status,
}
"""What hard tasks are put together from."""
