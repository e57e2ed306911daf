"""Runs a function on several processes that share a gloo process group, with a deadline and readable failures.

The processes are forked from a server that has imported the training backend once and computed nothing, so each one
starts in a fraction of a second and with clean state. Two ways to use them:

* :func:`run_distributed` starts new processes for the call and kills them after it: for what changes a process, and to
  hold what the other way finds against;
* :func:`run_on_workers` keeps one set of ranks for every world size, each with one torch.distributed world for all of
  its calls: for grids of many small runs. Process groups are made once for (ranks, description) and used again, all of
  a rank's on one gloo device, so that a rank's threads do not grow with its calls. A call that fails takes the set
  with it, and the next call starts a new one.
"""

from __future__ import annotations

import atexit
import functools
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
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "mua.trainer.learner",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
    ]
)

_WORLD_SECONDS = 1800.0
"""Deadline of a collective in ranks that stay; a call's own deadline, which ends the ranks, is shorter."""
_GLOO_THREADS = 2
"""Of each process group; with one, and connections made when first used, eight ranks can wait for each other."""


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
    own = _Ranks(ranks, stay=False)
    try:
        return own.run(function, args, seconds)
    finally:
        own.stop()


def run_on_workers(world: int, function: Callable[..., Any], *args: Any, seconds: float = 240.0) -> list[Any]:
    """As :func:`run_distributed`, in processes that stay for later calls; what ``function`` leaves behind stays too.

    ``function`` must leave the process group it runs in as it is, and no collective of it pending.
    """
    return _KEPT.run(world, function, args, seconds)


class _Ranks:
    """As many processes as a process group has ranks, that wait for calls."""

    def __init__(self, count: int, *, stay: bool) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        for rank in range(count):
            ours, theirs = _CONTEXT.Pipe()
            # Not daemonic: a checkpoint's writers are children of the rank.
            process = _CONTEXT.Process(target=_serve, args=(theirs, rank, count, self._folder.name, stay))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        return _collect(self._pipes, time.monotonic() + seconds)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


class _Kept:
    """One set of ranks for every world size that was asked for."""

    def __init__(self) -> None:
        self._sets: dict[int, _Ranks] = {}

    def run(self, world: int, function: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> list[Any]:
        ranks = self._sets.pop(world, None) or _Ranks(world, stay=True)
        try:
            results = ranks.run(function, args, seconds)
        except BaseException:
            ranks.stop()
            raise
        self._sets[world] = ranks
        return results

    def stop(self) -> None:
        while self._sets:
            self._sets.popitem()[1].stop()


_KEPT = _Kept()
atexit.register(_KEPT.stop)


def _serve(calls: Connection, rank: int, ranks: int, folder: str, stay: bool) -> None:
    """Joins the group of these ranks and answers calls until one fails or the parent is gone."""
    import torch
    import torch.distributed as dist

    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    made = _reuse_groups() if stay else []
    while True:
        try:
            function, args = calls.recv()
        except EOFError:
            return
        try:
            if not dist.is_initialized():
                timeout = timedelta(seconds=_WORLD_SECONDS)
                store = f"file://{folder}/store"
                dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timeout)
            result = function(*args)
            dist.barrier()
            while made:
                dist.destroy_process_group(made[-1])
        except BaseException:
            calls.send((False, traceback.format_exc()))
            return
        calls.send((True, result))


def _reuse_groups() -> list[Any]:
    """Makes this process's named groups once and for all, on one gloo device.

    Every gloo device has a thread that polls, every group some that work; Megatron makes about fifty groups for each
    layout, and a process with hundreds of threads is slow.

    Returns:
        a list to which every group without a description is added, for the caller to end: two that are alike may be
        in use at once.
    """
    import torch.distributed as dist

    share_a_device()
    kept: dict[Any, Any] = {}
    made: list[Any] = []
    new_group, destroy = dist.new_group, dist.destroy_process_group

    def reused(ranks: Sequence[int] | None = None, *args: Any, group_desc: str | None = None, **settings: Any) -> Any:
        key = (None if ranks is None else tuple(ranks), group_desc)
        if key in kept:
            return kept[key]
        group = new_group(ranks, *args, **(settings | {"group_desc": group_desc}))
        if group_desc is not None:
            kept[key] = group
        elif group is not dist.GroupMember.NON_GROUP_MEMBER:
            made.append(group)
        return group

    def destroy_unless_kept(group: Any = None) -> None:
        if group in made:
            made.remove(group)
        if group is None or not any(group is known for known in kept.values()):
            destroy(group)

    dist.new_group, dist.destroy_process_group = reused, destroy_unless_kept
    return made


@functools.cache
def share_a_device() -> None:
    """All gloo groups that this process makes from now on poll in one thread instead of one each."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import ProcessGroup, ProcessGroupGloo

    gloo: Any = ProcessGroupGloo
    device = gloo.create_default_device(lazy_init=False)

    def create(group: Any, _: Any) -> Any:
        options = gloo._Options()
        options._devices, options._threads, options._timeout = [device], _GLOO_THREADS, group.timeout
        options.global_ranks_in_group, options.group_name = group.global_ranks_in_group, group.group_id
        return gloo(group.store, group.group_rank, group.group_size, options)

    dist.Backend.register_backend(
        "gloo", create, extended_api=True, devices=["cpu", "cuda"], _backend_type=ProcessGroup.BackendType.GLOO
    )


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


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
