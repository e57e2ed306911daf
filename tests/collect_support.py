"""``mua conversations --agent policy`` in a folder of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from e2e_support import environment, whole_lines

CONFIG = """\
name: collect
output: out
model: {path: none}
environment: {name: help_desk, prompt: short}
rollout: {max_turns: 4, max_turn_tokens: 24, max_retries: 1, concurrency: 4}
trainer: {steps: 1}
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command on ``collect.yaml`` in ``folder``, with its output in files there."""
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "mua.cli", "conversations", "collect.yaml", "x.jsonl"),
                *("--agent=policy", "--json", *arguments),
            ],
            cwd=folder, env=environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True,
            start_new_session=True,
        )  # fmt: skip


def policy_at(url: str, model: str) -> list[str]:
    """Overrides that name who plays."""
    keys = {"kind": "endpoint", "endpoint.base_url": url, "endpoint.model": model}
    return [f"evaluation.policy.{key}={value}" for key, value in keys.items()]


def episodes(folder: Path) -> list[str]:
    """Lines of the episodes that have ended."""
    return whole_lines(folder / "x.episodes.jsonl")


def report(folder: Path) -> dict[str, Any]:
    """What was kept, and why the rest was not."""
    found: dict[str, Any] = json.loads((folder / "x.report.json").read_text())
    return found
