"""The user by rules on official data: has a phone, and does with it what the agent names.

Official scenarios are free text, so that nothing tells by rules what the user would do unasked. This one tells what it
is asked for (:mod:`environments._tau.user`) and does, in order, each of the phone's tools that a message of the agent
names, with an underscore or a space between the words (``toggle_roaming``, "toggle roaming"); it says what the phone
shows. For trying the data offline; a measurement wants a user that plays its part (``user.kind: llm``).

An argument is the first of the values that its schema or :data:`KNOWN` has which stands in the rest of the message
behind the tool's name, up to the next tool; without one the user asks which is meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from environments._tau.user import InstructedUser
from mua.environment.user import UserReply, UserTools
from mua.types import Json, ToolSchema

KNOWN: dict[str, Sequence[str]] = {
    "app_name": ("messaging", "browser"),
    "permission": ("sms", "storage", "phone", "network"),
}
"""Values of arguments whose schema lists none."""
MOST_CALLS = 10
"""Tools used for one message; what else it names is left."""


class DirectedUser(InstructedUser):
    """A :class:`InstructedUser` with tools. Implements :class:`mua.environment.user.ToolUser`."""

    def __init__(self, instruction: str, domain: str, seed: int = 0) -> None:
        super().__init__(instruction, domain, seed)
        self._tools: UserTools | None = None

    def take_tools(self, tools: UserTools) -> None:
        self._tools = tools

    async def reply(self, agent_text: str) -> UserReply:
        done = await self._done(agent_text) if self._tools is not None else []
        if not done:
            return await super().reply(agent_text)
        self._left -= 1
        return UserReply("\n".join(done)) if self._left >= 0 else await super().reply(agent_text)

    async def _done(self, agent_text: str) -> list[str]:
        assert self._tools is not None
        said = []
        for schema, rest in list(named(agent_text, self._tools.schemas()))[:MOST_CALLS]:
            arguments = _arguments(schema, rest)
            if arguments is None:
                said.append(f"For {schema.name.replace('_', ' ')}: which one?")
                continue
            result = await self._tools.call(schema.name, arguments)
            said.append(f"I did {schema.name.replace('_', ' ')}. {result.text}")
        return said


def named(agent_text: str, schemas: Sequence[ToolSchema]) -> Iterator[tuple[ToolSchema, str]]:
    """Each tool that a message names, in order, with what follows up to the next one."""
    by_name = {schema.name: schema for schema in schemas}
    names = "|".join(re.escape(name).replace("_", "[_ ]") for name in sorted(by_name, key=len, reverse=True))
    found = list(re.finditer(rf"\b(?:{names})\b", agent_text, re.IGNORECASE)) if names else []
    ends = [match.start() for match in found[1:]] + [len(agent_text)]
    for match, end in zip(found, ends, strict=False):
        yield by_name[match[0].lower().replace(" ", "_")], agent_text[match.end() : end]


def _arguments(schema: ToolSchema, rest: str) -> Json | None:
    """None where a needed argument is not said."""
    found: Json = {}
    for name in schema.parameters["required"]:
        values: Sequence[str] = schema.parameters["properties"][name].get("enum") or KNOWN.get(name, ())
        places = [(match.start(), value) for value in values if (match := _word(value).search(rest))]
        if not places:
            return None
        found[name] = min(places)[1]
    return found


def _word(value: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(value)}(?!\w)", re.IGNORECASE)
