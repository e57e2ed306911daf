"""Rows of zeros behind the tokens of each expert, which the fp8 kernels want."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGN = 16
"""For all recipes but MXFP8."""


class _Aligned(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or _ALIGN

    def padded(self, m_splits: list[int]) -> list[int]:
        assert len(m_splits) == self.num_gemms, "Number of splits should match number of GEMMs."
        return [-(-rows // self.align_size) * self.align_size for rows in m_splits]


class Fp8Padding(_Aligned):
    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        wanted = self.padded(m_splits)
        parts = zip(inp.split(m_splits), m_splits, wanted, strict=True)
        return torch.cat([F.pad(part, (0, 0, 0, new - old)) for part, old, new in parts]), wanted


class Fp8Unpadding(_Aligned):
    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        parts = inp.split(self.padded(m_splits))
        return torch.cat([part[:rows] for part, rows in zip(parts, m_splits, strict=True)])
