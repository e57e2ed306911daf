"""The domain's tools over MCP: the server's half of streamable HTTP, one JSON answer a request and no state.

By hand, because the session is the gateway's: the SDK's server is an ASGI application with sessions and a lifetime of
its own, and what an agent needs of it are the four methods below. Clients of the SDK speak to it in the tests.
"""

from __future__ import annotations

from typing import Any

import mua
from mua.rollout.gateway.chat_calls import Refused
from mua.rollout.gateway.episode_host import EpisodeHost
from mua.types import Json

_VERSIONS = ("2025-06-18", "2025-03-26", "2024-11-05")
_NO_METHOD, _BAD_REQUEST, _BAD_PARAMETERS = -32601, -32600, -32602


async def answer_mcp(message: Json, host: EpisodeHost) -> Json | None:
    """The answer to one JSON-RPC message; None for a notification."""
    method, number = message.get("method"), message.get("id")
    if number is None:
        return None
    if message.get("jsonrpc") != "2.0" or not isinstance(method, str):
        return _error(number, _BAD_REQUEST, "a request of JSON-RPC 2.0 with a method")
    parameters = message.get("params") or {}
    if method == "initialize":
        asked = parameters.get("protocolVersion")
        version = asked if asked in _VERSIONS else _VERSIONS[0]
        about = {"name": "mua", "version": mua.__version__}
        return _result(number, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about})
    if method == "ping":
        return _result(number, {})
    if method == "tools/list":
        tools = [
            {"name": tool.name, "description": tool.description, "inputSchema": tool.parameters}
            for tool in host.tools()
        ]
        return _result(number, {"tools": tools})
    if method == "tools/call":
        name, arguments = parameters.get("name"), parameters.get("arguments") or {}
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return _error(number, _BAD_PARAMETERS, "tools/call needs a name and arguments (an object)")
        try:
            result = await host.call_tool(name, arguments)
        except Refused as refused:
            result = {"text": f"error: {refused}", "error": True}
        return _result(number, {"content": [{"type": "text", "text": result["text"]}], "isError": result["error"]})
    return _error(number, _NO_METHOD, f"the method {method[:40]!r} is not served")


def _result(number: Any, result: Json) -> Json:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def _error(number: Any, code: int, message: str) -> Json:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}
