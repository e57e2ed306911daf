"""Several endpoints behind one role, over real HTTP: failover, breaker, rate limits, cache, metrics, preflight keys.

Not covered: what one endpoint's troubles look like (test_users_llm.py), the arithmetic of limits
(test_users_limits.py).
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from mua.config.load import load_config
from mua.config.schema import EndpointConfig, JudgeConfig, LlmConfig, UserConfig
from mua.environment.endpoint import connection as connection_module
from mua.environment.endpoint import services as services_module
from mua.environment.endpoint.connection import RateLimit
from mua.environment.endpoint.services import ChatClient, Services
from mua.utils.errors import ConfigError, JudgeFault, UserFault
from mua.utils.masking import hidden_texts, masked_tree
from tests.chat_server import Clock, Server, asked, client_of, drops, fails, never, raw, says, serving, together

HELLO = [{"role": "user", "content": "hi"}]
KEYS = ("sk-first-0123456789", "sk-second-0123456789")


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services_module, "FIRST_BACKOFF_SECONDS", 0.01)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (connection_module, services_module):
        monkeypatch.setattr(module, "monotonic", clock)
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda loop: clock.of_loop(loop))
    return clock


def pool(
    *servers: Server | str, fallback: dict | None = None, **settings: Any
) -> AbstractAsyncContextManager[ChatClient]:
    """A pool over ``servers``, in order; ``fallback`` holds settings of those after the first."""
    first, *rest = [server if isinstance(server, str) else server.url for server in servers]
    others = [
        EndpointConfig(base_url=url, model="second", api_key=SecretStr(KEYS[1]), **(fallback or {})) for url in rest
    ]
    return client_of(LlmConfig(base_url=first, model="first", api_key=SecretStr(KEYS[0]), fallbacks=others, **settings))


async def ask(endpoint: ChatClient, seed: int = 1) -> str:
    return (await endpoint.chat(HELLO, seed=seed)).text


@pytest.mark.parametrize("step", [fails(503), fails(429, {"Retry-After": "60"}), fails(401), fails(404), drops])
async def test_another_endpoint_answers_at_once(step: Any) -> None:
    async with (
        serving(step) as one,
        serving(says("from the second")) as two,
        pool(one, two, total_seconds=50.0) as endpoint,  # the 60 s of Retry-After are the first one's alone
    ):
        assert await ask(endpoint) == "from the second"
        metrics = endpoint.metrics()
    assert (metrics["requests"], metrics["retries"], metrics["failovers"]) == (2, 1, 1)
    assert [h["Authorization"] for h in one.headers + two.headers] == [f"Bearer {key}" for key in KEYS]
    assert [r["model"] for r in one.received + two.received] == ["first", "second"]


async def test_the_first_that_can_be_asked_is_asked() -> None:
    async with serving(says("one")) as one, serving(says("two")) as two, pool(one, two) as endpoint:
        assert [await ask(endpoint, seed) for seed in range(5)] == ["one"] * 5
    assert not two.received


async def test_when_all_fail_each_is_named_with_its_fix_and_no_key() -> None:
    first, second = [json.dumps({"error": {"message": f"bad key {key}"}}) for key in KEYS]
    async with (
        serving(fails(401, body=first)) as one,
        serving(fails(503, body=second)) as two,
        pool(one, two, max_retries=1) as endpoint,
    ):
        with pytest.raises(UserFault) as caught:
            await ask(endpoint)
    text = str(caught.value)
    for part in (one.url, two.url, "HTTP 401", "HTTP 503", "check user.llm.api_key", "after 2 requests"):
        assert part in text
    assert not [key for key in KEYS if key in text]
    assert (len(one.received), len(two.received)) == (1, 2)


async def test_a_broken_endpoint_is_left_alone_and_then_tried_by_one_request(clock: Clock) -> None:
    async with (
        serving(*[fails(500)] * 3, says("well again")) as one,
        serving(says("two")) as two,
        pool(one, two, breaker_faults=3, breaker_seconds=100.0, max_retries=0) as endpoint,
    ):
        assert [await ask(endpoint, seed) for seed in range(6)] == ["two"] * 6
        assert len(one.received) == 3  # the fourth to sixth did not ask it
        clock.ahead = 100.0
        answers = await asyncio.gather(*[ask(endpoint, seed) for seed in range(10, 18)])
        assert answers.count("well again") == 1  # the probe; the others did not wait for it
        assert await ask(endpoint) == "well again"
        assert endpoint.metrics()["breaker_opened"] == 1


def pause_until_broken(monkeypatch: pytest.MonkeyPatch, endpoint: ChatClient) -> None:
    """A request that failed asks no more before the others have failed too: the breaker is open then."""

    async def until_broken(seconds: float) -> None:
        while endpoint._members[0].breaker.closed:
            await asyncio.sleep(0)

    monkeypatch.setattr(services_module, "asyncio", SimpleNamespace(sleep=until_broken, timeout=asyncio.timeout))


async def test_without_another_endpoint_requests_wait_for_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asked(
        *[together(2, fails(500))] * 2, says("well again"), breaker_faults=2, breaker_seconds=0.3, max_retries=3
    ) as (one, endpoint):
        pause_until_broken(monkeypatch, endpoint)
        answers = await asyncio.gather(*[ask(endpoint, seed) for seed in (1, 2)])
        assert answers == ["well again"] * 2
        assert len(one.received) == 4
        assert one.times[2] - one.times[1] >= 0.29


async def test_a_failed_probe_counts_for_all_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint that is gone for good costs a bounded number of requests, however many wait."""
    async with asked(
        *[together(20, fails(500))] * 20, fails(500), breaker_faults=2, breaker_seconds=0.3, max_retries=3
    ) as (one, endpoint):
        pause_until_broken(monkeypatch, endpoint)
        ended = await asyncio.gather(*[ask(endpoint, seed) for seed in range(20)], return_exceptions=True)
    assert all(isinstance(end, UserFault) for end in ended)
    assert all("HTTP 500" in str(end) and "after 4 requests" in str(end) for end in ended)
    assert len(one.received) <= 20 + 4  # all begin at once; after that the probes speak for all


async def test_what_a_model_says_wrongly_breaks_nothing() -> None:
    async with asked(*[says("")] * 5, says("at last"), breaker_faults=2, breaker_seconds=60.0) as (_, endpoint):
        assert await ask(endpoint) == "at last"
        assert endpoint.metrics()["errors/empty"] == 5


async def test_requests_a_minute_are_kept_and_overflow_goes_on() -> None:
    async with (
        serving(says("one")) as one,
        serving(says("two")) as two,
        pool(one, two, requests_per_minute=3) as endpoint,
    ):
        answers = [await ask(endpoint, seed) for seed in range(5)]
    assert answers == ["one"] * 3 + ["two"] * 2


async def test_requests_a_minute_delay_where_there_is_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "RateLimit", partial(RateLimit, seconds=0.3))
    async with serving(says("one")) as one, pool(one, requests_per_minute=2) as endpoint:
        begun = time.monotonic()
        await asyncio.gather(*[ask(endpoint, seed) for seed in range(6)])
    for i, came in enumerate(one.times):
        assert came - begun >= 0.3 * (i // 2) - 0.001  # asyncio may wake up a clock's tick early


async def test_tokens_a_minute_follow_what_the_endpoint_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimated at 200 a request, reported as 10: ten requests fit into a window of 300."""
    monkeypatch.setattr(connection_module, "RateLimit", partial(RateLimit, seconds=30.0))
    answer = says("one", usage=(6, 4))
    async with asked(answer, tokens_per_minute=300, max_tokens=200, total_seconds=5.0) as (_, endpoint):
        for seed in range(10):
            await ask(endpoint, seed)
        slow = [asyncio.create_task(ask(endpoint, seed)) for seed in (20, 21)]
        with pytest.raises(UserFault, match="rate limit"):  # two estimates at once do not fit
            await asyncio.gather(*slow)
        await asyncio.gather(*slow, return_exceptions=True)


async def test_deadlines_hold_over_all_endpoints(clock: Clock) -> None:
    silent = clock.forward(20.0, never)
    async with (
        serving(silent) as one,
        serving(silent) as two,
        pool(one, two, request_seconds=20.0, total_seconds=50.0, fallback={"request_seconds": 20.0}) as p,
    ):
        with pytest.raises(UserFault, match=r"nothing usable within 50 s"):
            await ask(p)
    assert len(one.received + two.received) == 3  # the third is cut by the deadline in all


async def test_metrics_hold_tokens_cost_latency_and_kinds_of_errors() -> None:
    steps = [fails(429), raw("nonsense"), says("a", usage=(1000, 100), seconds=0.05), says("b", usage=(3000, 300))]
    async with serving(*steps) as one, pool(one, price_per_million_in=2.0, price_per_million_out=10.0) as endpoint:
        await ask(endpoint, 1)
        await ask(endpoint, 2)
        metrics = endpoint.metrics()
        again = endpoint.metrics()
    assert (metrics["tokens_in"], metrics["tokens_out"]) == (4000, 400)
    assert metrics["cost"] == pytest.approx(4000 * 2e-6 + 400 * 10e-6)
    assert (metrics["errors/rate_limit"], metrics["errors/unreadable"]) == (1, 1)
    assert metrics["latency_p95_seconds"] >= 0.05
    assert metrics["latency_p95_seconds"] > metrics["latency_p50_seconds"] > 0
    assert set(again.values()) == {0.0}


async def test_connections_are_used_again() -> None:
    async with serving(says("one")) as one, pool(one) as endpoint:
        for seed in range(20):
            await ask(endpoint, seed)
    assert len(one.peers) == 1


@asynccontextmanager
async def proxy(monkeypatch: pytest.MonkeyPatch, scheme: str) -> AsyncIterator[list[str]]:
    """A proxy of the environment that wants a name and refuses everybody; the heads of what it is sent."""
    heads: list[str] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 407 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    monkeypatch.setenv(f"{scheme}_proxy", f"http://me:word@127.0.0.1:{server.sockets[0].getsockname()[1]}")
    monkeypatch.setenv("no_proxy", "direct.invalid")
    yield heads
    server.close()


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_the_environments_proxy_is_used_unless_excepted(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    async with proxy(monkeypatch, scheme) as heads:
        for host in ("model.invalid", "direct.invalid"):
            async with pool(f"{scheme}://{host}/v1", max_retries=0) as endpoint:
                with pytest.raises(UserFault) as caught:
                    await ask(endpoint)
                assert "word" not in str(caught.value)
    (head,) = heads
    assert "model.invalid" in head.splitlines()[0]
    assert "Proxy-Authorization: Basic bWU6d29yZA==" in head
    assert (KEYS[0] in head) is (scheme == "http")  # encrypted, a proxy must not see the key


async def test_extra_fields_reach_the_endpoint() -> None:
    extra = {"top_p": 0.9, "chat_template_kwargs": {"enable_thinking": False}}
    async with serving(says("one")) as one, pool(one, extra=extra) as endpoint:
        await ask(endpoint)
    assert {name: one.received[0][name] for name in extra} == extra


# ---- the cache


async def test_the_same_request_is_answered_from_disk(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "replies.sqlite"
    async with serving(says("one"), says("two"), says("three"), says("four")) as one:
        async with pool(one, cache=file) as endpoint:
            assert [await ask(endpoint, seed) for seed in (1, 1, 2)] == ["one", "one", "two"]
            assert (await endpoint.chat(HELLO, seed=1, temperature=0.3)).text == "three"
            metrics = endpoint.metrics()
        async with pool(one, cache=file) as endpoint:  # another process, later
            assert await ask(endpoint) == "one"
        async with pool(one, cache=file, max_tokens=9) as endpoint:
            assert await ask(endpoint) == "four"
    assert (metrics["cache_hits"], metrics["requests"]) == (1, 3)
    assert KEYS[0].encode() not in file.read_bytes()


async def test_a_kept_reply_that_is_not_accepted_is_asked_for_again(tmp_path: Path) -> None:
    async with serving(says("one"), says("two")) as one, pool(one, cache=tmp_path / "c") as endpoint:
        await ask(endpoint)
        other = await endpoint.chat(HELLO, seed=1, accept=lambda reply: "no" if reply.text == "one" else None)
    assert other.text == "two"


async def test_faults_are_not_kept(tmp_path: Path) -> None:
    async with serving(fails(400), says("better")) as one, pool(one, cache=tmp_path / "c") as endpoint:
        with pytest.raises(UserFault):
            await ask(endpoint)
        assert await ask(endpoint) == "better"


def test_several_processes_share_a_cache(tmp_path: Path) -> None:
    """Four write the same and other keys at the same time; every one reads what the first wrote."""
    file = tmp_path / "shared.sqlite"
    program = """
import asyncio, sys
from pathlib import Path
from mua.environment.endpoint.services import JsonCache
async def main(name):
    cache = JsonCache(Path(sys.argv[1]), "k", "replies")
    for i in range(25):
        kept = await cache.put({"i": i}, {"text": f"{i} by {name}"})
        await cache.put({"i": i, "by": name}, {"text": name})
        assert await cache.get({"i": i}) == kept
        print(kept["text"])
    await cache.close()
asyncio.run(main(sys.argv[2]))
"""
    running = [
        subprocess.Popen([sys.executable, "-c", program, str(file), name], stdout=subprocess.PIPE, text=True)
        for name in "abcd"
    ]
    said = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0] * 4
    assert len(set(said)) == 1
    with sqlite3.connect(file) as store:
        assert store.execute("SELECT count(*) FROM replies").fetchone() == (125,)


@pytest.mark.parametrize("content", [b"this is no database, it is a text", None])
def test_a_file_that_is_no_cache_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "cache"
    file.write_bytes(content) if content else file.mkdir()
    with pytest.raises(ConfigError, match=r"judge\.llm\.cache: cannot keep replies in .*cache"):
        ChatClient(LlmConfig(base_url="http://x/v1", model="m", cache=file), "judge")


@pytest.mark.parametrize("reply", ["no JSON", "[]", "{}", '{"text": "x", "calls": [1]}', "[" * 100_000])
async def test_a_damaged_reply_in_the_cache_is_named(tmp_path: Path, reply: str) -> None:
    file = tmp_path / "replies"
    async with serving(says("hello")) as one, pool(one, cache=file) as endpoint:
        await ask(endpoint)
        with sqlite3.connect(file) as store:
            store.execute("UPDATE replies SET reply = ?", (reply,))
        with pytest.raises(ConfigError, match=r"cache: .*replies holds a reply that cannot be read; name another file"):
            await ask(endpoint)


# ---- roles


async def test_users_and_judges_have_pools_and_metrics_of_their_own() -> None:
    async with serving(says("user")) as one, serving(fails(401)) as two:
        user = UserConfig(kind="llm", llm=LlmConfig(base_url=one.url, model="u"))
        services = Services.from_config(user, JudgeConfig(llm=LlmConfig(base_url=two.url, model="j")))
        assert services.user is not None
        assert services.judge is not None
        assert await ask(services.user) == "user"
        with pytest.raises(JudgeFault, match=r"judge endpoint .*check judge\.llm\.api_key"):
            await ask(services.judge)
        metrics = services.metrics()
        await services.close()
    assert (metrics["user/llm/requests"], metrics["judge/llm/requests"]) == (1, 1)
    assert metrics["judge/llm/errors/refused"] == 1
    assert "user/llm/errors/refused" not in metrics


RECIPE = """\
name: x
output: out
model: {path: m}
environment: {name: help_desk}
trainer: {steps: 1}
user:
  kind: llm
  llm:
    base_url: http://a/v1
    model: a
    fallbacks:
      - {base_url: http://b/v1, model: b, api_key: sk-fallback-key}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "x.yaml"
    file.write_text(RECIPE)
    return file


def test_the_secrets_of_fallbacks_are_known_and_masked(recipe: Path) -> None:
    config = load_config(recipe)
    shown = masked_tree(config.model_dump(mode="json"))
    assert list(hidden_texts(shown, config.model_dump())) == [("user.llm.fallbacks.0.api_key", "sk-fallback-key")]
    assert "sk-fallback-key" not in str(config) + config.model_dump_json()
