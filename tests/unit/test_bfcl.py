"""The BFCL adapter: on a small hand-made package always, on the real one where MUA_BFCL names its folder.

On the real package every task is replayed, and our verdicts are compared with its own checker's on gold, damaged and
empty conversations. Not covered: what models score on it.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from environments._packages import read_call
from environments.bfcl import DOMAIN, BfclDomain
from environments.bfcl.episode import CATEGORIES, BfclEnvironment, Done, Turn, executed_by_turn, first_fault
from environments.kit.demonstrate import demonstrate, replay_gold
from mua.config.schema import EnvironmentConfig, PolicyEndpointConfig, RolloutConfig
from mua.environment.domain import Domain
from mua.environment.endpoint.services import ChatClient, Services
from mua.environment.manager import EnvironmentManager
from mua.environment.protocol import Task, Transcript
from mua.rollout.agent import ChatPolicy, EpisodeSetting
from mua.rollout.episode import Episode, EpisodeResult
from mua.types import Json, Outcome
from mua.utils.errors import ConfigError
from tests.chat_fixtures import ChatServer, calls, chat_server, in_order, says
from tests.desk_support import judged, opened
from tests.tables import cases_of, refused, table, write_files

REAL = os.environ.get("MUA_BFCL")
needs_package = pytest.mark.skipif(REAL is None, reason="MUA_BFCL does not name the folder of the package bfcl-eval")


cases = cases_of("bfcl")


def write_package(folder: Path) -> Path:
    return write_files(folder, table("bfcl")["PACKAGE"])


def configured(folder: Path, **more: object) -> BfclDomain:
    config = EnvironmentConfig.model_validate({"name": "bfcl", "data": folder, **more})
    domain = DOMAIN.configured(config, Services())
    assert isinstance(domain, BfclDomain)
    return domain


@pytest.fixture
def domain(tmp_path: Path) -> BfclDomain:
    return configured(write_package(tmp_path))


def task(domain: Domain, name: str) -> Task:
    return next(t for t in domain.tasks("test") if t.id == f"multi_turn_{name}")


async def test_gold_earns_one_and_silence_nothing(domain: BfclDomain) -> None:
    tasks = domain.tasks("test")
    assert [t.data["kind"] for t in tasks] == ["base", "base", "miss_func", "long_context"]
    for one in tasks:
        if one.data["kind"] != "miss_func":  # whose tool comes with the user's message
            assert (await replay_gold(domain, one)).reward == 1.0, one.id
        played = await demonstrate(domain, one, 0)
        assert (played.reward, played.ended) == (1.0, True)
        assert judged(opened(one, domain), *["Hello."] * 3).reward == 0.0


@pytest.fixture
def environment(domain: BfclDomain) -> BfclEnvironment:
    """Of the first task."""
    return opened(task(domain, "base_0"), domain)


def test_tools_reach_the_model_whole_as_json_schema(domain: BfclDomain, environment: BfclEnvironment) -> None:
    tools = {tool.name: tool for tool in environment.tools()}
    assert set(tools) == {"open_ticket", "count", "close_all", "add"}
    for tool in tools.values():
        jsonschema_rs.meta.validate(tool.parameters)
        assert tool.parameters["type"] == "object"
    assert tools["open_ticket"].parameters["properties"]["urgent"] == {"type": "boolean", "default": False}
    assert tools["add"].parameters["properties"]["a"] == {"type": "number"}
    assert "Returns: " in tools["add"].description
    environment.reset(task(domain, "base_1"), 0)
    (loose,) = (tool for tool in environment.tools() if tool.name == "add")
    assert loose.parameters["properties"]["a"] == {}  # a gold call of this task gives a text here
    assert loose.parameters["properties"]["b"] == {"type": "number"}


def called(environment: BfclEnvironment, *wanted: tuple[str, Json]) -> list[Json]:
    """The assistant message of one answer, its calls made, and what they gave."""
    results = [environment.call(name, arguments) for name, arguments in wanted]
    functions = [{"function": {"name": name, "arguments": json.dumps(given)}} for name, given in wanted]
    answers = [{"role": "tool", "content": result.text} for result in results]
    return [{"role": "assistant", "content": "", "tool_calls": functions}, *answers]


SAID: Json = {"role": "assistant", "content": "Done."}
LEAK = ("open_ticket", {"title": "leak", "urgent": True})
COUNT: tuple[str, Json] = ("count", {})


@cases
def test_every_turn_is_judged(environment: BfclEnvironment, turns: list[list[Any]], why: str | None) -> None:
    """A call by its name alone has no arguments; LEAK opens an urgent ticket about a leak."""
    messages = []
    for turn in turns:
        for call in turn:
            made = LEAK if call == "LEAK" else call if isinstance(call, list) else (call, {})
            messages += called(environment, made)
        messages.append(SAID)
    verdict = environment.evaluate(Transcript(messages))
    assert verdict.details.get("why") == why
    assert verdict.success == (why is None)
    assert verdict == environment.evaluate(Transcript(messages))


def test_refused_calls_reach_no_service_and_no_verdict(environment: BfclEnvironment) -> None:
    bad: list[tuple[str, Json]] = [
        ("hidden", {}), ("_load_scenario", {"scenario": {}}), ("__init__", {}), ("open_ticket", {}),
        ("open_ticket", {"title": 3}), ("open_ticket", {"title": "leak", "x": 1}),
    ]  # fmt: skip
    assert all(environment.call(*call).error for call in bad)
    messages = [*called(environment, *bad, LEAK), *called(environment, LEAK), SAID, *called(environment, COUNT), SAID]
    assert environment.evaluate(Transcript(messages)).success


def test_a_refused_call_is_told_from_the_same_one_made_later() -> None:
    function = {"name": "count", "arguments": "{}"}
    asked = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    messages = [asked, {"role": "tool", "content": "error: no"}, SAID, asked, {"role": "tool", "content": "1"}, SAID]
    turns = executed_by_turn(messages, [Done("count", {}, "1")])
    assert [list(turn) for turn in turns] == [[], [COUNT], []]
    assert [turn.steps for turn in turns] == [1, 1, 0]


def test_rollouts_of_one_task_share_no_state(domain: BfclDomain) -> None:
    one, other = (opened(task(domain, "base_0"), domain) for _ in range(2))
    assert json.loads(one.call(*LEAK).text) == {"id": 2}  # type: ignore[union-attr]
    assert other.call(*COUNT).text == "1"  # type: ignore[union-attr]
    assert "close_all" in {tool.name for tool in other.tools()}
    assert task(domain, "base_0").data["initial"]["TicketAPI"]["tickets"] == [["old", False]]


def test_the_package_leaves_nothing_behind(domain: BfclDomain) -> None:
    assert not [name for name in sys.modules if name.startswith("bfcl_eval")]
    assert not [place for place in sys.path if (Path(place) / "bfcl_eval").exists()]


async def played(domain: BfclDomain, name: str, *replies: Json) -> tuple[EpisodeResult, ChatServer]:
    """An episode of a policy behind an endpoint, on the adapter."""
    config = EnvironmentConfig(name="bfcl")
    manager, chosen = EnvironmentManager(domain, config), task(domain, name)
    async with chat_server(in_order(*replies)) as server:
        client = ChatClient(PolicyEndpointConfig(base_url=server.base_url, model="m"), "policy")
        setting = EpisodeSetting(
            budgets=RolloutConfig(), temperature=0.0, show_tools=True,
            system_prompt=lambda task: domain.system_prompt("full"), deterministic=False,
        )  # fmt: skip
        async with manager.instance(chosen, 0) as environment:
            user = domain.scripted_user(chosen, 0)
            agent = ChatPolicy(client).agent(setting, session="s", seed=1)
            result = await Episode(setting, environment, user, agent).run()
        await client.close()
    await manager.close()
    return result, server


async def test_a_withheld_tool_comes_with_the_users_message(domain: BfclDomain) -> None:
    early, late = calls(("close_all", {})), calls(("close_all", {}))
    result, server = await played(domain, "miss_func_0", early, says("I have no tool for that."), late, says("Done."))
    assert (result.outcome, result.evaluation.details) == (Outcome.USER_STOP, {})
    observed = [m["content"] for m in result.messages if m["role"] == "tool"]
    assert observed == ["error: there is no tool 'close_all'", "closed"]
    offered = [{tool["function"]["name"] for tool in request["tools"]} for request in server.requests]
    assert ["close_all" in names for names in offered] == [False, False, True, True]
    announced = result.messages[-5]["content"]
    assert '"name": "close_all"' in announced


async def test_an_episode_through_an_endpoint(domain: BfclDomain) -> None:
    result, _ = await played(domain, "base_0", calls(LEAK, LEAK), says("Two."), calls(COUNT), says("Three."))
    assert (result.outcome, result.turn_rewards) == (Outcome.USER_STOP, [0.0, 0.0, 0.0, 1.0])


def test_calls_in_the_data_are_read_not_run() -> None:
    assert read_call("f(1, 'a', key=[1, {'b': None}])") == ("f", (1, "a"), {"key": [1, {"b": None}]})
    for text in ("__import__('os').system('x')", "f(g())", "f(**{})", "f", "f(1); g(2)", "f(x)"):
        with pytest.raises((ValueError, SyntaxError)):
            read_call(text)


def test_bad_data_is_one_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment\.data: domain 'bfcl' has no tasks of its own"):
        DOMAIN.configured(EnvironmentConfig(name="bfcl"), Services())
    refused("holds no bfcl_eval/data", configured, tmp_path)
    folder = write_package(tmp_path / "package")
    assert len(configured(folder / "bfcl_eval").tasks("test")) == 4  # the package's own folder will do
    assert configured(folder, options={"categories": "base"}).tasks("train") == ()
    assert len(configured(folder, options={"categories": "base"}).tasks("test")) == 2
    refused("choose among base, miss_func", configured, folder, options={"categories": "basic"})
    refused(r"environment\.options\.category: ", configured, folder, options={"category": "base"})
    broken = write_package(tmp_path / "broken")
    (broken / "bfcl_eval/data/BFCL_v4_multi_turn_base.json").write_text('{"id": 3\n')
    refused(r"multi_turn_base\.json:1: not a line of JSON", configured, broken)
    lacking = write_package(tmp_path / "lacking")
    (lacking / "bfcl_eval/eval_checker/multi_turn_eval/func_source_code/helper.py").unlink()
    refused("cannot be imported", configured, lacking)


def test_the_domain_is_there_without_data_and_has_no_tasks() -> None:
    assert (DOMAIN.needs_data, DOMAIN.tasks("test"), DOMAIN.tasks("train")) == (True, (), ())
    refused("needs its data", DOMAIN.environment)


@pytest.fixture(scope="module")
def official() -> BfclDomain:
    assert REAL is not None
    return configured(Path(REAL))


@needs_package
async def test_every_official_task_is_solved_by_its_gold(official: BfclDomain) -> None:
    tasks = official.tasks("test")
    assert len(tasks) == 200 * len(CATEGORIES)
    for one in tasks:
        assert (await demonstrate(official, one, 0)).reward == 1.0, one.id


@needs_package
@pytest.mark.slow
def test_verdicts_agree_with_the_official_checker(official: BfclDomain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gold, nothing, a call lost, a call twice, a turn swapped, on every task."""
    root = Path(REAL or "")
    monkeypatch.syspath_prepend(str(root.parent if root.name == "bfcl_eval" else root))
    checker = importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker")
    rng, agreed, failed = random.Random(1), 0, 0
    for number, one in enumerate(official.tasks("test")):
        for label, turns in damaged(one.data["gold"], rng):
            entry = {
                "id": one.id, "initial_config": one.data["initial"], "involved_classes": one.data["classes"],
            }  # fmt: skip
            steps = [[[text] for text in turn] for turn in turns]
            category = one.id.rsplit("_", 1)[0]
            theirs = checker.multi_turn_checker(steps, one.data["gold"], entry, category, f"{label}{number}")
            ours = first_fault(official._loaded, one, [_turn(official, one, turn) for turn in turns])
            assert theirs["valid"] == (ours is None), (one.id, label, theirs.get("error_type"), ours)
            agreed += 1
            failed += ours is not None
    assert agreed == 800 * 5
    assert failed > 1600


def damaged(gold: list[list[str]], rng: random.Random) -> Iterator[tuple[str, list[list[str]]]]:
    yield "gold", gold
    yield "nothing", [[] for _ in gold]
    turn = rng.choice([index for index, texts in enumerate(gold) if texts])
    place = rng.randrange(len(gold[turn]))
    yield "lost", [texts[:place] + texts[place + 1 :] if i == turn else texts for i, texts in enumerate(gold)]
    yield "twice", [texts[: place + 1] + texts[place:] if i == turn else texts for i, texts in enumerate(gold)]
    yield "swapped", [*gold[1:], gold[0]]


def _turn(domain: BfclDomain, one: Task, texts: list[str]) -> Turn:
    from environments.bfcl.episode import gold_move, schemas

    tools = {tool.name: tool for tool in schemas(domain._loaded, one)}
    return Turn(gold_move(text, tools) for text in texts)
