"""Official data of tau-bench and tau2-bench under retail: folders, tasks, recordings, what the reward is made of.

Tests of agreement read the official data (tests/tau_support.py) and skip without it; the others make small folders of
their own. tau2-bench's official files are not at hand: its format is tried on folders in its form. Airline has its own.
"""

from __future__ import annotations

import asyncio
import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from tau_support import official
from typer.testing import CliRunner

from environments._tau import OfficialDomain
from environments._tau.environment import JudgedEnvironment, OfficialEnvironment
from environments.retail import DOMAIN
from environments.retail.shop import shop
from environments.retail.tools import TOOLS
from mua.cli import app
from mua.config.schema import EnvironmentConfig
from mua.endpoint.services import Services
from mua.environment.protocol import Evaluation, Split, Task, ToolResult, Transcript
from mua.errors import ConfigError, JudgeFault
from mua.types import Json
from tests.counting import operations
from workbench.demonstrate import replay_gold
from workbench.recordings import replay_files

SPLITS: tuple[Split, ...] = get_args(Split)


def over(folder: Path, services: Services | None = None, **settings: object) -> OfficialDomain:
    config = EnvironmentConfig.model_validate({"name": "retail", "data": folder, **settings})
    domain = DOMAIN.configured(config, services or Services())
    assert isinstance(domain, OfficialDomain)
    return domain


def all_tasks(domain: OfficialDomain) -> list[Task]:
    return [task for split in SPLITS for task in domain.tasks(split)]


def said(*texts: str) -> Transcript:
    return Transcript([{"role": "assistant", "content": text} for text in texts])


def recordings(folder: Path) -> list[Path]:
    return sorted(folder.glob("recorded_*.jsonl.gz"))


# ---- agreement with the official tools


def test_every_recording_agrees():
    folder = official("retail")
    files = recordings(folder)
    found = replay_files("retail", folder, files)
    assert found.recordings >= 1560
    assert found.failures > 500
    assert found.disagreements == []


def _wrong_answer(recording: Json) -> None:
    step = next(step for step in recording["steps"] if step["answer"].startswith("{"))
    step["answer"] = json.dumps({**json.loads(step["answer"]), "status": "lost"})


def _a_failure_that_was_none(recording: Json) -> None:
    recording["steps"][0]["answer"] = "Error: order not found"


def _a_success_that_was_none(recording: Json) -> None:
    recording["steps"].append({"name": "no_such_tool", "arguments": {}, "answer": "{}"})


def _wrong_verdict(key: str) -> Callable[[Json], None]:
    def tamper(recording: Json) -> None:
        recording[key] = not recording[key]

    return tamper


@pytest.mark.parametrize(
    ("tamper", "reported"),
    [
        (_wrong_answer, "at /status recorded lost, here cancelled"),
        (_a_failure_that_was_none, "recorded Error"),
        (_a_success_that_was_none, "there is no tool"),
        (_wrong_verdict("database_equals_gold"), "database equals gold: recorded False, here True"),
        (_wrong_verdict("database_equals_untouched"), "database equals untouched: recorded True, here False"),
    ],
)
def test_the_command_reports_what_was_tampered_with(tmp_path, tamper, reported):
    folder = official("retail")
    with gzip.open(folder / "recorded_dev.jsonl.gz", "rt") as file:
        lines = [json.loads(line) for line in file]
    tamper(lines[0])
    path = tmp_path / "recorded.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    result = CliRunner().invoke(app, ["env", "replay", "retail", "--data", str(folder), str(path)])
    assert result.exit_code == 1
    assert reported in result.output
    assert "1 disagree" in result.output


def test_the_command_is_content_with_what_was_recorded_and_shows_ten_disagreements_at_most(tmp_path):
    folder = official("retail")
    arguments = ["env", "replay", "retail", "--data", str(folder)]
    result = CliRunner().invoke(app, [*arguments, str(folder / "recorded_dev.jsonl.gz")])
    assert result.exit_code == 0
    assert "all agree" in result.output
    with gzip.open(folder / "recorded_dev.jsonl.gz", "rt") as file:
        lines = [json.loads(line) for line in file]
    for line in lines:
        _wrong_verdict("database_equals_gold")(line)
    (tmp_path / "wrong.jsonl").write_text("\n".join(map(json.dumps, lines)))
    result = CliRunner().invoke(app, [*arguments, str(tmp_path / "wrong.jsonl")])
    assert result.exit_code == 1
    assert result.output.count("database equals gold: recorded") == 10
    assert f"... and {len(lines) - 10} more" in result.output


def test_tools_have_the_official_names_arguments_types_and_order():
    theirs = json.loads((official("retail") / "tools.json").read_text())
    ours = [tool.schema.openai() for tool in TOOLS]
    assert [_facts(tool) for tool in ours] == [_facts(tool) for tool in theirs]


def _facts(tool: Json) -> Any:
    """The tool without its descriptions, lists of names in their order."""
    function = tool["function"]
    properties = function["parameters"]["properties"]
    return function["name"], list(properties), function["parameters"]["required"], _undescribed(properties)


def _undescribed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _undescribed(inner) for key, inner in value.items() if key != "description" or inner == {}}
    return value


def test_our_words_and_data_are_our_own():
    folder = official("retail")
    theirs = json.loads((folder / "tools.json").read_text())
    described = {tool["function"]["description"] for tool in theirs}
    assert not described & {tool.schema.description for tool in TOOLS}
    for table, name in (("products", lambda row: row["name"]), ("users", lambda row: row["email"])):
        official_rows = json.loads(gzip.decompress((folder / f"{table}.json.gz").read_bytes()))
        assert not official_rows.keys() & shop().tables[table].keys()
        assert not {name(row) for row in official_rows.values()} & {name(row) for row in shop().tables[table].values()}


def test_gold_is_rewarded_in_every_official_task():
    domain = over(official("retail"))
    assert {split: len(domain.tasks(split)) for split in SPLITS} == {"train": 500, "validation": 20, "test": 115}
    assert domain.system_prompt("full").startswith("# Retail agent policy")

    async def all_replayed() -> list[float]:
        return [(await replay_gold(domain, task)).reward for task in all_tasks(domain)]

    assert set(asyncio.run(all_replayed())) == {1.0}


def test_tasks_that_reward_idling_are_known_and_can_be_left_out():
    folder = official("retail")
    domain = over(folder)
    for split in SPLITS:
        idle = []
        for task in domain.tasks(split):
            environment = domain.environment()
            environment.reset(task, 0)
            verdict = environment.evaluate(said())
            assert isinstance(verdict, Evaluation)
            if verdict.reward:
                idle.append(task.id)
        assert [task.id for task in domain.noop_tasks(split)] == idle
        kept = over(folder, options={"skip_noop": True}).tasks(split)
        assert {task.id for task in kept} == {task.id for task in domain.tasks(split)} - set(idle)
    assert domain.noop_tasks("test")


def test_a_gold_rollout_with_its_verdict_costs_little_beside_a_copy_of_the_database():
    domain = over(official("retail"))
    tasks = domain.tasks("test")

    def rollouts() -> None:
        for task in tasks:
            environment = domain.environment()
            environment.reset(task, 0)
            for action in task.data["actions"]:
                environment.call(action["name"], action["arguments"])
            environment.evaluate(said())
            environment.close()

    rollouts()  # the gold states of all tasks are found once
    assert operations(rollouts) / len(tasks) * 50 < operations(lambda: copy.deepcopy(domain.desk.base.tables))


# ---- folders


def write_tau(folder: Path, *tasks: Json) -> Path:
    for name, rows in shop().tables.items():
        (folder / f"{name}.json").write_text(json.dumps(rows))
    (folder / "policy.md").write_text("Be kind.")
    (folder / "tasks_test.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    return folder


def pending() -> Json:
    return next(order for order in shop().tables["orders"].values() if order["status"] == "pending")


def cancelling(order: Json) -> Json:
    arguments = {"order_id": order["order_id"], "reason": "no longer needed"}
    return {"name": "cancel_pending_order", "arguments": arguments}


def tau_task(**changes: object) -> Json:
    return {
        "id": "t0",
        "user_id": "u",
        "instruction": "You are Ada. Cancel it.",
        "actions": [cancelling(pending())],
        "outputs": ["12.5"],
        **changes,
    }


def test_a_folder_of_plain_files_is_read(tmp_path):
    domain = over(write_tau(tmp_path, tau_task()))
    (task,) = domain.tasks("test")
    assert domain.tasks("train") == domain.tasks("validation") == ()
    assert (task.id, task.data["kind"], task.data["difficulty"]) == ("t0", "cancel_pending_order", "easy")
    assert task.data["statements"] == [["12.5"]]
    assert domain.persona(task) == "You are Ada. Cancel it."
    assert domain.system_prompt("full") == "Be kind."
    assert domain.noop_tasks("test") == []


def test_types_are_checked_on_our_data_and_left_to_the_tools_on_official_data(tmp_path):
    domain = over(write_tau(tmp_path, tau_task()))
    (task,) = domain.tasks("test")
    address = dict.fromkeys(("address1", "address2", "city", "state", "country"), "x") | {"zip": 12345}
    call = {"order_id": pending()["order_id"], **address}
    for chosen, error in ((domain, False), (DOMAIN, True)):
        environment = chosen.environment()
        environment.reset(task if chosen is domain else DOMAIN.tasks("test")[0], 0)
        result = environment.call("modify_pending_order_address", call)
        assert isinstance(result, ToolResult)
        assert result.error == error


@pytest.mark.parametrize("value", [None, 5, [], {}, "", ["x"], {"a": 1}, True])
@pytest.mark.parametrize("argument", ["order_id", "item_ids", "new_item_ids", "payment_method_id"])
def test_arguments_of_any_type_are_answered_and_refused_without_a_trace(tmp_path_factory, argument, value):
    desk = _lenient(tmp_path_factory)
    order = pending()
    fitting = {"order_id": order["order_id"], "item_ids": [order["items"][0]["item_id"]], "new_item_ids": ["0"]}
    environment = OfficialEnvironment(desk)
    environment.reset(Task("t", "retail", "test", {"actions": []}), 0)
    call = {**fitting, "payment_method_id": "paypal_0", argument: value}
    assert environment.call("modify_pending_order_items", call).error
    assert environment.equals_untouched()


_DESKS: list[Any] = []


def _lenient(factory: pytest.TempPathFactory) -> Any:
    if not _DESKS:
        _DESKS.append(over(write_tau(factory.mktemp("tau"), tau_task())).desk)
    return _DESKS[0]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "orders.json").unlink(), r"has no orders\.json \(or orders\.json\.gz\)"),
        (lambda folder: (folder / "policy.md").unlink(), r"has no policy\.md"),
        (lambda folder: (folder / "users.json").write_text("["), r"users\.json: is no JSON"),
        (lambda folder: (folder / "users.json").write_text("[]"), r"table 'users' must be a JSON object of records"),
        (lambda folder: (folder / "tasks_test.jsonl").unlink(), r"holds no tasks"),
        (lambda folder: (folder / "tasks_test.jsonl").write_text("{"), r"tasks_test\.jsonl, line 1: is no JSON"),
        (lambda folder: (folder / "tasks_test.jsonl").write_text("[]"), r"line 1: must be a JSON object"),
        (lambda folder: (folder / "tasks_test.jsonl").write_text("{}"), r"task 0: 'id' must be a text"),
        (lambda folder: (folder / "tasks_test.jsonl.gz").write_bytes(b"x"), None),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(tmp_path, spoil, message):
    folder = write_tau(tmp_path, tau_task())
    spoil(folder)
    if message is None:
        assert over(folder).tasks("test")  # the plain file comes first
        return
    with pytest.raises(ConfigError, match=message):
        over(folder)


def test_options_are_checked(tmp_path):
    folder = write_tau(tmp_path, tau_task())
    with pytest.raises(
        ConfigError, match="has no option 'compact' on official data; known: skip_noop, leave_out, communicate, split"
    ):
        over(folder, options={"compact": True})
    with pytest.raises(ConfigError, match="leave_out: 'DB' is none of ACTION, NL_ASSERTION, ENV_ASSERTION"):
        over(folder, options={"leave_out": "DB"})


def test_replaying_names_what_it_cannot_use(tmp_path):
    folder = write_tau(tmp_path, tau_task())
    wrong = tmp_path / "wrong.jsonl"
    verdicts = {"database_equals_gold": True, "database_equals_untouched": True}
    for line, message in (
        ("{", r"wrong\.jsonl:1: is no JSON"),
        ("[]", r"wrong\.jsonl:1: is no recording: it must be a JSON object"),
        ("{}", r"wrong\.jsonl:1: is no recording: 'task' is missing"),
        (json.dumps({"task": "t0", "steps": [{"name": "think"}], **verdicts}), "step 1: 'arguments' is missing"),
        ("[" * 100_000, r"wrong\.jsonl:1: is no JSON: nested too deeply"),
        (
            json.dumps({"task": "t0", "steps": [{"name": "think", "arguments": 1, "answer": ""}], **verdicts}),
            "step 1: 'arguments' is missing or of another type",
        ),
        (json.dumps({"task": "t9", "steps": [], **verdicts}), "has no task 't9'"),
    ):
        wrong.write_text(line)
        with pytest.raises(ConfigError, match=message):
            replay_files("retail", folder, [wrong])
    with pytest.raises(ConfigError, match="'help_desk' loads no official data"):
        replay_files("help_desk", folder, [wrong])
    packed = bytearray(gzip.compress(bytes(range(256)) * 8))
    packed[20:30] = b"\xff" * 10
    for data in (b"no gzip", packed, packed[:20]):
        (tmp_path / "wrong.jsonl.gz").write_bytes(data)
        with pytest.raises(ConfigError, match="cannot be read as recordings"):
            replay_files("retail", folder, [tmp_path / "wrong.jsonl.gz"])


# ---- tau2-bench's form


def write_tau2(folder: Path, *tasks: Json, splits: Json | None = None) -> Path:
    (folder / "db.json").write_text(json.dumps(shop().tables))
    (folder / "tasks.json").write_text(json.dumps(tasks))
    (folder / "policy.md").write_text("Be kind.")
    if splits is not None:
        (folder / "split_tasks.json").write_text(json.dumps(splits))
    return folder


def tau2_task(number: int = 0, **criteria: object) -> Json:
    instructions = {
        "domain": "retail",
        "reason_for_call": "Cancel the order.",
        "known_info": "You are Ada.",
        "unknown_info": None,
        "task_instructions": "Be brief.",
    }
    action = {"action_id": "a", **cancelling(pending()), "info": None, "compare_args": None}
    return {
        "id": str(number),
        "user_scenario": {"persona": "patient", "instructions": instructions},
        "initial_state": None,
        "evaluation_criteria": {
            "actions": [action],
            "communicate_info": ["12.5"],
            "nl_assertions": [],
            "reward_basis": ["DB", "COMMUNICATE"],
            **criteria,
        },
    }


def evaluated(domain: OfficialDomain, task: Task, *texts: str, gold: bool = True) -> Evaluation:
    environment = domain.environment()
    environment.reset(task, 0)
    for action in task.data["actions"] if gold else ():
        environment.call(action["name"], action["arguments"])

    async def verdict() -> Evaluation:
        given = environment.evaluate(said(*texts))
        return given if isinstance(given, Evaluation) else await given

    return asyncio.run(verdict())


def test_tau2_tasks_are_read_with_their_splits_and_basis(tmp_path):
    splits = {"train": ["1"], "test": ["0"], "base": ["0", "1"]}
    domain = over(write_tau2(tmp_path, tau2_task(0), tau2_task(1, reward_basis=["DB"]), splits=splits))
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
    domain = over(write_tau2(tmp_path, task))
    (task_,) = domain.tasks("test")
    assert domain.noop_tasks("test") == []
    for calls, reward in (
        ([], 0.0),
        ([("get_order_details", {}), ("calculate", {})], 0.0),
        ([("get_order_details", read["arguments"]), ("calculate", {"expression": "2+2"})], 1.0),
    ):
        environment = domain.environment()
        environment.reset(task_, 0)
        for name, arguments in calls:
            environment.call(name, arguments)
        verdict = environment.evaluate(said())
        assert isinstance(verdict, Evaluation)
        assert verdict.reward == reward


class FakeEndpoint:
    """Answers as a judge's endpoint would, from a list."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []

    async def complete(self, messages: Any, *, seed: int, response_format: Any = None, accept: Any = None) -> str:
        self.asked.append(messages)
        return self.answers.pop(0)

    def count(self, name: str) -> None:
        pass


def test_tau2_assertions_go_to_the_judge_or_are_left_out_or_refused(tmp_path):
    criteria: Json = {"nl_assertions": ["Agent is kind.", "Agent is brief."], "reward_basis": ["DB", "NL_ASSERTION"]}
    folder = write_tau2(tmp_path, tau2_task(0, **criteria), tau2_task(1, nl_assertions=[], reward_basis=["DB"]))
    with pytest.raises(
        ConfigError, match=r"1 tasks, such as 0, are judged by NL_ASSERTION; configure the section judge"
    ):
        over(folder)
    left_out = over(folder, options={"leave_out": "NL_ASSERTION"})
    assert evaluated(left_out, left_out.tasks("test")[0]).reward == 1.0

    def judged(*answers: str, gold: bool = True) -> tuple[Evaluation, FakeEndpoint]:
        endpoint = FakeEndpoint(*answers)
        domain = over(folder, Services(judge=endpoint))  # type: ignore[arg-type]
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
        domain = over(folder, options={"leave_out": "NL_ASSERTION", "communicate": communicate})
        assert evaluated(domain, domain.tasks("test")[0]).reward == reward
        assert evaluated(domain, domain.tasks("test")[0], "It was 12.5.").reward == 1.0


def test_tau2_environment_assertions_are_refused_unless_left_out(tmp_path):
    assertion = {"env_type": "user", "func_name": "f", "arguments": {}}
    folder = write_tau2(tmp_path, tau2_task(0, env_assertions=[assertion], reward_basis=["DB", "ENV_ASSERTION"]))
    with pytest.raises(ConfigError, match="judged by ENV_ASSERTION; leave it out with"):
        over(folder)
    assert over(folder, options={"leave_out": "ENV_ASSERTION"}).tasks("test")


def test_tau2_initial_states_are_laid_over_the_database(tmp_path):
    order = pending()
    data = {"agent_data": {"orders": {order["order_id"]: {"status": "delivered"}}}}
    task = tau2_task(0, actions=[], communicate_info=[])
    task["initial_state"] = {"initialization_data": data, "initialization_actions": None, "message_history": None}
    domain = over(write_tau2(tmp_path, task))
    environment = domain.environment()
    environment.reset(domain.tasks("test")[0], 0)
    refused = environment.call(**_named(cancelling(order)))
    assert isinstance(refused, ToolResult)
    assert refused.error
    shown = environment.call("get_order_details", {"order_id": order["order_id"]})
    assert isinstance(shown, ToolResult)
    assert json.loads(shown.text) == {**order, "status": "delivered"}
    assert shop().tables["orders"][order["order_id"]]["status"] == "pending"


def _named(action: Json) -> Json:
    return {"name": action["name"], "arguments": action["arguments"]}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (tau2_task(0, reward_basis=["DB", "LUCK"]), r"task 0: reward_basis names 'LUCK'; known: DB, COMMUNICATE"),
        ({**tau2_task(0), "evaluation_criteria": None}, "task 0: has no evaluation_criteria"),
        ({**tau2_task(0), "initial_state": {"message_history": [{}]}}, "begins in the middle of a conversation"),
    ],
)
def test_what_is_not_supported_of_tau2_is_refused_by_name(tmp_path, task, message):
    with pytest.raises(ConfigError, match=message):
        over(write_tau2(tmp_path, task))


def test_what_is_no_task_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"task 0: is not of the form of a task: KeyError: 'name'"):
        over(write_tau(tmp_path, tau_task(actions=[{"arguments": {}}])))
    folder = write_tau2(tmp_path, tau2_task(0, actions=[{"name": "think"}]))
    with pytest.raises(ConfigError, match=r"tasks\.json, task 0: is not of the form of a task: KeyError: 'arguments'"):
        over(folder)
    (folder / "tasks.json").write_text("{}")
    with pytest.raises(ConfigError, match="must be a list of objects with an id"):
        over(folder)


def test_a_split_that_names_a_task_which_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="split 'train' names task '7'"):
        over(write_tau2(tmp_path, tau2_task(0), splits={"train": ["7"]}))
