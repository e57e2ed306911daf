"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4


def replace_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write ``text`` to ``path``, folders included: a reader, or whoever comes after a crash, finds old or new.

    ``mode`` says who may read and write it, less what the process's umask forbids. Several processes may write one path
    at once, also from several machines: the last one wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{uuid4().hex}.new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)
    new.replace(path)
