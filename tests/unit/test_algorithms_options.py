"""No option of ``algorithm`` is accepted and not read: each key alone is refused, or moves some bit of the gradient.

The gradient is that of a whole step: batch, advantages, corrections, loss. Not covered: what an option does to it
(the other files of this name), and keys that choose episodes or count steps (:data:`ELSEWHERE`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from mua.algorithms.batch import adjust_batch, make_batch
from mua.algorithms.gae import estimate_advantages
from mua.algorithms.losses import PolicyLoss, TokenTensors
from mua.config.schema import AlgorithmConfig, ExperimentConfig
from mua.types import Group, Outcome, TrainSequence, Trajectory
from tests.segments import segment_of

VERSION = 5
TEACHER = {"base_url": "http://teacher:1"}
ELSEWHERE = {
    "group_size", "groups_per_step", "epochs", "minibatches", "filters", "group_filter", "refill", "curriculum",
    "shuffle_rewards", "allow_off_policy", "skip_zero_advantage",
}  # fmt: skip
"""Keys that choose groups or steps, permit what is refused otherwise, or promise the same gradient."""
VALUES: dict[str, list[Any]] = {
    "score": ["terminal", "mean", "discounted"], "discount": [0.5], "sign_clamp": [9.0], "advantage_scale": [2.0],
    "advantage": ["rloo", "reinforce_plus_plus", "pass_at_k", "gae", "none"], "divide_by_std": [False],
    "whiten": ["environment"], "pass_k": [2], "gae_lambda": [0.5], "gae_whiten": [False],
    "credit": ["reward_to_go", "exponential", "signed"], "credit_k": [0.5], "credit_form": ["userrl"],
    "loss": ["gspo", "cispo", "sapo", "reinforce", "cross_entropy"],
    "clip_low": [0.01], "clip_high": [0.01], "dual_clip": [1.01], "ce_gppo_beta1": [0.7], "ce_gppo_beta2": [0.7],
    "aggregation": ["sequence_mean", "sequence_sum", "constant"], "aggregation_constant": [9.0],
    "kl_coefficient": [0.3], "kl_estimator": ["k1", "k2"], "kl_in": ["reward"], "entropy_coefficient": [0.2],
    "old_logprobs": ["engine"], "distillation": [TEACHER, TEACHER | {"only": True}],
    "correction": ["truncate", "mask", "band"], "correction_level": ["sequence", "geometric"],
    "correction_low": [0.9], "correction_high": [1.1], "correction_cap": [1.0], "correction_decay": [0.5],
    "shaping": [{"turn_efficiency": 0.4}, {"overlong_tokens": 6, "overlong_buffer": 3}, {"malformed_turn": 0.3},
                {"repeated_turn": 0.3}, {"cap_faulty_turns": True}],
    "minimal_advantage": [0.2], "drop_zero_advantage": [True],
}  # fmt: skip
BASES: list[dict[str, Any]] = [
    {},
    *({key: value} for key in ("loss", "advantage", "credit", "correction", "aggregation", "distillation", "score")
      for value in VALUES[key] if value != "discounted"),
    {"score": "discounted", "discount": 0.7},
    {"kl_coefficient": 0.3}, {"kl_coefficient": 0.3, "kl_in": "reward"}, {"drop_zero_advantage": True},
    {"correction": "band", "old_logprobs": "engine"}, {"loss": "cross_entropy", "minimal_advantage": 0.7},
    {"loss": "minirl"},
    {"advantage": "gae", "kl_coefficient": 0.3, "kl_in": "reward"}, {"minimal_advantage": -1.0},
    {"loss": "reinforce", "correction": "band"}, {"loss": "reinforce", "distillation": TEACHER},
]  # fmt: skip


ALIKE = {
    "pass_at_k": ("score", "pass_k", "shaping"), "reinforce_plus_plus": ("drop_zero_advantage",),
    str(TEACHER | {"only": True}): ("advantage",), "cross_entropy, 0.7": ("advantage", "shaping"),
    **dict.fromkeys(("sequence_mean", "sequence_sum", "constant"), ("drop_zero_advantage",)),
}  # fmt: skip
"""``advantage: none`` says that rewards are left out. Others are read, but not seen in these episodes: successes stay
successes, after whitening nothing is exactly 0, and whole trajectories without an advantage move no weight of the
others, though the step gets cheaper without them."""


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def member(group: int, sample: int) -> Trajectory:
    """Two or three turns of one to four tokens; one may be empty, one said twice. The last group agrees."""
    random = np.random.default_rng([group, sample])
    turns = int(random.integers(2, 4))
    turn = np.repeat(np.arange(turns), random.integers(1, 5, turns)).astype(np.int32)
    rewards = [0.0] * turns if group == 3 else random.choice([-0.5, 0.0, 0.25, 1.0], turns).tolist()
    logprobs, behind = -1 - random.random(len(turn)), random.integers(0, 3)
    segment = segment_of(
        [True] * len(turn), ids=np.arange(len(turn)), logprobs=logprobs, version=VERSION - behind, turn=turn,
        teacher_logprobs=(logprobs - random.normal(size=len(turn))).astype(np.float32),
    )  # fmt: skip
    total, messages = sum(rewards), [said("a"), said("a" if sample % 2 else ""), said("b")][:turns]
    domain = "shop" if group % 2 else "gym"
    return Trajectory(
        "t", group, sample, [segment], rewards, total, total > 0.5, Outcome.USER_STOP, domain=domain, messages=messages
    )


GROUPS = [Group(number, "t", [member(number, sample) for sample in range(4)]) for number in range(4)]
LONGEST = 12


def scored_by_trainer(sequence: TrainSequence, old: bool) -> TrainSequence:
    random = np.random.default_rng([*sequence.origin[:2], 7])  # type: ignore[misc]
    near, far, values = random.normal(0, 0.4, (3, len(sequence))).astype(np.float32)
    return replace(
        sequence, reference_logprobs=sequence.behavior_logprobs + far, values=values,
        old_logprobs=sequence.behavior_logprobs + near if old else sequence.old_logprobs,
    )  # fmt: skip


def gradient(config: AlgorithmConfig) -> np.ndarray:
    """Of the log-probability of every token, ``[trajectories, LONGEST]``; entropy depends on it too."""
    batch, found = make_batch(GROUPS, config, 1.0), np.zeros((len(GROUPS) * 4, LONGEST))
    batch = replace(batch, sequences=[scored_by_trainer(s, config.recomputes) for s in batch])
    if config.advantage == "gae":
        (batch,), _ = estimate_advantages([batch], config)
    if not batch.sequences or not (batch := adjust_batch(batch, config, VERSION)[0]).sequences:
        return found
    columns = ("weights", "advantages", "behavior_logprobs", "old_logprobs", "reference_logprobs")
    parts = [torch.from_numpy(np.concatenate([getattr(s, c)[s.trained] for s in batch])).double() for c in columns]
    drifts = [np.random.default_rng([*s.origin[:2], 9]).normal(0, 0.6, len(s))[s.trained] for s in batch]
    logprobs = (parts[2] + torch.from_numpy(np.concatenate(drifts))).requires_grad_()
    owner = np.repeat(np.arange(len(batch)), [s.trained.sum() for s in batch])
    tokens = TokenTensors(*parts, sequence=torch.from_numpy(owner), sequences=len(batch))
    PolicyLoss(config)(logprobs, -logprobs * logprobs.detach().exp(), tokens).loss.backward()
    assert logprobs.grad is not None
    for number, s in enumerate(batch):
        row = found[s.origin[0] * 4 + s.origin[1]]  # type: ignore[index]
        row[: len(s)][s.trained] = logprobs.grad.numpy()[owner == number]
    return found


def accepted(settings: dict[str, Any]) -> AlgorithmConfig | None:
    try:
        config = AlgorithmConfig.model_validate({"epochs": 2, "allow_off_policy": True} | settings)
    except ValidationError:
        return None
    return config.model_copy(update={"pass_k": 2}) if config.pass_k == 4 else config  # of groups of four


@pytest.mark.parametrize("base", BASES, ids=str)
def test_each_key_alone_is_refused_or_moves_the_gradient(base: dict[str, Any]) -> None:
    plain = accepted(base)
    assert plain is not None
    expected = gradient(plain)
    tried = ((key, value) for key, values in VALUES.items() if key not in base for value in values)
    unread = [
        (key, value)
        for key, value in tried
        if key not in ALIKE.get(", ".join(map(str, base.values())), ())
        and (config := accepted(base | {key: value})) is not None
        and np.array_equal(gradient(config), expected)
    ]
    assert not unread


def test_every_key_is_tried_or_said_to_work_elsewhere() -> None:
    assert VALUES.keys() | ELSEWHERE == AlgorithmConfig.model_fields.keys()
    assert not VALUES.keys() & ELSEWHERE


@pytest.mark.parametrize("base", BASES, ids=str)
def test_trajectories_without_an_advantage_are_skipped_only_where_the_gradient_stays(base: dict[str, Any]) -> None:
    if (skipping := accepted(base | {"skip_zero_advantage": True})) is None:
        return
    plain = accepted(base)
    assert plain is not None
    np.testing.assert_array_equal(gradient(skipping), gradient(plain))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loss": "minirl", "dual_clip": 3.0}, "dual_clip is read only with loss grpo, gspo, hook (loss is minirl)"),
    ({"pass_k": 2}, "pass_k is read only with advantage pass_at_k"),
    ({"loss": "cross_entropy", "score": "mean"}, "score is read only with advantage, which is read only with loss"),
    ({"loss": "reinforce", "old_logprobs": "engine"}, "old_logprobs is read only with"),
    ({"distillation": TEACHER | {"only": True}, "divide_by_std": False}, "divide_by_std is read only with"),
    ({"kl_in": "reward"}, "kl_in is read only with kl_coefficient"),
    ({"shaping": {"overlong_buffer": 3}}, "overlong_buffer is read only with overlong_tokens"),
    ({"refill": {"max_cancellations": 3}}, "max_cancellations is read only with oversample"),
    ({"curriculum": {"floor": 0.3}}, "floor is read only with kind success_rate, failing_kinds, hook"),
    ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "kl_estimator k1"),
    ({"group_size": 1}, "group_size 1"), ({"group_size": 1, "advantage": "pass_at_k", "pass_k": 1}, "group_size 1"),
    ({"group_size": 1, "advantage": "none", "filters": [{"kind": "range"}]}, "filters: kind range"),
    ({"advantage": "pass_at_k", "group_size": 4}, "pass_k 4"),
    ({"skip_zero_advantage": True, "entropy_coefficient": 0.1}, "skip_zero_advantage"),
    ({"skip_zero_advantage": True, "kl_coefficient": 0.1}, "skip_zero_advantage"),
    ({"skip_zero_advantage": True, "loss": "cross_entropy"}, "skip_zero_advantage"),
    ({"skip_zero_advantage": True, "loss": "pkg.module:loss"}, "skip_zero_advantage"),
    ({"skip_zero_advantage": True, "minimal_advantage": 0.1}, "skip_zero_advantage"),
    ({"loss": "cross_entropy", "kl_in": "reward", "kl_coefficient": 0.1}, "loss cross_entropy"),
    ({"advantage": "pass_at_k", "shaping": {"turn_efficiency": 0.1}}, "advantage pass_at_k"),
    ({"correction": "band", "loss": "sapo"}, "correction band"),
    ({"correction": "mask", "old_logprobs": "engine"}, "correction compares the engine"),
    ({"correction": "mask", "correction_low": 3.0}, "correction_low must be below"),
    ({"correction": "band", "old_logprobs": "engine", "correction_high": 3.0}, "correction_high bounds"),
    ({"minimal_advantage": 0.0, "advantage": "gae"}, "minimal_advantage and drop_zero_advantage"),
    ({"advantage": "gae", "shaping": {"cap_faulty_turns": True}}, "shaping.cap_faulty_turns"),
    ({"advantage": "gae", "sign_clamp": 0.5}, "sign_clamp is read only with advantage grpo"),
    ({"advantage": "gae", "distillation": TEACHER | {"only": True}}, "advantage is read only with rewards"),
    ({"loss": "gspo", "ce_gppo_beta1": 1.0}, "ce_gppo_beta1 is read only with loss grpo, hook"),
    ({"loss": "cross_entropy", "shuffle_rewards": True}, "shuffle_rewards"),
    ({"drop_zero_advantage": True, "minimal_advantage": 0.1}, "minimal_advantage above 0"),
    ({"score": "discounted"}, "score discounted"),
    ({"correction": "band", "correction_level": "sequence"}, "correction_level is read only with"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "line"), REFUSED, ids=str)
def test_what_is_not_read_is_refused_with_the_key_and_the_option_that_reads_it(
    settings: dict[str, Any], line: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        AlgorithmConfig.model_validate(settings)
    lines = [one for problem in refused.value.errors() for one in problem["msg"].split("\n")]
    assert any(one.removeprefix("Value error, ").startswith(line) for one in lines)


@pytest.mark.parametrize("address", ["http://t:1/v1", "http://me:secret@t:1", "teacher:30000"])
def test_an_address_that_is_no_native_interface_is_refused_and_not_repeated(address: str) -> None:
    with pytest.raises(ValidationError) as refused:
        AlgorithmConfig.model_validate({"distillation": {"base_url": address}})
    assert "secret@" not in refused.value.errors()[0]["msg"]


@pytest.mark.parametrize(
    "settings",
    [
        {"advantage": "none", "distillation": TEACHER | {"only": True}}, {"group_size": 1, "advantage": "none"},
        {"group_size": 1, "distillation": TEACHER | {"only": True}},
        {"skip_zero_advantage": True, "minimal_advantage": -1.0}, {"loss": "pkg.module:loss", "dual_clip": 2.0},
        {"advantage": "pkg.module:advantage", "pass_k": 2}, {"loss": "minirl", "dual_clip": None, "pass_k": 4},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_read_and_what_stands_at_its_default_is_accepted(settings: dict[str, Any]) -> None:
    AlgorithmConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"critic": {"warmup_steps": 1}}, "critic is read only with algorithm.advantage gae"),
        ({"optimizer": {"min_learning_rate": 1e-9}}, "min_learning_rate is read only with schedule linear, cosine"),
        ({"optimizer": {"exp_avg_dtype": "bfloat16"}}, "exp_avg_dtype is read only with precision_aware"),
        ({"algorithm": {"skip_zero_advantage": True}, "megatron": {"moe_aux_loss": 0.1}}, "algorithm.skip_zero_adv"),
        ({"algorithm": {"correction": "band", "correction_decay": 0.1}}, "algorithm.correction_decay narrows"),
        ({"rollout": {"final_request": "Now."}}, "final_request is read only with final_turn"),
    ],
)
def test_other_sections_refuse_what_they_do_not_read(sections: dict[str, Any], key: str) -> None:
    needed = {"name": "n", "output": "o", "model": {"path": "m"}, "environment": {"name": "e"}, "trainer": {"steps": 9}}
    with pytest.raises(ValidationError) as refused:
        ExperimentConfig.model_validate(needed | sections)
    assert key in refused.value.errors()[0]["msg"]
