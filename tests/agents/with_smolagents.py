"""The domain's agent with smolagents: calls as text, a final answer as a tool."""

from typing import Any, ClassVar

from desk import TASK, call_tool, tell_user
from smolagents import OpenAIServerModel, Tool, ToolCallingAgent


def tool(schema: dict[str, Any]) -> Tool:
    class Named(Tool):  # type: ignore[misc]
        skip_forward_signature_validation = True
        name = schema["name"]
        description = schema["description"] or "A tool."
        inputs: ClassVar = {
            key: {"type": "any", "description": str(value.get("description") or key), "nullable": True}
            for key, value in schema["parameters"].get("properties", {}).items()
        }
        output_type = "string"

        def forward(self, **arguments: Any) -> str:
            return call_tool(schema["name"], {key: value for key, value in arguments.items() if value is not None})

    return Named()


def main(kind: Any) -> None:
    """Play the episode with an agent of ``kind``."""
    agent = kind(
        tools=[tool(one["function"]) for one in TASK["tools"]],
        model=OpenAIServerModel("policy"),
        instructions=TASK["instructions"],
        max_steps=20,
        verbosity_level=0,
    )
    said: str | None = TASK["user"]
    first = True
    while said is not None:
        answer = agent.run(said, reset=first)
        first = False
        said = tell_user(str(answer))


if __name__ == "__main__":
    main(ToolCallingAgent)
