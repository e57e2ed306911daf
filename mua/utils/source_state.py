"""Which code runs here: the commit of the repository, a digest of the installed sources, versions of packages; and its
files that are no code (recipes, job scripts, pins, the demonstration's base policy).

A checkout has those at its top, where people look for them; the wheel has the same files inside the package, where
nobody else's folder of that name is met.
"""

from __future__ import annotations

import hashlib
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_GIT_SECONDS = 20.0
_CODE = ("mua", "megatron_bridge", "environments")
_SUFFIXES = frozenset({".py", ".yaml", ".jinja", ".json", ".jsonl", ".txt", ".gz", ".npz"})

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


def git_state(root: Path) -> dict[str, Any] | None:
    """Commit of the repository ``root``, and whether tracked files differ from it; None if it is no repository."""
    git = ("git", "-C", str(root))
    top = program_output(*git, "rev-parse", "--show-toplevel", seconds=_GIT_SECONDS)
    commit = program_output(*git, "rev-parse", "HEAD", seconds=_GIT_SECONDS)
    if top is None or commit is None or Path(top).resolve() != root.resolve():
        return None
    changed = program_output(*git, "status", "--porcelain", "--untracked-files=no", seconds=_GIT_SECONDS)
    return {"commit": commit, "dirty": bool(changed)}


@cache
def code_digest(root: Path = ROOT) -> str:
    """16 hexadecimal digits of the sources and data files below ``root`` that episodes are made by.

    It tells apart what a commit does not: files that were changed, and installations without a repository. Read once
    per process; so call it before anybody changes the files.
    """
    found = hashlib.sha256()
    for folder in _CODE:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in _SUFFIXES and path.is_file() and not path.is_relative_to(INSIDE):
                found.update(f"{path.relative_to(root).as_posix()}\0".encode())
                found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def installed_version(package: str) -> str | None:
    """None if ``package`` is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def program_output(*command: str, seconds: float) -> str | None:
    """What a program prints; None if it is not here, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.rstrip()
