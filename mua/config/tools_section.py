"""The section ``environment.tools``: tools of this program that the policy gets beside those of the domain."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from mua.config.mcp import TOOL_NAME
from mua.config.reading_section import BrowseTool, PagesConfig, ReadingTool, ReadPageTool, SearchTool, check_reading
from mua.config.sandbox_section import SandboxConfig
from mua.config.section import Section

ProgramKind = Literal["python", "shell"]
ReadingKind = Literal["read_page", "browse", "search"]


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
    read_page: ReadPageTool | None = None
    """Gives a page in parts; null: not offered."""
    browse: BrowseTool | None = None
    """Answers a question from a page; null: not offered. Needs the section ``judge``."""
    search: SearchTool | None = None
    """Finds pages; null: not offered."""
    pages: PagesConfig = PagesConfig()
    """What the three read (docs/reading.md)."""
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

    @property
    def reading(self) -> dict[ReadingKind, ReadingTool]:
        """Those that read pages, with their names."""
        given: dict[ReadingKind, ReadingTool | None] = {
            "read_page": self.read_page,
            "browse": self.browse,
            "search": self.search,
        }
        return {
            kind: tool.model_copy(update={"name": tool.name or kind})
            for kind, tool in given.items()
            if tool is not None
        }

    def _names(self) -> list[tuple[str, str]]:
        """Each tool's key and name."""
        sandboxed = [(kind, tool.name) for kind, tool in self.sandboxed.items()]
        return [*sandboxed, *((kind, tool.name) for kind, tool in self.reading.items())]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        kinds: dict[str, str] = {}
        for kind, name in self._names():
            if (first := kinds.setdefault(name, kind)) != kind:
                raise ValueError(f"{first} and {kind} are both called {name!r}; give one of them another name")
        check_reading(self.pages, self.read_page is not None or self.browse is not None, self.search)
        if not self.sandboxed and self.sandbox != SandboxConfig():
            raise ValueError("sandbox has no tool that runs in it; add python: {} or shell: {}")
        return self
