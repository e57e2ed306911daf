"""Errors a person is meant to read, and the exit status that each leaves with.

A message is one line that names what is wrong, where, and what to do. The command line prints a :class:`MuaError`
without a traceback; anything else is a bug of the program and keeps its traceback. Four statuses tell a launcher what
to do next:

====== =================================================== ================================================
status meaning                                             what a launcher does
====== =================================================== ================================================
2      a person's mistake: a wrong key, a wrong model, a   stops: the same command fails the same way
       folder in use, a disk that is full
75     a fault that may pass: an engine that died too      starts the same command again, which continues
       often, an endpoint that does not answer, a rank     from the newest checkpoint; a bounded number of
       that was lost, a deadline; or a signal to leave     times in a row without a new one
3      an evaluation of which too much could not be        stops; the same command plays what is missing,
       scored: its result is written with its bounds       once the reason is gone
1      a bug: a traceback stands above                     as 75: it may be the machine's
====== =================================================== ================================================

A full disk is a person's: nothing that the run does makes room, and each new attempt would load a model to fail again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from enum import StrEnum
from importlib.util import find_spec
from typing import NamedTuple

MISTAKE = 2
"""Exit status: something a person has to change."""
INCOMPLETE = 3
"""Exit status: an evaluation ended, and too much of it could not be scored."""
PASSING = os.EX_TEMPFAIL
"""Exit status 75: not finished; the same command continues and may get further."""
INTERRUPTED = 130
"""Exit status after Ctrl-C."""


class MuaError(Exception):
    """Base of every error whose message is meant for the person who runs the program.

    ``passing`` says whether the same command may succeed later with nothing changed; each class has a default.
    ``by_policy``: what the policy of an episode did brought it about. Such a fault is tried again as any other, and the
    last try is scored, so that no policy has its own episode left out of the verdict.
    """

    passing: bool = False
    by_policy: bool = False

    def __init__(self, message: str = "", *, passing: bool | None = None) -> None:
        super().__init__(message)
        if passing is not None:
            self.passing = passing


class ConfigError(MuaError):
    """A configuration file or override is wrong. The message names file, key and the nearest valid name."""


class ModelError(MuaError):
    """A model folder or checkpoint is missing, incomplete, or of another shape than configured."""


class BridgeError(ModelError):
    """A checkpoint and a model do not fit together. The message names the file, tensor or key, and the fix."""


class DamagedCheckpoint(ModelError):
    """A checkpoint is not what was written: a file is missing, cut short, or has other bytes."""


class EngineError(MuaError):
    """The inference engine did not start, died, or answered something that cannot be used."""

    passing = True


class EnvironmentFault(MuaError):
    """An environment raised or hung outside what the policy can be blamed for."""


class UserFaultKind(StrEnum):
    """What a simulated user did wrong, as the metrics ``user_faults/<kind>`` and ``user_flags/<kind>`` count it."""

    UNREACHABLE = "unreachable"
    """Nobody answered: the endpoint is down, refuses, or is too slow."""
    CRASHED = "crashed"
    """Its code raised, or gave something else than a reply."""
    NO_TEXT = "no_text"
    BROKEN_TEXT = "broken_text"
    """Unpaired surrogates, control characters, or an answer that cannot be read at all."""
    TOO_LONG = "too_long"
    SPEAKS_AS_AGENT = "speaks_as_agent"
    LEAKS_INSTRUCTION = "leaks_instruction"
    """Quotes its instructions, or speaks of having some."""
    TOOL_CALL_IN_TEXT = "tool_call_in_text"
    """A tool call, or the markup of a model, where words should be; or a call of a tool that nobody offered."""
    ACTS_ON_AND_ON = "acts_on_and_on"
    ENDS_TOO_EARLY = "ends_too_early"
    INVENTS_FACTS = "invents_facts"
    CHANGES_WISH = "changes_wish"
    NO_RECORDING = "no_recording"
    """A replay whose agent took another course than the recorded one."""


class Refusal(NamedTuple):
    """Why a text cannot be a user's words."""

    kind: UserFaultKind
    reason: str


class UserFault(MuaError):
    """The simulated user could not be asked, or what it said cannot be a user's words."""

    def __init__(
        self, message: str = "", kind: UserFaultKind = UserFaultKind.UNREACHABLE, *, passing: bool | None = None
    ) -> None:
        super().__init__(message, passing=passing)
        self.kind = kind


class JudgeFault(MuaError):
    """A judge could not be asked, or gave no verdict that can be read. Never scored as 0."""


class DiskError(MuaError):
    """A file cannot be written: the disk is full, a quota is used up. The message names the file."""


class RankLost(MuaError):
    """Another trainer rank ended or fell silent, and this one cannot go on without it."""

    passing = True


class RunStopped(MuaError):
    """A bound of the configuration ends the run between two steps. The message says what to look at."""


class IncompleteEvaluation(MuaError):
    """More episodes than ``evaluation.max_unscored`` could not be scored. The result is written all the same."""


class Preempted(MuaError):
    """A signal asked the run to leave before its end. The same command continues it."""

    passing = True


class DeadlineExceeded(MuaError):
    """A named wait ran past its deadline. The message names the wait and the seconds it was given."""

    passing = True


def exit_status(error: BaseException) -> int:
    """Status of a process that ends by an error which a person is meant to read (see the table above)."""
    if isinstance(error, IncompleteEvaluation):
        return INCOMPLETE
    return PASSING if _passes(error) else MISTAKE


def _passes(error: BaseException) -> bool:
    """A group passes only if all of it does."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_passes, error.exceptions))
    return isinstance(error, MuaError) and error.passing


def one_line(error: BaseException) -> str:
    """Kind and message of an error of another library, which may have several lines."""
    return " ".join(f"{type(error).__name__}: {error}".split())


# ---- what a person is told

_STACK = (
    'for a CPU: pip install "mua[cpu]" -c "$(mua files constraints/cpu-py312.txt)", then pip install --no-deps -r '
    '"$(mua files constraints/cpu-py312-nodeps.txt)"; for CUDA: pip install -r "$(mua files '
    'constraints/gpu-py312-cu.txt)"'
)
_TOOLS = "pip install 'mua[tools]'"
TOOL_SERVERS = ("mcp",)
"""Modules without which no tool server is reached."""
EXTRAS = {
    **dict.fromkeys(("torch", "megatron", "sglang", "triton"), _STACK),
    **dict.fromkeys((*TOOL_SERVERS, "mcp_types", "httpx2", "anyio"), _TOOLS),
    **dict.fromkeys(("lxml", "pypdf", "trafilatura", "charset_normalizer", "lxml_html_clean"), _TOOLS),
    **dict.fromkeys(("math_verify", "sympy", "latex2sympy2_extended"), _TOOLS),
    "psycopg": "pip install 'mua[postgres]'",
    "pyarrow": "pip install 'mua[parquet]'",
}
"""How to install the extras of ``setup.py``, by the module that an import asks for."""
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


def describe_error(error: BaseException) -> Iterator[str]:
    """The lines that tell a person what to fix; none for a fault of the program.

    A person can do something about the project's own errors, errors of the operating system that name a file or say
    that a disk is full or closed to us, missing packages of an extra, and groups (of concurrent tasks) that hold
    nothing else.
    """
    if isinstance(error, MuaError):
        yield from str(error).splitlines() or [type(error).__name__]
    elif isinstance(error, OSError) and (error.filename is not None or error.errno in _DISK):
        name = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes | os.PathLike) else ""
        yield f"{name}{error.strerror} (MUA_TRACEBACK=1 shows where)"
    elif line := advise_install(error):
        yield line
    elif isinstance(error, BaseExceptionGroup):
        lines = [list(describe_error(inner)) for inner in error.exceptions]
        if all(lines):
            yield from dict.fromkeys(line for inner in lines for line in inner)


def advise_install(error: BaseException) -> str | None:
    """One line for a person; None unless ``error`` says that a module of an extra is not installed."""
    module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return f"{module} is not installed; {EXTRAS[module]}" if module in EXTRAS else None


def find_missing(modules: Iterable[str]) -> str | None:
    """The advice on the first of ``modules``, which belong to extras, that is not installed; imports none of them."""
    missing = next((module for module in modules if find_spec(module) is None), None)
    return None if missing is None else f"{missing} is not installed; {EXTRAS[missing]}"
