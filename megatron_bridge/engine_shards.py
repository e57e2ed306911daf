"""What each rank of an inference engine holds, as block copies of Hugging Face tensors: the plan's second target.

SGLang fuses Hugging Face tensors (q, k and v; gate and up; the matrices of all experts) and keeps of each the part of
its tensor-parallel rank. A family's table says so once for every parameter; the shapes of the Hugging Face tensors say
the rest. Of a rank r of t, with e expert-parallel ranks (the formulas of ``sglang/srt/layers``, 0.5.23):

    qkv_proj        [q_r; k_r; v_r]: heads r of t; where t exceeds the KV heads, t / heads ranks hold the same one
    gate_up_proj    [gate_r; up_r]                                     o_proj, down_proj    columns r of t
    embed_tokens    rows r of t of a vocabulary padded to 64, the padding zero (lm_head alike)
    w13, w2_weight  experts of rank r // (t / e), stacked, each cut over t / e ranks   norms, routers    whole
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_bridge.blocks import BlockCopy
from megatron_bridge.family import EngineRule, EngineSplit, HfConfig
from megatron_bridge.plan import TensorSpec
from mua.utils.errors import BridgeError

_PADDED_VOCABULARY = 64
"""Rows the vocabulary is padded to a multiple of: SGLang's ``DEFAULT_VOCAB_PADDING_SIZE``."""


@dataclass(frozen=True, slots=True)
class EngineRanks:
    """The ranks of one engine."""

    tensor: int
    """Tensor-parallel ranks: all of them."""
    expert: int = 1
    """Ranks the experts are spread over, a divisor of ``tensor``; the rest of it cuts each expert's matrices."""

    def __post_init__(self) -> None:
        if self.tensor % self.expert:
            raise BridgeError(
                f"engine.extra.ep_size {self.expert} does not divide engine.tensor_parallel {self.tensor}"
            )


@dataclass(frozen=True, slots=True)
class EngineParameter:
    """One parameter of the engine, of which every rank holds a matrix of the same shape."""

    name: str
    rows: int
    """Of the matrix ``[rows, cols]``: leading dimensions are counted as one, a vector has one column."""
    cols: int
    dtype: torch.dtype
    blocks: tuple[tuple[BlockCopy, ...], ...]
    """For each rank, where its matrix comes from; ``shard_row`` and ``shard_col`` count in it. What no block fills is
    zero."""


@dataclass(slots=True)
class _Sources:
    """The Hugging Face tensors of one engine parameter: of one expert, or the only ones."""

    rule: EngineRule
    of_expert: dict[int, dict[int, TensorSpec]] = field(default_factory=lambda: defaultdict(dict))
    """By expert (-1: none) and place in the rule."""


def engine_parameters(
    table: Mapping[str, EngineRule], specs: Iterable[TensorSpec], hf_config: HfConfig, ranks: EngineRanks
) -> list[EngineParameter]:
    """The parameters of an engine of ``ranks`` that the tensors ``specs`` of a model fill, in their order.

    Raises:
        BridgeError: a tensor is in no rule of the table, or a dimension does not divide by the ranks.
    """
    templates = {source: (name, place) for name, rule in table.items() for place, source in enumerate(rule.sources)}
    found: dict[str, _Sources] = {}
    for spec in specs:
        numbers = re.findall(r"(?<=\.)\d+(?=\.)", spec.name)
        template = re.sub(r"(?<=\.)\d+(?=\.)", "{}", spec.name)
        if template not in templates:
            raise BridgeError(
                f"{spec.name} is not in the table of engine parameters of {hf_config.get('model_type')!r}; add it in "
                "megatron_bridge/families, or set engine.load: tensors"
            )
        name, place = templates[template]
        layer, expert = (*numbers, "-1", "-1")[:2]
        parameter = found.setdefault(name.format(layer), _Sources(table[name]))
        parameter.of_expert[int(expert)][place] = spec
    parameters = []
    for name, sources in found.items():
        experts = sorted(sources.of_expert)
        spread = experts != [-1]
        over = ranks.tensor // ranks.expert if spread else ranks.tensor
        own = _divide(len(experts), ranks.expert, name, "experts") if spread else 1
        blocks = []
        for rank in range(ranks.tensor):
            first, at = (rank // over * own if spread else 0), 0
            of_rank: list[BlockCopy] = []
            for expert in experts[first : first + own]:
                fused = [sources.of_expert[expert][place] for place in sorted(sources.of_expert[expert])]
                if len(fused) != len(sources.rule.sources):
                    raise BridgeError(f"{name} is fused of several tensors, of which one is missing")
                one, rows, cols = _matrix(sources.rule.split, fused, hf_config, rank % over, over)
                of_rank += [
                    BlockCopy(b.source, b.source_row, b.source_col, b.shard_row + at, b.shard_col, b.rows, b.cols)
                    for b in one
                ]
                at += rows
            blocks.append(tuple(of_rank))
        parameters.append(EngineParameter(name, at, cols, fused[0].dtype, tuple(blocks)))
    return parameters


def _matrix(
    split: EngineSplit, specs: Sequence[TensorSpec], hf_config: HfConfig, rank: int, ranks: int
) -> tuple[list[BlockCopy], int, int]:
    """What ``rank`` holds of some tensors fused into one: its blocks, rows and columns."""
    rows, cols = specs[0].shape[0], torch.Size(specs[0].shape[1:]).numel()
    name = specs[0].name
    if split is EngineSplit.WHOLE:
        return [BlockCopy(name, 0, 0, 0, 0, rows, cols)], rows, cols
    if split is EngineSplit.COLUMNS:
        part = _divide(cols, ranks, name, "columns")
        return [BlockCopy(name, 0, rank * part, 0, 0, rows, part)], rows, part
    if split is EngineSplit.VOCABULARY:
        padded = -(-rows // _PADDED_VOCABULARY) * _PADDED_VOCABULARY
        part = _divide(padded, ranks, name, "rows")
        filled = min(part, rows - rank * part)
        return [BlockCopy(name, rank * part, 0, 0, 0, filled, cols)] if filled > 0 else [], part, cols
    blocks, at = [], 0
    for place, spec in enumerate(specs):
        parts, index = ranks, rank
        if split is EngineSplit.HEADS and place and ranks > (heads := int(hf_config["num_key_value_heads"])):
            parts, index = heads, rank // _divide(ranks, heads, spec.name, "ranks over its heads")
        part = _divide(spec.shape[0], parts, spec.name, "rows")
        blocks.append(BlockCopy(spec.name, index * part, 0, at, 0, part, cols))
        at += part
    return blocks, at, cols


def _divide(size: int, parts: int, name: str, what: str) -> int:
    if size % parts:
        raise BridgeError(f"{name}: {size} {what} do not divide by {parts}; change engine.tensor_parallel")
    return size // parts
