"""The whole loop on one machine: a policy of two million random weights learns to serve a help desk's customers.

For every seed: build a tokenizer and a random Qwen3, fine-tune it on conversations of an agent that decides rightly but
often tells facts in words of its own, then let it learn what really helps by reinforcement learning against SGLang
rollouts. It is judged on held-out tasks before and after. At the end the last checkpoint is converted, reloaded, and
one conversation printed.

Everything runs through the same commands a person would type; each is printed before it runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.tiny import before_and_after, build_policy, mua, print_table, say

ROOT = Path("runs/demo")
CONVERSATIONS = 1500
LOOSE = 0.7
"""How often the demonstrating agent tells a fact in words of its own instead of the policy's. Supervised training
copies that; reinforcement learning, which sees the outcome, has to unlearn it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("overrides", nargs="*", help="overrides of configs/demo.yaml for the RL run, key=value")
    arguments = parser.parse_args()
    results = []
    for seed in arguments.seeds:
        results.append(run_seed(seed, arguments.overrides))
        write_summary(results)
    picture = draw(arguments.seeds, results)
    show_last(arguments.seeds[-1])
    report(results, picture)


def run_seed(seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Everything for one seed; what goes into the summary."""
    folder = ROOT / f"seed-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    started = time.monotonic()
    say(f"seed {seed}: tokenizer, conversations and a random policy")
    build(folder, seed)
    built = time.monotonic()
    say(f"seed {seed}: supervised cold start on {CONVERSATIONS} conversations of a scripted agent")
    sft = [f"model.path={folder}/init", f"sft.data={folder}/conversations.jsonl", f"output={folder}/sft"]
    mua("sft", "configs/demo-sft.yaml", *sft, f"seed={seed}")
    tuned = time.monotonic()
    say(f"seed {seed}: reinforcement learning against SGLang rollouts, judged before and after")
    mua("train", "configs/demo.yaml", f"model.path={folder}/sft/hf", f"output={folder}/rl", f"seed={seed}", *overrides)
    return summary_of(seed, folder, [started, built, tuned, time.monotonic()])


def build(folder: Path, seed: int) -> None:
    """A tokenizer from the domain's own text, the demonstrations, and random weights."""
    from environments.help_desk import DOMAIN
    from environments.help_desk.demonstrations import demonstrations

    system = DOMAIN.system_prompt("short")
    build_policy(folder / "init", demonstrations(1000, 0.0, seed + 1, system), seed)
    with (folder / "conversations.jsonl").open("w") as file:
        for messages in demonstrations(CONVERSATIONS, LOOSE, seed, system):
            file.write(json.dumps({"messages": messages}) + "\n")


def summary_of(seed: int, folder: Path, times: Sequence[float]) -> dict[str, Any]:
    """What one seed reached, read from the metrics of its run."""
    build_s, sft_s, rl_s = (b - a for a, b in itertools.pairwise(times))
    return {
        "seed": seed,
        **before_and_after(folder / "rl" / "metrics.jsonl"),
        "seconds": round(times[-1] - times[0], 1),
        "seconds_by_stage": {"build": round(build_s, 1), "sft": round(sft_s, 1), "rl": round(rl_s, 1)},
    }


def draw(seeds: Sequence[int], results: Sequence[dict[str, Any]]) -> Path:
    """The reward curves of all seeds in one picture."""
    from mua.observe.plot import plot_reward_curve

    files = {f"seed {seed}": ROOT / f"seed-{seed}" / "rl" / "metrics.jsonl" for seed in seeds}
    return plot_reward_curve(files, ROOT / "reward.png")


def show_last(seed: int) -> None:
    """Convert the last checkpoint, load it with transformers, and print one conversation of it."""
    from transformers import AutoModelForCausalLM

    folder = ROOT / f"seed-{seed}"
    checkpoint = max((folder / "rl" / "checkpoints").glob("step_*"))
    mua("convert", "megatron-to-hf", str(checkpoint), f"{folder}/converted")
    policy = AutoModelForCausalLM.from_pretrained(folder / "converted")
    print(f"transformers loads it: {type(policy).__name__}, {sum(p.numel() for p in policy.parameters()):,} parameters")
    mua("rollout", "configs/demo.yaml", f"model.path={folder}/converted", f"output={folder}/rollout", f"seed={seed}")


def write_summary(results: Sequence[dict[str, Any]]) -> None:
    (ROOT / "summary.json").write_text(json.dumps({"seeds": list(results)}, indent=2) + "\n")


def report(results: Sequence[dict[str, Any]], picture: Path) -> None:
    """The table of seeds and where everything lies."""
    print_table(results)
    print(f"\nreward curve  {picture}\nsummary       {ROOT / 'summary.json'}")
    print(f"TensorBoard   tensorboard --logdir {ROOT}\ntraces        {ROOT}/seed-*/rl/traces")


if __name__ == "__main__":
    main()
