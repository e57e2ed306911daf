"""The parallel layouts that are proven: one table for the check at start, the tests and ``docs/layouts.md``.

Each entry has been run on as many processes as it names, and gave the loss, gradients, gradient norm and weights of a
single process. What an entry stands for is its pattern: which dimensions are larger than one, and how the experts' lie
in the others. Sizes within a pattern are free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from mua.config.schema import MegatronConfig
from mua.errors import ConfigError, MuaError

Pattern: TypeAlias = frozenset[str]
"""Dimensions by their short names, and relations between them."""

_SHORT = {
    "TP": "tensor_parallel",
    "PP": "pipeline_parallel",
    "VPP": "virtual_pipeline",
    "CP": "context_parallel",
    "DP": "data_parallel",
    "EP": "expert_parallel",
    "ETP": "expert_tensor_parallel",
    "FIRST": "first_stage_layers",
    "LAST": "last_stage_layers",
}
_MEANING = {
    "uneven": "uneven stages",
    "ETP<TP": "ETP < TP",
    "ETP>TP": "ETP > TP",
    "EDP": "replicated experts",
}

DENSE = (
    "single",
    "TP2",
    "TP4",
    "PP2",
    "PP4",
    "PP2 VPP2",
    "CP2",
    "CP4",
    "DP2",
    "TP2 DP2",
    "TP2 PP2",
    "TP2 CP2",
    "PP2 CP2",
    "PP2 DP2",
    "CP2 DP2",
    "PP2 FIRST1",
    "PP4 FIRST2 LAST2",
    "PP2 VPP2 FIRST4",
    "TP2 PP2 VPP2",
    "PP2 VPP2 CP2",
    "PP2 VPP2 DP2",
    "TP2 PP2 DP2",
    "TP2 PP2 CP2",
    "TP2 CP2 DP2",
    "PP2 CP2 DP2",
    "TP2 PP2 VPP2 DP2",
    "TP2 PP2 VPP2 CP2",
    "PP2 VPP2 CP2 DP2",
)
"""Layouts proven for models without experts."""

MOE = (
    "single",
    "TP2",
    "TP2 ETP1",
    "PP2",
    "PP2 VPP2",
    "CP2",
    "DP2",
    "DP2 EP2",
    "TP2 EP2 ETP1",
    "CP2 EP2",
    "DP4 EP4",
    "DP4 EP2",
    "PP2 DP2 EP2",
    "PP2 VPP2 DP2 EP2",
    "TP2 PP2",
    "TP2 DP2",
    "PP2 DP2",
    "TP2 DP2 EP2",
    "TP2 DP4 EP2",
    "TP2 DP2 EP2 ETP1",
    "TP2 DP2 EP4 ETP1",
    "TP2 CP2 EP2",
    "TP2 CP2 EP4 ETP1",
    "TP2 PP2 EP2 ETP1",
    "PP2 CP2 EP2",
    "CP2 DP2 EP2",
    "CP2 DP2 EP4",
    "PP2 FIRST1",
    "PP2 VPP2 FIRST4",
    "TP2 PP2 DP2 EP2",
    "TP2 PP2 DP2 EP2 ETP1",
    "TP2 PP2 DP2 EP4 ETP1",
    "TP2 PP2 DP2 EP4 ETP1 FIRST1",
    "TP2 PP2 VPP2 DP2 EP2",
    "TP2 PP2 VPP2 DP2 EP4 ETP1",
    "TP2 PP2 CP2 EP2",
    "TP2 PP2 CP2 EP4 ETP1",
    "TP2 CP2 DP2 EP2",
    "TP2 CP2 DP2 EP4 ETP1",
    "TP2 CP2 DP2 EP8 ETP1",
    "PP2 CP2 DP2 EP2",
    "PP2 CP2 DP2 EP4",
    "PP2 DP4 EP2",
)
"""Layouts proven for mixture-of-experts models."""


def sizes(name: str) -> dict[str, Any]:
    """The settings of ``MegatronConfig`` that a name such as ``"TP2 PP2 DP2"`` stands for, all of them int."""
    if name == "single":
        return {}
    parts = [part.rstrip("0123456789") for part in name.split()]
    return {_SHORT[short]: int(part[len(short) :]) for short, part in zip(parts, name.split(), strict=True)}


def name_of(config: MegatronConfig) -> str:
    """The inverse of :func:`sizes`: dimensions that are 1, or as their default, are left out."""
    shown = []
    for short, key in _SHORT.items():
        value = getattr(config, key)
        default = None if short in ("FIRST", "LAST") else config.tensor_parallel if short == "ETP" else 1
        if value is not None and value != default:
            shown.append(f"{short}{value}")
    return " ".join(shown) or "single"


def pattern(config: MegatronConfig) -> Pattern:
    """What has to be proven together: dimensions above one, and relations of the experts' dimensions to the others."""
    found = {short for short in ("TP", "PP", "VPP", "CP", "DP", "EP") if (getattr(config, _SHORT[short]) or 1) > 1}
    if config.first_stage_layers is not None or config.last_stage_layers is not None:
        found.add("uneven")
    expert_tensor = config.expert_tensor_parallel or config.tensor_parallel
    if expert_tensor != config.tensor_parallel:
        found.add("ETP<TP" if expert_tensor < config.tensor_parallel else "ETP>TP")
    shared = config.tensor_parallel * config.context_parallel * config.data_parallel
    if "EP" in found and shared > config.expert_parallel * expert_tensor:
        found.add("EDP")
    return frozenset(found)


def check_layout(config: MegatronConfig, *, moe: bool | None = None) -> None:
    """Refuses a layout whose pattern no run has proven.

    Uneven stages are a matter of the pipeline alone: they need a proven pipeline with uneven stages and, apart from
    that, a proven pattern.

    Args:
        moe: whether the model has experts; None while that is not known.

    Raises:
        MuaError: names the layout, and the nearest proven one.
    """
    asked = pattern(config)
    tables = {None: (*DENSE, *MOE), False: DENSE, True: MOE}[moe]
    proven = {pattern(MegatronConfig(**sizes(name))): name for name in reversed(tables)}
    even = asked - {"uneven"}
    pipeline = asked & {"PP", "VPP", "uneven"}
    if even in proven and (even == asked or pipeline in proven):
        return
    nearest = min(proven, key=lambda known: (len(known ^ asked), sorted(known)))
    kind = {None: "", False: " of a dense model", True: " of a mixture of experts"}[moe]
    raise MuaError(
        f"megatron: no run has proven the layout {name_of(config)}{kind} ({describe(asked)}); the nearest proven one "
        f"is {proven[nearest]} ({describe(nearest)}). {_mend(asked, nearest)}; docs/layouts.md lists all"
    )


def check_divisible(architecture: Mapping[str, Any], config: MegatronConfig) -> None:
    """Refuses a layout over which the model's heads, widths, layers or experts do not divide.

    Args:
        architecture: fields of ``TransformerConfig``, from ``megatron_bridge.transformer_config_kwargs``.

    Raises:
        ConfigError: names the key and what does not divide.
    """
    expert_tensor = config.expert_tensor_parallel or config.tensor_parallel
    shared = config.tensor_parallel * config.context_parallel * config.data_parallel
    _divides("tensor_parallel", config.tensor_parallel, "attention heads", architecture["num_attention_heads"])
    _divides("tensor_parallel", config.tensor_parallel, "features of an MLP", architecture["ffn_hidden_size"])
    if experts := architecture.get("num_moe_experts"):
        width = architecture.get("moe_ffn_hidden_size") or architecture["ffn_hidden_size"]
        _divides("expert_parallel", config.expert_parallel, "experts", experts)
        _divides("expert_tensor_parallel", expert_tensor, "features of an expert", width)
        _divides(
            "expert_parallel x expert_tensor_parallel",
            config.expert_parallel * expert_tensor,
            "ranks of tensor_parallel x context_parallel x data_parallel",
            shared,
        )
    groups, tensor = architecture.get("num_query_groups") or architecture["num_attention_heads"], config.tensor_parallel
    if groups % tensor and tensor % groups:
        raise ConfigError(
            f"megatron.tensor_parallel {tensor} and the model's {groups} key-value heads: neither divides the other"
        )
    _check_stages(architecture["num_layers"], config)


def _divides(key: str, size: int, what: str, count: int) -> None:
    if count % size:
        nearest = max(divisor for divisor in range(1, size) if count % divisor == 0)
        raise ConfigError(f"megatron.{key} {size} does not divide the {count} {what}; {nearest} does")


def _check_stages(layers: int, config: MegatronConfig) -> None:
    """Every stage needs whole layers, the same number in each of its chunks."""
    stages, chunks = config.pipeline_parallel, config.virtual_pipeline or 1
    ends = [count for count in (config.first_stage_layers, config.last_stage_layers) if count is not None]
    others, left = stages - len(ends), layers - sum(ends)
    even = left == 0 if others == 0 else left > 0 and left % (others * chunks) == 0
    if stages < len(ends) or not even or any(count % chunks for count in ends):
        given = "".join(
            f", {key} {value}"
            for key in ("first_stage_layers", "last_stage_layers")
            if (value := getattr(config, key)) is not None
        )
        raise ConfigError(
            f"megatron.pipeline_parallel {stages} x virtual_pipeline {chunks}{given}: the model's {layers} layers do "
            f"not divide over the stages; set first_stage_layers and last_stage_layers so that what is left is a "
            f"multiple of {max(others, 1) * chunks} and each of them a multiple of {chunks}"
        )


def describe(found: Pattern) -> str:
    """A pattern in words, dimensions first."""
    order = [*_SHORT, *_MEANING]
    return " x ".join(_MEANING.get(part, part) for part in sorted(found, key=order.index)) or "a single process"


def _mend(asked: Pattern, nearest: Pattern) -> str:
    """Which keys to change to get from one pattern to the other."""
    keys = {
        **_SHORT,
        "uneven": "first_stage_layers and last_stage_layers",
        "ETP<TP": "expert_tensor_parallel",
        "ETP>TP": "expert_tensor_parallel",
        "EDP": "expert_parallel",
    }
    left_out = dict.fromkeys(keys[part] for part in sorted(asked - nearest))
    used = dict.fromkeys(keys[part] for part in sorted(nearest - asked) if keys[part] not in left_out)
    hints = [f"leave out {' and '.join(left_out)}"] if left_out else []
    hints += [f"use {' and '.join(used)}"] if used else []
    text = " and ".join(hints)
    return text[:1].upper() + text[1:]
