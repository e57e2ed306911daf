"""What the phone can do, computed from the carrier's records and the phone's settings together.

::

    service ── line active, registered, SIM ready, not in airplane mode, roaming abroad
       └─ data ── mobile data on, data roaming abroad, APN right, no bar, data left
            ├─ speed ── network mode, plan and device; savers, VPN and used-up data slow it down
            └─ picture messages ── MMS server set, no bar, app permissions, no Wi-Fi calling
"""

from __future__ import annotations

from dataclasses import dataclass

from environments.kit.overlay import Overlay
from environments.telecom.world import APN, PHONE
from mua.types import Json

GOOD_MBPS = 20.0
"""From here on a connection counts as good."""
_MODE_MBPS = {"2G": 0.0, "3G": 4.0, "4G": 60.0, "5G": 180.0}
_BRAKE = 0.1
"""What each of data saver, battery saver and VPN leaves of the speed."""
_CRAWL_MBPS = 0.5
"""Speed of plans that go on when their data is used up."""


@dataclass(frozen=True, slots=True)
class View:
    """The records that the phone's state follows from."""

    phone: Json
    line: Json
    plan: Json
    device: Json
    profile: int

    @classmethod
    def of(cls, database: Overlay) -> View:
        """The user's phone and what stands behind it."""
        phone = _record(database, PHONE, PHONE)
        line = _record(database, "lines", phone["line_id"])
        return cls(
            phone=phone,
            line=line,
            plan=_record(database, "plans", line["plan_id"]),
            device=_record(database, "devices", line["device_id"]),
            profile=_record(database, "network", phone["line_id"])["profile"],
        )

    @property
    def no_service_because(self) -> str | None:
        """What the status bar would show in place of signal bars; None when there is service."""
        phone = self.phone
        if phone["airplane_mode"]:
            return "airplane mode"
        if not phone["sim_seated"]:
            return "no SIM card"
        if phone["sim_locked"]:
            return "SIM locked, PUK needed"
        reachable = self.line["status"] == "active" and phone["profile"] == self.profile
        abroad = phone["abroad"] is not None and not self.line["roaming"]
        return None if reachable and not abroad and self.mode != "2G" else "no service"

    @property
    def mode(self) -> str:
        """The fastest network that phone setting, device and plan allow; 2G is switched off in Vela's networks."""
        chosen = self.phone["network_mode"]
        fast = self.device["supports_5g"] and self.plan["network"] == "5G"
        if chosen == "automatic":
            return "5G" if fast else "4G"
        return str(chosen)

    @property
    def data_left_gb(self) -> float:
        """Of this month; never below 0."""
        line = self.line
        return max(0.0, round(self.plan["data_gb"] + line["data_refuelled_gb"] - line["data_used_gb"], 1))

    @property
    def data(self) -> bool:
        """Whether anything loads over the mobile network, however slowly."""
        phone, line = self.phone, self.line
        allowed = phone["mobile_data"] and (phone["abroad"] is None or phone["data_roaming"])
        left = self.data_left_gb > 0 or self.plan["when_used_up"] == "slow"
        right_apn = phone["apn"]["name"] == APN["name"]
        return bool(self.no_service_because is None and allowed and left and right_apn and "data" not in line["bars"])

    @property
    def mbps(self) -> float:
        """Download speed in megabits a second; 0 without data."""
        if not self.data:
            return 0.0
        brakes = sum(self.phone[name] for name in ("data_saver", "battery_saver", "vpn"))
        speed = _MODE_MBPS[self.mode] * _BRAKE**brakes
        return round(min(speed, _CRAWL_MBPS) if self.data_left_gb == 0 else speed, 2)

    @property
    def picture_messages(self) -> bool:
        """Whether a picture message goes out."""
        phone = self.phone
        app = phone["messages_app"]
        server = phone["apn"]["mms_server"] == APN["mms_server"]
        open_way = not phone["wifi_calling"] and "mms" not in self.line["bars"]
        return self.data and server and open_way and app["sms"] and app["storage"]


def _record(database: Overlay, table: str, key: str) -> Json:
    record = database.get(table, key)
    assert record is not None, f"tasks name existing records: {table}/{key}"
    return record


ASSERTIONS = {
    "service": lambda view: view.no_service_because is None,
    "data": lambda view: view.data,
    "good_speed": lambda view: view.mbps >= GOOD_MBPS,
    "picture_messages": lambda view: view.picture_messages,
    "nothing_erased": lambda view: view.phone["photos_and_apps"] == "kept",
}
"""What a task may require of the final state, by name: functions of a :class:`View`."""
