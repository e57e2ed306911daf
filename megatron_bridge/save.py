"""Saving a distributed model as a Hugging Face folder, without any rank holding more than a band of foreign rows.

    rank 0: hidden folder, other files, weight files of the final size
    every rank:  for each tensor, in one order
                     holders of the other shards ── band by band ──► the rank that writes it ── pwrite ──► file
    every rank:  flush, tell errors and checksums
    rank 0: checksums, rename

Each parameter goes to the data-parallel replica of the model that has the fewest bytes so far, and within it to that
rank of those that hold its shards, so that all ranks write about as much. All need one shared folder. Sending and
receiving are blocking and in the same order everywhere, so there is no cycle of ranks that wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from megatron_bridge.blocks import BandPart, bands
from megatron_bridge.hf_folder import DEFAULT_SHARD_BYTES, copy_other_files, main_dtype
from megatron_bridge.plan import ModelPlan, PlannedParameter, TensorSpec, as_matrix, plan_model
from megatron_bridge.safetensors_io import SafetensorsWriter
from mua.utils.atomic import hidden_folder, publish_folder, staged_folder, write_error
from mua.utils.checksums import NAME as CHECKSUMS
from mua.utils.checksums import Sidecar, seal
from mua.utils.collective import gathered, raise_together, together

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

BAND_BYTES = 8 << 20
"""Rows that are put together before they are written; another buffer of this size receives them."""


def save_hf(
    chunks: Sequence[GPTModel],
    out: Path,
    *,
    source: Path,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Export ``chunks`` into the folder ``out``; every rank of the job calls it.

    Args:
        source: gives configuration and tokenizer files.
        texts: files by name that stand in ``out`` instead of those of ``source``.

    Raises:
        BridgeError: on every rank, if any failed. Nothing of the folder is left, an older one is as it was.
    """
    folder, leads, dtype = hidden_folder(out), distributed.get_rank() == 0, main_dtype(plan_model(chunks).tensors())
    with ExitStack() as stack:
        with _one_line(out), together():
            if leads:
                stack.enter_context(staged_folder(out))
                copy_other_files(source, folder, dtype, texts)
        with _one_line(out):
            export = ModelExport(chunks, folder, max_shard_bytes)
            stack.callback(export.close)
            export.exchange()
            export.finish()
        with _one_line(out), together():
            if leads:
                publish_folder(folder, out)


@contextmanager
def _one_line(out: Path) -> Iterator[None]:
    """Errors of the operating system are told as :class:`BridgeError`."""
    try:
        yield
    except OSError as error:
        raise write_error(out, error) from error


class ModelExport:
    """The tensors of a model on their way into the weight files of a folder. Collective, but for :meth:`write`.

    Args:
        folder: is there; the first rank makes the files in it.
        head: of a critic, its value head too.
    """

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        folder: Path,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        *,
        head: bool = False,
    ) -> None:
        self._plan, self._folder = plan_model(chunks), folder
        exported, rank = self._plan.exported(head=head), distributed.get_rank()
        self.specs = [spec for parameter in exported for spec in parameter.sources()]
        self._turns = _turns(self._plan, exported)
        own = [spec.name for turn in self._turns if turn.writer == rank for spec in turn.parameter.sources()]
        self._copies: list[tuple[str, Tensor]] = []
        self._error: Exception | None = None
        for first in (True, False):  # rank 0 makes the files, then the others open them
            with together():
                if first is (rank == 0):
                    self._writer = SafetensorsWriter(folder, self.specs, max_shard_bytes, create=first, only=own)

    @torch.no_grad()
    def exchange(self, *, keep: bool = False) -> None:
        """Every tensor goes to the rank that writes it, a band at a time, and into its file.

        With ``keep`` it waits on the host for :meth:`write` instead. After an error the exchange goes on without
        writing, as others wait for it; :meth:`finish` raises it.
        """
        for turn in self._turns:
            if distributed.get_rank() not in turn.ranks:
                continue
            for spec in turn.parameter.sources():
                rows = _rows(self._plan, turn, spec)
                if turn.writer != distributed.get_rank():
                    for _ in rows:
                        pass
                elif keep:
                    self._keep(spec.name, rows)
                else:
                    self._write(spec.name, rows)

    def write(self) -> None:
        """Write what :meth:`exchange` kept: in a thread, if wanted."""
        while self._copies and self._error is None:
            name, rows = self._copies.pop()
            self._write(name, (rows,))

    def _keep(self, name: str, rows: Iterable[Tensor]) -> None:
        copied: list[Tensor] = []
        for band in rows:
            self._try(lambda part: copied.append(part.cpu()), band)
        self._try(lambda: self._copies.append((name, torch.cat(copied))))

    def _write(self, name: str, rows: Iterable[Tensor]) -> None:
        sink = self._writer.sink(name)
        for band in rows:
            self._try(sink.write, band)
        self._try(self._writer.complete, sink)

    def _try(self, call: Callable[..., object], *arguments: object) -> None:
        """A call whose error is kept, as other ranks wait for the rest of the exchange; none after an error."""
        if self._error is None:
            try:
                call(*arguments)
            except Exception as error:
                self._error = error

    def finish(self) -> None:
        """Flush and close the files; the first rank leaves their checksums.

        Raises:
            BridgeError, OSError: on every rank, if writing failed on any.
        """
        raise_together(self._error, naming=True)
        with together():
            self._writer.finish()
        digests = {name: digest for found in gathered(self._writer.digests) for name, digest in found.items()}
        with together():
            if distributed.get_rank() == 0:
                with closing(Sidecar(self._folder / CHECKSUMS, job="export")) as sidecar:
                    for spec in self.specs:
                        sidecar.add(spec.name, digests[spec.name])
                seal(self._folder, self._writer.header_sizes())

    def close(self) -> None:
        """Close the files as they are."""
        self._writer.close()


@dataclass(frozen=True, slots=True)
class _Turn:
    """Who puts a parameter together: of each shard the rank that gives it, and the one that writes."""

    parameter: PlannedParameter
    ranks: tuple[int, ...]
    writer: int


def _turns(plan: ModelPlan, exported: Sequence[PlannedParameter]) -> list[_Turn]:
    """What the replica of this rank writes, the same on all ranks of it. Collective over all ranks."""
    first_ranks = sorted(set(gathered(min(distributed.get_process_group_ranks(plan.group)))))
    replica = first_ranks.index(min(distributed.get_process_group_ranks(plan.group)))
    replicas, written = [0] * len(first_ranks), Counter[int]()  # bytes so far
    turns: list[_Turn] = []
    for number, parameter in enumerate(exported):
        nbytes = sum(spec.nbytes for spec in parameter.sources())
        chosen = replicas.index(min(replicas))
        replicas[chosen] += nbytes
        if chosen == replica:
            ranks = tuple(holders[number % len(holders)] for holders in parameter.holders)
            writer = min(ranks, key=written.__getitem__)
            written[writer] += nbytes
            turns.append(_Turn(parameter, ranks, writer))
    return turns


def _rows(plan: ModelPlan, turn: _Turn, spec: TensorSpec) -> Iterator[Tensor]:
    """On the rank that writes, the rows of one of a parameter's tensors, a band at a time; others send theirs."""
    own, writer, owners, parameter = distributed.get_rank(), turn.writer, turn.ranks, turn.parameter
    cols = parameter.packing.cols
    shard = as_matrix(plan.local[parameter.name].detach())
    pieces = [
        BandPart(owner, b.shard_row, b.shard_col, b.source_row, b.source_col, b.rows, b.cols)
        for index, owner in enumerate(owners)
        for b in parameter.packing.shard_blocks(len(owners), index)
        if b.source == spec.name
    ]
    # What one rank holds in whole needs no buffer.
    max_rows = spec.shape[0] if len(owners) == 1 else max(1, BAND_BYTES // (cols * spec.dtype.itemsize))
    for band in bands(spec.name, pieces, spec.shape[0], cols, max_rows):
        parts = []
        for piece in band.pieces:
            if piece.origin == own:
                part = shard[piece.origin_row : piece.origin_row + piece.rows]
                part = part[:, piece.origin_col : piece.origin_col + piece.cols]
                if own != writer:
                    distributed.send(part.contiguous().view(torch.uint8), dst=writer, group=plan.group)
            elif own == writer:
                part = torch.empty(piece.rows, piece.cols, dtype=parameter.dtype, device=plan.device)
                distributed.recv(part.view(torch.uint8), src=piece.origin, group=plan.group)
            else:
                continue
            parts.append(part)
        if own == writer:
            yield parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
