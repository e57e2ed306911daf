"""``manifest.json``: what a checkpoint holds, and what every file of it must look like.

It is written last, into the folder that is still hidden, so that a folder without one is not whole. It has the size and
the checksum of every file, and one of itself; all of them are compared before a checkpoint is loaded or converted
(:func:`check_files`, of which each rank takes a share).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from megatron_bridge.hf_folder import MANIFEST, verify_hf_folder
from megatron_bridge.safetensors_io import SafetensorsFolder
from mua.types import Json
from mua.utils.checksums import ALGORITHM, Hasher, digest_of_file
from mua.utils.checksums import NAME as CHECKSUMS
from mua.utils.errors import BridgeError, DamagedCheckpoint, ModelError
from mua.utils.strict_json import label, read_json_file, shown

NAME = MANIFEST
FORMAT = 4
"""Formats up to 3 were Megatron's torch_dist."""
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
        found, quoted = content.get("format"), shlex.quote(str(folder))
        if found == 3:
            raise ModelError(
                f"checkpoint {folder} is of the old form (torch_dist); mua convert megatron-to-hf {quoted} OUT "
                f"--source {quoted}/hf imports its weights, from which a new run starts with model.path there"
            )
        raise ModelError(f"checkpoint {folder}: {NAME} has format {shown(found)}, this version reads {FORMAT}")
    if not intact:
        raise DamagedCheckpoint(f"checkpoint {folder} is damaged: {NAME}: it has other bytes than were written")
    try:
        _Manifest.model_validate(content)
    except ValidationError as error:
        key = error.errors()[0]["loc"][0]
        raise DamagedCheckpoint(
            f"checkpoint {folder} is damaged: {NAME}: {key} is missing or of the wrong kind"
        ) from None
    return content


_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_Name = Annotated[str, Field(pattern=r"\A[ -~]{1,500}\z")]  # as ``is_name`` says
_File = Annotated[str, Field(pattern=r"\A\w[\w.-]*(/\w[\w.-]*)*\z")]
"""Of this folder: no part of it is hidden, or leads out."""


class _FileEntry(BaseModel, strict=True):
    bytes: _Count
    xxh3_64: str


class _NetworkState(BaseModel, strict=True):
    steps: _Count
    skipped_steps: _Count


class _Manifest(BaseModel, strict=True):
    """What every manifest says."""

    dtype: Literal["torch.float32", "torch.bfloat16", "torch.float16", "torch.float64"]
    files: dict[_File, _FileEntry]
    layout: dict[str, _Count]
    networks: dict[_Name, _NetworkState]
    """By name: optimizer steps, which are its schedule's position, and those that were skipped."""
    data_position: dict[str, Any]


def _checksum(content: Json) -> str:
    """Of everything a manifest says but the checksum itself; none of what is nested too deep to be one."""
    rest = {key: value for key, value in content.items() if key != _SUM}
    try:
        return str(Hasher(json.dumps(rest, sort_keys=True).encode()).hexdigest())
    except RecursionError:
        return ""


def write_manifest(folder: Path, content: Mapping[str, Any], digests: Mapping[str, str]) -> None:
    """Describe ``content`` and the files of ``folder`` that no sidecar of a model folder describes.

    Args:
        digests: checksums by file name that are known already; the sidecars are read.
    """
    known = dict(digests)
    for path in sorted(folder.rglob(CHECKSUMS)):
        known[str(path.relative_to(folder))] = str(digest_of_file(path))
    files = {name: {"bytes": (folder / name).stat().st_size, ALGORITHM: known[name]} for name in sorted(known)}
    described = {"format": FORMAT, **content, "files": files}
    plain: Json = json.loads(json.dumps(described))  # whose keys are all text, as they will be when they are read
    (folder / NAME).write_text(json.dumps({**plain, _SUM: _checksum(plain)}, indent=1))


def check_files(folder: Path, content: Json, part: int = 0, parts: int = 1) -> None:
    """Read a share of the files and compare them with the checksums they were written with.

    The model folders in it, each by its sidecar, are compared too.

    Args:
        part: which of ``parts`` shares of about the same number of bytes: a rank among all ranks.

    Raises:
        DamagedCheckpoint: a file is missing or another one.
    """
    files = content["files"]
    for name in sorted(files, key=lambda name: (files[name]["bytes"], name))[part::parts]:
        try:
            intact = digest_of_file(folder / name) == files[name][ALGORITHM]
            state = "has other bytes than were written"
        except (OSError, ValueError) as error:
            intact, state = False, f"cannot be read: {getattr(error, 'strerror', None) or error}"
        if not intact:
            raise DamagedCheckpoint(f"checkpoint {folder} is damaged: {label(name)} {state}")
    for name in files:
        if PurePosixPath(name).name == CHECKSUMS:
            try:
                verify_hf_folder((folder / name).parent, part, parts)
            except BridgeError as error:
                raise DamagedCheckpoint(f"checkpoint {folder} is damaged: {error}") from error


def has_files(folder: Path) -> bool:
    """Whether a checkpoint has a manifest and all files in their sizes; of weights the headers alone are read."""
    try:
        files = read_manifest(folder)["files"]
        for name in files:
            if PurePosixPath(name).name == CHECKSUMS:
                SafetensorsFolder((folder / name).parent).close()
        return all((folder / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (ModelError, OSError):
        return False
