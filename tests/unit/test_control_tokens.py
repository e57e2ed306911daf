"""Control tokens that a model has never trained: found, started from others on every layout's rows, and watched.

Not here: several ranks, of which each takes the rows that it holds; a real model with this fault (docs/sft.md).
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mua.config.schema import ModelConfig
from mua.megatron.model import load_chunks
from mua.observe.metrics_log import read_metrics
from mua.tokens.chat_family import ChatFamily, load_family
from mua.tokens.codec import content
from mua.trainer.control_tokens import EMBEDDINGS, OUTPUT, control_token_metrics, find_untrained, init_untrained
from mua.trainer.sft import fine_tune
from mua.types import Provenance
from mua.utils.errors import ModelError
from tests.megatron_support import backend
from tests.unit.test_exports import config_of, make_model


def spoil(folder: Path, family: ChatFamily, token: str, *, name: str = EMBEDDINGS, scale: float | None = None) -> None:
    """Make the row of ``token`` one of many that are alike, or ``scale`` times as long."""
    tensors = load_file(folder / "model.safetensors")
    number = family.codec.control[token]
    if scale is None:
        tensors[name][[5, 6, number]] = tensors[name][7].clone()
    else:
        tensors[name][number] *= scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, ChatFamily]:
    folder = make_model(tmp_path / "model", "qwen2.5", "instruct")
    return folder, load_family(folder, thinking=False)


def test_a_whole_model_has_nothing_to_tell(model: tuple[Path, ChatFamily]) -> None:
    assert find_untrained(*model) == ([], {})


@pytest.mark.parametrize(("name", "scale", "told"), [
    (EMBEDDINGS, None, "equals 3 other rows"), (OUTPUT, None, "equals 3 other rows"),
    (EMBEDDINGS, 0.01, "has norm"), (OUTPUT, 0.0, "has norm"),
])  # fmt: skip
def test_a_row_that_was_never_trained_is_named_and_started_anew(
    model: tuple[Path, ChatFamily], name: str, scale: float | None, told: str
) -> None:
    folder, family = model
    spoil(folder, family, "<tool_call>", name=name, scale=scale)
    (note,), starts = find_untrained(folder, family)
    assert f"<tool_call> was never trained: its row of {name} {told}" in note
    number = family.codec.control["<tool_call>"]
    assert {one: [*rows] for one, rows in starts.items()} == {name: [number]}
    matrix = load_file(folder / "model.safetensors")[name]
    spelt = matrix[family.codec.encode([content("<tool_call>", Provenance.USER)])[0].tolist()].mean(dim=0)
    row = starts[name][number]
    torch.testing.assert_close(row / row.norm(), spelt / spelt.norm())
    torch.testing.assert_close(row.norm(), matrix.norm(dim=1).median())
    with backend(folder) as built:
        (chunk,) = built.policy.chunks
        (fresh,) = load_chunks(ModelConfig(path=folder, dtype="float32"), built._config.megatron)
        init_untrained([fresh], ModelConfig(path=folder))
        for tensor, before, of in (
            (fresh.embedding.word_embeddings.weight, chunk.embedding.word_embeddings.weight, EMBEDDINGS),
            (fresh.output_layer.weight, chunk.output_layer.weight, OUTPUT),
        ):  # fmt: skip
            changed = (tensor != before).any(dim=1).nonzero().flatten().tolist()
            assert changed == ([number] if of == name else [])
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: tensors[name][:300]}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="rows, none of them for"):
        find_untrained(folder, family)


def test_fine_tuning_tells_of_it_starts_it_and_logs_its_probability(
    model: tuple[Path, ChatFamily], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, family = model
    for token in ("<tool_call>", "</tool_call>"):
        for name in (EMBEDDINGS, OUTPUT):
            spoil(folder, family, token, name=name)
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"key": "value"}}}
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    sft, reached = {"data": str(tmp_path / "x.jsonl"), "batch_size": 1}, {}
    for start in ("off", "mean"):
        config = config_of(folder, tmp_path / start, sft=sft, optimizer={"learning_rate": 3e-3},
                           trainer={"steps": 6, "save_every": 0})  # fmt: skip
        model_section = config.model.model_copy(update={"init_control_tokens": start})
        config = config.model_copy(update={"model": model_section})
        with caplog.at_level(logging.WARNING):
            fine_tune(config)
        told = [line for line in caplog.messages if "was never trained" in line]
        assert len(told) == 4
        assert all(("set model.init_control_tokens: mean" in line) == (start == "off") for line in told)
        caplog.clear()
        lines = [*read_metrics(config.output / "metrics.jsonl")]
        names = {"im_end", "tool_call", "tool_call_end"}
        assert {n.rpartition("/")[2] for n in lines[0] if "control_token_prob" in n} == names
        reached[start] = [line["train/control_token_prob/tool_call"] for line in lines]
        assert all(0 <= value <= 1 for value in reached[start])
    assert reached["mean"][-1] > reached["mean"][0]


def test_probabilities_are_means_over_what_counts(model: tuple[Path, ChatFamily]) -> None:
    _, family = model
    call, end = (family.codec.control[token] for token in ("<tool_call>", "<|im_end|>"))
    ids, logprobs = (
        np.array([call, 5, call, end, call], np.int32),
        np.log(np.array([0.2, 0.9, 0.4, 1, 0.9], np.float32)),
    )
    mask = np.array([True, True, True, True, False])
    found = control_token_metrics("rollout", family, [(ids, logprobs, mask), (ids[:1], logprobs[:1], ~mask[:1])])
    want = {"rollout/control_token_prob/tool_call": 0.3, "rollout/control_token_prob/im_end": 1.0}
    assert found == pytest.approx(want)
    assert control_token_metrics("rollout", family, []) == {}
