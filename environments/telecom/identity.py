"""Who is writing: what the user has given of itself by then, held against the carrier's records.

A customer is identified when it was looked up with what the user gave, and name and date of birth of the record are
among that. Where nobody has spoken (gold moves, replayed), whatever a look-up used counts as given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from environments.kit.conduct import Past
from environments.telecom.world import base, lines_by_number
from mua.types import Json

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
