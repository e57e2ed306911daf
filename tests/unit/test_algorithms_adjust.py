"""What the trainer's log-probabilities do to a batch: penalties, importance weights, AgentRL's band, what is reported.

The band is compared with AgentRL's formula written out token by token in float64, aggregation and denominators
included. Does not cover the ratio's own formulas (test_algorithms_objectives.py) or how a batch is made
(test_algorithms_batch.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mua.algorithms.batch import adjust_batch
from mua.algorithms.losses import PolicyLoss, TokenTensors
from mua.config.schema import AlgorithmConfig
from mua.types import TrainBatch, TrainSequence

VERSION = 7


def sequence(
    old: list[float], behavior: list[float], advantages: list[float], *, trajectory: int = 0, age: list[int] | int = 0,
    weight: float = 1.0, reference: list[float] | None = None,
) -> TrainSequence:  # fmt: skip
    """A prompt token, then sampled ones with these values."""
    n = len(old)

    def after_prompt(values: Any) -> np.ndarray:
        return np.array([0.0, *values], dtype=np.float32)

    return TrainSequence(
        ids=np.arange(n + 1, dtype=np.int32),
        weights=after_prompt([weight] * n),
        advantages=after_prompt(advantages),
        behavior_logprobs=after_prompt(behavior),
        old_logprobs=after_prompt(old),
        reference_logprobs=None if reference is None else after_prompt(reference),
        version=np.array([-1, *(VERSION - np.broadcast_to(age, n))], dtype=np.int32),
        trajectory=trajectory,
    )


def batch_of(*sequences: TrainSequence, tokens: float | None = None) -> TrainBatch:
    count = sum(int(s.trained.sum()) for s in sequences) if tokens is None else tokens
    return TrainBatch(list(sequences), 1.0, {"tokens": float(count), "sequences": 1.0})


def config(**changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**changes)


def test_a_kl_penalty_is_taken_from_the_advantage_before_it_is_weighed():
    plain = batch_of(sequence([-1.0], [-1.0 - math.log(1.5)], [1.0], reference=[-1.4]))
    taken = config(kl_in="reward", kl_coefficient=0.5, kl_estimator="k1", correction="truncate")
    found, _ = adjust_batch(plain, taken, VERSION)
    np.testing.assert_allclose(found.sequences[0].advantages, [0.0, 1.5 * (1 - 0.5 * 0.4)], rtol=1e-5)


def test_nothing_is_done_where_nothing_is_asked():
    plain = batch_of(sequence([-1.0], [-2.0], [1.0]))
    found, metrics = adjust_batch(plain, config(), VERSION)
    assert found.sequences == plain.sequences
    assert metrics == {}, "the trainer's log-probabilities are not known before an on-policy step"


def test_mismatch_is_reported_apart_for_fresh_and_stale_tokens():
    plain = batch_of(
        sequence([-1.0, -1.0], [-1.0, -1.1], [1.0, 1.0], age=[0, 2]), sequence([-1.0], [-1.3], [1.0], age=1)
    )
    _, metrics = adjust_batch(plain, config(minibatches=2), VERSION)
    assert metrics["train/fresh/train_rollout_logprob_abs_diff_max"] == 0.0
    assert metrics["train/fresh/token_mult_prob_error"] == 1.0
    assert metrics["train/stale/train_rollout_logprob_abs_diff"] == pytest.approx(0.2, rel=1e-5)
    assert metrics["train/stale/train_rollout_logprob_abs_diff_max"] == pytest.approx(0.3, rel=1e-5)
    kl = (math.exp(0.1) - 1.1 + math.exp(0.3) - 1.3) / 2
    assert metrics["train/stale/train_rollout_kl_k3"] == pytest.approx(kl, rel=1e-4)
    all_fresh, all_fresh_metrics = adjust_batch(batch_of(plain.sequences[1]), config(minibatches=2), VERSION - 1)
    assert not any(name.startswith("mismatch_stale") for name in all_fresh_metrics)
    assert len(all_fresh) == 1


# ---- What another policy sampled

RATIOS = (1.0, 20.0, 148.0)
"""How much likelier the token is to the policy that is trained than to the one that sampled it."""


def gradients(advantage: float, **changes: Any) -> list[float]:
    """d loss / d log p of one token at the step's first update, for each of :data:`RATIOS`."""
    setting, found = config(**changes), []
    for ratio in RATIOS:
        engine = -1.0 - math.log(ratio)
        old = -1.0 if setting.recomputes else engine  # as make_batch leaves it
        one, _ = adjust_batch(batch_of(sequence([old], [engine], [advantage])), setting, VERSION)
        if not one.sequences:  # a band took the token out of the batch
            found.append(0.0)
            continue
        (s,) = one.sequences
        logprobs = torch.tensor([-1.0], requires_grad=True)
        tokens = TokenTensors(
            *(torch.from_numpy(a[s.trained]) for a in (s.weights, s.advantages, s.behavior_logprobs, s.old_logprobs)),
            sequence=torch.zeros(1, dtype=torch.int64), sequences=1,
        )  # fmt: skip
        PolicyLoss(setting)(logprobs, torch.zeros(1), tokens).loss.backward()
        assert logprobs.grad is not None
        found.append(float(logprobs.grad))
    return found


@pytest.mark.parametrize("steps", [{}, {"minibatches": 2}, {"epochs": 2}])
@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo", "minirl", "sapo"])
def test_without_a_correction_the_gradient_is_blind_to_who_sampled(loss: str, steps: dict[str, int]):
    found = gradients(-1.0, loss=loss, **steps)
    assert found == pytest.approx([1.0] * 3)
    assert not config(loss=loss, **steps).sees_sampler


@pytest.mark.parametrize(
    ("advantage", "changes", "expected"),
    [
        (1.0, {"correction": "truncate", "correction_high": 50.0}, [-1.0, -20.0, -50.0]),
        (-1.0, {"correction": "truncate", "correction_high": 50.0, "loss": "reinforce"}, [1.0, 20.0, 50.0]),
        (1.0, {"correction": "mask", "correction_high": 50.0}, [-1.0, -20.0, 0.0]),
        (1.0, {"correction": "band", "correction_cap": 100.0, "correction_high": 50.0}, [-1.0, -20.0, 0.0]),
        (-1.0, {"old_logprobs": "engine"}, [1.0, 20.0, 148.0]),
        (1.0, {"old_logprobs": "engine"}, [-1.0, 0.0, 0.0]),
        (-1.0, {"old_logprobs": "engine", "loss": "minirl"}, [1.0, 20.0, 148.0]),
    ],
)
def test_with_a_correction_it_depends_on_who_sampled(advantage: float, changes: dict[str, Any], expected: list[float]):
    assert gradients(advantage, **changes) == pytest.approx(expected, rel=1e-5)
    assert config(**changes).sees_sampler


# ---- AgentRL's band

TOKEN = st.tuples(
    st.sampled_from([0.05, 0.3, 0.6, 0.85, 1.0, 1.25, 1.6, 2.0, 5.0]),  # ratio
    st.sampled_from([-1.0, 0.0, 0.5]),  # advantage, of the whole turn in reality
    st.integers(0, 12),  # age
)
SEGMENT = st.lists(TOKEN, min_size=1, max_size=4)
TRAJECTORIES = st.lists(st.lists(SEGMENT, min_size=1, max_size=2), min_size=1, max_size=3)
AGGREGATION = st.sampled_from(["token_mean", "sequence_mean", "sequence_sum"])
WIDTH = {"clip_low": 0.2, "clip_high": 0.3, "correction": "band"}


def sampled(trajectories: list[list[list[tuple[float, float, int]]]], aggregation: str) -> TrainBatch:
    """A batch with these ratios ``q / m``, weighted as ``make_batch`` does; ``reference`` keeps ``q`` for the test."""
    tokens = sum(len(segment) for segments in trajectories for segment in segments)
    sequences = []
    for number, segments in enumerate(trajectories):
        own = sum(map(len, segments))
        weight = {"token_mean": 1 / tokens, "sequence_mean": 1 / (len(trajectories) * own)}.get(
            aggregation, 1 / len(trajectories)
        )
        for segment in segments:
            ratios, advantages, ages = (list(column) for column in zip(*segment, strict=True))
            old = [-2.0 + math.log(r) for r in ratios]
            sequences.append(
                sequence(old, [-2.0] * len(old), advantages, trajectory=number, age=ages, weight=weight, reference=old)
            )
    return TrainBatch(sequences, 1.0, {"tokens": float(tokens), "sequences": float(len(trajectories))})


def kept(ratio: float, advantage: float, age: int, *, cap: float, decay: float) -> bool:
    """AgentRL's mask: epsilon 0.2, epsilon_higher 0.1."""
    d = math.exp(min(0, -age * decay))
    return not ((advantage > 0 and ratio > 1 + 0.3 * cap * d) or (advantage < 0 and ratio < 1 - 0.2 * cap * d))


def agentrls_loss(trajectories, aggregation: str, cap: float, decay: float) -> float:
    """Its GRPO with all sequences in one micro-batch: masked tokens leave numerator and denominator."""
    totals = []
    for segments in trajectories:
        stay = [(r, a) for segment in segments for r, a, age in segment if kept(r, a, age, cap=cap, decay=decay)]
        values = [-min(r * a, min(max(r, 0.8), 1.3) * a) for r, a in stay]
        totals.append((math.fsum(values), len(values)))
    if aggregation == "token_mean":
        return math.fsum(total for total, _ in totals) / max(1, sum(count for _, count in totals))
    if aggregation == "sequence_mean":
        return math.fsum(total / max(1, count) for total, count in totals) / len(totals)
    return math.fsum(total for total, _ in totals) / len(totals)


def loss_of(batch: TrainBatch, setting: AlgorithmConfig) -> tuple[float, list[float]]:
    """The configured loss while the policy is still what made the trainer's log-probabilities, and its gradient."""

    def flat(name: str) -> torch.Tensor:
        parts = [torch.from_numpy(getattr(s, name)[s.trained]) for s in batch]
        return torch.cat([*parts, torch.zeros(0)]).double()

    logprobs = flat("reference_logprobs").requires_grad_()
    tokens = TokenTensors(flat("weights"), flat("advantages"), flat("behavior_logprobs"), flat("old_logprobs"))
    loss = PolicyLoss(setting)(logprobs, torch.zeros_like(logprobs), tokens).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient.tolist()


@given(TRAJECTORIES, AGGREGATION, st.sampled_from([1.0, 4.0]), st.sampled_from([0.0, 0.1]))
def test_the_band_with_the_engines_old_values_is_agentrls_grpo(trajectories, aggregation, cap, decay):
    setting = config(
        **WIDTH, old_logprobs="engine", aggregation=aggregation, correction_cap=cap, correction_decay=decay
    )
    banded, metrics = adjust_batch(sampled(trajectories, aggregation), setting, VERSION)
    assert loss_of(banded, setting)[0] == pytest.approx(
        agentrls_loss(trajectories, aggregation, cap, decay), rel=1e-5, abs=1e-6
    )
    every = [token for segments in trajectories for segment in segments for token in segment]
    gone = sum(not kept(*token, cap=cap, decay=decay) for token in every)
    assert metrics["train/tis_masked_fraction"] == pytest.approx(gone / len(every))
    assert banded.denominators["tokens"] == len(every) - gone


@given(TRAJECTORIES, AGGREGATION)
def test_the_band_with_the_trainers_old_values_is_agentrls_minirl(trajectories, aggregation):
    """Gradients: of each token that stays, minus its ratio to the engine times its advantage, over what stays."""
    setting = config(**WIDTH, loss="minirl", aggregation=aggregation, correction_decay=0.1, correction_high=1e9)
    banded, _ = adjust_batch(sampled(trajectories, aggregation), setting, VERSION)
    found = loss_of(banded, setting)[1]
    expected = []
    inside = [[t for s in segments for t in s if kept(*t, cap=4.0, decay=0.1)] for segments in trajectories]
    for tokens in inside:
        count = {"token_mean": sum(map(len, inside)), "sequence_mean": len(inside) * len(tokens)}
        expected += [-r * a / count.get(aggregation, len(inside)) for r, a, _ in tokens]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_agentrls_note_on_loose_bounds():
    """Between the clip and the wide band GRPO has no gradient and its token still counts; MiniRL keeps both. With a
    negative advantage nothing truncates either. Ratio 1.6 and 6, each beside a token that nobody touches."""
    for ratio, advantage, of_grpo in ((1.6, 1.0, 0.0), (6.0, -1.0, 6.0)):
        pair = [[[(ratio, advantage, 0)], [(1.0, 0.0, 0)]]]
        for objective, old, slope in (("grpo", "engine", of_grpo), ("minirl", "recompute", -ratio * advantage)):
            high = {"correction_high": 1e9} if old == "recompute" else {}
            setting = config(**WIDTH, loss=objective, old_logprobs=old, **high)
            banded, _ = adjust_batch(sampled(pair, "token_mean"), setting, VERSION)
            assert loss_of(banded, setting)[1] == pytest.approx([slope / 2, 0.0], rel=1e-5)


@pytest.mark.parametrize("name", ["truncate", "mask", "band"])
@given(TRAJECTORIES, st.randoms(use_true_random=False))
def test_rows_are_adjusted_each_by_itself_and_what_is_not_trained_is_not_read(name: str, trajectories, random):
    setting = config(**(WIDTH | {"correction": name} | ({"correction_decay": 0.1} if name == "band" else {})))
    plain = sampled(trajectories, "sequence_mean")
    noisy = [
        replace(s, **{k: np.where(s.trained, getattr(s, k), 5.0) for k in ("old_logprobs", "behavior_logprobs")})
        for s in plain
    ]
    order = random.sample(range(len(noisy)), len(noisy))
    expected, _ = adjust_batch(plain, setting, VERSION)
    found, _ = adjust_batch(replace(plain, sequences=[noisy[i] for i in order]), setting, VERSION)

    def rows(batch: TrainBatch) -> list[tuple]:
        return sorted((s.trajectory, s.weights.tolist(), s.advantages[s.trained].tolist()) for s in batch)

    assert rows(found) == rows(expected)


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.7), ("k2", 0.245), ("k3", math.exp(-0.7) - 0.3)])
def test_every_estimator_can_be_taken_from_the_advantage(estimator: str, value: float):
    plain = batch_of(sequence([-1.0], [-1.0], [2.0], reference=[-1.7]))
    setting = config(kl_in="reward", kl_coefficient=0.5, kl_estimator=estimator)
    found, _ = adjust_batch(plain, setting, VERSION)
    np.testing.assert_allclose(found.sequences[0].advantages, [0.0, 2.0 - 0.5 * value], rtol=1e-5)
