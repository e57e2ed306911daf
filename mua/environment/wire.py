"""Requests and answers as JSON, one object a line, between a run and its worker processes.

::

    run     {"do": "call", "instance": 7, "seconds": 30, "tool": "get_order", "arguments": {"order": "K7"}}
    worker  {"answer": {"text": "...", "error": false, "terminal": false, "reward": 0.0}}
            {"raised": "KeyError", "text": "'K7'"}

Everything an instance passes on is JSON by the protocol, so nothing is ever pickled.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from mua.environment.protocol import Evaluation, Task, ToolResult, Transcript
from mua.environment.requests import CallRequest, EvaluateRequest, Request, ResetRequest, ToolLists, WrongResult
from mua.environment.threads import CallOutcome
from mua.types import Json, ToolSchema
from mua.utils.errors import ConfigError, JudgeFault, UserFault, UserFaultKind

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
    """An answer of the right type (:func:`mua.environment.requests.checked_answer`), as JSON."""
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
