"""Collect what a machine without internet needs into one folder: wheels, and the list to install them by.

    python -m tools.wheelhouse FOLDER --for gpu|cpu|gpu-check [--with NAME ...] [--have NAMES] [--target-freeze FILE]

``gpu`` and ``cpu`` are the whole installations of docs/installation.md. ``gpu-check`` is the least that
tools/gpu_check.py needs, training; ``--with sglang transformer-engine transformer-engine-cu13`` adds engines and
Transformer Engine. Versions are those of ``constraints/``. Of a machine that has some packages already, ``pip freeze``
there gives a FILE: what the FILE has stays as it is wherever the rest goes together with it, and is not collected.
``--have torch,nvidia-*`` leaves out what is there by name alone.

uv resolves and knows files, sizes and hashes from the index. FOLDER then holds the wheels and ``requirements.txt``
with the hashes. A file whose hash is right is not fetched again. Nothing that is collected is executed. Exit status: 0;
2 for what a person can fix.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from tools import kit

ROOT = kit.ROOT
GLIBC = 35
PLATFORM = f"x86_64-manylinux_2_{GLIBC}"
SECONDS = 900.0
"""Deadline of one resolution or one download."""
_EXTRAS = ("tools", "parquet", "postgres", "dev")
KINDS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "gpu": ("gpu-py312-cu.txt", ("gpu", *_EXTRAS), ()),
    "cpu": ("cpu-py312.txt", ("cpu", *_EXTRAS), ()),
    "gpu-check": ("gpu-py312-cu.txt", (), ("megatron-core",)),
}
"""By ``--for``: the pins, extras of setup.py, and packages beside them."""
WITHOUT_DEPENDENCIES = {
    "cpu": ("cpu-py312-nodeps.txt", "--only-binary"),
    "gpu": ("gpu-py312-cu-source.txt", "--no-binary"),
}
"""Pins of packages that are installed without what they depend on; those of ``gpu`` are source."""


class WheelhouseError(Exception):
    """What a person can fix."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = kit.parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--for", dest="kind", choices=sorted(KINDS), default="gpu")
    parser.add_argument("--with", dest="more", nargs="+", default=[], metavar="NAME", help="further packages")
    parser.add_argument("--have", default="", metavar="NAMES", help="packages that are there, such as torch,nvidia-*")
    parser.add_argument("--target-freeze", type=Path, metavar="FILE", help="what pip freeze prints on the machine")
    parser.add_argument("--dry-run", action="store_true", help="print what would be collected; download nothing")
    arguments = parser.parse_args(argv)
    try:
        frozen = read_freeze(arguments.target_freeze) if arguments.target_freeze else {}
        found = {
            name: file
            for name, file in resolve(arguments.kind, arguments.more, frozen).items()
            if frozen.get(name) != file["version"]
            and not any(fnmatch.fnmatch(name, pattern) for pattern in arguments.have.split(","))
        }
        rows = [(name, file["version"], f"{file['size'] / 1e6:.1f}") for name, file in found.items()]
        total = sum(file["size"] for file in found.values()) / 1e6
        print(kit.table(("package", "version", "MB"), [*rows, (f"{len(rows)} files", "", f"{total:.1f}")]), flush=True)
        if not arguments.dry_run:
            collect(found, arguments.folder)
    except (WheelhouseError, OSError, subprocess.TimeoutExpired) as error:
        print(f"wheelhouse: {error}", file=sys.stderr)
        return 2
    return 0


def read_freeze(file: Path) -> dict[str, str]:
    """Versions by name, without their local part (``2.11.0+cu130`` is 2.11.0)."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise WheelhouseError(f"{file}: not UTF-8 text; give it what `pip freeze` prints") from error
    pinned = re.findall(r"^([A-Za-z0-9][\w.-]*)\s*==\s*([\w.!]+)", text, re.MULTILINE)
    if not pinned:
        raise WheelhouseError(f"{file}: no line is NAME==VERSION; give it what `pip freeze` prints on the machine")
    return {canonicalize_name(name): version for name, version in pinned}


def resolve(kind: str, more: Sequence[str], frozen: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The file of every package: its version, url, size and sha256. What is ``frozen`` is preferred to the pins."""
    pins, extras, names = KINDS[kind]
    preferred = read_freeze(ROOT / "constraints" / pins) | dict(frozen)
    with tempfile.TemporaryDirectory(prefix="mua-wheels-") as name:
        wanted, solved, lock = (Path(name) / file for file in ("wanted.in", "solved.txt", "pylock.toml"))
        wanted.write_text("\n".join([*names, *more]), encoding="utf-8")
        # uv keeps the versions of the file that it writes wherever they go together.
        solved.write_text("".join(f"{one}=={version}\n" for one, version in preferred.items()), encoding="utf-8")
        asked = [argument for extra in extras for argument in ("--extra", extra)]
        asked += ["constraints/gpu-py312-cu-source.txt"] if kind == "gpu" else []  # for what it depends on
        _compile("setup.py", wanted, *asked, "--no-annotate", "--no-emit-package", "transformer-engine-torch", solved)
        found = _locked(solved, "--only-binary", lock)
        if kind in WITHOUT_DEPENDENCIES:
            file, how = WITHOUT_DEPENDENCIES[kind]
            found |= _locked(ROOT / "constraints" / file, how, lock)
    return found


def _locked(requirements: Path, how: str, lock: Path) -> dict[str, dict[str, Any]]:
    """The file that suits the target best of each package, by the index's own word; nothing is downloaded."""
    _compile(requirements, "--no-deps", how, ":all:", "--format", "pylock.toml", lock)
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    tags = [*cpython_tags((3, 12), platforms=platforms), *compatible_tags((3, 12), "cp312", platforms)]
    order = {tag: place for place, tag in enumerate(tags)}
    found = {}
    for package in tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]:
        files = [package["sdist"]] if how == "--no-binary" else package.get("wheels", [])
        places = {}
        for file in files:
            file |= {"file": file["url"].rpartition("/")[2].partition("#")[0].replace("%2B", "+")}
            fitting = (
                [0]
                if how == "--no-binary"
                else [order[tag] for tag in parse_wheel_filename(file["file"])[3] if tag in order]
            )
            if fitting:
                places[min(fitting)] = file | {"version": package["version"], "sha256": file["hashes"]["sha256"]}
        if not places:
            raise WheelhouseError(f"{package['name']} has no wheel for Python 3.12 on {PLATFORM}")
        found[package["name"]] = places[min(places)]
    return found


def _compile(*arguments: str | Path) -> None:
    """Have uv resolve; the last argument is the file that it writes."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--python-version", "3.12", "--no-header"]
    command += ["--python-platform", PLATFORM, *map(str, arguments[:-1]), "-o", str(arguments[-1])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise WheelhouseError(f"uv cannot resolve: {' '.join(done.stderr.split())[-600:]}")


def collect(found: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Fetch what is missing, each whole or not at all, then write ``requirements.txt``.

    Raises:
        WheelhouseError: a file has another hash than the index says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in found.values():
        target = folder / file["file"]
        if target.is_file() and hashlib.sha256(target.read_bytes()).hexdigest() == file["sha256"]:
            continue
        with urllib.request.urlopen(file["url"], timeout=SECONDS) as answer:
            data = answer.read()
        if hashlib.sha256(data).hexdigest() != file["sha256"]:
            raise WheelhouseError(f"{file['file']}: its hash is not the index's; run it again")
        target.write_bytes(data)
    lines = [
        f"{name}=={file['version']} --hash=sha256:{file['sha256']}\n"
        for name, file in found.items()
        if file["file"].endswith(".whl")
    ]
    (folder / "requirements.txt").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
