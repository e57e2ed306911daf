"""Checkpoints whose small files are damaged: each is used as far as it is whole, or refused in one line.

Damaged are, of ours, manifest.json, with its own checksum put right in half of the cases, random states, the sidecar
and the heads of slices, the last three under a manifest that fits, as somebody would who means harm; of Megatron-LM's,
the index and the heads of tensors. Every case is met by ``verify``, by conversion or by resuming. Not covered: damage
that leaves another possible checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from mua.megatron import checkpoint_manifest, offline
from mua.megatron.checkpoint import checkpoint_folder, instead_of
from mua.megatron.offline import verify
from mua.megatron.torch_dist import INDEX
from mua.utils.checksums import NAME as CHECKSUMS
from mua.utils.checksums import digest_of_file
from mua.utils.errors import MuaError
from tests.fuzz._mutate import damage_bytes, damage_json, mutated_bytes, outcome, scratch
from tests.megatron_support import backend, write_model
from tests.torch_dist import save_torch_dist

CASES = 150
CHUNK = 30
REFUSALS = MuaError
_KEPT = tempfile.TemporaryDirectory(prefix="mua-fuzz-")
Meet = Callable[[Path], object]
Damage = Callable[[Path, random.Random], object]


def run(cases: int, seed: int) -> list[str]:
    """Faults of ``cases`` checkpoints, one line each; case n has the seed ``seed + n``."""
    model, failures = _saved()[0], []
    with backend(model) as built:
        for number in range(seed, seed + cases):
            failures += _case(number, {"resume": built.load}, resume=True)
    for number in range(seed, seed + cases):
        failures += _case(number, {"verify": _verify, "convert": _convert, "offer": _offer}, resume=False)
    return failures


def _case(number: int, meetings: dict[str, Meet], *, resume: bool) -> list[str]:
    """One damaged checkpoint. A process with process groups can resume and not import, so each case has its turn."""
    rng = random.Random(f"manifests/{number}")
    if (rng.random() < 0.4) is not resume:
        return []
    upstreams = not resume and rng.random() < 0.3
    meeting = "convert" if upstreams else rng.choice(sorted(meetings))
    told, damage = rng.choice(_UPSTREAMS if upstreams else _DAMAGES)
    with scratch() as root:
        folder = checkpoint_folder(root, 1)
        shutil.copytree(_saved()[1 + upstreams], folder)
        damage(folder, rng)
        faults = outcome(lambda: meetings[meeting](folder), REFUSALS)[2]
    return [f"seed {number} ({told}, {meeting}): {fault}" for fault in faults]


@cache
def _saved() -> tuple[Path, Path, Path]:
    """A model, a training checkpoint of it, and one of Megatron-LM."""
    root = Path(_KEPT.name)
    write_model(root / "hf")
    with backend(root / "hf") as built:
        built.save(checkpoint_folder(root, 1), {"step": 1})
        save_torch_dist(built, root / "upstreams")
    return root / "hf", checkpoint_folder(root, 1), root / "upstreams"


def _verify(folder: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        verify(folder)


def _convert(folder: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        offline.convert_to_hf(folder, folder.with_name("out"), _saved()[0])


def _offer(folder: Path) -> None:
    newest = Path(shutil.copytree(_saved()[1], checkpoint_folder(folder.parent, 2)))
    (newest / checkpoint_manifest.NAME).unlink()
    instead_of(newest)
    _convert(newest)


def _seal(folder: Path) -> None:
    """Put sizes and checksums of the manifest right."""
    content = json.loads((folder / checkpoint_manifest.NAME).read_text())
    for name, entry in content["files"].items():
        path = folder / name
        if path.is_file():
            entry |= {"bytes": path.stat().st_size, "xxh3_64": digest_of_file(path)}
    _write(folder, content)


def _write(folder: Path, content: dict[str, object]) -> None:
    content["checksum"] = checkpoint_manifest._checksum(content)
    (folder / checkpoint_manifest.NAME).write_text(json.dumps(content), encoding="utf-8", errors="surrogatepass")


def _manifest_sealed(folder: Path, rng: random.Random) -> None:
    damage_json(folder / checkpoint_manifest.NAME, rng)
    try:
        content = json.loads((folder / checkpoint_manifest.NAME).read_text(encoding="utf-8", errors="surrogatepass"))
    except (ValueError, RecursionError):
        return
    if isinstance(content, dict):
        _write(folder, content)


def _manifest_kind(folder: Path, rng: random.Random) -> None:
    path = folder / rng.choice(_FILES)
    path.unlink()
    kind = rng.randrange(4)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to(path)
    elif kind == 2:
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


def _bytes(path: Path, rng: random.Random) -> None:
    """Change bytes; in a long file at a drawn place of a few hundred, so that heads are met as well as values."""
    data = path.read_bytes()
    start = rng.randrange(max(1, len(data) - 400))
    path.write_bytes(data[:start] + mutated_bytes(data[start : start + 400], rng) + data[start + 400 :])


def _sealed(change: Callable[[Path, random.Random], object], name: str) -> Damage:
    def damage(folder: Path, rng: random.Random) -> None:
        change(folder / name, rng)
        _seal(folder)

    return damage


_RANDOM, _SLICES = "optimizer/random_00000.json", "optimizer/rank_00000.safetensors"
_FILES = (checkpoint_manifest.NAME, CHECKSUMS, "config.json", "model.safetensors", _RANDOM, _SLICES)
_DAMAGES: tuple[tuple[str, Damage], ...] = (
    ("manifest_bytes", lambda folder, rng: damage_bytes(folder / checkpoint_manifest.NAME, rng)),
    ("manifest", lambda folder, rng: damage_json(folder / checkpoint_manifest.NAME, rng)),
    *[("manifest_sealed", _manifest_sealed)] * 3,
    ("manifest_kind", _manifest_kind),
    *[("random_states", _sealed(damage_json, _RANDOM))] * 2,
    *[("slices", _sealed(_bytes, _SLICES))] * 3,
    ("sidecar", _sealed(_bytes, CHECKSUMS)),
)
_UPSTREAMS: tuple[tuple[str, Damage], ...] = (
    ("index", lambda folder, rng: _bytes(folder / INDEX, rng)),
    ("tensors", lambda folder, rng: _bytes(rng.choice(sorted(folder.glob("*.distcp"))), rng)),
)
