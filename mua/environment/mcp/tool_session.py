"""One session with one server, owned by one task from its opening to its end.

::

    owner task:   transport ─► ClientSession ─► handshake ─► list of tools ─► waits ─► everything closed, in order
                                                                  │            ▲
    open() ◄──────────────────────────────────────────────────────┘            │ lost, or close()
    call() ── from the episode's task ── request ─► answer ─► text

The SDK's contexts must be left by the task that entered them, last in first out; hence the owner. Whatever goes wrong
becomes one :class:`ToolServerFault` that says which server, what, and what the server said on standard error.

What a result is as text, which is all that a policy reads:

=================== ==========================================================================
content             text
=================== ==========================================================================
text                as it is
image, audio        ``[image: image/png, 5120 bytes, not shown]``
embedded resource   ``[resource file:///a.txt (text/plain)]`` and its text; of a binary one its size
resource link       ``[link to report: file:///a.pdf (application/pdf)]``
structured content  as JSON, where there is no text; by the specification a text says the same
=================== ==========================================================================

Parts are joined by line ends. A result without any part is ``(no output)``.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import mcp_types as types
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from pydantic import TypeAdapter, ValidationError

import mua
from mua.config.environment import McpServerConfig
from mua.config.section import TOOL_NAME
from mua.environment.blame import Blame, blame
from mua.environment.mcp.health import FAULT_KEY, Health, ServerFaultKind, ToolServerFault
from mua.environment.protocol import ToolResult
from mua.environment.tool_arguments import argument_checker
from mua.types import Json, ToolSchema
from mua.utils.errors import ConfigError, JudgeFault, MuaError, one_line
from mua.utils.strict_json import MAX_DEPTH, deeper, printable, unpaired_surrogate

MOST_TOOLS = 512


@dataclass(frozen=True, slots=True)
class ServerTool:
    """One tool of a server, as the policy gets it."""

    schema: ToolSchema
    own_name: str
    """What its server calls it."""
    safe: bool
    """Whether it may be called twice."""


def chosen_tools(config: McpServerConfig, listed: Sequence[types.Tool]) -> dict[str, ServerTool]:
    """The tools that ``config`` lets through, by the policy's name, in the server's order.

    Raises :class:`ConfigError` for a name in the configuration that the server does not know, a name that no policy can
    call, two tools of one name, and a schema that is none.
    """
    where = f"environment.mcp, server {config.name!r}"
    if len(listed) > MOST_TOOLS:
        raise ConfigError(f"{where}: it lists more than {MOST_TOOLS} tools")
    known = [tool.name for tool in listed]
    for key in ("allow", "block", "rename", "safe"):
        for name in getattr(config, key):
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(sorted(known)) or 'none'}"
                raise ConfigError(f"{where}: {key} names {name!r}, a tool that it does not have{hint}")
    found: dict[str, ServerTool] = {}
    for tool in listed:
        if tool.name in config.block or (config.allow and tool.name not in config.allow):
            continue
        public = config.rename.get(tool.name, config.prefix + tool.name)
        if not TOOL_NAME.fullmatch(public):
            raise ConfigError(
                f"{where}: its tool {printable(public, 80)!r} has a name that policies cannot call (at most 64 "
                "letters, digits, - and _); name it in rename, or in block"
            )
        if public in found:
            fix = "give one of them another name in rename"
            raise ConfigError(f"{where}: {found[public].own_name!r} and {tool.name!r} both become {public!r}; {fix}")
        said = tool.annotations
        safe = tool.name in config.safe or bool(said and (said.read_only_hint or said.idempotent_hint))
        found[public] = ServerTool(_schema(where, public, tool), tool.name, safe)
    if not found:
        raise ConfigError(f"{where}: none of its {len(listed)} tools is left by allow and block")
    return found


def _schema(where: str, name: str, tool: types.Tool) -> ToolSchema:
    parameters = tool.input_schema
    schema = ToolSchema(name, tool.description or "", parameters)
    fault = None
    if parameters.get("type") != "object":
        fault = "is not of type object"
    elif deeper(parameters, MAX_DEPTH):
        fault = f"nests more than {MAX_DEPTH} deep"
    elif unpaired_surrogate(schema.description) is not None:
        fault = "comes with a description that is no text"
    else:
        try:
            argument_checker(schema)({})
        except Exception as error:
            fault = f"is no JSON Schema: {printable(str(error), 200)}"
    if fault is not None:
        raise ConfigError(f"{where}: the schema of its tool {tool.name!r} {fault}; name the tool in block")
    return schema


def text_of(result: types.CallToolResult, longest: int) -> str:
    """The text of a result, at most ``longest`` characters and a line that says what was cut."""
    parts = [_part(block) for block in result.content]
    if result.structured_content is not None and not any(isinstance(b, types.TextContent) for b in result.content):
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return cut("\n".join(parts) or "(no output)", longest)


def cut(text: str, longest: int) -> str:
    """``text``, or its beginning and a line that says so."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]}\n[cut: the first {longest} of {len(text)} characters are shown]"


def _part(block: types.ContentBlock) -> str:
    def size(base64: str) -> int:
        return len(base64) * 3 // 4 - base64[-2:].count("=")

    match block:
        case types.TextContent():
            return block.text
        case types.ImageContent() | types.AudioContent():
            return f"[{block.type}: {block.mime_type}, {size(block.data)} bytes, not shown]"
        case types.ResourceLink():
            kind = f" ({block.mime_type})" if block.mime_type else ""
            return f"[link to {block.name}: {block.uri}{kind}]"
    inner = block.resource
    kind = f" ({inner.mime_type})" if inner.mime_type else ""
    if isinstance(inner, types.TextResourceContents):
        return f"[resource {inner.uri}{kind}]\n{inner.text}"
    return f"[resource {inner.uri}{kind}: {size(inner.blob)} bytes, not shown]"


log = logging.getLogger(__name__)

Streams = Callable[[McpServerConfig, Health], AbstractAsyncContextManager[tuple[Any, Any]]]
"""A transport: its two streams, under a context."""
CLOSE_SECONDS = 5.0
"""For a session to close by itself; then its task is cancelled, which ends its process at once."""
MOST_PAGES = 100
_REASON_SECONDS = 2.0
_RESULT: TypeAdapter[types.CallToolResult] = TypeAdapter(types.CallToolResult)
_ABSENT = re.compile(
    r"unknown tool|no such tool|tool\b.{0,200}\b(not found|does not exist|unknown|unavailable)", re.I | re.S
)
_ANSWER_SECONDS = 5.0
"""For a ping, whatever calls may take."""
_EMPTY: TypeAdapter[types.EmptyResult] = TypeAdapter(types.EmptyResult)


def status_of(error: BaseException) -> int | None:
    """The HTTP status of the request that met ``error``, if it had one."""
    data = error.error.data if isinstance(error, MCPError) else None
    status = data.get("status") if isinstance(data, dict) else None
    return status if isinstance(status, int) and status >= 400 else None


class ToolSession:
    """Opened once, called by one rollout at a time (or by all, where it is shared), closed once."""

    def __init__(self, config: McpServerConfig, streams: Streams) -> None:
        self.tools: dict[str, ServerTool] = {}
        """As they were when it was opened."""
        self.health = Health(config.message_bytes)
        self._config = config
        self._streams = streams
        self._client: ClientSession | None = None
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner: asyncio.Task[None] | None = None
        self._stale = False
        self.retired = False
        """Whether the pool has it closed."""

    @property
    def usable(self) -> bool:
        """Whether a call can succeed."""
        return self._client is not None and not self.health.over.is_set()

    async def open(self) -> None:
        """Start the server where it has to be, greet it, take its tools, under ``start_seconds``.

        Raises :class:`ToolServerFault`, or :class:`ConfigError` for tools that the configuration does not fit.
        """
        self._owner = asyncio.create_task(self._live(), name=f"session with {self._config.name}")
        try:
            async with asyncio.timeout(self._config.start_seconds) as deadline:
                await asyncio.wait({self._opened, self._owner}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            assert deadline.expired()
            late = f"it was not ready within {self._config.start_seconds:g} s (start_seconds)"
            self.health.lose(ServerFaultKind.HUNG, late)
        except asyncio.CancelledError:
            self.health.lose(ServerFaultKind.HUNG, "its opening was cancelled")
            await self.close()
            raise
        if self._opened.done() and self._opened.exception() is None:
            return
        error = self._opened.exception() if self._opened.done() else None
        if error is not None and not isinstance(error, MuaError):
            self.health.lose(*self._read_error(error))
        await self.close()
        if isinstance(error, MuaError):
            raise error
        raise self.fault("cannot be opened")

    async def call(self, tool: ServerTool, arguments: Json) -> ToolResult:
        """Call a tool under ``call_seconds``.

        What the server answers, its errors included, is a result, and so is that it answers everything but this call.
        That it does not answer raises :class:`ToolServerFault`, as does an error that it marks as no policy's doing;
        one of its judge raises :class:`JudgeFault`.
        """
        if self._stale:
            await self._same_tools()
        if unpaired_surrogate(json.dumps(arguments, ensure_ascii=False)) is not None:  # no message can hold it
            return ToolResult("error: an argument has an unpaired surrogate, which is no text", error=True)
        what = f"call of {tool.own_name!r}"
        params = types.CallToolRequestParams(name=tool.own_name, arguments=arguments)
        try:
            result = await self._request(what, types.CallToolRequest(params=params), _RESULT)
        except MCPError as error:
            await self._same_tools()
            return ToolResult(cut(f"error: {error.message}", self._config.result_chars), error=True)
        except ToolServerFault as lost:
            if not await self.answers():
                raise
            return ToolResult(cut(f"error: {lost}", self._config.result_chars), error=True)
        text = text_of(result, self._config.result_chars)
        if result.is_error and isinstance(told := (result.meta or {}).get(FAULT_KEY), dict):
            text, passing = f"tool server {self._config.name!r}: {text}", told.get("passing") is not False
            marked: MuaError = ToolServerFault(text, ServerFaultKind.TOLD, passing=passing)
            if told.get("kind") == "judge":
                marked = JudgeFault(text, passing=passing)
            marked.by_policy = told.get("by_policy") is True
            raise marked
        if result.is_error and _ABSENT.search(text):
            await self._same_tools()
        return ToolResult(text, error=bool(result.is_error))

    async def answers(self) -> bool:
        """Whether its server answers a ping in this session; one that does not know pings answers, too."""
        if not self.usable:
            return False
        try:
            async with asyncio.timeout(min(_ANSWER_SECONDS, self._config.call_seconds)):
                await self._request("ping", types.PingRequest(), _EMPTY)
        except MCPError:
            return True
        except (ToolServerFault, TimeoutError):
            return False
        return self.usable

    async def refreshed(self) -> bool:
        """Whether its tools are still those that it was opened with; asks the server."""
        try:
            await self._same_tools()
        except ToolServerFault:
            return False
        return self.usable

    async def close(self) -> None:
        """End it; on return nothing of the server is left. Never raises but for a cancellation."""
        self.health.over.set()
        if self._owner is None:
            return
        patience = 0 if self.health.kind is ServerFaultKind.HUNG else CLOSE_SECONDS
        done, _ = await asyncio.wait({self._owner}, timeout=patience)
        if not done:
            self._owner.cancel()
            done, _ = await asyncio.wait({self._owner}, timeout=2 * CLOSE_SECONDS)
        if not done:
            log.warning("tool server %r: a session does not close", self._config.name)

    def fault(self, what: str) -> ToolServerFault:
        """The fault that ``health`` tells of."""
        health, name = self.health, self._config.name
        kind = health.kind or ServerFaultKind.CRASHED
        told = health.told() or "its session ended"
        return ToolServerFault(f"tool server {name!r}: {what}: {told}", kind, passing=health.passing)

    # ---- inside

    async def _live(self) -> None:
        async def hear(message: Any) -> None:
            self._stale = self._stale or isinstance(message, types.ToolListChangedNotification)

        try:
            async with self._streams(self._config, self.health) as (heard, said):
                info = types.Implementation(name="mua", version=mua.__version__)
                async with ClientSession(heard, said, message_handler=hear, client_info=info) as client:
                    await self._greet(client)
                    await self.health.over.wait()
        except BaseExceptionGroup as error:
            first: BaseException = error
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            self.health.lose(ServerFaultKind.CRASHED, one_line(first)[:300])
        except Exception as error:
            self.health.lose(ServerFaultKind.CRASHED, one_line(error)[:300])
        finally:
            self._client = None
            self.health.lose(ServerFaultKind.CRASHED, "its session was closed")

    async def _greet(self, client: ClientSession) -> None:
        """Handshake and tools; what goes wrong is :meth:`open`'s to tell, and not the contexts' to wrap."""
        try:
            try:
                # Not the SDK's probe for the newest protocol, which a mute server holds up for 10 s.
                await client.initialize()
            except MCPError as error:
                if error.code != types.UNSUPPORTED_PROTOCOL_VERSION:
                    raise
                await client.discover()
            if self._config.url and self._config.isolation == "session" and not self.health.session_id:
                raise ConfigError(
                    f"environment.mcp, server {self._config.name!r}: it keeps no sessions (no Mcp-Session-Id), so that "
                    "rollouts cannot be kept apart; set isolation: shared if it has no state, or none that matters"
                )
            self._client = client
            self.tools = await asyncio.to_thread(chosen_tools, self._config, await self._listed())
        except Exception as error:
            self._opened.set_exception(error)
            self.health.over.set()
        else:
            self._opened.set_result(None)

    async def _listed(self) -> list[types.Tool]:
        assert self._client is not None
        tools: list[types.Tool] = []
        cursor: str | None = None
        for _ in range(MOST_PAGES):
            params = types.PaginatedRequestParams(cursor=cursor) if cursor else None
            page = await self._client.list_tools(params=params)
            tools += page.tools
            if not (cursor := page.next_cursor):
                return tools
        raise ConfigError(f"environment.mcp, server {self._config.name!r}: its list of tools has no end")

    async def _same_tools(self) -> None:
        """Ask for the tools again. Raises :class:`ToolServerFault` where they are others."""
        self._stale = False
        seconds = self._config.call_seconds
        try:
            async with asyncio.timeout(seconds):
                now = await asyncio.to_thread(chosen_tools, self._config, await self._listed())
        except TimeoutError:
            self.health.lose(ServerFaultKind.HUNG, f"it did not list its tools within {seconds:g} s")
        except ConfigError as error:
            self.health.lose(ServerFaultKind.TOOLS_CHANGED, str(error))
        except Exception as error:
            self.health.lose(*self._read_error(error))
        else:
            if now == self.tools:
                return
            differ = sorted({*now} ^ {*self.tools}) or [name for name in now if now[name] != self.tools[name]]
            told = f"its tools changed while a rollout used them ({', '.join(differ[:5])})"
            self.health.lose(ServerFaultKind.TOOLS_CHANGED, told)
        raise self.fault("list of tools")

    async def _request(self, what: str, request: Any, answer: TypeAdapter[Any]) -> Any:
        """The answer. Raises :class:`ToolServerFault`, and MCPError for an error that the server itself answers."""
        client, seconds = self._client, self._config.call_seconds
        if client is None or self.health.over.is_set():
            raise await self._gone(what)
        try:
            async with asyncio.timeout(seconds) as deadline:
                return await client.send_request(request, answer)
        except TimeoutError:
            if not deadline.expired():
                raise
            stray = f"; on standard output it said {self.health.stray!r}" if self.health.stray else ""
            told = f"no answer within {seconds:g} s (call_seconds){stray}"
            name = self._config.name
            raise ToolServerFault(f"tool server {name!r}: {what}: {told}", ServerFaultKind.HUNG) from None
        except ValidationError as error:
            told = f"its answer is none that the protocol knows: {str(error).splitlines()[0]}"
            self.health.lose(ServerFaultKind.GARBAGE, told)
            raise self.fault(what) from None
        except MCPError as error:
            if self.health.over.is_set():
                raise await self._gone(what) from None
            # Whether no server answered this: the SDK puts its own troubles into the same form, and servers its codes
            # into theirs. A ping tells.
            status = status_of(error)
            own = error.code in (types.CONNECTION_CLOSED, types.REQUEST_TIMEOUT, types.PARSE_ERROR)
            found = blame("tool_server", [status or error.code], error.message if status else "")
            if (status is None and not own) or (status is not None and found is Blame.POLICY):
                raise
            kind, told = self._read_error(error)
            if found is Blame.FORGOTTEN and self.health.session_id:
                kind, told = ServerFaultKind.FORGOTTEN, f"it no longer knows its session (HTTP status {status})"
                if what == "ping":
                    self.health.lose(kind, told)
            raise ToolServerFault(f"tool server {self._config.name!r}: {what}: {told}", kind) from None
        except Exception as error:
            self.health.lose(ServerFaultKind.CRASHED, one_line(error))
            raise await self._gone(what) from None

    async def _gone(self, what: str) -> ToolServerFault:
        """The fault of a session that has ended, once its owner knows how."""
        self.health.over.set()
        if self._owner is not None:
            await asyncio.wait({self._owner}, timeout=_REASON_SECONDS)
        return self.fault(what)

    def _read_error(self, error: BaseException) -> tuple[ServerFaultKind, str]:
        if status := status_of(error):
            kind = ServerFaultKind.REFUSED if status in (401, 403) else ServerFaultKind.CRASHED
            hint = "; check headers" if kind is ServerFaultKind.REFUSED else ""
            return kind, f"it answers with HTTP status {status}{hint}"
        if isinstance(error, ValidationError) or (isinstance(error, MCPError) and error.code == types.PARSE_ERROR):
            return ServerFaultKind.GARBAGE, f"its answer is none that the protocol knows: {one_line(error)[:400]}"
        return ServerFaultKind.CRASHED, one_line(error)[:300]
