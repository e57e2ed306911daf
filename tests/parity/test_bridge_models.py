"""A saved folder loads in transformers with the same values, of every dtype, in one file or several.

One process. Round trips and log-probabilities of every family are in tests/contract/test_family_contract.py, more ranks
than one in test_bridge_layouts.py.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from bridge_support import EXAMPLES, build, start_parallel, write_hf_model
from torch import distributed

from megatron_bridge.convert import load_hf
from megatron_bridge.save import save_hf
from mua.config.schema import MegatronConfig


@pytest.fixture(autouse=True, scope="module")
def single_process():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    start_parallel(MegatronConfig())
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 20_000])
@pytest.mark.parametrize("example", ["qwen2 untied", "qwen3_moe mixed", "glm4_moe biases"])
def test_a_saved_folder_loads_in_transformers(tmp_path, example, max_shard_bytes):
    hf = write_hf_model(EXAMPLES[example], tmp_path / "source", torch.bfloat16)
    chunks = build(tmp_path / "source", MegatronConfig())
    load_hf(chunks, tmp_path / "source")
    save_hf(chunks, tmp_path / "out", source=tmp_path / "source", max_shard_bytes=max_shard_bytes)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 3) == (max_shard_bytes == 20_000)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.dtype == torch.float32, "config.json must name the dtype that was written"
    state = again.state_dict()
    assert all(torch.equal(state[name], tensor.float()) for name, tensor in hf.state_dict().items())
