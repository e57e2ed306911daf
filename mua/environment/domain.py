"""What a domain looks like: a named family of tasks. A new one implements these protocols and registers itself."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from mua.environment.protocol import Environment, Move, PromptStyle, Split, Task

if TYPE_CHECKING:
    from mua.config.schema import EnvironmentConfig
    from mua.environment.endpoint.services import Services
    from mua.environment.user import User
import asyncio
import logging
from typing import TYPE_CHECKING

from mua.utils.errors import MuaError, one_line

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any


class Domain(Protocol):
    """A named family of tasks: what the registry hands out. ``environments/<name>`` exports one as ``DOMAIN``.

    Five more attributes are optional: ``isolation`` (:data:`Isolation`; "thread" if absent), ``held_out`` (True: for
    evaluation only, its train split may be empty), ``needs_data`` (True: it has tasks only where ``environment.data``
    names a folder or package of them), ``scores_answers`` (True: it takes ``environment.scorer``) and
    ``user_in_tools`` (True: whoever talks with the policy does so through a tool, and ``scripted_user`` opens and
    nudges whatever ``user.kind`` says). So are some methods:
    :class:`Configurable`, :class:`Expert`, :class:`HasUserFacts`, :class:`Owner`, :class:`PerTaskPrompt`.
    """

    name: str

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of a split, in a fixed order. Splits are disjoint."""

    def environment(self) -> Environment:
        """A fresh environment, not yet reset."""

    def system_prompt(self, style: PromptStyle) -> str:
        """The agent's instructions. ``full`` holds the whole policy; ``short`` one line, for tiny models."""

    def persona(self, task: Task) -> str:
        """The system prompt of an LLM that plays this task's user."""

    def scripted_user(self, task: Task, seed: int) -> User:
        """A rule-based user for this task; ``seed`` varies its wording."""

    def gold(self, task: Task) -> Sequence[Move]:
        """A shortest way to success: tool calls, and texts to the user, that earn full reward whatever is answered.

        What the user has to do with tools of its own stands among them as :class:`UserMove`.
        """


@runtime_checkable
class Expert(Protocol):
    """A domain that can play the agent by rules: source of demonstrations, and proof that its tasks can be solved."""

    def expert(self, task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
        """Yield a move and be sent what came back: the tool's result, or the user's words.

        It learns what it needs by asking and by calling tools, as a policy would. ``loose`` is how often it departs
        from the prescribed way (another wording, a skipped step), for demonstrations that leave something to learn.
        """


@runtime_checkable
class HasPersona(Protocol):
    """A domain whose scripted users are of several kinds (:mod:`mua.users.personas`)."""

    peopled: Literal[True]

    def scripted_user(self, task: Task, seed: int, personas: Sequence[str] = ()) -> User:
        """One of ``personas``, or of all; otherwise :meth:`Domain.scripted_user`."""


@runtime_checkable
class Configurable(Protocol):
    """A domain with settings: another data folder, another form of reward, a judge."""

    def configured(self, config: EnvironmentConfig, services: Services) -> Domain:
        """This domain under ``config``; raises :class:`ConfigError` for what it cannot do."""


@runtime_checkable
class HasUserFacts(Protocol):
    """A domain that lists what the user of a task knows, so that what a language model says in that part can be checked
    (:mod:`mua.users.task_check`). Without it the persona and the texts of the task's data stand for it.
    """

    def known(self, task: Task) -> Mapping[str, Sequence[str]]:
        """Everything the user may state besides what the persona says, as texts by kind: ``{"email": [...]}``.

        Kinds are for people; a value may be written in any usual way. What the user may make up freely (a reason, any
        city) is listed with all its possible values, or left out of the persona.
        """

    def wishes(self, task: Task) -> Sequence[Mapping[str, Sequence[str]]]:
        """What the user wants, one entry a wish: the texts that tell it, such as ``{"verb": ["cancel"], "order":
        ["#W3680"]}``. A conversation is not over before each has been spoken of.

        ``"shown"`` lists what the user's own tools answer once all is well ("4 bars"): having just seen that, it may
        end. Of a wish without it any use of them lets it end.
        """


@runtime_checkable
class Owner(Protocol):
    """A domain that holds something for its environments: a client, a session, a connection of its own.

    The manager calls each once a run, on the event loop that coroutine methods run on, under
    ``environment.reset_seconds``: ``start`` before the first environment is built, ``stop`` after the last one is
    closed, also where ``start`` failed half-way. In worker processes each worker does so for itself.
    """

    async def start(self) -> None:
        """Take what is needed. An exception ends the run, with a message that names the domain."""

    async def stop(self) -> None:
        """Give it back. What it raises is logged."""


@runtime_checkable
class PerTaskPrompt(Protocol):
    """A domain whose instructions depend on the task."""

    def prompt_for(self, task: Task, style: PromptStyle) -> str:
        """The agent's instructions for ``task``; comes before :meth:`Domain.system_prompt`."""


def scripted_user(domain: Domain, task: Task, seed: int, personas: Sequence[str] = ()) -> User:
    """The domain's scripted user: one of ``personas``, where it has several kinds."""
    if isinstance(domain, HasPersona):
        return domain.scripted_user(task, seed, personas)
    return domain.scripted_user(task, seed)


def moves_of(domain: Domain, task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
    """The expert's moves; the gold ones, whatever is answered, where the domain has no expert."""
    return domain.expert(task, seed, loose) if isinstance(domain, Expert) else unanswered(domain.gold(task))


def unanswered(moves: Sequence[Move]) -> Generator[Move, str, None]:
    """``moves``, whatever is answered."""
    for move in moves:  # noqa: UP028 - a sequence cannot be sent what came back, as `yield from` would do
        yield move


log = logging.getLogger(__name__)


class DomainNotStarted(MuaError):
    """A domain's own start failed or hung. No episode's fault to be retried: it ends the run, and may pass."""

    passing = True


class DomainLifecycle:
    """The life of one domain in one run. Belongs to one event loop; does nothing for a domain that owns nothing."""

    def __init__(self, domain: Domain, seconds: float) -> None:
        """``seconds`` are the deadline of either; see ``environment.reset_seconds``."""
        self._name = domain.name
        self._owner = domain if isinstance(domain, Owner) else None
        self._seconds = seconds
        self._starting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the domain, once; whoever comes meanwhile waits for the same start and meets the same end.

        Raises :class:`DomainNotStarted`, or the domain's own :class:`MuaError`.
        """
        if self._owner is None:
            return
        if self._starting is None:
            work = self._within(self._owner.start(), "start")
            self._starting = asyncio.create_task(work, name=f"start domain {self._name}")
            # An exception that nobody is left to wait for is no surprise.
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._starting)

    async def stop(self) -> None:
        """Stop the domain, once, if it was started; what that raises is logged."""
        starting, self._starting = self._starting, None
        if self._owner is None or starting is None:
            return
        await asyncio.wait((starting,))
        try:
            await self._within(self._owner.stop(), "stop")
        except MuaError as error:
            log.warning("%s", error)

    async def _within(self, work: Coroutine[Any, Any, None], what: str) -> None:
        named = f"environment {self._name!r}: its {what}()"
        try:
            async with asyncio.timeout(self._seconds) as deadline:
                await work
        except MuaError:
            raise
        except TimeoutError as error:
            if not deadline.expired():
                raise DomainNotStarted(f"{named} raised {one_line(error)}") from error
            late = f"{named} did not return within {self._seconds:g} s (environment.reset_seconds)"
            raise DomainNotStarted(late) from None
        except Exception as error:
            raise DomainNotStarted(f"{named} raised {one_line(error)}") from error
