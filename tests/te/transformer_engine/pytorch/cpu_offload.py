"""The name that Megatron-Core imports; offload of activations needs a device to offload from."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

CPUOffloadEnabled = False


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> Any:
    """Megatron-Core asks for it always, and enters the context only where offloading is configured."""
    if enabled:
        raise NotImplementedError("the stand-in offloads nothing")
    return nullcontext(), lambda tensor: tensor
