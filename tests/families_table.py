"""docs/families.md: what its table says, written by the grid of tests/parity/test_bridge_layouts.py and read back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bridge_support import EXAMPLES, LAYOUTS

from megatron_bridge.families import FAMILIES

TABLE = Path(__file__).parent.parent / "docs/families.md"

_HEAD = """# Model families and layouts

A family is one table in `megatron_bridge/families/`, from which loading, saving, exporting and resharding follow for
every layout; [add-a-family.md](add-a-family.md) tells how to write one. Each column below is a tiny random model of a
family, with perturbed norms, biases and routers, each row a layout. A filled cell means that the model was loaded into
real Megatron-Core on gloo and came back bit for bit, exported and as files, and that its log-probabilities equal
transformers' in float32; the number is their largest difference, at most 1e-4. `-` marks layouts of experts for models
that have none. TP is with sequence parallelism.

CI proves every cell (`tests/parity/test_bridge_layouts.py`); `make tables` writes them here.

"""
_TAIL = """
Missing: multi-head latent attention (DeepSeek-V2/V3, Kimi-K2), layers for multi-token prediction (left out of GLM-4.5
when loading, and of what is saved), quantized checkpoints, sliding windows, vision.
"""


def families_page(differences: Mapping[str, Mapping[str, float]]) -> str:
    """The page: ``differences`` of log-probabilities by layout and example."""
    lines = [f"| layout | {' | '.join(EXAMPLES)} |", f"| --- |{' --- |' * len(EXAMPLES)}"]
    for name in LAYOUTS:
        cells = [f"{differences[name][example]:.0e}" if example in differences[name] else "-" for example in EXAMPLES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| `model_type` | models |", "| --- | --- |"]
    lines += [f"| `{family.model_type}` | {family.about} |" for family in FAMILIES.values()]
    return _HEAD + "\n".join(lines) + "\n" + _TAIL


def table_cells(page: str) -> dict[str, dict[str, str]]:
    """Cells of the page's table of layouts, by layout and example."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    head, body = rows[0], rows[2 : 2 + len(LAYOUTS)]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in body}
