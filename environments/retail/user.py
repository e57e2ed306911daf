"""The scripted customer: a task's wishes and what the customer knows, in words that vary with the seed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mua.environment.protocol import Task
from mua.types import Json
from mua.users.scripted import Fact, ScriptedUser, Wish

OPENINGS: Mapping[str, Sequence[str]] = {
    "cancel": ("I want to cancel an order.", "Please cancel an order of mine.", "Hi, cancel an order please."),
    "return": ("I want to return an item.", "Hi, I would like to send an item back.", "Please take an item back."),
    "refund_to": (
        "I want to return an item and choose where the refund goes.",
        "Please take an item back, but not with the usual refund.",
    ),
    "exchange": ("I want to exchange an item I got.", "Hi, please exchange something I received."),
    "change_items": ("I want another variant in an order.", "Please change an item of an order that is still open."),
    "payment": ("I want to pay an order another way.", "Please change how an order is paid."),
    "address": ("My order should go to another address.", "Please send an order somewhere else."),
    "home": ("I have moved.", "Please change the address in my profile."),
    "status": ("What is the status of my order?", "Hi, how is my order doing?", "I want to know an order's status."),
    "price": ("What does something in your shop cost?", "I want to know a price."),
}
_REASONS: Mapping[str, Sequence[str]] = {
    "no longer needed": ("I no longer need it.", "No longer needed."),
    "ordered by mistake": ("I ordered it by mistake.", "Ordered by mistake."),
}
_ANSWERS: Mapping[str, Sequence[str]] = {
    "order": ("Order {0}.", "It is {0}.", "The number is {0}."),
    "item": ("The {0}.", "It is the {0}."),
    "product": ("The {0}.", "A {0}."),
    "wanted": ("I want {0}.", "With {0}.", "{0}, please."),
    "payment": ("My {0}.", "Use my {0}."),
    "address": ("{0}.", "To {0}."),
    "email": ("{0}.", "It is {0}.", "My email is {0}."),
    "name": ("I am {0}.", "My name is {0}.", "{0}."),
    "zip": ("Zip {0}.", "My zip code is {0}."),
}
_FORGOTTEN = ("I forgot the number. It is the order with the {0}.", "I do not know it. The {0} is in that order.")
_YIELDING = ("Yes, then the original one is fine.", "Yes, use that then.")
_ASKED: Mapping[str, str] = {
    "order": r"\border (numbers?|ids?)|(which|what) orders?\b|number of (the|your) order",
    "reason": r"\breason\b|\bwhy\b",
    "item": r"(which|what) (item|thing)s?\b|item\?",
    "product": r"(which|what) product|product\?",
    "wanted": r"(which|what) (one|options?|variant|kind|colou?r|size|version)|options?\?|(want|like|have) instead",
    "payment": r"(which|what) (payment|card|method)|payment method|how (do|would|will) you .*\bpay|refund (go|be sent)",
    "address": r"(which|what|your)( is the| is your)?( new| full)? address|address\?|where (should|shall|do)",
    "email": r"\be-?mail\b",
    "name": r"\bname\b|who are you",
    "zip": r"\bzip code|\byour zip\b|postal code",
}
_PATTERNS = {fact: re.compile(pattern, re.IGNORECASE) for fact, pattern in _ASKED.items()}
_ORIGINAL = re.compile(r"\boriginal\b|\binstead\b", re.IGNORECASE)
_TOLD: Mapping[str, re.Pattern[str]] = {
    "status": re.compile(
        r"\b(pending|processed|delivered|cancelled)\b|\bsorry\b|\bcan ?not\b|\bunable\b", re.IGNORECASE
    ),
    "price": re.compile(r"\d+\.\d\d|\bsorry\b|\bcan ?not\b|\bunable\b", re.IGNORECASE),
    "refund_to": re.compile(r"\bdone\b|\breturned\b|\brequested\b|\bupdated\b|\btransferr(ed|ing)\b", re.IGNORECASE),
}
"""What settles a wish, where the usual words do not: questions, and a refusal that is not the end."""


def customer(task: Task, seed: int) -> ScriptedUser:
    """The customer of one episode."""
    who = task.data["customer"]
    known = {"email": who["email"], "name": f"{who['first_name']} {who['last_name']}", "zip": who["zip"]}
    facts = {fact: Fact(_PATTERNS[fact], _said(fact, value)) for fact, value in known.items()}
    return ScriptedUser(f"{task.id}/{seed}", [_wish(wish) for wish in task.data["wishes"]], facts)


def _wish(wish: Json) -> Wish:
    facts = {fact: Fact(_PATTERNS[fact], _said(fact, value, wish)) for fact, value in wish["knows"].items()}
    if wish.get("yields"):
        facts["original"] = Fact(_ORIGINAL, _YIELDING)
    before = {fact: Fact(_PATTERNS[fact], _said(fact, value)) for fact, value in wish.get("before", {}).items()}
    change = [wish["change"]] if "change" in wish else []
    return Wish(
        OPENINGS[wish["verb"]],
        facts,
        change_of_mind=change,
        before=before,
        **({"settled": _TOLD[wish["verb"]]} if wish["verb"] in _TOLD else {}),
    )


def _said(fact: str, value: str | None, wish: Json | None = None) -> Sequence[str]:
    """Ways to tell a fact; none at all for what the customer does not know."""
    if fact == "order" and value is None and wish is not None:
        return [wording.format(wish["hint"]) for wording in _FORGOTTEN]
    if value is None:
        return ()
    if fact == "reason":
        return _REASONS[value]
    return [wording.format(value) for wording in _ANSWERS[fact]]
