"""The list ``environment.mcp``: servers whose tools the policy gets, by the Model Context Protocol."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from mua.config.section import NonNegative, Positive, PositiveFloat, Section

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What every chat template and every OpenAI-compatible endpoint takes as the name of a function."""


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
    def _one_transport(self) -> Self:
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
        return self

    @model_validator(mode="after")
    def _kept_apart(self) -> Self:
        if self.url and self.isolation == "process":
            raise ValueError("isolation process needs a command: behind a url nothing is started; take session")
        if self.reuse and self.isolation != "session":
            raise ValueError(f"reuse belongs to isolation session; with {self.isolation} leave it out")
        return self

    @model_validator(mode="after")
    def _names(self) -> Self:
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


def distinct_servers(servers: list[McpServerConfig]) -> None:
    """Raises ValueError where two servers have one name."""
    names = [server.name for server in servers]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"mcp: two servers are called {twice!r}; rename one")
