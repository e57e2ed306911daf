"""Checkpoint writing of Megatron-Core in this process, in a thread of it if in the background.

Upstream: megatron-core 0.19.2, ``dist_checkpointing/strategies/filesystem_async.py``. Its plan of a save is an
``AsyncRequest`` whose writer is a forked process, which would inherit CUDA, gloo's threads and the engine's connections
and outlive a trainer that is killed. To hand results from its writers to the trainer it starts a ``multiprocessing``
manager by spawn, also when the trainer itself does the writing: seconds of start-up at the first save, the main script
imported a second time, and, after ``kill -9`` of the trainer, a process that nobody ends. Here the files of a plan are
written by :func:`write_bucket`, one tensor after the other; both ends of that queue are in this process, and a plain
queue serves.
Goes when: ``tests/unit/test_megatron_compat.py::test_upstream_still_needs_the_import_hook`` fails.
"""

from __future__ import annotations

import io
import os
import queue
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

import torch
from torch.distributed.checkpoint.storage import WriteResult

from mua.compat.plain_index import StorageInfo
from mua.utils.checksums import HashingStream

Bucket: TypeAlias = tuple[str, str, tuple[list[Any], list[Any]]]
"""One file of a checkpoint: path, name, and what goes into it: pairs of an item with its bytes, or with its tensor."""


def buckets_of(request: Any, *, copied: bool) -> Sequence[Bucket]:
    """The files that upstream planned for this rank; ``copied``: with tensors that no later step changes.

    Else their tensors are those of the networks, on their device: the host never holds all of them.
    """
    if request.preload_fn is None:
        return []
    if not copied:
        planned: Sequence[Bucket] = request.async_fn_args[1]
        return planned
    buckets: Sequence[Bucket] = request.preload_fn()
    for (*_, (_, tensors)), (*_, (_, originals)) in zip(buckets, request.async_fn_args[1], strict=True):
        for index, ((item, tensor), (_, original)) in enumerate(zip(tensors, originals, strict=True)):
            if tensor is original:  # what came from a device is a copy already
                tensors[index] = (item, tensor.clone())
    return buckets


def write_bucket(bucket: Bucket) -> tuple[list[WriteResult], str]:
    """One file: objects as they are, tensors as ``torch.save`` makes them; what lies where, and its checksum."""
    path, name, (objects, tensors) = bucket
    results = []
    with Path(path).open("wb") as file:
        stream = HashingStream(file.fileno())
        for item, data in (*objects, *tensors):
            offset = stream.position
            if isinstance(data, io.BytesIO):
                stream.write(data.getbuffer())
            else:
                torch.save(data.cpu(), cast(IO[bytes], stream))
            length = stream.position - offset
            results.append(WriteResult(item.index, length, StorageInfo(name, offset, length)))
        os.fsync(file.fileno())
    tensors.clear()
    return results, stream.hexdigest()


def finish(request: Any, results: dict[int, list[WriteResult]]) -> None:
    """Upstream's end of a save: the first rank gathers where everything is and writes the index; collective."""
    if request.async_fn is not None:
        request.async_fn_args[2].put(results)
    for function in request.finalize_fns:
        function()


def repair(module: Any, without_cuda: bool) -> None:
    """Gives the imported ``filesystem_async`` module a queue within the process."""
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    module.get_write_results_queue = lambda *_, **__: results
