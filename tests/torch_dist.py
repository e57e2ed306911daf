"""Checkpoints as Megatron-LM leaves them, by Megatron-Core's own ``dist_checkpointing``."""

from __future__ import annotations

import pickle
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from mua.megatron.torch_dist import INDEX
from mua.trainer.learner import Learner
from tests.megatron_support import backend


def save_torch_dist(built: Learner, folder: Path) -> None:
    """The policy's weights and an object; collective."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()  # upstream's is a process, which takes long to start
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state: dict[str, Any] = {f"model{n}": chunk.sharded_state_dict() for n, chunk in enumerate(built.policy.chunks)}
    dist_checkpointing.save({**state, "iteration": 5, "args": {"lr": 0.1}}, folder)


def write_torch_dist(model: str, folder: str, layout: dict[str, Any]) -> None:
    """A checkpoint of the model folder ``model`` under a layout; by every rank."""
    with backend(Path(model), **layout) as built:
        save_torch_dist(built, Path(folder))


def change_index(folder: Path, change: Callable[[Any], None]) -> None:
    """Write the index again, after a change to it."""
    index = FileSystemReader(folder).read_metadata()
    change(index)
    (folder / INDEX).write_bytes(pickle.dumps(index))
