"""What Megatron-Core sees instead of ``torch.cuda`` on a machine without CUDA.

Used only by :mod:`mua.compat.megatron_cpu`, whose docstring gives the reason, the upstream version and the test that
says when it can go.
"""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class CudaEvent:
    """``torch.cuda.Event`` for a device that finishes every call before it returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = 0.0

    def record(self, *_: Any) -> None:
        self._time = time.perf_counter()

    def wait(self, *_: Any) -> None:
        """Nothing is ever pending."""

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: CudaEvent) -> float:
        """Milliseconds from this event to ``end``."""
        return (end._time - self._time) * 1e3


class CudaStream:
    """``torch.cuda.Stream`` for a device with a single, synchronous queue."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes and ignores what ``torch.cuda.Stream`` takes."""

    def wait_stream(self, stream: CudaStream) -> None:
        """Nothing is ever pending."""

    def wait_event(self, event: CudaEvent) -> None:
        """Nothing is ever pending."""

    def record_event(self, event: CudaEvent | None = None) -> CudaEvent:
        event = event or CudaEvent()
        event.record()
        return event

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class CudaStandIn(types.ModuleType):
    """The part of ``torch.cuda`` that Megatron-Core uses, on the CPU. Any other name is torch's own."""

    def __init__(self) -> None:
        super().__init__("mua.compat.cuda_stand_in.cuda")
        self.Event, self.Stream = CudaEvent, CudaStream
        self._stream = CudaStream()
        self.nvtx = types.SimpleNamespace(
            range=lambda *_: contextlib.nullcontext(), range_push=lambda *_: None, range_pop=lambda *_: None
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, *_: Any) -> None:
        """There is one device."""

    def is_available(self) -> bool:
        return False

    def synchronize(self, *_: Any) -> None:
        """Nothing is ever pending."""

    def empty_cache(self) -> None:
        """The CPU allocator keeps no cache."""

    def current_stream(self, *_: Any) -> CudaStream:
        return self._stream

    def default_stream(self, *_: Any) -> CudaStream:
        return self._stream

    @contextlib.contextmanager
    def stream(self, _: CudaStream) -> Iterator[None]:
        yield

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def max_memory_allocated(self, *_: Any) -> int:
        return 0

    def memory_allocated(self, *_: Any) -> int:
        return 0


def cuda_type_name(tensor: Any) -> Any:
    """``tensor.type()`` as it would read on a GPU: ``torch.cuda.FloatTensor`` for a float32 tensor on the CPU."""
    name = tensor.type()
    if isinstance(name, str) and name.endswith("Tensor"):
        return "torch.cuda." + name.rsplit(".", 1)[-1]
    return name


def stay(tensor: T) -> T:
    """``tensor.cuda()`` where the tensor already lies on the only device."""
    return tensor
