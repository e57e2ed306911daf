"""The sections ``environment``, ``user`` and ``judge``: what policies learn in, and with whom."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from mua.config.section import (
    HOOK_PATH,
    TOOL_NAME,
    NonNegative,
    NonNegativeFloat,
    OrHook,
    Positive,
    PositiveFloat,
    Section,
)


class McpServerConfig(Section):
    """One server: a command that speaks over its standard input and output, or a URL (streamable HTTP)."""

    name: str
    """How messages and logs call it: letters, digits, ``-`` and ``_``."""
    command: str = ""
    """Program to start, found on ``PATH``. Either this or ``url``."""
    args: list[str] = []
    """Arguments of the program."""
    env: dict[str, SecretStr] = {}
    """Variables that the program gets besides HOME, LANG, LC_ALL, LOGNAME, PATH, SHELL, TERM, TMPDIR, TZ and USER;
    others of the run are not passed on. Use ``${ENV_VAR}`` for secrets."""
    cwd: Annotated[Path, Field(strict=False)] | None = None
    """Working directory of the program; null: that of the run."""
    url: str = ""
    """Address of a server that is running, such as ``http://host:8000/mcp``."""
    headers: dict[str, SecretStr] = {}
    """Sent with every request to ``url``, such as ``{Authorization: "Bearer ${TOKEN}"}``."""
    ca_file: Annotated[Path, Field(strict=False)] | None = None
    """Certificates in PEM form of the authorities that may have signed the server's certificate, in place of those that
    Python trusts; for an ``https`` url of a private authority."""
    domains: list[str] = []
    """Only tasks of these domains get the tools; empty: all."""
    allow: list[str] = []
    """Only these tools of the server; empty: all. Names as the server tells them, as in ``block``, ``rename``,
    ``safe``."""
    block: list[str] = []
    """Not these."""
    rename: dict[str, str] = {}
    """What the policy knows a tool by, such as ``{read_file: open_page}``."""
    prefix: str = ""
    """Put before the name of each tool that ``rename`` does not name."""
    isolation: Literal["session", "process", "shared"] = "session"
    """How a rollout is kept apart. ``session``: a session of its own (with a command that is a process of its own,
    since one speaks with one client). ``process``: a process of its own, which a URL cannot give. ``shared``: one
    session for all rollouts, which then share whatever state the server has and meet its faults together."""
    reuse: bool = False
    """Hand a session that a rollout has left to a later one. Only for servers that keep no state."""
    ready: NonNegative = 8
    """Sessions opened in advance, at most: as many as lately were taken while one opened. 0: opened when needed."""
    max_sessions: Positive = 256
    """Sessions open at once; rollouts beyond that wait. One of a command costs its process's memory."""
    result_chars: Annotated[int, Field(gt=0, le=400_000)] = 16_384
    """Longest result in characters; what is cut is said in the result."""
    message_bytes: Annotated[int, Field(ge=4096)] = 2**21
    """Longest message that is read. A longer one is a fault of the server, found before anything of it is parsed."""
    start_seconds: PositiveFloat = 30.0
    """Deadline of opening a session: start of the program, handshake, list of tools."""
    call_seconds: PositiveFloat = 30.0
    """Deadline of one call, in place of ``environment.call_seconds``."""
    retries: NonNegative = 2
    """Further tries of what may be done twice: opening a session, and calls of ``safe`` tools."""
    safe: list[str] = []
    """Tools that may be called twice, besides those that the server annotates as read-only or idempotent. After a fault
    they are tried again where that needs no state of the session."""

    @model_validator(mode="after")
    def _keys_go_together(self) -> Self:
        if not TOOL_NAME.fullmatch(self.name):
            raise ValueError(f"name {self.name!r}: at most 64 letters, digits, - and _")
        if bool(self.command) == bool(self.url):
            raise ValueError("give either command, a program to start, or url, a server that is running")
        of_other = ("headers", "ca_file") if self.command else ("args", "env", "cwd")
        for key in of_other:
            if getattr(self, key):
                raise ValueError(f"{key} belongs to a {'url' if self.command else 'command'}; leave it out")
        if self.url and (urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname):
            raise ValueError("url must begin with http:// or https:// and name a host")
        if self.ca_file is not None and urlsplit(self.url).scheme != "https":
            raise ValueError("ca_file belongs to a url that begins with https://; leave it out")
        if self.url and self.isolation == "process":
            raise ValueError("isolation process needs a command: behind a url nothing is started; take session")
        if self.reuse and self.isolation != "session":
            raise ValueError(f"reuse belongs to isolation session; with {self.isolation} leave it out")
        if both := sorted(set(self.allow) & set(self.block)):
            raise ValueError(f"allow and block both name {both[0]!r}; leave it out of one")
        for old, new in self.rename.items():
            if not TOOL_NAME.fullmatch(new):
                raise ValueError(f"rename.{old}: {new!r} is no name of a tool: at most 64 letters, digits, - and _")
            if old in self.block or (self.allow and old not in self.allow):
                raise ValueError(f"rename.{old}: allow and block leave this tool out; leave out the rename")
        if len(set(self.rename.values())) < len(self.rename):
            raise ValueError("rename gives two tools one name")
        if self.prefix and not TOOL_NAME.fullmatch(self.prefix):
            raise ValueError(f"prefix {self.prefix!r}: only letters, digits, - and _")
        return self


AnswerForm: TypeAlias = Literal["boxed", "tag", "json", "line", "code", "number", "whole"]
_KEY = re.compile(r"[A-Za-z_][\w-]{0,63}")


class ScorerConfig(Section):
    """How an answer is scored (docs/scorers.md)."""

    name: str = "exact"
    """``exact``, ``numeric``, ``date``, ``symbolic``, ``fuzzy``, ``f1``, ``list``, ``choice``, ``code``, ``judge``, or
    a factory of your own as ``package.module:function``."""
    options: dict[str, Any] = {}
    """Settings of the scorer; docs/scorers.md lists them."""
    forms: list[AnswerForm] = []
    """Forms in which an answer is looked for, in this order; the first that is there decides. Empty: those that the
    scorer prefers."""
    tag: str = "answer"
    """Name of the XML tag of form ``tag``."""
    key: str = "answer"
    """Key of a JSON object that form ``json`` looks for."""
    several: Literal["every", "last", "joined"] = "every"
    """What counts when the text holds several different answers of the form: ``every`` one has to be right, the
    ``last`` one alone counts, or all are ``joined`` as the lines of one answer, for scorer ``list``."""
    longest: Annotated[int, Field(gt=0, le=200_000)] = 2_000
    """Longest answer in characters; a longer one is none. Code may have 50 times as many."""

    @model_validator(mode="after")
    def _names_can_be_found(self) -> Self:
        for key, value in (("tag", self.tag), ("key", self.key)):
            if not _KEY.fullmatch(value):
                raise ValueError(f"{key} {value!r}: at most 64 letters, digits, - and _, of which a letter comes first")
        if len(set(self.forms)) < len(self.forms):
            raise ValueError("forms: a form stands there twice; name each once")
        return self


NO_DOMAIN = "none"
"""Stands for ``environment.name`` where nothing is played: supervised and offline runs."""
USER_KINDS = ("scripted", "llm", "replay")


class EnvironmentConfig(Section):
    """The tasks and the tools."""

    name: str = ""
    """Registered domain or gym, such as ``retail`` or ``gyms/function``; ``mua env list`` shows all; or a hook. Either
    this or ``mix``."""
    mix: dict[str, PositiveFloat] = {}
    """Several domains with their shares of the training tasks, such as ``{retail: 2, gyms/turtle: 1}``."""
    data: Annotated[Path, Field(strict=False)] | None = None
    """Folder of published tasks that a domain loads in place of its own. ``retail`` and ``airline``: tau-bench's or
    tau2-bench's; ``telecom``: tau2-bench's; gyms: UserRL's records; ``bfcl`` and ``acebench``, which have no others:
    their packages. See docs/official_data.md. ``qa``: questions of your own
    (docs/qa.md). ``help_desk`` takes none."""
    difficulties: list[Literal["easy", "medium", "hard"]] = []
    """Only tasks of these difficulties; empty: all."""
    reward: Annotated[Literal["all_or_nothing", "partial"], OrHook] = "all_or_nothing"
    """Domains with a database: 1 or 0, or the share of right changes and told facts among all that were due or made. Or
    a hook, whose reward takes the place of the one that the environment gives at the end."""
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
    def _one_domain_or_a_mix(self) -> Self:
        names = [server.name for server in self.mcp]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"mcp: two servers are called {twice!r}; rename one")
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
    def of_domains(self) -> Self:
        """What domains are told: a hook of ``reward`` is no matter of theirs."""
        return self.model_copy(update={"reward": "all_or_nothing"}) if ":" in self.reward else self

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
        if self.kind not in USER_KINDS and not re.fullmatch(HOOK_PATH, self.kind):
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
