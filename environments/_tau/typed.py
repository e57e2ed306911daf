"""What can be told from its form in an instruction: names, numbers, addresses; and a sentence without them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Facts: TypeAlias = Mapping[str, Sequence[str]]
"""Values by fact, in the order of the text, each once."""
_METHOD = r"(?:credit_card|gift_card|paypal|certificate)_\d+"
_MONTH = "January|February|March|April|May|June|July|August|September|October|November|December"
_FORMS: Mapping[str, str] = {
    "payment": rf"\b{_METHOD}\b",
    "user_id": rf"\b(?!{_METHOD})[a-z]+(?:_[a-z]+)+_\d{{2,6}}\b",
    "email": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[A-Za-z]+",
    "order": r"#?\bW\d{3,}\b|#\w+",
    "zip": r"(?<![\w#$.,-])\d{5}(?![\w-])",
    "item": r"\b\d{10}\b",
    "phone": r"\b\d{3}-\d{3}-\d{4}\b",
    "flight": r"\bHAT\d{3}\b",
    "birth_date": r"\b\d{4}-\d{2}-\d{2}\b",
    "date": rf"\b(?:{_MONTH}) \d{{1,2}}\b",
    "address": (
        r"\b\d{1,5} (?:[A-Z][a-z]+ )?(?:Street|St|Drive|Avenue|Ave|Road|Lane|Highway|Boulevard|Way)\b"
        r"(?:, (?:Suite \d+|[A-Z][a-z]+(?: [A-Z][a-z]+)*|[A-Z]{2}|\d{5})\b)*"
    ),
    "card": r"(?<=ending in )\d{4}\b|(?<=your )\d{4}(?= card)",
    "passengers": r"(?<=passenger )[A-Z][a-z]+\b(?: [A-Z][a-z]+\b)?",
    "name": r"(?:(?<=You are )|(?<=You're )|(?<=name is )|(?<=called ))[A-Z][a-z]+\b(?: [A-Z][a-z]+\b)?",
}
_COMPILED = {name: re.compile(form) for name, form in _FORMS.items()}
_RESERVATION = re.compile(r"\b(?=[A-Z\d]*[A-Z])[A-Z\d]{6}\b")
_NO_NAME = frozenset({"French"})


def facts_in(text: str, *, reservations: bool = False) -> Facts:
    """The values that ``text`` holds; ``reservations``: as in"
    " :func:`environments._tau.instruction.read_instruction`."""
    found = {name: pattern.findall(text) for name, pattern in _COMPILED.items()}
    if reservations:
        numbers = [number for number in _RESERVATION.findall(text) if number not in found["flight"]]
        found |= {"reservation": numbers, "order": []}
    found["name"] = [name for name in found["name"] if name not in _NO_NAME]
    return {name: tuple(dict.fromkeys(values)) for name, values in found.items() if values}


_ID = rf"(?:#?W\d{{3,}}|#\w+|(?=[A-Z\d]*[A-Z])[A-Z\d]{{6}}|{_METHOD}|[a-z]+(?:_[a-z]+)+_\d+)(?![\w])"
_LISTED = rf"{_ID}(?:(?:,| and|, and) {_ID})*"
_VEILS: tuple[tuple[str, str], ...] = (
    (r"\b(user id) [a-z]+(?:_[a-z]+)+_\d+", r"\1"),
    (rf"\s*\((?:[^()]*?\b)?{_LISTED}[^()]*\)", ""),
    (r",? ?\(?(?:with )?(?:DOB|date of birth|born)(?: is| on)? \d{4}-\d\d-\d\d\)?", ""),
    (
        rf"\b(order|reservation|booking|flight|confirmation)s?(?: (?:number|ID|IDs|id|ids|no\.?))?(?: is| are"
        rf"|:)? {_ID},? and {_ID}",
        r"\1s",
    ),
    (rf",? {_ID} and {_ID}", ""),
    (
        rf"\b(order|orders|reservation|reservations|booking|flight)(?: (?:number|ID|IDs|id|ids|no\.?))?(?: is"
        rf"|:)? {_LISTED}",
        r"\1",
    ),
    (rf"\b(my|the|this|that|another|new) {_ID}(?= order)", r"\1"),
    (rf"\b(my|the) {_METHOD}\b", r"\1 payment method"),
    (rf"\b{_METHOD}\b", "my other payment method"),
    (rf"\s*\b(?:in|from|of|for|with|under|on|within) {_LISTED}", ""),
    (rf"\b{_LISTED}(?= order)", "my"),
    (r"\b(?:product|item) \d{10}", "one item"),
    (r"\b\d{10}\b", "another one"),
    (r"\s*\bHAT\d{3}\b", ""),
    (rf"(?<!\w){_LISTED}", "my order"),
    (r" (?:card|credit card) ending in \d{4}", " card"),
    (r"(?<=my )\d{4} (?=card)", ""),
    (_FORMS["address"], "another address"),
    (rf" on (?:{_MONTH}) \d{{1,2}}(?!\d| to\b| and\b)", ""),
    (
        r"(?<=.{20}),? (?:because|since|as|due to)\b (?:of )?(?:i|it|its|they|the|my|a|there|we|you)\b.*?(?=[.]$|[.] )",
        "",
    ),
    (r",? (?:in|at) \d{5}\b|\s*\(\d{5}\)", ""),
)
_VEIL = tuple((re.compile(pattern), instead) for pattern, instead in _VEILS)
_BARE = re.compile(
    r"\b(cancel|return|change|modify|of|in|from|for|exchange|about|within|with|under) (orders?|reservations?"
    r"|bookings?)\b",
    re.I,
)


def veiled(text: str) -> str:
    """``text`` without numbers and ids, which are told when somebody asks for them."""
    for pattern, instead in _VEIL:
        text = pattern.sub(instead, text)
    text = _BARE.sub(r"\1 my \2", text)
    text = re.sub(r"\b(?:the|my) my\b", "my", text.replace("my order order", "my order"))
    return re.sub(r"\s+([.,;?!])", r"\1", re.sub(r"\s+", " ", text)).strip()
