"""The GPUs a plan can be made for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, from its vendor's datasheet. A gigabyte is 10^9 bytes, as there; drivers report a little more."""

    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes per second between memory and processor."""
    flops: float
    """Dense bfloat16 operations per second of the tensor cores, without sparsity."""
    source: str


GPUS: dict[str, Gpu] = {
    "A100-80": Gpu(80 * 10**9, 2.039e12, 312e12, "NVIDIA A100 80GB SXM datasheet"),
    "H100": Gpu(80 * 10**9, 3.35e12, 989e12, "NVIDIA H100 SXM datasheet (1,979 with sparsity)"),
    "H200": Gpu(141 * 10**9, 4.8e12, 989e12, "NVIDIA H200 SXM datasheet (1,979 with sparsity)"),
    "B200": Gpu(192 * 10**9, 8.0e12, 2250e12, "NVIDIA Blackwell datasheet (4,500 with sparsity)"),
}
