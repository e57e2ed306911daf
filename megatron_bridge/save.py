"""Saving a distributed model as a Hugging Face folder, without any rank holding more than a band of foreign rows.

    rank 0: hidden folder, other files, weight files of the final size
    every rank:  for each tensor, in one order
                     owners of the other shards ── band by band ──► the rank that writes it ── pwrite ──► file
    every rank:  flush, tell errors and checksums
    rank 0: checksums, rename

A tensor is written by one of the ranks that own its shards, in turn over the parameters, so that the work is spread.
All ranks need one shared folder. Sending and receiving are blocking and in the same order everywhere, so there is no
cycle of ranks that wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from megatron_bridge.bands import BandPart, RowBand, bands
from megatron_bridge.hf_folder import (
    DEFAULT_SHARD_BYTES,
    copy_other_files,
    main_dtype,
    write_checksums,
)
from megatron_bridge.plan import ModelPlan, PlannedParameter, TensorSpec, as_matrix, plan_model
from megatron_bridge.safetensors_writer import SafetensorsWriter
from mua.utils.atomic import hidden_folder, publish_folder, staged_folder, write_error
from mua.utils.collective import gathered, raise_together

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
    sync: bool = True,
    checksums: bool = True,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Export ``chunks`` into the folder ``out``; every rank of the job calls it, one replica writes.

    Args:
        source: gives configuration and tokenizer files.
        sync: flush everything to the disk before the folder gets its name. Without it a crash of the machine, not of
            the process, may leave a damaged folder.
        checksums: leave the sidecar that :func:`megatron_bridge.hf_folder.verify_hf_folder` compares with.
        texts: files by name that stand in ``out`` instead of those of ``source``.

    Raises:
        BridgeError: on every rank, if any failed. Nothing of the folder is left, an older one is as it was.
    """
    plan = plan_model(chunks)
    failure: Exception | None = None
    if 0 in distributed.get_process_group_ranks(plan.group):
        try:
            _save(plan, out, source, max_shard_bytes, sync, checksums, texts)
        except Exception as error:  # raised below, once the other replicas have been told
            failure = error
    raise_together(failure)


def _save(
    plan: ModelPlan,
    out: Path,
    source: Path,
    max_shard_bytes: int,
    sync: bool,
    checksums: bool,
    texts: Mapping[str, str] | None,
) -> None:
    specs, leads, errors = plan.tensors(), distributed.get_rank() == 0, _Errors(plan.group, out)
    folder = hidden_folder(out)
    exported = [p for p in plan.parameters if not p.tied_copy]
    writers = [parameter.owners[turn % len(parameter.owners)] for turn, parameter in enumerate(exported)]
    own = [spec.name for parameter, rank in zip(exported, writers, strict=True) if rank == distributed.get_rank()
           for spec in parameter.sources()]  # fmt: skip
    with ExitStack() as stack:
        writer: SafetensorsWriter | None = None
        for turn in (True, False):  # rank 0 makes the files, then the others open them
            with errors.kept():
                if turn is leads:
                    if leads:
                        stack.enter_context(staged_folder(out))
                        copy_other_files(source, folder, main_dtype(specs), texts)
                    writer = SafetensorsWriter(
                        folder, specs, max_shard_bytes, create=leads, only=own, checksums=checksums
                    )
                    stack.callback(writer.close)
            errors.agree()
        assert writer is not None
        for parameter, rank in zip(exported, writers, strict=True):
            if distributed.get_rank() in parameter.owners:
                _write_tensors(_Assembly(plan, parameter, rank), writer, errors)
        with errors.kept():
            writer.finish(sync=sync)
        errors.agree()
        digests = {name: digest for found in gathered(writer.digests, plan.group) for name, digest in found.items()}
        with errors.kept():
            if leads:
                if checksums:
                    ordered = {spec.name: digests[spec.name] for spec in specs if spec.name in digests}
                    write_checksums(folder, ordered, writer.layout.header_sizes())
                publish_folder(folder, out, sync=sync)
        errors.agree()


class _Errors:
    """The first error of this rank, kept until all ranks of the group can raise together."""

    def __init__(self, group: distributed.ProcessGroup, out: Path) -> None:
        self._group, self._out = group, out
        self.error: Exception | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Remember an error instead of raising it; the block is left, the program goes on."""
        try:
            yield
        except Exception as error:
            self.error = self.error or (write_error(self._out, error) if isinstance(error, OSError) else error)

    def agree(self) -> None:
        """Raise on all ranks if any has an error."""
        raise_together(self.error, self._group, naming=True)


@torch.no_grad()
def _write_tensors(assembly: _Assembly, writer: SafetensorsWriter, errors: _Errors) -> None:
    """The tensors of a parameter from all its owners. After an error the exchange goes on without writing: others wait
    for it."""
    for spec in assembly.parameter.sources():
        sink = writer.sink(spec.name) if assembly.writes else None
        for rows in assembly.rows(spec):
            if sink is not None and rows is not None and errors.error is None:
                with errors.kept():
                    sink.write(rows)
        if sink is not None and errors.error is None:
            with errors.kept():
                writer.complete(sink)


class _Assembly:
    """Puts the Hugging Face tensors of one parameter together on the rank that writes them."""

    def __init__(self, plan: ModelPlan, parameter: PlannedParameter, writer: int) -> None:
        self.writes = distributed.get_rank() == writer
        self.parameter, self._plan, self._writer = parameter, plan, writer
        self._shard = as_matrix(plan.local[parameter.name].detach())
        self._pieces: dict[str, list[BandPart[int]]] = {}
        for index, owner in enumerate(parameter.owners):
            for b in parameter.packing.shard_blocks(len(parameter.owners), index):
                piece = BandPart(owner, b.shard_row, b.shard_col, b.source_row, b.source_col, b.rows, b.cols)
                self._pieces.setdefault(b.source, []).append(piece)

    def rows(self, spec: TensorSpec) -> Iterator[Tensor | None]:
        """On the writer the tensor's rows, a band at a time; the other owners send theirs and get None."""
        pieces = self._pieces[spec.name]
        if len(self.parameter.owners) == 1:
            yield from (self._local(piece) for piece in sorted(pieces, key=lambda piece: piece.row))
            return
        cols = self.parameter.packing.cols
        max_rows = max(1, BAND_BYTES // (cols * spec.dtype.itemsize))
        for band in bands(spec.name, pieces, spec.shape[0], cols, max_rows):
            yield self._band(band)

    def _band(self, band: RowBand[int]) -> Tensor | None:
        if not self.writes:
            for piece in band.pieces:
                if piece.origin == distributed.get_rank():
                    values = self._local(piece).contiguous().view(torch.uint8)
                    distributed.send(values, dst=self._writer, group=self._plan.group)
            return None
        if len(band.pieces) == 1:
            return self._piece(band.pieces[0])
        whole = self._empty(band.rows, self.parameter.packing.cols)
        for piece in band.pieces:
            whole[:, piece.col : piece.col + piece.cols].copy_(self._piece(piece))
        return whole

    def _piece(self, piece: BandPart[int]) -> Tensor:
        if piece.origin == self._writer:
            return self._local(piece)
        received = self._empty(piece.rows, piece.cols)
        distributed.recv(received.view(torch.uint8), src=piece.origin, group=self._plan.group)
        return received

    def _local(self, piece: BandPart[int]) -> Tensor:
        row, col = piece.origin_row, piece.origin_col
        return self._shard[row : row + piece.rows, col : col + piece.cols]

    def _empty(self, rows: int, cols: int) -> Tensor:
        return torch.empty(rows, cols, dtype=self.parameter.dtype, device=self._plan.device)
