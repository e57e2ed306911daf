"""Generated tasks pinned by a manifest: a silent change of a generator or a data file is an error, not a new benchmark.

A manifest is a JSON file beside the domain, ``{"train": {"tasks": 400, "sha256": ...}, "database": {"sha256": ...}}``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mua.environment.protocol import Task
from mua.types import Json
from mua.utils.atomic import replace_text
from mua.utils.errors import MuaError
from mua.utils.strict_json import read_file, read_json


def tasks_digest(tasks: Sequence[Task]) -> str:
    """sha256 over the tasks' ids and data."""
    text = json.dumps([[task.id, task.data] for task in tasks], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_manifest(manifest: Path, made: Mapping[str, str], command: str) -> None:
    """Compare digests by name (a split, the database) with the pinned ones.

    Args:
        manifest: the file.
        made: name -> sha256 of what the generator makes now.
        command: what pins anew.

    Raises:
        MuaError: the manifest cannot be read, or something differs.
    """
    for name, now in made.items():
        try:
            pinned = read_json(read_file(manifest))[name]["sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MuaError(f"{manifest}: cannot read {name}.sha256 ({error}); make it with {command}") from error
        if now != pinned:
            raise MuaError(
                f"{manifest}: {name}: what is generated differs from what is pinned; results would not be comparable. "
                f"Restore the generator and its data, or pin what it makes now with {command}"
            )


def pin_manifest(manifest: Path, entries: Mapping[Any, Json]) -> None:
    """Pin ``entries``, each with its ``sha256``."""
    replace_text(manifest, json.dumps(entries, indent=2) + "\n")
