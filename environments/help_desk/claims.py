"""What the agent told the customer, as claims that can be checked.

The policy fixes the wording of facts ("order K7 is shipped"), so a claim is found by a pattern and a reward
cannot be had by naming every possible status: two different claims about one thing cancel the fact.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from mua.types import Json

_CLAIM = re.compile(
    r"\b(order\s+[a-z]\d+|[a-z]+)\s+is\s+"
    r"(?:(pending|shipped|delivered)|in\s+([a-z]+)|(not\s+on\s+your\s+account)|(final\s+sale))\b",
    re.IGNORECASE,
)
_ATTRIBUTES = ("status", "place", "account", "sale")


def claims(texts: Iterable[str]) -> dict[tuple[str, str], set[str]]:
    """Every claim in ``texts``: (``"order K7"``, attribute) -> the values stated, lower case."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for text in texts:
        for match in _CLAIM.finditer(text):
            subject, *values = match.groups()
            attribute, value = next((a, v) for a, v in zip(_ATTRIBUTES, values, strict=True) if v)
            found[_plain(subject), attribute].add(_plain(value))
    return found


def claim(fact: Json) -> str:
    """The wording that the policy fixes for a fact (``subject``, ``attribute``, ``value``)."""
    where = "in " if fact["attribute"] == "place" else ""
    return f"{fact['subject']} is {where}{fact['value']}."


def missing_facts(facts: Sequence[Json], told: Iterable[str]) -> list[str]:
    """The required facts (``subject``, ``attribute``, ``value``) that were not told, or told with a contradiction."""
    stated = claims(told)
    missing = []
    for fact in facts:
        values = stated.get((_plain(fact["subject"]), fact["attribute"]), set())
        if values != {_plain(fact["value"])}:
            said = ", ".join(sorted(values)) or "nothing"
            missing.append(f"{fact['subject']} is {fact['value']} (said: {said})")
    return missing


def _plain(text: str) -> str:
    return " ".join(text.lower().split())
