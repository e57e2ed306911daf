"""Which GPUs engines have, and by which address other machines reach the trainer.

colocated             GPUs of a node   0 1 2 3 4 5 6 7
                      trainer ranks    0 1 2 3 4 5 6 7
                      engines, TP 2    0 0 1 1 2 2 3 3

separate, nodes 0     trainer ranks    0 1 2 3
                      engines, TP 2            0 0 1 1

separate, nodes > 0   a trainer's node: all are trainer ranks; an engine node: all are engines
"""

from __future__ import annotations

import os
import socket

from mua.config.schema import EngineConfig, ExperimentConfig
from mua.engine.server import has_cuda
from mua.utils.errors import ConfigError
from mua.utils.ports import LOOPBACK


def local_ranks() -> int:
    """Trainer ranks of this machine, each with the GPU of its number."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def visible_gpus() -> int:
    """CUDA devices that this process sees."""
    import torch

    return torch.cuda.device_count() if has_cuda() else 0


def trains_beside_engines(config: ExperimentConfig) -> bool:
    """Whether the trainer's machines have engines too."""
    return config.placement == "colocated" or not config.engine.nodes


def first_engine_gpu(config: ExperimentConfig, ranks: int) -> int:
    """The first GPU of a trainer's machine with ``ranks`` ranks that is an engine's."""
    return 0 if config.placement == "colocated" else ranks


def check_trainer_machine(config: ExperimentConfig, ranks: int, gpus: int) -> None:
    """Raises :class:`ConfigError` when a trainer's machine with ``gpus`` CUDA devices lacks some for its engines, or
    when trainer ranks and engine ranks of one NCCL group would share a GPU. Without CUDA everything is possible."""
    if not gpus:
        return
    engine = config.engine
    if config.placement == "colocated" and engine.transport == "broadcast":
        raise ConfigError(
            "engine.transport: broadcast with placement colocated makes a trainer rank and an engine rank of one GPU "
            "members of one NCCL group, which NCCL refuses; set it to colocated, or placement to separate"
        )
    wanted = engine.count * engine.tensor_parallel
    if config.placement == "separate" and trains_beside_engines(config) and ranks + wanted > gpus:
        left = max(0, gpus - ranks)
        raise ConfigError(
            f"placement separate: {ranks} trainer ranks and engine.count {engine.count} x engine.tensor_parallel "
            f"{engine.tensor_parallel} need {ranks + wanted} GPUs, and this machine ({socket.gethostname()}) shows "
            f"{gpus}: {left} are left for engines; lower engine.count to {left // engine.tensor_parallel} or the "
            "layout's ranks, or give engines nodes of their own (engine.nodes)"
        )


def check_engine_machine(config: ExperimentConfig, gpus: int) -> None:
    """Raises :class:`ConfigError` when an engine node of ``gpus`` CUDA devices cannot be filled with engines."""
    count, tp = config.engine.count, config.engine.tensor_parallel
    if not gpus:
        return
    if gpus % tp:
        raise ConfigError(
            f"engine.tensor_parallel {tp} does not divide the {gpus} GPUs of this machine ({socket.gethostname()}): "
            f"{gpus % tp} would be left over; choose a divisor of {gpus}, or show fewer with CUDA_VISIBLE_DEVICES"
        )
    if count * tp > gpus:
        raise ConfigError(
            f"engine.count {count} x engine.tensor_parallel {tp} needs {count * tp} GPUs, and this machine "
            f"({socket.gethostname()}) shows {gpus}; set engine.count to {gpus // tp}"
        )


def trainer_address(engine: EngineConfig) -> str:
    """Address by which engine nodes reach the trainer's first node; see ``engine.address``."""
    if engine.address is not None:
        return engine.address
    given = os.environ.get("MASTER_ADDR", LOOPBACK)
    if engine.nodes and given in (LOOPBACK, "localhost"):
        return socket.gethostbyname(socket.gethostname())
    return given


def address_towards(host: str, port: int) -> str:
    """Address of this machine by which ``host`` sees it; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 1))
        return str(probe.getsockname()[0])
