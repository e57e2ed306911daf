"""Pin what gyms make now: ``python -m environments.gyms._shared.pin [SHORT_NAME ...]``, all gyms without a name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from environments.gyms._shared.gym import Gym


def main(names: Sequence[str]) -> None:
    """Pin the gyms of ``names``; all of them if empty."""
    here = Path(__file__).parents[1]
    for name in names or sorted(path.parent.name for path in here.glob("[a-z]*/__init__.py")):
        module = importlib.import_module(f"environments.gyms.{name}")
        if isinstance(module.DOMAIN, Gym):
            module.DOMAIN.pinned().pin()


if __name__ == "__main__":
    main(sys.argv[1:])
