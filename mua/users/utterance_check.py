"""What a simulated user must not say, whatever the task: what is no text, the agent's lines, calls and markup of a
model, its own instructions.

Every check gives a :class:`Refusal`, or None for what a person may write. All are linear in the text, and the length is
looked at first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from mua.environment.user import STOP_SIGNAL
from mua.users.task_check import TaskCheck, wording
from mua.utils.errors import Refusal, UserFaultKind
from mua.utils.strict_json import MAX_UTTERANCE, JsonError, broken_at, read_json_at

_MARKUP = re.compile(
    r"<\|[^|<>\n]{1,40}\|>|<\s*/?\s*(tool_?calls?|tool_?response|function_?calls?|tool_?result|think|invoke)\b"
    r"|<function\s*=|\[/?TOOL_(CALLS?|RESULTS?)\]|\[/?INST\]|<(start|end)_of_turn>|<</?SYS>>",
    re.IGNORECASE,
)
_LABEL = re.compile(r"\A[\s*#>\[(]*(user|customer|me)\s*(?:[*\])]+\s*)?:\s*(?:\*+\s*)?", re.IGNORECASE)
_NOTED = re.compile(
    r"(?<![\w.])(?:[a-z]\w{0,60}_\w{1,60}\s{0,3}\(\s{0,3}(?:\w{1,60}\s{0,3}=|[\"'{)])"
    r"|[a-z]\w{0,60}\(\s{0,3}\w{1,60}\s{0,3}=\s{0,3}[\"'\d{\[])|\bAction Input\s{0,3}:"
    r"|^[ \t]{0,8}Action[ \t]{0,3}:[ \t]{0,3}\w",
    re.MULTILINE,
)
"""``cancel_order(order="K7")``, and calls as ReAct writes them."""
_OBJECT = re.compile(r"\{\s*\"")
_NAMES = frozenset({"name", "function", "tool", "tool_name", "action"})
_ARGUMENTS = frozenset({"arguments", "args", "parameters", "params", "input", "action_input", "tool_input", "kwargs"})
_MOST_OBJECTS = 50
_STOP = re.compile(r"[#*_\[<(]*#{1,}[\s*_]*stop[\s*_]*#*|\bstop[\s*_]*#{2,}", re.IGNORECASE)
_ONLY_STOP = re.compile(r"\A[\s\"'`*_<\[(]*(STOP|END(_OF_CONVERSATION)?)[\s\"'`*_>\]).]*\Z")
_MOUTH = re.compile(r"\"[^\"]*\"|“[^”]*”")
"""What an instruction puts into the user's mouth: that is meant to be said."""
_WORD = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"[.!?]\s|\n")
_WORDS_AFTER_STOP = 4
RULE_WORDS = 9
"""So many words in a row of the rules that all users have are a quotation, however long a leak must be otherwise."""
ORDER_WORDS = 6
"""So many words in a row of the persona are a quotation, if they address the user: a person says "I", not "you"."""
_ADDRESS = frozenset({"you", "your", "yours", "yourself"})
_OWN = frozenset({"i", "my", "me", "mine", "myself"})


def formless(text: object) -> Refusal | None:
    """Why ``text`` is none that a policy could be told: no text at all, too long, or with what is no character."""
    if not isinstance(text, str):
        return Refusal(UserFaultKind.NO_TEXT, f"the user gave {type(text).__name__}, not text")
    if not text or text.isspace():
        return Refusal(UserFaultKind.NO_TEXT, "the user says nothing")
    if len(text) > MAX_UTTERANCE:
        reason = f"the user writes {len(text)} characters, and {MAX_UTTERANCE} are the most that are read"
        return Refusal(UserFaultKind.TOO_LONG, reason)
    if (at := broken_at(text)) is not None:
        reason = (
            f"the user's words hold an unpaired surrogate or a control character at character {at}, which is no text"
        )
        return Refusal(UserFaultKind.BROKEN_TEXT, reason)
    return None


def unusable(text: str) -> Refusal | None:
    """Why ``text`` cannot be a user's message, in form or as words of a user.

    A line that begins with the agent's name is the agent's line, and so is what only a desk says and everything a chat
    template puts around messages and tool calls: none may reach the policy as the words of a user.
    """
    if refusal := formless(text):
        return refusal
    if markup := _MARKUP.search(text):
        reason = f"the user writes a model's markup ({markup.group()})"
        return Refusal(UserFaultKind.TOOL_CALL_IN_TEXT, reason)
    if called := _call_in(text):
        return Refusal(UserFaultKind.TOOL_CALL_IN_TEXT, f"the user writes a tool call as text ({called})")
    if line := wording("agents_line").search(text) or wording("speaks_as_desk").search(text):
        reason = f"the user speaks as the agent ({' '.join(line.group().split())})"
        return Refusal(UserFaultKind.SPEAKS_AS_AGENT, reason)
    if role := wording("speaks_of_part").search(text):
        reason = f"the user speaks of its part ({' '.join(role.group().split())})"
        return Refusal(UserFaultKind.LEAKS_INSTRUCTION, reason)
    return None


def _call_in(text: str) -> str | None:
    """A tool call that is written out: as Python, as ReAct, or as JSON."""
    if noted := _NOTED.search(text):
        return noted.group().strip()
    begun = _OBJECT.search(text)
    for _ in range(_MOST_OBJECTS):
        if begun is None:
            return None
        try:
            value, end = read_json_at(text, begun.start(), strict=False)
        except JsonError:
            end = begun.end()
        else:
            if not text[: begun.start()].strip("`json \n") and not text[end:].strip("` \n"):
                return "nothing but a JSON object"
            if value.keys() & _NAMES and value.keys() & _ARGUMENTS:
                return text[begun.start() : begun.start() + 40]
        begun = _OBJECT.search(text, end)
    return None


def without_label(text: str) -> str:
    """``text`` without the name of the speaker that some models put before it."""
    return _LABEL.sub("", text, count=1)


def with_signal(text: str) -> str:
    """``text`` with the stop signal as it is meant to be, where a model wrote it in another way (``### STOP ###``)."""
    if _ONLY_STOP.match(text):
        return STOP_SIGNAL
    return _STOP.sub(STOP_SIGNAL, text)


def misused_signal(text: str) -> Refusal | None:
    """Why the stop signal in ``text`` stops nothing: the user goes on, or speaks of the signal."""
    _, found, after = text.rpartition(STOP_SIGNAL)
    if found and len(_WORD.findall(after)) >= _WORDS_AFTER_STOP:
        return Refusal(UserFaultKind.LEAKS_INSTRUCTION, "the user goes on after the signal to stop, or speaks of it")
    return None


class LeakCheck:
    """Finds quotations of hidden texts, whatever the case, spacing and punctuation."""

    def __init__(self, words: int, *hidden: str, rules: str = "", stated: Sequence[str] = ()) -> None:
        """``words`` words in a row of ``hidden`` are a quotation, of ``rules`` and of what addresses the user fewer.

        ``stated`` are values in ``hidden`` that the user is there to tell: no run goes across one. 0 words: nothing is
        ever a leak.
        """
        self._words = words
        # A bare word stands in prose for itself too.
        cut_out = {value for value in stated if re.search(r"[\dA-Z]|\w\s+\w", value)}
        values = tuple(sorted(cut_out, key=len, reverse=True))
        self._hidden = [_prose_runs(text, words, values) for text in hidden]
        self._orders = [_orders(text, min(words, ORDER_WORDS)) for text in hidden]
        self._rules = _hidden_runs(rules, min(words, RULE_WORDS))

    def quotation(self, text: str) -> str | None:
        """The words that ``text`` quotes."""
        words = _WORD.findall(text.casefold())
        looked = [*((self._words, hidden) for hidden in self._hidden), (min(self._words, RULE_WORDS), self._rules)]
        looked += [(min(self._words, ORDER_WORDS), orders) for orders in self._orders]
        for length, hidden in looked:
            if found := hidden & _runs_of(words, length):
                return " ".join(min(found))
        return None


@lru_cache(maxsize=1024)
def _hidden_runs(text: str, length: int) -> frozenset[tuple[str, ...]]:
    """Remembered: the rules are the same for all users, and the rollouts of a group share their persona."""
    runs = (run for part in _MOUTH.split(text) for run in _runs_of(_WORD.findall(part), length))
    return frozenset(tuple(word.casefold() for word in run) for run in runs)


@lru_cache(maxsize=1024)
def _prose_runs(text: str, length: int, values: tuple[str, ...]) -> frozenset[tuple[str, ...]]:
    """Runs of an instruction that are neither values, nor mostly names and numbers, nor in the user's own voice."""
    cut = re.compile("|".join(rf"(?<!\w){re.escape(value)}(?!\w)" for value in values) or r"(?!)", re.IGNORECASE)
    parts = (prose for part in _MOUTH.split(text) for prose in cut.split(part))
    found = set()
    for run in (run for part in parts for run in _runs_of(_WORD.findall(part), length)):
        folded = tuple(word.casefold() for word in run)
        # Facts are there to be told, and can hardly be put otherwise.
        of_facts = 3 * sum(word[0].isupper() or word[0].isdigit() for word in run) >= len(run)
        # "with my gift card": an instruction, which says "you", gives it to be said.
        in_own_voice = not _OWN.isdisjoint(folded) and _ADDRESS.isdisjoint(folded)
        if not of_facts and not in_own_voice:
            found.add(folded)
    return frozenset(found)


@lru_cache(maxsize=1024)
def _orders(text: str, length: int) -> frozenset[tuple[str, ...]]:
    """Runs within a sentence that address the user."""
    sentences = (one for part in _MOUTH.split(text.casefold()) for one in _SENTENCE_END.split(part))
    runs = (run for sentence in sentences for run in _runs_of(_WORD.findall(sentence), length))
    return frozenset(run for run in runs if not _ADDRESS.isdisjoint(run))


def _runs_of(words: list[str], length: int) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)} if length else set()


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
