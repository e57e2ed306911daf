"""Conversion between Hugging Face folders and Megatron checkpoints in one process, without a model in memory.

A checkpoint holds global tensors under Megatron's names; how they follow from the layers' parameters is Megatron's own
knowledge (``sharded_state_dict``), and how a parameter follows from Hugging Face tensors is the bridge's (``Packing``).
Both are asked of a model of one rank on the meta device, which gives, as rectangles,

    Hugging Face tensor  ◄── blocks of the bridge ──►  parameter  ◄── regions ──►  global tensor  ◄── chunks ──►  file

so that either direction copies rows from file to file through one buffer. What is in place already, after an
interruption, is told by the checksums in the sidecar and not written again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megatron_bridge.blocks import BandPart, bands
from megatron_bridge.convert import check_coverage, check_sizes
from megatron_bridge.hf_config import need, read_hf_config
from megatron_bridge.hf_folder import (
    DEFAULT_SHARD_BYTES,
    copy_other_files,
    foreign_files,
    main_dtype,
    verify_hf_folder,
)
from megatron_bridge.plan import PlannedParameter, TensorSpec, as_matrix, attach_hf_config, plan_rank
from megatron_bridge.safetensors_io import SafetensorsFolder, SafetensorsWriter
from mua.compat.checkpoint_reading import check_pickles
from mua.compat.without_cuda import without_cuda
from mua.config.load import load_config
from mua.config.schema import MegatronConfig, ModelConfig
from mua.megatron import checkpoint_manifest
from mua.megatron.model import build_chunks
from mua.megatron.model_card import ExportedPolicy, exported_texts
from mua.megatron.parallel import meta_rank
from mua.megatron.torch_dist import ChunkSpec, Region, StoredMatrix, TorchDistReader, TorchDistWriter
from mua.observe.output import CONFIG_FILE, find_config
from mua.observe.progress import Progress
from mua.types import Json
from mua.utils import checksums as sidecars
from mua.utils.atomic import publish_folder, refuse_overlap, replaceable, staged_folder
from mua.utils.checksums import Sidecar
from mua.utils.errors import BridgeError, ModelError, MuaError, one_line

BUFFER_BYTES = 32 << 20
"""Values held at a time; another buffer of this size takes the rows of one chunk where several lie side by side."""

OnBytes = Callable[[int], None]
"""Told how many more bytes of weights are in place."""

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


_Mapping = Sequence[tuple[PlannedParameter, Sequence[Region]]]
"""Every parameter of a model of one rank, and where its rows lie in the checkpoint's global tensors."""


def megatron_to_hf(
    checkpoint: Path,
    out: Path,
    *,
    source: Path,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    force: bool = False,
    texts: Mapping[str, str] | None = None,
    on_bytes: OnBytes = lambda _: None,
) -> None:
    """Write the weights of a checkpoint of any layout as the Hugging Face folder ``out``.

    Optimizer state is never read. The dtype is the checkpoint's. An interrupted conversion is continued.

    Args:
        source: folder that gives config.json and the tokenizer's files.
        force: replace ``out`` whatever it holds; otherwise only a folder that was written here and not changed since.
        texts: files by name that stand in ``out`` instead of those of ``source``.

    Raises:
        ModelError: the checkpoint is not as it was written, or of another model than ``source``.
        BridgeError: ``out`` cannot be written, holds anything else, or lies over or in what is read.
    """
    refuse_overlap(out, checkpoint, source)
    described = checkpoint_manifest.read_manifest(checkpoint)
    checkpoint_manifest.check_files(checkpoint, described)
    check_pickles(checkpoint)
    mapping = without_cuda(_mapping, read_hf_config(source), described["dtype"].removeprefix("torch."))
    job = _export_job(checkpoint, max_shard_bytes)
    allowed = replaceable(foreign_files, force=force)
    with closing(TorchDistReader(checkpoint)) as reader, staged_folder(out, job=job, foreign=allowed) as folder:
        specs = [replace(spec, dtype=reader.dtype(regions[0].key))
                 for parameter, regions in mapping for spec in parameter.sources()]  # fmt: skip
        copy_other_files(source, folder, main_dtype(specs), texts)
        by_name = {spec.name: spec for spec in specs}
        with (
            closing(Sidecar(folder / sidecars.NAME, job)) as sidecar,
            closing(SafetensorsWriter(folder, specs, max_shard_bytes, sidecar=sidecar)) as writer,
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


def is_converted(checkpoint: Path, out: Path, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> bool:
    """Whether ``out`` was made from this checkpoint by :func:`megatron_to_hf` with the same settings.

    Raises:
        ModelError: the checkpoint is not whole.
        BridgeError: ``out`` was made from it, but its files are not whole any more.
    """
    checkpoint_manifest.read_manifest(checkpoint)
    if not sidecars.same_job(out / sidecars.NAME, _export_job(checkpoint, max_shard_bytes)):
        return False
    SafetensorsFolder(out).close()
    return True


def hf_to_megatron(
    source: Path,
    out: Path,
    *,
    dtype: str | None = None,
    force: bool = False,
    allow_nan: bool = False,
    on_bytes: OnBytes = lambda _: None,
) -> None:
    """Write a Hugging Face folder as a checkpoint without optimizer state that loads under any layout.

    Configuration and tokenizer files go, byte for byte, into its folder ``hf``. An interrupted conversion is continued.

    Args:
        dtype: ``float32`` or ``bfloat16``; None takes that of most of the source's bytes.
        force: as for :func:`megatron_to_hf`.
        allow_nan: take weights that are no finite numbers, too.

    Raises:
        BridgeError: ``source`` is no complete model of a known family, or not as it was written, if it has checksums;
            a weight is no finite number; ``out`` cannot be written, holds anything else, or lies over or in ``source``.
        ModelError: the source's dtype is none of the two, and none was chosen.
    """
    refuse_overlap(out, source)
    config = read_hf_config(source)
    if (source / sidecars.NAME).exists():
        verify_hf_folder(source)
    with SafetensorsFolder(source, finite=not allow_nan) as weights:
        check_sizes(config, weights)
        if dtype is None:
            found = main_dtype([TensorSpec(n, weights.entry(n).shape, weights.entry(n).dtype) for n in weights.names])
            if found not in _DTYPES:
                raise ModelError(f"{source} is of {found}; choose a dtype of {' or '.join(_DTYPES.values())}")
        mapping = without_cuda(_mapping, config, dtype or _DTYPES[found])
        specs = [spec for parameter, _ in mapping for spec in parameter.sources()]
        check_coverage(specs, weights, config)
        chunks = [(parameter, chunk, rows) for parameter, regions in mapping
                  for chunk, rows in _chunks(parameter, regions)]  # fmt: skip
        files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.iterdir()
                 if path.is_file()]  # fmt: skip
        job = _job("hf-to-megatron", json.dumps(sorted(files)).encode(), str(dtype).encode())
        allowed = replaceable(checkpoint_manifest.foreign_checkpoint_files, force=force)
        with staged_folder(out, job=job, foreign=allowed) as folder:
            (folder / checkpoint_manifest.HF_FILES).mkdir(exist_ok=True)
            copy_other_files(source, folder / checkpoint_manifest.HF_FILES, None)
            with (
                closing(Sidecar(folder / sidecars.NAME, job)) as sidecar,
                closing(TorchDistWriter(folder, sidecar)) as writer,
            ):
                for parameter, chunk, first_row in chunks:
                    if not writer.has(chunk):
                        writer.write(chunk, _read_chunk(weights, parameter, chunk, first_row))
                    on_bytes(chunk.nbytes)
                writer.finish([chunk for _, chunk, _ in chunks])
            # What makes it a checkpoint: upstream's two small files, the state of a run not begun, the manifest.
            save_config(CheckpointingConfig("torch_dist", 1), str(folder))
            torch.save({}, folder / "common.pt")
            state = {"steps": 0, "skipped_steps": 0, "extra": {"step": 0}}
            (folder / checkpoint_manifest.STATE).write_text(json.dumps(state))
            content = {
                "tensors": {spec.name: list(spec.shape) for spec in specs},
                "dtype": str(main_dtype(specs)),
                "weights_only": True,
                "source": str(source.resolve()),
            }
            checkpoint_manifest.write_manifest(folder, content)
            publish_folder(folder, out)


def _mapping(hf_config: Mapping[str, Any], dtype: str) -> _Mapping:
    length = need(hf_config, "max_position_embeddings")
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
            global_shape=tuple(tensor.global_shape),
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


def _chunks(parameter: PlannedParameter, regions: Sequence[Region]) -> Iterator[tuple[ChunkSpec, int]]:
    """The chunks to write for one parameter, no larger than the buffer, and the parameter's row each begins with."""
    for region in regions:
        dims = len(region.global_shape) - len(region.prefix)
        step = max(1, BUFFER_BYTES // (region.cols * parameter.dtype.itemsize))
        for start in range(0, region.rows, step):
            offsets = (*region.prefix, *(region.row + start, region.col)[:dims])
            sizes = (1,) * len(region.prefix) + (min(step, region.rows - start), region.cols)[:dims]
            yield ChunkSpec(region.key, region.global_shape, offsets, sizes, parameter.dtype), region.first_row + start


def _read_chunk(weights: SafetensorsFolder, parameter: PlannedParameter, chunk: ChunkSpec, first_row: int) -> Tensor:
    """Values of a chunk, ``[rows, cols]`` of its parameter from ``first_row`` on; padding is zero."""
    rows = chunk.nbytes // (parameter.packing.cols * parameter.dtype.itemsize)
    values = torch.zeros(rows, parameter.packing.cols, dtype=parameter.dtype)
    for block in parameter.packing.shard_blocks(1, 0):
        low, high = max(block.shard_row, first_row), min(block.shard_row + block.rows, first_row + rows)
        if low < high:
            target = values[low - first_row : high - first_row]
            weights.read(block.source, block.source_row + low - block.shard_row, 0, target)
    return values


def _export_job(checkpoint: Path, max_shard_bytes: int) -> str:
    return _job("megatron-to-hf", (checkpoint / checkpoint_manifest.NAME).read_bytes(), str(max_shard_bytes).encode())


def _job(name: str, *inputs: bytes) -> str:
    """Names a conversion by what it reads and how: only the same one may continue what was interrupted."""
    return f"{name} {hashlib.sha256(b'|'.join(inputs)).hexdigest()}"


# ---- for the command line


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


def convert_to_hf(
    checkpoint: Path,
    out: Path,
    source: Path | None = None,
    config: Path | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    force: bool = False,
) -> None:
    """Write ``checkpoint`` as the Hugging Face folder ``out``.

    Args:
        source: gives configuration and tokenizer; None takes those the checkpoint was converted with, or
            ``model.path`` of the run's configuration (``config``, by default the one above the checkpoint).
        shard_bytes: of one weight file, at most.
        force: replace ``out`` whatever it holds.
    """
    files, content = source or source_files(checkpoint, config), checkpoint_manifest.read_manifest(checkpoint)
    itemsize = 2 if content["dtype"] in ("torch.bfloat16", "torch.float16") else 4
    nbytes = sum(math.prod(shape) for shape in content["tensors"].values()) * itemsize
    texts = texts_of(checkpoint, files, content)
    with _progress(out, nbytes) as on_bytes:
        megatron_to_hf(
            checkpoint, out, source=files, max_shard_bytes=shard_bytes, force=force, texts=texts, on_bytes=on_bytes
        )
    print(f"{out}: written from {checkpoint}")


def convert_to_megatron(
    source: Path, out: Path, dtype: str | None, force: bool = False, allow_nan: bool = False
) -> None:
    """Write the Hugging Face folder ``source`` as a checkpoint that runs of any layout can start from."""
    with SafetensorsFolder(source) as weights:
        nbytes = sum(weights.entry(name).nbytes for name in weights.names)
    with _progress(out, nbytes) as on_bytes:
        hf_to_megatron(source, out, dtype=dtype, force=force, allow_nan=allow_nan, on_bytes=on_bytes)
    print(f"{out}: written from {source}")


def verify(folder: Path) -> dict[str, int]:
    """Read a Hugging Face folder or a checkpoint in whole and compare it with the checksums it was written with.

    The number of files or tensors that were read."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder; name a model folder or a checkpoint")
    if (folder / checkpoint_manifest.NAME).exists():
        content = checkpoint_manifest.read_manifest(folder)
        checkpoint_manifest.check_files(folder, content)
        check_pickles(folder)
        print(f"{folder}: all {len(content['files'])} files are as they were written")
        return {"files": len(content["files"])}
    print(f"{folder}: all {(tensors := verify_hf_folder(folder))} tensors are as they were written")
    return {"tensors": tensors}


def source_files(checkpoint: Path, config: Path | None = None) -> Path:
    """The folder that has config.json and the tokenizer of a checkpoint's model."""
    own = checkpoint / checkpoint_manifest.HF_FILES
    if config is None and own.is_dir():
        return own
    named = config or find_config(checkpoint)
    found = load_config(named).model.path
    if not found.is_dir():
        raise ModelError(
            f"{checkpoint}: holds no tokenizer of its own, and {found}, model.path of {named}, is not there; name a "
            "folder with the model's config.json and tokenizer by --source"
        )
    return found


def texts_of(checkpoint: Path, files: Path, content: Json) -> dict[str, str]:
    """The card and generation settings of an export of ``checkpoint``; none of what no run of ours trained.

    Args:
        files: the folder of its tokenizer.
        content: its manifest.
    """
    trained = content.get("config")
    if not isinstance(trained, dict):
        return {}
    position = content.get("data_position")
    step = position.get("step") if isinstance(position, dict) else None
    above = checkpoint.resolve().parents
    run = next((folder for folder in above if (folder / CONFIG_FILE).is_file()), None)
    exported = ExportedPolicy(
        trained, files, step if isinstance(step, int) else 0, run, content.get("git"), content.get("versions")
    )
    return exported_texts(exported)
