"""Tasks of tau-bench as tasks of this project, and what the two benchmarks share: kind and difficulty."""

from __future__ import annotations

from collections.abc import Sequence

from mua.environment.protocol import Split, Task
from mua.types import Json
from mua.utils.errors import ConfigError

_READS = ("get_", "find_", "list_", "search_", "calculate", "think", "transfer_")
"""How the names of tools begin that leave both databases alone."""


def task_of(domain: str, split: Split, entry: Json, where: str) -> Task:
    """One line of a tasks file: gold actions, and ``outputs`` as statements. ConfigError names what ``where`` lacks."""
    for key, kind in (("id", str), ("instruction", str), ("actions", list)):
        if not isinstance(entry.get(key), kind):
            raise ConfigError(f"{where}: {key!r} must be a {'list' if kind is list else 'text'}")
    actions = [{"name": action["name"], "arguments": action["arguments"]} for action in entry["actions"]]
    data: Json = {
        **graded(actions),
        "instruction": entry["instruction"],
        "actions": actions,
        "statements": [[output] for output in entry.get("outputs") or []],
    }
    return Task(entry["id"], domain, split, data)


def graded(actions: Sequence[Json]) -> Json:
    """``kind``: the tool of the gold writes, "several" or "no_write"; ``difficulty`` by how many writes there are."""
    writes = [action["name"] for action in actions if not action["name"].startswith(_READS)]
    kind = writes[0] if len(set(writes)) == 1 else "several" if writes else "no_write"
    return {"kind": kind, "difficulty": "easy" if len(writes) <= 1 else "medium" if len(writes) <= 3 else "hard"}
