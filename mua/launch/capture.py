"""What a run was made with, for whoever reads its logs later: versions, commit, machine, variables without secrets."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import mua
from mua.masking import HIDDEN, mask_credentials

ROOT = Path(mua.__file__).parents[1]
COMMAND_SECONDS = 30.0

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|PRIVATE|SIGNATURE", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\bsk-[\w-]{8,}|\bhf_\w{8,}|\bgh[pousr]_\w{8,}|\beyJ[\w-]{10,}\.|\bBearer\s+\S+")


def capture_environment(folder: Path) -> Path:
    """Write ``environment-<node>.json`` into ``folder``; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    path = folder / f"environment-{node}.json"
    path.write_text(json.dumps(environment(), indent=1) + "\n", encoding="utf-8")
    return path


def environment() -> dict[str, Any]:
    """Everything that is recorded, ready for JSON."""
    packages = {str(d.metadata["Name"]).lower(): d.version for d in metadata.distributions() if d.metadata["Name"]}
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "command": [masked(part) for part in sys.argv],
        "mua": mua.__version__,
        "commit": command("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "uncommitted": (command("git", "-C", str(ROOT), "status", "--short") or "").splitlines(),
        "python": sys.version,
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": command("nvidia-smi"),
        "packages": dict(sorted(packages.items())),
        "variables": {
            name: HIDDEN if _SECRET_NAME.search(name) else masked(value) for name, value in sorted(os.environ.items())
        },
    }


def masked(text: str) -> str:
    """``text`` with what looks like a credential replaced, wherever it stands."""
    name, equals, _ = text.partition("=")
    if equals and _SECRET_NAME.search(name):
        return f"{name}={HIDDEN}"
    return _SECRET_VALUE.sub(HIDDEN, mask_credentials(text))


def command(*words: str) -> str | None:
    """What a program says; None if it is not here, fails or takes too long."""
    if shutil.which(words[0]) is None:
        return None
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.rstrip()
