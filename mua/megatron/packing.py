"""Packs sequences of unequal length into rows, the same plan on every rank."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from mua.config.schema import MegatronConfig
from mua.errors import MuaError
from mua.megatron import trees
from mua.megatron.trees import Forest
from mua.megatron.workload import Spread, Workload
from mua.types import Int32Array, TrainSequence

LITTLE_PADDING = 0.02
"""Share of positions that rows of one length may waste before more rows are tried."""

LOOKS = 8
"""Pairs of rows that are considered when rows are evened out, a sequence."""

_Part: TypeAlias = tuple[int, list[int]]
"""The cost of a rank's rows, and their places in descending order of cost."""
_Exchange: TypeAlias = tuple[int, int, int]
"""How far apart it leaves two rows or ranks, what the dearer gives, and what it takes: a sequence, or their number for
nothing."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """What lengths are rounded up to, so that rows divide over the ranks that share them."""

    sequence: int = 1
    """Each sequence becomes a multiple of this."""
    row: int = 1
    """The row becomes a multiple of this, itself a multiple of ``sequence``; the rest is a sequence of padding."""

    @classmethod
    def of(cls, config: MegatronConfig) -> Alignment:
        """For a layout: sequence parallelism divides a row, context parallelism every sequence, into two chunks a
        rank, and then what each rank holds is divided again."""
        if config.context_parallel == 1:
            return cls(1, config.tensor_parallel)
        return cls(2 * config.context_parallel, config.context_parallel * math.lcm(2, config.tensor_parallel))

    def padded(self, lengths: Sequence[int], least: int = 0) -> list[int]:
        """Each sequence's padded length, then the length of the padding at the end, if any.

        The row has at least ``least`` positions. An empty row is padding alone: it still computes."""
        padded = [aligned(length, self.sequence) for length in lengths]
        rest = aligned(max(sum(padded), least), self.row) - sum(padded)
        return [*padded, rest] if rest else padded


@dataclass(frozen=True, slots=True)
class Plan:
    """Which sequences form which row. One row is one micro-batch."""

    rows: tuple[tuple[tuple[int, ...], ...], ...]
    """``rows[rank][i]``: indices of the sequences in the i-th row of that data-parallel rank; may be empty.

    Every rank has the same number of rows."""
    tokens: int
    """Tokens of all sequences."""
    padded_tokens: int
    """Positions computed, over all ranks: tokens plus alignment and empty rows."""
    least: int
    """Positions every row has at least: those of the longest where all rows must be of one length, else 0."""

    @property
    def row_count(self) -> int:
        """Rows over all ranks, empty ones included."""
        return sum(len(rows) for rows in self.rows)

    @property
    def padding_share(self) -> float:
        """Share of computed positions that hold no token, 0 to 1."""
        return 1.0 - self.tokens / self.padded_tokens


def plan_rows(
    lengths: Sequence[int],
    max_tokens_per_microbatch: int,
    ranks: int,
    alignment: Alignment = Alignment(),
    *,
    multiple: int = 1,
    equal: bool = False,
    costs: Sequence[int] | None = None,
    lockstep: bool = False,
) -> Plan:
    """Distributes sequences over rows and rows over data-parallel ranks.

    First-fit-decreasing (Johnson, 1973) gives the number of rows, rounded up to a multiple of ``ranks * multiple``.
    Over that many rows the sequences are levelled by cost, dearest first into the cheapest row that has room (Graham's
    longest processing time first, 1969); where a sequence finds no room, the first-fit rows stand. Then rows exchange
    sequences while that evens them out, are dealt to ranks, and, given ``costs``, ranks exchange sequences likewise:
    where one sequence fills a row, rows cannot be even and ranks still can.

    The plan depends on nothing but the arguments, and which sequences share a row not on ``alignment``; without
    ``costs`` it is the same for all ``ranks`` and ``multiple`` that give as many rows.

    Args:
        lengths: tokens of each sequence, at least 1.
        max_tokens_per_microbatch: most tokens in one row, padding not counted.
        ranks: data-parallel ranks.
        alignment: what sequences and rows are padded to.
        multiple: a rank's number of rows is a multiple of this.
        equal: pad all rows to the length of the longest. Then rows are levelled by tokens, as every row computes as
            many as the fullest has, ranks only by which rows they are dealt, and there may be more rows, up to twice
            as many, where that leaves less padding.
        costs: work of each sequence, in any unit; None: its tokens.
        lockstep: ranks wait for each other in every row, so that even rows count for more than even ranks.

    Raises:
        MuaError: a sequence is longer than a row.
    """
    for index, length in enumerate(lengths):
        if length > max_tokens_per_microbatch:
            raise MuaError(
                f"sequence {index} has {length} tokens, more than megatron.max_tokens_per_microbatch "
                f"{max_tokens_per_microbatch}; raise the key or lower rollout.max_tokens"
            )
    items = _Items.of(lengths, lengths if equal or costs is None else costs, max_tokens_per_microbatch)
    rows = _even_rows(items, ranks * multiple, equal=equal)
    dealt = _dealt(costs or lengths, rows, ranks)
    if costs is not None and not equal and not lockstep:
        _level_ranks(dealt, items)
    padded = [sum(alignment.padded([lengths[index] for index in row])) for rank in dealt for row in rank]
    least = max(padded) if equal else 0
    planned = tuple(tuple(tuple(sorted(row)) for row in rank) for rank in dealt)
    return Plan(planned, sum(lengths), sum(max(size, least) for size in padded), least)


@dataclass(frozen=True, slots=True)
class Row:
    """One packed micro-batch."""

    sequences: tuple[int, ...]
    """Indices into the batch."""
    forest: Forest
    """How they share tokens; indices count within this row."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Every rank's rows."""

    plan: Plan
    """Over trees of sequences that share what they begin with, each of a single sequence where nothing is merged."""
    rows: tuple[tuple[Row, ...], ...]
    """``rows[rank]``: of each data-parallel rank."""
    tokens: int
    """Tokens of all sequences, shared ones counted for each."""
    spread: Spread
    """How evenly the work lies."""

    @property
    def merged_share(self) -> float:
        """Share of tokens that need not be computed because another sequence begins with them."""
        return 1.0 - self.plan.tokens / max(1, self.tokens)


def pack(
    ids: Sequence[Int32Array],
    config: MegatronConfig,
    alignment: Alignment,
    *,
    workload: Workload,
    multiple: int = 1,
    equal: bool = False,
) -> Packed:
    """Lays sequences (their ids) into rows for a layout; see :func:`plan_rows`.

    Args:
        workload: of the model; it measures the spread, and with ``megatron.balance: flops`` it is what is levelled.
        multiple: a rank's number of rows is a multiple of this.
        equal: all rows have one length.

    Raises:
        MuaError: a sequence is longer than a row.
    """
    capacity, ranks = config.max_tokens_per_microbatch, config.data_parallel
    if config.merge_prefixes:
        members, forests = _forests(ids, capacity, ranks * multiple, alignment)
        sizes = [sum(aligned(len(node), alignment.sequence) for node in forest.nodes) for forest in forests]
        capacity = max([capacity, *sizes])  # nodes are padded one by one; padding does not count
    else:
        members, forests = [[index] for index in range(len(ids))], [trees.separate([len(one)]) for one in ids]
        sizes = [len(one) for one in ids]
    costs = [workload.operations(_spans(forest)) for forest in forests] if config.balance == "flops" else None
    lockstep = _in_lockstep(config)
    plan = plan_rows(sizes, capacity, ranks, alignment, multiple=multiple, equal=equal, costs=costs, lockstep=lockstep)
    plan = replace(plan, tokens=sum(forest.tokens for forest in forests))
    rows = tuple(
        tuple(Row(tuple(i for t in row for i in members[t]), trees.joined([forests[t] for t in row])) for row in rank)
        for rank in plan.rows
    )
    return Packed(plan, rows, sum(map(len, ids)), spread(rows, config, alignment, workload, plan.least))


def spread(
    rows: Sequence[Sequence[Row]], config: MegatronConfig, alignment: Alignment, workload: Workload, least: int = 0
) -> Spread:
    """How evenly the work of ``rows[rank]`` lies in a layout, rows of at least ``least`` positions."""
    computed = [[_padded(row.forest, alignment, least) for row in rank] for rank in rows]
    useful = sum(workload.operations(_spans(row.forest)) for rank in rows for row in rank)
    return Spread.of(
        [[sum(length for _, length in spans) for spans in rank] for rank in computed],
        [[workload.operations(spans) for spans in rank] for rank in computed],
        useful,
        lockstep=_in_lockstep(config),
    )


def _in_lockstep(config: MegatronConfig) -> bool:
    """Whether experts are spread over data-parallel ranks, which then exchange tokens in every layer."""
    experts = config.expert_parallel * (config.expert_tensor_parallel or config.tensor_parallel)
    return experts > config.tensor_parallel * config.context_parallel


def _spans(forest: Forest) -> list[tuple[int, int]]:
    return [(node.start, len(node)) for node in forest.nodes]


def _padded(forest: Forest, alignment: Alignment, least: int) -> list[tuple[int, int]]:
    """A row's runs of positions as they are computed: start and length, padding at its end as a run of its own."""
    lengths = alignment.padded([len(node) for node in forest.nodes], least)
    starts = [node.start for node in forest.nodes] + [0] * (len(lengths) - len(forest.nodes))
    return list(zip(starts, lengths, strict=True))


def _forests(
    ids: Sequence[Int32Array], max_tokens_per_microbatch: int, rows: int, alignment: Alignment
) -> tuple[list[list[int]], list[Forest]]:
    """Sequences in trees that fit a row, small enough that every rank gets some, and the trees."""
    least = max(1, 2 * alignment.sequence)  # sharing less costs more in padding than it saves
    whole = trees.merged(ids, least).tokens
    capacity = min(max_tokens_per_microbatch, max([-(-whole // rows), *(len(sequence) for sequence in ids)]))
    members = trees.groups(ids, capacity, least)
    return members, [trees.merged([ids[i] for i in group], least) for group in members]


def aligned(count: int, multiple: int) -> int:
    """``count`` rounded up to a multiple of ``multiple``, at least one."""
    return max(1, -(-count // multiple)) * multiple


def _sums(values: Sequence[int], rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(values[index] for index in row) for row in rows]


def _descending(values: Sequence[int]) -> list[int]:
    return sorted(range(len(values)), key=lambda index: (-values[index], index))


def _first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    free: list[int] = []
    for index in _descending(lengths):
        length = lengths[index]
        row = next((i for i, space in enumerate(free) if space >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(capacity)
        rows[row].append(index)
        free[row] -= length
    return rows


@dataclass(frozen=True, slots=True)
class _Items:
    """What is to be laid into rows. The arrays end with nothing: a sequence without tokens and cost."""

    costs: Sequence[int]
    cost: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    capacity: int

    @classmethod
    def of(cls, lengths: Sequence[int], costs: Sequence[int], capacity: int) -> Self:
        return cls(costs, np.array([*costs, 0], dtype=np.int64), np.array([*lengths, 0], dtype=np.int64), capacity)

    @property
    def count(self) -> int:
        return len(self.costs)


def _even_rows(items: _Items, multiple: int, *, equal: bool) -> list[list[int]]:
    """A multiple of ``multiple`` rows, as few as first-fit needs; if ``equal``, the fewest of little padding."""
    first_fit = _first_fit(items.size[:-1].tolist(), items.capacity)
    fewest = aligned(len(first_fit), multiple)
    tried: list[tuple[float, list[list[int]]]] = []
    for count in range(fewest, 2 * fewest + 1, multiple):
        rows = _levelled(items, count) or [*map(list, first_fit), *([] for _ in range(count - len(first_fit)))]
        _level(rows, items)
        sizes = [int(items.size[row].sum()) for row in rows]
        padding = 1.0 - sum(sizes) / max(1, count * max(sizes))
        if not equal or padding <= LITTLE_PADDING:
            return rows
        tried.append((padding, rows))
    return min(tried, key=lambda trial: trial[0])[1]


def _levelled(items: _Items, count: int) -> list[list[int]] | None:
    """Dearest first into the cheapest row with room, or None where a sequence finds none."""
    rows: list[list[int]] = [[] for _ in range(count)]
    spent, free = np.zeros(count), np.full(count, items.capacity)
    for index in _descending(items.costs):
        row = int(np.where(free >= items.size[index], spent, np.inf).argmin())
        if free[row] < items.size[index]:
            return None
        rows[row].append(index)
        spent[row] += items.cost[index]
        free[row] -= items.size[index]
    return rows


def _level(rows: list[list[int]], items: _Items) -> None:
    """While it evens them out, the dearest row gives a sequence to another, for a cheaper one or for nothing.

    The other is the cheapest row that this brings closer to it. No row gets dearer than the dearest was. At most one
    exchange a sequence is made, and :data:`LOOKS` a sequence are considered.
    """
    spent, looks, made = _sums(items.costs, rows), LOOKS * items.count, 0
    while looks > 0 and made < items.count:
        high = spent.index(max(spent))
        for low in sorted(range(len(rows)), key=spent.__getitem__)[:looks]:
            looks -= 1
            found = _exchange(rows[high], rows[low], spent[high] - spent[low], items)
            if found is not None:
                break
        else:
            return
        made += 1
        _swap(rows[high], rows[low], found, items)
        for row in (high, low):
            spent[row] = sum(items.costs[index] for index in rows[row])


def _level_ranks(dealt: list[list[list[int]]], items: _Items) -> None:
    """The same between the dearest and the cheapest rank, whose rows of one deal exchange sequences."""
    for _ in range(items.count):
        spent = [sum(_sums(items.costs, rank)) for rank in dealt]
        high, low = (dealt[spent.index(bound)] for bound in (max(spent), min(spent)))
        gap = max(spent) - min(spent)
        found = [_exchange(one, other, gap, items) for one, other in zip(high, low, strict=True)]
        possible = [(exchange, deal) for deal, exchange in enumerate(found) if exchange is not None]
        if not possible:
            return
        exchange, deal = min(possible)
        _swap(high[deal], low[deal], exchange, items)


def _exchange(high: Sequence[int], low: Sequence[int], gap: int, items: _Items) -> _Exchange | None:
    """Which sequences to exchange between two rows with room for it, to bring what is ``gap`` apart closest together;
    None where nothing does."""
    given, taken = np.array(high, dtype=np.int64), np.array([*low, items.count])
    moved, grown = (values[given][:, None] - values[taken][None] for values in (items.cost, items.size))
    room_low, room_high = (items.capacity - items.size[row].sum() for row in (taken, given))
    fits = (grown <= room_low) & (-grown <= room_high) & (moved > 0)
    apart = np.where(fits, np.abs(gap - 2 * moved), gap)
    if not apart.size or apart.min() >= gap:
        return None
    one, other = np.unravel_index(int(apart.argmin()), apart.shape)
    return int(apart[one, other]), int(given[one]), int(taken[other])


def _swap(high: list[int], low: list[int], exchange: _Exchange, items: _Items) -> None:
    _, given, taken = exchange
    high.remove(given)
    low.append(given)
    if taken != items.count:
        low.remove(taken)
        high.append(taken)


def _dealt(costs: Sequence[int], rows: list[list[int]], ranks: int) -> list[list[list[int]]]:
    """Deals the dearest rows first, one to each rank, so that rows which run at the same time are neighbours in cost.

    Which rank gets which row of a deal is decided by differencing (Karmarkar and Karp, 1982; balanced as by Michiels,
    Korst and Aarts, 2003): of all deals the two most uneven are joined, the dearest part of one to the cheapest of the
    other, until one is left. Ranks then are no further apart than the rows of the most uneven deal.
    """
    spent = _sums(costs, rows)
    order = _descending(spent)
    deals: list[tuple[int, int, list[_Part]]] = []
    for start in range(0, len(rows), ranks):
        parts = [(spent[row], [place]) for place, row in enumerate(order[start : start + ranks], start)]
        deals.append((parts[-1][0] - parts[0][0], start, parts))
    heapq.heapify(deals)
    while len(deals) > 1:
        (_, _, one), (_, tie, other) = heapq.heappop(deals), heapq.heappop(deals)
        joined = [(a + b, [*x, *y]) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(deals, (joined[-1][0] - joined[0][0], tie, joined))
    return [[rows[order[place]] for place in sorted(places)] for _, places in deals[0][2]]


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
