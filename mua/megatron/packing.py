"""Packs sequences of unequal length into micro-batches, the same plan on every rank."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from mua.config.schema import MegatronConfig
from mua.megatron import trees
from mua.megatron.architecture import Workload
from mua.megatron.trees import Forest
from mua.types import Int32Array, TrainSequence
from mua.utils.errors import MuaError

LITTLE_PADDING = 0.02
"""Share of positions that micro-batches of one length may waste before more of them are tried."""

LOOKS = 8
"""Pairs of micro-batches that are considered when they are balanced, per sequence."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """What lengths are rounded up to, so that micro-batches divide over the ranks that share them."""

    sequence: int = 1
    """Each sequence becomes a multiple of this."""
    microbatch: int = 1
    """Their sum becomes a multiple of this, itself a multiple of ``sequence``; the rest is a sequence of padding."""

    @classmethod
    def of(cls, config: MegatronConfig) -> Alignment:
        """For a layout: sequence parallelism divides a micro-batch, context parallelism every sequence, into two chunks
        per rank, and then what each rank holds is divided again; in float8 into whole blocks of scales."""
        own = config.tensor_parallel * config.token_multiple
        if config.context_parallel == 1:
            return cls(1, own)
        return cls(2 * config.context_parallel, config.context_parallel * math.lcm(2, own))

    def whole(self, tokens: int) -> int:
        """Positions of a micro-batch of ``tokens``, whose sequences need no padding of their own."""
        return aligned(tokens, self.microbatch)

    def padded(self, lengths: Sequence[int], least: int = 0) -> list[int]:
        """Each sequence's padded length, then the length of the padding at the end, if any.

        They have at least ``least`` positions. An empty micro-batch is padding alone: it still computes."""
        padded = [aligned(length, self.sequence) for length in lengths]
        rest = aligned(max(sum(padded), least), self.microbatch) - sum(padded)
        return [*padded, rest] if rest else padded


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """Which sequences form which micro-batch."""

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    """``microbatches[rank][i]``: indices of the sequences in the i-th one of that data-parallel rank; may be empty.

    Every rank has the same number of them."""
    tokens: int
    """Tokens of all sequences."""
    padded_tokens: int
    """Positions computed, over all ranks: tokens plus alignment and empty micro-batches."""
    least: int
    """Positions every micro-batch has at least: those of the longest where all must be of one length, of a full one
    where that length must be the same in every step, else 0."""

    @property
    def count(self) -> int:
        """Micro-batches over all ranks, empty ones included."""
        return sum(len(own) for own in self.microbatches)

    @property
    def padding_share(self) -> float:
        """Share of computed positions that hold no token, 0 to 1."""
        return 1.0 - self.tokens / self.padded_tokens


@dataclass(frozen=True, slots=True)
class LoadBalance:
    """How evenly work lies on data-parallel ranks. An imbalance is 1 where all have the same.

    Ranks wait for each other at the end of a step, when gradients are summed: the busiest counts. Where experts are
    spread over data-parallel ranks they wait in every layer, and in every micro-batch the busiest counts.
    """

    imbalance_tokens: float
    """Positions computed (padding included) on the rank with most, over the mean of ranks."""
    imbalance_flops: float
    """Operations, likewise."""
    microbatch_imbalance_tokens: float
    """Of micro-batches that run at the same time the largest, over their mean; both are summed over the step first."""
    microbatch_imbalance_flops: float
    """Operations, likewise."""
    utilization: float
    """Operations on real tokens over what the ranks could have done until the last was ready, 0 to 1: what padding and
    waiting for other ranks leave. Pipeline bubbles and what kernels reach of the hardware are not in it."""

    @classmethod
    def of(
        cls, tokens: Sequence[Sequence[int]], flops: Sequence[Sequence[int]], useful: int, *, lockstep: bool
    ) -> Self:
        """Args:
        tokens: positions of the i-th micro-batch of each rank, ``[ranks][micro-batches]``.
        flops: its operations.
        useful: operations on real tokens, over all ranks.
        lockstep: ranks wait for each other in every micro-batch.
        """
        work, positions = (np.array(values, dtype=np.float64) for values in (flops, tokens))
        # Of ranks, and of micro-batches that run at the same time.
        (tokens_ranks, tokens_together), (ranks, together) = (
            (float(v.sum(1).max() / mean), float(v.max(0).sum() / mean))
            for v, mean in ((v, v.sum() / len(v)) for v in (positions, work))
        )
        utilization = useful / float(work.sum()) / (together if lockstep else ranks)
        return cls(tokens_ranks, ranks, tokens_together, together, utilization)


@dataclass(frozen=True, slots=True)
class PlannedMicrobatch:
    """One packed micro-batch."""

    sequences: tuple[int, ...]
    """Indices into the batch."""
    lengths: tuple[int, ...]
    """Tokens of each of them."""
    forest: Forest | None = None
    """How they share tokens under ``megatron.merge_prefixes``; indices count within this micro-batch."""

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Its runs of tokens, in the order in which they are laid out: depth in their sequences, and length."""
        if self.forest is None:
            return [(0, length) for length in self.lengths]
        return [(node.start, len(node)) for node in self.forest.nodes]


@dataclass(frozen=True, slots=True)
class Packed:
    """Every rank's micro-batches."""

    plan: PackingPlan
    """Over sequences; under ``megatron.merge_prefixes`` over trees of those that share what they begin with."""
    microbatches: tuple[tuple[PlannedMicrobatch, ...], ...]
    """``microbatches[rank]``: of each data-parallel rank."""
    tokens: int
    """Tokens of all sequences, shared ones counted for each."""
    balance: LoadBalance
    """How evenly the work lies."""

    @property
    def merged_share(self) -> float:
        """Share of tokens that need not be computed because another sequence begins with them."""
        return 1.0 - self.plan.tokens / max(1, self.tokens)


def pack(ids: Sequence[Int32Array], config: MegatronConfig, workload: Workload) -> Packed:
    """Lays sequences (their ids) into micro-batches for a layout; see :func:`plan_microbatches`.

    Args:
        workload: of the model; it measures the balance, and with ``megatron.balance: flops`` it is what is balanced.

    Raises:
        MuaError: a sequence is longer than a micro-batch.
    """
    alignment, capacity, ranks = Alignment.of(config), config.max_tokens_per_microbatch, config.data_parallel
    # Megatron's interleaved schedule passes them on in groups of this many, and cannot announce their lengths.
    interleaved = (config.virtual_pipeline or 1) > 1
    multiple = config.pipeline_parallel if interleaved else 1
    lengths = [len(one) for one in ids]
    members, forests = [[index] for index in range(len(ids))], list[Forest]()
    spans = [[(0, length)] for length in lengths]
    if config.merge_prefixes:
        # In trees that fit a micro-batch, small enough that every rank gets some.
        least = max(1, 2 * alignment.sequence)  # sharing less costs more in padding than it saves
        whole = trees.merge_prefixes(ids, least).tokens
        room = min(capacity, max([-(-whole // (ranks * multiple)), *lengths]))
        members = trees.group_by_prefix(ids, room, least)
        forests = [trees.merge_prefixes([ids[i] for i in group], least) for group in members]
        spans = [[(node.start, len(node)) for node in forest.nodes] for forest in forests]
        lengths = [sum(aligned(length, alignment.sequence) for _, length in runs) for runs in spans]
        capacity = max([capacity, *lengths])  # nodes are padded one by one; padding does not count
    plan = plan_microbatches(
        lengths,
        capacity,
        ranks,
        alignment,
        multiple=multiple,
        equal=interleaved,
        costs=[workload.operations(runs) for runs in spans] if config.balance == "flops" else None,
        lockstep=_lockstep(config),
    )
    plan = replace(plan, tokens=sum(length for runs in spans for _, length in runs))
    if config.one_length:
        least = alignment.whole(config.max_tokens_per_microbatch)
        plan = replace(plan, least=least, padded_tokens=least * plan.count)

    def planned(taken: tuple[int, ...]) -> PlannedMicrobatch:
        indices = tuple(i for one in taken for i in members[one])
        forest = trees.join_forests([forests[one] for one in taken]) if config.merge_prefixes else None
        return PlannedMicrobatch(indices, tuple(len(ids[i]) for i in indices), forest)

    microbatches = tuple(tuple(map(planned, own)) for own in plan.microbatches)
    return Packed(plan, microbatches, sum(map(len, ids)), load_balance(microbatches, config, workload, plan.least))


def load_balance(
    microbatches: Sequence[Sequence[PlannedMicrobatch]], config: MegatronConfig, workload: Workload, least: int = 0
) -> LoadBalance:
    """How evenly the work of ``microbatches[rank]`` lies in a layout, each of at least ``least`` positions."""
    alignment = Alignment.of(config)

    def computed(microbatch: PlannedMicrobatch) -> list[tuple[int, int]]:
        """Runs of positions: start and length, padding at the end as a run of its own."""
        spans = microbatch.spans
        lengths = alignment.padded([length for _, length in spans], least)
        return list(zip([start for start, _ in spans] + [0] * (len(lengths) - len(spans)), lengths, strict=True))

    spans = [[computed(microbatch) for microbatch in own] for own in microbatches]
    return LoadBalance.of(
        [[sum(length for _, length in runs) for runs in own] for own in spans],
        [[workload.operations(runs) for runs in own] for own in spans],
        sum(workload.operations(microbatch.spans) for own in microbatches for microbatch in own),
        lockstep=_lockstep(config),
    )


def _lockstep(config: MegatronConfig) -> bool:
    """Whether experts are spread over data-parallel ranks, which then exchange tokens in every layer."""
    experts = config.expert_parallel * (config.expert_tensor_parallel or config.tensor_parallel)
    return experts > config.tensor_parallel * config.context_parallel


def aligned(count: int, multiple: int) -> int:
    """``count`` rounded up to a multiple of ``multiple``, at least one."""
    return max(1, -(-count // multiple)) * multiple


def plan_microbatches(
    lengths: Sequence[int],
    max_tokens_per_microbatch: int,
    ranks: int,
    alignment: Alignment = Alignment(),
    *,
    multiple: int = 1,
    equal: bool = False,
    costs: Sequence[int] | None = None,
    lockstep: bool = False,
) -> PackingPlan:
    """Distributes sequences over micro-batches and those over data-parallel ranks.

    First-fit-decreasing (Johnson, 1973) gives the number of micro-batches, rounded up to a multiple of ``ranks *
    multiple``. Over that many the sequences are balanced by cost, the most expensive first into the cheapest one that
    has room (Graham's longest processing time first, 1969); where a sequence finds no room, first-fit's stand. Then
    micro-batches exchange sequences while that balances them, are dealt to ranks, and, given ``costs``, ranks exchange
    sequences likewise: where one sequence fills a micro-batch, those cannot be even and ranks still can.

    The plan depends on nothing but the arguments, and which sequences share a micro-batch not on ``alignment``; without
    ``costs`` it is the same for all ``ranks`` and ``multiple`` that give as many micro-batches.

    Args:
        lengths: tokens of each sequence, at least 1.
        max_tokens_per_microbatch: most tokens in one micro-batch, padding not counted.
        ranks: data-parallel ranks.
        alignment: what sequences and micro-batches are padded to.
        multiple: a rank's number of micro-batches is a multiple of this.
        equal: pad all micro-batches to the length of the longest. Then they are balanced by tokens, as every one
            computes as many as the fullest has, ranks only by which they are dealt, and there may be up to twice as
            many, where that leaves less padding.
        costs: work of each sequence, in any unit; None: its tokens.
        lockstep: ranks wait for each other in every micro-batch, so that even micro-batches count for more than even
            ranks.

    Raises:
        MuaError: a sequence is longer than a micro-batch.
    """
    for index, length in enumerate(lengths):
        if length > max_tokens_per_microbatch:
            raise MuaError(
                f"sequence {index} has {length} tokens, more than megatron.max_tokens_per_microbatch "
                f"{max_tokens_per_microbatch}; raise the key or lower rollout.max_tokens"
            )
    balanced = lengths if equal or costs is None else costs
    items = _Items(np.array([*balanced, 0]), np.array([*lengths, 0]), max_tokens_per_microbatch)
    dealt = _dealt(costs or lengths, _balanced_bins(items, ranks * multiple, equal=equal), ranks)
    if costs is not None and not equal and not lockstep:
        _balance_ranks(dealt, items)
    padded = [sum(alignment.padded([lengths[index] for index in taken])) for own in dealt for taken in own]
    least = max(padded) if equal else 0
    planned = tuple(tuple(tuple(sorted(taken)) for taken in own) for own in dealt)
    return PackingPlan(planned, sum(lengths), sum(max(size, least) for size in padded), least)


_Bin = list[int]
"""The sequences of a micro-batch that is being filled."""


@dataclass(frozen=True, slots=True)
class _Items:
    """What is to be laid into bins. The arrays end with nothing: a sequence without tokens and cost."""

    cost: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    capacity: int

    def __len__(self) -> int:
        return len(self.cost) - 1

    def spent(self, taken: _Bin) -> int:
        return int(self.cost[taken].sum())

    def exchange(self, high: _Bin, low: _Bin, gap: int) -> tuple[int, int, int] | None:
        """Which sequences to exchange between two bins with room for it, to bring what is ``gap`` apart closest
        together; None where nothing does.

        Returns:
            how far apart they are left, what the more expensive one gives, and what it takes: a sequence, or their
            number for nothing.
        """
        given, taken = np.array(high, dtype=np.int64), np.array([*low, len(self)])
        moved, grown = (values[given][:, None] - values[taken][None] for values in (self.cost, self.size))
        room_low, room_high = (self.capacity - self.size[one].sum() for one in (taken, given))
        fits = (grown <= room_low) & (-grown <= room_high) & (moved > 0)
        apart = np.where(fits, np.abs(gap - 2 * moved), gap)
        if not apart.size or apart.min() >= gap:
            return None
        one, other = np.unravel_index(int(apart.argmin()), apart.shape)
        return int(apart[one, other]), int(given[one]), int(taken[other])

    def swap(self, high: _Bin, low: _Bin, given: int, taken: int) -> None:
        """Makes an exchange."""
        high.remove(given)
        low.append(given)
        if taken != len(self):
            low.remove(taken)
            high.append(taken)


def _descending(values: Sequence[int]) -> list[int]:
    return sorted(range(len(values)), key=lambda index: (-values[index], index))


def _first_fit(lengths: Sequence[int], capacity: int) -> list[_Bin]:
    bins, free = list[_Bin](), list[int]()
    for index in _descending(lengths):
        place = next((i for i, space in enumerate(free) if space >= lengths[index]), len(bins))
        if place == len(bins):
            bins.append([])
            free.append(capacity)
        bins[place].append(index)
        free[place] -= lengths[index]
    return bins


def _balanced_bins(items: _Items, multiple: int, *, equal: bool) -> list[_Bin]:
    """A multiple of ``multiple`` bins, as few as first-fit needs; if ``equal``, the fewest of little padding."""
    first_fit = _first_fit(items.size[:-1].tolist(), items.capacity)
    fewest = aligned(len(first_fit), multiple)
    tried: list[tuple[float, list[_Bin]]] = []
    for count in range(fewest, 2 * fewest + 1, multiple):
        bins = _longest_first(items, count) or [*map(list, first_fit), *([] for _ in range(count - len(first_fit)))]
        _balance(bins, items)
        sizes = [int(items.size[taken].sum()) for taken in bins]
        padding = 1.0 - sum(sizes) / max(1, count * max(sizes))
        if not equal or padding <= LITTLE_PADDING:
            return bins
        tried.append((padding, bins))
    return min(tried, key=lambda trial: trial[0])[1]


def _longest_first(items: _Items, count: int) -> list[_Bin] | None:
    """Most expensive first into the cheapest bin with room, or None where a sequence finds none."""
    bins: list[_Bin] = [[] for _ in range(count)]
    spent, free = np.zeros(count), np.full(count, items.capacity)
    for index in _descending(items.cost[:-1].tolist()):
        place = int(np.where(free >= items.size[index], spent, np.inf).argmin())
        if free[place] < items.size[index]:
            return None
        bins[place].append(index)
        spent[place] += items.cost[index]
        free[place] -= items.size[index]
    return bins


def _balance(bins: list[_Bin], items: _Items) -> None:
    """While it balances them, the most expensive bin gives a sequence to another, for a cheaper one or for nothing.

    The other is the cheapest bin that this brings closer to it. No bin gets more expensive than the most expensive was.
    At most one exchange per sequence is made, and :data:`LOOKS` per sequence are considered.
    """
    spent, looks, made = [items.spent(taken) for taken in bins], LOOKS * len(items), 0
    while looks > 0 and made < len(items):
        high = spent.index(max(spent))
        for low in sorted(range(len(bins)), key=spent.__getitem__)[:looks]:
            looks -= 1
            found = items.exchange(bins[high], bins[low], spent[high] - spent[low])
            if found is not None:
                break
        else:
            return
        made += 1
        items.swap(bins[high], bins[low], *found[1:])
        for place in (high, low):
            spent[place] = items.spent(bins[place])


def _balance_ranks(dealt: list[list[_Bin]], items: _Items) -> None:
    """The same between the most expensive and the cheapest rank, whose bins of one deal exchange sequences."""
    for _ in range(len(items)):
        spent = [sum(items.spent(taken) for taken in own) for own in dealt]
        high, low = (dealt[spent.index(bound)] for bound in (max(spent), min(spent)))
        gap = max(spent) - min(spent)
        found = [items.exchange(one, other, gap) for one, other in zip(high, low, strict=True)]
        possible = [(exchange, deal) for deal, exchange in enumerate(found) if exchange is not None]
        if not possible:
            return
        (_, given, taken), deal = min(possible)
        items.swap(high[deal], low[deal], given, taken)


def _dealt(costs: Sequence[int], bins: list[_Bin], ranks: int) -> list[list[_Bin]]:
    """Deals the most expensive bins first, one to each rank, so that those which run together cost nearly alike.

    Which rank gets which bin of a deal is decided by differencing (Karmarkar and Karp, 1982; balanced as by Michiels,
    Korst and Aarts, 2003): of all deals the two most uneven are joined, the most expensive part of one to the cheapest
    of the other, until one is left. Ranks then are no further apart than the bins of the most uneven deal.
    """
    spent = [sum(costs[index] for index in taken) for taken in bins]
    order = _descending(spent)
    # Unevenness, tie-breaker, and for each rank the cost of its bins and their places in descending order of cost.
    deals: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for start in range(0, len(bins), ranks):
        parts = [(spent[taken], [place]) for place, taken in enumerate(order[start : start + ranks], start)]
        deals.append((parts[-1][0] - parts[0][0], start, parts))
    heapq.heapify(deals)
    while len(deals) > 1:
        (_, _, one), (_, tie, other) = heapq.heappop(deals), heapq.heappop(deals)
        joined = [(a + b, [*x, *y]) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(deals, (joined[-1][0] - joined[0][0], tie, joined))
    return [[bins[order[place]] for place in sorted(places)] for _, places in deals[0][2]]


def check_first_tokens(sequences: Sequence[TrainSequence]) -> None:
    """Refuses a weight on a sequence's first token, which nothing predicts.

    Raises:
        MuaError: names the sequence.
    """
    for index, sequence in enumerate(sequences):
        if len(sequence) == 0 or sequence.weights[0] != 0:
            raise MuaError(
                f"sequence {index} of the batch is empty or trains its first token, which has no context to be "
                "predicted from; begin every sequence with at least one prompt token"
            )


def check_ids(sequences: Sequence[TrainSequence], vocab_size: int) -> None:
    """Refuses a token that the model has no embedding for.

    Raises:
        MuaError: names the sequence and the token.
    """
    for index, sequence in enumerate(sequences):
        foreign = sequence.ids[(sequence.ids < 0) | (sequence.ids >= vocab_size)]
        if len(foreign):
            raise MuaError(
                f"sequence {index} holds token {foreign[0]}, outside the model's vocabulary of {vocab_size}; was it "
                "made with the tokenizer of another model?"
            )
