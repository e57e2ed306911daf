"""The user's side of tau2-bench's telecom: the tools of the phone, and the functions that only tasks name.

What the phone shows of the network is found anew by :func:`search_network` wherever the benchmark does so, and stays
as it is otherwise; several of the benchmark's faults depend on that. Names, arguments and effects are the benchmark's;
what the screen says is in words of our own, with the benchmark's values in it.

One effect is left out: the benchmark's ``break_vpn`` spoils the settings that every later ``connect_vpn`` of the same
process connects with; here they are a new connection's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from environments.kit.database import ToolError, load_tools
from environments.kit.overlay import Overlay
from environments.telecom.official.records import USER, Apn, Vpn, read_record
from mua.types import Json

DEVICE, SURROUNDINGS = "device", "surroundings"
MODES = {"4g_5g_preferred": "5G", "4g_only": "4G", "3g_only": "3G", "2g_only": "2G"}
"""Network modes, and the technology that each connects with."""
_MBPS = {"none": 0.0, "2G": 0.25, "3G": 3.0, "4G": 55.0, "5G": 275.0}
"""The middle of the range of each technology."""
_SIGNAL = {"none": 0.0, "poor": 0.2, "fair": 0.5, "good": 0.8, "excellent": 1.0}
_GRADES = ((1.0, "Very Poor"), (5.0, "Poor"), (25.0, "Fair"), (100.0, "Good"))
_SLOW_VPN, _DATA_SAVER = 0.1, 0.2
"""What each leaves of the speed."""


def around(database: Overlay) -> Json:
    """Where the user is, and what the carrier lets the phone do; to read."""
    return _record(database, SURROUNDINGS)


def _phone(database: Overlay) -> Json:
    return _record(database, DEVICE)


def _record(database: Overlay, key: str) -> Json:
    record = database.get(USER, key)
    assert record is not None, "both records are there from the start"
    return record


def _edit(database: Overlay) -> Json:
    return database.edit(USER, DEVICE)


# ---- what follows from the state


def search_network(database: Overlay) -> str:
    """Connect anew, or find that there is nothing to connect to."""
    phone, place = _edit(database), around(database)
    off = phone["airplane_mode"] or phone["active_apn_settings"]["apn_name"] == "broken" or not place["line_active"]
    if off or sim_status(phone) != "active":
        _connected(phone, "no_service", "none", "none")
        return "no service"
    technology = MODES[phone["network_mode_preference"]]
    if technology == "5G" and place["signal_strength"].get("5G", "none") == "none":
        technology = "4G"
    _connected(phone, "connected", technology, place["signal_strength"].get(technology, "none"))
    return "connected"


def _connected(phone: Json, status: str, technology: str, signal: str) -> None:
    phone["network_connection_status"] = status
    phone["network_technology_connected"] = technology
    phone["network_signal_strength"] = signal


def sim_status(phone: Json) -> str:
    """ "missing", or whether the card that is there works."""
    return "missing" if phone["sim_card_missing"] else str(phone["sim_card_status"])


def data_works(database: Overlay) -> bool:
    """Whether anything loads over the mobile network."""
    phone, place = _phone(database), around(database)
    reached = not phone["airplane_mode"] and phone["network_signal_strength"] != "none"
    served = reached and phone["network_connection_status"] != "no_service"
    allowed = not place["is_abroad"] or (phone["roaming_enabled"] and place["roaming_allowed"])
    return bool(served and allowed and phone["data_enabled"] and not place["mobile_data_usage_exceeded"])


def speed(database: Overlay) -> tuple[float, str] | None:
    """Megabits a second and what that is called; None without data."""
    if not data_works(database):
        return None
    phone = _phone(database)
    vpn = phone["vpn_details"] if phone["vpn_connected"] else None
    factor = _SLOW_VPN if vpn and vpn["server_performance"] == "poor" else 1.0
    factor *= _DATA_SAVER if phone["data_saver_mode"] else 1.0
    base = _MBPS[phone["network_technology_connected"]]
    mbps = round(base * _SIGNAL[phone["network_signal_strength"]] * factor, 2)
    return mbps, next((grade for limit, grade in _GRADES if mbps < limit), "Excellent")


def mms_works(database: Overlay) -> bool:
    """Whether a picture message goes out."""
    phone = _phone(database)
    over_wifi = phone["wifi_calling_enabled"] and phone["wifi_calling_mms_over_wifi"]
    app = phone["app_statuses"].get("messaging")
    allowed = app is not None and app["permissions"]["storage"] and app["permissions"]["sms"]
    fast = phone["network_technology_connected"] != "2G"
    ready = data_works(database) and fast and not over_wifi
    return bool(ready and allowed and phone["active_apn_settings"]["mmsc_url"] is not None)


def _bar(database: Overlay) -> str:
    return f"Status bar: {' | '.join(_icons(_phone(database)))}"


def _icons(phone: Json) -> Iterator[str]:
    technology = phone["network_technology_connected"]
    if phone["airplane_mode"]:
        yield "airplane mode"
    else:
        signal = phone["network_signal_strength"]
        yield "no signal" if signal == "none" else f"signal {signal}"
        yield from [technology] if technology != "none" else []
        data = phone["data_enabled"] and technology != "none"
        yield "data enabled" if data else "data disabled"
        yield from ["data saver"] if data and phone["data_saver_mode"] else []
    if phone["wifi_enabled"] and phone["wifi_connected"]:
        yield f"Wi-Fi {phone['wifi_ssid'] or 'connected'}"
    yield from ["VPN connected"] if phone["vpn_connected"] else []
    yield f"battery {phone['battery_level']}%"


# ---- looking


def check_status_bar(database: Overlay) -> str:
    return _bar(database)


def check_network_status(database: Overlay) -> str:
    phone = _phone(database)
    lines = {
        "Airplane mode": _on(phone["airplane_mode"]),
        "SIM card": sim_status(phone),
        "Cellular connection": phone["network_connection_status"],
        "Cellular signal": phone["network_signal_strength"],
        "Network type": phone["network_technology_connected"],
        "Mobile data": _on(phone["data_enabled"]),
        "Data roaming": _on(phone["roaming_enabled"]),
        "Wi-Fi": _on(phone["wifi_enabled"]),
        "Wi-Fi connected": phone["wifi_ssid"] or "yes" if phone["wifi_connected"] else "no",
    }
    return "\n".join(f"{name}: {value}" for name, value in lines.items())


def _on(value: bool) -> str:
    return "ON" if value else "OFF"


def check_network_mode_preference(database: Overlay) -> str:
    return f"Network mode: {_phone(database)['network_mode_preference']}"


def run_speed_test(database: Overlay) -> str:
    found = speed(database)
    return f"Speed test: {found[0]:.2f} Mbps ({found[1]})" if found else "Speed test failed: no connection"


_SIM = {
    "active": "The SIM card is active and works.",
    "missing": "No SIM card is detected.",
    "locked_pin": "The SIM card is locked and asks for a PIN code.",
    "locked_puk": "The SIM card is locked and asks for a PUK code.",
}


def check_sim_status(database: Overlay) -> str:
    return _SIM[sim_status(_phone(database))]


def check_data_restriction_status(database: Overlay) -> str:
    return f"Data Saver is {_on(_phone(database)['data_saver_mode'])}."


def check_apn_settings(database: Overlay) -> str:
    apn = _phone(database)["active_apn_settings"]
    return f"APN name: {apn['apn_name']}\nMMSC URL, for picture messages: {apn['mmsc_url'] or 'not set'}"


def check_wifi_status(database: Overlay) -> str:
    phone = _phone(database)
    if not phone["wifi_enabled"] or not phone["wifi_connected"]:
        return f"Wi-Fi is {_on(phone['wifi_enabled'])} and connected to no network."
    return f"Wi-Fi is ON, connected to {phone['wifi_ssid']}; its signal is {phone['wifi_signal_strength']}."


def check_wifi_calling_status(database: Overlay) -> str:
    return f"Wi-Fi Calling is {_on(_phone(database)['wifi_calling_enabled'])}."


def check_vpn_status(database: Overlay) -> str:
    phone = _phone(database)
    if not phone["vpn_connected"]:
        return f"The VPN is {'set up but not connected' if phone['vpn_enabled_setting'] else 'OFF'}."
    details = phone["vpn_details"]
    return "The VPN is connected" + (f": {details}" if details else ".")


def check_installed_apps(database: Overlay) -> str:
    return f"Apps on the phone: {', '.join(_phone(database)['app_statuses'])}"


def check_app_status(database: Overlay, app_name: str) -> str:
    app = _phone(database)["app_statuses"].get(app_name)
    if app is None:
        return f"There is no app {app_name!r} on this phone."
    allowed = [name for name, given in app["permissions"].items() if given]
    return f"The app {app_name} may use: {', '.join(allowed) or 'nothing'}."


def can_send_mms(database: Overlay) -> str:
    return f"Picture messages {'can' if mms_works(database) else 'cannot'} be sent."


def check_payment_request(database: Overlay) -> str:
    asked = around(database)["payment_request"]
    if asked is None:
        return "Nobody asks for a payment."
    return f"You are asked to pay bill {asked['bill_id']}: {asked['amount_due']} USD."


# ---- changing


def set_network_mode_preference(database: Overlay, mode: str) -> str:
    if mode not in MODES:
        return f"There is no network mode {mode!r}; there are {', '.join(MODES)}.\n{_bar(database)}"
    _edit(database)["network_mode_preference"] = mode
    search_network(database)
    return f"The network mode is {mode} now.\n{_bar(database)}"


def _toggle_airplane(database: Overlay) -> bool:
    phone = _edit(database)
    phone["airplane_mode"] = on = not phone["airplane_mode"]
    if on or phone["wifi_enabled"]:
        phone.update(wifi_connected=False, wifi_ssid=None, wifi_signal_strength="none")
    if on:
        _drop_vpn(phone)
    search_network(database)
    return on


def _drop_vpn(phone: Json) -> bool:
    """Whether there was a connection to end."""
    if connected := bool(phone["vpn_connected"]):
        phone.update(vpn_connected=False, vpn_details=None)
    return connected


def _toggle(field: str, *, search: bool) -> Callable[[Overlay], bool]:
    def toggle(database: Overlay) -> bool:
        phone = _edit(database)
        phone[field] = on = not phone[field]
        if search:
            search_network(database)
        return on

    return toggle


_toggle_data = _toggle("data_enabled", search=True)
_toggle_roaming = _toggle("roaming_enabled", search=True)
_toggle_saver = _toggle("data_saver_mode", search=False)
_toggle_wifi_calling = _toggle("wifi_calling_enabled", search=False)


def _said(name: str, toggle: Callable[[Overlay], bool]) -> Callable[[Overlay], str]:
    """The tool that toggles and says what is now."""

    def run(database: Overlay) -> str:
        return f"{name} is {_on(toggle(database))} now.\n{_bar(database)}"

    return run


def _until(toggle: Callable[[Overlay], bool], wanted: bool) -> Callable[[Overlay], str]:
    """Toggle once, and again where that was the wrong way: what is lost on the way stays lost, as in the benchmark."""

    def run(database: Overlay) -> str:
        if toggle(database) is not wanted:
            toggle(database)
        return _on(wanted)

    return run


def reseat_sim_card(database: Overlay) -> str:
    _edit(database)["sim_card_missing"] = False
    search_network(database)
    return f"The SIM card was taken out and put back.\n{_bar(database)}"


def set_apn_settings(database: Overlay, apn_settings: Json) -> str:
    try:
        settings = read_record(Apn, apn_settings)
    except ValueError as error:
        raise ToolError(f"these are no APN settings: {error}") from error
    _edit(database)["active_apn_settings"] = settings
    search_network(database)
    return f"The APN is {settings['apn_name']} now.\n{_bar(database)}"


def reset_apn_settings(database: Overlay) -> str:
    _edit(database)["active_apn_settings"]["reset_at_reboot"] = True
    search_network(database)
    return f"The APN settings will be reset when the phone restarts.\n{_bar(database)}"


def toggle_wifi(database: Overlay) -> str:
    phone = _edit(database)
    if phone["airplane_mode"]:
        return f"Wi-Fi cannot be changed in airplane mode.\n{_bar(database)}"
    phone["wifi_enabled"] = on = not phone["wifi_enabled"]
    if not on:
        phone.update(wifi_connected=False, wifi_ssid=None, wifi_signal_strength="none")
    return f"Wi-Fi is {_on(on)} now.\n{_bar(database)}"


def connect_vpn(database: Overlay) -> str:
    phone = _edit(database)
    if phone["vpn_connected"]:
        return "The VPN is connected already."
    good = Vpn(server_address="192.168.1.1", protocol="OpenVPN", server_performance="excellent")
    phone.update(vpn_connected=True, vpn_details=good.model_dump())
    return f"The VPN is connected.\n{_bar(database)}"


def disconnect_vpn(database: Overlay) -> str:
    ended = _drop_vpn(_edit(database))
    return f"{'The VPN is disconnected.' if ended else 'No VPN was connected.'}\n{_bar(database)}"


def grant_app_permission(database: Overlay, app_name: str, permission: str) -> str:
    app, wanted = _edit(database)["app_statuses"].get(app_name), permission.lower()
    if app is None:
        return f"There is no app {app_name!r} to allow anything.\n{_bar(database)}"
    if wanted not in app["permissions"]:
        return f"An app can be allowed {', '.join(app['permissions'])}, not {wanted!r}.\n{_bar(database)}"
    app["permissions"][wanted] = True
    return f"The app {app_name} may use {wanted} now.\n{_bar(database)}"


def reboot_device(database: Overlay) -> str:
    phone = _edit(database)
    reset = phone["active_apn_settings"]["reset_at_reboot"]
    if reset:
        phone["active_apn_settings"] = Apn().model_dump()
    search_network(database)
    return f"The phone has restarted{', with its APN settings reset' if reset else ''}.\n{_bar(database)}"


def make_payment(database: Overlay) -> str:
    if around(database)["payment_request"] is None:
        return "Nobody asks for a payment."
    asked = database.edit(USER, SURROUNDINGS)["payment_request"]
    asked["paid"] = True
    return f"Bill {asked['bill_id']} is paid: {asked['amount_due']} USD."


# ---- functions that no side can call: the faults that tasks begin with, and what they assert


def _set_user_info(database: Overlay, name: str, phone_number: str) -> str:
    database.edit(USER, SURROUNDINGS).update(name=name, phone_number=phone_number)
    return "set"


def _set_user_location(database: Overlay, abroad: bool) -> str:
    database.edit(USER, SURROUNDINGS)["is_abroad"] = abroad
    return "set"


def _turn_data_on(database: Overlay) -> str:
    _edit(database)["data_enabled"] = True
    return "ON"


def _unseat_sim(database: Overlay) -> str:
    _edit(database)["sim_card_missing"] = True
    return search_network(database)


def _lock_sim(database: Overlay, mode: str) -> str:
    if mode not in ("pin", "puk"):
        raise ToolError(f"a SIM card asks for a pin or a puk, not for {mode!r}")
    _edit(database)["sim_card_status"] = f"locked_{mode}"
    return search_network(database)


def _break_apn(database: Overlay) -> str:
    _edit(database)["active_apn_settings"]["apn_name"] = "broken"
    return search_network(database)


def _break_apn_mms(database: Overlay) -> str:
    _edit(database)["active_apn_settings"]["mmsc_url"] = None
    return "broken"


def _set_wifi_calling(database: Overlay, enabled: bool, mms_over_wifi: bool | None = None) -> str:
    phone = _edit(database)
    phone["wifi_calling_enabled"] = enabled
    if mms_over_wifi is not None:
        phone["wifi_calling_mms_over_wifi"] = mms_over_wifi
    return _on(enabled)


def _break_vpn(database: Overlay) -> str:
    connect_vpn(database)
    details = _edit(database)["vpn_details"]
    if details is None:
        raise ToolError("the VPN's connection has no details to spoil")
    details["server_performance"] = "poor"
    return "slow"


def _remove_permission(database: Overlay, app_name: str, permission: str) -> str:
    app = _edit(database)["app_statuses"].get(app_name)
    if app is None or permission.lower() not in app["permissions"]:
        raise ToolError(f"there is no permission {permission!r} of an app {app_name!r} to take away")
    app["permissions"][permission.lower()] = False
    return "removed"


SETUP: dict[str, Callable[..., Any]] = {
    "set_user_info": _set_user_info,
    "set_user_location": _set_user_location,
    "simulate_network_search": search_network,
    "turn_airplane_mode_on": _until(_toggle_airplane, True),
    "turn_airplane_mode_off": _until(_toggle_airplane, False),
    "turn_data_on": _turn_data_on,
    "turn_data_off": _until(_toggle_data, False),
    "turn_roaming_on": _until(_toggle_roaming, True),
    "turn_roaming_off": _until(_toggle_roaming, False),
    "turn_data_saver_mode_on": _until(_toggle_saver, True),
    "turn_data_saver_mode_off": _until(_toggle_saver, False),
    "unseat_sim_card": _unseat_sim,
    "lock_sim_card": _lock_sim,
    "break_apn_settings": _break_apn,
    "break_apn_mms_setting": _break_apn_mms,
    "set_wifi_calling": _set_wifi_calling,
    "break_vpn": _break_vpn,
    "remove_app_permission": _remove_permission,
}


def _is(field: str) -> Callable[[Overlay, bool], bool]:
    def check(database: Overlay, expected_status: bool) -> bool:
        return bool(_phone(database)[field] == expected_status)

    return check


def _assert_internet_speed(database: Overlay, expected_speed: float, expected_desc: str | None = None) -> bool:
    mbps, grade = speed(database) or (0.0, "No Connection")
    return mbps >= expected_speed and (expected_desc is None or grade.lower() == expected_desc.lower())


def _assert_service_status(database: Overlay, expected_status: str) -> bool:
    return bool(_phone(database)["network_connection_status"] == expected_status)


def _assert_data_status(database: Overlay, expected_status: bool) -> bool:
    return data_works(database) == expected_status


def _assert_not_excellent(database: Overlay) -> bool:
    return (speed(database) or (0.0, "No Connection"))[1] != "Excellent"


def _assert_can_send_mms(database: Overlay, expected_status: bool) -> bool:
    return mms_works(database) == expected_status


def _assert_usage_exceeded(database: Overlay, expected_status: bool) -> bool:
    return bool(around(database)["mobile_data_usage_exceeded"] == expected_status)


ASSERTIONS: dict[str, Callable[..., bool]] = {
    "assert_airplane_mode_status": _is("airplane_mode"),
    "assert_service_status": _assert_service_status,
    "assert_mobile_data_status": _assert_data_status,
    "assert_mobile_roaming_status": _is("roaming_enabled"),
    "assert_mobile_data_saver_mode_status": _is("data_saver_mode"),
    "assert_internet_speed": _assert_internet_speed,
    "assert_internet_not_excellent": _assert_not_excellent,
    "assert_can_send_mms": _assert_can_send_mms,
    "assert_mobile_data_usage_exceeded": _assert_usage_exceeded,
}


toggle_airplane_mode = _said("Airplane mode", _toggle_airplane)
toggle_data = _said("Mobile data", _toggle_data)
toggle_roaming = _said("Data roaming", _toggle_roaming)
toggle_data_saver_mode = _said("Data Saver", _toggle_saver)
toggle_wifi_calling = _said("Wi-Fi Calling", _toggle_wifi_calling)
check_app_permissions = check_app_status
TOOLS = tuple(load_tools(Path(__file__).with_suffix(".yaml"), sys.modules[__name__], MODES=MODES).values())
"""In the benchmark's order."""
