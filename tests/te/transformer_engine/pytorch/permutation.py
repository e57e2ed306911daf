"""Tokens in the order of their experts and back, and chunks of tokens in another order."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    if map_type != "mask":
        raise NotImplementedError("the stand-in takes maps, not indices")
    output, _, row_id_map = _permuted(inp, None, routing_map, num_out_tokens)
    return output, row_id_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _permuted(inp, probs, routing_map, num_out_tokens)


def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    raise NotImplementedError("the stand-in pads by Fp8Padding")


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """Sums the rows of each token, weighted by ``merging_probs`` ``[tokens, experts]`` if given."""
    if map_type != "mask" or probs is not None or pad_offsets is not None:
        raise NotImplementedError("the stand-in takes maps, not indices, and no padding")
    if not inp.numel():
        return inp.new_zeros(restore_shape or inp.shape) + inp.sum()
    tokens, hidden = restore_shape or inp.shape
    experts = (row_id_map.shape[1] - 1) // 2
    token, slot = _slots(row_id_map, experts)
    rows = inp[row_id_map[token, slot].long()].float()
    if merging_probs is not None:
        rows = rows * merging_probs[token, row_id_map[token, experts + slot].long()][:, None]
    return rows.new_zeros(tokens, hidden).index_add(0, token, rows).to(inp.dtype)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    return inp[_chunk_order(inp, split_sizes, sorted_index)]


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    order = _chunk_order(inp, split_sizes, sorted_index)
    return inp[order], probs[order]


def _chunk_order(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    sizes = split_sizes.reshape(-1).tolist()
    if sum(sizes) != inp.shape[0]:
        raise ValueError(f"chunks hold {sum(sizes)} tokens, the input {inp.shape[0]}")
    chunks = torch.arange(inp.shape[0]).split(sizes)
    return torch.cat([chunks[index] for index in sorted_index.reshape(-1).tolist()])


def _permuted(
    inp: Tensor, probs: Tensor | None, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, permuted probabilities (none: empty) and a map that :func:`moe_unpermute` reads.

    The map is int32 ``[tokens, 2 * experts + 1]``: of each token its rows in the output, the experts of those rows, and
    how many there are.
    """
    tokens, experts = routing_map.shape
    if not inp.numel():
        kind = torch.float32 if probs is None else probs.dtype
        return inp.clone(), torch.empty(0, dtype=kind), torch.empty(0, 2 * experts + 1, dtype=torch.int32)
    if inp.shape[0] != tokens:
        raise ValueError(f"Permute not possible: {inp.shape[0]} tokens, routing_map has {tokens}")
    assert num_out_tokens > 0, f"moe_permute (mask map) requires num_out_tokens > 0, got {num_out_tokens}."
    expert, token = routing_map.bool().T.nonzero(as_tuple=True)
    if len(token) != num_out_tokens:
        raise ValueError(f"routing_map has {len(token)} choices, num_out_tokens is {num_out_tokens}")
    chosen = routing_map.bool()
    slot = (chosen.cumsum(1) - 1)[token, expert]
    row_id_map = torch.full((tokens, 2 * experts + 1), -1, dtype=torch.int32)
    row_id_map[token, slot] = torch.arange(num_out_tokens, dtype=torch.int32)
    row_id_map[token, experts + slot] = expert.int()
    row_id_map[:, -1] = chosen.sum(1)
    permuted = torch.empty(0) if probs is None else probs[token, expert]
    return inp[token], permuted, row_id_map


def _slots(row_id_map: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Token and slot of every row that the map holds."""
    used = torch.arange(experts)[None] < row_id_map[:, -1:]
    token, slot = used.nonzero(as_tuple=True)
    return token, slot
