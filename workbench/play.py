"""A person in the terminal as the agent, or as the user, of one task; the rest is as in a rollout.

As the agent one types texts to the user and tool calls; the domain's scripted user answers. As the user one talks with
the domain's expert, or with its gold moves where it has none. The verdict and what differs from gold stand at the end.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TextIO, TypeAlias

from environments.kit import demonstrate
from environments.kit.demonstrate import Moves
from mua.config.schema import EnvironmentConfig
from mua.environment.domain import Domain, moves_of
from mua.environment.protocol import Move, Split, Task, UserMove
from mua.environment.selection import Selection
from mua.environment.user import STOP_SIGNAL, ToolUser, User, UserReply, UserTools
from mua.rollout.episode import EpisodeResult
from mua.types import Json, ToolSchema
from mua.utils.errors import ConfigError
from mua.utils.strict_json import JsonError, read_json

Role = Literal["agent", "user"]
HELP = """\
  some text               say it
  /tool NAME {"a": 1}     call a tool with JSON arguments; /NAME {"a": 1} does the same
  /tools                  list the tools
  /help                   this
  /quit                   end here"""


def play(config: EnvironmentConfig, task: str | None, split: Split, seed: int, role: Role) -> EpisodeResult:
    """Play one task on standard input and output. Raises :class:`ConfigError` for what there is not."""
    selection = Selection.from_config(config)
    chosen = pick(selection.domains[config.name], task, split, seed)
    return asyncio.run(_played(selection, chosen, seed, role, Terminal(sys.stdin, sys.stdout)))


def pick(domain: Domain, task: str | None, split: Split, seed: int) -> Task:
    """The task called ``task`` in any split; without a name the ``seed``-th of ``split``, counting round."""
    if task is None:
        tasks = domain.tasks(split)
        if not tasks:
            raise ConfigError(f"domain {domain.name!r} has no {split} tasks; choose another --split, or give it --data")
        return tasks[seed % len(tasks)]
    splits: tuple[Split, ...] = ("train", "validation", "test")
    known = {found.id: found for one in splits for found in domain.tasks(one)}
    if task not in known:
        near = difflib.get_close_matches(task, list(known), n=3, cutoff=0.3)
        raise ConfigError(f"domain {domain.name!r} has no task {task!r}; near: {', '.join(near) or 'none'}")
    return known[task]


class Terminal:
    """Lines from a person and to it."""

    def __init__(self, source: TextIO, target: TextIO) -> None:
        self._source = source
        self._target = target

    def show(self, who: str, text: str) -> None:
        """One utterance."""
        print(f"{who}: {text}", file=self._target)

    def title(self, text: str) -> None:
        """The start of a part."""
        print(f"\n--- {text} ---", file=self._target)

    def line(self, text: str) -> None:
        """A line of its own."""
        print(text, file=self._target)

    def ask(self, prompt: str) -> str | None:
        """What the person types next that is not empty; None at the end of the input."""
        while True:
            print(f"{prompt}> ", end="", file=self._target, flush=True)
            if not (line := self._source.readline()):
                print(file=self._target)
                return None
            if line.strip():
                return line.strip()

    def move(self, prompt: str, tools: Sequence[ToolSchema]) -> Move | None:
        """A text, or a tool call that can be made; None when the person ends it."""
        while (line := self.ask(prompt)) is not None and line != "/quit":
            if not line.startswith("/"):
                return line
            if (call := self._command(line[1:], tools)) is not None:
                return call
        return None

    def _command(self, line: str, tools: Sequence[ToolSchema]) -> Move | None:
        word, _, rest = line.partition(" ")
        if word == "tool":
            word, _, rest = rest.strip().partition(" ")
        elif word in ("tools", "help"):
            self.line(HELP if word == "help" else "\n".join(map(signature, tools)) or "  there are no tools")
            return None
        if word not in (known := [tool.name for tool in tools]):
            near = difflib.get_close_matches(word, known, n=1)
            self.line(
                f"  there is no tool {word!r}" + (f"; did you mean {near[0]}?" if near else "; see /tools, /help")
            )
            return None
        try:
            arguments = read_json(rest or "{}")
        except JsonError as error:
            self.line(f"  the arguments are no JSON: {error}")
            return None
        if not isinstance(arguments, dict):
            self.line('  the arguments are a JSON object, such as {"order": "W1"}')
            return None
        return word, arguments


async def _played(selection: Selection, task: Task, seed: int, role: Role, terminal: Terminal) -> EpisodeResult:
    domain = selection.domain(task)

    def person(opening: str, tools: Sequence[ToolSchema]) -> Moves:
        while (move := terminal.move("agent", tools)) is not None:
            answer = yield move
            if not isinstance(move, str):
                terminal.show("tool", answer)

    def scripted(opening: str, tools: Sequence[ToolSchema]) -> Moves:
        moves = moves_of(domain, task, seed)
        answer: str | None = None
        while True:
            try:
                move = next(moves) if answer is None else moves.send(answer)
            except StopIteration:
                return terminal.line("(the agent has nothing left to do)")
            except Exception as error:
                return terminal.line(f"(the agent by rules does not know how to go on: {error!r})")
            if not isinstance(move, str):
                who = "you do" if isinstance(move, UserMove) else "agent calls"
                terminal.show(who, f"{move[0]} {json.dumps(move[1])}")
            answer = yield move
            if not isinstance(move, str):
                terminal.show("tool", answer)

    facts = [str(task.data[key]) for key in ("kind", "difficulty") if key in task.data]
    terminal.line(f"task {task.id} ({', '.join([task.split, *facts])}), seed {seed}")
    if role == "agent":
        terminal.title("You are the agent (/help tells what to type)")
        terminal.line(selection.system_prompt(task).strip())
    else:
        terminal.title("You are the user; say what you want first (/help tells what to type)")
        terminal.line(domain.persona(task).strip())
    terminal.title("conversation")
    user = PersonUser(terminal) if role == "user" else _HeardUser(domain.scripted_user(task, seed), terminal)
    found = await demonstrate.play(domain, task, seed, person if role == "agent" else scripted, user)
    terminal.title("verdict")
    terminal.line(f"reward {round(found.reward, 4):g}, {'success' if found.evaluation.success else 'no success'}")
    for line in differences(found.evaluation.details):
        terminal.line(f"  {line}")
    return found


Waited: TypeAlias = Callable[[Callable[[], Move | None]], Awaitable[Move | None]]


async def _at_once(ask: Callable[[], Move | None]) -> Move | None:
    return ask()


class PersonUser:
    """A person as the user. Implements :class:`mua.environment.user.User` and ``ToolUser``."""

    def __init__(self, terminal: Terminal, waited: Waited = _at_once) -> None:
        """``waited`` waits for what is asked of the person; by default nothing else goes on meanwhile."""
        self._terminal = terminal
        self._waited = waited
        self._tools: UserTools | None = None

    def take_tools(self, tools: UserTools) -> None:
        self._tools = tools

    async def open(self) -> UserReply:
        return await self._said()

    async def reply(self, agent_text: str) -> UserReply:
        self._terminal.show("agent", agent_text)
        return await self._said()

    async def close(self) -> None:
        return None

    async def _said(self) -> UserReply:
        schemas = self._tools.schemas() if self._tools is not None else ()
        while (move := await self._waited(lambda: self._terminal.move("you", schemas))) is not None:
            if isinstance(move, str):
                return UserReply(move, stop=STOP_SIGNAL in move)
            assert self._tools is not None, "no call gets through without schemas"
            self._terminal.show("tool", (await self._tools.call(*move)).text)
        return UserReply(STOP_SIGNAL, stop=True)


class _HeardUser:
    """Another user whose words and deeds are shown."""

    def __init__(self, inner: User, terminal: Terminal) -> None:
        self._inner = inner
        self._terminal = terminal

    def take_tools(self, tools: UserTools) -> None:
        if isinstance(self._inner, ToolUser):
            self._inner.take_tools(tools)

    async def open(self) -> UserReply:
        return self._shown(await self._inner.open())

    async def reply(self, agent_text: str) -> UserReply:
        return self._shown(await self._inner.reply(agent_text))

    async def close(self) -> None:
        await self._inner.close()

    def _shown(self, reply: UserReply) -> UserReply:
        self._terminal.show("user", reply.text)
        return reply


def signature(tool: ToolSchema) -> str:
    """One line a tool: its name, its arguments (optional ones in brackets) and what it does."""
    required = tool.parameters.get("required", ())
    names = [name if name in required else f"[{name}]" for name in tool.parameters.get("properties", {})]
    return f"  {tool.name}({', '.join(names)})  {tool.description}"


def differences(details: Json) -> list[str]:
    """What a verdict's details say, one line each; the difference of databases field by field."""
    lines = []
    for key, value in details.items():
        if isinstance(value, dict) and {"wrong", "missing", "extra"} <= value.keys():
            fields = [(kind, path, at) for kind in ("wrong", "missing", "extra") for path, at in value[kind].items()]
            lines += [f"{kind}: {path} {_told(at)}" for kind, path, at in fields] or [f"{key}: equals gold"]
        else:
            lines.append(f"{key}: {json.dumps(value)}")
    return lines


def _told(at: Json) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {json.dumps(value)}" for key, value in at.items())
