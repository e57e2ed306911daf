"""What a result was made with: for the manifest of a checkpoint, and for whoever reads the logs of a job later."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

import mua
from mua.config.load import dump_config
from mua.config.schema import ExperimentConfig
from mua.types import Json
from mua.utils.hooks import hook_sources
from mua.utils.masking import masked_tree
from mua.utils.source_state import ROOT, git_state, installed_version, program_output

_PACKAGES = ("megatron-core", "torch", "sglang", "transformers")
_CAPTURE_SECONDS = 30.0


def provenance(config: ExperimentConfig) -> Json:
    """For a checkpoint's manifest: ``config`` (secrets masked), ``git`` (None outside a repository), ``versions``, and
    where there are ``hooks`` the file of each with its digest."""
    hooks = hook_sources(config)
    return {
        "config": yaml.safe_load(dump_config(config)),
        "git": git_state(ROOT),
        "versions": {"mua": mua.__version__, **{name: installed_version(name) for name in _PACKAGES}},
    } | ({"hooks": hooks} if hooks else {})


def changed_keys(before: Json, after: Json) -> list[str]:
    """``key old → new`` of every value that differs in nested mappings, by dotted keys; what is not there is null."""
    old, new = (dict(_flat(of)) for of in (before, after))
    return [
        f"{key} {json.dumps(old.get(key), ensure_ascii=False)} → {json.dumps(new.get(key), ensure_ascii=False)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def _flat(value: Json, above: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{above}{name}.")
        else:
            yield f"{above}{name}", inner


def capture_environment(folder: Path) -> Path:
    """Write what this node runs with into ``folder``, as ``environment-<node>.json``, without secrets; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"environment-{node_name()}.json"
    packages = {str(d.metadata["Name"]).lower(): d.version for d in metadata.distributions() if d.metadata["Name"]}
    git = ("git", "-C", str(ROOT))
    record: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "command": masked_tree(sys.argv),
        "mua": mua.__version__,
        "commit": program_output(*git, "rev-parse", "HEAD", seconds=_CAPTURE_SECONDS),
        "uncommitted": (program_output(*git, "status", "--short", seconds=_CAPTURE_SECONDS) or "").splitlines(),
        "python": sys.version,
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": program_output("nvidia-smi", seconds=_CAPTURE_SECONDS),
        "packages": dict(sorted(packages.items())),
        "variables": masked_tree(dict(sorted(os.environ.items())), free=True),
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def node_name() -> str:
    """Slurm's name of this machine, else its own."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
