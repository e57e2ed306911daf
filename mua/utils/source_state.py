"""Which code runs here: the commit of the repository, a digest of the installed sources, versions of packages."""

from __future__ import annotations

import hashlib
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from mua.utils.resources import INSIDE

ROOT = Path(__file__).parents[2]
_GIT_SECONDS = 20.0
_CODE = ("mua", "megatron_bridge", "environments")
_SUFFIXES = frozenset({".py", ".yaml", ".jinja", ".json", ".jsonl", ".txt", ".gz", ".npz"})


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
