"""The shop's database in tau-bench retail's form and size: 500 users, 1000 orders, 50 products with their variants.

Made from a seed, so that the repository holds no data file; ``manifest.json`` pins its digest. Ids are shorter than
tau-bench's and otherwise of the same look. In one order every product occurs once, and a user has at most one payment
method of a kind: "the kite" and "my gift card" are clear.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from functools import lru_cache

from environments.kit.overlay import Base
from environments.retail.reading import BRANDS, CITIES, FIRST_NAMES, LAST_NAMES, MAIL, PRODUCTS, STREETS
from environments.retail.tools import MODIFIED, REASONS
from mua.types import Json

SEED = "retail/1"
USERS, ORDERS = 500, 1000
PAYMENTS = ("paypal", "credit_card", "gift_card")
MOST_ORDERS = 5
"""Orders of one user."""
_STATUSES = {
    "pending": 43,
    "delivered": 38,
    "processed": 8,
    "cancelled": 3,
    "exchange requested": 4,
    "return requested": 2,
    MODIFIED: 2,
}
"""Weights."""


@lru_cache(maxsize=8)
def shop(practice: int = 0) -> Base:
    """The database, made once a process; with a number above 0 another one, for practice, with customers of its own."""
    rng = random.Random(f"{SEED}/practice/{practice}" if practice else SEED)
    products = _products(rng)
    users = _users(rng)
    orders = _orders(rng, users, products)
    return Base({"users": users, "orders": orders, "products": products})


def _products(rng: random.Random) -> dict[str, Json]:
    product_ids = _numbers(rng, 100, 999, len(PRODUCTS))
    item_ids = iter(_numbers(rng, 1000, 9999, 2000))
    products: dict[str, Json] = {}
    for product_id, (name, (price, options)) in zip(product_ids, PRODUCTS.items(), strict=True):
        combinations = list(itertools.product(*options.values()))
        chosen = rng.sample(combinations, min(len(combinations), rng.randint(6, 12)))
        variants = {}
        for values in chosen:
            item_id = next(item_ids)
            variants[item_id] = _variant(rng, item_id, dict(zip(options, values, strict=True)), price)
        products[product_id] = {"name": name, "product_id": product_id, "variants": variants}
    return products


def _variant(rng: random.Random, item_id: str, options: Json, price: int) -> Json:
    cents = rng.randrange(85 * price, 115 * price) // 10 * 10 + rng.randint(1, 9)  # never ends in 0: 12.5 is 12.50
    return {"item_id": item_id, "options": options, "available": rng.random() < 0.75, "price": cents / 100}


def _users(rng: random.Random) -> dict[str, Json]:
    names = rng.sample(list(itertools.product(FIRST_NAMES, LAST_NAMES)), USERS)
    numbers = {kind: iter(_numbers(rng, 100, 999, USERS)) for kind in PAYMENTS}
    users: dict[str, Json] = {}
    for first, last in names:
        user_id = f"{first}_{last}_{rng.randint(10, 99)}".lower()
        users[user_id] = {
            "name": {"first_name": first, "last_name": last},
            "address": address(rng),
            "email": f"{first}.{last}@{rng.choice(MAIL)}".lower(),
            "payment_methods": {method["id"]: method for method in _methods(rng, numbers)},
            "orders": [],
        }
    return users


def _methods(rng: random.Random, numbers: Mapping[str, Iterator[str]]) -> list[Json]:
    kinds = rng.sample(PAYMENTS, rng.choice([1, 2, 2, 3]))
    found: list[Json] = []
    for kind in kinds:
        method: Json = {"source": kind, "id": f"{kind}_{next(numbers[kind])}"}
        if kind == "credit_card":
            method |= {"brand": rng.choice(BRANDS), "last_four": str(rng.randint(1000, 9999))}
        if kind == "gift_card":
            method["balance"] = rng.randint(5, 200)
        found.append(method)
    return found


def address(rng: random.Random) -> Json:
    """A place to live, half of the time with a flat."""
    city, state, zip_prefix = rng.choice(CITIES)
    return {
        "address1": f"{rng.randint(1, 99)} {rng.choice(STREETS)}",
        "address2": f"Flat {rng.randint(1, 30)}" if rng.random() < 0.5 else "",
        "city": city,
        "state": state,
        "country": "USA",
        "zip": f"{zip_prefix}{rng.randint(10, 99)}",
    }


def _orders(rng: random.Random, users: dict[str, Json], products: dict[str, Json]) -> dict[str, Json]:
    owners = list(users)
    while len(owners) < ORDERS:
        owner = rng.choice(list(users))
        if owners.count(owner) < MOST_ORDERS:
            owners.append(owner)
    orders: dict[str, Json] = {}
    for order_number, owner in zip(_numbers(rng, 1000, 9999, ORDERS), sorted(owners), strict=True):
        order_id = f"#W{order_number}"
        users[owner]["orders"].append(order_id)
        orders[order_id] = _order(rng, order_id, owner, users[owner], products)
    return orders


def _order(rng: random.Random, order_id: str, user_id: str, user: Json, products: dict[str, Json]) -> Json:
    bought = [_bought(rng, product) for product in rng.sample(list(products.values()), rng.choice([1, 2, 2, 3]))]
    status = rng.choices(list(_STATUSES), list(_STATUSES.values()))[0]
    amount, method = round(sum(item["price"] for item in bought), 2), rng.choice(list(user["payment_methods"]))
    order: Json = {
        "order_id": order_id,
        "user_id": user_id,
        "address": dict(user["address"]),
        "items": bought,
        "fulfillments": [],
        "status": status,
        "payment_history": [{"transaction_type": "payment", "amount": amount, "payment_method_id": method}],
    }
    _age(rng, order, products)
    return order


def _bought(rng: random.Random, product: Json) -> Json:
    variant = rng.choice(list(product["variants"].values()))
    kept = {key: variant[key] for key in ("item_id", "price")}
    return {"name": product["name"], "product_id": product["product_id"], **kept, "options": dict(variant["options"])}


def _age(rng: random.Random, order: Json, products: dict[str, Json]) -> None:
    """What an order of this status has been through."""
    status, paid = order["status"], order["payment_history"][0]
    item_ids = [item["item_id"] for item in order["items"]]
    if status not in ("pending", "cancelled", MODIFIED):
        order["fulfillments"] = [{"tracking_id": [str(rng.randint(10**7, 10**8 - 1))], "item_ids": item_ids}]
    if status == "cancelled":
        order["cancel_reason"] = rng.choice(REASONS)
        order["payment_history"].append({**paid, "transaction_type": "refund"})
    if status == MODIFIED:
        order["payment_history"].append({**paid, "transaction_type": "refund", "amount": rng.randint(101, 499) / 100})
    if status == "return requested":
        order |= {"return_items": item_ids[:1], "return_payment_method_id": paid["payment_method_id"]}
    if status == "exchange requested":
        old = order["items"][0]
        new = rng.choice(list(products[old["product_id"]]["variants"].values()))
        order |= {
            "exchange_items": [old["item_id"]],
            "exchange_new_items": [new["item_id"]],
            "exchange_payment_method_id": paid["payment_method_id"],
            "exchange_price_difference": round(new["price"] - old["price"], 2),
        }


def _numbers(rng: random.Random, low: int, high: int, count: int) -> list[str]:
    """Distinct numbers as texts."""
    return [str(number) for number in rng.sample(range(low, high + 1), count)]
