"""The plan of a distributed model: every parameter on every pipeline stage and expert rank, and how it is packed.

Names are global (``decoder.layers.N`` counts over all stages and virtual chunks, expert numbers over all
expert-parallel ranks) and come from the tensors themselves, so the plan is the same on every rank and covers
exactly the model that was built. Process groups come from the model; this package never imports Megatron.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn

from megatron_bridge.blocks import Packing, Split
from megatron_bridge.families import family_of
from megatron_bridge.family import EXPERT, HfConfig, Sizes
from megatron_bridge.hf_config import context_length, inverse_frequencies, need, rotary_fraction, rotary_parameters
from mua.utils.collective import gathered
from mua.utils.errors import BridgeError

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
_OUTPUT_LAYER = "output_layer."


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor by name, without its values: Hugging Face's, or a band of rows of an engine's parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    row: int = 0
    """Of a band, the first row in the whole."""

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PlannedParameter:
    """One Megatron parameter, or persistent buffer, of the whole model."""

    name: str
    """Its Megatron name, with global layer and expert numbers."""
    shape: tuple[int, ...]
    """Shape of one shard."""
    dtype: torch.dtype
    owners: tuple[int, ...]
    """For each shard, the lowest of the global ranks in ``ModelPlan.group`` that hold it.

    Dense layers have a shard per tensor-parallel rank, experts one per expert-tensor-parallel rank, what is
    replicated has one.
    """
    packing: Packing
    """``packing.shard_blocks(len(owners), i)`` are the copies of shard i."""
    tied_copy: bool
    """A second copy of the embedding, loaded like the first and never exported."""
    holders: tuple[tuple[int, ...], ...] = ()
    """For each shard, all ranks of ``ModelPlan.group`` that hold it, the owner first."""
    head: bool = False
    """Of a critic's value head, which is in no Hugging Face model: only checkpoints hold it."""

    def sources(self) -> list[TensorSpec]:
        """The Hugging Face tensors it is packed from, in whole."""
        cols = () if len(self.shape) == 1 else (self.packing.cols,)
        return [
            TensorSpec(name, (self.packing.source_rows(index), *cols), self.dtype)
            for index, name in enumerate(self.packing.sources)
        ]


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """All parameters in a fixed order (embedding, layers, final norm, output), and this rank's place."""

    parameters: list[PlannedParameter]
    local: dict[str, Tensor]
    """This rank's shards by name: parameters and persistent buffers, the objects themselves."""
    shard: dict[str, int]
    """Which shard of it this rank holds, for every name in ``local``."""
    group: distributed.ProcessGroup
    """The ranks that together hold the whole model.

    Those of one tensor- and pipeline-parallel replica; all ranks of the job where experts are spread differently.
    """
    tied: bool
    hf_config: HfConfig

    @property
    def device(self) -> torch.device:
        """Where this rank's shards are at the moment; they may leave the device and come back."""
        return next(iter(self.local.values())).device

    def tensors(self) -> list[TensorSpec]:
        """The Hugging Face tensors of the model in the order of export."""
        return [spec for parameter in self.exported() for spec in parameter.sources()]

    def exported(self, *, head: bool = False) -> list[PlannedParameter]:
        """The parameters whose values an export writes; with ``head`` a critic's value head too."""
        return [p for p in self.parameters if not p.tied_copy and (head or not p.head)]


def transformer_config_kwargs(hf_config: HfConfig) -> dict[str, Any]:
    """Architecture fields for ``TransformerConfig``; layout, precision, fusions and dropout are the caller's."""
    return family_of(hf_config).transformer(hf_config)


def gpt_model_kwargs(hf_config: HfConfig) -> dict[str, Any]:
    """Architecture arguments for ``GPTModel``, and ``inverse_frequencies`` for its rotary embedding.

    ``vocab_size`` is the true one; the caller may round it up for tensor parallelism. The rows added are loaded as
    zero and never exported; they have logit 0 and must be masked wherever a softmax is taken.

    ``inverse_frequencies`` (float32 values) is no argument of ``GPTModel``: take it out and put it, as a tensor, into
    the model's ``rotary_pos_emb.inv_freq``. ``attach_hf_config`` refuses a model with other frequencies.
    """
    head_dim = family_of(hf_config).transformer(hf_config)["kv_channels"]
    return {
        "vocab_size": need(hf_config, "vocab_size"),
        "max_sequence_length": context_length(hf_config) or need(hf_config, "max_position_embeddings"),
        "position_embedding_type": "rope",
        "rotary_base": float(need(rotary_parameters(hf_config), "rope_theta")),
        "rotary_percent": rotary_fraction(hf_config),
        "inverse_frequencies": inverse_frequencies(hf_config, head_dim).tolist(),
        "share_embeddings_and_output_weights": _tied(hf_config),
    }


def attach_hf_config(chunks: Sequence[GPTModel], hf_config: HfConfig, *, backbone: bool = False) -> None:
    """Tell the bridge which checkpoint format these chunks stand for; ``load_hf`` does it by itself.

    With ``backbone`` they stand for all of it but the output layer: what their own ``output_layer`` holds is in no
    Hugging Face tensor, and the embedding is tied to nothing.

    Needed before a model is exported that was never loaded from a Hugging Face folder (random weights, or a
    resumed Megatron checkpoint). Raises BridgeError where the built model differs from ``hf_config``.
    """
    expected, models = transformer_config_kwargs(hf_config), _unwrap(chunks)
    if getattr(models[0], "hf_config", None) != hf_config:
        _PLANS.pop(models[0], None)
    for chunk in models:
        for key, value in expected.items():
            _require_equal(key, getattr(chunk.config, key), value)
        tied = _tied(hf_config) and not backbone
        _require_equal("share_embeddings_and_output_weights", chunk.share_embeddings_and_output_weights, tied)
        built = getattr(getattr(chunk, "rotary_pos_emb", None), "inv_freq", None)
        frequencies = inverse_frequencies(hf_config, expected["kv_channels"])
        if built is not None and not built.is_meta and not torch.equal(built.cpu(), frequencies):
            raise BridgeError("the model's rotary_pos_emb.inv_freq are not those of config.json; see gpt_model_kwargs")
        chunk.hf_config, chunk.hf_backbone = dict(hf_config), backbone


def plan_model(chunks: Sequence[GPTModel]) -> ModelPlan:
    """The plan of the model whose chunks of this rank are given.

    Collective over ``ModelPlan.group`` the first time; later calls return the same plan. It holds parameters by
    identity, so their values may be replaced, also through ``.data``, but not the parameters.

    Raises:
        BridgeError: no configuration is attached, a parameter is not in the family's table, two parameters map
            the same tensor, or a shard is on no rank.
    """
    models = _unwrap(chunks)
    for module in (module for model in models for module in model.modules()):
        bias = getattr(module, "expert_bias", None)
        # Undoes a cast of the routers' biases to the parameters' dtype, as Megatron's router does before it computes.
        if isinstance(bias, Tensor) and bias.dtype != torch.float32:
            bias.data = bias.data.float()
    if models[0] not in _PLANS:
        table = _Table(models)
        mine = [(name, tuple(t.shape), t.dtype, table.shard(name)) for name, t in table.local.items()]
        ranks = distributed.get_process_group_ranks(table.group)
        holders: dict[str, list[list[int]]] = {}
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for rank, entries in sorted(zip(ranks, gathered(mine, table.group), strict=True), key=lambda pair: pair[0]):
            for name, shape, dtype, shard in entries:
                if shapes.setdefault(name, (shape, dtype)) != (shape, dtype):
                    raise BridgeError(f"{name} is {shapes[name]} on one rank and {(shape, dtype)} on rank {rank}")
                holders.setdefault(name, [[] for _ in range(table.shards(name))])[shard].append(rank)
        _PLANS[models[0]] = table.plan([(name, *shapes[name], tuple(map(tuple, holders[name]))) for name in shapes])
    return _PLANS[models[0]]


def plan_rank(chunks: Sequence[GPTModel]) -> ModelPlan:
    """The plan of what this rank alone holds, without communication: for models on the meta device.

    Every entry of ``owners`` is this rank, whoever else holds the parameter.
    """
    models = _unwrap(chunks)
    table = _Table(models)
    rank = distributed.get_rank()
    return table.plan(
        [(name, tuple(t.shape), t.dtype, ((rank,),) * table.shards(name)) for name, t in table.local.items()]
    )


_PLANS: WeakKeyDictionary[nn.Module, ModelPlan] = WeakKeyDictionary()
"""By the first chunk of a rank."""

_Entry = tuple[str, tuple[int, ...], torch.dtype, tuple[tuple[int, ...], ...]]
"""Name, shard shape, dtype and the holders of each shard."""


class _Table:
    """What is known of a model without communication."""

    def __init__(self, models: list[Any]) -> None:
        if getattr(models[0], "hf_config", None) is None:
            raise BridgeError("the model has no Hugging Face configuration; call attach_hf_config(chunks, hf_config)")
        self.hf_config: HfConfig = models[0].hf_config
        self.family, self.backbone = family_of(self.hf_config), bool(getattr(models[0], "hf_backbone", False))
        config, groups = models[0].config, models[0].pg_collection
        self.tp, self.expert_tp, expert = groups.tp, groups.tp, None
        self.group = groups.mp
        if experts := getattr(config, "num_moe_experts", None):
            self.expert_tp, expert = groups.expt_tp, groups.ep
            if expert.size() > 1 or self.expert_tp.size() != self.tp.size():
                self.group = distributed.group.WORLD
        first_expert = 0 if expert is None else experts // expert.size() * expert.rank()
        self.local = dict(_global_tensors(models, first_expert))
        self.sizes = Sizes(
            vocab=need(self.hf_config, "vocab_size"),
            heads=config.num_attention_heads,
            query_groups=config.num_query_groups,
            head_dim=config.kv_channels,
            tp=self.tp.size(),
        )

    def shards(self, name: str) -> int:
        return (self.expert_tp if EXPERT.search(name) else self.tp).size()

    def shard(self, name: str) -> int:
        return (self.expert_tp if EXPERT.search(name) else self.tp).rank()

    def plan(self, entries: list[_Entry]) -> ModelPlan:
        tied = _tied(self.hf_config)
        parameters, seen = [], dict[str, str]()
        for name, shape, dtype, holders in sorted(entries, key=lambda entry: _position(entry[0])):
            head = name.startswith(_OUTPUT_LAYER) and self.backbone
            tied_copy = tied and name == _OUTPUT and not head
            matrix_shape = (shape[0], torch.Size(shape[1:]).numel())
            sizes = replace(self.sizes, tp=len(holders))
            if head:
                source = f"value_head.{name.removeprefix(_OUTPUT_LAYER)}"
                packing = Packing((source,), matrix_shape[:1], 1, *matrix_shape, Split.REPLICATED)
            else:
                packing = self.family.packing(_EMBEDDING if tied_copy else name, matrix_shape, sizes)
            if packing.split is Split.REPLICATED:
                holders = (tuple(sorted({rank for ranks in holders for rank in ranks})),)
            if () in holders:
                raise BridgeError(f"no rank holds shard {holders.index(())} of {len(holders)} of {name}")
            owners = tuple(ranks[0] for ranks in holders)
            for source in () if tied_copy else packing.sources:
                if source in seen:
                    raise BridgeError(f"{source} is mapped twice: to {seen[source]} and to {name}")
                seen[source] = name
            parameters.append(PlannedParameter(name, shape, dtype, owners, packing, tied_copy, holders, head))
        shard = {p.name: self.shard(p.name) if len(p.owners) > 1 else 0 for p in parameters if p.name in self.local}
        return ModelPlan(parameters, self.local, shard, self.group, tied, self.hf_config)


def in_order(parameters: Sequence[PlannedParameter]) -> list[PlannedParameter]:
    """As a plan has them: the embedding, the layers by number, then the rest."""
    return sorted(parameters, key=lambda parameter: _position(parameter.name))


def as_matrix(tensor: Tensor) -> Tensor:
    """A two-dimensional view: ``[n]`` becomes ``[n, 1]``."""
    return tensor.view(tensor.shape[0], -1)


def _unwrap(chunks: Sequence[Any]) -> list[Any]:
    """Strip DDP, Float16Module and their like, which all hold the model as ``module``."""
    models = []
    for chunk in chunks:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        models.append(chunk)
    return models


def _tied(hf_config: HfConfig) -> bool:
    return bool(hf_config.get("tie_word_embeddings", False))


def _require_equal(key: str, built: Any, expected: Any) -> None:
    if built != expected:
        raise BridgeError(f"the model was built with {key}={built!r}, but config.json means {expected!r}")


def _global_tensors(models: list[Any], first_expert: int) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of this rank under their global names.

    ``layer_number`` counts from 1 over all stages; expert numbers are local to an expert-parallel rank.
    """
    for model in models:
        kept = model.state_dict(keep_vars=True)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name not in kept:
                continue
            if match := _LAYER.match(name):
                number = model.decoder.layers[int(match[1])].layer_number - 1
                tail = EXPERT.sub(lambda found: found[1] + str(first_expert + int(found[2])), name[match.end() :])
                name = f"decoder.layers.{number}.{tail}"
            yield name, tensor


def _position(name: str) -> int:
    """Sort key: the embedding, the layers by number, then the rest; equal keys keep their order."""
    match = _LAYER.match(name)
    if match:
        return int(match[1])
    return -1 if name == _EMBEDDING else 1 << 30
