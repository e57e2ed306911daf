"""The environment that the unmodified agent libraries live in: SGLang pins another openai than they want."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np

from mua.types import Trajectory

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-agents"
PINS = ROOT / "constraints" / "agents-py312.txt"
LIBRARIES = ("openai_agents", "pydantic_ai", "langgraph", "smolagents")


def agents_python() -> Path:
    """Its interpreter; made from the pins at the first use, by one process while others wait (about 20 s)."""
    python, ready = FOLDER / "bin" / "python", FOLDER / ".ready"
    wanted = hashlib.sha256(PINS.read_bytes()).hexdigest()
    with (ROOT / ".venv-agents.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists() or ready.read_text() != wanted:
            uv = [sys.executable, "-m", "uv"]
            for command in (
                [*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(FOLDER)],
                [*uv, "pip", "install", "--quiet", "--python", str(python), "-r", str(PINS)],
            ):
                subprocess.run(command, check=True, timeout=600)
            ready.write_text(wanted)
    return python


def command_of(library: str) -> list[str]:
    """What ``agent.command`` is for the agent that is written with ``library``."""
    return [str(agents_python()), str(ROOT / "tests" / "agents" / f"with_{library}.py")]


def agreed(trajectory: Trajectory) -> int:
    """Tokens of a built-in episode's first segment that an agent which asks the same must have too, ids and all.

    They end with the first turn that a library answers in a way of its own (calls that cannot be read, a turn that is
    cut off), or with the last turn.
    """
    segment = trajectory.segments[0]
    said = [message for message in trajectory.messages if message["role"] == "assistant"]
    odd = [turn for turn, message in enumerate(said) if "tool_call_errors" in message or "truncated" in message]
    last = min([*odd, int(segment.turn[segment.loss_mask].max())])
    return int(np.flatnonzero(segment.loss_mask & (segment.turn == last))[-1]) + 1


def differing(mine: Trajectory, built_in: Trajectory) -> str:
    """Which of ids, provenance and log-probabilities differ in the agreed part, comma-separated; empty: none."""
    end, (ours, theirs) = agreed(built_in), (mine.segments[0], built_in.segments[0])
    return ", ".join(
        name
        for name in ("ids", "provenance", "logprobs")
        if not np.array_equal(getattr(ours, name)[:end], getattr(theirs, name)[:end])
    )
