"""The sixteen tools of the shop: tau-bench retail's names, arguments and effects, described in words of our own.

They check what tau-bench's tools check (that records exist, statuses, availability, balances) and leave the rest of
the policy to the agent: cancelling a stranger's order works, and is wrong. Amounts are computed in the order in which
tau-bench computes them, so that sums of floats agree to the last bit.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from environments._tau.desk import CALCULATE, THINK, TRANSFER
from environments._tau.folder import Form
from environments.kit.database import Tool, ToolError, load_tools
from environments.kit.overlay import Overlay
from mua.types import Json

TABLES = ("users", "orders", "products")
REASONS = ("no longer needed", "ordered by mistake")
MODIFIED = "pending (item modified)"


# ---- looking up


def find_user_id_by_email(database: Overlay, email: str) -> str:
    wanted = email.lower()
    for key, user in database.items("users"):
        if user["email"].lower() == wanted:
            return key
    raise ToolError("user not found")


def find_user_id_by_name_zip(database: Overlay, first_name: str, last_name: str, zip: str) -> str:
    first, last = first_name.lower(), last_name.lower()
    for key, user in database.items("users"):
        name = user["name"]
        if name["first_name"].lower() == first and name["last_name"].lower() == last and user["address"]["zip"] == zip:
            return key
    raise ToolError("user not found")


def get_user_details(database: Overlay, user_id: str) -> Json:
    return _record(database, "users", user_id)


def get_order_details(database: Overlay, order_id: str) -> Json:
    return _record(database, "orders", order_id)


def get_product_details(database: Overlay, product_id: str) -> Json:
    return _record(database, "products", product_id)


def list_all_product_types(database: Overlay) -> Json:
    return dict(sorted({product["name"]: product["product_id"] for _, product in database.items("products")}.items()))


def get_item_details(database: Overlay, item_id: str) -> Json:
    for _, product in database.items("products"):
        if item_id in product["variants"]:
            variant: Json = product["variants"][item_id]
            return variant
    raise ToolError("item not found")


# ---- pending orders


def cancel_pending_order(database: Overlay, order_id: str, reason: str) -> Json:
    if _record(database, "orders", order_id)["status"] != "pending":
        raise ToolError("only a pending order can be cancelled")
    if reason not in REASONS:
        raise ToolError(f"the reason must be one of: {', '.join(REASONS)}")
    order = database.edit("orders", order_id)
    payments = order["payment_history"]
    for payment in payments:
        if "gift_card" in payment["payment_method_id"]:
            _credit(database, order["user_id"], payment["payment_method_id"], payment["amount"])
    refunds = [_transaction("refund", payment["amount"], payment["payment_method_id"]) for payment in payments]
    order["status"], order["cancel_reason"] = "cancelled", reason
    payments.extend(refunds)
    return order


def modify_pending_order_address(
    database: Overlay, order_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
) -> Json:
    if _record(database, "orders", order_id)["status"] != "pending":
        raise ToolError("only a pending order can be modified")
    return _send_order(database, order_id, _address(address1, address2, city, state, country, zip))


def modify_address_of_any_pending_order(
    database: Overlay, order_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
) -> Json:
    """tau2-bench's rule: an order whose items were modified still counts as pending."""
    if "pending" not in _record(database, "orders", order_id)["status"]:
        raise ToolError("only a pending order can be modified")
    return _send_order(database, order_id, _address(address1, address2, city, state, country, zip))


def modify_pending_order_payment(database: Overlay, order_id: str, payment_method_id: str) -> Json:
    order = _record(database, "orders", order_id)
    if order["status"] != "pending":
        raise ToolError("only a pending order can be modified")
    method = _payment_method(database, order, payment_method_id)
    history = order["payment_history"]
    if len(history) > 1 or history[0]["transaction_type"] != "payment":
        raise ToolError("the order must have been paid exactly once")
    old, amount = history[0]["payment_method_id"], history[0]["amount"]
    if old == payment_method_id:
        raise ToolError("this is the payment method that the order has already")
    if method["source"] == "gift_card" and method["balance"] < amount:
        raise ToolError("the gift card's balance does not cover the order")
    order = database.edit("orders", order_id)
    order["payment_history"] += [
        _transaction("payment", amount, payment_method_id),
        _transaction("refund", amount, old),
    ]
    if method["source"] == "gift_card":
        _credit(database, order["user_id"], payment_method_id, -amount)
    if "gift_card" in old:
        _credit(database, order["user_id"], old, amount)
    return order


def modify_pending_order_items(
    database: Overlay, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
) -> Json:
    order = _record(database, "orders", order_id)
    if order["status"] != "pending":
        raise ToolError("only a pending order can be modified")
    difference = _price_difference(database, order, item_ids, new_item_ids)
    method = _payment_method(database, order, payment_method_id)
    if method["source"] == "gift_card" and method["balance"] < difference:
        raise ToolError("the gift card's balance does not cover the price difference")
    order = database.edit("orders", order_id)
    kind = "payment" if difference > 0 else "refund"
    order["payment_history"].append(_transaction(kind, abs(difference), payment_method_id))
    if method["source"] == "gift_card":
        _credit(database, order["user_id"], payment_method_id, -difference)
    for old, new in zip(item_ids, new_item_ids, strict=True):
        item = _item(order, old)  # looked up again each time: an item just put in may be the next one's match
        variant = _record(database, "products", item["product_id"])["variants"][new]
        item.update(item_id=new, price=variant["price"], options=variant["options"])
    order["status"] = MODIFIED
    return order


def modify_items_to_other_ones(
    database: Overlay, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
) -> Json:
    """tau2-bench's rule: an item cannot be modified to itself."""
    if any(old == new for old, new in zip(item_ids, new_item_ids, strict=False)):
        raise ToolError("the new item must be another one than the old item")
    return modify_pending_order_items(database, order_id, item_ids, new_item_ids, payment_method_id)


# ---- delivered orders


def return_delivered_order_items(database: Overlay, order_id: str, item_ids: list[str], payment_method_id: str) -> Json:
    order = _record(database, "orders", order_id)
    if order["status"] != "delivered":
        raise ToolError("only a delivered order can be returned")
    _payment_method(database, order, payment_method_id)
    original = order["payment_history"][0]["payment_method_id"]
    if "gift_card" not in payment_method_id and payment_method_id != original:
        raise ToolError("the refund must go to the original payment method or to a gift card")
    _check_in_order(order, item_ids)
    order = database.edit("orders", order_id)
    order["status"] = "return requested"
    order["return_items"] = sorted(item_ids)
    order["return_payment_method_id"] = payment_method_id
    return order


def exchange_delivered_order_items(
    database: Overlay, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
) -> Json:
    order = _record(database, "orders", order_id)
    if order["status"] != "delivered":
        raise ToolError("only a delivered order can be exchanged")
    difference = round(_price_difference(database, order, item_ids, new_item_ids), 2)
    method = _payment_method(database, order, payment_method_id)
    if method["source"] == "gift_card" and method["balance"] < difference:
        raise ToolError("the gift card's balance does not cover the price difference")
    order = database.edit("orders", order_id)
    order["status"] = "exchange requested"
    order["exchange_items"] = sorted(item_ids)
    order["exchange_new_items"] = sorted(new_item_ids)
    order["exchange_payment_method_id"] = payment_method_id
    order["exchange_price_difference"] = difference
    return order


# ---- users


def modify_user_address(
    database: Overlay, user_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
) -> Json:
    _record(database, "users", user_id)
    user = database.edit("users", user_id)
    user["address"] = _address(address1, address2, city, state, country, zip)
    return user


# ---- shared steps


def _record(database: Overlay, table: str, key: str) -> Json:
    record = database.get(table, key)
    if record is None:
        raise ToolError(f"{table[:-1]} not found")
    return record


def _payment_method(database: Overlay, order: Json, payment_method_id: str) -> Json:
    methods: Json = _record(database, "users", order["user_id"])["payment_methods"]
    if payment_method_id not in methods:
        raise ToolError("payment method not found")
    method: Json = methods[payment_method_id]
    return method


def _credit(database: Overlay, user_id: str, payment_method_id: str, amount: float) -> None:
    card = database.edit("users", user_id)["payment_methods"][payment_method_id]
    card["balance"] = round(card["balance"] + amount, 2)


def _check_in_order(order: Json, item_ids: Sequence[str]) -> None:
    """Each item as often as the order has it, at most."""
    held = [item["item_id"] for item in order["items"]]
    for item_id in item_ids:
        if item_ids.count(item_id) > held.count(item_id):
            raise ToolError(f"item {item_id} is not in the order as often as it is asked for")


def _price_difference(database: Overlay, order: Json, item_ids: Sequence[str], new_item_ids: Sequence[str]) -> float:
    """New prices less old ones, unrounded; checks that old items are in the order and new ones can be had."""
    _check_in_order(order, item_ids)
    if len(item_ids) != len(new_item_ids):
        raise ToolError("there must be one new item for each old item")
    difference: float = 0
    for old, new in zip(item_ids, new_item_ids, strict=True):
        item = _item(order, old)
        variant = _record(database, "products", item["product_id"])["variants"].get(new)
        if variant is None or not variant["available"]:
            raise ToolError(f"item {new} is not available for product {item['product_id']}")
        difference += variant["price"] - item["price"]
    return difference


def _item(order: Json, item_id: str) -> Json:
    """The first item of the order with this id."""
    found: Json = next(item for item in order["items"] if item["item_id"] == item_id)
    return found


def _send_order(database: Overlay, order_id: str, address: Json) -> Json:
    order = database.edit("orders", order_id)
    order["address"] = address
    return order


def _address(address1: str, address2: str, city: str, state: str, country: str, zip: str) -> Json:
    return {
        "address1": address1,
        "address2": address2,
        "city": city,
        "state": state,
        "country": country,
        "zip": zip,
    }


def _transaction(kind: str, amount: float, payment_method_id: str) -> Json:
    return {"transaction_type": kind, "amount": amount, "payment_method_id": payment_method_id}


_OWN = load_tools(Path(__file__).with_suffix(".yaml"), sys.modules[__name__], REASONS=REASONS)
_OF_TAU2 = _OWN.pop("get_item_details")
TOOLS: tuple[Tool, ...] = (CALCULATE, *_OWN.values(), THINK, TRANSFER)
"""In tau-bench's order."""


def tools_of(form: Form) -> Sequence[Tool]:
    """The tools for official data: tau-bench's, or tau2-bench's, which has one more and lacks ``think``."""
    if form == "tau":
        return TOOLS
    other: dict[str, Callable[..., Any]] = {
        "modify_pending_order_address": modify_address_of_any_pending_order,
        "modify_pending_order_items": modify_items_to_other_ones,
    }
    kept = [tool for tool in TOOLS if tool is not THINK]
    return [*(dataclasses.replace(tool, run=other.get(tool.schema.name, tool.run)) for tool in kept), _OF_TAU2]
