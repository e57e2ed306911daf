"""Throughput of rollouts by samplers apart from the trainer, against the trainer's own, on the same episodes.

    python -m tools.bench.samplers [--steps 6] [--repeats 2] [--store URL]

A deterministic run of a random tiny policy on the help desk, so that every arm plays the same episodes with the same
tokens: by the trainer itself; by the trainer as one sampler of its store; by one and by three processes of ``mua
sample``. Without ``--store`` that is SQLite. Seconds are the trainer's wait for episodes, the first step left out;
arms take turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from environments.help_desk import DOMAIN
from environments.help_desk.demonstrations import demonstrations
from tools import kit
from tools.tiny import SMALL, build_policy

ARMS: dict[str, tuple[list[str], int]] = {
    "the trainer, no leases": ([], 0),
    "the trainer as a sampler": (["samplers.enabled=true"], 0),
    "one sampler apart": (["samplers.enabled=true", "samplers.inside=false"], 1),
    "three samplers apart": (["samplers.enabled=true", "samplers.inside=false"], 3),
}
"""Overrides, and processes of ``mua sample``."""
GROUPS, SIZE = 8, 4
RECIPE = """\
name: bench
output: out
model: {{path: {model}, dtype: float32, max_length: 512}}
environment: {{name: help_desk, prompt: short}}
user: {{personas: [brief]}}
rollout: {{max_turns: 6, max_tool_calls: 4, max_turn_tokens: 48, max_tokens: 400, concurrency: 32}}
engine: {{max_total_tokens: 32768, max_running_requests: 32, memory_fraction: 0.5, deterministic: true}}
algorithm: {{group_size: {size}, groups_per_step: {groups}}}
megatron: {{max_tokens_per_microbatch: 2048, threads: 1}}
optimizer: {{learning_rate: 1.0e-9}}
trainer: {{steps: {steps}, save_every: 1000, deterministic: true}}
observe: {{traces: false}}
"""


def _mua(folder: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-m", "mua.cli", *arguments], cwd=folder, stdout=log, stderr=log)


def play(recipe: Path, overrides: Sequence[str], samplers: int, store: str | None, seconds: float) -> dict[str, Any]:
    """One run: what its steps after the first say, on average, and the tokens of all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url = [f"store.url={store}"] if store is not None else []
        run = _mua(folder, "train", "train", str(recipe), *overrides, *url)
        place, others = store or str(folder / "out"), list[subprocess.Popen[bytes]]()
        try:
            while samplers and not (folder / "out" / "store_run").exists() and run.poll() is None:
                pass
            where = (folder / "out" / "store_run").read_text().strip() if samplers else ""
            others += [_mua(folder, f"sample-{n}", "sample", place, "--run", where) for n in range(samplers)]
            if status := run.wait(seconds):
                raise SystemExit(f"the run ended with {status}: {(folder / 'train.log').read_text()[-2000:]}")
        finally:
            for process in (run, *others):
                process.kill()
                process.wait()
        lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    found = [line.get("metrics", line) for line in lines]
    return {
        "wait": mean(line["time/wait_seconds"] for line in found[1:]),
        "busy": mean(line["time/engine_generating_seconds"] for line in found[1:]),
        "tokens": [line["engine/sampled_tokens"] for line in found],
    }


def measure(steps: int, repeats: int, store: str | None, seconds: float) -> str:
    """The table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        conversations = list(demonstrations(200, 1, DOMAIN.system_prompt("short"), ["brief"]))
        build_policy(folder / "model", conversations, 1, 512, SMALL)
        recipe = folder / "recipe.yaml"
        recipe.write_text(RECIPE.format(model=folder / "model", size=SIZE, groups=GROUPS, steps=steps))
        found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
        for _ in range(repeats):
            for arm, (overrides, samplers) in ARMS.items():
                found[arm].append(play(recipe, overrides, samplers, store, seconds))
    if len({tuple(one["tokens"]) for runs in found.values() for one in runs}) != 1:
        raise SystemExit("the arms did not sample the same tokens")
    own = mean(one["wait"] for one in found["the trainer, no leases"])
    rows = []
    for arm, runs in found.items():
        wait = mean(one["wait"] for one in runs)
        each = ", ".join(f"{one['wait']:.2f}" for one in runs)
        rows.append((arm, f"{GROUPS * SIZE / wait:.1f}", f"{own / wait:.2f}", each))
    return kit.table(("who rolls out", "episodes per second", "of the trainer's own", "seconds per step"), rows)


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--store", help="URL of an empty PostgreSQL database")
    parser.add_argument("--seconds", type=float, default=600.0, help="deadline of one run")
    arguments = parser.parse_args()
    print(measure(arguments.steps, arguments.repeats, arguments.store, arguments.seconds))


if __name__ == "__main__":
    main()
