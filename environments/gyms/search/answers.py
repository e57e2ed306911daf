"""Whether an answer is the right one: normalised exact match with the answer or one of its aliases."""

from __future__ import annotations

import re
from collections.abc import Iterable


def normal(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (as SQuAD's exact match compares)."""
    words = re.sub(r"[^\w\s]", " ", text.lower().replace("-", " ")).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def matches(given: str, accepted: Iterable[str]) -> bool:
    """Whether ``given`` is one of ``accepted`` once both are normalised."""
    said = normal(given)
    return bool(said) and said in {normal(one) for one in accepted}
