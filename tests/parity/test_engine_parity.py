"""The engine against transformers on the same float32 weights: greedy ids, log-probabilities, weight updates.

Real SGLang on CPU, one server for the module's tests. Not covered: bfloat16, MoE, tensor parallelism, GPU.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_fixtures import STOP_ID, VOCAB
from safetensors.torch import load_file

from mua.engine import SamplingParams
from mua.engine.pool import EnginePool
from mua.utils.errors import EngineError
from tests.tensor_source import TensorSource

pytestmark = pytest.mark.asyncio(loop_scope="session")

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=32, stop_token_ids=(STOP_ID,))


def prompts(n: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(5, VOCAB, size=generator.integers(3, 40)).tolist() for _ in range(n)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def greedy(folder: Path, prompt: list[int], n: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.generate(torch.tensor([prompt]), max_new_tokens=n, do_sample=False)[0, len(prompt) :].tolist()


def token_logprobs(folder: Path, prompt: list[int], ids: list[int], temperature: float) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()


async def load(pool: EnginePool, folder: Path) -> int:
    version = pool.version + 1
    await pool.update_weights(TensorSource(weights(folder)), version)
    return version


async def test_greedy_ids_equal_transformers(engine_pool: EnginePool, tiny_qwen3_folder: Path) -> None:
    version = await load(engine_pool, tiny_qwen3_folder)
    work = [engine_pool.generate(p, GREEDY, session=str(i), deadline_s=60) for i, p in enumerate(prompts(8))]
    for prompt, found in zip(prompts(8), await asyncio.gather(*work), strict=True):
        assert found.ids.tolist() == greedy(tiny_qwen3_folder, prompt, 32)
        assert found.version == version


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_sampled_logprobs_equal_transformers(
    engine_pool: EnginePool, tiny_qwen3_folder: Path, temperature: float
) -> None:
    await load(engine_pool, tiny_qwen3_folder)
    params = SamplingParams(temperature=temperature, max_new_tokens=40, stop_token_ids=(STOP_ID,), top_p=0.95)
    for prompt in prompts(4, seed=1):
        found = await engine_pool.generate(prompt, params, session="s", deadline_s=60)
        expected = token_logprobs(tiny_qwen3_folder, prompt, found.ids.tolist(), temperature)
        assert len(found.logprobs) == len(found.ids) > 0
        np.testing.assert_allclose(found.logprobs, expected, atol=1e-4)


def penalized(folder: Path, prompt: list[int], ids: list[int], params: SamplingParams) -> np.ndarray:
    """Log-probabilities ``[n, vocabulary]`` of the distribution that ``RolloutConfig.sampling`` names for penalties."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    counts = torch.zeros_like(logits)
    for place in range(1, len(ids)):
        counts[place] = counts[place - 1]
        counts[place, ids[place - 1]] += 1
    logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    return torch.log_softmax(logits / params.temperature, -1).numpy()


async def test_penalized_logprobs_are_of_the_distribution_that_trajectories_name(
    engine_pool: EnginePool, tiny_qwen3_folder: Path
) -> None:
    """The ids repeat under a negative penalty, so that counts above one and both penalties show."""
    await load(engine_pool, tiny_qwen3_folder)
    seen = 0
    for presence, frequency in ((1.5, 0.5), (-2.0, -0.5)):
        params = SamplingParams(0.7, 40, (), presence_penalty=presence, frequency_penalty=frequency)
        for prompt in prompts(3, seed=2):
            found = await engine_pool.generate(prompt, params, session="s", deadline_s=60)
            ids = found.ids.tolist()
            seen += len(ids) - len(set(ids))
            expected = penalized(tiny_qwen3_folder, prompt, ids, params)[np.arange(len(ids)), ids]
            np.testing.assert_allclose(found.logprobs, expected, atol=2e-4)
            plain = token_logprobs(tiny_qwen3_folder, prompt, ids, params.temperature)
            assert np.abs(found.logprobs - plain).max() > 0.1, "the penalty does not show in the log-probabilities"
    assert seen > 20


async def test_min_p_cuts_what_is_drawn_and_not_what_is_reported(
    engine_pool: EnginePool, tiny_qwen3_folder: Path
) -> None:
    await load(engine_pool, tiny_qwen3_folder)
    wide = SamplingParams(2.0, 60, ())
    rare = 0
    for min_p in (0.0, 0.5):
        for prompt in prompts(3, seed=3):
            found = await engine_pool.generate(prompt, replace(wide, min_p=min_p), session="s", deadline_s=60)
            ids = found.ids.tolist()
            every = penalized(tiny_qwen3_folder, prompt, ids, wide)
            own = every[np.arange(len(ids)), ids]
            np.testing.assert_allclose(found.logprobs, own, atol=2e-4)
            below = own < every.max(-1) + np.log(0.5) - 1e-3
            if min_p:
                assert not below.any()
            else:
                rare += below.sum()
    assert rare > 20, "nothing is below the cut without min_p either"


async def test_update_changes_the_policy_and_its_version(
    engine_pool: EnginePool, tiny_qwen3_folder: Path, other_qwen3_folder: Path
) -> None:
    await load(engine_pool, tiny_qwen3_folder)
    prompt = prompts(1)[0]
    before = await engine_pool.generate(prompt, GREEDY, session="s", deadline_s=60)
    report = await engine_pool.update_weights(TensorSource(weights(other_qwen3_folder)), engine_pool.version + 1)
    after = await engine_pool.generate(prompt, GREEDY, session="s", deadline_s=60)
    assert before.ids.tolist() == greedy(tiny_qwen3_folder, prompt, 32)
    assert after.ids.tolist() == greedy(other_qwen3_folder, prompt, 32) != before.ids.tolist()
    assert after.version == engine_pool.version
    assert set(after.versions.tolist()) == {engine_pool.version}
    assert after.cached_tokens == 0, "the prefix cache of the old weights was kept"
    assert report.tensors == len(weights(other_qwen3_folder))
    assert report.buckets == 1
    assert report.bytes == sum(tensor.nbytes for tensor in weights(other_qwen3_folder).values())


@pytest.mark.slow
@pytest.mark.parametrize("released", [False, True], ids=["beside the trainer", "memory given back meanwhile"])
async def test_running_requests_survive_an_update(
    engine_pool: EnginePool, tiny_qwen3_folder: Path, other_qwen3_folder: Path, released: bool
) -> None:
    """With memory given back, as where groups are carried over (algorithm.refill.carry_versions)."""
    old = await load(engine_pool, tiny_qwen3_folder)
    params = SamplingParams(temperature=1.0, max_new_tokens=1200, stop_token_ids=())
    prompt = prompts(1)[0]
    running = [
        asyncio.create_task(engine_pool.generate(prompt, params, session=str(i), deadline_s=120)) for i in range(6)
    ]
    while engine_pool.metrics()["engine/running"] < 6:
        await asyncio.sleep(0.01)
    # Answered behind them and beside them: they have begun, however slow the engine is.
    await engine_pool.generate(prompt, replace(params, max_new_tokens=8), session="7", deadline_s=120)
    config = engine_pool.config
    if released:
        engine_pool.config = config.model_copy(update={"memory_saver": True})
        await engine_pool.release_memory(["kv_cache", "weights"])
        assert engine_pool.pauses.seconds > 0
        await engine_pool.resume_memory(["weights"])
    new = await load(engine_pool, other_qwen3_folder)
    if released:
        assert not all(request.done() for request in running)
        await engine_pool.resume_memory(["kv_cache"])
        engine_pool.config = config
    for found in await asyncio.gather(*running):
        switch = int(np.argmax(found.versions == new)) if found.version == new else len(found.ids)
        assert (found.versions[:switch] == old).all()
        assert (found.versions[switch:] == new).all()
        for folder, part in ((tiny_qwen3_folder, slice(0, switch)), (other_qwen3_folder, slice(switch, None))):
            ids = found.ids.tolist()
            expected = token_logprobs(folder, prompt, ids, 1.0)[part]
            np.testing.assert_allclose(found.logprobs[part], expected, atol=1e-4)
    assert any(set(task.result().versions.tolist()) == {old, new} for task in running)


async def test_verify_names_a_corrupted_tensor(engine_pool: EnginePool, other_qwen3_folder: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors = weights(other_qwen3_folder)
    await load(engine_pool, other_qwen3_folder)
    assert await engine_pool.verify_weights(TensorSource(tensors)) == []
    value = tensors[name].flatten()[0]
    tensors[name].flatten()[0] = torch.nextafter(value, value + 1)
    differing = await engine_pool.verify_weights(TensorSource(tensors))
    assert name in differing
    assert all(".qkv" in name or ("self_attn" in other and "layers.0" in other) or other == name for other in differing)


async def test_requests_wait_while_memory_is_released(engine_pool: EnginePool, other_qwen3_folder: Path) -> None:
    """SGLang's own calls run; that memory becomes free needs torch_memory_saver and a GPU."""
    await load(engine_pool, other_qwen3_folder)
    prompt, config = prompts(1)[0], engine_pool.config
    with pytest.raises(EngineError, match=r"engine\.memory_saver: true"):
        await engine_pool.release_memory(["kv_cache"])
    engine_pool.config = config.model_copy(update={"memory_saver": True})
    try:
        await engine_pool.release_memory(["kv_cache", "weights"])
        await engine_pool.release_memory(["kv_cache"])  # it is away already
        assert engine_pool.released
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):  # the request's own deadline stands still meanwhile
                await engine_pool.generate(prompt, GREEDY, session="s", deadline_s=0.1)
        await engine_pool.resume_memory(["weights"])
        await load(engine_pool, other_qwen3_folder)
        await engine_pool.resume_memory(["kv_cache"])
    finally:
        engine_pool.config = config
    assert not engine_pool.released
    found = await engine_pool.generate(prompt, GREEDY, session="s", deadline_s=60)
    assert found.ids.tolist() == greedy(other_qwen3_folder, prompt, 32)
