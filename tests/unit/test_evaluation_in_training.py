"""Judging while training: which domains, under which options, and what the numbers are over.

Selections are of real domains; trajectories are made up, but for rounds of real episodes whose policy is scripted. A
run with held-out domains and a real engine is in tests/e2e/test_environments.py, the same numbers from training and
`mua eval` with one in tests/e2e/test_best.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from environments.gyms._shared import Gym
from mua.config.schema import EvaluationConfig, ExperimentConfig
from mua.environment.endpoint.services import Services
from mua.environment.selection import Selection
from mua.observe.progress import Progress
from mua.rollout.service import RolloutService
from mua.trainer.evaluation.evaluator import evaluate_in_training
from mua.trainer.evaluation.report import interval_of, training_metrics
from mua.types import Outcome, Trajectory
from mua.utils.errors import ConfigError
from tests.rollout_fixtures import ScriptedPool, call
from tests.tokens_fixtures import chat_family, model_folder


def config(environment: dict[str, Any], sections: dict[str, Any] | None = None, **evaluation: Any) -> ExperimentConfig:
    plain = {"name": "x", "output": "x", "model": {"path": "x"}, "trainer": {"steps": 1, "evaluate_first": True}}
    told = {"environment": environment, "evaluation": evaluation}
    return ExperimentConfig.model_validate({**plain, **told, **(sections or {})})


def held_out(environment: dict[str, Any], **evaluation: Any) -> Selection | None:
    return Selection.held_out(config(environment, **evaluation), Services())


def test_what_is_trained_on_is_not_held_out() -> None:
    mix = {"mix": {"gyms/turtle": 1.0, "help_desk": 2.0}}
    assert held_out(mix) is None
    assert held_out(mix, domains=["help_desk", "gyms/turtle"]) is None
    selection = held_out(mix, domains=["help_desk", "gyms/function", "gyms/search"])
    assert selection is not None
    assert list(selection.domains) == ["gyms/function", "gyms/search"]
    assert {t.domain for t in selection.sampled_tasks("validation", 3)} == {"gyms/function", "gyms/search"}


def test_held_out_domains_have_options_of_their_own() -> None:
    environment = {"name": "gyms/turtle", "options": {"max_words": 7}}
    training = Selection.from_config(config(environment).environment)
    options = {"function.max_actions": 3, "gyms/search.max_answers": 1}
    selection = held_out(environment, domains=["gyms/function", "gyms/search"], options=options)
    assert selection is not None
    both = training.beside(selection)
    assert both.tasks("train") == training.tasks("train")
    settings = {name: domain.setting for name, domain in both.domains.items() if isinstance(domain, Gym)}
    assert settings["gyms/turtle"].whole("max_words") == 7
    assert settings["gyms/function"].whole("max_actions") == 3
    assert settings["gyms/search"].whole("max_answers") == 1
    assert both.domain(selection.sampled_tasks("validation", 1)[0]).name == "gyms/function"


@pytest.mark.parametrize(
    ("evaluation", "says"),
    [
        ({"domains": ["gyms/search"], "split": "train"}, r"evaluation\.domains: 'gyms/search' has no train tasks"),
        ({"domains": ["gyms/search"] * 2}, "a domain stands there twice"),
        ({"domains": ["gyms/seerch"]}, "unknown environment 'gyms/seerch'"),
        ({"domains": ["gyms/search"], "options": {"turtle.max_words": 5}}, r"evaluation\.options\.turtle\.max_words: "),
        ({"domains": ["gyms/search"], "options": {"max_answers": 5}}, r"evaluation\.options\.max_answers: nothing is"),
        ({"domains": ["gyms/search"], "options": {"search.max_ansers": 5}}, r"did you mean 'max_answers'"),
    ],
)
def test_what_cannot_be_held_out_is_refused(evaluation: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        held_out({"name": "gyms/turtle"}, **evaluation)


def gives_up() -> ScriptedPool:
    """Stands for the engines: a policy that looks for a tool of the gyms and gives up."""
    return ScriptedPool(
        chat_family("qwen3", False), lambda session, turn: call("interact", choice="finish", content="x")
    )


def test_one_round_evaluates_training_domains_and_those_held_out(tmp_path: Path) -> None:
    loaded = config(
        {"mix": {"help_desk": 1.0, "gyms/function": 1.0}, "prompt": "short"},
        {"output": tmp_path, "model": {"path": model_folder("qwen3")}},
        domains=["gyms/telepathy", "help_desk"],
        options={"telepathy.max_actions": 2},
        tasks=2,
        samples=3,
    )
    rollouts = RolloutService(loaded)
    rollouts._pool = gives_up()  # type: ignore[assignment]
    assert [t.domain for t in rollouts.evaluation_tasks("validation")] == [
        *["help_desk"] * 2, *["gyms/function"] * 2, *["gyms/telepathy"] * 2
    ]  # fmt: skip
    with rollouts:
        found = evaluate_in_training(loaded, rollouts, Progress(enabled=False), "validation", 0)
    names = ("", "held_out_", "help_desk/", "gyms/function/", "gyms/telepathy/")
    assert {found[f"eval/{name}validation_success"] for name in names} == {0.0}
    assert {found[f"eval/{name}validation_unscored"] for name in names} == {0.0}
    bounds = {name: found[f"eval/{name}validation_success_high"] for name in names}
    assert bounds["held_out_"] == bounds["help_desk/"] > bounds[""] > 0  # two tasks each, four together


@pytest.mark.parametrize("split", ["validation", "test"])
def test_an_evaluation_shares_nothing_with_training(tmp_path: Path, split: str) -> None:
    """Neither tasks nor seeds nor sessions nor the temperature; each sample of a task has seeds of its own."""
    sections = {
        "output": tmp_path, "model": {"path": model_folder("qwen3")}, "engine": {"deterministic": True},
        "rollout": {"temperature": 0.75, "max_turns": 1}, "algorithm": {"groups_per_step": 4, "group_size": 2},
    }  # fmt: skip
    desk = {"name": "help_desk", "prompt": "short"}
    loaded = config(desk, sections, split=split, tasks=4, samples=2, temperature=0.25)
    rollouts, pool = RolloutService(loaded), gives_up()
    rollouts._pool = pool  # type: ignore[assignment]
    assert {task.split for task in rollouts.evaluation_tasks(split)} == {split}
    with rollouts:
        evaluate_in_training(loaded, rollouts, Progress(enabled=False), loaded.evaluation.split, 0)
        evaluated = list(pool.requests)
        rollouts.schedule(0, None)
        rollouts.take()
    trained = pool.requests[len(evaluated) :]
    assert (len(evaluated), len(trained)) == (8, 8)
    assert {request.params.temperature for request in evaluated} == {0.25}
    assert {request.params.temperature for request in trained} == {0.75}
    for what in (lambda request: request.params.seed, lambda request: request.session):
        assert len({what(request) for request in (*evaluated, *trained)}) == 16


def episodes(domain: str, *tasks: str) -> list[Trajectory]:
    """A task for each text, a sample for each letter of it: success, failure or unscored."""
    outcome = {"s": Outcome.USER_STOP, "f": Outcome.MAX_TURNS, "-": Outcome.ENGINE_ERROR}
    return [
        Trajectory(f"t{index}", index, sample, [], [0.0], 0.0, letter == "s", outcome[letter], domain=domain)
        for index, samples in enumerate(tasks)
        for sample, letter in enumerate(samples)
    ]


def test_training_domains_and_held_out_ones_are_never_mixed() -> None:
    played = [
        *episodes("shop", "ss", "sf"),
        *episodes("desk", "ff"),
        *episodes("gym", "f-", "--"),
        *episodes("quiz", "s"),
    ]
    found = training_metrics(played, {"shop": 2.0, "desk": 1.0}, "test", EvaluationConfig())
    assert found["eval/test_success"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert found["eval/held_out_test_success"] == pytest.approx(0.5)
    assert found["eval/shop/test_success"] == pytest.approx(0.75)
    assert (found["eval/desk/test_success"], found["eval/quiz/test_success"]) == (0.0, 1.0)
    assert found["eval/gym/test_unscored"] == 0.75
    assert found["eval/held_out_test_unscored"] == pytest.approx(3 / 5)
    by_task = interval_of(EvaluationConfig(), [1.0, 0.5, 0.0])  # four samples more of a task would be no more evidence
    assert (found["eval/test_success_low"], found["eval/test_success_high"]) == by_task[1:]


def test_a_single_domain_has_one_name_and_an_unscored_part_no_success() -> None:
    alone = training_metrics(episodes("shop", "s", "f"), {"shop": 1.0}, "validation", EvaluationConfig())
    assert set(alone) == {f"eval/validation_{name}" for name in ("success", "success_low", "success_high", "unscored")}
    beside = training_metrics(
        [*episodes("shop", "s"), *episodes("quiz", "-")], {"shop": 1.0}, "test", EvaluationConfig()
    )
    assert "eval/quiz/test_success" not in beside
    assert "eval/held_out_test_success" not in beside
    assert beside["eval/held_out_test_unscored"] == 1.0
