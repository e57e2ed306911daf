"""The agent's tools: the carrier's customers, lines, plans, bills and devices.

They refuse what makes no sense (a plan that does not exist, a bill that is paid), not what the policy forbids: a line
suspended for fraud can be resumed, and that is wrong. Keeping to the policy is what the agent is judged on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from environments.kit.database import Tool, ToolError, load_tools
from environments.kit.overlay import Overlay
from environments.telecom.world import PLANS, View, lines_by_number
from mua.types import Json


def _found(database: Overlay, table: str, key: str, what: str) -> Json:
    record = database.get(table, key)
    if record is None:
        raise ToolError(f"there is no {what} {key}")
    return record


def find_customer_by_number(database: Overlay, number: str) -> Json:
    wanted = "".join(filter(str.isdigit, number))
    line = lines_by_number().get(wanted)
    if line is None:
        raise ToolError(f"no line has the number {number}")
    return {"customer_id": line["customer_id"], "line_id": line["line_id"]}


def find_customer_by_name(database: Overlay, first_name: str, last_name: str, date_of_birth: str) -> Json:
    wanted = {"first": first_name.lower(), "last": last_name.lower()}
    for customer_id, customer in database.items("customers"):
        name = {part: text.lower() for part, text in customer["name"].items()}
        if name == wanted and customer["date_of_birth"] == date_of_birth:
            return {"customer_id": customer_id}
    raise ToolError("no customer has this name and date of birth")


def get_customer(database: Overlay, customer_id: str) -> Json:
    return _found(database, "customers", customer_id, "customer")


def get_line(database: Overlay, line_id: str) -> Json:
    line = _found(database, "lines", line_id, "line")
    return {key: value for key, value in line.items() if key != "puk" and not key.startswith("data_")}


def get_data_usage(database: Overlay, line_id: str) -> Json:
    line = _found(database, "lines", line_id, "line")
    plan = _found(database, "plans", line["plan_id"], "plan")
    included, refuelled, used = plan["data_gb"], line["data_refuelled_gb"], line["data_used_gb"]
    left = max(0.0, round(included + refuelled - used, 1))
    return {"included_gb": included, "refuelled_gb": refuelled, "used_gb": used, "left_gb": left}


def get_device(database: Overlay, line_id: str) -> Json:
    line = _found(database, "lines", line_id, "line")
    return _found(database, "devices", line["device_id"], "device")


def get_bills(database: Overlay, customer_id: str) -> list[Json]:
    customer = _found(database, "customers", customer_id, "customer")
    return [_found(database, "bills", bill_id, "bill") for bill_id in customer["bill_ids"]]


def list_plans(database: Overlay) -> list[Json]:
    return [plan for _, plan in database.items("plans")]


def send_payment_request(database: Overlay, bill_id: str) -> Json:
    status = _found(database, "bills", bill_id, "bill")["status"]
    if status == "paid":
        raise ToolError(f"bill {bill_id} is paid")
    database.edit("bills", bill_id)["status"] = "requested"
    return {"bill_id": bill_id, "status": "requested"}


def resume_line(database: Overlay, line_id: str) -> Json:
    status = _found(database, "lines", line_id, "line")["status"]
    if status == "active":
        raise ToolError(f"line {line_id} is active")
    line = database.edit("lines", line_id)
    line["status"], line["suspension"] = "active", None
    database.edit("network", line_id)["profile"] += 1
    return {"line_id": line_id, "status": "active", "note": "the phone takes it up when it registers anew"}


def suspend_line(database: Overlay, line_id: str) -> Json:
    if _found(database, "lines", line_id, "line")["status"] != "active":
        raise ToolError(f"line {line_id} is not active")
    line = database.edit("lines", line_id)
    line["status"], line["suspension"] = "suspended", "customer request"
    return {"line_id": line_id, "status": "suspended"}


def set_roaming(database: Overlay, line_id: str, on: bool) -> Json:
    _found(database, "lines", line_id, "line")
    database.edit("lines", line_id)["roaming"] = on
    return {"line_id": line_id, "roaming": on}


def set_bar(database: Overlay, line_id: str, bar: str, on: bool) -> Json:
    bars = _found(database, "lines", line_id, "line")["bars"]
    if (bar in bars) == on:
        raise ToolError(f"bar {bar} of line {line_id} is {'on' if on else 'off'} already")
    changed = database.edit("lines", line_id)["bars"]
    if on:
        changed[bar] = "customer"
    else:
        del changed[bar]
    return {"line_id": line_id, "bars": changed}


def refuel_data(database: Overlay, line_id: str, gb: int) -> Json:
    line = _found(database, "lines", line_id, "line")
    price = _found(database, "plans", line["plan_id"], "plan")["refuel_price_per_gb"]
    database.edit("lines", line_id)["data_refuelled_gb"] += gb
    return {"line_id": line_id, "added_gb": gb, "price": round(gb * price, 2), "charged": "on the next bill"}


def change_plan(database: Overlay, line_id: str, plan_id: str) -> Json:
    _found(database, "plans", plan_id, "plan")
    if _found(database, "lines", line_id, "line")["plan_id"] == plan_id:
        raise ToolError(f"line {line_id} has the plan {plan_id} already")
    database.edit("lines", line_id)["plan_id"] = plan_id
    return {"line_id": line_id, "plan_id": plan_id}


def get_puk_code(database: Overlay, line_id: str) -> Json:
    return {"line_id": line_id, "puk": _found(database, "lines", line_id, "line")["puk"]}


def check_network(database: Overlay, line_id: str) -> Json:
    """What the network sees; it knows nothing of the phone's settings."""
    line = _found(database, "lines", line_id, "line")
    view = View.of(database)
    seen = view.phone["line_id"] == line_id and view.no_service_because is None
    return {"line_id": line_id, "outage": False, "phone_registered": seen, "roaming_allowed": line["roaming"]}


def transfer_to_human(database: Overlay, customer_id: str, reason: str) -> Json:
    _found(database, "customers", customer_id, "customer")
    database.insert("tickets", customer_id, {"customer_id": customer_id, "reason": reason})
    return {"transferred": True}


def tools(*, compact: bool = False) -> tuple[Tool, ...]:
    """The agent's tools. ``compact`` answers without spaces and without fields that hold nothing."""
    return tuple(_compacted(tool) for tool in TOOLS) if compact else TOOLS


def _compacted(tool: Tool) -> Tool:
    run: Callable[..., Any] = tool.run

    def terse(database: Overlay, **arguments: Any) -> str:
        return json.dumps(_without_blanks(run(database, **arguments)), separators=(",", ":"))

    return Tool(tool.schema, terse, tool.terminal)


def _without_blanks(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_blanks(inner) for key, inner in value.items() if inner not in (None, {}, [])}
    return [_without_blanks(inner) for inner in value] if isinstance(value, list) else value


TOOLS = tuple(
    load_tools(
        Path(__file__).with_suffix(".yaml"), sys.modules[__name__], "transfer_to_human", PLANS=list(PLANS)
    ).values()
)
