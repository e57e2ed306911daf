"""A tiny policy learns the domains of a configuration: cold start from their experts, then reinforcement learning.

    python -m tools.learn configs/tiny-retail.yaml --loose 0.5 [--seeds 1 2 3] [key.path=value ...]

For every seed: conversations of the scripted experts, made loose so that something is left to learn; a tokenizer of
their text and a random policy of two million parameters; supervised fine-tuning (``configs/tiny-sft.yaml``); GRPO;
success on held-out tasks before and after. Leaves a summary and the reward curve under ``runs/<name>``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mua.config.load import load_config
from mua.config.schema import ExperimentConfig
from mua.environment.selection import Selection
from mua.types import Json
from tools.make_conversations import conversations, success_of
from tools.tiny import before_and_after, build_policy, mua, print_table, say


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="key.path=value, for every command")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--loose", type=float, default=0.5, help="how often the demonstrating expert departs")
    parser.add_argument("--conversations", type=int, default=1500)
    parser.add_argument("--practice", type=int, default=0, help="practice shops (retail) to take conversations from")
    parser.add_argument("--sft-steps", type=int, default=200)
    parser.add_argument("--vocabulary", type=int, default=768)
    arguments = parser.parse_intermixed_args()
    config = load_config(arguments.config, arguments.overrides)
    root = Path("runs") / config.name
    results = []
    for seed in arguments.seeds:
        results.append(_run_seed(arguments, config, root / f"seed-{seed}", seed))
        (root / "summary.json").write_text(json.dumps({"seeds": results}, indent=2) + "\n")
    picture = _draw(root, arguments.seeds)
    print_table(results)
    print(f"\nreward curve  {picture}\nsummary       {root / 'summary.json'}")


def _run_seed(arguments: argparse.Namespace, config: ExperimentConfig, folder: Path, seed: int) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    overrides, times = [*arguments.overrides, f"seed={seed}"], [time.monotonic()]
    say(f"seed {seed}: conversations, tokenizer and a random policy")
    _build(arguments, config, folder, seed)
    times.append(time.monotonic())
    say(f"seed {seed}: supervised cold start")
    mua("sft", "configs/tiny-sft.yaml", *_common(config), f"model.path={folder}/init", f"output={folder}/sft",
        f"sft.data={folder}/conversations.jsonl", f"trainer.steps={arguments.sft_steps}", f"seed={seed}")  # fmt: skip
    times.append(time.monotonic())
    say(f"seed {seed}: reinforcement learning against SGLang rollouts, judged before and after")
    mua("train", str(arguments.config), f"model.path={folder}/sft/hf", f"output={folder}/rl", *overrides)
    times.append(time.monotonic())
    stages = dict(zip(("build", "sft", "rl"), (b - a for a, b in itertools.pairwise(times)), strict=True))
    reached = before_and_after(folder / "rl" / "metrics.jsonl", config.evaluation.split)
    return {"seed": seed, **reached, "seconds": times[-1] - times[0], "seconds_by_stage": stages}


def _common(config: ExperimentConfig) -> list[str]:
    """What supervised training must share with reinforcement learning."""
    shares = ", ".join(f"{name}: {share}" for name, share in config.environment.shares.items())
    return [
        f"model.max_length={config.model.max_length}",
        f"megatron.tokens_per_row={config.megatron.tokens_per_row}",
        'environment.name=""', f"environment.mix={{{shares}}}",
    ]  # fmt: skip


def _build(arguments: argparse.Namespace, config: ExperimentConfig, folder: Path, seed: int) -> None:
    selection = Selection.from_config(config.environment)
    kept = list(_conversations(arguments, config, seed))
    build_policy(folder / "init", kept, seed, arguments.vocabulary)
    with (folder / "conversations.jsonl").open("w") as file:
        file.writelines(json.dumps({"messages": messages}) + "\n" for messages in kept)
    held_out = selection.tasks(config.evaluation.split)[: config.evaluation.tasks or None]
    print(f"experts on {len(held_out)} held-out tasks: {success_of(selection, held_out, 0.0):.3f} solved; "
          f"as loose as in the conversations: {success_of(selection, held_out, arguments.loose):.3f}")  # fmt: skip


def _conversations(arguments: argparse.Namespace, config: ExperimentConfig, seed: int) -> Iterator[list[Json]]:
    """About the training split, or an equal share about each practice shop where some are asked for."""
    shops = range(1, arguments.practice + 1) or [0]
    for shop in shops:
        options = {**config.environment.options, **({"practice": shop} if shop else {})}
        selection = Selection.from_config(config.environment.model_copy(update={"options": options}))
        made = conversations(selection, seed, arguments.loose, successful=False)
        yield from itertools.islice(made, arguments.conversations // len(shops))


def _draw(root: Path, seeds: Sequence[int]) -> Path:
    from mua.observe.plot import plot_reward_curve

    files = {f"seed {seed}": root / f"seed-{seed}" / "rl" / "metrics.jsonl" for seed in seeds}
    return plot_reward_curve(files, root / "reward.png")


if __name__ == "__main__":
    main()
