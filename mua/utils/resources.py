"""Files that are no code: recipes, job scripts, pins, the demonstration's base policy.

A checkout has them at its top, where people look for them; the wheel has the same files inside the package, where
nobody else's folder of that name is met.
"""

from __future__ import annotations

from pathlib import Path

FOLDERS = ("configs", "slurm", "constraints", "tools/base")
"""What the wheel holds beside code, named from the top of a checkout."""
INSIDE = Path(__file__).parents[1] / "_shipped"
"""Where the wheel has it; ``setup.py`` puts it there. A checkout has no such folder."""


def shipped(name: str = "") -> Path:
    """The file or folder that a checkout has as ``name``, such as ``slurm/train.sbatch``; its top without one."""
    return (INSIDE if INSIDE.is_dir() else INSIDE.parents[1]) / name


def shipped_files() -> list[str]:
    """The names of all, sorted."""
    top = shipped()
    paths = (path for folder in FOLDERS for path in (top / folder).rglob("*"))
    return sorted(path.relative_to(top).as_posix() for path in paths if path.is_file())
