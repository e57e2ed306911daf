"""Parallel layouts: what keeps one from dividing a model, and which are proven.

:func:`problems` is the one list of what divides over a layout; the trainer refuses with its first line, a plan shows
all. The tables are read by the check at start, the tests and ``docs/layouts.md``. Each entry has been run on as many
processes as it names, and gave the loss, gradients, gradient norm and weights of a single process. What an entry stands
for is its pattern: which dimensions are larger than one, and how the experts' lie in the others. Sizes within a pattern
are free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeAlias

from mua.config.schema import MegatronConfig
from mua.megatron.architecture import Architecture
from mua.utils.errors import ConfigError, MuaError

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
_RELATIONS = {
    "uneven": ("uneven stages", "first_stage_layers and last_stage_layers"),
    "ETP<TP": ("ETP < TP", "expert_tensor_parallel"),
    "ETP>TP": ("ETP > TP", "expert_tensor_parallel"),
    "EDP": ("replicated experts", "expert_parallel"),
}
"""In words, and the keys that make it so."""

DENSE = tuple(
    """
    single, TP2, TP4, PP2, PP4, PP2 VPP2, CP2, CP4, DP2,
    TP2 DP2, TP2 PP2, TP2 CP2, PP2 CP2, PP2 DP2, CP2 DP2, PP2 FIRST1, PP4 FIRST2 LAST2, PP2 VPP2 FIRST4,
    TP2 PP2 VPP2, PP2 VPP2 CP2, PP2 VPP2 DP2, TP2 PP2 DP2, TP2 PP2 CP2, TP2 CP2 DP2, PP2 CP2 DP2,
    TP2 PP2 VPP2 DP2, TP2 PP2 VPP2 CP2, PP2 VPP2 CP2 DP2
    """.strip().replace("\n    ", " ").split(", ")
)  # fmt: skip
"""Layouts proven for models without experts."""

MOE = tuple(
    """
    single, TP2, TP2 ETP1, PP2, PP2 VPP2, CP2, DP2,
    DP2 EP2, TP2 EP2 ETP1, CP2 EP2, DP4 EP4, DP4 EP2, PP2 DP2 EP2, PP2 VPP2 DP2 EP2,
    TP2 PP2, TP2 DP2, PP2 DP2, TP2 DP2 EP2, TP2 DP4 EP2, TP2 DP2 EP2 ETP1, TP2 DP2 EP4 ETP1,
    TP2 CP2 EP2, TP2 CP2 EP4 ETP1, TP2 PP2 EP2 ETP1, PP2 CP2 EP2, CP2 DP2 EP2, CP2 DP2 EP4,
    PP2 FIRST1, PP2 VPP2 FIRST4, TP2 PP2 DP2 EP2, TP2 PP2 DP2 EP2 ETP1, TP2 PP2 DP2 EP4 ETP1,
    TP2 PP2 DP2 EP4 ETP1 FIRST1, TP2 PP2 VPP2 DP2 EP2, TP2 PP2 VPP2 DP2 EP4 ETP1,
    TP2 PP2 CP2 EP2, TP2 PP2 CP2 EP4 ETP1, TP2 CP2 DP2 EP2, TP2 CP2 DP2 EP4 ETP1, TP2 CP2 DP2 EP8 ETP1,
    PP2 CP2 DP2 EP2, PP2 CP2 DP2 EP4, PP2 DP4 EP2
    """.strip().replace("\n    ", " ").split(", ")
)  # fmt: skip
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
    if "EP" in found and config.world_size // config.pipeline_parallel > config.expert_parallel * expert_tensor:
        found.add("EDP")
    return frozenset(found)


def in_words(found: Pattern) -> str:
    """A pattern in words, dimensions first."""
    order = [*_SHORT, *_RELATIONS]
    words = [_RELATIONS[part][0] if part in _RELATIONS else part for part in sorted(found, key=order.index)]
    return " x ".join(words) or "a single process"


@cache
def _proven(moe: bool | None) -> Mapping[Pattern, str]:
    tables = {None: (*DENSE, *MOE), False: DENSE, True: MOE}[moe]
    return {pattern(MegatronConfig(**sizes(name))): name for name in reversed(tables)}


def is_proven(config: MegatronConfig, *, moe: bool | None = None) -> bool:
    """Whether runs have proven the layout's pattern, for models with or without experts.

    Uneven stages are a matter of the pipeline alone: they need a proven pipeline with uneven stages and, apart from
    that, a proven pattern.
    """
    asked, proven = pattern(config), _proven(moe)
    even = asked - {"uneven"}
    return even in proven and (even == asked or asked & {"PP", "VPP", "uneven"} in proven)


def check_layout(config: MegatronConfig, *, moe: bool | None = None) -> None:
    """Refuses a layout whose pattern no run has proven, see :func:`is_proven`.

    Args:
        moe: whether the model has experts; None while that is not known.

    Raises:
        MuaError: names the layout, and the nearest proven one.
    """
    if is_proven(config, moe=moe):
        return
    asked, proven = pattern(config), _proven(moe)
    nearest = min(proven, key=lambda known: (len(known ^ asked), sorted(known)))
    keys = _SHORT | {relation: key for relation, (_, key) in _RELATIONS.items()}
    left_out = dict.fromkeys(keys[part] for part in sorted(asked - nearest))
    used = dict.fromkeys(keys[part] for part in sorted(nearest - asked) if keys[part] not in left_out)
    hints = [f"{verb} {' and '.join(of)}" for verb, of in (("leave out", left_out), ("use", used)) if of]
    hint = " and ".join(hints)
    kind = {None: "", False: " of a dense model", True: " of a mixture of experts"}[moe]
    raise MuaError(
        f"megatron: no run has proven the layout {name_of(config)}{kind} ({in_words(asked)}); the nearest proven one "
        f"is {proven[nearest]} ({in_words(nearest)}). {hint[:1].upper()}{hint[1:]}; docs/layouts.md lists all"
    )


def check_divisible(architecture: Architecture, layout: MegatronConfig) -> None:
    """Refuses a layout that does not divide the model.

    Raises:
        ConfigError: the first of :func:`problems`.
    """
    for problem in problems(architecture, layout):
        raise ConfigError(problem)


def problems(architecture: Architecture, layout: MegatronConfig) -> Iterator[str]:
    """What keeps the trainer's layout from dividing the model, a line each: the key, what does not divide, a fix."""
    a, tp, ep = architecture, layout.tensor_parallel, layout.expert_parallel
    etp, ranks = layout.expert_tensor_parallel or tp, layout.world_size // layout.pipeline_parallel
    rows = f"the embedding's {{}} rows (a vocabulary of {a.vocabulary}, padded)"
    yield from head_problems("megatron.tensor_parallel", tp, a)
    yield from undivided("megatron.tensor_parallel", tp, rows, a.padded_vocabulary)
    if not all(a.sparse):
        yield from undivided("megatron.tensor_parallel", tp, "the MLP's width of {}", a.ffn)
    yield from undivided("megatron.tensor_parallel", tp, "the shared expert's width of {}", a.shared_ffn)
    if a.experts:
        both, stage = "megatron.expert_parallel x expert_tensor_parallel", "tensor x context x data parallel"
        yield from undivided("megatron.expert_parallel", ep, "the model's {} experts", a.experts)
        yield from undivided("megatron.expert_tensor_parallel", etp, "an expert's width of {}", a.expert_ffn)
        yield from undivided(both, ep * etp, f"the {{}} ranks of a stage ({stage})", ranks)
    elif ep > 1:
        yield f"megatron.expert_parallel {ep} needs a model with experts; this one has none"
    yield from _stage_problems(a.layers, layout)


def head_problems(key: str, size: int, architecture: Architecture) -> Iterator[str]:
    """What keeps ``size`` ranks from dividing the heads of an attention layer."""
    yield from undivided(key, size, "the model's {} attention heads", architecture.heads)
    heads = architecture.kv_heads
    if heads % size and size % heads:
        yield f"{key} {size} is neither a divisor nor a multiple of the model's {heads} key-value heads"


def undivided(key: str, size: int, what: str, count: int) -> Iterator[str]:
    """A line unless ``size`` divides ``count``, for which ``what`` has a place."""
    if count % size:
        nearest = max(divisor for divisor in range(1, size) if count % divisor == 0)
        yield f"{key} {size} does not divide {what.format(count)}; {nearest} does"


def _stage_problems(layers: int, layout: MegatronConfig) -> Iterator[str]:
    """Every stage needs whole layers, the same number in each of its chunks."""
    stages, chunks = layout.pipeline_parallel, layout.virtual_pipeline or 1
    given = {key: getattr(layout, key) for key in ("first_stage_layers", "last_stage_layers")}
    given = {key: count for key, count in given.items() if count is not None}
    middle, left = stages - len(given), layers - sum(given.values())
    if middle < 0 or (left != 0 if middle == 0 else left <= 0 or left % middle):
        but = f" but for the {sum(given.values())} of {' and '.join(f'{k} {n}' for k, n in given.items())}"
        each = -(-layers // stages)
        ends = layers - each * (stages - 2)
        advice = (
            f"possible: first_stage_layers {ends - ends // 2}, last_stage_layers {ends // 2} (and {each} in each other)"
            if stages > 2 and layers >= stages and ends > 1
            else f"set first_stage_layers and last_stage_layers so that what is left is a multiple of "
            f"{max(middle, 1) * chunks} and each of them a multiple of {chunks}"
        )
        yield (
            f"megatron.pipeline_parallel {stages} does not divide the model's {layers} layers{but if given else ''}; "
            f"{advice}"
        )
        return
    for size in dict.fromkeys([*given.values(), *([left // middle] if middle else [])]):
        if size % chunks:
            yield (
                f"megatron.virtual_pipeline {chunks} does not divide the {size} layers of a stage; set "
                f"first_stage_layers and last_stage_layers to multiples of {chunks} and leave a multiple of "
                f"{max(middle, 1) * chunks}"
            )
