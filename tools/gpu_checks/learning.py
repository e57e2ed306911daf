"""A run that learns, and steps of a policy of more than a billion parameters, by the commands a person would type."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from megatron_bridge.hf_folder import copy_other_files
from mua.observe.metrics_log import METRICS_FILE, read_metrics
from tools.gpu_checks.child import Found, Place
from tools.gpu_checks.engines import POLICY, ROOT, command, needs_sglang, overrides, told

GAIN = 0.1
"""Of success on the test split, at the least; its interval must also lie above the first policy's."""
LARGE = {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 128, "num_hidden_layers": 12}  # fmt: skip
"""Qwen3-4B's layers, 12 of its 36: its checkpoint has 15 GB."""
STEPS = 3


def learns(place: Place) -> Found:
    """The demonstration: a supervised cold start, then forty steps of RL, success on the test split before and after.

    ``make demo`` does the same on a CPU and more; here only the evaluations of the report are made.
    """
    from workbench.demo import build

    needs_sglang(place)
    found = Found(told())
    dtype = f"model.dtype={place.pick('bfloat16', 'float32')}"
    build(place.work / "demo", seed=1)
    policy = [f"model.path={POLICY}", f"sft.data={place.work}/demo/conversations.jsonl", f"output={place.work}/sft"]
    command("sft", str(ROOT / "configs/demo-sft.yaml"), *policy, dtype, "seed=1")
    sizes = ["engine.max_total_tokens=98304", "engine.max_running_requests=192", "rollout.concurrency=192"]
    steps = ["evaluation.report_split=test", "evaluation.tasks=256", "trainer.save_every=0", "trainer.evaluate_every=0"]
    where = [f"model.path={place.work}/sft/hf", "trainer.export=last", "seed=1"]
    command("train", str(ROOT / "configs/demo.yaml"), *overrides(place), *sizes, *steps, *where)
    report = json.loads((place.work / "run/report.json").read_text())
    first, final = (
        {key.rpartition("test_")[2]: value for key, value in report[part].items()} for part in ("first", "final")
    )
    for name, part in (("SFT", first), ("RL", final)):
        interval = f"({part['success_low']:.3f} to {part['success_high']:.3f})"
        found.add(f"success on test after {name}", part["success"], interval)
    found.expect(
        final["success"] - first["success"] >= GAIN and final["success_low"] > first["success_high"],
        f"it did not learn: success on the test split went from {first['success']:.3f} to {final['success']:.3f}",
    )
    _steps(found, place.work / "run")
    return found


def large(place: Place) -> Found:
    """Three colocated steps of 1.2 billion random weights that talk with the help desk's customers.

    What such a policy says is noise and earns nothing. Its vocabulary is the demonstration's, whose tokenizer it has.
    It is the machinery that is measured: memory handed over, rollouts, training, weights synced, a checkpoint.
    """
    needs_sglang(place)
    found = Found("; ".join(filter(None, ["random weights, vocabulary of 896", told()])))
    found.add("parameters", _random_policy(place) / 1e9, "billion")
    sizes = ["engine.max_total_tokens=null", "engine.max_running_requests=128", "rollout.concurrency=128"]
    groups = ["algorithm.groups_per_step=8", "algorithm.group_size=16", "algorithm.skip_zero_advantage=false"]
    turns = ["model.max_length=4096", "rollout.max_tokens=4000", "rollout.max_turn_tokens=1024", "rollout.max_turns=6",
             "rollout.max_malformed=6", "megatron.max_tokens_per_microbatch=16384"]  # fmt: skip
    steps = [f"trainer.steps={STEPS}", "trainer.save_every=0", "trainer.evaluate_every=0", "trainer.export=last"]
    off = ["megatron.offload=true", "optimizer.warmup_steps=0"]
    off += ["optimizer.learning_rate=1e-7", "optimizer.min_learning_rate=0"]
    where = [f"model.path={place.work}/policy"]
    command("train", str(ROOT / "configs/demo.yaml"), *overrides(place), *sizes, *groups, *turns, *steps, *off, *where)
    last = _steps(found, place.work / "run")
    found.add("sampled", int(last["engine/sampled_tokens"]), "tokens per step")
    generating = last["time/engine_generating_seconds"]
    found.add("while engines generate", last["engine/sampled_tokens"] / generating, "tokens per second")
    found.add("longest segment", int(last["rollout/tokens/segment_max"]), "tokens")
    found.add("a sync", last["engine/sync/bytes"] / 1e9, "GB")
    return found


def _random_policy(place: Place) -> int:
    """Write it among the demonstration's tokenizer files; its parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = place.work / "policy"
    folder.mkdir()
    copy_other_files(POLICY, folder, None)
    shape: dict[str, Any] = json.loads((POLICY / "config.json").read_text()) | LARGE | {"initializer_range": 0.02}
    del shape["layer_types"], shape["dtype"]
    torch.manual_seed(1)
    with torch.device(place.device):
        model = Qwen3ForCausalLM(Qwen3Config(**shape)).bfloat16()
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _steps(found: Found, run: Path) -> dict[str, Any]:
    """Figures of a run's last step that trained; what steps report must be finite."""
    lines = list(read_metrics(run / METRICS_FILE))
    for line in lines:
        for name in ("rollout/reward/mean", "train/grad_norm", "train/loss"):
            found.expect(math.isfinite(line.get(name, 0.0)), f"step {line['step']}: {name} is {line.get(name)}")
    trained = [line for line in lines if "train/train_rollout_logprob_abs_diff" in line]
    if not trained:
        raise RuntimeError(f"none of {len(lines)} steps had anything to train on")
    last: dict[str, Any] = trained[-1]
    found.add("steps that trained", len(trained), f"of {len(lines)}")
    found.add("engine and trainer differ by", float(last["train/train_rollout_logprob_abs_diff"]), "nats")
    found.add("pause of a sync", float(last["engine/sync/pause_seconds"]), "s")
    found.add("trained", int(last["train/tokens"]), "tokens of the last step")
    for name in sorted(last):
        if name.startswith("time/") and name.endswith("_seconds") and "episode" not in name and last[name]:
            found.add(name, float(last[name]), "s")
    return last
