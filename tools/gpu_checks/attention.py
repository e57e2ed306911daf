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
from mua.megatron.settings import Capabilities, Implementation, implementation_of
from tools.gpu_checks.child import Found, Place
from tools.gpu_checks.policies import sequences, wait

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Of one token: the norm of the difference over its own. bfloat16 has 8 bits, and probabilities are rounded too."""


class Core:
    """The core attention of a one-layer policy with these heads, and the packing that the trainer makes for it."""

    def __init__(
        self, heads: int, groups: int, width: int, dtype: torch.dtype, tokens: int, implementation: Implementation
    ) -> None:
        self.heads, self.groups, self.width, self.dtype = heads, groups, width, dtype
        hf = {
            "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 128, "num_hidden_layers": 1,
            "intermediate_size": 128, "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": width,
            "vocab_size": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False,
            "max_position_embeddings": tokens, "tie_word_embeddings": False, "initializer_range": 0.02,
        }  # fmt: skip
        self._config = MegatronConfig(
            max_tokens_per_microbatch=tokens, merge_prefixes=True, implementation=implementation
        )
        self._workload = Workload.of(Architecture.from_hf(hf))
        name = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[dtype]
        (chunk,) = build_chunks(hf, ModelConfig(path=".", dtype=name), self._config)  # type: ignore[arg-type]
        self.module = chunk.decoder.layers[0].self_attention.core_attention

    def packed(self, lengths: Sequence[int], shared: int = 0) -> tuple[PackedMicrobatch, list[Tensor]]:
        """The one micro-batch of sequences of these lengths, which begin with the same ``shared`` tokens, and where in
        it the tokens of each are."""
        given = sequences(lengths, 128)
        for sequence in given:
            sequence.ids[:shared] = given[0].ids[:shared]
            sequence.ids[shared : shared + 1] = len(sequence) % 128  # and no further
        plan = pack([sequence.ids for sequence in given], self._config, self._workload)
        ((planned,),) = plan.microbatches
        own = [given[index] for index in planned.sequences]
        packing = micro_batch(own, Alignment.of(self._config), plan.plan, planned).packing
        starts = np.cumsum([0, *packing.lengths])
        paths = [[index] for index in range(len(own))] if planned.forest is None else planned.forest.paths
        places = [np.concatenate([starts[n] + np.arange(packing.used[n]) for n in path]) for path in paths]
        return packing, [torch.from_numpy(place).to(parallel.device()) for place in places]

    def inputs(self, tokens: int, seed: int = 0) -> list[Tensor]:
        """Query, key, value as the layer gives them, ``[tokens, 1, heads, head dim]``."""
        torch.manual_seed(seed)
        shapes = [(tokens, 1, heads, self.width) for heads in (self.heads, self.groups, self.groups)]
        return [torch.randn(shape, device=parallel.device(), dtype=self.dtype).requires_grad_() for shape in shapes]

    def __call__(self, inputs: Sequence[Tensor], packing: PackedMicrobatch) -> Tensor:
        """``[tokens, heads * head dim]``"""
        from megatron.core.transformer.enums import AttnMaskType

        output: Tensor = self.module(
            *inputs, attention_mask=None, attn_mask_type=AttnMaskType.causal, packed_seq_params=packing
        )
        return output.reshape(len(inputs[0]), -1)


def implementations() -> list[Implementation]:
    """Whose layers can be built here."""
    auto = implementation_of(MegatronConfig(), Capabilities.here())
    return list(dict.fromkeys([auto, "local"]))


def rows(place: Place) -> Found:
    """Odd rows: 1, 100, 1,024 tokens together, 32k alone, 8 heads on 1 and 8 on 8; and a tree of shared prefixes."""
    found, long, middle = Found(), place.pick(32768, 384), place.pick(1024, 128)
    odd = [([1], 0), ([100], 0), ([1, 100, middle], 0), ([middle, 7, 1, 333], 0), ([long - 3], 0)]
    tree = ([middle + 9, middle + 300, middle + 2], middle)
    most = max(sum(lengths) for lengths, _ in (*odd, tree))
    parallel.initialize(MegatronConfig(), seed=1)
    before = _graphs()
    for implementation in implementations():
        for dtype in place.pick([torch.bfloat16], [torch.float32, torch.bfloat16]):
            whose = f"{implementation}, {str(dtype).removeprefix('torch.')}"
            all_rows = 0.0
            for heads, groups in ((8, 1), (8, 8)):
                core = Core(heads, groups, place.pick(128, 16), dtype, most, implementation)
                for lengths, shared in (*odd, tree) if groups == 1 else (odd[2], tree):
                    worst = _compare(core, lengths, shared)
                    all_rows = max(all_rows, *worst.values())
                    name = f"{whose}, {heads} heads on {groups}, {'+'.join(map(str, lengths))} tokens, {shared} shared"
                    for what, error in worst.items():
                        found.expect(error < TOLERANCE[dtype], f"{name}: {what} of a token is off by {error:.3g}")
            found.add(f"{whose}: worst token of all rows off by", all_rows, "of its norm")
    if (after := _graphs()) is not None and before is not None:
        found.add("graphs compiled", after - before)
    if place.cuda:
        found.add("memory at most", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    return found


def _compare(core: Core, lengths: Sequence[int], shared: int) -> dict[str, float]:
    """The worst token of the output and of each gradient; scoring, without gradients, gives the same output."""
    packing, places = core.packed(lengths, shared)
    inputs = core.inputs(sum(packing.lengths))
    with torch.no_grad():
        scored = core(inputs, packing)
    output = core(inputs, packing)
    gradient, unseen = torch.randn_like(output), torch.ones(len(output), dtype=torch.bool, device=output.device)
    own = [x.reshape(len(x), -1).detach() for x in (output, *torch.autograd.grad(output, inputs, gradient))]
    expected = [torch.zeros_like(x, dtype=torch.float32) for x in own]
    for at in places:
        first = unseen[at]  # a token that several sequences begin with has its gradient once
        of_one = _reference(core, [x[at] for x in inputs], gradient[at] * first[:, None])
        expected[0][at] = of_one[0]
        for whole, part in zip(expected[1:], of_one[1:], strict=True):
            whole[at] += part
        unseen[at] = False
    # Padding is not seen by a token, and what comes back for it is its own.
    own = [x.masked_fill(unseen[:, None], 0) for x in own]
    worst = {"output without gradients": max(_difference(scored[at], output[at]) for at in places)}
    for name, ours, theirs in zip(("output", "dq", "dk", "dv"), own, expected, strict=True):
        scale = float(theirs.norm(dim=-1).max())
        for at in places:
            if len(at) == 1 and name in ("dq", "dk"):  # one token sees itself alone: its scores have no gradient
                error = float(ours[at].float().norm()) / max(scale, 1.0)
            else:
                error = _difference(ours[at], theirs[at])
            worst[name] = max(worst.get(name, 0.0), error)
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
    """32 query and 8 key heads of 128, bfloat16: one row of 32k tokens, eight of 4,096, eight that share 16k."""
    found = Found()
    parallel.initialize(MegatronConfig(), seed=1)
    for implementation in implementations():
        core = Core(32, 8, 128, torch.bfloat16, 32768 + 8 * 17408, implementation)
        for lengths, shared in (([32768], 0), ([4096] * 8, 0), ([16384 + 1024 + n for n in range(8)], 16384)):
            packing, places = core.packed(lengths, shared)
            inputs = core.inputs(sum(packing.lengths))
            pairs = sum(n * (n + 1) // 2 for n in map(len, places)) - (len(places) - 1) * shared * (shared + 1) // 2
            operations = 4 * core.heads * core.width * pairs
            tree = f" sharing {shared:,}" if shared else ""
            name = f"{implementation}, {len(lengths)} x {lengths[0]:,}{tree}"
            ours = _times(lambda: core(inputs, packing), inputs, place)  # noqa: B023
            for what, kind, factor in (("forward", 0, 1.0), ("backward", 1, 2.5)):
                found.add(f"{name} {what}", factor * operations / ours[kind] / 1e12, "TFLOP/s")
            if not shared:
                by_head = [x[:, 0].detach().transpose(0, 1)[None].requires_grad_() for x in core.inputs(lengths[0])]
                theirs = _times(lambda: _flash(*by_head), by_head, place)  # noqa: B023
                for what, kind in (("forward", 0), ("backward", 1)):
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
