"""Generated tasks pinned by a manifest: a silent change of a generator or a data file is an error, not a new benchmark.

A manifest is a JSON file beside the domain, ``{"train": {"tasks": 400, "sha256": ...}, "database": {"sha256": ...}}``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from mua.environment.protocol import Split, Task
from mua.types import Json
from mua.utils.atomic import replace_text
from mua.utils.errors import MuaError
from mua.utils.strict_json import read_file, read_json


def tasks_digest(tasks: Sequence[Task]) -> str:
    """sha256 over the tasks' ids and data."""
    text = json.dumps([[task.id, task.data] for task in tasks], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(slots=True)
class PinnedTasks:
    """The tasks that a domain's generator makes, checked against the domain's manifest when a split is first wanted."""

    manifest: Path
    generate: Callable[[Split], Iterable[Task]]
    command: str
    """What pins anew."""
    world: Callable[[], Mapping[str, str]] = dict
    """What tasks are about: name -> sha256."""
    _loaded: dict[Split, tuple[Task, ...]] = field(default_factory=dict)

    def load(self, split: Split) -> tuple[Task, ...]:
        """The tasks of a split, made once a process.

        Raises:
            MuaError: the manifest cannot be read, or the generator no longer makes what it pins.
        """
        if split not in self._loaded:
            tasks = tuple(self.generate(split))
            for name, digest in {**self.world(), split: tasks_digest(tasks)}.items():
                self._check(name, digest)
            self._loaded[split] = tasks
        return self._loaded[split]

    def _check(self, name: str, digest: str) -> None:
        try:
            pinned = read_json(read_file(self.manifest))[name]["sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MuaError(
                f"{self.manifest}: cannot read {name}.sha256 ({error}); make it with {self.command}"
            ) from error
        if digest != pinned:
            raise MuaError(
                f"{self.manifest}: {name}: what is generated differs from what is pinned; results would not be "
                f"comparable. Restore the generator and its data, or pin what it makes now with {self.command}"
            )

    def pin(self) -> None:
        """Pin what the generator makes now."""
        entries: dict[str, Json] = {name: {"sha256": digest} for name, digest in self.world().items()}
        for split in get_args(Split):
            tasks = tuple(self.generate(split))
            entries[split] = {"tasks": len(tasks), "sha256": tasks_digest(tasks)}
        replace_text(self.manifest, json.dumps(entries, indent=2) + "\n")
