"""Policies trained with one population of users, judged with every one: the help desk's matrix.

    python -m tools.bench.users_matrix [--steps 14] [--write]

The start is fine-tuned on conversations with customers of all populations; from it one policy per population is trained
by ``configs/demo.yaml``, and ``mua eval --matrix`` judges the start and all of them with every population on the same
tasks of the test split. Leaves everything under ``runs/users-matrix``; ``--write`` also writes
``docs/benchmarks/users_matrix.md``. A policy that is there already is not trained again.
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from textwrap import fill

import yaml

from environments.help_desk import DOMAIN
from environments.help_desk.demonstrations import demonstrations
from tools.pretrain import BASE
from tools.tiny import mua

ROOT = Path("runs/users-matrix")
PAGE = Path("docs/benchmarks/users_matrix.md")
START = ROOT / "start" / "hf"
CONFIG, SFT = "configs/demo.yaml", "configs/demo-sft.yaml"
CONVERSATIONS = 800
LONGER = ["model.max_length=832", "rollout.max_tokens=800"]
"""Most of these people say more than those of the demonstration."""
POPULATIONS = {
    "brief": ["brief"],
    "forthcoming": ["forthcoming"],
    "terse": ["terse"],
    "erring": ["careless", "forgetful", "wavering"],
}
"""Name -> ``user.personas``."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--tasks", type=int, default=128)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}")
    arguments = parser.parse_args()
    if not START.exists():
        fine_tune(arguments.sft_steps)
    for name, personas in POPULATIONS.items():
        if not (ROOT / name / "hf").exists():
            train(name, personas, arguments.steps)
    judge(arguments.tasks)
    if arguments.write:
        PAGE.write_text(page(arguments.sft_steps, arguments.steps, arguments.tasks))


def fine_tune(steps: int) -> None:
    """The start: it has met customers of every population."""
    data = ROOT / "conversations.jsonl"
    everybody = [persona for personas in POPULATIONS.values() for persona in personas]
    talks = demonstrations(CONVERSATIONS, 1, DOMAIN.system_prompt("short"), everybody)
    ROOT.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in talks))
    run = [f"model.path={BASE}", f"sft.data={data}", f"output={START.parent}", f"trainer.steps={steps}", "seed=1"]
    mua("sft", SFT, *run, "sft.batch_size=16", LONGER[0])


def train(name: str, personas: list[str], steps: int) -> None:
    """One policy from the start with one population, its last weights in ``hf``."""
    mua(
        "train",
        CONFIG,
        f"model.path={START}",
        f"output={ROOT / name}",
        f"user.personas={personas}",
        f"trainer.steps={steps}",
        "trainer.save_every=0",
        "trainer.evaluate_every=0",
        "trainer.export=last",
        "seed=1",
        *LONGER,
    )


def judge(tasks: int) -> None:
    """Every policy with every population."""
    cells = {
        "policies": {"start": str(START), **{f"with-{name}": str(ROOT / name / "hf") for name in POPULATIONS}},
        "users": {name: {"user.personas": personas} for name, personas in POPULATIONS.items()},
    }
    file = ROOT / "matrix.yaml"
    file.write_text(yaml.safe_dump(cells, sort_keys=False))
    judged = [f"output={ROOT / 'matrix'}", "evaluation.split=test", f"evaluation.tasks={tasks}", "seed=1"]
    mua("eval", "--matrix", str(file), CONFIG, *judged, *LONGER)


def page(sft_steps: int, steps: int, tasks: int) -> str:
    """The matrix as ``mua eval`` wrote it, with how it was made."""
    populations = "".join(f"* **{name}**: {', '.join(personas)}\n" for name, personas in POPULATIONS.items())
    matrix = (ROOT / "matrix" / "matrix.md").read_text()
    how = (
        f"{datetime.now(UTC):%Y-%m-%d}, `python -m tools.bench.users_matrix --write` on two CPU cores: the help desk, "
        f"policies of 1.8 million parameters. The start: {sft_steps} steps of SFT on {CONVERSATIONS} conversations "
        f"with customers of all populations; every other row: {steps} steps of GRPO (16 groups of 8) from it with one "
        f"population; one seed. Each cell: {tasks} tasks of the test split, one episode of each at temperature 1, 95 % "
        "intervals over tasks. Populations, by personas of `mua/users/personas.py`:"
    )
    title = "# Trained with one population of users, judged with another"
    return f"{title}\n\n{fill(how, 120)}\n\n{populations}\n{matrix[matrix.index('## Success') :]}"


if __name__ == "__main__":
    main()
