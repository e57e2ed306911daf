"""Checkpoints to Hugging Face folders and back, for the command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from megatron_bridge.hf_folder import DEFAULT_SHARD_BYTES, verify_hf_folder
from megatron_bridge.safetensors_io import SafetensorsFolder
from mua.compat.checkpoint_reading import check_pickles
from mua.config.load import load_config
from mua.megatron import checkpoint_manifest, offline
from mua.megatron.model_card import ExportedPolicy, exported_texts
from mua.observe.output import CONFIG_FILE, find_config
from mua.observe.progress import Progress
from mua.types import Json
from mua.utils.errors import ModelError

_MIB = 1 << 20


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
    total = sum(math.prod(shape) for shape in content["tensors"].values()) * itemsize // _MIB
    with Progress(True) as progress, progress.stage(f"{out.name} (MiB)", total=total) as stage:
        counter = _Mebibytes(stage.advance)
        offline.megatron_to_hf(
            checkpoint,
            out,
            source=files,
            max_shard_bytes=shard_bytes,
            force=force,
            texts=texts_of(checkpoint, files, content),
            on_bytes=counter.add,
        )
    print(f"{out}: written from {checkpoint}")


def convert_to_megatron(
    source: Path, out: Path, dtype: str | None, force: bool = False, allow_nan: bool = False
) -> None:
    """Write the Hugging Face folder ``source`` as a checkpoint that runs of any layout can start from."""
    with SafetensorsFolder(source) as weights:
        total = sum(weights.entry(name).nbytes for name in weights.names) // _MIB
    with Progress(True) as progress, progress.stage(f"{out.name} (MiB)", total=total) as stage:
        counter = _Mebibytes(stage.advance)
        offline.hf_to_megatron(source, out, dtype=dtype, force=force, allow_nan=allow_nan, on_bytes=counter.add)
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


class _Mebibytes:
    """Turns counts of bytes into counts of whole MiB."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._advance, self._rest = advance, 0

    def add(self, count: int) -> None:
        whole, self._rest = divmod(self._rest + count, _MIB)
        if whole:
            self._advance(whole)
