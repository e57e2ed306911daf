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
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

Mood: TypeAlias = Literal["is", "will", "can", "none"]


@dataclass(frozen=True, slots=True)
class Clause:
    """A part of a sentence with its own verb."""

    text: str
    mood: Mood


_START = (
    r"(?:i|we|it|your|the|this|that|you|there|they|he|she|all|both|nothing|none|no|here|my|our|order|orders|flight|line|please"
    r"|is|are|was|were|has|have|can|will|would|therefore|so)"
)
_SPLIT = re.compile(
    rf" ?; ?| , (?:and |but |so |or |yet |now |then )?(?={_START}\b)| , (?=(?:which|who|where|because|since|as|while|though|although|however|therefore|then|so|but)\b)"
    rf"| (?:and|but|yet) (?={_START}\b)"
    r"| (?=(?:because|since|although|though|whereas|so that)\b)| , (?=(?:if|unless|once|when|until|before|after)\b)"
    r"| (?=(?:if|unless|as soon as|in case|provided)\b)| (?:and|but) (?=(?:just |already |also |then |now )?[a-z]+(?:ed|ent|ut|ook)\b)"
)
_VERB = re.compile(
    r"\b(?:is|are|was|were|am|be|been|has|have|had|will|can|could|would|do|does|did|costs?|goes|go|went|contains?|includes?|holds?"
    r"|shows?|says?|lists?|remains?|stays?|sits?|lies|belongs?|comes?|came|gets?|got|sent|paid|made|told|found|took|gave|put|set"
    r"|[a-z]{2,}ed|[a-z]{3,}ing)\b"
)


@lru_cache(maxsize=4096)
def clauses(text: str) -> tuple[Clause, ...]:
    """The clauses of a sentence, in order."""
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
    return tuple(Clause(part, "none" if supposed else mood_of(part)) for part in parts)


_SUPPOSED = re.compile(
    r"(?:and |but |so |then )*(?:if|unless|in case|once|as soon as|whenever|provided|assuming|suppose)\b"
)


def _colons(text: str) -> list[str]:
    """Parts at colons; a label (``status : shipped``) stays with what it labels."""
    parts = re.split(r" ?: ", text)
    found = [parts[0]]
    for part in parts[1:]:
        short = len(found[-1].split()) <= 4 and not _FINITE.search(found[-1])
        if short or not _VERB.search(part):
            found[-1] += f" : {part}"
        else:
            found.append(part)
    return found


_FINITE = re.compile(r"\b(?:is|are|was|were|am|has|have|had|will|can|could|did|do)\b")
_PLAIN = re.compile(
    r"\b(?:that|which|what|about what) you (?:have |had |just )?(?:asked|requested|wanted|ordered|bought|named|mentioned|chose|gave|need|needed|wish)(?: me)?(?: for| about)?\b|"
    r"\b(?:i|we) (?:can|could) (?:now |already |indeed |clearly )*(?:see|confirm|tell|say|assure|verify|report)(?: to)?(?: you)?(?: now)?(?: that)?\b"
    r"|\b(?:as|like|just as|exactly as|the way|what) (?:you |was |we |had )*(?:have |had )?(?:requested|asked(?: for)?|asked me to|wished|wanted|wish|agreed|instructed|ordered|confirmed|discussed)\b"
    r"|\b(?:i am |we are |am )?(?:happy|glad|pleased|sorry|afraid|delighted|sad) to (?:say|tell|confirm|report|inform|announce|let)(?: you)?(?: know)?(?: that)?\b"
    r"|\b(?:let me|allow me to|i would like to|i want to|i have to|i must|may i|i should|i would) (?:just )?(?:confirm|tell|inform|say|let|add|point out|mention|note)(?: you)?(?: know)?(?: that)?\b"
    r"|\bplease (?:note|know|be (?:advised|aware|informed|assured)|rest assured)(?: that)?\b|\bthat would be\b|\b(?:it|this) (?:must|has to) be said\b"
)
_NONE = re.compile(
    r"^(?:and |but |so |then |okay , |sure , )*(?:if|unless|whenever|in case|should|provided|assuming|suppose|supposing|until|as soon as|only if|please|kindly"
    r"|let me|let us|would|could|do|does|did|shall|may|can|what|which|who|whose|where|how|why|whether|or|were|had)\b"
    r"|\b(?:if|whether|unless|would|should|might|may|shall|must|ought|perhaps|maybe|in order to|so that|how to|let me|let us|please|or not)\b"
    r"|\byou (?:\w+ ){0,2}(?:want|wants|wanted|wish|wished|like|liked|need|needed|ask|asked|request|requested|say|said|mention|mentioned|tell|told|hope|hoped|plan|think|thought|try|tried|prefer|meant|mean|expected|are (?:asking|looking|trying|saying|telling|wishing|hoping|requesting))\b"
    r"|\b(?:your|the|this|a) (?:wish|request|question|desire) (?:to|is to|for|about)\b"
    r"|\b(?:i|we) (?:will|shall|am going to|are going to|need to|need|have to|want|intend|plan|hope|try|am about to|are about to|am trying|still have to|am happy|am able|can help|only|just need)\b(?! (?:checked|looked))"
    r"|\b(?:to be|before|until|once|as soon as|when) (?:i|we|you|it|that|this|the|your)\b"
    r"|\b(?:before|without|instead of|after) [a-z]+ing\b.{0,40}$"
    r"|\b(?:is|are|get|getting) ready to\b|\bin which case\b|\baccording to you\b|\b(?:only|any) [a-z]+ (?:orders?|items?)\b|\bfor example\b|\bsuch as\b"
)
_CAN = re.compile(
    r"\b(?:can|could|able|unable|possible|impossible|eligible|ineligible|allowed|permitted|entitled|no way|too late|not an option|qualif\w+)\b"
)
_WILL = re.compile(
    r"\b(?:will|is going to|are going to|is due|is expected|are expected|is to be|are to be|is about to)\b"
)


def mood_of(clause: str) -> Mood:
    """What a clause says of what it speaks of."""
    plain = _PLAIN.sub(" ", clause).strip(" ,")
    if _NONE.search(plain):
        return "none"
    if _CAN.search(plain):
        return "can"
    return "will" if _WILL.search(plain) else "is"


_DENIAL = re.compile(
    r"\b(?:not|never|no longer|neither|nor|hardly|nothing|none|nobody|without|instead of|rather than|failed to|unable|impossible|ineligible"
    r"|no way|too late|no(?! (?:doubt|problem|worries|sooner)))\b(?! only\b)(?:(?! (?:but|so|because|since|as|which|and now) | , ).){0,48}$"
)


def denied(clause: str, at: int) -> bool:
    """Whether what stands at ``at`` is denied by a word before it."""
    return _DENIAL.search(clause[:at]) is not None
