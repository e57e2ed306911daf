"""Policies trained with one population of users, evaluated with every one: the help desk's matrix.

    python -m tools.bench.users_matrix [--sft-steps 300] [--steps 14] [--tasks 128] [--write]

The start is fine-tuned on conversations with customers of all populations; from it one policy per population is trained
by ``configs/demo.yaml``, and ``mua eval --matrix`` judges the start and all of them with every population on the same
tasks of the test split. Leaves everything under ``runs/users-matrix``, in a folder of its own for each choice of
steps; ``--write`` also writes ``docs/benchmarks/users_matrix.md``. A policy that is there already is not trained again.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from textwrap import fill

import yaml

from environments.help_desk import DOMAIN
from environments.help_desk.demonstrations import demonstrations
from environments.kit.demonstrate import write_conversations
from tools import kit
from tools.pretrain import BASE
from workbench.commands import mua

PAGE = Path("docs/benchmarks/users_matrix.md")
CONFIG, SFT = "configs/demo.yaml", "configs/demo-sft.yaml"
CONVERSATIONS = 800
CONTEXT = "model.max_length=832"
LONGER = [CONTEXT, "rollout.max_tokens=800"]
"""Most of these people say more than those of the demonstration."""
POPULATIONS = {
    "brief": ["brief"],
    "forthcoming": ["forthcoming"],
    "terse": ["terse"],
    "erring": ["careless", "forgetful", "wavering"],
}
"""Name -> ``user.personas``."""


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--tasks", type=int, default=128)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}")
    arguments = parser.parse_args()
    folder = Path("runs/users-matrix") / f"sft-{arguments.sft_steps}-rl-{arguments.steps}"
    if not (folder / "start" / "hf").exists():
        fine_tune(folder, arguments.sft_steps)
    for name, personas in POPULATIONS.items():
        if not (folder / name / "hf").exists():
            train(folder, name, personas, arguments.steps)
    judge(folder, arguments.tasks)
    if arguments.write:
        PAGE.write_text(page(folder, arguments.sft_steps, arguments.steps, arguments.tasks))


def fine_tune(folder: Path, steps: int) -> None:
    """The start: it has met customers of every population."""
    data = folder / "conversations.jsonl"
    everybody = [persona for personas in POPULATIONS.values() for persona in personas]
    talks = demonstrations(CONVERSATIONS, 1, DOMAIN.system_prompt("short"), everybody)
    folder.mkdir(parents=True, exist_ok=True)
    write_conversations(data, talks)
    run = [f"model.path={BASE}", f"sft.data={data}", f"output={folder / 'start'}", f"trainer.steps={steps}", "seed=1"]
    mua("sft", SFT, *run, "sft.batch_size=16", CONTEXT)


def train(folder: Path, name: str, personas: list[str], steps: int) -> None:
    """One policy from the start with one population, its last weights in ``hf``."""
    mua(
        "train",
        CONFIG,
        f"model.path={folder / 'start' / 'hf'}",
        f"output={folder / name}",
        f"user.personas={personas}",
        f"trainer.steps={steps}",
        "trainer.save_every=0",
        "trainer.evaluate_every=0",
        "trainer.export=last",
        "seed=1",
        *LONGER,
    )


def judge(folder: Path, tasks: int) -> None:
    """Every policy with every population."""
    rows = {"start": "start", **{f"with-{name}": name for name in POPULATIONS}}
    cells = {
        "policies": {row: str(folder / name / "hf") for row, name in rows.items()},
        "users": {name: {"user.personas": personas} for name, personas in POPULATIONS.items()},
    }
    file = folder / "matrix.yaml"
    file.write_text(yaml.safe_dump(cells, sort_keys=False))
    judged = [f"output={folder / 'matrix'}", "evaluation.split=test", f"evaluation.tasks={tasks}", "seed=1"]
    mua("eval", "--matrix", str(file), CONFIG, *judged, *LONGER)


def page(folder: Path, sft_steps: int, steps: int, tasks: int) -> str:
    """The matrix as ``mua eval`` wrote it, with how it was made."""
    populations = "".join(f"* **{name}**: {', '.join(personas)}\n" for name, personas in POPULATIONS.items())
    matrix = (folder / "matrix" / "matrix.md").read_text()
    how = (
        f"{datetime.now(UTC):%Y-%m-%d}, `python -m tools.bench.users_matrix --write` on two CPU cores: the help desk, "
        f"policies of 1.8 million parameters. The start: {sft_steps} steps of SFT on {CONVERSATIONS} conversations "
        f"with customers of all populations; every other row: {steps} steps of GRPO (16 groups of 8) from it with one "
        f"population; one seed. Each cell: {tasks} tasks of the test split, one episode of each at temperature 1, 95 % "
        "intervals over tasks. Populations, by personas of `mua/users/personas.py`:"
    )
    title = "# Trained with one population of users, evaluated with another"
    return f"{title}\n\n{fill(how, 120)}\n\n{populations}\n{matrix[matrix.index('## Success') :]}"


if __name__ == "__main__":
    main()
