"""``pip install "mua[cpu]"`` brings all that a trainer and an engine import, without SGLang's own requirements, and
``pip install mua`` what reads and views runs, evaluates endpoints and samples.

This environment has more: what tests, tool servers and the documentation need. Here none of that can be imported. Not
covered: what is imported only while an engine serves, for which ``python -m tools.wheel_check --fresh --train`` is.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mua.compat import sglang_cpu
from tests.contract.test_repository import requirement_lines

ROOT = Path(__file__).parents[2]
BLOCKED = """
import sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent!r} else super().find_spec(name, path, target)
sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""
SERVER = (
    "sglang.launch_server", "sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler",
    "sglang.srt.managers.tokenizer_manager", "sglang.srt.managers.detokenizer_manager",
)  # fmt: skip
TRAINER = (
    "mua.cli",
    "mua.trainer.rl",
    "mua.trainer.sft",
    "mua.trainer.evaluation.evaluator",
    "mua.rollout.rollout_worker",
)
ALONE = (
    "mua.cli", "mua.view.web", "mua.view.run_evidence", "mua.trainer.evaluation.evaluator",
    "mua.rollout.gateway.serving", "mua.rollout.rollout_worker", "mua.launch.checks.configuration",
)  # fmt: skip
UNPINNED = {"sglang", "xgrammar"}
"""Installed without their requirements (constraints/cpu-py312-nodeps.txt)."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def brought(lines: list[str]) -> set[str]:
    """The distributions that installing ``lines`` brings, by the metadata of this environment."""
    todo, seen = [Requirement(line) for line in lines], set[tuple[str, frozenset[str]]]()
    while todo:
        asked = todo.pop()
        if (key := (canonical(asked.name), frozenset(asked.extras))) in seen:
            continue
        seen.add(key)
        try:
            needs = metadata.distribution(asked.name).requires or []
        except metadata.PackageNotFoundError:  # CUDA's, where PyTorch's CPU build is installed
            continue
        extras = {"", *asked.extras}
        for need in map(Requirement, needs):
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(need)
    return {name for name, _ in seen}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "modules"), [("cpu", SERVER), ("cpu", TRAINER), ("core", ALONE)], ids=["server", "trainer", "alone"]
)
def test_an_extra_brings_what_is_imported(extra: str, modules: tuple[str, ...]) -> None:
    lines = requirement_lines()
    there = brought([*lines["core"], *(lines["cpu"] if extra == "cpu" else [])]) | {"mua", "setuptools", "pip"}
    there |= UNPINNED if extra == "cpu" else set()
    # Where another test has imported setuptools, its own copies of packages are found too.
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    installed = {canonical(found.name) for found in metadata.distributions(path=[*folders])}
    absent = {
        module for module, owners in metadata.packages_distributions().items()
        if (here := {canonical(owner) for owner in owners} & installed) and not here & there
    }  # fmt: skip
    assert {"pytest", "mcp", "hypothesis"} <= absent, "nothing is missing, so that this test shows nothing"
    first = "import mua_sglang_cpu\n" if modules == SERVER else ""
    code = BLOCKED.format(absent=absent) + first + "".join(f"import {module}\n" for module in modules)
    variables = sglang_cpu.cpu_environment() if modules == SERVER else dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
