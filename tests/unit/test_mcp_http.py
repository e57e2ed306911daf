"""Tool servers behind a URL: one of the SDK's own, in a process, and one that misbehaves on order, in a thread.

Not here: what is the same over standard input and output (``test_mcp_servers.py``); proxies.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ipaddress
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import misbehaving_mcp
import pytest
from cryptography import x509
from mcp_support import environment, managed, play, some_task

from mua.environment.manager import EnvironmentInstance
from mua.environment.mcp.health import ServerFaultKind, ServerNotStarted, ToolServerFault
from mua.environment.tool_arguments import validate_arguments
from mua.types import Json, ToolSchema
from mua.utils.errors import ConfigError
from tests.web_support import certificate

EVENTS = {"content-type": "text/event-stream"}
NOTIFICATION = b'data: {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": 1}}'
STREAMS = {
    "notifications": (b"", (NOTIFICATION + b"\n\n") * 50, 0.0),
    "carriage returns": (b"", (NOTIFICATION + b"\r\r") * 50, 0.0),
    "comments": (b"", b":\n\n" * 50, 0.0),
    "giant event": (b"data: ", b"x" * 65536, 0.0),
    "giant field": (b"", b"data: x\n" * 8192, 0.0),
    "pings": (b"", b": ping\n\n", 0.05),
    "half an event": (b'data: {"jsonrpc": ', b"", 0.05),
}
"""What is sent first, what then without end, and the seconds between."""


class Handler(BaseHTTPRequestHandler):
    """JSON answers, one session a handshake. ``fault`` says what is done to calls, or to everything."""

    protocol_version = "HTTP/1.1"
    fault = ""
    sessions = 0
    pings = False
    """Whether the fault is that of calls alone."""
    lost: frozenset[str] = frozenset()
    """The sessions that it has forgotten, and what it says of them."""
    forgets: tuple[int, Json] = (404, {})
    refuses: int = 0
    """The HTTP status of calls that hold the word "trap"."""
    methods: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        if type(self).fault == "reconnects":  # an event that names itself, and the end
            self.answer(200, b"id: 1\nretry: 0\ndata:\n\n", **EVENTS)
            return
        self.send_response(405)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_DELETE(self) -> None:
        kind = type(self)
        kind.ended = (*kind.ended, self.headers["mcp-session-id"])
        self.answer(200, b"")

    def do_POST(self) -> None:
        kind, message = type(self), json.loads(self.rfile.read(int(self.headers["content-length"])))
        kind.methods = (*kind.methods, message["method"])
        session = self.headers["mcp-session-id"]
        if message["method"] != "initialize" and session in kind.lost:
            status, said = kind.forgets
            self.answer(status, json.dumps(said).encode())
            return
        if kind.fault.isdecimal() or self.headers.get("authorization") != "Bearer t":
            self.answer(int(kind.fault or 401), b"")
        elif "id" not in message:
            self.answer(202, b"")
        else:
            more = {}
            if message["method"] == "initialize" and kind.fault != "stateless":
                kind.sessions += 1
                more["mcp-session-id"] = str(kind.sessions)
            reply = {"jsonrpc": "2.0", "id": message["id"], "result": misbehaving_mcp.answer(message)}
            calls = message["method"] in ("tools/call", *(() if kind.pings else ("ping",)))
            if kind.refuses and "trap" in json.dumps(message):
                self.answer(kind.refuses, b"not that one")
                return
            if calls and kind.fault == "drops":
                self.close_connection = True
                return
            if calls and kind.fault == "reconnects":
                self.do_GET()
                return
            if calls and kind.fault in STREAMS:
                self.stream(*STREAMS[kind.fault])
                return
            body = json.dumps(reply).encode()
            if calls and kind.fault == "gzip":
                body, more = gzip.compress(body), {"content-encoding": "gzip"}
            if calls and kind.fault == "garbage":
                body = b'{"jsonrpc": '
            self.answer(500 if calls and kind.fault == "fails" else 200, body, **more)

    def stream(self, first: bytes, again: bytes, seconds: float) -> None:
        """A stream of events that never ends."""
        self.close_connection = True
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(first)
            while True:
                self.wfile.write(again)
                time.sleep(seconds)

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"content-type": "application/json", "content-length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:
            self.close_connection = True


@contextmanager
def served(fault: str = "", tls: Path | None = None) -> Iterator[tuple[type[Handler], str]]:
    kind = type("Handler", (Handler,), {"fault": fault})
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    httpd.daemon_threads = True
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls)
        httpd.socket = context.wrap_socket(httpd.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=lambda: httpd.serve_forever(0.01))
    thread.start()
    try:
        yield kind, f"http{'s' if tls else ''}://127.0.0.1:{httpd.server_port}/mcp"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def at(url: str, **settings: Any) -> Json:
    own = {"name": "web", "url": url, "headers": {"Authorization": "Bearer t"}, "ready": 0, "retries": 0}
    return own | settings


async def echo(instance: EnvironmentInstance) -> str:
    return (await instance.call("echo", {"text_": "hello"})).text


def test_sessions_of_many_rollouts_share_connections_and_are_ended() -> None:
    async def run(url: str) -> None:
        async with managed(environment(at(url))) as manager:

            async def rollout(number: int) -> None:
                async with manager.instance(some_task(), number) as instance:
                    assert await echo(instance) == "hello"

            await asyncio.gather(*map(rollout, range(8)))

    with served() as (kind, url):
        asyncio.run(run(url))
        assert kind.sessions == len(kind.ended) == len(set(kind.ended)) >= 8


FAULTS = {
    "drops": ("echo", {"text_": "x"}, ServerFaultKind.CRASHED, "no connection"),
    "fails": ("echo", {"text_": "x"}, ServerFaultKind.CRASHED, "HTTP status 500"),
    "gzip": ("big", {"size": 50_000_000}, ServerFaultKind.GARBAGE, "compresses"),
    "garbage": ("echo", {"text_": "x"}, ServerFaultKind.GARBAGE, "none that the protocol knows"),
    "": ("big", {"size": 50_000_000}, ServerFaultKind.FLOODED, "message_bytes"),
    "notifications": ("echo", {"text_": "x"}, ServerFaultKind.FLOODED, "messages without end"),
    "carriage returns": ("echo", {"text_": "x"}, ServerFaultKind.FLOODED, "messages without end"),
    "comments": ("echo", {"text_": "x"}, ServerFaultKind.FLOODED, "messages without end"),
    "giant event": ("echo", {"text_": "x"}, ServerFaultKind.FLOODED, "message_bytes"),
    "giant field": ("echo", {"text_": "x"}, ServerFaultKind.FLOODED, "message_bytes"),
    "pings": ("echo", {"text_": "x"}, ServerFaultKind.HUNG, "call_seconds"),
    "half an event": ("echo", {"text_": "x"}, ServerFaultKind.HUNG, "call_seconds"),
    "reconnects": ("echo", {"text_": "x"}, ServerFaultKind.FLOODED, "ends its streams without end"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_typed(fault: str) -> None:
    tool, arguments, kind, told = FAULTS[fault]
    patience = {"call_seconds": 1.0} if kind is ServerFaultKind.HUNG else {}
    with served(fault) as (_, url), pytest.raises(ToolServerFault, match=told) as met:
        play(environment(at(url, **patience)), lambda instance: instance.call(tool, arguments))
    assert met.value.kind is kind


def test_a_private_authority_is_trusted_where_its_file_is_named(tmp_path: Path) -> None:
    for name in ("own", "other"):
        certificate(tmp_path / f"{name}.pem", x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    with served(tls=tmp_path / "own.pem") as (_, url):
        assert play(environment(at(url, ca_file=str(tmp_path / "own.pem"))), echo) == "hello"
        for settings in ({}, {"ca_file": str(tmp_path / "other.pem")}):
            with pytest.raises(
                ServerNotStarted, match=r"certificate is not trusted: self.signed.*; set ca_file"
            ) as met:
                play(environment(at(url, **settings)), echo)
            assert not met.value.passing
        other_host = url.replace("127.0.0.1", "localhost")
        with pytest.raises(ServerNotStarted, match=r"certificate is not trusted: Hostname mismatch.*correct the url"):
            play(environment(at(other_host, ca_file=str(tmp_path / "own.pem"))), echo)
    for file, why in (("none.pem", "No such file"), ("empty.pem", "PEM form")):
        (tmp_path / "empty.pem").write_text("nothing")
        with pytest.raises(ConfigError, match=rf"server 'web': ca_file .*{file}: .*{why}"):
            play(environment(at("https://127.0.0.1:1/mcp", ca_file=str(tmp_path / file))), echo)
    with pytest.raises(ValueError, match="ca_file belongs to a url that begins with https"):
        environment(at("http://127.0.0.1:1/mcp", ca_file="x.pem"))


def test_what_cannot_be_opened_says_why() -> None:
    with served() as (_, url):
        with pytest.raises(ServerNotStarted, match="HTTP status 401; check headers") as met:
            play(environment(at(url, headers={"Authorization": "Bearer secret-word"})), echo)
        assert "secret-word" not in str(met.value)
        assert not met.value.passing
    with pytest.raises(ServerNotStarted, match="no connection") as met:
        play(environment(at(url)), echo)
    assert met.value.passing, "the server may come up"
    with served("503") as (_, url), pytest.raises(ServerNotStarted, match="HTTP status 503"):
        play(environment(at(url)), echo)


FORGETS: list[tuple[int, Json]] = [
    (404, {}),
    (404, {"jsonrpc": "2.0", "id": None, "error": {"code": -32001, "message": "Session not found"}}),
    (400, {"jsonrpc": "2.0", "error": {"code": -32000, "message": "Bad Request: No valid session ID provided"}}),
    (410, {"error": "unknown session"}),
]


def restart(kind: type[Handler]) -> None:
    """What was opened before is forgotten."""
    kind.lost = frozenset(map(str, range(kind.sessions + 1)))


@pytest.mark.parametrize("forgets", FORGETS, ids=str)
@pytest.mark.parametrize("kept", [{"isolation": "shared"}, {"reuse": True, "retries": 1}])
def test_a_server_that_forgets_its_sessions_costs_no_later_episode(kept: Json, forgets: tuple[int, Json]) -> None:
    async def run(kind: type[Handler], url: str) -> None:
        async with managed(environment(at(url, **kept))) as manager:

            async def episodes(count: int) -> None:
                async def one(number: int) -> str:
                    async with manager.instance(some_task(), number) as instance:
                        return await echo(instance)

                assert await asyncio.gather(*map(one, range(count))) == ["hello"] * count

            await episodes(4)
            restart(kind)
            await episodes(6)
            async with manager.instance(some_task(), 9) as instance:
                assert await echo(instance) == "hello"
                restart(kind)  # nothing was done, and no state is lost: another session does it
                assert (await instance.call("put", {"key": "a", "value": "1"})).text == "ok"

    with served() as (kind, url):
        kind.forgets = forgets
        asyncio.run(run(kind, url))


def test_a_session_with_state_that_is_forgotten_costs_one_attempt() -> None:
    async def run(kind: type[Handler], url: str) -> None:
        async with managed(environment(at(url))) as manager:
            async with manager.instance(some_task(), 1) as instance:
                restart(kind)
                with pytest.raises(ToolServerFault, match="no longer knows its session") as met:
                    await echo(instance)
            assert (met.value.kind, met.value.by_policy) == (ServerFaultKind.FORGOTTEN, False)
            async with manager.instance(some_task(), 2) as instance:
                assert await echo(instance) == "hello"

    with served() as (kind, url):
        asyncio.run(run(kind, url))


@pytest.mark.parametrize(
    "fault", ["fails", "garbage", "half an event", "400", "401", "403", "404", "413", "429", "503"]
)
@pytest.mark.parametrize("isolation", ["session", "shared"])
def test_what_a_server_fails_at_while_it_answers_a_ping_is_the_calls(fault: str, isolation: str) -> None:
    """Else a call that it cannot bear would leave its episode unscored."""

    async def run(kind: type[Handler], url: str) -> None:
        async with (
            managed(environment(at(url, isolation=isolation, call_seconds=1.0))) as manager,
            manager.instance(some_task(), 1) as instance,
            manager.instance(some_task(), 2) as beside,
        ):
            kind.fault = "" if fault.isdecimal() else fault
            kind.refuses = int(fault) if fault.isdecimal() else 0
            bad, good = await asyncio.gather(echo_all(instance, "trap"), echo_all(beside, "fine"))
            assert (bad.error, bad.text.startswith("error: ")) == (True, True)
            if fault.isdecimal():
                assert (good.error, good.text) == (False, "fine"), "a status belongs to one request"

    with served() as (kind, url):
        kind.pings = True
        asyncio.run(run(kind, url))


async def echo_all(instance: EnvironmentInstance, text: str) -> Any:
    return await instance.call("echo", {"text_": text})


TUPLE = {"type": "array", "items": [{"type": "integer"}, {"type": "string"}], "additionalItems": False}
DIALECTS: dict[str, tuple[Json, Json, str | None]] = {
    "draft-07": ({"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"v": TUPLE}}, {"v": [1, 2]},
                 r"v[1]: 2 is not of type 'string'"),
    "draft-04": ({"$schema": "http://json-schema.org/draft-04/schema#",
                  "properties": {"v": {"minimum": 0, "exclusiveMinimum": True}}}, {"v": 0}, "v: 0 is less than or"),
    "draft-06": ({"$schema": "http://json-schema.org/draft-06/schema", "properties": {"v": TUPLE}}, {"v": [1, "a", 3]},
                 "v: Additional items are not allowed"),
    "2020-12": ({"$schema": "https://json-schema.org/draft/2020-12/schema",
                 "properties": {"v": {"prefixItems": [{"type": "string"}]}}}, {"v": [1]}, "v[0]: 1 is not of type"),
    "undeclared": ({"properties": {"v": TUPLE}}, {"v": ["a"]}, "v[0]: 'a' is not of type 'integer'"),
    "nobody's": ({"$schema": "https://x.test/own", "properties": {"v": {"type": "string"}}}, {"v": 1}, "v: 1 is"),
}  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_schema_is_read_in_the_dialect_that_it_declares(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schema, wrong, told = DIALECTS[dialect]
    listed = [{"name": "tool", "inputSchema": {"type": "object", **schema}}]
    monkeypatch.setattr(misbehaving_mcp, "listed", lambda: listed)

    async def look(instance: EnvironmentInstance) -> ToolSchema:
        return next(tool for tool in instance.tools() if tool.name == "tool")

    with served() as (_, url):
        found = play(environment(at(url)), look)
    assert told is not None and told in (validate_arguments(found, wrong) or "")  # noqa: PT018
    assert "$schema" not in json.dumps(found.openai())


def test_rollouts_that_cannot_be_kept_apart_are_refused() -> None:
    with served("stateless") as (_, url):
        with pytest.raises(ConfigError, match=r"keeps no sessions .* set isolation: shared"):
            play(environment(at(url)), echo)
        assert play(environment(at(url, isolation="shared")), echo) == "hello"
