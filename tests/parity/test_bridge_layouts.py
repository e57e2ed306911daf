"""Round trips of every family's examples over the grid of layouts on gloo, with real Megatron-Core models.

For every layout and example: load, check that every parameter and buffer of every rank was set and that
log-probabilities equal transformers' (a wrong plan would pass a round trip alone), export, compare bit for bit with the
file on every rank, save from all ranks, compare what was written. A part that has every mechanism of the plan
runs always, half of the grid as slow tests, half with the grids; with ``MUA_WRITE_TABLES=1`` all of them write
docs/families.md. Training in these layouts is in test_megatron_layouts.py; sequences longer than a few dozen tokens are
not covered.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from bridge_support import (
    DENSE_LAYOUTS,
    EXAMPLES,
    IDS,
    LAYOUTS,
    build,
    hf_log_probabilities,
    layout,
    layouts_of,
    log_probabilities,
    start_parallel,
    stored_tensors,
    write_hf_model,
)
from exported_tensors import export_hf
from families_table import TABLE, families_page
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch import distributed as dist

from megatron_bridge.convert import load_hf
from megatron_bridge.save import save_hf
from mua.utils.errors import BridgeError
from tests.distributed import run_on_workers

LOG_PROBABILITIES = "log-probabilities.safetensors"
TOLERANCE = 1e-4
QUICK = {
    "TP2": ("qwen2 untied", "llama scaled"),
    "PP2 VPP2": ("qwen3 tied",),
    "TP4": ("qwen3 tied", "glm4_moe biases"),
    "TP2 PP2 VPP2": ("qwen2 tied", "qwen3_moe mixed"),
    "TP2 PP2 EP2 ETP1": ("qwen3_moe experts", "glm4_moe groups"),
    "TP2 DP2 EP2 ETP2": ("glm4_moe biases",),
}
"""Examples by layout: more ranks than KV heads, tied stages, virtual stages, and experts divided both ways."""
GRID = {name: tuple(example for example in EXAMPLES if name in layouts_of(EXAMPLES[example])) for name in LAYOUTS}

Result = dict[str, Any]
"""``faults``, a list of sentences, and ``difference``, the largest of log-probabilities or None."""


def check_case(name: str, source: Path, out: Path) -> Result:
    """Run on every rank."""
    megatron = layout(name)
    start_parallel(megatron)
    chunks = build(source, megatron)
    load_hf(chunks, source)
    stored = [pair for chunk in chunks for pair in stored_tensors(chunk).items()]
    faults = [f"{key} has unset elements" for key, tensor in stored if tensor.isnan().any()]
    found, difference = log_probabilities(chunks, IDS), None
    if (found is None) == parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        faults.append("log-probabilities must come from the last stage")
    elif found is not None:
        difference = float((found - load_file(source / LOG_PROBABILITIES)["values"]).abs().max())
        if not difference <= TOLERANCE:
            faults.append(f"log-probabilities differ by {difference}")
    weights = load_file(source / "model.safetensors")
    exported = [(key, tensor.clone()) for key, tensor in export_hf(chunks)]
    faults += differences("export", dict(exported), weights)
    if len(exported) != len(weights):
        faults.append("a tensor was exported twice")
    save_hf(chunks, out, source=source, max_shard_bytes=60_000)
    if dist.get_rank() == 0:
        written = {key: tensor for file in out.glob("*.safetensors") for key, tensor in load_file(file).items()}
        faults += differences("disk", written, weights)
    return {"faults": faults, "difference": difference}


def differences(where: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    names = [f"{where}: {name} is in one only" for name in found.keys() ^ expected.keys()]
    for name in found.keys() & expected.keys():
        same = found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name])
        names += [] if same else [f"{where}: {name} differs"]
    return names


def run_cases(name: str, examples: list[str], sources: str, out: str) -> dict[str, Result]:
    return {example: check_case(name, Path(sources) / example, Path(out) / name / example) for example in examples}


def failed_save(folder: str) -> str:
    """A save that fails raises on every rank, and leaves the ranks able to go on together; returns the message."""
    source, megatron = Path(folder), layout("TP2")
    start_parallel(megatron)
    chunks = build(source, megatron)
    load_hf(chunks, source)
    try:
        save_hf(chunks, source / "config.json", source=source)
    except BridgeError as error:
        dist.barrier()
        return str(error)
    return "no error was raised"


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for example, config in EXAMPLES.items():
        hf = write_hf_model(config, root / example)
        save_file({"values": hf_log_probabilities(hf)}, root / example / LOG_PROBABILITIES)
    return root


def prove(name: str, examples: tuple[str, ...], sources: Path, out: Path) -> dict[str, float]:
    """Run the examples in a layout; returns the largest difference of log-probabilities of each."""
    ranks = run_on_workers(layout(name).world_size, run_cases, name, list(examples), str(sources), str(out))
    faults = {
        f"rank {rank} {example}": result["faults"]
        for rank, results in enumerate(ranks)
        for example, result in results.items()
        if result["faults"]
    }
    assert faults == {}
    return {
        example: max(results[example]["difference"] for results in ranks if results[example]["difference"] is not None)
        for example in examples
    }


@pytest.mark.parametrize("name", QUICK)
def test_mechanisms_of_the_plan_round_trip_bit_exact(sources, tmp_path, name):
    assert prove(name, QUICK[name], sources, tmp_path).keys() == set(QUICK[name])


def test_a_failed_save_raises_on_every_rank(sources):
    assert all("is a file" in message for message in run_on_workers(2, failed_save, str(sources / "qwen2 tied")))


@pytest.fixture(scope="module")
def proven():
    """Differences by layout and example, which become the table of docs/families.md if all layouts were run."""
    found: dict[str, dict[str, float]] = {}
    yield found
    if os.environ.get("MUA_WRITE_TABLES") and found.keys() == set(LAYOUTS):
        TABLE.write_text(families_page(found), encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.grid if n % 2 or name == "TP2 PP4" else pytest.mark.slow)
        for n, name in enumerate(GRID)
    ],
)
def test_every_example_in_every_layout(sources, proven, tmp_path, name):
    assert name not in DENSE_LAYOUTS or GRID[name] == tuple(EXAMPLES)
    proven[name] = prove(name, GRID[name], sources, tmp_path)
