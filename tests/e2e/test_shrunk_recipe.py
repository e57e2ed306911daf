"""One step of reinforcement learning of the mixture-of-experts recipe at toy size: TP2 x PP2 x EP2 on eight ranks.

Real Megatron on gloo and a real SGLang server whose expert choices training replays, started as a person would. Not
covered: the recipe's own model and machines, and that anything is learnt.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from e2e_support import ROOT, mua

from mua.observe.metrics_log import read_metrics

LAYOUT = ("megatron.data_parallel=2", "megatron.expert_parallel=2")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_step_of_the_mixture_of_experts_recipe(tmp_path: Path) -> None:
    overrides = ["model.shrink=true", *LAYOUT, "trainer.steps=1", "trainer.evaluate_every=0"]
    overrides += ["engine.routed_experts=true", "megatron.routing_replay=replay"]
    overrides += ["environment.name=graded_desk"]  # random episodes differ in reward, so there is a gradient
    hf_config = f"model.hf_config={ROOT}/configs/models/Qwen3-30B-A3B/config.json"
    overrides += ["trainer.evaluate_first=false", hf_config, f"output={tmp_path}/out"]
    printed = mua("train", ROOT / "configs" / "qwen3-30b-a3b-2x8.yaml", *overrides, cwd=tmp_path, seconds=850.0)
    assert "megatron.max_tokens_per_microbatch: 32768 -> 256" in printed
    recorded = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    layout = {key: recorded["megatron"][f"{key}_parallel"] for key in ("tensor", "pipeline", "expert", "data")}
    assert layout == {"tensor": 2, "pipeline": 2, "expert": 2, "data": 2}
    (metrics,) = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert metrics["engine/sampled_tokens"] > 0
    assert metrics["engine/sync/bytes"] > 0
    assert metrics["train/train_rollout_logprob_abs_diff_max"] < 1e-4  # trainer and engine agree on what was sampled
    assert metrics["train/moe/replay_agreement"] > 0.99  # in float32 both make the same choices, but for a rare tie
    assert 0 < metrics["train/grad_norm"] < float("inf")
    assert (tmp_path / "out" / "hf" / "config.json").is_file()
