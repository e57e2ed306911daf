"""The gold moves of a task: look everything up, act, with each setting of the phone looked at before, and tell."""

from __future__ import annotations

import json
from collections.abc import Iterator

from environments.telecom.world import base
from mua.environment.protocol import Move, Task, UserMove
from mua.types import Json

_LOOKS = {
    "reset_apn": "check_apn",
    "reseat_sim": "check_sim",
    "set_network_mode": "check_network_mode",
    "grant_permission": "check_app_permissions",
}


def gold_moves(task: Task) -> list[Move]:
    """Reads, words, actions of both sides, and what has to be told in the end."""
    data = task.data
    line = base().tables["lines"][data["initial"]["phone"]["phone"]["line_id"]]
    stranger = any("verify" in fact["say"] for fact in data["facts"])
    moves: list[Move] = list(_read(line, data["known"], stranger=stranger))
    if data["assertions"][:-1]:
        moves.append("Let us look at your phone.")
    for action in data["actions"]:
        moves += _moves(action)
    return [*moves, *(fact["say"] for fact in data["facts"])]


def _read(line: Json, known: Json, *, stranger: bool) -> Iterator[Move]:
    customer = {"customer_id": line["customer_id"]}
    if known["number"] is None:
        name = {"first_name": known["first"], "last_name": known["last"]}
        yield "find_customer_by_name", {**name, "date_of_birth": known["born"]}
    else:
        yield "find_customer_by_number", {"number": known["number"]}
    yield "get_customer", customer
    if not stranger:
        yield "get_line", {"line_id": line["line_id"]}
        yield "get_data_usage", {"line_id": line["line_id"]}
        yield "get_bills", customer


def _moves(action: Json) -> Iterator[Move]:
    name, arguments = str(action["name"]), json.loads(json.dumps(action["arguments"]))
    if action.get("requestor") != "user":
        yield name, arguments
        return
    look = _LOOKS.get(name) or (name.replace("set_", "check_") if name.startswith("set_") else "")
    if look:
        yield UserMove(look, {})
    yield UserMove(name, arguments)
