"""Every family's examples as tiny Hugging Face models, the layouts they are run in, and Megatron models of both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, distributed

from mua.compat import megatron_cpu

megatron_cpu.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import (  # noqa: E402
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)

import mua.megatron.model  # noqa: E402
from megatron_bridge.families import FAMILIES  # noqa: E402
from megatron_bridge.family import Family, HfConfig  # noqa: E402
from megatron_bridge.hf_config import read_hf_config  # noqa: E402
from megatron_bridge.plan import transformer_config_kwargs  # noqa: E402
from mua.config.schema import MegatronConfig, ModelConfig  # noqa: E402
from mua.megatron import layouts  # noqa: E402
from mua.megatron.model import build_chunks  # noqa: E402
from mua.megatron.modules import PackedMicrobatch  # noqa: E402
from mua.megatron.parallel import start_groups  # noqa: E402
from mua.megatron.tiles import gathered_order, zigzag  # noqa: E402

IDS = torch.randint(101, (36,), generator=torch.Generator().manual_seed(2))
"""A sequence for log-probabilities; its length divides by every tensor-parallel size used."""
EXAMPLES: dict[str, HfConfig] = {
    f"{family.model_type} {variant}": config
    for family in FAMILIES.values()
    for variant, config in family.examples.items()
}
"""Every example of every family in the registry."""

DENSE_LAYOUTS = (
    "single", "TP2", "TP4", "PP2", "PP2 VPP2", "PP4", "PP2 FIRST1", "CP2", "DP2", "TP2 PP2", "TP2 PP2 VPP2", "TP2 CP2",
    "TP2 DP2", "TP4 PP2", "TP2 PP4", "TP2 PP2 DP2",
)  # fmt: skip
"""Layouts for every model; experts are divided like the other layers."""
EXPERT_LAYOUTS = (
    "TP2 ETP1", "DP2 EP2", "DP2 ETP2", "TP2 EP2 ETP1", "CP2 EP2", "DP4 EP4", "DP4 EP2", "PP2 DP2 EP2",
    "PP2 VPP2 DP2 EP2", "TP2 DP2 EP2 ETP2", "TP2 PP2 EP2 ETP1", "TP2 PP2 DP2 EP2 ETP2", "TP2 PP2 DP2 EP4 ETP1",
    "DP8 EP8",
)  # fmt: skip
"""Layouts for models with experts, which lie in the other dimensions in their own way."""
LAYOUTS = DENSE_LAYOUTS + EXPERT_LAYOUTS


def layout(name: str) -> MegatronConfig:
    """``"TP2 PP2"`` as a configuration."""
    return MegatronConfig(**layouts.sizes(name))


def layouts_of(config: HfConfig) -> tuple[str, ...]:
    """The layouts that a model with this configuration is run in."""
    return LAYOUTS if "num_moe_experts" in transformer_config_kwargs(config) else DENSE_LAYOUTS


def write_hf_model(config: HfConfig, folder: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """Save a random model whose norms, biases and routers are perturbed, so that none of them can be lost unseen."""
    torch.manual_seed(11)
    hf_config = transformers.AutoConfig.for_model(**config, initializer_range=0.2)
    hf = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager")
    with torch.no_grad():
        for tensor in hf.state_dict().values():
            if tensor.ndim == 1:
                tensor.add_(torch.randn_like(tensor) * 0.3)
        for parameter in hf.parameters():  # not the buffers, which are float32 in published checkpoints
            parameter.data = parameter.data.to(dtype)
    hf.eval().save_pretrained(folder)
    return hf


def hf_log_probabilities(hf: transformers.PreTrainedModel) -> Tensor:
    """float32 ``[tokens, vocabulary]`` of ``IDS`` by transformers."""
    with torch.no_grad():
        return hf(IDS[None]).logits[0].float().log_softmax(-1)


OF_FUSED = re.compile(r"layer_norm_weight|mlp\.experts\.linear_fc")
"""Lines of a family's table for names that only Transformer Engine's layers have."""


def documented_family() -> Family:
    """The family that docs/add-a-family.md writes."""
    (code,) = re.findall(
        r"```python\n(.*?)```",
        (Path(__file__).parents[1] / "docs" / "add-a-family.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert len(code.splitlines()) < 60, "the page promises fewer than 60 lines"
    names: dict[str, Any] = {}
    exec(code, names)
    (family,) = (value for value in names.values() if isinstance(value, Family))
    return family


def start_parallel(megatron: MegatronConfig) -> None:
    """Megatron's process groups over those of torch, for layouts that training does not offer yet as well."""
    start_groups(megatron, 5)


def build(folder: Path, megatron: MegatronConfig, dtype: str = "float32") -> list[Any]:
    """Random Megatron chunks of the model in ``folder``, every element NaN so that none can stay unset."""
    config = read_hf_config(folder)
    model = ModelConfig(path=folder, dtype=dtype, max_length=512)
    # Weights are proven here in more layouts than training elsewhere, so that training's table does not count.
    with mock.patch.object(mua.megatron.model, "check_layout", create=True):
        chunks = build_chunks(config, model, megatron)
    with torch.no_grad():
        for chunk in chunks:
            for tensor in stored_tensors(chunk).values():
                tensor.fill_(torch.nan)
    return chunks


def stored_tensors(chunk: Any) -> dict[str, Tensor]:
    """Parameters and persistent buffers; Megatron's state also names extra states, which are empty."""
    return {name: tensor for name, tensor in chunk.state_dict().items() if not name.endswith("_extra_state")}


def log_probabilities(chunks: Sequence[Any], ids: Tensor) -> Tensor | None:
    """float32 ``[tokens, vocabulary]`` of one sequence, int64 ``[tokens]``, on the last stage; None on the others.

    Walks the stages in the order of their layers with plain sends, so that it depends on no schedule.
    """
    length, cp = len(ids), parallel_state.get_context_parallel_group()
    mine = torch.from_numpy(zigzag([length], cp.size(), cp.rank()))
    order = torch.from_numpy(gathered_order([length], cp.size()))
    positions, ids = mine, ids[mine]
    row = PackedMicrobatch(lengths=(length,), positions=positions, order=order)
    pp, stage = parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_pipeline_model_parallel_rank()
    stages = distributed.get_process_group_ranks(pp)
    config = chunks[0].config
    rows = len(ids) // (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    output = torch.empty(rows, 1, config.hidden_size)
    for index in range(len(chunks) * len(stages)):
        if index % len(stages) != stage:
            continue
        chunk = chunks[index // len(stages)]
        if index > 0 and len(stages) > 1:
            distributed.recv(output, stages[(stage - 1) % len(stages)])
        chunk.set_input_tensor(output)
        with torch.no_grad():
            result = chunk(ids[None], positions[None], None, packed_seq_params=row)
        if index + 1 == len(chunks) * len(stages):
            logits = gather_from_tensor_model_parallel_region(result)[0, :, : chunk.hf_config["vocab_size"]]
            return gather_from_sequence_parallel_region(logits.float().log_softmax(-1), group=cp)[order]
        distributed.send(result.contiguous(), stages[(stage + 1) % len(stages)])
    return None
