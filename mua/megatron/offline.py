"""Checkpoints as model folders, for the command line: ours are copied or cast, Megatron-LM's are imported.

A checkpoint of Megatron-LM (:mod:`mua.megatron.torch_dist`) has global tensors under Megatron's names; how they follow
from the layers' parameters is Megatron's own knowledge (``sharded_state_dict``), and how a parameter follows from
Hugging Face tensors is the bridge's (``Packing``). Both are asked of a model of one rank on the meta device, which
gives, as rectangles,

    Hugging Face tensor  ◄── blocks of the bridge ──►  parameter  ◄── regions ──►  global tensor  ◄── chunks ──►  file

so that rows are copied from file to file through one buffer. What is in place already, after an interruption, is told
by the checksums in the sidecar and not written again.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megatron_bridge.blocks import BandPart, bands
from megatron_bridge.convert import check_coverage, check_sizes
from megatron_bridge.family import HfConfig
from megatron_bridge.hf_config import context_length, need, read_hf_config
from megatron_bridge.hf_folder import (
    DEFAULT_SHARD_BYTES,
    copy_other_files,
    foreign_files,
    main_dtype,
    verify_hf_folder,
    write_checksums,
)
from megatron_bridge.plan import PlannedParameter, TensorSpec, as_matrix, attach_hf_config, plan_rank
from megatron_bridge.safetensors_io import SafetensorsFolder, SafetensorsWriter
from mua.compat.without_cuda import without_cuda
from mua.config.schema import MegatronConfig, ModelConfig
from mua.megatron import checkpoint_manifest
from mua.megatron.model import build_chunks
from mua.megatron.parallel import meta_rank
from mua.megatron.torch_dist import INDEX, Region, StoredMatrix, TorchDistReader
from mua.observe.progress import Progress
from mua.utils import checksums as sidecars
from mua.utils.atomic import publish_folder, refuse_overlap, replaceable, staged_folder
from mua.utils.checksums import Sidecar, read_sealed
from mua.utils.errors import BridgeError, ModelError, MuaError, one_line

BUFFER_BYTES = 32 << 20
"""Values held at a time; another buffer of this size takes the rows of one chunk where several lie side by side."""

OnBytes = Callable[[int], None]
"""Told how many more bytes of weights are in place."""

_Mapping = Sequence[tuple[PlannedParameter, Sequence[Region]]]
"""Every parameter of a model of one rank, and where its rows lie in the checkpoint's global tensors."""


def convert_to_hf(
    checkpoint: Path,
    out: Path,
    source: Path | None = None,
    dtype: str | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    force: bool = False,
) -> None:
    """Write the weights of ``checkpoint``, one of ours or of Megatron-LM, as the model folder ``out``.

    Args:
        source: folder with config.json and tokenizer, for a checkpoint of Megatron-LM, which has neither.
        dtype: of the weights; None leaves them as they are; weight files of ours are linked where that can be.
        shard_bytes: of one weight file, at most, where weights are written.
        force: replace ``out`` whatever it holds; otherwise only a folder that was written here and not changed since.

    Raises:
        ModelError: the checkpoint is not as it was written, or of another model than ``source``.
        BridgeError: ``out`` cannot be written, holds anything else, or lies over or in what is read.
    """
    if not (checkpoint / INDEX).exists():
        export_checkpoint(checkpoint, out, dtype=dtype, max_shard_bytes=shard_bytes, force=force)
    elif source is None or dtype is not None:
        fix = "name a folder with its config.json and tokenizer by --source" if source is None else "leave --dtype out"
        raise ModelError(f"{checkpoint} is a checkpoint of Megatron (torch_dist); {fix}")
    else:
        import_torch_dist(checkpoint, out, source=source, max_shard_bytes=shard_bytes, force=force)
    print(f"{out}: written from {checkpoint}")


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    force: bool = False,
) -> None:
    """The model folder in one of our checkpoints, without optimizer and manifest; see :func:`convert_to_hf`."""
    refuse_overlap(out, checkpoint)
    checkpoint_manifest.check_files(checkpoint, checkpoint_manifest.read_manifest(checkpoint))
    with staged_folder(out, foreign=replaceable(foreign_files, force=force)) as folder:
        if dtype is None:
            recorded = read_sealed(checkpoint)
            for name in (sidecars.NAME, *recorded.files):  # copies: people edit them, and the checkpoint stays as it is
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(checkpoint / name, folder / name)
            for name in recorded.headers:
                try:
                    os.link(checkpoint / name, folder / name)
                except OSError:  # another file system
                    shutil.copyfile(checkpoint / name, folder / name)
        else:
            _cast(checkpoint, folder, dtype, max_shard_bytes)
        publish_folder(folder, out)


def _cast(checkpoint: Path, folder: Path, dtype: str, max_shard_bytes: int) -> None:
    copy_other_files(checkpoint, folder, getattr(torch, dtype))
    with SafetensorsFolder(checkpoint) as weights:
        specs = _tensors_of(read_hf_config(checkpoint), dtype)
        with (
            closing(SafetensorsWriter(folder, specs, max_shard_bytes)) as writer,
            _progress(checkpoint, sum(spec.nbytes for spec in specs)) as on_bytes,
        ):
            for spec in specs:
                sink, cols = writer.sink(spec.name), torch.Size(spec.shape[1:]).numel()
                step = max(1, BUFFER_BYTES // (cols * spec.dtype.itemsize))
                for row in range(0, spec.shape[0], step):
                    rows = torch.empty(min(step, spec.shape[0] - row), cols, dtype=spec.dtype)
                    weights.read(spec.name, row, 0, rows)
                    sink.write(rows)
                writer.complete(sink)
                on_bytes(spec.nbytes)
            writer.finish()
    write_checksums(folder, writer.digests, writer.header_sizes())


def _tensors_of(config: HfConfig, dtype: str) -> list[TensorSpec]:
    """The tensors of a model of ``dtype``, of which a router's bias is float32 in any."""
    return [spec for parameter, _ in without_cuda(_mapping, config, dtype) for spec in parameter.sources()]


def is_exported(checkpoint: Path, out: Path) -> bool:
    """Whether ``out`` holds the model folder of ``checkpoint``, as :func:`convert_to_hf` leaves it.

    Raises:
        ModelError, BridgeError: the checkpoint has no manifest; a weight file of ``out`` is missing or cut short.
    """
    sidecar = out / sidecars.NAME
    if (checkpoint / INDEX).exists():
        found = sidecars.same_job(sidecar, _import_job(checkpoint, DEFAULT_SHARD_BYTES))
    else:
        checkpoint_manifest.read_manifest(checkpoint)
        found = sidecar.exists() and sidecar.read_bytes() == (checkpoint / sidecars.NAME).read_bytes()
    if found:
        SafetensorsFolder(out).close()
    return found


def verify(folder: Path) -> dict[str, int | None]:
    """Check that a model folder is a whole model of a known family; compare it, or a checkpoint, with its checksums.

    The number of files or tensors; ``intact`` is None where there is nothing to compare with.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder; name a model folder or a checkpoint")
    if (folder / checkpoint_manifest.NAME).exists():
        content = checkpoint_manifest.read_manifest(folder)
        checkpoint_manifest.check_files(folder, content)
        print(f"{folder}: all files are as they were written")
        return {"files": len(content["files"])}
    config = read_hf_config(folder)
    with SafetensorsFolder(folder) as weights:
        check_sizes(config, weights)
        check_coverage(_tensors_of(config, "float32"), weights, config)
        tensors = len(list(weights.names))
    checked = (folder / sidecars.NAME).exists() and verify_hf_folder(folder) > 0
    written = "all as they were written" if checked else f"without {sidecars.NAME} to compare with"
    print(f"{folder}: a whole {config['model_type']} of {tensors} tensors, {written}")
    return {"tensors": tensors} if checked else {"tensors": tensors, "intact": None}


def import_torch_dist(
    checkpoint: Path,
    out: Path,
    *,
    source: Path,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    force: bool = False,
) -> None:
    """Write the weights of a ``torch_dist`` checkpoint of any layout as the model folder ``out``.

    Optimizer state is never read. The dtype is the checkpoint's. An interrupted import is continued. Arguments and
    errors are those of :func:`convert_to_hf`.
    """
    refuse_overlap(out, checkpoint, source)
    job, allowed = _import_job(checkpoint, max_shard_bytes), replaceable(foreign_files, force=force)
    with closing(TorchDistReader(checkpoint)) as reader, staged_folder(out, job=job, foreign=allowed) as folder:
        mapping = without_cuda(_mapping, read_hf_config(source), "float32")
        specs = [replace(spec, dtype=reader.dtype(regions[0].key))
                 for parameter, regions in mapping for spec in parameter.sources()]  # fmt: skip
        copy_other_files(source, folder, main_dtype(specs))
        by_name = {spec.name: spec for spec in specs}
        with (
            closing(Sidecar(folder / sidecars.NAME, job)) as sidecar,
            closing(SafetensorsWriter(folder, specs, max_shard_bytes, sidecar=sidecar)) as writer,
            _progress(out, sum(spec.nbytes for spec in specs)) as on_bytes,
        ):
            for parameter, regions in mapping:
                pieces = _pieces(reader, parameter, regions)
                for name in parameter.packing.sources:
                    if not writer.has(name):
                        sink, cols = writer.sink(name), parameter.packing.cols
                        max_rows = max(1, BUFFER_BYTES // (cols * by_name[name].dtype.itemsize))
                        for band in bands(name, pieces[name], by_name[name].shape[0], cols, max_rows):
                            sink.write(_rows(reader, band.pieces, band.rows, cols, by_name[name].dtype))
                        writer.complete(sink)
                    on_bytes(by_name[name].nbytes)
            writer.finish()
        sidecars.seal(folder, writer.header_sizes())
        publish_folder(folder, out)


def _mapping(hf_config: Mapping[str, Any], dtype: str) -> _Mapping:
    length = context_length(hf_config) or need(hf_config, "max_position_embeddings")
    model = ModelConfig.model_construct(path=Path(), dtype=dtype, max_length=length)
    layout = MegatronConfig()
    with meta_rank(layout, 0):
        try:
            chunks = build_chunks(hf_config, model, layout)
        except MuaError:
            raise
        except Exception as error:  # Megatron tells what it cannot build by whatever its parts happen to raise
            raise BridgeError(f"config.json describes a model that cannot be built ({one_line(error)})") from error
        attach_hf_config(chunks, hf_config)
        plan = plan_rank(chunks)
        state = chunks[0].sharded_state_dict()
        return [(p, _regions(p.name, plan.local[p.name], state)) for p in plan.parameters if not p.tied_copy]


def _regions(name: str, local: Tensor, state: Mapping[str, Any]) -> list[Region]:
    """Where Megatron puts the rows of one parameter; a packed one it divides, such as gate and up, gives several."""
    if name not in state:
        raise BridgeError(f"Megatron's checkpoint has no place for parameter {name}")
    cols, regions = as_matrix(local.detach()).shape[1], []
    for tensor in _flat(state[name]):
        leading, place = len(tensor.global_shape) - local.dim(), (*tensor.global_offset, 0)
        region = Region(
            first_row=(tensor.data.storage_offset() - local.storage_offset()) // cols,
            key=tensor.key,
            prefix=place[:leading],
            row=place[leading],
            col=place[leading + 1],
            rows=tensor.data.shape[0],
            cols=cols,
        )
        regions.append(region)
    return regions


def _flat(entry: Any) -> Iterator[ShardedTensor]:
    if isinstance(entry, ShardedTensorFactory):
        entry = entry.build()
    if isinstance(entry, ShardedTensor):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from _flat(part)


def _pieces(
    reader: TorchDistReader, parameter: PlannedParameter, regions: Sequence[Region]
) -> dict[str, list[BandPart[StoredMatrix]]]:
    """For every Hugging Face tensor of a parameter the stored rectangles that it consists of.

    ``shift`` leads from the parameter's rows to the global tensor's.
    """
    pieces: dict[str, list[BandPart[StoredMatrix]]] = {source: [] for source in parameter.packing.sources}
    stored = [(region, region.row - region.first_row, m) for region in regions for m in reader.stored(region)]
    for block, (region, shift, matrix) in itertools.product(parameter.packing.shard_blocks(1, 0), stored):
        low = max(block.shard_row + shift, region.row, matrix.row)
        high = min(block.shard_row + block.rows + shift, region.row + region.rows, matrix.row + matrix.rows)
        if low < high:
            piece = BandPart(
                origin=matrix,
                origin_row=low - matrix.row,
                origin_col=0,
                row=block.source_row + low - shift - block.shard_row,
                col=matrix.col - region.col,
                rows=high - low,
                cols=matrix.cols,
            )
            pieces[block.source].append(piece)
    return pieces


def _rows(
    reader: TorchDistReader, pieces: Sequence[BandPart[StoredMatrix]], rows: int, cols: int, dtype: torch.dtype
) -> Tensor:
    whole = torch.empty(rows, cols, dtype=dtype)
    for piece in pieces:
        part = whole if len(pieces) == 1 else torch.empty(rows, piece.cols, dtype=dtype)
        reader.read(piece.origin, piece.origin_row, part)
        if part is not whole:
            whole[:, piece.col : piece.col + piece.cols].copy_(part)
    return whole


def _import_job(checkpoint: Path, max_shard_bytes: int) -> str:
    """Names an import by what it reads and how: only the same one may continue what was interrupted."""
    read = (checkpoint / INDEX).read_bytes() + str(max_shard_bytes).encode()
    return f"torch_dist-to-hf {hashlib.sha256(read).hexdigest()}"


@contextmanager
def _progress(out: Path, nbytes: int) -> Iterator[OnBytes]:
    """A line on the terminal that counts the mebibytes of ``nbytes`` that are in place."""
    with Progress(True) as progress, progress.stage(f"{out.name} (MiB)", total=nbytes >> 20) as stage:
        done = 0

        def add(count: int) -> None:
            nonlocal done
            before, done = done, done + count
            stage.advance((done >> 20) - (before >> 20))

        yield add
