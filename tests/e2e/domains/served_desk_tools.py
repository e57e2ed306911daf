"""The help desk's tools as a server of the SDK, over standard input and output: a look-up answers, a change is noted.

Takes any arguments, because a barely trained policy seldom finds the right ones.
"""

from __future__ import annotations

import anyio
import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from environments.help_desk import DOMAIN
from environments.help_desk.tools import HelpDesk

DESK = HelpDesk()
DESK.reset(DOMAIN.tasks("train")[0], 0)
TOOLS = [
    types.Tool(name=tool.name, description=tool.description, input_schema={"type": "object"}) for tool in DESK.tools()
]


async def listed(_: object, __: object) -> types.ListToolsResult:
    return types.ListToolsResult(tools=TOOLS)


async def called(_: object, request: types.CallToolRequestParams) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=f"{request.name}: noted")])


async def main() -> None:
    server = Server("desk", on_list_tools=listed, on_call_tool=called)
    async with stdio_server() as (heard, said):
        await server.run(heard, said, server.create_initialization_options())


if __name__ == "__main__":
    anyio.run(main)
