"""What the scripted expert reads: tool answers in either form, and facts in a customer's words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from mua.types import Json

ORDER = re.compile(r"#W\d+")
EMAIL = re.compile(r"[\w.]+@[\w.]*\w")
ZIP = re.compile(r"\b\d{5}\b")
NAME = re.compile(r"\b([A-Z][a-z]+) ([A-Z][a-z]+)\b")
_ADDRESS = re.compile(r"(\d+ [^,.]+), (?:([^,]+), )?([^,]+), ([A-Z]{2}) (\d{5})")
_HINT = re.compile(r"order with the ([\w ]+)\.|The ([\w ]+) is in that order\.")
_SOURCES = {"paypal": "paypal", "credit card": "credit_card", "gift card": "gift_card"}


@dataclass(frozen=True, slots=True)
class Item:
    """One line of an order."""

    item_id: str
    name: str
    product_id: str
    options: dict[str, str]


@dataclass(frozen=True, slots=True)
class Order:
    """What an agent needs to know of an order."""

    order_id: str
    owner: str
    status: str
    paid_with: str
    amount: float
    items: list[Item]

    def named(self, text: str) -> list[Item]:
        """The items that ``text`` names, in the order in which it does."""
        found = [(text.find(item.name), item) for item in self.items]
        return [item for place, item in sorted(found, key=lambda pair: pair[0]) if place >= 0]


def read_order(order_id: str, text: str) -> Order:
    """From the answer of ``get_order_details``."""
    found = json.loads(text)
    if "paid" in found:
        method, amount = found["paid"].split(" ")
        items = [_short_item(one) for one in found["items"]]
        return Order(order_id, found["owner"], found["status"], method, float(amount), items)
    paid = found["payment_history"][0]
    items = [Item(one["item_id"], one["name"], one["product_id"], one["options"]) for one in found["items"]]
    return Order(order_id, found["user_id"], found["status"], paid["payment_method_id"], paid["amount"], items)


def _short_item(text: str) -> Item:
    head, options = text.split(": ", 1)
    named, product_id = head.split(", product ")
    name, item_id = named.rsplit(" ", 1)
    return Item(item_id, name, product_id, read_options(options))


def read_options(text: str) -> dict[str, str]:
    """``color red, size large`` as a mapping."""
    pairs = (part.split(" ", 1) for part in text.split(", "))
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def read_user(text: str) -> tuple[list[str], dict[str, float | None]]:
    """Orders, and payment methods with the balances of gift cards, from the answer of ``get_user_details``."""
    found = json.loads(text)
    if "pays" in found:
        pays = [one.split(" ") for one in found["pays"]]
        return found["orders"], {one[0]: float(one[1]) if len(one) > 1 else None for one in pays}
    return found["orders"], {key: one.get("balance") for key, one in found["payment_methods"].items()}


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant on offer."""

    item_id: str
    options: dict[str, str]
    price: float


def read_product(text: str) -> list[Variant]:
    """Variants that are available, from the answer of ``get_product_details``."""
    found = json.loads(text)
    if "variants" in found:
        on_offer = [one for one in found["variants"].values() if one["available"]]
        return [Variant(one["item_id"], one["options"], one["price"]) for one in on_offer]
    split = {key: value.rsplit(" ", 1) for key, value in found.items()}
    return [Variant(key, read_options(options), float(price)) for key, (options, price) in split.items()]


def wanted_options(text: str, keys: Iterable[str]) -> dict[str, str]:
    """The options that a customer names by ``key value``."""
    found = {key: re.search(rf"\b{key} ([\w-]+)", text) for key in keys}
    return {key: match[1] for key, match in found.items() if match}


def reason_in(text: str) -> str | None:
    """The reason for a cancellation that the customer gives, if any."""
    if "mistake" in text:
        return "ordered by mistake"
    return "no longer needed" if re.search(r"no longer", text, re.IGNORECASE) else None


def source_in(text: str) -> str | None:
    """The kind of payment method that the customer names, as tools call it."""
    return next((source for words, source in _SOURCES.items() if words in text.lower()), None)


def address_in(text: str) -> Json | None:
    """The address that the customer gives, as tools take it."""
    match = _ADDRESS.search(text)
    if match is None:
        return None
    street, flat, city, state, zip_code = match.groups()
    place = {"address1": street, "address2": flat or "", "city": city, "state": state}
    return {**place, "country": "USA", "zip": zip_code}


def hinted(text: str) -> tuple[str, str]:
    """The product by which the customer describes an order ("" if it does not), and the rest of its words."""
    match = _HINT.search(text)
    if match is None:
        return "", text
    return match[1] or match[2], text[: match.start()] + text[match.end() :]
