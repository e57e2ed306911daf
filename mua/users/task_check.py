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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

from mua.environment.domain import Domain, HasUserFacts
from mua.environment.protocol import Split, Task
from mua.environment.user import STOP_SIGNAL
from mua.users.stated_facts import EMAIL, Knowledge, Value, any_of, is_word, plain_word, values_in, wording, wordings
from mua.users.utterance_check import LeakCheck, misused_signal, unusable
from mua.utils.errors import Refusal, UserFaultKind

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
MOST_PERSONAS = 1500
"""Tasks of a domain whose personas are read for its names."""
MOST_LOOKED_AT = 4000
"""Characters at the end of what the agent says that are searched for questions and results: what it takes grows with
their square."""
_NOT_THE_USERS = frozenset(
    {
        "world", "initial", "initial_state", "actions", "gold", "expected", "statements", "false_statements",
        "forbidden", "assertions", "nl_assertions", "communicate_info", "reward_basis", "basis", "settled",
        "difficulty", "id", "kind",
    }
)  # fmt: skip
"""Keys of a task's data that hold what the user cannot know: the state of the world, and what is right."""
_SENTENCE = re.compile(r"[^.!?\n;]+")
_ENDS = re.compile(r"(?<=[.!?])\s+|\n+")
_TOKEN = re.compile(r"[A-Za-z][A-Za-z'’-]*")
_OWN_NAME = re.compile(
    r"\bmy (?:first |last |full |sur)?name(?: is|'s|:)\s+([A-Za-z'-]+)(?:\s+([A-Za-z'-]+))?", re.IGNORECASE
)
_NAMED = re.compile(r"\b(?:[Nn]ame is|called|named|[Ss]urname is)\s+([A-Z][A-Za-z'-]+)(?:\s+([A-Z][A-Za-z'-]+))?")
_QUOTED = re.compile(r"\"[^\"\n]*\"")
_SHORT_ANSWER = 3
"""Words of a sentence that may be nothing but a name."""
_BEFORE = 60
"""Characters before a name that say what it is to the user."""
_ANSWERS = frozenset({"amount", "date", "time"})


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
        words: set[str] = set()
        phrases: set[str] = set()
        tasks = islice((task for split in SPLITS for task in domain.tasks(split)), MOST_PERSONAS)
        personas = (_QUOTED.sub(" ", domain.persona(task)) for task in tasks)
        for sentence in (found for persona in personas for found in _SENTENCE.findall(persona)):
            for run in re.findall(r"(?<=[^\s]\s)[A-Z][\w'-]+(?: [A-Z][\w'-]+)*", sentence):
                parts = [plain_word(part) for part in run.split()]
                if len(parts) > 1:
                    phrases.add(" ".join(parts))
                words |= {part for part in parts if part.isalpha() and len(part) > 2}
        self._words, self._phrases = frozenset(words), frozenset(phrases)

    def names(self) -> frozenset[str]:
        """All of them, lower case: single words where no name has several."""
        return self._phrases or self._words

    def of(self, task: Task) -> TaskCheck:
        """The check of one user of ``task``."""
        persona = self._domain.persona(task)
        if not isinstance(self._domain, HasUserFacts):
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
        for, so that to copy them is no leak (:class:`mua.users.utterance_check.LeakCheck`); the others as
        :class:`HasUserFacts` gives.
        """
        self.stated = tuple(stated)
        wants = [[text for kind, texts in wish.items() if kind != "shown" for text in texts] for wish in wishes]
        listed = [text for texts in wants for text in texts]
        self._shown = [text.casefold() for wish in wishes for text in wish.get("shown", ())]
        self._knowledge = Knowledge([persona, *listed], values)
        task = " ".join([persona, *listed])
        self._sorts = allowed_by(task)
        self._wanted = allowed_by(" ".join([*listed, *_wanting(persona)]))
        self._may_keep = wording("keeps").search(task) is not None
        self._given_up = _given_up(persona, self._wanted)
        self._open = [_marks(*texts) for texts in wants]
        self._open = self._open or [_marks(sentence) for sentence in _wanting(persona)]
        self._words, self._phrases = words, phrases
        self._agent = ""
        self._settled = False
        self._seen = ""
        self._talk = ""

    def heard(self, text: str) -> None:
        """What the agent said."""
        self._knowledge.add(text)
        self._seen = ""
        self._talk += f"\n{text.casefold()}"
        text = text[-MOST_LOOKED_AT:]
        self._sorts |= allowed_by(text)
        self._wanted |= allowed_by(text)
        self._agent = text
        parts = _parted(text)
        told = " ".join(part for part in parts if not part.endswith("?"))
        states = told and told == " ".join(parts) and not wording("stalls").search(told)
        closes = any(part.endswith("?") and wording("closing").search(part) for part in parts)
        answers = any(value.kind in _ANSWERS for value in values_in(told))
        self._settled |= bool(states or closes or answers or wording("settled").search(told))

    def saw(self, text: str) -> None:
        """What a tool of the user's own answered: it may be told, and settles nothing."""
        self._knowledge.add(text)
        self._seen += f"\n{text.casefold()}"
        self._talk += f"\n{text.casefold()}"

    def find(self, text: str, *, acted: bool = False) -> Refusal | None:
        """Why ``text`` does not fit; ``acted``: the user has just used tools of its own."""
        said = text.replace(STOP_SIGNAL, " ")
        if unknown := self.invented(said):
            return Refusal(UserFaultKind.INVENTS_FACTS, f"the user invents {unknown.kind} {unknown.said!r}")
        if other := self.changed(said):
            return Refusal(UserFaultKind.CHANGES_WISH, f"the user changes its wish ({other})")
        if STOP_SIGNAL in text and (why := self.unfinished(said, acted)):
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
        for retreat in (found for pattern in self._given_up for found in pattern.finditer(text)):
            if not (self._may_keep and wording("keeps").search(retreat.group())):
                return " ".join(retreat.group().split())
        wishes = (asked["what"] for asked in _asking().finditer(text))
        asked_for = [what for what in wishes if not wording("not_asking").search(what)]
        # Sorts of wishes that neither the task nor the agent has spoken of.
        strange = {name: sort for name, sort in sorts().items() if not sort.vague and name not in self._sorts}
        far = {name: sort for name, sort in strange.items() if not sort.near & self._wanted}
        return next((name for what in asked_for for name, sort in far.items() if sort.asks.search(what)), None)

    def unfinished(self, text: str, acted: bool) -> str | None:
        """Why nothing is settled yet."""
        if not self._agent:
            return "nobody has answered"
        if acted and (not self._shown or any(text in self._seen for text in self._shown)):
            return None
        if not self._settled:
            return "the agent has neither done nor refused anything"
        still_asks = self._asks("open_question") and not wording("settled").search(self._agent)
        if self._asks("decides", last=True) or still_asks:
            return "the agent waits for an answer"
        talk = self._talk + text.casefold()
        gone = wording("leaves").search(self._agent)
        unsaid = next((marks for marks in self._open if marks and not any(mark in talk for mark in marks)), None)
        return f"nobody has spoken of {min(unsaid)!r}" if unsaid and not gone else None

    def _asks(self, name: str, *, last: bool = False) -> bool:
        """Whether the agent's last message has a question of this wording (``last``: ends in one); closing ones do not
        count."""
        parts = _parted(self._agent)[-1:] if last else _parted(self._agent)
        pattern, closing = wording(name), wording("closing")
        return any(p.endswith("?") and pattern.search(p) and not closing.search(p) for p in parts)

    def _invented_names(self, text: str) -> Iterator[Value]:
        folded = f" {' '.join(plain_word(token) for token in _TOKEN.findall(text))} "
        said = sorted(phrase for phrase in self._phrases if f" {phrase} " in folded)
        new = (phrase for phrase in said if not all(map(self._knowledge.knows_word, phrase.split())))
        yield from (Value("name", phrase, phrase) for phrase in new)
        for sentence in _SENTENCE.findall(EMAIL.sub(" ", text)):
            found = list(_TOKEN.finditer(sentence))
            tokens = [token.group() for token in found]
            for place, token in enumerate(tokens):
                if self._knowledge.knows_word(token) or not self._is_name(token, place, tokens):
                    continue
                plain, previous = plain_word(token), tokens[place - 1] if place else ""
                before = sentence[: found[place].start()][-_BEFORE:]
                # No matter of this domain: small talk, or the region of a place that is known.
                of_place = plain in wordings()["regions"] and previous[:1].isupper()
                beside = (of_place and self._knowledge.knows_word(previous)) or wording("beside").search(before)
                if plain in self._words or not beside:
                    yield Value("name", token, plain)
        for named in (found for pattern in (_OWN_NAME, _NAMED) for found in pattern.finditer(text)):
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
        return bool(others) or self._asks("asks_name")


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


def _parted(text: str) -> list[str]:
    """Sentences, each with the mark that ends it."""
    return [part for part in (piece.strip() for piece in _ENDS.split(text)) if part]


@cache
def _asking() -> re.Pattern[str]:
    """Asking, and in ``what`` what for."""
    asking = wording("asking")
    return re.compile(rf"(?:{asking.pattern})(?P<what>[^.!?;\n]*)", asking.flags)


def _given_up(persona: str, wanted: set[str]) -> list[re.Pattern[str]]:
    """The wordings by which the user of a task would give up what it came for."""
    if wording("wavers").search(persona):
        return []
    rid = not wanted.isdisjoint(wordings()["riddance"])
    return [wording("retreat")] if rid else [wording("retreat"), wording("unwanted")]


def _wanting(persona: str) -> list[str]:
    return [sentence for sentence in re.split(r"(?<=[.!?])\s|\n", persona) if wording("wants").search(sentence)]


def _marks(*texts: str) -> frozenset[str]:
    """What shows that somebody has spoken of a wish: its ids and numbers, and beside them its names. Empty without ids:
    names alone are too little to miss."""
    stated = (value for text in texts for value in values_in(text))
    codes = {value.said.lstrip("#").casefold() for value in stated if value.kind in ("code", "number")}
    names = {token.casefold() for text in texts for token in _TOKEN.findall(text) if token[0].isupper()}
    return frozenset(codes | {name for name in names if not is_word(name)}) if codes else frozenset()


# ---- the English that is looked for: wordings.yaml


@dataclass(frozen=True, slots=True)
class Sort:
    """One sort of thing that somebody may ask to have done."""

    asks: re.Pattern[str]
    allows: re.Pattern[str]
    """What makes it no surprise in a task: ``asks`` and more."""
    near: frozenset[str]
    """Sorts that make it no surprise."""
    vague: bool
    """Ordinary talk names it without wanting it."""


@cache
def sorts() -> dict[str, Sort]:
    """All of them by name."""
    return {
        name: Sort(
            any_of(entry["asks"]),
            any_of([*entry["asks"], *entry.get("allows", ())]),
            frozenset(entry.get("near", ())),
            entry.get("vague", False),
        )
        for name, entry in wordings()["sorts"].items()
    }


def allowed_by(text: str) -> set[str]:
    """The sorts that a task, or an agent, of these words makes no surprise."""
    return {name for name, sort in sorts().items() if sort.allows.search(text)}
