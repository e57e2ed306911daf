"""What people type who come from other frameworks is answered with the right key, and lists and unions with their own.

Not covered: names that nobody is known to type.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mua.config import near_names
from mua.config.load import load_config
from mua.config.schema import ExperimentConfig
from mua.config.section import all_keys
from mua.utils.errors import ConfigError

BASE = """\
name: x
output: out
model: {path: m, max_length: 1024}
environment: {name: help_desk}
trainer: {steps: 1}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(BASE)
    return path


def told(recipe: Path, override: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, [override])
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("typed", "means"),
    [
        ("optimizer.lr", "optimizer.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("critic.lr", "critic.optimizer.learning_rate"),
        ("optimizer.max_grad_norm", "optimizer.clip_grad"),
        ("megatron.tp", "megatron.tensor_parallel"),
        ("megatron.pp", "megatron.pipeline_parallel"),
        ("megatron.cp", "megatron.context_parallel"),
        ("megatron.ep", "megatron.expert_parallel"),
        ("megatron.tensor-model-parallel-size", "megatron.tensor_parallel"),
        ("engine.tp_size", "engine.tensor_parallel"),
        ("tp", "megatron.tensor_parallel or engine.tensor_parallel"),
        ("micro_batch_size", "megatron.max_tokens_per_microbatch"),
        ("kl_coef", "algorithm.kl_coefficient"),
        ("algorithm.clip_ratio", "algorithm.clip_low or algorithm.clip_high"),
        ("rollout.n", "algorithm.group_size"),
        ("temperature", "rollout.temperature or evaluation.temperature or user.llm.temperature"),
        ("rollout.max_new_tokens", "rollout.max_turn_tokens"),
        ("max_response_length", "rollout.max_turn_tokens"),
        ("algorithm.adv_estimator", "algorithm.advantage"),
        ("trainer.save_freq", "trainer.save_every"),
        ("trainer.test_freq", "trainer.evaluate_every"),
        ("trainer.total_epochs", "trainer.steps"),
        ("engine.gpu_memory_utilization", "engine.memory_fraction"),
        ("model.name_or_path", "model.path"),
        ("hf_checkpoint", "model.path"),
        ("env", "environment.name"),
        ("rollout_temperature", "rollout.temperature"),
        ("trainer.maxStaleness", "trainer.max_staleness"),
        ("optimiser.learning_rate", "optimizer"),
        ("rollout.learning_rate", "optimizer.learning_rate"),
    ],
)
def test_a_name_of_another_framework_is_answered_with_ours(recipe: Path, typed: str, means: str) -> None:
    assert f"unknown key; did you mean {means}?" in told(recipe, f"{typed}=1")


@pytest.mark.parametrize(
    ("override", "means"),
    [
        ("loss=ppo", "did you mean algorithm.loss? algorithm.loss has no 'ppo'; take grpo, the clipped ratio"),
        ("algorithm.loss=ppo", "did you mean grpo, the clipped ratio; PPO is algorithm.loss=grpo with"),
        ("algorithm.advantage=ppo", "did you mean gae?"),
        ("model.dtype=bf16", "did you mean bfloat16?"),
        ("evaluation.split=val", "did you mean validation?"),
        ("algorithm.aggregation=token-mean", "did you mean token_mean?"),
        ("algorithm.kl_estimator=low_var_kl", "did you mean k3?"),
        ("placement=disaggregated", "did you mean separate?"),
        ("megatron.recompute_modules=[mpl]", "did you mean mlp?"),
        ("trainer.deterministic=yes", "write true"),
        ("trainer.steps='1_000'", "expected an integer"),
        ("environment.mix=[retail, airline]", "several domains are written with their shares"),
        ("megatron.sequence_parallel=true", "it is on wherever megatron.tensor_parallel is above 1"),
        ("engine.enabled=true", "this section has"),
        ("algorithm.filters=[{kind: balance, extra: 2}]", "did you mean algorithm.filters.0.extra_right or "
         "algorithm.filters.0.extra_wrong?"),
        ("algorithm.filters=[{kind: range}, {kind: ballance}]", "algorithm.filters.1.kind: expected 'range' or"),
        ("algorithm.filters=[{minimum: 1}]", "algorithm.filters.0.kind: required, but not set"),
        ("algorithm.filters=[{kind: minimum_turns}]", "algorithm.filters.0.turns: required, but not set"),
        ("algorithm.filters=range", "algorithm.filters: expected a list, got 'range'"),
        ("user.llm={url: x, model: m, base_url: h}", "did you mean user.llm.base_url?"),
        ("environment.mcp=[{name: a, cmd: x, command: y}]", "did you mean environment.mcp.0.command?"),
    ],
)  # fmt: skip
def test_values_lists_and_unions(recipe: Path, override: str, means: str) -> None:
    assert means in told(recipe, override)


def test_two_domains_need_no_empty_name(recipe: Path) -> None:
    mixed = load_config(recipe, ["environment.mix={retail: 1, airline: 2}"])
    assert mixed.environment.shares == {"retail": 1, "airline": 2}
    recipe.with_name("y.yaml").write_text("extends: x.yaml\nenvironment: {mix: {retail: 1}}\n")
    assert load_config(recipe.with_name("y.yaml")).environment.name == ""
    back = load_config(recipe.with_name("y.yaml"), ["environment.name=telecom"])
    assert back.environment.shares == {"telecom": 1}
    with pytest.raises(ConfigError, match="give either name, one domain, or mix"):
        load_config(recipe, ["environment.name=retail", "environment.mix={airline: 1}"])
    recipe.write_text(BASE.replace("{name: help_desk}", "{name: retail, mix: {airline: 1}}"))
    with pytest.raises(ConfigError, match="give either name, one domain, or mix"):
        load_config(recipe)


def test_every_suggestion_is_a_key() -> None:
    keys = {".".join(key) for key in all_keys(ExperimentConfig)}
    assert sorted({key for keys_of in near_names._MEANT.values() for key in keys_of} - keys) == []


def test_episodes_fit_a_context_that_was_only_lowered(recipe: Path) -> None:
    assert load_config(recipe).rollout.max_tokens == 1016
    assert load_config(recipe, ["model.max_length=40960"]).rollout.max_tokens == 32768
    with pytest.raises(ConfigError, match="must stay 8 below"):
        load_config(recipe, ["rollout.max_tokens=2000"])
