"""The environment that the unmodified agent libraries live in: SGLang pins another openai than they want."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from mua.config.schema import EnvironmentConfig
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Task
from mua.environment.registry import get_domain
from mua.environment.selection import Selection
from mua.rollout.runner import EpisodeRunner, Placed
from mua.types import Json, Trajectory
from tests.expert_sampler import ExpertSampler
from tests.rollout_fixtures import experiment
from tests.tokens_fixtures import chat_family

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


def play(
    domain_name: str, tasks: dict[int, Task], agent: Json | None, *, final: str | None = None, hostile: bool = False
) -> list[Trajectory]:
    """One episode of each task, by the agent of a command or by the built-in one."""
    domain, family = get_domain(domain_name), chat_family("qwen3", False)
    environment = {"name": domain_name, "prompt": "short"}
    budgets = {
        "max_tokens": 32000,
        "max_turn_tokens": 4000,
        "max_retries": 0,
        "concurrency": 2,
        "max_tool_calls": 60,
        "max_malformed": 60,
    }
    sections: dict[str, Json] = {"environment": environment, "rollout": budgets, "model": {"max_length": 40000}}
    config = experiment(**sections, **({} if agent is None else {"agent": agent}))
    config = config.model_copy(update={"output": Path(tempfile.mkdtemp(prefix="mua-agents-"))})
    selection = Selection({domain_name: domain}, EnvironmentConfig(name=domain_name, prompt="short"))

    async def run() -> list[Trajectory]:
        sampler = ExpertSampler(family, domain, tasks, final, hostile=hostile)
        runner = EpisodeRunner(config, selection, family, sampler, Services())
        found: dict[int, Trajectory] = {}
        try:
            await runner.each(
                [Placed(task, ordinal, 0) for ordinal, task in tasks.items()],
                temperature=1.0,
                on_trajectory=lambda placed, trajectory: found.update({placed.ordinal: trajectory}),
            )
        finally:
            await runner.close()
        return [found[ordinal] for ordinal in tasks]

    return asyncio.run(run())


def same_tokens(mine: Trajectory, built: Trajectory) -> bool:
    """Whether both saw and sampled the same; what came behind the last sampled token is left out."""
    if len(mine.segments) != 1 or len(built.segments) != 1:
        return False
    ours, theirs = (
        segment.ids[: int(np.flatnonzero(segment.loss_mask)[-1]) + 1]
        for segment in (mine.segments[0], built.segments[0])
    )
    return np.array_equal(ours, theirs)


def shares(trajectories: list[Trajectory]) -> tuple[int, int]:
    """Follow-up calls that were appended, and all of them."""
    counts = [
        sum(int(t.metrics.get(f"gateway/{placed}", 0)) for t in trajectories)
        for placed in ("appended", "forked", "rewritten")
    ]
    return counts[0], sum(counts)
