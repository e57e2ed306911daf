"""Losses, their gradients and their metrics against float64 brute force, finite differences and closed forms.

Does not cover how the training backend makes log-probabilities or reduces over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mua.algorithms.losses import CrossEntropyLoss, LossTerms, PolicyLoss, TokenTensors, finish_metrics
from mua.config.schema import AlgorithmConfig

LOW, HIGH = 0.2, 0.3


def tokens(n: int, *, seed: int = 0, reference: bool = True, dtype: torch.dtype = torch.float64) -> TokenTensors:
    g = torch.Generator().manual_seed(seed)

    def normal(scale: float, shift: float = 0.0) -> Tensor:
        return torch.randn(n, generator=g, dtype=dtype) * scale + shift

    weights = torch.rand(n, generator=g, dtype=dtype) + 0.1
    return TokenTensors(
        weights=weights / weights.sum() if n else weights,
        advantages=normal(1.0),
        behavior_logprobs=normal(0.3, -2),
        old_logprobs=normal(0.3, -2),
        reference_logprobs=normal(0.3, -2) if reference else None,
    )


def logprobs_of(n: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(n, generator=g, dtype=dtype) * 0.3 - 2).requires_grad_()


def policy_loss(kl: float = 0.0, **more: Any) -> PolicyLoss:
    """Not on-policy, unless ``epochs`` says 1."""
    chosen = {"clip_low": LOW, "clip_high": HIGH, "kl_coefficient": kl, "epochs": 2}
    return PolicyLoss(AlgorithmConfig().model_copy(update=chosen | more))


def run(loss: Callable[..., LossTerms], logprobs: Tensor, given: TokenTensors) -> LossTerms:
    return loss(logprobs, torch.full_like(logprobs, 0.7).detach(), given)


def brute_force(lp: list[float], given: TokenTensors, kl: float) -> float:
    total = 0.0
    for i, value in enumerate(lp):
        advantage, weight = given.advantages[i].item(), given.weights[i].item()
        ratio = math.exp(value - given.old_logprobs[i].item())
        bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
        total -= weight * min(ratio * advantage, bounded * advantage)
        if kl:
            x = given.reference_logprobs[i].item() - value
            total += weight * kl * (math.exp(x) - x - 1)
    return total


@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_grpo_equals_the_brute_force(kl: float):
    given, lp = tokens(64), logprobs_of(64)
    terms = run(policy_loss(kl), lp, given)
    assert terms.loss.item() == pytest.approx(brute_force(lp.tolist(), given, kl), rel=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("objective", ["grpo", "sapo"])
def test_the_whole_loss_has_the_gradient_of_finite_differences(objective: str, estimator: str):
    """Objectives that stop no gradient, dual clip and every KL estimator; tokens without weight have none."""
    given, lp = tokens(24), logprobs_of(24)
    given = replace(given, weights=given.weights * (torch.arange(24) % 3 > 0))
    loss = policy_loss(0.4, loss=objective, dual_clip=1.5, kl_estimator=estimator)
    run(loss, lp, given).loss.backward()
    step = 1e-6
    for i in range(24):
        moved = (lp.detach().index_add(0, torch.tensor([i]), torch.tensor([s]).double()) for s in (step, -step))
        up, down = (run(loss, values, given).loss.item() for values in moved)
        assert lp.grad[i].item() == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-8)
        assert (lp.grad[i].item() == 0) >= (i % 3 == 0)


def test_extreme_ratios_stay_finite_in_float32():
    distance, advantages = torch.tensor([-1e4, -100.0, 100.0, 1e4]).repeat(3), torch.tensor([-1.0, 0.0, 1.0])
    lp = (distance - 1e4 - 1).requires_grad_()
    far = torch.full((12,), -1e4 - 1.0)
    given = TokenTensors(torch.ones(12), advantages.repeat_interleave(4), far, far, far)
    terms = run(policy_loss(0.1), lp, given)
    terms.loss.backward()
    assert torch.isfinite(terms.loss)
    assert torch.isfinite(lp.grad).all()
    assert all(torch.isfinite(v) for v in [*terms.sums.values(), *terms.maxima.values()])


def test_a_missing_reference_is_an_error():
    with pytest.raises(ValueError, match="kl_coefficient"):
        run(policy_loss(0.1), logprobs_of(2), tokens(2, reference=False))


def test_cross_entropy_and_its_gradient():
    given, lp = tokens(16, reference=False), logprobs_of(16)
    terms = run(CrossEntropyLoss(), lp, given)
    terms.loss.backward()
    expected = -math.fsum(w * v for w, v in zip(given.weights.tolist(), lp.tolist(), strict=True))
    assert terms.loss.item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(lp.grad, -given.weights, rtol=0, atol=0)


def expected_metrics(lp: list[float], given: TokenTensors, trainer: list[float]) -> dict[str, float]:
    n, old, behavior = len(lp), given.old_logprobs.tolist(), given.behavior_logprobs.tolist()
    advantages = given.advantages.tolist()
    ratios = [math.exp(a - b) for a, b in zip(lp, old, strict=True)]
    gaps = [t - b for t, b in zip(trainer, behavior, strict=True)]
    reference = [r - v for r, v in zip(given.reference_logprobs.tolist(), lp, strict=True)]
    return {
        "train/tokens": n,
        "train/entropy": 0.7,
        "train/logprob": math.fsum(lp) / n,
        "train/ratio": math.fsum(ratios) / n,
        "train/ratio_max": max(ratios),
        "train/advantage_abs": math.fsum(map(abs, advantages)) / n,
        "train/pg_clipfrac_low": sum(r < 1 - LOW and a < 0 for r, a in zip(ratios, advantages, strict=True)) / n,
        "train/pg_clipfrac_high": sum(r > 1 + HIGH and a > 0 for r, a in zip(ratios, advantages, strict=True)) / n,
        "train/ppo_kl": -math.fsum(map(math.log, ratios)) / n,
        "train/ppo_kl_k3": math.fsum(r - 1 - math.log(r) for r in ratios) / n,
        "train/ref_kl": math.fsum(math.exp(x) - x - 1 for x in reference) / n,
        "train/train_rollout_logprob_abs_diff": math.fsum(map(abs, gaps)) / n,
        "train/train_rollout_logprob_abs_diff_max": max(map(abs, gaps)),
        "train/train_rollout_kl": -math.fsum(gaps) / n,
        "train/train_rollout_kl_k3": math.fsum(math.exp(g) - g - 1 for g in gaps) / n,
        "train/train_rollout_ratio": math.fsum(map(math.exp, gaps)) / n,
        "train/token_mult_prob_error": math.fsum(math.exp(abs(g)) for g in gaps) / n,
        "train/loss": brute_force(lp, given, 0.1),
        "train/pg_loss": brute_force(lp, given, 0.0),
        "train/kl_loss": brute_force(lp, given, 0.1) - brute_force(lp, given, 0.0),
    }


@pytest.mark.parametrize("source", ["engine", "recompute"])
def test_metrics_equal_the_brute_force(source: str):
    given, lp = tokens(50), logprobs_of(50)
    terms = run(policy_loss(0.1, old_logprobs=source), lp, given)
    trainer = lp.tolist() if source == "engine" else given.old_logprobs.tolist()
    expected = expected_metrics(lp.tolist(), given, trainer)
    finished = finish_metrics(terms.sums, terms.maxima)
    assert finished.keys() == expected.keys()
    assert finished == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("cuts", [[50], [1, 49], [0, 20, 0, 30], [10] * 5])
@pytest.mark.parametrize("loss", [policy_loss(0.1), CrossEntropyLoss()])
def test_loss_gradient_and_metrics_do_not_depend_on_the_split(loss, cuts: list[int]):
    given, whole, split = tokens(50), logprobs_of(50), logprobs_of(50)
    expected = run(loss, whole, given)
    expected.loss.backward()
    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    start = 0
    for cut in cuts:
        piece = slice(start, start + cut)
        start += cut
        part = TokenTensors(*(getattr(given, name)[piece] for name in TokenTensors.__slots__[:5]))
        terms = run(loss, split[piece], part)
        terms.loss.backward()
        for name, value in terms.sums.items():
            sums[name] = sums.get(name, 0) + value
        for name, value in terms.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
    torch.testing.assert_close(split.grad, whole.grad, rtol=1e-12, atol=0)
    assert finish_metrics(sums, maxima) == pytest.approx(finish_metrics(expected.sums, expected.maxima), rel=1e-10)


def test_no_trained_token_gives_a_zero_loss_with_a_graph_and_no_means():
    terms = run(policy_loss(0.1), logprobs_of(0), tokens(0))
    terms.loss.backward()
    assert finish_metrics(terms.sums, terms.maxima) == {
        "train/tokens": 0.0,
        "train/loss": 0.0,
        "train/pg_loss": 0.0,
        "train/kl_loss": 0.0,
    }


def test_a_name_used_twice_is_an_error():
    with pytest.raises(ValueError, match="'x'"):
        finish_metrics({"tokens": 1.0, "x": 1.0}, {"x": 1.0})


def test_an_on_policy_loss_takes_old_from_its_own_forward_pass() -> None:
    """The same loss, gradient and metrics as with the old values recomputed by hand; the ones given are not read."""
    logprobs = torch.tensor([-0.5, -1.5, -2.5], requires_grad=True)
    entropy = torch.zeros(3)
    given = TokenTensors(
        weights=torch.full((3,), 1 / 3),
        advantages=torch.tensor([1.0, -2.0, 0.5]),
        behavior_logprobs=torch.tensor([-0.6, -1.4, -2.5]),
        old_logprobs=torch.full((3,), float("nan")),
    )
    recomputed = replace(given, old_logprobs=logprobs.detach().clone())
    on_policy = policy_loss(epochs=1)(logprobs, entropy, given)
    (gradient,) = torch.autograd.grad(on_policy.loss, logprobs)
    reference = policy_loss()(logprobs, entropy, recomputed)
    (expected,) = torch.autograd.grad(reference.loss, logprobs)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(gradient, -given.advantages / 3)
    for name, value in reference.sums.items():
        torch.testing.assert_close(on_policy.sums[name], value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, True), ({"minibatches": 2}, False), ({"epochs": 2}, False), ({"old_logprobs": "engine"}, False)],
)
def test_only_a_single_recomputed_step_is_on_policy(changes: dict[str, Any], expected: bool) -> None:
    assert AlgorithmConfig(**changes).on_policy is expected


def test_gspo_takes_the_mean_over_each_sequence_and_over_ranks() -> None:
    """Two sequences, one of them partly on another rank, whose share is added by ``add_up``."""
    logprobs = torch.tensor([-0.5, -1.5, -2.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-0.6, -1.2, -2.0], dtype=torch.float64)
    elsewhere = torch.tensor([[0.0, 0.3], [0.0, 2.0]], dtype=torch.float64)  # sums and counts of the other rank
    given = TokenTensors(
        torch.ones(3).double(), torch.ones(3).double(), old, old,
        sequence=torch.tensor([0, 0, 1]), sequences=2, add_up=lambda sums: sums + elsewhere,
    )  # fmt: skip
    terms = policy_loss(clip_low=10.0, clip_high=10.0, loss="gspo")(logprobs, torch.zeros(3).double(), given)
    means = [(0.1 - 0.3) / 2, (-0.5 + 0.3) / 3]
    assert terms.loss.item() == pytest.approx(-2 * math.exp(means[0]) - math.exp(means[1]))
    (gradient,) = torch.autograd.grad(terms.loss, logprobs)
    torch.testing.assert_close(gradient, -torch.tensor([means[0], means[0], means[1]]).double().exp())


def test_an_entropy_bonus_pulls_towards_more_entropy() -> None:
    given, lp = tokens(5), logprobs_of(5)
    entropy = torch.rand(5, dtype=torch.float64, requires_grad=True)
    terms = policy_loss(0.0, entropy_coefficient=0.1)(lp, entropy, given)
    (gradient,) = torch.autograd.grad(terms.loss, entropy)
    torch.testing.assert_close(gradient, -0.1 * given.weights)
    assert terms.sums["train/entropy_loss"].item() == pytest.approx(-0.1 * (given.weights * entropy).sum().item())
