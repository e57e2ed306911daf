"""The splits: one customer a task, recipes in turn, pinned by a manifest.

Splits are disjoint by customer. The digests in ``manifest.json`` make a silent change of world or generator an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from environments.kit.task_manifest import check_manifest, pin_manifest, tasks_digest
from environments.telecom.recipes import data_of
from environments.telecom.world import base
from mua.environment.protocol import Split, Task
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
    made = {"world": base().digest(), split: tasks_digest(tasks)}
    check_manifest(MANIFEST, made, "python -m environments.telecom.tasks")
    return tasks


def write_manifest() -> None:
    """Pin what the generator makes now."""
    entries: dict[str, Json] = {"world": {"sha256": base().digest()}}
    for split in SIZES:
        tasks = tuple(_generate_split(split))
        entries[split] = {"first_seed": FIRST_SEED[split], "tasks": len(tasks), "sha256": tasks_digest(tasks)}
    pin_manifest(MANIFEST, entries)


if __name__ == "__main__":
    write_manifest()
