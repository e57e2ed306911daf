"""The engines of a run from another process, through the router of its trainer (:mod:`mua.engine.router`)."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Sequence
from dataclasses import asdict
from http import HTTPStatus
from time import monotonic
from typing import Any

import aiohttp
import numpy as np
import orjson

from mua.engine.pauses import Pauses
from mua.engine.sampler import SamplingParams, TurnCut
from mua.engine.sglang_client import EngineGone
from mua.types import Generation, Json
from mua.utils.errors import DeadlineExceeded, EngineError, one_line

log = logging.getLogger(__name__)
CONTRACT = 2
"""Counts every change of what the trainer and the samplers of a run tell each other: requests and answers of the
router, and what leases and rows of results mean to both. Sides that differ in it refuse each other."""
CONTRACT_HEADER = "X-Mua-Sampler-Contract"
_LOOK_SECONDS = 0.5
_ANSWER_SECONDS = 10.0
_AGAIN_SECONDS = 0.5
_ARRAYS = ("ids", "logprobs", "versions", "experts")


class RouterLost(EngineError):
    """The router has not answered for a while: the trainer is gone, or no network leads there."""


class RoutedEngines:
    """Implements :class:`mua.engine.sampler.Sampler`. Belongs to one event loop; use as a context manager.

    A request that loses its connection is asked again until the router has been silent for ``silence_seconds``.
    """

    def __init__(self, url: str, key: str, sampler: str, silence_seconds: float) -> None:
        self.pauses = Pauses()
        """Time that counts to no deadline, because it stands still for the engines."""
        self.state: Json = {}
        """What the router said last."""
        self._url, self._key, self.name, self._silence = url, key, sampler, silence_seconds
        self._unanswered: float | None = None
        """When the first of the questions ended that were not answered since the last answer."""
        self.lost = False
        """Whether the router has been silent for too long: two questions at least, so that a moment in which this
        process itself stood still is not taken for the router's silence."""
        self._refusal = ""
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RoutedEngines:
        self._session = aiohttp.ClientSession(
            base_url=self._url,
            headers={"Authorization": f"Bearer {self._key}", CONTRACT_HEADER: str(CONTRACT)},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_ANSWER_SECONDS),
        )
        self._watch = asyncio.create_task(self._look(), name="watch of the router")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._session.close()

    async def answers(self) -> bool:
        """Whether the router answers now."""
        return await self._ask(wants=False)

    async def room(self) -> int:
        """How many episodes may be started now; 0 where the router does not answer. Raises :class:`EngineError` where
        it refuses samplers of this mua."""
        room = int(self.state["room"]) if await self._ask(wants=True) else 0
        if self._refusal:
            raise EngineError(self._refusal, passing=False)
        return room

    async def started(self, count: int) -> None:
        """So many episodes were."""
        await self._ask(wants=False, started=count)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str, deadline_s: float
    ) -> Generation:
        """See :meth:`mua.engine.sampler.Sampler.generate`. Raises :class:`RouterLost` too."""
        deadline = self.pauses.deadline(deadline_s)
        while True:
            asked = {"ids": list(map(int, prompt_ids)), "params": asdict(params), "session": session}
            body = orjson.dumps(asked | {"seconds": max(deadline.left, 0.001)})
            try:
                answer = await self._answer(body)
                break
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                if self.lost:
                    raise RouterLost(
                        f"the engines' router at {self._url} has not answered for {self._silence:g} s: "
                        f"{one_line(error)}"
                    ) from None
                if not deadline.left:
                    raise DeadlineExceeded(f"engine request of session {session!r}: {one_line(error)}") from None
                await asyncio.sleep(_AGAIN_SECONDS)
        if "fault" in answer:
            raise fault_of(answer["fault"])
        return generation_of(answer["generation"])

    async def _answer(self, body: bytes) -> Json:
        request = asyncio.ensure_future(self._post(body))
        try:
            while not request.done():
                await asyncio.wait({request}, timeout=_LOOK_SECONDS)
                if not request.done() and self.lost:  # nothing tells a client that the machine behind is gone
                    raise TimeoutError("no sign of life")
            return request.result()
        finally:
            request.cancel()

    async def _post(self, body: bytes) -> Json:
        async with self._session.post("/generate", data=body) as response:
            text = await response.read()
            if response.status != 200:
                raise EngineError(
                    f"the engines' router at {self._url} answered {response.status}: "
                    f"{text[:300].decode(errors='replace')}",
                    passing=response.status != HTTPStatus.CONFLICT,
                )
        found: Json = orjson.loads(text)
        return found

    async def _look(self) -> None:
        while True:
            await self._ask(wants=False)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _ask(self, *, wants: bool, started: int = 0) -> bool:
        """Learn the state; whether the router answered."""
        state = await self._state(wants, started)
        if state is None:
            self._unanswered, first = self._unanswered or monotonic(), self._unanswered
            self.lost = first is not None and monotonic() - first > self._silence
            return False
        self.state, self._unanswered, self.lost = state, None, False
        if state["paused"]:
            self.pauses.begin()
        else:
            self.pauses.end()
        return True

    async def _state(self, wants: bool, started: int) -> Json | None:
        query = {"sampler": self.name, "wants": str(int(wants)), "started": str(started)}
        limit = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        try:
            async with self._session.get("/state", params=query, timeout=limit) as response:
                if response.status == HTTPStatus.CONFLICT:
                    self._refusal = (await response.read())[:300].decode(errors="replace")
                if response.status != 200:
                    return None
                found: Json = orjson.loads(await response.read())
                return found
        except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError):
            return None


# ---- how turns and faults travel


def generation_json(generation: Generation) -> Json:
    """As JSON, arrays in base64 with their dtype and shape; bit for bit."""
    arrays = {name: getattr(generation, name) for name in _ARRAYS}
    return {
        "finish": generation.finish,
        "version": generation.version,
        "cached_tokens": generation.cached_tokens,
        "waited": generation.waited,
        "engine": generation.engine,
        "arrays": {name: _packed(array) for name, array in arrays.items() if array is not None},
    }


def generation_of(body: Json) -> Generation:
    """Reverses :func:`generation_json`. Raises :class:`EngineError` for anything else."""
    try:
        arrays = {name: _unpacked(packed) for name, packed in body["arrays"].items()}
        return Generation(
            arrays["ids"], arrays["logprobs"], body["finish"], int(body["version"]), arrays["versions"],
            int(body["cached_tokens"]), arrays.get("experts"), float(body["waited"]),
            str(body["engine"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"the engines' router gave an answer that cannot be read: {error!r}") from None


def fault_json(fault: EngineError | DeadlineExceeded) -> Json:
    """What the pool raised, as JSON."""
    kind = next(name for name, made in _KINDS.items() if isinstance(fault, made))
    body: Json = {"kind": kind, "message": str(fault), "passing": fault.passing}
    return body | ({"partial": generation_json(fault.partial)} if isinstance(fault, TurnCut) else {})


def fault_of(body: Json) -> EngineError | DeadlineExceeded:
    """Reverses :func:`fault_json`."""
    made, message = _KINDS.get(body.get("kind", ""), EngineError), str(body.get("message", body))
    if made is TurnCut:
        return TurnCut(message, generation_of(body["partial"]))
    fault: EngineError | DeadlineExceeded = made(message)
    fault.passing = bool(body.get("passing", True))
    return fault


_KINDS: dict[str, Any] = {
    "turn_cut": TurnCut, "deadline": DeadlineExceeded, "engine_gone": EngineGone, "engine_error": EngineError,
}  # fmt: skip
"""The more special before the more general."""


def _packed(array: np.ndarray[Any, Any]) -> list[Any]:
    return [array.dtype.str, list(array.shape), base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()]


def _unpacked(packed: list[Any]) -> np.ndarray[Any, Any]:
    dtype, shape, data = packed
    return np.frombuffer(base64.b64decode(data, validate=True), np.dtype(dtype)).reshape(shape).copy()
