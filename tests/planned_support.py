"""Bytes that a real multi-process run holds, beside those the plan foresaw for each rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mua.config.schema import (
    AlgorithmConfig,
    EnvironmentConfig,
    ExperimentConfig,
    MegatronConfig,
    ModelConfig,
    TrainerConfig,
)
from mua.launch.plan.gpu_memory import ObjectBytes, measure, rank_bytes
from mua.megatron.architecture import Architecture, architecture_of
from mua.megatron.settings import Capabilities, Options
from tests.distributed import run_on_workers

SHAPE: dict[str, Any] = {
    "vocab_size": 1001,  # padded to 1024
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],  # one layer stays dense
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": SHAPE,
    "dense, tied": SHAPE | {"tie_word_embeddings": True},
    "experts": SHAPE | EXPERTS,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One run: a model, a layout by :mod:`mua.megatron.layouts`' names, an optimizer, a type, a critic or none."""

    model: str
    layout: str
    distributed: bool = True
    dtype: str = "bfloat16"
    critic: bool = False

    @property
    def title(self) -> str:
        optimizer = "distributed" if self.distributed else "replicated"
        return f"{self.model}; {self.layout}; {self.dtype}; {optimizer} optimizer{'; critic' * self.critic}"

    def config(self, folder: Path) -> ExperimentConfig:
        from mua.megatron.layouts import sizes

        return ExperimentConfig(
            name="planned",
            output=folder / "out",
            model=ModelConfig.model_validate({"path": folder / self.model, "dtype": self.dtype, "max_length": 256}),
            environment=EnvironmentConfig(name="help_desk"),
            rollout={"max_tokens": 64},  # type: ignore[arg-type]
            megatron=MegatronConfig.model_validate(
                {
                    "max_tokens_per_microbatch": 64,
                    "distributed_optimizer": self.distributed,
                    "threads": 1,
                    **sizes(self.layout),
                }
            ),
            algorithm=AlgorithmConfig(advantage="gae" if self.critic else "grpo"),
            trainer=TrainerConfig(steps=1),
        )


def write_models(folder: Path) -> None:
    """Every model of :data:`MODELS` with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, shape in MODELS.items():
        config = AutoConfig.for_model(**{key: value for key, value in shape.items() if key != "architectures"})
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)


def planned(folder: Path, case: Case) -> list[ObjectBytes]:
    """What the plan says each rank holds of the policy, or of the critic if the case has one."""
    config = case.config(folder)
    architecture: Architecture = architecture_of(config.model)
    options = Options.of(config.megatron, Capabilities.here())
    ranks = [rank_bytes(architecture, config, rank, options) for rank in range(config.megatron.world_size)]
    return [rank.bytes if rank.critic is None else rank.critic for rank in ranks]


def measured(folder: Path, case: Case) -> list[ObjectBytes]:
    """What each rank of a real run holds of it after one training step."""
    world = case.config(folder).megatron.world_size
    return [ObjectBytes(**found) for found in run_on_workers(world, _held, str(folder), asdict(case), seconds=600.0)]


def _held(folder: str, case: dict[str, Any]) -> dict[str, int]:
    from mua.algorithms.losses import PolicyLoss, ValueLoss
    from mua.config.schema import AlgorithmConfig
    from mua.trainer.learner import Learner
    from tests.megatron_support import make_batch, with_values

    config = Case(**case).config(Path(folder))
    built = Learner(config, total_steps=1, critic_steps=1 if case["critic"] else None, driven=False)
    try:
        built.train_step(make_batch(), PolicyLoss(AlgorithmConfig(epochs=2)))
        network = built.policy
        if case["critic"]:
            built.train_values(with_values(make_batch()), ValueLoss(None))
            network = built.critic
        return asdict(measure(network.chunks, network.wrapped, network.optimizer))
    finally:
        built.close()
