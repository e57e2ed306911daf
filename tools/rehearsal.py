"""Rehearses layouts on Transformer Engine's layers and writes the tables of ``docs/transformer_engine.md``.

    python -m tools.rehearsal

What stands before the tables is kept. A layout that fails ends the run with an error and leaves the page as it is.
"""

from __future__ import annotations

import datetime
import os
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from mua.config.schema import MegatronConfig
from mua.megatron import layouts
from tests.te_support import REHEARSED, Rehearsal, rehearse
from tools import kit

HEADINGS = {"dense": "Dense models", "moe": "Mixtures of experts"}
COLUMNS = {
    "logprobs": "log-probabilities",
    "loss": "loss",
    "gradient": "gradients",
    "distributed_loss": "loss, DO",
    "distributed_weights": "weights, DO",
    "load": "experts' load",
    "from_local": "checkpoint from local",
    "to_local": "checkpoint to local",
}
MEASURED = "## What was measured"


def main() -> None:
    found: dict[tuple[str, str], Rehearsal] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, names in REHEARSED.items():
            for name in names:
                one = found[kind, name] = rehearse(Path(folder), kind, name)
                if refused := one.refused():
                    raise SystemExit(f"{kind} {name} is not a single process of local layers: {refused}")
                print(kind, name, *(f"{key}={value:.1e}" for key, value in asdict(one).items()), flush=True)
    page = kit.ROOT / "docs" / "transformer_engine.md"
    before = page.read_text().split(MEASURED)[0]
    page.write_text("\n".join([before + MEASURED, "", _where(), *(_section(kind, found) for kind in REHEARSED)]))


def _where() -> str:
    return (
        f"Measured on {datetime.date.today()} with Megatron-Core {version('megatron-core')}, torch {version('torch')}, "
        f"gloo and the stand-in on {os.cpu_count()} CPU cores; no GPU.\n"
    )


def _section(kind: str, found: dict[tuple[str, str], Rehearsal]) -> str:
    columns = [column for column in COLUMNS if column != "load" or kind == "moe"]
    rows = []
    for name in REHEARSED[kind]:
        values = asdict(found[kind, name])
        world = MegatronConfig(**layouts.sizes(name)).world_size
        rows.append((f"`{name}`", world, *(f"{values[column]:.0e}" for column in columns)))
    head = ("layout", "processes", *(COLUMNS[column] for column in columns))
    return f"## {HEADINGS[kind]}\n\n{kit.table(head, rows)}\n"


if __name__ == "__main__":
    main()
