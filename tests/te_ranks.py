"""Ranks that find Transformer Engine: the processes of ``tests/distributed.py`` with the stand-in on their import path.

Megatron-Core looks for Transformer Engine while it is imported, and the ranks of a test are forked from a server that
has imported it without. So a second such server is started from a small process of its own, which has ``tests/te`` in
front of its path and passes calls on as bytes; it imports neither torch nor Megatron itself.

    this process ── pickled call ──► passer ── tests.distributed.run_on_workers ──► ranks with Transformer Engine
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.distributed import RanksFailed, run_on_workers

STAND_IN = Path(__file__).parent / "te"


def run_with_transformer_engine(world: int, function: Callable[..., Any], *args: Any, seconds: float = 240.0) -> Any:
    """:func:`tests.distributed.run_on_workers` on ranks that build models as a Hopper GPU with Transformer Engine.

    Raises:
        RanksFailed: as there.
    """
    return _passer().call((world, pickle.dumps((sys.path, pickle.dumps((function, args)))), seconds), seconds)


class _Passer:
    """The small process, and the one call that it has at a time."""

    def __init__(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        paths = [STAND_IN, STAND_IN.parents[1], STAND_IN.parent, os.environ.get("PYTHONPATH", "")]
        # Megatron compiles small functions, SwiGLU among them; uncompiled they compute the same.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)).rstrip(os.pathsep), "TORCH_COMPILE_DISABLE": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.te_ranks", str(theirs.fileno())]
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        self._pipe: Connection[Any, Any] = ours
        self._lock = threading.Lock()
        atexit.register(self.stop)

    def call(self, message: tuple[int, bytes, float], seconds: float) -> Any:
        with self._lock:
            self._pipe.send(message)
            if not self._pipe.poll(seconds + 60.0):
                raise RanksFailed("the ranks with Transformer Engine did not answer in time")
            succeeded, value = self._pipe.recv()
        if not succeeded:
            raise RanksFailed(value)
        return [pickle.loads(result) for result in value]

    def stop(self) -> None:
        self._pipe.close()  # it ends, and its ranks with it
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()


_passer = cache(_Passer)


def called(payload: bytes) -> bytes:
    """On a rank: what is called as on a GPU."""
    from mua.megatron.capabilities import pretending

    paths, call = pickle.loads(payload)
    sys.path += [path for path in paths if path not in sys.path]
    function, args = pickle.loads(call)
    with pretending(gpu()):
        return pickle.dumps(function(*args))


def gpu() -> Any:
    """A Hopper GPU with the Transformer Engine that is on the import path."""
    from mua.megatron.capabilities import Capabilities

    version = importlib.import_module("transformer_engine").__version__
    return Capabilities(cuda=True, compute=(9, 0), torch="2.14.1", transformer_engine=version)


def _pass(calls: Connection) -> None:
    while True:
        try:
            world, payload, seconds = calls.recv()
        except EOFError:
            return
        try:
            calls.send((True, run_on_workers(world, called, payload, seconds=seconds)))
        except RanksFailed as error:
            calls.send((False, str(error)))
        except BaseException:
            calls.send((False, traceback.format_exc()))


if __name__ == "__main__":
    from tests import te_ranks  # under its own name, for the functions that are pickled

    te_ranks._pass(Connection(int(sys.argv[1])))
