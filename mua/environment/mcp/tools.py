"""Which of a server's tools the policy gets, under which names, and what a result is as text.

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

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import mcp_types as types

from mua.config.mcp import TOOL_NAME, McpServerConfig
from mua.environment.tool_arguments import argument_checker
from mua.types import ToolSchema
from mua.utils.errors import ConfigError
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
        found[public] = ServerTool(_schema(where, public, tool), tool.name, _safe(config, tool))
    if not found:
        raise ConfigError(f"{where}: none of its {len(listed)} tools is left by allow and block")
    return found


def _safe(config: McpServerConfig, tool: types.Tool) -> bool:
    said = tool.annotations
    return tool.name in config.safe or bool(said and (said.read_only_hint or said.idempotent_hint))


def _schema(where: str, name: str, tool: types.Tool) -> ToolSchema:
    parameters = {key: value for key, value in tool.input_schema.items() if key != "$schema"}
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
    if isinstance(block, types.TextContent):
        return block.text
    if isinstance(block, types.ImageContent | types.AudioContent):
        return f"[{block.type}: {block.mime_type}, {_size(block.data)} bytes, not shown]"
    if isinstance(block, types.ResourceLink):
        return f"[link to {block.name}: {block.uri}{_kind(block.mime_type)}]"
    inner = block.resource
    if isinstance(inner, types.TextResourceContents):
        return f"[resource {inner.uri}{_kind(inner.mime_type)}]\n{inner.text}"
    return f"[resource {inner.uri}{_kind(inner.mime_type)}: {_size(inner.blob)} bytes, not shown]"


def _kind(mime_type: str | None) -> str:
    return f" ({mime_type})" if mime_type else ""


def _size(base64: str) -> int:
    return len(base64) * 3 // 4 - base64[-2:].count("=")
