"""The help desk with a graded reward, registered as a third party's package registers its domain.

A policy with barely trained weights never earns the help desk's reward of 1, so every advantage would be 0 and nothing
would be trained. Here the share of vowels in what it wrote is added, which differs from episode to episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from environments.help_desk import HelpDeskDomain
from environments.help_desk.tools import HelpDesk
from mua.environment.protocol import Environment, Evaluation, Split, Task, ToolResult, Transcript
from mua.types import Json, ToolSchema


def vowels(transcript: Transcript) -> float:
    """Their share of what the agent wrote."""
    text = "".join(m["content"] or "" for m in transcript.messages if m["role"] == "assistant").lower()
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))


class GradedDesk(HelpDesk):
    """A help desk that judges in smaller steps."""

    def evaluate(self, transcript: Transcript) -> Evaluation:
        verdict = super().evaluate(transcript)
        return replace(verdict, reward=verdict.reward + vowels(transcript))


class Graded:
    """Another environment; the share of vowels in what the agent wrote is added to its reward."""

    def __init__(self, inner: Environment) -> None:
        self._inner = inner

    def reset(self, task: Task, seed: int) -> None:
        self._inner.reset(task, seed)

    def tools(self) -> Sequence[ToolSchema]:
        return self._inner.tools()

    def call(self, name: str, arguments: Json) -> ToolResult:
        return self._inner.call(name, arguments)

    def evaluate(self, transcript: Transcript) -> Evaluation:
        verdict = self._inner.evaluate(transcript)
        return replace(verdict, reward=verdict.reward + vowels(transcript))

    def close(self) -> None:
        self._inner.close()


class GradedDeskDomain(HelpDeskDomain):
    """The help desk's tasks and customers with :class:`GradedDesk`."""

    name = "graded_desk"

    def tasks(self, split: Split) -> Sequence[Task]:
        return [replace(task, domain=self.name) for task in super().tasks(split)]

    def environment(self) -> Environment:
        return GradedDesk()


DOMAIN = GradedDeskDomain()
