"""From groups of trajectories to a batch whose loss is a plain weighted sum.

The global denominators are divided into the per-token weights here, once. Whatever layout trains the batch
afterwards (data, context, pipeline, micro-batches) only adds up, so it cannot change the loss.

The way of a step's groups to its gradients, one line per function. The numbers are files, of the walk of a token that
begins at the top of :mod:`mua.trainer.rl`; what has none is optional, or computes without passing tokens on::

    filter_groups(groups)          which trajectories train                    9   here
    make_batches(parts)            advantages, weights of tokens               9   here, advantage
    Learner.with_logprobs(batch)   the trainer's and the reference's scores    10  mua.trainer.learner
    estimate_advantages(batches)   with a critic: its advantages                   mua.algorithms.gae
    adjust_batch(batch)            KL penalty, teacher, the engine's mismatch      here, distillation, correction
    Learner.train_step(batch)      announced to all ranks                      10  mua.trainer.learner
      BatchSharder.plan(sequences) once for scores and training                11  mua.megatron.batch_sharder
        pack(ids)                  sequences into micro-batches, ranks         12  mua.megatron.packing
      BatchSharder.shard(batch)    each rank gets its own                      11  mua.megatron.batch_sharder
      Network.train(batch)                                                     13  mua.megatron.network
        micro_batch(sequences)     one micro-batch as tensors                  14  mua.megatron.microbatch
        Megatron's schedule        forward and backward of each micro-batch    13  mua.megatron.network
          PackedAttention          inside the model                                mua.megatron.attention
          log_probabilities        of the scored tokens                            mua.megatron.logprobs
          PolicyLoss               the loss, and sums for metrics              15  mua.algorithms.losses
        Optimizer.step()           clip, AdamW                                     mua.megatron.optimizer

Filters see trajectories that are scored and sampled something; whatever they take out is in no group statistics either,
so that it cannot shift the baseline of those that stay. They run in the order of ``algorithm.filters``. Shaping reads
which turns of a conversation were malformed, and which repeat what was done or said before. A turn is an assistant
message. Messages are those of :class:`mua.types.Trajectory`.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mua.algorithms.advantage import (
    TOLERANCE,
    Floats,
    agree,
    clamp_signs,
    group_advantages,
    spread_advantage,
    trajectory_score,
    turn_credits,
    whiten_by_label,
)
from mua.algorithms.correction import correct_mismatch, drop_tokens
from mua.algorithms.distillation import distill
from mua.config.schema import (
    AlgorithmConfig,
    BalanceFilter,
    GroupFilter,
    MinimumTurnsFilter,
    RangeFilter,
    ShapingConfig,
)
from mua.types import Group, Json, Outcome, Segment, TrainBatch, TrainSequence, Trajectory
from mua.utils.hooks import call_hook, check_numbers, is_hook, wrong_result
from mua.utils.seeds import derived_seed, named_random


def make_batches(parts: Sequence[Sequence[Group]], config: AlgorithmConfig, temperature: float) -> list[TrainBatch]:
    """The batches of a step's optimizer steps, one for each of ``parts``: minibatches of the step's groups.

    What compares across groups (whitening) sees the groups of all parts, so no advantage depends on how the step was
    cut. Denominators are those of a part: an optimizer step's loss is the mean over its own batch.

    Trajectories that are unscored or sampled nothing contribute nothing, not even to group statistics. The advantage of
    a trajectory is spread over its turns (``algorithm.credit``) and, within a turn, over every token sampled, in all
    segments; segments without a sampled token are left out. Weights of sampled tokens, with ``T_i`` sampled tokens in
    trajectory ``i`` and ``M`` trajectories:

    - ``token_mean``: ``1 / sum_i T_i``;
    - ``sequence_mean``: ``1 / (M * T_i)``;
    - ``sequence_sum``: ``1 / M``;
    - ``constant``: ``1 / (M * aggregation_constant)``.

    With ``algorithm.skip_zero_advantage`` trajectories whose advantages are all 0 are counted in these denominators and
    then left out: their loss has no gradient.

    What ``algorithm.minimal_advantage`` and ``drop_zero_advantage`` leave out is in no denominator of tokens, as if it
    had never been sampled.

    ``old_logprobs`` are the engine's; a trainer that recomputes them replaces them, and then has the batch
    :func:`adjust_batch`. ``temperature`` is that of sampling. A batch whose advantages are all 0 is legal, and so is an
    empty one (nothing was scored).
    """
    cut = [[_penalized(group, config) for group in part] for part in parts]
    credited = _with_advantages([group for part in cut for group in part], config)
    batches = [
        _batch(part, list(itertools.islice(credited, sum(len(group.acted) for group in part))), config, temperature)
        for part in cut
    ]
    return [
        drop_tokens(batch, [s.trained & select_tokens(s.advantages, config) for s in batch], config)
        for batch in batches
    ]


def select_tokens(advantages: npt.NDArray[Any], config: AlgorithmConfig) -> npt.NDArray[np.bool_]:
    """Which tokens ``algorithm.minimal_advantage`` and ``drop_zero_advantage`` let train, of the shape of
    ``advantages``."""
    stays = np.ones(np.shape(advantages), dtype=np.bool_)
    if config.drop_zero_advantage:
        stays &= advantages != 0
    if config.minimal_advantage is not None:
        stays &= advantages >= np.float32(config.minimal_advantage)
    return stays


def make_batch(groups: Sequence[Group], config: AlgorithmConfig, temperature: float) -> TrainBatch:
    """The batch of a step that takes one optimizer step on all of ``groups``; see :func:`make_batches`."""
    return make_batches([groups], config, temperature)[0]


def _penalized(group: Group, config: AlgorithmConfig) -> Group:
    return replace(group, trajectories=[penalize_turns(t, config.shaping) for t in group.trajectories])


def _with_advantages(groups: Sequence[Group], config: AlgorithmConfig) -> Iterator[tuple[Trajectory, Floats]]:
    """Every trajectory that acted with the advantage of each of its turns, ``[T]``."""
    members = [t for group in groups for t in group.acted]
    scores = [shape_scores(_scores(g.acted, config), g.acted, config.shaping) for g in groups]
    found = [_estimate(own, group.acted, config) for own, group in zip(scores, groups, strict=True)]
    advantages = np.concatenate([np.zeros(0), *found])
    if config.advantage == "reinforce_plus_plus":
        apart = [t.domain if config.whiten == "environment" else "" for t in members]
        advantages = whiten_by_label(advantages, np.array([t.sampled_tokens for t in members]), apart)
    if config.sign_clamp is not None:
        advantages = clamp_signs(advantages, np.concatenate([np.zeros(0), *scores]), config.sign_clamp)
    for trajectory, advantage in zip(members, (advantages * config.advantage_scale).tolist(), strict=True):
        turns = len(trajectory.turn_rewards)
        by_turn = np.full(turns, advantage)
        if config.credit != "equal":
            tokens = np.zeros(turns, dtype=np.int64)
            for segment in trajectory.segments:
                tokens += np.bincount(segment.turn[segment.loss_mask], minlength=turns)
            credits = turn_credits(trajectory.turn_rewards, config.credit, gamma=config.discount, k=config.credit_k)
            by_turn = spread_advantage(advantage, credits, tokens, signed_sum=config.credit_form == "userrl")
        yield trajectory, cap_faulty_turns(by_turn, trajectory, config.shaping)


def _estimate(scores: Floats, members: Sequence[Trajectory], config: AlgorithmConfig) -> Floats:
    """The advantages of one group by ``algorithm.advantage``, ``[n]``."""
    if config.advantage == "gae" or not members:  # not known before the critic has seen the batch
        return np.zeros(len(members))
    if is_hook(config.advantage):
        found = call_hook("algorithm.advantage", config.advantage, scores.tolist(), members, config)
        return check_numbers("algorithm.advantage", config.advantage, found, len(members))
    k = min(config.pass_k, len(scores))  # a group may have lost members to faults of the infrastructure
    return group_advantages(scores.tolist(), config.advantage, divide_by_std=config.divide_by_std, k=k)


def _scores(members: Sequence[Trajectory], config: AlgorithmConfig) -> Floats:
    if config.score == "sum":
        return np.array([t.reward for t in members])
    return np.array([trajectory_score(t.turn_rewards, config.score, gamma=config.discount) for t in members])


def _batch(
    groups: Sequence[Group], credited: Sequence[tuple[Trajectory, Floats]], config: AlgorithmConfig, temperature: float
) -> TrainBatch:
    """``credited``: the trajectories of ``groups`` that acted, in order, with the advantage of each of their turns."""
    count, tokens = len(credited), sum(trajectory.sampled_tokens for trajectory, _ in credited)
    sequences: list[TrainSequence] = []
    for number, (trajectory, advantages) in enumerate(credited):
        if config.skip_zero_advantage and not advantages.any():
            continue
        denominator = {
            "token_mean": float(tokens),
            "sequence_mean": float(count * trajectory.sampled_tokens),
            "sequence_sum": float(count),
            "constant": count * config.aggregation_constant,
        }[config.aggregation]
        sequences += [
            replace(
                _train_sequence(segment, 1.0 / denominator, advantages, number),
                origin=(trajectory.ordinal, trajectory.sample, place),
            )
            for place, segment in enumerate(trajectory.segments)
            if segment.loss_mask.any()
        ]
    rewards = []
    if config.advantage == "gae":  # the rewards of turns; what shaping adds to a score comes with the last
        for group in groups:
            scores = _scores(group.acted, config)
            bonuses = shape_scores(scores, group.acted, config.shaping) - scores
            for trajectory, bonus in zip(group.acted, bonuses, strict=True):
                rewards.append(np.array(trajectory.turn_rewards, dtype=np.float64))
                rewards[-1][-1] += bonus
    return TrainBatch(sequences, temperature, {"tokens": float(tokens), "sequences": float(count)}, rewards)


def _train_sequence(segment: Segment, weight: float, advantages: Floats | None, trajectory: int = 0) -> TrainSequence:
    """The segment up to its last trained token: what follows (a tool's result, the user's goodbye) moves no loss.

    ``advantages`` are those of the trajectory's turns.
    """
    end = int(np.flatnonzero(segment.loss_mask)[-1]) + 1
    sampled = segment.loss_mask[:end]
    by_token = np.zeros(end, dtype=np.float32)
    if advantages is not None:
        by_token[sampled] = advantages[segment.turn[:end][sampled]]
    return TrainSequence(
        ids=segment.ids[:end],
        weights=sampled.astype(np.float32) * np.float32(weight),
        advantages=by_token,
        behavior_logprobs=segment.logprobs[:end],
        old_logprobs=segment.logprobs[:end],
        experts=None if segment.experts is None else segment.experts[:end],
        version=segment.version[:end],
        turns=segment.turn[:end],
        teacher_logprobs=None if segment.teacher_logprobs is None else segment.teacher_logprobs[:end],
        trajectory=trajectory,
    )


def adjust_batch(batch: TrainBatch, config: AlgorithmConfig, version: int) -> tuple[TrainBatch, dict[str, float]]:
    """``batch``, whose old and reference log-probabilities are the trainer's, with what is decided by them; metrics.

    It happens on whole sequences and in numpy, before anything is packed or split over ranks. A KL penalty in the
    reward (``algorithm.kl_in``) and the distance to the teacher (``algorithm.distillation``) are taken from the
    advantages, token by token; the policy's side is the old log-probabilities. Then the engine's mismatch is weighed or
    masked, see :func:`mua.algorithms.correction.correct_mismatch`.

    Args:
        batch: of :func:`make_batches`.
        config: the section ``algorithm``.
        version: the policy version that is about to be trained; a token's age counts from it.
    """
    metrics: dict[str, float] = {}
    if config.kl_in == "reward" and config.kl_coefficient != 0 and config.advantage != "gae":  # GAE has taken it
        from mua.algorithms.objectives import kl_to_reference  # torch, which no evaluation of an endpoint needs

        penalties = [config.kl_coefficient * kl_to_reference(s, config.kl_estimator) * s.trained for s in batch]
        batch = batch.with_advantages([s.advantages - penalty for s, penalty in zip(batch, penalties, strict=True)])
    if config.distillation is not None:
        batch, metrics = distill(batch, config.distillation)
    if not config.recomputes:
        return batch, metrics
    batch, of_correction = correct_mismatch(batch, config, version)
    return batch, metrics | of_correction


def usable(group: Group, config: AlgorithmConfig) -> bool:
    """Whether ``group`` would move the policy; ``algorithm.refill`` replaces groups that would not.

    Infrastructure faults fill no group, see :func:`enough_scored`. After the filters some member must have an advantage
    other than 0 by its raw outcome: what ``algorithm.shaping`` adds tells members apart that came to the same. Where a
    critic, a teacher or imitation decides, which reads no outcomes of the group, that is taken for granted.
    """
    if not enough_scored(group, config):
        return False
    kept, _ = filter_groups([group], config)
    if config.advantage == "gae" or config.distillation is not None or config.why_unread("advantage") is not None:
        return bool(kept)
    found = [_estimate(_scores(g.acted, config), g.acted, config) * config.advantage_scale for g in kept]
    return any(bool((np.abs(a[select_tokens(a, config)]) > TOLERANCE).any()) for a in found)


def enough_scored(group: Group, config: AlgorithmConfig) -> bool:
    """Whether two scored members at least (one with ``group_size`` 1) were left to sample something."""
    return len(group.acted) >= min(2, config.group_size)


def sft_batch(segments: Sequence[Segment]) -> TrainBatch:
    """A supervised batch: every trained token weighs ``1 / tokens`` over the whole batch.

    The temperature is 1: cross-entropy is of the model's own distribution. Advantages are 0 and unused.
    """
    trained = [segment for segment in segments if segment.loss_mask.any()]
    tokens = sum(int(segment.loss_mask.sum()) for segment in trained)
    sequences = [_train_sequence(segment, 1.0 / tokens, None) for segment in trained]
    return TrainBatch(sequences, 1.0, {"tokens": float(tokens), "sequences": float(len(trained))})


def split_minibatches(groups: Sequence[Group], n: int) -> list[list[Group]]:
    """Cut ``groups`` into ``n`` runs, in order, whose lengths differ by one at most.

    Whole groups, not trajectories, so that each part's group statistics are those of the full batch. Raises
    ``ValueError`` when there are fewer groups than parts.
    """
    if not 0 < n <= len(groups):
        raise ValueError(f"cannot cut {len(groups)} groups into {n} minibatches; algorithm.minibatches is too large")
    bounds = [len(groups) * i // n for i in range(n + 1)]
    return [list(groups[low:high]) for low, high in itertools.pairwise(bounds)]


def filter_groups(groups: Sequence[Group], config: AlgorithmConfig) -> tuple[list[Group], dict[str, float]]:
    """The groups that are left, without members that are unscored or sampled nothing, and what share each filter took.

    A group that is left without members is dropped. Deterministic: what is drawn depends on the group's ordinal alone.
    """
    kept = [replace(group, trajectories=group.acted) for group in groups if group.acted]
    before, taken = sum(len(group.trajectories) for group in kept), Counter[str]()

    def take(name: str, passed: Sequence[Sequence[Trajectory]]) -> None:
        nonlocal kept
        taken[name] += sum(len(g.trajectories) - len(p) for g, p in zip(kept, passed, strict=True))
        kept = [replace(g, trajectories=list(p)) for g, p in zip(kept, passed, strict=True) if p]

    for chosen in config.filters:
        take(chosen.kind, [_passed(group, chosen) for group in kept])
    if (path := config.group_filter) is not None:
        key, passed = "algorithm.group_filter", []
        for group in kept:
            found = call_hook(key, path, group, config)
            members = {id(t) for t in group.trajectories}
            if not isinstance(found, list | tuple) or not all(id(t) in members for t in found):
                raise wrong_result(key, path, f"gave {type(found).__name__}, no list of the group's trajectories")
            passed.append(found)
        take("hook", passed)
    shares = {f"rollout/filters/{kind}": count / before for kind, count in taken.items()} if before else {}
    return kept, shares | ({"rollout/filters/groups_kept": len(kept) / len(groups)} if groups and taken else {})


def _passed(group: Group, chosen: GroupFilter) -> list[Trajectory]:
    members, draw = group.trajectories, random.Random(derived_seed("filter", group.ordinal))

    def at_most(count: int, among: list[Trajectory]) -> list[Trajectory]:
        return among if len(among) <= count else draw.sample(among, count)

    if isinstance(chosen, RangeFilter):
        rewards = [t.reward for t in members]
        return members if not agree(rewards) and np.ptp(rewards) >= chosen.minimum - TOLERANCE else []
    right, wrong = [t for t in members if t.success], [t for t in members if not t.success]
    if isinstance(chosen, MinimumTurnsFilter):
        dropped = [t for t in right if len(t.turn_rewards) < chosen.turns]
    elif isinstance(chosen, BalanceFilter):
        # At most so many more of either kind than there are of the rarer one (AgentRL: one wrong, two right).
        rarer = min(len(right), len(wrong))
        kept = at_most(rarer + chosen.extra_right, right) + at_most(rarer + chosen.extra_wrong, wrong)
        dropped = _without(members, kept)
    else:
        overlong = [t for t in wrong if t.outcome in (Outcome.LENGTH, Outcome.MAX_TURNS)]
        dropped = _without(overlong, at_most(chosen.keep, overlong))
    return _without(members, dropped)


def _without(members: list[Trajectory], dropped: list[Trajectory]) -> list[Trajectory]:
    gone = {id(t) for t in dropped}  # trajectories hold arrays, which know no equality
    return [t for t in members if id(t) not in gone]


def penalize_turns(trajectory: Trajectory, shaping: ShapingConfig) -> Trajectory:
    """``trajectory`` with the penalties of its malformed and repeated turns in its turn rewards and its reward."""
    if not (shaping.malformed_turn or shaping.repeated_turn) or not trajectory.sampled_tokens:
        return trajectory
    malformed, repeated = malformed_turns(trajectory.messages), repeated_turns(trajectory.messages)
    penalties = [
        shaping.malformed_turn * m + shaping.repeated_turn * r for m, r in zip(malformed, repeated, strict=True)
    ]
    rewards = [reward - penalty for reward, penalty in zip(trajectory.turn_rewards, penalties, strict=True)]
    return replace(trajectory, turn_rewards=rewards, reward=trajectory.reward - sum(penalties))


def cap_faulty_turns(advantages: Floats, trajectory: Trajectory, shaping: ShapingConfig) -> Floats:
    """``advantages`` of the trajectory's turns, ``[T]``, at most 0 where a turn was malformed or repeated.

    AgentRL's treatment of such turns: what was discouraged stays so, and their rewards are left alone.
    """
    if not shaping.cap_faulty_turns or not trajectory.sampled_tokens:
        return advantages
    faulty = np.array(malformed_turns(trajectory.messages)) | np.array(repeated_turns(trajectory.messages))
    return np.where(faulty, np.minimum(advantages, 0.0), advantages)


def shape_scores(scores: Floats, members: Sequence[Trajectory], shaping: ShapingConfig) -> Floats:
    """The scores of one group after shaping, ``[n]``; what the advantages are computed from.

    ``turn_efficiency`` (AgentRL's efficient rewarding) adds ranks by turns in [-1, 1] with mean 0: successes earn more
    the fewer turns they took, failures the more; each kind is ranked by itself, ties share their mean rank.
    ``overlong_tokens`` (DAPO's soft punishment, arXiv 2503.14476) takes a penalty that rises from 0 to 1 over the last
    ``overlong_buffer`` tokens.
    """
    result = scores.astype(np.float64)
    if shaping.turn_efficiency:
        from scipy.stats import rankdata  # seconds of imports, which only those pay who need it

        bonus = np.zeros(len(members))
        for success, sign in ((True, -1.0), (False, 1.0)):
            places = [i for i, t in enumerate(members) if t.success is success]
            if len(places) > 1:
                ranks = rankdata([len(members[i].turn_rewards) for i in places]) - 1
                bonus[places] = sign * (2 * ranks / (len(places) - 1) - 1)
        result = result + shaping.turn_efficiency * bonus
    if shaping.overlong_tokens:
        sampled = np.array([t.sampled_tokens for t in members])
        over, buffer = sampled - (shaping.overlong_tokens - shaping.overlong_buffer), shaping.overlong_buffer
        result = result - (np.clip(over / buffer, 0.0, 1.0) if buffer else (over > 0).astype(np.float64))
    return result


def malformed_turns(messages: Sequence[Json]) -> list[bool]:
    """For every turn: it holds something that is no acceptable tool call, or nothing at all.

    Not acceptable is what cannot be read, names no tool or breaks its schema (``tool_call_errors``). A turn that was
    cut by a budget is not malformed.
    """
    return [
        bool(turn.get("tool_call_errors"))
        or not ((turn.get("content") or "").strip() or turn.get("tool_calls") or turn.get("truncated"))
        for turn in messages
        if turn["role"] == "assistant"
    ]


def repeated_turns(messages: Sequence[Json]) -> list[bool]:
    """For every turn: one of its tool calls was made before, with the same arguments; or, without a call, its text was.

    Arguments are compared as JSON values, texts without regard to white space. That the world changed in between does
    not excuse a call: whether to look again is for the policy to find out.
    """
    seen: set[str] = set()
    repeated = []
    for turn in messages:
        if turn["role"] == "assistant":
            # What the turn did, in a form that is equal where the deed is.
            calls = [call["function"] for call in turn.get("tool_calls") or ()]
            actions = [json.dumps(["call", f["name"], json.loads(f["arguments"])], sort_keys=True) for f in calls]
            if not calls and (words := (turn.get("content") or "").split()):
                actions = [json.dumps(["text", *words])]
            repeated.append(any(action in seen for action in actions) or len(set(actions)) < len(actions))
            seen.update(actions)
    return repeated


def shuffle_rewards(groups: Sequence[Group], version: int) -> list[Group]:
    """The groups with the rewards of all scored trajectories of the step dealt anew among them.

    A control for every claim that rewards taught something: the same run, its rewards dealt at random. Their
    distribution stays, what they say of a trajectory goes. A dealt reward is an outcome reward: it stands in the last
    turn. The same for the same groups and ``version``.
    """
    rewards = [(t.reward, t.success) for group in groups for t in group.scored]
    named_random("shuffled", version).shuffle(rewards)
    left = iter(rewards)

    def dealt(trajectory: Trajectory) -> Trajectory:
        if not trajectory.scored:
            return trajectory
        reward, success = next(left)
        turns = [0.0] * (len(trajectory.turn_rewards) - 1) + [reward]
        return replace(trajectory, reward=reward, success=success, turn_rewards=turns)

    return [replace(group, trajectories=[dealt(t) for t in group.trajectories]) for group in groups]
