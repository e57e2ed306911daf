"""Log-probabilities and entropy against their closed form in float64, on one process and under tensor parallelism.

Covers values, gradients of both outputs, temperature, selected rows, padded vocabulary, chunks, no rows, bfloat16, and
that the gradient under tensor parallelism is neither scaled nor partial. Does not cover the model around it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mua.megatron import logprobs
from mua.megatron.logprobs import log_probabilities
from tests.distributed import run_distributed

ROWS, VALID, COLUMNS = 11, 21, 32


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(params=[1, 40, 1 << 22], ids="chunk {}".format)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", request.param)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits ``[ROWS, COLUMNS]`` with garbage in the padding, ids, rows, and weights of both outputs ``[2, n]``."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64) * 4
    logits[:, VALID:] = 50
    rows = torch.tensor([9, 0, 3, 4, 10, 7])
    ids = torch.tensor([0, 20, 15, 16, 3, 12])
    return logits, ids, rows, torch.randn(2, len(rows), generator=generator, dtype=torch.float64)


def closed_form(logits: Tensor, ids: Tensor, rows: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = (logits[rows, :VALID] / temperature).log_softmax(-1)
    return log_p.gather(1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def expected(temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Values and the gradient ``[ROWS, COLUMNS]`` of their weighted sum."""
    logits, ids, rows, weights = inputs()
    logits.requires_grad_()
    values, entropy = closed_form(logits, ids, rows, temperature)
    (weights[0] @ values + weights[1] @ entropy).backward()
    assert logits.grad is not None
    return values.detach(), entropy.detach(), logits.grad


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_values_and_gradients_are_the_closed_form(group: dist.ProcessGroup, temperature: float) -> None:
    logits, ids, rows, weights = inputs()
    logits.requires_grad_()
    values, entropy = log_probabilities(logits, ids, temperature, rows=rows, vocab_size=VALID, group=group)
    (weights[0] @ values + weights[1] @ entropy).backward()
    for own, reference in zip((values, entropy, logits.grad), expected(temperature), strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("output", [0, 1])
def test_each_output_alone_has_its_gradient(group: dist.ProcessGroup, output: int) -> None:
    logits, ids, rows, _ = inputs()

    def one(values: Tensor) -> Tensor:
        return log_probabilities(values, ids, 0.7, rows=rows, vocab_size=VALID, group=group)[output]

    assert torch.autograd.gradcheck(one, (logits.requires_grad_(),))


def test_no_rows_give_an_empty_result_and_no_gradient(group: dist.ProcessGroup) -> None:
    logits = inputs()[0].requires_grad_()
    none = torch.zeros(0, dtype=torch.int64)
    values, entropy = log_probabilities(logits, none, 1.0, rows=none, vocab_size=VALID, group=group)
    (values.sum() + entropy.sum()).backward()
    assert values.shape == entropy.shape == (0,)
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_bfloat16_logits_are_reduced_in_float32(group: dist.ProcessGroup) -> None:
    logits, ids, rows, _ = inputs()
    rounded = logits.bfloat16().requires_grad_()
    values, entropy = log_probabilities(rounded, ids, 1.0, rows=rows, vocab_size=VALID, group=group)
    assert values.dtype == entropy.dtype == torch.float32
    reference = closed_form(rounded.detach().double(), ids, rows, 1.0)
    torch.testing.assert_close(values.detach().double(), reference[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.detach().double(), reference[1], rtol=1e-5, atol=1e-5)
    values.sum().backward()
    assert rounded.grad is not None
    assert rounded.grad.dtype == torch.bfloat16


def test_logits_are_left_as_they_are(group: dist.ProcessGroup) -> None:
    logits, ids, rows, _ = inputs()
    before = logits.clone()
    log_probabilities(logits, ids, 1.0, rows=rows, vocab_size=VALID, group=group)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_must_be_positive(group: dist.ProcessGroup, temperature: float) -> None:
    logits, ids, rows, _ = inputs()
    with pytest.raises(ValueError, match="temperature must be above 0"):
        log_probabilities(logits, ids, temperature, rows=rows, vocab_size=VALID, group=group)


def shard_results() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """On each of the ranks: values, entropy, and the gradient of this rank's columns."""
    logits, ids, rows, weights = inputs()
    shard = logits.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone().requires_grad_()
    values, entropy = log_probabilities(shard, ids, 0.3, rows=rows, vocab_size=VALID, group=dist.group.WORLD)
    (weights[0] @ values + weights[1] @ entropy).backward()
    assert shard.grad is not None
    return values.detach().numpy(), entropy.detach().numpy(), shard.grad.numpy()


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_shards_give_the_same_values_and_the_whole_gradient(ranks: int) -> None:
    """With four ranks the last shard is nothing but padding. A gradient scaled by the ranks would be 2 or 4 times."""
    values, entropy, gradient = (tensor.numpy() for tensor in expected(0.3))
    results = run_distributed(shard_results, ranks)
    for own_values, own_entropy, _ in results:
        np.testing.assert_allclose(own_values, values, rtol=1e-10)
        np.testing.assert_allclose(own_entropy, entropy, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(np.concatenate([own for *_, own in results], axis=1), gradient, rtol=1e-9, atol=1e-12)
