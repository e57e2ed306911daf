"""Checkpoint writing of Megatron-Core without a helper process that outlives its parent.

Upstream: megatron-core 0.19.2, ``dist_checkpointing/strategies/filesystem_async.py``. To hand results from
its writers to the trainer it starts a ``multiprocessing`` manager by spawn, also when the trainer itself does the
writing: seconds of start-up at the first save, the main script imported a second time, and, after ``kill -9`` of the
trainer, a process that nobody ends. :mod:`mua.megatron.checkpoint` writes in this process, in a thread of it if in the
background, so both ends of that queue are here and a plain queue serves.
Goes when: ``tests/unit/test_megatron_compat.py::test_upstream_checkpoint_still_starts_a_manager`` fails.
"""

from __future__ import annotations

import queue
from typing import Any


def repair(module: Any, without_cuda: bool) -> None:
    """Gives the imported ``filesystem_async`` module a queue within the process."""
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    module.get_write_results_queue = lambda *_, **__: results
