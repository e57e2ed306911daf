"""What the scripted expert reads: tool answers in either form, and facts in a customer's words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from mua.types import Json

# The words that the shop's database is made of: people, places, and fifty products with their options.

_FIRST = """
Ada Bruno Cleo Dario Edda Felix Greta Hugo Ilse Jonas Kira Lorenz Mira Nils Orla Pavel Quinn Rosa Silas Tilda
Uma Viktor Wanda Xenia Yorick Zita Alba Bela Carmen Dora Elio Fiona Gustav Hedda Ines Janko Klara Leif Marta Nora
"""
_LAST = """
Abel Baum Cole Dahl Egan Frost Gale Holm Iver Jost Kern Lund Marsh Nash Oster Pike Quist Reed Stark Thorn
Ulm Vance West Yates Zorn Ash Birk Crane Drake Elder Falk Grove Hale Irwin Kemp Lowe Moor Nye Orr Penn
"""
FIRST_NAMES, LAST_NAMES = tuple(_FIRST.split()), tuple(_LAST.split())
_STREETS = "Fern Way, Quarry Row, Mill Court, Harbor Walk, Orchard Rise, Chapel Yard, Bridge Gate, Kiln End"
STREETS = tuple(_STREETS.split(", "))
CITIES = (
    ("Salem", "OR", "973"),
    ("Fargo", "ND", "581"),
    ("Boise", "ID", "837"),
    ("Tulsa", "OK", "741"),
    ("Provo", "UT", "846"),
    ("Macon", "GA", "312"),
    ("Akron", "OH", "443"),
    ("Erie", "PA", "165"),
    ("Reno", "NV", "895"),
    ("Waco", "TX", "767"),
    ("Utica", "NY", "135"),
    ("Flint", "MI", "485"),
)
"""City, state, first three digits of its zip codes."""
MAIL = ("post.com", "inbox.org")
BRANDS = ("visa", "mastercard")

_COLORS = "color: red, blue, green, black"
_SIZES = "size: small, medium, large"
_WOODS = "wood: oak, pine, beech"
_METALS = "metal: steel, brass, copper"
_SHELF = f"""
Rain Coat | 64 | {_COLORS} | {_SIZES}
Wool Scarf | 27 | {_COLORS} | pattern: plain, striped
Felt Hat | 38 | {_COLORS} | {_SIZES}
Belt | 31 | color: brown, black | {_SIZES}
Mittens | 19 | {_COLORS} | {_SIZES}
Apron | 23 | {_COLORS} | pattern: plain, striped, dotted
Slippers | 29 | {_COLORS} | {_SIZES}
Suit Case | 112 | {_COLORS} | {_SIZES}
Hand Bag | 71 | {_COLORS} | closure: clasp, button
Wallet | 34 | color: brown, black | closure: clasp, button
Teapot | 36 | {_COLORS} | volume: half-liter, liter
Frying Pan | 44 | {_METALS} | {_SIZES}
Bread Knife | 26 | {_WOODS} | {_SIZES}
Salad Bowl | 33 | {_WOODS} | {_SIZES}
Rolling Pin | 17 | {_WOODS} | {_SIZES}
Spice Rack | 41 | {_WOODS} | tiers: two, three, four
Wine Rack | 58 | {_WOODS} | tiers: two, three, four
Candle Holder | 22 | {_METALS} | {_SIZES}
Scale | 39 | unit: metric, imperial | {_COLORS}
Toaster | 47 | {_COLORS} | slots: two, four
Pillow | 24 | {_COLORS} | filling: down, foam
Blanket | 52 | {_COLORS} | fabric: wool, cotton
Bath Towel | 18 | {_COLORS} | {_SIZES}
Curtain | 49 | {_COLORS} | fabric: linen, cotton
Door Mat | 21 | {_COLORS} | {_SIZES}
Side Table | 88 | {_WOODS} | shape: round, square
Bar Stool | 76 | {_WOODS} | height: low, high
Rocking Chair | 164 | {_WOODS} | {_COLORS}
Picture Frame | 28 | {_WOODS} | {_SIZES}
Mirror | 67 | {_METALS} | shape: round, square
Garden Bench | 143 | {_WOODS} | {_SIZES}
Watering Can | 25 | {_METALS} | volume: small, large
Flower Pot | 16 | {_COLORS} | {_SIZES}
Bird House | 32 | {_WOODS} | {_COLORS}
Rake | 29 | {_WOODS} | width: narrow, wide
Hand Saw | 37 | {_WOODS} | teeth: fine, coarse
Step Ladder | 83 | {_METALS} | steps: three, four, five
Tool Box | 46 | {_COLORS} | {_SIZES}
Lantern | 42 | {_METALS} | {_COLORS}
Compass | 24 | {_METALS} | needle: plain, glowing
Fishing Rod | 69 | length: short, long | {_COLORS}
Kite | 18 | {_COLORS} | {_SIZES}
Sled | 62 | {_WOODS} | {_SIZES}
Chess Board | 55 | {_WOODS} | {_SIZES}
Ukulele | 97 | {_WOODS} | {_COLORS}
Harmonica | 35 | key: high, low | {_METALS}
Music Stand | 48 | {_METALS} | height: low, high
Sketch Pad | 14 | paper: smooth, rough | {_SIZES}
Fountain Pen | 53 | {_COLORS} | nib: fine, broad
Globe | 74 | {_COLORS} | {_SIZES}
"""


def _options(column: str) -> tuple[str, tuple[str, ...]]:
    name, values = column.split(": ")
    return name, tuple(values.split(", "))


PRODUCTS: dict[str, tuple[int, dict[str, tuple[str, ...]]]] = {
    name: (int(price), dict(_options(column) for column in columns))
    for name, price, *columns in (line.split(" | ") for line in _SHELF.strip().splitlines())
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
