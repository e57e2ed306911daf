"""Pin what gyms make now: ``python -m environments.gyms._shared.pin [SHORT_NAME ...]``, all gyms without a name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from environments.gyms._shared.gym import Gym
from environments.kit.task_manifest import pin_manifest, tasks_digest
from mua.environment.protocol import Split

SPLITS: tuple[Split, ...] = get_args(Split)


def pin(gym: Gym) -> None:
    """Write the manifest of what ``gym`` makes now."""
    made = {split: tuple(gym.generate(split)) for split in SPLITS}
    entries = {split: {"tasks": len(tasks), "sha256": tasks_digest(tasks)} for split, tasks in made.items()}
    pin_manifest(gym.folder() / "manifest.json", entries)


def main(names: Sequence[str]) -> None:
    """Pin the gyms of ``names``; all of them if empty."""
    here = Path(__file__).parents[1]
    for name in names or sorted(path.parent.name for path in here.glob("[a-z]*/__init__.py")):
        module = importlib.import_module(f"environments.gyms.{name}")
        if isinstance(module.DOMAIN, Gym):
            pin(module.DOMAIN)


if __name__ == "__main__":
    main(sys.argv[1:])
