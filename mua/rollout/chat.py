"""The policy behind an OpenAI-compatible endpoint: one request for one turn, and its reply read strictly.

The library of the endpoint's protocol retries what may pass (408, 409, 429, 5xx, dropped connections) with jittered
backoff that honours ``Retry-After``. What remains is a fault of the infrastructure (:class:`mua.errors.EngineError`,
retried with a fresh episode, never scored), or a setting that no retry mends (:class:`mua.errors.ConfigError`). A
conversation that outgrew the model's context is neither: the policy answers for it, as it does on an engine.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from mua.config.schema import PolicyEndpointConfig
from mua.errors import ConfigError, DeadlineExceeded, EngineError
from mua.masking import masked
from mua.tokens.parsing import AssistantTurn, ErrorKind, ToolCall, ToolCallError
from mua.types import Json
from mua.untrusted import JsonError, read_json, unpaired_surrogate
from mua.users.connection import without_secrets
from mua.users.limits import Window

if TYPE_CHECKING:
    import openai

SECTION = "evaluation.policy.endpoint"
_MENDS = {
    401: f"check {SECTION}.api_key",
    403: f"check that {SECTION}.api_key may use this model",
    404: f"check {SECTION}.base_url (it usually ends in /v1) and {SECTION}.model",
}
_TOO_LONG = re.compile(r"context[ _](length|window)|maximum (context|model)|too many tokens|prompt is too long", re.I)
_THINKING = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RawCall:
    """One tool call as the endpoint wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One assistant message, not yet judged."""

    content: str
    reasoning: str | None = None
    calls: tuple[RawCall, ...] = ()
    truncated: bool = False
    tokens: dict[str, int] = field(default_factory=dict)
    """``prompt_tokens``, ``completion_tokens``, and ``cached_tokens``, ``reasoning_tokens`` where they are told."""

    def turn(self, number: int, used: Collection[str]) -> tuple[AssistantTurn, list[Json]]:
        """The turn, and its calls as they go back to the endpoint, in the order in which results are given.

        An id that is missing, or was used before, is replaced: every call needs one of its own to be answered.
        """
        good: list[ToolCall] = []
        errors: list[ToolCallError] = []
        broken: list[Json] = []
        taken = set(used)
        for index, raw in enumerate(self.calls):
            call_id = raw.id if raw.id and raw.id not in taken else f"call_{number}_{index}"
            taken.add(call_id)
            arguments = _arguments(raw)
            if isinstance(arguments, ToolCallError):
                errors.append(arguments)
                broken.append(ToolCall(call_id, raw.name or "unknown", {}).openai())
            else:
                good.append(ToolCall(call_id, raw.name, arguments))
        turn = AssistantTurn(self.content, self.reasoning, good, errors, self.truncated)
        return turn, [call.openai() for call in good] + broken

    def wire(self, calls: Sequence[Json], *, reasoning: bool) -> Json:
        """The message as it goes back to the endpoint, with its ``calls`` from :meth:`turn`."""
        message: Json = {"role": "assistant", "content": self.content or (None if calls else "")}
        if calls:
            message["tool_calls"] = list(calls)
        if reasoning and self.reasoning:
            message["reasoning_content"] = self.reasoning
        return message


class ChatClient:
    """Chat completions of one endpoint and model, at most ``concurrency`` requests in flight. Of one event loop."""

    def __init__(self, config: PolicyEndpointConfig) -> None:
        import openai  # over a second, which no training run should pay

        address = urlsplit(config.base_url)
        self._openai = openai
        self.config = config
        self._slots = asyncio.Semaphore(config.concurrency)
        self._window = Window(config.requests_per_minute) if config.requests_per_minute else None
        self._client = openai.AsyncOpenAI(
            base_url=address._replace(query="").geturl(),
            default_query=dict(parse_qsl(address.query)),
            api_key=config.api_key.get_secret_value() or "none",
            max_retries=config.max_retries,
            timeout=config.request_seconds,
        )

    async def complete(
        self, messages: Sequence[Json], tools: Sequence[Json], *, temperature: float, top_p: float, top_k: int,
        max_tokens: int, seed: int, deadline_s: float,
    ) -> ChatReply | None:  # fmt: skip
        """The next assistant message; None when the conversation no longer fits the model's context.

        ``top_p`` below 1 and ``top_k`` above 0 are sent; the latter is no field of OpenAI's own endpoints.
        """
        request: Json = {
            "model": self.config.model,
            "messages": list(messages),
            "temperature": temperature,
            self.config.tokens_parameter: max_tokens,
            "extra_body": {**({"top_k": top_k} if top_k > 0 else {}), **self.config.extra},
        }
        if tools:
            request |= {"tools": list(tools), "tool_choice": "auto"}
        if top_p < 1:
            request["top_p"] = top_p
        if self.config.send_seed:
            request["seed"] = seed
        fault: Exception
        try:
            async with asyncio.timeout(deadline_s), self._slots:
                await self._place()
                return _read(await self._client.chat.completions.create(**request))
        except TimeoutError:
            fault = DeadlineExceeded(f"rollout.generate_seconds: {self} did not answer within {deadline_s:g} s")
        except self._openai.APIStatusError as error:
            if error.status_code in (400, 413, 422) and _TOO_LONG.search(error.message):
                return None
            fault = self._refusal(error)
        except (ValueError, RecursionError, self._openai.APIError) as error:
            # The first two: a body announced as JSON that is none, or is nested without end.
            cause = error.__cause__ or error
            fault = EngineError(f"{self}: {type(cause).__name__}: {self._clean(str(cause))}")
        # Raised outside the handlers: a chained exception would carry the request and its headers.
        raise fault

    def cost(self, reply: ChatReply) -> float:
        """What ``reply`` cost by the configured prices."""
        read, written = (reply.tokens.get(f"{side}_tokens", 0) for side in ("prompt", "completion"))
        return (read * self.config.price_per_million_in + written * self.config.price_per_million_out) / 1e6

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def __str__(self) -> str:
        return f"policy endpoint {masked(self.config.base_url)} (model {self.config.model})"

    async def _place(self) -> None:
        """Wait for a place under the rate limit."""
        if self._window is not None:
            await asyncio.sleep(self._window.reserve(1.0, monotonic()).start - monotonic())

    def _refusal(self, error: openai.APIStatusError) -> EngineError | ConfigError:
        reason = f"{self}: HTTP {error.status_code}: {self._clean(error.message)}"
        mend = _MENDS.get(error.status_code)
        return EngineError(reason) if mend is None else ConfigError(f"{reason}; {mend}")

    def _clean(self, text: str) -> str:
        """One line, shortened, without keys and passwords: some endpoints quote them in their refusal."""
        return without_secrets(text, self.config)[:500]


def _read(response: Any) -> ChatReply:
    """Raises :class:`EngineError` where the answer is no chat completion."""
    try:
        choice = response.choices[0]
        message = choice.message
        calls = tuple(
            RawCall(call.id or "", call.function.name, call.function.arguments or "")
            for call in message.tool_calls or ()
        )
        content, reasoning = message.content or "", _reasoning(message)
        told = "".join((content, reasoning or "", *(f"{call.id}{call.name}{call.arguments}" for call in calls)))
    except (AttributeError, IndexError, TypeError) as error:
        raise EngineError(
            f"the policy's endpoint gave no chat completion ({error}); check {SECTION}.base_url", passing=False
        ) from None
    if unpaired_surrogate(told) is not None:
        raise EngineError("the policy's endpoint gave text with an unpaired surrogate, which no request can carry")
    if reasoning is None and (thought := _THINKING.match(content)):
        reasoning, content = thought[1].strip("\n"), content[thought.end() :]
    return ChatReply(content, reasoning, calls, choice.finish_reason == "length", _usage(response))


def _reasoning(message: Any) -> str | None:
    """Servers disagree on the field's name; none of them stands in OpenAI's own schema."""
    found = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
    return found if isinstance(found, str) else None


def _usage(response: Any) -> dict[str, int]:
    usage = getattr(response, "usage", None)
    prompt, completion = (getattr(usage, f"{side}_tokens_details", None) for side in ("prompt", "completion"))
    told = {
        "prompt_tokens": getattr(usage, "prompt_tokens", None),
        "completion_tokens": getattr(usage, "completion_tokens", None),
        "cached_tokens": getattr(prompt, "cached_tokens", None),
        "reasoning_tokens": getattr(completion, "reasoning_tokens", None),
    }
    return {name: int(value) for name, value in told.items() if value is not None}


def _arguments(call: RawCall) -> Json | ToolCallError:
    raw = f"{call.name}({call.arguments})"
    if not call.name:
        return ToolCallError(ErrorKind.MISSING_NAME, "the tool call has no name", raw)
    try:
        value = read_json(call.arguments or "{}")
    except JsonError as error:
        return ToolCallError(ErrorKind.BAD_JSON, f"the arguments of {call.name} are not valid JSON: {error}", raw)
    if not isinstance(value, dict):
        return ToolCallError(ErrorKind.BAD_ARGUMENTS, f"the arguments of {call.name} must be a JSON object", raw)
    return value
