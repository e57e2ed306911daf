"""One packed micro-batch as tensors, and the one place where a token meets the position that predicts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from mua.megatron.tiles import IndexArray, gathered_order, zigzag
from mua.megatron.trees import Forest, separate
from mua.types import TrainSequence


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


def micro_batch(
    sequences: Sequence[TrainSequence],
    alignment: Alignment,
    plan: PackingPlan | None = None,
    forest: Forest | None = None,
    *,
    scoring: bool = False,
) -> MicroBatch:
    """Scores the trained tokens, those whose weight is not 0, or every token but the first of each sequence.

    Args:
        sequences: of the micro-batch, none of which may train its first token; none make a micro-batch of padding.
        plan: of the batch that it belongs to; None: it is the whole batch.
        forest: which tokens the sequences share; without one they lie side by side.
        scoring: every token but first ones is scored, and only log-probabilities are asked for.
    """
    forest = forest or separate([len(sequence) for sequence in sequences])
    lengths = [len(node) for node in forest.nodes]
    padded = alignment.padded(lengths, plan.least if plan else 0)
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    own = zigzag(padded, size, rank)
    # Of each position its index in the nodes laid end to end, or -1 for padding.
    source, first, start = np.full(sum(padded), -1, dtype=np.int64), 0, 0
    for length, room in zip(lengths, padded, strict=False):  # ``padded`` may end with padding alone
        source[start : start + length] = np.arange(first, first + length)
        first, start = first + length, start + room
    source = source[own]
    ids = _laid_out([sequence.ids for sequence in sequences], forest).astype(np.int64)
    scored, predictors = _scored(sequences, forest, source, scoring)
    experts, routed = _experts(sequences, forest, source)
    depths = [node.start for node in forest.nodes] + [0] * (len(padded) - len(lengths))
    positions = np.concatenate([start + np.arange(room) for start, room in zip(depths, padded, strict=True)])
    whole = np.concatenate([*(sequence.ids for sequence in sequences), np.zeros(0, dtype=np.int32)]).astype(np.int64)
    return MicroBatch(
        ids=_placed(np.where(source >= 0, np.append(ids, 0)[source], 0))[None],
        packing=PackedMicrobatch(
            lengths=tuple(padded),
            used=tuple(lengths),
            parents=tuple(node.parent for node in forest.nodes),
            positions=_placed(positions[own]),
            order=_placed(gathered_order(padded, size)) if size > 1 else None,
            real=_placed(source >= 0),
            experts=experts,
            routed=routed,
            batch_tokens=max(plan.tokens if plan else forest.tokens, 1),
        ),
        predictors=_placed(predictors),
        targets=_placed(whole[scored]),
        scored=_placed(scored),
        tokens=None if scoring else _token_tensors(sequences, scored),
    )


def _laid_out(arrays: Sequence[Any], forest: Forest) -> Any:
    """What belongs to the tokens of every node, from the sequence that holds it, end to end."""
    parts = [arrays[node.sequence][node.start : node.stop] for node in forest.nodes]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def _scored(
    sequences: Sequence[TrainSequence], forest: Forest, source: IndexArray, scoring: bool
) -> tuple[IndexArray, IndexArray]:
    """The scored tokens that this rank's positions predict, and those positions, each ``[N]``.

    A token is its index in the sequences laid end to end. Where a tree branches, one position predicts several.
    """
    first = np.cumsum([0, *(len(node) for node in forest.nodes)])
    nothing = np.zeros(0, dtype=np.int64)
    # For every token of every sequence its index in the nodes laid end to end.
    places = np.concatenate([nothing, *(np.arange(first[n], first[n + 1]) for path in forest.paths for n in path)])
    held = np.full(first[-1] + 1, -1, dtype=np.int64)
    held[source] = np.arange(len(source))
    held[-1] = -1  # padding's source is -1
    masks = [np.arange(len(sequence)) > 0 if scoring else sequence.trained for sequence in sequences]
    scored = np.flatnonzero(np.concatenate([np.zeros(0, dtype=np.bool_), *masks]))  # no mask holds a first token
    predictors = held[places[scored - 1]]
    return scored[predictors >= 0], predictors[predictors >= 0]


def _experts(
    sequences: Sequence[TrainSequence], forest: Forest, source: IndexArray
) -> tuple[Tensor | None, Tensor | None]:
    """The engine's choices of each position, and which are known; see :class:`PackedMicrobatch`."""
    recorded = [sequence.experts for sequence in sequences if sequence.experts is not None]
    if not recorded or len(recorded) < len(sequences):
        return None, None
    whole = _laid_out(recorded, forest)
    ends = np.cumsum([len(node) for node in forest.nodes]) - 1
    unknown = [end for node, end in zip(forest.nodes, ends, strict=True) if node.stop == len(sequences[node.sequence])]
    kind: Any = np.uint8 if whole.dtype == np.uint8 else np.int32  # torch computes with no uint16
    return _placed(whole[source].astype(kind)), _placed((source >= 0) & ~np.isin(source, unknown))


def _placed(values: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(values).to(device())


def _token_tensors(sequences: Sequence[TrainSequence], scored: IndexArray) -> TokenTensors:
    group, lengths = parallel_state.get_context_parallel_group(), [len(sequence) for sequence in sequences]

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

    same = ("weights", "advantages", "behaviour_logprobs", "old_logprobs", "reference_logprobs", "returns")
    return TokenTensors(
        **{name: gathered(name) for name in same},
        old_values=gathered("values"),
        sequence=_placed(np.repeat(np.arange(len(sequences)), lengths)[scored]),
        sequences=len(sequences),
        add_up=add_up,
    )
