"""Policies trained with one population of users, judged with every one: the help desk's matrix.

    python -m tools.bench.users_matrix [--start runs/demo/seed-1/sft/hf] [--steps 14] [--write]

From one start (the demonstration's cold start) one policy per population is trained by ``configs/demo.yaml``, and
``mua eval --matrix`` judges the start and all of them with every population on the same tasks of the test split.
Leaves everything under ``runs/users-matrix``; ``--write`` also writes ``docs/benchmarks/users_matrix.md``. A policy
that is there already is not trained again.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

import yaml

from tools.tiny import mua

ROOT = Path("runs/users-matrix")
PAGE = Path("docs/benchmarks/users_matrix.md")
CONFIG = "configs/demo.yaml"
POPULATIONS = {
    "brief": ["brief"],
    "forthcoming": ["forthcoming"],
    "terse": ["terse"],
    "erring": ["careless", "forgetful", "wavering"],
}
"""Name -> ``user.personas``. The start has seen brief customers only."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, default=Path("runs/demo/seed-1/sft/hf"))
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--tasks", type=int, default=128)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}")
    arguments = parser.parse_args()
    for name, personas in POPULATIONS.items():
        if not (ROOT / name / "hf").exists():
            train(arguments.start, name, personas, arguments.steps)
    judge(arguments.start, arguments.tasks)
    if arguments.write:
        PAGE.write_text(page(arguments.steps, arguments.tasks))


def train(start: Path, name: str, personas: list[str], steps: int) -> None:
    """One policy from ``start`` with one population, its last weights in ``hf``."""
    mua(
        "train",
        CONFIG,
        f"model.path={start}",
        f"output={ROOT / name}",
        f"user.personas={personas}",
        f"trainer.steps={steps}",
        "trainer.save_every=0",
        "trainer.evaluate_every=0",
        "trainer.export=last",
        "seed=1",
    )


def judge(start: Path, tasks: int) -> None:
    """Every policy with every population."""
    cells = {
        "policies": {"start": str(start), **{f"with {name}": str(ROOT / name / "hf") for name in POPULATIONS}},
        "users": {name: {"user.personas": personas} for name, personas in POPULATIONS.items()},
    }
    file = ROOT / "matrix.yaml"
    file.write_text(yaml.safe_dump(cells, sort_keys=False))
    judged = [f"output={ROOT / 'matrix'}", "evaluation.split=test", f"evaluation.tasks={tasks}", "seed=1"]
    mua("eval", "--matrix", str(file), CONFIG, *judged)


def page(steps: int, tasks: int) -> str:
    """The matrix as ``mua eval`` wrote it, with how it was made."""
    populations = "".join(f"* **{name}**: {', '.join(personas)}\n" for name, personas in POPULATIONS.items())
    return (
        "# Trained with one population of users, judged with another\n\n"
        f"{datetime.now(UTC):%Y-%m-%d}, `python -m tools.bench.users_matrix --write` on two CPU cores: the help desk, "
        f"policies of 1.8 million parameters. Each row but the first is {steps} steps of GRPO (16 groups of 8) with "
        "one population from the demonstration's cold start, which has seen brief customers only; one seed. Each cell: "
        f"{tasks} tasks of the test split, one episode of each at temperature 1, 95 % intervals over tasks.\n\n"
        f"Populations (personas of `mua/users/personas.py`):\n\n{populations}\n"
        + (ROOT / "matrix" / "matrix.md").read_text()
    )


if __name__ == "__main__":
    main()
