"""What decides which groups a step trains on and with which rewards: faulty turns, their penalties, usable groups.

Every term of shaping is followed into the gradient: a real backward pass through PolicyLoss against the closed form.
Properties of the pipeline of filters hold for any group, one-element, all-unscored and mixed ones included. Does not
cover who replaces a group (test_rollout_scheduler.py) or how messages come about (test_rollout_episode.py).
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mua.algorithms.batch import filter_groups, make_batch, malformed_turns, repeated_turns, usable
from mua.algorithms.losses import PolicyLoss, TokenTensors
from mua.algorithms.rollout_metrics import rollout_metrics
from mua.config.schema import AlgorithmConfig
from mua.rollout.runner import Position, RolloutBatch
from mua.rollout.service import refill_metrics
from mua.types import Group, Json, Outcome, Trajectory
from tests.segments import segment_of


def said(text: str) -> Json:
    return {"role": "assistant", "content": text}


def called(*calls: tuple[str, Json], errors: int = 0) -> Json:
    message: Json = {"role": "assistant", "content": ""}
    if calls:
        message["tool_calls"] = [{"function": {"name": n, "arguments": json.dumps(a)}} for n, a in calls]
    if errors:
        message["tool_call_errors"] = [{"kind": "bad_json", "message": "no"}] * errors
    return message


def with_others(turns: list[Json]) -> list[Json]:
    """A conversation around these turns, in which user and tools repeat themselves all the time."""
    start: list[Json] = [{"role": "system", "content": "s"}, {"role": "user", "content": "again"}]
    answers = [{"role": "tool" if "tool_calls" in t else "user", "content": "again"} for t in turns]
    return start + [m for pair in zip(turns, answers, strict=True) for m in pair]


LOOK = ("look", {"order": "A1", "deep": True})


@pytest.mark.parametrize(
    ("turn", "malformed"),
    [
        (said("Hello."), False),
        (said(" \n"), True),
        (said("") | {"truncated": True}, False),
        (called(LOOK), False),
        (called(LOOK, errors=1), True),
        (called(errors=2), True),
    ],
)
def test_a_turn_without_words_or_with_an_unacceptable_call_is_malformed(turn: Json, malformed: bool) -> None:
    assert malformed_turns(with_others([said("a"), turn])) == [False, malformed]


@pytest.mark.parametrize(
    ("turns", "repeated"),
    [
        ([said("Which order?"), said("Which  order?\n"), said("which order?")], [False, True, False]),
        ([called(LOOK), called(("look", {"deep": True, "order": "A1"}))], [False, True]),
        ([called(LOOK), called(("look", {"order": "A2", "deep": True})), called(LOOK)], [False, False, True]),
        ([called(LOOK, LOOK)], [True]),
        ([called(LOOK), called(("find", LOOK[1])), called(("find", {}), LOOK)], [False, False, True]),
        # What is said beside a call is not what the turn does.
        ([said("Wait.") | called(LOOK), said("Wait.") | called(("find", {}))], [False, False]),
        ([said(" "), said(" ")], [False, False]),  # empty turns are malformed, not repeated
        ([], []),
    ],
)
def test_a_repeated_turn_does_or_says_the_same_again(turns: list[Json], repeated: list[bool]) -> None:
    assert repeated_turns(with_others(turns)) == repeated


# ---- shaping reaches the gradient

TOKENS = 2
"""Sampled tokens of every turn."""


def member(
    turns: list[Json], reward: float = 0.0, *, outcome: Outcome = Outcome.USER_STOP, success: bool | None = None
) -> Trajectory:
    """A trajectory of ``turns`` that is rewarded at its end."""
    turn = np.repeat(np.arange(len(turns)), TOKENS)
    segment = segment_of([True] * len(turn), turn=turn)
    rewards = [0.0] * (len(turns) - 1) + [reward] if turns else [reward]
    won = reward > 0.5 if success is None else success
    segments = [segment] if turns else []
    return Trajectory("t", 0, 0, segments, rewards, reward, won, outcome, messages=with_others(turns))


def gradients(members: list[Trajectory], config: AlgorithmConfig) -> list[list[float]]:
    """d loss / d log-probability of one token a turn, of every member, at ratio 1, times the batch's tokens."""
    batch = make_batch([Group(0, "t", members)], config, 1.0)
    found = []
    for sequence in batch:
        old = torch.from_numpy(sequence.old_logprobs).double()
        logprobs = old.clone().requires_grad_()
        weights, advantages = (torch.from_numpy(a).double() for a in (sequence.weights, sequence.advantages))
        loss = PolicyLoss(config)
        loss(logprobs, torch.zeros_like(old), TokenTensors(weights, advantages, old, old)).loss.backward()
        assert logprobs.grad is not None
        by_turn = (logprobs.grad * batch.denominators["tokens"]).reshape(-1, TOKENS)
        assert torch.equal(by_turn[:, 0], by_turn[:, 1])
        found.append(by_turn[:, 0].tolist())
    return found


def config(**changed: object) -> AlgorithmConfig:
    """RLOO with token means: at ratio 1 a token's gradient is minus its advantage over the batch's tokens."""
    return AlgorithmConfig.model_validate({"advantage": "rloo", "aggregation": "token_mean"} | changed)


def different(count: int, start: int = 0) -> list[Json]:
    return [said(f"turn {start + i}") for i in range(count)]


def close(found: list[list[float]], expected: list[list[float]]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-12)


def test_turn_efficiency_gives_equal_successes_a_gradient_by_their_turns() -> None:
    members = [member(different(n), 1.0) for n in (1, 3, 2)]
    close(gradients(members, config()), [[0.0] * n for n in (1, 3, 2)])
    # Bonuses 0.3, -0.3, 0: above the mean of the others by 0.45, -0.45, 0.
    found = gradients(members, config(shaping={"turn_efficiency": 0.3}))
    close(found, [[-0.45], [0.45] * 3, [0.0] * 2])
    # Among failures the longer one is preferred, with the opposite sign.
    failures = [replace(m, turn_rewards=[0.0] * len(m.turn_rewards), reward=0.0, success=False) for m in members]
    close(gradients(failures, config(shaping={"turn_efficiency": 0.3})), [[0.45], [-0.45] * 3, [0.0] * 2])


FAULTY = [called(errors=1), said("Hm."), said("Hm.")]
"""Malformed, fine, repeated."""


def test_penalties_of_turns_reach_the_score() -> None:
    members = [member(FAULTY, 1.0), member(different(2), 1.0)]
    close(gradients(members, config()), [[0.0] * 3, [0.0] * 2])
    shaping = {"malformed_turn": 0.25, "repeated_turn": 0.5}
    close(gradients(members, config(shaping=shaping)), [[0.75] * 3, [-0.75] * 2])
    close(gradients(members, config(shaping={"repeated_turn": 0.5})), [[0.5] * 3, [-0.5] * 2])
    # The last turn alone is the score: the malformed first one does not count.
    close(gradients(members, config(score="terminal", shaping=shaping)), [[0.5] * 3, [-0.5] * 2])


def test_penalties_of_turns_reach_the_credit() -> None:
    """Signed credit by hand: rewards -0.25, 0, 0.5; A = 0.25 - 1 = -0.75; four tokens with credit, Z = 2 * 0.75."""
    members = [member(FAULTY, 1.0), member(different(2), 1.0)]
    shaping = {"malformed_turn": 0.25, "repeated_turn": 0.5}
    found = gradients(members, config(credit="signed", shaping=shaping))
    scale = 4 / (2 * 0.25 + 2 * 0.5)
    close(found, [[0.75 * -0.25 * scale, 0.0, 0.75 * 0.5 * scale], [0.0, -0.75]])


def test_the_cap_takes_encouragement_from_faulty_turns_alone() -> None:
    members = [member(FAULTY, 1.0), member(FAULTY, 0.0)]
    close(gradients(members, config()), [[-1.0] * 3, [1.0] * 3])
    found = gradients(members, config(shaping={"cap_faulty_turns": True}))
    close(found, [[0.0, -1.0, 0.0], [1.0] * 3])


# ---- any group


@st.composite
def groups(draw: st.DrawFn) -> Group:
    outcomes = st.sampled_from(
        [Outcome.USER_STOP, Outcome.LENGTH, Outcome.MAX_TURNS, Outcome.ENGINE_ERROR, Outcome.TIMEOUT]
    )
    kinds = st.tuples(st.integers(1, 4), st.sampled_from([0.0, 0.25, 1.0]), outcomes)
    drawn = draw(st.lists(kinds, min_size=1, max_size=6))
    made = [member(different(turns, 10 * i), reward, outcome=o) for i, (turns, reward, o) in enumerate(drawn)]
    return Group(draw(st.integers(0, 9)), "t", made)


EVERY_TERM = {"turn_efficiency": 0.125, "overlong_tokens": 6, "overlong_buffer": 4, "repeated_turn": 0.5}
PIPELINES = st.lists(
    st.sampled_from(
        [
            {"kind": "range"},
            {"kind": "range", "minimum": 0.5},
            {"kind": "minimum_turns", "turns": 2},
            {"kind": "overlong", "keep": 0},
        ]
    ),
    max_size=3,
)


@settings(max_examples=60)
@given(groups(), PIPELINES, st.sampled_from(["grpo", "rloo", "none"]), st.booleans(), st.randoms())
def test_no_result_depends_on_the_order_of_members_or_on_faults_beside_them(
    group: Group, pipeline: list[dict], advantage: str, shape: bool, draw: object
) -> None:
    chosen = config(advantage=advantage, filters=pipeline, shaping=EVERY_TERM if shape else {})

    def trained(some: Group) -> dict[int, list[float]]:
        kept, _ = filter_groups([some], chosen)
        members = [t for g in kept for t in g.trajectories]
        batch = make_batch(kept, chosen, 1.0)
        assert len(batch) == len(members)
        return {id(t.segments[0]): s.advantages.tolist() for t, s in zip(members, batch, strict=True)}

    expected, verdict = trained(group), usable(group, chosen)
    shuffled = list(group.trajectories)
    draw.shuffle(shuffled)  # type: ignore[attr-defined]
    mixed = trained(replace(group, trajectories=shuffled))
    assert mixed.keys() == expected.keys()
    for key, advantages in expected.items():
        assert mixed[key] == pytest.approx(advantages, rel=1e-5, abs=1e-6)
    scored_alone = replace(group, trajectories=group.scored)
    assert trained(scored_alone) == expected
    assert usable(scored_alone, chosen) == verdict
    if not shape:
        assert verdict == (len(group.scored) >= 2 and any(any(a) for a in expected.values()))


OUTCOMES = {
    "failures of different lengths": ([(1, 0.0), (3, 0.0), (2, 0.0)], {"turn_efficiency": 0.3}, False),
    "all too long": ([(1, 0.0), (3, 0.0)], {"overlong_tokens": 6, "overlong_buffer": 4}, False),
    "penalties of turns": ([(3, 1.0), (3, 1.0)], {"malformed_turn": 0.25, "repeated_turn": 0.5}, False),
    "rounding": ([(1, 0.1 + 0.2), (1, 0.3)], {}, False),
    "rounding of large rewards": ([(1, 1e9 / 3 * 3), (1, 1e9 + 1e-6)], {}, False),
    "nobody else acted": ([(2, 1.0), (0, 0.0)], {}, False),
    "one sampled nothing": ([(2, 1.0), (2, 1.0), (0, 0.0)], {}, False),
    "success and failure": ([(2, 1.0), (2, 0.0), (0, 0.0)], {}, True),
    "evened out by a penalty": ([(3, 1.0), (2, 0.5)], {"repeated_turn": 0.5}, True),
}


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce_plus_plus"])
@pytest.mark.parametrize("case", OUTCOMES)
def test_a_group_is_usable_by_the_raw_outcomes_of_members_that_acted(case: str, advantage: str) -> None:
    drawn, shaping, expected = OUTCOMES[case]
    members = [member(FAULTY if n == 3 else different(n, 10 * i), reward) for i, (n, reward) in enumerate(drawn)]
    group = Group(0, "t", members)
    assert usable(group, config(advantage=advantage, shaping=shaping)) is expected
    agrees = rollout_metrics([group])["rollout/groups/zero_std"]
    assert agrees == (0.0 if expected else 1.0)
    kept, _ = filter_groups([group], config(filters=[{"kind": "range"}]))
    assert bool(kept) is expected


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "none", "pass_at_k"])
def test_a_sibling_that_sampled_nothing_changes_no_advantage(advantage: str) -> None:
    members = [member(different(1), 1.0), member(different(2), 0.0), member(different(1), 0.25)]
    setting = config(advantage=advantage, **({"pass_k": 2} if advantage == "pass_at_k" else {}))
    close(gradients([*members, member([], -3.0)], setting), gradients(members, setting))


def test_a_lone_trajectory_is_a_group_where_groups_are_of_one() -> None:
    lone = Group(0, "t", [member(different(1), 1.0)])
    assert usable(lone, config(advantage="none", group_size=1))
    failed = replace(lone, trajectories=[member(different(1), 1e-9)])
    assert not usable(failed, config(advantage="none", group_size=1))


def test_to_imitate_a_group_need_not_disagree() -> None:
    equal = Group(0, "t", [member(different(1), 1.0), member(different(2), 1.0)])
    assert usable(equal, AlgorithmConfig(loss="cross_entropy"))
    assert not usable(equal, AlgorithmConfig(loss="cross_entropy", drop_zero_advantage=True))


def test_a_step_tells_what_it_took_to_find_its_groups() -> None:
    good, equal = ([member(different(1), r) for r in rewards] for rewards in ([0.0, 1.0], [1.0, 1.0]))
    lone = [member(different(1), 1.0), member(different(1), 0.0, outcome=Outcome.ENGINE_ERROR)]
    chosen = config(groups_per_step=3, group_size=2)
    rolled_out = [Group(4, "a", equal), Group(5, "b", good), Group(6, "c", lone), Group(7, "d", equal)]
    kept = [group for group in rolled_out if usable(group, chosen)]
    assert refill_metrics(RolloutBatch(rolled_out, kept, 2, Position(9, {8: 1})), chosen) == {
        "rollout/filters/dropped": 3.0,
        "rollout/filters/faulty": 1.0,
        "rollout/filters/refilled": 1.0,
        "rollout/filters/extra_episodes": 6.0,
        "rollout/filters/missing": 2.0,
        "rollout/filters/cancelled": 2.0,
        "rollout/filters/carried": 0.0,
        "engine/partial/saved_share": 0.0,
        "engine/partial/saved_tokens": 0.0,
    }
