"""Every metric that a run logs: what it means, its unit, what is normal, and what to do when it is not.

A name is looked up by :func:`described`. ``{word}`` in a name of the catalogue stands for what differs between runs: a
domain, a tool, a kind. ``docs/metrics.md`` is made of it (``mua metrics docs``). A name that is not here is an error
where :data:`STRICT` is set, as tests set it, and said once elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Literal

from mua.observe.timeline import EngineActivity, TrainerPhase
from mua.types import Outcome, Provenance

STRICT = "MUA_STRICT_METRICS"
"""Variable of the environment: ``1`` makes a name that the catalogue lacks an error."""

GROUPS: Mapping[str, str] = {
    "evaluation": "Held-out figures, at the number of steps that the policy had taken: 0 is before training. In "
    "`evaluations.jsonl`; everything else is in `metrics.jsonl`, at the number of the step, counted from 0.",
    "reward": "What the episodes of a step were worth. Over scored episodes: the infrastructure's faults count "
    "nowhere.",
    "policy": "The updates of the policy. Means are over trained tokens, and over the step's updates.",
    "critic": "The updates of the critic, where `algorithm.advantage` is `gae`; names that are also under "
    "`policy/` mean "
    "the same of the critic.",
    "mismatch": "How far the engine's log-probabilities of its own tokens are from the trainer's, and how old the "
    "tokens "
    "are.",
    "moe": "Load of the experts of a mixture, and replayed routing.",
    "rollout": "Shape, outcome and selection of the step's episodes.",
    "tools": "Calls of tools, per scored episode.",
    "users": "Simulated users and judges: faults, and the endpoints that answer for them, since the step before.",
    "engine": "The inference engines since the step before, the weights that went to them, the teacher.",
    "time": "Where the time of a step went, in seconds and shares (docs/planning.md).",
    "resources": "Memory, the store, and bytes between ranks.",
}
"""At most twelve, which TensorBoard shows as so many sections."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One name, or family of names."""

    name: str
    unit: str
    meaning: str
    normal: str
    otherwise: str = ""
    """What to do when it is not as it should be; empty where nothing follows from the figure alone."""
    kind: Literal["scalar", "histogram", "text"] = "scalar"

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]


@lru_cache(maxsize=4096)
def described(name: str) -> Metric | None:
    """The entry that ``name`` is of, if there is one."""
    found = _exact().get(name)
    if found is not None:
        return found
    return next((metric for pattern, metric in _patterns() if pattern.fullmatch(name)), None)


def unknown(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that the catalogue lacks."""
    return [name for name in names if described(name) is None]


def near(name: str) -> list[str]:
    """Names of the catalogue like ``name``, or that contain it."""
    names = [metric.name for metric in CATALOGUE]
    within = [known for known in names if name in known]
    return within or get_close_matches(name, names, 5, 0.5)


@cache
def _exact() -> dict[str, Metric]:
    return {metric.name: metric for metric in CATALOGUE if "{" not in metric.name}


@cache
def _patterns() -> list[tuple[re.Pattern[str], Metric]]:
    """Families, the most particular first."""
    families = sorted((m for m in CATALOGUE if "{" in m.name), key=lambda m: -len(re.sub(r"\{\w+\}", "", m.name)))
    return [(re.compile(_pattern(metric.name)), metric) for metric in families]


def _pattern(name: str) -> str:
    parts = re.split(r"\{(\w+)\}", name)
    holes = [_FREE.get(word) or "|".join(map(re.escape, STANDS_FOR[word])) for word in parts[1::2]]
    fixed = [re.escape(part) for part in parts[::2]]
    return fixed[0] + "".join(f"(?:{hole}){rest}" for hole, rest in zip(holes, fixed[1:], strict=True))


_FREE = {
    "domain": ".+",
    "tool": ".+",
    "kind": "[a-z0-9_]+",
    "layer": "[0-9]+",
    "moment": "(?:rollout|train|sync|save)_(?:begin|end)",
}
"""Words that stand for what a run brings, as patterns."""
_OF_AN_UPDATE = {
    "grad_norm", "learning_rate", "skipped", "microbatches", "padding_share", "merged_share", "imbalance_tokens",
    "imbalance_flops", "microbatch_imbalance_tokens", "microbatch_imbalance_flops", "utilisation",
    "forward_backward_seconds", "optimizer_seconds",
}  # fmt: skip
STANDS_FOR: Mapping[str, Sequence[str]] = {
    "split": ("train", "validation", "test"),
    "outcome": tuple(Outcome),
    "provenance": tuple(kind.name.lower() for kind in Provenance),
    "figure": (
        "mean", "std", "min", "max", "success",
        "logprob_difference", "logprob_difference_max", "kl_k3", "probability_error",
    ),
    "of_policy": tuple(sorted(_OF_AN_UPDATE)),
    "of_moe": ("load_max_over_mean", "load_min_over_mean", "load_entropy", "aux_loss", "z_loss"),
    "phase": (*TrainerPhase, "train", "read", "validate"),
    "activity": tuple(EngineActivity),
    "part": (
        "start", "generating", "engine_slot", "tools", "user", "scoring", "other", "stop", "begin", "load", "end",
        "resume",
    ),
    "what": ("allocated", "reserved", "free"),
    "count": (
        "rewrites", "rewrites_by_tokens", "rewrites_by_turns", "rewrites_by_repetition", "tokens_before",
        "tokens_after", "notes_tokens", "results_cut", "requests", "retried", "appended", "forked", "rewritten",
        "started", "overridden", "told", "own_reward", "judge_score",
    ),
}  # fmt: skip
"""Words that stand for one of these."""

_SAME = "as of all tasks"
_ENDPOINT = "look at the endpoint's log and limits; docs/users.md"

CATALOGUE: tuple[Metric, ...] = (
    # ---- evaluation
    Metric("evaluation/{split}_success", "share",
           "Success on the tasks of the domains that are trained on; the task is the unit, its samples are averaged.",
           "rises from its value at step 0, with noise of the interval's width", "flat while `reward/mean` rises: "
           "reward is won otherwise than by solving tasks, or training's tasks are learnt by heart; falling: lower "
           "`optimizer.learning_rate`, and look at failures (`mua view`)"),
    Metric("evaluation/{split}_success_low", "share",
           "Lower end of the interval of `evaluation.level`, by bootstrap over tasks.",
           "a step towards better begins where it passes the first point's upper end", "more tasks or samples"),
    Metric("evaluation/{split}_success_high", "share", "Upper end of the same interval.", "", "more tasks or samples"),
    Metric("evaluation/{split}_unscored", "share", "Episodes that could not be scored; they count in no other figure.",
           "0", "look at their outcomes and errors: `mua store ls`, events in `mua view`"),
    Metric("evaluation/held_out_{split}_success", "share", "Success on domains that are not trained on.",
           "stays, or rises with what transfers",
           "falling: the policy forgets; train on more domains, or add `algorithm.kl_coefficient`"),
    Metric("evaluation/held_out_{split}_success_low", "share", "Lower end of its interval.", _SAME),
    Metric("evaluation/held_out_{split}_success_high", "share", "Upper end of its interval.", _SAME),
    Metric("evaluation/held_out_{split}_unscored", "share", "Unscored episodes of domains not trained on.", "0"),
    Metric("evaluation/{domain}/{split}_success", "share", "Success on one domain, where there are several.", _SAME,
           "one rises while another falls: change `environment.mix`"),
    Metric("evaluation/{domain}/{split}_success_low", "share", "Lower end of its interval.", _SAME),
    Metric("evaluation/{domain}/{split}_success_high", "share", "Upper end of its interval.", _SAME),
    Metric("evaluation/{domain}/{split}_unscored", "share", "Unscored episodes of the domain.", "0"),
    Metric("evaluation/loss", "nats per token", "Mean cross-entropy of the trained tokens of SFT's validation set.",
           "falls, then is flat", "rising while `policy/loss` falls: overfitting; stop earlier, or more data"),
    Metric("evaluation/perplexity", "", "Its exponential.", "falls towards a small number above 1"),
    Metric("evaluation/tokens", "tokens", "Trained tokens of the validation set.", "constant"),
    # ---- reward
    Metric("reward/mean", "reward", "Mean reward of the scored episodes.", "rises, with noise between steps", "flat: "
           "see `reward/groups/zero_variance`; rising without `reward/success`: the reward is hacked, read "
           "episodes"),
    Metric("reward/std", "reward", "Standard deviation over the step's episodes.", "above 0",
           "0: nothing can be learned; tasks are all too hard or too easy"),
    Metric("reward/min", "reward", "Lowest reward.", "the domain's lowest"),
    Metric("reward/max", "reward", "Highest reward.", "the domain's highest, now and then"),
    Metric("reward/success", "share", "Episodes that solved their task.", "rises; 0.2 to 0.8 teaches most",
           "near 0: easier tasks, SFT first, or a curriculum; near 1: harder tasks"),
    Metric("reward/groups/count", "groups", "Groups with a scored episode.", "`algorithm.groups_per_step`",
           "fewer: faults of the infrastructure"),
    Metric("reward/groups/zero_variance", "share", "Groups whose episodes all have one reward, and teach nothing.",
           "under 0.5", "a larger `algorithm.group_size`, `algorithm.refill`, a curriculum, a finer reward"),
    Metric("reward/groups/all_correct", "share", "Groups of which every episode succeeded.", "rises late",
           "high: harder tasks, or `algorithm.curriculum`"),
    Metric("reward/groups/all_wrong", "share", "Groups of which none did.", "falls",
           "high: easier tasks, more samples per task, SFT first"),
    Metric("reward/advantage/abs_mean", "", "Mean absolute group-relative advantage of an episode.",
           "about 0.5 to 0.9 with division by the standard deviation", "near 0: groups agree"),
    Metric("reward/length_correlation", "", "Correlation of reward and sampled tokens over the step's episodes.",
           "between -0.5 and 0.5", "near 1 while lengths grow: length is what pays; penalise it or look for padding"),
    Metric("reward/of_episodes", "reward", "Histogram of the rewards of the step's scored episodes.",
           "two heaps, or a spread", "one heap: nothing to learn from", kind="histogram"),
    # ---- policy
    Metric("policy/loss", "", "The whole loss that was minimised.",
           "of RL: near 0 and noisy, no sign of progress; of SFT it falls", "not finite: see `policy/skipped`"),
    Metric("policy/policy_loss", "", "Its part of the policy gradient.", "near 0 and noisy"),
    Metric("policy/kl_loss", "", "Its part of the distance from the reference, weighted.", "small beside the rest"),
    Metric("policy/entropy_loss", "", "Its part of the entropy bonus, weighted.", "small beside the rest"),
    Metric("policy/tokens", "tokens", "Tokens that were trained on in an update.",
           "as many as the step's groups have with an advantage", "0: every group agreed or was filtered out"),
    Metric("policy/entropy", "nats per token", "Mean entropy of the next-token distribution at trained tokens.",
           "0.1 to 1, falling slowly", "to 0 in a few steps: collapse; lower the learning rate, raise `clip_high`, "
           "add `algorithm.entropy_coefficient`; rising without end: the policy dissolves, lower the learning rate"),
    Metric("policy/logprob", "nats per token", "Mean log-probability of trained tokens.", "above -1, rising slowly"),
    Metric("policy/ratio", "", "Mean ratio of the policy to the one that sampled, or was current before the step.",
           "near 1", "away from 1: too many updates per batch, or a mismatch of engine and trainer"),
    Metric("policy/ratio_max", "", "Largest such ratio of a token.", "under 10",
           "hundreds: as `policy/ratio`; `algorithm.correction` bounds its weight"),
    Metric("policy/clip_fraction_low", "share",
           "Tokens whose ratio is below the lower bound, with a negative advantage.", "under 0.05; 0 on-policy",
           "high: steps are too large"),
    Metric("policy/clip_fraction_high", "share",
           "Tokens whose ratio is above the upper bound, with a positive advantage.", "under 0.05; 0 on-policy",
           "high: steps are too large"),
    Metric("policy/ppo_kl", "nats per token", "KL(old || current) by k1.", "near 0, under 0.01",
           "above 0.05: lower the learning rate, or fewer minibatches and epochs"),
    Metric("policy/ppo_kl_k3", "nats per token", "The same by k3, which is never negative.", "under 0.01",
           "as `policy/ppo_kl`"),
    Metric("policy/reference_kl", "nats per token", "KL to the frozen reference.", "grows slowly, under 0.2",
           "grows fast: raise `algorithm.kl_coefficient`"),
    Metric("policy/advantage_abs", "", "Mean absolute advantage of a trained token.", "about 0.5 to 1"),
    Metric("policy/grad_norm", "", "Norm of the gradient before clipping.",
           "steady over steps, of the size of `optimizer.clip_grad` or below",
           "tenfold in a step: look at that step's longest and strangest episodes"),
    Metric("policy/learning_rate", "", "Of the update.", "as scheduled"),
    Metric("policy/skipped", "share", "Updates left out because the gradient's norm was not finite.", "0",
           "lower the learning rate; look at the data and at float16"),
    Metric("policy/microbatches", "", "Packed micro-batches per rank.", "a multiple of the pipeline's stages",
           "1 on few tokens: ranks idle; larger steps"),
    Metric("policy/padding_share", "share", "Computed positions that hold no token.", "under 0.05", "docs/packing.md"),
    Metric("policy/merged_share", "share", "Tokens that were not computed because another sequence begins with them.",
           "0 without `megatron.merge_prefixes`"),
    Metric("policy/imbalance_tokens", "", "Tokens of the busiest rank over the mean of ranks.", "under 1.1",
           "more sequences per step, or `megatron.balance: flops`"),
    Metric("policy/imbalance_flops", "", "The same of operations.", "under 1.1", "as of tokens"),
    Metric("policy/microbatch_imbalance_tokens", "", "Of micro-batches at the same time the largest over their mean.",
           "under 1.2", "as of ranks"),
    Metric("policy/microbatch_imbalance_flops", "", "The same of operations.", "under 1.2", "as of ranks"),
    Metric("policy/utilisation", "share",
           "Operations on real tokens over what ranks could do until the last is ready.", "above 0.8",
           "docs/packing.md"),
    Metric("policy/forward_backward_seconds", "s", "Forward and backward passes of an update.", "most of an update"),
    Metric("policy/optimizer_seconds", "s", "The optimizer of an update.", "a small part of it"),
    Metric("policy/distillation/reverse_kl", "nats per token", "KL(policy || teacher) at sampled tokens, by k1.",
           "falls",
           "flat: a larger `algorithm.distillation.coefficient`, or a teacher with the same tokenizer and template"),
    Metric("policy/distillation/reverse_kl_k3", "nats per token", "The same by k3.", "falls"),
    Metric("policy/distillation/difference_max", "nats", "Largest difference of a token.", "under 20"),
    # ---- critic
    Metric("critic/loss", "", "Clipped squared error of the values.", "falls, then follows the rewards",
           "growing: lower `critic.optimizer.learning_rate`"),
    Metric("critic/value", "reward", "Mean value at trained tokens.", "near `critic/return`"),
    Metric("critic/value_old", "reward", "Mean value before the step's updates.", "near `critic/return`"),
    Metric("critic/return", "reward", "Mean return that the values are drawn to.", "near `reward/mean`"),
    Metric("critic/clip_fraction", "share", "Tokens whose value was held near the old one.", "under 0.2",
           "high: lower the critic's learning rate, or raise `critic.value_clip`"),
    Metric("critic/explained_variance", "", "1 - Var(return - value) / Var(return).", "rises towards 1",
           "at or under 0 for long: the critic knows nothing; more `critic.warmup_steps`"),
    Metric("critic/advantage_std", "reward", "Standard deviation of advantages before whitening.", "above 0"),
    Metric("critic/{of_policy}", "", "As `policy/...` of that name, of the critic's updates.", "as of the policy"),
    Metric("critic/moe/{of_moe}", "", "As `moe/...`, of the critic.", "as of the policy"),
    Metric("critic/moe/layers/{layer}/load_max_over_mean", "", "As `moe/layers/...`, of the critic.",
           "as of the policy"),
    # ---- mismatch
    Metric("mismatch/logprob_difference", "nats per token",
           "Mean absolute difference of the engine's and the trainer's log-probability of a sampled token.",
           "under 0.05 in bfloat16, 1e-6 on a CPU in float32",
           "`mua doctor`, `engine.deterministic`, `model.fp32_lm_head`; of old tokens see `mismatch/stale/...`"),
    Metric("mismatch/logprob_difference_max", "nats", "Largest difference.", "under 1 in bfloat16",
           "as of the mean; `algorithm.correction`"),
    Metric("mismatch/kl", "nats per token", "KL(engine || trainer) by k1.", "near 0"),
    Metric("mismatch/kl_k3", "nats per token", "The same by k3.", "under 0.001", "as `mismatch/logprob_difference`"),
    Metric("mismatch/ratio", "", "Mean ratio of the trainer's to the engine's probability.", "near 1"),
    Metric("mismatch/probability_error", "", "Mean of exp(|difference|); 1 is none.", "under 1.05",
           "as `mismatch/logprob_difference`"),
    Metric("mismatch/fresh/{figure}", "", "The same figures of tokens of the version that is trained: numerics alone.",
           "as above", "as above"),
    Metric("mismatch/stale/{figure}", "", "The same of tokens of older versions: the weights differ too.",
           "larger than fresh, growing with age", "lower `trainer.max_staleness`, or `algorithm.correction`"),
    Metric("mismatch/correction/weight", "", "Mean importance weight of the correction.", "near 1",
           "far from 1: data is too old, or engine and trainer disagree"),
    Metric("mismatch/correction/cut", "share", "Tokens whose weight was cut or zero.", "under 0.05", "as its weight"),
    Metric("mismatch/correction/removed", "share", "Tokens that the correction took out.", "under 0.1",
           "as its weight"),
    Metric("mismatch/version_lag/mean", "versions", "Mean age of sampled tokens in policy versions.",
           "0 in synchronous training, about half of `trainer.max_staleness` beside"),
    Metric("mismatch/version_lag/max", "versions", "Largest age.", "at most `trainer.max_staleness`"),
    # ---- moe
    Metric("moe/load_max_over_mean", "", "Tokens of the fullest expert of any layer over the mean.", "under 3",
           "an expert takes everything: raise `megatron.moe_aux_loss`"),
    Metric("moe/load_min_over_mean", "", "Tokens of the emptiest expert over the mean.", "above 0.1"),
    Metric("moe/load_entropy", "", "Evenness of the load, mean over layers; 1 is even.", "above 0.8"),
    Metric("moe/layers/{layer}/load_max_over_mean", "", "As `moe/load_max_over_mean`, of one layer.", "under 3"),
    Metric("moe/aux_loss", "", "Load-balancing loss, without its coefficient.", "near 1"),
    Metric("moe/z_loss", "", "Router z-loss, without its coefficient.", "small and steady"),
    Metric("moe/replay_agreement", "share", "Of the engine's expert choices, those that the trainer makes too.",
           "above 0.95", "low: engine and trainer compute differently; `mismatch/...` will show it"),
    # ---- rollout
    Metric("rollout/trajectories/count", "episodes", "Episodes of the step.", "groups times group size"),
    Metric("rollout/trajectories/unscored", "share", "Episodes that faults of the infrastructure left unscored.", "0",
           "look at `rollout/outcome/...` and at the log; docs/qa.md"),
    Metric("rollout/outcome/{outcome}", "share", "Episodes by how they ended (docs/architecture.md).",
           "most as the domain means it: `user_stop`, `terminal_tool`, `agent_end`", "`length`, `max_turns`, "
           "`malformed`, `repetition` are the policy's: raise the limit or penalise; `*_error`, `timeout` are the "
           "infrastructure's"),
    Metric("rollout/attempts/mean", "attempts", "Attempts per episode.", "1",
           "above: faults are retried; see the log"),
    Metric("rollout/attempts/max", "attempts", "Most attempts of an episode.", "1"),
    Metric("rollout/turns/mean", "turns", "Assistant turns per episode.", "as the domain needs",
           "growing without success: the policy stalls"),
    Metric("rollout/turns/max", "turns", "Most turns of an episode.", "under `rollout.max_turns`"),
    Metric("rollout/turns/cut_by_time", "share", "Episodes with a turn that was cut because it took too long.", "0",
           "raise `rollout.generate_seconds`, or fewer requests at once"),
    Metric("rollout/tokens/{provenance}", "tokens",
           "Tokens per episode by who put them there; `sampled` are the policy's.", "steady or growing slowly",
           "`sampled` growing without success: length explosion; penalise length"),
    Metric("rollout/tokens/segment_max", "tokens", "Longest segment.", "under `rollout.max_tokens`",
           "near it: episodes end as `length`; raise it, or `context`"),
    Metric("rollout/segments/mean", "segments",
           "Token streams per episode; a new one begins where history is rewritten.",
           "1 and what the template prescribes"),
    Metric("rollout/segments/max", "segments", "Most segments of an episode.", "as of the mean"),
    Metric("rollout/context/{count}", "per episode", "Rewrites of long contexts (docs/context.md).", "0 without them"),
    Metric("rollout/gateway/{count}", "per episode",
           "Requests of an agent of its own, by where they were put (docs/gateway.md).", "mostly `appended`",
           "many `rewritten`: the client changes history, and segments multiply"),
    Metric("rollout/domain/{domain}/share", "share", "Share of the step's episodes.", "as `environment.mix`"),
    Metric("rollout/domain/{domain}/unscored", "share", "Unscored episodes of the domain.", "0"),
    Metric("rollout/domain/{domain}/reward/{figure}", "reward", "As `reward/...`, of the domain.", "as of all"),
    Metric("rollout/domain/{domain}/turns", "turns", "Turns per episode of the domain.", "as the domain needs"),
    Metric("rollout/domain/{domain}/sampled_tokens", "tokens", "Sampled tokens per episode of the domain.", "steady"),
    Metric("rollout/domain/{domain}/zero_variance", "share", "Groups of the domain that teach nothing.", "under 0.5",
           "as `reward/groups/zero_variance`"),
    Metric("rollout/filters/{kind}", "share", "Episodes that a filter of that kind took out.", "small"),
    Metric("rollout/filters/groups_kept", "share", "Groups that are left after all filters.", "above 0.5",
           "low: the filters are too strict"),
    Metric("rollout/filters/dropped", "groups", "Groups that were not usable, under `algorithm.refill`.", "few"),
    Metric("rollout/filters/faulty", "groups", "Of those, groups that faults left fewer than two scored episodes.",
           "0"),
    Metric("rollout/filters/refilled", "groups", "Groups rolled out beyond `groups_per_step`.", "a few",
           "near the most that are allowed: tasks are too hard or too easy"),
    Metric("rollout/filters/extra_episodes", "episodes", "Episodes of groups that were not trained.", "few"),
    Metric("rollout/filters/missing", "groups", "Groups by which the step fell short.", "0",
           "raise the refill's limit"),
    Metric("rollout/filters/cancelled", "groups", "Groups that oversampling put off.", "as oversampling asks"),
    Metric("rollout/filters/carried", "groups", "Groups that go on into the next step.", "as `carry_versions` allows"),
    Metric("rollout/curriculum/mean_rate", "share", "Running success rate over the tasks that were seen.", "rises"),
    Metric("rollout/curriculum/always_solved", "share", "Tasks that are always solved.", "rises"),
    Metric("rollout/curriculum/never_solved", "share", "Tasks that never were.", "falls"),
    Metric("rollout/curriculum/known", "share", "Tasks that were seen at all.", "to 1 in the first pass"),
    Metric("rollout/curriculum/{domain}/mean_rate", "share", "The same of a domain.", "rises"),
    Metric("rollout/curriculum/{domain}/always_solved", "share", "The same of a domain.", "rises"),
    Metric("rollout/curriculum/{domain}/never_solved", "share", "The same of a domain.", "falls"),
    Metric("rollout/curriculum/{domain}/known", "share", "The same of a domain.", "to 1"),
    Metric("rollout/samplers/alive", "processes", "Processes that roll out, the trainer's own among them.",
           "all of them", "fewer: see the samplers' logs; docs/samplers.md"),
    Metric("rollout/said/distinct_4grams", "share", "Distinct among all 4-grams of sampled tokens of the step.",
           "steady; 0.2 to 0.9 by domain",
           "falling: template collapse; entropy, and read episodes of different tasks"),
    Metric("rollout/said/unique_turns", "share",
           "Distinct among all turns of the policy that say something, as tokens.",
           "above 0.5, less where turns are short", "falling: different prompts get one answer"),
    Metric("rollout/said/unique_episodes", "share", "Distinct among all episodes, by what the policy sampled.",
           "near 1", "falling: groups repeat one episode, and teach nothing; raise `rollout.temperature`"),
    Metric("rollout/sampled_tokens_of_episodes", "tokens", "Histogram of what the policy sampled per scored episode.",
           "one heap, away from `rollout.max_tokens`", "a heap at the limit: episodes are cut", kind="histogram"),
    Metric("rollout/turns_of_episodes", "turns", "Histogram of turns per scored episode.",
           "one heap, away from `rollout.max_turns`", "a heap at the limit: episodes are cut", kind="histogram"),
    Metric("rollout/episodes/solved", "", "Text of an episode of the step that succeeded.", "it reads well",
           "read it: does it deserve its reward?", kind="text"),
    Metric("rollout/episodes/failed", "", "Text of an episode of the step that did not.", "its failure can be seen",
           "read it: is the verdict right?", kind="text"),
    # ---- tools
    Metric("tools/calls/{tool}", "per episode", "Calls of the tool.", "as tasks need",
           "to 0: the policy gives it up; growing: it is called to no end"),
    Metric("tools/errors/{tool}", "per episode", "Calls that the tool says failed.", "falls",
           "read the results; `mua view`, filter by tool error"),
    Metric("tools/used/{tool}", "share", "Episodes that call the tool at least once.", "as tasks need",
           "as its calls"),
    # ---- users
    Metric("users/faults/{kind}", "attempts",
           "Attempts that ended by a fault of the simulated user, retried ones too.", "0", "docs/users.md by kind"),
    Metric("users/flags/{kind}", "replies", "Replies that were said although the check found a fault.", "few",
           "a stronger model for the user, or `user.check: refuse`"),
    Metric("users/llm/requests", "requests", "Requests sent for users.", "turns times episodes", _ENDPOINT),
    Metric("users/judge/requests", "requests", "Requests sent for judges.", "scored episodes", _ENDPOINT),
    *(
        metric
        for role, who in (("llm", "users"), ("judge", "judges"))
        for metric in (
            Metric(f"users/{role}/retries", "requests", "Of those, sent again after trouble.", "few", _ENDPOINT),
            Metric(f"users/{role}/failovers", "requests", "Changes to another endpoint.", "0", _ENDPOINT),
            Metric(f"users/{role}/errors/{{kind}}", "requests", "Failed requests by kind.", "0", _ENDPOINT),
            Metric(f"users/{role}/breaker_opened", "times", "An endpoint was given up for a while.", "0", _ENDPOINT),
            Metric(f"users/{role}/latency_p50_seconds", "s", "Median of answered requests.", "steady", _ENDPOINT),
            Metric(f"users/{role}/latency_p95_seconds", "s", "95 % were answered within it.", "under "
                   "`total_seconds`", _ENDPOINT),
            Metric(f"users/{role}/tokens_in", "tokens", "Read by the endpoint, as it says.", "steady"),
            Metric(f"users/{role}/tokens_out", "tokens", "Written by it.", "steady"),
            Metric(f"users/{role}/cost", "price", f"Of {who}, at the prices that are configured.", "as planned"),
            Metric(f"users/{role}/cache_hits", "replies", "Replies from disk.", "0 without a cache"),
            Metric(f"users/{role}/cache_errors", "", "Reads or writes of the cache that failed.", "0", "disk and "
                   "rights"),
            Metric(f"users/{role}/truncated", "replies", "Cut at `max_tokens`.", "0", "raise it"),
            Metric(f"users/{role}/refused/{{kind}}", "replies", "Refused by the check and asked for again.", "few",
                   "a stronger model"),
            Metric(f"users/{role}/flags/{{kind}}", "replies", "Said although the check found a fault.", "few",
                   "a stronger model"),
            Metric(f"users/{role}/verdicts", "verdicts", "Answers of judges that could be read.", "all"),
            Metric(f"users/{role}/invalid_verdicts", "verdicts", "Answers that could not.", "0", "a stronger judge, or "
                   "structured output"),
        )
    ),
    # ---- engine
    Metric("engine/requests", "requests", "Requests of generation that ended.", "turns times episodes"),
    Metric("engine/failures", "requests", "Requests that failed.", "0", "the engine's log, `<output>/logs`"),
    Metric("engine/asked_again", "requests", "Sent again, to another engine or after a restart.", "0", "as failures"),
    Metric("engine/prompt_tokens", "tokens", "Of all prompts.", "steady"),
    Metric("engine/cached_tokens", "tokens", "Of those, found in the prefix cache.", "most, in conversations"),
    Metric("engine/sampled_tokens", "tokens", "Sampled.", "steady"),
    Metric("engine/prefix_cache_hit_rate", "share", "Cached over prompt tokens.", "above 0.7 in conversations",
           "low: memory for the cache is short, or the router spreads an episode over engines"),
    Metric("engine/running", "requests", "Running at the moment of logging.", "0 in synchronous training"),
    Metric("engine/queued", "requests", "Waiting then.", "0"),
    Metric("engine/serving", "engines", "Engines that serve.", "all", "fewer: one is down or starting; its log"),
    Metric("engine/restarts", "times", "Restarts since the run began.", "0", "the engine's log; docs/qa.md"),
    Metric("engine/nodes_joined", "machines", "That joined (docs/placement.md).", "as planned"),
    Metric("engine/nodes_left", "machines", "That took leave.", "0"),
    Metric("engine/nodes_lost", "machines", "That went without a word.", "0", "the machine's log"),
    Metric("engine/sync/bytes", "bytes", "Of all tensors that an engine got; see docs/resharding.md.", "constant"),
    Metric("engine/sync/bytes_moved", "bytes", "From one process to another.", "near `bytes_needed`"),
    Metric("engine/sync/bytes_needed", "bytes", "The least that any plan moves.", "constant"),
    Metric("engine/sync/tensors", "tensors", "Weights.", "constant"),
    Metric("engine/sync/buckets", "buckets", "They went in.", "constant"),
    Metric("engine/sync/version", "", "Policy version that the engines have.", "grows by 1"),
    Metric("engine/sync/seconds", "s", "The whole synchronisation.", "a small part of the step", "docs/resharding.md"),
    Metric("engine/sync/gigabytes_per_second", "GB/s", "Bytes over seconds.", "near the link's"),
    Metric("engine/sync/pause_seconds", "s", "While nothing was generated.", "a small part of the step"),
    Metric("engine/sync/pause_{part}_seconds", "s", "Its parts.", "`load` is most of it"),
    Metric("engine/sync/assemble_seconds", "s", "Putting buckets together, summed.", "hidden behind loading"),
    Metric("engine/sync/load_seconds", "s", "Loading buckets, summed.", "near `pause_load_seconds`"),
    Metric("engine/sync/overlap_seconds", "s", "While one bucket was put together and another loaded.", "above 0"),
    Metric("engine/partial/continued", "turns", "Turns that went on in another engine.", "0 without interruptions"),
    Metric("engine/partial/kept_tokens", "tokens", "Kept by them.", "0 without interruptions"),
    Metric("engine/partial/saved_tokens", "tokens", "Of carried groups, that would have been sampled again.",
           "above 0 where groups are carried"),
    Metric("engine/partial/saved_share", "share", "Their share of all that was sampled.", "as above"),
    Metric("engine/teacher/requests", "requests", "Sent to the teacher of a distillation.", "one per segment"),
    Metric("engine/teacher/retries", "requests", "Of those, again.", "0", "the teacher's log"),
    Metric("engine/teacher/tokens", "tokens", "Scored by it.", "as sampled"),
    Metric("engine/teacher/seconds", "s", "Of an answer.", "short beside an episode"),
    # ---- time
    Metric("time/step_seconds", "s", "From the line before to this one.", "steady"),
    Metric("time/{phase}_seconds", "s", "Of the trainer by phase: `wait` for episodes, `memory`, `batch`, `logprobs`, "
           "`optimizer`, `sync`, `evaluate`, `records`, `checkpoint`, `rest`; of SFT and offline training `train`, "
           "`read`, `validate`.", "`wait` and `optimizer` are most", "mostly `wait`: more engines, `max_staleness`; "
           "mostly `optimizer`: a better layout; `mua timeline RUN`"),
    Metric("time/overlap_efficiency", "share",
           "max(generation, training) over the step; 1 hides the shorter in the longer.",
           "near 1 with `max_staleness` above 0"),
    Metric("time/sampled_tokens_per_second", "tokens/s", "Sampled tokens over the step.", "steady",
           "falling: lengths, or the engines' load"),
    Metric("time/trained_tokens_per_second", "tokens/s", "Trained tokens over the step.", "steady"),
    Metric("time/engine_{activity}", "share", "Engines' time by what they did (docs/planning.md); they sum to 1.",
           "`generating` is most",
           "`idle_trainer_waits`: users and tools are slow; `idle_trainer_works`: more staleness"),
    Metric("time/engine_slots_used", "share", "Decoding slots in use.", "above 0.3",
           "low: raise `rollout.concurrency`, or fewer engines"),
    Metric("time/engine_generating_seconds", "s", "Mean over engines, with at least one request.", "most of the step"),
    Metric("time/episode_seconds", "s", "Of the mean episode.", "steady"),
    Metric("time/episode_queued_seconds", "s", "Before it began, waiting for `rollout.concurrency`.", "short"),
    Metric("time/episode_{part}_seconds", "s",
           "Its parts: `start`, `generating`, `engine_slot`, `tools`, `user`, `scoring`, `other`.",
           "`generating` is most", "`user`: its endpoint is slow; `tools`: the environment's"),
    # ---- resources
    Metric("resources/memory/process_gib", "GiB", "Resident set of the leading process.", "steady",
           "growing each step: a leak; tell us"),
    Metric("resources/memory/children_gib", "GiB", "Of its descendants; shared pages count for each.", "steady"),
    Metric("resources/memory/cuda_allocated_gib", "GiB", "Allocated by torch on the GPU.", "steady"),
    Metric("resources/memory/cuda_peak_gib", "GiB", "The most so far.", "as `mua plan` says"),
    Metric("resources/memory/cuda_device_used_gib", "GiB", "Used on the device by all processes.", "under its memory"),
    Metric("resources/memory/{moment}_resident_gib", "GiB", "Resident set before and after a phase, of rank 0.",
           "comes back to its value after each step", "does not: something is not given back"),
    Metric("resources/memory/{moment}_device_{what}_gib", "GiB", "Device memory then: allocated, reserved, free.",
           "as `mua plan` says", "docs/resharding.md"),
    Metric("resources/store/cpu_seconds", "s", "Of the store's writer thread.", "a small part of the step"),
    Metric("resources/store/waited_seconds", "s", "Waited for room in the writer's queue.", "0",
           "a faster disk or database; `store.queue_megabytes`"),
    Metric("resources/store/bytes", "bytes", "Given to the store.", "steady"),
    Metric("resources/store/rows", "rows", "Given to the store.", "steady"),
    Metric("resources/batch/bytes_sent", "bytes", "From rank 0 to the others.", "as the batch is long"),
    Metric("resources/batch/bytes_received_max", "bytes", "By the rank with most.", "even over ranks"),
    Metric("resources/batch/bytes_returned", "bytes", "Scores that came back.", "small"),
)  # fmt: skip
