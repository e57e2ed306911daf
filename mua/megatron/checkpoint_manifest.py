"""``manifest.json``: what a checkpoint holds, and what every file of it must look like.

It is written last, into the folder that is still hidden, so that a folder without one is not whole. It has the size and
the checksum of every file, and one of itself; all of them are compared before a checkpoint is loaded or converted
(:func:`check_files`, of which each rank takes a share).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from mua.types import Json
from mua.utils.checksums import ALGORITHM, Hasher, digest_of_file
from mua.utils.errors import DamagedCheckpoint, ModelError
from mua.utils.strict_json import is_count, is_name, label, read_json_file, shown

NAME, STATE, HF_FILES = "manifest.json", "state.json", "hf"
FORMAT = 3
"""Format 2 was that of Megatron-Core 0.16, which kept other states of the optimizer under other names."""
_SUM = "checksum"


def read_manifest(folder: Path) -> Json:
    """The manifest of the checkpoint ``folder``.

    Raises:
        DamagedCheckpoint: it has no manifest, or one that is not as it was written.
        ModelError: there is no such folder, or it is of another format.
    """
    if not folder.is_dir():
        raise ModelError(f"checkpoint {folder} does not exist; name a step_* folder, or none to start afresh")
    try:
        content = read_json_file(folder / NAME, strict=False)  # a configuration may hold Infinity
    except FileNotFoundError:
        raise DamagedCheckpoint(f"checkpoint {folder} is not whole: it has no {NAME}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON: {error}"
        raise DamagedCheckpoint(f"checkpoint {folder} is damaged: {NAME} cannot be read: {reason}") from error
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"checkpoint {folder} is damaged: {NAME} is no JSON object")
    intact = content.get(_SUM) == _checksum(content)
    if content.get("format") != FORMAT and (intact or _SUM not in content):
        raise ModelError(_other_format(folder, content))
    if not intact:
        raise DamagedCheckpoint(f"checkpoint {folder} is damaged: {NAME}: it has other bytes than were written")
    try:
        (_TrainingManifest if content.get("weights_only", False) is False else _WeightsManifest).model_validate(content)
    except ValidationError as error:
        key = error.errors()[0]["loc"][0]
        raise DamagedCheckpoint(
            f"checkpoint {folder} is damaged: {NAME}: {key} is missing or of the wrong kind"
        ) from None
    return content


def _other_format(folder: Path, content: Json) -> str:
    found = content.get("format")
    if found not in (1, 2):
        return f"checkpoint {folder}: {NAME} has format {shown(found)}, this version reads {FORMAT}"
    versions = content.get("versions")
    saved = versions.get("megatron-core") if isinstance(versions, dict) else None
    saved = saved if is_name(saved) else None
    return (
        f"checkpoint {folder} was saved with Megatron-Core {saved or '0.16'} (format {found}), this version has "
        f"{version('megatron-core')} and reads format {FORMAT}; convert it with the version of mua that saved it (mua "
        "convert megatron-to-hf) and start a new run with model.path there"
    )


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError("no file of this folder")
    return name


_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_Name = Annotated[str, Field(pattern=r"\A[ -~]{1,500}\z")]  # as ``is_name`` says


class _FileEntry(BaseModel, strict=True):
    bytes: _Count
    xxh3_64: str


class _WeightsManifest(BaseModel, strict=True):
    """What every manifest says."""

    tensors: dict[_Name, Annotated[list[_Count], Field(max_length=8)]]
    dtype: Literal["torch.float32", "torch.bfloat16", "torch.float16", "torch.float64"]
    files: dict[Annotated[str, AfterValidator(_inside)], _FileEntry]
    weights_only: bool = False


class _TrainingManifest(_WeightsManifest, strict=True):
    """What that of a checkpoint with optimizer state says too."""

    distributed_optimizer: bool
    layout: dict[str, _Count]
    networks: list[_Name]


def _checksum(content: Json) -> str:
    """Of everything a manifest says but the checksum itself; none of what is nested too deep to be one."""
    rest = {key: value for key, value in content.items() if key != _SUM}
    try:
        return str(Hasher(json.dumps(rest, sort_keys=True).encode()).hexdigest())
    except RecursionError:
        return ""


def write_manifest(folder: Path, content: Mapping[str, Any], digests: Mapping[str, str] | None = None) -> None:
    """Describe ``content`` and every file of ``folder``.

    Args:
        digests: checksums by file name that are known already; the other files are read.
    """
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if name == NAME or (path.name.startswith(".") and path.name != ".metadata"):
            continue
        files[name] = {"bytes": path.stat().st_size, ALGORITHM: (digests or {}).get(name) or digest_of_file(path)}
    described = {"format": FORMAT, "megatron_core": version("megatron-core"), **content, "files": files}
    plain: Json = json.loads(json.dumps(described))  # whose keys are all text, as they will be when they are read
    (folder / NAME).write_text(json.dumps({**plain, _SUM: _checksum(plain)}, indent=1))


def check_files(folder: Path, content: Json, part: int = 0, parts: int = 1) -> None:
    """Read a share of the files and compare them with the sizes and checksums they were written with.

    Args:
        part: which of ``parts`` shares of about the same number of bytes: a rank among all ranks.

    Raises:
        DamagedCheckpoint: a file is missing or another one.
    """
    for name in _share(content["files"], part, parts):
        expected, path = content["files"][name], folder / name
        size, state = expected["bytes"], None
        try:
            found = path.stat().st_size if path.is_file() else None
            if found is None:
                state = "is missing"
            elif found != size:
                state = f"has {found} bytes instead of {size}"
            elif digest_of_file(path) != expected[ALGORITHM]:
                state = "has other bytes than were written"
        except (OSError, ValueError) as error:
            state = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        if state is not None:
            raise DamagedCheckpoint(f"checkpoint {folder} is damaged: {label(name)} {state}")


def foreign_checkpoint_files(folder: Path) -> str | None:
    """Why ``folder`` is not a checkpoint as it was written and nothing else; None if it is one."""
    try:
        content = read_manifest(folder)
        check_files(folder, content)
    except ModelError as error:
        return str(error)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()}
    foreign = sorted(names - {NAME, *content["files"]})
    return f"it holds {foreign[0]}" if foreign else None


def has_files(folder: Path) -> bool:
    """Whether a checkpoint has a manifest and all files in their sizes; none of them is read."""
    try:
        files = read_manifest(folder)["files"]
        return all((folder / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (ModelError, OSError):
        return False


def _share(files: Mapping[str, Any], part: int, parts: int) -> list[str]:
    """The largest files first, each to the share that has the fewest bytes; whole files, as each has one checksum."""
    loads, mine = [0] * parts, []
    for name in sorted(files, key=lambda name: (-files[name]["bytes"], name)):
        least = loads.index(min(loads))
        loads[least] += files[name]["bytes"] + 1
        if least == part:
            mine.append(name)
    return mine


def read_state(folder: Path, counts: list[str]) -> Json:
    """``state.json``, in which every one of ``counts`` is a number of steps.

    Raises:
        DamagedCheckpoint: it cannot be read, or lacks one.
    """
    try:
        state = read_json_file(folder / STATE, strict=False)
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"checkpoint {folder} is damaged: {STATE} cannot be read ({error})") from error
    for name in counts:
        if not isinstance(state, dict) or not is_count(state.get(name)):
            raise DamagedCheckpoint(f"checkpoint {folder} is damaged: {STATE} has no number under {name!r}")
    result: Json = state
    return result
