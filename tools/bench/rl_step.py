"""Where the time of one reinforcement-learning step goes: seconds and share of every stage, on this machine.

Runs a few steps of configs/demo.yaml on the policy of ``make demo`` (or, without one, on a random policy, whose
episodes are longer), and reports the mean of the steps after the first, which still warms up.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from environments.help_desk import DOMAIN
from environments.help_desk.demonstrations import demonstrations
from mua.observe.metrics_log import METRICS_FILE, read_metrics
from tools import kit
from tools.tiny import build_policy
from workbench import timeline


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--policy", type=Path, default=Path("runs/demo/seed-1/sft/hf"))
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mua-bench-") as scratch:
        policy = arguments.policy
        if not policy.is_dir():
            policy = Path(scratch) / "init"
            build_policy(policy, demonstrations(50, 1, DOMAIN.system_prompt("short"), ["brief"]), 1)
        overrides = [f"model.path={policy}", f"output={scratch}/run", f"trainer.steps={arguments.steps}"]
        overrides += ["trainer.evaluate_first=false", "trainer.evaluate_every=0", "trainer.export=last"]
        command = [sys.executable, "-m", "mua.cli", "train", "configs/demo.yaml", *overrides]
        subprocess.run(command, check=True)
        print_table(list(read_metrics(Path(scratch) / "run" / METRICS_FILE))[1:], policy)


def print_table(steps: Sequence[Mapping[str, Any]], policy: Path) -> None:
    """The means over ``steps``, as Markdown."""
    print(f"\n{policy}, {len(steps)} steps, {kit.machine()}\n\n{timeline.tables(steps)}\n")
    mean = partial(timeline.mean, steps)
    sampled = mean("engine/sampled_tokens")
    print(f"sampled {sampled:.0f} tokens per step, {sampled / mean('time/wait_seconds'):.0f} per second of rollout")
    print(f"prefix-cache hit rate {mean('engine/prefix_cache_hit_rate'):.2f}")
    print(f"sync {mean('engine/sync/bytes') / 1e6:.1f} MB in {mean('engine/sync/seconds'):.2f} s")


if __name__ == "__main__":
    main()
