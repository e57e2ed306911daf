"""Whether what a language model says as a user agrees with its task: facts, wishes, and when it ends.

::

    persona, task's facts, domain's known() ──► Vocabulary.of(task) ──► Knowledge ◄── heard(): the agent, own tools
                                                                            │
    reply ──► values that people state (ids, emails, amounts, dates, names) ├─ not known, never heard ─► invents_facts
          ──► what it asks to have done                                     ├─ of another sort ────────► changes_wish
          ──► the end                                                       └─ a wish is still open ───► ends_too_early

It is made for precision: only values of a clear form are looked at, a person may repeat whatever it was told, and small
numbers, weekdays and what can be read in two ways count for nothing. What it misses is measured in
docs/benchmarks/user_check.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from mua.environment.protocol import Domain, Informed, Split, Task
from mua.errors import UserFaultKind
from mua.users.guards import LeakCheck, misused_signal, unusable
from mua.users.protocol import STOP_SIGNAL, Refusal
from mua.users.stated import EMAIL, Knowledge, Value, is_word, plain_word, values_in

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
MOST_PERSONAS = 1500
"""Tasks of a domain whose personas are read for its names."""
MOST_LOOKED_AT = 4000
"""Characters at the end of what the agent says that are searched for questions and results: what it takes grows with
their square."""
_NOT_THE_USERS = frozenset(
    {"world", "initial", "initial_state", "actions", "gold", "expected", "statements", "false_statements", "forbidden"}
    | {
        "assertions",
        "nl_assertions",
        "communicate_info",
        "reward_basis",
        "basis",
        "settled",
        "difficulty",
        "id",
        "kind",
    }
)
"""Keys of a task's data that hold what the user cannot know: the state of the world, and what is right."""
_SENTENCE = re.compile(r"[^.!?\n;]+")
_ENDS = re.compile(r"(?<=[.!?])\s+|\n+")
_TOKEN = re.compile(r"[A-Za-z][A-Za-z'’-]*")
_NAMED = re.compile(
    r"\b(?:my (?:first |last |full |sur)?name(?: is|'s|:)|(?:name is|called|named|surname is))\s+"
    r"([A-Za-z'-]+)(?:\s+([A-Za-z'-]+))?",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"\"[^\"\n]*\"")
_SHORT_ANSWER = 3
"""Words of a sentence that may be nothing but a name."""
_VERBS: Mapping[str, str] = {
    "cancel": r"cancel\w*|call(?:ing)? off",
    "return": r"return(?:ing|ed)?|send(?:ing)? (?:\w+ ){0,4}back|take (?:\w+ ){0,4}back|give (?:\w+ ){0,4}back",
    "refund": r"refund\w*|money back|reimburse\w*",
    "exchange": r"exchang\w+|swap\w*|replac\w+|trade\w* in",
    "change": r"chang\w+|modif\w+|updat\w+|edit\w*|switch\w*|correct\w*|adjust\w*",
    "book": r"book(?:ing|ed)?|reserv(?:e|ing)|purchas\w+|buy(?:ing)?|fly",
    "upgrade": r"upgrad\w+|(?:business|first) class|cabin|(?:better|bigger|larger|other) plan|plan",
    "downgrade": r"downgrad\w+|cheaper|(?:smaller|other) plan|economy|cabin|plan",
    "insure": r"insur\w+",
    "compensate": r"compensat\w+|voucher",
    "suspend": r"suspend\w*|paus\w+ (?:my|the) (?:line|plan|service)|terminat\w+",
    "unlock": r"unlock\w*",
    "redirect": r"redirect\w*|rerout\w+|deliver\w* to|send (?:\w+ ){0,4}to|go(?:es)? to",
    "baggage": r"baggage|bags?|luggage|suitcases?",
    "track": r"track\w*|where (?:is|'s)|where my|status",
}
_VERB = {sort: re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE) for sort, pattern in _VERBS.items()}
_NEIGHBOURS: Mapping[str, frozenset[str]] = {
    "return": frozenset({"refund"}),
    "refund": frozenset({"return", "cancel", "compensate"}),
    "exchange": frozenset({"change"}),
    "compensate": frozenset({"refund"}),
    "redirect": frozenset({"change"}),
}
"""Which wishes make it no surprise that a sort is asked for: a cancelled order is refunded."""
_ASKS = re.compile(
    r"\b(?:i (?:also |now |actually |really |just |do )*(?:want|need|wish|prefer|would like|would rather"
    r"|would prefer|demand"
    r"|insist)|i'?d (?:also |actually |rather |much )*(?:like|rather|prefer|love|want)|(?:can|could|would"
    r"|will) you(?: please)?"
    r"|please|instead|actually|let'?s|rather|go ahead and|i am looking to|i'm looking to|i(?:'m| am) (?:here"
    r"|writing) to"
    r"|i have decided to|i've decided to|i(?:'ve| have)? decided)\b(?P<what>[^.!?;\n]*)",
    re.IGNORECASE,
)
_NOT_ASKED = re.compile(
    r"\b(?:tell|explain|confirm|check|know|whether|if|how|why|see|understand|show|say|repeat)\b", re.I
)
_RETREAT = re.compile(
    r"\b(?:(?:i(?:'ve| have)? )?changed my mind|on second thought|no longer (?:want|wish|need) (?:to"
    r"|it (?:to be )?|the (?:refund"
    r"|return|exchange|cancel\w*))|(?:do not|don'?t) (?:want|wish|need) (?:to (?:cancel|return|exchange|change"
    r"|book|fly|move|upgrade"
    r"|go through)\b|(?:it|that|this|the \w+) (?:cancel\w*|return\w*|exchang\w+|chang\w+|any ?more))"
    r"|forget (?:about )?(?:the|my|this|that) (?:\w+ ){0,2}(?:request|order|return|exchange|cancel\w*|refund"
    r"|booking|change|whole thing|thing)"
    r"|(?:i'?ll |i will |let me |let'?s |please |just |i'?d rather |want to |(?<=[.!,] ))(?:just )?(?:keep"
    r"|leave) (?:it|everything|the \w+|my \w+|them|things)"
    r"(?: (?:as (?:it is|is|they are)|then|after all|instead|the way)|$|[.!,])|(?:do not|don'?t) (?:cancel|return"
    r"|exchange|change|refund) (?:it|the|my|that|anything))",
    re.IGNORECASE | re.MULTILINE,
)
_CHANGES_ITSELF = re.compile(
    r"chang\w* (?:your|of) mind|change of mind|\bat first\b|\bfirst (?:you )?(?:ask|name|say)|correct yourself"
    r"|you say: \"(?:wait|no|actually)|\bwait, i\b|\b(?:no longer|not any ?more) want",
    re.I,
)
_SETTLED = re.compile(
    r"\b(?:done|cancel+ed|returned|exchanged|changed|updated|booked|modified|added|removed|processed|completed"
    r"|confirmed"
    r"|refunded|issued|sent|initiated|submitted|restored|fixed|resolved|working|works|solved|upgraded|downgraded"
    r"|moved"
    r"|sorry(?! (?:to hear|about|for|you))|unfortunately|can ?not|can't|unable|not (?:able|possible|allowed"
    r"|eligible|permitted|covered|on your)"
    r"|does not|doesn't|won't|will not|no longer|transfer\w*|final sale|denied|refuse[ds]?|declined|all set"
    r"|taken care"
    r"|success\w*|is (?:in|on|at|pending|shipped|delivered|processed|\$?\d)|costs?|(?:price|status|total) is"
    r"|certificate|voucher)\b",
    re.IGNORECASE,
)
_OPEN_QUESTION = re.compile(
    r"\b(?:what|which|who|when|where|could you|can you|may i|would you|do you|shall i|should i|are you|is (?:that|this)"
    r"|please (?:tell|give|provide|confirm|share|send|let)|have you|yes/no|confirm|proceed)\b",
    re.IGNORECASE,
)
_STALLS = re.compile(
    r"\b(?:please|let me|moment|hold on|wait|i will|i'll|hello|hi|welcome|thank|thanks|sorry|tell|give|need|provide)\b",
    re.IGNORECASE,
)
"""A message that asks for nothing and has none of these states how things are: that may be all there is to say."""
_KEEPS = re.compile(r"\b(?:keep|leave)", re.IGNORECASE)
_ASKS_NAME = re.compile(
    r"\b(?:name|city|town|who|where|destination|address|country|item|product|which)\b", re.IGNORECASE
)
_DECIDES = re.compile(
    r"yes/no|\b(?:yes or no|do you confirm|shall i|should i|confirm|proceed|go ahead)\b", re.IGNORECASE
)
_ANSWERS = frozenset({"amount", "date", "time"})
_CLOSING = re.compile(r"\b(?:anything|something|what) (?:else|more|further)\b", re.IGNORECASE)
_WANTS = re.compile(
    r"\b(?:you (?:also |now |then )*(?:want|would like|wish|need|ask|prefer)|ask(?:s|ing)? (?:to|for)|then you)\b",
    re.IGNORECASE,
)


class ReplyCheck:
    """Everything that is looked at before a language model's words become a user's."""

    def __init__(self, leak: LeakCheck, facts: TaskCheck | None = None) -> None:
        """``facts`` is the check against the task, if there is one; it follows this conversation alone."""
        self._leak = leak
        self._facts = facts

    def heard(self, text: str) -> None:
        """What the agent said."""
        if self._facts is not None:
            self._facts.heard(text)

    def saw(self, text: str) -> None:
        """What a tool of the user's own answered."""
        if self._facts is not None:
            self._facts.saw(text)

    def said(self, text: str) -> None:
        """``text`` is what the user said in the end."""
        if self._facts is not None:
            self._facts.said(text)

    def form(self, text: str, *, first: bool) -> Refusal | None:
        """Why ``text`` can be no user's, whatever the task; ``first``: nothing has been said before."""
        if refusal := unusable(text) or misused_signal(text):
            return refusal
        if first and STOP_SIGNAL in text:
            return Refusal(UserFaultKind.ENDS_TOO_EARLY, "the user ended the conversation before it began")
        return None

    def content(self, text: str, *, acted: bool = False) -> Refusal | None:
        """What speaks against ``text`` in this task; ``acted``: the user has just used tools of its own."""
        if (quoted := self._leak.quotation(text)) is not None:
            return Refusal(UserFaultKind.LEAKS_INSTRUCTION, f"the user quotes its instructions ({quoted})")
        return self._facts.find(text, acted=acted) if self._facts is not None else None


class Vocabulary:
    """The names that a domain's tasks deal with: people, places, things. Read from the personas, once a domain."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._words, self._phrases = _names_of(self._personas())

    def _personas(self) -> Iterator[str]:
        tasks = (task for split in SPLITS for task in self._domain.tasks(split))
        return (self._domain.persona(task) for task in islice(tasks, MOST_PERSONAS))

    def names(self) -> frozenset[str]:
        """All of them, lower case."""
        return self._phrases or self._words

    def of(self, task: Task) -> TaskCheck:
        """The check of one user of ``task``."""
        persona = self._domain.persona(task)
        if not isinstance(self._domain, Informed):
            return TaskCheck(persona, {"task": list(_texts(task.data))}, (), self._words, self._phrases)
        values = self._domain.known(task)
        stated = [text for texts in values.values() for text in texts]
        return TaskCheck(persona, values, self._domain.wishes(task), self._words, self._phrases, stated)


class TaskCheck:
    """Follows one conversation and says of each reply whether it fits the task."""

    def __init__(
        self,
        persona: str,
        values: Mapping[str, Sequence[str]] = {},
        wishes: Sequence[Mapping[str, Sequence[str]]] = (),
        words: frozenset[str] = frozenset(),
        phrases: frozenset[str] = frozenset(),
        stated: Sequence[str] = (),
    ) -> None:
        """``words`` and ``phrases`` are names that the domain deals with; ``stated`` are texts that the user is asked
        for, so that to copy them is no leak (:class:`mua.users.guards.LeakCheck`); the others as :class:`Informed`
        gives.
        """
        self.stated = tuple(stated)
        listed = [text for wish in wishes for texts in wish.values() for text in texts]
        self._knowledge = Knowledge([persona, *listed], values)
        self._sorts = _sorts(" ".join([persona, *listed]))
        self._keeps = _KEEPS.search(f"{persona} {' '.join(listed)}") is not None
        self._may_retreat = _CHANGES_ITSELF.search(persona) is not None
        self._open = [_marks(" ".join(text for texts in wish.values() for text in texts)) for wish in wishes]
        self._open = self._open or [_marks(sentence) for sentence in _wanting(persona)]
        self._words, self._phrases = words, phrases
        self._agent = ""
        self._settled = False
        self._talk = ""

    def heard(self, text: str) -> None:
        """What the agent said."""
        self._knowledge.add(text)
        self._talk += f"\n{text.casefold()}"
        text = text[-MOST_LOOKED_AT:]
        self._sorts |= _sorts(text)
        self._agent = text
        parts = _parted(text)
        told = " ".join(part for part in parts if not part.endswith("?"))
        states = told and told == " ".join(parts) and not _STALLS.search(told)
        self._settled |= (
            bool(states) or _SETTLED.search(told) is not None or any(v.kind in _ANSWERS for v in values_in(told))
        )

    def saw(self, text: str) -> None:
        """What a tool of the user's own answered: it may be told, and settles nothing."""
        self._knowledge.add(text)
        self._talk += f"\n{text.casefold()}"

    def find(self, text: str, *, acted: bool = False) -> Refusal | None:
        """Why ``text`` does not fit; ``acted``: the user has just used tools of its own."""
        words = text.replace(STOP_SIGNAL, " ")
        if unknown := self.invented(words):
            return Refusal(UserFaultKind.INVENTS_FACTS, f"the user invents {unknown.kind} {unknown.said!r}")
        if other := self.changed(words):
            return Refusal(UserFaultKind.CHANGES_WISH, f"the user changes its wish ({other})")
        if STOP_SIGNAL in text and (why := self.unfinished(words, acted)):
            return Refusal(UserFaultKind.ENDS_TOO_EARLY, f"the user ends the conversation though {why}")
        return None

    def said(self, text: str) -> None:
        """``text`` is what the user said in the end."""
        self._talk += f"\n{text.casefold()}"

    def invented(self, text: str) -> Value | None:
        """The first value that the user cannot know."""
        found = (value for value in values_in(text) if not self._knowledge.has(value))
        return next(found, None) or next(self._invented_names(text), None)

    def changed(self, text: str) -> str | None:
        """What the user asks for, or gives up, against its wish."""
        for retreat in () if self._may_retreat else _RETREAT.finditer(text):
            if not (self._keeps and _KEEPS.search(retreat.group())):
                return " ".join(retreat.group().split())
        for asked in _ASKS.finditer(text):
            what = asked["what"]
            if _NOT_ASKED.search(what):
                continue
            for sort in _sorts(what) & _CLEAR:
                if sort not in self._sorts and not self._sorts & _NEIGHBOURS.get(sort, frozenset()):
                    return sort
        return None

    def unfinished(self, text: str, acted: bool) -> str | None:
        """Why nothing is settled yet."""
        if not self._agent:
            return "nobody has answered"
        if acted:
            return None
        if not self._settled:
            return "the agent has neither done nor refused anything"
        if self._asks(_DECIDES, last=True) or (self._asks(_OPEN_QUESTION) and not _SETTLED.search(self._agent)):
            return "the agent waits for an answer"
        talk = self._talk + text.casefold()
        gone = re.search(r"\btransfer\w*|\bhuman agent\b", self._agent, re.IGNORECASE)
        unsaid = next((marks for marks in self._open if marks and not any(mark in talk for mark in marks)), None)
        return f"nobody has spoken of {min(unsaid)!r}" if unsaid and not gone else None

    def _asks(self, pattern: re.Pattern[str], *, last: bool = False) -> bool:
        """Whether the agent's last message has a question with ``pattern`` (``last``: ends in one); closing ones do not
        count."""
        parts = _parted(self._agent)[-1:] if last else _parted(self._agent)
        return any(p.endswith("?") and pattern.search(p) and not _CLOSING.search(p) for p in parts)

    def _invented_names(self, text: str) -> Iterator[Value]:
        folded = f" {' '.join(plain_word(token) for token in _TOKEN.findall(text))} "
        for phrase in self._phrases:
            if f" {phrase} " in folded and not self._knowledge.knows_words(phrase):
                yield Value("name", phrase, phrase)
        for sentence in _SENTENCE.findall(EMAIL.sub(" ", text)):
            tokens = _TOKEN.findall(sentence)
            for place, token in enumerate(tokens):
                if not self._knowledge.knows_word(token) and self._is_name(token, place, tokens):
                    yield Value("name", token, plain_word(token))
        for named in _NAMED.finditer(text):
            for word in filter(None, named.groups()):
                if not is_word(word) and not self._knowledge.knows_word(word):
                    yield Value("name", word, plain_word(word))

    def _is_name(self, token: str, place: int, tokens: Sequence[str]) -> bool:
        plain = plain_word(token)
        if is_word(token):
            # "the Lamp": a thing of this domain by its name, where the sentence is about things
            return plain in self._words and token[0].isupper() and (place > 0 or len(tokens) <= _SHORT_ANSWER)
        if plain in self._words:
            return True
        if not token[0].isupper() or len(plain) < 3:
            return False
        if token.isupper() and len(token) > 3 and all(t.isupper() for t in tokens):
            return False  # somebody shouts
        if place > 0:
            return True
        if len(tokens) > _SHORT_ANSWER:
            return False
        others = [other for other in tokens[1:] if other[0].isupper()]
        return bool(others) or self._asks(_ASKS_NAME)


_CLEAR = frozenset(_VERBS) - {"change", "track", "book", "baggage", "refund"}
"""Sorts of wishes that ordinary talk names only when it means them."""


def _texts(data: Any, depth: int = 8) -> Iterator[str]:
    """Every text in a task's data that its user may know, and values as texts."""
    if isinstance(data, dict) and depth:
        for key, value in data.items():
            if key not in _NOT_THE_USERS:
                yield from _texts(value, depth - 1)
    elif isinstance(data, list) and depth:
        for value in data:
            yield from _texts(value, depth - 1)
    elif isinstance(data, str):
        yield data
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield f"{data:g}" if isinstance(data, float) else str(data)


def _names_of(personas: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Names in the personas: single words, and phrases of several, lower case."""
    words: set[str] = set()
    phrases: set[str] = set()
    for persona in personas:
        for sentence in _SENTENCE.findall(_QUOTED.sub(" ", persona)):
            for run in re.findall(r"(?<=[^\s]\s)[A-Z][\w'-]+(?: [A-Z][\w'-]+)*", sentence):
                parts = [plain_word(part) for part in run.split()]
                if len(parts) > 1:
                    phrases.add(" ".join(parts))
                words |= {part for part in parts if part.isalpha() and len(part) > 2}
    return frozenset(words), frozenset(phrases)


def _parted(text: str) -> list[str]:
    """Sentences, each with the mark that ends it."""
    return [part for part in (piece.strip() for piece in _ENDS.split(text)) if part]


def _sorts(text: str) -> set[str]:
    return {sort for sort, pattern in _VERB.items() if pattern.search(text)}


def _wanting(persona: str) -> list[str]:
    return [sentence for sentence in re.split(r"(?<=[.!?])\s|\n", persona) if _WANTS.search(sentence)]


def _marks(text: str) -> frozenset[str]:
    """What shows that somebody has spoken of a wish: its ids and numbers, else its names."""
    codes = {value.said.lstrip("#").casefold() for value in values_in(text) if value.kind in ("code", "number")}
    return frozenset(codes)
