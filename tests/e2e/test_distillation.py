"""On-policy distillation with a real teacher: SGLang serves the tuned policy, a random one learns from it.

Covers that log-probabilities over HTTP are the model's own, that a teacher with another tokenizer is refused before
anything starts, and that a run's batches hold what the teacher said. Does not cover that a policy comes nearer to its
teacher (the expected gradient is tested in tests/unit/test_algorithms_distillation.py), or CUDA.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from e2e_support import Workshop, metrics_of, mua, refused, running, until

from mua.config.schema import DistillationConfig
from mua.engine.engine_handle import EngineClient
from mua.engine.server import free_port
from mua.rollout.teacher import Teacher
from mua.store.traces import read_traces
from mua.tokens.chat_family import load_family
from mua.types import Group, Outcome, Provenance, Segment, Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 2
LEARNING = (
    f"trainer.steps={STEPS}", "trainer.save_every=0", "algorithm.group_size=8", "algorithm.groups_per_step=3",
    "optimizer.learning_rate=1.0e-4", "megatron.max_tokens_per_microbatch=4096", "rollout.max_turns=2",
    "rollout.max_tokens=160",
)  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tuned: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Address and key of the fine-tuned policy, as :class:`DistillationConfig` names them."""
    folder = tmp_path_factory.mktemp("teacher")
    address, port = folder / "address", free_port()
    small = ["--mem-fraction-static=0.2", "--max-total-tokens=32768", "--dtype=float32", "--context-length=512"]
    extra = [f"--extra={flag}" for flag in small]
    with running(
        "serve", tuned / "hf", address, f"--port={port}", "--name=t", *extra, cwd=folder, own_engine=True
    ) as process:
        until(address.exists, process, "the address")
        told = dict(line.split("=", 1) for line in address.read_text().splitlines())
        yield {"base_url": f"http://127.0.0.1:{port}", "api_key": told["MUA_USER_API_KEY"]}
        process.terminate()
        assert process.wait(60) == 0


async def test_the_server_tells_the_models_own_log_probabilities(teacher: dict[str, str], tuned: Path) -> None:
    """Against transformers on the same weights, for sampled tokens with others between them."""
    import torch
    from transformers import AutoModelForCausalLM

    codec = load_family(tuned / "hf", thinking=False).codec
    ids = np.random.default_rng(0).integers(3, 200, 60).astype(np.int32)
    ids[25] = codec.vocabulary_size - 1
    provenance = np.full(60, Provenance.USER, dtype=np.uint8)
    provenance[20:30] = provenance[40:50] = Provenance.SAMPLED
    zeros = np.zeros(60, dtype=np.int32)
    segment = Segment(ids, provenance, zeros.astype(np.float32), zeros, zeros)
    members = [Trajectory("t", 0, i, [segment], [0.0], 0.0, False, Outcome.USER_STOP) for i in range(4)]
    asked = Teacher(DistillationConfig.model_validate(teacher), codec)
    await asked.meet()
    scored = await asked.scored(Group(0, "t", members))
    await asked.close()
    model = AutoModelForCausalLM.from_pretrained(tuned / "hf", dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.from_numpy(ids).long()[None]).logits[0].log_softmax(-1)
    own = logprobs[:-1].gather(1, torch.from_numpy(ids[1:]).long()[:, None])[:, 0].numpy()
    sampled = provenance == Provenance.SAMPLED
    for member in scored.trajectories:
        found = member.segments[0].teacher_logprobs
        assert found is not None
        np.testing.assert_allclose(found[sampled], own[sampled[1:]], atol=2e-5)
        assert not found[~sampled].any()


async def test_sglang_calls_the_last_id_of_its_vocabulary_0(teacher: dict[str, str], tuned: Path) -> None:
    """When this fails, the exception in ``mua.rollout.teacher.parse_logprobs`` can go."""
    last = load_family(tuned / "hf", thinking=False).codec.vocabulary_size - 1
    body = {
        "input_ids": [5, last, 6], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True,
        "logprob_start_len": 0,
    }  # fmt: skip
    client = EngineClient(teacher["base_url"], "the teacher", teacher["api_key"])
    answer = await client.call("/generate", body, timeout=60)
    await client.close()
    assert [pair[1] for pair in answer["meta_info"]["input_token_logprobs"]] == [5, 0, 6]


def test_a_run_is_scored_by_its_teacher(workshop: Workshop, teacher: dict[str, str], tmp_path: Path) -> None:
    distillation = ["advantage=none", f"distillation={json.dumps(teacher | {'only': True, 'concurrency': 8})}"]
    mua("train", workshop.recipe, *LEARNING, *(f"algorithm.{key}" for key in distillation), cwd=tmp_path)
    lines = metrics_of(tmp_path / "out")
    assert all(line["train/opd_reverse_kl_k3"] > 0 for line in lines)
    assert all(line["engine/teacher/retries"] == 0 and line["engine/teacher/requests"] >= 24 for line in lines)
    assert all(line["train/fresh/train_rollout_logprob_abs_diff"] < 1e-3 for line in lines)
    trajectory = next(read_traces(tmp_path / "out" / "traces"))
    assert trajectory.segments[0].teacher_logprobs is not None
    assert (trajectory.segments[0].teacher_logprobs[trajectory.segments[0].loss_mask] < 0).all()


def test_a_teacher_with_another_tokenizer_is_refused(
    workshop: Workshop, teacher: dict[str, str], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    from workbench.tokenizer import train_tokenizer

    other = tmp_path / "other"
    AutoModelForCausalLM.from_pretrained(workshop.model).save_pretrained(other)
    train_tokenizer([workshop.conversations.read_text()[:20000]], other, vocab_size=512)
    line = refused(
        "train", workshop.recipe, f"model.path={other}",
        f"algorithm.distillation={json.dumps(teacher | {'only': True})}", cwd=tmp_path,
    )  # fmt: skip
    assert "algorithm.distillation.base_url" in line
    assert "another tokenizer" in line
