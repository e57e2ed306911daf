"""The tools ``python`` and ``shell`` beside a domain's: programs of the policy in its rollout's sandbox.

::

    start() ──► a first sandbox: can there be any?
    open()  ──► SandboxSession ── first call ──► takes a sandbox ──► further calls, files kept ──► close(): gone

Whatever a program does is a result, also where the sandbox ends with it: the next call gets a fresh one, and is told
so. What is no program's doing, a sandbox that does not start or ends between two calls, is a :class:`SandboxFault`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mua.config.tools import ProgramKind, SandboxedTool, ToolsConfig
from mua.environment.extras import ExtraTool, ExtraToolFault, ExtraToolsNotStarted
from mua.environment.protocol import Task, ToolResult
from mua.sandbox.box import Sandbox, SandboxResult, ending
from mua.sandbox.stock import SandboxStock
from mua.types import Json, ToolSchema
from mua.utils.errors import EnvironmentFault

FRESH = "[a fresh sandbox: the files of the one before are gone]"
_ARGUMENTS: dict[ProgramKind, tuple[str, str]] = {
    "python": ("code", "A whole program; what it prints is the result."),
    "shell": ("command", "Run by bash in the working folder; what it prints is the result."),
}
_DOES: dict[ProgramKind, str] = {
    "python": "Run a Python program in a sandbox and get what it prints. Variables are not kept between calls",
    "shell": "Run a shell command in a sandbox and get what it prints",
}


class SandboxFault(ExtraToolFault):
    """A sandbox failed by no doing of the policy."""


class SandboxesNotStarted(ExtraToolsNotStarted):
    """The first sandbox did not start."""


class SandboxTools:
    """The sandboxed tools of ``environment.tools``; see :class:`mua.environment.extras.ExtraTools`."""

    def __init__(self, config: ToolsConfig) -> None:
        """Raises :class:`ConfigError` where the backend is not on this machine."""
        self._kinds = {tool.name: kind for kind, tool in config.sandboxed.items()}
        self._offered = [
            ExtraTool(_schema(kind, tool, config), f"environment.tools.{kind}", f"set environment.tools.{kind}.name")
            for kind, tool in config.sandboxed.items()
        ]
        self._stock = SandboxStock(config.sandbox)

    async def start(self) -> Sequence[ExtraTool]:
        """Start a first sandbox. Raises :class:`SandboxesNotStarted`."""
        try:
            await self._stock.start()
        except EnvironmentFault as fault:
            raise SandboxesNotStarted(f"environment.tools: {fault}", passing=False) from fault
        return self._offered

    async def open(self, task: Task, seed: int) -> SandboxSession:
        """For one rollout; its sandbox comes with its first call."""
        return SandboxSession(self._offered, self._kinds, self._stock)

    async def close(self) -> None:
        """End the sandboxes that no rollout took."""
        await self._stock.close()


class SandboxSession:
    """One rollout's sandbox; see :class:`mua.environment.extras.ExtraSession`."""

    def __init__(self, offered: Sequence[ExtraTool], kinds: dict[str, ProgramKind], stock: SandboxStock) -> None:
        self.tools = offered
        self._kinds = kinds
        self._stock = stock
        self._sandbox: Sandbox | None = None
        self._lost = False

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """Run a program. Raises :class:`SandboxFault`."""
        kind = self._kinds[name]
        key = _ARGUMENTS[kind][0]
        if not isinstance(program := arguments.get(key), str):
            return ToolResult(f"error: {key} has to be a text", error=True)
        if self._sandbox is None:
            try:
                self._sandbox = await self._stock.take()
            except EnvironmentFault as fault:
                raise SandboxFault(str(fault)) from fault
        elif not self._sandbox.alive:
            raise SandboxFault(f"the sandbox ended between two calls: {self._sandbox.last_words()}")
        result = await self._sandbox.run(kind, program)
        told = f"{FRESH}\n{told_of(result)}" if self._lost else told_of(result)
        self._lost = result.lost
        if result.lost:
            await self.close()
        return ToolResult(told, error=result.code != 0 or bool(result.fault))

    async def close(self) -> None:
        """End the sandbox, and everything in it."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()


def told_of(result: SandboxResult) -> str:
    """What the policy reads: the output, and how the program ended where that was not well."""
    end = ""
    if result.fault:
        end = f"[{result.fault}]"
    elif result.code:
        end = f"[{ending(result.code)}]"
    if result.lost:
        end += " [its files are gone; the next call gets a fresh one]"
    if not result.output:
        return end or "(no output)"
    return result.output if not end else f"{result.output.removesuffix('\n')}\n{end}"


def _schema(kind: ProgramKind, tool: SandboxedTool, config: ToolsConfig) -> ToolSchema:
    argument, about = _ARGUMENTS[kind]
    box = config.sandbox
    network = "with access to the network" if box.network else "without network"
    said = tool.description or (
        f"{_DOES[kind]}. It is {network}; files in /work stay until the conversation ends. A call may take "
        f"{box.call_seconds:g} s, {box.memory_mib} MiB of memory and {box.disk_mib} MiB of files."
    )
    properties = {argument: {"type": "string", "description": about}}
    return ToolSchema(tool.name, said, {"type": "object", "properties": properties, "required": [argument],
                                        "additionalProperties": False})  # fmt: skip
