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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megatron_bridge import checksums
from megatron_bridge.checksums import Sidecar, digest_of
from megatron_bridge.errors import BridgeError
from megatron_bridge.plain_files import open_regular
from megatron_bridge.plan import TensorSpec
from megatron_bridge.safetensors_io import SafetensorsFolder
from megatron_bridge.safetensors_writer import SafetensorsWriter, flush

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
        write_checksums(folder, writer.digests, writer.layout.header_sizes())
        publish(folder, out)


def verify_hf_folder(folder: Path, part: int = 0, parts: int = 1) -> int:
    """Read everything that was written into ``folder`` and compare it with its checksums; the number of tensors.

    Args:
        part: which of ``parts`` shares of the tensors and files is read: a rank among all ranks.

    Raises:
        BridgeError: there are no checksums, or a tensor or file is not what was written.
    """
    recorded = checksums.read_sealed(folder)
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
        found = checksums.digest_of_file(path, size)
    except OSError as error:
        raise BridgeError(f"{path} cannot be read: {error.strerror}; convert or copy the folder again") from error
    if found != digest:
        raise BridgeError(
            f"{path} is not what was written; convert or copy the folder again, or remove {checksums.NAME} there if it "
            "was changed on purpose"
        )


def foreign_files(folder: Path) -> str | None:
    """Why ``folder`` is not a model folder as it was written and nothing else; None if it is one."""
    try:
        recorded = checksums.read_sealed(folder)
        verify_hf_folder(folder)
    except BridgeError as error:
        return str(error)
    written = {checksums.NAME, *recorded.files, *recorded.headers}
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in written)
    return f"it holds {foreign[0]}" if foreign else None


def refuse_overlap(out: Path, *sources: Path) -> None:
    """Raise unless ``out`` and every one of ``sources`` lie apart: neither is in the other, nor are they the same."""
    real = out.resolve()
    for source in (source.resolve() for source in sources):
        if real == source or source in real.parents or real in source.parents:
            raise BridgeError(f"{out} would be written over or into {source}, which is read; give a folder elsewhere")


def hidden_folder(out: Path) -> Path:
    """Where ``out`` is assembled."""
    return out.parent / f".{out.name}.partial"


@contextmanager
def staged_folder(
    out: Path, *, job: str | None = None, foreign: Callable[[Path], str | None] | None = None
) -> Iterator[Path]:
    """The hidden folder of ``out``, locked; :func:`publish` gives it its name, or it is gone afterwards.

    Args:
        job: what is being done, from what: a folder that an interrupted run of the same job left is continued, and
            one that fails is left for the next run.
        foreign: why an ``out`` that is not empty must not be replaced; by default it may be if it has a config.json.

    Raises:
        BridgeError: for errors of files, in one line; ``out`` is something else; another process is writing it.
    """
    folder, held = hidden_folder(out), -1
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _recover(out)
        _refuse_foreign(out, foreign or _no_model)
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
        skipped = path.name.startswith(".") or path.name.endswith(_WEIGHT_SUFFIXES) or path.name == checksums.NAME
        if skipped or path.is_dir():
            continue
        try:
            descriptor = open_regular(path)
        except OSError as error:
            raise BridgeError(f"{path} cannot be read: {error.strerror}") from error
        with open(descriptor, "rb") as read, (folder / path.name).open("wb") as written:
            if path.name == "config.json" and dtype is not None:
                written.write(_with_dtype(read.read(), str(dtype).removeprefix("torch.")))
            else:
                shutil.copyfileobj(read, written, 1 << 20)


def write_checksums(folder: Path, digests: dict[str, str], headers: dict[str, int]) -> None:
    """The closed sidecar of a folder that was written in one go; ``headers`` as for :func:`checksums.seal`."""
    sidecar = Sidecar(folder / checksums.NAME, job="export")
    for name, digest in digests.items():
        sidecar.add(name, digest)
    sidecar.close()
    checksums.seal(folder, headers)


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


def _refuse_foreign(out: Path, foreign: Callable[[Path], str | None]) -> None:
    if out.exists() and not out.is_dir():
        raise BridgeError(f"{out} is a file; give a folder")
    if out.is_dir() and any(out.iterdir()):
        place = out.resolve()
        if place in (Path.home(), *Path.cwd().parents, Path.cwd()) or place.is_mount():
            raise BridgeError(f"{out} is never replaced; give a folder of its own")
        if (reason := foreign(out)) is not None:
            raise BridgeError(reason)


def _no_model(out: Path) -> str | None:
    return None if (out / "config.json").exists() else f"{out} is not empty and no model folder; give another folder"


def replaceable(foreign: Callable[[Path], str | None], *, force: bool) -> Callable[[Path], str | None]:
    """The ``foreign`` of a :func:`staged_folder` of a command that has ``--force``."""

    def reason(out: Path) -> str | None:
        found = None if force else foreign(out)
        return found and (
            f"{out} holds what this command did not write ({found}); give another folder, or --force to replace it "
            "with everything in it"
        )

    return reason
