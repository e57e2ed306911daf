"""Optimizer state as safetensors: of every Hugging Face tensor the float32 weight and moments, in slices.

    optimizer/rank_00003.safetensors:   model.layers.0.mlp.down_proj.weight/exp_avg[0:512,128:256]   float32 [512, 128]

A rank writes the elements that it updates, one file each, without communication, one tensor at a time from the device
it is on. A slice is a rectangle of the Hugging Face tensor, so that a rank of any layout finds what it needs
(:mod:`megatron_bridge.blocks` gives the rectangles of its shards).
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from megatron_bridge.blocks import BandPart, BlockCopy, Split, bands
from megatron_bridge.family import EXPERT
from megatron_bridge.plan import PlannedParameter, TensorSpec, as_matrix, plan_model
from megatron_bridge.safetensors_io import SafetensorsFolder, header_of
from mua.compat.megatron_optimizer_state import KINDS, ParameterState, parameter_states, settle
from mua.utils.checksums import HashingStream
from mua.utils.errors import BridgeError

FOLDER = "optimizer"
_KEY = re.compile(r"(?P<name>.+)/(?P<kind>\w+)\[(?P<row>\d+):(?P<last>\d+),(?P<col>\d+):(?P<end>\d+)\]")


@dataclass(frozen=True, slots=True)
class Slice:
    """``[rows, cols]`` of a Hugging Face tensor, and where they begin in a rank's flat piece of a parameter."""

    name: str
    row: int
    col: int
    rows: int
    cols: int
    start: int

    def key(self, kind: str) -> str:
        """Its name in a file."""
        return f"{self.name}/{kind}[{self.row}:{self.row + self.rows},{self.col}:{self.col + self.cols}]"


def slices_of(blocks: Sequence[BlockCopy], cols: int, first: int, end: int) -> Iterator[Slice]:
    """The elements ``first`` to ``end`` of a shard of ``cols`` columns, whose rows are ``blocks``, as rectangles.

    They are part of a row, whole rows, and part of a row, each cut where another source begins. What belongs to no
    source, the padding of a vocabulary, is left out.
    """
    at = first
    while at < end:
        row, col = divmod(at, cols)
        whole = 0 if col else (end - at) // cols
        rows, width = (whole, cols) if whole else (1, min(cols - col, end - at))
        for block in blocks:
            low, high = max(row, block.shard_row), min(row + rows, block.shard_row + block.rows)
            if low < high:
                source_row = block.source_row + low - block.shard_row
                start = low * cols + col - first
                yield Slice(block.source, source_row, block.source_col + col, high - low, width, start)
        at += rows * width


class OptimizerState:
    """What a rank holds of a network's optimizer state, under Hugging Face names."""

    def __init__(self, chunks: Sequence[GPTModel], optimizer: ChainedOptimizer) -> None:
        """Collective, as :func:`megatron_bridge.plan.plan_model` is."""
        plan = plan_model(chunks)
        names = {id(tensor): name for name, tensor in plan.local.items()}
        planned = {parameter.name: parameter for parameter in plan.parameters}
        self._optimizer = optimizer
        self._held: list[tuple[ParameterState, PlannedParameter, list[BlockCopy], int]] = []
        for state in parameter_states(optimizer):
            parameter = planned[names[id(state.parameter)]]
            blocks = parameter.packing.shard_blocks(len(parameter.owners), plan.shard[parameter.name])
            self._held.append((state, parameter, blocks, as_matrix(state.parameter).shape[1]))

    @torch.no_grad()
    def save(self, path: Path, *, keep: bool) -> Callable[[], str]:
        """What writes the file of this rank's slices, and returns its checksum.

        With ``keep`` from a copy on the host, so that they may change at once.
        """
        held = [
            (state, list(slices_of(blocks, cols, state.first, state.end)))
            for state, parameter, blocks, cols in self._held if _is_saved(parameter)
        ]  # fmt: skip
        copies = [
            {kind: value.to("cpu", copy=True) for kind, value in state.read().items()} for state, _ in held if keep
        ]
        specs = [
            TensorSpec(each.key(kind), (each.rows, each.cols), torch.float32)
            for _, slices in held for kind in KINDS for each in slices
        ]  # fmt: skip

        def write() -> str:
            with path.open("wb") as file:
                stream = HashingStream(file.fileno())
                stream.write(header_of(specs)[0])
                for number, (state, slices) in enumerate(held):
                    values = copies[number] if keep else state.read()
                    for kind in KINDS:
                        flat = values[kind].cpu()
                        for each in slices:
                            part = flat[each.start : each.start + each.rows * each.cols]
                            stream.write(part.contiguous().view(torch.uint8).numpy().data)
                os.fsync(file.fileno())
            copies.clear()
            return stream.hexdigest()

        return write

    def load(self, folder: Path, steps: int) -> None:
        """Set everything from the slices in ``folder``, after ``steps`` steps; padding becomes zero.

        Raises:
            BridgeError: an element that this rank needs is in no slice, or in several; a file is damaged.
        """
        files = sorted(path.name for path in folder.glob("rank_*.safetensors"))
        with SafetensorsFolder(folder, finite=False, files=files) as opened:
            reader = SliceReader(opened)
            for state, parameter, blocks, cols in self._held:
                first, end = state.held
                values = {kind: torch.zeros(end - first) for kind in KINDS}
                for kind, flat in values.items():
                    for each in slices_of(blocks, cols, first, end):
                        target = flat[each.start : each.start + each.rows * each.cols].view(each.rows, each.cols)
                        reader.read(parameter, each, kind, target)
                state.write(values)
        settle(self._optimizer, steps)


def _is_saved(parameter: PlannedParameter) -> bool:
    """Whether this rank writes its state of a parameter: of those that tensor-parallel ranks all hold, one does."""
    if parameter.packing.split is not Split.REPLICATED:
        return not parameter.tied_copy
    expert = EXPERT.search(parameter.name)
    rank = (
        parallel_state.get_expert_tensor_parallel_rank() if expert else parallel_state.get_tensor_model_parallel_rank()
    )
    return rank == 0


class SliceReader:
    """Reads rectangles of tensors from the slices that the ranks left in files."""

    def __init__(self, files: SafetensorsFolder) -> None:
        self._files = files
        self._slices: defaultdict[tuple[str, str], list[BandPart[str]]] = defaultdict(list)
        self._checked: set[tuple[str, str]] = set()
        for key in files.names:
            found, entry = _KEY.fullmatch(key), files.entry(key)
            if found is None:
                raise BridgeError(f"{entry.path}: {key} is no slice of a tensor")
            row, last, col, end = (int(found[part]) for part in ("row", "last", "col", "end"))
            if entry.shape != (last - row, end - col):
                raise BridgeError(f"{entry.path}: {key} has shape {list(entry.shape)}")
            part = BandPart(key, 0, 0, row, col, last - row, end - col)
            self._slices[found["name"], found["kind"]].append(part)

    def read(self, parameter: PlannedParameter, wanted: Slice, kind: str, target: Tensor) -> None:
        """A slice of a tensor that ``parameter`` is packed from into ``target``, float32 ``[rows, cols]``."""
        key = (wanted.name, kind)
        if key not in self._checked:
            spec = next(spec for spec in parameter.sources() if spec.name == wanted.name)
            width = torch.Size(spec.shape[1:]).numel()
            for _ in bands(
                f"{self._files.folder}: {wanted.name}/{kind}", self._slices[key], spec.shape[0], width, spec.shape[0]
            ):
                pass  # raises unless every element is in one slice
            self._checked.add(key)
        for part in self._slices[key]:
            row, last = max(part.row, wanted.row), min(part.row + part.rows, wanted.row + wanted.rows)
            col, end = max(part.col, wanted.col), min(part.col + part.cols, wanted.col + wanted.cols)
            if row < last and col < end:
                view = target[row - wanted.row : last - wanted.row, col - wanted.col : end - wanted.col]
                self._files.read(part.origin, row - part.row, col - part.col, view)
