"""Distillation advantages against sums written out, and their expected gradient against that of the true divergence.

A policy over three tokens and sequences of three is small enough to enumerate every sequence: expectations are exact,
and the gradient of the divergence comes from finite differences in float64. Does not cover how the teacher is asked
(test_rollout_teacher.py) or that a run learns (tests/e2e/test_distillation.py).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mua.algorithms.batch import adjust_batch, make_batch
from mua.algorithms.distillation import distillation_advantages, reverse_kl
from mua.algorithms.losses import PolicyLoss, TokenTensors
from mua.config.schema import AlgorithmConfig, DistillationConfig
from mua.types import Group, Outcome, TrainBatch, Trajectory
from tests.segments import segment_of

WORDS, LENGTH = 3, 3
PREFIXES = [prefix for n in range(LENGTH) for prefix in itertools.product(range(WORDS), repeat=n)]
PLACE = {prefix: i for i, prefix in enumerate(PREFIXES)}
SEQUENCES = list(itertools.product(range(WORDS), repeat=LENGTH))
Table = np.ndarray
"""Log-probabilities of the next word after each prefix, ``[prefixes, words]``."""


def table(seed: int) -> Table:
    return np.random.default_rng(seed).normal(0, 1.2, (len(PREFIXES), WORDS))


def normalized(logits: Table) -> Table:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def of_sequence(logits: Table, words: tuple[int, ...]) -> np.ndarray:
    log_p = normalized(logits)
    return np.array([log_p[PLACE[words[:i]], words[i]] for i in range(LENGTH)])


def divergence(logits: Table, teacher: Table, sampler: Table | None) -> float:
    """KL of whole sequences; with ``sampler`` the prefixes are drawn from it and each position counts by itself."""
    total = 0.0
    for words in SEQUENCES:
        own, other = of_sequence(logits, words), of_sequence(teacher, words)
        if sampler is None:
            total += math.exp(own.sum()) * (own - other).sum()
            continue
        drawn = of_sequence(sampler, words)
        for i in range(LENGTH):
            # Once for every word that could stand at i; later words sum to one.
            share = math.exp(drawn[:i].sum() + own[i]) * math.exp(drawn[i + 1 :].sum())
            total += share * (own[i] - other[i])
    return total


def slopes(logits: Table, teacher: Table, *, prefixes_fixed: bool) -> np.ndarray:
    """Finite differences of the divergence."""
    found, step = np.zeros_like(logits), 1e-6
    sampler = logits.copy() if prefixes_fixed else None
    for index in np.ndindex(*logits.shape):
        sides = []
        for sign in (1, -1):
            moved = logits.copy()
            moved[index] += sign * step
            sides.append(divergence(moved, teacher, sampler))
        found[index] = (sides[0] - sides[1]) / (2 * step)
    return found


def sampled(
    words: tuple[int, ...], logprobs: np.ndarray, teacher: np.ndarray, reward: float = 0.0, sample: int = 0
) -> Trajectory:
    """The words behind one token of a prompt."""
    segment = segment_of(
        [False, *[True] * len(words)], ids=[0, *words], logprobs=np.array([0, *logprobs]),
        teacher_logprobs=np.array([0, *teacher], dtype=np.float32),
    )  # fmt: skip
    return Trajectory("t", 0, sample, [segment], [reward], reward, reward > 0, Outcome.USER_STOP)


def config(objective: str = "reinforce", **distillation: Any) -> AlgorithmConfig:
    how = DistillationConfig(base_url="http://teacher:30000", **({"only": True} | distillation))
    return AlgorithmConfig(distillation=how, aggregation="sequence_sum", loss=objective)  # type: ignore[arg-type]


@pytest.mark.parametrize("objective", ["grpo", "reinforce"])
@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_the_expected_gradient_is_that_of_the_divergence(objective: str, discount: float):
    """Every sequence once, weighted by its probability: through batch, adjustment and loss."""
    logits, teacher = table(1), table(2)
    setting = config(objective, discount=discount, coefficient=2.0)
    members = [sampled(w, of_sequence(logits, w), of_sequence(teacher, w)) for w in SEQUENCES]
    batch, metrics = adjust_batch(make_batch([Group(0, "t", members)], setting, 1.0), setting, 0)
    parameters = torch.from_numpy(logits).requires_grad_()
    log_p = parameters.log_softmax(-1)
    probability = np.array([math.exp(of_sequence(logits, w).sum()) for w in SEQUENCES])
    logprobs = torch.stack([log_p[PLACE[w[:i]], w[i]] for w in SEQUENCES for i in range(LENGTH)])
    tokens = TokenTensors(
        torch.from_numpy(np.repeat(probability, LENGTH)), flat(batch, "advantages"),
        logprobs.detach(), logprobs.detach(),
    )  # fmt: skip
    loss = PolicyLoss(setting)(logprobs, torch.zeros_like(logprobs), tokens).loss
    (gradient,) = torch.autograd.grad(loss, parameters)
    expected = 2.0 * slopes(logits, teacher, prefixes_fixed=discount == 0)
    np.testing.assert_allclose(gradient.numpy(), expected, atol=2e-6)
    assert metrics["train/opd_difference_max"] > 1


def flat(batch: TrainBatch, name: str) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([getattr(s, name)[s.trained] for s in batch]).astype(np.float64))


VALUES = st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.booleans()), min_size=1, max_size=8)


@given(VALUES, st.sampled_from([0.0, 0.5, 1.0]))
def test_advantages_written_out(values: list[tuple[float, float, bool]], discount: float):
    policy, teacher, trained = (np.array(column) for column in zip(*values, strict=True))
    found = distillation_advantages(policy, teacher, trained, discount=discount)
    terms = [max(-20.0, min(20.0, p - t)) for p, t, sampled in values if sampled]
    ahead = [math.fsum(discount ** (j - i) * terms[j] for j in range(i, len(terms))) for i in range(len(terms))]
    np.testing.assert_allclose(found[trained], -np.array(ahead), rtol=1e-9, atol=1e-9)
    assert not found[~trained].any()
    assert not reverse_kl(policy, teacher, trained)[~trained].any()


def test_rewards_and_teacher_add_up_and_rewards_can_be_left_out():
    teacher, policy = np.array([-1.0, -3.0]), np.array([-2.0, -2.0])
    members = [sampled((0, 1), policy, teacher, reward, sample) for sample, reward in enumerate((1.0, 0.0))]
    for only, of_reward in ((True, (0.0, 0.0)), (False, (1.0, -1.0))):
        setting = AlgorithmConfig(
            distillation=DistillationConfig(base_url="http://t:1", coefficient=0.5, only=only),
            advantage="grpo" if only else "rloo",
        )
        batch, metrics = adjust_batch(make_batch([Group(0, "t", members)], setting, 1.0), setting, 0)
        for sequence, reward in zip(batch, of_reward, strict=True):
            np.testing.assert_allclose(sequence.advantages, [0.0, reward + 0.5, reward - 0.5], rtol=1e-6)
        assert metrics["train/opd_reverse_kl"] == 0.0
        assert metrics["train/opd_reverse_kl_k3"] == pytest.approx(math.cosh(1) - 1)
