"""What an agent does with a message, as the person it talks to takes it.

A message is read sentence by sentence. The mood of a sentence (a question, a request, a statement about what has been
done, what can not be done, ...) comes from English that all domains share (``general.yaml``); what it is about comes from
the domain's words: how its facts are named, how its deeds are called. So "Mind telling me which one it is?" asks for an
item because it is a question that names the kind of thing an item is, not because somebody listed the sentence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from mua.language.patterns import expression, load
from mua.language.text import Sentence, sentences
from mua.types import Json

_GENERAL = Path(__file__).with_name("general.yaml")


@dataclass(frozen=True, slots=True)
class Acts:
    """What one message does; several at once are usual."""

    asks: frozenset[str] = frozenset()
    """Facts that the hearer is asked for."""
    proposes: bool = False
    """Wants a yes before it goes on."""
    done: bool = False
    """Says that the wish has been carried out."""
    refuses: bool = False
    informs: bool = False
    """Tells what the hearer wanted to know."""
    transfers: bool = False
    offers: bool = False
    """Asks whether there is anything else."""
    waits: bool = False
    """A greeting, thanks, a moment please: nothing to answer."""

    @property
    def understood(self) -> bool:
        """Whether any sense could be made of it."""
        return self != Acts()

    def __or__(self, other: Acts) -> Acts:
        flags = ("proposes", "done", "refuses", "informs", "transfers", "offers", "waits")
        return Acts(self.asks | other.asks, *(getattr(self, flag) or getattr(other, flag) for flag in flags))


@dataclass(frozen=True, slots=True)
class _Fact:
    named: re.Pattern[str]
    kind: re.Pattern[str]
    idioms: re.Pattern[str]


class Reader:
    """Reads messages with one domain's words."""

    def __init__(self, words: Json) -> None:
        """``words``: the domain's file: ``facts``, ``deeds``, ``answers``, ``against``, ``values``, ``lists``."""
        general = _general()
        lists = {**general["lists"], **words.get("lists", {})}

        def compiled(phrases: Sequence[str]) -> re.Pattern[str]:
            return expression(phrases, lists)

        self._general = {key: compiled(phrases) for key, phrases in general.items() if key != "lists"}
        self._facts = {
            name: _Fact(*(compiled(fact.get(part, ())) for part in ("named", "kind", "idioms")))
            for name, fact in words["facts"].items()
        }
        deeds: Mapping[str, Sequence[str]] = words["deeds"]
        self._deeds = {wish: compiled(phrases) for wish, phrases in deeds.items()}
        self._done = {wish: compiled(_participles(phrases)) for wish, phrases in deeds.items()}
        self._any_deed = compiled([phrase for phrases in deeds.values() for phrase in phrases])
        self._answers = {wish: compiled(phrases) for wish, phrases in words.get("answers", {}).items()}
        self._against = {wish: compiled(phrases) for wish, phrases in words.get("against", {}).items()}
        self._value = compiled(words.get("values", ()))
        self.read = lru_cache(maxsize=4096)(self._read)

    def _read(self, message: str, wish: str) -> Acts:
        """What ``message`` does to somebody with this wish."""
        found, parts = Acts(), sentences(message)
        for sentence in parts:
            found |= self._sentence(sentence, wish)
        return _settled(found)

    def _sentence(self, sentence: Sentence, wish: str) -> Acts:
        text = sentence.text
        asking = sentence.question or bool(self._general["question_start"].match(text))
        if self._has("offer", text) and (asking or not self._has("refusal", text)):
            rest = self._general["offer"].sub(" ", text)
            return Acts(offers=True) | replace(self._statement(rest, wish, asking), proposes=False)
        asked = self._asked(text, asking)
        if asked:
            before = _head(text)
            return Acts(asks=asked) | (self._said(before, wish) if before else Acts())
        if self._wants_yes(text, asking):
            return Acts(proposes=True)
        return self._statement(text, wish, asking)

    def _statement(self, text: str, wish: str, asking: bool) -> Acts:
        found = Acts() if asking else self._said(text, wish)
        if self._has("transfer", text) and not asking:
            found = Acts(transfers=True)
        return found if found.understood else Acts(waits=self._has("wait", text) and bool(text))

    # Questions and requests.

    def _asked(self, text: str, asking: bool) -> frozenset[str]:
        if not asking and (not self._has("request", text) or self._has("no_request", text)):
            return frozenset(fact for fact, words in self._facts.items() if words.idioms.search(text))
        core = _core(text)
        which = self._general["which"]
        found = set()
        for name, fact in self._facts.items():
            if fact.idioms.search(core) or self._names(fact.named, core) or _which(which, fact.kind, core):
                found.add(name)
        return frozenset(found)

    def _names(self, named: re.Pattern[str], text: str) -> bool:
        """Whether the fact is named, and not at once followed by its value ("order number K7")."""
        return any(not self._value.match(text[found.end() :].lstrip(" :#")) for found in named.finditer(text))

    def _wants_yes(self, text: str, asking: bool) -> bool:
        if self._has("no_request", text):
            return False
        if asking and self._has("confirm", text):
            return True
        deed = self._any_deed.search(text) is not None
        if asking:
            return (
                self._has("would_i", text)
                or (deed and self._has("you_want", text))
                or deed
                or self._has("you_want", text)
            )
        return self._has("request", text) and self._has("confirm", text) and not self._has("offer", text)

    # Statements.

    def _said(self, text: str, wish: str) -> Acts:
        refused = self._refused(text, wish)
        return Acts(
            done=not refused and self._completed(text, wish),
            refuses=refused,
            informs=not refused and wish in self._answers and self._answers[wish].search(text) is not None,
            transfers=self._has("transfer", text),
        )

    def _refused(self, text: str, wish: str) -> bool:
        plain = self._general["not_refusal"].sub(" ", text)
        if self._general["refusal"].search(plain):
            return True
        return wish in self._against and self._against[wish].search(plain) is not None

    def _completed(self, text: str, wish: str) -> bool:
        done = self._done.get(wish)
        for found in [*(done.finditer(text) if done else ()), *self._general["complete"].finditer(text)]:
            if not self._general["hypothetical"].search(_clause(text, found.start())):
                return True
        return False

    def _has(self, key: str, text: str) -> bool:
        return self._general[key].search(text) is not None


@lru_cache(maxsize=1)
def _general() -> Json:
    return load(_GENERAL)


_SUBORDINATE = re.compile(
    r"^(?:(?:and|but|so|okay|sure|thanks|great|no problem|of course|i am sorry|sorry) ?,? )?"
    r"(?:before|once|after|as soon as|when|since|because|while|in order to|so that|for|to|now that|until) [^,:]*[,:] "
)
_PURPOSE = re.compile(
    r" (?:,? ?so (?:that )?(?:i|we) (?:can|may|know|am|do|will)|so as to|before (?:i|we|going|cancel|do|mak|chang|proceed)|in order to|because|since"
    r"|to (?:help|find|look|locate|verify|pull|proceed|process|cancel|return|go|get|move|access|continue|make|check|confirm|help|begin|start|do|set|bring|complete|see|be|identify|open|track)"
    r"|then (?:i|we)|and (?:i|we) (?:will|can|shall)|(?:if|when|once|until|as soon as) (?:i|we) (?:can|have|know|get)) .*"
)
_BREAK = re.compile(r" [,:] | (?:and|but|so|because|since|as|which|though|although|while|however|therefore|then) ")


def _core(text: str) -> str:
    """A question without the clauses that say what it is for."""
    core = _SUBORDINATE.sub("", text)
    return _PURPOSE.sub(" ", core) if _PURPOSE.search(core) and len(_PURPOSE.sub("", core)) > 12 else core


def _which(which: re.Pattern[str], kind: re.Pattern[str], text: str) -> bool:
    for found in which.finditer(text):
        after = " ".join(text[found.end() :].split()[:5])
        if kind.search(after):
            return True
    return False


def _clause(text: str, at: int) -> str:
    """The words before ``at`` that belong to its clause."""
    start = max((found.end() for found in _BREAK.finditer(text[:at])), default=0)
    return text[start:at]


def _head(text: str) -> str:
    """What a sentence says before it comes to its question."""
    found = re.search(
        r" (?:[,:]|but|so) (?=(?:and |so |but )?(?:could|can|would|what|which|may|please|who|where|do|i (?:just |still |will |do )*need))",
        text,
    )
    return text[: found.start()] if found else ""


def _participles(phrases: Sequence[str]) -> list[str]:
    return [re.sub(r"<([a-z]+)>", r"<\1:done>", phrase) for phrase in phrases if "<" in phrase]


def _settled(found: Acts) -> Acts:
    """What counts of several acts: who asks has not settled anything yet, who waits does nothing else."""
    other = replace(found, waits=False)
    return other if other.understood else found
