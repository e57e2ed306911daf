"""CPU kernels whose result for one token does not depend on what is computed beside it.

Reason: the loop promises that a resumed run repeats bit for bit, while arrival times decide which requests share
a batch and what the prefix cache holds. Measured on torch 2.13 with MKL: a row of a float32 matrix product
changes its last bits with the number of rows, and a row of causal attention with the length of the block it is
computed in; normalization, activations, softmax and the seeded sampler do not.

Matrix products therefore run in tiles of a fixed number of rows, the last one padded: equal shapes give equal
code paths, and the position of a row within the tile does not matter (checked in the tests, not promised by
MKL). Attention runs row by row, a prompt's tokens exactly as decoding would. A token's values are then a
function of its prefix alone, so batch composition, chunked prefill, retraction and the prefix cache are all
invisible. One thread per rank is assumed. Upstream: sglang 0.5.23 supports this on CUDA and XPU only.

Sampling had one more leak: SGLang draws from the sorted vocabulary as soon as one request of the batch uses top_p,
top_k or temperature 0, and from the plain one otherwise, so a request's tokens depended on its neighbors'
parameters (a health probe is such a neighbor). Here the draw is always from the plain order.
"""

from __future__ import annotations

from typing import Any

import torch
from mua_cpu_grouped import is_special
from torch.nn.functional import scaled_dot_product_attention

TILE = 24
"""Rows of one matrix product. MKL's kernels take 8 rows at once with SSE4.2, 6 with AVX2, and what is left over by a
kernel of another order of summation: 24 leaves nothing over. Larger wastes time on small batches, smaller on large."""

_library: torch.library.Library | None = None


def tiled_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` for ``a`` [m, k] and ``b`` [k, n], in products of exactly ``TILE`` rows."""
    m, k = a.shape
    out = a.new_empty(m, b.shape[1])
    whole = m - m % TILE
    for start in range(0, whole, TILE):
        torch.mm(a[start : start + TILE], b, out=out[start : start + TILE])
    if whole < m:
        padded = a.new_zeros(TILE, k)
        padded[: m - whole] = a[whole:]
        last = a.new_empty(TILE, b.shape[1])
        torch.mm(padded, b, out=last)
        out[whole:] = last[: m - whole]
    return out


def tiled_addmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """``beta * bias + alpha * (a @ b)`` on :func:`tiled_mm`."""
    product = tiled_mm(a, b)
    return bias.mul(beta).add(product, alpha=alpha) if beta != 1 or alpha != 1 else bias + product


def extend(
    _backend: object,
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
    """Causal attention of new tokens over cached ones, each row computed alone.

    ``query`` and ``output`` are [tokens, heads, head_dim], the caches [slots, kv_heads, head_dim],
    ``req_to_token`` [requests, positions] maps positions to slots; the rest is per sequence.
    """
    if is_special(encoder_lens, options) or not options["causal"]:
        raise NotImplementedError("deterministic CPU inference knows neither cross attention nor sliding windows")
    row = 0
    rows = zip(req_pool_indices.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True)
    for request, prefix, new in rows:
        slots = req_to_token[request, : prefix + new]
        keys = k_cache[slots].movedim(0, 1).to(query.dtype).unsqueeze(0)
        values = v_cache[slots].movedim(0, 1).to(query.dtype).unsqueeze(0)
        for length in range(prefix + 1, prefix + new + 1):
            output[row] = scaled_dot_product_attention(
                query[row, None, :, None],
                keys[:, :, :length],
                values[:, :, :length],
                enable_gqa=options.get("enable_gqa", False),
                scale=options.get("scaling"),
            )[0, :, 0]
            row += 1
    return output


def decode(
    backend: object, query: torch.Tensor, output: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """Attention of one new token per sequence: :func:`extend` by one, so that the two cannot differ."""
    ones = torch.ones_like(seq_lens)
    return extend(
        backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, seq_lens - ones, ones,
        encoder_lens, **options | {"causal": True},
    )  # fmt: skip


def sample_filtered(
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    sampling_seed: torch.Tensor | None,
    positions: torch.Tensor,
    *,
    return_filtered_probs: bool = False,
    max_top_k: int | None = None,
) -> torch.Tensor:
    """Seeded draw from ``probs`` [n, vocabulary] under each row's top-k and top-p; int32 ids ``[n]``.

    A row without filters gives the same id as SGLang's unfiltered draw.
    """
    from sglang.srt.layers.sampler import multinomial_with_seed

    if need_min_p_sampling or return_filtered_probs or sampling_seed is None:
        raise NotImplementedError("deterministic CPU inference knows neither min_p nor sampling masks")
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = torch.cumsum(ordered, dim=-1) - ordered
    rank = torch.arange(probs.shape[-1], device=probs.device)
    dropped = rank >= top_ks.view(-1, 1)
    dropped |= (top_ps < 1).view(-1, 1) & (mass_before > top_ps.view(-1, 1))
    kept = probs.masked_fill(torch.zeros_like(dropped).scatter(1, index, dropped), 0.0)
    return multinomial_with_seed(torch.log(kept), sampling_seed, positions).view(-1).to(torch.int32)


def enable() -> None:
    """Put the kernels in place for this process, once; SGLang calls it in deterministic mode."""
    global _library
    if _library is not None:
        return
    import sglang.srt.layers.sampler as sampler
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    sampler.top_k_top_p_min_p_sampling_from_probs_torch = sample_filtered
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("mm", tiled_mm, "CPU")
    _library.impl("addmm", tiled_addmm, "CPU")
    TorchNativeAttnBackend._run_sdpa_forward_extend = extend
    TorchNativeAttnBackend._run_sdpa_forward_decode = decode
