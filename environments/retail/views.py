"""Short answers of the tools, for policies with little context (``environment.options.compact: true``).

The same facts, but only those that the next step needs:

=========================  =========================================================================================
order                      ``{"owner": "jo_reed_12", "status": "pending", "paid": "paypal_123 45.67", "items":
                           ["Kite 3051, product 602: color red, size large"]}``: original payment method and
                           amount; of each item its name, id, product id and options
user                       ``{"orders": ["#W1"], "pays": ["paypal_123", "gift_card_77 50"]}``, gift cards with balance
product                    ``{"3058": "color blue, size large 12.45"}``: variants that are available, with prices
after a change of an order ``{"status": "cancelled"}``
after a change of a user   ``{"address": "12 Fern Way, Salem, OR 97311"}``
=========================  =========================================================================================

User ids, the list of products, results of ``calculate`` and errors stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable

from environments._service import shortened
from environments.kit.database import Tool
from environments.retail.wishes import place
from mua.types import Json


def options_text(options: Json) -> str:
    """Options as a customer names them: ``color red, size large``."""
    return ", ".join(f"{key} {value}" for key, value in options.items())


def _order(order: Json) -> Json:
    paid = order["payment_history"][0]
    items = [
        f"{item['name']} {item['item_id']}, product {item['product_id']}: {options_text(item['options'])}"
        for item in order["items"]
    ]
    shown = f"{paid['payment_method_id']} {paid['amount']}"
    return {"owner": order["user_id"], "status": order["status"], "paid": shown, "items": items}


def _user(user: Json) -> Json:
    pays = [
        f"{one['id']} {one['balance']}" if "balance" in one else one["id"] for one in user["payment_methods"].values()
    ]
    return {"orders": user["orders"], "pays": pays}


def _product(product: Json) -> Json:
    variants = product["variants"].items()
    return {key: f"{options_text(one['options'])} {one['price']}" for key, one in variants if one["available"]}


def _status(order: Json) -> Json:
    return {"status": order["status"]}


def _address(user: Json) -> Json:
    return {"address": place(user["address"])}


_SHORT: dict[str, Callable[[Json], Json]] = {
    "get_order_details": _order,
    "get_user_details": _user,
    "get_product_details": _product,
    "modify_user_address": _address,
    **dict.fromkeys(
        (
            "cancel_pending_order",
            "exchange_delivered_order_items",
            "modify_pending_order_address",
            "modify_pending_order_items",
            "modify_pending_order_payment",
            "return_delivered_order_items",
        ),
        _status,
    ),
}


def compact(tool: Tool) -> Tool:
    """The tool with its short answer."""
    return shortened(tool, _SHORT.get(tool.schema.name))
