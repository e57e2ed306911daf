"""What stands at the root for people and forges, and the recipes of containers, fit the project.

Not covered: whether the images build, which takes a registry; docs/containers.md says what was built by hand. Nor the
options of docker and apptainer on that page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import page_commands
import pytest
import yaml

import mua
from mua.utils.source_state import FOLDERS

ROOT = Path(__file__).parents[2]
DOCKER = (ROOT / "containers/Dockerfile").read_text(encoding="utf-8")
APPTAINER = (ROOT / "containers/mua.def").read_text(encoding="utf-8")
STEPS = [
    "pip install --no-cache-dir -r constraints/gpu-py312-cu.txt",
    "pip install --no-cache-dir --no-build-isolation --no-deps -r constraints/gpu-py312-cu-source.txt",
    "pip install --no-cache-dir --no-deps -e .",
]


@pytest.mark.parametrize("recipe", [DOCKER, APPTAINER], ids=["Docker", "Apptainer"])
def test_an_image_is_the_pinned_installation(recipe: str) -> None:
    assert [step for step in STEPS if step not in recipe] == []
    assert [recipe.index(step) for step in STEPS] == sorted(recipe.index(step) for step in STEPS)
    assert "python3.12-venv" in recipe
    toolkit = re.search(
        r"^cuda-toolkit==(\d+\.\d+)\.", (ROOT / "constraints/gpu-py312-cu.txt").read_text(), re.MULTILINE
    )
    assert toolkit
    (image,) = re.findall(r"nvidia/cuda:(\S+)", recipe)
    assert image.startswith(f"{toolkit[1]}.")
    assert image.endswith("cudnn-devel-ubuntu24.04")  # its extension compiles; Ubuntu 24.04 has Python 3.12


def test_apptainer_copies_every_package_and_nothing_that_is_not_there() -> None:
    copied = re.findall(r"^    (\S+) /opt/mua/(\S+)$", APPTAINER, re.MULTILINE)
    assert all(source == target and (ROOT / source).exists() for source, target in copied)
    packages = re.findall(r'"(\w+)"', re.search(r"include=\[(.+?)\]", (ROOT / "setup.py").read_text(), re.DOTALL)[1])  # type: ignore[index]
    assert set(packages) <= {source for source, _ in copied}


def copied_into_the_sif() -> list[str]:
    return re.findall(r"^    (\S+) /opt/mua/\S+$", APPTAINER, re.MULTILINE)


def test_apptainer_copies_what_the_program_reads_beside_its_packages() -> None:
    """What the wheel holds, what the set-up reads, and the tools that the pages run on a GPU."""
    needed = {*FOLDERS, "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "tools"}
    whole = copied_into_the_sif()
    assert {name for name in needed if not any(Path(name).is_relative_to(source) for source in whole)} == set()


def packages_of_ubuntu(recipe: str) -> list[list[str]]:
    """The packages of each ``apt-get install``, without its options."""
    found = re.findall(r"apt-get install -y --no-install-recommends \\\n\s+([^\n&]+)\n", recipe)
    return [names.rstrip("\\").split() for names in found]


def test_all_images_have_the_same_packages_of_ubuntu() -> None:
    cpu, gpu = packages_of_ubuntu(DOCKER)
    (sif,) = packages_of_ubuntu(APPTAINER)
    assert cpu == gpu == sif
    assert cpu == sorted(cpu)


def test_an_image_has_what_sandboxed_tools_need() -> None:
    """By Debian's names, in the messages of whoever looks for them."""
    said = (ROOT / "mua/users/scoring/sandbox.py").read_text(encoding="utf-8")
    needed = set(re.findall(r"install Debian's package (\S+)\"", said)) | {"bubblewrap"}
    assert {"python3", "util-linux"} <= needed <= set(packages_of_ubuntu(APPTAINER)[0])


def test_an_image_is_compiled_before_anybody_runs_it() -> None:
    """Who runs it may not be able to write into it; ``pip`` compiles what it installs, but not a checkout."""
    packages = re.findall(r'"(\w+)"', re.search(r"include=\[(.+?)\]", (ROOT / "setup.py").read_text(), re.DOTALL)[1])  # type: ignore[index]
    for recipe, times in ((DOCKER, 2), (APPTAINER, 1)):
        compiled = re.findall(r"/opt/venv/bin/python -m compileall -q (.+)$", recipe, re.MULTILINE)
        assert [set(folders.split()) for folders in compiled] == [{*packages, "tools"}] * times


def test_nothing_that_git_ignores_is_copied_into_an_image() -> None:
    """Virtual environments, runs and caches would make it gigabytes larger, and anybody's who has it."""
    left_out = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").split()]
    assert ".git" in left_out
    copied = [name for name in ignored if not any(fnmatch(name, pattern.removeprefix("**/")) for pattern in left_out)]
    assert copied == []


def run_in_containers() -> Iterator[str]:
    """What the page runs in an image, as one would type it there."""
    text = (ROOT / "docs/containers.md").read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^(?:docker run|apptainer run|apptainer exec|srun apptainer) .+$", text, re.MULTILINE):
        if found := re.search(r" mua(?::cpu|:gpu|\.sif) (.+)$", line):
            yield f"mua {found[1]}" if line.startswith("apptainer run") else found[1]


def test_the_commands_of_the_page_are_there_in_the_image() -> None:
    commands = list(run_in_containers())
    assert len(commands) > 2
    for command in commands:
        assert page_commands.PROGRAM.match(command), command
        page_commands.parsed(command)


def test_the_citation_names_the_version_and_nobody_who_is_not_there() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == mua.__version__
    assert citation["license"] == "Apache-2.0"
    assert citation["authors"] == [{"name": "The mua contributors"}]
    assert mua.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
