"""The desk of tau2-bench's telecom: both sides' tools over one database, and what each learns of the other.

After every call, and after every function that sets a task up, the carrier's records and the phone's surroundings are
brought into line (:func:`settle`): whether the line is active and may roam, whether its data is used up, which payment
is asked for, which was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from environments._tau.desk import Functions, OfficialDesk, laid_over, merged
from environments.kit.database import RewardForm, ToolError
from environments.kit.overlay import Base, Overlay
from environments.telecom.official import carrier, phone
from environments.telecom.official.records import TABLES, USER, USER_RECORDS, read_record
from mua.types import Json


class TelecomDesk(OfficialDesk):
    """What all episodes over one folder share."""

    assertions: ClassVar[Functions] = {
        **{("assistant", name): function for name, function in carrier.ASSERTIONS.items()},
        **{("user", name): function for name, function in phone.ASSERTIONS.items()},
    }

    def __init__(self, base: Base, *, reward: RewardForm) -> None:
        super().__init__(base, carrier.TOOLS, phone.TOOLS, reward=reward)
        self.functions = {
            **self.functions,
            **{("assistant", name): function for name, function in carrier.SETUP.items()},
            **{("user", name): function for name, function in phone.SETUP.items()},
        }

    def settle(self, state: Overlay) -> None:
        settle(state)

    def fill(self, state: Overlay, wanted: Json) -> None:
        """``agent_data`` replaces whole lists of records, ``user_data`` fields of the user's two."""
        for table, records in wanted["data"].items():
            if table not in TABLES:
                raise ToolError(f"agent_data: there is no list {table!r}; there are {', '.join(TABLES)}")
            _replace(state, table, records)
        for name, record in wanted.get("user_data", {}).items():
            if name not in USER_RECORDS:
                raise ToolError(f"user_data: there is no {name!r}; there are {', '.join(USER_RECORDS)}")
            mixed = merged(state.get(USER, name), record)
            state.insert(USER, name, _read(f"user_data.{name}", USER_RECORDS[name], mixed))


def settle(state: Overlay) -> None:
    """Bring both sides into line. ToolError where the phone's line or its plan is not among the carrier's."""
    number = phone.around(state)["phone_number"]
    if number is None:
        return
    line = carrier.line_of_phone(state, number)
    plan = carrier.found(state, "plans", line["plan_id"])
    used_up = line["data_used_gb"] >= plan["data_limit_gb"] + line["data_refueling_gb"]
    place = state.edit(USER, phone.SURROUNDINGS)
    place["line_active"] = line["status"] == "Active"
    place["roaming_allowed"] = line["roaming_enabled"]
    place["mobile_data_usage_exceeded"] = used_up
    asked = place["payment_request"]
    if asked is not None and asked["paid"]:
        carrier.found(state, "bills", asked["bill_id"])
        state.edit("bills", asked["bill_id"])["status"] = "Paid"
        place["payment_request"] = None
    if place["payment_request"] is None:
        waiting = carrier.awaiting_payment(state, carrier.get_customer_by_phone(state, number))
        if waiting:
            bill = waiting[0]
            place["payment_request"] = {"bill_id": bill["bill_id"], "amount_due": bill["total_due"], "paid": False}


def base_of_lists(lists: Mapping[str, Any], user: Mapping[str, Any]) -> Base:
    """The tables of ``db.toml`` and ``user_db.toml``; ValueError that says which record is wrong, and where."""
    for given, known in ((lists, TABLES), (user, USER_RECORDS)):
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(known)}")
    tables: dict[str, dict[str, Json]] = {name: {} for name in TABLES}
    for table in TABLES:
        tables[table] = _by_key(table, lists.get(table, []))
    tables[USER] = {name: _valued(name, kind, user.get(name, {})) for name, kind in USER_RECORDS.items()}
    state = Overlay(Base(tables))
    try:
        settle(state)
    except ToolError as error:
        raise ValueError(f"surroundings.phone_number: {error}") from error
    return laid_over(Base(tables), state.changes())


def _by_key(table: str, records: Any) -> dict[str, Json]:
    kind, key = TABLES[table]
    if not isinstance(records, list):
        raise ValueError(f"{table}: must be a list of records")
    found: dict[str, Json] = {}
    for number, record in enumerate(records):
        read = _valued(f"{table}[{number}]", kind, record)
        if read[key] in found:
            raise ValueError(f"{table}[{number}]: another record has the {key} {read[key]!r} too")
        found[read[key]] = read
    return found


def _valued(where: str, kind: Any, record: Any) -> Json:
    try:
        return read_record(kind, record)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _read(where: str, kind: Any, record: Any) -> Json:
    try:
        return _valued(where, kind, record)
    except ValueError as error:
        raise ToolError(str(error)) from error


def _replace(state: Overlay, table: str, records: Any) -> None:
    try:
        wanted = _by_key(table, records)
    except ValueError as error:
        raise ToolError(f"agent_data: {error}") from error
    for key in [key for key, _ in state.items(table)]:
        state.delete(table, key)
    for key, record in wanted.items():
        state.insert(table, key, record)
