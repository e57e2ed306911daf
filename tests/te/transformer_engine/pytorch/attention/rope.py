"""Rotary embedding by given angles (``sbhd``, ``bshd``) or by cumulative lengths (``thd``)."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Angles ``freqs`` ``[s2, 1, 1, d2]``: row i belongs to position i, of the tensor or of each packed sequence."""
    assert tensor_format in ("sbhd", "bshd", "thd"), f"Unsupported tensor_format: {tensor_format}."
    assert (freqs.dim(), *freqs.shape[1:3]) == (4, 1, 1), "expected freqs tensor of shape [s, 1, 1, d]"
    assert freqs.shape[-1] <= t.shape[-1], "expected the last dim of t to be no smaller than that of freqs"
    if start_positions is not None:
        raise NotImplementedError("the stand-in has no offsets of sequences")
    angles = freqs.float()
    if tensor_format == "thd":
        assert fused, "'thd' is only supported when `fused` is True"
        assert cu_seqlens is not None, "cu_seqlens must not be None when tensor_format is 'thd'."
        places = torch.cat([_places(length, cp_size, cp_rank) for length in cu_seqlens.diff().tolist()])
        assert len(places) == len(t), f"cu_seqlens hold {len(places)} tokens of this rank, t {len(t)}"
        return _rotated(t, angles[places][:, 0], interleaved)
    length = t.shape[0 if tensor_format == "sbhd" else 1]
    assert freqs.shape[0] >= length, "expected freqs tensor to have a sequence length no smaller than that of t"
    return _rotated(t, angles[:length] if tensor_format == "sbhd" else angles[:length].transpose(0, 1), interleaved)


def _places(length: int, size: int, rank: int) -> Tensor:
    """Positions of a rank's tokens of one sequence, in Transformer Engine's order of chunks."""
    if size == 1:
        return torch.arange(length)
    chunk = length // (2 * size)
    return torch.cat([torch.arange(part * chunk, (part + 1) * chunk) for part in (rank, 2 * size - 1 - rank)])


def _rotated(t: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """In float32, as the kernel does, cast once at the end."""
    turned, kept = t[..., : angles.shape[-1]].float(), t[..., angles.shape[-1] :]
    if interleaved:
        other = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        other = torch.cat((-second, first), dim=-1)
    return torch.cat(((turned * angles.cos() + other * angles.sin()).to(t.dtype), kept), dim=-1)
