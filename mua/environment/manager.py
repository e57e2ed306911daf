"""Instances of fresh environments: one per episode, under deadlines, always given back.

::

    instance() ── waits for a slot ──► build + reset ──► episode calls tools, one at a time
                    ▲                                           │ ends, raises, hangs or is cancelled
                    └────────────── slot freed ◄── close ◄──────┘

Where the methods run (:mod:`mua.environment.executors`, :mod:`mua.environment.processes`) is chosen by the domain or by
``environment.isolation``; an instance knows none of them. Closing runs where no cancellation of the episode reaches it.
A call that hangs leaves its environment unusable; what else it costs (a thread that is abandoned and counted in
``leaked_threads``, a worker process that is killed, a cancelled coroutine) depends on the place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, Literal

from mua.config.schema import EnvironmentConfig
from mua.environment.domain import Domain, DomainLifecycle
from mua.environment.executors import (
    EnvironmentHandle,
    HungCall,
    LocalExecutor,
    LostEnvironment,
)
from mua.environment.mcp.health import ServerNotStarted, ToolServerFault
from mua.environment.protocol import Evaluation, Isolation, Task, ToolResult, Transcript
from mua.environment.requests import CallRequest, EvaluateRequest, Request, ResetRequest, WrongResult, error_text
from mua.environment.tool_arguments import fitted
from mua.store.recorder import arguments_text, current_episode
from mua.types import Json, ToolSchema
from mua.utils.errors import ConfigError, EnvironmentFault, JudgeFault, MuaError, UserFault

if TYPE_CHECKING:
    from mua.environment.mcp.servers import ToolServers
    from mua.environment.processes import ProcessExecutor

_Limit = Literal["call_seconds", "reset_seconds"]
log = logging.getLogger(__name__)

THREADS = 32
"""Environment calls in execution at once. Tools are short and share one interpreter lock: more threads would
only make the event loop wait longer for its turn."""
MAX_LEAKED_THREADS = 64


class TooManyHungCalls(MuaError):
    """So many calls hang that the domain must be broken. Not an episode's fault to be retried: it ends the run."""


class EnvironmentInstance:
    """One environment, reset for one task, for one episode. Calls are queued, never overlapping."""

    def __init__(self, domain_name: str, task: Task, config: EnvironmentConfig, handle: EnvironmentHandle) -> None:
        self.task = task
        self._domain_name = domain_name
        self._config = config
        self._handle = handle
        self._tools: tuple[ToolSchema, ...] = ()
        self._schemas: dict[str, ToolSchema] = {}
        self.user_tools = InstanceUserTools(self)
        self._turn = asyncio.Lock()
        self._unusable: str | None = None

    def tools(self) -> tuple[ToolSchema, ...]:
        """The tools of this task, as they were right after the reset."""
        return self._tools

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """Run one tool under ``environment.call_seconds``.

        Raises :class:`EnvironmentFault` when the tool raises, hangs, takes its process with it or gives
        anything but a :class:`ToolResult`. After a hang or a cancelled call the environment is unusable.
        """
        return await self._run(CallRequest(name, self._fitted(name, arguments, self._schemas)), "call_seconds")

    async def user_call(self, name: str, arguments: Json) -> ToolResult:
        """Run one of the user's tools; raises like :meth:`call`."""
        fitted = self._fitted(name, arguments, {schema.name: schema for schema in self.user_tools.known})
        return await self._run(CallRequest(name, fitted, by_user=True), "call_seconds")

    async def evaluate(self, transcript: Transcript) -> Evaluation:
        """Judge the episode under ``environment.reset_seconds``; raises like :meth:`call`."""
        return await self._run(EvaluateRequest(transcript), "reset_seconds")

    async def reset(self, seed: int) -> None:
        """Build the environment and reset it; called once, by the manager, before the instance is handed out."""
        self._tools, self.user_tools.known = await self._run(ResetRequest(self.task, seed), "reset_seconds")
        self.know_tools(self._tools)

    def know_tools(self, schemas: Iterable[ToolSchema]) -> None:
        """There are these tools too from now on."""
        self._schemas |= {schema.name: schema for schema in schemas}

    async def close(self) -> str | None:
        """Close, once the call under way has ended or run out of time. Gives what went wrong, if anything did."""
        self._unusable = "its instance has ended"
        try:
            error = await self._handle.close(self._config.reset_seconds)
        except HungCall as hung:
            return self._hung("close()", "reset_seconds", hung)
        return None if error is None else self._raised("close()", error)

    async def _run(self, request: Request, limit: _Limit) -> Any:
        async with self._turn:
            if self._unusable is not None:
                raise EnvironmentFault(f"{self._named(request.name)} cannot run: {self._unusable}")
            try:
                answer, error = await self._handle.run(request, getattr(self._config, limit))
            except HungCall as hung:
                self._unusable = f"{request.name} hangs"
                raise EnvironmentFault(self._hung(request.name, limit, hung)) from None
            except LostEnvironment as lost:
                self._unusable = str(lost)
                raise EnvironmentFault(f"{self._named(request.name)}: {lost}") from None
            except asyncio.CancelledError:
                self._unusable = f"{request.name} was cancelled while it ran"
                raise
        if error is None:
            return answer
        if isinstance(error, ConfigError | UserFault | JudgeFault | ServerNotStarted | ToolServerFault):
            raise error
        raise EnvironmentFault(self._raised(request.name, error), passing=getattr(error, "passing", None)) from error

    def _fitted(self, name: str, arguments: Json, schemas: Mapping[str, ToolSchema]) -> Json:
        """The arguments as the environment is given them; see :func:`mua.environment.tool_arguments.fitted`."""
        return fitted(schemas[name], arguments) if name in schemas else arguments

    def _named(self, what: str) -> str:
        return f"environment {self._domain_name!r}, task {self.task.id!r}: {what}"

    def _raised(self, what: str, error: BaseException) -> str:
        said = str(error) if isinstance(error, WrongResult) else f"raised {error_text(error)}"
        return f"{self._named(what)} {said}"

    def _hung(self, what: str, limit: _Limit, hung: HungCall) -> str:
        seconds: float = getattr(self._config, limit)
        return f"{self._named(what)} did not return within {seconds:g} s (environment.{limit}); {hung}"


class InstanceUserTools:
    """The user's side of an instance; implements :class:`mua.environment.user.UserTools`."""

    def __init__(self, instance: EnvironmentInstance) -> None:
        self.known: tuple[ToolSchema, ...] = ()
        self._instance = instance
        self._taken: list[Json] = []

    def schemas(self) -> Sequence[ToolSchema]:
        """The user's tools, as they were right after the reset."""
        return self.known

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """Run one, and keep what was called and answered."""
        began, started = time(), perf_counter()
        values: Json = {"turn": 0, "name": name, "arguments": arguments_text(arguments), "by_user": True}
        values |= {"error": None, "reward": None}
        record = current_episode.get()
        try:
            result = await self._instance.user_call(name, arguments)
        except BaseException as error:
            if record is not None:
                failed = {"error": error_text(error), "seconds": perf_counter() - started}
                record.tool_call(began, None, **values | failed)
            raise
        if record is not None:
            text = result.text if isinstance(result.text, str) else None
            record.tool_call(began, text, **values | {"reward": result.reward, "seconds": perf_counter() - started})
        self._taken.append({"name": name, "arguments": arguments, "answer": result.text})
        return result

    def taken(self) -> list[Json]:
        """What was called since the last time this was asked."""
        taken, self._taken = self._taken, []
        return taken


def isolation_of(domain: Domain, config: EnvironmentConfig) -> Isolation:
    """Where the domain's environments run under ``config``."""
    return getattr(domain, "isolation", "thread") if config.isolation == "auto" else config.isolation


class EnvironmentManager:
    """Hands out instances, at most ``environment.max_instances`` at once. Belongs to one event loop."""

    def __init__(self, domain: Domain, config: EnvironmentConfig) -> None:
        self._domain = domain
        self._config = config
        self._executor: LocalExecutor | ProcessExecutor
        if (isolation := isolation_of(domain, config)) == "process":
            from mua.environment.processes import ProcessExecutor

            self._executor = ProcessExecutor(domain, config)
        else:
            self._executor = LocalExecutor(domain, THREADS if isolation == "thread" else 0)
        self._servers: ToolServers | None = None
        if servers := [one for one in config.mcp if not one.domains or domain.name in one.domains]:
            from mua.environment.mcp.servers import ToolServers  # brings the SDK, which takes long to import

            self._servers = ToolServers(servers)
        self._slots = asyncio.Semaphore(config.max_instances)
        self.instances = 0
        """Environments alive now, those being closed included."""
        self._closing: set[asyncio.Task[str | None]] = set()
        # Worker processes start the domain for themselves.
        self._lifecycle = DomainLifecycle(domain, config.reset_seconds) if isolation != "process" else None

    @property
    def leaked_threads(self) -> int:
        """Calls that hang past their deadline and still hold a thread."""
        return self._executor.hung

    @asynccontextmanager
    async def instance(self, task: Task, seed: int) -> AsyncIterator[EnvironmentInstance]:
        """A fresh environment, reset for ``task``; waits while ``max_instances`` are alive.

        That wait has no deadline of its own: it is the caller's queue, under the caller's deadline. Raises
        :class:`EnvironmentFault` when building, resetting or closing raises or hangs, and
        :class:`TooManyHungCalls` when ``MAX_LEAKED_THREADS`` calls hang already. The first instance starts the domain
        (:class:`mua.environment.domain.Owner`).
        """
        if self._lifecycle is not None:
            await self._lifecycle.start()
        await self._slots.acquire()
        if self.leaked_threads >= MAX_LEAKED_THREADS:
            self._slots.release()
            raise TooManyHungCalls(
                f"environment {self._domain.name!r}: {self.leaked_threads} calls hang in abandoned threads, so task "
                f"{task.id!r} is not started. Give the tools deadlines of their own, or raise "
                "environment.call_seconds and reset_seconds if they are only slow"
            )
        self.instances += 1
        instance = EnvironmentInstance(self._domain.name, task, self._config, self._handle(task))
        try:
            await instance.reset(seed)
            yield instance
        except BaseException:
            # The episode's own exception is the one to be seen; what closing adds to it goes to the log.
            if fault := await self._give_back(instance):
                log.warning(fault)
            raise
        if fault := await self._give_back(instance):
            raise EnvironmentFault(fault)

    async def start(self) -> None:
        """Start the tool servers; without it the first instance does so.

        Raises :class:`ConfigError` and :class:`mua.environment.mcp.health.ServerNotStarted`.
        """
        if self._servers is not None:
            await self._servers.start()

    async def close(self) -> None:
        """Wait for environments still being closed (under their deadlines), stop the domain, let tool servers,
        threads or workers go."""
        if self._closing:
            await asyncio.wait(self._closing)
        if self._servers is not None:
            await self._servers.close()
        if self._lifecycle is not None:
            await self._lifecycle.stop()
        await self._executor.close()

    def _handle(self, task: Task) -> EnvironmentHandle:
        inner = self._executor.handle(task)
        if self._servers is None:
            return inner
        from mua.environment.mcp.servers import HandleWithServers

        return HandleWithServers(inner, self._servers)

    async def _give_back(self, instance: EnvironmentInstance) -> str | None:
        task = asyncio.create_task(self._close(instance), name=f"close environment of {instance.task.id}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return await asyncio.shield(task)

    async def _close(self, instance: EnvironmentInstance) -> str | None:
        try:
            return await instance.close()
        finally:
            self.instances -= 1
            self._slots.release()
