"""Starting and stopping what a domain holds for its environments (:class:`mua.environment.domain.Owner`)."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from mua.environment.domain import Domain, Owner
from mua.utils.errors import MuaError, one_line

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

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

    @property
    def owns(self) -> bool:
        """Whether the domain has a start and a stop of its own."""
        return self._owner is not None

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
