"""`mua sft` in one process on a tiny model: the validation loss, its independence of packing, leaving in its middle.

What is read is covered by test_trainer_sft_data.py, the command and learning by tests/e2e/test_loop.py, layouts by
tests/parity/test_megatron_layouts.py. Preemption here is asked for at a chosen safe point; real signals are sent by
tests/e2e/test_preempt.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from mua.algorithms.batch import sft_batch
from mua.algorithms.losses import CrossEntropyLoss
from mua.config.schema import ExperimentConfig
from mua.megatron.checkpoint import latest_checkpoint
from mua.observe.metrics_log import read_metrics
from mua.tokens.chat_family import load_family
from mua.trainer.conversations import Conversations, load_sets
from mua.trainer.preempt import Preemption
from mua.trainer.sft import fine_tune, validation_metrics
from mua.types import Json, Segment
from mua.utils.errors import Preempted, RunStopped
from tests.megatron_support import backend
from tests.tokens_fixtures import write_tokenizer

STEPS, EVERY = 5, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer(tmp_path_factory.mktemp("policy") / "model", "qwen3")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    config = transformers.Qwen3Config(vocab_size=len(tokenizer), initializer_range=0.2, **shape, **heads)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of one to five turns, in both forms."""
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    path.write_text("".join(json.dumps(record(i)) + "\n" for i in range(24)))
    return path


def record(i: int) -> Json:
    said = [("human", f"where is order {i}?"), ("gpt", f"hello {i}, " * (1 + i % 4))] * (1 + i % 5)
    if i % 2:
        return {"conversations": [{"from": who, "value": text} for who, text in said]}
    roles = {"human": "user", "gpt": "assistant"}
    return {"messages": [{"role": roles[who], "content": text} for who, text in said]}


def config(model: Path, data: Path, output: Path, **sft: object) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "name": "sft",
            "output": str(output),
            "model": {"path": str(model), "dtype": "float32", "max_length": 512},
            "environment": {"name": "help_desk"},
            "rollout": {"max_tokens": 256},
            "megatron": {"max_tokens_per_microbatch": 512, "threads": 1},
            "optimizer": {"learning_rate": 1e-3},
            "trainer": {"steps": STEPS, "save_every": 2},
            "sft": {"data": str(data), "batch_size": 5, "validation": 0.25, "validate_every": EVERY} | sft,
            "observe": {"tensorboard": False, "progress": False},
        }
    )


def own_loss(folder: Path, conversations: Conversations) -> float:
    """Mean cross-entropy of sampled tokens by transformers, one sequence at a time, summed in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses: list[np.ndarray] = []
    for segment in (s for segments in conversations for s in segments):
        ids = torch.from_numpy(segment.ids.astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        every = torch.nn.functional.cross_entropy(logits.double(), ids[1:], reduction="none").numpy()
        losses.append(every[segment.loss_mask[1:]])
    return float(np.concatenate(losses).mean())


@pytest.mark.parametrize("train_on", ["all", "last"])
def test_the_loss_is_that_of_transformers_however_it_is_packed(
    model: Path, data: Path, tmp_path: Path, train_on: str
) -> None:
    family = load_family(model, thinking=False)
    training, held_out = load_sets(config(model, data, tmp_path, train_on=train_on), family)
    assert len(held_out) == 6
    everything: list[Segment] = [segment for segments in held_out for segment in segments]
    tokens = sum(int(segment.loss_mask.sum()) for segment in everything)
    expected = own_loss(model, held_out)
    for row in (256, 2048):
        with backend(model, max_tokens_per_microbatch=row) as built:
            for size in (1, 4, 100):
                found = validation_metrics(built, held_out, size)  # type: ignore[arg-type]
                assert found["eval/loss"] == pytest.approx(expected, rel=1e-5)
                assert found["eval/perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
                assert found["eval/tokens"] == tokens
            trained = built.train_step(sft_batch(everything), CrossEntropyLoss())
            assert trained["train/loss"] == pytest.approx(expected, rel=1e-5)
            assert validation_metrics(built, held_out, 4)["eval/loss"] != pytest.approx(expected)  # type: ignore[arg-type]
    assert expected != pytest.approx(own_loss(model, training), rel=1e-3)


class LeavingAt(Preemption):
    """Asked to leave from the ``count``-th safe point on."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.left = count

    def check(self) -> None:
        self.left -= 1
        if self.left <= 0:
            self._asked.set()
        super().check()


def evaluations(output: Path) -> dict[int, Json]:
    path = output / "evaluations.jsonl"
    return {line["step"]: line for line in read_metrics(path)} if path.exists() else {}


def lines(output: Path) -> list[Json]:
    """Of all steps, and then of all validations."""
    timed = ("seconds", "memory/")
    found = [*read_metrics(output / "metrics.jsonl"), *evaluations(output).values()]
    return [{name: value for name, value in line.items() if not any(word in name for word in timed)} for line in found]


@pytest.mark.slow
def test_a_run_that_leaves_in_the_middle_of_a_validation_continues_to_the_same_numbers(
    model: Path, data: Path, tmp_path: Path
) -> None:
    straight, broken = (config(model, data, tmp_path / name) for name in ("straight", "broken"))
    fine_tune(straight)
    whole = lines(straight.output)
    assert [line["step"] for line in whole] == [*range(STEPS), 2, 4, 5]
    held_out = evaluations(straight.output)
    assert held_out[2]["eval/loss"] > held_out[5]["eval/loss"] > 0

    # Two checks of the steps, then the second of the validation's two batches.
    with pytest.raises(Preempted):
        fine_tune(broken, LeavingAt(4))
    assert [line["step"] for line in lines(broken.output)] == [0]
    newest = latest_checkpoint(broken.output / "checkpoints")
    assert newest is not None
    assert newest.name == "step_00000002"
    fine_tune(broken)
    assert lines(broken.output) == whole
    assert own_loss(broken.output / "hf", held_out_of(broken)) == pytest.approx(held_out[5]["eval/loss"], rel=1e-5)


def test_weights_that_are_not_finite_end_the_run(model: Path, data: Path, tmp_path: Path) -> None:
    loaded = config(model, data, tmp_path, validation=None)
    # The first step carries the weights out of range; no later one has a gradient.
    wild = loaded.optimizer.model_copy(update={"learning_rate": 1e38, "clip_grad": 0.0})
    trainer = loaded.trainer.model_copy(update={"save_every": 0, "max_skipped_steps": 2})
    with pytest.raises(RunStopped, match="the gradient norm of the last 2 steps with an update, to step 2, was not"):
        fine_tune(loaded.model_copy(update={"optimizer": wild, "trainer": trainer}))
    assert [line["train/skipped"] for line in lines(tmp_path)] == [0, 1, 1]
    newest = latest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == "step_00000003"


def held_out_of(loaded: ExperimentConfig) -> Conversations:
    return load_sets(loaded, load_family(loaded.model.path, thinking=False))[1]
