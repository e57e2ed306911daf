"""What the repository promises about itself: pins, make targets, packaged data.

Not covered: that the pins install (`make setup` does it, .ci/run from nothing) or resolve for a GPU
(`make check-gpu-pins`); both need the network.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
import torch

import mua
from mua.utils.source_state import FOLDERS

ROOT = Path(__file__).parents[2]
CONSTRAINTS = sorted((ROOT / "constraints").glob("*.txt"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def pins(path: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def names(path: Path) -> set[str]:
    return {re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins(path)}


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.name)
def test_every_line_pins_one_version(path: Path) -> None:
    assert [pin for pin in pins(path) if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin)] == []
    assert len(names(path)) == len(pins(path))


def test_no_requirement_names_the_apex_of_pypi() -> None:
    """PyPI's ``apex`` is a web framework's toolkit; NVIDIA's is built from its own repository."""
    files = [*CONSTRAINTS, ROOT / "setup.py", ROOT / "pyproject.toml", ROOT / "Makefile", ROOT / "tools/setup.sh"]
    bare = re.compile(r"""(^|["'\s])apex(\[|==|>=|~=|["'\s]|$)""", re.IGNORECASE | re.MULTILINE)
    assert [path.name for path in files if bare.search(path.read_text(encoding="utf-8"))] == []
    assert bare.search('install_requires=["apex"]')  # the search itself finds what it looks for
    assert bare.search("apex==0.9.10\n")


def test_the_cpu_runs_the_versions_that_ship() -> None:
    """No package has one version where it is tested and another where it is used."""
    gpu = {pin.lower() for pin in pins(ROOT / "constraints/gpu-py312-cu.txt")}
    cpu = [*pins(ROOT / "constraints/cpu-py312.txt"), *pins(ROOT / "constraints/cpu-py312-nodeps.txt")]
    assert [pin for pin in cpu if pin.lower() not in gpu] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU machine is checked by mua doctor preflight")
def test_this_environment_is_the_pinned_one() -> None:
    wanted = [*pins(ROOT / "constraints/cpu-py312.txt"), *pins(ROOT / "constraints/cpu-py312-nodeps.txt")]
    installed = {
        re.sub(r"[-_.]+", "-", item.name).lower(): item.version.split("+")[0]
        for item in metadata.distributions(path=[sysconfig.get_paths()["purelib"]])  # not what setuptools brings along
    }
    other = {
        pin: found
        for name, version in (pin.split("==") for pin in wanted)
        if (found := installed.get(pin := re.sub(r"[-_.]+", "-", name).lower())) != version
    }
    assert other == {}


def test_the_pins_hold_what_each_machine_is_made_of() -> None:
    cpu = {*pins(ROOT / "constraints/cpu-py312.txt"), *pins(ROOT / "constraints/cpu-py312-nodeps.txt")}
    assert {"torch==2.14.1", "megatron-core==0.19.2", "sglang==0.5.23", "torchvision==0.29.2"} <= cpu
    gpu = names(ROOT / "constraints/gpu-py312-cu.txt")
    assert {"torch", "sglang", "megatron-core", "transformer-engine-cu13", "torch-memory-saver"} <= gpu
    assert any(pin.startswith("megatron-core==0.19.") for pin in pins(ROOT / "constraints/gpu-py312-cu.txt"))


def make(*arguments: str) -> str:
    """What ``make`` prints, also when make itself runs the tests and would make this one its child."""
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=outside, capture_output=True, text=True, check=True
    ).stdout


def test_help_is_the_default_and_describes_every_target() -> None:
    text = make()
    assert text == make("help")
    described = {line.split()[0] for line in text.splitlines()}
    assert described == set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"setup", "demo", "test", "lint", "docs", "test-slow", "test-grid"} <= described


def set_up(venv: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`make setup` with another environment; it must refuse before it asks any index for anything."""
    command = ["bash", str(ROOT / "tools/setup.sh"), str(venv)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def folder_of_tools(folder: Path) -> str:
    """What the set-up needs before it needs a Python, and no Python."""
    folder.mkdir()
    for name in ("bash", "dirname", "mktemp", "rm"):
        (folder / name).symlink_to(str(shutil.which(name)))
    return str(folder)


def test_without_python_3_12_the_set_up_says_what_to_install(tmp_path: Path) -> None:
    done = set_up(tmp_path / "venv", PATH=folder_of_tools(tmp_path / "bin"), HOME=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert (
        f"no Python 3.12 with venv as python3.12, as python3, in {tmp_path}/.pyenv/versions or through uv"
        in done.stderr
    )
    assert "apt-get install python3.12 python3.12-venv" in done.stderr


def test_pyenvs_python_3_12_is_found_where_no_command_names_it(tmp_path: Path) -> None:
    found = tmp_path / "pyenv/versions/3.12.99/bin/python3.12"
    found.parent.mkdir(parents=True)
    found.write_text('#!/bin/sh\ncase "$*" in *ensurepip*) exit 0;; esac\necho "asked for $*" >&2; exit 9\n')
    found.chmod(0o755)
    tools, root = folder_of_tools(tmp_path / "bin"), str(tmp_path / "pyenv")
    done = set_up(tmp_path / "venv", PATH=tools, HOME=str(tmp_path), PYENV_ROOT=root)
    assert (done.returncode, done.stderr) == (9, f"asked for -m venv {tmp_path}/venv\n")


def test_an_environment_of_another_python_is_left_alone(tmp_path: Path) -> None:
    binaries = tmp_path / "venv/bin"
    binaries.mkdir(parents=True)
    for name in ("python", "pip"):
        (binaries / name).write_text('#!/bin/sh\ncase "$*" in *platform*) echo 3.11.7;; *) exit 1;; esac\n')
        (binaries / name).chmod(0o755)
    done = set_up(tmp_path / "venv", PATH=folder_of_tools(tmp_path / "bin"), HOME=str(tmp_path))
    assert done.returncode == 1
    assert f"{tmp_path}/venv is there, but of Python 3.11.7 instead of 3.12; move it away" in done.stderr
    assert sorted(path.name for path in binaries.iterdir()) == ["pip", "python"]


@pytest.mark.parametrize(
    ("written", "variables", "index"),
    [
        ("index-url = https://file.invalid/\n", {}, "https://file.invalid/"),
        ("index-url = a\n[install]\nindex-url = https://narrow.invalid/\n", {}, "https://narrow.invalid/"),
        ("index-url = a\n", {"PIP_INDEX_URL": "https://own.invalid/"}, "https://own.invalid/"),
        ("index-url = a\n", {"UV_DEFAULT_INDEX": "https://uv.invalid/"}, "https://uv.invalid/"),
    ],
    ids=["a file", "a section of it", "a variable of pip's", "a variable of uv's"],
)
def test_uv_gets_the_index_and_the_certificates_that_pip_has(
    tmp_path: Path, written: str, variables: dict[str, str], index: str
) -> None:
    """The real pip says what it has read; uv only notes what it was given, and nothing else is to be installed."""
    binaries, configured, noted = tmp_path / "venv/bin", tmp_path / "pip.conf", tmp_path / "noted"
    binaries.mkdir(parents=True)
    configured.write_text(f"[global]\ncert = /of/pip.crt\n{written}", encoding="utf-8")
    python = (
        f'case "$*" in *"-m pip config"*) exec {sys.executable} "$@";; '
        f'*"-m uv"*) echo "$UV_DEFAULT_INDEX $SSL_CERT_FILE" >> {noted};; esac'
    )
    for name, script in (("python", python), ("pip", "exit 1"), ("uv", "exit 1")):
        (binaries / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (binaries / name).chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_CONFIG_FILE": str(configured)}
    done = set_up(tmp_path / "venv", **environment, **variables)
    assert done.returncode == 0, done.stderr
    assert set(noted.read_text(encoding="utf-8").splitlines()) == {f"{index} /of/pip.crt"}


def test_every_script_that_make_and_ci_name_exists() -> None:
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", ".ci/run"))
    assert [name for name in sorted(set(re.findall(r"tools/\w+\.\w+", text))) if not (ROOT / name).is_file()] == []


def test_the_version_is_written_once() -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == mua.__version__


def test_packages_carry_every_data_file(tmp_path: Path) -> None:
    """Policies, task files and the engine's CPU stand-in must be in a wheel, not only in the checkout."""
    built = tmp_path / "lib"
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(built)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    tracked = subprocess.run(
        ["git", "ls-files", "--", "mua", "megatron_bridge", "environments", "workbench"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert [name for name in tracked if not (built / name).is_file()] == []
    beside = subprocess.run(
        ["git", "ls-files", "--", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert [name for name in beside if not (built / "mua/_shipped" / name).is_file()] == []


PACKAGES = ("mua", "megatron_bridge", "environments", "workbench")
BROUGHT = {
    "annotated_types": "pydantic", "pydantic_core": "pydantic", "yarl": "aiohttp", "anyio": "mcp", "httpx2": "mcp",
    "mcp_types": "mcp", "latex2sympy2_extended": "math-verify", "sympy": "math-verify",
}  # fmt: skip
"""Modules that a requirement's own interface takes or gives, so that it always brings them."""
BY_NAME = {
    "lxml-html-clean": "by trafilatura, where lxml has it no more", "psycopg": "by SQLAlchemy, for a URL",
    "tensorboard": "by torch.utils.tensorboard",
}  # fmt: skip
"""Requirements that others import for us, and for what."""
STACKS = ("cpu", "gpu", "dev", "docs")
"""Extras of a whole stack, some of which only SGLang imports."""


def requirement_lines() -> dict[str, list[str]]:
    """Requirements by extra, those of everybody as ``core``, as ``setup.py`` declares them."""
    command = [sys.executable, "-c", "import json, setuptools; setuptools.setup = lambda **k: print(json.dumps("
               "{'core': k['install_requires'], **k['extras_require']})); exec(open('setup.py').read(), "
               "{'__file__': 'setup.py'})"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def requirements() -> dict[str, set[str]]:
    """Distribution names by extra, those of everybody as ``core``."""
    return {
        extra: {re.split(r"[\[<>=;~ ]", line)[0].lower() for line in lines}
        for extra, lines in requirement_lines().items()
    }


def imported(trees: Iterable[ast.Module]) -> set[str]:
    """Top names of all modules that are imported, wherever the statement stands."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    by_from = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.partition(".")[0] for name in plain | by_from}


def test_requirements_are_what_is_imported() -> None:
    """Nothing is imported that no requirement brings, and nothing is required that nothing imports."""
    paths = [path for room in PACKAGES for path in (ROOT / room).rglob("*.py")]
    plugins = (ROOT / "mua/compat/sglang_cpu/shim", ROOT / "mua/compat/sglang_keys/plugin")
    trees = [tree_of(path) for path in paths if not any(path.is_relative_to(folder) for folder in plugins)]
    own = {*PACKAGES, *sys.stdlib_module_names, "_typeshed"}
    known = metadata.packages_distributions()
    asked = {
        BROUGHT.get(name) or next(iter(known.get(name, [name]))).lower().replace("_", "-")
        for name in imported(trees) - own
        if not name.startswith("mua_")
    }
    declared = requirements()
    assert asked - set().union(*declared.values()) == set()
    assert declared["core"] - asked - BY_NAME.keys() == set()
    for extra in declared.keys() - {"core", *STACKS}:
        assert declared[extra] - asked - BY_NAME.keys() == set(), extra


def test_ci_runs_what_the_readme_says_and_is_executable() -> None:
    ci = ROOT / ".ci/run"
    assert ci.stat().st_mode & 0o111
    text = ci.read_text(encoding="utf-8")
    assert all(f"make {target}" in text for target in ("setup", "lint", "test ROTATE=1"))


def private_names_of_upstream(tree: ast.AST, own: set[str]) -> list[str]:
    """Private names that a module imports or asks of an object, but those in ``own``."""
    asked = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr not in own]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in ("mua", "megatron_bridge"):
            asked += [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            asked += [part for alias in node.names for part in alias.name.split(".")]
    return [name for name in asked if name.startswith("_") and not name.startswith("__")]


def test_only_compat_knows_private_names_of_other_packages() -> None:
    paths = [path for room in ("mua", "megatron_bridge") for path in sorted((ROOT / room).rglob("*.py"))]
    trees = {path: tree_of(path) for path in paths}
    own = {"_replace", "_asdict", "_fields", "_exit"}  # public all the same: of named tuples, and of os
    outside = {path: tree for path, tree in trees.items() if ROOT / "mua/compat" not in path.parents}
    for node in (node for tree in outside.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.id if isinstance(node, ast.Name) else node.attr)
    found = {str(path.relative_to(ROOT)): private_names_of_upstream(tree, own) for path, tree in outside.items()}
    assert {path: names for path, names in found.items() if names} == {}
    example = ast.parse("import torch._C\nfrom torch import _x\ntorch.y._z")
    assert private_names_of_upstream(example, own) == ["_z", "_C", "_x"]
