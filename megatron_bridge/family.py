"""What a model family is: its Hugging Face configuration, and one table from Megatron names to rules.

A rule says how the named Megatron parameter is packed from Hugging Face tensors, given the shape of one shard.
The first ``{}`` in a name is the global layer number, the second the global expert number. Both of Megatron's layer
specifications may be listed side by side (``input_layernorm`` and Transformer Engine's
``linear_qkv.layer_norm_weight``): a model has one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron_bridge.blocks import Packing, Split
from mua.utils.errors import BridgeError

HfConfig = Mapping[str, Any]

EXPERT = re.compile(r"(\bmlp\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)")
"""The expert number in a Megatron name, of the sequential experts or of Transformer Engine's grouped ones."""

_LAYER = re.compile(r"^(.*?\blayers\.)(\d+)")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that a shard's shape alone does not tell."""

    vocab: int
    """Rows of the embedding without padding."""
    heads: int
    """Query heads."""
    query_groups: int
    """KV heads."""
    head_dim: int
    tp: int
    """Shards: tensor-parallel ranks, or expert-tensor-parallel ranks for a parameter of an expert."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Names of the Hugging Face sources, and how they are packed: ``pack(sources, shard_shape, sizes)``."""

    sources: tuple[str, ...]
    pack: Callable[[tuple[str, ...], tuple[int, int], Sizes], Packing]


class EngineSplit(Enum):
    """How an engine divides one of its parameters over its tensor-parallel ranks."""

    WHOLE = "whole"
    ROWS = "rows"
    """A part of each source's rows, one source under the other."""
    HEADS = "heads"
    """As ROWS, but that key and value heads are repeated where there are more ranks than heads."""
    COLUMNS = "columns"
    VOCABULARY = "vocabulary"


@dataclass(frozen=True, slots=True)
class EngineRule:
    """The Hugging Face tensors an engine's parameter is made of, and how it is divided.

    In names the first ``{}`` is the layer; a second one, in sources alone, the expert: the parameter stacks all experts
    of a rank.
    """

    sources: tuple[str, ...]
    split: EngineSplit


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. Everything the bridge does with it follows from these fields."""

    model_type: str
    """``model_type`` of config.json."""
    about: str
    """Which published models it covers, and what is their own, in one line for docs/families.md."""
    transformer: Callable[[HfConfig], dict[str, Any]]
    """Architecture fields of ``megatron.core.transformer.TransformerConfig``."""
    check: Callable[[HfConfig], None]
    """Raises BridgeError on a configuration this family cannot express."""
    parameters: Mapping[str, Rule]
    """Every Megatron parameter and persistent buffer it can have; see the head of this file for the names."""
    examples: Mapping[str, HfConfig]
    """Tiny configurations by a short name, which tests run through every layout: one for each variant of the table.

    Four layers, sizes that divide by four, a vocabulary that does not."""
    engine: Mapping[str, EngineRule] | None = None
    """SGLang's parameters by name, for weights that reach each engine rank as its own slices; None: only as whole
    tensors, of which the engine keeps its part."""
    extras: Callable[[HfConfig], Sequence[str]] = lambda config: ()
    """Patterns (regular expressions, whole names) of tensors in checkpoints that the Megatron model has no part for.

    They are neither loaded nor exported; any other tensor without a use is an error."""

    def rule(self, name: str) -> tuple[Rule, tuple[str, ...]] | None:
        """The rule for a global Megatron name, and the layer and expert numbers to put into the source names."""
        numbers: list[str] = []

        def blank(match: re.Match[str]) -> str:
            numbers.append(match[2])
            return match[1] + "{}"

        rule = self.parameters.get(EXPERT.sub(blank, _LAYER.sub(blank, name)))
        return None if rule is None else (rule, tuple(numbers))

    def packing(self, name: str, shard_shape: tuple[int, int], sizes: Sizes) -> Packing:
        """How the global Megatron parameter ``name`` is packed; a name not in the table is an error."""
        found = self.rule(name)
        if found is None:
            raise BridgeError(
                f"Megatron parameter {name} is not in the table of family {self.model_type!r}; "
                f"add it to megatron_bridge/families, or build the model without it"
            )
        rule, numbers = found
        sources = tuple(source.format(*numbers) for source in rule.sources)
        return rule.pack(sources, shard_shape, sizes)


def replicated(source: str) -> Rule:
    """The same whole tensor on every tensor-parallel rank."""

    def pack(sources: tuple[str, ...], shape: tuple[int, int], sizes: Sizes) -> Packing:
        return Packing(sources, (shape[0],), 1, *shape, Split.REPLICATED)

    return Rule((source,), pack)


def column_split(source: str) -> Rule:
    """Divided along the input dimension: Megatron's row-parallel linear layers."""

    def pack(sources: tuple[str, ...], shape: tuple[int, int], sizes: Sizes) -> Packing:
        return Packing(sources, (shape[0],), 1, shape[0], shape[1] * sizes.tp, Split.COLUMNS)

    return Rule((source,), pack)


def vocabulary(source: str) -> Rule:
    """Divided along the vocabulary, whose rows beyond the tokenizer's are zero padding."""

    def pack(sources: tuple[str, ...], shape: tuple[int, int], sizes: Sizes) -> Packing:
        rows = shape[0] * sizes.tp
        if rows < sizes.vocab:
            raise BridgeError(f"{sources[0]}: the model has {rows} vocabulary rows, config.json says {sizes.vocab}")
        return Packing(sources, (sizes.vocab,), 1, rows, shape[1], Split.ROWS)

    return Rule((source,), pack)


def grouped_qkv(query: str, key: str, value: str) -> Rule:
    """Fused attention projections: for every KV head its query heads, then its key, then its value."""

    def pack(sources: tuple[str, ...], shape: tuple[int, int], sizes: Sizes) -> Packing:
        queries = sizes.heads // sizes.query_groups * sizes.head_dim
        group_rows = (queries, sizes.head_dim, sizes.head_dim)
        return Packing(sources, group_rows, sizes.query_groups, shape[0] * sizes.tp, shape[1], Split.ROWS)

    return Rule((query, key, value), pack)


def gate_up(gate: str, up: str) -> Rule:
    """Gated MLP input: every rank holds its part of the gate, then its part of the up projection."""

    def pack(sources: tuple[str, ...], shape: tuple[int, int], sizes: Sizes) -> Packing:
        half = shape[0] // 2
        return Packing(sources, (half, half), sizes.tp, shape[0] * sizes.tp, shape[1], Split.ROWS)

    return Rule((gate, up), pack)
