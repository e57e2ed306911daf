"""What an environment, its tools and its tasks look like. A new domain implements these and registers itself."""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from mua.types import Json

if TYPE_CHECKING:
    from mua.config.schema import EnvironmentConfig
    from mua.endpoint.client import Services
    from mua.users.protocol import User

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
    """By convention ``kind`` names the sort of task and ``difficulty`` is easy, medium or hard: evaluation makes its
    tables by them, and ``environment.difficulties`` chooses."""


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

    Methods are plain blocking code; the manager runs them where :attr:`Domain.isolation` says, under a deadline. An
    environment that waits for others (a language model, a service) makes ``reset``, ``call``, ``user_call``,
    ``evaluate`` or ``close`` coroutine functions instead, which run on the event loop; ``tools`` and ``user_tools``
    answer at once. Arguments come as :func:`mua.environment.schema.fitted` leaves them: 2.0 is 2 where the schema says
    integer. A reward that is no finite number is refused. An exception from any method is an infrastructure fault
    (``environment_error``; :class:`mua.errors.JudgeFault`: ``judge_error``, :class:`mua.errors.UserFault`:
    ``user_error``): the episode is retried, not scored.
    """

    def reset(self, task: Task, seed: int) -> Awaitable[None] | None:
        """Build fresh state for ``task``. ``seed`` varies whatever the domain randomises."""

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


class Domain(Protocol):
    """A named family of tasks: what the registry hands out. ``environments/<name>`` exports one as ``DOMAIN``.

    Four more attributes are optional: ``isolation`` (:data:`Isolation`; "thread" if absent), ``held_out`` (True: for
    evaluation only, its train split may be empty), ``needs_data`` (True: it has tasks only where ``environment.data``
    names a folder or package of them) and ``user_in_tools`` (True: whoever talks with the policy does so through a
    tool, and ``scripted_user`` opens and nudges whatever ``user.kind`` says). So are some methods:
    :class:`Configurable`, :class:`Expert`, :class:`Informed`, :class:`Owner`, :class:`PerTaskPrompt`.
    """

    name: str

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of a split, in a fixed order. Splits are disjoint."""

    def environment(self) -> Environment:
        """A fresh environment, not yet reset."""

    def system_prompt(self, style: PromptStyle) -> str:
        """The agent's instructions. ``full`` holds the whole policy; ``short`` one line, for tiny models."""

    def persona(self, task: Task) -> str:
        """The system prompt of an LLM that plays this task's user."""

    def scripted_user(self, task: Task, seed: int) -> User:
        """A rule-based user for this task; ``seed`` varies its wording."""

    def gold(self, task: Task) -> Sequence[Move]:
        """A shortest way to success: tool calls, and texts to the user, that earn full reward whatever is answered.

        What the user has to do with tools of its own stands among them as :class:`UserMove`.
        """


@runtime_checkable
class Expert(Protocol):
    """A domain that can play the agent by rules: source of demonstrations, and proof that its tasks can be solved."""

    def expert(self, task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
        """Yield a move and be sent what came back: the tool's result, or the user's words.

        It learns what it needs by asking and by calling tools, as a policy would. ``loose`` is how often it departs
        from the prescribed way (another wording, a skipped step), for demonstrations that leave something to learn.
        """


@runtime_checkable
class Peopled(Protocol):
    """A domain whose scripted users are of several kinds (:mod:`mua.users.personas`)."""

    peopled: Literal[True]

    def scripted_user(self, task: Task, seed: int, personas: Sequence[str] = ()) -> User:
        """One of ``personas``, or of all; otherwise :meth:`Domain.scripted_user`."""


@runtime_checkable
class Configurable(Protocol):
    """A domain with settings: another data folder, another form of reward, a judge."""

    def configured(self, config: EnvironmentConfig, services: Services) -> Domain:
        """This domain under ``config``; raises :class:`mua.errors.ConfigError` for what it cannot do."""


@runtime_checkable
class Informed(Protocol):
    """A domain that lists what the user of a task knows, so that what a language model says in that part can be checked
    (:mod:`mua.users.check`). Without it the persona and the texts of the task's data stand for it.
    """

    def known(self, task: Task) -> Mapping[str, Sequence[str]]:
        """Everything the user may state besides what the persona says, as texts by kind: ``{"email": [...]}``.

        Kinds are for people; a value may be written in any usual way. What the user may make up freely (a reason, any
        city) is listed with all its possible values, or left out of the persona.
        """

    def wishes(self, task: Task) -> Sequence[Mapping[str, Sequence[str]]]:
        """What the user wants, one entry a wish: the texts that tell it, such as ``{"verb": ["cancel"], "order":
        ["#W3680"]}``. A conversation is not over before each has been spoken of.

        ``"shown"`` lists what the user's own tools answer once all is well ("4 bars"): having just seen that, it may
        end. Of a wish without it any use of them lets it end.
        """


@runtime_checkable
class Owner(Protocol):
    """A domain that holds something for its environments: a client, a session, a connection of its own.

    The manager calls each once a run, on the event loop that coroutine methods run on, under
    ``environment.reset_seconds``: ``start`` before the first environment is built, ``stop`` after the last one is
    closed, also where ``start`` failed half-way. In worker processes each worker does so for itself.
    """

    async def start(self) -> None:
        """Take what is needed. An exception ends the run, with a message that names the domain."""

    async def stop(self) -> None:
        """Give it back. What it raises is logged."""


@runtime_checkable
class PerTaskPrompt(Protocol):
    """A domain whose instructions depend on the task."""

    def prompt_for(self, task: Task, style: PromptStyle) -> str:
        """The agent's instructions for ``task``; comes before :meth:`Domain.system_prompt`."""
