"""``tools/wheelhouse.py`` on a project and a package index of its own: uv resolves, pip downloads and installs.

The index is served here, so nothing depends on a network; the real lists and sizes are not looked at.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tools import wheelhouse
from tools.wheelhouse import main

BACKEND = '''\
def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    import pathlib
    info = pathlib.Path(folder) / "mua-0.1.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("""Metadata-Version: 2.1
Name: mua
Version: 0.1
Requires-Dist: numpy>=2.0
Provides-Extra: gpu
Requires-Dist: megatron-core<0.20,>=0.19.2; extra == "gpu"
Requires-Dist: sglang==0.5.23; extra == "gpu"
Requires-Dist: transformer-engine>=2.9; extra == "gpu"
Requires-Dist: transformer-engine-cu13>=2.9; extra == "gpu"
Provides-Extra: tools
Requires-Dist: mcp; extra == "tools"
Provides-Extra: parquet
Requires-Dist: pyarrow; extra == "parquet"
Provides-Extra: postgres
Requires-Dist: psycopg; extra == "postgres"
Provides-Extra: dev
Requires-Dist: ruff; extra == "dev"
""")
    return info.name
'''
PINS = {
    "numpy": "2.3.5", "torch": "2.14.1", "megatron-core": "0.19.2", "sglang": "0.5.23", "transformer-engine": "2.20.2",
    "transformer-engine-cu13": "2.20.2", "einops": "0.8.2", "mcp": "2.3.0", "pyarrow": "26.0.1", "psycopg": "3.3.9",
    "ruff": "0.17.5",
}  # fmt: skip
NEEDS = {
    ("megatron-core", "0.19.2"): ["torch>=2.6", "numpy"],
    ("sglang", "0.5.23"): ["torch==2.14.1"],
    ("transformer-engine-torch", "2.20.2"): ["einops", "torch"],
}
OTHER = [("torch", "2.11.0"), ("numpy", "1.26.0"), ("numpy", "2.5.2")]
SIZES = {"torch": 900_000, "sglang": 300_000, "ruff": 200_000}


def wheel(name: str, version: str, tag: str = "py3-none-any") -> tuple[str, bytes]:
    """A wheel of one module, filled up to its size."""
    module, buffer = name.replace("-", "_"), io.BytesIO()
    needs = "".join(f"Requires-Dist: {need}\n" for need in NEEDS.get((name, version), ()))
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"{module}.py", f'VERSION = "{version}"\n' + "#" * SIZES.get(name, 0))
        info = f"{module}-{version}.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")
    return f"{module}-{version}-{tag}.whl", buffer.getvalue()


def source(name: str, version: str) -> tuple[str, bytes]:
    import tarfile

    buffer, root = io.BytesIO(), f"{name.replace('-', '_')}-{version}"
    needs = "".join(f"Requires-Dist: {need}\n" for need in NEEDS[name, version])
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, text in {
            "PKG-INFO": f"Metadata-Version: 2.2\nName: {name}\nVersion: {version}\n{needs}",
            "setup.py": "raise SystemExit('nothing of it may run')",
        }.items():
            entry = tarfile.TarInfo(f"{root}/{path}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return f"{root}.tar.gz", buffer.getvalue()


class Index:
    """The simple API of package indices in JSON (PEP 691), with what is asked of it."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []
        for name, version in [*PINS.items(), *OTHER]:
            self.add(name, *wheel(name, version))
        self.add("numpy", *wheel("numpy", "2.3.5", "cp312-cp312-manylinux_2_27_x86_64.manylinux_2_28_x86_64"))
        self.add("numpy", *wheel("numpy", "2.3.5", "cp312-cp312-macosx_14_0_arm64"))
        self.add("transformer-engine-torch", *source("transformer-engine-torch", "2.20.2"))
        self.sums = {file: hashlib.sha256(data).hexdigest() for of in self.files.values() for file, data in of.items()}

    def add(self, name: str, file: str, data: bytes) -> None:
        self.files.setdefault(name, {})[file] = data

    def _file(self, name: str) -> bytes:
        return next(of[name] for of in self.files.values() if name in of)

    def answer(self, path: str) -> tuple[int, bytes]:
        kind, name = path.strip("/").split("/")[:2]
        if kind == "files" and name.endswith(".metadata"):
            with zipfile.ZipFile(io.BytesIO(self._file(name.removesuffix(".metadata")))) as archive:
                return 200, archive.read(next(path for path in archive.namelist() if path.endswith("METADATA")))
        if kind == "files":
            self.asked.append(name)
            return 200, self._file(name)
        if name not in self.files:
            return 404, b""
        listed = [
            {"filename": file, "url": f"/files/{file}", "hashes": {"sha256": self.sums[file]}, "size": len(data),
             "core-metadata": file.endswith(".whl")}
            for file, data in self.files[name].items()
        ]  # fmt: skip
        return 200, json.dumps({"meta": {"api-version": "1.1"}, "name": name, "files": listed, "versions": []}).encode()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    served = Index()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = served.answer(self.path)
            kind = "application/octet-stream" if "/files/" in self.path else "application/vnd.pypi.simple.v1+json"
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("UV_INDEX_URL", "UV_DEFAULT_INDEX", "PIP_INDEX_URL"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{server.server_port}/simple")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "UV_FIND_LINKS", "UV_EXTRA_INDEX_URL", "UV_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setattr(wheelhouse, "ROOT", project(tmp_path / "project"))
    yield served
    server.shutdown()
    server.server_close()


def project(folder: Path) -> Path:
    (folder / "constraints").mkdir(parents=True)
    (folder / "setup.py").touch()
    (folder / "backend.py").write_text(BACKEND)
    build = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (folder / "pyproject.toml").write_text(build)
    pins = "".join(f"{name}=={version}\n" for name, version in PINS.items())
    (folder / "constraints/gpu-py312-cu.txt").write_text(pins)
    (folder / "constraints/gpu-py312-cu-source.txt").write_text("transformer-engine-torch==2.20.2\n")
    return folder


def listed(folder: Path) -> dict[str, str]:
    """Versions in ``requirements.txt``."""
    return dict(re.findall(r"^(\S+)==(\S+)", (folder / "requirements.txt").read_text(), re.MULTILINE))


@pytest.mark.slow
def test_all_is_collected_and_can_be_installed_without_an_index(index: Index, tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    assert main([str(folder), "--for", "gpu"]) == 0
    assert listed(folder) == PINS
    assert (folder / "transformer_engine_torch-2.20.2.tar.gz").exists()
    assert (folder / "numpy-2.3.5-cp312-cp312-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl").exists()
    command = ["-m", "pip", "install", "--no-index", "--find-links", folder, "--no-deps", "--require-hashes"]
    given = [sys.executable, *command, "-r", folder / "requirements.txt", "--target", tmp_path / "site"]
    subprocess.run(given, check=True, env={"PIP_CONFIG_FILE": "/dev/null"}, timeout=120)
    assert 'VERSION = "0.19.2"' in (tmp_path / "site/megatron_core.py").read_text()
    # Run again, only what is not whole is fetched.
    torn = folder / "mcp-2.3.0-py3-none-any.whl"
    torn.write_bytes(torn.read_bytes()[:-1])
    index.asked.clear()
    assert main([str(folder), "--for", "gpu"]) == 0
    assert [name for name in index.asked if name.endswith(".whl")] == [torn.name]


@pytest.mark.slow
def test_a_file_that_is_not_what_the_index_says_is_refused(index: Index, tmp_path: Path, capsys) -> None:
    index.files["mcp"]["mcp-2.3.0-py3-none-any.whl"] = wheel("mcp", "2.3.0")[1][:-1] + b"!"
    assert main([str(tmp_path / "wheels"), "--for", "gpu"]) == 2
    assert capsys.readouterr().err.startswith("wheelhouse: mcp-2.3.0-py3-none-any.whl: ")
    assert not (tmp_path / "wheels" / "mcp-2.3.0-py3-none-any.whl").exists()
    assert not (tmp_path / "wheels" / "requirements.txt").exists()


@pytest.mark.slow
def test_what_a_machine_has_and_fits_stays_there(index: Index, tmp_path: Path) -> None:
    freeze = tmp_path / "freeze.txt"
    freeze.write_text("torch==2.11.0+cu130\nnumpy==2.5.2\nlocal @ file:///x\n# note\n-e git+https://x#egg=y\n")
    assert main([str(tmp_path / "a"), "--for", "gpu-check", "--target-freeze", str(freeze)]) == 0
    assert listed(tmp_path / "a").keys() == {"megatron-core"}
    # A whole installation needs the pinned torch, so that one is replaced; a numpy that mua does not take, too.
    freeze.write_text("torch==2.11.0\nnumpy==1.26.0\n")
    assert main([str(tmp_path / "b"), "--for", "gpu", "--target-freeze", str(freeze), "--have", "megatron-*,ruff"]) == 0
    found = listed(tmp_path / "b")
    assert found["torch"] == "2.14.1"
    assert found["numpy"].startswith("2.")
    assert not {"megatron-core", "ruff"} & found.keys()


def test_mistakes_are_one_line(index: Index, tmp_path: Path, capsys) -> None:
    (empty := tmp_path / "empty.txt").write_text("hello\n")
    (binary := tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for file in (empty, binary, tmp_path / "nowhere"):
        assert main([str(tmp_path / "w"), "--target-freeze", str(file)]) == 2
    del index.files["sglang"]
    assert main([str(tmp_path / "w"), "--for", "gpu"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 4
    assert [name in line for name, line in zip(("empty.txt", "binary", "nowhere", "sglang"), err, strict=True)]
