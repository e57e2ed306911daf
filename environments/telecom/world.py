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
phone together (:mod:`environments.telecom.world`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

from environments.kit.conduct import Past
from environments.kit.overlay import Base, Overlay
from mua.types import Json
from mua.utils.strict_json import read_file

TODAY = "2026-03-16"
CUSTOMERS = 620
PHONE = "phone"
"""Key of the one record of table ``phone``."""
APN = {"name": "vela.web", "mms_server": "mms.vela.example"}
"""What a phone has to be set to for Vela's data (``name``) and picture messages (``mms_server``)."""
COUNTRIES = ("Spain", "Norway", "Greece", "Canada", "Japan", "Kenya", "Chile", "Portugal")

_CARRIER = yaml.safe_load(read_file(Path(__file__).with_name("carrier.yaml")))
FIRST_NAMES, LAST_NAMES = _CARRIER["first_names"].split(), _CARRIER["last_names"].split()
_STREETS, _CITIES, _MODELS = _CARRIER["streets"], _CARRIER["cities"], tuple(_CARRIER["models"].items())


def _plan(plan_id: str, given: Json) -> Json:
    price = 2.5 if given["data_gb"] >= 20 else 3.5
    return {"plan_id": plan_id, **given, "refuel_price_per_gb": price, "refuel_limit_gb": 10}


PLANS: dict[str, Json] = {plan_id: _plan(plan_id, given) for plan_id, given in _CARRIER["plans"].items()}
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


# What the phone can do, computed from the carrier's records and the phone's settings together.
#
# ::
#
#     service ── line active, registered, SIM ready, not in airplane mode, roaming abroad
#        └─ data ── mobile data on, data roaming abroad, APN right, no bar, data left
#             ├─ speed ── network mode, plan and device; savers, VPN and used-up data slow it down
#             └─ picture messages ── MMS server set, no bar, app permissions, no Wi-Fi calling

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


# Who is writing: what the user has given of itself by then, held against the carrier's records.
#
# A customer is identified when it was looked up with what the user gave, and name and date of birth of the record are
# among that. Where nobody has spoken (gold moves, replayed), whatever a look-up used counts as given.

_MONTHS = (
    "january", "february", "march", "april", "may", "june",
    "july", "august", "september", "october", "november", "december",
)  # fmt: skip
_MONTH = "|".join(f"{month[:3]}(?:{month[3:]})?" for month in _MONTHS) + "|sept"
_ISO = re.compile(r"\b(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})\b")
_DAY_FIRST = re.compile(rf"\b(\d{{1,2}})(?:st|nd|rd|th)?\.?(?: of)? ({_MONTH})\.?,? (\d{{4}})\b")
_MONTH_FIRST = re.compile(rf"\b({_MONTH})\.? (?:the )?(\d{{1,2}})(?:st|nd|rd|th)?,? (?:of )?(\d{{4}})\b")
_NUMERIC = re.compile(r"\b(\d{1,2})[-/.](\d{1,2})[-/.](\d{4})\b")
_NUMBER = re.compile(r"\d(?:[ ().-]{0,2}\d){6,}")


@lru_cache(maxsize=4096)
def dates(text: str) -> frozenset[str]:
    """The dates of a text, as YYYY-MM-DD; of ``3/4/1990`` both readings."""
    low = text.lower()
    found = {_iso(year, month, day) for year, month, day in _ISO.findall(low)}
    found |= {_iso(year, _number(month), day) for day, month, year in _DAY_FIRST.findall(low)}
    found |= {_iso(year, _number(month), day) for month, day, year in _MONTH_FIRST.findall(low)}
    for one, other, year in _NUMERIC.findall(low):
        found |= {_iso(year, one, other), _iso(year, other, one)}
    return frozenset(found)


@lru_cache(maxsize=4096)
def numbers(text: str) -> frozenset[str]:
    """The phone numbers of a text, digits only."""
    return frozenset(re.sub(r"\D", "", found) for found in _NUMBER.findall(text))


def identified(past: Past, heard: Sequence[str] | None = None) -> set[str]:
    """The customers who are known to be who they say; ``heard`` stands for what the user said."""
    texts = tuple(past.heard if heard is None else heard)
    looked_up = {str(call.arguments["customer_id"]) for call in past.calls if call.name == "get_customer"}
    found = set()
    for call in past.calls:
        if call.name == "find_customer_by_name":
            found |= {customer for customer in by_name(call.arguments) if gave(customer, texts)}
        elif call.name == "find_customer_by_number":
            number = re.sub(r"\D", "", str(call.arguments["number"]))
            customer = lines_by_number().get(number, {}).get("customer_id")
            if (
                customer in looked_up
                and (not texts or any(number in numbers(text) for text in texts))
                and gave(customer, texts)
            ):
                found.add(customer)
    return found


def gave(customer_id: str, heard: Sequence[str]) -> bool:
    """Whether name and date of birth of this customer are among what was said; where nothing was said, yes."""
    if not heard:
        return True
    record, text = base().tables["customers"][customer_id], " ".join(heard).lower()
    names = all(re.search(rf"\b{re.escape(part.lower())}\b", text) for part in record["name"].values())
    return names and any(record["date_of_birth"] in dates(said) for said in heard)


def by_name(arguments: Json) -> Iterator[str]:
    """The customers with this name and date of birth."""
    wanted = (str(arguments["first_name"]).lower(), str(arguments["last_name"]).lower(), arguments["date_of_birth"])
    return iter(_people().get(wanted, ()))


@lru_cache(maxsize=1)
def _people() -> dict[tuple[str, str, str], list[str]]:
    found: dict[tuple[str, str, str], list[str]] = {}
    for customer_id, record in base().tables["customers"].items():
        first, last = record["name"]["first"].lower(), record["name"]["last"].lower()
        found.setdefault((first, last, record["date_of_birth"]), []).append(customer_id)
    return found


def owner(key: str, value: object) -> str:
    """The customer that an argument is of: a customer, line or bill; empty for one that there is not."""
    if key == "customer_id":
        return str(value)
    record = base().tables["lines" if key == "line_id" else "bills"].get(str(value), {})
    return str(record.get("customer_id", ""))


def _number(month: str) -> int:
    return next(at for at, name in enumerate(_MONTHS, 1) if name[:3] == month[:3])


def _iso(year: object, month: object, day: object) -> str:
    return f"{int(str(year)):04d}-{int(str(month)):02d}-{int(str(day)):02d}"
