"""The agent's side of tau2-bench's telecom: its thirteen tools, and the functions that only tasks name.

Names, arguments, checks and effects are the benchmark's; descriptions and refusals are in words of our own. The day is
:data:`TODAY`. A bill that has to be made gets an id from its customer and place, where the benchmark draws one at
random: two episodes that do the same are then the same.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from environments._tau.desk import TRANSFER
from environments.kit.database import ToolError, load_tools
from environments.kit.overlay import Overlay
from mua.types import Json

TODAY = "2025-02-25"
_NEXT_BILL = {
    "period_start": "2025-03-01",
    "period_end": "2025-03-31",
    "issue_date": "2025-03-01",
    "due_date": "2025-03-15",
}
_LAST_BILL = {
    "period_start": "2025-01-01",
    "period_end": "2025-01-31",
    "issue_date": "2025-01-01",
    "due_date": "2025-01-15",
}
"""The months around :data:`TODAY`, as the benchmark computes them."""
CYCLE_END = "2025-02-28"
_KINDS = {"L": "lines", "D": "devices", "B": "bills", "C": "customers", "P": "plans"}


def found(database: Overlay, table: str, key: str) -> Json:
    """The record; ToolError if there is none."""
    record = database.get(table, key) if isinstance(key, str) else None
    if record is None:
        raise ToolError(f"there is no record {key!r} among the {table}")
    return record


def line_of_phone(database: Overlay, phone_number: str) -> Json:
    """The line with this number; ToolError if there is none."""
    for _, line in database.items("lines"):
        if line["phone_number"] == phone_number:
            return line
    raise ToolError(f"there is no line with the number {phone_number}")


def get_customer_by_phone(database: Overlay, phone_number: str) -> Json:
    for _, customer in database.items("customers"):
        lines = (found(database, "lines", line_id) for line_id in customer["line_ids"])
        if customer["phone_number"] == phone_number or any(line["phone_number"] == phone_number for line in lines):
            return customer
    raise ToolError(f"no customer has the number {phone_number}")


def awaiting_payment(database: Overlay, customer: Json) -> list[Json]:
    """The customer's bills whose payment was asked for."""
    bills = [found(database, "bills", bill_id) for bill_id in customer["bill_ids"]]
    return [bill for bill in bills if bill["status"] == "Awaiting Payment"]


def _line_of(database: Overlay, customer_id: str, line_id: str) -> Json:
    if line_id not in found(database, "customers", customer_id)["line_ids"]:
        raise ToolError(f"customer {customer_id} has no line {line_id}")
    return found(database, "lines", line_id)


def get_customer_by_id(database: Overlay, customer_id: str) -> Json:
    return found(database, "customers", customer_id)


def get_customer_by_name(database: Overlay, full_name: str, dob: str) -> list[Json]:
    wanted = full_name.lower()
    every = [customer for _, customer in database.items("customers")]
    return [one for one in every if one["full_name"].lower() == wanted and one["date_of_birth"] == dob]


def get_details_by_id(database: Overlay, id: str) -> Json:
    table = _KINDS.get(id[:1])
    if table is None:
        raise ToolError(f"{id!r} is the id of nothing that the carrier has; ids begin with {', '.join(_KINDS)}")
    return found(database, table, id)


def suspend_line(database: Overlay, customer_id: str, line_id: str, reason: str) -> Json:
    if _line_of(database, customer_id, line_id)["status"] != "Active":
        raise ToolError("only an active line can be suspended")
    line = database.edit("lines", line_id)
    line.update(status="Suspended", suspension_start_date=TODAY)
    return {"message": "The line is suspended; holding it costs $5 a month.", "line": line}


def resume_line(database: Overlay, customer_id: str, line_id: str) -> Json:
    if _line_of(database, customer_id, line_id)["status"] not in ("Suspended", "Pending Activation"):
        raise ToolError("only a line that is suspended or awaits activation can be resumed")
    line = database.edit("lines", line_id)
    line.update(status="Active", suspension_start_date=None)
    return {"message": "The line is active again.", "line": line}


def get_bills_for_customer(database: Overlay, customer_id: str, limit: int = 12) -> list[Json]:
    bills = [found(database, "bills", one) for one in found(database, "customers", customer_id)["bill_ids"]]
    return sorted(bills, key=lambda bill: str(bill["issue_date"]), reverse=True)[:limit]


def send_payment_request(database: Overlay, customer_id: str, bill_id: str) -> str:
    customer = found(database, "customers", customer_id)
    if awaiting_payment(database, customer):
        raise ToolError("the customer has been asked to pay another bill already")
    if bill_id not in customer["bill_ids"]:
        raise ToolError(f"customer {customer_id} has no bill {bill_id}")
    database.edit("bills", bill_id)["status"] = "Awaiting Payment"
    return f"The customer has been asked to pay bill {bill_id}"


def get_data_usage(database: Overlay, customer_id: str, line_id: str) -> Json:
    line = _line_of(database, customer_id, line_id)
    plan = found(database, "plans", line["plan_id"])
    return {
        "line_id": line_id,
        "data_used_gb": str(line["data_used_gb"]),
        "data_limit_gb": str(plan["data_limit_gb"]),
        "data_refueling_gb": str(line["data_refueling_gb"]),
        "cycle_end_date": CYCLE_END,
    }


def _roaming(on: bool) -> Callable[..., str]:
    word = "on" if on else "off"

    def run(database: Overlay, customer_id: str, line_id: str) -> str:
        if _line_of(database, customer_id, line_id)["roaming_enabled"] is on:
            return f"Roaming was {word} already"
        database.edit("lines", line_id)["roaming_enabled"] = on
        return f"Roaming is {word} now"

    return run


enable_roaming, disable_roaming = _roaming(True), _roaming(False)


def refuel_data(database: Overlay, customer_id: str, line_id: str, gb_amount: float) -> Json:
    line = _line_of(database, customer_id, line_id)
    if gb_amount <= 0:
        raise ToolError("the amount of data must be more than 0")
    price = found(database, "plans", line["plan_id"])["data_refueling_price_per_gb"]
    charge = gb_amount * price
    bill = _next_bill(database, customer_id)
    line = database.edit("lines", line_id)
    line["data_refueling_gb"] += gb_amount
    text = f"Data refueling: {gb_amount} GB at ${price}/GB"  # a value of the benchmark's records
    bill["line_items"].append(_item(text, charge))
    bill["total_due"] += charge
    return {
        "message": f"Line {line_id} has {gb_amount} GB more, for ${charge:.2f}",
        "new_data_refueling_gb": str(line["data_refueling_gb"]),
        "charge": str(charge),
    }


def _next_bill(database: Overlay, customer_id: str) -> Json:
    """The customer's draft, to write to; made if there is none."""
    customer = found(database, "customers", customer_id)
    for bill_id in customer["bill_ids"]:
        if found(database, "bills", bill_id)["status"] == "Draft":
            return database.edit("bills", bill_id)
    place = f"{customer_id}/{len(customer['bill_ids'])}"
    return _new_bill(database, customer_id, f"B{hashlib.sha256(place.encode()).hexdigest()[:8]}", "Draft", _NEXT_BILL)


def _new_bill(database: Overlay, customer_id: str, bill_id: str, status: str, dates: Json) -> Json:
    bill = {"bill_id": bill_id, "customer_id": customer_id, **dates, "total_due": 0.0, "line_items": []}
    database.insert("bills", bill_id, {**bill, "status": status})
    database.edit("customers", customer_id)["bill_ids"].append(bill_id)
    return database.edit("bills", bill_id)


def _item(description: str, amount: float) -> Json:
    kind = "Credit" if amount < 0 else "Charge"
    return {"description": description, "amount": amount, "date": TODAY, "item_type": kind}


# ---- functions that no side can call: the faults that tasks begin with, and what they assert


def _set_data_usage(database: Overlay, customer_id: str, line_id: str, data_used_gb: float) -> str:
    _line_of(database, customer_id, line_id)
    database.edit("lines", line_id)["data_used_gb"] = data_used_gb
    return "set"


def _suspend_for_overdue_bill(
    database: Overlay, customer_id: str, line_id: str, new_bill_id: str, contract_ended: bool
) -> str:
    line, customer = found(database, "lines", line_id), found(database, "customers", customer_id)
    amount = found(database, "plans", line["plan_id"])["price_per_month"]
    bills = [found(database, "bills", bill_id) for bill_id in customer["bill_ids"]]
    if line["status"] != "Active" or amount <= 0 or any(bill["status"] == "Overdue" for bill in bills):
        raise ToolError("the line must be active, its plan cost something, and no bill be overdue yet")
    bill = _new_bill(database, customer_id, new_bill_id, "Overdue", _LAST_BILL)
    bill["line_items"].append(_item(f"Charge for line {line_id}", amount))
    bill["total_due"] += amount
    line = database.edit("lines", line_id)
    line.update(status="Suspended", suspension_start_date=TODAY)
    if contract_ended:
        line["contract_end_date"] = _LAST_BILL["period_end"]
    return "suspended"


def _assert_data_refueling_amount(database: Overlay, customer_id: str, line_id: str, expected_amount: float) -> bool:
    refuelled: float = _line_of(database, customer_id, line_id)["data_refueling_gb"]
    return abs(refuelled - expected_amount) < 1e-6


def _assert_line_status(database: Overlay, customer_id: str, line_id: str, expected_status: str) -> bool:
    return bool(_line_of(database, customer_id, line_id)["status"] == expected_status)


def _assert_overdue_bill_exists(database: Overlay, customer_id: str, overdue_bill_id: str) -> bool:
    owned = overdue_bill_id in found(database, "customers", customer_id)["bill_ids"]
    return bool(owned and found(database, "bills", overdue_bill_id)["status"] == "Overdue")


def _assert_no_overdue_bill(database: Overlay, overdue_bill_id: str) -> bool:
    bill = database.get("bills", overdue_bill_id)
    return bill is None or bill["status"] == "Paid"


SETUP: dict[str, Callable[..., Any]] = {
    "set_data_usage": _set_data_usage,
    "suspend_line_for_overdue_bill": _suspend_for_overdue_bill,
}
ASSERTIONS: dict[str, Callable[..., bool]] = {
    "assert_data_refueling_amount": _assert_data_refueling_amount,
    "assert_line_status": _assert_line_status,
    "assert_overdue_bill_exists": _assert_overdue_bill_exists,
    "assert_no_overdue_bill": _assert_no_overdue_bill,
}

_OWN = load_tools(Path(__file__).with_suffix(".yaml"), sys.modules[__name__])
_LAST = _OWN.pop("refuel_data")
TOOLS = (*_OWN.values(), TRANSFER, _LAST)
"""In the benchmark's order."""
