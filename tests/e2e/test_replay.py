"""A past step once more, from the checkpoint before it and the store: the same gradients, bit for bit.

Here one rank and, as ``grid``, experts. Two ranks: test_two_ranks.py; a critic and its warm-up: test_critic.py; groups
that were chosen, in a run that was killed and resumed: test_refill.py. What is refused: unit/test_trainer_replay.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from e2e_support import DETERMINISTIC, Workshop, metrics_of, mua, replayed

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_a_step_is_replayed_bit_for_bit_and_other_settings_show(trained: Path, tmp_path: Path) -> None:
    found = replayed(trained, 2, "algorithm.divide_by_std=false", "algorithm.kl_coefficient=0.1", cwd=tmp_path)
    assert found["changed"]["overrides"] == ["algorithm.divide_by_std=false", "algorithm.kl_coefficient=0.1"]
    assert found["changed"]["cosines"][0] < 1


@pytest.mark.grid
@pytest.mark.parametrize("layout", [(), ("megatron.data_parallel=2", "megatron.expert_parallel=2")], ids=["one", "ep2"])
def test_recorded_choices_of_experts_are_replayed(workshop: Workshop, tmp_path: Path, layout: tuple[str, ...]) -> None:
    model = tmp_path / "moe"
    shutil.copytree(workshop.model, model, ignore=shutil.ignore_patterns("*.safetensors*"))
    small = json.loads((model / "config.json").read_text())
    torch.manual_seed(14)
    config = transformers.Qwen3MoeConfig(
        vocab_size=small["vocab_size"], hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4,
        num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=512, eos_token_id=small["eos_token_id"],
        tie_word_embeddings=False, initializer_range=0.15,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(model)
    choices = ("engine.routed_experts=true", "megatron.routing_replay=replay", "algorithm.minibatches=3")
    steps = ("trainer.steps=2", "trainer.save_every=2")
    mua("train", workshop.recipe, f"model.path={model}", *steps, *choices, *layout, *DETERMINISTIC, cwd=tmp_path)
    found = replayed(tmp_path / "out", 1, cwd=tmp_path)  # by way of step 0
    assert found["from"] == 0
    agreement = metrics_of(tmp_path / "out")[1]["train/moe/replay_agreement"]
    assert found["replayed"]["train/moe/replay_agreement"] == agreement < 1, (
        "the trainer alone would have chosen the same"
    )
