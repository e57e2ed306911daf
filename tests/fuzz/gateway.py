"""What clients send to the gateway: each body is answered, or refused in OpenAI's form with a status below 500.

Over real HTTP, with a session whose policy is a script. Not covered: what a turn becomes (test_gateway_sessions.py).
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import aiohttp

from mua.config.rollout import AgentConfig
from mua.rollout.gateway.serving import GatewayServer
from mua.rollout.gateway.session import GatewaySession, add_cut
from mua.types import Json, ToolSchema
from tests.fuzz._mutate import NASTY_TEXTS, drawn, mutated_bytes, mutated_json
from tests.rollout_fixtures import sampled_ids
from tests.tokens_fixtures import chat_family, generation

CASES = 2000
CHUNK = 100
_CALL = {"id": "c0", "type": "function", "function": {"name": "find", "arguments": '{"key": "a"}'}}
_PART = [{"type": "text", "text": "hm"}]
_SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
_FUNCTION = {"name": "find", "description": "Finds.", "parameters": _SCHEMA, "strict": True}
BODIES: dict[str, Json] = {
    "/chat/completions": {
        "model": "m", "messages": [
            {"role": "system", "content": "Help."}, {"role": "user", "content": _PART},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c0", "content": "row"}, {"role": "user", "content": "And?"},
        ],
        "tools": [{"type": "function", "function": _FUNCTION}], "tool_choice": {"function": {"name": "find"}},
        "stop": ["x"], "max_tokens": 5, "temperature": 0.5, "stream": True, "stream_options": {"include_usage": True},
        "parallel_tool_calls": False, "response_format": {"type": "text"}, "metadata": {"a": 1}, "n": 1,
    },
    "/responses": {
        "model": "m", "instructions": "Help.", "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hm"}]},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "c0", "name": "find", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c0", "output": _PART},
        ],
        "tools": [{"type": "function", **_FUNCTION}], "text": {"format": {"type": "text"}}, "max_output_tokens": 5,
    },
    "/episode/mcp": {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "find", "arguments": {}}},
    "/episode/tools/find": {"arguments": {"key": "a"}, "call_id": "c"},
    "/episode/user": {"text": "hello"},
    "/episode/report": {"reward": 0.5, "success": True},
}  # fmt: skip
_FAMILY = chat_family("qwen3", False)
_TOOL = ToolSchema("find", "Finds.", _SCHEMA)


class _Host:
    """A session with itself as episode: it says and does the same for everybody."""

    def __init__(self) -> None:
        limits = AgentConfig(command=["true"], max_requests=10**9, max_session_tokens=10**9)
        self.session = GatewaySession(_FAMILY, self.ask, self, limits, show_tools=True)  # type: ignore[arg-type]

    async def ask(self, talk: Any, call: Any, seed: Any, number: Any) -> Any:
        talk.prompt_ids()
        return add_cut(talk, generation(sampled_ids(_FAMILY, "One x two.")), call.stop, number())

    def task(self) -> Json:
        return {}

    def tools(self) -> list[ToolSchema]:
        return [_TOOL]

    async def call_tool(self, name: str, arguments: Json) -> Json:
        return {"text": json.dumps(arguments), "error": False, "ended": False}

    async def tell_user(self, text: str) -> Json:
        return {"text": text, "stop": False}

    def report(self, report: Json) -> None:
        return None

    def may_ask(self) -> None:
        return None

    def turned(self, *_: Any) -> None:
        return None

    def ended(self, outcome: Any) -> None:
        raise AssertionError(outcome)

    def failed(self, fault: Exception) -> None:
        return None


def run(cases: int, seed: int) -> list[str]:
    """Faults of ``cases`` bodies, one line each."""
    return asyncio.run(_run([(case, *_drawn(rng)) for case, rng in drawn("gateway", cases, seed)]))


def _drawn(rng: random.Random) -> tuple[str, bytes]:
    path = rng.choice([*BODIES])
    kind, body = rng.randrange(4), BODIES[path]
    if kind == 0:
        return path, mutated_bytes(json.dumps(body).encode(), rng)
    if kind == 1:
        key = rng.choice([*body])
        wrong = (None, 0, -1, 1.5, 10**30, True, "", "x", [], [[]], {}, [None], {"type": []}, rng.choice(NASTY_TEXTS))
        return path, json.dumps(body | {key: rng.choice(wrong)}).encode("utf-8", "surrogatepass")
    return path, mutated_json(body, rng).encode("utf-8", "surrogatepass")


async def _run(bodies: list[tuple[str, str, bytes]]) -> list[str]:
    server, found = GatewayServer(AgentConfig(command=["true"])), list[str]()
    await server.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
            for case, path, body in bodies:
                key = server.open_session(_Host().session)
                headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
                async with http.post(f"{server.url}/v1{path}", data=body, headers=headers) as response:
                    text = await response.text()
                    if response.status >= 500 or (response.status >= 400 and "error" not in text):
                        found.append(f"{case}: {path}: {response.status}: {body[:200]!a}")
                await server.close_session(key)
    finally:
        await server.close()
    return found
