"""What the scripted expert reads: tool answers in either form, and facts in a customer's words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from mua.types import Json
from mua.utils.strict_json import read_file

_STOCK = yaml.safe_load(read_file(Path(__file__).with_name("stock.yaml")))
FIRST_NAMES, LAST_NAMES = tuple(_STOCK["first_names"].split()), tuple(_STOCK["last_names"].split())
STREETS = tuple(_STOCK["streets"])
CITIES = tuple(map(tuple, _STOCK["cities"]))
"""City, state, first three digits of its zip codes."""
MAIL = ("post.com", "inbox.org")
BRANDS = ("visa", "mastercard")
PRODUCTS: dict[str, tuple[int, dict[str, tuple[str, ...]]]] = {
    name: (one["price"], {option: tuple(values) for option, values in one.items() if option != "price"})
    for name, one in _STOCK["products"].items()
}
"""Product -> price in dollars about which its variants lie, and the values of each option."""


ORDER = re.compile(r"#W\d+")
EMAIL = re.compile(r"[\w.]+@[\w.]*\w")
ZIP = re.compile(r"\b\d{5}\b")
NAME = re.compile(rf"\b({'|'.join(FIRST_NAMES)}) ({'|'.join(LAST_NAMES)})\b")
_ADDRESS = re.compile(r"(\d+ [^,.]+), (?:([^,]+), )?([^,]+), ([A-Z]{2}) (\d{5})")
_PATTERNS = {"order": ORDER, "email": EMAIL, "name": NAME, "address": _ADDRESS}
_PRODUCT = re.compile(rf"\b({'|'.join(sorted(PRODUCTS, key=len, reverse=True))})\b")
_VALUES: dict[str, set[str]] = {}
for _, _product_options in PRODUCTS.values():
    for _key, _values in _product_options.items():
        _VALUES.setdefault(_key, set()).update(_values)
_OPTION = re.compile(rf"\b({'|'.join(_VALUES)}) ([\w-]+)")
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


def address_in(text: str) -> Json | None:
    """The address that the customer gives, as tools take it."""
    match = _ADDRESS.search(text)
    if match is None:
        return None
    street, flat, city, state, zip_code = match.groups()
    place = {"address1": street, "address2": flat or "", "city": city, "state": state}
    return {**place, "country": "USA", "zip": zip_code}


def noted(text: str) -> dict[str, str]:
    """The facts in a customer's words: what an agent asks for, and ``hint``, what is in the order."""
    found = {fact: match for fact, pattern in _PATTERNS.items() if (match := pattern.search(text))}
    facts = {fact: match[0] for fact, match in found.items()}
    if "name" in found:
        facts["name"] = f"{found['name'][1]} {found['name'][2]}"
    rest = text.replace(facts.get("address", ""), " ") if "address" in facts else text
    if match := ZIP.search(rest):
        facts["zip"] = match[0]
    facts |= {"reason": reason} if (reason := _reason(text)) else {}
    facts |= {"payment": source} if (source := _source(text)) else {}
    return facts | _products(text) | _wanted(text)


def _reason(text: str) -> str:
    if re.search(r"by (mistake|accident)", text):
        return "ordered by mistake"
    return "no longer needed" if re.search(r"no longer need|not need it any more", text, re.IGNORECASE) else ""


def _source(text: str) -> str:
    """The kind of payment method that the customer names, as tools call it."""
    return next((source for words, source in _SOURCES.items() if words in text.lower()), "")


def _products(text: str) -> dict[str, str]:
    """Products that are named: as what is in an order, where the sentence speaks of one, else as what it is about."""
    found: dict[str, str] = {}
    for sentence in re.split(r"(?<=[.!?;])\s", text):
        names = " and the ".join(dict.fromkeys(_PRODUCT.findall(sentence)))
        if names and re.search(r"\border\b", sentence, re.IGNORECASE):
            found["hint"] = names
        elif names:
            found |= {"item": names, "product": names}
    return found


def _wanted(text: str) -> dict[str, str]:
    pairs = [f"{key} {value}" for key, value in _OPTION.findall(text) if value in _VALUES[key]]
    return {"wanted": ", ".join(pairs)} if pairs else {}
