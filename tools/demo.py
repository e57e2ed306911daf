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
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path("runs/demo")
CONVERSATIONS = 1500
LOOSE = 0.7
"""How often the demonstrating agent tells a fact in words of its own instead of the policy's. Supervised training
copies that; reinforcement learning, which sees the outcome, has to unlearn it."""
POLICY = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rope_theta": 10_000.0,
    "initializer_range": 0.06,
    "tie_word_embeddings": True,
}
VOCABULARY = 768


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
    from mua.environment.demonstrate import spoken_text
    from mua.tokens import train_tokenizer

    system = DOMAIN.system_prompt("short")
    corpus = list(demonstrations(1000, 0.0, seed + 1, system))
    train_tokenizer(spoken_text(corpus), folder / "init", vocab_size=VOCABULARY)
    with (folder / "conversations.jsonl").open("w") as file:
        for messages in demonstrations(CONVERSATIONS, LOOSE, seed, system):
            file.write(json.dumps({"messages": messages}) + "\n")
    initialise(folder / "init", seed)


def initialise(folder: Path, seed: int) -> None:
    """Random weights of a small Qwen3 that fits the tokenizer in ``folder``."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    torch.manual_seed(seed)
    policy = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), eos_token_id=end_of_turn, **POLICY))
    policy.save_pretrained(folder)
    print(f"{sum(p.numel() for p in policy.parameters()):,} parameters, {len(tokenizer)} tokens in the vocabulary")


def summary_of(seed: int, folder: Path, times: Sequence[float]) -> dict[str, Any]:
    """What one seed reached, read from the metrics of its run."""
    from mua.observe.metrics import read_metrics

    lines = list(read_metrics(folder / "rl" / "metrics.jsonl"))
    before, after = lines[0], lines[-1]
    build_s, sft_s, rl_s = (b - a for a, b in itertools.pairwise(times))
    return {
        "seed": seed,
        "sft_success": before["initial_evaluation/test_success"],
        "sft_interval": [before[f"initial_evaluation/test_success_{bound}"] for bound in ("low", "high")],
        "rl_success": after["evaluation/test_success"],
        "rl_interval": [after[f"evaluation/test_success_{bound}"] for bound in ("low", "high")],
        "steps": len(lines),
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
    print(f"\n{'seed':>5} {'after SFT':>22} {'after RL':>22} {'gain':>7} {'seconds':>8}")
    for result in results:
        before, after = (_with_interval(result, stage) for stage in ("sft", "rl"))
        gain = result["rl_success"] - result["sft_success"]
        print(f"{result['seed']:>5} {before:>22} {after:>22} {gain:>+7.3f} {result['seconds']:>8.0f}")
    print(f"\nreward curve  {picture}\nsummary       {ROOT / 'summary.json'}")
    print(f"TensorBoard   tensorboard --logdir {ROOT}\ntraces        {ROOT}/seed-*/rl/traces")


def _with_interval(result: dict[str, Any], stage: str) -> str:
    low, high = result[f"{stage}_interval"]
    return f"{result[f'{stage}_success']:.3f} ({low:.3f} to {high:.3f})"


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def mua(*arguments: str) -> None:
    """Run one command of the project, as a person would; leave with its status if it fails."""
    print("$ mua " + shlex.join(arguments), flush=True)
    status = subprocess.run([sys.executable, "-m", "mua.cli", *arguments]).returncode
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
