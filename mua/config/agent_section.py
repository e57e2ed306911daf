"""An agent of its own: the section ``agent``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mua.config.section import HookPath, NonNegativeFloat, Positive, Section


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
    most_characters: Positive = 100_000
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
    (``mua/rollout/gateway/launch.py``). A coroutine runs on the rollout's event loop, a plain function in a thread."""
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
