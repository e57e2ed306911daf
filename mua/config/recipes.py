"""Recipes by name: ``qwen3-8b-1x8`` is the configuration of that name that the package brings, wherever one is."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import NamedTuple

from mua.utils.errors import ConfigError
from mua.utils.resources import shipped

_SUFFIX = ".yaml"
_BASE = "base"
"""What recipes extend; no run by itself."""


class Recipe(NamedTuple):
    """One of them."""

    name: str
    about: str
    """The first line of its file."""
    path: Path


def recipes() -> list[Recipe]:
    """All, by name."""
    paths = sorted(shipped("configs").glob(f"*{_SUFFIX}"))
    return [Recipe(path.stem, _about(path), path) for path in paths if path.stem != _BASE]


def config_file(named: Path, folder: Path = Path()) -> Path:
    """The file meant by ``named``, as seen from ``folder``: a recipe's where it is a recipe's bare name.

    A file of that name there comes first. Raises :class:`ConfigError` for a bare name that is neither.
    """
    here = folder / named
    if len(named.parts) != 1 or os.path.isfile(here):
        return here
    if os.path.isfile(found := shipped(f"configs/{named}{_SUFFIX}")):
        return found
    if named.suffix in (_SUFFIX, ".yml"):
        return here
    known = [recipe.name for recipe in recipes()]
    nearest = difflib.get_close_matches(str(named), known, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise ConfigError(f"{here}: neither a file nor a recipe; mua recipes lists those{hint}")


def _about(path: Path) -> str:
    return path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")
