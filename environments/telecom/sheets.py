"""What is so at a moment, as sheets that an agent's statements are held against
(:mod:`environments.kit.language.claims`).

=========  ==========================================================================================
kind       its roles
=========  ==========================================================================================
line       status, reason, plan, was, bars, left, used, included, added, puk, number, contract, deed, can
bill       status, total, charges; by month (``bill march``) and id, ``bill bills`` for all of them
charge     amount, month, deed; what a bill holds besides plans, by the name on the bill
plan       price, data, refuel, network, roaming
switch     state: what is on or off on the phone, by the names people have for it; ``switch roaming`` is the carrier's
phone      works (calls, data, pictures, speed), sim, mode, apn, server, place
may        state: what the messages app may use
customer   verified, name, birth
=========  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from environments.kit.conduct import Past
from environments.kit.language.claims import AGENT, Moment, Sheet, Thing
from environments.kit.overlay import Base, Overlay
from environments.telecom.phone_tools import SWITCHES
from environments.telecom.world import APN, FIRST_NAMES, LAST_NAMES, PLANS, View, base, identified
from mua.environment.protocol import Task
from mua.types import Json

NAMES: Mapping[str, Sequence[str]] = {
    "airplane_mode": ("airplane mode", "aeroplane mode", "flight mode", "plane mode"),
    "mobile_data": ("mobile data", "cellular data"),
    "data_roaming": ("data roaming", "roaming on your phone", "roaming on the phone", "roaming in your phone"),
    "data_saver": ("data saver", "data saving"),
    "battery_saver": ("battery saver", "power saver", "battery saving", "power saving", "low power mode"),
    "vpn": ("vpn",),
    "wifi": ("wi-fi", "wifi", "wlan"),
    "wifi_calling": ("wi-fi calling", "wifi calling"),
}
"""How people call the phone's switches."""
CHARGES = (
    "roaming day pass", "third-party subscription", "extra data", "directory enquiries", "ringtone club",
    "horoscope service", "quiz hotline", "calls to service numbers",
)  # fmt: skip
MONTHS = {"2026-01": "january", "2026-02": "february", "2026-03": "march"}
_NOTHING: frozenset[str] = frozenset()


def moment(task: Task, start: Base, state: Overlay, past: Past) -> Moment:
    """What is so after some of an episode, for the line that the phone is of."""
    now, before = View.of(state), View.of(Overlay(start))
    known = task.data["known"]
    heard = past.heard or [f"{known['number']}, {known['first']} {known['last']}, {known['born']}"]
    customer = base().tables["customers"][now.line["customer_id"]]
    bills = [_record(state, "bills", key) for key in customer["bill_ids"]]
    verified = now.line["customer_id"] in identified(past, heard)
    deeds = _deeds(before, now, state, start, bills)
    line = _line(now, before, deeds, bills) | {"name": frozenset(part.lower() for part in customer["name"].values())}
    sheets: dict[Thing, Sheet] = {f"line {now.line['number']}": line, f"line {now.line['line_id'].lower()}": line}
    for other in customer["line_ids"]:
        sheets |= _other_line(_record(state, "lines", other), now.line["line_id"])
    sheets |= _bills(bills) | _charges(bills) | _plans() | _phone(now)
    sheets["customer"] = _customer(customer, known, verified=verified) | {"read": _flag(_has_read(past))}
    if any(call.name == "find_customer_by_number" for call in past.calls):
        sheets["customer"] = {**sheets["customer"], "exists": _flag(True)}
    sheets[AGENT] = {"deed": frozenset(_of_agent(deeds, past))}
    focus = [*_focus(bills), f"plan {now.plan['plan_id'].lower()}", "phone", "customer", f"line {now.line['number']}"]
    return Moment(sheets, focus, _WORDS, _amounts(now, bills))


_WORDS: Mapping[str, Sequence[str]] = {
    "switch": (*(name for names in NAMES.values() for name in names), "roaming"),
    "charge": CHARGES,
    "may": ("sms", "storage"),
    "name": (*FIRST_NAMES, *LAST_NAMES),
}


def _focus(bills: Sequence[Json]) -> list[Thing]:
    """What is said of a bill without naming it is said of an overdue one, where there is any."""
    overdue = [bill for bill in bills if bill["status"] in ("overdue", "requested")]
    found = [f"bill {MONTHS[bill['month']]}" for bill in overdue or bills]
    return found + [
        f"charge {charge['for']}" for bill in bills for charge in bill["charges"] if charge["for"] in CHARGES
    ]


def _line(now: View, before: View, deeds: set[str], bills: Sequence[Json]) -> dict[str, frozenset[str]]:
    line, plan = now.line, now.plan
    return {
        "status": frozenset({line["status"]}),
        "reason": frozenset({line["suspension"] or before.line["suspension"] or "none"}),
        "was status": frozenset({line["status"], before.line["status"]}),
        "plan": frozenset({line["plan_id"].lower()}),
        "price": _sums(plan["monthly_price"]),
        "roaming": _flag(plan["roaming_included"]),
        "refuel": _sums(plan["refuel_price_per_gb"]),
        "unlimited": _NOTHING,
        "outage": _flag(so=False),
        "owes": frozenset(_owed(bills)),
        "limit": _numbers(plan["refuel_limit_gb"], plan["refuel_limit_gb"] - line["data_refuelled_gb"]),
        "refund": _NOTHING,
        "untouched": _flag(not deeds - {"phone", "done"}),
        "was": frozenset({before.line["plan_id"].lower(), line["plan_id"].lower()}),
        "bars": frozenset({*line["bars"], *(["any"] if line["bars"] else [])}),
        "barred by": frozenset(line["bars"].values()),
        "left": _numbers(now.data_left_gb),
        "used": _numbers(line["data_used_gb"]),
        "included": _numbers(plan["data_gb"]),
        "added": _numbers(line["data_refuelled_gb"]),
        "used up": _flag(now.data_left_gb == 0),
        "puk": frozenset({line["puk"]}),
        "number": frozenset({line["number"]}),
        "deed": frozenset(deeds),
        "can": frozenset(possible(now, bills)),
        "can add": frozenset(_addable(plan["refuel_limit_gb"] - line["data_refuelled_gb"])),
    }


def _owed(bills: Sequence[Json]) -> Iterator[str]:
    """What is overdue, and that with what is due."""
    late = sum(bill["total"] for bill in bills if bill["status"] in ("overdue", "requested"))
    due = sum(bill["total"] for bill in bills if bill["status"] == "due")
    yield from (f"{round(amount, 2):g}" for amount in (late, due, late + due) if amount)
    if not late:
        yield "nothing"


def _addable(room: int) -> Iterator[str]:
    yield from (str(gb) for gb in range(1, room + 1))
    if room > 0:
        yield "any"


def possible(now: View, bills: Sequence[Json]) -> set[str]:
    """What the policy lets an agent do for the line as it is now."""
    line, overdue = now.line, any(bill["status"] in ("overdue", "requested") for bill in bills)
    found = {"suspend"} if line["status"] == "active" else set[str]()
    if (
        line["status"] == "suspended"
        and line["suspension"] != "fraud"
        and not (line["suspension"] == "unpaid bill" and overdue)
    ):
        found.add("resume")
    found |= set() if overdue else {"change plan"}
    found |= {"roaming"} if now.plan["roaming_included"] else set()
    return found


def _deeds(before: View, now: View, state: Overlay, start: Base, bills: Sequence[Json]) -> set[str]:
    """What has been changed since the start, on either side."""
    found = set[str]()
    if before.line["status"] != now.line["status"]:
        found |= {"resumed" if now.line["status"] == "active" else "suspended"}
    found |= {"plan"} if before.line["plan_id"] != now.line["plan_id"] else set()
    found |= {"data"} if before.line["data_refuelled_gb"] != now.line["data_refuelled_gb"] else set()
    found |= {"roaming"} if now.line["roaming"] and not before.line["roaming"] else set()
    found |= {"barred"} if now.line["bars"].keys() - before.line["bars"].keys() else set()
    found |= {"lifted"} if before.line["bars"].keys() - now.line["bars"].keys() else set()
    for bill in bills:
        if start.tables["bills"][bill["bill_id"]]["status"] != bill["status"]:
            found |= {"requested", "paid"} if bill["status"] == "paid" else {"requested"}
    found |= {"changed", "done"} if found else set()
    return found | ({"phone", "done"} if before.phone != now.phone else set())


def _of_agent(deeds: set[str], past: Past) -> set[str]:
    names = {call.name for call in past.calls}
    found = {"sent"} if "requested" in deeds else set[str]()
    found |= {"given"} if "data" in deeds else set()
    return found | ({"transferred", "recorded"} if "transfer_to_human" in names else set())


def _has_read(past: Past) -> bool:
    return any(call.name.startswith(("find_", "get_")) for call in past.calls)


def _other_line(record: Json, own: str) -> dict[Thing, Sheet]:
    if record["line_id"] == own:
        return {}
    sheet: Sheet = {
        "status": frozenset({record["status"]}),
        "plan": frozenset({record["plan_id"].lower()}),
        "number": frozenset({record["number"]}),
    }
    return {f"line {record['number']}": sheet, f"line {record['line_id'].lower()}": sheet}


def _bills(bills: Sequence[Json]) -> dict[Thing, Sheet]:
    found: dict[Thing, Sheet] = {}
    for bill in bills:
        sheet: Sheet = {
            "status": frozenset(_bill_states(bill)),
            "total": frozenset({f"{bill['total']:g}"}),
            "charges": frozenset(charge["for"].lower() for charge in bill["charges"]),
            "plans": frozenset(charge["for"].lower().removesuffix(" plan") for charge in bill["charges"]),
        }
        found |= {f"bill {bill['bill_id'].lower()}": sheet, f"bill {MONTHS[bill['month']]}": sheet}
    found["bill bills"] = {
        "status": frozenset({"paid"} if all(bill["status"] == "paid" for bill in bills) else ()),
        "overdue": frozenset({str(sum(bill["status"] in ("overdue", "requested") for bill in bills))}),
    }
    return found


def _bill_states(bill: Json) -> set[str]:
    """A bill whose payment was asked for is overdue until it is paid."""
    states = {
        "overdue": {"overdue", "unpaid"},
        "requested": {"overdue", "unpaid", "requested"},
        "due": {"due", "unpaid"},
    }
    return states.get(bill["status"], {bill["status"]})


def _charges(bills: Sequence[Json]) -> dict[Thing, Sheet]:
    found: dict[Thing, dict[str, set[str]]] = {f"charge {name}": {"amount": set(), "month": set()} for name in CHARGES}
    for bill in bills:
        for charge in bill["charges"]:
            if charge["for"] in CHARGES:
                sheet = found[f"charge {charge['for']}"]
                sheet["amount"].add(f"{charge['amount']:g}")
                sheet["month"].add(MONTHS[bill["month"]])
    return {
        thing: {role: frozenset(values) for role, values in sheet.items()}
        | {"deed": _NOTHING, "on": _flag(bool(sheet["month"]))}
        for thing, sheet in found.items()
    }


@lru_cache(maxsize=1)
def _plans() -> dict[Thing, Sheet]:
    return {
        f"plan {name.lower()}": {
            "price": _sums(plan["monthly_price"]),
            "data": _numbers(plan["data_gb"]),
            "refuel": _sums(plan["refuel_price_per_gb"]),
            "unlimited": _NOTHING,
            "network": frozenset({plan["network"].lower()}),
            "roaming": _flag(plan["roaming_included"]),
        }
        for name, plan in PLANS.items()
    }


def _phone(now: View) -> dict[Thing, Sheet]:
    phone = now.phone
    found: dict[Thing, Sheet] = {
        f"switch {name}": {"state": frozenset({"on" if phone[field] else "off"})}
        for field in SWITCHES
        for name in NAMES[field]
    }
    found["switch roaming"] = {"state": frozenset({"on" if now.line["roaming"] else "off"})}
    found |= {f"may {name}": {"state": _flag(allowed)} for name, allowed in phone["messages_app"].items()}
    works = {
        "service": now.no_service_because is None,
        "data": now.data,
        "pictures": now.picture_messages,
        "speed": now.mbps >= 20,
    }
    found["phone"] = {
        "works": frozenset(name for name, so in works.items() if so),
        "sim": frozenset({"missing" if not phone["sim_seated"] else "locked" if phone["sim_locked"] else "ready"}),
        "mode": frozenset({phone["network_mode"].lower()}),
        "apn": frozenset(
            {phone["apn"]["name"], *([phone["apn_after_restart"]["name"]] if phone["apn_after_restart"] else [])}
        ),
        "apn right": _flag(phone["apn"]["name"] == "vela.web" or phone["apn_after_restart"] is not None),
        "server": frozenset({phone["apn"]["mms_server"]}),
        "server right": _flag(phone["apn"]["mms_server"] == APN["mms_server"]),
        "place": frozenset({(phone["abroad"] or "home").lower(), *(["abroad"] if phone["abroad"] else [])}),
        "permissions": frozenset({"all"} if all(phone["messages_app"].values()) else ()),
        "mbps": _numbers(now.mbps),
    }
    return found


def _customer(record: Json, known: Json, *, verified: bool) -> dict[str, frozenset[str]]:
    """Names are those of the user: whose the line is, a stranger is not told."""
    parts = {known["first"].lower(), known["last"].lower(), f"{known['first']} {known['last']}".lower()}
    own = (record["name"]["first"], record["name"]["last"]) == (known["first"], known["last"])
    return {
        "verified": _flag(verified),
        "fits": frozenset({"name"} if own else ())
        | frozenset({"birth"} if known["born"] == record["date_of_birth"] else ()),
        "name": frozenset(parts),
    }


def _amounts(now: View, bills: Sequence[Json]) -> frozenset[float]:
    """Sums that may be spoken of: the price list, what is on the bills, data by the gigabyte."""
    found = {plan["monthly_price"] for plan in PLANS.values()} | {
        plan["refuel_price_per_gb"] for plan in PLANS.values()
    }
    for bill in bills:
        extra = [charge["amount"] for charge in bill["charges"] if not charge["for"].endswith("plan")]
        found |= {bill["total"], *(charge["amount"] for charge in bill["charges"]), round(sum(extra), 2)}
    found |= {gb * now.plan["refuel_price_per_gb"] for gb in range(1, 51)}
    found |= {abs(one["monthly_price"] - now.plan["monthly_price"]) for one in PLANS.values()}
    return frozenset(found)


def _numbers(*values: float) -> frozenset[str]:
    return frozenset(f"{value:g}" for value in values)


def _sums(value: float) -> frozenset[str]:
    return frozenset({f"{value:g}", f"{value:.2f}"})


def _flag(so: bool) -> frozenset[str]:
    return frozenset({"yes" if so else "no"})


def _record(state: Overlay, table: str, key: str) -> Json:
    record = state.get(table, key)
    assert record is not None, f"{table}/{key}"
    return record


# What has to be told in a task, and what has to come before the last word: facts and demands, as data.
#
# Each fact has ``say``, words in which gold tells it.

NOT_VERIFIED: Json = {
    "any": [
        {"thing": "customer", "role": "verified", "value": "yes", "denied": True},
        {"thing": "customer", "role": "verified", "value": "no"},
        {"thing": "customer", "role": "fits", "value": "name", "or": ["birth"], "denied": True},
    ],
    "say": "I cannot verify your identity.",
}


def looked(tool: str) -> Json:
    """That this was looked up for a customer who is identified."""
    return {"looked": tool, "name": f"{tool} for a customer who is identified"}


LINE_READ = looked("get_line")


def asked(words: str) -> Json:
    """That the agent has put this to the user, who has answered."""
    return {"asked": words, "name": f"the customer was asked: {words}"}


def given(*values: str) -> Json:
    """That the user has said these; the last may be a date in any form."""
    return {"given": list(values), "name": "the customer gave " + ", ".join(values)}


def record_read(customer_id: str) -> Json:
    """That the record of the customer was read."""
    return {"call": "get_customer", "arguments": {"customer_id": customer_id}}


def _of(line: Json, role: str, value: str, *others: str, denied: bool = False) -> Json:
    return {
        "thing": f"line {line['number']}",
        "things": [f"line {line['line_id'].lower()}"],
        "role": role,
        "value": value,
        "or": list(others),
        "denied": denied,
    }


def plan_changed(line: Json, plan: str) -> Json:
    found = [_of(line, "deed", "plan", "done"), _of(line, "plan", plan.lower())]
    return {"any": found, "say": f"Your line is on the {plan} plan now."}


def data_added(line: Json, gb: int) -> Json:
    return {"any": [_of(line, "deed", "data", "done"), _of(line, "added", str(gb))], "say": f"I have added {gb} GB."}


def suspended(line: Json) -> Json:
    return {"any": [_of(line, "status", "suspended"), _of(line, "deed", "done")], "say": "Your line is suspended."}


def premium_barred(line: Json) -> Json:
    found = [_of(line, "deed", "barred", "done"), _of(line, "bars", "premium", "any")]
    return {"any": found, "say": "Premium numbers are barred on your line."}


def roaming_on(line: Json) -> Json:
    on = {"thing": "switch roaming", "role": "state", "value": "on"}
    return {"any": [on, _of(line, "deed", "roaming", "done")], "say": "Roaming is switched on for your line."}


def no_roaming(line: Json) -> Json:
    plan = {"thing": f"plan {line['plan_id'].lower()}", "role": "roaming"}
    found = [
        _of(line, "can", "roaming", denied=True),
        _of(line, "roaming", "no"),
        _of(line, "roaming", "yes", denied=True),
        plan | {"value": "no"},
        plan | {"value": "yes", "denied": True},
    ]
    return {"any": found, "say": "I cannot switch roaming on, your plan does not include roaming."}


def over_limit(line: Json, gb: int) -> Json:
    found = [_of(line, "limit", "10"), _of(line, "can add", str(gb), denied=True)]
    return {"any": found, "say": f"The limit is 10 GB a month, so I cannot add {gb} GB."}


def overdue(line: Json, bill: Json, what: str) -> list[Json]:
    """That the bill is; that what is wanted can not be done follows, and is put in too many ways to ask for one."""
    months = [f"bill {MONTHS[bill['month']]}", f"bill {bill['bill_id'].lower()}"]
    is_overdue = {"thing": months[0], "things": months[1:], "role": "status", "value": "overdue", "or": ["unpaid"]}
    unpaid = is_overdue | {"value": "paid", "or": [], "denied": True}
    told = [is_overdue, unpaid, _of(line, "reason", "unpaid bill")]
    return [{"any": told, "say": f"The bill is overdue, so I cannot {_SAID[what]}."}]


_SAID = {"resume": "resume your line", "change plan": "change your plan"}


def charge(name: str, amount: float) -> Json:
    fact = {"thing": f"charge {name}", "role": "amount", "value": f"{amount:g}"}
    return fact | {"say": f"Your March bill has a charge of ${amount:.2f} for {name}."}
