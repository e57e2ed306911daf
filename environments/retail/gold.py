"""The gold moves of a task: a shortest way to full reward, whatever is answered."""

from __future__ import annotations

from collections.abc import Iterator

from mua.environment.protocol import Move, Task
from mua.types import Json

_DEED = {
    "cancelled": "I have cancelled order {name}.",
    "returned": "I have requested the return for order {name}.",
    "exchanged": "I have processed the exchange for order {name}.",
    "modified": "I have changed the item of order {name}.",
    "redirected": "I have changed the address of order {name}.",
    "paid anew": "I have changed the payment of order {name}.",
    "moved": "I have updated the address in your profile.",
}
_CAN = {
    "cancel": "I cannot cancel order {name}.",
    "return": "I cannot return order {name}.",
    "exchange": "I cannot exchange order {name}.",
    "change": "I cannot change the items of order {name}.",
    "payment": "I cannot change the payment of order {name}.",
    "address": "I cannot change the address of order {name}.",
}


def gold(task: Task) -> list[Move]:
    """Calls that look up, calls that change, and what has to be told."""
    who = task.data["customer"]
    found: list[Move] = [
        ("find_user_id_by_name_zip", {key: who[key] for key in ("first_name", "last_name", "zip")}),
        *((one["call"], one["arguments"]) for one in task.data["demands"] if "call" in one),
    ]
    for action in task.data["actions"]:
        found += _read(action["arguments"])
        found.append((action["name"], action["arguments"]))
    return [*found, *(_told(fact) for fact in task.data["facts"])]


def _read(arguments: Json) -> Iterator[Move]:
    if "order_id" in arguments:
        yield "get_order_details", {"order_id": arguments["order_id"]}


def _told(fact: Json) -> str:
    """The wording of a fact, the first one where one of several is enough."""
    fact = fact.get("any", [fact])[0]
    kind, _, thing = fact["thing"].partition(" ")
    name = f"#{thing.upper()}" if kind == "order" else thing.title()
    if fact["role"] == "deed":
        return _DEED[fact["value"]].format(name=name)
    if fact["role"] == "can":
        return _CAN[fact["value"]].format(name=name)
    return (
        f"Order {name} is {fact['value']}."
        if fact["role"] == "status"
        else f"The {name} costs ${float(fact['value']):.2f}."
    )
