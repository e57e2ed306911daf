"""The card and the generation settings of an export: from a run's folder, from a checkpoint's manifest, from nothing.

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
from mua.config.schema import ExperimentConfig
from mua.megatron.model_card import CARD, GENERATION, ExportedPolicy, exported_texts, generation_config

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


def exported(base: Path, run: Path | None, *overrides: str, step: int = 4) -> ExportedPolicy:
    config = load_config(Path("demo"), [f"model.path={base}", f"output={run or '/secret/place'}", *overrides])
    return ExportedPolicy(config, step, {"git": {"commit": "c0ffee", "dirty": True}, "versions": {"mua": "1"}})


def test_the_card_says_what_the_run_measured(base: Path, run: Path) -> None:
    text = exported_texts(exported(base, run))[CARD]
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


BASE_SAMPLING = {"eos_token_id": [3, 5], "do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}


def generation(base: Path, **keys: object) -> dict[str, Any]:
    """The file that a run with these sections writes; of its configuration nothing else counts."""
    sections = {"name": "x", "output": "x", "model": {"path": str(base)}, "environment": {"name": "help_desk"},
                "rollout": {"max_tokens": 64}, "trainer": {"steps": 1}} | keys  # fmt: skip
    config = ExperimentConfig.model_validate(sections)
    made: dict[str, Any] = json.loads(generation_config(ExportedPolicy(config, 1, {}, (7, 3))))
    GenerationConfig.from_dict(made).validate(strict=True)
    del made["transformers_version"]
    return made


def test_generation_is_the_bases_but_for_what_the_run_chose_and_the_end_of_a_turn(base: Path) -> None:
    (base / GENERATION).write_text(json.dumps(BASE_SAMPLING))
    ended = BASE_SAMPLING | {"eos_token_id": [7, 3, 5]}
    assert generation(base) == ended
    rollout = {"max_tokens": 64, "temperature": 0.9, "top_k": -1, "max_turn_tokens": 99}
    assert generation(base, rollout=rollout) == ended | {"temperature": 0.9, "top_k": 0, "max_new_tokens": 99}
    greedy = {"eos_token_id": [7, 3, 5], "do_sample": False, "repetition_penalty": 1.05}
    assert generation(base, evaluation={"temperature": 0.0}) == greedy
    sft = {"rollout": {"max_tokens": 64, "temperature": 0.9, "max_turn_tokens": 99}, "evaluation": {"temperature": 0.0}}
    assert generation(base, sft={"data": "x.jsonl"}, **sft) == ended, "SFT reads neither section"
    (base / GENERATION).write_text(json.dumps({"eos_token_id": 3, "max_new_tokens": 2048, "do_sample": False}))
    assert generation(base) == {"eos_token_id": [7, 3], "max_new_tokens": 2048, "do_sample": False}
    (base / GENERATION).unlink()
    assert generation(base) == {"eos_token_id": [7, 3, 5]}


def test_a_policy_of_an_unevaluated_step_says_so(base: Path, run: Path) -> None:
    text = exported_texts(exported(base, run, step=2))[CARD]
    assert "was not evaluated by its run" in text
    assert not ModelCard(text).data.eval_results


def test_hostile_words_of_a_base_stay_words(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    (base / CARD).write_text("---\nlicense: [[[\n---\n")
    (base / GENERATION).write_text('{"eos_token_id": "rm", "pad_token_id": true}')
    (base / "config.json").write_text("[]")
    with caplog.at_level(logging.WARNING):
        texts = exported_texts(exported(base, None, "name='a|b]: <script>`'"))
    assert "config.json: cannot be read (no JSON object)" in caplog.text
    assert json.loads(texts[GENERATION]).keys().isdisjoint({"eos_token_id", "pad_token_id"})
    assert ModelCard(texts[CARD]).data.license is None
    assert "\n# a\\|b\\]: \\<script\\>\\`\n" in texts[CARD]
