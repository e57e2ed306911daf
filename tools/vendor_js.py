"""Fetch the page's libraries at their pinned versions into ``mua/view/static/vendor``: ``python -m tools.vendor_js``.

``npm pack`` brings the packages as they were published; a file with another digest than the one here is refused. Run it
after a version below changed; npm says the digest of a version (``npm view NAME@VERSION dist.integrity``).
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mua.view.html_page import STATIC

FOLDER = STATIC / "vendor"


@dataclass(frozen=True)
class Package:
    """A published package, and which of its files become which of ours."""

    name: str
    version: str
    integrity: str
    """npm's, of the whole archive (SHA-512)."""
    files: dict[str, str]
    licence: str
    """What its licence is kept as."""


PACKAGES = (
    Package(
        "preact", "11.2.0",
        "sha512-/HfHI/7N84e6GrWBJ3J280z3mLaRJiDcSvj/A+y/4AbLnND/1UlGHe1sR6oYuTGwId0nP7dqDU9OnLxMPZ7xBg==",
        {"dist/preact.mjs": "preact.mjs", "hooks/dist/hooks.mjs": "preact_hooks.mjs"}, "preact.LICENSE.txt",
    ),
    Package(
        "htm", "3.1.1",
        "sha512-983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
        {"dist/htm.mjs": "htm.mjs"}, "htm.LICENSE.txt",
    ),
    Package(
        "uplot", "1.6.32",
        "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        {"dist/uPlot.iife.min.js": "uplot.mjs", "dist/uPlot.min.css": "uplot.css"},
        "uplot.LICENSE.txt",
    ),
)  # fmt: skip
AFTER = {"uplot.mjs": "\nexport default uPlot;\n"}
"""What makes a module of a file that only sets a variable."""


def vendored(package: Package, folder: Path) -> dict[str, bytes]:
    """Our files of ``package``, brought into ``folder``. Raises SystemExit where it is not what was pinned."""
    made = subprocess.run(
        ["npm", "pack", "--json", f"{package.name}@{package.version}"],
        cwd=folder, check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    archive = folder / json.loads(made.stdout)[0]["filename"]
    digest = f"sha512-{base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()}"
    if digest != package.integrity:
        raise SystemExit(f"{package.name} {package.version}: is {digest}, pinned is {package.integrity}")
    found = {}
    with tarfile.open(archive) as opened:
        for theirs, ours in {**package.files, "LICENSE": package.licence}.items():
            member = opened.extractfile(f"package/{theirs}")
            assert member is not None, f"{package.name}: {theirs} is no file"
            lines = [
                line for line in member.read().decode().splitlines() if not line.startswith("//# sourceMappingURL")
            ]
            found[ours] = ("\n".join(lines).strip("\n") + "\n" + AFTER.get(ours, "")).encode()
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Bring the page's libraries.")
    parser.add_argument("--check", action="store_true", help="compare with what is there, change nothing")
    chosen = parser.parse_args(arguments)
    wrong = []
    for package in PACKAGES:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in vendored(package, Path(folder)).items():
                path = FOLDER / name
                if chosen.check and (not path.is_file() or path.read_bytes() != content):
                    wrong.append(name)
                elif not chosen.check:
                    path.write_bytes(content)
        print(f"{package.name} {package.version}")
    if wrong:
        print(f"not as published: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
