"""A worker process: ``python -m mua.environment.worker``, started by :mod:`mua.environment.processes`.

::

    stdin (a socket) ──► reader thread ──► queue ──► main thread: one request after the other
         │ end of file: the run has closed it, or is dead                │
         └── environments left are closed, and the process group dies ◄──┘

It is told a domain's name and configuration and keeps many instances' environments. Coroutine methods run on an event
loop of the worker, one request at a time like all others. The reader thread sees the end of the socket also while a
call hangs in Python; a call that holds the interpreter lock for ever is ended by a timer of ``faulthandler``, which
needs no lock, shortly after its deadline.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable
from contextlib import suppress
from functools import cached_property
from queue import SimpleQueue
from typing import Any, TypeAlias

from mua.config.schema import EnvironmentConfig
from mua.environment.domain import Configurable, Domain, DomainLifecycle, Owner
from mua.environment.protocol import Environment
from mua.environment.registry import get_domain
from mua.environment.requests import answer_json, checked_answer, error_json, packed, read_request
from mua.types import Json

GRACE_S = 2.0
"""After the run has gone: time for the call under way and for closing environments."""
_LONGEST_S = 1e6
_Inbox: TypeAlias = "SimpleQueue[bytes | None]"


class Worker:
    """The environments of one domain, by instance."""

    def __init__(self, domain: Domain, seconds: float = 60.0) -> None:
        """``seconds`` are the deadline of the domain's own start and stop."""
        self._domain = domain
        self._lifecycle = DomainLifecycle(domain, seconds)
        self._environments: dict[int, Environment] = {}

    def start(self) -> None:
        """Start what the domain owns."""
        if isinstance(self._domain, Owner):
            self._loop.run_until_complete(self._lifecycle.start())

    def answer(self, message: Json) -> bytes:
        """Do what a line asks, and the line that answers it. Never raises."""
        try:
            instance = message["instance"]
            if message["do"] == "close":
                self._close(instance)
                return packed({"answer": None})
            request = read_request(message)
            if instance not in self._environments:
                self._environments[instance] = self._domain.environment()
            answer = request.perform(self._environments[instance])
            if inspect.isawaitable(answer):
                answer = self._loop.run_until_complete(_awaited(answer))
            return packed({"answer": answer_json(checked_answer(request, answer))})
        except BaseException as error:
            return packed(error_json(error))

    def close(self) -> None:
        """Close every environment that is left, then stop what the domain owns."""
        for instance in list(self._environments):
            with suppress(BaseException):
                self._close(instance)
        if isinstance(self._domain, Owner):
            with suppress(BaseException):
                self._loop.run_until_complete(self._lifecycle.stop())

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """Made when it is first needed: it holds two sockets."""
        return asyncio.new_event_loop()

    def _close(self, instance: int) -> None:
        environment = self._environments.pop(instance, None)
        closing = None if environment is None else environment.close()
        if inspect.isawaitable(closing):
            self._loop.run_until_complete(_awaited(closing))


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def main() -> None:
    """Serve until the socket ends."""
    for asked in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(asked, signal.SIG_IGN)  # Ctrl-C and a cluster's notice to leave are the run's to handle
    wire = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)
    inbox: _Inbox = SimpleQueue()
    threading.Thread(target=_read, args=(wire, inbox), daemon=True).start()
    # An OSError says that the run has gone.
    with suppress(OSError), open(os.devnull, "wb") as nothing:
        worker: Worker | None = None
        if (hello := inbox.get()) is not None:
            try:
                message = json.loads(hello)
                config = EnvironmentConfig.model_validate_json(message["config"])
                worker = Worker(configured_domain(message["domain"], config), config.reset_seconds)
                worker.start()
            except BaseException as error:
                worker = None
                wire.sendall(packed(error_json(error)))
            else:
                wire.sendall(packed({"answer": "ready"}))
        while worker is not None and (line := inbox.get()) is not None:
            message = json.loads(line)
            seconds = min(message["seconds"], _LONGEST_S) + GRACE_S
            faulthandler.dump_traceback_later(seconds, exit=True, file=nothing)
            answer = worker.answer(message)
            faulthandler.cancel_dump_traceback_later()
            wire.sendall(answer)
        if worker is not None:
            worker.close()
    _end()


def configured_domain(name: str, config: EnvironmentConfig) -> Domain:
    """The domain as the run has it, without endpoints."""
    domain = get_domain(name)
    if not isinstance(domain, Configurable):
        return domain  # the run has seen that nothing is set which it lacks
    from mua.environment.endpoint.services import Services  # brings clients of endpoints, which take long to import

    return domain.configured(config.of_domains, Services())


def _read(wire: socket.socket, inbox: _Inbox) -> None:
    with suppress(OSError):
        for line in wire.makefile("rb"):
            inbox.put(line)
    inbox.put(None)
    time.sleep(GRACE_S)
    _end()


def _end() -> None:
    """End this process and all that its environments started."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
