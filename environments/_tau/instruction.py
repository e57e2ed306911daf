"""A free-text instruction of tau-bench or tau2-bench, taken apart: who somebody is, what it wants, what it answers.

::

    You are Ada Abel in 19122.                        facts    name, zip
    You want to return the lamp of order #W12.        wishes   "I want to return the lamp.", and all of it when asked
    You prefer PayPal.                                asides   told when somebody asks for what they are about
    If the agent asks for confirmation, keep it.      replies  said when it comes to that
    You are shy and brief. Be polite.                 manners  left out

Published instructions are the work of many hands; what fits none of the patterns is an aside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from environments._tau.lists import listed_wishes
from environments._tau.speech import first_person, spoken, tidied
from environments._tau.typed import Facts, facts_in

Trigger = Literal["confirm", "refusal", "asked", "other"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One thing that is wanted."""

    text: str
    """All of it, in the first person."""
    facts: Facts
    inquiry: bool = False
    """Whether it is to be told something."""
    opening: str = ""
    """It without particulars; empty: ``text`` without ids, cut to a length."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Sentences by the fact they answer."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What is said when it comes to something."""

    trigger: Trigger
    about: str
    """The words of the condition."""
    text: str
    then: str = ""
    """The instruction's words for it."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """Everything that the user may say."""

    facts: Facts
    wishes: Sequence[Wanted]
    asides: Sequence[str]
    replies: Sequence[Reply]


def read_instruction(text: str, *, reservations: bool = False) -> Instruction:
    """``text`` taken apart; ``reservations``: six capitals and digits are the number of one."""
    facts = dict(facts_in(text, reservations=reservations))
    if "name" not in facts and "user_id" in facts:
        facts["name"] = (" ".join(part.capitalize() for part in facts["user_id"][0].split("_")[:2]),)
    plain, listed = listed_wishes(tidied(_unlabelled(text)))
    taken = _Taken(reservations)
    for sentence in _sentences(plain):
        taken.take(sentence)
    for reply in taken.replies:
        facts |= dict(_given(reply, facts)) if reply.trigger == "asked" else {}
    wishes = [Wanted(one.text, one.facts, opening=one.opening, details=one.details) for one in listed]
    if not (taken.wishes or wishes) and taken.asides:
        taken.wish(taken.asides.pop(0), inquiry=False)
    return Instruction(facts, taken.wishes + wishes, taken.asides, taken.replies)


class _Taken:
    """Sentences sorted into wishes, asides and replies, in order."""

    def __init__(self, reservations: bool) -> None:
        self.wishes: list[Wanted] = []
        self.asides: list[str] = []
        self.replies: list[Reply] = []
        self._reservations = reservations
        self._last = ""

    def take(self, sentence: str) -> None:
        """Put one sentence where it belongs; manners belong nowhere."""
        if reply := _reply(sentence):
            self._reply(reply)
        elif _is_manner(sentence):
            return
        elif _is_wish(sentence):
            self.wish(spoken(sentence), inquiry=_is_inquiry(sentence))
        else:
            self.asides.append(spoken(sentence))
            self._last = "aside"

    def _reply(self, reply: Reply) -> None:
        if reply.about == "so" and self.replies:
            before = self.replies.pop()
            reply = Reply(before.trigger, before.about, f"{before.text} {reply.text}", before.then)
        self.replies.append(reply)
        self._last = "reply"

    def wish(self, said: str, *, inquiry: bool) -> None:
        """A wish of its own, or more about the one before; what "it" stands for comes with it."""
        before = self.wishes[-1] if self.wishes else None
        refers = _REFERS.search(said) is not None
        if refers and self._last == "aside":
            said = f"{self.asides.pop()} {said}"
        elif before and self._last == "wish" and ((refers and not inquiry) or _repeats(before.text, said)):
            self.wishes.pop()
            said, inquiry = f"{before.text} {said}", before.inquiry and inquiry
        self.wishes.append(Wanted(said, facts_in(said, reservations=self._reservations), inquiry))
        self._last = "wish"


_REFERS = re.compile(
    r"^I (?:also |would )?(?:want|wish|need|like) to \w+ (?:it|them|the (?:\w+ ){0,2}one)\b|\bavailable for it\b"
    r"|\bthe (?:more|less) \w+ one\b"
)


def _repeats(before: str, said: str) -> bool:
    """Whether a wish says most of the one before again, with more to it."""
    words = [frozenset(re.findall(r"[a-z]{4,}", text.lower())) - _COMMON for text in (before, said)]
    return bool(words[0]) and len(words[0] & words[1]) >= 0.6 * len(words[0])


_COMMON = frozenset(("want", "also", "know", "with", "that", "this", "would", "like", "from"))


_LABEL = re.compile(
    r"^(Your character|Why you write|What you know|What you do not know|How you behave): ", re.MULTILINE
)
"""Of :mod:`environments._tau.tau2`."""


def _unlabelled(text: str) -> str:
    """Paragraphs without their labels, without the character, one after the other."""
    parts = [part for part in text.split("\n\n") if not part.startswith("Your character: ")]
    return "\n".join(_LABEL.sub("", part) for part in parts)


_END = re.compile(r"(?<=[.!?;])(?<!i\.e\.)(?<!e\.g\.)(?<!a\.m\.)(?<!p\.m\.)[\"')]*\s+(?=[A-Z\"'(#])|\n+")
_ASIDE_IF = re.compile(r",? (?:but|and),? if\b(?=[^,.]*(?:asks|not|cannot|impossible|n't)[^,.]*, )")
_HIDES = re.compile(
    r"(?:which )?(?:but )?(?:and )?(?:you )?(?:do not|don't|won't|will not|prefer not to|would not)"
    r"(?: want to| like to)? (?:reveal|mention"
    r"|share)(?: it)?(?: in chat)?(?: for private reasons)?,? ?(?:but )?(?=it is\b|it's\b|is\b|should be)"
)
_SECRET = re.compile(
    r"\s*\((?:insist|say|mention) [^()]*\)|\s*\((?:[^()]*?,? ?but )?(?:you )?(?:do not|don't|won't|will not"
    r"|only) (?:want to )?(?:reveal|mention|provide|say|speak)[^()]*\)"
    r"|\s*\([^()]*\b(?:do not|don't) (?:want to )?(?:reveal|mention)[^()]*\)"
    r"|,? (?:and|but) you (?:do not|don't|would not) (?:want|like) to (?:reveal|mention|speak|share)[^.,;]*"
)
_WHO = re.compile(
    r"^(?:you are|you're|your name is|your user id is|your user id is|your id is|your email is|your zip code is"
    r"|you live in)\s+"
    r"(?:(?:an? [a-z ]+ (?:called|named) |user )?['\"]?(?:[A-Z][a-z]+\b|[a-z]+(?:_[a-z]+)+_\d+|[\w.]+@[\w.]+\w"
    r"|\d{5}\b)|in \d{5})",
    re.I,
)
_CAPITAL = re.compile(
    r"^(?:you are|you're) (?:an? [a-z -]+ (?:called|named) |user )?['\"]?(?:[A-Z]|[a-z]+(?:_[a-z]+)+_\d|[\w.]+@)", re.I
)
_AFTER_WHO = re.compile(
    r"(?:,\s*(?:and\s+)?|\s+and\s+|;\s*)(?=you\s+(?!live|currently (?:live|reside)|reside|are (?:in|from)\b"
    r"|have (?:two|multiple|several) e-?mail|go by)"
    r"|(?:want|wish|need)\s+(?:to|the)\b|your\s+(?!name|zip|e-?mail|user id|phone|birth|date))",
    re.I,
)


def _sentences(text: str) -> Iterator[str]:
    """Sentences without who somebody is and what is to be kept secret."""
    text = _SECRET.sub("", _HIDES.sub(lambda found: "" if text[found.end() :].startswith("it") else "it ", text))
    for sentence in (
        part.strip(" ;\"'().") if part.startswith("(") else part.strip(" ;\"'")
        for part in _END.split(_ASIDE_IF.sub(". If", text))
    ):
        rest = _without_identity(sentence)
        if len(re.findall(r"\w+", rest)) > 1:
            yield rest


def _without_identity(sentence: str) -> str:
    named = _WHO.match(sentence)
    if not named or (sentence.lower().startswith(("you are", "you're")) and not _named(sentence)):
        return sentence
    rest = _AFTER_WHO.search(sentence, named.end())
    if rest is None:
        return ""
    found = sentence[rest.end() :]
    return found if re.match(r"you", found, re.I) else f"you {found}"


def _named(sentence: str) -> bool:
    """Whether "You are" is followed by a name, an id or an address, not by how somebody is."""
    after = re.sub(r"^(?:You are|You're|you are|you're) (?:an? [a-z ]+ (?:called|named) |user )?['\"]?", "", sentence)
    return re.match(r"[A-Z][a-z]+\b(?! by)|[a-z]+(?:_[a-z]+)+_\d|[\w.]+@", after) is not None and not after.startswith(
        "French"
    )


# Conditions.

_IF = re.compile(r"^(?:and |but |so |however,? |even )?(?:if|when|once|in case)\b(?: and only if)?\s+", re.I)
_THEN = re.compile(
    r",\s*(?=(?:and |then |just |please |only |also )*(?:you(?:r|'[a-z]+)?|only|do|don't|no|ask|say|mention"
    r"|provide|insist|"
    r"be|cancel|return|exchange|modify|change|respond|keep|drop|it is|it's|downgrade|try|agree|refund|just|go"
    r"|choose|the|"
    r"PayPal|otherwise|see|add|pay)\b)"
)
_CONFIRMING = re.compile(r"confirm", re.I)
_BEING_ASKED = re.compile(r"\bask(?:s|ed)?\b", re.I)
_REFUSING = re.compile(
    r"\b(?:not|n't|cannot|unable|impossible|no\b|refuses?|fails?|isn't|any issues|unavailable|unsuccessful)|^not\b",
    re.I,
)
_SAYS = re.compile(r"(?:then )?(?:you )?(?:say|mention|respond|insist|tell|provide)\b", re.I)
_HALVES = re.compile(r"\b(?:the |customer |service )*agent\b|^asked\b", re.I)


def _reply(sentence: str) -> Reply | None:
    opened = _IF.match(sentence)
    if not opened:
        return None
    parts = _THEN.split(sentence[opened.end() :], maxsplit=1)
    if len(parts) == 1:
        parts = sentence[opened.end() :].split(", ", 1)
    if len(parts) == 1:
        return None
    about, then = parts
    said = spoken(re.sub(r"^then ", "", then.strip()))
    even = opened[0].lower().startswith("even")
    alone = even or _HALVES.search(about) or _SAYS.match(then)
    whole = said if alone else f"If {first_person(about)}, {_lowered(said)}"
    return Reply("refusal" if even else _trigger(about), about, whole, then)


def _trigger(about: str) -> Trigger:
    if _CONFIRMING.search(about):
        return "confirm"
    if _BEING_ASKED.search(about) and not re.search(r"\bpay\b.*fee", about):
        return "asked"
    return "refusal" if _REFUSING.search(about) else "other"


def _lowered(text: str) -> str:
    keep = re.match(r"I\b|I'|PayPal|[A-Z]{2,}", text)
    return text if keep else text[:1].lower() + text[1:]


def _given(reply: Reply, facts: Facts) -> Iterator[tuple[str, Sequence[str]]]:
    """Facts that a reply gives in an order of its own ("say 98178 first"), which come before others."""
    number = re.findall(r"#?\bW?\d{5,}\b", reply.then)
    if not number:
        return
    name = "zip" if "zip" in reply.about else "order" if "order" in reply.about else ""
    if name:
        yield name, tuple(dict.fromkeys([*number, *facts.get(name, ())]))


# Manners and wishes.

_HOW = (
    r"(?:very |a bit |an? |extremely |quite |also |now |so |rather |usually |always |really )*"
    r"(?:[a-z-]+(?:ed|ive|ent|ant|ous|ful|ible|able|ic|al|ing|less|ish|ry|sy|py|dy|ty|ly)|calm|brief|terse|polite|rude|sad|"
    r"shy|rigid|direct|busy|insecure|happy|private|mysterious|persistent|private person|yound|funny|chill|lonely"
    r"|interesting|"
    r"organized|firm|detail-oriented|loyal|in debt|in a rush|not (?:good|familiar)|french|secure|person|urgent|late)"
)
_STATE = (
    r"(?!(?:willing|contacting|looking|also looking|ok|okay|fine|happy (?:to|with)|unhappy (?:with|about|that)"
    r"|angry about|a bit absent|flying|unsure|frustrated with|very upset that|initially unsure)\b)"
)
_MANNER = re.compile(
    rf"^(?:you are|you're|you will be|be|you were) {_STATE}{_HOW}\b|^you are an? [a-z, -]*\b(?:person|guy|man"
    rf"|woman|student)\b"
    r"|^(?:your (?:approach|goal|tone|name|email|zip|user id)\b|it is urgent|as you are interacting"
    r"|you are (?:now )?(?:emotional|reactive|patient)|"
    r"you (?:like|speak|talk|randomly|recently the|use french|tend)\b|make (?:sure|everything)\b"
    r"|(?:also )?try to (?:paraphrase|make the conversation)|"
    r"be \w+|use both|do not take|don't accept|do not mention|do not reveal|never\b|you (?:do not|don't"
    r"|would not) want to (?:reveal|mention|speak|share)|"
    r"please be|you're very|you will then use|you are into|mention the two|answer in|speak|keep your|remain|stay)",
    re.I,
)
_STYLE = re.compile(
    r"^(?:please )?(?:make sure (?:you|to) (?:\w+ )?mention|mention (?:the two|both)|under no circumstances"
    r"|do not mention|provide all|say things|"
    r"otherwise, just thank|after \d+ assertions|this is incorrect|mention all|try to paraphrase)",
    re.I,
)
_DOING = re.compile(r"\bwant to (?:cancel|return|exchange|modify|change|undo|know|book|upgrade|remove|buy|check)\b")
_WANTING = re.compile(
    r"\b(?:want|wants|wanted|wish|would like|would also like|'d like|'d want|wonder|intend|considering"
    r"|looking for|first inquire|like to (?:modify|change|exchange|cancel|return))\b|^(?:first,? )?try to (?:book"
    r"|see|get|figure|unsubscribe|exchange)|needs to be|^you (?:also )?need (?:to|the|your)\b|no longer need"
    r"|^you (?:then |first |will first )?(?:ask|inquire) ",
    re.I,
)
_ORDERING = re.compile(
    r"^(?:first,? |then |and |also,? |finally,? |lastly,? )*(?:please|confirm|cancel|return|exchange|modify"
    r"|change|book|add|remove|upgrade|downgrade|get|find|"
    r"ask|check|inquire|tell|mention that you(?:'re| booked)|update|figure|complain|express|how|what|which|when"
    r"|where|is|are|can|could|for (?:your|the|order|#))\b",
    re.I,
)
_PREFERRING = re.compile(
    r"^you(?:'d| would)? (?:also )?(?:do not|don't|prefer|never)\b|"
    r"^you(?: would)? (?:also )?want (?:the |to (?:use|pay|fly in|minimi[sz]e|first use|proceed|be )|in )|"
    r"^\S+(?: \w+)? is prefer|^price is|^you know\b|^for payment|^you(?:'re| are) (?:ok|okay|fine|willing|happy"
    r"|not sure|unsure)\b",
    re.I,
)
_INQUIRY = re.compile(
    r"\b(?:want|like|need|wish) to (?:know|check|ask|figure|verify|see|confirm)|\bwonder|inquire|^(?:how|what"
    r"|which|when|where|is|are)\b|^you (?:then |first |will first )?(?:ask|inquire) (?!for|to)|"
    r"^(?:please |also )*(?:check|figure)|ask (?:about|the agent (?:about|if|whether|wh|how))|\bhow m(?:any|uch)\b",
    re.I,
)


def _is_manner(sentence: str) -> bool:
    return _STYLE.match(sentence) is not None or (_MANNER.match(sentence) is not None and not _DOING.search(sentence))


def _is_wish(sentence: str) -> bool:
    if _PREFERRING.search(sentence) and not _INQUIRY.search(sentence):
        return False
    return _WANTING.search(sentence) is not None or _ORDERING.match(sentence) is not None


def _is_inquiry(sentence: str) -> bool:
    return _INQUIRY.search(sentence) is not None
