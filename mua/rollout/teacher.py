"""A teacher's log-probabilities of what the policy sampled, asked of an SGLang server while other groups roll out.

    group done ──► one request a segment, of the ids themselves ──► segments with ``teacher_logprobs`` ──► batch

Token ids mean the same to both only under one tokenizer, which :meth:`Teacher.meet` makes sure of before anything is
asked. Every request has a deadline; one that meets a fault (no connection, no answer in time, 5xx) is tried again, with
growing pauses. What then fails ends the run: a batch without its teacher would be another algorithm.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import monotonic, time
from typing import Any, TypeAlias

import numpy as np

from mua.config.schema import DistillationConfig
from mua.engine.engine_handle import EngineClient, EngineGone
from mua.store.recorder import NotedRequest
from mua.tokens.codec import Codec, fixed
from mua.types import Float32Array, Group, Int32Array, Json, Segment
from mua.utils.errors import ConfigError, EngineError
from mua.utils.masking import mask_secrets

_KEY = "algorithm.distillation"
_PROBED_IDS = 512
_PROBE_TEXTS = (
    "Your order #4711 (2 × 19.90 €) ships on 2024-05-31.\n\n\tdef f(x): return x**2  # ½",
    '{"name": "find_order", "arguments": {"id": "W-1093"}}',
    "Grüße, 你好, здравствуйте, שלום, 🙂👍🏽",
)
_LONGEST_PAUSE_S = 30.0

Note: TypeAlias = Callable[[int, NotedRequest], None]
"""Is given the sample whose segment was asked about, and the request."""
Tell: TypeAlias = Callable[[float, float, float, Any, BaseException | None], None]
"""Is given when a try began, its seconds, those it waited before, its answer, its error."""


class Teacher:
    """One server with the teacher's weights. Belongs to one asyncio loop; :meth:`close` it there."""

    def __init__(self, config: DistillationConfig, codec: Codec) -> None:
        """``codec`` is the policy's tokenizer."""
        self._config = config
        self._codec = codec
        self._client = EngineClient(
            config.base_url, f"the teacher at {config.base_url}", config.api_key.get_secret_value()
        )
        self._free = asyncio.Semaphore(config.concurrency)
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0

    async def close(self) -> None:
        await self._client.close()

    async def meet(self) -> None:
        """Make sure that the teacher is there and that ids mean to it what they mean to the policy.

        It tokenizes texts that hold every control token and tokens from all over the vocabulary. Raises
        :class:`ConfigError` when its ids differ, :class:`EngineError` when it cannot be asked.
        """
        texts = probe_texts(self._codec)
        answer = await self._ask("/tokenize", {"prompt": texts, "add_special_tokens": False})
        found = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(found, list) or len(found) != len(texts):
            raise EngineError(
                f"{self._client.label} does not tell how it tokenizes ({str(answer)[:200]}); {_KEY}.base_url must be "
                "that of an SGLang server, without /v1, that was not started with --skip-tokenizer-init",
                passing=False,
            )
        for text, ids in zip(texts, found, strict=True):
            own = self._codec.encode([fixed(text)])[0].tolist()
            if ids != own:
                raise ConfigError(
                    f"{_KEY}.base_url: {self._client.label} has another tokenizer than the policy: {text[:40]!r} is "
                    f"{ids[:8]} to it and {own[:8]} to the policy. Token ids must mean the same to both: take a "
                    "teacher of the policy's family, or give it the policy's tokenizer (--tokenizer-path)"
                )

    async def scored(self, group: Group, note: Note = lambda sample, request: None) -> Group:
        """``group``, whose scored members' segments now hold ``teacher_logprobs``. ``note`` is given every request."""
        places = [(t, i) for t in group.scored for i, segment in enumerate(t.segments) if segment.loss_mask.any()]
        try:
            async with asyncio.TaskGroup() as running:
                asked = [
                    running.create_task(self._segment(t.segments[i], i, partial(note, t.sample))) for t, i in places
                ]
        except ExceptionGroup as faults:
            raise faults.exceptions[0] from None
        for (trajectory, i), answer in zip(places, asked, strict=True):
            trajectory.segments[i] = answer.result()
        return group

    def metrics(self) -> dict[str, float]:
        """Counters since the last call: requests, those tried again, tokens read, mean seconds of an answer."""
        counts, seconds = self._counts, self._seconds
        self._counts, self._seconds = Counter(), 0.0
        found = {f"engine/teacher/{name}": float(counts[name]) for name in ("requests", "retries", "tokens")}
        answered = counts["requests"] - counts["retries"]
        return found | ({"engine/teacher/seconds": seconds / answered} if answered > 0 else {})

    async def _segment(self, segment: Segment, number: int, note: Callable[[NotedRequest], None]) -> Segment:
        """The segment with the teacher's log-probability of each sampled token.

        Asked from the token before the first sampled one on: what comes earlier is a prefix that the server may have
        computed for another member of the group.
        """
        sampled = np.flatnonzero(segment.loss_mask)
        start, end = int(sampled[0]) - 1, int(sampled[-1]) + 1
        ids = segment.ids[:end]
        if start < 0:
            raise EngineError("a segment begins with a sampled token, of which no server tells the log-probability")
        if (largest := int(ids.max())) >= self._codec.vocabulary_size:
            raise EngineError(
                f"the policy sampled id {largest}, a padding row of its embedding: its tokenizer has "
                f"{self._codec.vocabulary_size} ids, and the teacher need not have more. Begin with a policy that was "
                "trained (mua sft)",
                passing=False,
            )
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start,
        }

        def tell(began: float, seconds: float, waited: float, answer: Any, error: BaseException | None) -> None:
            about = answer.get("meta_info") if isinstance(answer, dict) else None
            cached = about.get("cached_tokens") if isinstance(about, dict) else None
            cached = cached if isinstance(cached, int) and 0 <= cached < 2**31 else None
            values = {
                "segment": number, "token_start": start + 1, "token_end": end, "prompt_tokens": end,
                "seconds": seconds, "waited": waited, "cached_tokens": cached,
                "endpoint": mask_secrets(self._config.base_url),
                "error": None if error is None else mask_secrets(str(error) or type(error).__name__),
            }  # fmt: skip
            note(NotedRequest("teacher", began, values))

        answer = await self._ask("/generate", body, tell)
        self._counts["tokens"] += len(ids)
        logprobs = np.zeros(len(segment), dtype=np.float32)
        last = self._codec.vocabulary_size - 1
        logprobs[start + 1 : end] = parse_logprobs(answer, ids[start:], self._client.label, last=last)
        return replace(segment, teacher_logprobs=np.where(segment.loss_mask, logprobs, np.float32(0)))

    async def _ask(self, path: str, body: Json, tell: Tell = lambda *_: None) -> Any:
        """POST with a deadline, again after faults. Raises :class:`EngineError` when it refuses or tries run out."""
        for attempt in range(self._config.max_retries + 1):
            self._counts["requests"] += 1
            came = monotonic()
            async with self._free:
                started, began = monotonic(), time()
                try:
                    answer = await self._client.call(path, body, timeout=self._config.request_seconds)
                except BaseException as error:
                    tell(began, monotonic() - started, started - came, None, error)
                    if isinstance(error, EngineError) and not isinstance(error, EngineGone):
                        raise EngineError(f"{error}; see {_KEY}", passing=False) from error
                    if not isinstance(error, EngineGone):
                        raise
                    last = error
                else:
                    self._seconds += monotonic() - started
                    tell(began, monotonic() - started, started - came, answer, None)
                    return answer
            if attempt < self._config.max_retries:
                self._counts["retries"] += 1
                await asyncio.sleep(min(_LONGEST_PAUSE_S, self._config.retry_seconds * 2**attempt))
        raise EngineError(
            f"{last} ({self._config.max_retries + 1} tries); check the server, or raise {_KEY}.request_seconds or "
            ".max_retries"
        ) from last


def probe_texts(codec: Codec) -> list[str]:
    """Texts by whose ids two tokenizers can be told apart: control tokens, samples of the vocabulary, prose, code."""
    stride = max(1, codec.vocabulary_size // _PROBED_IDS)
    places = [*range(0, codec.vocabulary_size, stride), codec.vocabulary_size - 1]
    words = (codec.decode([place]) for place in places)
    return [*_PROBE_TEXTS, *sorted(codec.control), *(word for word in words if word and "\ufffd" not in word)]


def parse_logprobs(answer: Any, ids: Int32Array, label: str, *, last: int) -> Float32Array:
    """Log-probabilities of ``ids[1:]`` from the answer of ``/generate`` that was asked from ``ids[0]`` on.

    ``last`` is the last id of the vocabulary, which SGLang (0.5.23) calls 0 in its list, its value being right.
    Raises :class:`EngineError` when they are not there, are of other ids, or are not finite.
    """
    try:
        pairs = answer["meta_info"]["input_token_logprobs"]
        logged = np.array([pair[1] for pair in pairs], dtype=np.int64)
        values = np.array([pair[0] for pair in pairs[1:]], dtype=np.float32)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"{label} gave an answer that cannot be read ({error!r}): {str(answer)[:300]}") from error
    if not (np.array_equal(logged, ids) or np.array_equal(logged, np.where(ids == last, 0, ids))):
        raise EngineError(
            f"{label} gave log-probabilities of other ids than it was asked for: {logged.tolist()} instead of "
            f"{ids.tolist()}"
        )
    if not np.isfinite(values).all():
        raise EngineError(f"{label} gave log-probabilities that are not finite")
    return values
