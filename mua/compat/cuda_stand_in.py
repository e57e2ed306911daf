"""What Megatron-Core sees instead of ``torch.cuda`` on a machine without CUDA.

Used only by :mod:`mua.compat.megatron_cpu`, whose docstring gives the reason, the upstream version and the test that
says when it can go.
"""

from __future__ import annotations

import contextlib
import time
import types
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def _nothing(*_: Any, **__: Any) -> None:
    """The device is one, does what it is told at once, and keeps no cache: there is nothing to do or to wait for."""


class CudaEvent:
    """``torch.cuda.Event`` for a device that finishes every call before it returns."""

    wait = synchronize = _nothing

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = 0.0

    def record(self, *_: Any) -> None:
        self._time = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: CudaEvent) -> float:
        """Milliseconds from this event to ``end``."""
        return (end._time - self._time) * 1e3


class CudaStream:
    """``torch.cuda.Stream`` for a device with a single, synchronous queue."""

    wait_stream = wait_event = synchronize = _nothing

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes and ignores what ``torch.cuda.Stream`` takes."""

    def record_event(self, event: CudaEvent | None = None) -> CudaEvent:
        event = event or CudaEvent()
        event.record()
        return event

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class CudaStandIn(types.ModuleType):
    """The part of ``torch.cuda`` that Megatron-Core uses, on the CPU. Any other name is torch's own."""

    def __init__(self) -> None:
        super().__init__("mua.compat.cuda_stand_in.cuda")
        stream = CudaStream()
        vars(self).update(
            Event=CudaEvent,
            Stream=CudaStream,
            nvtx=types.SimpleNamespace(
                range=lambda *_: contextlib.nullcontext(), range_push=_nothing, range_pop=_nothing
            ),
            set_device=_nothing,
            synchronize=_nothing,
            empty_cache=_nothing,
            device_count=lambda: 1,
            is_available=lambda: False,
            current_stream=lambda *_: stream,
            default_stream=lambda *_: stream,
            stream=lambda _: contextlib.nullcontext(),
            manual_seed=torch.manual_seed,
            get_rng_state=lambda *_, **__: torch.get_rng_state(),
            set_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
            max_memory_allocated=lambda *_: 0,
            memory_allocated=lambda *_: 0,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return torch.device("cpu")


def cuda_type_name(tensor: Any) -> Any:
    """``tensor.type()`` as it would read on a GPU: ``torch.cuda.FloatTensor`` for a float32 tensor on the CPU."""
    name = tensor.type()
    if isinstance(name, str) and name.endswith("Tensor"):
        return "torch.cuda." + name.rsplit(".", 1)[-1]
    return name


def stay(tensor: T) -> T:
    """``tensor.cuda()`` where the tensor already lies on the only device."""
    return tensor
