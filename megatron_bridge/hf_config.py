"""Reading config.json: strict access, and the fields that decoder-only families share."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mua.utils.errors import BridgeError
from mua.utils.strict_json import is_name, read_json_file, shown

if TYPE_CHECKING:
    from torch import Tensor


_COUNTS = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "moe_intermediate_size": 1 << 22,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "max_position_embeddings": 1 << 40,
    "original_max_position_embeddings": 1 << 40,
    "num_experts": 1 << 16,
    "num_local_experts": 1 << 16,
    "n_routed_experts": 1 << 16,
    "num_experts_per_tok": 1 << 16,
}
"""Whole numbers of at least 1, and the most that is believed: far beyond any model, and small enough to count up to."""
_NATURALS = frozenset(
    {"first_k_dense_replace", "n_shared_experts", "n_group", "topk_group", "num_nextn_predict_layers",
     "decoder_sparse_step"}
)  # fmt: skip
"""Whole numbers that may be 0."""
_NUMBERS = frozenset(
    {"rms_norm_eps", "rope_theta", "routed_scaling_factor", "partial_rotary_factor", "factor", "low_freq_factor",
     "high_freq_factor"}
)  # fmt: skip
"""Finite numbers above 0."""
_FLAGS = frozenset(
    {"tie_word_embeddings", "norm_topk_prob", "attention_bias", "mlp_bias", "use_qk_norm", "use_sliding_window"}
)
_TEXTS = frozenset({"model_type", "hidden_act", "dtype", "torch_dtype", "rope_type", "type"})
_SECTIONS = frozenset({"rope_parameters", "rope_scaling"})


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Parse ``folder/config.json``.

    Raises:
        BridgeError: it cannot be read, a key that a family uses has a value of another kind, or two keys say two things
            of rotary positions, the context's length or the dtype.
    """
    path = folder / "config.json"
    try:
        config = read_json_file(path, strict=False)  # as published ones are, some with Infinity
    except FileNotFoundError:
        raise BridgeError(f"{path} does not exist; give a Hugging Face model folder") from None
    except OSError as error:
        raise BridgeError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BridgeError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise BridgeError(f"{path} is not a JSON object")
    sections = [(f"{key}.", config[key]) for key in _SECTIONS if isinstance(config.get(key), dict)]
    for prefix, section in [("", config), *sections]:
        for key, value in section.items():
            if value is not None and key in _KINDS and not _KINDS[key][1](value):
                raise BridgeError(f"{path}: {prefix}{key}={shown(value)} is not {_KINDS[key][0]}")
    for fact in (rotary_parameters, context_length, weights_dtype):  # whoever reads it, and whatever of it
        fact(config)
    return config


def _whole(least: int, most: int) -> tuple[str, Callable[[Any], bool]]:
    return f"a whole number from {least} to {most}", lambda value: type(value) is int and least <= value <= most


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **{key: _whole(1, most) for key, most in _COUNTS.items()},
    **{key: _whole(0, 1 << 16) for key in _NATURALS},
    **{key: ("a finite number above 0", lambda n: type(n) in (int, float) and 0 < n < 1e300) for key in _NUMBERS},
    **{key: ("true or false", lambda value: isinstance(value, bool)) for key in _FLAGS},
    **dict.fromkeys(_TEXTS, ("a short text", is_name)),
    **{key: ("a JSON object", lambda value: isinstance(value, dict)) for key in _SECTIONS},
    "layer_types": ("a list of short texts", lambda value: isinstance(value, list) and all(map(is_name, value))),
    "mlp_only_layers": (
        "a list of whole numbers", lambda value: isinstance(value, list) and all(type(item) is int for item in value)
    ),
}  # fmt: skip
"""What the values of a key are, in words and as a test."""


def need(config: Mapping[str, Any], key: str) -> Any:
    """``config[key]``, which must be present and not null."""
    if config.get(key) is None:
        raise BridgeError(f"config.json has no {key!r}; the model cannot be built without it")
    return config[key]


def refuse_unless(config: Mapping[str, Any], **expected: Any) -> None:
    """Raise unless every key, where present and not null, has the expected value."""
    for key, value in expected.items():
        if config.get(key, value) not in (value, None):
            raise BridgeError(f"config.json: {key}={config[key]!r} is not supported, only {value!r}")


def _agreed(told: Mapping[str, Any]) -> Any:
    """The one value that is told, by place; None where there is none. Raises BridgeError with two that differ."""
    (first, value), *others = [*told.items()] or [("", None)]
    for place, other in others:
        if other != value:
            raise BridgeError(
                f"config.json says two things: {first}={shown(value)} and {place}={shown(other)}, and programs differ "
                "in which they take; keep the one that is meant"
            )
    return value


def rotary_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_type``, ``rope_theta`` and whatever else is said of rotary positions, in ``rope_parameters`` (transformers
    5), ``rope_scaling`` or beside them."""
    sections = {
        name: {key: value for key, value in config[name].items() if value is not None}
        for name in ("rope_parameters", "rope_scaling")
        if config.get(name)
    }
    told: dict[str, dict[str, Any]] = {"rope_type": {}}
    for name, section in sections.items():
        for key in section:
            told.setdefault("rope_type" if key == "type" else key, {})[f"{name}.{key}"] = section[key]
        if not section.keys() & {"type", "rope_type"}:
            told["rope_type"][f"{name}.rope_type"] = "default"
    if len(sections) == 2:  # what one of them leaves out is said nowhere for those who read that one
        for key in told.keys() - {"rope_type", "rope_theta", "partial_rotary_factor"}:
            told[key] |= {f"{name}.{key}": None for name, section in sections.items() if key not in section}
    for key in ("rope_theta", "partial_rotary_factor"):
        told.setdefault(key, {}).update({key: config[key]} if config.get(key) is not None else {})
    return {"rope_type": "default"} | {key: value for key in told if (value := _agreed(told[key])) is not None}


def rotary_fraction(config: Mapping[str, Any]) -> float:
    """The part of every head that is rotated, from its first element on; 1 where nothing is said."""
    return float(rotary_parameters(config).get("partial_rotary_factor", 1.0))


def context_length(config: Mapping[str, Any]) -> int | None:
    """The positions that the model has, before any rotary scaling; None where config.json names none."""
    keys = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
    length: int | None = _agreed({key: config[key] for key in keys if isinstance(config.get(key), int)})
    return length


def weights_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype that the weights are said to have, such as ``bfloat16``."""
    dtype: str | None = _agreed({key: config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None})
    return dtype


def inverse_frequencies(config: Mapping[str, Any], head_dim: int) -> Tensor:
    """Radians per position of every rotated pair, float32 ``[rotated dimensions / 2]`` (Su et al., 2021).

    ``rope_type`` ``llama3`` (Llama 3.1) divides frequencies whose wavelength is beyond the length of pretraining by
    ``factor``, keeps short ones, and blends between. Megatron's own version of it hard-codes all constants but
    ``factor``, so a model must take its frequencies from here.

    Raises:
        BridgeError: for any other scaling.
    """
    import torch

    rotated = int(head_dim * rotary_fraction(config))
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    rope = rotary_parameters(config)
    frequencies = 1.0 / float(need(rope, "rope_theta")) ** exponents
    if (kind := rope["rope_type"]) == "default":
        return frequencies
    if kind != "llama3":
        raise BridgeError(f"config.json: rope_type={kind!r} is not supported, only 'default' and 'llama3'")
    factor, low, high, length = (
        need(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    turns = length * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / factor


def check_decoder(
    config: Mapping[str, Any], *, partial_rotary: bool = False, needed: Collection[str] = (), **expected: Any
) -> None:
    """Refuse what no family here can express: windows, quantized weights, other activations, other rotary scalings.

    Besides what one of them cannot: a config without the ``needed`` keys, or with other values than ``expected``.
    """
    refuse_unless(config, hidden_act="silu", use_sliding_window=False)
    if not partial_rotary and (fraction := rotary_fraction(config)) != 1:
        raise BridgeError(f"config.json: partial_rotary_factor={fraction} is not supported by this family")
    if "quantization_config" in config:
        raise BridgeError("config.json: quantization_config is not supported; give the unquantized model")
    kinds = set(config.get("layer_types") or []) - {"full_attention"}
    if kinds:
        raise BridgeError(f"config.json: layer_types contains {sorted(kinds)[:3]}; only 'full_attention' is supported")
    inverse_frequencies(config, head_dim=4)
    heads, groups = need(config, "num_attention_heads"), need(config, "num_key_value_heads")
    if heads % groups:
        raise BridgeError(f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={groups}")
    for key in needed:
        need(config, key)
    refuse_unless(config, **expected)


def head_size(config: Mapping[str, Any]) -> int:
    """``head_dim``, or what the hidden size leaves for each head."""
    return int(config.get("head_dim") or need(config, "hidden_size") // need(config, "num_attention_heads"))


def decoder_transformer(config: Mapping[str, Any], *, qkv_bias: bool, qk_norm: bool) -> dict[str, Any]:
    """Architecture fields of a pre-norm decoder with RMSNorm, SwiGLU, rotary positions and grouped queries."""
    from torch.nn import functional

    return {
        "num_layers": need(config, "num_hidden_layers"),
        "hidden_size": need(config, "hidden_size"),
        "num_attention_heads": need(config, "num_attention_heads"),
        "num_query_groups": need(config, "num_key_value_heads"),
        "kv_channels": head_size(config),
        "ffn_hidden_size": need(config, "intermediate_size"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": need(config, "rms_norm_eps"),
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": qk_norm,
    }


def experts_transformer(config: Mapping[str, Any], *, experts: int, sparse_layers: Collection[int]) -> dict[str, Any]:
    """Architecture fields of routed experts: their number, and which layers have them; the router is in float32.

    Every chosen expert sees every token (no capacity). Balancing losses are the trainer's.
    """
    return {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": need(config, "moe_intermediate_size"),
        "moe_layer_freq": [int(layer in sparse_layers) for layer in range(need(config, "num_hidden_layers"))],
        "moe_router_topk": need(config, "num_experts_per_tok"),
        "moe_router_dtype": "fp32",
    }


def corrected_routing(config: Mapping[str, Any]) -> dict[str, Any]:
    """Architecture fields of a shared expert and of sigmoid routing (DeepSeek-V3, section 2.1.2).

    Experts are chosen by score plus a bias, within the best groups where there are several, and weighted by the score
    alone, normalized over the chosen. Megatron ranks a group by as many of its experts as one token takes from it,
    config.json means two; where these differ the configuration is refused.
    """
    groups, chosen_groups = config.get("n_group") or 1, config.get("topk_group") or 1
    chosen = need(config, "num_experts_per_tok")
    if groups > 1 and chosen // chosen_groups != 2:
        raise BridgeError(
            f"config.json: topk_group={chosen_groups} with num_experts_per_tok={chosen} is not supported, only two "
            "experts a group"
        )
    return {
        "moe_shared_expert_intermediate_size": need(config, "n_shared_experts") * need(config, "moe_intermediate_size"),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": need(config, "routed_scaling_factor"),
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": chosen_groups if groups > 1 else None,
    }
