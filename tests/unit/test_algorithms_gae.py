"""GAE over sampled tokens and the critic's loss: float64 brute force, closed forms, finite differences, masks.

Does not cover the critic itself (tests/unit/test_megatron_critic.py) or a training run (tests/e2e/test_critic.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mua.algorithms.batch import make_batch
from mua.algorithms.gae import clipped_value_loss, discounts_of_tokens, estimate_advantages, gae, rewards_of_tokens
from mua.config.schema import AlgorithmConfig
from mua.types import Group, Outcome, Segment, TrainBatch, Trajectory
from tests.segments import segment_of


def brute_force(rewards: Any, values: Any, discounts: Any, lam: float) -> list[float]:
    """The mixture of n-step estimators that GAE is: ``(1 - lam) sum_k lam^(k-1) A^(k)``, the rest on the longest."""
    total = len(rewards)
    found = []
    for first in range(total):
        estimators = []
        for steps in range(1, total - first + 1):
            discount, estimate = 1.0, -float(values[first])
            for n in range(first, first + steps):
                estimate += discount * float(rewards[n])
                discount *= float(discounts[n])
            if first + steps < total:
                estimate += discount * float(values[first + steps])
            estimators.append(estimate)
        mixed = sum((1 - lam) * lam**k * estimate for k, estimate in enumerate(estimators[:-1]))
        found.append(mixed + lam ** (len(estimators) - 1) * estimators[-1])
    return found


def drawn(seed: int, tokens: int = 11, turns: int = 4) -> tuple[Any, Any, Any]:
    """Turn rewards, turns and values of a trajectory; every turn has a token."""
    random = np.random.default_rng(seed)
    numbers = np.sort(np.concatenate([np.arange(turns), random.integers(0, turns, tokens - turns)])).astype(np.int32)
    return random.normal(size=turns), numbers, random.normal(size=tokens)


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [1.0, 0.7])
def test_brute_force(gamma: float, lam: float) -> None:
    for seed in range(5):
        turn_rewards, turns, values = drawn(seed)
        rewards, discounts = rewards_of_tokens(turn_rewards, turns), discounts_of_tokens(turns, gamma)
        expected = brute_force(rewards, values, discounts, lam)
        np.testing.assert_allclose(gae(rewards, values, discounts, lam), expected, rtol=0, atol=1e-12)


def test_lambda_one_is_the_reward_to_come_minus_the_value() -> None:
    turn_rewards, turns, values = drawn(3)
    rewards, discounts = rewards_of_tokens(turn_rewards, turns), discounts_of_tokens(turns, 0.8)
    to_go = [sum(0.8 ** (t - turn) * turn_rewards[t] for t in range(turn, 4)) for turn in turns]
    np.testing.assert_allclose(gae(rewards, values, discounts, 1.0), to_go - values, atol=1e-12)


def test_rewards_follow_the_last_token_of_their_turn() -> None:
    turns = np.array([1, 1, 2, 4, 4], dtype=np.int32)
    rewards = rewards_of_tokens(np.array([9.0, 1.0, 2.0, 3.0, 4.0, 5.0]), turns)
    # Turn 0 came before any choice; nothing was sampled in turns 3 and 5.
    assert rewards.tolist() == [0.0, 1.0, 5.0, 0.0, 9.0]
    assert discounts_of_tokens(turns, 0.5).tolist() == [1.0, 0.5, 0.25, 1.0, 0.0]
    assert not len(discounts_of_tokens(turns[:0], 0.5))
    assert not len(gae(np.zeros(0), np.zeros(0), np.zeros(0), 1.0))


def segment(provenance: str, turns: str, seed: int = 0) -> Segment:
    """One letter a token: S sampled, anything else somebody's."""
    ids = np.random.default_rng(seed).integers(0, 50, len(provenance))
    return segment_of([letter == "S" for letter in provenance], ids=ids, turn=[int(turn) for turn in turns])


def trajectory(segments: list[Segment], turn_rewards: list[float], sample: int = 0) -> Trajectory:
    return Trajectory(
        task_id="t", ordinal=0, sample=sample, segments=segments, turn_rewards=turn_rewards, reward=sum(turn_rewards),
        success=sum(turn_rewards) > 0, outcome=Outcome.USER_STOP,
    )  # fmt: skip


SETTINGS: dict[str, Any] = {"advantage": "gae", "gae_lambda": 0.9, "discount": 0.8, "gae_whiten": False}


def batch_of(*groups: list[Trajectory], **settings: Any) -> TrainBatch:
    config = AlgorithmConfig(**{**SETTINGS, **settings})
    made = make_batch([Group(i, "t", group) for i, group in enumerate(groups)], config, 1.0)
    random = np.random.default_rng(7)
    sequences = [replace(s, values=random.normal(size=len(s)).astype(np.float32)) for s in made]
    return replace(made, sequences=sequences)


def two_segments() -> Trajectory:
    """Its history was rewritten before turn 2; users and templates lie between the sampled tokens."""
    return trajectory([segment("uuSSuSuuSS", "0000011111", 1), segment("ttttSSttSt", "2222223333", 2)], [0.5, 0, -1, 2])


def test_only_sampled_tokens_are_states_whatever_lies_between_and_in_all_segments() -> None:
    batch = batch_of([two_segments()])
    (done,), _ = estimate_advantages([batch], AlgorithmConfig(**SETTINGS))
    values = np.concatenate([s.values[s.trained] for s in batch]).astype(np.float64)
    #            turns:       0  0  1     1     1         2  2          3
    rewards = np.array([0, 0.5, 0, 0, 0.0, 0, -1, 2])
    discounts = np.array([1, 0.8, 1, 1, 0.8, 1, 0.8, 0])
    expected = brute_force(rewards, values, discounts, 0.9)
    found = np.concatenate([s.advantages[s.trained] for s in done])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(np.concatenate([s.returns[s.trained] for s in done]), expected + values, atol=1e-6)
    for sequence in done:
        assert not sequence.advantages[~sequence.trained].any()
        assert not sequence.returns[~sequence.trained].any()


def test_trajectories_do_not_mix_and_their_order_does_not_matter() -> None:
    others = [trajectory([segment("uSSuS", "00011", seed)], [0.0, float(seed)], seed) for seed in (3, 4)]
    batch = batch_of([two_segments(), others[0]], [others[1]])
    config = AlgorithmConfig(**(SETTINGS | {"gae_whiten": True}))
    (whole,), metrics = estimate_advantages([batch], config)
    order = [3, 0, 1, 2]  # segments of one trajectory stay together
    shuffled = replace(batch, sequences=[batch.sequences[i] for i in order])
    (permuted,), same = estimate_advantages([shuffled], config)
    for place, number in enumerate(order):
        np.testing.assert_allclose(permuted.sequences[place].advantages, whole.sequences[number].advantages, atol=1e-6)
    assert same == pytest.approx(metrics)
    plain, alone = AlgorithmConfig(**SETTINGS), replace(batch, sequences=batch.sequences[:2])
    for ours, theirs in zip(
        estimate_advantages([alone], plain)[0][0], estimate_advantages([batch], plain)[0][0], strict=False
    ):
        assert np.array_equal(ours.advantages, theirs.advantages)


def test_whitening_is_over_all_minibatches_and_leaves_returns_alone() -> None:
    batches = [batch_of([two_segments()]), batch_of([trajectory([segment("uSS", "000")], [1.0])])]
    plain, _ = estimate_advantages(batches, AlgorithmConfig(**SETTINGS))
    white, metrics = estimate_advantages(
        batches, AlgorithmConfig(**(SETTINGS | {"gae_whiten": True, "advantage_scale": 2.0}))
    )
    raw = np.concatenate([s.advantages[s.trained] for b in plain for s in b])
    found = np.concatenate([s.advantages[s.trained] for b in white for s in b])
    np.testing.assert_allclose(found, 2 * (raw - raw.mean()) / raw.std(), rtol=1e-5, atol=1e-6)
    assert metrics["train/critic/advantage_std"] == pytest.approx(raw.std(), rel=1e-5)
    for ours, theirs in zip([s for b in plain for s in b], [s for b in white for s in b], strict=True):
        assert np.array_equal(ours.returns, theirs.returns)


def test_explained_variance() -> None:
    settings = SETTINGS | {"gae_lambda": 1.0}
    batch = batch_of([two_segments(), trajectory([segment("uSS", "000")], [1.0], 1)])
    (done,), metrics = estimate_advantages([batch], AlgorithmConfig(**settings))
    values, returns = (
        np.concatenate([getattr(s, name)[s.trained] for s in done]).astype(np.float64) for name in ("values", "returns")
    )
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert metrics["train/critic/vf_explained_var"] == pytest.approx(expected, rel=1e-5)
    knowing = replace(batch, sequences=[replace(s, values=s.returns) for s in done])
    assert estimate_advantages([knowing], AlgorithmConfig(**settings))[1][
        "train/critic/vf_explained_var"
    ] == pytest.approx(1.0)
    flat = batch_of([trajectory([segment("uSS", "000")], [1.0])])
    assert "train/critic/vf_explained_var" not in estimate_advantages([flat], AlgorithmConfig(**settings))[1]


def test_shaping_is_part_of_the_last_turns_reward_and_nothing_else_is_lost() -> None:
    config = {"shaping": {"overlong_tokens": 6, "overlong_buffer": 4}}
    lazy = trajectory([segment("uSS", "000")], [1.0], 1)
    batch = batch_of([two_segments(), lazy, trajectory([], [3.0], 2)], **config)
    assert [rewards.tolist() for rewards in batch.turn_rewards] == [[0.5, 0, -1, 1.0], [1.0]]
    assert [s.trajectory for s in batch] == [0, 0, 1]
    assert not any(s.advantages.any() for s in batch)


def test_a_kl_penalty_in_the_reward_reaches_earlier_tokens() -> None:
    settings = SETTINGS | {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1", "gae_lambda": 1.0}
    batch = batch_of([trajectory([segment("uSSuS", "00011")], [0.0, 1.0])], **settings)
    (sequence,) = batch
    reference = sequence.old_logprobs - np.array([0, 1, 2, 0, 4], dtype=np.float32)
    ready = replace(batch, sequences=[replace(sequence, reference_logprobs=reference)])
    (done,), _ = estimate_advantages([ready], AlgorithmConfig(**settings))
    last = 1 - 0.4
    np.testing.assert_allclose(
        done.sequences[0].returns[[1, 2, 4]], [0.8 * last - 0.3, 0.8 * last - 0.2, last], atol=1e-6
    )


def test_without_values_or_tokens() -> None:
    batch = batch_of([two_segments()])
    with pytest.raises(ValueError, match="value of every token"):
        estimate_advantages(
            [replace(batch, sequences=[replace(s, values=None) for s in batch])], AlgorithmConfig(**SETTINGS)
        )
    empty = TrainBatch([], 1.0, {"tokens": 0.0, "sequences": 0.0})
    assert estimate_advantages([empty], AlgorithmConfig(**SETTINGS)) == ([empty], {})


def value_loss(value: float, old: float, target: float, clip: float | None) -> float:
    """Written out case by case."""
    plain = (value - target) ** 2
    if clip is None:
        return plain / 2
    held = min(max(value, old - clip), old + clip)
    return max(plain, (held - target) ** 2) / 2


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_and_its_gradient(clip: float | None) -> None:
    random = np.random.default_rng(0)
    old, target = random.normal(size=200), random.normal(size=200)
    value = torch.tensor(old + random.normal(size=200) * 0.3, requires_grad=True)
    loss, clipped = clipped_value_loss(value, torch.tensor(old), torch.tensor(target), clip)
    loss.sum().backward()
    h = 1e-6
    for i, v in enumerate(value.tolist()):
        assert loss[i].item() == pytest.approx(value_loss(v, old[i], target[i], clip), abs=1e-12)
        slope = (value_loss(v + h, old[i], target[i], clip) - value_loss(v - h, old[i], target[i], clip)) / (2 * h)
        assert value.grad[i].item() == pytest.approx(slope, abs=1e-5)
        assert clipped[i].item() == (slope == 0)
    assert bool(clipped.any()) == (clip is not None)
