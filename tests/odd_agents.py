"""Agents for the tests of the gateway, most of them bad ones; ``agent.function`` names them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from mua.rollout.external import AgentTask

SEEN: list[Any] = []
"""What agents leave for their test."""


class Wire:
    """Plain requests with the session's key."""

    def __init__(self, task: AgentTask, http: aiohttp.ClientSession) -> None:
        self.task = task
        self.http = http

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        sent = {"Authorization": f"Bearer {self.task.api_key}", **headers}
        async with self.http.post(self.task.base_url + path, json=body, headers=sent) as response:
            return response.status, await response.json()

    async def chat(self, *messages: Any, **body: Any) -> tuple[int, Any]:
        return await self.post("/chat/completions", {"messages": messages, **body})


def opening(task: AgentTask) -> list[Any]:
    found = task.task
    return [{"role": "system", "content": found["instructions"]}, {"role": "user", "content": found["user"]}]


async def good(task: AgentTask) -> None:
    """What the built-in agent does, over HTTP."""
    async with aiohttp.ClientSession() as http:
        wire, messages = Wire(task, http), opening(task)
        while True:
            status, answer = await wire.chat(*messages, tools=task.task["tools"])
            assert status == 200, answer
            message = answer["choices"][0]["message"]
            messages.append(message)
            for call in message.get("tool_calls", ()):
                body = {"arguments": json.loads(call["function"]["arguments"])}
                _, result = await wire.post(f"/episode/tools/{call['function']['name']}", body)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result["text"]})
                if result["ended"]:
                    return
            if not message.get("tool_calls"):
                _, reply = await wire.post("/episode/user", {"text": message["content"]})
                if reply["stop"]:
                    return
                messages.append({"role": "user", "content": reply["text"]})


async def forks(task: AgentTask) -> None:
    """Asks the same twice, goes on from the first answer in two ways, and writes what it likes where it may."""
    async with aiohttp.ClientSession() as http:
        wire, messages, tools = Wire(task, http), opening(task), task.task["tools"]
        odd = {"model": "m\0" * 500, "stop": ["zzz\0"], "temperature": 0.1}
        _, answer = await wire.chat(*messages, tools=tools, **odd)
        await wire.chat(*messages, tools=tools)
        said = answer["choices"][0]["message"]
        for words in ("Hello?", "Are you there?"):
            await wire.chat(*messages, said, {"role": "user", "content": words}, tools=tools)


async def odd_requests(task: AgentTask) -> None:
    """Foreign keys, 10 MB, no JSON, an unknown path, a stream that is hung up and asked for again."""
    async with aiohttp.ClientSession() as http:
        wire = Wire(task, http)
        url = f"{task.base_url}/chat/completions"
        for key in ("", "Bearer mua-guess", f"Basic {task.api_key}", f"Bearer {task.api_key}x"):
            async with http.post(url, json={"messages": opening(task)}, headers={"Authorization": key}) as response:
                SEEN.append((response.status, (await response.json())["error"]["code"]))
        own = task.base_url.replace("/v1", f"/session/{task.api_key}/v1") + "/models"
        for sent in ({}, {"Authorization": "Bearer none"}, {"Authorization": "Bearer mua-of-another-session"}):
            async with http.get(own, headers=sent) as response:
                SEEN.append(response.status)
        SEEN.append((await wire.chat({"role": "user", "content": "x" * 10_000_000}))[0])
        SEEN.append((await wire.post("/chat/completions", [1]))[0])
        SEEN.append((await wire.post("/nothing", {}))[0])
        SEEN.append((await wire.post("/episode/report", {"reward": 1}))[0])
        body = {"messages": opening(task), "stream": True}
        headers = {"Authorization": f"Bearer {task.api_key}"}
        response = await http.post(url, json=body, headers=headers)
        await response.content.readany()
        response.close()
        status, _ = await wire.chat(*opening(task))
        SEEN.append(status)
        retry = await http.post(url, json=body, headers={**headers, "x-stainless-retry-count": "1"})
        SEEN.append((await retry.text()).count("data: [DONE]"))


async def other_tools(task: AgentTask) -> None:
    async with aiohttp.ClientSession() as http:
        wire = Wire(task, http)
        await wire.chat(*opening(task))
        for _ in range(5):
            SEEN.append((await wire.post("/episode/tools/launch", {"arguments": {}}))[1])


async def floods(task: AgentTask) -> None:
    async with aiohttp.ClientSession() as http:
        wire = Wire(task, http)
        await wire.chat(*opening(task))
        SEEN.extend(await asyncio.gather(*(wire.post("/episode/tools/get_order", {}) for _ in range(200))))


async def crashes_on_a_turn(task: AgentTask) -> None:
    async with aiohttp.ClientSession() as http:
        await Wire(task, http).chat(*opening(task))
    raise ValueError("what the model says is no JSON")


async def crashes_on_a_tool(task: AgentTask) -> None:
    async with aiohttp.ClientSession() as http:
        wire = Wire(task, http)
        await wire.chat(*opening(task))
        await wire.post("/episode/tools/get_order", {"arguments": {"order": "1"}})
    raise ValueError("cannot read the tool's answer")


async def leaves_early(task: AgentTask) -> None:
    async with aiohttp.ClientSession() as http:
        await Wire(task, http).chat(*opening(task))


async def asks_on_and_on(task: AgentTask) -> None:
    async with aiohttp.ClientSession() as http:
        wire, status = Wire(task, http), 200
        while status == 200:
            status, answer = await wire.chat(*opening(task))
        SEEN.append(answer["error"]["code"])
    raise RuntimeError("the endpoint refuses")


async def reports(task: AgentTask) -> dict[str, float]:
    async with aiohttp.ClientSession() as http:
        await Wire(task, http).chat(*opening(task))
    return {"reward": 0.25}


async def reports_no_number(task: AgentTask) -> None:
    async with aiohttp.ClientSession() as http:
        wire = Wire(task, http)
        await wire.chat(*opening(task))
        for reward in ("NaN", None, True, 1e300):
            SEEN.append((await wire.post("/episode/report", {"reward": reward}))[0])
        raw = b'{"reward": NaN}'
        headers = {"Authorization": f"Bearer {task.api_key}"}
        async with http.post(f"{task.base_url}/episode/report", data=raw, headers=headers) as response:
            SEEN.append(response.status)


def in_a_thread(task: AgentTask) -> None:
    """A plain function, with the client that users have."""
    import openai

    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key)
    answer = client.chat.completions.create(model="m", messages=opening(task))
    SEEN.append(answer.choices[0].message.content)
    with client.chat.completions.create(
        model="m", messages=opening(task), stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    SEEN.append("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
    SEEN.append(chunks[-1].usage.completion_tokens > 0)
    response = client.responses.create(model="m", instructions="Help.", input="Hello", max_output_tokens=50)
    SEEN.append(response.output_text)
    more = client.responses.create(
        model="m",
        instructions="Help.",
        input=[{"role": "user", "content": "Hello"}, *response.output, {"role": "user", "content": "On"}],
    )
    SEEN.append(more.output_text)
    asked = [{"role": "user", "content": "Hello"}, *response.output, {"role": "user", "content": "Go on"}]
    with client.responses.stream(model="m", instructions="Help.", input=asked) as events:
        kinds = [event.type for event in events]
        SEEN.append((kinds[0], kinds[-1], events.get_final_response().output_text))
    SEEN.append(client.models.list().data[0].id)


async def over_mcp(task: AgentTask) -> None:
    """The domain's tools through the SDK's own client."""
    from mcp import ClientSession
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    async with aiohttp.ClientSession() as plain:
        await Wire(task, plain).chat(*opening(task))
    headers = {"Authorization": f"Bearer {task.api_key}"}

    async with (
        create_mcp_http_client(headers=headers) as http,
        streamable_http_client(f"{task.episode_url}/mcp", http_client=http) as streams,
        ClientSession(streams[0], streams[1]) as client,
    ):
        await client.initialize()
        SEEN.append([tool.name for tool in (await client.list_tools()).tools])
        SEEN.append((await client.call_tool("get_order", {"order": "no"})).content[0].text)
        SEEN.append((await client.call_tool("launch", {})).is_error)


async def runs_programs(task: AgentTask) -> None:
    """The sandboxed tools, by MCP and as the plain tool of an episode."""
    from mcp import ClientSession
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    async with aiohttp.ClientSession() as plain:
        wire = Wire(task, plain)
        await wire.chat(*opening(task))
        _, result = await wire.post("/episode/tools/shell", {"arguments": {"command": "echo kept > file"}})
        SEEN.append(result["text"])
    async with (
        create_mcp_http_client(headers={"Authorization": f"Bearer {task.api_key}"}) as http,
        streamable_http_client(f"{task.episode_url}/mcp", http_client=http) as streams,
        ClientSession(streams[0], streams[1]) as client,
    ):
        await client.initialize()
        SEEN.append([tool.name for tool in (await client.list_tools()).tools][-2:])
        answer = await client.call_tool("python", {"code": "print(open('file').read())"})
        SEEN.append(answer.content[0].text)


async def repeats_ids(task: AgentTask) -> None:
    """The same ids twice and at once, over MCP and over plain requests, and as another client."""
    async with aiohttp.ClientSession() as http:
        wire = Wire(task, http)
        await wire.chat(*opening(task))

        async def rpc(number: Any, session: str = "", name: str = "get_order", **arguments: Any) -> Any:
            params = {"name": name, "arguments": arguments}
            message = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}
            _, answer = await wire.post("/episode/mcp", message, **{"Mcp-Session-Id": session})
            return answer.get("result", answer)["content"][0]["text"]

        SEEN.append(await asyncio.gather(*(rpc(1, order="X") for _ in range(3))))
        SEEN.append(await rpc("1", order="X"))
        SEEN.append(await rpc(1, order="Y"))
        SEEN.append(await rpc(1, "another client", order="Y"))
        for body in ({"call_id": "c", "arguments": {"order": "X"}}, {"call_id": "c", "arguments": {"order": "Y"}}):
            SEEN.append([(await wire.post("/episode/tools/get_order", body))[0] for _ in range(2)])


async def hangs_up(task: AgentTask) -> None:
    """Leaves before the answer, comes back for another turn, and is told what it does not get."""
    async with aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {task.api_key}"}
        body = {"messages": [*opening(task), {"role": "user", "content": "slow"}]}
        try:
            async with asyncio.timeout(0.2):
                await http.post(f"{task.base_url}/chat/completions", json=body, headers=headers)
        except TimeoutError:
            SEEN.append("left")
        await asyncio.sleep(0.5)
        body = {"messages": opening(task), "temperature": 0.3, "stop": "x", "stream": False}
        async with http.post(f"{task.base_url}/chat/completions", json=body, headers=headers) as response:
            SEEN.append(response.headers.get("x-mua-overridden"))
            await response.json()
