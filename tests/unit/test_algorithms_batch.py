"""Batch weights and advantages against a separately written count over every token, and who is left out.

A sequence ends at its last trained token: what follows moves no loss.

Does not cover the loss itself (test_algorithms_losses.py), what is decided once the trainer has scored the batch
(test_algorithms_adjust.py) or packing into micro-batches.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mua.algorithms.advantage import leave_one_out, trajectory_score, turn_credits
from mua.algorithms.batch import make_batch, make_batches, sft_batch, split_minibatches
from mua.config.schema import AlgorithmConfig
from mua.types import Group, Outcome, Segment, TrainBatch, Trajectory
from tests.segments import segment_of

TOKEN_MEAN = AlgorithmConfig(aggregation="token_mean")


def segment(mask: list[bool], start: int = 0) -> Segment:
    """Ids count up from ``start`` so that a token can be told apart; log-probability of id k is -k / 100."""
    ids = np.arange(start, start + len(mask))
    return segment_of(mask, ids=ids, logprobs=-ids / 100, version=3)


def trajectory(masks: list[list[bool]], reward: float = 0.0, outcome: Outcome = Outcome.USER_STOP) -> Trajectory:
    segments = [segment(mask, 100 * i) for i, mask in enumerate(masks)]
    return Trajectory("t", 0, 0, segments, [reward], reward, reward > 0, outcome)


def group(*members: Trajectory) -> Group:
    return Group(0, "t", list(members))


def weighted_loss(batch: TrainBatch, losses: list[list[float]]) -> float:
    """Sum of weights times losses, where each sequence's losses are those of its trained tokens in order."""
    return sum(
        float(np.dot(s.weights[s.trained].astype(np.float64), values)) for s, values in zip(batch, losses, strict=True)
    )


@pytest.mark.parametrize(
    ("aggregation", "same", "mixed"),
    [("token_mean", 1.0, 1.75), ("sequence_mean", 1.0, 1.5), ("sequence_sum", 2.0, 3.5), ("constant", 0.2, 0.35)],
)
def test_aggregation_oracle(aggregation: str, same: float, mixed: float):
    """AgentRL's values."""
    config = AlgorithmConfig().model_copy(update={"aggregation": aggregation, "aggregation_constant": 10.0})
    batch = make_batch([group(trajectory([[False, True]]), trajectory([[True, False, True, True]]))], config, 1.0)
    assert weighted_loss(batch, [[1.0], [1.0, 1.0, 1.0]]) == pytest.approx(same, rel=1e-6)
    assert weighted_loss(batch, [[1.0], [2.0, 2.0, 2.0]]) == pytest.approx(mixed, rel=1e-6)


MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=3)
MEMBER = st.tuples(MASKS, st.sampled_from([0.0, 0.25, 1.0]), st.sampled_from(list(Outcome)))
GROUPS = st.lists(st.lists(MEMBER, min_size=1, max_size=5), min_size=1, max_size=4)


@given(GROUPS, st.sampled_from(["token_mean", "sequence_mean", "sequence_sum", "constant"]), st.booleans())
def test_every_token_against_the_brute_force(raw, aggregation: str, divide: bool):
    chosen = {"aggregation": aggregation, "divide_by_std": divide, "aggregation_constant": 7.0}
    config = AlgorithmConfig().model_copy(update=chosen)
    batch = make_batch([group(*(trajectory(*m) for m in members)) for members in raw], config, 0.7)
    expected = brute_force(raw, aggregation, divide)
    assert len(batch) == len(expected)
    assert batch.temperature == 0.7
    for sequence, (weights, advantages, logprobs) in zip(batch, expected, strict=True):
        assert len(sequence) == len(weights)
        np.testing.assert_allclose(sequence.weights, weights, rtol=1e-6)
        np.testing.assert_allclose(sequence.advantages, advantages, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(sequence.behavior_logprobs, logprobs, rtol=1e-6)
        np.testing.assert_array_equal(sequence.old_logprobs, sequence.behavior_logprobs)
        assert sequence.reference_logprobs is None


def brute_force(raw, aggregation: str, divide: bool) -> list[tuple[list[float], list[float], list[float]]]:
    valid = {"user_stop", "terminal_tool", "max_turns", "length", "malformed", "repetition", "agent_end"}
    kept = [[m for m in members if m[2].value in valid] for members in raw]
    trainable = [m for members in kept for m in members if any(any(mask) for mask in m[0])]
    total = sum(sum(mask) for masks, _, _ in trainable for mask in masks)
    rows = []
    for members in kept:
        members = [m for m in members if any(any(mask) for mask in m[0])]
        rewards = [m[1] for m in members]
        for masks, reward, _ in members:
            own = sum(sum(mask) for mask in masks)
            advantage = 0.0
            if len(set(rewards)) > 1:
                mean = sum(rewards) / len(rewards)
                variance = sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)
                advantage = (reward - mean) / (variance**0.5 + 1e-6 if divide else 1.0)
            for index, mask in enumerate(masks):
                if not any(mask):
                    continue
                while not mask[-1]:
                    mask = mask[:-1]
                weight = {
                    "token_mean": 1 / total,
                    "sequence_mean": 1 / (len(trainable) * own),
                    "sequence_sum": 1 / len(trainable),
                    "constant": 1 / (len(trainable) * 7),
                }[aggregation]
                rows.append(
                    (
                        [weight if m else 0.0 for m in mask],
                        [advantage if m else 0.0 for m in mask],
                        [-(100 * index + i) / 100 if m else 0.0 for i, m in enumerate(mask)],
                    )
                )
    return rows


def test_unscored_members_change_neither_statistics_nor_weights():
    good, bad = trajectory([[True]], 1.0), trajectory([[True, True]], 0.0)
    faults = [
        trajectory([[True] * 5], 100.0, o)
        for o in (Outcome.TIMEOUT, Outcome.ENGINE_ERROR, Outcome.USER_ERROR, Outcome.ENVIRONMENT_ERROR)
    ]
    alone = make_batch([group(good, bad)], TOKEN_MEAN, 1.0)
    mixed = make_batch([group(faults[0], good, *faults[1:], bad)], TOKEN_MEAN, 1.0)
    for one, other in zip(alone, mixed, strict=True):
        np.testing.assert_array_equal(one.weights, other.weights)
        np.testing.assert_array_equal(one.advantages, other.advantages)


def test_a_group_without_a_scored_member_gives_an_empty_batch():
    batch = make_batch([group(trajectory([[True]], 1.0, Outcome.TIMEOUT))], TOKEN_MEAN, 1.0)
    assert len(batch) == 0
    assert batch.denominators == {"tokens": 0.0, "sequences": 0.0}


@given(GROUPS, st.sampled_from(["token_mean", "sequence_mean"]))
def test_skipping_zero_advantages_drops_those_sequences_and_changes_nothing_else(raw, aggregation: str):
    groups = [group(*(trajectory(*m) for m in members)) for members in raw]
    whole = make_batch(groups, AlgorithmConfig(aggregation=aggregation), 1.0)
    config = AlgorithmConfig(aggregation=aggregation, skip_zero_advantage=True)
    short = make_batch(groups, config, 1.0)
    assert short.denominators == whole.denominators
    kept = [s for s in whole if s.advantages.any()]
    assert len(short) == len(kept)
    for one, other in zip(short, kept, strict=True):
        for name in one.__slots__:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_sft_batch_is_the_mean_over_all_trained_tokens():
    batch = sft_batch([segment([True, True, False]), segment([False, False]), segment([False, True])])
    assert len(batch) == 2
    assert batch.temperature == 1.0
    np.testing.assert_allclose(np.concatenate([s.weights for s in batch]), np.array([1, 1, 0, 1]) / 3, rtol=1e-6)
    assert batch.denominators == {"tokens": 3.0, "sequences": 2.0}


@given(st.integers(1, 40), st.data())
def test_minibatches_keep_order_and_balance(count: int, data):
    n = data.draw(st.integers(1, count))
    groups = [Group(i, str(i), []) for i in range(count)]
    parts = split_minibatches(groups, n)
    assert [g.ordinal for part in parts for g in part] == list(range(count))
    assert len(parts) == n
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("n", [0, 3])
def test_too_many_minibatches_is_an_error(n: int):
    with pytest.raises(ValueError, match="minibatches"):
        split_minibatches([Group(0, "a", []), Group(1, "b", [])], n)


def several_turns(rewards: list[float], tokens: list[int], *, cut: int | None = None) -> Trajectory:
    """A trajectory with so many sampled tokens in each turn, each followed by an answer; cut into two segments."""
    turn = np.concatenate([np.full(n + 1, t, dtype=np.int32) for t, n in enumerate(tokens)])
    turn[-1] = len(tokens)  # the user's goodbye belongs to a turn that never came
    mask = np.concatenate([[True] * n + [False] for n in tokens])
    whole = replace(segment(mask.tolist()), turn=turn)
    bounds = [slice(0, cut), slice(cut, None)] if cut else [slice(None)]
    parts = [Segment(*(getattr(whole, name)[b] for name in Segment.__slots__[:5])) for b in bounds]
    return Trajectory("t", 0, 0, parts, rewards, sum(rewards), rewards[-1] > 0, Outcome.USER_STOP)


REWARDED = st.lists(st.tuples(st.integers(-2, 4).map(lambda k: k / 4), st.integers(1, 4)), min_size=1, max_size=4)


@pytest.mark.parametrize("credit", ["equal", "reward_to_go", "exponential", "signed"])
@given(members=st.lists(REWARDED, min_size=2, max_size=4), scored=st.sampled_from(["sum", "mean", "discounted"]))
def test_turn_credit_reaches_every_token(credit: str, members, scored: str):
    chosen = {"credit": credit, "score": scored, "discount": 0.8, "advantage": "rloo"}
    config = AlgorithmConfig().model_copy(update=chosen)
    trajectories = [several_turns([r for r, _ in m], [n for _, n in m]) for m in members]
    batch = make_batch([group(*trajectories)], config, 1.0)
    scores = [trajectory_score(t.turn_rewards, scored, gamma=0.8) for t in trajectories]
    for sequence, member, advantage in zip(batch, members, leave_one_out(scores), strict=True):
        credits = turn_credits([r for r, _ in member], credit, gamma=0.8)
        per_token = np.concatenate([[c] * n for c, (_, n) in zip(credits, member, strict=True)])
        size = np.abs(per_token).sum()
        expected = advantage * per_token * (per_token != 0).sum() / size if size else per_token * 0
        np.testing.assert_allclose(sequence.advantages[sequence.trained], expected, rtol=1e-5, atol=1e-6)
        assert not sequence.advantages[~sequence.trained].any()


@pytest.mark.parametrize("cut", [1, 4, 9])
def test_credit_of_a_turn_does_not_depend_on_where_segments_begin(cut: int):
    """Signed credit by hand: rewards 1, -2, 0.5 for turns of 3, 2 and 3 tokens; 8 tokens, of credits 8.5 together."""
    config = AlgorithmConfig(credit="signed", advantage="none")
    split = several_turns([1.0, -2.0, 0.5], [3, 2, 3], cut=cut)
    batch = make_batch([group(split)], config, 1.0)
    joined = np.concatenate([s.advantages[s.trained] for s in batch])
    by_turn = np.array([1.0, -2.0, 0.5]) * -0.5 * 8 / 8.5
    np.testing.assert_allclose(joined, np.repeat(by_turn, [3, 2, 3]), rtol=1e-6)


def test_reinforce_plus_plus_whitens_over_the_whole_batch():
    pairs = [((0, 1), (1, 3)), ((2, 2), (5, 1))]
    groups = [group(*(several_turns([float(reward)], [n]) for reward, n in pair)) for pair in pairs]
    batch = make_batch(groups, AlgorithmConfig(advantage="reinforce_plus_plus"), 1.0)
    tokens = np.concatenate([s.advantages[s.trained] for s in batch])
    assert tokens.mean() == pytest.approx(0.0, abs=1e-6)
    assert tokens.std() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_whitening_is_of_the_step_however_it_is_cut(minibatches: int):
    """Against the closed form by tokens; by minibatches the pairs, each centered on 0, would have other signs."""
    pairs = [((0, 1), (1, 3)), ((2, 2), (5, 1)), ((0, 6), (9, 1)), ((3, 4), (3, 2))]
    groups = [group(*(several_turns([float(reward)], [n]) for reward, n in pair)) for pair in pairs]
    centered = [reward - (first + second) / 2 for (first, _), (second, _) in pairs for reward in (first, second)]
    tokens = [n for pair in pairs for _, n in pair]
    mean = sum(a * n for a, n in zip(centered, tokens, strict=True)) / sum(tokens)
    variance = sum((a - mean) ** 2 * n for a, n in zip(centered, tokens, strict=True)) / sum(tokens)
    expected = [(a - mean) / (variance + 1e-8) ** 0.5 for a in centered]
    config = AlgorithmConfig(advantage="reinforce_plus_plus", minibatches=minibatches)
    batches = make_batches(split_minibatches(groups, minibatches), config, 1.0)
    assert len(batches) == minibatches
    found = [s.advantages[s.trained] for batch in batches for s in batch]
    np.testing.assert_allclose([values[0] for values in found], expected, rtol=1e-6)
    assert all((values == values[0]).all() for values in found)
    # The last pair agrees: alone it is told nothing, in the step it stands above the mean by tokens.
    assert expected[-1] > 0
    alone = make_batch(groups[-1:], config, 1.0)
    assert all((s.advantages == 0).all() for s in alone)
    # Weights stay those of each optimizer step's own batch.
    assert [sum(s.weights.sum() for s in batch) for batch in batches] == pytest.approx([1.0] * minibatches)


def of_domain(name: str, *members: tuple[float, int]) -> Group:
    """A group of trajectories with these rewards and numbers of sampled tokens."""
    return group(*(replace(several_turns([reward], [tokens]), domain=name) for reward, tokens in members))


def test_whitening_apart_makes_environments_alike_whatever_their_scale():
    shop = [of_domain("shop", (0, 1), (1, 3)), of_domain("shop", (0, 2), (0, 2), (1, 1))]

    def found(scale: float, whiten: str) -> dict[str, np.ndarray]:
        gym = [of_domain("gym", (0, 2), (9 * scale, 5)), of_domain("gym", (2 * scale, 4), (1 * scale, 1))]
        config = AlgorithmConfig(advantage="reinforce_plus_plus", whiten=whiten)
        batch = make_batch([shop[0], gym[0], gym[1], shop[1]], config, 1.0)
        tokens = [s.advantages[s.trained] for s in batch]
        return {"shop": np.concatenate(tokens[:2] + tokens[6:]), "gym": np.concatenate(tokens[2:6])}

    for name, values in found(1.0, "environment").items():
        assert values.mean() == pytest.approx(0.0, abs=1e-6), name
        assert values.std() == pytest.approx(1.0, rel=1e-5), name
        np.testing.assert_allclose(values, found(100.0, "environment")[name], rtol=1e-5)
    together = found(100.0, "batch")
    assert together["shop"].std() < 0.01 < together["gym"].std()


@pytest.mark.parametrize(
    ("rewards", "changes", "expected"),
    [
        ((0.4, 0.2, 0.2, 0.2), {}, [0.2, -0.2 / 3, -0.2 / 3, -0.2 / 3]),
        ((0.4, 0.2, 0.2, 0.2), {"sign_clamp": 0.5, "advantage_scale": 2.0}, [0.0, -0.4 / 3, -0.4 / 3, -0.4 / 3]),
        ((1.0, 0.0, 0.0, 0.0), {"sign_clamp": 0.5, "advantage_scale": 2.0}, [2.0, -2 / 3, -2 / 3, -2 / 3]),  # AgentRL's
    ],
)
def test_scale_and_sign_clamp(rewards: tuple[float, ...], changes: dict[str, float], expected: list[float]):
    config = AlgorithmConfig(advantage="rloo", **changes)
    batch = make_batch([group(*(several_turns([reward], [1]) for reward in rewards))], config, 1.0)
    np.testing.assert_allclose([s.advantages[0] for s in batch], expected, rtol=1e-5)


def test_a_group_smaller_than_k_uses_all_its_members():
    members = [several_turns([r], [1]) for r in (1.0, 0.0)]
    batch = make_batch([group(*members)], AlgorithmConfig(advantage="pass_at_k", pass_k=4), 1.0)
    assert [s.advantages[0] for s in batch] == [0.0, 0.0]  # the one pair there is succeeds


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
@pytest.mark.parametrize(
    ("changes", "stay"),
    [
        ({}, [True, True, True]),
        ({"drop_zero_advantage": True}, [True, True, False]),
        ({"minimal_advantage": 0.0}, [True, False, True]),
        ({"minimal_advantage": 0.0, "drop_zero_advantage": True}, [True, False, False]),
        ({"minimal_advantage": -0.4}, [True, False, True]),
        ({"minimal_advantage": -0.6}, [True, True, True]),
        ({"minimal_advantage": 9.0}, [False, False, False]),
    ],
)
def test_what_a_minimal_advantage_leaves_out_was_never_sampled(
    aggregation: str, changes: dict[str, float], stay: list[bool]
):
    """Advantages 0.5, -0.5 and 0 by trajectory; two, three and one sampled tokens."""
    members = [trajectory([[False, True, True]], 1.0), trajectory([[True, False], [True, True]], 0.0)]
    both = [group(*members), group(trajectory([[True]], 0.5))]
    config = AlgorithmConfig.model_validate(
        {"aggregation": aggregation, "divide_by_std": False, "group_size": 2} | changes
    )
    batch, plain = (
        make_batch(both, config, 1.0),
        make_batch(both, config.model_copy(update=dict.fromkeys(changes)), 1.0),
    )
    tokens = {0: 2, 1: 3, 2: 1}
    left = [number for number, stays in enumerate(stay) if stays]
    assert sorted({s.trajectory for s in batch}) == left
    assert batch.denominators["tokens"] == sum(tokens[number] for number in left)
    for sequence in batch:
        wanted = {
            "token_mean": 1 / max(1, sum(tokens[number] for number in left)),
            "sequence_mean": 1 / (3 * tokens[sequence.trajectory]),
            "sequence_sum": 1 / 3,
        }[aggregation]
        assert sequence.weights[sequence.trained] == pytest.approx(wanted)
    assert len(plain.sequences) == 4, "nothing is left out without them"


def test_a_turn_below_the_minimal_advantage_is_left_out_alone():
    """With credit by turn the advantages of one trajectory differ: each turn stays or goes by its own."""
    one = trajectory([[True, True, True, True]])
    one.segments[0] = replace(one.segments[0], turn=np.array([0, 0, 1, 1], np.int32))
    one.turn_rewards, one.reward = [-1.0, 1.0], 0.0
    config = AlgorithmConfig(advantage="none", score="terminal", credit="signed", minimal_advantage=0.0, group_size=1)
    (sequence,) = make_batch([group(one)], config, 1.0)
    assert sequence.trained.tolist() == [False, False, True, True]
    assert sequence.weights[2:] == pytest.approx(0.5)
