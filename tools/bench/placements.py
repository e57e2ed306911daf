"""Which placement wins under which assumptions: a recipe's simulation with other tails of episodes and other pauses.

    python -m tools.bench.placements [RECIPE ...] [--spread 0.2 1.0] [--pause 0.5 10] [--staleness 2]

Nothing is measured: the simulation is that of `mua plan --placements`, whose assumptions stand in docs/planning.md.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from mua.config.load import load_config
from mua.launch.plan.placements import compare_placements
from mua.launch.plan.planner import make_plan
from tools import kit

COLUMNS = (
    "recipe", "spread of lengths", "seconds between turns", "placement", "GPUs that train", "that generate",
    "generation alone, s", "training alone, s", "step, s", "max / step",
)  # fmt: skip


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("recipes", nargs="*", default=["qwen3-32b-4x8-h200", "qwen3-30b-a3b-2x8"])
    parser.add_argument("--spread", type=float, nargs="+", default=[0.2, 1.0])
    parser.add_argument("--pause", type=float, nargs="+", default=[0.5, 10.0])
    parser.add_argument("--staleness", type=int, default=2)
    arguments = parser.parse_args()
    os.chdir(kit.ROOT)  # recipes name files relative to it
    print(kit.head(*COLUMNS))
    for recipe, spread, pause in itertools.product(arguments.recipes, arguments.spread, arguments.pause):
        overrides = [f"cluster.length_spread={spread}", f"cluster.pause_seconds={pause}"]
        plan = make_plan(load_config(Path(f"configs/{recipe}.yaml"), overrides))
        for place, found in enumerate(compare_placements(plan, [arguments.staleness])):
            where = (recipe, f"{spread:g}", f"{pause:g}") if place == 0 else ("", "", "")
            seconds = (found.generation_seconds, found.training_seconds, found.step_seconds)
            gpus = (found.trainer_gpus, found.engine_gpus)
            print(
                kit.row(*where, found.name, *gpus, *(f"{s:.0f}" for s in seconds), f"{found.efficiency:.0%}"),
                flush=True,
            )


if __name__ == "__main__":
    main()
