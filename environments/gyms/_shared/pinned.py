"""Tasks pinned by a manifest: a silent change of a generator or a data file is an error, not another benchmark.

``python -m environments.gyms._shared.pin`` pins what the gyms make now.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from mua.environment.protocol import Split, Task
from mua.errors import MuaError

T = TypeVar("T")
_COMMAND = "python -m environments.gyms._shared.pin"


def digest(tasks: Sequence[Task]) -> str:
    """sha256 over the tasks' ids and data."""
    text = json.dumps([[task.id, task.data] for task in tasks], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@lru_cache(maxsize=64)
def load_pinned(folder: Path, split: Split, generate: Callable[[Split], Iterable[Task]]) -> tuple[Task, ...]:
    """What ``generate`` makes for a split, checked against ``folder/manifest.json``; made once a process.

    Raises :class:`MuaError` when the tasks are not the pinned ones.
    """
    tasks = tuple(generate(split))
    manifest = folder / "manifest.json"
    try:
        pinned = json.loads(manifest.read_text(encoding="utf-8"))[split]["sha256"]
    except (OSError, ValueError, KeyError) as error:
        raise MuaError(f"{manifest}: cannot read {split}.sha256 ({error}); make it with {_COMMAND}") from error
    if digest(tasks) != pinned:
        raise MuaError(
            f"{manifest}: {split}: the tasks differ from the pinned ones; results would not be comparable. Restore the "
            f"generator and its data, or pin the new tasks with {_COMMAND} {folder.name}"
        )
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
