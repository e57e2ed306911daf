"""What a server's result is as text, which is all that a policy reads.

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

import json

import mcp_types as types


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
