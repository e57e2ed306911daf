"""A complete Hugging Face folder: weights, configuration, tokenizer, checksums, all or nothing.

Files that are not weights are copied byte for byte from the source folder: ``save_pretrained`` of another transformers
version would rename keys of config.json, and an engine with the old names would silently take a default rope base.

A distributed model is saved (:func:`save_hf`) without any rank holding more than a band of foreign rows.

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

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from megatron_bridge.blocks import BandPart, bands
from megatron_bridge.plan import ModelPlan, PlannedParameter, TensorSpec, as_matrix, plan_model
from megatron_bridge.safetensors_io import SafetensorsFolder, SafetensorsWriter
from mua.utils.atomic import hidden_folder, publish_folder, staged_folder, write_error
from mua.utils.checksums import NAME as CHECKSUMS
from mua.utils.checksums import Sidecar, digest_of, digest_of_file, read_sealed, seal
from mua.utils.collective import gathered, raise_together
from mua.utils.errors import BridgeError
from mua.utils.strict_json import open_regular

DEFAULT_SHARD_BYTES = 5 << 30
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")
_DTYPE_KEY = re.compile(r'("(?:torch_)?dtype"\s*:\s*")[^"]*(")')


def verify_hf_folder(folder: Path, part: int = 0, parts: int = 1) -> int:
    """Read everything that was written into ``folder`` and compare it with its checksums; the number of tensors.

    Args:
        part: which of ``parts`` shares of the tensors and files is read: a rank among all ranks.

    Raises:
        BridgeError: there are no checksums, or a tensor or file is not what was written.
    """
    recorded = read_sealed(folder)
    for name in sorted(recorded.files)[part::parts]:
        _compare(folder / name, None, recorded.files[name])
    with SafetensorsFolder(folder) as weights:
        for name, start in sorted(weights.data_starts.items())[part::parts]:
            _compare(folder / name, start, recorded.headers.get(name))
        names = sorted(weights.names)
        for name in names[part::parts]:
            entry = weights.entry(name)
            if digest_of(weights.descriptor(name), entry.offset, entry.nbytes) != recorded.tensors.get(name):
                raise BridgeError(f"{entry.path}: {name} is not what was written; convert or copy the folder again")
    return len(names)


def _compare(path: Path, size: int | None, digest: str | None) -> None:
    try:
        found = digest_of_file(path, size)
    except OSError as error:
        raise BridgeError(f"{path} cannot be read: {error.strerror}; convert or copy the folder again") from error
    if found != digest:
        raise BridgeError(
            f"{path} is not what was written; convert or copy the folder again, or remove {CHECKSUMS} there if it "
            "was changed deliberately"
        )


def foreign_files(folder: Path) -> str | None:
    """Why ``folder`` is not a model folder as it was written and nothing else; None if it is one."""
    try:
        recorded = read_sealed(folder)
        verify_hf_folder(folder)
    except BridgeError as error:
        return str(error)
    written = {CHECKSUMS, *recorded.files, *recorded.headers}
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in written)
    return f"it holds {foreign[0]}" if foreign else None


def main_dtype(specs: Sequence[TensorSpec]) -> torch.dtype:
    """The dtype of most bytes, which config.json names; a router's bias may be float32 beside it."""
    sizes: Counter[torch.dtype] = Counter()
    for spec in specs:
        sizes[spec.dtype] += spec.nbytes
    return sizes.most_common(1)[0][0]


def copy_other_files(
    source: Path, folder: Path, dtype: torch.dtype | None, texts: Mapping[str, str] | None = None
) -> None:
    """Every file of ``source`` that holds no weights, byte for byte; config.json names ``dtype``, if one is given.

    ``texts`` are files by name that stand in ``folder`` instead of those of the source.
    """
    texts = texts or {}
    if not (source / "config.json").is_file():
        raise BridgeError(f"{source} has no config.json to copy; give a Hugging Face model folder")
    for path in sorted(source.iterdir()):
        skipped = path.name.startswith(".") or path.name.endswith(_WEIGHT_SUFFIXES) or path.name == CHECKSUMS
        if skipped or path.name in texts or path.is_dir():
            continue
        try:
            descriptor = open_regular(path)
        except OSError as error:
            raise BridgeError(f"{path} cannot be read: {error.strerror}") from error
        with open(descriptor, "rb") as read, (folder / path.name).open("wb") as written:
            if path.name != "config.json" or dtype is None:
                shutil.copyfileobj(read, written, 1 << 20)
                continue
            name = str(dtype).removeprefix("torch.")
            text = _DTYPE_KEY.sub(rf"\g<1>{name}\g<2>", read.read().decode())
            for key, found in json.loads(text).items():
                if key in ("dtype", "torch_dtype") and found not in (None, name):
                    raise BridgeError(f"config.json: {key}={found!r} cannot be set to {name!r}")
            written.write(text.encode())
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def write_checksums(folder: Path, digests: dict[str, str], headers: dict[str, int]) -> None:
    """The closed sidecar of a folder that was written in one go; ``headers`` as for :func:`seal`."""
    sidecar = Sidecar(folder / CHECKSUMS, job="export")
    for name, digest in digests.items():
        sidecar.add(name, digest)
    sidecar.close()
    seal(folder, headers)


# ---- a distributed model as such a folder

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
    """Export ``chunks`` into the folder ``out``; every rank of the job calls it, one replica writes.

    The folder has checksums (:func:`verify_hf_folder`), and is flushed to the disk before it gets its name.

    Args:
        source: gives configuration and tokenizer files.
        texts: files by name that stand in ``out`` instead of those of ``source``.

    Raises:
        BridgeError: on every rank, if any failed. Nothing of the folder is left, an older one is as it was.
    """
    plan = plan_model(chunks)
    failure: Exception | None = None
    if 0 in distributed.get_process_group_ranks(plan.group):
        try:
            _save(plan, out, source, max_shard_bytes, texts)
        except Exception as error:  # raised below, once the other replicas have been told
            failure = error
    raise_together(failure)


@torch.no_grad()
def _save(plan: ModelPlan, out: Path, source: Path, max_shard_bytes: int, texts: Mapping[str, str] | None) -> None:
    own, specs, folder = distributed.get_rank(), plan.tensors(), hidden_folder(out)
    exported = [p for p in plan.parameters if not p.tied_copy]
    writers = [parameter.owners[turn % len(parameter.owners)] for turn, parameter in enumerate(exported)]
    written = [spec.name for parameter, rank in zip(exported, writers, strict=True) if rank == own
               for spec in parameter.sources()]  # fmt: skip
    failure: Exception | None = None

    def attempt(write: Callable[..., None], *arguments: Any) -> None:
        """After an error the exchange goes on without writing: others wait for it."""
        nonlocal failure
        try:
            if failure is None:
                write(*arguments)
        except Exception as error:
            failure = error

    with ExitStack() as stack:
        writer: SafetensorsWriter | None = None
        for leads in (True, False):  # rank 0 makes the files, then the others open them
            with _together(plan.group, out):
                if leads is (own == 0):
                    if leads:
                        stack.enter_context(staged_folder(out))
                        copy_other_files(source, folder, main_dtype(specs), texts)
                    writer = SafetensorsWriter(folder, specs, max_shard_bytes, create=leads, only=written)
                    stack.callback(writer.close)
        assert writer is not None
        for parameter, rank in zip(exported, writers, strict=True):
            for spec in parameter.sources() if own in parameter.owners else ():
                sink = writer.sink(spec.name) if own == rank else None
                for rows in _rows(plan, parameter, spec, rank):
                    if sink is not None:
                        attempt(sink.write, rows)
                if sink is not None:
                    attempt(writer.complete, sink)
        with _together(plan.group, out):
            if failure is not None:
                raise failure
            writer.finish()
        digests = {name: digest for found in gathered(writer.digests, plan.group) for name, digest in found.items()}
        with _together(plan.group, out):
            if own == 0:
                ordered = {spec.name: digests[spec.name] for spec in specs}
                write_checksums(folder, ordered, writer.header_sizes())
                publish_folder(folder, out)


@contextmanager
def _together(group: distributed.ProcessGroup, out: Path) -> Iterator[None]:
    """A block whose error on one rank is raised by all of the group; of files in one line. Collective at its end."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = write_error(out, error) if isinstance(error, OSError) else error
    raise_together(failure, group, naming=True)


def _rows(plan: ModelPlan, parameter: PlannedParameter, spec: TensorSpec, writer: int) -> Iterator[Tensor]:
    """On rank ``writer`` the rows of one of a parameter's tensors, a band at a time; other owners send theirs."""
    own, cols, owners = distributed.get_rank(), parameter.packing.cols, parameter.owners
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
