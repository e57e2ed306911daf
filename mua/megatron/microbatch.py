"""One packed micro-batch as tensors, and the one place where a token meets the position that predicts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from mua.algorithms.losses import TokenTensors
from mua.megatron.modules import PackedMicrobatch
from mua.megatron.moe import layers_with_experts
from mua.megatron.packing import Alignment, PackingPlan, PlannedMicrobatch
from mua.megatron.parallel import device
from mua.megatron.trees import IndexArray, gathered_order, zigzag
from mua.types import BoolArray, ExpertArray, Float32Array, Int32Array, TrainSequence


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands in a parallel layout, and what it holds of the model: what decides what it reads."""

    data: int = 0
    context: int = 0
    contexts: int = 1
    tensor: int = 0
    tensors: int = 1
    first: bool = True
    """Whether it holds the beginning of the model, which takes ids."""
    last: bool = True
    """Whether it holds the end, which predicts them."""
    layers: tuple[int, ...] = ()
    """Its layers with experts, counted from 0 over all stages, in the order of :func:`layers_with_experts`."""
    top_k: int = 0

    @classmethod
    def of(cls, chunks: Sequence[GPTModel]) -> Self:
        """This rank's, which holds ``chunks``."""
        return cls(
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
            any(chunk.pre_process for chunk in chunks),
            any(chunk.post_process for chunk in chunks),
            tuple(layer.layer_number - 1 for layer in layers_with_experts(chunks)),
            chunks[0].config.moe_router_topk,
        )

    @property
    def reports(self) -> bool:
        """Whether it holds results that no other rank holds too."""
        return self.last and self.tensor == 0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """This rank's ``T`` positions of a packed micro-batch, of which ``N`` predict a token that is scored.

    Under context parallelism a token and the position that predicts it may lie on different ranks: a scored token
    belongs to the rank of its predictor, so that every one belongs to exactly one rank.
    """

    ids: Tensor
    """int64 ``[1, T]``; padding is token 0, behind each sequence or a sequence of its own."""
    packing: PackedMicrobatch
    """How they are divided."""
    predictors: Tensor
    """int64 ``[N]``: positions whose output predicts a scored token; one may predict several, where a tree branches."""
    targets: Tensor
    """int64 ``[N]``: ids of the scored tokens."""
    scored: Tensor
    """int64 ``[N]``: each scored token's index in the sequences laid end to end, without padding."""
    tokens: TokenTensors | None
    """What the loss reads about the scored tokens; None when only log-probabilities are asked for."""


@dataclass(frozen=True, slots=True)
class Columns:
    """What a rank holds of one sequence, by the names of :class:`mua.types.TrainSequence`; None is what nobody knows,
    or what this rank has no use for."""

    ids: Int32Array | None = None
    weights: Float32Array | None = None
    advantages: Float32Array | None = None
    behavior_logprobs: Float32Array | None = None
    old_logprobs: Float32Array | None = None
    reference_logprobs: Float32Array | None = None
    returns: Float32Array | None = None
    values: Float32Array | None = None


_COMPUTABLE: dict[Any, Any] = {np.dtype(np.uint8): np.uint8}
"""torch computes with no uint16."""

OF_LOSS = tuple(field.name for field in fields(Columns) if field.name != "ids")
"""What the loss reads of a sequence, all float32 ``[T]``."""


def micro_batch(
    sequences: Sequence[TrainSequence] | Sequence[Columns],
    alignment: Alignment,
    plan: PackingPlan | None = None,
    planned: PlannedMicrobatch | None = None,
    *,
    scoring: bool = False,
    predicts: bool = True,
    experts: ExpertArray | None = None,
) -> MicroBatch:
    """Scores the trained tokens, those whose weight is not 0, or every token but the first of each sequence.

    Args:
        sequences: of the micro-batch, none of which may train its first token; none make a micro-batch of padding.
        plan: of the batch that it belongs to; None: it is the whole batch.
        planned: how it is laid out; None: side by side, and all sequences have ids.
        scoring: every token but first ones is scored, and only log-probabilities are asked for.
        predicts: whether this rank holds the end of the model; else no token is scored here.
        experts: this rank's :func:`expert_rows`; None: the router chooses freely.
    """
    known = [sequence.ids for sequence in sequences if sequence.ids is not None]
    planned = planned or PlannedMicrobatch(tuple(range(len(known))), tuple(map(len, known)))
    forest, spans = planned.forest, planned.spans
    lengths = [length for _, length in spans]
    padded = alignment.padded(lengths, plan.least if plan else 0)
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    own = zigzag(padded, size, rank)
    source = _sources(lengths, padded)[own]
    scored = predictors = np.zeros(0, dtype=np.int64)
    if predicts:
        masks = None if scoring else [np.not_equal(np.asarray(sequence.weights), 0) for sequence in sequences]
        scored, predictors = predictions(planned, source, masks)
    depths = [start for start, _ in spans] + [0] * (len(padded) - len(lengths))
    positions = np.concatenate([start + np.arange(room) for start, room in zip(depths, padded, strict=True)])
    ids, whole = np.zeros(len(own), dtype=np.int64), np.zeros(0, dtype=np.int64)
    if known:
        whole = np.concatenate(known).astype(np.int64)
        laid_out = forest.lay_out(known).astype(np.int64) if forest else whole
        ids = np.where(source >= 0, np.append(laid_out, 0)[source], 0)
    last_tokens = forest.last_tokens() if forest else np.cumsum(lengths) - 1
    return MicroBatch(
        ids=_placed(ids)[None],
        packing=PackedMicrobatch(
            lengths=tuple(padded),
            used=tuple(lengths),
            parents=tuple(node.parent for node in forest.nodes) if forest else (),
            positions=_placed(positions[own]),
            order=_placed(gathered_order(padded, size)) if size > 1 else None,
            real=_placed(source >= 0),
            experts=None if experts is None else _placed(experts.astype(_COMPUTABLE.get(experts.dtype, np.int32))),
            # Of the last token of a sequence no choice is known.
            routed=None if experts is None else _placed((source >= 0) & ~np.isin(source, last_tokens)),
            batch_tokens=max(plan.tokens if plan else sum(lengths), 1),
        ),
        predictors=_placed(predictors),
        targets=_placed(whole[scored]),
        scored=_placed(scored),
        tokens=None if scoring or not predicts else _token_tensors(sequences, planned.lengths, scored),
    )


def positions_of(place: Place, planned: PlannedMicrobatch, alignment: Alignment, least: int) -> IndexArray:
    """Of each position of a micro-batch that a rank computes, before sequence parallelism divides them, its index in
    what is laid end to end, or -1 for padding."""
    lengths = [length for _, length in planned.spans]
    padded = alignment.padded(lengths, least)
    return _sources(lengths, padded)[zigzag(padded, place.contexts, place.context)]


def _sources(lengths: Sequence[int], padded: Sequence[int]) -> IndexArray:
    """Of each position of a micro-batch its index in what is laid end to end, or -1 for padding."""
    source, first, start = np.full(sum(padded), -1, dtype=np.int64), 0, 0
    for length, room in zip(lengths, padded, strict=False):  # ``padded`` may end with padding alone
        source[start : start + length] = np.arange(first, first + length)
        first, start = first + length, start + room
    return source


def expert_rows(
    recorded: Sequence[ExpertArray], planned: PlannedMicrobatch, alignment: Alignment, least: int, place: Place
) -> ExpertArray:
    """The engine's choices that the routers of one rank replay, ``[positions / (cp * tp), its layers * top k]``.

    Sequence parallelism divides what context parallelism has left of a micro-batch. Rows of padding hold anything.

    Args:
        recorded: of each sequence, ``[T, layers * top k]``.
        least: positions the micro-batch has at least.
    """
    own = np.split(positions_of(place, planned, alignment, least), place.tensors)[place.tensor]
    laid_out = planned.forest.lay_out(recorded) if planned.forest else np.concatenate(recorded)
    choices = [np.arange(layer * place.top_k, (layer + 1) * place.top_k) for layer in place.layers]
    return laid_out[own[:, None], np.concatenate(choices)]


def predictions(
    planned: PlannedMicrobatch, source: IndexArray, masks: Sequence[BoolArray] | None = None
) -> tuple[IndexArray, IndexArray]:
    """The scored tokens that the positions ``source`` predict, and those positions, each ``[N]``.

    A token is its index in the sequences laid end to end. Where a tree branches, one position predicts several.

    Args:
        masks: of each sequence which tokens are scored, never the first; None: all others.
    """
    masks = [np.arange(length) > 0 for length in planned.lengths] if masks is None else masks
    scored = np.flatnonzero(np.concatenate([np.zeros(0, dtype=np.bool_), *masks]))
    held = np.full(sum(length for _, length in planned.spans) + 1, -1, dtype=np.int64)
    held[source] = np.arange(len(source))
    held[-1] = -1  # padding's source is -1
    before = scored - 1
    predictors = held[planned.forest.places()[before] if planned.forest and len(scored) else before]
    return scored[predictors >= 0], predictors[predictors >= 0]


def _placed(values: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(values).to(device())


def _token_tensors(
    sequences: Sequence[TrainSequence] | Sequence[Columns], lengths: Sequence[int], scored: IndexArray
) -> TokenTensors:
    group = parallel_state.get_context_parallel_group()

    def gathered(name: str) -> Any:
        """None where a sequence does not know it."""
        arrays = [getattr(sequence, name) for sequence in sequences]
        if any(array is None for array in arrays):
            return None
        return _placed(np.concatenate([*arrays, np.zeros(0, dtype=np.float32)])[scored].astype(np.float32))

    def add_up(sums: Tensor) -> Tensor:
        """The sums over the ranks of ``group``, all of which come here for the same micro-batch."""
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        return sums

    found = {name: gathered(name) for name in OF_LOSS}
    return TokenTensors(
        old_values=found.pop("values"),
        **found,
        sequence=_placed(np.repeat(np.arange(len(sequences)), lengths)[scored]),
        sequences=len(sequences),
        add_up=add_up,
    )
