"""Agent libraries behind the gateway: how many of their calls stay in one segment, and whose tokens they are.

    python -m tools.bench.agent_libraries [--tasks 6] [--library pydantic_ai] [--domain retail] [--hostile]

The policy is the domain's expert, in odd spellings of JSON; runner, users, gateway, libraries and processes are real.
Equal: the agent's tokens are those of the built-in episode with the same policy, up to the last that was sampled
(smolagents has instructions of its own, so none of its can be). docs/benchmarks/gateway.md has the figures.
"""

from __future__ import annotations

import argparse
import asyncio
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
from tests.agents_support import LIBRARIES, command_of
from tests.expert_sampler import ExpertSampler
from tests.rollout_fixtures import experiment
from tests.tokens_fixtures import chat_family


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=6)
    parser.add_argument("--library", choices=LIBRARIES)
    parser.add_argument("--domain", choices=("help_desk", "retail"))
    parser.add_argument("--hostile", action="store_true", help="every third turn is a call that fits no schema")
    options = parser.parse_args()
    print("| domain | library | episodes | solved | follow-up calls | in one segment | equal tokens |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for domain in [options.domain] if options.domain else ["help_desk", "retail"]:
        drawn = list(get_domain(domain).tasks("train"))[::7][: options.tasks]
        tasks = dict(enumerate(drawn))
        built = play(domain, tasks, None, hostile=options.hostile)
        print(f"| {domain} | built in | {len(built)} | {sum(t.success for t in built)} | | | |")
        for library in [options.library] if options.library else LIBRARIES:
            final = "final_answer" if library == "smolagents" else None
            mine = play(domain, tasks, {"command": command_of(library)}, final=final, hostile=options.hostile)
            appended, calls = shares(mine)
            equal = sum(map(same_tokens, mine, built))
            solved = sum(t.success for t in mine)
            share = f"{appended / calls:.1%}" if calls else "none"
            print(f"| {domain} | {library} | {len(mine)} | {solved} | {calls} | {share} | {equal} |", flush=True)
            for t in mine:
                if not t.scored:
                    print(f"    {t.task_id}: {t.error}")


if __name__ == "__main__":
    main()
