"""Policy and critic as Megatron-Core model chunks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_bridge.convert import check_sizes, load_hf
from megatron_bridge.family import HfConfig
from megatron_bridge.hf_config import read_hf_config
from megatron_bridge.plan import gpt_model_kwargs, transformer_config_kwargs
from megatron_bridge.safetensors_io import SafetensorsFolder
from mua.config.schema import MegatronConfig, ModelConfig
from mua.megatron.architecture import Architecture
from mua.megatron.attention import PackedAttention
from mua.megatron.layouts import check_divisible, check_layout
from mua.megatron.modules import PositionedRotary, RMSNorm, ValueHead
from mua.megatron.moe import GroupedExperts, PackedRouter, prepare_experts
from mua.megatron.parallel import device, virtual_stages
from mua.megatron.settings import start_user_buffers, transformer_config
from mua.utils.errors import BridgeError, ModelError, MuaError, one_line


def layer_spec(config: TransformerConfig, sparse: bool = False) -> ModuleSpec:
    """A transformer layer of the implementation that ``config`` names, with experts where ``sparse``."""
    if config.transformer_impl == "transformer_engine":
        from mua.megatron import transformer_engine_spec  # its classes have Transformer Engine's for bases

        return transformer_engine_spec.layer_spec(config, sparse)
    # Megatron's local transformer layer with this package's norm and attention.
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if sparse else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if sparse:
        submodules = layer.mlp.keywords["submodules"]
        submodules.router = PackedRouter
        submodules.experts = partial(GroupedExperts, **submodules.experts.keywords)
    return spec


def load_chunks(model: ModelConfig, megatron: MegatronConfig, *, critic: bool = False) -> list[GPTModel]:
    """:func:`build_chunks` of the model folder, with its weights; a critic keeps its own output layer.

    Raises:
        ModelError: the model folder cannot be read.
    """
    try:
        hf_config = read_hf_config(model.path)
        with SafetensorsFolder(model.path) as weights:
            check_sizes(hf_config, weights)  # before memory is taken for what config.json says
        try:
            chunks = build_chunks(hf_config, model, megatron, critic=critic)
        except MuaError:
            raise
        except (ValueError, TypeError, AssertionError, ZeroDivisionError) as error:
            raise BridgeError(f"config.json describes a model that cannot be built ({one_line(error)})") from error
        load_hf(chunks, model.path, backbone=critic)
    except BridgeError as error:
        raise ModelError(f"model.path: {error}") from error
    return chunks


def build_chunks(
    hf_config: HfConfig, model: ModelConfig, megatron: MegatronConfig, *, critic: bool = False
) -> list[GPTModel]:
    """Builds this rank's model chunks, randomly initialized, on :func:`mua.megatron.parallel.device`.

    Call :func:`mua.megatron.parallel.initialize` first. There is one chunk, or one a virtual pipeline stage. The
    vocabulary is padded to a multiple of :data:`mua.megatron.architecture.VOCABULARY_MULTIPLE`.

    Args:
        hf_config: the model's config.json.
        model: gives the dtype.
        megatron: gives the layout.
        critic: with a :class:`mua.megatron.modules.ValueHead` in place of the output layer, which is then not tied.
    """
    architecture = Architecture.from_hf(hf_config)
    check_divisible(architecture, megatron)
    check_layout(megatron, moe=architecture.experts > 0)
    config = transformer_config(transformer_config_kwargs(hf_config), model, megatron)
    start_user_buffers(config, megatron)
    gpt = dict(gpt_model_kwargs(hf_config))
    if critic:
        gpt["share_embeddings_and_output_weights"] = False
    frequencies = torch.tensor(gpt.pop("inverse_frequencies"), dtype=torch.float32)
    final_norm: Any = RMSNorm
    if config.transformer_impl == "transformer_engine":
        from mua.megatron.transformer_engine_spec import FinalNorm as final_norm
    virtual = virtual_stages(megatron)
    chunks = []
    for stage in [None] if virtual is None else range(virtual):
        first = get_transformer_layer_offset(config, vp_stage=stage)
        layers = range(first, first + get_num_layers_to_build(config, vp_stage=stage))
        specs = [layer_spec(config, architecture.sparse[layer]) for layer in layers]
        where: dict[str, Any] = {"ignore_virtual": stage is None, "vp_stage": stage}
        settings: dict[str, Any] = gpt | {
            "vocab_size": architecture.padded_vocabulary,
            "parallel_output": True,
            "pre_process": parallel_state.is_pipeline_first_stage(**where),
            "post_process": parallel_state.is_pipeline_last_stage(**where),
            "vp_stage": stage,
        }
        chunk = GPTModel(config, TransformerBlockSubmodules(layer_specs=specs, layer_norm=final_norm), **settings)
        chunk.rotary_pos_emb = PositionedRotary(frequencies)
        chunks.append(chunk.to(device()))
    prepare_experts(chunks, megatron.moe_aux_loss, megatron.moe_z_loss)
    for chunk in chunks if critic else ():
        if chunk.post_process:
            chunk.output_layer = ValueHead(chunk)
    return chunks
