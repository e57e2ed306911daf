"""The whole loop by its commands: fine-tune, train, convert, roll out, evaluate, check the weight sync.

Real parts throughout: Megatron-Core, SGLang, the scripted customer, files. The policy is far too small and too little
trained to be any good; that it learns is shown by the demonstration, not here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from e2e_support import GROUPS, SIZE, STEPS, Workshop, evaluations_of, metrics_of, mua
from transformers import AutoModelForCausalLM, AutoTokenizer

from mua.observe import catalog
from mua.observe.timeline import EngineActivity, TrainerPhase
from mua.store.traces import read_traces
from mua.types import Outcome, Provenance
from workbench.timeline import EPISODE_PARTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a busy machine; the fixtures' runs count too

FIELD_NAMES = {
    "step", "rollout/reward/mean", "rollout/reward/std", "rollout/success", "train/loss", "train/entropy",
    "train/ppo_kl",
    "train/pg_clipfrac_low", "train/pg_clipfrac_high", "train/train_rollout_logprob_abs_diff", "train/train_rollout_kl",
    "train/grad_norm",
    "train/lr", "rollout/turns/mean", "rollout/response_len/mean",
    "rollout/tokens/user", "rollout/tokens/tool", "rollout/tokens/template",
    "rollout/advantage/abs_mean", "rollout/off_policy_level/max", "time/engine_slots_used", "time/overlap_efficiency",
    "engine/prefix_cache_hit_rate", "engine/restarts", "engine/sync/bytes", "time/sampled_tokens_per_second",
    "time/trained_tokens_per_second", "memory/process_gib", "memory/children_gib",
}  # fmt: skip


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def same_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def sampled_versions(path: Path) -> Iterator[int]:
    for trajectory in read_traces(path):
        for segment in trajectory.segments:
            yield from segment.version[segment.loss_mask].tolist()


def test_fine_tuning_learns_the_conversations(workshop: Workshop, tuned: Path) -> None:
    lines = metrics_of(tuned)
    assert [line["step"] for line in lines] == list(range(24))
    held_out = evaluations_of(tuned)
    assert list(held_out) == [12, 24]
    assert held_out[12]["eval/loss"] > held_out[24]["eval/loss"] > 0
    assert lines[0]["train/loss"] > 2 * lines[-1]["train/loss"] > 0
    assert sorted(p.name for p in (tuned / "checkpoints").iterdir()) == ["step_00000012", "step_00000024"]
    assert not same_weights(tensors(workshop.model), tensors(tuned / "hf"))


def test_training_writes_the_fields_metrics(tuned: Path, trained: Path) -> None:
    lines = metrics_of(trained)
    assert [line["step"] for line in lines] == list(range(STEPS))
    for line in lines:
        assert not FIELD_NAMES - line.keys()
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in line.values())
        assert math.isclose(sum(line[f"rollout/outcome/{kind}"] for kind in Outcome), 1.0)
        assert line["rollout/trajectories/count"] == GROUPS * SIZE
        assert line["train/grad_norm"] > 0
        assert line["train/entropy"] > 0
        assert line["rollout/off_policy_level/max"] == 0
        phases = [line[f"time/{phase}_seconds"] for phase in TrainerPhase]
        assert math.isclose(sum(phases), line["time/step_seconds"])
        assert math.isclose(sum(line[f"time/engine_{activity}"] for activity in EngineActivity), 1.0)
        parts = [line[f"time/episode_{part}_seconds"] for part in EPISODE_PARTS]
        assert math.isclose(sum(parts), line["time/episode_seconds"])
        assert min(parts) >= 0
    assert any(0 < line["engine/prefix_cache_hit_rate"] < 1 for line in lines)
    assert list((trained / "tensorboard").glob("events.out.tfevents.*"))
    assert {name.partition("/")[0] for line in lines for name in line if name != "step"} <= set(catalog.GROUPS)
    settings, *details = [json.loads(line) for line in (trained / "details.jsonl").read_text().splitlines()]
    assert settings["hyperparameters"]["trainer.steps"] == STEPS
    assert [sum(d["histograms"]["rollout/reward/histogram"]["counts"]) for d in details] == [GROUPS * SIZE] * STEPS
    assert all("user: " in text for d in details for text in d["texts"].values())
    log = (trained / "logs" / "train.log").read_text()
    assert [f"step {step}: rollout/reward/mean" in log for step in range(STEPS)] == [True] * STEPS
    assert "mua train is done" in log
    assert not same_weights(tensors(tuned / "hf"), tensors(trained / "hf"))


def test_training_prints_no_notices_of_its_libraries(tuned: Path, trained: Path) -> None:
    for folder in (tuned.parent, trained.parent):
        lines = (folder / "stderr").read_text().splitlines()
        lines = [line for line in lines if not line.startswith("mua ")]
        assert not [line for line in lines if re.search(r"megatron|deprecated|Warning|torch\.distributed", line, re.I)]


def test_traces_read_back_with_the_version_that_sampled_them(trained: Path) -> None:
    seen = []
    for step in range(STEPS):
        path = trained / "traces" / f"step_{step:06d}.jsonl"
        trajectories = list(read_traces(path))
        seen += [(t.ordinal, t.sample) for t in trajectories]
        assert set(sampled_versions(path)) == {step}
        for trajectory in trajectories:
            assert trajectory.messages[0]["role"] == "system"
            turns = {turn for s in trajectory.segments for turn in s.turn[s.loss_mask].tolist()}
            assert turns == set(range(len(trajectory.turn_rewards)))
            assert math.isclose(sum(trajectory.turn_rewards), trajectory.reward)
            for segment in trajectory.segments:
                others = segment.provenance != Provenance.SAMPLED
                assert (segment.logprobs[~others] < 0).all()
                assert np.all(segment.version[others] == -1)
    assert seen == [(ordinal, sample) for ordinal in range(STEPS * GROUPS) for sample in range(SIZE)]


def test_a_converted_checkpoint_is_the_trained_policy(trained: Path, tmp_path: Path) -> None:
    checkpoint = trained / "checkpoints" / f"step_{STEPS:08d}"
    mua("convert", "megatron-to-hf", checkpoint, tmp_path / "converted", cwd=tmp_path)
    assert same_weights(tensors(tmp_path / "converted"), tensors(trained / "hf"))
    conversation = [{"role": "user", "content": "Where is my order?"}]
    texts = {
        AutoTokenizer.from_pretrained(folder).apply_chat_template(conversation, tokenize=False)
        for folder in (tmp_path / "converted", trained / "hf")
    }
    assert len(texts) == 1
    assert "Where is my order?" in texts.pop()


def test_rollout_prints_a_conversation(recipe: Path, tmp_path: Path) -> None:
    shown = mua("rollout", recipe, "environment.name=help_desk", "evaluation.tasks=2", cwd=tmp_path)
    trajectories = list(read_traces(tmp_path / "out" / "traces"))
    assert len(trajectories) == 2
    opening = next(m["content"] for m in trajectories[0].messages if m["role"] == "user")
    assert opening in shown
    assert "2 episodes, success 0.000" in shown
    assert (tmp_path / "out" / "config-rollout.yaml").is_file()


def test_evaluation_writes_success_with_its_interval(recipe: Path, tmp_path: Path) -> None:
    shown = mua("eval", recipe, "environment.name=help_desk", "evaluation.samples=2", cwd=tmp_path)
    result = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert (result["split"], result["episodes"], result["unscored"]) == ("validation", 8, 0)
    assert result["success"]["low"] <= result["success"]["mean"] <= result["success"]["high"]
    assert sum(kind["episodes"] for kind in result["kinds"].values()) == 8
    assert "success on validation" in shown


def test_doctor_finds_every_tensor_in_the_engine(recipe: Path, tmp_path: Path) -> None:
    assert "every tensor in every engine equals the trainer's" in mua("doctor", "sync", recipe, cwd=tmp_path)
