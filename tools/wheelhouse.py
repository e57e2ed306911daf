"""Collect what a machine without internet needs into one folder: wheels, what they are, how they are installed there.

    python -m tools.wheelhouse FOLDER --for gpu|cpu|gpu-check [--limit 2GB] [--have NAMES] [--target-freeze FILE]

``gpu`` and ``cpu`` are the whole installations of docs/installation.md, ``gpu-check`` is what tools/gpu_check.py needs.
Versions are those of ``constraints/``. Of a machine that has some packages already, ``pip freeze`` there gives a FILE:
what the FILE has stays as it is wherever the rest goes together with it, and is not collected. ``--have torch,triton``
leaves out what is there by name alone, whatever its version; ``nvidia-*`` names several.

Where a limit is given, optional layers are left out whole, the last of the table first, until the rest fits; what then
does not work is said. FOLDER then holds the wheels, ``manifest.json`` (name, version, size, sha256, layer),
``requirements.txt`` with the hashes, and ``INSTALL.txt``. A run that was interrupted goes on: a file whose size and
hash are right stays. Nothing that is collected is executed.

uv resolves and knows sizes and hashes from the index alone; pip downloads. Exit status: 0; 2 for what a person can fix.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fnmatch
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from tools import kit

ROOT = Path(__file__).resolve().parents[1]
PYTHON, GLIBC = (3, 12), 35
PLATFORM = f"x86_64-manylinux_2_{GLIBC}"
MANIFEST, REQUIREMENTS, INSTALL = "manifest.json", "requirements.txt", "INSTALL.txt"
SECONDS = 900.0
"""Deadline of one resolution or one download."""
Kind = Literal["gpu", "cpu", "gpu-check"]


@dataclass(frozen=True)
class Layer:
    """Requirements that are left out together."""

    name: str
    lost: str
    """What does not work without it; empty for the first layer, which cannot be left out."""
    extras: tuple[str, ...] = ()
    """Of setup.py."""
    requirements: tuple[str, ...] = ()
    """Names that :data:`setup.py`'s ``gpu`` asks for."""
    bare: bool = False
    """Without what the requirements depend on; see constraints/cpu-py312-nodeps.txt."""
    source: bool = False
    """With the package that exists as source only."""


_TRAINING = Layer("training", "", requirements=("megatron-core",))
_ENGINE = "the step after a rollout needs engines: no mua train, no mua doctor sync, no mua eval of a checkpoint; "
_LAYERS: dict[Kind, tuple[Layer, ...]] = {
    "gpu": (
        _TRAINING,
        Layer("engine", _ENGINE + "mua sft, convert and plan work", requirements=("megatron-core", "sglang")),
        Layer(
            "transformer-engine", "megatron.implementation: transformer_engine; auto takes Megatron's local layers",
            requirements=("transformer-engine", "transformer-engine-cu13"), source=True,
        ),
        Layer("tools", "tools over MCP, the page reader, scorers of answers", extras=("tools",)),
        Layer("parquet", "Parquet files: official data, exports of a store", extras=("parquet",)),
        Layer("postgres", "a store in PostgreSQL", extras=("postgres",)),
        Layer("development", "make test, make lint, make docs", extras=("dev",)),
    ),
    "cpu": (
        Layer("training", "", extras=("cpu",)),
        Layer("engine", _ENGINE + "mua sft, convert and plan work", bare=True),
        Layer("tools", "tools over MCP, the page reader, scorers of answers", extras=("tools",)),
        Layer("parquet", "Parquet files: official data, exports of a store", extras=("parquet",)),
        Layer("postgres", "a store in PostgreSQL", extras=("postgres",)),
        Layer("development", "make test, make lint, make docs", extras=("dev",)),
    ),
    "gpu-check": (
        _TRAINING,
        Layer(
            "transformer-engine", "checks run on Megatron's local layers",
            requirements=("transformer-engine", "transformer-engine-cu13"), source=True,
        ),
        Layer("engine", "the checks engine, doctor-sync and rl are skipped", requirements=("megatron-core", "sglang")),
    ),
}  # fmt: skip
_PINS: dict[Kind, tuple[str, ...]] = {
    "gpu": ("gpu-py312-cu.txt",),
    "cpu": ("cpu-py312.txt", "cpu-py312-nodeps.txt"),
    "gpu-check": ("gpu-py312-cu.txt",),
}
_SOURCE = "gpu-py312-cu-source.txt"


class Trouble(Exception):
    """What a person can fix."""


@dataclass(frozen=True)
class Archive:
    """A wheel, or a source archive, of the index."""

    name: str
    version: str
    file: str
    size: int
    sha256: str
    url: str
    layer: str = ""


@dataclass
class Collection:
    """What goes into the folder, and what does not."""

    kind: str
    wheels: list[Archive] = field(default_factory=list)
    sources: list[Archive] = field(default_factory=list)
    at_target: list[str] = field(default_factory=list)
    """``name==version`` that the target has and that go together with the rest; by ``--have`` names alone."""
    replaced: list[str] = field(default_factory=list)
    """What the target has in a version that does not go together with the rest."""
    left_out: list[dict[str, Any]] = field(default_factory=list)
    """Layers: name, bytes, packages, what then does not work."""

    @property
    def size(self) -> int:
        return sum(archive.size for archive in (*self.wheels, *self.sources))


def main(argv: Sequence[str] | None = None) -> int:
    parser = kit.parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--for", dest="kind", choices=sorted(_LAYERS), default="gpu")
    parser.add_argument("--limit", type=size_of, metavar="SIZE", help="of all files, such as 64MB or 2GB")
    parser.add_argument("--have", default="", metavar="NAMES", help="packages that are there, such as torch,nvidia-*")
    parser.add_argument("--target-freeze", type=Path, metavar="FILE", help="what pip freeze prints on the machine")
    parser.add_argument("--dry-run", action="store_true", help="say what would be collected; download nothing")
    arguments = parser.parse_args(argv)
    try:
        frozen = read_freeze(arguments.target_freeze) if arguments.target_freeze else {}
        have = [canonicalize_name(name) if "*" not in name else name for name in arguments.have.split(",") if name]
        found = select(resolve(arguments.kind, frozen, have), arguments.limit)
        print("\n".join(summary(found)))
        if not arguments.dry_run:
            collect(found, arguments.folder)
            print(f"\n{install_text(found)}", end="")
    except Trouble as error:
        print(f"wheelhouse: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"wheelhouse: {error}", file=sys.stderr)
        return 2
    return 0


def size_of(text: str) -> int:
    """Bytes of ``64MB``, ``1.5 GB``, ``500MiB``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 64MB or 2GB")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def read_freeze(file: Path) -> dict[str, str]:
    """Versions by name, without their local part (``2.11.0+cu130`` is 2.11.0)."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Trouble(f"{file}: not UTF-8 text; give it what `pip freeze` prints") from error
    pinned: dict[str, str] = {}
    unread: list[str] = []
    for line in filter(None, (line.partition("#")[0].strip() for line in text.splitlines())):
        if match := re.fullmatch(r"([A-Za-z0-9][\w.-]*)\s*==\s*([\w.!]+)(\+[\w.]+)?(\s*;.*)?", line):
            pinned[canonicalize_name(match[1])] = match[2]
        elif match := re.match(r"([A-Za-z0-9][\w.-]*)\s*@", line):
            unread.append(match[1])
        elif not line.startswith("-"):
            unread.append(line[:40])
    if not pinned:
        raise Trouble(f"{file}: no line is NAME==VERSION; give it what `pip freeze` prints on the machine")
    if unread:
        shown = ", ".join(unread[:5])
        print(f"wheelhouse: {file}: {len(unread)} lines name no version ({shown}); what of them is there and "
              "fits can be named in --have", file=sys.stderr)  # fmt: skip
    return pinned


def resolve(kind: Kind, frozen: Mapping[str, str], have: Sequence[str]) -> Collection:
    """All layers, each with what no layer before it brings.

    A whole installation is solved together, so that what the target has gives way where it must. For the checks it does
    not: there each layer is solved beside those before it, and one that does not go with them is left out.
    """
    found, versions = Collection(kind), dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="mua-wheels-") as name:
        folder = Path(name)
        preferred = {**_pins(kind), **frozen}
        if kind != "gpu-check":
            preferred = _solved(_LAYERS[kind], preferred, {}, folder)
        layers: list[tuple[Layer, list[str]]] = []
        for layer in _LAYERS[kind]:
            try:
                solved = _bare(kind) if layer.bare else _solved([layer], preferred, versions, folder)
            except Trouble as error:
                if not layer.lost:
                    raise
                why = f"{layer.lost} (it does not go with what is there: {str(error)[-300:]})"
                found.left_out.append({"layer": layer.name, "bytes": 0, "packages": [], "lost": why})
                continue
            layers.append((layer, sorted(solved.keys() - versions.keys())))
            versions |= solved
        archives = _archives(versions, folder)
        for layer, names in layers:
            for name in names:
                if any(fnmatch.fnmatch(name, pattern) for pattern in have):
                    found.at_target.append(name)
                elif frozen.get(name) == versions[name]:
                    found.at_target.append(f"{name}=={versions[name]}")
                else:
                    if name in frozen:
                        found.replaced.append(f"{name} {frozen[name]} by {versions[name]}")
                    found.wheels.append(_labeled(archives, name, layer))
            if layer.source:
                found.sources.append(_source(layer, folder))
    return found


def _labeled(archives: Mapping[str, Archive], name: str, layer: Layer) -> Archive:
    if name not in archives:
        raise Trouble(f"{name} has no wheel for Python {PYTHON[0]}.{PYTHON[1]} on {PLATFORM}")
    return Archive(**(asdict(archives[name]) | {"layer": layer.name}))


def _pins(kind: Kind) -> dict[str, str]:
    lines: list[str] = [
        line for name in _PINS[kind] for line in (ROOT / "constraints" / name).read_text("utf-8").splitlines()
    ]
    return {
        canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines) if version
    }


def _requirements(names: Iterable[str]) -> list[str]:
    """What setup.py's GPU says of them, word for word."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (said,) = (ast.literal_eval(node.value) for node in tree.body
               if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "GPU")  # fmt: skip
    by_name: dict[str, str] = {canonicalize_name(re.split(r"[^\w.-]", line, maxsplit=1)[0]): line for line in said}
    return [by_name[name] for name in names]


def _solved(
    layers: Sequence[Layer], preferred: Mapping[str, str], fixed: Mapping[str, str], folder: Path
) -> dict[str, str]:
    """One version of everything the layers ask for, beside what is ``fixed``; ``preferred`` ones wherever they fit."""
    wanted = _requirements(dict.fromkeys(name for layer in layers for name in layer.requirements))
    extras = [extra for layer in layers for extra in layer.extras]
    solved, bounds = folder / "solved.txt", folder / "fixed.txt"
    _write_pins(preferred, solved)
    _write_pins(fixed, bounds)
    sources = _source_of(any(layer.source for layer in layers))
    _compile(wanted, extras, solved, folder, *sources, "-c", str(bounds))
    return _read_pins(solved)


def _bare(kind: Kind) -> dict[str, str]:
    lines = (ROOT / "constraints/cpu-py312-nodeps.txt").read_text(encoding="utf-8").splitlines()
    names = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    return {name: version for name, version in _pins(kind).items() if name in names}


def _write_pins(versions: Mapping[str, str], file: Path) -> None:
    file.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()), encoding="utf-8")


def _source_of(wanted: bool) -> list[str]:
    """What the source depends on is collected too; it itself is no wheel."""
    return [f"constraints/{_SOURCE}"] if wanted else []


def _read_pins(file: Path) -> dict[str, str]:
    pairs = (line.split(";")[0].strip().partition("==") for line in file.read_text(encoding="utf-8").splitlines())
    return {canonicalize_name(name): version for name, _, version in pairs if version}


def _compile(requirements: Sequence[str], extras: Iterable[str], into: Path, folder: Path, *more: str) -> None:
    given = folder / "wanted.in"
    given.write_text("\n".join(requirements), encoding="utf-8")
    asked = [argument for extra in extras for argument in ("--extra", extra)]
    plain = ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-package", "transformer-engine-torch"]
    _uv("setup.py", str(given), *asked, *plain, *more, "-o", str(into))


def _uv(*arguments: str) -> None:
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--python-version", "3.12"]
    try:
        done = subprocess.run(
            [*command, "--python-platform", PLATFORM, *arguments],
            cwd=ROOT, capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Trouble(f"uv did not resolve within {SECONDS:g} s; can the package index be reached?") from error
    if "No module named uv" in done.stderr:
        raise Trouble("uv is needed: python -m pip install uv, or run it in the environment of make setup")
    if done.returncode:
        raise Trouble(f"uv cannot resolve: {' '.join(done.stderr.split())[-600:]}")


def _archives(versions: Mapping[str, str], folder: Path) -> dict[str, Archive]:
    """The wheel of each package that suits the target best, by the index's own word; nothing is downloaded."""
    pinned, lock = folder / "all.txt", folder / "pylock.toml"
    _write_pins(versions, pinned)
    _uv(str(pinned), "--no-deps", "--only-binary", ":all:", "--format", "pylock.toml", "-o", str(lock))
    order = {tag: place for place, tag in enumerate(target_tags())}
    found = {}
    for package in tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]:
        wheels = [(place, wheel) for wheel in package.get("wheels", ()) if (place := _place(wheel, order)) is not None]
        if wheels:
            _, best = min(wheels, key=lambda pair: (pair[0], pair[1]["size"]))
            found[package["name"]] = _archive(package, best)
    return found


def _archive(package: Mapping[str, Any], file: Mapping[str, Any]) -> Archive:
    name, sha = file["url"].rpartition("/")[2].partition("#")[0], file["hashes"]["sha256"]
    return Archive(package["name"], package["version"], name.replace("%2B", "+"), file["size"], sha, file["url"])


def target_tags() -> Iterator[Tag]:
    """Of wheels for the target, the best first (PEP 425, PEP 600)."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    yield from cpython_tags(PYTHON, platforms=platforms)
    yield from compatible_tags(PYTHON, f"cp{PYTHON[0]}{PYTHON[1]}", platforms)


def _place(wheel: Mapping[str, Any], order: Mapping[Tag, int]) -> int | None:
    *_, tags = parse_wheel_filename(wheel["url"].rpartition("/")[2].partition("#")[0].replace("%2B", "+"))
    return min((order[tag] for tag in tags if tag in order), default=None)


def _source(layer: Layer, folder: Path) -> Archive:
    lock = folder / "pylock.source.toml"
    _uv(f"constraints/{_SOURCE}", "--no-deps", "--no-binary", ":all:", "--format", "pylock.toml", "-o", str(lock))
    (package,) = tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]
    return Archive(**(asdict(_archive(package, package["sdist"])) | {"layer": layer.name}))


def select(found: Collection, limit: int | None) -> Collection:
    """Leave optional layers out, the last first, until the rest fits.

    Raises:
        Trouble: the first layer alone is too large; its largest packages are named.
    """
    for layer in reversed(_LAYERS[found.kind]):  # type: ignore[index]
        if limit is None or found.size <= limit:
            break
        of_layer = [archive for archive in (*found.wheels, *found.sources) if archive.layer == layer.name]
        if not layer.lost:
            largest = sorted(of_layer, key=lambda archive: -archive.size)[:5]
            named = ", ".join(f"{archive.name} {megabytes(archive.size)}" for archive in largest)
            raise Trouble(
                f"{megabytes(found.size)} are needed at least, {megabytes(limit)} are allowed; the largest are "
                f"{named}. What the machine has already need not come: --target-freeze FILE, or --have NAMES"
            )
        if not of_layer:  # it did not go with the rest
            continue
        found.left_out.append({"layer": layer.name, "bytes": sum(archive.size for archive in of_layer),
                               "packages": [archive.name for archive in of_layer], "lost": layer.lost})  # fmt: skip
        found.wheels = [archive for archive in found.wheels if archive.layer != layer.name]
        found.sources = [archive for archive in found.sources if archive.layer != layer.name]
    return found


def summary(found: Collection) -> list[str]:
    """The table of layers in their order, and what is not collected."""
    rows = []
    for layer in _LAYERS[found.kind]:  # type: ignore[index]
        own = [archive for archive in (*found.wheels, *found.sources) if archive.layer == layer.name]
        out = next((gone for gone in found.left_out if gone["layer"] == layer.name), None)
        size = sum(archive.size for archive in own) if out is None else out["bytes"]
        count = len(own) if out is None else len(out["packages"])
        state = "needed" if not layer.lost else "collected" if out is None else "left out: without it " + layer.lost
        rows.append((layer.name, count, megabytes(size), state))
    lines = kit.table(("layer", "files", "size", ""), rows).splitlines()
    lines += ["", f"{len(found.wheels)} wheels and {len(found.sources)} sources, {megabytes(found.size)} in all"]
    if found.at_target:
        lines.append(f"there already: {', '.join(found.at_target)}")
    if found.replaced:
        lines.append(f"replaced, because the rest does not go with it: {', '.join(found.replaced)}")
    return lines


def megabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def collect(found: Collection, folder: Path) -> None:
    """Fetch what is missing, each whole or not at all; then write the manifest.

    Raises:
        Trouble: a file has another size or hash than the index says, or cannot be fetched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    every = [*found.wheels, *found.sources]
    for number, archive in enumerate(every, 1):
        there = folder / archive.file
        state = "there" if _is(archive, there) else "fetched"
        if state == "fetched":
            fetch(archive, folder, source=archive in found.sources)
        print(f"{number:4}/{len(every)}  {state:8}{archive.file}  {megabytes(archive.size)}", flush=True)
    strays = sorted(
        {path.name for path in folder.iterdir() if path.suffix in (".whl", ".gz")} - {a.file for a in every}
    )
    if strays:
        print(f"wheelhouse: {folder} also holds files of another collection: {', '.join(strays)}", file=sys.stderr)
    manifest = {"for": found.kind, "python": "3.12", "platform": PLATFORM, "bytes": found.size} | asdict(found)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    lines = [f"{archive.name}=={archive.version} --hash=sha256:{archive.sha256}\n" for archive in found.wheels]
    (folder / REQUIREMENTS).write_text("".join(lines), encoding="utf-8")
    (folder / INSTALL).write_text(install_text(found), encoding="utf-8")


def _is(archive: Archive, file: Path) -> bool:
    if not file.is_file() or file.stat().st_size != archive.size:
        return False
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == archive.sha256


def fetch(archive: Archive, folder: Path, *, source: bool) -> None:
    """Download beside its place, compare with the index's word, and move it there."""
    with tempfile.TemporaryDirectory(prefix=".part-", dir=folder) as part:
        into = Path(part)
        if source:  # pip would run its set-up to read its metadata, which needs torch
            try:
                with contextlib.closing(urllib.request.urlopen(archive.url, timeout=SECONDS)) as answer:
                    (into / archive.file).write_bytes(answer.read())
            except urllib.error.URLError as error:
                raise Trouble(f"{archive.url}: {error.reason}") from error
        else:
            _pip_download(archive, into)
        if not _is(archive, into / archive.file):
            raise Trouble(
                f"{archive.file}: what was fetched has another size or hash than the index says; run it again"
            )
        (into / archive.file).replace(folder / archive.file)


def _pip_download(archive: Archive, into: Path) -> None:
    """By name, version and hash: exactly this file, of whatever index pip is configured for."""
    wanted = into / "wanted.txt"
    wanted.write_text(f"{archive.name}=={archive.version} --hash=sha256:{archive.sha256}\n", encoding="utf-8")
    platforms = archive.file.removesuffix(".whl").split("-")[-1].split(".")
    target = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    target += [f"--abi={abi}" for abi in ("cp312", "abi3", "none")] + [f"--platform={name}" for name in platforms]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", *target]
    try:
        done = subprocess.run([*command, "-d", str(into), "-r", str(wanted)],
                              capture_output=True, text=True, timeout=SECONDS)  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Trouble(f"{archive.file}: pip did not fetch it within {SECONDS:g} s") from error
    if done.returncode or not (into / archive.file).is_file():
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()[-300:]]
        raise Trouble(f"{archive.file}: pip cannot fetch it: {' '.join(lines)}")


def install_text(found: Collection) -> str:
    """The commands on the machine without internet; FOLDER is where the wheels are there."""
    pip = "python3.12 -m pip install --no-index --find-links FOLDER"
    lines = [
        "On the machine, in its virtual environment or with --target DIRECTORY and that on PYTHONPATH:",
        f"  {pip} --no-deps --require-hashes -r FOLDER/{REQUIREMENTS}",
    ]
    for source in found.sources:
        lines += [
            f"{source.name} {source.version} is source. It compiles against the installed torch, with nvcc of the same "
            "CUDA, some minutes:",
            f"  NVTE_PYTORCH_FORCE_BUILD=TRUE {pip} --no-build-isolation --no-deps FOLDER/{source.file}",
            "Or: NVIDIA publishes wheels of it for some versions of torch. Where there is internet, fetch the one for "
            f"yours from https://github.com/NVIDIA/TransformerEngine/releases/tag/v{source.version} into FOLDER, and "
            "install that.",
        ]
    lines += ["mua itself, from its checkout:", "  export PYTHONPATH=$PWD    (python -m mua.cli is then mua)"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
