"""A tokenizer of a domain's own text, and a small random policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mua.types import Json
from tools import kit

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
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
"""In place of parts of it, where any policy will do."""
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
    from transformers import AutoTokenizer

    from environments.kit.demonstrate import spoken_text
    from workbench.tokenizer import train_tokenizer

    train_tokenizer(spoken_text(list(conversations)), folder, vocab_size=vocabulary, apart=apart)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>")}
    policy = kit.random_qwen3(folder, seed, **(POLICY | dict(shape)), **ends)
    print(f"{sum(p.numel() for p in policy.parameters()):,} parameters, {len(tokenizer)} tokens in the vocabulary")
