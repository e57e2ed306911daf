"""The environment that the unmodified agent libraries live in: SGLang pins another openai than they want."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
from pathlib import Path

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
