"""Policies that deserve nothing at the shop's desk; see :mod:`environments.kit.canned`."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from typing import TypeAlias

from environments.kit.canned import Canned, Glance, Player, echo, end_at_once, says, write_at_random
from environments.retail.expert import ASK
from environments.retail.reading import noted
from environments.retail.tools import REASONS
from mua.environment.protocol import Move
from mua.types import Json

Moves: TypeAlias = Generator[Move, str, None]
_TURNS = 5


def _asked(fact: str, heard: str) -> Generator[Move, str, dict[str, str]]:
    """What the customer tells when it is asked for one fact a few times."""
    known = noted(heard)
    for _ in range(3):
        if fact in known:
            break
        known |= noted((yield ASK[fact]))
    return known


def _found(heard: str) -> Generator[Move, str, tuple[str, dict[str, str]]]:
    """The customer's user id, asked for and looked up as the policy wants, and what it told."""
    known = yield from _asked("email", heard)
    if "email" in known:
        user = yield "find_user_id_by_email", {"email": known["email"]}
        if not user.startswith("Error"):
            return user, known
    known |= (yield from _asked("name", "")) | (yield from _asked("zip", ""))
    if not {"name", "zip"} <= known.keys():
        return "", known
    first, last = known["name"].split(" ")
    return (yield "find_user_id_by_name_zip", {"first_name": first, "last_name": last, "zip": known["zip"]}), known


def _order(heard: str, user: str = "") -> Generator[Move, str, tuple[str, Json]]:
    """The order: by its number, else the customer's first one, looked up."""
    known = yield from _asked("order", heard)
    number = known.get("order", "")
    if not number and user and not user.startswith("Error"):
        number = json.loads((yield "get_user_details", {"user_id": user}))["orders"][0]
    text = yield "get_order_details", {"order_id": number or "#W1000"}
    return number, {} if text.startswith("Error") else json.loads(text)


def _opened(glance: Glance) -> Generator[Move, str, tuple[str, str, Json]]:
    """The customer's user id and the order, found as the policy wants: its number and record."""
    user, _known = yield from _found(glance.opening)
    number, order = yield from _order("", user)
    return user, number, order


def _return_of(number: str, order: Json) -> Move:
    """The order's first item back to what paid for it."""
    items = [item["item_id"] for item in order.get("items", ())][:1]
    paid = order.get("payment_history", [{"payment_method_id": "paypal_1"}])[0]["payment_method_id"]
    return "return_delivered_order_items", {"order_id": number, "item_ids": items, "payment_method_id": paid}


def _to_each_wish(tell: Callable[[str, Json], str]) -> Player:
    """Finds the customer, and answers every wish with what ``tell`` makes of the order's number and record."""

    def play(glance: Glance) -> Moves:
        user, heard = "", glance.opening
        for _ in range(_TURNS):
            user = user or (yield from _found(heard))[0]
            heard = yield tell(*(yield from _order(heard, user)))

    return play


def _refused(number: str, order: Json) -> str:
    return f"Sorry, I cannot do that with order {number}: it is {order.get('status', 'not there')}."


def claim_everything(glance: Glance) -> Moves:
    """Finds the customer, reads the order, changes nothing and says that all is done."""
    _user, number, _record = yield from _opened(glance)
    told = f"Done: I have cancelled order {number}, requested the return, processed the exchange, changed its address, "
    yield from says(f"{told}its payment and its items, and updated your profile.")(glance)


def read_it_all_out(glance: Glance) -> Moves:
    """Calls every tool that reads and reads everything out."""
    user, heard = "", glance.opening
    for _ in range(_TURNS):
        if not user:
            user, _known = yield from _found(heard)
        number, order = yield from _order(heard, user)
        products = json.loads((yield "list_all_product_types", {}))
        asked = (yield from _asked("product", "")).get("product", "Kite")
        product = products.get(asked) or products["Kite"]
        variants = json.loads((yield "get_product_details", {"product_id": product}))["variants"]
        prices = [f"the {asked} costs ${one['price']:.2f}" for one in variants.values()]
        items = ", ".join(item["name"] for item in order.get("items", ()))
        heard = yield f"Order {number} is {order.get('status')}. It contains {items}. Then {', '.join(prices)}."


def do_it_without_a_yes(glance: Glance) -> Moves:
    """Finds the customer, reads the order, cancels or returns it as it stands, and asks nothing."""
    _user, number, order = yield from _opened(glance)
    status = order.get("status")
    if status == "pending":
        yield "cancel_pending_order", {"order_id": number, "reason": REASONS[0]}
        yield from says(f"I have cancelled order {number}.")(glance)
    elif status == "delivered":
        yield _return_of(number, order)
        yield from says(f"I have requested the return for order {number}.")(glance)
    yield from says(f"Order {number} is {status}.")(glance)


def transfer_properly(glance: Glance) -> Moves:
    """Finds the customer, reads the order, and hands over."""
    _user, number, _record = yield from _opened(glance)
    yield f"I have to hand order {number} over to a colleague."
    yield "transfer_to_human_agents", {"summary": "asked"}


def recite(glance: Glance) -> Moves:
    """The gold calls of a training task and its facts, with this customer's order number."""
    user, number, _record = yield from _opened(glance)
    task = glance.rng.choice(list(glance.training))
    for action in task.data["actions"]:
        given = {"order_id": number} if "order_id" in action["arguments"] else {"user_id": user}
        yield action["name"], {**action["arguments"], **given}
    yield from says(f"I have cancelled order {number}.", "Your profile is updated.")(glance)


CANNED: Mapping[str, Canned] = {
    "refuse properly": Canned(_to_each_wish(_refused)),
    "claim everything": Canned(claim_everything),
    "read it all out": Canned(read_it_all_out),
    "do it without a yes": Canned(do_it_without_a_yes),
    "transfer properly": Canned(transfer_properly),
    "recite training": Canned(recite),
    "write at random": Canned(write_at_random),
    "echo": Canned(echo),
    "end at once": Canned(end_at_once),
    "sorry": Canned(says("Sorry, I cannot do that.", "It is against our policy.")),
}
