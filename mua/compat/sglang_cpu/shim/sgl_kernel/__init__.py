"""Stand-in for ``sgl_kernel`` on hosts without CUDA: the names SGLang's CPU engine imports, and one function.

Reason: every wheel of ``sgl-kernel`` / ``sglang-kernel`` on PyPI links libcuda and libnvrtc. Upstream: sglang
0.5.23. ``torch.ops.sgl_kernel.convert_weight_packed`` stays undefined deliberately: SGLang then knows that there
is no AMX and gives every layer its plain PyTorch forward. The functions it imports by name serve speculative
decoding and linear attention; they refuse when called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.0.0+mua"

_MASK = 0xFFFFFFFF


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Hash (seed, position, column) to uint32 ``[n, m]``; ``seed`` and ``positions`` are ``[n]``, ``columns`` ``[m]``.

    MurmurHash3 x86 32-bit (A. Appleby, public domain) on int64 tensors. The key is 16 bytes: the seed's low and high
    word, the position, the column.
    """
    seed = seed.to(torch.int64).view(-1, 1)
    position = positions.to(torch.int64).view(-1, 1) & _MASK
    column = columns.to(torch.int64).view(1, -1) & _MASK
    state = torch.zeros_like(seed)
    for word in (seed & _MASK, (seed >> 32) & _MASK, position, column):
        word = (word * 0xCC9E2D51) & _MASK
        word = ((word << 15) | (word >> 17)) & _MASK
        state = state ^ ((word * 0x1B873593) & _MASK)
        state = ((state << 13) | (state >> 19)) & _MASK
        state = (state * 5 + 0xE6546B64) & _MASK
    # The finalizer: avalanche all bits.
    state = state ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return (state ^ (state >> 16)).to(torch.uint32)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu") and name not in {"silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"}:
        raise AttributeError(f"module 'sgl_kernel' (CPU stand-in) has no attribute {name!r}")

    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no CPU implementation here; do not use the feature that calls it"
        )

    refuse.__name__ = name
    return refuse
