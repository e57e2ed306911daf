"""Whether products round their operands to fp8, and how."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_engine.common.recipe import Float8BlockScaling, Recipe

_BLOCK = 128


class FP8GlobalStateManager:
    """The innermost ``autocast``."""

    enabled = False
    recipe: Recipe | None = None

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.enabled

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        return cls.recipe or Float8BlockScaling()

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        return False

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        return False

    @classmethod
    def reset(cls) -> None:
        cls.enabled, cls.recipe = False, None


class autocast:
    """Within it products are those of ``recipe``."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        if enabled and not isinstance(recipe, Float8BlockScaling):
            raise NotImplementedError(f"the stand-in computes fp8 by block scaling only, not by {recipe}")
        if calibrating or _graph:
            raise NotImplementedError("the stand-in neither calibrates nor captures graphs")
        self._own = (enabled, recipe)
        self._before: tuple[bool, Recipe | None] = (False, None)

    def __enter__(self) -> None:
        state = FP8GlobalStateManager
        self._before = (state.enabled, state.recipe)
        state.enabled, state.recipe = self._own

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        FP8GlobalStateManager.enabled, FP8GlobalStateManager.recipe = self._before


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    with autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph):
        yield


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    if enabled:
        raise NotImplementedError("the stand-in keeps no parameters in fp8")
    yield


fp8_model_init = quantized_model_init


def check_sizes(*operands: Tensor) -> None:
    """Refuses operands that the fp8 kernels cannot take, as ``assert_dim_for_fp8_exec`` does."""
    for operand in operands:
        if math.prod(operand.shape[:-1]) % 8 or operand.shape[-1] % 16:
            raise ValueError(
                "FP8 execution requires the product of all dimensions except the last to be divisible by 8 and the last"
                f" dimension to be divisible by 16, but got tensor with dims={list(operand.size())}"
            )


def rounded(values: Tensor, rows: int) -> Tensor:
    """``values`` ``[..., n]`` through E4M3 with one power-of-two scale per block of ``rows`` x 128."""
    flat = values.reshape(-1, values.shape[-1]).float()
    padded = F.pad(flat, (0, -flat.shape[1] % _BLOCK, 0, -flat.shape[0] % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // _BLOCK, _BLOCK)
    largest = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-30)
    scale = torch.exp2(torch.floor(torch.log2(448.0 / largest)))
    back = (blocks * scale).to(torch.float8_e4m3fn).float() / scale
    return back.view(padded.shape)[: flat.shape[0], : flat.shape[1]].reshape(values.shape).to(values.dtype)


def operands(left: Tensor, right: Tensor, *, weight: bool) -> tuple[Tensor, Tensor]:
    """What a product of ``left`` with ``right`` gets under the recipe; ``right`` is in square blocks if a weight."""
    return rounded(left, 1), rounded(right, _BLOCK if weight else 1)
