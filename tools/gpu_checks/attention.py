"""Core attention of a layer that the product built, on packed rows: right to the last token, compiled how often, how
fast beside SDPA's flash kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mua.config.schema import MegatronConfig, ModelConfig
from mua.megatron import parallel
from mua.megatron.architecture import Architecture, Workload
from mua.megatron.microbatch import micro_batch
from mua.megatron.model import build_chunks
from mua.megatron.modules import PackedMicrobatch
from mua.megatron.packing import Alignment, pack
from tools.gpu_checks.child import Found, Place
from tools.gpu_checks.policies import sequences, wait

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Of one token: the norm of the difference over its own. bfloat16 has 8 bits, and probabilities are rounded too."""


class Core:
    """The core attention of a one-layer policy with these heads, and the packing that the trainer makes for it."""

    def __init__(self, heads: int, groups: int, width: int, dtype: torch.dtype, tokens: int) -> None:
        self.heads, self.groups, self.width, self.dtype = heads, groups, width, dtype
        hf = {
            "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 128, "num_hidden_layers": 1,
            "intermediate_size": 128, "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": width,
            "vocab_size": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False,
            "max_position_embeddings": tokens, "tie_word_embeddings": False, "initializer_range": 0.02,
        }  # fmt: skip
        self._config = MegatronConfig(max_tokens_per_microbatch=tokens)
        self._workload = Workload.of(Architecture.from_hf(hf))
        name = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[dtype]
        (chunk,) = build_chunks(hf, ModelConfig(path=".", dtype=name), self._config)  # type: ignore[arg-type]
        self.module = chunk.decoder.layers[0].self_attention.core_attention

    def packed(self, lengths: Sequence[int]) -> tuple[PackedMicrobatch, list[int]]:
        """The one micro-batch of sequences of these lengths, and the lengths in its order."""
        given = sequences(lengths, 128)
        plan = pack([sequence.ids for sequence in given], self._config, self._workload)
        ((planned,),) = plan.microbatches
        own = [given[index] for index in planned.sequences]
        made = micro_batch(own, Alignment.of(self._config), plan.plan, planned.forest)
        return made.packing, [len(sequence) for sequence in own]

    def inputs(self, tokens: int, seed: int = 0) -> list[Tensor]:
        """Query, key, value as the layer gives them, ``[tokens, 1, heads, head dim]``."""
        torch.manual_seed(seed)
        shapes = [(tokens, 1, heads, self.width) for heads in (self.heads, self.groups, self.groups)]
        return [torch.randn(shape, device=parallel.device(), dtype=self.dtype).requires_grad_() for shape in shapes]

    def __call__(self, inputs: Sequence[Tensor], packing: PackedMicrobatch) -> Tensor:
        """``[tokens, heads * head dim]``"""
        from megatron.core.transformer.enums import AttnMaskType

        query, key, value = inputs
        if packing.qkv_format == "thd":
            query, key, value = query[:, 0], key[:, 0], value[:, 0]
        mask = AttnMaskType.padding_causal if packing.qkv_format == "thd" else AttnMaskType.causal
        output: Tensor = self.module(query, key, value, None, attn_mask_type=mask, packed_seq_params=packing)
        return output.reshape(len(inputs[0]), -1)


def rows(place: Place) -> Found:
    """Odd rows: 1, 100, 1,024 tokens together, 32k alone, 8 heads on 1 and 8 on 8."""
    found, long = Found(), place.pick(32768, 384)
    kinds = place.pick([torch.bfloat16], [torch.float32, torch.bfloat16])
    odd = [[1], [100], [1, 100, place.pick(1024, 128)], [place.pick(1024, 128), 7, 1, 333], [long - 3]]
    parallel.initialize(MegatronConfig(), seed=1)
    before = _graphs()
    for dtype in kinds:
        all_rows = 0.0
        for heads, groups in ((8, 1), (8, 8)):
            core = Core(heads, groups, place.pick(128, 16), dtype, max(map(sum, odd)))
            for lengths in odd if groups == 1 else odd[2:3]:
                worst = _compare(core, lengths)
                of_dtype = str(dtype).removeprefix("torch.")
                name = f"{heads} heads on {groups}, rows {'+'.join(map(str, lengths))}, {of_dtype}"
                all_rows = max(all_rows, *worst.values())
                for what, error in worst.items():
                    found.expect(
                        error < TOLERANCE[dtype], f"{name}: {what} of a token is off by {error:.3g} of its norm"
                    )
        found.add(f"{str(dtype).removeprefix('torch.')}: worst token of all rows off by", all_rows, "of its norm")
    if (after := _graphs()) is not None and before is not None:
        found.add("graphs compiled", after - before)
    if place.cuda:
        found.add("memory at most", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    return found


def _compare(core: Core, lengths: Sequence[int]) -> dict[str, float]:
    """The worst token of the output and of each gradient; scoring, without gradients, gives the same output."""
    packing, order = core.packed(lengths)
    inputs = core.inputs(sum(packing.lengths))
    with torch.no_grad():
        scored = core(inputs, packing)
    output = core(inputs, packing)
    gradient = torch.randn_like(output)
    gradient[sum(order) :] = 0  # padding
    own = [output, *torch.autograd.grad(output, inputs, gradient)]
    worst: dict[str, float] = {"output without gradients": _difference(scored[: sum(order)], output[: sum(order)])}
    start = 0
    for padded, length in zip(packing.lengths, order, strict=False):
        expected = _reference(core, [x[start : start + length] for x in inputs], gradient[start : start + length])
        for name, ours, theirs in zip(("output", "dq", "dk", "dv"), own, expected, strict=True):
            part = ours[start : start + length].reshape(length, -1)
            if length == 1 and name in ("dq", "dk"):  # one token sees itself alone: its scores have no gradient
                error = float(
                    part.float().norm() / own[2 if name == "dq" else 1].float().norm(dim=-1).max().clamp(min=1)
                )
            else:
                error = _difference(part, theirs)
            worst[name] = max(worst.get(name, 0.0), error)
        start += padded
    return worst


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Of the worst token: the norm of the difference over its own norm, or over the mean one where that is greater."""
    ours, theirs = ours.detach().float(), theirs.detach().float()
    norms = theirs.norm(dim=-1)
    return float(((ours - theirs).norm(dim=-1) / torch.maximum(norms, norms.mean()).clamp(min=1e-20)).max())


def _reference(core: Core, inputs: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    """One sequence alone, in float32, by blocks of queries with all their scores: no kernel's mask is trusted."""
    length, repeat = len(inputs[0]), core.heads // core.groups
    query, key, value = (x[:, 0].detach().float().transpose(0, 1).requires_grad_() for x in inputs)
    keys, values = (x.repeat_interleave(repeat, dim=0) for x in (key, value))
    outputs, block = [], 1024
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    wanted = gradient.float().view(length, core.heads, core.width).transpose(0, 1)
    for start in range(0, length, block):
        stop = min(start + block, length)
        scores = query[:, start:stop] @ keys[:, :stop].transpose(1, 2) / math.sqrt(core.width)
        hidden = torch.ones(stop - start, stop, dtype=torch.bool, device=query.device).triu(start + 1)
        output = scores.masked_fill(hidden, -math.inf).softmax(-1) @ values[:, :stop]
        parts = torch.autograd.grad(output, (query, key, value), wanted[:, start:stop], retain_graph=True)
        for total, part in zip(grads, parts, strict=True):
            total += part
        outputs.append(output.detach())
    whole = torch.cat(outputs, dim=1)
    return [x.transpose(0, 1).reshape(length, -1) for x in (whole, *grads)]


def _graphs() -> int | None:
    """Graphs that dynamo has compiled in this process; None where it does not say."""
    try:
        from torch._dynamo.utils import counters

        return int(counters["stats"].get("unique_graphs", 0))
    except (ImportError, AttributeError):
        return None


def speed(place: Place) -> Found:
    """32 query and 8 key heads of 128, bfloat16: one row of 32k tokens, and eight of 4,096."""
    found = Found()
    parallel.initialize(MegatronConfig(), seed=1)
    core = Core(32, 8, 128, torch.bfloat16, 32768)
    for lengths in ([32768], [4096] * 8):
        packing, order = core.packed(lengths)
        inputs = core.inputs(sum(packing.lengths))
        pairs = sum(length * (length + 1) // 2 for length in order)
        operations = 4 * core.heads * core.width * pairs
        name = f"{len(lengths)} x {lengths[0]:,}"
        ours = _times(lambda: core(inputs, packing), inputs, place)  # noqa: B023
        by_head = [x[:, 0].detach().transpose(0, 1)[None].requires_grad_() for x in core.inputs(lengths[0])]
        theirs = _times(lambda: _flash(*by_head), by_head, place)  # noqa: B023
        for what, kind, factor in (("forward", 0, 1.0), ("backward", 1, 2.5)):
            found.add(f"{name} {what}", factor * operations / ours[kind] / 1e12, "TFLOP/s")
            found.add(f"{name} {what} over SDPA", theirs[kind] * len(lengths) / ours[kind])
    return found


def _flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _times(work: Any, inputs: Sequence[Tensor], place: Place, times: int = 10) -> tuple[float, float]:
    """Seconds of a forward and of a backward pass: the median of ten after three."""
    taken = []
    for _ in range(3 + times):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        output = work()
        marks[1].record()
        torch.autograd.grad(output, inputs, torch.ones_like(output))
        marks[2].record()
        wait(place)
        taken.append((marks[0].elapsed_time(marks[1]) / 1e3, marks[1].elapsed_time(marks[2]) / 1e3))
    forward, backward = np.median(np.array(taken[3:]), axis=0)
    return float(forward), float(backward)
