"""An agent of its own: the section ``agent``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mua.config.section import NonNegativeFloat, Positive, Section


class AgentConfig(Section):
    """An agent that plays the episodes in the place of the built-in one, and asks the policy through the gateway
    (docs/gateway.md)."""

    command: Annotated[list[str], Field(min_length=1)] | None = None
    """Program and arguments; one process an episode."""
    entry: str | None = None
    """``package.module:function``, in place of ``command``: called once an episode, with an ``AgentTask``
    (``mua/gateway/launch.py``). A coroutine runs on the rollout's event loop, a plain function in a thread."""
    reward: Literal["environment", "report"] = "environment"
    """Who scores an episode. environment: the domain, on what was done and told to the user (domains with judges ask
    them). report: the agent itself, by ``POST /v1/episode/report`` or the last line of its standard output."""
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
        if (self.command is None) == (self.entry is None):
            raise ValueError("set either command or entry")
        return self
