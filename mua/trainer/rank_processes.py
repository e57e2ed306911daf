"""As many trainer processes as the layout needs: one command starts them, or torchrun already has."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

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
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    libc = ctypes.CDLL(None)

    def tie_to_parent() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    process = subprocess.Popen(
        [sys.executable, "-m", "mua.cli", *sys.argv[1:]],
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        preexec_fn=tie_to_parent,
    )
    _started.append(process)
