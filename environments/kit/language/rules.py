"""What the general English and a domain's words say of a sentence, without anything learnt: marks for the model.

The mood of a sentence (a question, a request, a statement about what has been done, what can not be done, ...) comes
from English that all domains share (``general.yaml``); what it is about comes from the domain's words. The rules are
right about three times out of four on sentences that they were not made for; :mod:`environments.kit.language.model`
weighs them against everything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from environments.kit.language.lexicon import Lexicon, Named
from environments.kit.language.text import Sentence

_SUBORDINATE = re.compile(
    r"^(?:(?:and|but|so|okay|sure|thanks|great|no problem|of course|i am sorry|sorry) ?,? )?"
    r"(?:before|once|after|as soon as|when|since|because|while|in order to|so that|for|to|now that|until) [^,:]*[,:] "
)
_AIMS = (
    "help|find|look|locate|verify|pull|proceed|process|cancel|return|go|get|move|access|continue|make|check|confirm"
    "|begin|start|do|set|bring|complete|see|be|identify|open|track"
)
_PURPOSE = re.compile(
    r" (?:,? ?so (?:that )?(?:i|we) (?:can|may|know|am|do|will)|so as to|in order to|because|since"
    r"|before (?:i|we|going|cancel|do|mak|chang|proceed)"
    rf"|to (?:{_AIMS})|then (?:i|we)|and (?:i|we) (?:will|can|shall)"
    r"|(?:if|when|once|until|as soon as) (?:i|we) (?:can|have|know|get)) .*"
)
_BREAK = re.compile(r" [,:] | (?:and|but|so|because|since|as|which|though|although|while|however|therefore|then) ")
_QUESTION_PART = re.compile(
    r" (?:[,:]|but|so) (?=(?:and |so |but )?"
    r"(?:could|can|would|what|which|may|please|who|where|do|i (?:just |still |will |do )*need))"
)


class Rules:
    """The rules with one domain's words."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._words = lexicon

    def marks(self, sentence: Sentence, wish: str) -> frozenset[str]:
        """``ask:FACT``, ``propose``, ``done``, ``refuse``, ``inform``, ``transfer``, ``offer``, ``wait``."""
        text = sentence.text
        asking = sentence.question or bool(self._words.moods["question_start"].match(text))
        if self._has("offer", text) and (asking or not self._has("refusal", text)):
            rest = self._words.moods["offer"].sub(" ", text)
            return frozenset({"offer", *self._statement(rest, wish, asking)})
        asked = self._asked(text, asking)
        if asked:
            before = head(text)
            return frozenset({*asked, *(self._said(before, wish) if before else ())})
        if self._wants_yes(text, asking):
            return frozenset({"propose"})
        return frozenset(self._statement(text, wish, asking))

    def _statement(self, text: str, wish: str, asking: bool) -> set[str]:
        found = set() if asking else set(self._said(text, wish))
        if found:
            return found
        return {"wait"} if self._has("wait", text) else set()

    # Questions and requests.

    def _asked(self, text: str, asking: bool) -> set[str]:
        facts = self._words.facts.items()
        if not asking and (not self._has("request", text) or self._has("no_request", text)):
            return {f"ask:{name}" for name, fact in facts if fact.idioms.search(text)}
        part = core(text)
        return {f"ask:{name}" for name, fact in facts if self._asks(fact, part)}

    def _asks(self, fact: Named, text: str) -> bool:
        """Whether the fact is asked for, or named and not at once followed by its value ("order number K7")."""
        rests = (text[found.end() :].lstrip(" :#") for found in fact.named.finditer(text))
        named = any(not self._words.value.match(rest) for rest in rests)
        return named or bool(fact.idioms.search(text)) or self._words.which(fact, text)

    def _wants_yes(self, text: str, asking: bool) -> bool:
        if self._has("no_request", text):
            return False
        if asking:
            wants = any(self._has(key, text) for key in ("confirm", "would_i", "you_want"))
            return wants or self._words.any_deed.search(text) is not None
        return self._has("request", text) and self._has("confirm", text) and not self._has("offer", text)

    # Statements.

    def _said(self, text: str, wish: str) -> Iterator[str]:
        plain = self._words.moods["not_refusal"].sub(" ", text)
        if self._has("refusal", plain) or self._words.of_wish(self._words.against, plain, wish):
            yield "refuse"
        else:
            yield from ("done",) if self._completed(text, wish) else ()
            yield from ("inform",) if self._words.of_wish(self._words.answers, text, wish) else ()
        if self._has("transfer", text):
            yield "transfer"

    def _completed(self, text: str, wish: str) -> bool:
        done = self._words.done.get(wish)
        for found in [*(done.finditer(text) if done else ()), *self._words.moods["complete"].finditer(text)]:
            if not self._words.moods["hypothetical"].search(clause(text, found.start())):
                return True
        return False

    def _has(self, key: str, text: str) -> bool:
        return self._words.moods[key].search(text) is not None


def core(text: str) -> str:
    """A question without the clauses that say what it is for."""
    found = _SUBORDINATE.sub("", text)
    return _PURPOSE.sub(" ", found) if _PURPOSE.search(found) and len(_PURPOSE.sub("", found)) > 12 else found


def clause(text: str, at: int) -> str:
    """The words before ``at`` that belong to its clause."""
    start = max((found.end() for found in _BREAK.finditer(text[:at])), default=0)
    return text[start:at]


def head(text: str) -> str:
    """What a sentence says before it comes to its question."""
    found = _QUESTION_PART.search(text)
    return text[: found.start()] if found else ""
