"""Checkpoints as model folders, for the command line: ours are copied or cast, Megatron-LM's are imported.

A checkpoint of Megatron-LM (:mod:`mua.megatron.torch_dist`) has global tensors under Megatron's names; how they follow
from the layers' parameters is Megatron's own knowledge (``sharded_state_dict``), and how a parameter follows from
Hugging Face tensors is the bridge's (``Packing``). Both are asked of a model of one rank on the meta device, which
gives, as rectangles,

    Hugging Face tensor  ◄── blocks of the bridge ──►  parameter  ◄── regions ──►  global tensor  ◄── chunks ──►  file

so that tensors are read and written one at a time. What is in place already, after an interruption, is told by the
checksums in the sidecar and not written again.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megatron_bridge.convert import check_coverage, check_sizes
from megatron_bridge.family import HfConfig
from megatron_bridge.hf_config import context_length, need, read_hf_config
from megatron_bridge.hf_folder import DEFAULT_SHARD_BYTES, copy_other_files, foreign_files, main_dtype, verify_hf_folder
from megatron_bridge.plan import PlannedParameter, TensorSpec, as_matrix, attach_hf_config, plan_rank
from megatron_bridge.safetensors_io import SafetensorsFolder, SafetensorsWriter
from mua.compat.without_cuda import without_cuda
from mua.config.schema import MegatronConfig, ModelConfig
from mua.megatron import checkpoint_manifest
from mua.megatron.model import build_chunks
from mua.megatron.parallel import meta_rank
from mua.megatron.torch_dist import INDEX, TorchDistReader
from mua.observe.progress import Progress
from mua.utils import checksums as sidecars
from mua.utils.atomic import publish_folder, refuse_overlap, replaceable, staged_folder
from mua.utils.checksums import Sidecar, read_sealed
from mua.utils.errors import BridgeError, ModelError, MuaError, one_line


@dataclass(frozen=True, slots=True)
class Region:
    """Rows of a parameter, as a matrix, in a global tensor: those from ``row`` on of its last dimensions at ``prefix``.

    One-dimensional parameters are matrices of one column.
    """

    first_row: int
    """Of the parameter."""
    rows: int
    key: str
    prefix: tuple[int, ...]
    row: int


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
        _export(checkpoint, out, dtype, shard_bytes, force)
    elif source is None or dtype is not None:
        fix = "name a folder with its config.json and tokenizer by --source" if source is None else "leave --dtype out"
        raise ModelError(f"{checkpoint} is a checkpoint of Megatron (torch_dist); {fix}")
    else:
        _import_torch_dist(checkpoint, out, source, shard_bytes, force)
    print(f"{out}: written from {checkpoint}")


def _export(checkpoint: Path, out: Path, dtype: str | None, shard_bytes: int, force: bool) -> None:
    """The model folder in one of our checkpoints, without optimizer and manifest."""
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
            _cast(checkpoint, folder, dtype, shard_bytes)
        publish_folder(folder, out)


def _cast(checkpoint: Path, folder: Path, dtype: str, shard_bytes: int) -> None:
    copy_other_files(checkpoint, folder, getattr(torch, dtype))
    with SafetensorsFolder(checkpoint) as weights:

        def read(spec: TensorSpec) -> Tensor:
            whole = as_matrix(torch.empty(spec.shape, dtype=spec.dtype))
            weights.read(spec.name, 0, 0, whole)
            return whole

        _write_tensors(folder, _tensors_of(read_hf_config(checkpoint), dtype), shard_bytes, "export", read)


def _write_tensors(
    folder: Path, specs: Sequence[TensorSpec], shard_bytes: int, job: str, read: Callable[[TensorSpec], Tensor]
) -> None:
    """Every tensor as ``read`` gives it; those that the same job left in ``folder`` are not read again."""
    with (
        closing(Sidecar(folder / sidecars.NAME, job)) as sidecar,
        closing(SafetensorsWriter(folder, specs, shard_bytes, sidecar=sidecar)) as writer,
        Progress(True) as progress,
        progress.stage("tensors", total=len(specs)) as stage,
    ):
        for spec in specs:
            if not writer.has(spec.name):
                sink = writer.sink(spec.name)
                sink.write(read(spec))
                writer.complete(sink)
            stage.advance(1)
        writer.finish()
    sidecars.seal(folder, writer.header_sizes())


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


def _import_torch_dist(checkpoint: Path, out: Path, source: Path, shard_bytes: int, force: bool) -> None:
    """A checkpoint of Megatron-LM of any layout as a model folder; one that was interrupted is continued.

    Optimizer state is never read. The dtype is the checkpoint's.
    """
    refuse_overlap(out, checkpoint, source)
    job, allowed = _import_job(checkpoint, shard_bytes), replaceable(foreign_files, force=force)
    with closing(TorchDistReader(checkpoint)) as reader, staged_folder(out, job=job, foreign=allowed) as folder:
        places = {
            spec.name: (replace(spec, dtype=reader.dtype(regions[0].key)), parameter, regions)
            for parameter, regions in without_cuda(_mapping, read_hf_config(source), "float32")
            for spec in parameter.sources()
        }
        specs = [spec for spec, _, _ in places.values()]
        copy_other_files(source, folder, main_dtype(specs))
        _write_tensors(folder, specs, shard_bytes, job, lambda spec: _read_source(reader, *places[spec.name]))
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
        leading = len(tensor.global_shape) - local.dim()
        first_row = (tensor.data.storage_offset() - local.storage_offset()) // cols
        place = tensor.global_offset
        regions.append(Region(first_row, tensor.data.shape[0], tensor.key, place[:leading], place[leading]))
    return regions


def _flat(entry: Any) -> Iterator[ShardedTensor]:
    if isinstance(entry, ShardedTensorFactory):
        entry = entry.build()
    if isinstance(entry, ShardedTensor):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from _flat(part)


def _read_source(
    reader: TorchDistReader, spec: TensorSpec, parameter: PlannedParameter, regions: Sequence[Region]
) -> Tensor:
    """A Hugging Face tensor that ``parameter`` is packed from, ``[rows, cols]``."""
    whole, read = torch.empty(spec.shape[0], parameter.packing.cols, dtype=spec.dtype), 0
    for block, region in itertools.product(parameter.packing.shard_blocks(1, 0), regions):
        low = max(block.shard_row, region.first_row)
        rows = min(block.shard_row + block.rows, region.first_row + region.rows) - low
        if block.source == spec.name and rows > 0:
            first = block.source_row + low - block.shard_row
            reader.read(region.key, region.prefix, region.row + low - region.first_row, whole[first : first + rows])
            read += rows
    if read != len(whole):
        raise BridgeError(f"Megatron's checkpoint has {read} of the {len(whole)} rows of {spec.name}")
    return whole


def _import_job(checkpoint: Path, shard_bytes: int) -> str:
    """Names an import by what it reads and how: only the same one may continue what was interrupted."""
    read = (checkpoint / INDEX).read_bytes() + str(shard_bytes).encode()
    return f"torch_dist-to-hf {hashlib.sha256(read).hexdigest()}"
