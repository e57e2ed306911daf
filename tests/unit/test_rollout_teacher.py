"""What is asked of a teacher and what becomes of its answers, over real HTTP from a server that misbehaves as told.

Does not cover SGLang's own answers (tests/e2e/test_distillation.py has a real engine) or what the log-probabilities are
for (test_algorithms_distillation.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from mua.config.schema import DistillationConfig
from mua.rollout.teacher import Teacher, probe_texts
from mua.tokens.codec import Codec, fixed
from mua.types import Group, Outcome, Provenance, Segment, Trajectory
from mua.utils.errors import ConfigError, EngineError
from tests.chat_server import Handler, Server, drops, fails, never, raw, serving, together
from tests.tokens_fixtures import chat_family

KEY = "not-for-logs"


@pytest.fixture(scope="module")
def codec() -> Codec:
    return chat_family("qwen3", False).codec


@asynccontextmanager
async def teacher(codec: Codec, *script: Handler, **settings: Any) -> AsyncIterator[tuple[Teacher, Server]]:
    async with serving(*script, path="/{any:.*}") as server:
        quick = {"retry_seconds": 0.001, "request_seconds": 10.0, "api_key": KEY}
        config = DistillationConfig.model_validate({"base_url": server.url.removesuffix("/v1")} | quick | settings)
        asked = Teacher(config, codec)
        try:
            yield asked, server
        finally:
            await asked.close()


def value_of(token: int) -> float:
    return -token / 8


async def scores(request: web.Request) -> web.StreamResponse:
    """As SGLang does: nothing for the first id asked about, then a log-probability each."""
    body = await request.json()
    ids, start = body["input_ids"], body["logprob_start_len"]
    pairs = [[None if i == 0 else value_of(token), token, None] for i, token in enumerate(ids[start:])]
    return web.json_response({"output_ids": [], "meta_info": {"input_token_logprobs": pairs}})


def with_pairs(pairs: list[Any]) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response({"meta_info": {"input_token_logprobs": pairs}})

    return handler


def segment(*owners: Provenance) -> Segment:
    n = len(owners)
    zeros = np.zeros(n, dtype=np.int32)
    return Segment(
        np.arange(1, n + 1, dtype=np.int32), np.array(owners, np.uint8), zeros.astype(np.float32), zeros, zeros
    )


U, A = Provenance.USER, Provenance.SAMPLED
SEGMENT = segment(U, U, A, A, U, A, U)


def trajectory(*segments: Segment, outcome: Outcome = Outcome.USER_STOP) -> Trajectory:
    return Trajectory("t", 0, 0, list(segments), [0.0], 0.0, False, outcome)


def group(*members: Trajectory) -> Group:
    return Group(0, "t", list(members or [trajectory(SEGMENT)]))


async def test_every_sampled_token_gets_the_teachers_log_probability(codec: Codec) -> None:
    async with teacher(codec, scores) as (asked, server):
        found = await asked.scored(
            group(trajectory(SEGMENT, segment(U, U)), trajectory(SEGMENT, outcome=Outcome.USER_ERROR))
        )
        metrics = asked.metrics()
        again = asked.metrics()
    first, second = found.trajectories
    np.testing.assert_array_equal(
        first.segments[0].teacher_logprobs, [0, 0, value_of(3), value_of(4), 0, value_of(6), 0]
    )
    assert first.segments[1].teacher_logprobs is None, "nothing was sampled"
    assert second.segments[0].teacher_logprobs is None, "it is not trained on"
    (body,) = server.received
    assert body["input_ids"] == [1, 2, 3, 4, 5, 6], "up to the last sampled token"
    assert body["logprob_start_len"] == 1, "from the token before the first sampled one"
    assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert (metrics["engine/teacher/requests"], metrics["engine/teacher/tokens"]) == (1.0, 6.0)
    assert again == {"engine/teacher/requests": 0.0, "engine/teacher/retries": 0.0, "engine/teacher/tokens": 0.0}


@pytest.mark.parametrize("fault", [fails(500), fails(503), drops], ids=["500", "503", "dropped"])
async def test_a_fault_is_tried_again(codec: Codec, fault: Handler) -> None:
    async with teacher(codec, fault, fault, scores) as (asked, server):
        found = await asked.scored(group())
        assert asked.metrics()["engine/teacher/retries"] == 2.0
    assert found.trajectories[0].segments[0].teacher_logprobs is not None
    assert len(server.received) == 3


async def test_an_answer_that_does_not_come_is_waited_for_no_longer_than_its_deadline(codec: Codec) -> None:
    async with teacher(codec, never, scores, request_seconds=1.0) as (asked, server):
        await asyncio.wait_for(asked.scored(group()), 60)
        assert len(server.received) == 2


@pytest.mark.parametrize(
    ("answer", "tries", "message"),
    [
        (fails(500), 3, r"answered /generate with 500.*3 tries.*algorithm\.distillation\.request_seconds"),
        (fails(400, body='{"error": {"message": "too long"}}'), 1, r"400: .*too long.*see algorithm\.distillation"),
        (raw("<html>"), 1, "cannot be read"),
        (
            with_pairs([[None, 2, None], [-1.0, 3, None]]),
            1,
            r"other ids .*: \[2, 3\] instead of \[2, 3, 4, 5, 6\]",
        ),
        (with_pairs([[None, 2], [-1.0, 3], [-1.0, 4], [-1.0, 5], [None, 6]]), 1, "not finite"),
        (with_pairs([[None, 2], [-1.0, 3], [-1.0, 4], [-1.0, 5], ["low", 6]]), 1, "cannot be read"),
    ],
    ids=["tries run out", "refused", "no JSON", "other ids", "no number", "text"],
)
async def test_what_cannot_be_had_ends_the_run_with_one_error(
    codec: Codec, answer: Handler, tries: int, message: str
) -> None:
    async with teacher(codec, answer, max_retries=2) as (asked, server):
        with pytest.raises(EngineError, match=message) as raised:
            await asked.scored(group())
    assert len(server.received) == tries
    assert KEY not in str(raised.value)


async def test_no_more_requests_are_in_flight_than_allowed(codec: Codec) -> None:
    async with teacher(codec, together(3, scores), concurrency=3) as (asked, server):
        await asked.scored(group(*(trajectory(SEGMENT) for _ in range(9))))
        assert server.most_in_flight == 3


async def test_the_last_id_of_the_vocabulary_may_be_called_0(codec: Codec) -> None:
    """SGLang 0.5.23 does so (tests/e2e/test_distillation.py says when it no longer does); no other id may."""
    last = segment(U, A)
    last.ids[1] = codec.vocabulary_size - 1
    async with teacher(codec, with_pairs([[None, 1], [-1.5, 0]])) as (asked, _):
        found = await asked.scored(group(trajectory(last)))
        np.testing.assert_array_equal(found.trajectories[0].segments[0].teacher_logprobs, [0, -1.5])
        with pytest.raises(EngineError, match="other ids"):
            await asked.scored(group(trajectory(segment(U, A))))


async def test_ids_that_no_tokenizer_knows_are_not_sent(codec: Codec) -> None:
    """SGLang's CPU engine crashes on ids beyond its embedding."""
    beyond = segment(U, A)
    beyond.ids[1] = codec.vocabulary_size
    async with teacher(codec, scores) as (asked, server):
        with pytest.raises(EngineError, match="a padding row of its embedding"):
            await asked.scored(group(trajectory(beyond)))
        with pytest.raises(EngineError, match="begins with a sampled token"):
            await asked.scored(group(trajectory(segment(A, A))))
    assert not server.received


# ---- the tokenizer


def tokenizes(encode: Callable[[str], list[int]]) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return web.json_response({"tokens": [encode(text) for text in body["prompt"]], "count": []})

    return handler


async def test_a_teacher_with_the_same_tokenizer_is_met(codec: Codec) -> None:
    async with teacher(codec, tokenizes(lambda text: codec.encode([fixed(text)])[0].tolist())) as (asked, server):
        await asked.meet()
    assert server.received[0]["prompt"] == probe_texts(codec)


async def test_one_id_that_means_something_else_is_found(codec: Codec) -> None:
    """Two control tokens with their ids exchanged, everything else alike."""
    one, other = sorted(codec.control.values())[:2]
    exchange = {one: other, other: one}

    def encode(text: str) -> list[int]:
        return [exchange.get(token, token) for token in codec.encode([fixed(text)])[0].tolist()]

    async with teacher(codec, tokenizes(encode)) as (asked, _):
        with pytest.raises(ConfigError, match=r"algorithm\.distillation\.base_url.*another tokenizer.*Token ids must"):
            await asked.meet()


def test_the_probe_holds_every_control_token_and_the_whole_range_of_ids(codec: Codec) -> None:
    ids = np.concatenate([codec.encode([fixed(text)])[0] for text in probe_texts(codec)])
    assert set(codec.control.values()) <= set(ids.tolist())
    assert len(set(ids.tolist())) >= min(200, codec.vocabulary_size // 4)
    assert ids.max() == codec.vocabulary_size - 1


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (raw("[]"), EngineError, "without /v1, that was not started with --skip-tokenizer-init"),
        (fails(404), EngineError, r"answered /tokenize with 404.*see algorithm\.distillation"),
        (fails(401), EngineError, r"401.*see algorithm\.distillation"),
    ],
)
async def test_a_server_that_does_not_tokenize_is_refused(
    codec: Codec, answer: Handler, kind: type[Exception], message: str
) -> None:
    async with teacher(codec, answer) as (asked, _):
        with pytest.raises(kind, match=message):
            await asked.meet()
