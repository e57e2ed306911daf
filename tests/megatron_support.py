"""Tiny Qwen3 models, dense and with experts, batches, and a training backend, for the tests of ``mua.megatron``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from mua.config.schema import CriticConfig, EngineConfig, ExperimentConfig, MegatronConfig, ModelConfig, OptimizerConfig
from mua.megatron.checkpoint_manifest import FORMAT, _checksum, read_manifest, write_manifest
from mua.megatron.checkpoint_manifest import NAME as MANIFEST
from mua.trainer.learner import Learner
from mua.types import Float32Array, TrainBatch, TrainSequence
from mua.utils.checksums import digest_of_file
from tests.distributed import share_a_device
from tests.exported_tensors import export_hf

VOCAB = 101  # no multiple of anything: the embedding is padded, and not evenly over the shards
LENGTHS = (17, 5, 40, 2, 23, 31, 8, 12, 29)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-4, clip_grad=1.0)


def write_model(
    folder: Path, *, layers: int = 2, hidden: int = 32, experts: int = 0, tied: bool = True, seed: int = 3, **more: Any
) -> transformers.PreTrainedModel:
    """Saves a random float32 model in which no weight, norms included, has a special value.

    Args:
        experts: of each layer, of which two are used for a token; 0 for a dense model.
        tied: whether the output layer of a dense model is the embedding; with experts it is not.
        more: of the model's configuration, in place of what stands here.
    """
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 512,
        "tie_word_embeddings": tied and not experts, "initializer_range": 0.2,
        "rope_parameters": {"rope_theta": 5e4, "rope_type": "default"},
    }  # fmt: skip
    model: transformers.PreTrainedModel
    if experts:
        sparse = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**(shape | sparse | more)))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(shape | more)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def make_batch(lengths: Sequence[int] = LENGTHS, *, temperature: float = 1.0, seed: int = 0) -> TrainBatch:
    """Random ids, about half of them trained, with advantages and old log-probabilities near the model's own."""
    random = np.random.default_rng(seed)
    drawn = []
    for length in lengths:
        mask = (random.random(length) < 0.5).astype(np.float32)
        mask[0] = 0
        ids = random.integers(0, VOCAB, length).astype(np.int32)
        advantages = random.normal(size=length).astype(np.float32)
        drawn.append((ids, mask, advantages, random.normal(-4.6, 0.5, size=length).astype(np.float32)))
    tokens = sum(int(mask.sum()) for _, mask, *_ in drawn)
    sequences = [
        TrainSequence(ids, mask / np.float32(max(tokens, 1)), advantages, logprobs, logprobs)
        for ids, mask, advantages, logprobs in drawn
    ]
    return TrainBatch(sequences, temperature, {"tokens": float(tokens), "sequences": float(len(lengths))})


def with_values(batch: TrainBatch, seed: int = 0) -> TrainBatch:
    """The batch with old values near 0 and returns that follow from the token before, so that they can be learned."""
    random = np.random.default_rng(seed)
    sequences = [
        replace(
            sequence,
            values=random.normal(0.0, 0.1, len(sequence)).astype(np.float32),
            returns=np.append(0.0, sequence.ids[:-1] % 3 - 0.7).astype(np.float32),
        )
        for sequence in batch
    ]
    return replace(batch, sequences=sequences)


def critic_heads(built: Learner) -> list[Any]:
    """The output layers of the critic on this rank: one on the last pipeline stage, none elsewhere."""
    return [chunk.output_layer for chunk in built.critic.chunks if chunk.post_process]


def learner_config(
    model: ModelConfig, megatron: MegatronConfig, optimizer: OptimizerConfig, critic: CriticConfig | None = None
) -> ExperimentConfig:
    """What a learner reads, and nothing of the rest of a run."""
    return ExperimentConfig.model_construct(
        model=model, megatron=megatron, optimizer=optimizer, critic=critic, engine=EngineConfig(), seed=1
    )


@contextmanager
def backend(folder: Path, **settings: Any) -> Iterator[Learner]:
    """A learner on ``folder``; settings of the model, the layout and the constructor by their own names.

    Every rank makes every call. ``critic``: train one, with these settings.
    """
    share_a_device()
    model = {key: settings.pop(key) for key in ("dtype",) if key in settings}
    optimizer, critic = settings.pop("optimizer", OPTIMIZER), settings.pop("critic", None)
    construction = {"total_steps": 10} | {
        key: settings.pop(key) for key in ("with_reference", "total_steps", "critic_steps") if key in settings
    }
    if critic is not None:
        construction.setdefault("critic_steps", construction["total_steps"])
    config = learner_config(
        ModelConfig(**{"path": folder, "dtype": "float32", "max_length": 512, **model}),
        MegatronConfig(**{"max_tokens_per_microbatch": 64, "threads": 1, **settings}),
        optimizer,
        critic,
    )
    built = Learner(config, driven=False, **construction)
    try:
        yield built
    finally:
        built.close()


def exported(built: Learner) -> dict[str, Float32Array]:
    """The policy's tensors under their Hugging Face names."""
    built.onload()  # what the last step left to be gathered
    return {name: tensor.float().numpy().copy() for name, tensor in export_hf(built.policy.chunks)}


def gradients(built: Learner) -> dict[str, Float32Array]:
    """The (clipped) gradients left by the last step, under Hugging Face names; needs ``distributed_optimizer=False``.

    The bridge exports whatever the parameters hold, so for a moment they hold their gradients.
    """
    parameters = list(built.policy.parameters())
    weights = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.main_grad  # type: ignore[attr-defined]
    result = exported(built)
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data = weight
    return result


def reseal(checkpoint: Path, **changes: Any) -> None:
    """Write the manifest of ``checkpoint`` again, of its files as they are; what is changed in it by name."""
    content = read_manifest(checkpoint)
    digests = {name: str(digest_of_file(checkpoint / name)) for name in content["files"]}
    for key in ("format", "files", "checksum"):
        del content[key]
    if "files" not in changes:
        write_manifest(checkpoint, content | changes, digests)
        return
    described = {"format": FORMAT, **content, **changes}
    (checkpoint / MANIFEST).write_text(json.dumps({**described, "checksum": _checksum(described)}))


def assert_gradients_alike(own: Mapping[str, Float32Array], expected: Mapping[str, Float32Array]) -> None:
    """Up to a hundred-thousandth of the largest."""
    assert own.keys() == expected.keys()
    largest = max(np.abs(values).max() for values in expected.values())
    for name, values in expected.items():
        np.testing.assert_allclose(own[name], values, atol=1e-5 * largest, rtol=0, err_msg=name)
