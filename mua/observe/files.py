"""Files that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, folders included: a reader, or whoever comes after a crash, finds old or new.

    Several processes may write one path at once, also from several machines: the last one wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{uuid4().hex}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
