"""The user's tools: what a person can look at and change on the phone, and paying a bill that was asked for.

Answers are what the screen shows, in words. Looking changes nothing; a speed test leaves no trace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from environments.kit.database import Tool, ToolError, load_tools
from environments.kit.overlay import Overlay
from environments.telecom.world import APN, GOOD_MBPS, PHONE, View, healthy_phone
from mua.types import Json, ToolSchema

SWITCHES = {
    "airplane_mode": "airplane mode",
    "mobile_data": "mobile data",
    "data_roaming": "data roaming",
    "data_saver": "data saver",
    "battery_saver": "battery saver",
    "vpn": "VPN",
    "wifi": "Wi-Fi",
    "wifi_calling": "Wi-Fi calling",
}
"""Settings that are on or off: field of the phone and its name on the screen."""
MODES = ("automatic", "4G", "3G", "2G")
_FAULTLESS = ("data_saver", "battery_saver", "vpn", "wifi_calling")


def _phone(database: Overlay) -> Json:
    return database.edit(PHONE, PHONE)


def _look(database: Overlay) -> Json:
    record = database.get(PHONE, PHONE)
    assert record is not None
    return record


def _register(database: Overlay) -> None:
    """The phone loads the network's current profile, if it can reach the network at all."""
    phone = _phone(database)
    network = database.get("network", phone["line_id"])
    if network is not None and phone["sim_seated"] and not phone["airplane_mode"]:
        phone["profile"] = network["profile"]


def check_status_bar(database: Overlay) -> str:
    view = View.of(database)
    if view.no_service_because is not None:
        return view.no_service_because
    icons = ["4 bars", view.mode, "Vela"]
    icons += ["roaming"] if view.phone["abroad"] else []
    icons += ["data arrows"] if view.data else ["no data arrows"]
    icons += [SWITCHES[name] for name in _FAULTLESS if view.phone[name]]
    return ", ".join(icons)


def _checker(field: str) -> Callable[..., str]:
    def check(database: Overlay) -> str:
        return f"{SWITCHES[field]} is {'on' if _look(database)[field] else 'off'}"

    return check


def _switch(field: str) -> Callable[..., str]:
    def switch(database: Overlay, on: bool) -> str:
        _phone(database)[field] = on
        if field == "airplane_mode" and not on:
            _register(database)
        return f"{SWITCHES[field]} is {'on' if on else 'off'} now"

    return switch


def check_sim(database: Overlay) -> str:
    phone = _look(database)
    if not phone["sim_seated"]:
        return "the SIM card is not detected"
    return "the SIM card is locked and asks for the PUK" if phone["sim_locked"] else "the SIM card is in and ready"


def reseat_sim(database: Overlay) -> str:
    _phone(database)["sim_seated"] = True
    _register(database)
    return check_sim(database)


def enter_puk(database: Overlay, code: str) -> str:
    phone = _look(database)
    if not phone["sim_locked"] or not phone["sim_seated"]:
        raise ToolError("the phone asks for no PUK")
    line = database.get("lines", phone["line_id"])
    if line is None or line["puk"] != code:
        raise ToolError("the phone says: wrong PUK")
    _phone(database)["sim_locked"] = False
    return "the SIM card is unlocked"


def check_network_mode(database: Overlay) -> str:
    return f"the network mode is {_look(database)['network_mode']}"


def set_network_mode(database: Overlay, mode: str) -> str:
    _phone(database)["network_mode"] = mode
    return f"the network mode is {mode} now"


def check_apn(database: Overlay) -> str:
    phone = _look(database)
    shown = phone["apn_after_restart"] or phone["apn"]
    waiting = ", in force after a restart" if phone["apn_after_restart"] else ""
    return f"the APN is {shown['name']} and the MMS server is {shown['mms_server'] or 'empty'}{waiting}"


def reset_apn(database: Overlay) -> str:
    _phone(database)["apn_after_restart"] = dict(APN)
    return "the APN is back to Vela's settings, in force after a restart"


def restart_phone(database: Overlay) -> str:
    phone = _phone(database)
    if phone["apn_after_restart"] is not None:
        phone["apn"], phone["apn_after_restart"] = phone["apn_after_restart"], None
    _register(database)
    return "the phone has restarted"


def check_app_permissions(database: Overlay) -> str:
    app = _look(database)["messages_app"]
    return "the messages app may use: " + ", ".join(f"{name} {'yes' if app[name] else 'no'}" for name in app)


def grant_permission(database: Overlay, permission: str) -> str:
    _phone(database)["messages_app"][permission] = True
    return f"the messages app may use {permission} now"


def run_speed_test(database: Overlay) -> str:
    mbps = View.of(database).mbps
    if mbps == 0:
        return "speed test failed, no connection"
    return f"speed test shows {mbps:g} Mbps, {'good' if mbps >= GOOD_MBPS else 'poor'}"


def send_picture_message(database: Overlay) -> str:
    return "the picture message was sent" if View.of(database).picture_messages else "the picture message was not sent"


def _requests(database: Overlay) -> list[Json]:
    """Bills whose payment was asked for, of the customer whose phone this is."""
    line = database.get("lines", _look(database)["line_id"])
    customer = database.get("customers", line["customer_id"]) if line else None
    bills = [database.get("bills", bill_id) for bill_id in customer["bill_ids"]] if customer else []
    return [bill for bill in bills if bill is not None and bill["status"] == "requested"]


def check_payment_requests(database: Overlay) -> str:
    asked = _requests(database)
    if not asked:
        return "there is no payment request"
    return "payment request: " + ", ".join(f"bill {bill['bill_id']}, {bill['total']:.2f}" for bill in asked)


def pay_bill(database: Overlay, bill_id: str) -> str:
    if bill_id not in [bill["bill_id"] for bill in _requests(database)]:
        raise ToolError(f"there is no payment request for bill {bill_id}")
    database.edit("bills", bill_id)["status"] = "paid"
    return f"bill {bill_id} is paid"


def factory_reset(database: Overlay) -> str:
    phone = _look(database)
    kept = {key: phone[key] for key in ("line_id", "abroad", "sim_seated", "sim_locked")}
    database.insert(PHONE, PHONE, {**healthy_phone(""), **kept, "photos_and_apps": "erased"})
    _register(database)
    return "the phone is as new; photos and apps are gone"


def _tools() -> Iterator[Tool]:
    own = load_tools(Path(__file__).with_suffix(".yaml"), sys.modules[__name__])
    yield own.pop("check_status_bar")
    on = {"on": {"type": "boolean", "description": "true for on, false for off"}}
    for field, name in SWITCHES.items():
        yield Tool(_schema(f"check_{field}", f"See whether {name} is on.", {}), _checker(field))
        yield Tool(_schema(f"set_{field}", f"Switch {name} on or off.", on), _switch(field))
    yield from own.values()


def _schema(name: str, description: str, properties: Json) -> ToolSchema:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return ToolSchema(name, description, parameters | {"additionalProperties": False})


TOOLS = tuple(_tools())
