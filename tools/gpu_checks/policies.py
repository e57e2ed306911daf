"""What checks train and score: random policies, token sequences, a learner and a network of nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mua.algorithms.losses import LossTerms, TokenTensors
from mua.config.schema import EngineConfig, ExperimentConfig, MegatronConfig, ModelConfig, OptimizerConfig
from mua.trainer.learner import Learner
from mua.types import Float32Array, TrainBatch, TrainSequence
from tools.gpu_checks.child import Place

VOCABULARY = 1000


def random_policy(folder: Path, place: Place, *, experts: int = 0, layers: int = 2, scale: int = 1) -> Any:
    """Write a random float32 policy of the Qwen3 family and give it as transformers' model, on the device.

    No weight has a special value, norms included, so that no mistake in their use stays hidden; no token pads, for
    transformers gives its embedding no gradient. Heads are 64 wide on a GPU, which every kernel takes, 16 on a CPU.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    head = place.pick(64, 16)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 8 * head * scale, "intermediate_size": 24 * head * scale,
        "num_hidden_layers": layers, "num_attention_heads": 8 * scale, "num_key_value_heads": 2 * scale,
        "head_dim": head, "max_position_embeddings": 4096, "tie_word_embeddings": False, "initializer_range": 0.05,
        "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    model: Any
    with torch.device(place.device):  # a processor draws a billion numbers in a minute
        if experts:
            sparse = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 4 * head * scale}
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **sparse, norm_topk_prob=True))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model.eval()


def sequences(lengths: Sequence[int], vocabulary: int = VOCABULARY, seed: int = 0) -> list[TrainSequence]:
    """Random ids, of which about half train, with weights that add up to about 1."""
    drawn, found = np.random.default_rng(seed), []
    total = np.float32(max(1.0, sum(lengths) / 2))
    for length in lengths:
        ids = drawn.integers(0, vocabulary, length).astype(np.int32)
        weights = (drawn.random(length) < 0.5).astype(np.float32) / total
        weights[0] = 0.0
        advantages, old = (drawn.normal(size=length).astype(np.float32) for _ in range(2))
        found.append(TrainSequence(ids, weights, advantages, old, old))
    return found


def batch(of: Sequence[TrainSequence]) -> TrainBatch:
    tokens = float(sum(int(sequence.trained.sum()) for sequence in of))
    return TrainBatch(list(of), 1.0, {"tokens": tokens, "sequences": float(len(of))})


def likelihood(logprobs: Tensor, entropy: Tensor, tokens: TokenTensors) -> LossTerms:
    """The weighted negative log-likelihood, whose gradient transformers gives too."""
    return LossTerms(-(tokens.weights * logprobs).sum(), {}, {})


@contextmanager
def learner(folder: Path, dtype: str, learning_rate: float = 1e-3, **megatron: Any) -> Iterator[Learner]:
    """The product's learner of the policy in ``folder``, of which nothing else of a run is configured."""
    config = ExperimentConfig.model_construct(
        model=ModelConfig(path=folder, dtype=dtype, max_length=4096),  # type: ignore[arg-type]
        megatron=MegatronConfig(**{"max_tokens_per_microbatch": 4096, "threads": 1, **megatron}),
        optimizer=OptimizerConfig(learning_rate=learning_rate, clip_grad=0.0, weight_decay=0.0),
        engine=EngineConfig(transport="colocated"),
        seed=1,
    )
    built = Learner(config, total_steps=100, driven=False)
    try:
        yield built
    finally:
        built.close()


def exported(built: Learner, values: Callable[[Any], Tensor] = lambda parameter: parameter.data) -> dict[str, Tensor]:
    """The policy's tensors, or what ``values`` says of each parameter, under their Hugging Face names, float32."""
    from torch import distributed

    from megatron_bridge.plan import plan_model
    from megatron_bridge.reshard import Resharder

    parameters = list(built.policy.parameters())
    weights = [parameter.data for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data = values(parameter).to(parameter.dtype)
        plan = plan_model(built.policy.chunks)
        ranks = dict.fromkeys(distributed.get_process_group_ranks(plan.group), (0,))
        resharder = Resharder(plan, ranks, 1 << 28, by_turns=False)
        found: dict[str, Tensor] = {}
        for index, layout in enumerate(resharder.buckets):
            flat = resharder.assemble(index)[0]
            found |= {tensor.spec.name: tensor.view(flat).float().clone() for tensor in layout.tensors}
        return found
    finally:
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data = weight


def bits(tensors: Mapping[str, Tensor] | Sequence[Float32Array]) -> str:
    """A digest of every bit."""
    import hashlib

    digest = hashlib.sha256()
    values = tensors.values() if isinstance(tensors, Mapping) else tensors
    for value in values:
        array = value.detach().cpu().contiguous().view(torch.uint8).numpy() if isinstance(value, Tensor) else value
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def seconds_of(work: Callable[[], object], place: Place, times: int = 3) -> float:
    """The least time of one call after a first one that is not counted; the device is idle before and after."""
    work()
    taken = []
    for _ in range(times):
        wait(place)
        began = time.perf_counter()
        work()
        wait(place)
        taken.append(time.perf_counter() - began)
    return min(taken)


def wait(place: Place) -> None:
    if place.cuda:
        torch.cuda.synchronize()
