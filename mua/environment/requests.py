"""What an instance asks of its environment, in one form for every place that an environment runs in.

Between a run and its worker processes they are JSON, one object a line, so nothing is ever pickled::

    run     {"do": "call", "instance": 7, "seconds": 30, "tool": "get_order", "arguments": {"order": "K7"}}
    worker  {"answer": {"text": "...", "error": false, "terminal": false, "reward": 0.0}}
            {"raised": "KeyError", "text": "'K7'"}
"""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

from mua.environment.protocol import Environment, Evaluation, Task, ToolResult, Transcript, UserControlled
from mua.types import Json, ToolSchema
from mua.utils.errors import ConfigError, EnvironmentFault, JudgeFault, UserFault, UserFaultKind
from mua.utils.strict_json import MAX_DEPTH, MAX_TOOL_TEXT, deeper, unpaired_surrogate

DEEPEST_DETAILS = MAX_DEPTH + 50
"""What a policy wrote, and some levels around it."""

LARGEST_REWARD = 1e9
"""Beyond it squares of advantages leave float32, and a domain has divided by something."""


CallOutcome: TypeAlias = tuple[Any, BaseException | None]
"""What a call returned, or what it raised. Exceptions travel as values: a future refuses StopIteration, SystemExit
must not kill the thread, and a CancelledError out of a tool is no cancellation of the episode."""


class WrongResult(Exception):
    """A method gave something else than the protocol says; the text names both types."""


class ToolLists(NamedTuple):
    """The tools right after a reset."""

    agent: tuple[ToolSchema, ...]
    user: tuple[ToolSchema, ...]


@dataclass(frozen=True, slots=True)
class ResetRequest:
    """Reset for one task; answered by :class:`ToolLists`."""

    task: Task
    seed: int

    @property
    def name(self) -> str:
        return "reset()"

    def perform(self, environment: Environment) -> Any:
        done = environment.reset(self.task, self.seed)
        if not inspect.isawaitable(done):
            return _tools_of(environment)

        async def after() -> ToolLists:
            await done
            return _tools_of(environment)

        return after()


@dataclass(frozen=True, slots=True)
class CallRequest:
    """One tool call, of the agent or of the user; answered by a :class:`ToolResult`."""

    tool: str
    arguments: Json
    by_user: bool = False

    @property
    def name(self) -> str:
        return f"user tool {self.tool!r}" if self.by_user else f"tool {self.tool!r}"

    def perform(self, environment: Environment) -> Any:
        if not self.by_user:
            return environment.call(self.tool, self.arguments)
        assert isinstance(environment, UserControlled), "only such environments have schemas to call"
        return environment.user_call(self.tool, self.arguments)


@dataclass(frozen=True, slots=True)
class EvaluateRequest:
    """The verdict; answered by an :class:`Evaluation`."""

    transcript: Transcript

    @property
    def name(self) -> str:
        return "evaluate()"

    def perform(self, environment: Environment) -> Any:
        return environment.evaluate(self.transcript)


Request: TypeAlias = ResetRequest | CallRequest | EvaluateRequest
"""``perform`` runs it on an environment and gives its answer, or an awaitable of it."""
_ANSWERS: dict[type, type] = {ResetRequest: ToolLists, CallRequest: ToolResult, EvaluateRequest: Evaluation}


def checked_answer(request: Request, answer: Any) -> Any:
    """``answer``, if it is what ``request`` is answered by, its reward as a float.

    Raises :class:`WrongResult` for another type, a reward that is no finite number, a text that is none.
    """
    expected = _ANSWERS[type(request)]
    if not isinstance(answer, expected):
        raise WrongResult(f"gave {type(answer).__name__} instead of {expected.__name__}")
    if isinstance(answer, ToolLists):
        return answer
    if isinstance(answer, ToolResult):
        if not isinstance(answer.text, str):
            raise WrongResult(f"gave a result whose text is {type(answer.text).__name__}, not text")
        reward = _checked_reward(answer.reward)
        return answer if reward is answer.reward else replace(answer, reward=reward)
    assert isinstance(answer, Evaluation)
    if not isinstance(answer.details, dict):
        raise WrongResult(f"gave details that are {type(answer.details).__name__}, not an object")
    if deeper(answer.details, DEEPEST_DETAILS):
        raise WrongResult(f"gave details that are nested more than {DEEPEST_DETAILS} deep, which no trace can hold")
    if answer.success not in (0, 1):
        raise WrongResult(f"gave the success {answer.success!r}, which is neither true nor false")
    reward = _checked_reward(answer.reward)
    if reward is answer.reward and isinstance(answer.success, bool):
        return answer
    return replace(answer, reward=reward, success=bool(answer.success))


def checked_text(tool: str, text: str) -> str:
    """``text``, if a conversation can hold it. Raises :class:`EnvironmentFault` that names the tool if not."""
    if len(text) > MAX_TOOL_TEXT:
        raise EnvironmentFault(
            f"tool {tool!r} answered with {len(text)} characters, and {MAX_TOOL_TEXT} are the most that are read; "
            "shorten what it answers"
        )
    if (at := unpaired_surrogate(text)) is not None:
        raise EnvironmentFault(f"tool {tool!r} answered with an unpaired surrogate at character {at}, no text")
    return text


def _checked_reward(reward: Any) -> float:
    """``reward`` as a float. Numbers of other libraries are numbers; what is not finite, or text, is no reward."""
    try:
        value = float(reward) if isinstance(reward, Real) else math.nan
    except (OverflowError, ValueError, TypeError):
        value = math.inf
    if not abs(value) <= LARGEST_REWARD:
        raise WrongResult(
            f"gave the reward {str(reward)[:40]!r}, which is no finite number (at most {LARGEST_REWARD:g} either way)"
        )
    return reward if type(reward) is float else value


def _tools_of(environment: Environment) -> ToolLists:
    # Asking isinstance of a protocol would take longer than resetting a small environment.
    users = environment.user_tools() if hasattr(environment, "user_tools") else ()
    return ToolLists(_listed("tools()", environment.tools()), _listed("user_tools()", users))


def _listed(method: str, schemas: Any) -> tuple[ToolSchema, ...]:
    if inspect.iscoroutine(schemas):
        schemas.close()
        raise WrongResult(f"has a coroutine {method}, which answers at once; wait in reset() and keep the tools")
    return tuple(schemas)


_KEPT = {kind.__name__: kind for kind in (ConfigError, JudgeFault, WrongResult)}
"""Exceptions that mean something to the run, and stay what they are."""


class RemoteError(Exception):
    """What an environment raised in a worker: the type's name and the text."""


def error_text(error: BaseException) -> str:
    """``KeyError: 'x'``, wherever it was raised."""
    return str(error) if isinstance(error, RemoteError) else f"{type(error).__name__}: {error}"


def packed(message: Json) -> bytes:
    """One line. Raises TypeError or ValueError for what is no JSON."""
    return json.dumps(message).encode() + b"\n"


def request_json(request: Request) -> Json:
    """The fields of a request; :func:`read_request` is its inverse."""
    if isinstance(request, ResetRequest):
        task = request.task
        fields = {"id": task.id, "domain": task.domain, "split": task.split, "data": task.data}
        return {"do": "reset", "task": fields, "seed": request.seed}
    if isinstance(request, CallRequest):
        return {"do": "call", "tool": request.tool, "arguments": request.arguments, "by_user": request.by_user}
    return {"do": "evaluate", "messages": list(request.transcript.messages)}


def read_request(message: Json) -> Request:
    """The request of a line that is one."""
    if message["do"] == "reset":
        return ResetRequest(Task(**message["task"]), message["seed"])
    if message["do"] == "call":
        return CallRequest(message["tool"], message["arguments"], message["by_user"])
    return EvaluateRequest(Transcript(message["messages"]))


def answer_json(answer: Any) -> Json:
    """An answer of the right type (:func:`checked_answer`), as JSON."""
    if isinstance(answer, ToolLists):
        # As texts: equal ones, which is nearly all, are then read and kept once for all instances.
        return {"agent": _schemas_text(answer.agent), "user": _schemas_text(answer.user)}
    if isinstance(answer, ToolResult):
        return {"text": answer.text, "error": answer.error, "terminal": answer.terminal, "reward": answer.reward}
    assert isinstance(answer, Evaluation)
    return {"reward": answer.reward, "success": answer.success, "details": answer.details}


def error_json(error: BaseException) -> Json:
    """An exception as JSON."""
    told = {"raised": type(error).__name__, "text": str(error)}
    return told | ({"kind": error.kind} if isinstance(error, UserFault) else {})


def read_error(message: Json) -> Exception | None:
    """What an answer's line says was raised, if anything was."""
    if "raised" not in message:
        return None
    if "kind" in message:
        return UserFault(message["text"], UserFaultKind(message["kind"]))
    kept = _KEPT.get(message["raised"])
    return kept(message["text"]) if kept else RemoteError(f"{message['raised']}: {message['text']}")


def read_outcome(request: Request, message: Json) -> CallOutcome:
    """The outcome of a request, from its answer's line."""
    if (error := read_error(message)) is not None:
        return None, error
    answer = message["answer"]
    if isinstance(request, ResetRequest):
        return ToolLists(_schemas(answer["agent"]), _schemas(answer["user"])), None
    return ToolResult(**answer) if isinstance(request, CallRequest) else Evaluation(**answer), None


def _schemas_text(schemas: tuple[ToolSchema, ...]) -> str:
    return json.dumps([[schema.name, schema.description, schema.parameters] for schema in schemas])


@lru_cache(maxsize=256)
def _schemas(text: str) -> tuple[ToolSchema, ...]:
    return tuple(ToolSchema(*fields) for fields in json.loads(text))
