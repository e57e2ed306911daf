"""What a run's configuration gives each of its domains, alone and in a mix. Does not cover the domains themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from environments.gyms._shared import Gym
from mua.config.schema import EnvironmentConfig
from mua.environment.selection import Selection
from mua.utils.errors import ConfigError


def chosen(**settings: Any) -> Selection:
    return Selection.from_config(EnvironmentConfig.model_validate(settings))


def gym(selection: Selection, name: str) -> Gym:
    found = selection.domains[name]
    assert isinstance(found, Gym)
    return found


def test_either_a_name_or_a_mix() -> None:
    for settings in ({}, {"name": "retail", "mix": {"retail": 1.0}}):
        with pytest.raises(ValueError, match="give either name, one domain, or mix"):
            EnvironmentConfig.model_validate(settings)


def test_tasks_come_domain_after_domain_with_their_shares_and_find_their_domain_again() -> None:
    selection = chosen(mix={"help_desk": 3.0, "gyms/function": 1.0}, difficulties=[])
    assert [share for share, _ in selection.shared_tasks("test")] == [3.0, 1.0]
    tasks = selection.tasks("test")
    assert [t.domain for t in tasks[:1] + tasks[-1:]] == ["help_desk", "gyms/function"]
    assert selection.domain(tasks[-1]).name == "gyms/function"
    assert selection.system_prompt(tasks[0]) != selection.system_prompt(tasks[-1])
    assert [t.domain for t in selection.sampled_tasks("test", 2)] == ["help_desk"] * 2 + ["gyms/function"] * 2


def test_difficulties_choose_tasks() -> None:
    easy = chosen(name="gyms/turtle", difficulties=["easy"]).tasks("train")
    assert easy
    assert {task.data["difficulty"] for task in easy} == {"easy"}
    assert len(easy) < len(chosen(name="gyms/turtle").tasks("train"))


def test_in_a_mix_an_option_reaches_its_owner_alone() -> None:
    mix = {"gyms/turtle": 1.0, "gyms/function": 1.0, "retail": 1.0, "help_desk": 1.0}
    options = {"turtle.max_answers": 2, "gyms/function.max_actions": 6, "retail.compact": True}
    selection = chosen(mix=mix, options=options)
    assert gym(selection, "gyms/turtle").setting.whole("max_answers") == 2
    assert gym(selection, "gyms/function").setting.whole("max_actions") == 6


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"compact": True}, r"say whose option it is in a mix, such as retail\.compact"),
        ({"airline.compact": True}, "no chosen environment is called 'airline'; there are help_desk, retail"),
        ({"help_desk.compact": True}, "'help_desk' has nothing to set there"),
        ({"retail.compct": True}, "'retail' has no such option; .* did you mean 'compact'"),
    ],
)
def test_an_option_nobody_takes_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        chosen(mix={"retail": 1.0, "help_desk": 1.0}, options=options)


def test_a_mix_leaves_each_what_it_understands() -> None:
    selection = chosen(mix={"retail": 1.0, "help_desk": 1.0, "gyms/turtle": 1.0}, reward="partial", show_reward=True)
    assert gym(selection, "gyms/turtle").setting.show_reward


def test_alone_what_a_domain_does_not_understand_is_refused() -> None:
    for key, value in (("data", "x"), ("reward", "partial"), ("show_reward", True), ("options", {"compact": True})):
        with pytest.raises(ConfigError, match=rf"environment\.{key}: domain 'help_desk' has nothing to set there"):
            chosen(name="help_desk", **{key: value})


def test_in_a_mix_every_domain_looks_into_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "retail").mkdir()
    with pytest.raises(ConfigError, match=str(tmp_path / "retail")):
        chosen(mix={"retail": 1.0, "help_desk": 1.0}, data=tmp_path)
