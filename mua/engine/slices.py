"""What engine ranks are handed, and which trainer ranks do it; said alike by a run and by ``mua plan``."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

from megatron_bridge.engine_shards import EngineRanks, engine_parameters
from megatron_bridge.families import family_of
from megatron_bridge.family import HfConfig
from megatron_bridge.plan import PlannedParameter
from megatron_bridge.reshard import Target, engine_slices, whole_tensors
from mua.config.schema import EngineConfig
from mua.utils.errors import ConfigError

_log = logging.getLogger(__name__)
_OTHER_LAYOUT = frozenset(
    {
        "quantization", "torchao_config", "load_format", "enable_dp_attention", "dp_size", "data_parallel_size",
        "pp_size", "pipeline_parallel_size", "moe_a2a_backend", "moe_runner_backend", "enable_eplb",
        "ep_num_redundant_experts", "enable_lora", "moe_dense_tp_size", "enable_dp_lm_head",
    }
)  # fmt: skip
"""Arguments under which an engine keeps parameters otherwise than :mod:`megatron_bridge.engine_shards` says."""
_LEAST_BAND_BYTES = 1 << 16
"""Of a parameter in bands; shorter copies would cost more than their bytes."""
_EXPERT_RANKS = ("ep_size", "expert_parallel_size", "ep")


def engine_target(
    parameters: Sequence[PlannedParameter], hf_config: HfConfig, config: EngineConfig
) -> tuple[Target, bool]:
    """What colocated engine ranks are handed, and whether it is slices, a variant for each rank.

    Args:
        parameters: of the whole model; what is in one bucket comes from as many of their owners as possible.

    Raises:
        ConfigError: slices are asked for and not possible.
        BridgeError: the model does not divide by the engine's ranks.
    """
    specs = [spec for parameter in parameters if not parameter.tied_copy for spec in parameter.sources()]
    extra = {key.replace("-", "_"): value for key, value in config.extra.items()}
    family = family_of(hf_config)
    reason = "engine.load says so" if config.load == "tensors" else ""
    if family.engine is None:
        reason = reason or f"the family {family.model_type!r} has no table of SGLang's parameters"
    if others := sorted(_OTHER_LAYOUT & {key for key, value in extra.items() if value is not False}):
        reason = reason or f"engine.extra.{others[0]} changes how the engine keeps its weights"
    if reason:
        if config.load == "slices":
            raise ConfigError(f"engine.load: slices is not possible: {reason}; set it to auto or tensors")
        _log.info("engines are handed whole tensors: %s", reason)
        return whole_tensors(specs), False
    assert family.engine is not None
    experts = next((int(extra[key]) for key in _EXPERT_RANKS if key in extra), 1)
    ranks = EngineRanks(config.tensor_parallel, experts)
    held = engine_parameters(family.engine, specs, hf_config, ranks)
    owners = len({min(parameter.owners) for parameter in parameters})
    return engine_slices(held, max(config.bucket_bytes // owners, _LEAST_BAND_BYTES)), True


def broadcast_roots(config: EngineConfig, world: int) -> list[int]:
    """Global ranks that broadcast, evenly over pipeline stages and machines."""
    count = min(config.broadcast_roots, world)
    return [world * number // count for number in range(count)]


def share_out(held: Mapping[int, Sequence[int]], sizes: Sequence[int]) -> list[int]:
    """The root of every bucket: the one that holds the most of it, and of those the one with the least to do.

    Args:
        held: of every root the bytes of each bucket that it holds itself.
        sizes: bytes of the buckets.
    """
    duties, found = dict.fromkeys(held, 0), []
    for index, size in enumerate(sizes):
        found.append(max(held, key=lambda rank: (held[rank][index], -duties[rank], -rank)))
        duties[found[-1]] += size
    return found


_ONE_CALL = re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)\.")


def loaded_together(name: str) -> str:
    """A key that tensors share which SGLang fuses within one call of its loader, and would lose apart.

    Those are the two down projections of multi-head latent attention; of the others it takes one at a time.
    """
    return _ONE_CALL.sub(".fused_qkv_a_proj_with_mqa.", name)
