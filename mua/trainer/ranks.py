"""The ranks of a trainer: as many processes as the layout needs, and what rank 0 has all of them do together.

One command starts them, or torchrun already has. Loops are written as for one process.

::

    rank 0                                  every other rank
    works alone (rollouts, evaluation):     worker_loop(): waits as long as there are signs of life,
      a thread gives a sign of life ─────►    RankLost after so many silent seconds
    an announced() method ───────────────►  the same method with the same arguments, entered by all
    release() ───────────────────────────►  worker_loop() returns

So a wait lasts as long as what it waits for, whatever the deadlines of a rollout add up to, and ends soon after rank 0
did. Whatever rank 0 itself waits for has a deadline of its own.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist

from mua.config.schema import ExperimentConfig, MegatronConfig
from mua.launch.gpus import set_variables
from mua.utils.cores import bind_near
from mua.utils.errors import ConfigError, RankLost
from mua.utils.ports import LOOPBACK

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_PR_SET_PDEATHSIG = 1
_ENDING_SECONDS = 5.0
"""Its connections are closed a moment before a process has ended."""
_LOOK_SECONDS = 0.25
_started: list[subprocess.Popen[bytes]] = []
"""Ranks that this process has started."""
_meeting_point: TCPStore | None = None
"""Where they find each other, served by this process."""


def init_distributed(config: ExperimentConfig) -> None:
    """:func:`ensure_processes`, and make this one ready for its GPU: variables, cores."""
    set_variables(config)  # before CUDA starts; the ranks that this process starts have them too
    ensure_processes(config.megatron)
    import torch

    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available() and rank < torch.cuda.device_count():
        gpu: Any = torch.cuda.get_device_properties(rank)
        bind_near(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")


def ensure_processes(config: MegatronConfig) -> None:
    """Return in a process of the right world; a lone process of a larger layout becomes rank 0 and starts the others.

    They run the same command, end with this process, however it ends, and leave Ctrl-C to it. torchrun's own way, a
    supervisor above all ranks, would bury every error message under a traceback of its own and lose the exit status.

    Under torchrun (or srun with its variables) the world must fit the layout, or a :class:`ConfigError` says so.
    """
    needed = config.world_size
    if "WORLD_SIZE" in os.environ:
        if (given := int(os.environ["WORLD_SIZE"])) != needed:
            raise ConfigError(
                f"megatron: the layout needs {needed} processes (tensor x pipeline x context x data parallel), "
                f"but {given} were started; change megatron.data_parallel or the launcher"
            )
    elif needed > 1:
        # As torchrun does, this process serves the store at which they meet: a port that was only chosen could be taken
        # in the seconds before the ranks are there.
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        global _meeting_point
        _meeting_point = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        size, port = str(needed), str(_meeting_point.port)
        os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "RANK": "0", "LOCAL_RANK": "0"}
        for rank in range(1, needed):
            _start_rank(rank)

        def end_waits_when_a_rank_is_lost() -> None:  # those at the meeting point, which have no other end in time
            global _meeting_point
            while _started and not any(process.poll() for process in _started):
                time.sleep(_LOOK_SECONDS)
            _meeting_point = None

        threading.Thread(target=end_waits_when_a_rank_is_lost, name="ranks", daemon=True).start()


def is_rank0() -> bool:
    """Whether this process drives the run: rollouts, logs and decisions are its own."""
    return int(os.environ.get("RANK", "0")) == 0


def ended_ranks() -> list[str]:
    """Of the ranks that this process has started, those that are gone, in words; one that is about to go is awaited."""
    deadline = time.monotonic() + _ENDING_SECONDS
    while _started and time.monotonic() < deadline and all(process.poll() is None for process in _started):
        time.sleep(0.05)
    return _gone()


def check_ranks() -> None:
    """Raise :class:`RankLost` if a rank that this process has started is gone, which a rollout would not notice."""
    if gone := _gone():
        raise RankLost(f"{', '.join(gone)}; look above for what it said")


def _gone() -> list[str]:
    return [
        f"rank {rank} ended with status {process.returncode}"
        for rank, process in enumerate(_started, start=1)
        if process.poll() is not None
    ]


def abort_workers() -> None:
    """Kill the ranks that this process has started and wait until they are gone; torchrun ends its own."""
    for process in _started:
        process.kill()
    while _started:
        _started.pop().wait()


def _start_rank(rank: int) -> None:
    libc = ctypes.CDLL(None)

    def tie_to_parent() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    command, variables = [sys.executable, "-m", "mua.cli", *sys.argv[1:]], {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    _started.append(
        subprocess.Popen(command, env=os.environ | variables, stdin=subprocess.DEVNULL, preexec_fn=tie_to_parent)
    )


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

log = logging.getLogger(__name__)

_SIGNS_PER_SILENCE = 10
_CLOSE_SECONDS = 5.0
_LONGEST_PAUSE_S = 0.25
_SHORTEST_PAUSE_S = 0.0005
_CALL, _SIGN, _STOP = "call", "sign", "stop"
_LOST = re.compile(r"gloo|connection (was )?(likely )?(closed|reset|refused)|broken pipe|timed? ?out", re.IGNORECASE)


class Calls:
    """The meetings of one group of ranks. Make and use it on all of them; rank 0 gives signs of life until `close`."""

    def __init__(self, group: dist.ProcessGroup, silence_seconds: float) -> None:
        """Collective. After ``silence_seconds`` without a sign of life the others give rank 0 up."""
        self._group = group
        self._silence = silence_seconds
        # A connection of its own: other users of the group's may be in the middle of a long wait.
        self._store = dist.PrefixStore("calls", group.get_group_store().clone())  # type: ignore[attr-defined]
        self._leading = dist.get_rank() == 0
        self._count = 0
        self._closed = threading.Event()
        if self._leading:
            self._store.set(_CALL, "0")
            self._store.set(_SIGN, "0")

            def show_life() -> None:
                number = 0
                while not self._closed.wait(self._silence / _SIGNS_PER_SILENCE):
                    number += 1
                    try:
                        self._store.set(_SIGN, str(number))
                    except RuntimeError as error:
                        log.warning("no more signs of life for the other ranks: %s", _first_line(error))
                        return

            self._thread = threading.Thread(target=show_life, name="signs of life", daemon=True)
            self._thread.start()

    def meet(self) -> None:
        """On rank 0 returns at once; on the others when rank 0 has come here as often as they have.

        Raises :class:`RankLost` when rank 0 has ended or shows no sign of life.
        """
        self._count += 1
        if self._leading:
            self._store.set(_CALL, str(self._count))
            return
        heard: SimpleQueue[bool | RankLost] = SimpleQueue()
        count = self._count

        def listen() -> None:
            """Tell every sign of life as False, and that rank 0 has come to its meeting ``count`` as True."""
            started, sign = time.monotonic(), b""
            try:
                while int(self._store.get(_CALL)) < count:
                    if (latest := self._store.get(_SIGN)) != sign:
                        sign = latest
                        heard.put(False)
                    # A short wait is noticed at once, and a long one costs the store few questions.
                    time.sleep(min(_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S + (time.monotonic() - started) / 20))
                heard.put(True)
            except RuntimeError as error:
                heard.put(RankLost(f"rank 0 is gone ({_first_line(error)}); look at its log"))

        # Where rank 0 holds the store and is stopped, a question to it never returns, so another thread asks.
        threading.Thread(target=listen, name="listener", daemon=True).start()
        found: bool | RankLost = False
        while not found:
            try:
                found = heard.get(timeout=self._silence)
            except Empty:
                raise RankLost(
                    f"rank 0 gave no sign of life for {self._silence:g} s (trainer.silence_seconds); look at its log "
                    "and its machine"
                ) from None
        if isinstance(found, RankLost):
            raise found

    def announce(self, what: Any) -> Any:
        """``what`` of rank 0, on every rank. Raises :class:`RankLost` when a rank is gone."""
        self.meet()
        box = [what]
        with naming_lost_ranks():
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def worker_loop(self, collective: Any) -> None:
        """On every rank but 0: make the calls that rank 0 announces, of methods of ``collective``, until it releases.

        Raises :class:`RankLost` when it ends or falls silent before.
        """
        with naming_lost_ranks():
            while (call := self.announce(None)) != _STOP:
                name, arguments, named = call
                method = getattr(type(collective), name)
                getattr(method, "__wrapped__", method)(collective, *arguments, **named)

    def release(self) -> None:
        """On rank 0: let the others return from :meth:`worker_loop`. No more signs of life."""
        try:
            if self._leading:
                self.announce(_STOP)
        finally:
            self.close()

    def close(self) -> None:
        """No more signs of life. Safe to call twice."""
        self._closed.set()
        if self._leading:
            self._thread.join(_CLOSE_SECONDS)  # a store that does not answer would hold it


def announced(
    method: Callable[Concatenate[Any, Arguments], Result],
) -> Callable[Concatenate[Any, Arguments], Result]:
    """A collective method: called on rank 0, it is called on all ranks with the same arguments.

    Its object has ``calls``, or None there: then nothing is announced, for there is one process, or all ranks make the
    same calls by themselves.
    """

    @wraps(method)
    def call(self: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if self.calls is not None:
            self.calls.announce((method.__name__, args, kwargs))
        return method(self, *args, **kwargs)

    return call


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """A block of collectives. Raises :class:`RankLost` when it fails because a rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise lost_rank(error) or error from error


def lost_rank(error: BaseException) -> RankLost | None:
    """What a collective's error says about other ranks: that one has ended or does not answer; None of other errors."""
    if not isinstance(error, RuntimeError) or not (isinstance(error, dist.DistError) or _LOST.search(str(error))):
        return None
    ended = ", ".join(ended_ranks())
    return RankLost(f"{ended or 'another rank is gone or does not answer'}; look at its log ({_first_line(error)})")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
