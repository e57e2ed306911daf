"""Rows of zeros behind the tokens of each expert, which the fp8 kernels want."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGN = 16
"""For all recipes but MXFP8."""


class Fp8Padding(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or _ALIGN

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        wanted = _padded(m_splits, self.num_gemms, self.align_size)
        parts = zip(inp.split(m_splits), m_splits, wanted, strict=True)
        return torch.cat([F.pad(part, (0, 0, 0, new - old)) for part, old, new in parts]), wanted


class Fp8Unpadding(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or _ALIGN

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        parts = inp.split(_padded(m_splits, self.num_gemms, self.align_size))
        return torch.cat([part[:rows] for part, rows in zip(parts, m_splits, strict=True)])


def _padded(m_splits: list[int], num_gemms: int, align_size: int) -> list[int]:
    assert len(m_splits) == num_gemms, "Number of splits should match number of GEMMs."
    return [-(-rows // align_size) * align_size for rows in m_splits]
