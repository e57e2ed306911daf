"""Prove, on any machine, that the pins for Python 3.12 with CUDA go together; nothing is installed.

1. pip resolves ``constraints/gpu-py312-cu.txt`` for Linux x86-64 with glibc 2.35 (Ubuntu 22.04), wheels only.
2. pip evaluates environment markers for the Python that runs it. So every requirement of every resolved package, and of
   mua with its ``gpu``, ``dev``, ``mcp`` and ``postgres`` extras, is checked again with the markers of the target.
3. Each package of ``constraints/gpu-py312-cu-source.txt`` is looked up in the index: its source archive is published.

Not proven: that the source compiles, that the packages import together, or that they run on a given driver.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints"
PINS = CONSTRAINTS / "gpu-py312-cu.txt"
SOURCES = CONSTRAINTS / "gpu-py312-cu-source.txt"
PYTHON = "3.12.0"
TARGET = {
    "implementation_name": "cpython",
    "implementation_version": PYTHON,
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": PYTHON,
    "python_version": "3.12",
    "sys_platform": "linux",
}
GLIBC_MINORS = range(5, 36)
"""manylinux_2_5 to manylinux_2_35: pip, once told a platform, accepts exactly the tags it is told."""
EXTRAS = ("", "gpu", "dev", "mcp", "postgres")


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    return subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, env=environment)


def resolve(requirements: Path) -> list[dict[str, Any]]:
    """The metadata of every wheel pip would install on the target machine. Exits with pip's words if it cannot."""
    tags = [f"manylinux_2_{minor}_x86_64" for minor in reversed(GLIBC_MINORS)]
    tags += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = pip(
            *("install", "--dry-run", "--ignore-installed", "--only-binary=:all:", "--quiet"),
            # pip install compares Requires-Python with the running Python; main() compares it with the target.
            "--ignore-requires-python",
            *("--python-version", "3.12", "--implementation", "cp", *(f"--platform={tag}" for tag in tags)),
            *("--target", folder, "--report", str(report), "-r", str(requirements)),
        )
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
            sys.exit("\n".join([f"{requirements.name} does not resolve:", *errors]))
        return [item["metadata"] for item in json.loads(report.read_text(encoding="utf-8"))["install"]]


def problems(packages: list[dict[str, Any]]) -> Iterator[str]:
    """Everything a resolved package, or mua, asks of the target that the resolved set does not give."""
    wants = {canonicalize_name(p["name"]): p.get("requires_dist", []) for p in packages}
    versions = {canonicalize_name(p["name"]): p["version"] for p in packages}
    for package in packages:
        if not SpecifierSet(package.get("requires_python") or "").contains(PYTHON):
            yield f"{package['name']} {package['version']} needs Python {package['requires_python']}"
    wants[canonicalize_name("mua")] = importlib.metadata.requires("mua") or []
    todo = [(name, "") for name in wants] + [(canonicalize_name("mua"), extra) for extra in EXTRAS]
    seen = set()
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for wanted in map(Requirement, wants[name]):
            if wanted.marker and not wanted.marker.evaluate(TARGET | {"extra": extra}):
                continue
            needed = canonicalize_name(wanted.name)
            if needed not in versions:
                yield f"{name} needs {wanted}, which is not pinned"
            elif not wanted.specifier.contains(versions[needed], prereleases=True):
                yield f"{name} needs {wanted}, pinned is {versions[needed]}"
            else:
                todo += [(needed, wanted_extra) for wanted_extra in wanted.extras]


def source_is_published(pin: str) -> bool:
    name, version = pin.split("==")
    done = pip("index", "versions", name, "--no-binary=:all:")
    listed = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    return listed is not None and version in listed.group(1).split(", ")


def pins(path: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def main() -> None:
    print(f"resolving {len(pins(PINS))} pins of {PINS.name} (about two minutes)", flush=True)
    pinned = {canonicalize_name(pin.split("==")[0]) for pin in pins(PINS)}
    # Left out: what only the running Python asks for. What the target asks for beyond the pins is then a fault.
    packages = [package for package in resolve(PINS) if canonicalize_name(package["name"]) in pinned]
    faults = list(problems(packages))
    faults += [f"{pin}: no source archive in the index" for pin in pins(SOURCES) if not source_is_published(pin)]
    if faults:
        sys.exit("\n".join(faults))
    print(f"{PINS.name}: {len(packages)} wheels go together on Python 3.12, Linux x86-64, glibc 2.35")
    print(f"{SOURCES.name}: published as source, to be compiled on the GPU machine: {', '.join(pins(SOURCES))}")


if __name__ == "__main__":
    main()
