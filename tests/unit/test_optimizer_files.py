"""Slices of optimizer state: any cut of a shard's elements tells which rectangles of which tensors they are.

Drawn shards, cuts and readers against plain numpy. Missing, doubled and misnamed slices are one error each. Whole
checkpoints are in ``test_megatron_checkpoint.py``, changes of layout in ``tests/parity/test_checkpoint_layouts.py``.
"""

from __future__ import annotations

import itertools
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from megatron_bridge.blocks import Packing, Split
from megatron_bridge.plan import TensorSpec
from megatron_bridge.safetensors_io import SafetensorsFolder
from mua.megatron.optimizer_files import SliceReader, slices_of
from mua.utils.errors import BridgeError

SPECS = {"a": (6, 4), "b": (3, 4)}
PACKINGS = {
    split: Packing(("a", "b"), (2, 1), 3, 10, 4, split) for split in (Split.ROWS, Split.COLUMNS, Split.REPLICATED)
}  # row 9 is padding


@st.composite
def cuts(draw: Any) -> tuple[Packing, int, list[int]]:
    """A packing, a number of shards, and where data-parallel ranks' pieces of a shard end."""
    split = draw(st.sampled_from(list(PACKINGS)))
    shards = draw(st.sampled_from([1, 2])) if split is not Split.REPLICATED else 1
    rows, cols = PACKINGS[split].shard_shape(shards)
    ends = draw(st.lists(st.integers(0, rows * cols), max_size=4))
    return PACKINGS[split], shards, sorted({*ends, 0, rows * cols})


@given(cuts())
def test_pieces_of_all_ranks_are_every_element_once(drawn: tuple[Packing, int, list[int]]) -> None:
    packing, shards, ends = drawn
    tensors = {name: np.arange(rows * cols).reshape(rows, cols) + 100 * (name == "b")
               for name, (rows, cols) in SPECS.items()}  # fmt: skip
    seen = {name: np.zeros(shape, int) for name, shape in SPECS.items()}
    for shard in range(shards):
        blocks = packing.shard_blocks(shards, shard)
        rows, cols = packing.shard_shape(shards)
        values = np.full((rows, cols), -1)
        for b in blocks:
            values[b.shard_row : b.shard_row + b.rows] = tensors[b.source][
                b.source_row : b.source_row + b.rows, b.source_col : b.source_col + b.cols
            ]
        for first, end in itertools.pairwise(ends):
            piece = values.reshape(-1)[first:end]
            for s in slices_of(blocks, cols, first, end):
                place = np.s_[s.row : s.row + s.rows, s.col : s.col + s.cols]
                found = piece[s.start : s.start + s.rows * s.cols].reshape(s.rows, s.cols)
                assert np.array_equal(found, tensors[s.name][place])
                seen[s.name][place] += 1
    assert all((count == 1).all() for count in seen.values())


PARAMETER: Any = SimpleNamespace(sources=lambda: [TensorSpec(n, shape, torch.float32) for n, shape in SPECS.items()])


def write(folder: Path, rank: int, *slices: str) -> None:
    whole = torch.arange(24.0).view(6, 4)
    parts = {}
    for each in slices:
        rows, cols = (slice(*map(int, ends.split(":"))) for ends in each.split(","))
        parts[f"a/exp_avg[{each}]"] = whole[rows, cols].clone().contiguous()
    save_file(parts, folder / f"rank_{rank:05d}.safetensors")


def opened(folder: Path) -> SafetensorsFolder:
    return SafetensorsFolder(folder, finite=False, files=sorted(path.name for path in folder.glob("rank_*")))


def read(folder: Path) -> torch.Tensor:
    blocks, target = PACKINGS[Split.REPLICATED].shard_blocks(1, 0), torch.zeros(4, 4)
    with opened(folder) as files:
        reader = SliceReader(files)
        for each in slices_of(blocks, 4, 5, 20):
            if each.name == "a":
                reader.read(PARAMETER, each, "exp_avg", target[: each.rows, : each.cols])
    return target


def test_a_rectangle_is_read_from_several_files(tmp_path: Path) -> None:
    write(tmp_path, 0, "0:2,0:4", "2:3,0:1")
    write(tmp_path, 1, "2:3,1:4", "3:6,0:2", "3:6,2:4")
    assert read(tmp_path)[0].tolist() == [8, 9, 10, 11]  # row 3 of the shard is row 2 of the tensor


@pytest.mark.parametrize(
    ("slices", "told"),
    [
        (("0:2,0:4", "3:6,0:4"), "a/exp_avg"),
        (("0:6,0:4", "2:3,1:2"), "a/exp_avg"),
        (("0:2,0:4", "2:6,0:3"), "a/exp_avg"),
        ((), "a/exp_avg"),
    ],
    ids=["row missing", "twice", "column missing", "all missing"],
)
def test_what_is_in_no_slice_or_in_two_is_named(tmp_path: Path, slices: tuple[str, ...], told: str) -> None:
    write(tmp_path, 0, *slices)
    with pytest.raises(BridgeError) as error:
        read(tmp_path)
    assert told in str(error.value)


@pytest.mark.parametrize("key", ["a/exp_avg", "a/exp_avg[0:2,0:4]x", "a/exp_avg[0:3,0:4]", "a[0:2,0:4]"])
def test_a_name_that_is_no_slice_is_refused(tmp_path: Path, key: str) -> None:
    save_file({key: torch.zeros(2, 4)}, tmp_path / "rank_00000.safetensors")
    with opened(tmp_path) as files, pytest.raises(BridgeError) as error:
        SliceReader(files)
    assert key.split("[")[0] in str(error.value)


def test_more_ranks_than_files_may_be_open(tmp_path: Path) -> None:
    for rank in range(96):
        row, col = divmod(rank, 4)
        write(tmp_path, rank, *([f"{row}:{row + 1},{col}:{col + 1}"] if rank < 24 else []))
    if (child := os.fork()) == 0:
        os.closerange(3, 1024)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        os._exit(0 if read(tmp_path)[0].tolist() == [8, 9, 10, 11] else 1)
    assert os.waitpid(child, 0)[1] == 0
