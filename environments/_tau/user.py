"""The user by rules on official data: follows a free-text instruction as somebody who has to be asked.

::

    the agent                        the user
    (nothing yet)                    its first wish, without particulars
    asks for facts                   tells them, those of the wish in hand first
    asks anything else               the sentence of its instruction that fits best, or "I do not know that."
    wants a yes                      what is to be said on confirmation, what is contradicted or untold; else yes
    refuses                          what is to be said in that case; insists once if told to; else the next wish
    has done it, has told it         the next wish
    asks whether there is more       the next wish, or no

It reads what the agent says with the domain's words (``environments/<domain>/words.yaml``) and those of ``words.yaml``
here. A measurement wants a user that plays its part (``user.kind: llm``).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from environments._tau.instruction import Reply, Trigger, Wanted, facts_in, read_instruction, veiled
from environments.kit.language.acts import Acts, Reader
from environments.kit.language.lexicon import Lexicon
from environments.kit.language.patterns import load
from environments.kit.language.text import sentences
from mua.environment.user import STOP_SIGNAL, UserReply
from mua.types import Json

_HERE = Path(__file__).parent
PATIENCE = 10
"""Messages that bring it no further, before it leaves."""
SHARE = 3
"""The opening is at most one part in this many of the instruction, where anything can be said so briefly."""
MOST = 60
"""Percent of the instruction's length that one message has at most; the rest has to be asked for again."""
LONGEST_OPENING = 130
"""Characters."""
MOST_SENTENCES = 3
"""Of one answer."""


@lru_cache(maxsize=8)
def words_of(domain: str) -> Json:
    """The domain's words, and those that its official data needs besides."""
    path, more = _HERE.parent / domain / "words.yaml", load(_HERE / "words.yaml")
    own: Json = load(path) if path.exists() else {"facts": {}, "deeds": {}}
    return {**own, "facts": {**more["facts"], **own["facts"]}, "deeds": {**more["deeds"], **own["deeds"]}}


@lru_cache(maxsize=8)
def reader_of(domain: str) -> Reader:
    """What users of a domain's official data understand with."""
    return Reader(words_of(domain))


@lru_cache(maxsize=8)
def _lexicon_of(domain: str) -> Lexicon:
    return Lexicon(words_of(domain))


class InstructedUser:
    """Follows one instruction. Implements :class:`mua.environment.user.User`; never raises."""

    def __init__(self, instruction: str, domain: str, seed: int = 0) -> None:
        self._rng = random.Random(f"{instruction}/{seed}")
        self._reader, self._lexicon = reader_of(domain), _lexicon_of(domain)
        self._given = read_instruction(instruction, reservations=domain == "airline")
        self._room = min(max((len(instruction) - 1) // SHARE, 24), LONGEST_OPENING)
        self._wishes = list(self._given.wishes) or [Wanted("I need some help.", {})]
        self._replies = list(self._given.replies)
        self._asides = list(self._given.asides)
        self._most = max(MOST * len(instruction) // 100, 90)
        self._told: set[str] = set()
        self._said: set[str] = set()
        self._left = PATIENCE
        self._thanked = False
        self._insists = _INSISTING.search(instruction) is not None

    async def open(self) -> UserReply:
        return UserReply(self._stated(self._wish))

    async def reply(self, agent_text: str) -> UserReply:
        found = self._reply(agent_text)
        return found if found.stop else UserReply(self._some(found.text))

    def _reply(self, agent_text: str) -> UserReply:
        acts = self._reader.read(agent_text, self._verb())
        if acts.transfers and not acts.proposes:
            return self._stop("Okay, thank you.")
        if said := self._answer(agent_text, acts):
            return UserReply(said)
        if acts.proposes:
            return UserReply(self._agreement(agent_text))
        if acts.refuses and (reply := self._taken("refusal", agent_text)):
            return UserReply(reply.text)
        if acts.refuses and self._insists:
            self._insists = False
            return UserReply("Are you sure? Please check once more.")
        if self._settled(agent_text, acts):
            return self._next(acts)
        if acts.offers:
            return self._spelled_out()
        return self._no_further(agent_text, acts)

    async def close(self) -> None:
        """Holds nothing."""

    @property
    def _wish(self) -> Wanted:
        return self._wishes[0]

    def _verb(self) -> str:
        """The kind of deed that the wish names first, in the domain's words."""
        text = _plain(self._wish.text)
        found = [(hit.start(), verb) for verb, deed in self._lexicon.deeds.items() if (hit := deed.search(text))]
        return min(found)[1] if found and not self._wish.inquiry else "do"

    def _some(self, text: str) -> str:
        """As many of the sentences as are said at once, those first that have not been said."""
        parts = sorted(_SENTENCE.split(text), key=lambda part: part in self._said)
        kept = [shortened(parts[0], self._most)]
        for part in parts[1:]:
            if sum(map(len, kept)) + len(kept) + len(part) <= self._most:
                kept.append(part)
        self._said.update(kept)
        return " ".join(kept)

    # Opening.

    def _stated(self, wish: Wanted) -> str:
        """The wish without ids, and in an opening's length."""
        text = shortened(wish.opening or veiled(wish.text), self._room)
        if text == wish.text:
            self._told.add(wish.text)
        return text

    # Answers.

    def _answer(self, agent_text: str, acts: Acts) -> str:
        """What it was asked for; "" where it was asked for nothing."""
        asked = [name for name in self._lexicon.facts if name in acts.asks]
        if not asked:
            return self._found(agent_text) if _open_question(agent_text, acts) else ""
        told = [text for name in asked for text in self._fact(name, agent_text)]
        if not told and not acts.proposes:
            told = [self._found(agent_text) or "I do not know that."]
        return " ".join(list(dict.fromkeys(told))[:MOST_SENTENCES])

    def _fact(self, name: str, agent_text: str) -> Iterator[str]:
        """Sentences that tell one fact: its values, what the wish says of it, or asides about it."""
        if reply := self._taken("asked", agent_text, name):
            self._told.update(re.findall(r"#?\w*\d\w*", reply.text))
            yield reply.text
        elif values := self._values(name):
            yield _TELL.get(name, "It is {}.").format(_joined(values))
        elif name in self._wish.details:
            yield self._detail(name)
        elif about := self._about(name):
            yield about

    def _detail(self, name: str) -> str:
        """A particular of the wish; of an exchange, what is wanted after what is given."""
        details = self._wish.details
        if details[name] in self._told and "wanted" in details and name == "item":
            name = "wanted"
        self._told.add(details[name])
        return details[name]

    def _values(self, name: str) -> Sequence[str]:
        """The values of the wish in hand, then those that have not been told, then all."""
        own, every = self._wish.facts.get(name, ()), self._given.facts.get(name, ())
        if name in ("zip", "order") and self._in_turn(name):
            every = tuple(value for value in every if value not in self._told)[:1] or every
        fresh = [value for value in own if value not in self._told] or (
            [value for value in every if value not in self._told] or list(every)
        )
        self._told.update(fresh)
        return fresh

    def _in_turn(self, name: str) -> bool:
        """Whether the instruction prescribes wrong values to be told first."""
        return any(reply.trigger == "asked" and name in reply.about.lower() for reply in self._given.replies)

    def _about(self, name: str) -> str:
        """The sentence that names the fact: of the wish, of an aside, of another wish."""
        fact = self._lexicon.facts[name]
        pool = [*self._asides, self._wish.text, *(wish.text for wish in self._wishes[1:])]
        by = _GROUNDS if name == "reason" else fact.named
        named = [text for text in pool if by.search(_plain(text))]
        fresh = [text for text in named if text not in self._told] or named
        if not fresh:
            return self._wish.text if name in _OF_WISH else ""
        self._told.add(fresh[0])
        return fresh[0]

    def _found(self, agent_text: str) -> str:
        """The sentence that shares most words with the question."""
        pool = [self._wish.text, *self._asides, *(reply.text for reply in self._replies if reply.trigger != "confirm")]
        asked = _content(agent_text)
        best = max(pool, key=lambda text: (_overlap(asked, _content(text)), text not in self._told))
        if not _overlap(asked, _content(best)):
            return ""
        self._told.add(best)
        return best

    # Proposals.

    def _agreement(self, agent_text: str) -> str:
        if reply := self._taken("confirm", agent_text):
            return reply.text
        if _EITHER.search(agent_text) and (best := self._found(agent_text)):
            return best
        if wrong := self._contradicted(agent_text):
            return f"No. {wrong}"
        if self._wish.text not in self._told and not self._wish.opening:
            self._told.add(self._wish.text)
            if len(_content(self._wish.text) - _content(agent_text)) > 1:
                return f"If it is this, yes: {self._wish.text}"
        return self._rng.choice(_YES)

    def _contradicted(self, agent_text: str) -> str:
        """What speaks against a proposal: other ids than those of the wish, or what it does not want."""
        named = facts_in(agent_text, reservations="reservation" in self._lexicon.facts)
        for name in ("order", "reservation", "payment"):
            own, theirs = self._given.facts.get(name, ()), named.get(name, ())
            if (
                own
                and theirs
                and not {_bare(one) for one in own} & {_bare(one) for one in theirs}
                and name != "payment"
            ):
                return _MEAN.format(_joined(self._wish.facts.get(name, own)))
        for text in self._asides:
            refused = _REFUSED.search(text)
            if refused and _wanted_anyway(refused[1], agent_text):
                return text
        return ""

    def _taken(self, trigger: Trigger, agent_text: str, name: str = "") -> Reply | None:
        """The next reply for this trigger, which is then used up."""
        for reply in self._replies:
            fits = reply.trigger == trigger or (trigger == "refusal" and reply.trigger == "other")
            if trigger == "asked":
                fits = fits and (
                    _mentions(self._lexicon, name, reply.about)
                    or _overlap(_content(reply.about), _content(agent_text)) > 1
                )
            elif reply.trigger == "other":
                fits = fits and _overlap(_content(reply.about), _content(agent_text)) > 0
            if fits:
                self._replies.remove(reply)
                self._told |= {self._wish.text} if trigger != "asked" else set()
                return reply
        return None

    # What becomes of a wish.

    def _settled(self, agent_text: str, acts: Acts) -> bool:
        if acts.done or acts.refuses or acts.informs:
            return True
        told = _content(self._wish.text) & _content(agent_text)
        return self._wish.inquiry and "?" not in agent_text and (len(told) > 1 or bool(re.search(r"\d", agent_text)))

    def _next(self, acts: Acts) -> UserReply:
        if len(self._wishes) > 1:
            self._wishes.pop(0)
            return UserReply(self._stated(self._wish))
        if acts.offers or self._thanked:
            return self._stop("No, thank you.")
        self._thanked = True
        return UserReply("That is a pity." if acts.refuses else "Thank you.")

    def _spelled_out(self) -> UserReply:
        """More is offered while a wish is open: says it again, in full; the second time it moves on."""
        if self._wish.text in self._told or self._thanked:
            return self._next(Acts(offers=True))
        self._told.add(self._wish.text)
        return UserReply(self._wish.text)

    def _no_further(self, agent_text: str, acts: Acts) -> UserReply:
        if self._thanked:
            return self._stop("Bye.")
        self._left -= 1
        if self._left < 0:
            return self._stop("This does not help me.")
        if reply := self._taken("other", agent_text):
            return UserReply(reply.text)
        if acts.waits:
            return UserReply("Okay.")
        return UserReply("I do not know that." if "?" in agent_text else "Sorry, what do you mean?")

    def _stop(self, text: str) -> UserReply:
        return UserReply(f"{text} {STOP_SIGNAL}", stop=True)


_INSISTING = re.compile(r"\b(?:insist|persist|do not take no)", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[.?!])\s+(?=[A-Z#])")
_YES = ("Yes.", "Yes, please.", "Yes, go ahead.")
_EITHER = re.compile(r"\b(?:prefer|rather|either|like)\b[^.?!]*\bor\b", re.IGNORECASE)
_MEAN = "I mean {}."
_TELL = {
    "name": "My name is {}.",
    "zip": "My zip code is {}.",
    "email": "My email is {}.",
    "user_id": "My user id is {}.",
    "order": "It is order {}.",
    "reservation": "It is reservation {}.",
    "phone": "My phone number is {}.",
    "birth_date": "The date of birth is {}.",
    "address": "The address is {}.",
    "card": "It is the one ending in {}.",
}
_GROUNDS = re.compile(
    r"\b(?:because|since|due to|by mistake|no longer|damaged|broken|does not|did not|sick|too (?:big|small)|wrong"
    r"|lost|emergency|reason)\b"
)
_OF_WISH = frozenset({"item", "product", "wanted", "wish", "flight", "route", "passengers", "direction", "preference"})
"""Facts that the wish itself tells, where nothing else does."""
_REFUSED = re.compile(r"\bI (?:do not|don't) (?:want|need|accept)(?: to)? (?:be |any )?(.+?)[.,]")


def _wanted_anyway(refused: str, agent_text: str) -> bool:
    """Whether a message proposes what is refused, in a clause without a denial."""
    words = _content(refused)
    clauses = re.split(r"[.,;\n]| and | but ", agent_text)
    denied = re.compile(r"\b(?:no|not|without|n't|decline|remove)\b", re.IGNORECASE)
    return bool(words) and any(words <= _content(clause) and not denied.search(clause) for clause in clauses)


def _bare(value: str) -> str:
    return value.lstrip("#").upper()


def _joined(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} and {values[-1]}"


def _mentions(lexicon: Lexicon, name: str, text: str) -> bool:
    fact = lexicon.facts.get(name)
    return fact is not None and bool(fact.named.search(_plain(text)) or fact.kind.search(_plain(text)))


@lru_cache(maxsize=4096)
def _plain(text: str) -> str:
    return " . ".join(sentence.text for sentence in sentences(text))


def _open_question(agent_text: str, acts: Acts) -> bool:
    """A question that is neither for a yes nor an offer."""
    return "?" in agent_text and not (acts.proposes or acts.offers or acts.done or acts.refuses)


_STOP_TEXT = (
    "that this what which would could should with your yours have from like want need know help please there their "
    "they them then than will just also about some more when where into does been being were make sure only order "
    "agent thank thanks provide assist today anything else"
)
_STOP = frozenset(_STOP_TEXT.split())


@lru_cache(maxsize=4096)
def _content(text: str) -> frozenset[str]:
    """The words that carry meaning, without their endings."""
    words = re.findall(r"[a-z]{3,}|\d+", _plain(text))
    return frozenset(re.sub(r"(?:ies|es|s|ing|ed|e)$", "", word) for word in words if word not in _STOP)


def _overlap(asked: frozenset[str], text: frozenset[str]) -> int:
    return len(asked & text)


# Short wishes.

_BREAK = re.compile(
    r"(?:[,;:] | \(| - | (?=(?:and|but|because|since|so|for|from|in|with|except|if|using|on|as|due|under|within|where|"
    r"which|while|at|about|instead|of|that|whether|how|when|by|until|after|before)\b| to (?:a|an|the|my|one|be"
    r"|business|economy)\b))"
)
_CLAUSE = re.compile(r"^(?!For |After |Due )|, I \w+")
_LEAST_WORDS = 3
_SHORTEST = ("I need help with something.", "I need some help.")


def shortened(text: str, room: int) -> str:
    """The first sentence of ``text``, cut before a clause or phrase so that it has at most ``room`` characters."""
    first = _SENTENCE.split(text, maxsplit=1)[0]
    if len(first) <= room:
        return first
    places = [found.start() for found in _BREAK.finditer(first)]
    heads = [first[:place].rstrip(" ,;:") for place in places]
    whole = [
        head
        for head in heads
        if len(head) < room and len(head.split()) > _LEAST_WORDS and _CLAUSE.search(head) and not _DANGLING.search(head)
    ]
    if whole:
        return f"{whole[-1]}."
    return next((one for one in _SHORTEST if len(one) <= room), _SHORTEST[-1])


_DANGLING = re.compile(
    r"\b(?:to|the|a|an|my|you|is|are|if|and|want|need|like|know|cancel|return|exchange|change|modify|I|am|would|wonder|because|also|just|book|except|realize|each|sure|confirm|receiving|day|move)$|\([^)]*$"
)
