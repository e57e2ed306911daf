"""Runs a function on several processes that share a gloo process group, with a deadline and readable failures.

The processes are forked from a server that has imported the training backend once and computed nothing, so each one
starts in a fraction of a second and with clean state. Two ways to use them:

* :func:`run_distributed` starts new processes for the call and kills them after it: for what changes a process;
* :func:`run_on_workers` keeps its processes for some calls and gives each call a new process group: for grids of many
  small runs. A call that fails takes the processes with it, and the next call starts new ones.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util  # its exit handler waits for children, so it must be registered before the pool's
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "mua.megatron.backend",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
    ]
)


_CALLS = 5
"""Calls a process serves before it is replaced: the threads of an ended gloo group (some forty a call) stay for as long
as Megatron's module state remembers the group, and a process with a thousand of them is slow."""


class RanksFailed(AssertionError):
    """Some ranks raised or did not answer in time; the message holds what each of them said."""


def run_distributed(function: Callable[..., Any], ranks: int, *args: Any, seconds: float = 240.0) -> list[Any]:
    """``function(*args)`` on every rank of a gloo process group of that size, in processes of its own.

    Args:
        function: importable by name; its result must be picklable and hold no torch tensors.
        seconds: deadline for all ranks together.

    Returns:
        the results in order of rank.

    Raises:
        RanksFailed: with the traceback of every rank that raised, and the names of those still running.
    """
    workers = _Workers()
    try:
        return workers.run(ranks, function, args, seconds)
    finally:
        workers.stop()


def run_on_workers(world: int, function: Callable[..., Any], *args: Any, seconds: float = 240.0) -> list[Any]:
    """As :func:`run_distributed`, in processes that stay for later calls; what ``function`` leaves behind stays too."""
    return _POOL.run(world, function, args, seconds)


class _Workers:
    """Processes that wait for calls; there are as many as the largest call so far needed."""

    def __init__(self) -> None:
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        self._calls = 0

    def run(self, ranks: int, function: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> list[Any]:
        if self._calls >= _CALLS:
            self.stop()
        self._calls += 1
        self._grow(ranks)
        pipes = self._pipes[:ranks]
        try:
            with tempfile.TemporaryDirectory() as folder:
                for rank, pipe in enumerate(pipes):
                    pipe.send((function, args, rank, ranks, folder, seconds))
                return _collect(pipes, time.monotonic() + seconds)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._calls = [], [], 0

    def _grow(self, count: int) -> None:
        while len(self._processes) < count:
            ours, theirs = _CONTEXT.Pipe()
            # Not daemonic: a checkpoint's writers are children of the rank.
            process = _CONTEXT.Process(target=_serve, args=(theirs,))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


_POOL = _Workers()
atexit.register(_POOL.stop)


def _serve(calls: Connection) -> None:
    """Answers calls until one fails or the parent is gone."""
    import torch

    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    while True:
        try:
            call = calls.recv()
        except EOFError:
            return
        try:
            result = _call(*call)
        except BaseException:
            calls.send((False, traceback.format_exc()))
            return
        calls.send((True, result))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, ranks: int, folder: str, seconds: float
) -> Any:
    import torch.distributed as dist

    store = f"file://{Path(folder) / 'store'}"
    timeout = timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timeout)
    result = function(*args)
    dist.barrier()
    dist.destroy_process_group()
    return result


def _collect(answers: Sequence[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {connection: rank for rank, connection in enumerate(answers)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RanksFailed(f"ranks {sorted(waiting.values())} did not answer in time")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            succeeded, value = _received(connection)
            if not succeeded:
                raise RanksFailed(f"rank {rank}:\n{value}{_other_failures(waiting)}")
            results[rank] = value
    return [results[rank] for rank in range(len(answers))]


def _received(connection: Connection) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = connection.recv()
    except (EOFError, ConnectionResetError):
        return False, "the process died without an answer"
    return answer


def _other_failures(waiting: dict[Connection, int]) -> str:
    """What the other ranks say within a second, which is where the cause often is."""
    text = ""
    for connection in wait(list(waiting), timeout=1.0):
        assert isinstance(connection, Connection)
        succeeded, value = _received(connection)
        if not succeeded:
            text += f"\nrank {waiting[connection]}:\n{value}"
    return text
