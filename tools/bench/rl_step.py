"""Where the time of one reinforcement-learning step goes: seconds and share of every stage, on this machine.

Runs a few steps of configs/demo.yaml on the policy of ``make demo`` (or, without one, on a random policy, whose
episodes are longer), and reports the mean of the steps after the first, which still warms up.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

STAGES = ("rollout", "train", "sync", "save")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, default=Path("runs/demo/seed-1/sft/hf"))
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mua-bench-") as scratch:
        policy = arguments.policy if arguments.policy.is_dir() else random_policy(Path(scratch))
        overrides = [f"model.path={policy}", f"output={scratch}/run", f"trainer.steps={arguments.steps}"]
        overrides += ["trainer.evaluate_first=false", "trainer.evaluate_every=0"]
        command = [sys.executable, "-m", "mua.cli", "train", "configs/demo.yaml", *overrides]
        subprocess.run(command, check=True)
        print_table(steps_of(Path(scratch) / "run"), policy)


def random_policy(folder: Path) -> Path:
    """A policy with random weights, as the demonstration starts from."""
    from tools.demo import build

    build(folder, 1)
    return folder / "init"


def steps_of(run: Path) -> Sequence[Mapping[str, Any]]:
    from mua.observe.metrics_log import read_metrics

    return list(read_metrics(run / "metrics.jsonl"))[1:]


def print_table(steps: Sequence[Mapping[str, Any]], policy: Path) -> None:
    """The means over ``steps``, as a Markdown table."""

    def mean(name: str) -> float:
        return sum(step.get(name) or 0.0 for step in steps) / len(steps)

    whole = mean("speed/step_seconds")
    print(f"\n{policy}, {len(steps)} steps, {os.cpu_count()} cores, {platform.processor() or platform.machine()}\n")
    print("| stage | seconds | share |\n| --- | --- | --- |")
    named = {stage: mean(f"seconds/{stage}") for stage in STAGES}
    for stage, seconds in [*named.items(), ("rest", whole - sum(named.values()))]:
        print(f"| {stage} | {seconds:.2f} | {seconds / whole:.0%} |")
    print(f"| step | {whole:.2f} | 100% |\n")
    sampled = mean("engine/sampled_tokens")
    print(f"sampled {sampled:.0f} tokens a step, {sampled / named['rollout']:.0f} a second of rollout")
    print(f"prefix-cache hit rate {mean('engine/prefix_cache_hit_rate'):.2f}")
    print(f"sync {mean('sync/bytes') / 1e6:.1f} MB in {mean('sync/seconds'):.2f} s")


if __name__ == "__main__":
    main()
