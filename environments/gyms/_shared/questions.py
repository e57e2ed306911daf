"""Reading questions by rules: what several gyms' oracles need."""

from __future__ import annotations

import re
from collections.abc import Sequence

_YES_NO = re.compile(
    r"^(so |then |and |okay,? |ok,? |hm,? )?"
    r"(is|are|was|were|does|do|did|can|could|has|have|had|would|will|might|may|must|am)\b"
)
_JOINT = re.compile(r"[,;/|&\n]|\b(?:and|or)\b", re.IGNORECASE)
MOST_JOINTS = 4
"""Commas, conjunctions and the like in one question: "green, blue, or red?" has three."""
MOST_WORDS = 60
NEGATED = re.compile(r"\bnot\b|n't\b|\bnever\b|\bno\b|\bcannot\b")


def plain(text: str) -> str:
    """Lower case, single spaces, without punctuation at the end."""
    return " ".join(text.lower().replace("’", "'").split()).rstrip(" ?!.")


def is_yes_no(question: str) -> bool:
    """Whether ``question`` can be answered by yes or no."""
    return _YES_NO.match(plain(question)) is not None


def is_list(text: str) -> bool:
    """Whether ``text`` goes through a list, as somebody does who hopes that one of many words hits."""
    return len(_JOINT.findall(text)) > MOST_JOINTS or len(text.split()) > MOST_WORDS


def pattern(keywords: Sequence[str]) -> re.Pattern[str]:
    """Finds any of ``keywords`` as words; a star at the end stands for any ending."""
    forms = [re.escape(word.rstrip("*")) + (r"\w*" if word.endswith("*") else "") for word in keywords]
    return re.compile(r"\b(?:" + "|".join(forms) + r")(?!\w)", re.IGNORECASE)
