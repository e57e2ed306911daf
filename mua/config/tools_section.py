"""The section ``environment.tools``: tools of this program that the policy gets beside those of the domain."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from mua.config.mcp import TOOL_NAME
from mua.config.sandbox_section import SandboxConfig
from mua.config.section import Section

ProgramKind = Literal["python", "shell"]


class SandboxedTool(Section):
    """How the policy knows a tool that runs programs in the rollout's sandbox; ``{}`` for the defaults."""

    name: str = ""
    """Empty: the name of its key."""
    description: str = ""
    """What the policy is told of it; empty: what it does and within which limits."""

    @model_validator(mode="after")
    def _name(self) -> Self:
        if self.name and not TOOL_NAME.fullmatch(self.name):
            raise ValueError(f"name {self.name!r}: at most 64 letters, digits, - and _")
        return self


class ToolsConfig(Section):
    """Which tools, for which domains."""

    python: SandboxedTool | None = None
    """Runs a Python program; null: not offered."""
    shell: SandboxedTool | None = None
    """Runs a command of the shell in the same sandbox; null: not offered."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where both run. Each rollout has a sandbox of its own, which ends with it."""
    domains: list[str] = []
    """Only tasks of these domains get the tools; empty: all."""

    @property
    def sandboxed(self) -> dict[ProgramKind, SandboxedTool]:
        """Those that run in a sandbox, with their names."""
        given: dict[ProgramKind, SandboxedTool | None] = {"python": self.python, "shell": self.shell}
        return {
            kind: tool.model_copy(update={"name": tool.name or kind})
            for kind, tool in given.items()
            if tool is not None
        }

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [tool.name for tool in self.sandboxed.values()]
        if len(set(names)) < len(names):
            raise ValueError(f"python and shell are both called {names[0]!r}; give one of them another name")
        if not names and self.sandbox != SandboxConfig():
            raise ValueError("sandbox has no tool that runs in it; add python: {} or shell: {}")
        return self
