"""Ranks on the meta device: shapes of each rank, and that nothing is left behind.

That the bytes of such a rank equal a real one's is ``tests/parity/test_planned_bytes.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mua.config.schema import MegatronConfig, ModelConfig, OptimizerConfig
from mua.megatron import parallel
from mua.megatron.model import build_chunks
from mua.megatron.optimizer import Optimizer, wrap_data_parallel
from mua.megatron.parallel import meta_rank
from mua.utils.errors import MuaError

ARCHITECTURE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 8, "hidden_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1024,
    "rms_norm_eps": 1e-6, "vocab_size": 1000, "tie_word_embeddings": False, "max_position_embeddings": 4096,
    "rope_theta": 1e6, "hidden_act": "silu",
}  # fmt: skip
LAYOUT = MegatronConfig(tensor_parallel=4, pipeline_parallel=4, data_parallel=64)


def built(layout: MegatronConfig, rank: int) -> tuple[list[torch.nn.Parameter], Optimizer]:
    with meta_rank(layout, rank):
        chunks = build_chunks(ARCHITECTURE, ModelConfig(path=Path("nowhere")), layout)
        wrapped = wrap_data_parallel(chunks, layout)
        optimizer = Optimizer(wrapped, OptimizerConfig(), layout, 10)
        return [p for chunk in chunks for p in chunk.parameters()], optimizer


def test_every_stage_has_its_own_parameters_and_none_has_memory() -> None:
    counts = []
    for rank in (0, 256, 1023):  # of 1024: the first stage, the second, the last
        parameters, _ = built(LAYOUT, rank)
        assert {p.device.type for p in parameters} == {"meta"}
        counts.append(sum(p.numel() for p in parameters))
    hidden, rows = 512, 1024 // 4
    attention = hidden * (128 + 2 * 64 + 128)  # a fourth of the query, key, value and output matrices
    layer = attention + 3 * hidden * 256 + 2 * hidden + 2 * 64
    assert counts == [2 * layer + rows * hidden, 2 * layer, 2 * layer + rows * hidden + hidden]


def fail_as(rank: int) -> None:
    with meta_rank(LAYOUT, rank):
        assert dist.get_rank() == rank
        assert parallel.device().type == "meta"
        raise KeyError


def test_nothing_is_left_behind() -> None:
    from megatron.core import parallel_state  # once mua.megatron is imported, which repairs it

    device, create, random = parallel.device(), parallel_state.create_group, torch.get_rng_state()
    for rank in (0, 7):
        with pytest.raises(KeyError):
            fail_as(rank)
        assert not dist.is_initialized()
        assert not parallel_state.model_parallel_is_initialized()
        assert parallel.device() == device
        assert parallel_state.create_group is create
        assert torch.equal(torch.get_rng_state(), random)


def test_what_is_refused() -> None:
    with pytest.raises(MuaError, match="there is no rank 1024"), meta_rank(LAYOUT, 1024):
        pass
    with meta_rank(LAYOUT, 0), pytest.raises(MuaError, match="process groups of its own"), meta_rank(LAYOUT, 0):
        pass
    assert not dist.is_initialized()
