"""The scripted customer: what an errand tells, asked for by these words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mua.environment.protocol import Task
from mua.types import Json
from mua.users.scripted import SETTLED, Fact, ScriptedUser, Wish

_QUESTIONS = {
    "user_id": r"\buser (id|name)\b|\b(account|customer|member|membership) (id|number|name)\b|\bwho am i\b",
    "reservation": r"\b(which|what) (reservation|booking|trip)\b|\b(reservation|booking) (id|number|code)\b",
    "reason": r"\breason\b|\bwhy\b",
    "payment": r"\b(which|what|how)\b[^?.]*\b(pay|paid|payment|card|charge|refund)",
    "bags": r"\b(how many|what number of)\b[^?.]*\b(bags?|baggages?|luggage|suitcases?)\b",
    "who": r"\b(which|what|whose)\b[^?.]*\b(passenger|name)\b|\bcorrect (name|spelling)\b",
    "date": r"\b(which|what|when)\b[^?.]*\b(day|date|fly)\b",
    "direction": r"\b(which|what)( one)?( of)?( the| your)?( two)? (flights?|legs?|segments?)\b",
    "preference": r"\b(prefer|preference|cheapest|earliest|latest)\b",
    "trip": r"\bone[- ]way\b|\bround[- ]trip\b",
    "cabin": r"\b(which|what)\b[^?.]*\b(cabin|class)\b",
    "passengers": r"\bwho\b[^?.]*\b(fl(y|ies|ying)|travel|go)|\b(which|how many|what)\b[^?.]*\b(passengers|people)\b",
    "insurance": r"\b(want|like|need|add|take|buy|include)\b[^?.]*\binsurance\b|\binsurance\?",
}
ASKED = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _QUESTIONS.items()}
"""Questions by the names of the facts that errands hold."""


def scripted_customer(task: Task, seed: int) -> ScriptedUser:
    """The customer of ``task``; ``seed`` varies the wording."""
    user = task.data["user"]
    own = {"user_id": [f"My user id is {user}.", f"It is {user}.", f"{user}."]}
    wishes = [_wish(errand) for errand in task.data["errands"]]
    return ScriptedUser(f"{task.id}/{seed}", wishes, _facts(own))


def _wish(errand: Json) -> Wish:
    return Wish(
        errand["openings"],
        _facts(errand["facts"]),
        re.compile(errand["settled"]) if errand["settled"] else SETTLED,
        errand["change"],
        _facts(errand["before"]),
    )


def _facts(known: Mapping[str, Sequence[str]]) -> dict[str, Fact]:
    return {name: Fact(ASKED[name], answers) for name, answers in known.items()}
