"""Experts in one process: balancing losses and their gradients against transformers, load metrics, recomputation.

That no layout changes any of it is shown in ``tests/parity/test_megatron_layouts.py``.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from mua.algorithms.losses import CrossEntropyLoss, LossTerms, TokenTensors
from mua.megatron.moe import GroupedExperts
from tests.megatron_support import OPTIMIZER, backend, gradients, make_batch, write_model

EXPERTS, CHOSEN, LAYERS = 8, 2, 2
UNCLIPPED = OPTIMIZER.model_copy(update={"clip_grad": 0.0})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, layers=LAYERS, experts=EXPERTS)
    return path


def no_loss(logprobs: Tensor, entropy: Tensor, tokens: TokenTensors) -> LossTerms:
    return LossTerms(logprobs.sum() * 0.0, {}, {})


def router_logits(folder: Path) -> tuple[Any, list[Tensor]]:
    """transformers' model and, for each layer, its router's logits over all sequences of the batch."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    logits: list[list[Tensor]] = [[] for _ in range(LAYERS)]

    def record(layer: int, gate: Any, hidden: Tensor) -> None:
        logits[layer].append(F.linear(hidden.view(-1, hidden.shape[-1]), gate.weight))

    for index, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(lambda gate, inputs, _, index=index: record(index, gate, inputs[0]))
    for sequence in make_batch().sequences:
        model(torch.from_numpy(sequence.ids.astype(np.int64))[None])
    return model, [torch.cat(parts) for parts in logits]


def balance(logits: Tensor) -> Tensor:
    share = F.one_hot(logits.topk(CHOSEN).indices, EXPERTS).sum((0, 1)) / (len(logits) * CHOSEN)
    return EXPERTS * (share * logits.softmax(-1).mean(0)).sum()


def z_loss(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize(("key", "formula"), [("moe_aux_loss", balance), ("moe_z_loss", z_loss)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_balancing_losses_have_the_gradient_of_their_formula(
    key: str, formula: Any, recompute: str, folder: Path
) -> None:
    model, logits = router_logits(folder)
    losses = [formula(layer) for layer in logits]
    (0.7 * sum(losses)).backward()
    settings: dict[str, Any] = {
        key: 0.7,
        "max_tokens_per_microbatch": 512,
        "recompute": recompute,
        "optimizer": UNCLIPPED,
    }
    with backend(folder, distributed_optimizer=False, **settings) as built:
        metrics = built.train_step(make_batch(), no_loss)
        found = gradients(built)
    assert metrics[key.replace("moe_", "train/moe/")] == pytest.approx(float(sum(losses)) / LAYERS, rel=1e-5)
    assert metrics["train/loss"] == 0
    for name in ("model.embed_tokens.weight", *(f"model.layers.{layer}.mlp.gate.weight" for layer in range(LAYERS))):
        expected = model.get_parameter(name).grad.numpy()
        assert np.abs(expected).max() > 1e-4
        np.testing.assert_allclose(found[name], expected, atol=1e-5 * np.abs(expected).max(), err_msg=name)


DTYPES = {"float32": 1e-6, "bfloat16": 2e-2}


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_in_one_product_are_experts_one_after_the_other(dtype: str, folder: Path) -> None:
    with backend(folder, dtype=dtype) as built:
        experts = built.policy.chunks[0].decoder.layers[0].mlp.experts
        assert type(experts) is GroupedExperts
        kind = experts.local_experts[0].linear_fc1.weight.dtype
        hidden = torch.randn(19, 32, dtype=kind, requires_grad=True)
        probs = torch.rand(19, requires_grad=True)
        counts = torch.tensor([3, 0, 7, 1, 0, 0, 8, 0])
        found = []
        for compute in (GroupedExperts.forward, GroupedExperts.__base__.forward):
            output, bias = compute(experts, hidden, counts, probs)
            assert bias is None
            weights = [w for expert in experts.local_experts for w in expert.parameters()]
            grads = torch.autograd.grad(output.float().square().sum(), [hidden, probs, *weights], allow_unused=True)
            found.append([output, *(torch.zeros(1) if grad is None else grad for grad in grads)])
    for own, other in zip(*found, strict=True):
        if own.shape == other.shape:
            torch.testing.assert_close(own, other, rtol=DTYPES[dtype], atol=DTYPES[dtype])
        else:  # an expert without tokens has no gradient, or one of zeros
            assert not own.any()


@pytest.mark.parametrize("settings", [{}, {"recompute": "full"}, {"max_tokens_per_microbatch": 512}])
def test_load_counts_every_token_once_and_no_padding(settings: dict[str, Any], folder: Path) -> None:
    _, logits = router_logits(folder)
    loads = [F.one_hot(layer.topk(CHOSEN).indices, EXPERTS).sum((0, 1)).double() for layer in logits]
    shares = [load / load.sum() for load in loads]
    with backend(folder, **settings) as built:
        built.log_probabilities(make_batch().sequences, 1.0)  # counts nothing
        metrics = built.train_step(make_batch(), CrossEntropyLoss())
    for layer, load in enumerate(loads):
        assert metrics[f"train/moe/layers/{layer:02d}/load_max_over_mean"] == pytest.approx(
            float(load.max() / load.mean())
        )
    assert metrics["train/moe/load_max_over_mean"] == pytest.approx(
        max(float(load.max() / load.mean()) for load in loads)
    )
    assert metrics["train/moe/load_min_over_mean"] == pytest.approx(
        min(float(load.min() / load.mean()) for load in loads)
    )
    entropies = [float(torch.special.entr(share).sum() / np.log(EXPERTS)) for share in shares]
    assert metrics["train/moe/load_entropy"] == pytest.approx(np.mean(entropies))
    assert not {"train/moe/aux_loss", "train/moe/z_loss"} & metrics.keys()


def test_a_trained_network_is_freed(folder: Path) -> None:
    """Megatron's dispatchers keep a graph that no collector sees through."""
    with backend(folder, distributed_optimizer=False, max_tokens_per_microbatch=512) as built:
        built.train_step(make_batch(), CrossEntropyLoss())
        chunk = weakref.ref(built.policy.chunks[0])
    del built
    gc.collect()
    assert chunk() is None
