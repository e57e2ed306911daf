"""The splits: one customer a task, recipes in turn, pinned by a manifest.

Splits are disjoint by customer. The digests in ``manifest.json`` make a silent change of world or generator an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from environments.telecom.recipes import data_of
from environments.telecom.world import base
from mua.environment.overlay import digest_of
from mua.environment.protocol import Split, Task
from mua.errors import MuaError
from mua.types import Json

MANIFEST = Path(__file__).with_name("manifest.json")
SIZES: dict[Split, int] = {"train": 400, "validation": 100, "test": 100}
FIRST_SEED: dict[Split, int] = {"train": 1_000_000, "validation": 2_000_000, "test": 3_000_000}
FIRST_CUSTOMER: dict[Split, int] = {"train": 0, "validation": 400, "test": 500}


def generate(split: Split, index: int) -> Task:
    """Task ``index`` of a split; a pure function of its arguments."""
    data = data_of(index, FIRST_SEED[split] + index, FIRST_CUSTOMER[split] + index)
    return Task(f"telecom/{split}/{index:03d}", "telecom", split, data)


def _generate_split(split: Split) -> Iterator[Task]:
    return (generate(split, index) for index in range(SIZES[split]))


@lru_cache(maxsize=3)
def load_split(split: Split) -> tuple[Task, ...]:
    """The tasks of a split, checked against the manifest.

    Raises :class:`MuaError` when the generator no longer makes the tasks that the manifest pins.
    """
    tasks = tuple(_generate_split(split))
    pinned = json.loads(MANIFEST.read_text())
    made = {"world": base().digest(), split: digest(tasks)}
    if {"world": pinned["world"]["sha256"], split: pinned[split]["sha256"]} != made:
        raise MuaError(
            f"{MANIFEST}: {split}: the generated world or tasks differ from the pinned ones; results would not be "
            "comparable. Restore the generator, or pin what it makes now with python -m environments.telecom.tasks"
        )
    return tasks


def digest(tasks: Sequence[Task]) -> str:
    """sha256 over the tasks' ids and data."""
    return digest_of([[task.id, task.data] for task in tasks])


def write_manifest() -> None:
    """Pin what the generator makes now."""
    manifest: dict[str, Json] = {"world": {"sha256": base().digest()}}
    for split in SIZES:
        tasks = tuple(_generate_split(split))
        manifest[split] = {"first_seed": FIRST_SEED[split], "tasks": len(tasks), "sha256": digest(tasks)}
    MANIFEST.write_text(json.dumps(manifest, indent=2) + "\n")


if __name__ == "__main__":
    write_manifest()
