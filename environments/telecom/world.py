"""The carrier's world: Vela Mobile's plans, 620 customers made from one seed, and a phone in working order.

==========  =============================================================================================
table       what a record is
==========  =============================================================================================
customers   who pays: name, date of birth, address, lines, bills
lines       one phone number: status, plan, contract, SIM, roaming, bars, data used; no word about the phone
plans       what is sold: data, price, speed, roaming, what happens when the data is used up
devices     the handset the carrier knows behind a line
bills       one month of one customer, with its charges
tickets     customers handed to a colleague, by customer; empty in the base
network     what the network's subscriber register holds of a line: the number of its current profile
phone       the one phone in the user's hand, key ``phone``; tasks say whose it is
==========  =============================================================================================

Nothing is stored twice: whether there is service, data or picture messages follows from the carrier's records and the
phone together (:mod:`environments.telecom.signals`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache

from environments.kit.overlay import Base
from mua.types import Json

TODAY = "2026-03-16"
CUSTOMERS = 620
PHONE = "phone"
"""Key of the one record of table ``phone``."""
APN = {"name": "vela.web", "mms_server": "mms.vela.example"}
"""What a phone has to be set to for Vela's data (``name``) and picture messages (``mms_server``)."""
COUNTRIES = ("Spain", "Norway", "Greece", "Canada", "Japan", "Kenya", "Chile", "Portugal")

_FIRST_NAMES = (
    "Alma Boris Carla Dario Edda Farid Greta Hanno Iris Jonas Kaja Leon Mira Nino Oda Pavel Quinn Runa Silas Thea "
    "Ulla Viktor Wanda Yara Zeno Anouk Bela Cosmo Delia Elio"
)
_LAST_NAMES = (
    "Abel Brandt Castell Dorn Ekman Faro Grimm Holt Ivers Jarvis Keller Lund Marek Noll Ortega Pohl Quist Rossi Stein "
    "Tarn Urban Vogel Weiss Young Zander"
)
FIRST_NAMES, LAST_NAMES = _FIRST_NAMES.split(), _LAST_NAMES.split()
_STREETS = ("Mill Lane", "Harbour Road", "Elm Street", "Station Square", "Garden Way", "North Quay")
_CITIES = ("Aldbrook", "Fenwick", "Marlow", "Stonehaven", "Westmere", "Oakridge")
_MODELS = (("Orbit 7", True), ("Orbit 5", False), ("Pebble X", True), ("Pebble Lite", False), ("Kite 12", True))


def _plan(plan_id: str, data_gb: int, price: float, network: str, roaming: bool, used_up: str) -> Json:
    return {
        "plan_id": plan_id,
        "data_gb": data_gb,
        "monthly_price": price,
        "network": network,
        "roaming_included": roaming,
        "when_used_up": used_up,
        "refuel_price_per_gb": 2.5 if data_gb >= 20 else 3.5,
        "refuel_limit_gb": 10,
    }


PLANS: dict[str, Json] = {
    plan["plan_id"]: plan
    for plan in (
        _plan("Pocket", 3, 12.0, "4G", False, "stop"),
        _plan("Start", 8, 17.0, "4G", False, "stop"),
        _plan("Steady", 12, 21.0, "4G", False, "slow"),
        _plan("Nomad", 15, 26.0, "4G", True, "stop"),
        _plan("Plus", 25, 31.0, "5G", True, "slow"),
        _plan("Home", 40, 36.0, "5G", False, "slow"),
        _plan("Max", 100, 52.0, "5G", True, "slow"),
    )
}
"""The price list. ``when_used_up``: data stops, or goes on at a crawl."""


@lru_cache(maxsize=1)
def base() -> Base:
    """The world of every episode; the same in every process."""
    rng = random.Random("vela mobile")
    tables: dict[str, dict[str, Json]] = {name: {} for name in ("customers", "lines", "devices", "bills", "network")}
    for index in range(CUSTOMERS):
        _customer(rng, index, tables)
    return Base({**tables, "plans": PLANS, "tickets": {}, PHONE: {PHONE: healthy_phone("")}})


@lru_cache(maxsize=1)
def lines_by_number() -> dict[str, Json]:
    """Phone number, digits only -> the line as it is in the base; numbers never change."""
    return {line["number"].replace("-", ""): line for line in base().tables["lines"].values()}


def healthy_phone(line_id: str) -> Json:
    """A phone on which everything is set right, for the line with its first profile."""
    return {
        "line_id": line_id,
        "abroad": None,
        "airplane_mode": False,
        "sim_seated": True,
        "sim_locked": False,
        "network_mode": "automatic",
        "profile": 1,
        "mobile_data": True,
        "data_roaming": False,
        "data_saver": False,
        "battery_saver": False,
        "vpn": False,
        "wifi": False,
        "wifi_calling": False,
        "apn": dict(APN),
        "apn_after_restart": None,
        "messages_app": {"sms": True, "storage": True},
        "photos_and_apps": "kept",
    }


def _customer(rng: random.Random, index: int, tables: dict[str, dict[str, Json]]) -> None:
    customer_id = f"C{10_000 + index}"
    lines = [f"L{20_000 + 2 * index + number}" for number in range(rng.choice((1, 1, 2)))]
    for line_id in lines:
        _line(rng, customer_id, line_id, tables)
    bills = dict(_bills(rng, customer_id, index, [tables["lines"][line_id] for line_id in lines]))
    tables["bills"].update(bills)
    tables["customers"][customer_id] = {
        "customer_id": customer_id,
        "name": {"first": rng.choice(FIRST_NAMES), "last": rng.choice(LAST_NAMES)},
        "date_of_birth": f"{rng.randint(1948, 2004)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}",
        "address": {"street": f"{rng.randint(1, 99)} {rng.choice(_STREETS)}", "city": rng.choice(_CITIES)},
        "line_ids": lines,
        "bill_ids": list(bills),
    }


def _line(rng: random.Random, customer_id: str, line_id: str, tables: dict[str, dict[str, Json]]) -> None:
    plan = PLANS[rng.choice(list(PLANS))]
    model, fast = rng.choice(_MODELS)
    device_id = f"D{line_id[1:]}"
    tables["devices"][device_id] = {"device_id": device_id, "model": model, "supports_5g": fast}
    tables["network"][line_id] = {"line_id": line_id, "profile": 1}
    tables["lines"][line_id] = {
        "line_id": line_id,
        "customer_id": customer_id,
        "number": f"555-{int(line_id[1:]) % 1000:03d}-{rng.randint(1000, 9999)}",
        "status": "active",
        "suspension": None,
        "plan_id": plan["plan_id"],
        "contract_end": f"{rng.randint(2027, 2028)}-{rng.randint(1, 12):02d}-28",
        "device_id": device_id,
        "roaming": False,
        "bars": {},
        "puk": str(rng.randint(10_000_000, 99_999_999)),
        "data_used_gb": round(plan["data_gb"] * rng.uniform(0.1, 0.8), 1),
        "data_refuelled_gb": 0,
    }


def _bills(rng: random.Random, customer_id: str, index: int, lines: list[Json]) -> Iterator[tuple[str, Json]]:
    """January to March; every bill holds the plans' prices, some an extra charge."""
    for number, month in enumerate(("2026-01", "2026-02", "2026-03")):
        charges = [
            {"for": f"{line['plan_id']} plan", "amount": PLANS[line["plan_id"]]["monthly_price"]} for line in lines
        ]
        if rng.random() < 0.3:
            charges.append({"for": "calls to service numbers", "amount": round(rng.uniform(1, 9), 2)})
        bill_id = f"B{30_000 + 3 * index + number}"
        yield bill_id, bill(bill_id, customer_id, month, charges)


def bill(bill_id: str, customer_id: str, month: str, charges: list[Json], status: str = "paid") -> Json:
    """A bill's record; the total follows from the charges."""
    total = round(sum(charge["amount"] for charge in charges), 2)
    record = {"bill_id": bill_id, "customer_id": customer_id, "month": month, "charges": charges, "total": total}
    return {**record, "status": status}
