"""What stands at the root for people and forges, and the recipes of containers, fit the project.

Not covered: whether the images build; that takes a registry.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import mua

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


def test_the_citation_names_the_version_and_nobody_who_is_not_there() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == mua.__version__
    assert citation["license"] == "Apache-2.0"
    assert citation["authors"] == [{"name": "The mua contributors"}]
    assert mua.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_hooks_download_nothing() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    assert all(hook["entry"].startswith(".venv/bin/python -m ") for hook in repository["hooks"])
