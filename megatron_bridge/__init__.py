"""Hugging Face checkpoints to and from Megatron-Core models.

One declarative table a model family (``megatron_bridge/families``) gives both directions and every shard::

    config = read_hf_config(folder)
    architecture, gpt = transformer_config_kwargs(config), gpt_model_kwargs(config)
    frequencies = torch.tensor(gpt.pop("inverse_frequencies"))  # for the model's rotary_pos_emb.inv_freq
    TransformerConfig(**architecture, ...), GPTModel(..., **gpt)
    load_hf(chunks, folder)
    for name, tensor in export_hf(chunks): ...
    save_hf(chunks, out, source=folder)

Importing this package loads torch, but not Megatron-Core.
"""

from megatron_bridge.convert import export_hf, hf_tensors, load_hf
from megatron_bridge.errors import BridgeError
from megatron_bridge.hf_config import read_hf_config
from megatron_bridge.hf_folder import verify_hf_folder, write_hf_folder
from megatron_bridge.plan import (
    TensorSpec,
    attach_hf_config,
    gpt_model_kwargs,
    transformer_config_kwargs,
)
from megatron_bridge.save import save_hf

__all__ = [
    "BridgeError",
    "TensorSpec",
    "attach_hf_config",
    "export_hf",
    "gpt_model_kwargs",
    "hf_tensors",
    "load_hf",
    "read_hf_config",
    "save_hf",
    "transformer_config_kwargs",
    "verify_hf_folder",
    "write_hf_folder",
]
