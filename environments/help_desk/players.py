"""Policies that deserve nothing at a help desk; see :mod:`environments.kit.canned`."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Generator, Mapping

from environments.help_desk.database import CITIES, PRODUCTS, STATUSES
from environments.kit.canned import Canned, Glance, echo, end_at_once, says, write_at_random
from mua.environment.protocol import Move, Task

# A scripted agent that keeps to the policy: it solves every task, whoever the customer is.
#
# It knows the customer's wish, which a person would read from the first message, and learns everything else by
# asking and by calling tools. It reads the customer's answers for what it knows they contain.

ASK = {
    "order": "What is the order number?",
    "name": "What is your name?",
    "item": "Which item is it?",
    "city": "Which city should it go to?",
}
ASK_BOTH = "What are your order number and your name?"
DONE = {
    "cancel": "Done, order {order} is cancelled.",
    "redirect": "Done, order {order} goes to {detail}.",
    "return": "Done, the {detail} is returned.",
}
MOST_QUESTIONS = 4
"""How often it asks for one thing."""


class Expert:
    """The agent's conversation about one task, as a generator of moves fed with what came back."""

    def __init__(self, task: Task, seed: int, loose: float = 0.0) -> None:
        """``loose`` is the probability of a decision against the policy: a refusal, or a write that is not allowed."""
        self._wish: str = task.data["wish"]
        self._known: dict[str, str] = task.data["known"]
        self._rng = random.Random(f"expert/{task.id}/{seed}")
        self._loose = loose

    def moves(self) -> Generator[Move, str, None]:
        """Yields a move and is sent the answer: the tool's result, or the customer's words."""
        heard = yield ASK_BOTH
        for what in ("order", "name"):
            if not _said(self._known[what], heard):
                yield from self._ask(what)
        order, name = self._known["order"], self._known["name"]
        owner = json.loads((yield "check_owner", {"order": order, "name": name}))
        if not owner["owner"]:
            yield from self._end(f"Sorry, order {order} is not on your account.")
            return
        found = json.loads((yield "get_order", {"order": order}))
        if self._wish == "track":
            yield from self._end(f"Order {order} is in {found['place']}.")
            return
        if found["status"] != ("delivered" if self._wish == "return" else "pending"):
            yield from self._end(f"Sorry, order {order} is {found['status']}.")
            return
        yield from self._grant(order)

    def _grant(self, order: str) -> Generator[Move, str, None]:
        detail = yield from self._detail()
        if self._wish == "return":
            item = json.loads((yield "get_item", {"order": order, "item": detail}))
            if item["final_sale"]:
                yield from self._end(f"Sorry, the {detail} is final sale.")
                return
        yield self._write(order, detail)
        yield from self._end(DONE[self._wish].format(order=order, detail=detail))

    def _ask(self, what: str) -> Generator[Move, str, None]:
        for _ in range(MOST_QUESTIONS):
            heard = yield ASK[what]
            if _said(self._known[what], heard):
                return

    def _end(self, text: str) -> Generator[Move, str, None]:
        """Says how it ended, again if the customer does not take it."""
        for _ in range(MOST_QUESTIONS):
            yield text

    def _detail(self) -> Generator[Move, str, str]:
        what = {"redirect": "city", "return": "item"}.get(self._wish, "")
        if what:
            yield from self._ask(what)
        return self._known.get(what, "")

    def _write(self, order: str, detail: str) -> Move:
        if self._wish == "cancel":
            return "cancel_order", {"order": order}
        if self._wish == "redirect":
            return "change_destination", {"order": order, "address": {"city": detail}}
        return "return_items", {"order": order, "items": [detail]}


def _said(value: str, heard: str) -> bool:
    """Whether the customer said it: as words of their own, "Lea" is not in "please"."""
    return re.search(rf"\b{re.escape(value)}\b", heard, re.IGNORECASE) is not None


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
