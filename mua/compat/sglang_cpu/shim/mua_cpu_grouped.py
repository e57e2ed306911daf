"""Attention of SGLang's CPU engine for several sequences at once.

Reason: SGLang 0.5.23's ``torch_native`` backend computes one sequence after the other, and for a prompt whose beginning
is cached also the beginning's queries, to throw them away. With a small policy and a hundred conversations that takes
more than half of the engine's time. Here sequences of about the same length are padded to one block, and only the new
tokens ask. Cross attention and sliding windows stay with SGLang's own code. Deterministic inference has kernels of its
own (:mod:`mua_cpu_invariant`), which replace these.

Expires when SGLang's backend computes batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn.functional import scaled_dot_product_attention

TOGETHER, ASKING = 16, 4
"""Most sequences of one block, where each has one new token and where some have several: in larger blocks padding costs
more than is saved."""
ROWS = 256
"""Most new tokens of one block; a longer prompt is computed in several."""
CELLS = 1 << 22
"""Most pairs of a query and a key in one block, over its sequences: bounds the mask's bytes."""

_Piece: TypeAlias = tuple[int, int, int, int]
"""Keys, queries, the first query's row, the request."""


def extend(
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Causal attention of new tokens over cached ones.

    ``query`` and ``output`` are [tokens, heads, head_dim], the caches [slots, kv_heads, head_dim],
    ``req_to_token`` [requests, positions] maps positions to slots; the rest is per sequence.
    """
    if is_special(encoder_lens, options) or not options["causal"]:
        return _upstream_extend(
            backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
            extend_seq_lens, encoder_lens, **options,
        )  # fmt: skip
    rows = zip(req_pool_indices.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True)
    pieces: list[_Piece] = []
    row = 0
    for request, prefix, new in rows:
        for start in range(0, new, ROWS):
            count = min(ROWS, new - start)
            pieces.append((prefix + start + count, count, row + start, request))
        row += new
    for block in _blocks(sorted(pieces)):
        _attend(block, query, output, k_cache, v_cache, req_to_token, options.get("scaling"))
    return output


def decode(
    backend: Any, query: torch.Tensor, output: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """Attention of one new token per sequence: :func:`extend` by one."""
    sequences = (query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
    if is_special(encoder_lens, options):
        return _upstream_decode(backend, *sequences, encoder_lens, **options)
    ones = torch.ones_like(seq_lens)
    return extend(backend, *sequences, seq_lens - ones, ones, **options | {"causal": True})


def is_special(encoder_lens: object, options: Mapping[str, Any]) -> bool:
    """Whether SGLang asks for what these kernels do not know: cross attention, a sliding window."""
    window = options.get("sliding_window_size")
    return encoder_lens is not None or bool(options.get("is_cross_attn")) or (window is not None and window > -1)


def _blocks(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Neighbors in order of keys, together while the block stays small."""
    blocks: list[list[_Piece]] = []
    most = 0
    for piece in pieces:
        most = max(most, piece[1])
        room = min(TOGETHER if most == 1 else ASKING, CELLS // (piece[0] * most))
        if blocks and len(blocks[-1]) < room:
            blocks[-1].append(piece)
        else:
            blocks.append([piece])
            most = piece[1]
    return blocks


def _attend(
    block: Sequence[_Piece],
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    scaling: float | None,
) -> None:
    n, heads, kv_heads = len(block), query.shape[1], k_cache.shape[1]
    lengths, counts, rows, requests = (torch.tensor(part) for part in zip(*block, strict=True))
    keys, queries = int(lengths.max()), int(counts.max())
    positions = torch.arange(keys)
    # Padding repeats a sequence's own last key: a NaN in a slot of nobody's would get through a weight of 0.
    slots = req_to_token[requests[:, None], torch.minimum(positions, lengths[:, None] - 1)].flatten()
    # Whole slots are copied, which is the fastest way on a CPU: [n, kv_heads, keys, head_dim].
    k, v = (
        cache.reshape(len(cache), -1).index_select(0, slots).view(n, keys, *cache.shape[1:]).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    k, v = k.to(query.dtype), v.to(query.dtype)
    # Query i of a sequence is the token at position length - count + i; queries beyond its count repeat the last.
    own = torch.minimum(torch.arange(queries), counts[:, None] - 1)
    index = (rows[:, None] + own).flatten()
    q = query[index].view(n, queries, kv_heads, heads // kv_heads, -1)
    q = q.permute(0, 2, 3, 1, 4).reshape(n, kv_heads, heads // kv_heads * queries, -1)
    last = (lengths - counts)[:, None] + own
    seen = (positions <= last[:, :, None])[:, None, None].expand(-1, 1, heads // kv_heads, -1, -1)
    mask = seen.reshape(n, 1, heads // kv_heads * queries, keys)
    found = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    found = found.view(n, kv_heads, heads // kv_heads, queries, -1).permute(0, 3, 1, 2, 4)
    output[index] = found.reshape(n * queries, heads, -1)


_upstream_extend: Callable[..., torch.Tensor]
_upstream_decode: Callable[..., torch.Tensor]


def enable() -> None:
    """Put both in place for this process."""
    global _upstream_extend, _upstream_decode
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    _upstream_extend = TorchNativeAttnBackend._run_sdpa_forward_extend
    _upstream_decode = TorchNativeAttnBackend._run_sdpa_forward_decode
    TorchNativeAttnBackend._run_sdpa_forward_extend = extend
    TorchNativeAttnBackend._run_sdpa_forward_decode = decode
