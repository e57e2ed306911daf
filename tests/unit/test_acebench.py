"""The ACEBench adapter, on a small checkout of the same form made here by hand.

On the real one, where MUA_ACEBENCH names its checkout, only that everything loads and that its milestones solve some
tasks, and no more than they are known to. Not covered: what models score on it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jsonschema_rs
import pytest

from environments.acebench import DOMAIN, AceDomain
from environments.acebench.episode import CATEGORIES, AceEnvironment, different, milestones, progress
from environments.kit.demonstrate import demonstrate, replay_gold
from mua.config.schema import EnvironmentConfig
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Task, ToolResult, Transcript
from mua.utils.errors import ConfigError
from tests.desk_support import opened
from tests.tables import refused, table, write_files

REAL = os.environ.get("MUA_ACEBENCH")


def checkout(folder: Path, data: str = "data_all/data_en") -> Path:
    files = table("acebench")["CHECKOUT"]
    return write_files(folder, {path.replace("data_all/data_en", data): text for path, text in files.items()})


def configured(folder: Path, **more: object) -> AceDomain:
    config = EnvironmentConfig.model_validate({"name": "acebench", "data": folder, **more})
    domain = DOMAIN.configured(config, Services())
    assert isinstance(domain, AceDomain)
    return domain


@pytest.fixture
def domain(tmp_path: Path) -> AceDomain:
    return configured(checkout(tmp_path))


def task(domain: AceDomain, name: str) -> Task:
    return next(t for t in domain.tasks("test") if t.id == f"agent_{name}")


def begun(domain: AceDomain, name: str) -> AceEnvironment:
    return opened(task(domain, name), domain)


def called(environment: AceEnvironment, name: str, **arguments: object) -> ToolResult:
    return environment.call(name, arguments)  # type: ignore[return-value]


def test_a_task_is_solved_by_its_final_state(domain: AceDomain) -> None:
    environment = begun(domain, "multi_turn_0")
    assert environment.evaluate(Transcript([])).details == {
        "wrong": ["BaseApi.wifi", "MessageApi.inbox.2"], "process": 0.0,
    }  # fmt: skip
    refused = called(environment, "send_message", text="hi")
    assert refused.error
    assert "Wi-Fi is off" in refused.text
    assert not called(environment, "turn_on_wifi").error  # the switch is in every app
    assert environment.evaluate(Transcript([])).details["process"] == 0.5
    called(environment, "send_message", text="hi")
    verdict = environment.evaluate(Transcript([]))
    assert (verdict.reward, verdict.success, verdict.details) == (1.0, True, {"wrong": [], "process": 1.0})
    called(environment, "send_message", text="more")  # the ground truth names only what counts
    assert environment.evaluate(Transcript([])).success


async def test_milestones_solve_what_they_can(domain: AceDomain) -> None:
    solved = {t.id: (await replay_gold(domain, t)).reward for t in domain.tasks("test")}
    assert solved == {"agent_multi_turn_0": 1.0, "agent_multi_turn_1": 0.0, "agent_multi_step_0": 0.0}
    assert milestones(task(domain, "multi_turn_1"))[0] == [("turn_on_wifi", {}), None]
    played = await demonstrate(domain, task(domain, "multi_turn_0"), 0)
    assert (played.reward, played.ended) == (1.0, True)


def test_progress_is_the_best_ways_share_in_order() -> None:
    a, b, c = (("f", {"x": number}) for number in range(3))
    assert progress([a, b, c], [[a, c]]) == 1.0
    assert progress([c, a], [[a, c]]) == 0.5
    assert progress([a], [[b], [a, b, None]]) == 0.333
    assert progress([], [[]]) == 1.0


def test_the_comparison_of_states() -> None:
    assert different({"A": {"x": {"1": 2, "2": 3}}}, {"A": {"x": {"1": 2}}}) == []
    assert different({"A": {"x": {"1": 2}}}, {"A": {"x": {"1": 3, "4": 1}}}) == ["A.x.1", "A.x.4"]
    assert different({"A": {"x": [1], "y": 1}}, {"A": {"x": [2]}}) == ["A.x", "A.y"]
    assert different({"A": {}, "B": {}}, {"A": {}}) == ["1 services should be involved, 2 are"]


def test_tools_and_refusals(domain: AceDomain) -> None:
    environment = begun(domain, "multi_turn_0")
    send = next(tool for tool in environment.tools() if tool.name == "send_message")
    jsonschema_rs.meta.validate(send.parameters)
    assert send.parameters["properties"] == {"text": {"type": "string"}, "urgent": {"type": "boolean"}, "note": {}}
    for name, arguments in (
        ("_load_scenario", {"scenario": {}}), ("__init__", {}), ("nothing", {}), ("send_message", {}),
        ("send_message", {"text": 1}), ("turn_on_wifi", {"x": 1}),
    ):  # fmt: skip
        assert called(environment, name, **arguments).error, name
    called(environment, "turn_on_wifi")
    assert "Error during execution: broken" in called(environment, "send_message", text="boom").text
    assert "Error during execution" in called(environment, "send_message", text="a", note=1).text


def test_rollouts_share_no_state_and_the_package_leaves_nothing_behind(domain: AceDomain) -> None:
    one, other = begun(domain, "multi_turn_0"), begun(domain, "multi_turn_0")
    called(one, "turn_on_wifi")
    assert other.state()["MessageApi"] == {"inbox": {"1": {"text": "old"}}}
    assert not other.state()["BaseApi"]["wifi"]
    assert not [name for name in sys.modules if name.startswith("model_inference")]


async def test_users_say_their_request_and_wait(domain: AceDomain) -> None:
    talkative = domain.scripted_user(task(domain, "multi_turn_0"), 0)
    assert (await talkative.open()).text == "Send 'hi' (0)."
    assert not (await talkative.reply("To whom?")).stop
    assert (await talkative.reply("Done.")).stop
    waiting = domain.scripted_user(task(domain, "multi_step_0"), 0)
    await waiting.open()
    assert (await waiting.reply("To whom?")).stop


def test_bad_data_is_one_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="domain 'acebench' has no tasks of its own"):
        DOMAIN.configured(EnvironmentConfig(name="acebench"), Services())
    refused("is no checkout of ACEBench", configured, tmp_path)
    folder = checkout(tmp_path / "newer", "data/data_en")
    assert len(configured(folder, options={"categories": "multi_turn"}).tasks("test")) == 2
    refused("choose among en, zh", configured, folder, options={"language": "fr"})
    refused("choose among multi_turn", configured, folder, options={"categories": "multi"})
    broken = checkout(tmp_path / "broken")
    (broken / "data_all/data_en/data_agent_multi_step.json").write_text('{"id": "agent_multi_step_0"}\n')
    refused(r"agent_multi_step\.json: agent_multi_step_0: KeyError", configured, broken)


@pytest.mark.skipif(REAL is None, reason="MUA_ACEBENCH does not name a checkout of ACEBench")
async def test_the_real_tasks_load() -> None:
    domain = configured(Path(REAL or ""))
    solved = dict.fromkeys(CATEGORIES, 0)
    for one in domain.tasks("test"):
        solved[one.data["kind"]] += (await replay_gold(domain, one)).evaluation.success
    assert len(domain.tasks("test")) == 50
    assert 0 < solved["multi_turn"] <= 18  # as many as their own checker, which skips misspelt classes, lets pass
    assert 0 < solved["multi_step"] <= 7
