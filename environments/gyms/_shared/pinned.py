"""Tasks pinned by a manifest: a silent change of a generator or a data file is an error, not another benchmark.

``python -m environments.gyms._shared.pin`` pins what the gyms make now.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from environments.kit.task_manifest import check_manifest, tasks_digest
from mua.environment.protocol import Split, Task
from mua.utils.errors import MuaError

T = TypeVar("T")
_COMMAND = "python -m environments.gyms._shared.pin"


@lru_cache(maxsize=64)
def load_pinned(folder: Path, split: Split, generate: Callable[[Split], Iterable[Task]]) -> tuple[Task, ...]:
    """What ``generate`` makes for a split, checked against ``folder/manifest.json``; made once a process.

    Raises :class:`MuaError` when the tasks are not the pinned ones.
    """
    tasks = tuple(generate(split))
    check_manifest(folder / "manifest.json", {split: tasks_digest(tasks)}, f"{_COMMAND} {folder.name}")
    return tasks


def dealt(items: Iterable[T], sizes: Mapping[Split, int], seed: str) -> dict[Split, list[T]]:
    """``items`` shuffled by ``seed`` and dealt to the splits; raises :class:`MuaError` if there are too few."""
    shuffled = list(items)
    random.Random(seed).shuffle(shuffled)
    if len(shuffled) < sum(sizes.values()):
        raise MuaError(f"{seed}: {len(shuffled)} items are too few for splits of {dict(sizes)}; write more")
    hands: dict[Split, list[T]] = {}
    first = 0
    for split, size in sizes.items():
        hands[split] = shuffled[first : first + size]
        first += size
    return hands
