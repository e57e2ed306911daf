"""After real optimizer steps and a weight sync the engine is the trained policy: token for token, tensor for tensor.

The trainer and its engine run in a process of their own, because Megatron-Core keeps global state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from e2e_support import assert_nothing_left
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mua.algorithms.batch import sft_batch
from mua.algorithms.losses import CrossEntropyLoss
from mua.config.load import load_config
from mua.engine import SamplingParams
from mua.rollout.service import RolloutService
from mua.tokens.chat_family import load_family
from mua.trainer.conversations import load_conversations
from mua.trainer.learner import Learner
from tests.distributed import run_distributed
from tests.forked_engines import WithForkedEngines
from tests.tensor_source import TensorSource

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a busy machine; the fixtures' runs count too

PROMPTS = ("Where is my order?", "I want to cancel my order.", "It is order A3.", "My name is Ada.", "?", "Zoë 🙂")
NEW_TOKENS = 24
STEPS = 3
VERSION = 7


def test_the_engine_is_the_trained_policy(recipe: Path, tmp_path: Path) -> None:
    found = run_distributed(WithForkedEngines(_train_and_sync), 1, recipe, tmp_path, seconds=240)[0]
    assert found["versions"] == [VERSION] * len(PROMPTS)
    assert found["different_before"]
    assert found["different"] == []
    assert found["after_corruption"] == ["model.layers.1.mlp.down_proj.weight"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    for prompt, answer in zip(found["prompts"], found["answers"], strict=True):
        assert _behind_the_likeliest(model, prompt, answer) < 1e-4
        assert len(answer) == NEW_TOKENS or answer[-1] == model.config.eos_token_id
    assert len({tuple(answer) for answer in found["answers"]}) > 1
    assert_nothing_left(tmp_path)


def _behind_the_likeliest(model: Any, prompt: list[int], answer: list[int]) -> float:
    """By how much a logit of the answer is below its step's largest, at most: 0 where it is ``model``'s greedy answer.

    Two tokens that are equally likely but for rounding are both right, and the weights differ a little by machine.
    """
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    taken = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return float((logits.amax(1) - taken).max())


def _train_and_sync(recipe: Path, folder: Path) -> dict[str, Any]:
    """What the engine says before and after a sync of weights that were trained for some steps."""
    config = load_config(recipe, [f"output={folder}/out", "environment.name=help_desk", f"trainer.steps={STEPS}"])
    family = load_family(config.model.path, thinking=False)
    with Learner(config, total_steps=STEPS) as learner, RolloutService(config) as rollouts:
        conversations = load_conversations(config.sft.data, family, config)[:8]
        for _ in range(STEPS):
            learner.train_step(sft_batch([s for segments in conversations for s in segments]), CrossEntropyLoss())
        found: dict[str, Any] = {"different_before": rollouts.verify_weights(learner.weights())}
        rollouts.update_weights(learner.weights(), version=VERSION)
        found["different"] = rollouts.verify_weights(learner.weights())
        found["prompts"] = _prompts(config.model.path)
        generations = [_greedy(rollouts, prompt) for prompt in found["prompts"]]
        found["answers"] = [generation.ids.tolist() for generation in generations]
        found["versions"] = [generation.version for generation in generations]
        learner.save_hf(folder / "exported")
        found["after_corruption"] = rollouts.verify_weights(_corrupted(folder / "exported"))
    return found


def _prompts(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = (
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in PROMPTS
    )
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def _greedy(rollouts: RolloutService, prompt: list[int]) -> Any:
    params = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, stop_token_ids=())
    pool = rollouts._pool
    return rollouts._call(pool.generate(prompt, params, session=str(np.sum(prompt)), deadline_s=60))


def _corrupted(folder: Path) -> TensorSource:
    """The same weights but for one element of one tensor."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] += 1e-3
    return TensorSource(tensors)
