"""The sections ``environment``, ``user`` and ``judge``: what policies learn in, and with whom."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr, model_validator

from mua.config.mcp import McpServerConfig, distinct_servers
from mua.config.scorer_section import ScorerConfig
from mua.config.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

NO_DOMAIN = "none"
"""Stands for ``environment.name`` where nothing is played: supervised and offline runs."""
USER_KINDS = ("scripted", "llm", "replay")
_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class EnvironmentConfig(Section):
    """The tasks and the tools."""

    name: str = ""
    """Registered domain or gym, such as ``retail`` or ``gyms/function``; ``mua env list`` shows all. Either this or
    ``mix``."""
    mix: dict[str, PositiveFloat] = {}
    """Several domains with their shares of the training tasks, such as ``{retail: 2, gyms/turtle: 1}``."""
    data: Annotated[Path, Field(strict=False)] | None = None
    """Folder of published tasks that a domain loads in place of its own. ``retail`` and ``airline``: tau-bench's or
    tau2-bench's; ``telecom``: tau2-bench's; ``agentbench_db``: AgentBench's dbbench; gyms: UserRL's records; ``bfcl``
    and ``acebench``, which have no others: their packages. See docs/official_data.md. ``qa``: questions of your own
    (docs/qa.md). ``help_desk`` takes none."""
    difficulties: list[Literal["easy", "medium", "hard"]] = []
    """Only tasks of these difficulties; empty: all."""
    reward: Literal["all_or_nothing", "partial"] = "all_or_nothing"
    """Domains with a database: 1 or 0, or the share of right changes and told facts among all that were due or made."""
    oracle: Literal["rule", "llm"] = "rule"
    """Gyms: who answers and judges, the rules over each task's structured facts, or the endpoints of ``user.llm`` and
    ``judge.llm``."""
    show_reward: bool = False
    """Gyms: tell the policy the reward of each call. Off, because no user tells it later either."""
    isolation: Literal["auto", "inline", "thread", "process"] = "auto"
    """Where tools run: ``auto`` as the domain says; ``process``: in worker processes, so that a hang or crash costs one
    worker and its episodes are tried again."""
    workers: Positive = 2
    """Worker processes with isolation ``process``."""
    options: dict[str, str | int | float | bool] = {}
    """Settings that only one domain knows; its documentation names them."""
    prompt: Literal["full", "short"] = "full"
    """``full`` puts the policy page and tool schemas into the system prompt; ``short`` one line, for policies too
    small to read."""
    call_seconds: PositiveFloat = 30.0
    """Deadline of one tool call; a tool that hangs longer ends the episode as environment_error."""
    reset_seconds: PositiveFloat = 60.0
    """Deadline of building, and of evaluating, one environment."""
    max_instances: Positive = 256
    """Environments alive at once."""
    scorer: ScorerConfig | None = None
    """Domains of questions and answers, such as ``qa``: how an answer is scored (docs/scorers.md)."""
    mcp: list[McpServerConfig] = []
    """Servers of the Model Context Protocol whose tools join those of the domain (docs/tool_servers.md)."""

    @model_validator(mode="after")
    def _distinct_servers(self) -> Self:
        distinct_servers(self.mcp)
        return self

    @model_validator(mode="after")
    def _one_domain_or_a_mix(self) -> Self:
        if bool(self.name) == bool(self.mix):
            raise ValueError("give either name, one domain, or mix, several; mua env list shows what there is")
        return self

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_set(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None or key not in ("name", "mix")}
        return data

    @property
    def shares(self) -> dict[str, float]:
        """Share of each domain in training; one domain has it all."""
        return dict(self.mix) or {self.name: 1.0}


class EndpointConfig(Section):
    """An OpenAI-compatible chat endpoint: where it is, and what it can bear."""

    base_url: str
    """Address of the API, ``/v1`` included. Credentials in it (``https://name:password@host``) are sent instead of
    ``api_key``, a query (``?api_key=...``) with every request; both are masked wherever the address is shown."""
    model: str
    """Model name the endpoint knows."""
    api_key: SecretStr = SecretStr("none")
    """Use ``${ENV_VAR}``; never written to a log, trace, result or checkpoint."""
    request_seconds: PositiveFloat = 60.0
    """Deadline of one request."""
    concurrency: Positive = 256
    """Requests in flight at once; the rest wait. 256 lets every episode of a large batch ask at the same moment."""
    requests_per_minute: Positive | None = None
    """Requests that may start within any 60 seconds; null: as many as ``concurrency`` allows."""
    tokens_per_minute: Positive | None = None
    """Tokens, read and written, within any 60 seconds. Estimated when a request starts (4 characters per token, and
    ``max_tokens``), corrected by what the endpoint reports."""
    breaker_faults: Positive = 8
    """Faults in a row (no connection, no answer in time, 5xx, refused keys, unreadable replies) after which the
    endpoint is left alone."""
    breaker_seconds: PositiveFloat = 5.0
    """How long it is left alone before one request tries it again."""
    structured_output: Literal["auto", "json_schema", "json_object", "text"] = "auto"
    """How JSON is asked for: under a schema, as any object, or in the prompt alone. ``auto`` begins with a schema and
    takes what the endpoint does not refuse. A policy is asked for none."""
    send_seed: bool = True
    """Send a seed with every request, for endpoints that repeat themselves with one."""
    tokens_parameter: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Name under which the endpoint takes the longest reply in tokens."""
    price_per_million_in: NonNegativeFloat = 0.0
    """Price of a million tokens read, in any currency, for the metric ``cost``; a policy's is ``policy_cost``."""
    price_per_million_out: NonNegativeFloat = 0.0
    """Price of a million tokens written."""
    extra: dict[str, Any] = {}
    """Further fields of every request, such as ``top_p`` or ``chat_template_kwargs``; never a secret."""


class LlmConfig(EndpointConfig):
    """A language model of a role: an endpoint, those that stand in for it, and how it is asked."""

    temperature: NonNegativeFloat = 1.0
    """Sampling temperature. 1 keeps users varied; 0 gives the steadiest verdicts of a judge."""
    max_tokens: Positive = 512
    """Longest reply, in the endpoint's tokens."""
    total_seconds: PositiveFloat = 300.0
    """Deadline of one reply: retries, fallbacks and waiting for limits included."""
    max_retries: NonNegative = 5
    """Retries at each endpoint on 429, 5xx, timeouts, dropped connections and unusable replies; 401 and other 4xx are
    not retried."""
    fallbacks: list[EndpointConfig] = []
    """Endpoints to turn to, in this order, while those before are broken, refuse or are at their rate limit."""
    cache: Annotated[Path, Field(strict=False)] | None = None
    """An SQLite file that keeps every reply under the whole request, its seed included; made if it is not there.
    Several processes of one machine may share it."""

    @property
    def endpoints(self) -> tuple[EndpointConfig, ...]:
        """The endpoint itself, then its fallbacks."""
        return (self, *self.fallbacks)


class UserConfig(Section):
    """Who plays the user."""

    kind: str = "scripted"
    """``scripted``: the domain's rule-based user; ``llm``: an endpoint; ``replay``: recorded utterances; or a factory
    of your own as ``package.module:name`` (docs/users.md)."""
    personas: list[str] = []
    """The population of scripted users: brief, plain, terse, talkative, forthcoming, forgetful, careless, stubborn,
    wavering, impatient. Empty: all but brief, who say only what is needed, in a few wordings that never change."""
    llm: LlmConfig | None = None
    """Needed when kind is ``llm``."""
    manners: bool = True
    """Whether the seed of each rollout also picks how an LLM's user talks (terse, chatty, unsure ...)."""
    temperatures: list[NonNegativeFloat] = []
    """Lowest and highest sampling temperature; the seed of each rollout picks one between. Empty:
    ``user.llm.temperature`` for all."""
    leak_words: NonNegative = 12
    """A reply of an LLM's user that repeats so many words of its instructions in a row is a leak; 0: no check."""
    check: Literal["off", "flag", "refuse"] = "refuse"
    """What happens to an LLM user's reply that does not fit its task (facts made up, another wish, an end too early) or
    quotes its instructions: ``refuse`` asks for another one, ``flag`` lets it pass and marks the trajectory."""
    tool_rounds: Positive = 8
    """How often in a row an LLM's user may use tools of its own before it must speak."""
    prompt: Annotated[Path, Field(strict=False)] | None = None
    """A text file that takes the place of the rules an LLM's user is told, with ``$persona``, ``$manner``, ``$stop``
    and ``$tool_rules`` where these belong."""
    options: dict[str, Any] = {}
    """Settings of a factory of your own."""
    replay: Annotated[Path, Field(strict=False)] | None = None
    """A trace file (JSON lines) whose user turns are replayed; needed when kind is ``replay``."""

    @property
    def asks_model(self) -> bool:
        """Whether the endpoint ``llm`` is asked: by kind ``llm``, and by a factory of your own that is given one."""
        return self.llm is not None and self.kind not in ("scripted", "replay")

    @model_validator(mode="after")
    def _kind_has_its_section(self) -> Self:
        if self.kind not in USER_KINDS and not _FACTORY.fullmatch(self.kind):
            near = difflib.get_close_matches(self.kind, USER_KINDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"there is no kind of user {self.kind!r}; known: {', '.join(USER_KINDS)}, or a factory as "
                f"package.module:name{hint}"
            )
        if self.options and self.kind in USER_KINDS:
            raise ValueError(f"user.options are those of a factory of your own; kind {self.kind!r} has none")
        if self.kind == "llm" and self.llm is None:
            raise ValueError("kind 'llm' needs the section user.llm")
        if self.kind == "replay" and self.replay is None:
            raise ValueError("kind 'replay' needs user.replay, a trace file")
        if self.temperatures and (len(self.temperatures) != 2 or self.temperatures[0] > self.temperatures[1]):
            raise ValueError("user.temperatures takes two numbers, the lowest and the highest, such as [0.7, 1.2]")
        return self


class JudgeConfig(Section):
    """Who judges where no rule can: another role than the user, with an endpoint and settings of its own."""

    llm: LlmConfig
    """The endpoint; temperature 0 gives the steadiest verdicts."""
