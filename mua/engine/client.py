"""The HTTP side of one SGLang server: native ``/generate`` with token ids, and the control endpoints."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, get_args

import aiohttp
import numpy as np
import orjson

from mua.types import ExpertArray, FinishReason, Generation, Int32Array
from mua.utils.errors import DeadlineExceeded, EngineError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one turn. ``temperature`` has no default anywhere in the project."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    """Of the tokens sampled by this request; not of its prompt."""
    frequency_penalty: float = 0.0
    seed: int | None = None
    """Per-request sampling seed; used only by an engine in deterministic mode, which rejects None."""
    order: int = 0
    """Of the requests that wait for a slot of an engine, those of a lower number go first."""
    experts_from: int | None = None
    """Ask for the experts of all tokens from this position of the prompt on; only of an engine that records them."""


class TurnCut(DeadlineExceeded):
    """The deadline of a request passed while the engine was at work on it; it told what it had written."""

    def __init__(self, message: str, partial: Generation) -> None:
        super().__init__(message)
        self.partial = partial
        """``finish`` is "abort"."""


class Sampler(Protocol):
    """The client side of one or several engines."""

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str, deadline_s: float
    ) -> Generation:
        """Sample a continuation.

        Requests of one ``session`` go to the same engine, so that its prefix cache is hit. Raises
        :class:`EngineError` when the engine fails and :class:`DeadlineExceeded` when
        ``deadline_s`` seconds pass (the request is aborted on the engine), namely :class:`TurnCut` where the engine
        answers the abort with what it had sampled. Cancelling the awaiting task aborts the request too.
        """


_JSON = {"Content-Type": "application/json"}


class EngineGone(EngineError):
    """The connection failed or the server answered 5xx: nothing more is to be expected from this engine."""


_KEEP_ALIVE_S = 2.0
"""Idle connections are given up long before the server does it (``mua.engine.server.IDLE_CONNECTION_SECONDS``)."""


class EngineClient:
    """Talks to one server. Lives on one asyncio loop; ``close`` it there."""

    def __init__(self, url: str, label: str, api_key: str | None = None) -> None:
        self.label = label
        self._session = aiohttp.ClientSession(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
            json_serialize=lambda value: orjson.dumps(value).decode(),
        )

    async def close(self) -> None:
        await self._session.close()

    async def call(self, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        """POST ``body`` as JSON and return the parsed answer (None when it is not JSON).

        Raises :class:`EngineGone` when the server is not there any more or is broken, and
        :class:`EngineError` when it refuses.
        """
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.post(path, data=data, headers=_JSON, timeout=limit) as response:
                answer = await response.read()
                status = response.status
        except TimeoutError:
            raise EngineGone(f"{self.label} did not answer {path} within {timeout:g} s") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineGone(f"{self.label} is gone: {path}: {type(error).__name__} {error}") from error
        if status >= 400:
            kind = EngineGone if status >= 500 else EngineError
            raise kind(f"{self.label} answered {path} with {status}: {answer[:500].decode(errors='replace')}")
        with contextlib.suppress(orjson.JSONDecodeError):
            return orjson.loads(answer)
        return None

    async def control(self, path: str, body: Any, *, timeout: float) -> Any:
        """Like :meth:`call`, and an answer that does not say ``success`` is an :class:`EngineError`."""
        answer = await self.call(path, body, timeout=timeout)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineError(f"{self.label} refused {path}: {answer}")
        return answer

    async def answers(self, path: str, timeout: float) -> bool:
        """Whether a GET of ``path`` succeeds in time."""
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.get(path, timeout=limit) as response:
                return response.status == 200
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            return False

    async def abort(self, rid: str, *, timeout: float = 5.0) -> None:
        """Tell the server to drop request ``rid``; unknown ids are ignored there."""
        await self.call("/abort_request", {"rid": rid, "abort_all": False}, timeout=timeout)

    async def flush(self, wait: float, *, timeout: float | None = None) -> None:
        """Wait ``wait`` seconds at most until the server is idle, and empty its prefix cache.

        A response reaches the client before the scheduler is idle, so this is also the barrier that a weight
        update needs. With ``wait`` 0 the answer comes at once: on a paused server, retracted requests do not
        count as running there, while a flush that waits (SGLang 0.5.23) would wait for them too.
        """
        await self.call(f"/flush_cache?timeout={wait:g}", timeout=wait + 30 if timeout is None else timeout)

    async def generate(self, rid: str, prompt_ids: Sequence[int] | Int32Array, params: SamplingParams) -> Generation:
        """Sample once; the caller bounds the time. Raises like :meth:`call`."""
        sampling: dict[str, Any] = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "max_new_tokens": params.max_new_tokens,
            "stop_token_ids": list(params.stop_token_ids),
        }
        if params.seed is not None:
            sampling["sampling_seed"] = params.seed
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": prompt_ids if isinstance(prompt_ids, np.ndarray) else list(prompt_ids),
            "sampling_params": sampling,
            "return_logprob": True,
        }
        routed: int | None = None
        if params.experts_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": params.experts_from}
            routed = len(prompt_ids) - params.experts_from
        return parse_generation(await self.call("/generate", body), self.label, routed_prompt=routed)


def parse_generation(answer: Any, label: str, *, routed_prompt: int | None = None) -> Generation:
    """Read the answer of ``/generate``. Raises :class:`EngineError` when ids and log-probabilities disagree.

    With ``routed_prompt`` the answer must hold the experts of the last so many prompt tokens and of all sampled ones
    but the last. A request that was aborted before anything was sampled has none.
    """
    try:
        meta = answer["meta_info"]
        if meta["finish_reason"]["type"] == "abort" and not answer["output_ids"]:  # it waited in the engine's queue
            version, nothing = int(meta["weight_version"]), np.zeros(0, np.int32)
            return Generation(nothing, np.zeros(0, np.float32), "abort", version, nothing, 0)
        ids = np.asarray(answer["output_ids"], dtype=np.int32)
        pairs = meta["output_token_logprobs"]
        logprobs = np.asarray([pair[0] for pair in pairs], dtype=np.float32)
        logged = np.asarray([pair[1] for pair in pairs], dtype=np.int32)
        versions = np.full(len(ids), int(meta["weight_version"]), dtype=np.int32)
        for span in meta.get("weight_versions") or ():
            versions[span["start"] : span["end"]] = int(span["version"])
        finish = meta["finish_reason"]["type"]
        cached = int(meta["cached_tokens"])
        experts = None if routed_prompt is None else _experts(meta["routed_experts"], routed_prompt + len(ids) - 1)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"{label} gave an answer that cannot be read ({error!r}): {str(answer)[:300]}") from error
    if finish not in get_args(FinishReason):
        raise EngineError(f"{label} ended a request for an unknown reason: {finish}")
    if not np.array_equal(ids, logged):
        raise EngineError(f"{label} gave {len(ids)} ids but log-probabilities of {len(logged)} others")
    if not np.isfinite(logprobs).all():
        raise EngineError(f"{label} gave log-probabilities that are not finite")
    return Generation(ids, logprobs, finish, int(meta["weight_version"]), versions, cached, experts)


def _experts(text: str, rows: int) -> ExpertArray:
    """SGLang's base64 of int32 ``[rows, layers, top k]`` in the narrowest type, ``[rows, layers * top k]``.

    Four bytes a choice is what the server sends; one or two are what is kept, recorded and given to the trainer.
    """
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    except binascii.Error as error:
        raise ValueError(f"routed_experts is not base64: {error}") from error
    if rows < 1 or flat.size == 0 or flat.size % rows:
        raise ValueError(f"{flat.size} expert choices for {rows} tokens")
    if flat.min() < 0 or flat.max() > np.iinfo(np.uint16).max:
        raise ValueError(f"expert choices from {flat.min()} to {flat.max()}")
    kind: Any = np.uint8 if flat.max() <= np.iinfo(np.uint8).max else np.uint16
    experts: ExpertArray = flat.reshape(rows, -1).astype(kind)
    return experts


class PartialTurn:
    """One turn, sampled in pieces. Each piece keeps its log-probabilities and the versions that sampled it."""

    def __init__(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._prompt, self._params = list(prompt_ids), params
        self.sampled: Generation | None = None
        """So far."""

    @property
    def tokens(self) -> int:
        """Sampled so far."""
        return 0 if self.sampled is None else len(self.sampled.ids)

    @property
    def prompt_ids(self) -> list[int]:
        """What the next engine is given."""
        return self._prompt if self.sampled is None else [*self._prompt, *self.sampled.ids.tolist()]

    @property
    def params(self) -> SamplingParams:
        """How the rest is to be sampled."""
        known = self._params.experts_from
        if not self.tokens:
            return self._params
        if known is not None:  # of the last sampled token on: it was not routed yet
            known = len(self.prompt_ids) - 1
        left = self._params.max_new_tokens - self.tokens
        return replace(self._params, max_new_tokens=left, experts_from=known)

    def add(self, piece: Generation) -> Generation:
        """The turn with ``piece`` behind what there is; it becomes :attr:`sampled`."""
        before = self.sampled
        if before is None or not self.tokens:
            # A piece without a token has no experts to go on from.
            self.sampled = piece if len(piece.ids) or piece.finish != "abort" else None
            return piece
        if not len(piece.ids):
            self.sampled = replace(before, finish=piece.finish, waited=before.waited + piece.waited)
            return self.sampled
        experts = None
        if before.experts is not None and piece.experts is not None:
            experts = np.concatenate([before.experts, piece.experts])  # of two types the wider holds both
        self.sampled = Generation(
            np.concatenate([before.ids, piece.ids]), np.concatenate([before.logprobs, piece.logprobs]), piece.finish,
            piece.version, np.concatenate([before.versions, piece.versions]), before.cached_tokens, experts,
            before.waited + piece.waited,
            before.engine if piece.engine in before.engine.split(", ") else f"{before.engine}, {piece.engine}",
        )  # fmt: skip
        return self.sampled

    @property
    def full(self) -> bool:
        """Whether there is no room for a further token."""
        return self.tokens >= self._params.max_new_tokens


class Pauses:
    """Belongs to one event loop. Pauses do not nest: a second ``begin`` changes nothing."""

    def __init__(self) -> None:
        self._earlier = 0.0
        self._began: float | None = None
        self._timeouts: dict[asyncio.Timeout, Deadline] = {}

    def begin(self) -> None:
        """Deadlines stand still from now on."""
        if self._began is None:
            self._began = _now()
            for timeout in self._open():
                timeout.reschedule(None)

    def end(self) -> None:
        """They go on."""
        if self._began is not None:
            self._earlier += _now() - self._began
            self._began = None
            for timeout in self._open():
                timeout.reschedule(_now() + self._timeouts[timeout].left)

    @property
    def seconds(self) -> float:
        """How long all pauses were, with the present one."""
        return self._earlier + (0.0 if self._began is None else _now() - self._began)

    def deadline(self, seconds: float) -> Deadline:
        """One that is over when ``seconds`` have passed from now on, without pauses."""
        return Deadline(self, seconds)

    @asynccontextmanager
    async def timeout(self, deadline: Deadline) -> AsyncIterator[asyncio.Timeout]:
        """``asyncio.timeout`` for what is left until ``deadline``."""
        async with asyncio.timeout(None if self._began is not None else deadline.left) as timeout:
            self._timeouts[timeout] = deadline
            try:
                yield timeout
            finally:
                del self._timeouts[timeout]

    def _open(self) -> list[asyncio.Timeout]:
        return [timeout for timeout in self._timeouts if not timeout.expired()]


class Deadline:
    """See :meth:`Pauses.deadline`."""

    def __init__(self, pauses: Pauses, seconds: float) -> None:
        self._pauses, self._seconds = pauses, seconds
        self._began, self._paused = _now(), pauses.seconds

    @property
    def left(self) -> float:
        """Seconds until it is over, without pauses; 0 at least."""
        passed = _now() - self._began - (self._pauses.seconds - self._paused)
        return max(0.0, self._seconds - passed)

    def timeout(self) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """``asyncio.timeout`` for what is left."""
        return self._pauses.timeout(self)


def _now() -> float:
    return asyncio.get_running_loop().time()
