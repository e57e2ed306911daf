"""Episodes whose context was rewritten: several segments count as what they are, one trajectory.

Every claim compares a trajectory of five segments, as :mod:`mua.rollout.context` leaves them (notes carry the number of
the turn that follows), with its twin: the same sampled tokens, in the same turns, in one segment. Not covered: sequence
ratios (GSPO, ``correction_level: sequence``), which are those of a segment by design (docs/algorithms.md), the
rollout's side (test_rollout_context.py), gradients of merged prefixes (tests/parity/test_megatron_layouts.py).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from mua.algorithms.batch import adjust_batch, make_batch
from mua.algorithms.gae import estimate_advantages
from mua.config.algorithm import AlgorithmConfig
from mua.megatron.microbatch import predictions
from mua.megatron.packing import PlannedMicrobatch
from mua.megatron.trees import merge_prefixes
from mua.types import Group, Outcome, Provenance, Segment, TrainBatch, TrainSequence, Trajectory
from tests.segments import segment_of

HEAD = 7
"""Tokens of instructions and question, which every segment begins with."""
TURNS = (3, 2, 4, 1, 3)
"""Sampled tokens of five turns; after each a result of two tokens."""
NOTES = 2
"""Sampled tokens of the notes before each turn but the first."""
REWARDS = (0.25, 0.0, -0.5, 0.0, 1.0)
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "constant")
ADVANTAGES = ("grpo", "rloo", "reinforce_plus_plus", "pass_at_k", "none")
CREDITS = ("equal", "reward_to_go", "exponential", "signed")


def stream(parts: list[tuple[int, int, bool]], seed: int) -> Segment:
    """Of so many tokens of a turn, sampled or not."""
    sampled = np.concatenate([np.full(count, mine) for count, _, mine in parts])
    turn = np.concatenate([np.full(count, number, np.int32) for count, number, _ in parts])
    ids = np.random.default_rng(seed).integers(100, 200, len(turn)).astype(np.int32)
    ids[:HEAD] = np.arange(HEAD)
    logprobs = -1.0 - (ids % 7) / 10
    return segment_of(sampled, ids=ids, logprobs=logprobs, version=3, turn=turn, others=Provenance.TEMPLATE)


def rewritten(sample: int, rewards: tuple[float, ...] = REWARDS) -> Trajectory:
    """Five segments: each but the last ends with notes that count as part of the turn after it."""
    segments = []
    for number, count in enumerate(TURNS):
        parts = [(HEAD, number, False), (count, number, True), (2, number + 1, False)]
        if number < len(TURNS) - 1:
            parts.append((NOTES, number + 1, True))
        segments.append(stream(parts, 10 * sample + number))
    return trajectory(sample, segments, rewards)


def twin(of: Trajectory) -> Trajectory:
    """The same in one segment."""
    whole = [np.concatenate([getattr(s, name) for s in of.segments]) for name in Segment.__slots__[:5]]
    return replace(of, segments=[Segment(*whole)])


def trajectory(sample: int, segments: list[Segment], rewards: tuple[float, ...]) -> Trajectory:
    return Trajectory("t", 0, sample, segments, list(rewards), sum(rewards), rewards[-1] > 0, Outcome.USER_STOP)


def short(sample: int, reward: float) -> Trajectory:
    """One segment of one turn."""
    return trajectory(sample, [stream([(HEAD, 0, False), (3, 0, True), (1, 1, False)], sample)], (reward,))


def groups(split: bool) -> list[Group]:
    """Two tasks; of each, long trajectories beside short ones."""
    first, second = rewritten(0), rewritten(1, (0.0, 0.5, 0.0, 0.0, 0.0))
    long = [first, second] if split else [twin(first), twin(second)]
    return [
        Group(0, "a", [long[0], short(1, 0.0), short(2, 1.0)]),
        Group(1, "b", [short(0, 0.5), long[1], short(2, 0.0)]),
    ]


def per_token(batch: TrainBatch, name: str) -> list[np.ndarray]:
    """Of each trajectory what its trained tokens have, in order."""
    found: dict[int, list[np.ndarray]] = {}
    for sequence in batch:
        found.setdefault(sequence.trajectory, []).append(getattr(sequence, name)[sequence.trained])
    return [np.concatenate(found[number]) for number in sorted(found)]


def assert_alike(one: TrainBatch, other: TrainBatch, *names: str) -> None:
    assert one.denominators == other.denominators
    for name in names:
        for mine, theirs in zip(per_token(one, name), per_token(other, name), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("advantage", "credit"), list(product(ADVANTAGES, CREDITS)))
def test_segments_change_neither_weight_nor_advantage_of_a_token(advantage: str, credit: str) -> None:
    for aggregation in AGGREGATIONS:
        config = AlgorithmConfig.model_validate(
            {"advantage": advantage, "credit": credit, "aggregation": aggregation}
            | ({"pass_k": 2} if advantage == "pass_at_k" else {})
            | ({"discount": 0.9} if credit == "reward_to_go" else {})
            | ({"aggregation_constant": 9.0} if aggregation == "constant" else {})
        )  # fmt: skip
        split, whole = (make_batch(groups(of), config, 1.0) for of in (True, False))
        assert len(split) == len(whole) + 2 * (len(TURNS) - 1)
        assert_alike(split, whole, "weights", "advantages", "turns")


@pytest.mark.parametrize(
    "settings",
    [
        {"drop_zero_advantage": True, "credit": "signed"},
        {"minimal_advantage": 0.0},
        {"skip_zero_advantage": True, "credit": "reward_to_go"},
        {"correction": "truncate", "correction_high": 1.1},
        {"correction": "mask", "correction_low": 0.8, "correction_high": 1.2},
        {"kl_coefficient": 0.1, "kl_in": "reward"},
    ],
    ids=str,
)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_what_is_left_out_or_corrected_is_the_same(settings: dict[str, Any], aggregation: str) -> None:
    config = AlgorithmConfig.model_validate({"aggregation": aggregation, "old_logprobs": "recompute"} | settings)
    done = []
    for split in (True, False):
        batch = make_batch(groups(split), config, 1.0)
        rescored = [
            replace(s, old_logprobs=(s.behavior_logprobs + (s.ids % 5 - 2) / 8).astype(np.float32),
                    reference_logprobs=(s.behavior_logprobs - 0.1 * (s.ids % 3)).astype(np.float32))
            for s in batch
        ]  # fmt: skip
        done.append(adjust_batch(replace(batch, sequences=rescored), config, 3)[0])
    assert_alike(done[0], done[1], "weights", "advantages")


def valued(batch: TrainBatch, elsewhere: float) -> TrainBatch:
    """The critic's values: of a trained token by its id, of all others ``elsewhere``."""
    return replace(
        batch,
        sequences=[
            replace(s, values=np.where(s.trained, (s.ids % 11) / 5, elsewhere).astype(np.float32)) for s in batch
        ],
    )


GAE: dict[str, Any] = {"advantage": "gae", "gae_lambda": 0.9, "discount": 0.8, "gae_whiten": False}


@pytest.mark.parametrize("whiten", [False, True])
def test_gae_goes_over_a_rewrite_to_the_next_token_that_the_policy_chose(whiten: bool) -> None:
    """Values of heads, results and templates, where no choice was made, are not read, whatever they are."""
    config = AlgorithmConfig.model_validate(GAE | {"gae_whiten": whiten})
    done = []
    for split, elsewhere in ((True, 1e6), (True, 0.0), (False, -1e6)):
        (batch,), _ = estimate_advantages([valued(make_batch(groups(split), config, 1.0), elsewhere)], config)
        done.append(batch)
    for other in done[1:]:
        assert_alike(done[0], other, "weights", "advantages", "returns", "values")


def test_merged_prefixes_train_each_token_once() -> None:
    """A rewrite that leaves early turns as they were repeats their tokens, which the policy sampled in the segment
    before and which a second trajectory may have sampled too: each is scored once for each segment that trains it,
    where its own segment goes on."""
    first = stream([(HEAD, 0, False), (3, 0, True), (2, 1, False), (3, 1, True)], 1)
    repeated = np.concatenate([first.ids[: HEAD + 3], np.arange(300, 306)]).astype(np.int32)
    second = Segment(
        ids=repeated,
        provenance=np.repeat([Provenance.TEMPLATE, Provenance.SAMPLED], [HEAD + 6, 3]).astype(np.uint8),
        logprobs=np.full(HEAD + 9, -1, np.float32), version=np.full(HEAD + 9, 3, np.int32),
        turn=np.full(HEAD + 9, 2, np.int32),
    )  # fmt: skip
    members = [trajectory(n, [first, second], (0.0, 0.0, float(n))) for n in range(2)]
    batch = make_batch([Group(0, "a", members)], AlgorithmConfig(), 1.0)
    sequences: list[TrainSequence] = list(batch)
    forest = merge_prefixes([s.ids for s in sequences])
    planned = PlannedMicrobatch(tuple(range(len(sequences))), tuple(map(len, sequences)), forest)
    assert forest.tokens == len(first) + 6
    scored, predictors = predictions(planned, np.arange(forest.tokens), [s.trained for s in sequences])
    assert len(scored) == len(set(scored.tolist())) == sum(t.sampled_tokens for t in members) == 18
    laid = np.concatenate([sequences[node.sequence].ids[node.start : node.stop] for node in forest.nodes])
    before = np.concatenate([np.append(-1, s.ids[:-1]) for s in sequences])
    np.testing.assert_array_equal(laid[predictors], before[scored])
    weights = np.concatenate([s.weights for s in sequences])[scored]
    assert weights.sum() == pytest.approx(1.0)
