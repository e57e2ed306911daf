"""The estimate of activations against the tensors a real forward pass saves, on the CPU in float32: of local layers.

Counted are distinct storages that autograd keeps, weights and inputs left out. Not covered: bfloat16 (the attention
kernel of the CPU works in float32), Transformer Engine's layers, kernels of a GPU, the allocator, several ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mua.config.schema import EnvironmentConfig, ExperimentConfig, MegatronConfig, ModelConfig, TrainerConfig
from mua.launch.plan.activations import LayerSizes, activations, microbatches_under_way
from mua.megatron import parallel
from mua.megatron.architecture import Architecture
from mua.megatron.microbatch import micro_batch
from mua.megatron.model import build_chunks
from mua.megatron.packing import Alignment
from mua.megatron.settings import Capabilities, Options
from tests.megatron_support import make_batch
from tests.planned_support import EXPERTS, SHAPE

TOKENS = 512
LAYERS = 4
WIDE = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "num_hidden_layers": LAYERS}
MODELS = {
    "dense": SHAPE | WIDE,
    "experts": SHAPE | WIDE | EXPERTS | {"mlp_only_layers": [], "moe_intermediate_size": 96},
}


def config_of(**megatron: Any) -> ExperimentConfig:
    return ExperimentConfig(
        name="activations",
        output=Path("nowhere"),
        model=ModelConfig(path=Path("nowhere"), dtype="float32", max_length=TOKENS + 8),
        environment=EnvironmentConfig(name="help_desk"),
        rollout={"max_tokens": TOKENS},  # type: ignore[arg-type]
        megatron=MegatronConfig.model_validate({"max_tokens_per_microbatch": TOKENS, **megatron}),
        trainer=TrainerConfig(steps=1),
    )


def saved_bytes(hf_config: dict[str, Any], config: ExperimentConfig) -> int:
    """Bytes a forward pass over one full micro-batch keeps for its backward pass, up to the logits."""
    started = parallel.initialize(config.megatron, seed=1)
    try:
        (chunk,) = build_chunks(hf_config, config.model, config.megatron)
        batch = micro_batch(make_batch((TOKENS // 2,) * 2).sequences, Alignment())
        own = {p.untyped_storage()._cdata for p in chunk.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage  # holding it keeps its address from being used again
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            chunk(batch.ids, batch.packing.positions[None], None, packed_seq_params=batch.packing)  # type: ignore[index]
        return sum(storage.nbytes() for storage in kept.values())
    finally:
        parallel.shutdown(started)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"recompute": "selective", "recompute_modules": ["mlp", "moe", "layernorm"]},
        {"swiglu_fusion": True},
    ],
    ids=lambda settings: ", ".join(f"{key} {value}" for key, value in settings.items()) or "plain",
)
@pytest.mark.parametrize("model", MODELS)
def test_estimate_is_near_what_autograd_saves(model: str, settings: dict[str, Any]) -> None:
    config = config_of(**settings)
    architecture = Architecture.from_hf(MODELS[model])
    options = Options.of(config.megatron, Capabilities.here(), experts=architecture.experts > 0)
    recompute = config.megatron.recompute
    estimate = activations(architecture, config, 0, range(LAYERS), 1, recompute, options)
    head = LayerSizes.of(architecture, config, options).final_norm()  # logits are the loss's to keep
    with torch.compiler.set_stance("force_eager"):  # Megatron compiles its fused SwiGLU; what it saves is the same
        assert estimate.kept + head == pytest.approx(saved_bytes(MODELS[model], config), rel=0.05)


def test_microbatches_under_way() -> None:
    pipeline = MegatronConfig(pipeline_parallel=4)
    assert [microbatches_under_way(pipeline, stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert microbatches_under_way(pipeline, 0, 2) == 2
    interleaved = MegatronConfig(pipeline_parallel=4, virtual_pipeline=2)
    assert [microbatches_under_way(interleaved, stage, 8) for stage in range(4)] == [5.5, 4.5, 3.5, 2.5]
    assert microbatches_under_way(interleaved, 0, 4) == 4


def test_parallelism_divides_activations() -> None:
    architecture = Architecture.from_hf(MODELS["dense"])

    def kept(**megatron: Any) -> int:
        config = config_of(**megatron)
        options = Options.of(config.megatron, Capabilities.here())
        return activations(architecture, config, 0, range(LAYERS), 1, "none", options).kept

    assert kept(context_parallel=2) == pytest.approx(kept() / 2, rel=1e-6)
    # Everything but the rotary tables, which every rank has in whole.
    rotary = LAYERS * 4 * 4 * 32 * TOKENS
    assert kept(tensor_parallel=2) == pytest.approx((kept() - rotary) / 2 + rotary, rel=1e-6)
