"""What an agent states, held against what is so at that moment.

A domain says by data how people put its facts (``claims.yaml``, notation of :mod:`mua.language.patterns`), and gives for each
moment the facts themselves, a sheet for each thing (an order, a flight, an item of an order)::

    frames:
      - role: status                    # what the sheet calls it
        of: [order]                     # the kinds of things that have it
        values: {shipped: ["shipped", "on its way"], ...}
      - role: place
        slot: city                      # the value is a word of this vocabulary, standing at {city}
        phrases: ["(is|located) ... in {city}"]

A statement is a clause that asserts: no question, no condition, no wish, no intention. Its subject is the thing named in
it, else in its sentence, else the last one named, else the one under discussion. The value must stand in the subject's
sheet; a denial ("is not pending") must not. Where nothing is known of a role, or no subject can be found, the statement
counts neither way (:attr:`Review.unread`).

Amounts of money are held against every sheet: one that stands nowhere is untrue, whatever it is said of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from mua.language.patterns import expression, translated
from mua.language.text import Sentence, normalised, sentences
from mua.types import Json

Thing: TypeAlias = str
"""A kind and a name, such as ``order 4821``; in lower case."""
Sheet: TypeAlias = Mapping[str, frozenset[str]]
"""Role -> the values that are so, in lower case. A role that is missing is not known."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What is so when something is said."""

    sheets: Mapping[Thing, Sheet]
    focus: Sequence[Thing] = ()
    """Things under discussion, the latest last: what is said without naming a thing is said of one of them."""
    vocabularies: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Slot -> the words that may stand there (cities, products, names), in any case."""
    amounts: frozenset[float] = frozenset()
    """Every sum of money that may be spoken of; empty: sums are not checked."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing stated."""

    thing: Thing
    role: str
    value: str
    denied: bool

    def __str__(self) -> str:
        return f"{self.thing}: {self.role} {'not ' if self.denied else ''}{self.value}"


@dataclass(frozen=True, slots=True)
class Review:
    """What the claims of one text came to."""

    true: tuple[Claim, ...] = ()
    false: tuple[Claim, ...] = ()
    unread: tuple[str, ...] = ()
    """Statements that speak of a role but of nothing whose sheet is known."""

    def __or__(self, other: Review) -> Review:
        return Review(self.true + other.true, self.false + other.false, self.unread + other.unread)


@dataclass(frozen=True, slots=True)
class _Frame:
    role: str
    kinds: tuple[str, ...]
    values: tuple[tuple[str, re.Pattern[str]], ...]
    slot: str
    phrases: tuple[str, ...]
    unless: re.Pattern[str]


class ClaimReader:
    """Finds the claims of one domain's agents and judges them."""

    def __init__(self, words: Json) -> None:
        """``words``: ``things`` (kind -> expression with a group, over normalised text), ``frames``, ``lists``."""
        self._lists: Mapping[str, Sequence[str]] = words.get("lists", {})
        self._things = {kind: re.compile(pattern) for kind, pattern in words.get("things", {}).items()}
        self._frames = [self._frame(frame) for frame in words["frames"]]
        self._slots: dict[tuple[str, tuple[str, ...]], re.Pattern[str]] = {}
        self._unsaid = expression(words.get("unsaid", ()), self._lists)

    def review(self, message: str, moment: Moment) -> Review:
        """Every claim of ``message``, judged."""
        found, named = Review(), list(moment.focus)
        for sentence in sentences(message):
            mentioned = self._mentioned(sentence.text, moment)
            if not sentence.question:
                found |= self._sentence(sentence, mentioned, named, moment)
            named += [thing for thing in mentioned if thing in moment.sheets]
        return found

    def _sentence(self, sentence: Sentence, mentioned: Sequence[Thing], named: Sequence[Thing], moment: Moment) -> Review:
        found = Review()
        for clause in clauses(sentence.text):
            if not asserted(clause) or self._unsaid.search(clause):
                continue
            own = self._mentioned(clause, moment)
            for frame in self._frames:
                for value, denied in self._values(frame, clause, moment):
                    found |= _judged(frame, value, denied, (own, mentioned, list(reversed(named))), moment)
            found |= _amounts(clause, moment)
        return found

    def _values(self, frame: _Frame, clause: str, moment: Moment) -> Iterable[tuple[str, bool]]:
        """The values that a clause states for a frame, and whether each is denied."""
        if frame.unless.search(clause):
            return
        for value, pattern in frame.values:
            for found in pattern.finditer(clause):
                yield value, denied(clause, found.start())
        if frame.slot:
            for found in self._slotted(frame, moment).finditer(clause):
                groups = [text for text in found.groups() if text]
                if groups:
                    yield normalised(groups[-1]), denied(clause, found.start(found.lastindex or 0))

    def _slotted(self, frame: _Frame, moment: Moment) -> re.Pattern[str]:
        words = tuple(moment.vocabularies.get(frame.slot, ()))
        key = (" ".join(frame.phrases), words)
        if key not in self._slots:
            choice = "|".join(re.escape(normalised(word)) for word in sorted(words, key=len, reverse=True)) or r"(?!)"
            parts = [translated(p, self._lists).replace(f"{{{frame.slot}}}", f"({choice})") for p in frame.phrases]
            self._slots[key] = re.compile(rf"(?<![\w#$])(?:{'|'.join(parts)})(?!\w)")
        return self._slots[key]

    def _mentioned(self, text: str, moment: Moment) -> list[Thing]:
        """The things named in a text, in order, known or not."""
        found = []
        for kind, pattern in self._things.items():
            found += [(match.start(), f"{kind} {match[1]}") for match in pattern.finditer(text)]
        for kind in moment.vocabularies:
            if any(kind in frame.kinds for frame in self._frames):
                words = [normalised(word) for word in moment.vocabularies[kind]]
                found += [(m.start(), f"{kind} {w}") for w in words for m in re.finditer(rf"(?<!\w){re.escape(w)}(?!\w)", text)]
        return [thing for _, thing in sorted(found)]

    def _frame(self, frame: Json) -> _Frame:
        values = tuple((value, expression(phrases, self._lists)) for value, phrases in frame.get("values", {}).items())
        return _Frame(
            frame["role"],
            tuple(frame["of"]),
            values,
            frame.get("slot", ""),
            tuple(frame.get("phrases", ())),
            expression(frame.get("unless", ()), self._lists),
        )


def _judged(
    frame: _Frame, value: str, denial: bool, places: Sequence[Sequence[Thing]], moment: Moment
) -> Review:
    """Of the first place that names a thing of the right kind: its first, or for what is only under discussion, any."""
    for index, things in enumerate(places):
        fitting = [thing for thing in things if thing.partition(" ")[0] in frame.kinds]
        known = [thing for thing in fitting if frame.role in moment.sheets.get(thing, {})]
        if fitting and not known and index < 2:
            if all(thing not in moment.sheets for thing in fitting):
                return Review(false=(Claim(fitting[0], frame.role, value, denial),))
            continue
        if known:
            chosen = known if index == 2 else known[:1]
            right = [thing for thing in chosen if (value in moment.sheets[thing][frame.role]) != denial]
            if index == 2:
                right = right[:1] if (known[0] in right or not denial) else []
            claim = Claim((right or chosen)[0], frame.role, value, denial)
            return Review(true=(claim,)) if right else Review(false=(claim,))
    return Review(unread=(f"{frame.role} {value}",))


_MONEY = re.compile(r"\$ ?(\d[\d,]*(?:\.\d\d?)?)|(\d[\d,]*(?:\.\d\d?)?) ?(?:dollars|usd|bucks)")


def _amounts(clause: str, moment: Moment) -> Review:
    if not moment.amounts:
        return Review()
    found = [float((match[1] or match[2]).replace(",", "")) for match in _MONEY.finditer(clause)]
    claims = [(Claim("money", "amount", f"{amount:g}", False), amount in moment.amounts) for amount in found]
    return Review(tuple(c for c, so in claims if so), tuple(c for c, so in claims if not so))


_CLAUSE = re.compile(
    r" ?[:;] ?| , (?=(?:and|but|so|because|since|which|while|though|although|however|therefore|then|i|we|it|your|the|this|that|you|there)\b)"
    r"| (?:and|but) (?=(?:i|we|it|your|the|this|that|you|there|is|was|has|can|will|would|therefore|so)\b)"
    r"| (?=(?:because|since|although|though|while|whereas|so that|so)\b)| , | (?=if\b|unless\b|once\b|when\b|until\b|before\b|after\b)"
)
_NOT_ASSERTED = re.compile(
    r"^(?:if|unless|once|when|whenever|in case|should|provided|assuming|until|before|as soon as|only if|please|let me|let us|to|would|could|do|does|did|shall|may|can|what|which|who|where|how|why|whether|or)\b"
    r"|\b(?:if|whether|unless|would|could|should|might|may|shall|must|want(?:s|ed)?|wish(?:es|ed)?|like|need(?:s|ed)? to|ask(?:ed|ing)?|request(?:ed|ing)?|try(?:ing)?|let me|let us|going to|about to|please|will|hope|intend|plan|able to|can|in order to|how to|before i|so i can|make sure|told me|said|mentioned|according to you|you say)\b"
)
_ASSERTED_ANYHOW = re.compile(
    r"\b(?:will (?:not )?(?:now )?(?:arrive|be delivered|receive|get|see|go|be sent|be shipped|be (?:refunded|credited|charged))|can (?:see|confirm|tell)|i can not|can not)\b"
)


def clauses(text: str) -> list[str]:
    """The clauses of a normalised sentence."""
    return [part.strip() for part in _CLAUSE.split(text) if part and part.strip()]


def asserted(clause: str) -> bool:
    """Whether a clause states something, rather than asking, supposing, wishing or intending."""
    plain = re.sub(r"\b(?:i|we) can (?:see|confirm|tell)(?: you)?(?: that)?\b|\bas (?:you )?(?:requested|asked|wished|you wanted)\b", " ", clause).strip()
    return _NOT_ASSERTED.search(plain) is None


_DENIAL = re.compile(r"\b(?:not|never|no longer|neither|nor|hardly|isn|without)\b(?! only)(?:(?! but ).){0,28}$")


def denied(clause: str, at: int) -> bool:
    """Whether what stands at ``at`` is denied by a word shortly before it."""
    return _DENIAL.search(clause[:at]) is not None
