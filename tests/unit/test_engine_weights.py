"""Buckets and names of the weight sync, and reading of the engine's answers; no server.

Not covered: the receiving side (tests/parity/test_engine_parity.py) and CUDA handles.
"""

from __future__ import annotations

import signal
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import psutil
import pybase64
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bridge.reshard import ALIGNMENT
from mua.compat.shared_weights import shared_buffer
from mua.engine.engine_handle import EnginePlace, parse_generation
from mua.engine.weight_transfer import WeightBucket, engine_name
from mua.utils.errors import EngineError
from tests.tensor_source import TensorSource

HERE = EnginePlace(0, 0)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)


def unpack(bucket: WeightBucket) -> dict[str, torch.Tensor]:
    """What a receiver sees: every tensor as a view of the flat buffer."""
    content = ForkingPickler.loads(pybase64.b64decode(bucket.handles[0][0]))
    flat = content["flattened_tensor"]
    return {
        item.name: flat[item.start_idx : item.end_idx].view(item.dtype).reshape(item.shape)
        for item in content["metadata"]
    }


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.sampled_from(DTYPES)), min_size=1, max_size=12),
    st.integers(256, 4096),
)
def test_buckets_carry_every_tensor_bit_for_bit(shapes: list[tuple[int, torch.dtype]], limit: int) -> None:
    tensors = {f"t{i}": torch.randn(n, 2).mul(100).abs().to(dtype) for i, (n, dtype) in enumerate(shapes)}
    seen: dict[str, torch.Tensor] = {}
    for bucket in TensorSource(tensors, bucket_bytes=limit).buckets([HERE]):
        assert isinstance(bucket, WeightBucket)
        names = [slot.spec.name for slot in bucket.layout.tensors]
        total = sum(-(-tensors[name].nbytes // ALIGNMENT) * ALIGNMENT for name in names)
        assert total <= limit or len(names) == 1
        seen |= {name: tensor.clone() for name, tensor in unpack(bucket).items()}
    assert list(seen) == list(tensors)
    assert all(torch.equal(seen[name], tensors[name]) and seen[name].dtype == tensors[name].dtype for name in tensors)


def test_upstream_shares_new_memory_by_a_private_name() -> None:
    """The day this fails, ``mua/compat/shared_weights.py`` can use the public name."""
    assert hasattr(torch.UntypedStorage, "_new_shared")
    assert not hasattr(torch.UntypedStorage, "new_shared")


def test_upstream_shares_memory_through_a_process_that_outlives_signals_to_a_step() -> None:
    """Slurm's signal reaches it, too, and the rank would abort when it frees its weights."""
    shared_buffer(64, torch.device("cpu"))
    managers = [child for child in psutil.Process().children() if child.name().startswith("torch_shm")]
    blocked = [int(_status(manager.pid, "SigBlk"), 16) for manager in managers]
    assert managers
    for number in (signal.SIGUSR1, signal.SIGTERM):
        assert all(mask >> (number - 1) & 1 for mask in blocked)
        assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, ())  # this process hears it as before


def _status(pid: int, field: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith(field))


@pytest.mark.parametrize(
    ("hugging_face", "engine"),
    [
        ("model.layers.3.self_attn.k_proj.weight", "model.layers.3.self_attn.qkv_proj.weight"),
        ("model.layers.3.self_attn.q_proj.bias", "model.layers.3.self_attn.qkv_proj.bias"),
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.gate_up_proj.weight"),
        ("model.layers.3.mlp.experts.17.gate_proj.weight", "model.layers.3.mlp.experts.w13_weight"),
        ("model.layers.3.mlp.experts.17.down_proj.weight", "model.layers.3.mlp.experts.w2_weight"),
        ("model.layers.3.mlp.down_proj.weight", "model.layers.3.mlp.down_proj.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_engine_names_of_fused_tensors(hugging_face: str, engine: str) -> None:
    assert engine_name(hugging_face) == engine


def answer(**meta: object) -> dict[str, object]:
    fields = {
        "finish_reason": {"type": "length"},
        "weight_version": "4",
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None]],
        "cached_tokens": 3,
    }
    return {"output_ids": [7, 8], "meta_info": fields | meta}


def test_versions_of_tokens_follow_the_spans() -> None:
    found = parse_generation(answer(), "engine 0")
    assert found.versions.tolist() == [3, 4]
    assert (found.version, found.finish, found.cached_tokens) == (4, "length", 3)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (answer(output_token_logprobs=[[-0.5, 7, None]]), "log-probabilities"),
        (answer(output_token_logprobs=[[-0.5, 7, None], [None, 8, None]]), "cannot be read|not finite"),
        (answer(output_token_logprobs=[[-0.5, 7, None], [-1.0, 9, None]]), "log-probabilities"),
        (answer(finish_reason={"type": "surprise"}), "unknown reason"),
        ({"text": "hello"}, "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_broken_answers_are_errors(broken: object, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        parse_generation(broken, "engine 0")
