"""The section ``algorithm``: how rewards become gradients."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from mua.config.section import (
    Fraction,
    HookPath,
    NonNegative,
    NonNegativeFloat,
    OrHook,
    Positive,
    PositiveFloat,
    Section,
)


class RangeFilter(Section):
    """Groups whose rewards hardly differ teach nothing."""

    kind: Literal["range"]
    """Drops whole groups."""
    minimum: NonNegativeFloat = 0.0
    """Smallest difference between the best and the worst reward; 0 drops groups without any difference (DAPO)."""


class BalanceFilter(Section):
    """Successes and failures of a group in balance."""

    kind: Literal["balance"]
    """Drops members at random."""
    extra_right: NonNegative = 2
    """Successes kept beyond the number of the rarer kind."""
    extra_wrong: NonNegative = 1
    """Failures kept beyond it."""


class MinimumTurnsFilter(Section):
    """Successes that came too soon may be guesses."""

    kind: Literal["minimum_turns"]
    """Drops successes."""
    turns: Positive
    """Assistant turns a success must have taken."""


class OverlongFilter(Section):
    """Failures that only ran into a limit of turns or tokens."""

    kind: Literal["overlong"]
    """Drops failures with outcome length or max_turns."""
    keep: NonNegative = 0
    """So many of a group are kept, drawn at random."""


GroupFilter = Annotated[RangeFilter | BalanceFilter | MinimumTurnsFilter | OverlongFilter, Field(discriminator="kind")]


class ShapingConfig(Section):
    """What is added to a trajectory's score before advantages are computed."""

    READS = {"overlong_tokens": {"set": ("overlong_buffer",)}}

    turn_efficiency: NonNegativeFloat = 0.0
    """Largest bonus or penalty for turns: the success with the fewest turns of its group gets it, the one with the most
    loses it; failures the other way round (AgentRL: 0.1)."""
    overlong_tokens: NonNegative = 0
    """Sampled tokens at which a trajectory has lost 1; 0 switches the penalty off (DAPO)."""
    overlong_buffer: NonNegative = 0
    """Tokens before that over which the penalty rises from 0."""
    malformed_turn: NonNegativeFloat = 0.0
    """Taken from the reward of every turn that is empty or holds a call that cannot be read, names no tool or breaks
    its schema; credit and score see it."""
    repeated_turn: NonNegativeFloat = 0.0
    """Taken from the reward of every turn that makes a tool call of the same trajectory again, arguments included, or
    says an earlier turn's text again."""
    cap_faulty_turns: bool = False
    """Encourage no malformed or repeated turn: the advantage of its tokens is at most 0 (AgentRL)."""


class RefillConfig(Section):
    """Whether a step goes on until it has groups_per_step groups that move the policy (DAPO's dynamic sampling).

    A group is usable if at least two members are scored (one with group_size 1) and, after the filters, some
    advantage is not 0, or still to be decided by a critic or a teacher.
    """

    READS = {"oversample": {"set": ("max_cancellations", "carry_versions")}}

    max_extra_groups: NonNegative = 0
    """Unusable groups that others replace in one step; a step that meets more trains on what is usable. 0: every
    group has its place, usable or not."""
    oversample: NonNegative = 0
    """Groups in flight beyond those that steps wait for: a step trains on the first usable ones that finish, which
    favors short episodes. The rest goes on into the next step where trainer.max_staleness allows it, and otherwise
    is cancelled and starts again. rollout.concurrency has to leave room for their episodes."""
    max_cancellations: Positive = 1
    """Cancellations of one group after which a step waits for it: no task is put off for ever because it is long."""
    carry_versions: NonNegative = 0
    """With oversample: so many versions more than trainer.max_staleness may a group be overtaken by when a step is
    full. It goes on where it is, its tokens keeping the version that sampled them, and only one that would be older
    starts again. Its environments and users stay; while the trainer has the engines' memory its deadlines stand
    still. 0: no token is older than trainer.max_staleness, which algorithms without a correction need."""

    @property
    def on(self) -> bool:
        """Whether steps choose among groups at all."""
        return self.max_extra_groups + self.oversample > 0


class CurriculumConfig(Section):
    """Which task comes next."""

    READS = {"kind": dict.fromkeys(("success_rate", "failing_kinds", "hook"), ("floor", "decay"))}

    kind: Annotated[Literal["off", "success_rate", "failing_kinds"], OrHook] = "off"
    """``off``: epochs, each a fresh permutation; ``success_rate``: tasks solved half of the time come most often;
    ``failing_kinds``: kinds of task that fail most. See ``mua/rollout/curriculum.py``. Or a hook that gives each task a
    weight."""
    floor: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Weight of a task that is always or never solved, where one that is solved half of the time has 1; of a kind that
    is always solved, where one that never is has 1."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor on the earlier counts of a task, or kind, whenever it was rolled out again; 1 never forgets what a younger
    policy did."""


class DistillationConfig(Section):
    """A teacher whose log-probabilities of the policy's own samples become advantages (on-policy distillation)."""

    base_url: str
    """Address of an SGLang server with the teacher's weights and the policy's tokenizer, such as
    ``http://teacher:30000``: its native interface, so without ``/v1``."""
    api_key: SecretStr = SecretStr("none")
    """Use ``${ENV_VAR}``; never written to a log, trace or checkpoint."""
    coefficient: PositiveFloat = 1.0
    """Factor on log p(policy) - log p(teacher) of each sampled token, which is taken from its advantage. The policy's
    side is at rollout.temperature, the teacher's at 1."""
    discount: Fraction = 0.0
    """How much of later tokens' terms a token answers for, per sampled token of its segment: 0 for its own term alone
    (GKD, Thinking Machines), 1 for all (MiniLLM)."""
    only: bool = False
    """Leave rewards out of the advantages: the policy learns from the teacher alone."""
    request_seconds: PositiveFloat = 120.0
    """Deadline of one request, which is one segment."""
    max_retries: NonNegative = 5
    """Further tries of a request after no connection, no answer in time, or 5xx; then the run ends."""
    retry_seconds: PositiveFloat = 1.0
    """Pause before the second try; it doubles with each, up to 30 s."""
    concurrency: Positive = 64
    """Requests in flight at once; the rest wait, which their deadline does not count."""

    @model_validator(mode="after")
    def _native_address(self) -> Self:
        address = urlsplit(self.base_url)
        if address.scheme not in ("http", "https") or not address.hostname or address.username:
            raise ValueError("base_url must be http://HOST:PORT or https://HOST:PORT; a key belongs into api_key")
        if address.path.strip("/") or address.query:
            raise ValueError(
                f"base_url must end behind the port, without {address.path or 'a query'}: the native API is asked"
            )
        return self


_PULLS = ("advantage", "advantage_scale", "correction", "distillation")
"""What is read by every loss that has advantages."""
_RATIO = ("old_logprobs", "clip_low", "clip_high")
"""And by every loss with a ratio of the policy to an older one."""
_SCORES = ("score", "shaping", "sign_clamp", "credit")
"""What is read by every estimator that spreads a trajectory's score over its turns."""


class AlgorithmConfig(Section):
    """Group-relative policy optimization."""

    group_size: Positive = 8
    """Trajectories of one task (n)."""
    groups_per_step: Positive = 32
    """Tasks in one optimizer step."""
    score: Literal["sum", "terminal", "mean", "discounted"] = "sum"
    """What a trajectory is worth to its group: sum, last, mean or discounted sum of its turn rewards."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of a turn, for ``score: discounted``, ``credit: reward_to_go`` (UserRL: 0.8) and ``advantage: gae``,
    where the tokens of one turn are not discounted among themselves."""
    advantage: Annotated[Literal["grpo", "rloo", "reinforce_plus_plus", "pass_at_k", "gae", "none"], OrHook] = "grpo"
    """How scores become advantages: against the group's mean (grpo), the mean of the others (rloo), the group's mean
    and then whitened over the batch (reinforce_plus_plus), by the reward of a random k of the group (pass_at_k), token
    by token against the values of a critic (gae, see the section ``critic``), or not at all (none); or a hook."""
    divide_by_std: bool = True
    """GRPO divides the centered reward by the group's standard deviation; False gives Dr. GRPO's advantage."""
    whiten: Literal["batch", "environment"] = "batch"
    """Over which tokens reinforce_plus_plus brings advantages to mean 0 and variance 1: all of the step, whatever its
    minibatches, or each environment's by themselves, so that one whose rewards are larger or spread wider does not
    drown the others."""
    pass_k: Positive = 4
    """k of ``advantage: pass_at_k``."""
    gae_lambda: Fraction = 1.0
    """Decay a sampled token of ``advantage: gae``: 1 trusts rewards alone, 0 the critic's next value alone."""
    gae_whiten: bool = True
    """Bring the advantages of ``advantage: gae`` to mean 0 and variance 1 over all trained tokens of a step."""
    sign_clamp: float | None = None
    """No trajectory scored at most this is encouraged, none above it discouraged (AgentRL: 0.5); None: off."""
    advantage_scale: PositiveFloat = 1.0
    """Factor on every advantage."""
    credit: Literal["equal", "reward_to_go", "exponential", "signed"] = "equal"
    """How a trajectory's advantage is spread over its turns; ``mua/algorithms/advantage.py`` has the formulas."""
    credit_k: PositiveFloat = 2.0
    """k of ``credit: exponential``."""
    credit_form: Literal["robust", "userrl"] = "robust"
    """Credits normalized by the sum of their absolute values, or by their sum as in UserRL's code; they differ where
    a turn was penalized."""
    loss: Annotated[Literal["grpo", "gspo", "cispo", "minirl", "sapo", "reinforce", "cross_entropy"], OrHook] = "grpo"
    """The objective; ``mua/algorithms/objectives.py`` has the formulas. cross_entropy reads no advantages: it imitates
    whatever filters and minimal_advantage let through. Or a hook; the KL and entropy terms are added to it."""
    clip_low: PositiveFloat = 0.2
    """Lower clip distance of the probability ratio; for sapo the temperature of tokens with a negative advantage."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; for sapo the temperature of the other tokens."""
    ce_gppo_beta1: NonNegativeFloat | None = None
    """grpo: share of the gradient at the lower bound that tokens below it keep (what AgentRL's beta1 is meant to be;
    CE-GPPO); None: they have none."""
    ce_gppo_beta2: NonNegativeFloat | None = None
    """The same above the upper bound (AgentRL's beta2)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """grpo and gspo: bound of the loss of tokens with a negative advantage, in multiples of it (MUA-RL: 3)."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "token_mean"
    """token_mean weighs every trained token alike over the whole batch, sequence_mean every trajectory; sequence_sum
    adds up a trajectory's tokens and averages over trajectories; constant divides that by aggregation_constant."""
    aggregation_constant: PositiveFloat = 1024.0
    """Tokens that ``aggregation: constant`` divides by, whatever a trajectory's length (Dr. GRPO)."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the estimator of KL(policy || reference); 0 keeps no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL term."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL term is added to the loss with its gradient or taken from each token's advantage."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    old_logprobs: Literal["engine", "recompute"] = "recompute"
    """What the clipped ratio is taken against: the engine's log-probabilities or the trainer's own."""
    distillation: DistillationConfig | None = None
    """A teacher to learn from, besides or in the place of rewards; None: no teacher."""
    correction: Literal["none", "truncate", "mask", "band"] = "none"
    """Importance weight for what the engine's log-probabilities differ from the trainer's: truncated at
    correction_high, or 0 outside [correction_low, correction_high]; both need old_logprobs ``recompute``. ``band``
    (AgentRL's) takes tokens out of the batch whose ratio left [1 - clip_low correction_cap, 1 + clip_high
    correction_cap] on the side their advantage pulls to; those that stay are weighed as by ``truncate``, or not at all
    with old_logprobs ``engine``."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of each token, of the whole sequence, or its mean a token."""
    correction_low: NonNegativeFloat = 0.5
    """Lower end of the mask's band."""
    correction_high: PositiveFloat = 2.0
    """Upper end of the band, and the bound of every weight (AgentRL has none: set it high)."""
    correction_cap: Annotated[float, Field(ge=1)] = 4.0
    """``correction: band``: how many times wider than the clip distances the band of a fresh token is; 1 is AgentRL's
    strict form."""
    correction_decay: NonNegativeFloat = 0.0
    """``correction: band``: rate at which the band narrows, to exp(-rate x age) of its width for a token that was
    sampled so many policy versions before the one that is trained (AgentRL: out_of_date_decay)."""
    allow_off_policy: bool = False
    """Allow a run whose gradient does not depend on the policy that sampled, though that was another one: with
    trainer.max_staleness above 0 neither a correction nor the engine's log-probabilities in the ratio, or several
    optimizer steps on a batch with loss reinforce. Without this such a configuration is refused."""
    filters: list[GroupFilter] = []
    """Which groups and trajectories train, in order; ``mua/algorithms/batch.py`` says what each does."""
    group_filter: HookPath | None = None
    """A hook that says which trajectories of a group train, after ``filters``."""
    shaping: ShapingConfig = ShapingConfig()
    refill: RefillConfig = RefillConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    shuffle_rewards: bool = False
    """A control, not a method: the rewards of a step's episodes are dealt among them at random before they train."""
    skip_zero_advantage: bool = False
    """Leave trajectories whose advantage is exactly 0 out of the forward and backward pass. The gradient stays the
    same (denominators still count them), the step gets cheaper, and token metrics cover the rest only. Refused where
    something else gives such trajectories a gradient: a KL or entropy term, a teacher, loss cross_entropy or a hook."""
    minimal_advantage: float | None = None
    """Turns whose advantage is below this are not trained, and in no denominator of tokens (AgentRL's
    minimal_advantage); 0 leaves out what would be discouraged, None nothing."""
    drop_zero_advantage: bool = False
    """Turns whose advantage is exactly 0 are not trained, and in no denominator of tokens (AgentRL's
    drop_zero_advantage), where skip_zero_advantage counts them."""
    epochs: Positive = 1
    """Passes over one batch."""
    minibatches: Positive = 1
    """Optimizer steps in one pass."""

    @property
    def on_policy(self) -> bool:
        """Whether old log-probabilities are those of the only forward pass itself."""
        single_step = self.epochs * self.minibatches == 1 and self.correction == "none" and self.kl_in == "loss"
        return single_step and self.old_logprobs == "recompute" and self.distillation is None

    @property
    def idle(self) -> list[str]:
        """Keys that are set and bound a ratio that is always 1."""
        bounds = ("clip_low", "clip_high", "dual_clip", "ce_gppo_beta1", "ce_gppo_beta2")
        return [key for key in bounds if self.on_policy and self.is_set(key)]

    @property
    def recomputes(self) -> bool:
        """Whether the trainer's own log-probabilities are computed before a batch's first step."""
        return self.correction == "band" or (self.old_logprobs == "recompute" and not self.on_policy)

    @property
    def sees_sampler(self) -> bool:
        """Whether the gradient of a token depends on how likely it was to the policy that sampled it.

        Either the mismatch with the engine is a weight, or the engine's log-probability is in the objective's ratio,
        which reinforce does not have. To imitate, it does not matter who sampled.
        """
        if self.loss == "cross_entropy":
            return True
        if self.old_logprobs == "engine":
            return self.loss != "reinforce"
        return self.correction != "none"

    READS = {
        "loss": {
            "grpo": (*_PULLS, *_RATIO, "ce_gppo_beta1", "ce_gppo_beta2", "dual_clip"),
            "gspo": (*_PULLS, *_RATIO, "dual_clip"),
            **dict.fromkeys(("cispo", "minirl", "sapo"), (*_PULLS, *_RATIO)),
            "reinforce": _PULLS,
            "cross_entropy": (),
            "hook": (*_PULLS, *_RATIO, "ce_gppo_beta1", "ce_gppo_beta2", "dual_clip"),
        },
        "minimal_advantage": {"set": ("advantage", "advantage_scale")},
        "drop_zero_advantage": {"set": ("advantage",)},
        "advantage": {
            "grpo": (*_SCORES, "divide_by_std"),
            "rloo": _SCORES,
            "reinforce_plus_plus": (*_SCORES, "whiten"),
            "pass_at_k": (*_SCORES, "pass_k"),
            "none": _SCORES,
            "gae": ("shaping", "discount", "gae_lambda", "gae_whiten"),
            "hook": (*_SCORES, "divide_by_std", "whiten", "pass_k"),
        },
        "score": {"discounted": ("discount",)},
        "credit": {
            "reward_to_go": ("discount", "credit_form"),
            "exponential": ("credit_k", "credit_form"),
            "signed": ("credit_form",),
        },
        "aggregation": {"constant": ("aggregation_constant",)},
        "kl_coefficient": {"set": ("kl_estimator", "kl_in")},
        "kl_in": {"reward": ("old_logprobs",)},
        "distillation": {"set": ("old_logprobs",)},
        "correction": {
            "truncate": ("correction_level", "correction_high"),
            "mask": ("correction_level", "correction_low", "correction_high"),
            "band": (*_RATIO, "correction_high", "correction_cap", "correction_decay"),
        },
    }

    @property
    def _teacher_alone(self) -> bool:
        return self.distillation is not None and self.distillation.only

    def is_set(self, key: str) -> bool:
        """See :class:`Section`; ``advantage: none`` beside a teacher alone says what is so."""
        return super().is_set(key) and not (key == "advantage" and self._teacher_alone and self.advantage == "none")

    def why_unread(self, key: str) -> str | None:
        """See :class:`Section`; a teacher alone leaves the rewards out."""
        if self._teacher_alone and key in ("advantage", "advantage_scale"):
            return "rewards, which distillation.only leaves out"
        return super().why_unread(key)

    @model_validator(mode="after")
    def _combination_works(self) -> Self:
        """A line for each rule that is broken."""
        gae, teacher, correction = self.advantage == "gae", self.distillation, self.correction
        later = "advantage gae" if gae else "distillation" if teacher else "kl_in reward"
        kl = self.kl_coefficient > 0
        compares = self.advantage in ("grpo", "rloo", "reinforce_plus_plus", "pass_at_k")
        # What gives a trajectory a gradient although its advantage is 0, or leaves it out of the denominators too.
        trains_all = {
            "kl_coefficient": kl, "entropy_coefficient": self.entropy_coefficient > 0, "distillation": teacher,
            "advantage gae": gae, f"loss {self.loss}": self.loss == "cross_entropy" or ":" in self.loss,
            "drop_zero_advantage": self.drop_zero_advantage,
            "minimal_advantage above 0": (self.minimal_advantage or 0.0) > 0,
        }  # fmt: skip
        other = next((name for name, on in trains_all.items() if on), "")
        rules = {
            "loss reinforce takes no account of how far earlier optimizer steps have moved the policy: set epochs and "
            "minibatches to 1, or choose a loss with a ratio, or say allow_off_policy: true":
                self.loss == "reinforce" and self.epochs * self.minibatches > 1 and not self.allow_off_policy,
            "minimal_advantage and drop_zero_advantage look at the advantages of rewards, and "
            f"{later} changes them token by token afterwards: leave out one of the two":
                (gae or teacher or (self.kl_in == "reward" and kl))
                and (self.minimal_advantage is not None or self.drop_zero_advantage),
            "loss cross_entropy reads no advantages: set kl_in to loss":
                self.loss == "cross_entropy" and kl and self.kl_in == "reward",
            "kl_estimator k1 in the loss has an expected gradient of 0: set kl_in to reward, or kl_estimator to k2 or "
            "k3": kl and self.kl_in == "loss" and self.kl_estimator == "k1",
            "shaping.cap_faulty_turns caps the advantages of whole turns, which advantage gae has none of: use "
            "shaping.malformed_turn and shaping.repeated_turn": self.shaping.cap_faulty_turns and gae,
            f"skip_zero_advantage keeps the gradient only where trajectories without an advantage have none, and with "
            f"{other} they have one or are left out already: leave out one of the two":
                self.skip_zero_advantage and other,
            f"group_size 1 leaves advantage {self.advantage} nothing to compare with, and every advantage is 0: set "
            "group_size to 2 or more, or advantage to none or gae, or distillation.only to true":
                self.group_size == 1 and compares and self.why_unread("advantage") is None,
            "shaping.turn_efficiency ranks the members of a group, and group_size is 1; leave it out":
                self.group_size == 1 and self.shaping.turn_efficiency,
            "filters: kind range drops every group where group_size is 1; leave it out":
                self.group_size == 1 and any(isinstance(one, RangeFilter) for one in self.filters),
            f"pass_k {self.pass_k} must be below group_size {self.group_size}, or all subsets of a group are one and "
            "every advantage is 0": self.advantage == "pass_at_k" and self.pass_k >= self.group_size > 1,
            "advantage pass_at_k asks whether a score is above 0, which shaping.turn_efficiency and "
            "shaping.overlong_tokens change for failures and successes: leave them out":
                self.advantage == "pass_at_k" and (self.shaping.turn_efficiency or self.shaping.overlong_tokens),
            "correction band takes its width from clip_low and clip_high, which loss sapo uses as temperatures: set "
            "another loss or correction": correction == "band" and self.loss == "sapo",
            "correction compares the engine with the trainer: set old_logprobs to recompute":
                correction in ("truncate", "mask") and self.old_logprobs == "engine",
            "correction_high bounds the weights of correction band, which old_logprobs engine has none of; leave it "
            "out": correction == "band" and self.old_logprobs == "engine" and self.is_set("correction_high"),
            "minimal_advantage above 0 leaves out what drop_zero_advantage would; leave that out":
                self.drop_zero_advantage and (self.minimal_advantage or 0.0) > 0,
            "shuffle_rewards deals rewards that neither the loss nor a filter reads; leave it out":
                self.shuffle_rewards and not (self.filters or self.group_filter)
                and self.why_unread("advantage") is not None,
            "score discounted with discount 1 is score sum: set discount below 1, or leave out score":
                self.score == "discounted" and self.discount == 1,
            "correction_low must be below correction_high":
                correction == "mask" and self.correction_low >= self.correction_high,
        }  # fmt: skip
        if broken := [problem for problem, on in rules.items() if on]:
            raise ValueError("\n".join(broken))
        return self
