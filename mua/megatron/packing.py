"""Packs sequences of unequal length into rows, the same plan on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mua.config.schema import MegatronConfig
from mua.errors import MuaError
from mua.megatron import trees
from mua.megatron.trees import Forest
from mua.types import Int32Array, TrainSequence


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
    tokens_per_row: int,
    ranks: int,
    alignment: Alignment = Alignment(),
    *,
    multiple: int = 1,
    equal: bool = False,
) -> Plan:
    """Distributes sequences over rows and rows over data-parallel ranks.

    First-fit-decreasing (Johnson, 1973) gives the number of rows, rounded up to a multiple of ``ranks * multiple``.
    Over that many rows the sequences are then levelled, longest first into the emptiest row, so that ranks and
    pipeline stages wait little for each other; where that overflows a row, the first-fit rows stand. The plan depends
    on nothing but the arguments, and which sequences share a row not on ``alignment``.

    Args:
        lengths: tokens of each sequence, at least 1.
        tokens_per_row: most tokens in one row, padding not counted.
        ranks: data-parallel ranks.
        alignment: what sequences and rows are padded to.
        multiple: a rank's number of rows is a multiple of this.
        equal: pad all rows to the length of the longest.

    Raises:
        MuaError: a sequence is longer than a row.
    """
    for index, length in enumerate(lengths):
        if length > tokens_per_row:
            raise MuaError(
                f"sequence {index} has {length} tokens, more than megatron.tokens_per_row {tokens_per_row}; raise the "
                "key or lower rollout.max_tokens"
            )
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    rows = _first_fit(lengths, order, tokens_per_row)
    count = aligned(len(rows), ranks * multiple)
    levelled = _levelled(lengths, order, count)
    if max(_sizes(lengths, levelled)) <= tokens_per_row:
        rows = levelled
    rows += [[] for _ in range(count - len(rows))]
    padded = [sum(alignment.padded([lengths[index] for index in row])) for row in rows]
    least = max(padded) if equal else 0
    return Plan(_assign(lengths, rows, ranks), sum(lengths), sum(max(size, least) for size in padded), least)


@dataclass(frozen=True, slots=True)
class Row:
    """One packed row."""

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

    @property
    def merged_share(self) -> float:
        """Share of tokens that need not be computed because another sequence begins with them."""
        return 1.0 - self.plan.tokens / max(1, self.tokens)


def pack(
    ids: Sequence[Int32Array], config: MegatronConfig, alignment: Alignment, *, multiple: int = 1, equal: bool = False
) -> Packed:
    """Lays sequences (their ids) into rows for a layout; see :func:`plan_rows`."""
    lengths, ranks = [len(sequence) for sequence in ids], config.data_parallel
    if not config.merge_prefixes:
        plan = plan_rows(lengths, config.tokens_per_row, ranks, alignment, multiple=multiple, equal=equal)
        rows = [[Row(row, trees.separate([lengths[i] for i in row])) for row in rank] for rank in plan.rows]
        return Packed(plan, tuple(map(tuple, rows)), sum(lengths))
    members, forests = _forests(ids, config.tokens_per_row, ranks * multiple, alignment)
    sizes = [sum(aligned(len(node), alignment.sequence) for node in forest.nodes) for forest in forests]
    capacity = max([config.tokens_per_row, *sizes])  # nodes are padded one by one; padding does not count
    plan = plan_rows(sizes, capacity, ranks, alignment, multiple=multiple, equal=equal)
    plan = replace(plan, tokens=sum(forest.tokens for forest in forests))
    rows = [
        [Row(tuple(i for t in row for i in members[t]), trees.joined([forests[t] for t in row])) for row in rank]
        for rank in plan.rows
    ]
    return Packed(plan, tuple(map(tuple, rows)), sum(lengths))


def _forests(
    ids: Sequence[Int32Array], tokens_per_row: int, rows: int, alignment: Alignment
) -> tuple[list[list[int]], list[Forest]]:
    """Sequences in trees that fit a row, small enough that every rank gets some, and the trees."""
    least = max(1, 2 * alignment.sequence)  # sharing less costs more in padding than it saves
    whole = trees.merged(ids, least).tokens
    capacity = min(tokens_per_row, max([-(-whole // rows), *(len(sequence) for sequence in ids)]))
    members = trees.groups(ids, capacity, least)
    return members, [trees.merged([ids[i] for i in group], least) for group in members]


def aligned(count: int, multiple: int) -> int:
    """``count`` rounded up to a multiple of ``multiple``, at least one."""
    return max(1, -(-count // multiple)) * multiple


def _sizes(lengths: Sequence[int], rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(lengths[index] for index in row) for row in rows]


def _first_fit(lengths: Sequence[int], order: Sequence[int], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    free: list[int] = []
    for index in order:
        length = lengths[index]
        row = next((i for i, space in enumerate(free) if space >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(capacity)
        rows[row].append(index)
        free[row] -= length
    return rows


def _levelled(lengths: Sequence[int], order: Sequence[int], count: int) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in range(count)]
    sizes = np.zeros(count, dtype=np.int64)
    for index in order:
        row = int(sizes.argmin())
        rows[row].append(index)
        sizes[row] += lengths[index]
    return rows


def _assign(lengths: Sequence[int], rows: list[list[int]], ranks: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Deals rows, longest first, to the rank with the fewest tokens that still lacks a row."""
    sizes = _sizes(lengths, rows)
    per_rank = len(rows) // ranks
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for row in sorted(range(len(rows)), key=lambda row: (-sizes[row], row)):
        rank = min((r for r in range(ranks) if len(dealt[r]) < per_rank), key=lambda r: (load[r], r))
        dealt[rank].append(row)
        load[rank] += sizes[row]
    return tuple(tuple(tuple(sorted(rows[row])) for row in rank) for rank in dealt)


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
