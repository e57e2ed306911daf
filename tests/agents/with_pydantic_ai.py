"""The domain's agent with pydantic-ai, over chat completions."""

import asyncio
from typing import Any

from desk import TASK, call_tool, tell_user
from pydantic_ai import Agent, Tool


def tool(schema: dict[str, Any]) -> Tool[None]:
    async def run(**arguments: Any) -> str:
        return await asyncio.to_thread(call_tool, schema["name"], arguments)

    return Tool.from_schema(run, schema["name"], schema["description"], schema["parameters"])


async def main() -> None:
    agent = Agent(
        "openai-chat:policy",
        system_prompt=TASK["instructions"],
        tools=[tool(one["function"]) for one in TASK["tools"]],
    )
    said: str | None = TASK["user"]
    history: list[Any] = []
    while said is not None:
        result = await agent.run(said, message_history=history)
        history = result.all_messages()
        said = await asyncio.to_thread(tell_user, str(result.output))


asyncio.run(main())
