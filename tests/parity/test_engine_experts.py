"""The experts an engine reports are those of transformers' router, also over several turns with a warm prefix cache.

Real SGLang on CPU with a tiny Qwen3-MoE. Sampling is greedy, so that the tokens are the same everywhere: among drawn
ones there is now and then one for which two experts are as good as each other, and rounding decides. Not covered:
engines with expert parallelism, CUDA, and what the trainer does with the choices (tests/parity/test_routing_replay.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_fixtures import make_pool

from mua.engine import SamplingParams
from mua.types import Int32Array

LAYERS, EXPERTS, TOP_K = 3, 8, 2
MARGIN = 1e-3
"""Between the router's last chosen expert and the next: a hundred times what float32 makes of other kernels."""


def write_qwen3_moe(folder: Path) -> transformers.PreTrainedModel:
    """A random Qwen3-MoE; every layer has experts, as SGLang 0.5.23 takes for granted."""
    torch.manual_seed(14)
    config = transformers.Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        norm_topk_prob=True, max_position_embeddings=2048, eos_token_id=None, pad_token_id=0, bos_token_id=None,
        tie_word_embeddings=False, initializer_range=0.15,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder)
    return model


def router_choices(model: transformers.PreTrainedModel, ids: Int32Array) -> tuple[dict[int, Any], float]:
    """transformers' top experts of each MoE layer, sorted, ``[T, top k]``, and by how much the closest was decided."""
    choices: dict[int, Any] = {}
    margins: list[float] = []
    hooks = []
    for index, layer in enumerate(model.model.layers):

        def note(_module: Any, inputs: Any, _output: Any, index: int = index, layer: Any = layer) -> None:
            logits = inputs[0].reshape(-1, 64) @ layer.mlp.gate.weight.T
            choices[index] = np.sort(logits.topk(TOP_K).indices.numpy(), axis=1)
            best = logits.topk(TOP_K + 1).values
            margins.append(float((best[:, -2] - best[:, -1]).min()))

        hooks.append(layer.mlp.register_forward_hook(note))
    with torch.no_grad():
        model(torch.from_numpy(ids.astype(np.int64))[None])
    for hook in hooks:
        hook.remove()
    return choices, min(margins)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_engines")
async def test_experts_are_those_of_transformers_turn_after_turn(tmp_path: Path) -> None:
    model = write_qwen3_moe(tmp_path / "moe")
    async with make_pool(tmp_path / "logs", routed_experts=True) as pool:
        await pool.start(tmp_path / "moe")
        ids = np.arange(20, 60, dtype=np.int32)
        known: list[Any] = []
        for turn in range(3):
            routed = sum(len(rows) for rows in known)
            params = SamplingParams(0.0, 12, (), experts_from=routed)
            found = await pool.generate(ids.tolist(), params, session="one", deadline_s=120)
            assert found.experts is not None
            assert found.experts.dtype == np.uint8
            assert (found.cached_tokens > 0) == (turn > 0)
            known.append(found.experts)
            ids = np.concatenate([ids, found.ids, np.arange(300, 310, dtype=np.int32)])
            assert sum(len(rows) for rows in known) == len(ids) - 10 - 1
        plain = await pool.generate(ids.tolist(), SamplingParams(1.0, 4, ()), session="one", deadline_s=120)
        assert plain.experts is None
    choices = np.concatenate(known).reshape(-1, LAYERS, TOP_K)
    expected, margin = router_choices(model, ids)
    assert margin > MARGIN, "too close to tell; take weights of another seed"
    for layer, rows in expected.items():
        assert np.array_equal(np.sort(choices[:, layer], axis=1), rows[: len(choices)])
