"""Runs an agent once: a process with all that it spawns, or a function.

A process is run by the guardian that runs engines: a subreaper, so that a child which detaches itself (``setsid``, a
double fork) is found and killed with the rest. Its variables are the gateway's, those of ``agent.variables`` and a
few of the machine's; nothing else of the trainer's environment is told to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mua.config.rollout import AgentConfig
from mua.engine.server import GUARDIAN
from mua.types import Json
from mua.utils.errors import ConfigError, one_line
from mua.utils.hooks import load_hook

_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ")
_MOST_LOG = 1 << 20
_TAIL = 4096
_KILL_SECONDS = 10.0
BY_SIGNAL = 128
"""A higher status is that of a signal, which no library raises on what a policy says."""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What an agent is told."""

    base_url: str
    """For OpenAI's clients."""
    api_key: str
    task: Json
    """``id``, ``domain``, ``instructions``, ``user`` (the first message), ``tools``."""

    @property
    def episode_url(self) -> str:
        """Where user, tools and report are."""
        return f"{self.base_url}/episode"


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How an agent ended by itself."""

    status: int
    """0, or what it failed with."""
    last_line: str
    """Of its standard output; what a function gave, as JSON."""
    error: str
    """The end of its standard error, or what it raised."""


def check_agent(config: AgentConfig) -> Callable[[AgentTask], Any] | None:
    """The function of ``agent.function``, if that is set. Raises :class:`ConfigError` for what cannot be run."""
    if config.command is not None:
        if shutil.which(config.command[0]) is None:
            raise ConfigError(
                f"agent.command: there is no program {config.command[0]!r}; give its path, or put it on PATH"
            )
        return None
    assert config.function is not None
    function: Callable[[AgentTask], Any] = load_hook("agent.function", config.function)
    return function


async def run_agent(config: AgentConfig, task: AgentTask, log_file: Path) -> AgentEnd:
    """Run until the agent ends by itself. When cancelled, its processes are killed, all of them, before this returns;
    a function in a thread is left alone, and its session's key serves it no more."""
    function = check_agent(config)
    if function is None:
        return await _run_process(config, task, log_file)
    try:
        given = function(task) if inspect.iscoroutinefunction(function) else await asyncio.to_thread(function, task)
        if inspect.isawaitable(given):
            given = await given
        return AgentEnd(0, "" if given is None else json.dumps(given), "")
    except Exception as error:
        return AgentEnd(1, "", one_line(error))


async def _run_process(config: AgentConfig, task: AgentTask, log_file: Path) -> AgentEnd:
    assert config.command is not None
    with tempfile.TemporaryDirectory(prefix="mua-agent-") as folder:
        task_file = Path(folder) / "task.json"
        task_file.write_text(json.dumps(task.task), encoding="utf-8")
        variables = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        variables |= {"PYTHONUNBUFFERED": "1"} | config.variables
        variables |= {
            "OPENAI_BASE_URL": task.base_url,
            "OPENAI_API_KEY": task.api_key,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "MUA_EPISODE_URL": task.episode_url,
            "MUA_TASK_FILE": str(task_file),
            "MUA_TASK_ID": str(task.task["id"]),
            "NO_PROXY": "127.0.0.1,localhost",
        }
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(GUARDIAN), str(os.getpid()), *config.command),
            stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=variables, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            out, error, status = await asyncio.gather(
                _tail(process.stdout), _tail(process.stderr, log_file), process.wait()
            )
        finally:
            await asyncio.shield(_kill(process))
    lines = out.decode(errors="replace").strip().splitlines()
    return AgentEnd(status, lines[-1] if lines else "", error.decode(errors="replace").strip())


async def _tail(stream: asyncio.StreamReader, log_file: Path | None = None) -> bytes:
    """The end of what is written; its first MiB goes to ``log_file``. All of it is read, so that nobody is blocked."""
    tail, written = b"", 0
    with contextlib.ExitStack() as stack:
        file = None
        while piece := await stream.read(1 << 16):
            tail = (tail + piece)[-_TAIL:]
            if log_file is not None and written < _MOST_LOG:
                if file is None:
                    log_file.parent.mkdir(parents=True, exist_ok=True)
                    file = stack.enter_context(log_file.open("wb"))
                written += file.write(piece[: _MOST_LOG - written])
    return tail


async def _kill(process: asyncio.subprocess.Process) -> None:
    """The guardian kills all below it and leaves."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_KILL_SECONDS):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
