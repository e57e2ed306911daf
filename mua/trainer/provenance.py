"""Where a checkpoint comes from: configuration, commit and versions, for its manifest."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

import mua
from mua.config.load import dump_config
from mua.config.schema import ExperimentConfig
from mua.types import Json

_PACKAGES = ("megatron-core", "torch", "sglang", "transformers")
_GIT_SECONDS = 20.0


def provenance(config: ExperimentConfig) -> Json:
    """``config`` (secrets masked), ``git`` (None outside a repository) and ``versions``."""
    return {
        "config": yaml.safe_load(dump_config(config)),
        "git": git_state(Path(mua.__file__).resolve().parent.parent),
        "versions": {"mua": mua.__version__, **{name: _version(name) for name in _PACKAGES}},
    }


def git_state(root: Path) -> Json | None:
    """Commit of the repository ``root``, and whether tracked files differ from it; None if it is no repository."""
    top = _git(root, "rev-parse", "--show-toplevel")
    commit = _git(root, "rev-parse", "HEAD")
    if top is None or commit is None or Path(top).resolve() != root.resolve():
        return None
    return {"commit": commit, "dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=no"))}


def _git(root: Path, *arguments: str) -> str | None:
    """What git says; None where there is no git, no repository or no answer."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
