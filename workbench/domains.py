"""What is registered: every domain with its tasks by split, tools and traits. A broken one is shown as broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import get_args

from mua.environment.domain import Domain
from mua.environment.protocol import Split
from mua.environment.registry import domain_names, get_domain
from mua.types import Json

SPLITS: tuple[Split, ...] = get_args(Split)
NO_GROUP = "domains"
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered domain."""

    name: str
    group: str
    """The folder it is in, such as ``gyms``; ``domains`` outside any."""
    tasks: dict[Split, int] = field(default_factory=dict)
    tools: list[str] = field(default_factory=list)
    """Names of the policy's tools in its first task."""
    isolation: str = ""
    held_out: bool = False
    needs_data: bool = False
    fault: str | None = None
    """Why it cannot be used: what its import or its tasks raised."""

    def as_json(self) -> Json:
        """Everything, for ``mua env list --json``."""
        return asdict(self)


def entries() -> list[Entry]:
    """Every registered domain, by name. Imports them all; whatever one raises is its own entry's fault."""
    return [_entry(name) for name in domain_names()]


def table(found: Sequence[Entry]) -> str:
    """The entries for a person, one line each."""
    head = ("name", "group", *SPLITS, "tools", "isolation", "notes")
    rows = [head, *(_row(entry) for entry in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=False)] + [row[-1]] for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _entry(name: str) -> Entry:
    group = name.rpartition("/")[0] or NO_GROUP
    try:
        domain = get_domain(name)
    except (Exception, SystemExit) as error:
        return Entry(name, group, fault=_said(error))
    needs_data = bool(getattr(domain, "needs_data", False))
    held_out = bool(getattr(domain, "held_out", False))
    isolation = str(getattr(domain, "isolation", "thread"))
    entry = Entry(name, group, isolation=isolation, held_out=held_out, needs_data=needs_data)
    try:
        return replace(entry, tasks={split: len(domain.tasks(split)) for split in SPLITS}, tools=_tools(domain))
    except (Exception, SystemExit) as error:
        return replace(entry, fault=None if needs_data else _said(error))


def _tools(domain: Domain) -> list[str]:
    task = next((task for split in SPLITS for task in domain.tasks(split)[:1]), None)
    if task is None:
        return []
    environment = domain.environment()
    try:
        environment.reset(task, 0)
        return [tool.name for tool in environment.tools()]
    finally:
        environment.close()


def _row(entry: Entry) -> tuple[str, ...]:
    counts = [f"{entry.tasks[split]:,}" if entry.tasks else "-" for split in SPLITS]
    notes = ["held out"] * entry.held_out + ["needs data"] * entry.needs_data
    notes += [f"broken: {entry.fault}"] if entry.fault else []
    return entry.name, entry.group, *counts, str(len(entry.tools) or "-"), entry.isolation or "-", ", ".join(notes)


def _said(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
