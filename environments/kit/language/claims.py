"""What an agent states, held against what is so at that moment.

A domain says by data how people put its facts (``claims.yaml``, notation of :mod:`environments.kit.language.patterns`;
what no agent of a desk can do stands in ``deeds.yaml`` beside this file), and gives for each moment the facts
themselves, a sheet for each thing (an order, a flight, an item of an order)::

    frames:
      - role: status                    # what the sheet calls it
        of: [order]                     # the kinds of things that have it
        values: {shipped: ["shipped", "on its way"], ...}
        unless: ["..."]                 # a clause with this does not state it
        adjective: true                 # a value just before a thing is said of that one
        inside: true                    # a "not" within a phrase denies it too, not only one before it
      - role: place
        of: [order]
        slot: city                      # the value is a word of this vocabulary, standing at {city}
        phrases: ["(is|located) ... in {city}"]
      - role: items
        of: [order]
        each: item                      # every word of this vocabulary that follows a phrase in its clause
        phrases: ["contains"]
      - role: can
        of: [order]
        moods: [can]                    # is (default), will, can: what the clause says of it
        values: {cancel: ["<cancel>"]}

Slots that are no vocabulary are typed: ``money``, ``number`` (also in words), and ``slots`` (name -> expression).

A statement is a clause that asserts: no question, no condition, no wish, no intention. Its subject is the nearest
thing named in it (all of them, where they are joined), else one named in its sentence, else the last one named, else
one under discussion; ``both`` and ``all`` speak of all. The value must stand in the subject's sheet; a denial ("is
not pending") must not. Where nothing is known of a role, or no subject can be found, the statement counts neither way
(:attr:`Review.unread`).

Amounts of money are held against every sheet: one that stands nowhere is untrue, whatever it is said of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias

from environments.kit.language.patterns import expression, load, translated
from environments.kit.language.text import normalised, sentences
from mua.types import Json

# The clauses of a sentence, what mood each is in, and what is denied in it. Works on normalised text.
#
# =======  =======================================================================
# mood     the clause says
# =======  =======================================================================
# is       that something is so or was done
# will     that something will be so
# can      that something can or can not be done
# none     nothing: it asks, supposes, wishes, intends, tells a rule, or repeats
# =======  =======================================================================

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


Thing: TypeAlias = str
"""A kind and a name, such as ``order 4821``; in lower case."""
Sheet: TypeAlias = Mapping[str, frozenset[str]]
"""Role -> the values that are so, in lower case. A role that is missing is not known."""
AGENT: Thing = "agent"
"""The one that speaks; what it has done stands in its sheet, under ``deed``."""
_DEEDS = Path(__file__).with_name("deeds.yaml")


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
    unless: re.Pattern[str]
    phrases: tuple[str, ...]
    moods: tuple[str, ...]
    slot: str = ""
    each: str = ""
    inside: bool = False
    adjective: bool = False


@dataclass(frozen=True, slots=True)
class _Stated:
    """A value that a clause states, and where."""

    value: str
    start: int
    end: int
    denied: bool
    named: bool = False
    """Whether the value is a word of its own, which is then not the subject."""


@dataclass(frozen=True, slots=True)
class _Mention:
    thing: Thing
    start: int
    end: int

    @property
    def kind(self) -> str:
        return self.thing.partition(" ")[0]


class ClaimReader:
    """Finds the claims of one domain's agents and judges them."""

    def __init__(self, words: Json) -> None:
        """``words`` is the domain's file:

        ``things`` (kind -> expression with a group, over normalised text), ``frames``, ``lists``, ``slots``, ``unsaid``
        (clauses with this state nothing), ``names`` (names that hold other words, such as a watering can), and
        ``deeds: false`` for a desk to which ``deeds.yaml`` does not apply.
        """
        shared = load(_DEEDS)
        self._lists: Mapping[str, Sequence[str]] = {**shared["lists"], **words.get("lists", {})}
        self._things = {kind: re.compile(pattern) for kind, pattern in words.get("things", {}).items()}
        own_deeds = [frame for frame in shared["frames"] if words.get("deeds", True)]
        self._frames = [self._frame(frame) for frame in [*words["frames"], *own_deeds]]
        self._kinds = list(dict.fromkeys(kind for frame in self._frames for kind in frame.kinds))  # the file's order
        self._patterns = {**_TYPED, **words.get("slots", {})}
        self._slots: dict[tuple[str, tuple[str, ...]], re.Pattern[str]] = {}
        self._names = expression(words.get("names", ()), self._lists)
        self._unsaid = expression([*shared["unsaid"], *words.get("unsaid", ())], self._lists)

    def review(self, message: str, moment: Moment) -> Review:
        """Every claim of ``message``, judged."""
        found, named = Review(), list(moment.focus)
        for sentence in sentences(message):
            text = self._names.sub(lambda name: name[0].replace(" ", "_"), sentence.text)
            mentioned = self._mentioned(text, moment)
            if not sentence.question:
                for clause in clauses(text):
                    found |= self._clause(clause, mentioned, named, moment)
            named += [one.thing for one in mentioned if one.thing in moment.sheets]
        return found

    def _clause(self, clause: Clause, sentence: Sequence[_Mention], named: Sequence[Thing], moment: Moment) -> Review:
        found = Review()
        if clause.mood == "none" or self._unsaid.search(clause.text):
            return found
        own = self._mentioned(clause.text, moment)
        for frame in self._frames:
            if clause.mood in frame.moods and not frame.unless.search(clause.text):
                for stated in self._stated(frame, clause.text, moment):
                    found |= _judged(frame, stated, _Places(clause.text, own, sentence, named), moment)
        return found | (_amounts(clause.text, moment) if clause.mood in ("is", "will") else Review())

    def _stated(self, frame: _Frame, text: str, moment: Moment) -> Iterator[_Stated]:
        """The values that a clause states for a frame."""
        for value, pattern in frame.values:
            for found in pattern.finditer(text):
                no = denied(text, found.start()) or (frame.inside and _INSIDE.search(found[0]) is not None)
                yield _Stated(value, found.start(), found.end(), no)
        if frame.slot:
            for found in self._slotted(frame, moment).finditer(text):
                name = next(name for name, part in found.groupdict().items() if part)
                start, end = found.span(name)
                value = _canonical(frame.slot, found[name])
                yield _Stated(value, start, end, denied(text, start), named=True)
        if frame.each and (head := self._slotted(frame, moment).search(text)):
            for value, start, end in self._words(frame.each, text, moment):
                if start >= head.end():
                    yield _Stated(value, start, end, denied(text, head.end()), named=True)

    def _slotted(self, frame: _Frame, moment: Moment) -> re.Pattern[str]:
        words = tuple(moment.vocabularies.get(frame.slot, ()))
        key = (" ".join(frame.phrases), words)
        if key not in self._slots:
            choice = self._patterns.get(frame.slot) or _choice(words)
            parts = []
            for index, phrase in enumerate(frame.phrases):
                slot = f"(?P<slot{index}>{choice})"
                parts.append(translated(phrase, self._lists).replace(f"{{{frame.slot}}}", slot, 1))
            self._slots[key] = re.compile(rf"(?<![\w#$])(?:{'|'.join(parts)})(?!\w)")
        return self._slots[key]

    def _words(self, kind: str, text: str, moment: Moment) -> Iterator[tuple[str, int, int]]:
        words = tuple(moment.vocabularies.get(kind, ()))
        for found in _vocabulary(words).finditer(text):
            yield found[1].replace("_", " "), found.start(), found.end()

    def _mentioned(self, text: str, moment: Moment) -> list[_Mention]:
        """The things named in a text, in order, known or not."""
        found = []
        for kind, pattern in self._things.items():
            found += [_Mention(f"{kind} {match[1]}", match.start(), match.end()) for match in pattern.finditer(text)]
        for kind in self._kinds:  # the sort below keeps their order where kinds share a word
            found += [_Mention(f"{kind} {word}", start, end) for word, start, end in self._words(kind, text, moment)]
        return sorted(found, key=lambda one: one.start)

    def _frame(self, frame: Json) -> _Frame:
        values = tuple((value, expression(phrases, self._lists)) for value, phrases in frame.get("values", {}).items())
        return _Frame(
            frame["role"],
            tuple(frame["of"]),
            values,
            unless=expression(frame.get("unless", ()), self._lists),
            phrases=tuple(frame.get("phrases", ())),
            moods=tuple(frame.get("moods", ("is",))),
            **{name: frame[name] for name in ("slot", "each", "inside", "adjective") if name in frame},
        )


_INSIDE = re.compile(r"\b(?:not|never|no|nobody)\b(?! (?:longer|sooner|doubt))")


# Who it is said of.


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the subject of a statement may be named, the likeliest first."""

    clause: str
    own: Sequence[_Mention]
    sentence: Sequence[_Mention]
    named: Sequence[Thing]


_BOTH = re.compile(r"\b(both|all|each|every)\b")


def _judged(frame: _Frame, stated: _Stated, places: _Places, moment: Moment) -> Review:
    if frame.kinds == (AGENT,):
        return _verdict(frame, stated, [AGENT], moment)
    quantified, kind = _quantifier(places.clause, frame.kinds)
    if kind:
        return _of_all(frame, stated, places, moment, quantified, kind)
    here = [one for one in places.own if one.kind in frame.kinds and not (stated.named and _within(one, stated))]
    if here:
        after = [one for one in here if 0 < one.start - stated.end <= _CLOSE][: int(frame.adjective)]
        described = [one.thing for one in after if "," not in places.clause[stated.end : one.start]]
        return _verdict(frame, stated, described or _nearest(here, stated, places.clause), moment)
    others = [one for one in frame.kinds if re.search(rf"\b(?:your|the) other {one}\b", places.clause)]
    if others:
        return _of_another(frame, stated, places, moment, others)
    if spoken := [one for one in frame.kinds if re.search(rf"\b{one}\b", places.clause)]:
        return _of_focus(frame, stated, places, moment, spoken)
    around = [one for one in places.sentence if one.kind in frame.kinds and one.thing.partition(" ")[2] != stated.value]
    if around:
        return _verdict(frame, stated, [around[0].thing], moment)
    return _of_focus(frame, stated, places, moment, frame.kinds)


_CLOSE = 20
"""Characters between an adjective and its noun, at most."""


def _within(mention: _Mention, stated: _Stated) -> bool:
    return mention.start < stated.end and stated.start < mention.end


def _nearest(here: Sequence[_Mention], stated: _Stated, clause: str) -> list[Thing]:
    """The thing named in the words of the value, or last before it, or first after it, with those joined to it."""
    inside = [one for one in here if _within(one, stated)]
    before = [one for one in here if one.start < stated.start]
    chosen = inside or list(reversed(before)) or list(here)
    joined = [chosen[0]]
    for one in chosen[1:]:
        first, second = sorted((joined[-1], one), key=lambda mention: mention.start)
        if one.kind != chosen[0].kind or not _JOINED.issuperset(clause[first.end : second.start].split()):
            break
        joined.append(one)
    return [one.thing for one in joined]


_JOINED = frozenset(
    (
        *(",", "and", "or", "nor", "as", "well", "plus", "&", "the", "your", "a", "an", "both", "also"),
        *("order", "orders", "item", "items", "one", "two", "three"),
    )
)
"""Words between things that are named together."""


def _verdict(frame: _Frame, stated: _Stated, things: Sequence[Thing], moment: Moment) -> Review:
    """Of things that are named: each has to have the value, or none if it is denied; there is no other thing."""
    found = Review()
    for thing in things:
        if thing not in moment.sheets:
            found |= _one_claim(thing, frame, stated, False) if thing != AGENT else Review()
        elif frame.role in moment.sheets[thing]:
            found |= _one_claim(thing, frame, stated, bool(_having([thing], frame, stated, moment)))
    return found if found != Review() else Review(unread=(f"{frame.role} {stated.value}",))


def _of_focus(frame: _Frame, stated: _Stated, places: _Places, moment: Moment, kinds: Sequence[str]) -> Review:
    """Of what is under discussion: the latest thing has it, or another one; a denial must hold for the latest."""
    known = [thing for thing in _known(frame, places, moment) if thing.partition(" ")[0] in kinds]
    if not known:
        return Review(unread=(f"{frame.role} {stated.value}",))
    right = _having(known, frame, stated, moment)
    so = known[0] in right if stated.denied else bool(right)
    return _one_claim(right[0] if so else known[0], frame, stated, so)


_NOT_THEIRS = "not yours"
"""What the sheet of a thing says under ``account`` where it is another customer's."""


def _of_another(frame: _Frame, stated: _Stated, places: _Places, moment: Moment, kinds: Sequence[str]) -> Review:
    """Of a thing that is not the one under discussion: the customer has one, and one such has it."""
    known = _known(frame, places, moment)[:1]
    others = [one for one in moment.sheets if one.partition(" ")[0] in kinds and one not in known]
    others = [one for one in others if _NOT_THEIRS not in moment.sheets[one].get("account", ())]
    said = [one for one in others if frame.role in moment.sheets[one]]
    so = _having(said, frame, stated, moment)
    return _one_claim([*so, *said, f"other {kinds[0]}"][0], frame, stated, bool(so))


def _of_all(frame: _Frame, stated: _Stated, places: _Places, moment: Moment, quantifier: str, kind: str) -> Review:
    """Of all things of a kind that are under discussion; ``both`` are two at least."""
    known = [thing for thing in _known(frame, places, moment) if thing.partition(" ")[0] == kind]
    if not known:
        return Review(unread=(f"{frame.role} {stated.value}",))
    having = _having(known, frame, stated, moment)
    return _one_claim(known[0], frame, stated, len(having) == len(known) if quantifier != "both" else len(having) > 1)


def _having(things: Sequence[Thing], frame: _Frame, stated: _Stated, moment: Moment) -> list[Thing]:
    """Those of which the statement is so; the role stands in their sheets."""
    return [thing for thing in things if (stated.value in moment.sheets[thing][frame.role]) != stated.denied]


def _one_claim(thing: Thing, frame: _Frame, stated: _Stated, so: bool) -> Review:
    claim = (Claim(thing, frame.role, stated.value, stated.denied),)
    return Review(true=claim) if so else Review(false=claim)


def _known(frame: _Frame, places: _Places, moment: Moment) -> list[Thing]:
    """The things under discussion that the statement may be of, the latest first."""
    things = dict.fromkeys(reversed([one for one in places.named if one.partition(" ")[0] in frame.kinds]))
    return [thing for thing in things if frame.role in moment.sheets.get(thing, {})]


def _quantifier(clause: str, kinds: Sequence[str]) -> tuple[str, str]:
    """A word such as ``both``, and the kind of things that it speaks of; empty where there is none."""
    for found in _BOTH.finditer(clause):
        for kind in kinds:
            if re.match(rf"(?: of)?(?: the| your| these| those| my)?(?: \w+)? {kind}s?\b", clause[found.end() :]):
                return found[1], kind
    return "", ""


@lru_cache(maxsize=8)
def claim_reader(folder: Path) -> ClaimReader:
    """What finds the claims of the agents of the domain in ``folder``, by its ``claims.yaml``."""
    return ClaimReader(load(folder / "claims.yaml"))


# Typed values.

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
_TENS = {"thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90}
_NUMBERS = {word: number for number, word in enumerate(_SMALL)} | _TENS
_NUMBER = r"\d+|" + "|".join(_NUMBERS)
_MONEY = (
    r"(?:\$|usd|us\$) ?\d[\d,]*(?:\.\d\d?)?|\d[\d,]*(?:\.\d\d?)? ?(?:dollars|usd|bucks)|\d[\d,]*\.\d\d"
    rf"|(?:an? )?(?:{'|'.join(_NUMBERS)}|hundred)(?:(?: and)?[ -](?:{'|'.join(_NUMBERS)}|hundred|thousand))* dollars"
)
_CENTS = rf"(?: \d\d(?! ?[\w-])| and (?:\d+|(?:{'|'.join(_NUMBERS)})(?:[ -](?:{'|'.join(_NUMBERS)}))?) cents)?"
_TYPED = {"money": rf"(?<![\w.,])(?:{_MONEY}){_CENTS}", "number": rf"(?<![\w.,])(?:{_NUMBER})"}
_SUM = re.compile(rf"(?<![\w#.$])(?:{_MONEY}){_CENTS}(?![\w%]|\.\d)")


def _canonical(slot: str, text: str) -> str:
    if slot == "money":
        return f"{money(text):g}"
    if slot == "number":
        return str(_NUMBERS.get(text, text))
    return normalised(text.replace("_", " "))


def money(text: str) -> float:
    """The sum that ``text`` names, in dollars."""
    dollars, _, rest = text.partition("dollars")
    cents = rest.removesuffix(" cents").removeprefix(" and ")
    return _number(dollars) + _number(cents) / 100


def _number(text: str) -> float:
    digits = re.sub(r"[^\d.]", "", text).strip(".")
    if digits:
        return float(digits)
    total = part = 0
    for word in re.split(r"[ -]", text.strip()):
        if word == "hundred":
            part = max(part, 1) * 100
        elif word == "thousand":
            total, part = total + max(part, 1) * 1000, 0
        else:
            part += _NUMBERS.get(word, 0)
    return float(total + part)


def _amounts(text: str, moment: Moment) -> Review:
    if not moment.amounts:
        return Review()
    found = [money(match[0]) for match in _SUM.finditer(text)]
    claims = [(Claim("money", "amount", f"{amount:g}", denied=False), amount in moment.amounts) for amount in found]
    return Review(tuple(c for c, so in claims if so), tuple(c for c, so in claims if not so))


@lru_cache(maxsize=256)
def _vocabulary(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-])({_choice(words)})(?:s|es)?(?![\w-])")


def _choice(words: Iterable[str]) -> str:
    return (
        "|".join(re.escape(normalised(word)).replace("\\ ", "[ _]") for word in sorted(words, key=len, reverse=True))
        or r"(?!)"
    )
