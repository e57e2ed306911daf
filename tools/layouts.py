"""Proves every layout of ``mua.megatron.layouts`` on this machine and writes ``docs/layouts.md``.

    python -m tools.layouts

A layout that fails ends the run with an error and leaves the page as it is.
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
from tests import layout_support
from tools import kit

KINDS = {"dense": ("Dense models", layouts.DENSE), "moe": ("Mixtures of experts", layouts.MOE)}
COLUMNS = {
    "loss": "loss", "gradient": "gradients", "norm": "norm", "weights": "weights", "distributed_loss": "loss, DO",
    "distributed_weights": "weights, DO", "alone": "one sequence", "load": "experts' load",
}  # fmt: skip

PAGE = """# Parallel layouts

Every layout below was run on as many gloo processes as it has ranks, and gave what a single process gives. A layout
whose pattern (which sizes are above one, and how experts lie in them) is not among them is refused at start, with the
nearest one that is. Sizes within a pattern are free: `TP8 PP4 DP4` is covered by `TP2 PP2 DP2`.

The table is `mua/megatron/layouts.py`, read by the check at start, by `tests/parity/test_megatron_layouts.py`, which
proves a part of it in `make test` and the rest in `make test-slow`, so that CI (`.ci/run`) proves all of it, and by
`make tables`, which measured and wrote this page.

| short | key under `megatron` | |
| --- | --- | --- |
| TP | `tensor_parallel` | with sequence parallelism |
| PP | `pipeline_parallel` | FIRST and LAST: `first_stage_layers`, `last_stage_layers` |
| VPP | `virtual_pipeline` | interleaved schedule; micro-batches are padded to one length |
| CP | `context_parallel` | each sequence of a packed micro-batch in zigzag chunks; padded to a multiple of 2 x CP |
| DP | `data_parallel` | each entry without and with `distributed_optimizer` |
| EP | `expert_parallel` | experts over ranks of TP x CP x DP |
| ETP | `expert_tensor_parallel` | as TP where it is not named |

Uneven stages concern the pipeline alone: where `PP2 FIRST1` is proven, every proven pattern with PP may have them.
Layers, heads or experts that do not divide over a layout are refused with the sizes that do.

## How it is measured

A random model (2 layers, 4 or 6 where stages need them; 4 heads, 2 key-value heads; 8 experts, 2 of them for a token)
is trained twice on packed micro-batches of 11 sequences of 2 to 40 tokens with random masks, in float32 with AdamW at a
learning rate of 1e-2, weight decay and clipping at 1: one step; then, with the distributed optimizer (DO) and, for
experts, with load-balancing and z-loss, two steps and one on a single sequence, which leaves most ranks without a
token. The columns are the largest differences to a single process over all ranks, steps and tensors:

* loss: absolute, of the first run, and of the second (at most 1e-5);
* gradients: relative to the largest, first run (1e-5);
* norm: of the gradients, relative, first step of both runs (1e-5);
* weights: absolute, after one step, and after two (3e-3: Adam magnifies rounding where a gradient is near zero,
  differently by CPU);
* one sequence: loss of the last step, absolute (1e-4: 4 tokens, under weights that have drifted by then);
* experts' load: of the load metrics and both losses, relative, first step of the second run (1e-5).

Log-probabilities before the first step are compared too (2e-5). A third run, which has no column, trains policy and
critic on sequences that begin alike, as prefix trees, under an objective over whole sequences; the single process has
them side by side: log-probabilities and values (2e-5), gradients and metrics (1e-5), what the critic learned (1e-3).
One set of ranks of each size proves one layout after the other and uses process groups again; some layouts also run in
fresh ranks, with the same result bit for bit. What these bounds find is shown by `tests/parity/test_planted_faults.py`:
faults of parallel training (a sum over ranks left out or made twice, a wrong share of sequences, layers, experts or
optimizer state) are planted one by one, and each is found.

A single process is itself compared with transformers. What is not measured here: a GPU, NCCL, bfloat16, more than
8 processes.
"""


def main() -> None:
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, (_, names) in KINDS.items():
            for name in names:
                found = layout_support.measure(Path(folder), kind, name)
                if refused := found.refused():
                    raise SystemExit(f"{kind} {name} is not a single process: {refused}")
                results[f"{kind} {name}"] = asdict(found)
                print(kind, name, *(f"{key}={value:.1e}" for key, value in asdict(found).items()), flush=True)
    (kit.ROOT / "docs" / "layouts.md").write_text(_page(results))


def _page(results: dict[str, dict[str, float]]) -> str:
    where = (
        f"Measured on {datetime.date.today()} with Megatron-Core {version('megatron-core')}, torch {version('torch')} "
        f"and gloo on {os.cpu_count()} CPU cores.\n"
    )
    return "\n".join([PAGE, where, *(_section(kind, results) for kind in KINDS)])


def _section(kind: str, results: dict[str, dict[str, float]]) -> str:
    heading, names = KINDS[kind]
    columns = [column for column in COLUMNS if column != "load" or kind == "moe"]
    rows = []
    for name in names:
        config = MegatronConfig(**layouts.sizes(name))
        values = (f"{results[f'{kind} {name}'][column]:.0e}" for column in columns)
        rows.append((f"`{name}`", config.world_size, layouts.in_words(layouts.pattern(config)), *values))
    head = ("layout", "processes", "pattern", *(COLUMNS[column] for column in columns))
    return f"## {heading}\n\n{kit.table(head, rows)}\n"


if __name__ == "__main__":
    main()
