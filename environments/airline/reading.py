"""What the expert reads out of the customer's words and of the tools' answers, long or short."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

from environments.airline.rules import TODAY
from mua.types import Json

_USER = re.compile(r"\b[a-z]+_[a-z]+_\d{4}\b", re.IGNORECASE)
_RESERVATION = re.compile(r"\b(?=[A-Z0-9]*\d)[A-Z][A-Z0-9]{5}\b")
_DAY = re.compile(r"\b([A-Z][a-z]+) (\d{1,2})\b")
_ROUTE = re.compile(r"\bfrom ([A-Z][A-Za-z. ]+?) to ([A-Z][A-Za-z. ]+?) on\b", re.IGNORECASE)
_BAGS = re.compile(r"\b(\d+) bags?\b")
_NAMES = re.compile(r"\bfrom (\w+) (\w+) to (\w+) (\w+)\b", re.IGNORECASE)
_BORN = re.compile(r"\b([A-Z]\w+) ([A-Z]\w+), born (\d{4}-\d\d-\d\d)")
_METHOD = re.compile(
    r"ending in (\d{4})|gift card with \$(\d+)|certificate over \$(\d+)|(both of my certificates)", re.IGNORECASE
)
_REASONS = {
    "health": re.compile(r"\b(?:ill|sick|flu|unwell)\b", re.IGNORECASE),
    "weather": re.compile(r"\b(?:storm|hurricane|blizzard)\b", re.IGNORECASE),
    "airline": re.compile(r"\b(?:airline|flight of it)\b", re.IGNORECASE),
    "plans": re.compile(
        r"\b(?:plans|any more|better to do|fell through|called off|will not happen|moved|interest|mind)\b",
        re.IGNORECASE,
    ),
}
_MONTHS = tuple(datetime(2000, month, 1).strftime("%B") for month in range(1, 13))


def user_id(text: str) -> str | None:
    found = _only(_USER, text)
    return found.lower() if found else None


def reservation_id(text: str) -> str | None:
    return _only(_RESERVATION, text)


def _only(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.search(text)
    return found.group(0) if found else None


def day(text: str) -> str | None:
    """``2025-03-20`` for "March 20" of this year."""
    for month, number in _DAY.findall(text):
        if month in _MONTHS:
            return f"{TODAY[:4]}-{_MONTHS.index(month) + 1:02}-{int(number):02}"
    return None


def route(text: str) -> tuple[str, str] | None:
    """Two cities by name."""
    found = _ROUTE.search(text)
    return (found.group(1), found.group(2)) if found else None


def bags(text: str) -> int | None:
    found = _BAGS.search(text)
    return int(found.group(1)) if found else 0 if re.search(r"\bno bags\b", text, re.IGNORECASE) else None


def names(text: str) -> tuple[str, str, str, str] | None:
    """Given and family name of a passenger, as they are and as they should be."""
    found = _NAMES.search(text)
    return found.groups() if found else None  # type: ignore[return-value]


def companions(text: str) -> list[Json]:
    return [{"first_name": first, "last_name": last, "dob": born} for first, last, born in _BORN.findall(text)]


def cabin(text: str) -> str | None:
    found = re.search(r"\b(basic economy|economy|business)\b", text, re.IGNORECASE)
    return found.group(1).lower().replace(" ", "_") if found else None


def preference(text: str) -> str | None:
    found = re.search(r"\b(cheapest|earliest|latest)\b", text, re.IGNORECASE)
    return found.group(1).lower() if found else None


def direction(text: str) -> str | None:
    """``out`` or ``back``."""
    found = re.search(r"\bflight (out|back)\b", text, re.IGNORECASE)
    return found.group(1).lower() if found else None


def insurance(text: str) -> str | None:
    """``yes`` or ``no``."""
    found = re.search(r"\b(with|no) insurance\b", text, re.IGNORECASE)
    return None if found is None else "yes" if found.group(1).lower() == "with" else "no"


def trip_type(text: str) -> str | None:
    """The day of the way back, or "" for one way."""
    if re.search(r"\bround trip\b", text, re.IGNORECASE):
        return day(text)
    return "" if re.search(r"\bone way\b", text, re.IGNORECASE) else None


def party(text: str) -> list[Json] | None:
    """The companions of the customer."""
    found = companions(text)
    return found if found or re.search(r"\bjust me\b", text, re.IGNORECASE) else None


def reason(text: str) -> str | None:
    """``health``, ``weather``, ``airline`` or ``plans``."""
    return next((name for name, pattern in _REASONS.items() if pattern.search(text)), None)


def methods(text: str, profile: Json) -> list[Json]:
    """The payment methods of the profile that the customer names, in order."""
    every = profile["methods"]
    found = []
    for four, gift, certificate, both in _METHOD.findall(text):
        own = [one for one in every if one["source"] == "certificate"]
        if both:
            found.append(max(own, key=lambda one: int(one["amount"])))
        elif four:
            found += [one for one in every if one.get("last_four") == four]
        else:
            source, amount = ("gift_card", gift) if gift else ("certificate", certificate)
            found += [one for one in every if one["source"] == source and one["amount"] == int(amount)]
    return found


def profile(answer: str) -> Json:
    """``{first_name, last_name, dob, membership, methods, reservations}``."""
    user = json.loads(answer)
    if "pays" not in user:
        own = {key: user[key] for key in ("dob", "membership", "reservations")}
        return {**user["name"], **own, "methods": list(user["payment_methods"].values())}
    first, last = user["name"].split()
    read = {"first_name": first, "last_name": last, "dob": user["born"], "membership": user["member"]}
    return {**read, "methods": [_method(line) for line in user["pays"]], "reservations": user["reservations"]}


def _method(line: str) -> Json:
    payment_id, *rest = line.split()
    source = payment_id.rpartition("_")[0]
    if source == "credit_card":
        return {"id": payment_id, "source": source, "brand": rest[0], "last_four": rest[1]}
    return {"id": payment_id, "source": source, "amount": int(rest[0])}


def reservation(answer: str) -> Json:
    """The record, ``payment_history`` replaced by ``paid``."""
    one: Json = json.loads(answer)
    if "trip" not in one:
        return {**one, "paid": sum(part["amount"] for part in one["payment_history"])}
    origin, destination = one["trip"].split("-")
    total, paid = re.findall(r"\d+", one["bags"])
    return {
        **one,
        "origin": origin,
        "destination": destination,
        "flights": [_leg(line) for line in one["flights"]],
        "passengers": [_person(line) for line in one["passengers"]],
        "total_baggages": int(total),
        "nonfree_baggages": int(paid),
        "created_at": one["made"],
    }


def _leg(line: str) -> Json:
    number, places, date, price = line.split()
    origin, destination = places.split("-")
    leg = {"flight_number": number, "origin": origin, "destination": destination}
    return {**leg, "date": date, "price": int(price)}


def _person(line: str) -> Json:
    first, last, dob = line.split()
    return {"first_name": first, "last_name": last, "dob": dob}


def flights(answer: str) -> list[Json]:
    """What a search of direct flights found."""
    found: list[Any] = json.loads(answer)
    return [_flight(line) if isinstance(line, str) else line for line in found]


def _flight(line: str) -> Json:
    number, clock, offers = line.split(" ", 2)
    seats, prices = {}, {}
    for offer in offers.split(", "):
        name, free, price = offer.split()
        seats[name], prices[name] = int(free), int(price)
    start = {"flight_number": number, "scheduled_departure_time_est": clock.split("-")[0]}
    return {**start, "available_seats": seats, "prices": prices}
