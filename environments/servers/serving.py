"""A tool server over standard input and output: its settings, its list of tools, and whose fault a failed call is.

::

    python -m environments.servers.NAME [--config FILE.yaml] [key.path=value ...]

What a tool returns is a result. :class:`ToolError` is one too, with an error that the policy reads. A fault that no
policy brought about (:class:`EnvironmentFault`, :class:`JudgeFault`) is marked in the result's ``_meta``, so that the
episode is tried again instead of scored. Anything else is a bug, and ends the server.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

import mua
from mua.config.load import load_config
from mua.config.section import Section
from mua.environment.mcp.health import FAULT_KEY
from mua.environment.tool_arguments import validate_arguments
from mua.types import Json, ToolSchema
from mua.utils.errors import EnvironmentFault, JudgeFault, MuaError

S = TypeVar("S", bound=Section)


class ToolError(Exception):
    """A call that cannot be answered, by what the policy asked for. Its text is one line for the policy."""


@dataclass(frozen=True, slots=True)
class ServedTool:
    """One tool of a server."""

    schema: ToolSchema
    run: Callable[..., Awaitable[str]]
    """Called with the checked arguments."""
    read_only: bool = False
    """Whether a call may be repeated."""


def make_server(name: str, tools: Sequence[ServedTool]) -> Server[Any]:
    """An MCP server with these tools."""
    by_name = {tool.schema.name: tool for tool in tools}

    async def list_tools(_: Any, __: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=tool.schema.name,
                    description=tool.schema.description,
                    input_schema=tool.schema.parameters,
                    annotations=types.ToolAnnotations(read_only_hint=tool.read_only),
                )
                for tool in tools
            ]
        )

    async def call_tool(_: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        return await answer_call(by_name, params.name, params.arguments or {})

    return Server(name, version=mua.__version__, on_list_tools=list_tools, on_call_tool=call_tool)


async def answer_call(tools: Mapping[str, ServedTool], name: str, arguments: Json) -> types.CallToolResult:
    """The result of one call."""
    if (tool := tools.get(name)) is None:
        return _result(f"unknown tool {name!r}", error=True)
    if wrong := validate_arguments(tool.schema, arguments):
        return _result(f"error: {wrong}", error=True)
    try:
        return _result(await tool.run(**arguments))
    except ToolError as error:
        return _result(str(error), error=True)
    except (EnvironmentFault, JudgeFault) as fault:
        kind = "judge" if isinstance(fault, JudgeFault) else "environment"
        told = {"kind": kind, "passing": fault.passing, "by_policy": fault.by_policy}
        return _result(str(fault), error=True, meta={FAULT_KEY: told})


def _result(text: str, *, error: bool = False, meta: Mapping[str, Any] | None = None) -> types.CallToolResult:
    content: list[types.ContentBlock] = [types.TextContent(type="text", text=text)]
    return types.CallToolResult(content=content, is_error=error, _meta=dict(meta) if meta else None)


def serve(name: str, schema: type[S], opened: Callable[[S], AbstractAsyncContextManager[Sequence[ServedTool]]]) -> None:
    """Read the settings, open the tools and answer until standard input ends.

    Exits with status 2 and one message on standard error for settings or a start that fail.
    """
    parser = argparse.ArgumentParser(prog=f"python -m environments.servers.{name}", description=schema.__doc__)
    parser.add_argument("--config", type=Path, help="YAML file of settings")
    parser.add_argument("settings", nargs="*", metavar="key.path=value", help="settings; they win over the file")
    given = parser.parse_args()

    def settings() -> S:
        if given.config is not None:
            return load_config(given.config, given.settings, schema)
        with NamedTemporaryFile("w", prefix=f"{name}-", suffix=".yaml") as none:
            none.write("{}\n")
            none.flush()
            return load_config(Path(none.name), given.settings, schema)

    async def run() -> None:
        async with opened(settings()) as tools, stdio_server() as (received, sent):
            server = make_server(name, tools)
            await server.run(received, sent, server.create_initialization_options())

    try:
        asyncio.run(run())
    except BaseExceptionGroup as group:
        _end(*(error for error in group.exceptions if isinstance(error, MuaError)))
        raise
    except MuaError as error:
        _end(error)


def _end(*errors: MuaError) -> None:
    if errors:
        sys.exit("\n".join(str(error) for error in errors))
