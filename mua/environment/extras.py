"""Tools beside a domain's own, from any number of sources: tool servers, sandboxes, page readers.

::

    Extras.start()   every source ready ─► names checked against each other
    Extras.open()    one session with each, for one rollout ─► RolloutExtras: tools, call(), close()
    Extras.close()   nothing of any source is left

:class:`HandleWithTools` puts the sessions of one rollout beside a domain's environment, wherever that runs: its tools
come first, then those of the sources in their order; a call goes where its tool belongs; the verdict stays the
domain's.

A source is three methods (:class:`ExtraTools`), a session a list and two more (:class:`ExtraSession`). Both keep their
own deadlines. Of what they raise, an :class:`ExtraToolFault` costs the episode, which is tried again; an
:class:`ExtraToolsNotStarted` or a :class:`ConfigError` ends the run. What the policy did wrong is neither,
but a result with ``error`` set.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from mua.environment.executors import EnvironmentHandle
from mua.environment.protocol import Task, ToolResult
from mua.environment.requests import CallRequest, Request, ResetRequest, ToolLists, WrongResult, checked_answer
from mua.environment.threads import CallOutcome
from mua.types import Json, ToolSchema
from mua.utils.errors import ConfigError, EnvironmentFault, MuaError

log = logging.getLogger(__name__)


class ExtraToolFault(EnvironmentFault):
    """A source failed in an episode, which is tried again. The message names the source."""

    passing = True


class ExtraToolsNotStarted(MuaError):
    """A source cannot be had at all. No episode's fault to be retried: it ends the run."""


class ExtraTool(NamedTuple):
    """One tool, and what a message says of it where its name is taken."""

    schema: ToolSchema
    owner: str
    """Who has it, such as ``the server 'files'``."""
    fix: str
    """How a person gives it another name."""


class ExtraSession(Protocol):
    """What one rollout has of a source. Calls come one at a time."""

    @property
    def tools(self) -> Sequence[ExtraTool]:
        """The same from opening to closing."""

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """Run one of ``tools``. After a cancellation only :meth:`close` comes."""

    async def close(self) -> None:
        """Give back what the rollout held. Called exactly once, whatever happened before."""


class ExtraTools(Protocol):
    """A source of tools for the rollouts of one domain. Belongs to one event loop."""

    async def start(self) -> Sequence[ExtraTool]:
        """Get ready, and say which tools rollouts will have. Called again after it raised."""

    async def open(self, task: Task, seed: int) -> ExtraSession:
        """A session for one rollout, after :meth:`start`. A cancelled or failed opening leaves nothing behind."""

    async def close(self) -> None:
        """End everything. Every session has been closed before."""


def check_names(tools: Iterable[ExtraTool], own: Iterable[ToolSchema] = ()) -> None:
    """Raises :class:`ConfigError` for a name that occurs twice; ``own`` are the domain's tools."""
    owners = {schema.name: "the domain" for schema in own}
    for schema, owner, fix in tools:
        if schema.name in owners:
            raise ConfigError(f"environment: {owners[schema.name]} and {owner} both have a tool {schema.name!r}; {fix}")
        owners[schema.name] = owner


class Extras:
    """All sources of one domain in one run."""

    def __init__(self, sources: Sequence[ExtraTools]) -> None:
        self.sources = sources
        self._starting = asyncio.Lock()
        self._started = False

    async def start(self) -> None:
        """Start each source. Raises :class:`ConfigError` and :class:`ExtraToolsNotStarted`."""
        async with self._starting:
            if self._started:
                return
            found = await asyncio.gather(*(source.start() for source in self.sources), return_exceptions=True)
            check_names([tool for tools in _without_errors(found) for tool in tools])
            self._started = True

    async def open(self, task: Task, seed: int) -> RolloutExtras:
        """A session with each source; all or none."""
        await self.start()
        opening = [asyncio.ensure_future(source.open(task, seed)) for source in self.sources]
        try:
            return RolloutExtras(await asyncio.gather(*opening))
        except BaseException:
            for one in opening:
                one.cancel()
            opened = await asyncio.gather(*opening, return_exceptions=True)
            sessions = [one for one in opened if not isinstance(one, BaseException)]
            for error in await asyncio.gather(*(one.close() for one in sessions), return_exceptions=True):
                if isinstance(error, BaseException):
                    log.warning("closing a session of extra tools: %s", error)
            raise

    async def close(self) -> None:
        """Close each source, also where another cannot be closed."""
        closed = await asyncio.gather(*(source.close() for source in self.sources), return_exceptions=True)
        _without_errors(closed)


class RolloutExtras:
    """The sessions of one rollout, as one."""

    def __init__(self, sessions: Sequence[ExtraSession]) -> None:
        """Raises :class:`ConfigError` where two have a tool of one name."""
        self._sessions = sessions
        self._tools = [tool for session in sessions for tool in session.tools]
        check_names(self._tools)
        self._at: Mapping[str, ExtraSession] = {
            tool.schema.name: session for session in sessions for tool in session.tools
        }

    def has(self, request: CallRequest) -> bool:
        """Whether it is a call of one of these tools."""
        return not request.by_user and request.tool in self._at

    def beside(self, own: Sequence[ToolSchema]) -> tuple[ToolSchema, ...]:
        """The domain's ``own`` tools and these. Raises :class:`ConfigError` for a name that occurs twice."""
        check_names(self._tools, own)
        return (*own, *(tool.schema for tool in self._tools))

    async def call(self, request: CallRequest) -> ToolResult:
        """Run one tool; raises as the source does."""
        result = await self._at[request.tool].call(request.tool, request.arguments)
        answer: ToolResult = checked_answer(request, result)
        return answer

    async def close(self) -> None:
        """Close each session, also where another cannot be closed."""
        closed = await asyncio.gather(*(one.close() for one in self._sessions), return_exceptions=True)
        _without_errors(closed)


class HandleWithTools:
    """An environment's handle with extra tools beside it; see :class:`mua.environment.executors.EnvironmentHandle`."""

    closes_at_once = False

    def __init__(self, inner: EnvironmentHandle, extras: Extras) -> None:
        self._inner = inner
        self._extras = extras
        self._rollout: RolloutExtras | None = None

    async def run(self, request: Request, seconds: float) -> CallOutcome:
        try:
            if isinstance(request, ResetRequest) and self._rollout is None:
                self._rollout = await self._extras.open(request.task, request.seed)
            rollout = self._rollout
            if rollout is not None and isinstance(request, CallRequest) and rollout.has(request):
                return await rollout.call(request), None
        except (MuaError, WrongResult) as error:
            return None, error
        answer, raised = await self._inner.run(request, seconds)
        if raised is None and rollout is not None and isinstance(answer, ToolLists):
            try:
                answer = answer._replace(agent=rollout.beside(answer.agent))
            except ConfigError as error:
                return None, error
        return answer, raised

    async def close(self, seconds: float) -> BaseException | None:
        rollout, self._rollout = self._rollout, None
        failed: BaseException | None = None
        if rollout is not None:
            try:
                async with asyncio.timeout(seconds):
                    await rollout.close()
            except Exception as error:
                failed = error
        return await self._inner.close(seconds) or failed


def _without_errors[T](found: Iterable[T | BaseException]) -> list[T]:
    """``found``, or the first error among it raised."""
    good: list[T] = []
    for one in found:
        if isinstance(one, BaseException):
            raise one
        good.append(one)
    return good
