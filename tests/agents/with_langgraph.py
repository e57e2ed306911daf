"""The domain's agent with langgraph's prebuilt agent over langchain-openai, streaming its turns."""

from typing import Any

from desk import TASK, call_tool, tell_user
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def tool(schema: dict[str, Any]) -> StructuredTool:
    def run(**arguments: Any) -> str:
        return call_tool(schema["name"], arguments)

    return StructuredTool.from_function(
        run, name=schema["name"], description=schema["description"] or "A tool.", args_schema=schema["parameters"]
    )


agent = create_react_agent(
    ChatOpenAI(model="policy", temperature=0, streaming=True),
    [tool(one["function"]) for one in TASK["tools"]],
    prompt=TASK["instructions"],
)
said: str | None = TASK["user"]
messages: list[Any] = []
while said is not None:
    result = agent.invoke({"messages": [*messages, {"role": "user", "content": said}]}, {"recursion_limit": 60})
    messages = result["messages"]
    said = tell_user(str(messages[-1].content) or "...")
