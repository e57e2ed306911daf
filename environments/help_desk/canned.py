"""Policies that deserve nothing at a help desk; see :mod:`environments.kit.canned`."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping

from environments.help_desk.expert import ASK
from environments.help_desk.words import CITIES, PRODUCTS, STATUSES
from environments.kit.canned import Canned, Glance, echo, end_at_once, says, write_at_random
from mua.environment.protocol import Move

_ORDER = re.compile(r"\b\d{4}\b")
_NAME = re.compile(r"\b[A-Z][a-z]+\b")


def _order(glance: Glance) -> Generator[Move, str, str]:
    """The order number, asked for if need be."""
    heard = glance.opening
    for _ in range(4):
        if found := _ORDER.search(heard):
            return found[0]
        heard = yield ASK["order"]
    return "0000"


def refuse_all(glance: Glance) -> Generator[Move, str, None]:
    """Asks for the order, looks it up, tells its status and place, and refuses; never asks who writes."""
    order = yield from _order(glance)
    found = json.loads((yield "get_order", {"order": order}))
    for _ in range(4):
        yield f"Sorry, order {order} is {found.get('status')}. It is in {found.get('place')}. I can not do that."


def claim_everything(glance: Glance) -> Generator[Move, str, None]:
    """Looks the order up, changes nothing, says that all is done."""
    order = yield from _order(glance)
    yield "get_order", {"order": order}
    yield from says(f"Done, order {order} is cancelled, goes to your city, and the item is returned.")(glance)


def tell_every_status(glance: Glance) -> Generator[Move, str, None]:
    """Names every status, every city, and that nothing is on the account."""
    order = yield from _order(glance)
    told = [f"Order {order} is {status}." for status in STATUSES]
    told += [f"Order {order} is in {city}." for city in CITIES] + [f"Order {order} is not on your account."]
    told += [f"{product} is final sale." for product in PRODUCTS]
    yield from says(" ".join(told))(glance)


def call_it_anothers(glance: Glance) -> Generator[Move, str, None]:
    """Asks for order and name, checks a name of its own choice, and calls everybody a stranger."""
    order = yield from _order(glance)
    yield ASK["name"]
    yield "check_owner", {"order": order, "name": "Nobody"}
    yield from says(f"Sorry, order {order} is not on your account.")(glance)


def final_sale_for_all(glance: Glance) -> Generator[Move, str, None]:
    """Calls whatever is named final sale."""
    order = yield from _order(glance)
    heard = yield ASK["item"]
    items = [word for word in _NAME.findall(heard) if word in PRODUCTS] or ["Lamp"]
    yield from says(f"Sorry, order {order} is shipped and the {items[-1]} is final sale.")(glance)


def do_it_all(glance: Glance) -> Generator[Move, str, None]:
    """Cancels, redirects and returns without asking who writes, and says it is done."""
    order = yield from _order(glance)
    found = json.loads((yield "get_order", {"order": order}))
    wish = glance.opening.lower()
    if re.search(r"cit|town|rout|where .*goes|destin", wish):
        city = next((word for word in _NAME.findall((yield ASK["city"])) if word in CITIES), CITIES[0])
        yield "change_destination", {"order": order, "address": {"city": city}}
    elif re.search(r"return|back", wish):
        yield "return_items", {"order": order, "items": list(found.get("items", ["Lamp"]))[:1]}
    else:
        yield "cancel_order", {"order": order}
    yield from says(f"Done, order {order} is taken care of.")(glance)


def transfer_at_once(glance: Glance) -> Generator[Move, str, None]:
    """Hands everybody over."""
    yield "transfer_to_human", {"reason": "asked"}


def recite(glance: Glance) -> Generator[Move, str, None]:
    """The gold moves of a training task, with this customer's order number."""
    order = yield from _order(glance)
    task = glance.rng.choice(list(glance.training))
    name = task.data["known"]["name"]
    yield "check_owner", {"order": order, "name": name}
    yield "get_order", {"order": order}
    for action in task.data["actions"]:
        yield action["name"], {**action["arguments"], "order": order}
    fact = task.data["facts"][0]
    yield from says(f"Order {order} is {fact['value']}.")(glance)


CANNED: Mapping[str, Canned] = {
    "refuse all": Canned(refuse_all),
    "claim everything": Canned(claim_everything),
    "tell every status": Canned(tell_every_status),
    "call it another's": Canned(call_it_anothers),
    "final sale for all": Canned(final_sale_for_all),
    "do it all unasked": Canned(do_it_all),
    "transfer at once": Canned(transfer_at_once),
    "recite training": Canned(recite),
    "write at random": Canned(write_at_random),
    "echo": Canned(echo),
    "end at once": Canned(end_at_once),
    "sorry": Canned(says("Sorry, I can not do that.", "It is against our policy.")),
}
