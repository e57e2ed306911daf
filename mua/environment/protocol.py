"""What an environment, its tools and its tasks look like. A new domain implements these and registers itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from mua.types import Json

if TYPE_CHECKING:
    from mua.users.protocol import User

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool as the model sees it. ``parameters`` is a full (nested) JSON Schema object, passed on whole."""

    name: str
    description: str
    parameters: Json

    def openai(self) -> Json:
        """The OpenAI function-calling form that chat templates render."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


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

    Methods are plain blocking code; the manager runs them off the event loop, under a deadline. An exception
    from any method is an infrastructure fault (``environment_error``): the episode is retried, not scored.
    """

    def reset(self, task: Task, seed: int) -> None:
        """Build fresh state for ``task``. ``seed`` varies whatever the domain randomises."""

    def tools(self) -> Sequence[ToolSchema]:
        """The tools of the current task."""

    def call(self, name: str, arguments: Json) -> ToolResult:
        """Run one tool. Unknown names and bad arguments give a result with ``error`` set."""

    def evaluate(self, transcript: Transcript) -> Evaluation:
        """Judge the episode from the final state and what the user was told."""

    def close(self) -> None:
        """Give back everything held. Called exactly once, whatever happened before."""


class Domain(Protocol):
    """A named family of tasks: what the registry hands out. ``environments/<name>`` exports one as ``DOMAIN``."""

    name: str

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of a split, in a fixed order. Splits are disjoint."""

    def environment(self) -> Environment:
        """A fresh environment, not yet reset."""

    def system_prompt(self, style: Literal["full", "short"]) -> str:
        """The agent's instructions. ``full`` holds the whole policy; ``short`` one line, for tiny models."""

    def persona(self, task: Task) -> str:
        """The system prompt of an LLM that plays this task's user."""

    def scripted_user(self, task: Task, seed: int) -> User:
        """A rule-based user for this task; ``seed`` varies its wording."""
