"""A complete Hugging Face folder: weights, configuration, tokenizer, checksums, all or nothing.

Everything is written into a hidden folder beside the target and renamed when it is whole and on the disk, so a
reader sees the old folder or the new one. Files that are not weights are copied byte for byte from the source
folder: ``save_pretrained`` of another transformers version would rename keys of config.json, and an engine
with the old names would silently take a default rope base.

The hidden folder ``.NAME.partial`` is locked while it is written. One without a lock was left by a process that was
killed: the same conversion continues it, anything else starts it anew.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megatron_bridge import checksums
from megatron_bridge.checksums import Sidecar
from megatron_bridge.errors import BridgeError
from megatron_bridge.plan import TensorSpec
from megatron_bridge.safetensors_io import SafetensorsFolder
from megatron_bridge.safetensors_writer import SafetensorsWriter, digest_of, flush

DEFAULT_SHARD_BYTES = 5 << 30
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")
_DTYPE_KEY = re.compile(r'("(?:torch_)?dtype"\s*:\s*")[^"]*(")')
_LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def write_hf_folder(
    tensors: Iterable[tuple[str, Tensor]],
    specs: Sequence[TensorSpec],
    out: Path,
    *,
    source: Path,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write ``tensors``, announced by ``specs``, and the other files of ``source`` as the folder ``out``.

    An existing model folder ``out`` is replaced; any other non-empty folder is refused. ``dtype`` or
    ``torch_dtype`` in config.json is set to what was written where it differs; every other byte is kept. On any
    error nothing is left behind and the old ``out`` is untouched.
    """
    with staged_folder(out) as folder:
        copy_other_files(source, folder, main_dtype(specs))
        writer = SafetensorsWriter(folder, specs, max_shard_bytes)
        try:
            for name, tensor in tensors:
                writer.write(name, tensor)
            writer.finish()
        finally:
            writer.close()
        write_checksums(folder, writer.digests)
        publish(folder, out)


def verify_hf_folder(folder: Path) -> int:
    """Read every tensor of ``folder`` and compare it with its checksum; the number of tensors.

    Raises:
        BridgeError: there are no checksums, or a tensor is not what was written.
    """
    path = folder / checksums.NAME
    if not path.exists():
        raise BridgeError(f"{folder} has no {checksums.NAME} to compare with")
    recorded = checksums.read_checksums(path)
    with SafetensorsFolder(folder) as weights:
        names = list(weights.names)
        for name in names:
            entry = weights.entry(name)
            if digest_of(weights.descriptor(name), entry.offset, entry.nbytes) != recorded.get(name):
                raise BridgeError(f"{entry.path}: {name} is not what was written; convert or copy the folder again")
    return len(names)


def hidden_folder(out: Path) -> Path:
    """Where ``out`` is assembled."""
    return out.parent / f".{out.name}.partial"


@contextmanager
def staged_folder(out: Path, *, job: str | None = None, marker: str = "config.json") -> Iterator[Path]:
    """The hidden folder of ``out``, locked; :func:`publish` gives it its name, or it is gone afterwards.

    Args:
        job: what is being done, from what: a folder that an interrupted run of the same job left is continued, and
            one that fails is left for the next run.
        marker: file that tells a folder of this kind, which may be replaced, from any other.

    Raises:
        BridgeError: for errors of files, in one line; ``out`` is something else; another process is writing it.
    """
    folder, held = hidden_folder(out), -1
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _recover(out)
        _refuse_foreign(out, marker)
        held = _lock(folder, out)
        if job is None or not checksums.same_job(folder / checksums.NAME, job):
            _empty(folder)
        yield folder
    except OSError as error:
        raise write_error(out, error, resumable=job is not None) from error
    finally:
        if held >= 0:
            if job is None:
                shutil.rmtree(folder, ignore_errors=True)
            os.close(held)


def write_error(out: Path, error: OSError, *, resumable: bool = False) -> BridgeError:
    """One line for an error of the operating system while ``out`` was written."""
    end = "run it again to continue" if resumable else "nothing was changed"
    return BridgeError(f"cannot write {out}: {error.strerror or error}; {end}")


def publish(folder: Path, out: Path, *, sync: bool = True) -> None:
    """Give the finished hidden folder its name; an older ``out`` goes. Flushed to the disk unless ``sync`` is false."""
    (folder / _LOCK).unlink(missing_ok=True)
    for path in [*folder.rglob("*"), folder] if sync else ():
        flush(path)
    old = _old(out)
    if out.exists():
        os.rename(out, old)
    try:
        os.rename(folder, out)
    except OSError:
        if old.exists():
            os.rename(old, out)
        raise
    if sync:
        flush(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def main_dtype(specs: Sequence[TensorSpec]) -> torch.dtype:
    """The dtype of most bytes, which config.json names; a router's bias may be float32 beside it."""
    sizes: Counter[torch.dtype] = Counter()
    for spec in specs:
        sizes[spec.dtype] += spec.nbytes
    return sizes.most_common(1)[0][0]


def copy_other_files(source: Path, folder: Path, dtype: torch.dtype | None) -> None:
    """Every file of ``source`` that holds no weights, byte for byte; config.json names ``dtype``, if one is given."""
    if not (source / "config.json").is_file():
        raise BridgeError(f"{source} has no config.json to copy; give a Hugging Face model folder")
    for path in sorted(source.iterdir()):
        if path.name.startswith(".") or path.name.endswith(_WEIGHT_SUFFIXES) or not path.is_file():
            continue
        if path.name == checksums.NAME:
            continue
        content = path.read_bytes()
        if path.name == "config.json" and dtype is not None:
            content = _with_dtype(content, str(dtype).removeprefix("torch."))
        (folder / path.name).write_bytes(content)


def write_checksums(folder: Path, digests: dict[str, str]) -> None:
    """The sidecar of a folder that was written in one go."""
    sidecar = Sidecar(folder / checksums.NAME, job="export")
    for name, digest in digests.items():
        sidecar.add(name, digest)
    sidecar.close()


def _with_dtype(config: bytes, dtype: str) -> bytes:
    """The same bytes, but for the value of ``dtype`` or ``torch_dtype``."""
    text = _DTYPE_KEY.sub(rf"\g<1>{dtype}\g<2>", config.decode())
    parsed = json.loads(text)
    for key in ("dtype", "torch_dtype"):
        if parsed.get(key) not in (None, dtype):
            raise BridgeError(f"config.json: {key}={parsed[key]!r} cannot be set to {dtype!r}")
    return text.encode()


def _lock(folder: Path, out: Path) -> int:
    """An open descriptor that holds the folder until it is closed, also by the death of this process."""
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise BridgeError(f"another process is writing {out}; wait for it, or give another folder") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # a shared file system may have no locks; the rename is atomic all the same
            os.close(descriptor)
            raise
    return descriptor


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()


def _old(out: Path) -> Path:
    return out.parent / f".{out.name}.old"


def _recover(out: Path) -> None:
    """Undo a replacement that was killed between its two renames, or finish removing the old folder."""
    old = _old(out)
    if not old.exists():
        return
    if out.exists():
        shutil.rmtree(old)
    else:
        os.rename(old, out)


def _refuse_foreign(out: Path, marker: str) -> None:
    if out.exists() and not out.is_dir():
        raise BridgeError(f"{out} is a file; give a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / marker).exists():
        raise BridgeError(f"{out} is not empty and no model folder; give another folder")
