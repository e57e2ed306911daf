"""Objectives and corrections, token by token: values and gradients against formulas written out in float64.

Gradients are compared with the closed form and with finite differences where the formula has no stopped gradient. Does
not cover aggregation into a batch (test_algorithms_batch.py) or the losses' metrics (test_algorithms_losses.py).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mua.algorithms.correction import band_bounds, correction_weights, in_band
from mua.algorithms.objectives import OBJECTIVES, PerToken, kl_estimate, sequence_log_ratio
from mua.config.schema import AlgorithmConfig

RATIOS = [0.05, 0.5, 0.79, 0.81, 1.0, 1.19, 1.29, 1.31, 2.5, 6.0]
ADVANTAGES = [-2.0, -0.5, 0.0, 0.5, 2.0]
GRID = [(r, a) for r in RATIOS for a in ADVANTAGES]
OLD = -1.7


def bounded(low: float = 0.2, high: float = 0.3, dual: float | None = None, **more: Any) -> AlgorithmConfig:
    return AlgorithmConfig().model_copy(update={"clip_low": low, "clip_high": high, "dual_clip": dual, **more})


BOUNDS = bounded()


def run(name: str, bounds: AlgorithmConfig = BOUNDS, grid=None) -> tuple[PerToken, torch.Tensor]:
    """The objective on the grid and its gradient with respect to every log-probability, float64."""
    ratios, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*(grid or GRID), strict=True))
    logprobs = (OLD + ratios.log()).requires_grad_()
    result = OBJECTIVES[name](logprobs, logprobs - OLD, advantages, bounds)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    return result, gradient


def expected(name: str, r: float, a: float, bounds: AlgorithmConfig) -> tuple[float, float]:
    """Loss and its derivative with respect to log p, each written out."""
    low, high, logp = bounds.clip_low, bounds.clip_high, OLD + math.log(r)
    out = (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low)
    if name in ("grpo", "gspo"):
        loss = -min(r * a, min(max(r, 1 - low), 1 + high) * a)
        gradient = 0.0 if out else -r * a
        if bounds.dual_clip is not None and a < 0 and loss > -bounds.dual_clip * a:
            return -bounds.dual_clip * a, 0.0
        return loss, gradient
    if name == "cispo":
        weight = min(max(r, 1 - low), 1 + high)
        return -weight * a * logp, -weight * a
    if name == "cross_entropy":
        return -logp, -1.0
    if name == "minirl":
        return (0.0, 0.0) if out else (-r * a * logp, -r * a)
    if name == "sapo":
        tau = high if a > 0 else low
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        return -4 / tau * gate * a, -4 * gate * (1 - gate) * r * a
    return -a * logp, -a


@pytest.mark.parametrize(
    "bounds", [BOUNDS, bounded(0.2, 0.3, dual=3.0), bounded(1.05, 1.0)], ids=["clip", "dual", "soft"]
)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_value_and_gradient_of_every_token(name: str, bounds: AlgorithmConfig):
    result, gradient = run(name, bounds)
    for (r, a), loss, slope in zip(GRID, result.loss.tolist(), gradient.tolist(), strict=True):
        value, derivative = expected(name, r, a, bounds)
        assert loss == pytest.approx(value, rel=1e-9, abs=1e-12), (r, a)
        assert slope == pytest.approx(derivative, rel=1e-9, abs=1e-12), (r, a)


@pytest.mark.parametrize("name", ["grpo", "sapo"])
def test_gradients_are_those_of_finite_differences(name: str):
    """For objectives that stop no gradient; away from the kinks."""
    step, bounds = 1e-6, bounded(0.2, 0.3, dual=3.0)
    for ratio, advantage in GRID:
        _, gradient = run(name, bounds, [(ratio, advantage)])
        sides = [run(name, bounds, [(ratio * math.exp(s), advantage)])[0].loss.item() for s in (step, -step)]
        assert gradient.item() == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", ["grpo", "minirl"])
def test_tokens_out_of_bounds_are_told(name: str):
    result, gradient = run(name)
    out = (result.clipped_low | result.clipped_high).tolist()
    for (_, advantage), gone, slope in zip(GRID, out, gradient.tolist(), strict=True):
        assert gone == (advantage != 0 and slope == 0)


def test_on_policy_all_have_the_gradient_of_reinforce():
    grid = [(1.0, a) for a in ADVANTAGES]
    for name in OBJECTIVES.keys() - {"cross_entropy"}:
        bounds = bounded(1.05, 1.0) if name == "sapo" else BOUNDS
        np.testing.assert_allclose(run(name, bounds, grid)[1], [-a for _, a in grid], atol=1e-12)


def test_minirl_and_grpo_have_the_same_gradients_under_the_same_bounds():
    """AgentRL's note: the two differ in aggregation only."""
    np.testing.assert_allclose(run("minirl")[1], run("grpo")[1], atol=1e-12)


@pytest.mark.parametrize(("b1", "b2"), [(1.0, 1.0), (0.5, 2.0), (0.0, 0.25)])
def test_kept_gradients_are_of_constant_size_beyond_the_clip(b1: float, b2: float):
    """AgentRL's beta1 and beta2 as they are meant: b times the gradient at the bound, whatever the ratio."""
    grid = [*GRID, (1e-12, -1.0), (1e12, 1.0)]  # beyond where a ratio is clamped too
    result, gradient = run("grpo", bounded(0.2, 0.3, ce_gppo_beta1=b1, ce_gppo_beta2=b2), grid)
    plain, unkept = run("grpo", BOUNDS, grid)
    for i, (r, a) in enumerate(grid):
        if a < 0 and r < 0.8:
            wanted = -b1 * 0.8 * a
        elif a > 0 and r > 1.3:
            wanted = -b2 * 1.3 * a
        else:
            wanted = float(unkept[i])
            assert result.loss[i].item() == plain.loss[i].item()
        assert float(gradient[i]) == pytest.approx(wanted, abs=1e-12), (r, a)
    assert not result.clipped_low.any()
    assert not result.clipped_high.any()
    low_only, of_low = run("grpo", bounded(0.2, 0.3, 3.0, ce_gppo_beta1=b1), grid)
    assert low_only.clipped_high.sum() == run("grpo", bounded(0.2, 0.3, 3.0), grid)[0].clipped_high.sum()
    assert float(of_low[grid.index((6.0, -2.0))]) == 0.0, "the dual clip still holds"


@given(st.lists(st.tuples(st.floats(-2, 0), st.floats(-2, 0)), min_size=1, max_size=6), st.sampled_from([-1.0, 1.0]))
def test_gspo_is_the_clipped_sequence_ratio(pairs: list[tuple[float, float]], advantage: float):
    """The sum over a sequence, each token weighing 1 / T, is ``-min(s A, clip(s) A)`` in value and in gradient."""
    current, old = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    logprobs, again = current.clone().requires_grad_(), current.clone().requires_grad_()
    log_ratio = sequence_log_ratio(logprobs, logprobs - old, (logprobs - old).mean().expand(len(old)))
    advantages = torch.full_like(old, advantage)
    loss = OBJECTIVES["gspo"](logprobs, log_ratio, advantages, BOUNDS).loss.mean()
    s = (again - old).mean().exp()
    direct = -torch.minimum(s * advantage, s.clamp(0.8, 1.3) * advantage)
    assert loss.item() == pytest.approx(direct.item(), rel=1e-9)
    (found,), (wanted,) = torch.autograd.grad(loss, logprobs), torch.autograd.grad(direct, again)
    torch.testing.assert_close(found, wanted)


def test_kl_estimators():
    x = torch.tensor([-1.0, 0.0, 0.5], dtype=torch.float64)
    np.testing.assert_allclose(kl_estimate("k1", x), x)
    np.testing.assert_allclose(kl_estimate("k2", x), x**2 / 2)
    np.testing.assert_allclose(kl_estimate("k3", x), torch.exp(-x) - 1 + x)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_estimators_have_the_right_mean_or_gradient(name: str):
    """Over all tokens of a small distribution: k1 and k3 have KL as their mean, k2 its gradient."""
    logits = torch.tensor([0.3, -0.2, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.4, 0.9, -0.3], dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    p = log_p.detach().exp()
    true = (log_p.exp() * (log_p - reference)).sum()
    estimate = (p * kl_estimate(name, log_p - reference)).sum()
    if name != "k2":
        assert estimate.item() == pytest.approx(true.item(), rel=1e-12)
    if name == "k2":
        (found,), (wanted,) = (torch.autograd.grad(v, logits, retain_graph=True) for v in (estimate, true))
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("name", "slope"), [("k1", lambda x: 1.0), ("k2", lambda x: x), ("k3", lambda x: 1 - math.exp(-x))]
)
def test_gradients_of_kl_estimators(name: str, slope):
    """Closed forms and finite differences; beyond 20 nats there is none."""
    step = 1e-6
    for value in (-3.0, -0.4, 0.0, 0.7, 2.5):
        x = torch.tensor(value, dtype=torch.float64, requires_grad=True)
        (found,) = torch.autograd.grad(kl_estimate(name, x), x)
        up, down = (kl_estimate(name, torch.tensor(value + s, dtype=torch.float64)).item() for s in (step, -step))
        assert found.item() == pytest.approx(slope(value), abs=1e-12)
        assert found.item() == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-6)
    far = torch.tensor(25.0, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.grad(kl_estimate(name, far), far)[0].item() == 0.0


LOGS = st.lists(st.floats(-3, 0), min_size=1, max_size=8)


@given(LOGS, st.data())
def test_weights_of_the_mismatch_written_out(old: list[float], data):
    behavior = data.draw(st.lists(st.floats(-3, 0), min_size=len(old), max_size=len(old)))
    trained = data.draw(st.lists(st.booleans(), min_size=len(old), max_size=len(old)))
    differences = [q - m for q, m, t in zip(old, behavior, trained, strict=True) if t]
    for level in ("token", "sequence", "geometric"):
        total = math.fsum(differences)
        of_sequence = total if level == "sequence" else total / max(1, len(differences))
        for name, low, high in (("truncate", 0.0, 2.0), ("mask", 0.5, 2.0)):
            chosen = {"correction": name, "correction_level": level, "correction_low": low, "correction_high": high}
            how = AlgorithmConfig().model_copy(update=chosen)
            found = correction_weights(np.array(old), np.array(behavior), np.array(trained), how)
            for place, weight in enumerate(found):
                ratio = math.exp(old[place] - behavior[place] if level == "token" else of_sequence)
                inside = low <= ratio <= high
                wanted = 1.0 if not trained[place] else min(ratio, high) if name == "truncate" else ratio * inside
                assert weight == pytest.approx(wanted, rel=1e-9), (level, name, place)


@pytest.mark.parametrize(
    ("age", "decay", "cap", "bounds"),
    [
        (0, 0.0, 1.0, (0.8, 1.3)),
        (0, 0.0, 4.0, (0.2, 2.2)),
        (5, 0.1, 4.0, (0.515, 1.728)),
        (20, 0.1, 4.0, (0.892, 1.162)),
        (-3, 0.1, 4.0, (0.2, 2.2)),
    ],
)
def test_agentrls_bands(age: float, decay: float, cap: float, bounds: tuple[float, float]):
    """Its numbers, and a token that is newer than it should be is no wider than a fresh one."""
    lower, upper = band_bounds(np.array([float(age)]), bounded(correction_cap=cap, correction_decay=decay))
    assert (lower[0], upper[0]) == pytest.approx(bounds, abs=5e-4)


def test_a_token_leaves_the_band_only_on_the_side_its_advantage_pulls_to():
    band = bounded(correction_cap=4.0, correction_decay=0.1)
    cases = [
        # ratio, advantage, age, stays
        (2.19, 1.0, 0, True), (2.21, 1.0, 0, False), (6.0, -1.0, 0, True), (0.21, -1.0, 0, True),
        (0.19, -1.0, 0, False), (0.01, 1.0, 0, True), (1.72, 1.0, 5, True), (1.74, 1.0, 5, False),
        (0.50, -1.0, 5, False), (0.52, -1.0, 5, True), (9.0, 0.0, 5, True), (0.01, 0.0, 5, True),
    ]  # fmt: skip
    ratio, advantages, age, stays = (np.array(column, dtype=np.float64) for column in zip(*cases, strict=True))
    assert in_band(np.log(ratio), advantages, age, band).tolist() == stays.astype(bool).tolist()
