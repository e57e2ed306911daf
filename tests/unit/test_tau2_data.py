"""Folders in tau2-bench's form under retail, airline and telecom: splits, telecom's two sides, verdicts, bad files.

The small folders under tests/data/tau2 are this project's own. With ``MUA_TAU2_BENCH`` the official folders are read
too. Agreement of telecom's tools with the official code, call by call, was looked at by hand: that code is not here.
Judged assertions are tried in test_tau_data.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from tau_support import SMALL, official_tau2

from environments._tau import OfficialDomain
from environments.kit.overlay import digest_of
from environments.telecom.official.user import named
from mua.config.schema import EnvironmentConfig
from mua.endpoint.services import Services
from mua.environment.protocol import Environment, Evaluation, Move, Split, Task, ToolResult, Transcript, UserMove
from mua.environment.registry import get_domain
from mua.environment.selection import Selection
from mua.errors import ConfigError
from mua.types import Json
from tests.desk_support import played_with
from tests.tables import cases_of
from workbench.demonstrate import demonstrate, replay_gold

cases = cases_of("tau2_data")

SPLITS: tuple[Split, ...] = get_args(Split)
LEFT_OUT = {"leave_out": "NL_ASSERTION"}


def over(name: str, folder: Path, **options: object) -> OfficialDomain:
    config = EnvironmentConfig.model_validate({"name": name, "data": folder, "options": options})
    domain = get_domain(name).configured(config, Services())  # type: ignore[attr-defined]
    assert isinstance(domain, OfficialDomain)
    return domain


def telecom(**options: object) -> OfficialDomain:
    return over("telecom", SMALL / "telecom", **options)


def sizes(domain: OfficialDomain) -> tuple[int, ...]:
    return tuple(len(domain.tasks(split)) for split in SPLITS)


def all_tasks(domain: OfficialDomain) -> list[Task]:
    return [task for split in SPLITS for task in domain.tasks(split)]


def rewards(domain: OfficialDomain) -> list[float]:
    async def replayed() -> list[float]:
        return [(await replay_gold(domain, task)).reward for task in all_tasks(domain)]

    return asyncio.run(replayed())


def opened(domain: OfficialDomain, task: Task) -> Any:
    environment = domain.environment()
    environment.reset(task, 0)
    return environment


def judged(environment: Environment, *texts: str) -> Evaluation:
    found = environment.evaluate(Transcript([{"role": "assistant", "content": text} for text in texts]))
    assert isinstance(found, Evaluation)
    return found


def by_kind(domain: OfficialDomain, start: str) -> Task:
    return next(task for task in all_tasks(domain) if task.id.startswith(start))


# ---- all three


@cases
def test_gold_of_every_task_is_rewarded_in_both_ways_to_split_a_folder(name, plain, base):
    for options, expected in (({}, plain), ({"split": "base"}, base)):
        domain = over(name, SMALL / name, **options, **LEFT_OUT)
        assert sizes(domain) == expected
        assert set(rewards(domain)) == {1.0}
        assert {task.split for task in domain.tasks("test")} == {"test"}


@pytest.mark.parametrize(("name", "tasks"), [("retail", 114), ("airline", 50), ("telecom", 114)])
def test_gold_of_the_official_tasks_is_rewarded(name, tasks):
    domain = over(name, official_tau2(name), split="base", **LEFT_OUT)
    assert sizes(domain) == (0, 0, tasks)
    assert set(rewards(domain)) == {1.0}
    if name == "telecom":
        assert domain.noop_tasks("test") == []


def test_in_a_mix_each_domain_loads_its_own_folder():
    options = {"retail.leave_out": "NL_ASSERTION", "telecom.split": "base"}
    mix = {"retail": 1, "telecom": 1, "agentbench_db": 1}
    config = EnvironmentConfig.model_validate({"mix": mix, "data": SMALL, "options": options})
    domains = Selection.from_config(config).domains
    assert {name: len(domain.tasks("test")) for name, domain in domains.items()} == {
        "retail": 2,
        "telecom": 9,
        "agentbench_db": 120,
    }


def test_other_sets_are_the_test_split_when_they_are_asked_for():
    assert [task.id[:15] for task in telecom(split="small").tasks("test")] == ["[service_issue]"]
    with pytest.raises(ConfigError, match=r"split: .*names no split 'huge'; it has: small, train, test, base, full"):
        telecom(split="huge")
    with pytest.raises(ConfigError, match=r"split 'full' names task '\[mms_issue\]one_that_.*does not have"):
        telecom(split="full")


def copy(tmp_path: Path, name: str, change: Callable[[Path], object]) -> Path:
    folder = tmp_path / name
    shutil.copytree(SMALL / name, folder)
    change(folder)
    return folder


def rewritten(file: str, change: Callable[[Any], Any]) -> Callable[[Path], object]:
    def rewrite(folder: Path) -> None:
        value = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(change(value)))

    return rewrite


def test_a_folder_without_a_file_of_splits_is_all_test_and_one_with_base_alone_too(tmp_path):
    bare = copy(tmp_path, "airline", lambda folder: (folder / "split_tasks.json").unlink())
    assert sizes(over("airline", bare)) == (0, 0, 3)
    with pytest.raises(ConfigError, match="it has: none, since the folder has no split_tasks"):
        over("airline", bare, split="base")
    (bare / "split_tasks.json").write_text('{"base": [0, "2"]}')
    assert [task.id for task in over("airline", bare).tasks("test")] == ["0", "2"]
    (bare / "split_tasks.json").write_text('{"dev": ["1"], "test": ["0"]}')
    assert sizes(over("airline", bare)) == (0, 1, 1)


@cases
def test_splits_that_lose_or_double_a_task_are_refused(tmp_path, splits, message):
    with pytest.raises(ConfigError, match=message):
        over("airline", copy(tmp_path, "airline", rewritten("split_tasks.json", lambda _: splits)))


@cases
def test_options_have_their_types(options, message):
    with pytest.raises(ConfigError, match=message):
        over("retail", SMALL / "retail", **options)


def test_two_tasks_with_one_id_are_refused(tmp_path):
    doubled = copy(tmp_path, "airline", rewritten("tasks.json", lambda tasks: [*tasks, tasks[0]]))
    with pytest.raises(ConfigError, match=r"tasks\.json, task 3: another task has the id '0' too"):
        over("airline", doubled)


def test_files_that_are_none_deep_or_large_are_refused_at_once(tmp_path, monkeypatch):
    folder = copy(tmp_path, "airline", lambda _: None)
    (folder / "tasks.json").write_text('{"a": 1, "a": 2}')
    with pytest.raises(ConfigError, match="the key 'a' appears twice"):
        over("airline", folder)
    (folder / "tasks.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        over("airline", folder)
    (folder / "tasks.json").unlink()
    os.mkfifo(folder / "tasks.json")
    with pytest.raises(ConfigError, match=r"tasks\.json: cannot be read as text: .*not a regular file"):
        over("airline", folder)
    monkeypatch.setattr("environments._tau.folder.MAX_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"db\.json: has more than 1,000 bytes"):
        over("airline", SMALL / "airline")


# ---- telecom: the tasks


def test_doing_nothing_and_telling_much_earn_nothing_in_any_task():
    domain = telecom()
    assert domain.noop_tasks("train") == domain.noop_tasks("test") == []
    for task in all_tasks(domain):
        assert judged(opened(domain, task), "roaming is enabled, all is well").reward == 0.0, task.id


def test_each_gold_call_is_needed():
    """Leaving out any one gold call costs the reward, so that nothing holds by accident."""
    domain = telecom()
    for task in all_tasks(domain):
        moves = list(domain.gold(task))
        for left_out in range(len(moves)):
            environment = opened(domain, task)
            _play(environment, [move for index, move in enumerate(moves) if index != left_out])
            texts = [move for index, move in enumerate(moves) if index != left_out and isinstance(move, str)]
            assert judged(environment, *texts).reward == 0.0, (task.id, moves[left_out])


def _play(environment: Any, moves: list[Move]) -> None:
    for move in moves:
        if isinstance(move, UserMove):
            environment.user_call(move.name, move.arguments)
        elif not isinstance(move, str):
            environment.call(*move)


def test_policy_kind_and_page_of_the_user():
    domain = telecom()
    policy = domain.system_prompt("full")
    assert policy.startswith("<main_policy>\n# Brook")
    assert policy.rstrip().endswith("</tech_support_policy>")
    assert "# By hand" in policy
    assert "# Step by step" in telecom(policy="workflow").system_prompt("full")
    with pytest.raises(ConfigError, match="policy: 'solo' is none of manual, workflow"):
        telecom(policy="solo")
    task = by_kind(domain, "[mobile_data_issue]bad_network")
    assert task.data["kind"] == "mobile_data_issue"
    assert domain.persona(task).startswith("Your character: You explain everything twice.")


def test_initial_data_replaces_lists_and_merges_the_user():
    domain = telecom()
    environment = opened(domain, by_kind(domain, "[line]"))
    assert json.loads(environment.call("get_details_by_id", {"id": "L1"}).text)["suspension_start_date"] == "2024-10-02"
    assert "battery 12%" in environment.user_call("check_status_bar", {}).text
    assert [tool.name for tool in environment.user_tools()] == ["check_status_bar"]
    assert environment.user_call("reboot_device", {}).error


def test_no_episode_writes_to_the_base_or_to_another():
    domain = telecom()
    before = digest_of(domain.desk.base.tables)
    for task in all_tasks(domain):
        _play(opened(domain, task), list(domain.gold(task)))
    assert digest_of(domain.desk.base.tables) == before
    assert set(rewards(domain)) == {1.0}


# ---- telecom: the tools


@pytest.fixture(name="phone")
def fixture_phone() -> Any:
    """Of a task that begins with nothing wrong."""
    domain = telecom()
    return opened(domain, by_kind(domain, "[roaming]"))


def did(environment: Any, name: str, **arguments: object) -> str:
    result = environment.user_call(name, arguments)
    assert isinstance(result, ToolResult)
    assert not result.error, result.text
    return result.text


def test_names_are_the_official_ones(phone):
    assert [tool.name for tool in phone.tools()] == [
        "get_customer_by_phone",
        "get_customer_by_id",
        "get_customer_by_name",
        "get_details_by_id",
        "suspend_line",
        "resume_line",
        "get_bills_for_customer",
        "send_payment_request",
        "get_data_usage",
        "enable_roaming",
        "disable_roaming",
        "transfer_to_human_agents",
        "refuel_data",
    ]
    assert len(phone.user_tools()) == 30


@cases
def test_speed_is_that_of_technology_signal_and_brakes(phone, mode, saver, expected):
    """Middle of the technology's range, times the signal's share, times 0.2 for Data Saver; there is no 2G here."""
    did(phone, "set_network_mode_preference", mode=mode)
    if saver:
        did(phone, "toggle_data_saver_mode")
    assert expected in did(phone, "run_speed_test")


def test_airplane_mode_ends_the_vpn_and_service_and_comes_back_without_the_vpn(phone):
    did(phone, "connect_vpn")
    assert "no_service" not in did(phone, "check_network_status")
    assert "airplane mode | battery" in did(phone, "toggle_airplane_mode")
    assert "cannot be changed in airplane mode" in did(phone, "toggle_wifi")
    assert "signal excellent | 5G" in did(phone, "toggle_airplane_mode")
    assert did(phone, "check_vpn_status") == "The VPN is OFF."


def test_apn_settings_are_reset_by_the_next_restart_alone(phone):
    did(phone, "set_apn_settings", apn_settings={"apn_name": "broken", "mmsc_url": None})
    assert "no_service" in did(phone, "check_network_status")
    did(phone, "reset_apn_settings")
    assert "broken" in did(phone, "check_apn_settings")
    did(phone, "reboot_device")
    assert "internet" in did(phone, "check_apn_settings")
    assert did(phone, "can_send_mms") == "Picture messages can be sent."
    for wrong in ({"apn_name": "fast"}, {"apn": "internet"}, 3):
        assert phone.user_call("set_apn_settings", {"apn_settings": wrong}).error


def test_a_payment_reaches_the_carrier_and_the_next_request_the_phone(phone):
    asked = {"customer_id": "C1", "bill_id": "B2"}
    assert did(phone, "check_payment_request") == did(phone, "make_payment") == "Nobody asks for a payment."
    assert not phone.call("send_payment_request", asked).error
    assert phone.call("send_payment_request", {**asked, "bill_id": "B1"}).error
    assert "54.0 USD" in did(phone, "check_payment_request")
    did(phone, "make_payment")
    assert json.loads(phone.call("get_details_by_id", {"id": "B2"}).text)["status"] == "Paid"
    assert did(phone, "check_payment_request") == "Nobody asks for a payment."


def test_refuelling_charges_the_next_bill_once_made(phone):
    line = {"customer_id": "C1", "line_id": "L1"}
    for _ in range(2):
        assert json.loads(phone.call("refuel_data", {**line, "gb_amount": 2.0}).text)["charge"] == "3.0"
    bills = json.loads(phone.call("get_bills_for_customer", {"customer_id": "C1", "limit": 1}).text)
    assert [(bill["status"], bill["total_due"], len(bill["line_items"])) for bill in bills] == [("Draft", 6.0, 2)]
    assert json.loads(phone.call("get_data_usage", line).text)["data_refueling_gb"] == "4.0"
    for wrong in (0, -1.0, "much", None):
        assert phone.call("refuel_data", {**line, "gb_amount": wrong}).error


@pytest.mark.parametrize("value", [None, 5, [], {}, "", ["x"], {"a": 1}, True])
def test_arguments_of_any_type_are_answered(phone, value):
    before = digest_of(phone.state.changes())
    calls = [(phone.call, tool) for tool in phone.tools()] + [(phone.user_call, tool) for tool in phone.user_tools()]
    for call, tool in calls:
        arguments = dict.fromkeys(tool.parameters["properties"], value)
        if arguments and tool.name not in ("transfer_to_human_agents", "set_apn_settings"):
            assert isinstance(call(tool.name, arguments), ToolResult)
    assert digest_of(phone.state.changes()) == before


# ---- telecom: the user by rules


def test_the_user_does_what_is_named_and_asks_which():
    domain = telecom()
    tools = domain.desk.user_schemas
    text = "Please toggle roaming, then check_app_permissions of Messaging and toggle_wifi_calling."
    assert [tool.name for tool, _ in named(text, tools)] == [
        "toggle_roaming",
        "check_app_permissions",
        "toggle_wifi_calling",
    ]
    task = by_kind(domain, "[mms_issue]")

    def moves() -> Any:
        answer = yield "Please reset_apn_settings, reboot_device, and grant app permission."
        assert answer.endswith("For grant app permission: which one?")
        answer = yield "Please grant_app_permission to messaging: sms. Then toggle_wifi_calling and can_send_mms."
        assert "Picture messages can be sent." in answer
        for _ in range(6):
            yield "That is done. Is there anything else?"

    async def talk() -> Any:
        environment, user = domain.environment(), domain.scripted_user(task, 0)
        environment.reset(task, 0)
        return await played_with(environment, user, moves())

    found = asyncio.run(talk())
    assert (found.reward, found.ended) == (1.0, True)


def test_a_conversation_with_the_user_by_rules_ends():
    domain = telecom()
    found = asyncio.run(demonstrate(domain, domain.tasks("train")[0], 0))
    assert 0 < len(found.messages[0]["content"]) < 0.5 * len(domain.tasks("train")[0].data["instruction"])


# ---- telecom: bad files


def _broken(table: str, change: Callable[[str], str]) -> Callable[[Path], object]:
    def rewrite(folder: Path) -> None:
        (folder / table).write_text(change((folder / table).read_text()))

    return rewrite


def _first(key: str, value: Any) -> Callable[[Any], Any]:
    def change(tasks: list[Json]) -> list[Json]:
        inside = tasks[0]
        *path, last = key.split("/")
        for step in path:
            inside = inside[int(step) if step.isdecimal() else step]
        inside[last] = value
        return tasks

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "db.toml").unlink(), r"has no db\.toml \(or db\.json\)"),
        (lambda folder: (folder / "main_policy.md").unlink(), r"has no main_policy\.md"),
        (lambda folder: (folder / "tech_support_manual.md").unlink(), r"has no tech_support_manual\.md"),
        (_broken("db.toml", lambda text: text + "\n= 3"), r"db\.toml: is no TOML: .*line \d+"),
        (_broken("db.toml", lambda text: "a = " + "[" * 100_000), r"db\.toml: is no TOML|nested too deeply"),
        (
            _broken("db.toml", lambda text: text.replace('"L2"', '"L1"', 1)),
            r"lines\[1\]: another record has",
        ),
        (
            _broken("db.toml", lambda text: text.replace("data_limit_gb = 5.0", "")),
            r"plans\[0\]: data_limit_gb: Field",
        ),
        (_broken("db.toml", lambda text: text.replace('"Paid"', '"Gone"')), r"bills\[0\]: status: "),
        (_broken("db.toml", lambda text: text.replace("2026-12-31", '"soon"')), r"lines\[0\]: contract_end_date: "),
        (_broken("db.toml", lambda text: text + "\n[[shops]]\nid = 1"), r"'shops' is none of plans, customers"),
        (_broken("user_db.toml", lambda text: text.replace("64", '"full"')), r"user_db\.toml.*device: battery_level"),
        (_broken("user_db.toml", lambda text: text + "\n[device]\n"), r"user_db\.toml: is no TOML"),
        (
            _broken("user_db.toml", lambda text: '[surroundings]\nphone_number = "5"\n'),
            r"surroundings\.phone_number: there is no line with the number 5",
        ),
        (
            rewritten("tasks.json", _first("initial_state/initialization_actions/0/func_name", "burn")),
            r"task \[mobile_data_issue\]user_abroad.*initialization_actions: there is no function 'burn' of env_type",
        ),
        (
            rewritten("tasks.json", _first("initial_state/initialization_actions/0/arguments", {"name": "x"})),
            r"initialization_actions: set_user_info lacks the argument 'phone_number'",
        ),
        (
            rewritten("tasks.json", _first("evaluation_criteria/env_assertions/0/func_name", "toggle_data")),
            r"env_assertions: there is no function 'toggle_data' of env_type 'user'",
        ),
        (
            rewritten("tasks.json", _first("evaluation_criteria/env_assertions/0/arguments", {"when": 1})),
            r"env_assertions: assert_mobile_data_status lacks the argument 'expected_status'",
        ),
        (rewritten("tasks.json", _first("evaluation_criteria", None)), "has no evaluation_criteria"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        over("telecom", copy(tmp_path, "telecom", change))


def test_an_initial_state_that_cannot_be_had_is_named_when_the_task_begins(tmp_path):
    data = {"agent_data": {"cars": []}, "user_data": None}
    folder = copy(tmp_path, "telecom", rewritten("tasks.json", _first("initial_state/initialization_data", data)))
    domain = over("telecom", folder)
    with pytest.raises(ConfigError, match=r"initial_state cannot be had: agent_data: there is no list 'cars'"):
        opened(domain, domain.tasks("train")[0])


def test_the_databases_may_be_json(tmp_path):
    import tomllib

    def convert(folder: Path) -> None:
        for name in ("db", "user_db"):
            value = tomllib.loads((folder / f"{name}.toml").read_text())
            (folder / f"{name}.json").write_text(json.dumps(value, default=str))
            (folder / f"{name}.toml").unlink()

    domain = over("telecom", copy(tmp_path, "telecom", convert))
    assert domain.desk.base.digest() == telecom().desk.base.digest()
