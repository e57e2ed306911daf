"""The sections ``rollout``, ``agent``, ``context``, ``samplers`` and ``evaluation``: how episodes are played."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mua.config.environment import EndpointConfig
from mua.config.section import Fraction, HookPath, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section
from mua.types import Json


class RolloutConfig(Section):
    """Budgets of one episode and how it is sampled."""

    READS = {"final_turn": {"set": ("final_request",)}}

    temperature: PositiveFloat = 1.0
    """Sampling temperature; training divides the logits by the same value."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 switches it off. Training refuses less, see ``allow_truncated_sampling``."""
    top_k: int = -1
    """Sample among the k likeliest tokens only; -1 switches it off. Training refuses others, see
    ``allow_truncated_sampling``."""
    min_p: Fraction = 0.0
    """Sample among tokens of at least this share of the likeliest one's probability; 0 switches it off. Training
    refuses more, see ``allow_truncated_sampling``."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Taken from the logits of tokens that the turn holds already, before the temperature. Training refuses others than
    0, see ``allow_truncated_sampling``."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Likewise, times how often the turn holds the token."""
    allow_truncated_sampling: bool = False
    """Train although ``top_p``, ``top_k``, ``min_p`` or a penalty makes the policy sample from another distribution
    than the trainer computes (docs/algorithms.md says what each does to the ratios)."""
    max_turns: Positive = 30
    """Assistant turns (generations) in one episode."""
    max_tool_calls: Positive = 60
    """Tool calls in one episode."""
    final_turn: bool = False
    """Give the policy one more turn, without tools, when ``max_turns`` or ``max_tool_calls`` is used up: it is told so
    by ``final_request``, and its text goes to the user."""
    final_request: str = "You have no more turns and can call no more tools. Give your final answer now."
    """The user's message in the policy's context that asks for it; no user is asked, and ``forced`` marks it."""
    max_turn_tokens: Positive = 1024
    """New tokens in one assistant turn."""
    max_tokens: Positive = 32768
    """Length of one segment; the episode ends as ``length`` when the next turn no longer fits. Where it is not set, it
    is at most what ``model.max_length`` and ``megatron.max_tokens_per_microbatch`` hold; ``mua sft`` ignores it."""
    max_malformed: NonNegative = 2
    """Malformed or unknown tool calls answered with an error observation before the episode ends as malformed."""
    generate_seconds: PositiveFloat = 600.0
    """Deadline of one assistant turn. A turn that the policy wrote on and on until then ends as ``length``; one that
    the engine was too slow for is unscored (``mua/rollout/agent.py`` has the rule)."""
    user_seconds: PositiveFloat = 600.0
    """Deadline of one utterance of the user, as the episode sees it."""
    episode_seconds: PositiveFloat = 3600.0
    """Deadline of the whole episode; past it the outcome is ``timeout``."""
    max_retries: NonNegative = 3
    """Fresh tries after an infrastructure fault before the trajectory is given up (unscored)."""
    concurrency: Positive = 64
    """Episodes in flight at once."""

    @property
    def truncations(self) -> Json:
        """Settings that let only some tokens be sampled, whose log-probabilities stay those of all."""
        settings: Json = {"top_p": (self.top_p, 1.0), "top_k": (self.top_k, -1), "min_p": (self.min_p, 0.0)}
        return {name: value for name, (value, off) in settings.items() if value != off}

    @property
    def penalties(self) -> Json:
        """Settings that change the logits before they are sampled from, and so the log-probabilities too."""
        settings = {"presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty}
        return {name: value for name, value in settings.items() if value}

    @property
    def other_distribution(self) -> str:
        """In words, by which settings the policy samples from another distribution than the trainer computes; empty
        where it does not."""
        settings = self.truncations | self.penalties
        if not settings:
            return ""
        shown = ", ".join(f"rollout.{name} {value:g}" for name, value in settings.items())
        return (
            f"{shown}: the policy samples from another distribution than softmax(logits / temperature), which the "
            f"trainer computes; the engine's log-probabilities are of {self.sampling(self.temperature)['logprobs_of']}"
        )

    def sampling(self, temperature: float) -> Json:
        """How an episode is sampled at ``temperature``; ``logprobs_of`` names the distribution that its
        log-probabilities are of, as SGLang 0.5.23 computes them (``srt/layers/sampler.py``)."""
        logits = "(logits - penalties)" if self.penalties else "logits"
        of = f"softmax({logits} / temperature)" if temperature else f"softmax({logits.strip('()')})"
        truncated = self.truncations if temperature else {}
        return {"temperature": temperature, **truncated, **self.penalties, "logprobs_of": of}


class PolicyEndpointConfig(EndpointConfig):
    """The policy that ``mua eval`` evaluates, where it is no checkpoint of ours; needs native tool calls."""

    request_seconds: PositiveFloat = 300.0
    """Deadline of one request; ``rollout.generate_seconds`` bounds a turn, retries included."""
    max_retries: NonNegative = 5
    """Retries of one request on 408, 409, 429, 5xx, dropped connections and replies that cannot be read."""
    concurrency: Positive = 64
    """Requests in flight at once; the rest wait."""
    send_reasoning: bool = True
    """Give the policy's ``reasoning_content`` back with its messages, as models that reason between tool calls expect;
    turn it off for endpoints that refuse unknown fields."""

    @property
    def endpoints(self) -> tuple[EndpointConfig, ...]:
        """Only itself: another endpoint would be another policy."""
        return (self,)


class PolicyConfig(Section):
    """The policy that ``mua eval`` evaluates."""

    kind: Literal["engine", "endpoint"] = "engine"
    """``engine``: the checkpoint ``model.path``, served here; ``endpoint``: whatever answers at ``endpoint``, in which
    case the sections ``model`` and ``trainer`` may be left out."""
    endpoint: PolicyEndpointConfig | None = None
    """Needed when kind is ``endpoint``."""

    @model_validator(mode="after")
    def _kind_has_its_section(self) -> Self:
        if self.kind == "endpoint" and self.endpoint is None:
            raise ValueError("kind 'endpoint' needs the section evaluation.policy.endpoint")
        return self


class EvaluationConfig(Section):
    """How a policy is evaluated."""

    policy: PolicyConfig = PolicyConfig()
    """Of ``mua eval``; in training it is always the policy being trained."""
    domains: list[str] = []
    """Domains and gyms that ``mua eval`` goes over; empty: those of ``environment``. Training evaluates them besides
    its own: those it does not train on are held out, with metrics of their own."""
    options: dict[str, str | int | float | bool] = {}
    """Settings of those of ``domains`` that are not in ``environment``, with their owner: ``{turtle.max_words: 5}``."""
    split: Literal["train", "validation", "test"] = "validation"
    """Which tasks; the splits are disjoint. Training evaluates itself on ``validation``: it refuses ``test`` here
    unless ``test_in_training`` is set."""
    test_in_training: bool = False
    """Let training evaluate on the test split as it goes. What is tuned, stopped or chosen by such numbers is no longer
    evaluated by them; for numbers of a report there is ``report_split``."""
    report_split: Literal["train", "validation", "test"] | None = None
    """Tasks that training plays for the report alone: before its first step, and after its last with the policy that
    ``trainer.export`` chooses. Nothing is decided by them; the numbers stand in ``<output>/report.json``."""
    tasks: Positive | None = None
    """So many tasks of the split, of each domain: a sample in the proportions of kinds and difficulties, always the
    same, with every kind where there is room for it. None takes all."""
    samples: Positive = 1
    """Episodes of each task. pass^k and pass@k are reported for every k up to this, 8 at most."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""
    max_unscored: Fraction = 0.05
    """Share of unscored episodes above which ``mua eval`` ends with status 3: what is missing is seldom a fair sample.
    Its result is written all the same, with the bounds that it leaves open."""
    level: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Level of the confidence intervals."""
    resamples: Positive = 2000
    """Bootstrap resamples behind every interval."""
    outputs: list[Literal["json", "markdown", "plots"]] = ["json", "markdown", "plots"]
    """What ``mua eval`` writes: ``evaluation.json`` (which ``mua compare`` reads), ``report.md``, pictures."""

    @model_validator(mode="after")
    def _options_have_owners(self) -> Self:
        if self.options and not self.domains:
            raise ValueError("evaluation.options needs evaluation.domains, whose settings they are")
        return self


class AgentJudgeConfig(Section):
    """The run's judge (section ``judge``) scores every episode of the agent."""

    question: Annotated[str, Field(min_length=1)]
    """What it is asked about the conversation; say what a high and what a low score stand for."""
    low: float = 0.0
    """Lowest score."""
    high: float = 1.0
    """Highest."""
    weight: float = 1.0
    """The score times this is added to the reward. 0: it is only recorded."""
    success_from: float | None = None
    """With ``agent.reward: judge``: the least score of a success; null: ``high``. Otherwise the other side says."""
    max_characters: Positive = 100_000
    """Of the instructions and of the conversation that it is shown; of longer ones the middle is left out, and it is
    told so. What its endpoint cannot take is a ``judge_error``."""

    @model_validator(mode="after")
    def _a_scale(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        if self.success_from is not None and not self.low < self.success_from <= self.high:
            raise ValueError(f"success_from {self.success_from:g} must lie above low and up to high")
        return self


class AgentConfig(Section):
    """An agent that plays the episodes in the place of the built-in one, and asks the policy through the gateway
    (docs/gateway.md)."""

    command: Annotated[list[str], Field(min_length=1)] | None = None
    """Program and arguments; one process an episode."""
    function: HookPath | None = None
    """``package.module:function``, in place of ``command``: called once an episode, with an ``AgentTask``
    (``mua.rollout.external.py``). A coroutine runs on the rollout's event loop, a plain function in a thread."""
    reward: Literal["environment", "report", "judge"] = "environment"
    """Who scores an episode. environment: the domain, on what was done and told to the user (domains with judges ask
    them). report: the agent itself, by ``POST /v1/episode/report`` or the last line of its standard output. judge: the
    section below, and nobody else."""
    judge: AgentJudgeConfig | None = None
    """A judge whose score is added to the reward, or recorded beside it; with ``reward: judge`` it is the reward."""
    sampling: Literal["override", "refuse"] = "override"
    """What becomes of a request's own temperature, top_p, seed or penalties. override: the run's count, whatever was
    asked. refuse: such a request is answered 400."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the agent's process beside the gateway's and PATH, HOME, LANG, TMPDIR."""
    max_requests: Positive = 1000
    """Requests of one session, of every kind; the episode then ends as ``max_turns``."""
    max_session_tokens: Positive = 262144
    """Tokens of all streams of one session; the episode then ends as ``length``."""
    max_request_bytes: Positive = 4 * 1024 * 1024
    """Size of one request; larger ones are answered 413."""
    concurrency: Positive = 4
    """Turns of one session that are sampled at once; more wait."""
    stop_seconds: NonNegativeFloat = 5.0
    """Time that an agent gets to leave by itself when its episode is over, before it is killed."""
    host: str = "127.0.0.1"
    """Address that the gateway listens on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Its port; 0 takes a free one."""

    @model_validator(mode="after")
    def _one_agent(self) -> Self:
        if (self.command is None) == (self.function is None):
            raise ValueError("set either command or function")
        if self.reward == "judge" and (self.judge is None or self.judge.weight == 0):
            raise ValueError("reward judge needs agent.judge, with a question and a weight other than 0")
        return self


class ContextConfig(Section):
    """Rewriting the policy's context in an episode, in training and evaluation alike (docs/context.md). Every rewrite
    is a new segment."""

    strategy: Literal["off", "discard_tool_results", "summarize", "digest"] = "off"
    """discard_tool_results: old results give way to a short mark. summarize: the policy writes notes; instructions,
    everything the user said, and the notes stay. digest: of what the user said only the first and an unanswered last
    message stay. Notes are sampled by the policy and trained with the turn that follows them."""
    share: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """A rewrite is due before a turn whose segment has at least this share of ``rollout.max_tokens``."""
    every_turns: Positive | None = None
    """One is due too after so many assistant turns since the last; null: never for that."""
    on_repetition: Annotated[int, Field(ge=2)] | None = None
    """And when the policy says the same (text and calls, white space aside) for so many times since the last; null:
    never for that."""
    keep_results: NonNegative = 1
    """Of discard_tool_results: the last so many turns whose results stay. Those that no turn has followed yet stay in
    any case."""
    summary_tokens: Positive = 512
    """Longest notes."""
    instruction: str = (
        "The conversation is too long to go on with. Write notes for yourself: what is asked for, what you have done "
        "and found out, with every name, number and identifier that is still needed, and what to do next. Call no "
        "tools."
    )
    """How notes are asked for, as a user's message that nobody else gets to see."""
    max_rewrites: Positive = 8
    """Rewrites of one episode; after them it ends as ``length`` when it no longer fits."""
    max_result_tokens: Positive | None = None
    """Longest result of one tool call in the policy's tokens (of an endpoint: four characters each); of longer ones
    beginning and end stay, and how much is left out is said between them. null: they are taken whole."""
    stop_on_repetition: Annotated[int, Field(ge=2)] | None = None
    """The episode ends as ``repetition``, which is scored, when the policy has said the same for so many times; null:
    never for that."""

    similarity: Annotated[float, Field(gt=0, le=1)] = 1.0
    """From which likeness on two turns count as the same, of 0 to 1 (normalized Indel similarity of text and calls); 1:
    only what is equal. Below 1 a policy that pages through results, or looks up one number after another, may count as
    repeating itself."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        if self.strategy == "off" and (self.every_turns is not None or self.on_repetition is not None):
            raise ValueError(
                "every_turns and on_repetition say when to rewrite, and strategy off never does; choose one"
            )
        if self.takes_notes and not self.instruction.strip():
            raise ValueError("instruction is empty: the policy would not know that notes are wanted")
        return self

    @property
    def takes_notes(self) -> bool:
        """Whether a rewrite is made of what the policy writes."""
        return self.strategy in ("summarize", "digest")


class SamplersConfig(Section):
    """Processes of ``mua sample``, which lease episodes of training from the store, on this machine or on others
    (docs/samplers.md)."""

    enabled: bool = False
    """Episodes of training are leased from the store. False: the trainer's process rolls all of them out."""
    inside: bool = True
    """The trainer's process rolls out too, as one sampler more."""
    lease_seconds: PositiveFloat = 60.0
    """How long an episode belongs to a sampler that is silent; then others may have it."""
    heartbeat_seconds: PositiveFloat = 10.0
    """How often a sampler renews its leases and learns which of them it has lost."""
    poll_seconds: PositiveFloat = 0.2
    """How often a sampler that has room asks for episodes, and the trainer for those that have ended; four times as
    often while there lately were some."""
    load: PositiveFloat = 1.0
    """Requests that run or wait at the engines for each that they can run at once, above which no sampler starts
    another episode."""
    other_code: Literal["refuse", "warn"] = "refuse"
    """What a sampler does whose sources or libraries are not the trainer's, though of the same version of mua: another
    commit, changed files, another transformers. They may make other episodes."""
    start_seconds: PositiveFloat = 1800.0
    """How long the trainer waits while no sampler is alive, before it ends with status 75."""
    leave_seconds: PositiveFloat = 120.0
    """How long a sampler that was asked to leave goes on with the episodes it has; then others may have them."""
    address: str = "127.0.0.1"
    """Address of rank 0's machine at which samplers reach the engines; one that other machines see, for samplers
    there."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Its port; 0 takes a free one."""

    @model_validator(mode="after")
    def _renewed_in_time(self) -> Self:
        if 3 * self.heartbeat_seconds > self.lease_seconds:
            raise ValueError(
                f"lease_seconds {self.lease_seconds:g} must be three times heartbeat_seconds "
                f"{self.heartbeat_seconds:g} at least, so that one late heartbeat loses no lease"
            )
        return self
