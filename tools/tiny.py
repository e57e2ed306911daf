"""What demonstrations share: a tokenizer of a domain's own text, a small random policy, commands run as a person."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mua.types import Json

POLICY = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 10_000.0,
    "initializer_range": 0.06,
    "tie_word_embeddings": True,
}
"""A Qwen3 of two million parameters."""
VOCABULARY = 768


def build_policy(
    folder: Path,
    conversations: Iterable[Sequence[Json]],
    seed: int,
    vocabulary: int = VOCABULARY,
    shape: Mapping[str, Any] = {},
    apart: Sequence[str] = (),
) -> None:
    """A tokenizer trained on the conversations' text, and random weights that fit it, as a Hugging Face folder.

    ``shape`` replaces parts of :data:`POLICY`; ``apart``: words that stand alone in the tokenizer.
    """
    from workbench.demonstrate import spoken_text
    from workbench.tokenizer import train_tokenizer

    train_tokenizer(spoken_text(list(conversations)), folder, vocab_size=vocabulary, apart=apart)
    _initialise(folder, seed, POLICY | dict(shape))


def write_conversations(file: Path, conversations: Iterable[Sequence[Json]]) -> None:
    """One JSON object per line, as ``sft.data`` reads it; what has been written is not held."""
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"messages": messages}) + "\n" for messages in conversations)


def _initialise(folder: Path, seed: int, shape: Mapping[str, Any]) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    torch.manual_seed(seed)
    policy = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), eos_token_id=end_of_turn, **shape))
    policy.save_pretrained(folder)
    print(f"{sum(p.numel() for p in policy.parameters()):,} parameters, {len(tokenizer)} tokens in the vocabulary")


def before_and_after(metrics: Path, split: str = "test") -> dict[str, Any]:
    """Success on held-out tasks before the first and after the last step, with intervals, from a run's metrics."""
    from mua.observe.metrics_log import read_metrics

    lines = list(read_metrics(metrics))
    before, after = f"initial_evaluation/{split}_success", f"evaluation/{split}_success"
    bounds = ("low", "high")
    return {
        "sft_success": lines[0][before],
        "sft_interval": [lines[0][f"{before}_{bound}"] for bound in bounds],
        "rl_success": lines[-1][after],
        "rl_interval": [lines[-1][f"{after}_{bound}"] for bound in bounds],
        "steps": len(lines),
    }


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """A line a seed: success before and after, gain, time."""
    print(f"\n{'seed':>5} {'after SFT':>22} {'after RL':>22} {'gain':>7} {'seconds':>8}")
    for result in results:
        before, after = (_with_interval(result, stage) for stage in ("sft", "rl"))
        gain = result["rl_success"] - result["sft_success"]
        print(f"{result['seed']:>5} {before:>22} {after:>22} {gain:>+7.3f} {result['seconds']:>8.0f}")


def _with_interval(result: dict[str, Any], stage: str) -> str:
    low, high = result[f"{stage}_interval"]
    return f"{result[f'{stage}_success']:.3f} ({low:.3f} to {high:.3f})"


def say(text: str) -> None:
    """A heading between commands."""
    print(f"\n== {text}", flush=True)


def mua(*arguments: str) -> None:
    """Run one command of the project, as a person would; leave with its status if it fails."""
    print("$ mua " + shlex.join(arguments), flush=True)
    status = subprocess.run([sys.executable, "-m", "mua.cli", *arguments]).returncode
    if status:
        sys.exit(status)
