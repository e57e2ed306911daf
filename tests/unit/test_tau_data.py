"""Official data of tau-bench and tau2-bench under retail and airline: folders, tasks, recordings, rewards.

Tests of agreement read the official data (tests/tau_support.py) and skip without it; the others make small folders of
their own. tau2-bench's official files are not at hand: its format is tried on folders in its form. Not covered: what
the tools do (test_airline_tools.py, test_retail.py), telecom (test_tau2_data.py).
"""

from __future__ import annotations

import asyncio
import copy
import gzip
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from environments._tau import OfficialDomain
from environments._tau.domain import JudgedEnvironment, OfficialEnvironment
from environments.airline.rules import TAU
from environments.airline.tools import airline_tools
from environments.kit.database import ServiceDesk
from environments.kit.demonstrate import replay_gold
from environments.retail import DOMAIN
from environments.retail.shop import shop
from environments.retail.tools import TOOLS
from mua.cli import app
from mua.environment.endpoint.chat import Completion
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Evaluation, Task, Transcript
from mua.types import Json
from mua.utils.errors import ConfigError, JudgeFault
from tests.desk_support import SPLITS, judged, opened
from tests.tables import cases_of, changed, refused, table
from tests.tau_support import official, over, tasks_of
from workbench.recordings import replay_files

cases = cases_of("tau_data")
TABLE = table("tau_data")
TOOLS_OF = {"retail": TOOLS, "airline": airline_tools(TAU)}


def said(*texts: str) -> Transcript:
    return Transcript([{"role": "assistant", "content": text} for text in texts])


# ---- agreement with the official tools


@pytest.mark.parametrize(
    ("name", "files", "recordings", "calls", "failures"),
    [("retail", "recorded_*.jsonl.gz", 1560, 5007, 500), ("airline", "recorded_test.jsonl.gz", 125, 528, 50)],
)
def test_every_recording_agrees(name: str, files: str, recordings: int, calls: int, failures: int):
    folder = official(name)
    found = replay_files(name, folder, sorted(folder.glob(files)))
    assert found.disagreements == []
    assert (found.recordings, found.calls) == (recordings, calls)
    assert found.failures > failures


@pytest.fixture(name="recorded")
def fixture_recorded() -> list[Json]:
    with gzip.open(official("retail") / "recorded_dev.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def replay(*paths: Path) -> Result:
    return CliRunner().invoke(app, ["env", "replay", "retail", "--data", str(official("retail")), *map(str, paths)])


def tampered(recording: Json, what: str) -> Json:
    steps = recording["steps"]
    if what == "answer":
        at = next(index for index, step in enumerate(steps) if step["answer"].startswith("{"))
        answer = json.dumps({**json.loads(steps[at]["answer"]), "status": "lost"})
        return changed(recording, {f"steps/{at}/answer": answer})
    if what == "failure":
        return changed(recording, {"steps/0/answer": "Error: order not found"})
    if what == "success":
        return recording | {"steps": [*steps, {"name": "no_such_tool", "arguments": {}, "answer": "{}"}]}
    return recording | {what: not recording[what]}


@pytest.mark.parametrize(
    ("what", "reported"),
    [
        ("answer", "at /status recorded lost, here cancelled"),
        ("failure", "recorded Error"),
        ("success", "there is no tool"),
        ("database_equals_gold", "database equals gold: recorded False, here True"),
        ("database_equals_untouched", "database equals untouched: recorded True, here False"),
    ],
)
def test_the_command_reports_what_was_tampered_with(tmp_path, recorded, what, reported):
    path = tmp_path / "recorded.jsonl.gz"
    lines = [tampered(recorded[0], what), *recorded[1:]]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    result = replay(path)
    assert result.exit_code == 1
    assert reported in result.output
    assert "1 disagree" in result.output


def test_the_command_is_content_with_what_was_recorded_and_shows_ten_disagreements_at_most(tmp_path, recorded):
    result = replay(official("retail") / "recorded_dev.jsonl.gz")
    assert result.exit_code == 0
    assert "all agree" in result.output
    wrong = [tampered(line, "database_equals_gold") for line in recorded]
    (tmp_path / "wrong.jsonl").write_text("\n".join(map(json.dumps, wrong)))
    result = replay(tmp_path / "wrong.jsonl")
    assert result.exit_code == 1
    assert result.output.count("database equals gold: recorded") == 10
    assert f"... and {len(wrong) - 10} more" in result.output


@pytest.mark.parametrize("name", TOOLS_OF)
def test_tools_have_the_official_names_arguments_types_and_order_and_words_of_our_own(name: str):
    theirs = json.loads((official(name) / "tools.json").read_text())
    ours = [tool.schema.openai() for tool in TOOLS_OF[name]]
    assert [_facts(tool) for tool in ours] == [_facts(tool) for tool in theirs]
    described = {tool["function"]["description"] for tool in theirs}
    assert not described & {tool["function"]["description"] for tool in ours}


def _facts(tool: Json) -> Any:
    """The tool without its descriptions, lists of names in their order."""
    function = tool["function"]
    return function["name"], list(function["parameters"]["properties"]), _undescribed(function["parameters"])


def _undescribed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _undescribed(inner) for key, inner in value.items() if key != "description" or inner == {}}
    return value


def test_our_data_are_our_own():
    for kind, name in (("products", lambda row: row["name"]), ("users", lambda row: row["email"])):
        packed = (official("retail") / f"{kind}.json.gz").read_bytes()
        official_rows = json.loads(gzip.decompress(packed))
        assert not official_rows.keys() & shop().tables[kind].keys()
        assert not {name(row) for row in official_rows.values()} & {name(row) for row in shop().tables[kind].values()}


@pytest.mark.parametrize(("name", "sizes"), [("retail", (500, 20, 115)), ("airline", (0, 0, 50))])
def test_gold_is_rewarded_in_every_official_task(name: str, sizes: tuple[int, ...]):
    domain = over(name, official(name))
    assert tuple(len(domain.tasks(split)) for split in SPLITS) == sizes
    assert domain.system_prompt("full").startswith(f"# {name.capitalize()}")

    async def all_replayed() -> list[float]:
        return [(await replay_gold(domain, task)).reward for task in tasks_of(domain)]

    assert set(asyncio.run(all_replayed())) == {1.0}


def test_tasks_that_reward_idling_are_known_and_can_be_left_out():
    folder = official("retail")
    domain = over("retail", folder)
    for split in SPLITS:
        idle = [task.id for task in domain.tasks(split) if judged(opened(task, domain)).reward]
        assert [task.id for task in domain.noop_tasks(split)] == idle
        kept = over("retail", folder, skip_noop=True).tasks(split)
        assert {task.id for task in kept} == {task.id for task in domain.tasks(split)} - set(idle)
    assert domain.noop_tasks("test")


# ---- folders


def write_tau(folder: Path, *tasks: Json) -> Path:
    for name, rows in shop().tables.items():
        (folder / f"{name}.json").write_text(json.dumps(rows))
    (folder / "policy.md").write_text("Be kind.")
    (folder / "tasks_test.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    return folder


def pending() -> Json:
    return next(order for order in shop().tables["orders"].values() if order["status"] == "pending")


def canceling(order: Json) -> Json:
    arguments = {"order_id": order["order_id"], "reason": "no longer needed"}
    return {"name": "cancel_pending_order", "arguments": arguments}


def tau_task(**changes: object) -> Json:
    return {
        "id": "t0",
        "user_id": "u",
        "instruction": "You are Ada. Cancel it.",
        "actions": [canceling(pending())],
        "outputs": ["12.5"],
        **changes,
    }


def test_a_folder_of_plain_files_is_read(tmp_path):
    domain = over("retail", write_tau(tmp_path, tau_task()))
    (task,) = domain.tasks("test")
    assert domain.tasks("train") == domain.tasks("validation") == ()
    assert (task.id, task.data["kind"], task.data["difficulty"]) == ("t0", "cancel_pending_order", "easy")
    assert task.data["statements"] == [["12.5"]]
    assert domain.persona(task) == "You are Ada. Cancel it."
    assert domain.system_prompt("full") == "Be kind."
    assert domain.noop_tasks("test") == []


def test_types_are_checked_on_our_data_and_left_to_the_tools_on_official_data(tmp_path):
    domain = over("retail", write_tau(tmp_path, tau_task()))
    (task,) = domain.tasks("test")
    address = dict.fromkeys(("address1", "address2", "city", "state", "country"), "x") | {"zip": 12345}
    call = {"order_id": pending()["order_id"], **address}
    for chosen, error in ((domain, False), (DOMAIN, True)):
        environment = opened(task if chosen is domain else DOMAIN.tasks("test")[0], chosen)
        assert environment.call("modify_pending_order_address", call).error == error


@pytest.fixture(name="desk", scope="module")
def fixture_desk(tmp_path_factory: pytest.TempPathFactory) -> ServiceDesk:
    return over("retail", write_tau(tmp_path_factory.mktemp("tau"), tau_task())).desk


@pytest.mark.parametrize("value", [None, 5, [], {}, "", ["x"], {"a": 1}, True])
@pytest.mark.parametrize("argument", ["order_id", "item_ids", "new_item_ids", "payment_method_id"])
def test_arguments_of_any_type_are_answered_and_refused_without_a_trace(desk, argument, value):
    order = pending()
    fitting = {"order_id": order["order_id"], "item_ids": [order["items"][0]["item_id"]], "new_item_ids": ["0"]}
    environment = OfficialEnvironment(desk)
    environment.reset(Task("t", "retail", "test", {"actions": []}), 0)
    call = {**fitting, "payment_method_id": "paypal_0", argument: value}
    assert environment.call("modify_pending_order_items", call).error
    assert environment.equals_untouched()


@cases
def test_what_is_wrong_with_a_folder_is_named(tmp_path, file, text, message):
    folder = write_tau(tmp_path, tau_task())
    (folder / file).unlink() if text is None else (folder / file).write_text(text)
    refused(message, over, "retail", folder)


def test_options_are_checked(tmp_path):
    folder = write_tau(tmp_path, tau_task())
    with pytest.raises(ConfigError, match=r"options.compact: .*known: skip_noop, leave_out, communicate, split"):
        over("retail", folder, compact=True)
    refused("leave_out: 'DB' is none of ACTION, NL_ASSERTION, ENV_ASSERTION", over, "retail", folder, leave_out="DB")


def test_replaying_names_what_it_cannot_use(tmp_path):
    folder = write_tau(tmp_path, tau_task())
    wrong = tmp_path / "wrong.jsonl"
    for line, message in (*TABLE["RECORDINGS"], ("[" * 100_000, r"wrong\.jsonl:1: is no JSON: nested too deeply")):
        wrong.write_text(line)
        refused(message, replay_files, "retail", folder, [wrong])
    refused("'help_desk' loads no official data", replay_files, "help_desk", folder, [wrong])
    packed = bytearray(gzip.compress(bytes(range(256)) * 8))
    packed[20:30] = b"\xff" * 10
    for data in (b"no gzip", packed, packed[:20]):
        (tmp_path / "wrong.jsonl.gz").write_bytes(data)
        refused("cannot be read as recordings", replay_files, "retail", folder, [tmp_path / "wrong.jsonl.gz"])


# ---- tau2-bench's form


def write_tau2(folder: Path, *tasks: Json, splits: Json | None = None) -> Path:
    (folder / "db.json").write_text(json.dumps(shop().tables))
    (folder / "tasks.json").write_text(json.dumps(tasks))
    (folder / "policy.md").write_text("Be kind.")
    if splits is not None:
        (folder / "split_tasks.json").write_text(json.dumps(splits))
    return folder


UNUSED: Json = {"info": None, "compare_args": None}


def tau2_task(number: int = 0, **criteria: object) -> Json:
    whole = changed(copy.deepcopy(TABLE["TAU2_TASK"]), {"id": str(number)})
    whole["evaluation_criteria"] |= {"actions": [{"action_id": "a", **canceling(pending()), **UNUSED}], **criteria}
    return whole


def evaluated(domain: OfficialDomain, task: Task, *texts: str, gold: bool = True) -> Evaluation:
    environment = domain.environment()
    environment.reset(task, 0)
    for action in task.data["actions"] if gold else ():
        environment.call(action["name"], action["arguments"])

    async def verdict() -> Evaluation:
        verdict = environment.evaluate(said(*texts))
        return await verdict if inspect.isawaitable(verdict) else verdict

    return asyncio.run(verdict())


def test_tau2_tasks_are_read_with_their_splits_and_basis(tmp_path):
    splits = {"train": ["1"], "test": ["0"], "base": ["0", "1"]}
    domain = over("retail", write_tau2(tmp_path, tau2_task(0), tau2_task(1, reward_basis=["DB"]), splits=splits))
    (test,), (train,) = domain.tasks("test"), domain.tasks("train")
    assert (test.id, train.id, domain.tasks("validation")) == ("0", "1", ())
    assert test.data["instruction"].split("\n\n") == [
        "Your character: patient",
        "Why you write: Cancel the order.",
        "What you know: You are Ada.",
        "How you behave: Be brief.",
    ]
    assert (evaluated(domain, test).reward, evaluated(domain, test, "12.50 dollars").reward) == (0.0, 1.0)
    assert evaluated(domain, train).reward == 1.0
    assert evaluated(domain, train, gold=False).reward == 0.0
    tools = {schema.name for schema in domain.environment().tools()}
    assert "get_item_details" in tools
    assert "think" not in tools


def test_tau2_actions_count_where_the_basis_has_them(tmp_path):
    read = {"action_id": "b", "name": "get_order_details", "arguments": {"order_id": pending()["order_id"]}}
    partly = {"action_id": "c", "name": "calculate", "arguments": {"expression": "1+1"}, "compare_args": []}
    task = tau2_task(0, actions=[read, partly], communicate_info=[], reward_basis=["DB", "ACTION"])
    domain = over("retail", write_tau2(tmp_path, task))
    (task_,) = domain.tasks("test")
    assert domain.noop_tasks("test") == []
    for calls, reward in (
        ([], 0.0),
        ([("get_order_details", {}), ("calculate", {})], 0.0),
        ([("get_order_details", read["arguments"]), ("calculate", {"expression": "2+2"})], 1.0),
    ):
        environment = opened(task_, domain)
        for name, arguments in calls:
            environment.call(name, arguments)
        assert judged(environment).reward == reward


class FakeEndpoint:
    """Answers as a judge's endpoint would, from a list."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []

    async def chat(self, messages: Any, *, seed: int, response_format: Any = None, accept: Any = None) -> Completion:
        self.asked.append(messages)
        return Completion(self.answers.pop(0))

    def count(self, name: str) -> None:
        pass


def test_tau2_assertions_go_to_the_judge_or_are_left_out_or_refused(tmp_path):
    criteria: Json = {"nl_assertions": ["Agent is kind.", "Agent is brief."], "reward_basis": ["DB", "NL_ASSERTION"]}
    folder = write_tau2(tmp_path, tau2_task(0, **criteria), tau2_task(1, nl_assertions=[], reward_basis=["DB"]))
    refused(r"1 tasks, such as 0, are judged by NL_ASSERTION; configure the section judge", over, "retail", folder)
    left_out = over("retail", folder, leave_out="NL_ASSERTION")
    assert evaluated(left_out, left_out.tasks("test")[0]).reward == 1.0

    def judged(*answers: str, gold: bool = True) -> tuple[Evaluation, FakeEndpoint]:
        endpoint = FakeEndpoint(*answers)
        domain = over("retail", folder, Services(judge=endpoint))  # type: ignore[arg-type]
        assert isinstance(domain.environment(), JudgedEnvironment)
        return evaluated(domain, domain.tasks("test")[0], "Done, my dear.", gold=gold), endpoint

    yes, no = '{"reason": "so", "holds": true}', '{"reason": "so", "holds": false}'
    held, endpoint = judged(yes, yes)
    assert held.reward == 1.0
    assert "Done, my dear." in json.dumps(endpoint.asked)
    denied, _ = judged(yes, no)
    assert (denied.reward, denied.details["denied"]) == (0.0, ["Agent is brief."])
    unasked, endpoint = judged(gold=False)
    assert (unasked.reward, endpoint.asked) == (0.0, [])
    with pytest.raises(JudgeFault):
        judged("perhaps", "maybe", "who knows")


def test_tau2_communication_can_be_asked_for_where_there_is_no_judge(tmp_path):
    task = tau2_task(0, nl_assertions=["Agent names the sum."], reward_basis=["DB", "NL_ASSERTION"])
    folder = write_tau2(tmp_path, task)
    for communicate, reward in ((False, 1.0), (True, 0.0)):
        domain = over("retail", folder, leave_out="NL_ASSERTION", communicate=communicate)
        assert evaluated(domain, domain.tasks("test")[0]).reward == reward
        assert evaluated(domain, domain.tasks("test")[0], "It was 12.5.").reward == 1.0


def test_tau2_environment_assertions_are_refused_unless_left_out(tmp_path):
    assertion = {"env_type": "user", "func_name": "f", "arguments": {}}
    folder = write_tau2(tmp_path, tau2_task(0, env_assertions=[assertion], reward_basis=["DB", "ENV_ASSERTION"]))
    refused("judged by ENV_ASSERTION; leave it out with", over, "retail", folder)
    assert over("retail", folder, leave_out="ENV_ASSERTION").tasks("test")


def test_tau2_initial_states_are_laid_over_the_database(tmp_path):
    order = pending()
    data = {"agent_data": {"orders": {order["order_id"]: {"status": "delivered"}}}}
    task = tau2_task(0, actions=[], communicate_info=[])
    task["initial_state"] = {"initialization_data": data, "initialization_actions": None, "message_history": None}
    domain = over("retail", write_tau2(tmp_path, task))
    environment = opened(domain.tasks("test")[0], domain)
    assert environment.call(**canceling(order)).error
    shown = environment.call("get_order_details", {"order_id": order["order_id"]})
    assert json.loads(shown.text) == {**order, "status": "delivered"}
    assert shop().tables["orders"][order["order_id"]]["status"] == "pending"


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (tau2_task(0, reward_basis=["DB", "LUCK"]), r"task 0: reward_basis names 'LUCK'; known: DB, COMMUNICATE"),
        ({**tau2_task(0), "evaluation_criteria": None}, "task 0: has no evaluation_criteria"),
        ({**tau2_task(0), "initial_state": {"message_history": [{}]}}, "begins in the middle of a conversation"),
    ],
)
def test_what_is_not_supported_of_tau2_is_refused_by_name(tmp_path, task, message):
    refused(message, over, "retail", write_tau2(tmp_path, task))


def test_what_is_no_task_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"task 0: is not of the form of a task: KeyError: 'name'"):
        over("retail", write_tau(tmp_path, tau_task(actions=[{"arguments": {}}])))
    folder = write_tau2(tmp_path, tau2_task(0, actions=[{"name": "think"}]))
    refused(r"tasks\.json, task 0: is not of the form of a task: KeyError: 'arguments'", over, "retail", folder)
    (folder / "tasks.json").write_text("{}")
    refused("must be a list of objects with an id", over, "retail", folder)


def test_a_split_that_names_a_task_which_is_not_there_is_refused(tmp_path):
    refused("split 'train' names task '7'", over, "retail", write_tau2(tmp_path, tau2_task(0), splits={"train": ["7"]}))
