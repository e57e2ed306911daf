"""mua: reinforcement learning of multi-turn, tool-using agents that talk with users.

Importing this package loads neither torch nor sglang; see ``docs/architecture.md`` for the rooms. What notebooks use is
in :mod:`mua.cli.api`, which is loaded when one of its names is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "evaluate", "load_config", "open_run"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("mua.cli.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
