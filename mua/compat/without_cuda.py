"""Work of Megatron-Core on the meta device, on a machine with CUDA: done by a process that sees none.

Upstream: megatron-core 0.19.2. Its source names CUDA (``device='cuda'``, ``torch.cuda.get_rng_state()``, parameters
that must be of type ``torch.cuda.FloatTensor``). Only as :mod:`mua.compat.megatron_cpu` loads it, which that does where
there is no CUDA, does it build model and optimizer on the meta device. On an H200 ``mua plan`` ended with ``TypeError:
tuple indices must be integers or slices, not torch.device``.
Goes when: Megatron-Core builds a DistributedOptimizer of parameters on the meta device where CUDA is there.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from mua.utils.errors import MuaError

P = ParamSpec("P")
T = TypeVar("T")
SECONDS = 900.0
"""Deadline of the process; building the meta model of the largest recipe takes some seconds."""
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def without_cuda(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``work`` returns; where there is CUDA, of a process of its own that sees none.

    ``work`` is a function of a module; it, its arguments and its result are pickled. What it raises is raised here.

    Raises:
        MuaError: the process ended without a result, or not within :data:`SECONDS`.
    """
    if not torch.cuda.is_available():
        return work(*args, **kwargs)
    with tempfile.TemporaryDirectory(prefix="mua-without-cuda-") as name:
        task, result = Path(name, "task"), Path(name, "result")
        task.write_bytes(pickle.dumps((work, args, kwargs)))
        variables = {key: value for key, value in os.environ.items() if key not in _OF_TORCHRUN}
        variables |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", __name__, str(task), str(result)]
        try:
            status = subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, timeout=SECONDS).returncode
        except subprocess.TimeoutExpired:
            raise MuaError(f"{work.__qualname__} in a process without CUDA did not end within {SECONDS:g} s") from None
        if not result.is_file():
            raise MuaError(f"{work.__qualname__} in a process without CUDA ended with status {status} and no result")
        raised, value = pickle.loads(result.read_bytes())  # written by the process that was just started
    if raised:
        raise value
    found: T = value
    return found


if __name__ == "__main__":
    work, args, kwargs = pickle.loads(Path(sys.argv[1]).read_bytes())
    answer: tuple[bool, Any]
    try:
        answer = (False, work(*args, **kwargs))
    except Exception as error:
        answer = (True, error)
    Path(sys.argv[2]).write_bytes(pickle.dumps(answer))
