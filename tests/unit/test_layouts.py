"""Which layouts are accepted, what the refusal of others says, and models that do not divide.

That the accepted ones are right is shown in ``tests/parity/test_megatron_layouts.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mua.config.schema import MegatronConfig
from mua.megatron import layouts
from mua.megatron.architecture import Architecture
from mua.megatron.layouts import check_divisible, check_layout, name_of, sizes
from mua.utils.errors import ConfigError, MuaError

MODEL = Architecture.from_hf(
    json.loads((Path(__file__).parents[2] / "configs/models/Qwen3-235B-A22B/config.json").read_text())
)


def config(name: str) -> MegatronConfig:
    return MegatronConfig(**sizes(name))


@pytest.mark.parametrize(("kind", "names"), [(False, layouts.DENSE), (True, layouts.MOE)])
def test_every_entry_is_accepted_and_none_is_listed_twice(kind: bool, names: tuple[str, ...]) -> None:
    for name in names:
        check_layout(config(name), moe=kind)
        assert name_of(config(name)) == name
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "moe"),
    [("TP8 PP4", False), ("TP4 PP8 DP2 FIRST7", False), ("DP8 EP8", True), ("TP4 PP8 VPP2 DP8 EP32 ETP1", True)],
)
def test_sizes_within_a_pattern_are_free(name: str, moe: bool) -> None:
    check_layout(config(name), moe=moe)


@pytest.mark.parametrize(
    ("name", "moe", "message"),
    [
        ("DP2 EP2", False, r"DP2 EP2 .*nearest .* is DP2 .*expert_parallel"),
        ("PP2 FIRST1 TP2 EP4 ETP4", None, r"nearest proven one is"),
        ("TP2 ETP4", True, r"ETP > TP.* nearest proven one is TP2 \(TP\)\. Leave out expert_tensor_parallel"),
        ("VPP2", None, r"nearest proven one is .*virtual_pipeline"),
        ("FIRST1", False, r"uneven stages"),
    ],
)
def test_a_layout_that_nobody_proved_is_refused_with_the_nearest(name: str, moe: bool | None, message: str) -> None:
    with pytest.raises(MuaError, match=message):
        check_layout(config(name), moe=moe)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("TP3", r"megatron\.tensor_parallel 3 does not divide the model's 64 attention heads; 2 does"),
        ("TP2 DP2 EP3", r"megatron\.expert_parallel 3 does not divide the model's 128 experts; 2 does"),
        ("DP2 EP4", r"expert_parallel x expert_tensor_parallel 4 does not divide the 2 ranks of"),
        ("PP4", r"pipeline_parallel 4 does not divide the model's 94 layers; possible: first_stage_layers 23, last"),
        ("PP8 FIRST11 LAST12", r"94 layers but for the 23 of first_stage_layers 11 and last_stage_layers 12;"),
        ("PP4 VPP2 FIRST23 LAST23", r"megatron\.virtual_pipeline 2 .*the 23 layers .*multiple of 4"),
        ("PP2 FIRST94", r"94 layers but for the 94 of .*first_stage_layers"),
    ],
)
def test_models_that_do_not_divide_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_divisible(MODEL, config(name))


@pytest.mark.parametrize(
    "name", ["PP2", "PP8 FIRST11 LAST11", "PP4 VPP2 FIRST22 LAST24", "PP4 FIRST4", "TP8 DP2 EP16 ETP1"]
)
def test_models_that_divide_are_accepted(name: str) -> None:
    check_divisible(MODEL, config(name))
