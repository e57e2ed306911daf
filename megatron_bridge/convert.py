"""Load a Hugging Face folder into a distributed model; what of a folder fits a model, and what does not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_bridge.families import family_of
from megatron_bridge.family import HfConfig
from megatron_bridge.hf_config import head_size, need, read_hf_config
from megatron_bridge.hf_folder import verify_hf_folder
from megatron_bridge.plan import TensorSpec, as_matrix, attach_hf_config, plan_model
from megatron_bridge.safetensors_io import SafetensorsFolder
from mua.utils.checksums import NAME as CHECKSUMS
from mua.utils.collective import together
from mua.utils.errors import BridgeError

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_LM_HEAD = "lm_head.weight"
_EMBED_TOKENS = "model.embed_tokens.weight"
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


@torch.no_grad()
def load_hf(
    chunks: Sequence[GPTModel], folder: Path, *, backbone: bool = False, head: bool = False, verify: bool = True
) -> None:
    """Fill the parameters of ``chunks`` from ``folder``; collective over the ranks of ``ModelPlan.group``.

    With ``backbone`` the output layer of both is left alone, see :func:`attach_hf_config`; with ``head`` too, the value
    head of a critic's checkpoint is loaded.

    Every rank reads its own rows and nothing is communicated but names. Values are cast to the parameter's
    dtype; padded vocabulary rows become zero. An optimizer that already copied the parameters must copy them
    again (``optimizer.reload_model_params()``).

    A folder with checksums is first compared with them, of which every rank of the group takes a share, unless
    ``verify`` is false.

    Raises BridgeError, on every rank alike, for a parameter without a source, a tensor without a use, a tensor
    that is missing, any difference in shape, values that are no finite numbers, and bytes that were not written so.
    """
    attach_hf_config(chunks, read_hf_config(folder), backbone=backbone)
    plan = plan_model(chunks)
    with together(plan.group), SafetensorsFolder(folder) as checkpoint:
        wanted = [spec for parameter in plan.exported(head=head) for spec in parameter.sources()]
        check_coverage(wanted, checkpoint, plan.hf_config, backbone=backbone)
        if verify and (folder / CHECKSUMS).exists():
            verify_hf_folder(folder, plan.group.rank(), plan.group.size())
        for parameter in plan.parameters:
            if parameter.name in plan.local and (head or not parameter.head):
                shard, filled = as_matrix(plan.local[parameter.name].detach()), 0
                for block in parameter.packing.shard_blocks(len(parameter.owners), plan.shard[parameter.name]):
                    filled = block.shard_row + block.rows
                    target = shard[block.shard_row : filled]
                    checkpoint.read(block.source, block.source_row, block.source_col, target)
                shard[filled:].zero_()


def check_coverage(
    specs: Sequence[TensorSpec], checkpoint: SafetensorsFolder, hf_config: HfConfig, *, backbone: bool = False
) -> None:
    """Raise BridgeError unless ``checkpoint`` holds exactly ``specs``.

    It may also hold a copy of a tied output layer (any output layer, if the specs are those of a ``backbone``), and
    what the family declares as extras.
    """
    family, tied = family_of(hf_config), bool(hf_config.get("tie_word_embeddings", False))
    wanted = {spec.name: spec for spec in specs}
    missing = [name for name in wanted if name not in checkpoint.names]
    if missing:
        raise BridgeError(f"{checkpoint.folder} lacks {_listed(missing)}, which the model needs")
    unused = [name for name in checkpoint.names if name not in wanted]
    if (tied or backbone) and _LM_HEAD in unused:
        # Some published checkpoints store the tied output layer as well; it may be dropped only if it is equal.
        if not backbone and not checkpoint.equal(_LM_HEAD, _EMBED_TOKENS):
            raise BridgeError(
                f"{checkpoint.folder}: config.json ties the embeddings, but {_LM_HEAD} differs from {_EMBED_TOKENS}; "
                "set tie_word_embeddings to false"
            )
        unused.remove(_LM_HEAD)
    extras = family.extras(hf_config)
    unused = [name for name in unused if not any(re.fullmatch(pattern, name) for pattern in extras)]
    if unused:
        raise BridgeError(f"{checkpoint.folder} has {_listed(unused)}, which no parameter of the model takes")
    for name, spec in wanted.items():
        found = checkpoint.entry(name).shape
        if found != spec.shape:
            raise BridgeError(
                f"{checkpoint.entry(name).path}: {name} has shape {list(found)}, the model needs {list(spec.shape)}"
            )


def check_sizes(hf_config: HfConfig, checkpoint: SafetensorsFolder) -> None:
    """Raise BridgeError where config.json and the weights are of different models, before either is believed.

    The rest is told by :func:`check_coverage`, which needs the model that config.json describes.
    """
    heads, layers = head_size(hf_config), need(hf_config, "num_hidden_layers")
    rows = {
        "embed_tokens": need(hf_config, "vocab_size"),
        "self_attn.q_proj": need(hf_config, "num_attention_heads") * heads,
        "self_attn.k_proj": need(hf_config, "num_key_value_heads") * heads,
        "mlp.gate_proj": need(hf_config, "intermediate_size"),
    }
    for name in checkpoint.names:
        entry = checkpoint.entry(name)
        expected = next((rows[part] for part in rows if name.endswith(f"{part}.weight")), None)
        if expected is not None and entry.shape != (expected, need(hf_config, "hidden_size")):
            raise BridgeError(
                f"{entry.path}: {name} has shape {list(entry.shape)}, config.json says "
                f"{[expected, need(hf_config, 'hidden_size')]}"
            )
    if not any(name.startswith(f"model.layers.{layers - 1}.") for name in checkpoint.names):
        raise BridgeError(f"{checkpoint.folder} lacks layer {layers - 1}, config.json says num_hidden_layers={layers}")
    key = next((key for key in _EXPERT_KEYS if hf_config.get(key)), None)
    if key is not None and not any(f".mlp.experts.{hf_config[key] - 1}." in name for name in checkpoint.names):
        raise BridgeError(
            f"{checkpoint.folder} lacks expert {hf_config[key] - 1}, config.json says {key}={hf_config[key]}"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
