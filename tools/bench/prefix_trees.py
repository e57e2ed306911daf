"""What computing common prefixes once saves: CPU time of a training step on trees against sequences side by side.

    python tools/bench/prefix_trees.py [--scale 0.25] [--hidden 256]

Shapes: groups of n trajectories that share a long prompt, and one trajectory cut into a sample for each of its
turns, as a sampler does that keeps every request (system prompt, reply and observation of 2,000, 600 and 900
tokens). All lengths are multiplied by ``--scale``. The limit is the ratio of tokens; attention over a shared
prefix is paid by every branch and is no part of it. One process, one thread, CPU time; each step is done twice
and the second counts.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

VOCABULARY = 1024
SYSTEM, REPLY, OBSERVATION = 2000, 600, 900


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.25, help="factor on all lengths")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--turns", type=int, nargs="*", default=[10, 30])
    arguments = parser.parse_args()
    print(f"{arguments.layers} layers of {arguments.hidden}, lengths x {arguments.scale:g}, one thread, "
          f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}\n")  # fmt: skip
    print("| shape | tokens | computed | limit | speed-up | share of the limit | CPU s apart | merged |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="mua-bench-") as folder:
        write_policy(Path(folder), arguments.hidden, arguments.layers)
        for name, batch in shapes(arguments.scale, arguments.turns):
            print(measured(name, batch, Path(folder)), flush=True)


def write_policy(folder: Path, hidden: int, layers: int) -> None:
    """A random Qwen3."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    heads = hidden // 32
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    attention = {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4), "head_dim": 32}
    positions = {"max_position_embeddings": 65536, "tie_word_embeddings": True}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, **shape, **attention, **positions)).save_pretrained(folder)


def shapes(scale: float, turns: list[int]) -> Iterator[tuple[str, list[tuple[np.ndarray, int]]]]:
    """Name, and for each sequence its ids and the first of its trained tokens."""
    random = np.random.default_rng(1)

    def text(length: int) -> np.ndarray:
        return random.integers(0, VOCABULARY, max(1, int(length * scale))).astype(np.int32)

    for members in (8, 16):
        prompt = text(7000)
        yield (
            f"group of {members}, prompt 7,000, answers 1,000",
            [(np.concatenate([prompt, text(1000)]), len(prompt)) for _ in range(members)],
        )
    for count in turns:
        history, samples = text(SYSTEM), []
        for _ in range(count):
            reply = text(REPLY)
            samples.append((np.concatenate([history, reply]), len(history)))
            history = np.concatenate([history, reply, text(OBSERVATION)])
        yield f"{count} turns, a sample each", samples


def measured(name: str, samples: list[tuple[np.ndarray, int]], folder: Path) -> str:
    """One row of the table."""
    found = {merge: step(samples, folder, merge) for merge in (False, True)}
    apart, merged = found[False], found[True]
    tokens = sum(len(ids) for ids, _ in samples)
    computed = tokens * (1 - merged["merged_share"])
    limit, gain = tokens / computed, apart["seconds"] / merged["seconds"]
    assert abs(apart["loss"] - merged["loss"]) < 1e-4, (apart, merged)
    return (
        f"| {name} | {tokens:,} | {computed:,.0f} | {limit:.2f} | {gain:.2f} | {gain / limit:.0%} "
        f"| {apart['seconds']:.1f} | {merged['seconds']:.1f} |"
    )


def step(samples: list[tuple[np.ndarray, int]], folder: Path, merge: bool) -> dict[str, float]:
    """Metrics of a second training step, and its CPU seconds."""
    from mua.algorithms.losses import PolicyLoss
    from mua.compat import megatron_cpu

    megatron_cpu.install()
    from mua.config.schema import MegatronConfig, ModelConfig, OptimizerConfig
    from mua.megatron.backend import MegatronBackend

    longest = max(len(ids) for ids, _ in samples)
    layout = MegatronConfig(tokens_per_row=max(longest, 16384), merge_prefixes=merge, threads=1)
    built = MegatronBackend(
        ModelConfig(path=folder, dtype="float32", max_length=65536), layout, OptimizerConfig(learning_rate=0.0),
        total_steps=10, seed=1,
    )  # fmt: skip
    loss, batch = PolicyLoss(0.2, 0.2, 0.0), _batch(samples)
    try:
        metrics: dict[str, float] = {}
        for _ in range(2):
            started = time.process_time()
            metrics = built.train_step(batch, loss) | {"seconds": time.process_time() - started}
        return metrics
    finally:
        built.close()


def _batch(samples: list[tuple[np.ndarray, int]]) -> Any:
    from mua.types import TrainBatch, TrainSequence

    trained = sum(len(ids) - first for ids, first in samples)
    sequences = []
    for number, (ids, first) in enumerate(samples):
        mask = (np.arange(len(ids)) >= first).astype(np.float32)
        old = np.full(len(ids), -np.log(VOCABULARY), np.float32)
        advantages = np.full(len(ids), (-1.0) ** number, np.float32)
        sequences.append(TrainSequence(ids, mask / np.float32(trained), advantages, old, old))
    return TrainBatch(sequences, 1.0, {"tokens": float(trained), "sequences": float(len(samples))})


if __name__ == "__main__":
    main()
