"""The card and the generation settings of an export: from a run's folder, and its configuration.

Not covered: that a run writes them (``tests/e2e/test_best.py``) and that the Hub shows them.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from transformers import GenerationConfig

from mua.config.load import load_config
from mua.megatron.model_card import CARD, GENERATION, exported_texts

INTERVAL = {"eval/test_success": 0.5625, "eval/test_success_low": 0.5, "eval/test_success_high": 0.62}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "models--Qwen--Qwen3-8B/snapshots/abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "eos_token_id": 5}))
    (folder / CARD).write_text("---\nlicense: apache-2.0\nbase_model: Qwen/Qwen3-8B-Base\n---\n# Qwen's own words\n")
    (folder / GENERATION).write_text(json.dumps({"eos_token_id": [3, 5], "temperature": 0.6, "top_k": 20}))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "checkpoints/step_00000004").mkdir(parents=True)
    names = [f"eval/validation_success{end}" for end in ("", "_low", "_high")]
    lines: list[dict[str, Any]] = [{"step": 0, **{name: value / 2 for name, value in INTERVAL.items()}}]
    lines.append({"step": 4, **dict(zip(names, (0.4, 0.3, 0.5), strict=True)), "eval/retail/validation_unscored": 0.0})
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "report.json").write_text(json.dumps({"split": "test", "final": {"step": 4, **INTERVAL}}))
    (folder / "config.yaml").write_text("{}")
    return folder


def exported(base: Path, run: Path, *overrides: str, step: int = 4) -> dict[str, str]:
    config = load_config(Path("demo"), [f"model.path={base}", f"output={run}", *overrides])
    return exported_texts(config, step, {"git": {"commit": "c0ffee", "dirty": True}, "versions": {"mua": "1"}})


def test_the_card_says_what_the_run_measured(base: Path, run: Path) -> None:
    text = exported(base, run)[CARD]
    card = ModelCard(text)
    assert (card.data.base_model, card.data.license) == ("Qwen/Qwen3-8B", "apache-2.0")
    assert card.data.pipeline_tag == "text-generation"
    found = {(one.dataset_name, one.metric_type): one.metric_value for one in card.data.eval_results}
    assert found == {
        ("all domains trained on, validation", "success"): 0.4,
        ("all domains trained on, test", "success"): 0.5625,
    }
    assert "| all domains trained on, test | 0.281 (0.250 to 0.310) | 0.562 (0.500 to 0.620) |" in text
    assert "chosen by success on `validation`" in text
    assert "4 steps in `help_desk`" in text
    assert "24 groups of 8 episodes" in text
    assert "commit `c0ffee`, with changes" in text
    assert "Qwen's own words" not in text
    assert str(run) not in text  # nor any other path of this machine
    assert str(base.parent) not in text


def test_generation_is_as_the_run_evaluates(base: Path, run: Path) -> None:
    sampled = json.loads(exported(base, run)[GENERATION])
    assert (sampled["eos_token_id"], sampled["temperature"], sampled["top_k"]) == ([3, 5], 1.0, 0)
    assert (sampled["do_sample"], sampled["max_new_tokens"]) == (True, 64)
    greedy = json.loads(exported(base, run, "evaluation.temperature=0.0")[GENERATION])
    assert greedy["do_sample"] is False
    assert "temperature" not in greedy
    for settings in (sampled, greedy):
        GenerationConfig.from_dict(settings).validate(strict=True)
    (base / GENERATION).unlink()
    assert json.loads(exported(base, run)[GENERATION])["eos_token_id"] == 5


def test_a_policy_of_an_unevaluated_step_says_so(base: Path, run: Path) -> None:
    text = exported(base, run, step=2)[CARD]
    assert "was not evaluated by its run" in text
    assert not ModelCard(text).data.eval_results


def test_hostile_words_of_a_base_stay_words(base: Path, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    (base / CARD).write_text("---\nlicense: [[[\n---\n")
    (base / GENERATION).write_text('{"eos_token_id": "rm", "pad_token_id": true}')
    (base / "config.json").write_text("[]")
    with caplog.at_level(logging.WARNING):
        texts = exported(base, run, "name='a|b]: <script>`'")
    assert "config.json: cannot be read (no JSON object)" in caplog.text
    assert json.loads(texts[GENERATION]).keys().isdisjoint({"eos_token_id", "pad_token_id"})
    assert ModelCard(texts[CARD]).data.license is None
    assert "\n# a\\|b\\]: \\<script\\>\\`\n" in texts[CARD]
