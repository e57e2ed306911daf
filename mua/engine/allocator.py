"""What torch's allocator must not do where engines share GPUs with the trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mua.config.schema import EngineConfig
from mua.utils.errors import ConfigError

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""By which torch's allocator is configured; the second and third are older names that it still reads."""


def expandable(value: str) -> bool:
    """Whether a setting of torch's allocator asks for expandable segments."""
    pairs = (part.partition(":") for part in value.split(","))
    return any(key.strip() == "expandable_segments" and on.strip().lower() in ("true", "1") for key, _, on in pairs)


def refuse_expandable_segments(config: EngineConfig, environment: Mapping[str, str] | None = None) -> None:
    """Refuse ``expandable_segments`` for ranks and engines whose memory is released or handed on.

    torch then maps its segments itself: torch_memory_saver, which maps an engine's memory in order to release it, does
    not work beside that, and CUDA IPC hands such memory to another process only where that may copy file descriptors of
    this one (``pidfd_getfd``), which containers rarely allow.

    Args:
        environment: of ranks and engines; None: this process's.

    Raises:
        ConfigError: names the variable, the keys that need it off, and the fix.
    """
    keys = ["engine.memory_saver: true"] * config.memory_saver
    keys += ["engine.transport: colocated"] * (config.transport != "broadcast")
    if not keys:
        return
    environment = os.environ if environment is None else environment
    for name in ALLOCATOR_VARIABLES:
        if expandable(value := environment.get(name, "")):
            raise ConfigError(
                f"{name}={value}: expandable segments can be neither released nor handed to an engine on the same GPU, "
                f"which {' and '.join(keys)} needs; take expandable_segments out of the variable"
            )
