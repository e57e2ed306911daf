"""One packed micro-batch as tensors, and the one place where a token meets the position that predicts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mua.algorithms.losses import TokenTensors
from mua.megatron.modules import PackedMicrobatch
from mua.megatron.packing import Alignment, PackingPlan
from mua.megatron.parallel import device
from mua.megatron.place import Place
from mua.megatron.tiles import IndexArray, gathered_order, zigzag
from mua.megatron.trees import Forest, separate
from mua.types import BoolArray, ExpertArray, Float32Array, Int32Array, TrainSequence


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
    behaviour_logprobs: Float32Array | None = None
    old_logprobs: Float32Array | None = None
    reference_logprobs: Float32Array | None = None
    returns: Float32Array | None = None
    values: Float32Array | None = None


OF_LOSS = tuple(field.name for field in fields(Columns) if field.name != "ids")
"""What the loss reads of a sequence, all float32 ``[T]``."""


def micro_batch(
    sequences: Sequence[TrainSequence] | Sequence[Columns],
    alignment: Alignment,
    plan: PackingPlan | None = None,
    forest: Forest | None = None,
    *,
    scoring: bool = False,
    predicts: bool = True,
    experts: ExpertArray | None = None,
) -> MicroBatch:
    """Scores the trained tokens, those whose weight is not 0, or every token but the first of each sequence.

    Args:
        sequences: of the micro-batch, none of which may train its first token; none make a micro-batch of padding.
        plan: of the batch that it belongs to; None: it is the whole batch.
        forest: which tokens the sequences share; without one they lie side by side, and all have ids.
        scoring: every token but first ones is scored, and only log-probabilities are asked for.
        predicts: whether this rank holds the end of the model; else no token is scored here.
        experts: this rank's :func:`expert_rows`; None: the router chooses freely.
    """
    forest = forest or separate([len(sequence.ids) for sequence in sequences if sequence.ids is not None])
    lengths = [len(node) for node in forest.nodes]
    padded = alignment.padded(lengths, plan.least if plan else 0)
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    own = zigzag(padded, size, rank)
    source = _sources(forest, padded)[own]
    scored = predictors = np.zeros(0, dtype=np.int64)
    if predicts:
        masks = None if scoring else [np.not_equal(np.asarray(sequence.weights), 0) for sequence in sequences]
        scored, predictors = predictions(forest, source, masks)
    depths = [node.start for node in forest.nodes] + [0] * (len(padded) - len(lengths))
    positions = np.concatenate([start + np.arange(room) for start, room in zip(depths, padded, strict=True)])
    ids, whole = np.zeros(len(own), dtype=np.int64), np.zeros(0, dtype=np.int64)
    if known := [sequence.ids for sequence in sequences if sequence.ids is not None]:
        ids = np.where(source >= 0, np.append(_laid_out(known, forest), 0)[source], 0).astype(np.int64)
        whole = np.concatenate(known).astype(np.int64)
    return MicroBatch(
        ids=_placed(ids)[None],
        packing=PackedMicrobatch(
            lengths=tuple(padded),
            used=tuple(lengths),
            parents=tuple(node.parent for node in forest.nodes),
            positions=_placed(positions[own]),
            order=_placed(gathered_order(padded, size)) if size > 1 else None,
            real=_placed(source >= 0),
            experts=None if experts is None else _placed(experts.astype(_computable(experts.dtype))),
            routed=None if experts is None else _placed((source >= 0) & ~np.isin(source, _unrouted(forest))),
            batch_tokens=max(plan.tokens if plan else forest.tokens, 1),
        ),
        predictors=_placed(predictors),
        targets=_placed(whole[scored]),
        scored=_placed(scored),
        tokens=None if scoring or not predicts else _token_tensors(sequences, forest, scored),
    )


def positions_of(place: Place, forest: Forest, alignment: Alignment, least: int) -> IndexArray:
    """Of each position of a micro-batch that a rank computes, before sequence parallelism divides them, its index in
    the nodes laid end to end, or -1 for padding."""
    padded = alignment.padded([len(node) for node in forest.nodes], least)
    return _sources(forest, padded)[zigzag(padded, place.contexts, place.context)]


def _sources(forest: Forest, padded: Sequence[int]) -> IndexArray:
    """Of each position of a micro-batch its index in the nodes laid end to end, or -1 for padding."""
    source, first, start = np.full(sum(padded), -1, dtype=np.int64), 0, 0
    for node, room in zip(forest.nodes, padded, strict=False):  # ``padded`` may end with padding alone
        source[start : start + len(node)] = np.arange(first, first + len(node))
        first, start = first + len(node), start + room
    return source


def expert_rows(
    recorded: Sequence[ExpertArray], forest: Forest, alignment: Alignment, least: int, place: Place
) -> ExpertArray:
    """The engine's choices that the routers of one rank replay, ``[positions / (cp * tp), its layers * top k]``.

    Sequence parallelism divides what context parallelism has left of a micro-batch. Rows of padding hold anything.

    Args:
        recorded: of each sequence, ``[T, layers * top k]``.
        least: positions the micro-batch has at least.
    """
    own = np.split(positions_of(place, forest, alignment, least), place.tensors)[place.tensor]
    # Of each row the sequence that holds its token, and where.
    ends = np.cumsum([len(node) for node in forest.nodes])
    node = np.minimum(np.searchsorted(ends, own, side="right"), len(ends) - 1)
    rows = np.zeros((len(own), len(place.layers) * place.top_k), dtype=np.result_type(*recorded))
    for index, one in enumerate(forest.nodes):
        here = np.flatnonzero((node == index) & (own >= 0))
        tokens, given = own[here] - (ends[index] - len(one)) + one.start, recorded[one.sequence]
        for column, run in place.columns:
            rows[here, column : column + len(run)] = given[tokens, run.start : run.stop]
    return rows


def _laid_out(arrays: Sequence[Any], forest: Forest) -> Any:
    """What belongs to the tokens of every node, from the sequence that holds it, end to end."""
    parts = [arrays[node.sequence][node.start : node.stop] for node in forest.nodes]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def predictions(
    forest: Forest, source: IndexArray, masks: Sequence[BoolArray] | None = None
) -> tuple[IndexArray, IndexArray]:
    """The scored tokens that the positions ``source`` predict, and those positions, each ``[N]``.

    A token is its index in the sequences laid end to end. Where a tree branches, one position predicts several.

    Args:
        masks: of each sequence which tokens are scored, never the first; None: all others.
    """
    first = np.cumsum([0, *(len(node) for node in forest.nodes)])
    nothing = np.zeros(0, dtype=np.int64)
    # For every token of every sequence its index in the nodes laid end to end.
    places = np.concatenate([nothing, *(np.arange(first[n], first[n + 1]) for path in forest.paths for n in path)])
    held = np.full(first[-1] + 1, -1, dtype=np.int64)
    held[source] = np.arange(len(source))
    held[-1] = -1  # padding's source is -1
    masks = [np.arange(length) > 0 for length in forest.lengths] if masks is None else masks
    scored = np.flatnonzero(np.concatenate([np.zeros(0, dtype=np.bool_), *masks]))
    predictors = held[places[scored - 1]]
    return scored[predictors >= 0], predictors[predictors >= 0]


def _unrouted(forest: Forest) -> list[int]:
    """Last tokens of sequences, of which no choice is known, in the nodes laid end to end."""
    ends = np.cumsum([len(node) for node in forest.nodes]) - 1
    lengths = forest.lengths
    return [int(end) for node, end in zip(forest.nodes, ends, strict=True) if node.stop == lengths[node.sequence]]


def _computable(kind: np.dtype[Any]) -> Any:
    """torch computes with no uint16."""
    return np.uint8 if kind == np.uint8 else np.int32


def _placed(values: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(values).to(device())


def _token_tensors(
    sequences: Sequence[TrainSequence] | Sequence[Columns], forest: Forest, scored: IndexArray
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
        sequence=_placed(np.repeat(np.arange(len(sequences)), forest.lengths)[scored]),
        sequences=len(sequences),
        add_up=add_up,
    )
