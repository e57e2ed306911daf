"""Log-probabilities and entropy against their closed form in float64, on one process and under tensor parallelism.

Covers values, gradients of both outputs with respect to hidden states and weight, temperature, selected and repeated
predictors, padded vocabulary, chunks, no predictors, bfloat16, logits in float32; that the gradient under tensor
parallelism is neither scaled nor partial, behind Megatron's own sequence-parallel gather; and that no logits of a
micro-batch exist, neither in the function nor in a training step. Does not cover the model around it
(tests/parity/test_megatron_layouts.py) nor what is gained (docs/benchmarks/logprobs.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mua.algorithms.losses import PolicyLoss
from mua.config.schema import AlgorithmConfig
from mua.megatron import logprobs
from mua.megatron.logprobs import log_probabilities
from tests.distributed import run_distributed
from tests.megatron_support import backend, make_batch, write_model

ROWS, HIDDEN, VALID, COLUMNS = 12, 7, 21, 32


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(params=[1, 40, 1 << 25], ids="chunk {}".format)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", request.param)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, a weight with garbage in the padding, ids, predictors, and weights of both outputs ``[2, n]``."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(COLUMNS, HIDDEN, generator=generator, dtype=torch.float64) * 1.5
    weight[VALID:] = 50
    predictors = torch.tensor([9, 0, 3, 4, 10, 3, 7])
    ids = torch.tensor([0, 20, 15, 16, 3, 2, 12])
    return hidden, weight, ids, predictors, torch.randn(2, len(predictors), generator=generator, dtype=torch.float64)


def closed_form(
    hidden: Tensor, weight: Tensor, ids: Tensor, predictors: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    log_p = ((hidden @ weight[:VALID].T)[predictors] / temperature).log_softmax(-1)
    return log_p.gather(1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def expected(temperature: float) -> list[Tensor]:
    """Values, and the gradients of their weighted sum: ``[ROWS, HIDDEN]`` and ``[COLUMNS, HIDDEN]``."""
    hidden, weight, ids, predictors, shares = inputs()
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    values, entropy = closed_form(hidden, weight, ids, predictors, temperature)
    return [values.detach(), entropy.detach(), *torch.autograd.grad(shares[0] @ values + shares[1] @ entropy, leaves)]


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_values_and_gradients_are_the_closed_form(group: dist.ProcessGroup, temperature: float) -> None:
    hidden, weight, ids, predictors, shares = inputs()
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    values, entropy = log_probabilities(
        hidden, weight, ids, temperature, predictors=predictors, vocab_size=VALID, group=group
    )
    found = torch.autograd.grad(shares[0] @ values + shares[1] @ entropy, leaves)
    for own, reference in zip((values, entropy, *found), expected(temperature), strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("output", [0, 1])
def test_each_output_alone_has_its_gradient(group: dist.ProcessGroup, output: int) -> None:
    hidden, weight, ids, predictors, _ = inputs()

    def one(states: Tensor, matrix: Tensor) -> Tensor:
        return log_probabilities(states, matrix, ids, 0.7, predictors=predictors, vocab_size=VALID, group=group)[output]

    assert torch.autograd.gradcheck(one, (hidden.requires_grad_(), weight.requires_grad_()))


def test_no_rows_give_an_empty_result_and_no_gradient(group: dist.ProcessGroup) -> None:
    hidden, weight, *_ = inputs()
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    none = torch.zeros(0, dtype=torch.int64)
    values, entropy = log_probabilities(hidden, weight, none, 1.0, predictors=none, vocab_size=VALID, group=group)
    assert values.shape == entropy.shape == (0,)
    for leaf, gradient in zip(leaves, torch.autograd.grad(values.sum() + entropy.sum(), leaves), strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))


def test_bfloat16_is_reduced_in_float32_and_added_up_in_it(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", VALID)  # a chunk a token: added up in bfloat16 it would drift
    hidden, weight, *_ = inputs()
    predictors = torch.arange(ROWS).repeat(40)
    ids = torch.arange(len(predictors)) % VALID
    low = (hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_())
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in low)
    values, entropy = log_probabilities(*low, ids, 1.0, predictors=predictors, vocab_size=VALID, group=group)
    assert values.dtype == entropy.dtype == torch.float32
    reference = closed_form(*exact, ids, predictors, 1.0)
    torch.testing.assert_close(values.detach().double(), reference[0], rtol=2e-2, atol=5e-2)  # bfloat16 logits
    own, wanted = torch.autograd.grad(values.sum(), low), torch.autograd.grad(reference[0].sum(), exact)
    assert own[1].dtype == torch.bfloat16
    apart = (own[1].double() - wanted[1]).abs().max() / wanted[1].abs().max()
    assert apart < 1e-2


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_must_be_positive(group: dist.ProcessGroup, temperature: float) -> None:
    hidden, weight, ids, predictors, _ = inputs()
    with pytest.raises(ValueError, match="temperature must be above 0"):
        log_probabilities(hidden, weight, ids, temperature, predictors=predictors, vocab_size=VALID, group=group)


def shard_results() -> list[np.ndarray]:
    """On each of the ranks: values, entropy, the gradient of this rank's tokens, and that of its part of the weight.

    Each has its tokens' hidden states and gathers the others', as behind a sequence-parallel layer.
    """
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    hidden, weight, ids, predictors, shares = inputs()
    world, rank = dist.get_world_size(), dist.get_rank()
    own, shard = (tensor.chunk(world)[rank].clone().requires_grad_() for tensor in (hidden, weight))
    gathered = gather_from_sequence_parallel_region(own, group=dist.group.WORLD)
    values, entropy = log_probabilities(
        gathered, shard, ids, 0.3, predictors=predictors, vocab_size=VALID, group=dist.group.WORLD
    )
    found = torch.autograd.grad(shares[0] @ values + shares[1] @ entropy, (own, shard))
    return [tensor.detach().numpy() for tensor in (values, entropy, *found)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_shards_give_the_same_values_and_the_whole_gradient(ranks: int) -> None:
    """With four ranks the last shard is nothing but padding. A gradient scaled by the ranks would be 2 or 4 times."""
    values, entropy, by_hidden, by_weight = (tensor.numpy() for tensor in expected(0.3))
    results = run_distributed(shard_results, ranks)
    for own_values, own_entropy, *_ in results:
        np.testing.assert_allclose(own_values, values, rtol=1e-10)
        np.testing.assert_allclose(own_entropy, entropy, rtol=1e-9, atol=1e-12)
    for place, whole in ((2, by_hidden), (3, by_weight)):
        np.testing.assert_allclose(np.concatenate([own[place] for own in results]), whole, rtol=1e-9, atol=1e-12)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes whose last or first dimension is a vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.tokens = 0
        """Tokens whose logits lay in one tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            # Logits, their transpose or a copy of them. A weight has the hidden size beside the vocabulary.
            if isinstance(tensor, Tensor) and tensor.ndim >= 2 and self.vocabulary in (*tensor.shape[-2:],):
                self.tokens = max(self.tokens, tensor.numel() // self.vocabulary)
        return result


def test_a_training_step_forms_no_logits_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, layers=1, hidden=12)  # narrower than a chunk, so that no weight is taken for logits
    in_chunk, padded = 16, 128
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", in_chunk * 101)
    with backend(tmp_path, max_tokens_per_microbatch=512, recompute="full", distributed_optimizer=False) as built:
        batch = make_batch((200, 190))
        with Largest(101) as valid, Largest(padded) as whole:
            built.log_probabilities(batch.sequences, 1.0)
            metrics = built.train_step(batch, PolicyLoss(AlgorithmConfig(epochs=2, entropy_coefficient=0.1)))
    assert metrics["train/num_microbatches"] == 1
    assert valid.tokens == in_chunk
    assert whole.tokens <= in_chunk


@pytest.mark.usefixtures("chunks")
def test_logits_in_float32_are_never_rounded(group: dist.ProcessGroup) -> None:
    """Of a bfloat16 model, with logits that have a large part in common, as a softmax does not see it."""
    hidden, weight, ids, predictors, shares = inputs()
    hidden, weight = (
        torch.cat([hidden, torch.full((ROWS, 1), 8.0)], 1),
        torch.cat([weight, torch.full((COLUMNS, 1), 4.0)], 1),
    )
    low = [tensor.bfloat16() for tensor in (hidden, weight)]
    exact, _ = closed_form(*(tensor.double() for tensor in low), ids, predictors, 1.0)
    found = {}
    for fp32 in (False, True):
        leaves = [tensor.clone().requires_grad_() for tensor in low]
        values, entropy = log_probabilities(
            *leaves, ids, 1.0, predictors=predictors, vocab_size=VALID, group=group, fp32=fp32
        )
        gradients = torch.autograd.grad(shares[0].float() @ values + shares[1].float() @ entropy, leaves)
        assert [gradient.dtype for gradient in gradients] == [torch.bfloat16] * 2
        found[fp32] = (values - exact).abs().max().item()
    assert found[True] < 1e-5
    assert found[False] > 0.01
