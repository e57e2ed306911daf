"""Model folders from elsewhere: a run starts from what the reference library reads in one, or refuses it in one line.

Damaged are config.json, headers, offsets and dtypes of weight files, the index, values, the sidecar's checksums, and
what kind of file lies under a name (FIFO, device, folder, loop of links). Not covered: tokenizers, and damage that
leaves another possible model.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from megatron_bridge.save import save_hf
from mua.config.schema import ModelConfig
from mua.megatron.architecture import architecture_of
from mua.utils.errors import MuaError
from tests.fuzz._mutate import damage_bytes, damage_json, mutated_bytes, mutated_json, outcome, scratch
from tests.megatron_support import backend, write_model

CASES = 260
CHUNK = 20
REFUSALS = MuaError
_KEPT = tempfile.TemporaryDirectory(prefix="mua-fuzz-")


def run(cases: int, seed: int) -> list[str]:
    """Faults of ``cases`` folders, one line each; case n has the seed ``seed + n``."""
    failures = []
    for number in range(seed, seed + cases):
        rng = random.Random(f"model_folders/{number}")
        damage = rng.choice(_DAMAGES)
        with scratch() as root:
            folder = Path(shutil.copytree(_folder(rng.choice((False, True))), root / "hf", symlinks=True))
            damage(folder, rng)
            model = ModelConfig.model_construct(path=folder, hf_config=None)
            faults = _loaded(folder) + outcome(partial(architecture_of, model), REFUSALS)[2]
        failures += [f"seed {number} ({damage.__name__[1:]}): {fault}" for fault in faults]
    return failures


@cache
def _folder(exported: bool) -> Path:
    """A model in one file, or what an export of it in several files and with checksums is."""
    root = Path(_KEPT.name) / str(exported)
    root.mkdir()
    write_model(root / "hf")
    (root / "hf" / "tokenizer.json").write_text("{}")
    if exported:
        with backend(root / "hf") as built:
            save_hf(built.policy.chunks, root / "back", source=root / "hf", max_shard_bytes=20_000)
    return root / ("back" if exported else "hf")


def _loaded(folder: Path) -> list[str]:
    def start() -> None:
        with backend(folder):
            pass

    _, error, faults = outcome(start, REFUSALS)
    return faults or (_as_the_library_reads(folder) if error is None else [])


def _as_the_library_reads(folder: Path) -> list[str]:
    """What was taken must be readable for the reference implementation too, and be numbers."""
    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    try:
        stored = [tensor for file in files for tensor in load_file(folder / file).values()]
    except (SafetensorError, OSError, KeyError) as error:
        return [f"taken, but safetensors refuses it: {error}"]
    return [] if all(bool(torch.isfinite(tensor).all()) for tensor in stored) else ["taken with values that are none"]


def _unsealed(folder: Path, name: str = "config.json") -> Path:
    """A file of the folder, whose checksums are gone: they would be told before anything else."""
    (folder / "checksums.jsonl").unlink(missing_ok=True)
    return folder / name


def _config(folder: Path, rng: random.Random) -> None:
    damage_json(_unsealed(folder), rng)


def _config_sizes(folder: Path, rng: random.Random) -> None:
    path = _unsealed(folder)
    config = json.loads(path.read_text())
    numbers = [key for key, value in config.items() if type(value) in (int, float)]
    for key in rng.sample(numbers, rng.choice((1, 1, 2))):
        config[key] = rng.choice((0, -1, 1, 2, 3, 7, 64, 10**3, 10**6, 2**31, 2**63, 10**30, 0.5, -0.5, 1e300))
    path.write_text(json.dumps(config))


def _config_bytes(folder: Path, rng: random.Random) -> None:
    damage_bytes(_unsealed(folder), rng)


def _weights(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(_unsealed(folder, ".").glob("*.safetensors")))


def _parts(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _put(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def _header(folder: Path, rng: random.Random) -> None:
    path = _weights(folder, rng)
    header, data = _parts(path)
    _put(path, mutated_json(header, rng).encode("utf-8", "surrogatepass"), data)


def _header_bytes(folder: Path, rng: random.Random) -> None:
    path = _weights(folder, rng)
    header, data = _parts(path)
    _put(path, mutated_bytes(json.dumps(header).encode(), rng), data)


def _header_length(folder: Path, rng: random.Random) -> None:
    path = _weights(folder, rng)
    data = path.read_bytes()
    length = rng.choice((0, 1, 2, 7, len(data), len(data) - 8, 100 << 20, 2**31, 2**63, 2**64 - 1, rng.randrange(9999)))
    path.write_bytes(struct.pack("<Q", length) + data[8:])


def _offsets(folder: Path, rng: random.Random) -> None:
    """Tensors that overlap, leave holes, lie in another order or beyond the end, or have another dtype or shape."""
    path = _weights(folder, rng)
    header, data = _parts(path)
    names = [name for name in header if name != "__metadata__"]
    first, second = header[rng.choice(names)], header[rng.choice(names)]
    kind = rng.randrange(6)
    if kind == 0:
        first["data_offsets"] = list(second["data_offsets"])
    elif kind == 1:
        shift = rng.choice((-8, -4, 4, 8, 1 << 20))
        first["data_offsets"] = [place + shift for place in first["data_offsets"]]
    elif kind == 2:
        first["dtype"] = rng.choice(("F16", "BF16", "I32", "F64", "U8", "F8_E4M3", "BOOL", "f32", ""))
    elif kind == 3:
        first["shape"] = rng.choice(([], [0], first["shape"][::-1], [*first["shape"], 1], [2**62, 4], [-1, -1], [1.0]))
    elif kind == 4:
        data += bytes(rng.randrange(1, 64))
    else:
        data = data[: -rng.randrange(1, 64)]
    _put(path, json.dumps(header).encode(), data)


def _twice(folder: Path, rng: random.Random) -> None:
    """A tensor in two files, or under one name twice in a header."""
    path = _weights(folder, rng)
    header, data = _parts(path)
    name = next(name for name in header if name != "__metadata__")
    if rng.random() < 0.5:
        text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
        _put(path, text.encode(), data)
    else:
        shutil.copy(path, folder / "model-00099-of-00099.safetensors")
        weights = {**_weight_map(folder), "copied": "model-00099-of-00099.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def _weight_map(folder: Path) -> dict[str, str]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: path.name for path in files for name in _parts(path)[0] if name != "__metadata__"}


def _values(folder: Path, rng: random.Random) -> None:
    path = _weights(folder, rng)
    header, data = _parts(path)
    place = rng.randrange(len(data) // 4) * 4
    value = struct.pack("<f", rng.choice((float("nan"), float("inf"), float("-inf"))))
    _put(path, json.dumps(header).encode(), data[:place] + value + data[place + 4 :])


def _index(folder: Path, rng: random.Random) -> None:
    path, weights = _unsealed(folder, "model.safetensors.index.json"), _weight_map(folder)
    if rng.random() < 0.5:
        outside = ("../../etc/passwd", "/etc/passwd", "absent.safetensors", "..", "", "x/../model.safetensors", ".")
        weights[rng.choice(sorted(weights))] = rng.choice(outside)
        text = json.dumps({"weight_map": weights})
    else:
        text = mutated_json({"metadata": {"total_size": 5}, "weight_map": weights}, rng)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")


def _kind_of_file(folder: Path, rng: random.Random) -> None:
    path = rng.choice(sorted(folder.iterdir()))
    path.unlink()
    kind = rng.randrange(7)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(rng.choice(("/dev/zero", "/dev/random", "/dev/full", "/dev/null")))
    elif kind == 3:
        path.symlink_to(path)
    elif kind == 4:
        path.symlink_to(folder / "absent")
    elif kind == 5:
        path.write_bytes(b"")


def _any_bytes(folder: Path, rng: random.Random) -> None:
    damage_bytes(rng.choice(sorted(folder.iterdir())), rng)


def _sidecar(folder: Path, rng: random.Random) -> None:
    path = folder / "checksums.jsonl"
    if not path.exists():
        path.write_text('{"algorithm": "xxh3_64", "job": "x"}\n')
    damage_bytes(path, rng)


_DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (
    _config, _config, _config_sizes, _config_sizes, _config_bytes, _header, _header, _header_bytes, _header_length,
    _offsets, _offsets, _twice, _values, _index, _index, _kind_of_file, _kind_of_file, _any_bytes, _sidecar,
)  # fmt: skip
