"""The registry of families, by ``model_type``."""

from megatron_bridge.families.dense import LLAMA, QWEN2, QWEN3
from megatron_bridge.families.glm4_moe import GLM4_MOE
from megatron_bridge.families.qwen3_moe import QWEN3_MOE
from megatron_bridge.family import Family, HfConfig
from mua.utils.errors import BridgeError

FAMILIES: dict[str, Family] = {family.model_type: family for family in (QWEN2, QWEN3, QWEN3_MOE, LLAMA, GLM4_MOE)}


def family_of(config: HfConfig) -> Family:
    """The family of a config.json; an unknown one, or a configuration it cannot express, is an error."""
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise BridgeError(f"config.json: model_type={model_type!r} is not supported; known: {', '.join(FAMILIES)}")
    family.check(config)
    return family
