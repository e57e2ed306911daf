"""The clauses of a sentence, what mood each is in, and what is denied in it. Works on normalised text.

=======  =======================================================================
mood     the clause says
=======  =======================================================================
is       that something is so or was done
will     that something will be so
can      that something can or can not be done
none     nothing: it asks, supposes, wishes, intends, tells a rule, or repeats
=======  =======================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias

from environments.kit.language.patterns import load

Mood: TypeAlias = Literal["is", "will", "can", "none"]
_WORDS = load(Path(__file__).with_name("clauses.yaml"))


def _any(parts: Iterable[str]) -> str:
    return rf"(?:{'|'.join(parts)})"


_START = _any(_WORDS["starts"])
_SPLIT = re.compile(
    rf" ?; ?| , (?:and |but |so |or |yet |now |then )?(?={_START}\b)| (?:and|but|yet) (?={_START}\b)"
    r"| , (?=(?:which|who|where|because|since|as|while|though|although|however|therefore|then|so|but)\b)"
    r"| (?=(?:because|since|although|though|whereas|so that|if|unless|as soon as|in case|provided)\b)"
    r"| , (?=(?:once|when|until|before|after)\b)"
    r"| (?:and|but) (?=(?:just |already |also |then |now )?[a-z]+(?:ed|ent|ut|ook)\b)"
)
_VERB = re.compile(rf"\b{_any(_WORDS['verbs'])}\b")
_FINITE = re.compile(r"\b(?:is|are|was|were|am|has|have|had|will|can|could|did|do)\b")
_SUPPOSED = re.compile(
    r"(?:and |but |so |then )*(?:if|unless|in case|once|as soon as|whenever|provided|assuming|suppose)\b"
)
_PLAIN = re.compile(rf"\b{_any(_WORDS['plain'])}\b")
_NONE = re.compile(
    rf"^(?:and |but |so |then |okay , |sure , )*{_any(_WORDS['none_at_first'])}\b|\b{_any(_WORDS['none'])}(?!\w)"
)
_CAN = re.compile(rf"\b{_any(_WORDS['can'])}\b")
_WILL = re.compile(rf"\b{_any(_WORDS['will'])}\b")
_DENIAL = re.compile(rf"\b{_any(_WORDS['denials'])}\b(?! only\b)(?:(?!{'|'.join(_WORDS['undenied'])}).){{0,48}}$")


@dataclass(frozen=True, slots=True)
class Clause:
    """A part of a sentence with its own verb."""

    text: str
    mood: Mood


@lru_cache(maxsize=4096)
def clauses(text: str) -> tuple[Clause, ...]:
    """The clauses of a sentence, in order; in one that begins with a condition all are supposed."""
    parts: list[str] = []
    for piece in _colons(text):
        for part in _SPLIT.split(piece):
            words = part.strip(" ,")
            if not words:
                continue
            if parts and not piece.startswith(part) and not (_VERB.search(words) and _VERB.search(parts[-1])):
                parts[-1] += f" , {words}"
            else:
                parts.append(words)
    supposed = _SUPPOSED.match(text) is not None
    plain = [parts[0], *(_RELATIVE.sub("", part) for part in parts[1:])] if parts else []
    return tuple(Clause(part, "none" if supposed else mood_of(one)) for part, one in zip(parts, plain, strict=True))


_RELATIVE = re.compile(
    r"^which (?=(?:is|was|are|were|has|had|costs?|comes|came|does|did|can|could|will|makes|made|adds|means)\b"
    r"(?! why\b))"
)
"""What makes a clause relative states something, other than what makes it a question."""


def _colons(text: str) -> list[str]:
    """Parts at colons; a label (``status : shipped``) stays with what it labels, and so does a list."""
    parts = re.split(r" ?: ", text)
    found = [parts[0]]
    for part in parts[1:]:
        short = len(found[-1].split()) <= 4 and not _FINITE.search(found[-1])
        if short or not _VERB.search(part):
            found[-1] += f" : {part}"
        else:
            found.append(part)
    return found


def mood_of(clause: str) -> Mood:
    """What a clause says of what it speaks of."""
    plain = _PLAIN.sub(" ", clause).strip(" ,")
    if _NONE.search(plain):
        return "none"
    if _CAN.search(plain):
        return "can"
    return "will" if _WILL.search(plain) else "is"


def denied(clause: str, at: int) -> bool:
    """Whether what stands at ``at`` is denied by a word before it."""
    return _DENIAL.search(clause[:at]) is not None
