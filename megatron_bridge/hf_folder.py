"""A complete Hugging Face folder: weights, configuration, tokenizer, checksums, all or nothing.

Files that are not weights are copied byte for byte from the source folder: ``save_pretrained`` of another transformers
version would rename keys of config.json, and an engine with the old names would silently take a default rope base.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megatron_bridge.hf_config import weights_dtype
from megatron_bridge.plan import TensorSpec
from megatron_bridge.safetensors_io import SafetensorsFolder
from mua.utils.checksums import NAME as CHECKSUMS
from mua.utils.checksums import digest_of, digest_of_file, list_files, read_sealed
from mua.utils.errors import BridgeError
from mua.utils.strict_json import open_regular

DEFAULT_SHARD_BYTES = 5 << 30
MANIFEST = "manifest.json"
"""Of a checkpoint, which is a model folder with more in it; none of a folder made from its files."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")
_OF_ADAPTERS = ("adapter_config.json",)
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
    foreign = [name for name in list_files(folder) if name not in written]
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

    What describes adapters stays behind: what is written is a whole model.

    ``texts`` are files by name that stand in ``folder`` instead of those of the source.
    """
    texts = texts or {}
    if not (source / "config.json").is_file():
        raise BridgeError(f"{source} has no config.json to copy; give a Hugging Face model folder")
    for name in list_files(source):
        path = source / name
        skipped = path.name.startswith(".") or path.name.endswith(_WEIGHT_SUFFIXES) or path.name in _OF_ADAPTERS
        if skipped or name in (CHECKSUMS, MANIFEST, *texts) or path.is_dir():
            continue
        (folder / name).parent.mkdir(exist_ok=True)
        try:
            descriptor = open_regular(path)
        except OSError as error:
            raise BridgeError(f"{path} cannot be read: {error.strerror}") from error
        with open(descriptor, "rb") as read, (folder / name).open("wb") as written:
            if name != "config.json" or dtype is None:
                shutil.copyfileobj(read, written, 1 << 20)
                continue
            told = str(dtype).removeprefix("torch.")
            text = _DTYPE_KEY.sub(rf"\g<1>{told}\g<2>", read.read().decode())
            if (found := weights_dtype(json.loads(text))) not in (None, told):
                raise BridgeError(f"config.json: the dtype {found!r} cannot be set to {told!r}")
            written.write(text.encode())
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
