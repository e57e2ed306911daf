"""Writes the generated parts of docs/planning.md: every recipe's plan and, on request, planned against measured bytes.

python -m tools.planning_page           # the recipes' plans (`make docs` does this)
python -m tools.planning_page --measure # also the table of real runs, on up to eight processes of this machine
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tools import kit

PAGE = kit.ROOT / "docs" / "planning.md"
RECIPES = ("qwen3-32b-4x8-h200", "qwen3-8b-1x8", "qwen3-30b-a3b-2x8", "qwen3-235b-a22b-16x8")


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--measure", action="store_true", help="run the layouts for real and rewrite their table")
    arguments = parser.parse_args()
    os.chdir(kit.ROOT)  # recipes name files relative to it
    parts = {"recipes": recipes}
    if arguments.measure:
        parts["measured"] = measured
    for name, made in parts.items():
        PAGE.write_text(kit.with_part(PAGE, name, made(), by=Path(__file__)), encoding="utf-8")


def recipes() -> str:
    """The plan of every recipe as the command prints it."""
    from mua.config.load import load_config
    from mua.launch.plan.planner import make_plan
    from workbench.plan_tables import as_text

    plans = {file: as_text(make_plan(load_config(Path(file)))) for file in (f"configs/{name}.yaml" for name in RECIPES)}
    return "\n\n".join(f"### `mua plan {file}`\n\n```text\n{plan}\n```" for file, plan in plans.items())


def measured() -> str:
    """A row for every run of tests/parity/test_planned_bytes.py."""
    from tests.parity.test_planned_bytes import QUICK, SLOW
    from tests.planned_support import measured, planned, write_models

    columns = "model | layout | type | optimizer | ranks | planned bytes, all ranks | measured | most a rank is off"
    lines = [kit.head(*columns.split(" | "))]
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        for case in (*QUICK, *SLOW):
            foreseen, found = planned(Path(folder), case), measured(Path(folder), case)
            apart = max(abs(a.total - b.total) for a, b in zip(foreseen, found, strict=True))
            cells = (
                case.model, case.layout, case.dtype, "distributed" if case.distributed else "replicated",
                str(len(found)), f"{sum(b.total for b in foreseen):,}", f"{sum(b.total for b in found):,}", str(apart),
            )  # fmt: skip
            lines.append(kit.row(*cells))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
