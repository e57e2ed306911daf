"""The domain's agent with openai-agents. DESK_API: chat, or responses (its default); DESK_STREAM: in streams."""

import asyncio
import json
import os
from typing import Any

from agents import Agent, FunctionTool, ModelSettings, OpenAIChatCompletionsModel, RunContextWrapper, Runner
from desk import TASK, call_tool, tell_user
from openai import AsyncOpenAI


def tool(schema: dict[str, Any]) -> FunctionTool:
    async def invoke(context: RunContextWrapper[Any], arguments: str) -> str:
        return await asyncio.to_thread(call_tool, schema["name"], json.loads(arguments or "{}"))

    return FunctionTool(
        name=schema["name"],
        description=schema["description"],
        params_json_schema=schema["parameters"],
        on_invoke_tool=invoke,
        strict_json_schema=False,
    )


async def main() -> None:
    chat = os.environ.get("DESK_API") != "responses"
    model = OpenAIChatCompletionsModel("policy", AsyncOpenAI()) if chat else "policy"
    agent = Agent(
        name="Clerk",
        instructions=TASK["instructions"],
        tools=[tool(one["function"]) for one in TASK["tools"]],
        model=model,
        model_settings=ModelSettings(temperature=0.3),
    )
    said: str | None = TASK["user"]
    history: list[Any] = []
    while said is not None:
        asked = [*history, {"role": "user", "content": said}]
        if os.environ.get("DESK_STREAM"):
            result: Any = Runner.run_streamed(agent, asked, max_turns=20)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, asked, max_turns=20)
        history = result.to_input_list()
        said = await asyncio.to_thread(tell_user, str(result.final_output) or "...")


asyncio.run(main())
