"""Facts that a user has to be told, and whether the agent told them.

A statement is a list of groups of alternatives: all groups must occur in one and the same message, of each group any
alternative. ``["327.50"]`` is a statement of one group; ``["#W123", ["cannot", "unable"]]`` asks for the order and a
refusal together. Comparison is tau-bench's: lower case, commas removed, substrings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Statement: TypeAlias = Sequence[str | Sequence[str]]

CANNOT = ("cannot", "can not", "can't", "unable", "not able", "not possible", "not allowed", "not eligible")
"""Ways to refuse, for statements that need one."""


def unsaid(statements: Sequence[Statement], told: Sequence[str]) -> list[Statement]:
    """The statements that occur in no message of ``told``."""
    messages = [_plain(text) for text in told]
    return [statement for statement in statements if not any(_says(message, statement) for message in messages)]


def _says(message: str, statement: Statement) -> bool:
    return all(
        any(_plain(alternative) in message for alternative in ([group] if isinstance(group, str) else group))
        for group in statement
    )


def _plain(text: str) -> str:
    return text.lower().replace(",", "").replace("’", "'")
