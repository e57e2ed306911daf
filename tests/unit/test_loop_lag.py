"""Foreign data never blocks the event loop: schemas, arguments, error texts, bodies, pages and PDFs that were made to.

One watchdog looks at all of them. It measures the processor time of the loop's thread between two of its own turns,
which other work of the machine does not lengthen, and the clock time, in which a thread may have held the interpreter.
Not covered: replies of endpoints (test_endpoint_*.py), and what a hostile page costs the process that parses it
(test_reading_pages.py, test_reading_pdf.py).
"""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx2
import mcp_types as types
import pytest

from environments.servers.fetching import Fetcher
from environments.servers.page_text import PageError
from environments.servers.parsers import Parsers
from environments.servers.search_service import SearchService
from environments.servers.web_settings import PagesConfig, SearchTool
from mua.config.environment import McpServerConfig
from mua.environment.endpoint.replies import read_text_calls
from mua.environment.mcp.health import Health
from mua.environment.mcp.http_pipe import CappedBody
from mua.environment.mcp.tool_session import ServerTool, ToolSession, chosen_tools
from mua.environment.tool_arguments import fitted, validate_arguments
from mua.rollout.gateway.session import same_message
from mua.types import Json, ToolSchema
from mua.utils.errors import ConfigError, EnvironmentFault
from mua.utils.masking import mask_secrets
from tests.web_support import host

MOST_CPU, MOST_WALL = 2.0, 30.0
"""Seconds of one turn of the loop. A machine may be several times slower than ours; what blocks it takes minutes."""
TINY = b"1\r\nx\r\n" * 400_000
"""A body in chunks of one byte."""
SERVER = McpServerConfig(name="s", command="x")


@asynccontextmanager
async def watched(what: str) -> AsyncIterator[None]:
    """Fails where one turn of the loop takes too long."""
    worst = [0.0, 0.0]

    async def watch() -> None:
        while True:
            began = time.thread_time(), time.perf_counter()
            await asyncio.sleep(0.001)
            taken = time.thread_time() - began[0], time.perf_counter() - began[1]
            worst[:] = map(max, worst, taken)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    try:
        yield
    finally:
        await asyncio.sleep(0.01)
        watching.cancel()
    assert worst[0] < MOST_CPU, f"{what} holds the loop for {worst[0]:.2f} s of processor time"
    assert worst[1] < MOST_WALL, f"{what} holds the loop for {worst[1]:.2f} s"


# ---- schemas and arguments


def doubling(count: int, reference: str = "$ref") -> Json:
    """Parts that refer twice to the next one."""
    parts = {f"a{n}": {"allOf": [{reference: f"#/$defs/a{n + 1}"}] * 2} for n in range(count)}
    return {**parts, f"a{count}": {"type": "object"}}


def chain(count: int) -> Json:
    return {**{f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(count)}, f"a{count}": {}}


def deep(levels: int, leaf: Any) -> Any:
    for _ in range(levels):
        leaf = {"x": leaf}
    return leaf


def of(x: Json) -> Json:
    return {"properties": {"x": x}}


NODE = {"anyOf": [{"type": "integer"}, *[{"type": "object", **of({"$ref": "#/$defs/n"})} for _ in range(2)]]}
ITEM = {"anyOf": [{"type": "integer"}, *[{"type": "array", "items": {"$ref": "#/$defs/n"}} for _ in range(2)]]}
MANY = {str(n): float(n) for n in range(20_000)}
REFUSED: dict[str, Json] = {
    "references that double": {"$defs": doubling(30), "allOf": [{"$ref": "#/$defs/a0"}]},
    "dynamic references that double": {"$defs": doubling(30, "$dynamicRef"), "allOf": [{"$dynamicRef": "#/$defs/a0"}]},
    "recursive references that double": {
        "$defs": doubling(30, "$recursiveRef"), "allOf": [{"$recursiveRef": "#/$defs/a0"}]
    },
    "tuples of draft 7 that double": {
        "definitions": {f"a{n}": {"items": [{"$ref": f"#/definitions/a{(n + 1) % 31}"}] * 2} for n in range(31)},
        **of({"$ref": "#/definitions/a0"}),
    },
    "doubling below not": {"$defs": doubling(30), "not": {"$ref": "#/$defs/a0"}},
    "doubling by a property's presence": {"$defs": doubling(30), "dependentSchemas": {"x": {"$ref": "#/$defs/a0"}}},
    "doubling in a property called default": {"$defs": doubling(30), **of({"$ref": "#/$defs/a0"})},
    "doubling by places in lists": {
        "list": [*({"allOf": [{"$ref": f"#/list/{n + 1}"}] * 2} for n in range(30)), {}],
        "allOf": [{"$ref": "#/list/0"}],
    },
    "a chain of references": {"$defs": chain(5000), "$ref": "#/$defs/a0"},
    "an anchor": {"$defs": {"a": {"$anchor": "q", "allOf": [{"$ref": "#q"}] * 2}}, "$ref": "#q"},
    "paths under another id": {"$defs": {"a": {"$id": "q", "type": "object"}}, "$ref": "#/$defs/a"},
    "repetitions of repetitions": of({"pattern": r"^(\w{1,1000}){1,1000}$"}),
    "300 large patterns": {"properties": {str(n): {"pattern": rf"^(\w{{1,{50 + n}}}){{1,40}}$"} for n in range(300)}},
    "200,000 values": of({"enum": list(range(200_000))}),
    "a keyword of another type": {"dependencies": 5},
}  # fmt: skip
TAKEN: dict[str, tuple[Json, Json]] = {
    "allOf refers to itself": ({"allOf": [{"$ref": "#"}]}, {"x": 1.0}),
    "two parts refer to one another": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, **of({"$ref": "#/$defs/a"})}, {"x": 1.0}
    ),
    "nested quantifiers for keys": ({"patternProperties": {"^(a+)+$": {"type": "integer"}}}, {"a" * 40 + "!": 2.0}),
    "nested quantifiers, no other keys": (
        {"additionalProperties": False, "patternProperties": {"^(a+)+$": {}}}, {"a" * 40 + "!": 2.0}
    ),
    "a thousand patterns for keys": (
        {"additionalProperties": False, "patternProperties": {f"^{n}q": True for n in range(1000)}}, MANY
    ),
    "nested quantifiers for values": (of({"pattern": "^(a+)+$"}), {"x": "a" * 100_000 + "!"}),
    "looking ahead": (of({"pattern": "(?=.*b)a"}), {"x": "a" * 100_000}),
    "looking ahead in many texts": (of({"items": {"pattern": "(?=.*b)a"}}), {"x": ["a" * 3000] * 300}),
    "looking ahead in a key": ({"patternProperties": {"(?=.*b)a": False}}, {"a" * 100_000: 1}),
    "unique items": (of({"uniqueItems": True}), {"x": [[n] for n in range(20_000)]}),
    "20,000 values": (of({"enum": list(range(20_000))}), {"x": -1}),
    "3,000 alternatives": (of({"anyOf": [{"type": "string", "minLength": n} for n in range(3000)]}), {"x": 5.0}),
    "3,000 alternatives for each of 10,000": (
        of({"items": {"anyOf": [{"type": "string", "minLength": n} for n in range(3000)]}}), {"x": [5.0] * 10_000}
    ),
    "two ways down at each level": ({"$defs": {"n": NODE}, **of({"$ref": "#/$defs/n"})}, deep(60, "s")),
    "the same for numbers": ({"$defs": {"n": NODE}, **of({"$ref": "#/$defs/n"})}, deep(60, 2.0)),
    "the same in lists": (
        {"$defs": {"n": ITEM}, **of({"$ref": "#/$defs/n"})}, {"x": json.loads("[" * 40 + '"s", 2.0' + "]" * 40)}
    ),
    "a thousand faults of a large object": ({"allOf": [{"minProperties": 10**9}] * 1000}, MANY),
    "faults of what no property names": ({"unevaluatedProperties": {"allOf": [{"type": "string"}] * 500}}, MANY),
    "a fault for each of 100,000": (of({"items": {"type": "string"}}), {"x": [1.0] * 100_000}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_a_schema_that_takes_long_is_refused_when_it_is_listed(name: str) -> None:
    schema = {"type": "object", **REFUSED[name]}
    async with watched(name):
        with pytest.raises(ConfigError, match=r"the schema of its tool 't' .*; name the tool in block"):
            await asyncio.to_thread(chosen_tools, SERVER, [types.Tool(name="t", input_schema=schema)])


@pytest.mark.parametrize("name", TAKEN)
async def test_arguments_are_held_against_a_schema_in_bounded_time(name: str) -> None:
    parameters, arguments = TAKEN[name]
    schema = ToolSchema("t", "", {"type": "object", **parameters})
    async with watched(name):
        chosen_tools(SERVER, [types.Tool(name="t", input_schema=schema.parameters)])
        fault = validate_arguments(schema, arguments)
        await asyncio.sleep(0)
        assert fault is None or (fault.startswith("invalid arguments for t: ") and len(fault) < 400)
        if fault is None:  # others are not called
            fitted(schema, arguments)


@pytest.mark.parametrize(
    ("schema", "arguments", "fault"),
    [
        (of({"pattern": "^(?!no).*$"}), {"x": "yes"}, None),
        (of({"pattern": "^(?!no).*$"}), {"x": "nope"}, "does not match"),
        (of({"pattern": r"^(\d+)-\1$"}), {"x": "12-12"}, None),
        ({"$defs": {"n": NODE}, **of({"$ref": "#/$defs/n"})}, deep(5, 2), None),
        (of({"items": {"properties": {"a": {"type": "string"}}}}), {"x": [{"a": "b"}] * 500 + [{"a": 1}]}, "500].a: 1"),
        ({"definitions": {"c": {"enum": ["red"]}}, **of({"$ref": "#/definitions/c"})}, {"x": "blue"}, "not one of"),
        (
            {**of({"type": "string"}), "required": ["y"], "allOf": [{"$ref": "#/properties/x"}]},
            {"x": "a"},
            "of type 'string'",
        ),
    ],
)
def test_ordinary_schemas_are_checked_as_before(schema: Json, arguments: Json, fault: str | None) -> None:
    found = validate_arguments(ToolSchema("t", "", {"type": "object", **schema}), arguments)
    assert found is None if fault is None else fault in (found or "")


# ---- what servers say


@pytest.mark.parametrize("piece", ["?key", "://a:", "export ", "Bearer ", "eyJ", "a-", "--a", "a.b=", "'"])
async def test_secrets_are_looked_for_in_bounded_time(piece: str) -> None:
    async with watched(piece):
        mask_secrets("://" + piece * (64_000 // len(piece)))


class Says:
    """A client whose server answers every call with one error."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def send_request(self, request: Any, answer: Any) -> types.CallToolResult:
        return types.CallToolResult(content=[types.TextContent(text=self._text)], is_error=True)


@pytest.mark.parametrize("text", ["tool " * 100_000, "tool unknow " * 40_000, "x" * 500_000, "no such too" * 40_000])
async def test_an_error_of_a_tool_server_is_read_in_linear_time(text: str) -> None:
    session = ToolSession(SERVER, lambda config, health: None)  # type: ignore[arg-type,return-value]
    session._client = Says(text)  # type: ignore[assignment]
    async with watched("an error text"):
        result = await session.call(ServerTool(ToolSchema("t", "", {"type": "object"}), "t", False), {})
    assert result.error


@pytest.mark.parametrize("text", ["<tool_call>" * 40_000, "<tool_call>{" * 40_000, "<function=look>" * 30_000])
async def test_calls_that_cannot_be_read_take_linear_time(text: str) -> None:
    async with watched("calls as text"):
        assert read_text_calls(text, {"look"})[1]


@pytest.mark.parametrize("added", ["\n" * 20_000 + "x", "]" * 20_000 + "x", "Calling tools: [" + "] " * 20_000 + "x"])
async def test_what_a_library_wrote_behind_a_turn_is_read_in_linear_time(added: str) -> None:
    async with watched("a copy of a turn"):
        held: Json = {"role": "assistant", "content": "said"}
        assert not same_message(held, held | {"content": "said" + added})
        call = {"function": {"name": "look", "arguments": "[" * 100_000}}
        assert not same_message(held | {"tool_calls": [call]}, held | {"content": "said look"})


class Pieces(httpx2.AsyncByteStream):
    """A body that is there at once, in pieces."""

    def __init__(self, piece: bytes, count: int) -> None:
        self._piece, self._count = piece, count

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self._count):
            yield self._piece


@pytest.mark.parametrize("events", [False, True])
async def test_an_answer_in_pieces_of_one_byte_ends_the_session_with_a_tool_server(events: bool) -> None:
    health = Health(2**24)
    async with watched("a body in pieces"):
        with pytest.raises(httpx2.StreamError):
            async for _ in CappedBody(Pieces(b"x", 2_000_000), health, 2**24, events=events):
                pass
    assert "in pieces of 1.0 bytes" in health.told()


# ---- pages, PDFs, searches


async def tiny(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n" + TINY)


def pdf(content: bytes) -> bytes:
    packed = zlib.compress(content, 9)
    objects = [
        b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(packed), packed),
        b"<< /Type /Page /Contents 1 0 R /Parent 3 0 R >>",
        b"<< /Type /Pages /Kids [2 0 R] /Count 1 >>",
        b"<< /Type /Catalog /Pages 3 0 R >>",
    ]
    told = b"".join(b"%d 0 obj\n%s\nendobj\n" % (number, one) for number, one in enumerate(objects, 1))
    return b"%PDF-1.4\n" + told + b"trailer\n<< /Root 4 0 R >>\n%%EOF"


FILES: dict[str, Callable[[], bytes]] = {
    "a hundred megabytes of spaces": lambda: pdf(b" " * 10**8),
    "operators without end": lambda: pdf(b"q " * 3_000_000),
    "open brackets": lambda: pdf(b"[" * 200_000),
    "a page of nested elements": lambda: b"<html><body>" + b"<div><p>" * 200_000,
    "a page of open attributes": lambda: b"<html><body>" + b"<a href='" * 400_000,
}


@pytest.mark.parametrize("name", FILES)
async def test_files_are_parsed_beside_the_loop(name: str) -> None:
    body, parsers = FILES[name](), Parsers(1, 1.0, "pages")
    try:
        await parsers.start()
        async with watched(name):
            with suppress(PageError):  # or there is some text
                await parsers.parse(body, html=name.startswith("a page"), pdf=body.startswith(b"%PDF"), longest=1000)
    finally:
        await parsers.close()


async def test_bodies_in_chunks_of_one_byte_are_given_up() -> None:
    async with host() as web:
        web.answers |= {"/page": tiny, "/search": tiny}
        fetcher = Fetcher(PagesConfig(allow_private=[web.place], fetch_seconds=20))
        service = SearchService(SearchTool(url=web.url("/search?q={query}"), retries=0), None, "search")
        try:
            async with watched("a page in tiny chunks"):
                with pytest.raises(PageError, match="pieces too small"):
                    await fetcher.fetch(web.url("/page"))
            async with watched("a search in tiny chunks"):
                with pytest.raises(EnvironmentFault, match="pieces too small"):
                    await service.search("x", 5)
        finally:
            await fetcher.close()
            await service.close()
