"""The LLM user over real HTTP, against a local server that answers well, badly or not at all.

Covers retries, deadlines, messages, role inversion, stop detection and secrecy of the key. Does not cover several
endpoints, limits and the cache (test_users_pool.py), guards and tools (test_users_utterance_check.py), nor what a real
model would say.
"""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from pydantic import SecretStr

from mua.config.schema import LlmConfig
from mua.environment.endpoint import services as services_module
from mua.environment.endpoint.connection import retry_after_seconds
from mua.environment.endpoint.services import ChatClient
from mua.environment.user import STOP_SIGNAL, User
from mua.users.llm import LlmUser
from mua.users.personas import DEFAULT_PROMPT, GREETING, SILENCE
from mua.utils.errors import UserFault
from tests.chat_server import (
    Clock,
    Handler,
    Server,
    client_of,
    dribbles,
    drops,
    fails,
    never,
    nobody,
    raw,
    says,
    serving,
    together,
)

KEY = "sk-very-secret-0123456789"


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as server:
        yield server


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services_module, "FIRST_BACKOFF_SECONDS", 0.01)


def open_endpoint(url: str, **settings: Any) -> AbstractAsyncContextManager[ChatClient]:
    return client_of(LlmConfig(base_url=url, model="simulator", api_key=SecretStr(KEY), **settings))


async def ask(url: str, **settings) -> str:
    async with open_endpoint(url, **settings) as endpoint:
        return await say(endpoint)


async def say(endpoint: ChatClient, text: str = "hi", seed: int = 1) -> str:
    return (await endpoint.chat([{"role": "user", "content": text}], seed=seed)).text


RETRIED = {
    "429": fails(429),
    "408": fails(408),
    "500": fails(500),
    "dropped connection": drops,
    "empty reply": says(""),
    "only reasoning": says("<think>I want a refund"),
    "null content": says(None),
    "no choices": raw("{}"),
    "error object with 200": raw('{"error": {"message": "overloaded"}}'),
    "not JSON": raw("certainly! {"),
    "HTML": raw("<html>login</html>", "text/html"),
    "nested without end": raw('{"a":' * 100_000),
    "unpaired surrogate": says("Hello \ud800"),
}


@pytest.mark.parametrize("name", RETRIED)
async def test_passing_trouble_is_retried(server: Server, name: str):
    server.script = [RETRIED[name], RETRIED[name], says("Hello there")]
    assert await ask(server.url) == "Hello there"
    assert len(server.received) == 3


@pytest.mark.parametrize(("name", "retries"), [("429", 2), ("dropped connection", 2), ("not JSON", 2), ("500", 0)])
async def test_lasting_trouble_ends_in_one_fault_after_the_retries(server: Server, name: str, retries: int):
    server.script = [RETRIED[name]]
    with pytest.raises(UserFault, match=rf"after {retries + 1} requests; \w") as caught:
        await ask(server.url, max_retries=retries)
    assert len(server.received) == retries + 1
    assert server.url in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "fix"),
    [(400, "user.llm.model"), (401, "user.llm.api_key"), (403, "user.llm.api_key"), (404, "user.llm.base_url")],
)
async def test_a_refusal_is_not_retried_and_says_the_fix(server: Server, status: int, fix: str):
    server.script = [fails(status)]
    with pytest.raises(UserFault) as caught:
        await ask(server.url)
    assert len(server.received) == 1
    for part in (server.url, str(status), "not today", fix):
        assert part in str(caught.value)


async def test_retry_after_is_waited_for(server: Server):
    server.script = [fails(429, {"Retry-After": "1"}), says("ok")]
    assert await ask(server.url) == "ok"
    assert server.times[1] - server.times[0] >= 1.0


async def test_retry_after_beyond_the_deadline_fails_without_waiting(server: Server):
    server.script = [fails(429, {"Retry-After": "86400"})]
    with pytest.raises(UserFault, match="HTTP 429"):
        await asyncio.wait_for(ask(server.url), timeout=60)
    assert len(server.received) == 1


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
DATES = [(format_datetime(NOON + timedelta(seconds=s), usegmt=True), max(0.0, s)) for s in (90, -90)]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, 0.0), ("7", 7.0), (" 1.5 ", 1.5), ("soon", 0.0), ("", 0.0), ("-3", 0.0), *DATES],
)
def test_retry_after_forms(value: str | None, seconds: float):
    assert retry_after_seconds(value, NOON) == seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda loop: clock.of_loop(loop))
    return clock


@pytest.mark.parametrize("silent", [never, dribbles])
async def test_a_request_without_an_end_is_cut_and_retried(server: Server, clock: Clock, silent: Handler):
    server.script = [clock.forward(60.0, silent), says("at last")]
    assert await ask(server.url, request_seconds=60.0, total_seconds=600.0) == "at last"
    assert len(server.received) == 2


async def test_the_deadline_in_all_ends_even_an_endless_request(server: Server, clock: Clock):
    server.script = [clock.forward(60.0, never)]
    with pytest.raises(UserFault, match=r"nothing usable within 60 s"):
        await ask(server.url, request_seconds=600.0, total_seconds=60.0)
    assert len(server.received) == 1


async def test_nobody_listens():
    with nobody() as place, pytest.raises(UserFault, match=r"connection failed.*user\.llm\.base_url") as caught:
        await ask(f"http://{place}/v1", max_retries=1)
    assert "after 2 requests" in str(caught.value)


@pytest.mark.parametrize("waits_for", ["an answer", "its pause"])
async def test_the_loop_is_never_blocked(server: Server, waits_for: str):
    """Others go on while an endpoint is silent, and while a request pauses for longer than this test may take."""
    server.script = [never if waits_for == "an answer" else fails(429, {"Retry-After": "100000"})]
    asked = asyncio.create_task(ask(server.url, request_seconds=100_000.0, total_seconds=1_000_000.0))
    while not server.received:
        await asyncio.sleep(0)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert not asked.done()
    assert len(server.received) == 1
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked


async def test_requests_in_flight_are_bounded(server: Server):
    server.script = [together(3, says("ok"))]
    async with open_endpoint(server.url, concurrency=3) as endpoint:
        asked = [say(endpoint, "hi", i) for i in range(12)]
        assert await asyncio.gather(*asked) == ["ok"] * 12
    assert server.most_in_flight == 3


@pytest.mark.parametrize("first", [fails(429, {"Retry-After": "30"}), never], ids=["backing off", "cancelled"])
async def test_a_request_that_backs_off_or_is_cancelled_holds_no_slot(server: Server, first: Handler):
    server.script = [first, says("ok")]
    async with open_endpoint(server.url, concurrency=1) as endpoint:
        waiting = asyncio.create_task(say(endpoint, "a", 1))
        while not server.received:
            await asyncio.sleep(0.01)
        if first is never:
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert await say(endpoint, "b", 2) == "ok"
        assert waiting.done() == (first is never)
        waiting.cancel()


async def test_the_key_is_sent_and_shown_nowhere(server: Server, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    body = json.dumps({"error": {"message": f"Incorrect API key provided: {KEY}"}})
    server.script = [fails(503, body=body), fails(401, body=body)]
    async with open_endpoint(server.url) as endpoint:
        user = LlmUser(endpoint, "persona", seed=1)
        with pytest.raises(UserFault, match="401") as caught:
            await user.open()
        shown = [repr(endpoint), repr(user), caplog.text, *traceback.format_exception(caught.value)]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert not [text for text in shown if KEY in text]
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


async def test_a_password_in_the_url_is_not_shown():
    with nobody() as place, pytest.raises(UserFault) as caught:
        await ask(f"http://someone:hunter2@{place}/v1", max_retries=0)
    assert "hunter2" not in str(caught.value)


async def test_roles_are_inverted_in_what_the_server_receives(server: Server):
    server.script = [says("My order is late."), says("It is 4711."), says(f"Thanks! {STOP_SIGNAL}")]
    async with open_endpoint(server.url, temperature=0.5, max_tokens=99) as endpoint:
        user = LlmUser(endpoint, "You are Ada; order 4711 is late.", seed=5)
        assert isinstance(user, User)
        opening = await user.open()
        second = await user.reply("Which order?")
        third = await user.reply("It arrives tomorrow.")
        await user.close()
    assert (opening.text, opening.stop) == ("My order is late.", False)
    assert (second.text, second.stop) == ("It is 4711.", False)
    assert third.stop
    last = server.received[-1]
    assert last["messages"] == [
        {"role": "system", "content": DEFAULT_PROMPT.text("You are Ada; order 4711 is late.")},
        {"role": "user", "content": GREETING},
        {"role": "assistant", "content": "My order is late."},
        {"role": "user", "content": "Which order?"},
        {"role": "assistant", "content": "It is 4711."},
        {"role": "user", "content": "It arrives tomorrow."},
    ]
    assert (last["model"], last["temperature"], last["max_tokens"]) == ("simulator", 0.5, 99)


async def test_seeds_differ_between_users_turns_and_retries_and_an_empty_text_is_sent_as_silence(server: Server):
    server.script = [says("")] * 2 + [says("hello")]
    async with open_endpoint(server.url) as endpoint:
        for seed in (1, 2**40):
            user = LlmUser(endpoint, "p", seed)
            await user.open()
            await user.reply("  ")
    assert server.received[-1]["messages"][-1] == {"role": "user", "content": SILENCE}
    seeds = [request["seed"] for request in server.received]
    assert len(set(seeds)) == len(seeds) == 6
    assert all(0 <= seed < 2**31 for seed in seeds)


async def test_reasoning_never_reaches_the_agent(server: Server):
    server.script = [says(f"<think>when done I say {STOP_SIGNAL}</think>\nI want to return a lamp.")]
    async with open_endpoint(server.url) as endpoint:
        reply = await LlmUser(endpoint, "p", 1).open()
    assert (reply.text, reply.stop) == ("I want to return a lamp.", False)


async def test_a_user_that_stops_before_it_began_is_a_fault(server: Server):
    server.script = [says(STOP_SIGNAL)]
    async with open_endpoint(server.url) as endpoint:
        with pytest.raises(UserFault, match="before it began"):
            await LlmUser(endpoint, "p", 1).open()
