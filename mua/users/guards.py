"""What a simulated user must not say: the agent's lines, a model's inner markup, its own instructions word for word."""

from __future__ import annotations

import re
from functools import lru_cache

_MARKUP = re.compile(
    r"<\|[^|<>\n]{1,40}\|>|</?(tool_call|tool_response|function_call|tool_result|think)\b|<function\s*=|\[TOOL_CALLS\]"
    r"|\[/?INST\]|<(start|end)_of_turn>",
    re.IGNORECASE,
)
_AGENT = re.compile(
    r"^[^\S\n]*(?:[*#>]+[^\S\n]*)*+(the )?(ai |support |service |customer )*"
    r"(agent|assistant|representative|system|tool)\s*(?:\*+\s*)?:",
    re.IGNORECASE | re.MULTILINE,
)
_LABEL = re.compile(r"\A[\s*#>]*(user|customer|me)\s*(?:\*+\s*)?:\s*(?:\*+\s*)?", re.IGNORECASE)
_WORD = re.compile(r"\w+")


def unusable(text: str) -> str | None:
    """Why ``text`` cannot be a user's message, or None.

    A line that begins with the agent's name is the agent's line, and so is everything a chat template puts around
    messages and tool calls: neither may reach the policy as the words of a user.
    """
    if markup := _MARKUP.search(text):
        return f"the user writes a model's markup ({markup.group()})"
    if line := _AGENT.search(text):
        return f"the user speaks as the agent ({' '.join(line.group().split())})"
    return None


def without_label(text: str) -> str:
    """``text`` without the name of the speaker that some models put before it."""
    return _LABEL.sub("", text, count=1)


class LeakCheck:
    """Finds ``words`` words in a row of hidden texts, whatever the case, spacing and punctuation."""

    def __init__(self, words: int, *hidden: str) -> None:
        """``words`` 0: nothing is ever a leak."""
        self._words = words
        self._hidden = [_hidden_runs(text, words) for text in hidden]

    def leaks(self, text: str) -> bool:
        """Whether ``text`` quotes so much of a hidden text."""
        runs = _runs(text, self._words)
        return any(not hidden.isdisjoint(runs) for hidden in self._hidden)


@lru_cache(maxsize=1024)
def _hidden_runs(text: str, length: int) -> frozenset[tuple[str, ...]]:
    """Remembered: the rules are the same for all users, and the rollouts of a group share their persona."""
    return frozenset(_runs(text, length))


def _runs(text: str, length: int) -> set[tuple[str, ...]]:
    words = _WORD.findall(text.casefold())
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)} if length else set()
