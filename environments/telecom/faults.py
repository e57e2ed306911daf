"""What can be wrong with a line or a phone, and what mends it.

A fault sets records before the episode (:attr:`Fault.apply`) and names the gold actions against it; who takes them is
part of an action (``"requestor": "user"``). Several faults of one task share a single restart at the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from environments.kit.overlay import Changes, copied
from environments.telecom.world import COUNTRIES, PHONE, PLANS, base, bill, healthy_phone
from mua.types import Json

Side = Literal["phone", "carrier", "both"]
Symptom = Literal["no_service", "no_data", "slow_data", "no_mms"]


@dataclass
class Scene:
    """One customer's records while a task is made of them."""

    rng: random.Random
    turn: int
    """Counts tasks of one recipe, for what is to occur in equal parts."""
    customer: Json
    line: Json
    phone: Json
    network: Json
    bills: list[Json]
    device: Json
    wants: Json = field(default_factory=dict)
    """What the user would answer: gigabytes to add, whether it pays, changes the plan."""

    @classmethod
    def of(cls, seed: int, number: int, turn: int) -> Scene:
        """Customer ``number`` of the base, with the first line and a healthy phone for it."""
        tables = base().tables
        customer = copied(tables["customers"][f"C{10_000 + number}"])
        line = copied(tables["lines"][customer["line_ids"][0]])
        return cls(
            random.Random(f"telecom/{seed}"),
            turn,
            customer,
            line,
            healthy_phone(line["line_id"]),
            copied(tables["network"][line["line_id"]]),
            [copied(tables["bills"][key]) for key in customer["bill_ids"]],
            copied(tables["devices"][line["device_id"]]),
        )

    @property
    def line_id(self) -> str:
        return str(self.line["line_id"])

    def set_plan(self, plan_ids: Sequence[str]) -> Json:
        """Put the line on one of these plans unless it has one; its bills and data used follow."""
        if self.line["plan_id"] not in plan_ids:
            old, new = self.line["plan_id"], self.rng.choice(list(plan_ids))
            self.line["plan_id"] = new
            self.line["data_used_gb"] = round(PLANS[new]["data_gb"] * 0.5, 1)
            for number, record in enumerate(self.bills):
                self.bills[number] = _with_plan(record, old, new)
        return PLANS[self.line["plan_id"]]

    def go_abroad(self) -> None:
        self.phone["abroad"] = self.phone["abroad"] or self.rng.choice(COUNTRIES)

    def initial(self) -> Changes:
        """The records that differ from the base."""
        records = [
            ("customers", self.customer["customer_id"], self.customer),
            ("lines", self.line_id, self.line),
            ("network", self.line_id, self.network),
            (PHONE, PHONE, self.phone),
            *(("bills", record["bill_id"], record) for record in self.bills),
        ]
        found: Changes = {}
        for table, key, record in records:
            if base().tables[table].get(key) != record:
                found.setdefault(table, {})[key] = record
        return found


def _with_plan(record: Json, old: str, new: str) -> Json:
    """The bill with the first charge for ``old`` replaced; a second line may have the same plan."""
    charges = copied(record["charges"])
    at = [charge["for"] for charge in charges].index(f"{old} plan")
    charges[at] = {"for": f"{new} plan", "amount": PLANS[new]["monthly_price"]}
    return bill(record["bill_id"], record["customer_id"], record["month"], charges, record["status"])


def carrier(name: str, /, **arguments: Any) -> Json:
    """A gold action of the agent."""
    return {"name": name, "arguments": arguments}


def user(name: str, /, **arguments: Any) -> Json:
    """A gold action of the user."""
    return {"requestor": "user", "name": name, "arguments": arguments}


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    name: str
    causes: Symptom
    side: Side
    apply: Callable[[Scene], None]
    mend: Callable[[Scene], list[Json]]
    restart: bool = False
    """Whether mending it only shows after the phone has registered anew or restarted."""
    excludes: frozenset[str] = frozenset()
    """Faults that make no sense together with it."""


def _set(**fields: Any) -> Callable[[Scene], None]:
    return lambda scene: scene.phone.update(fields)


def _switched(setting: str, on: bool) -> Callable[[Scene], list[Json]]:
    return lambda scene: [user(f"set_{setting}", on=on)]


def _suspended(reason: str) -> Callable[[Scene], None]:
    def apply(scene: Scene) -> None:
        scene.line.update(status="suspended", suspension=reason)

    return apply


def _resume(scene: Scene) -> list[Json]:
    return [carrier("resume_line", line_id=scene.line_id)]


def _unpaid(scene: Scene) -> None:
    _suspended("unpaid bill")(scene)
    scene.bills[1]["status"] = "overdue"
    scene.wants["pay"] = True


def _pay_and_resume(scene: Scene) -> list[Json]:
    bill_id = scene.bills[1]["bill_id"]
    return [carrier("send_payment_request", bill_id=bill_id), user("pay_bill", bill_id=bill_id), *_resume(scene)]


def _roaming_off(scene: Scene) -> None:
    scene.go_abroad()
    scene.set_plan([plan for plan in PLANS if PLANS[plan]["roaming_included"]])
    scene.phone["data_roaming"] = True


def _not_roaming_on_phone(scene: Scene) -> None:
    scene.go_abroad()
    if scene.line["plan_id"] not in ROAMING_PLANS:
        scene.set_plan(ROAMING_PLANS)
    scene.line["roaming"] = True
    scene.phone["data_roaming"] = False


def _used_up(stop: bool) -> Callable[[Scene], None]:
    """The month's data is gone. Plans with 20 GB or more add data at another price."""

    def apply(scene: Scene) -> None:
        kinds = [plan for plan in PLANS if (PLANS[plan]["when_used_up"] == "stop") == stop]
        plan = scene.set_plan([name for name in kinds if not scene.phone["abroad"] or name in ROAMING_PLANS])
        scene.line["data_used_gb"] = round(plan["data_gb"] + scene.rng.choice((0.1, 0.2, 0.3)), 1)
        scene.wants["gb"] = scene.rng.randint(1, 6)

    return apply


def _refuel(scene: Scene) -> list[Json]:
    return [carrier("refuel_data", line_id=scene.line_id, gb=scene.wants["gb"])]


def _barred(bar: str, by: str = "customer") -> Callable[[Scene], None]:
    return lambda scene: scene.line["bars"].update({bar: by})


def _lift(bar: str) -> Callable[[Scene], list[Json]]:
    return lambda scene: [carrier("set_bar", line_id=scene.line_id, bar=bar, on=False)]


def _wrong_apn(name: str | None, server: str | None) -> Callable[[Scene], None]:
    def apply(scene: Scene) -> None:
        apn = scene.phone["apn"]
        scene.phone["apn"] = {
            "name": apn["name"] if name is None else name,
            "mms_server": apn["mms_server"] if server is None else server,
        }

    return apply


def _not_granted(permission: str) -> Callable[[Scene], None]:
    return lambda scene: scene.phone["messages_app"].update({permission: False})


def _grant(permission: str) -> Callable[[Scene], list[Json]]:
    return lambda scene: [user("grant_permission", permission=permission)]


ROAMING_PLANS = [plan for plan in PLANS if PLANS[plan]["roaming_included"]]
_SUSPENSIONS = frozenset({"unpaid", "paused", "reported_lost"})
_ABROAD = frozenset({"roaming_at_carrier", "roaming_on_phone"})
_USED = frozenset({"used_up", "used_up_slow"})


def _mode(mode: str) -> tuple[Callable[[Scene], None], Callable[[Scene], list[Json]]]:
    return _set(network_mode=mode), lambda scene: [user("set_network_mode", mode="automatic")]


FAULTS: tuple[Fault, ...] = (
    Fault("airplane", "no_service", "phone", _set(airplane_mode=True), _switched("airplane_mode", False)),
    Fault("sim_loose", "no_service", "phone", _set(sim_seated=False), lambda scene: [user("reseat_sim")]),
    Fault(
        "sim_locked", "no_service", "both", _set(sim_locked=True),
        lambda scene: [user("enter_puk", code=scene.line["puk"])], excludes=frozenset({"sim_loose"}),
    ),
    Fault("mode_2g", "no_service", "phone", *_mode("2G"), excludes=frozenset({"mode_3g"})),
    Fault(
        "old_profile", "no_service", "phone", lambda scene: scene.network.update({"profile": 2}), lambda scene: [],
        restart=True,
    ),
    Fault("unpaid", "no_service", "both", _unpaid, _pay_and_resume, restart=True, excludes=_SUSPENSIONS),
    Fault("paused", "no_service", "both", _suspended("customer request"), _resume, restart=True, excludes=_SUSPENSIONS),
    Fault(
        "reported_lost", "no_service", "both", _suspended("reported lost"), _resume, restart=True,
        excludes=_SUSPENSIONS,
    ),
    Fault(
        "roaming_at_carrier", "no_service", "carrier", _roaming_off,
        lambda scene: [carrier("set_roaming", line_id=scene.line_id, on=True)], excludes=_ABROAD,
    ),
    Fault("mobile_data", "no_data", "phone", _set(mobile_data=False), _switched("mobile_data", True)),
    Fault(
        "roaming_on_phone", "no_data", "phone", _not_roaming_on_phone, _switched("data_roaming", True),
        excludes=_ABROAD,
    ),
    Fault(
        "apn", "no_data", "phone", _wrong_apn("internet.old", None), lambda scene: [user("reset_apn")], restart=True,
    ),
    Fault("data_bar", "no_data", "carrier", _barred("data"), _lift("data")),
    Fault("used_up", "no_data", "carrier", _used_up(True), _refuel, excludes=_USED),
    Fault("data_saver", "slow_data", "phone", _set(data_saver=True), _switched("data_saver", False)),
    Fault("battery_saver", "slow_data", "phone", _set(battery_saver=True), _switched("battery_saver", False)),
    Fault("vpn", "slow_data", "phone", _set(vpn=True), _switched("vpn", False)),
    Fault("mode_3g", "slow_data", "phone", *_mode("3G"), excludes=frozenset({"mode_2g"})),
    Fault("used_up_slow", "slow_data", "carrier", _used_up(False), _refuel, excludes=_USED),
    Fault(
        "mms_server", "no_mms", "phone", _wrong_apn(None, ""), lambda scene: [user("reset_apn")], restart=True,
    ),
    Fault("wifi_calling", "no_mms", "phone", _set(wifi_calling=True), _switched("wifi_calling", False)),
    Fault("sms_permission", "no_mms", "phone", _not_granted("sms"), _grant("sms")),
    Fault("storage_permission", "no_mms", "phone", _not_granted("storage"), _grant("storage")),
    Fault("mms_bar", "no_mms", "carrier", _barred("mms"), _lift("mms")),
)  # fmt: skip
WHICH: dict[Symptom, tuple[Symptom, ...]] = {
    "no_service": ("no_service",),
    "no_data": ("no_data", "no_service"),
    "slow_data": ("slow_data",),
    "no_mms": ("no_mms", "no_data", "no_service"),
}
"""Of which kinds the faults behind a complaint can be; the first kind is always among them."""
SOLVED = {"no_service": "service", "no_data": "data", "slow_data": "good_speed", "no_mms": "picture_messages"}
"""The assertion that a complaint is over."""


def draw(rng: random.Random, symptom: Symptom, count: int, turn: int) -> list[Fault]:
    """``count`` faults behind a complaint that go together, in the order of :data:`FAULTS`.

    ``turn`` picks the first of them, so that tasks made in turn have each in equal parts.
    """
    own = [fault for fault in FAULTS if fault.causes == symptom]
    chosen = [own[turn % len(own)]]
    others = [fault for fault in FAULTS if fault.causes in WHICH[symptom]]
    while len(chosen) < count:
        fault = rng.choice(others)
        if fault not in chosen and not any(fault.name in one.excludes or one.name in fault.excludes for one in chosen):
            chosen.append(fault)
    return sorted(chosen, key=FAULTS.index)


def mended(scene: Scene, faults: Sequence[Fault]) -> list[Json]:
    """The gold actions: the carrier's side first, then the phone, one restart last; nothing twice."""
    actions: list[Json] = []
    for fault in sorted(faults, key=lambda fault: fault.side == "phone"):
        actions += [action for action in fault.mend(scene) if action not in actions]
    return [*actions, user("restart_phone")] if any(fault.restart for fault in faults) else actions
