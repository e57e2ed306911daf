"""Functions of a person's own that a configuration names as ``package.module:function``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from mua.utils.errors import ConfigError


def named_callable(path: str, key: str) -> Callable[..., Any]:
    """What ``path`` names. Raises :class:`ConfigError` with ``key``, the setting, where there is no such callable."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{key}: {path!r}: {module_name} cannot be imported: {error}; install its package, or put its folder on "
            "PYTHONPATH"
        ) from error
    found: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{key}: {path!r}: module {module_name} has no callable {name!r}")
    return found
