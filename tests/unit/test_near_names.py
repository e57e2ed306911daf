"""What people type who come from other frameworks is answered with the right key, and lists and unions with their own.

Not covered: names that nobody is known to type.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mua.config import messages
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
        ("rollout.learning_rate", "optimizer.learning_rate or critic.optimizer.learning_rate"),
        ("optimzer.learning_rate", "optimizer"),
        ("tp", "megatron.tensor_parallel or engine.tensor_parallel"),
        ("algorithm.clip_ratio", "algorithm.clip_low or algorithm.clip_high"),
        ("rollout.n", "algorithm.group_size"),
        ("temperature", "rollout.temperature or evaluation.temperature or user.llm.temperature"),
        ("trainer.total_epochs", "trainer.steps"),
        ("trainer.maxStaleness", "trainer.max_staleness"),
    ],
)
def test_an_unknown_key_is_answered_with_ours(recipe: Path, typed: str, means: str) -> None:
    assert f"unknown key; did you mean {means}?" in told(recipe, f"{typed}=1")


@pytest.mark.parametrize(
    ("override", "means"),
    [
        ("algorithm.loss=ppo", "did you mean grpo, the clipped ratio"),
        ("algorithm.advantage=ppo", "did you mean gae?"),
        ("algorithm.kl_estimator=low_var_kl", "did you mean k3?"),
        ("megatron.recompute_modules=[mpl]", "did you mean mlp?"),
        ("environment.mix=[retail, airline]", "{retail: 2, airline: 1}"),
        ("environment.scorer.xyzzy=true", "this section has forms, "),
        ("algorithm.filters=[{kind: balance, extra: 2}]", "algorithm.filters.0.extra_right or"),
        ("algorithm.filters=[{kind: range}, {kind: ballance}]", "algorithm.filters.1.kind: expected 'range' or"),
        ("algorithm.filters=[{minimum: 1}]", "algorithm.filters.0.kind: required"),
        ("user.llm={url: x, model: m, base_url: h}", "did you mean user.llm.base_url?"),
    ],
)
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
    assert sorted({key for keys_of in messages._KEYS.values() for key in keys_of.split()} - keys) == []


def test_episodes_fit_a_context_that_was_only_lowered(recipe: Path) -> None:
    assert load_config(recipe).rollout.max_tokens == 1016
    assert load_config(recipe, ["model.max_length=40960"]).rollout.max_tokens == 32768
    with pytest.raises(ConfigError, match="must stay 8 below"):
        load_config(recipe, ["rollout.max_tokens=2000"])
