"""What an environment, its tools and its tasks look like."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from mua.types import Json, ToolSchema

Split = Literal["train", "validation", "test"]
PromptStyle = Literal["full", "short"]
Isolation = Literal["inline", "thread", "process"]
"""Where an environment's methods run: on the event loop (only for work of microseconds that cannot hang, and for
coroutines), in a thread (a hang costs the thread), or in a worker process (a hang or crash costs the worker)."""
Move: TypeAlias = str | tuple[str, Json]
"""What an agent does: a text to the user, or a tool call (name, arguments)."""


class UserMove(NamedTuple):
    """A move among the gold ones that the user makes, with a tool of its own (:class:`UserControlled`)."""

    name: str
    arguments: Json


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool call gave. An error the policy caused is a result with ``error`` set, never an exception."""

    text: str
    error: bool = False
    terminal: bool = False
    """The episode ends after this call (a transfer to a human, say)."""
    reward: float = 0.0
    """Turn-level reward of this call."""


@dataclass(frozen=True, slots=True)
class Task:
    """One thing a user wants. ``data`` holds what the domain needs: gold actions, required facts, user facts."""

    id: str
    domain: str
    split: Split
    data: Json
    """By convention ``kind`` names the sort of task and ``difficulty`` is easy, medium or hard: evaluation makes its
    tables by them, and ``environment.difficulties`` chooses."""

    @property
    def labels(self) -> dict[str, str]:
        """``kind`` and ``difficulty``, those of them that the task has."""
        return {name: str(self.data[name]) for name in ("kind", "difficulty") if name in self.data}


@dataclass(frozen=True, slots=True)
class Transcript:
    """What the evaluation may look at: the conversation and how it ended."""

    messages: Sequence[Json]
    """OpenAI-style messages. Assistant messages with ``tool_calls``, ``tool_call_errors`` or ``truncated`` were not
    shown to the user."""

    def told_user(self) -> list[str]:
        """Every text the agent said to the user, in order."""
        unsaid = ("tool_calls", "tool_call_errors", "truncated")
        agent = [m for m in self.messages if m["role"] == "assistant"]
        return [m["content"] or "" for m in agent if not any(m.get(key) for key in unsaid)]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The verdict on one finished episode."""

    reward: float
    success: bool
    details: Json = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """Tools over private state, for exactly one episode at a time.

    Methods are plain blocking code; the manager runs them where the domain's ``isolation`` says, under a deadline. An
    environment that waits for others (a language model, a service) makes ``reset``, ``call``, ``user_call``,
    ``evaluate`` or ``close`` coroutine functions instead, which run on the event loop; ``tools`` and ``user_tools``
    answer at once. Arguments come as :func:`mua.environment.tool_arguments.fitted` leaves them: 2.0 is 2 where the
    schema says integer. A reward that is no finite number is refused. An exception from any method is an infrastructure
    fault (``environment_error``; :class:`JudgeFault`: ``judge_error``, :class:`UserFault`:
    ``user_error``): the episode is retried, not scored.
    """

    def reset(self, task: Task, seed: int) -> Awaitable[None] | None:
        """Build fresh state for ``task``. ``seed`` varies whatever the domain randomizes."""

    def tools(self) -> Sequence[ToolSchema]:
        """The tools of the current task."""

    def call(self, name: str, arguments: Json) -> ToolResult | Awaitable[ToolResult]:
        """Run one tool. Unknown names and bad arguments give a result with ``error`` set."""

    def evaluate(self, transcript: Transcript) -> Evaluation | Awaitable[Evaluation]:
        """Judge the episode from the final state and what the user was told."""

    def close(self) -> Awaitable[None] | None:
        """Give back everything held. Called exactly once, whatever happened before."""


@runtime_checkable
class UserControlled(Protocol):
    """What an environment adds when the user has tools too (dual control): a phone to restart, a switch to turn."""

    def user_tools(self) -> Sequence[ToolSchema]:
        """The tools of the task's user; the policy never sees them."""

    def user_call(self, name: str, arguments: Json) -> ToolResult | Awaitable[ToolResult]:
        """Run one of them on the same state that the policy's tools work on."""
