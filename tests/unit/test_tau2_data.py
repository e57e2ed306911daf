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
import tomllib
from pathlib import Path
from typing import Any

import pytest

from environments._tau import OfficialDomain
from environments.kit.database import DatabaseEnvironment
from environments.kit.demonstrate import demonstrate, replay_gold
from environments.kit.overlay import digest_of
from environments.telecom.official.user import named
from mua.config.schema import EnvironmentConfig
from mua.environment.protocol import Move, Task, ToolResult, UserMove
from mua.environment.selection import Selection
from mua.utils.errors import ConfigError
from tests.desk_support import SPLITS, judged, opened, played_with
from tests.tables import cases_of, changed, refused, table
from tests.tau_support import SMALL, official_tau2, over, tasks_of

cases, TABLE = cases_of("tau2_data"), table("tau2_data")

LEFT_OUT = {"leave_out": "NL_ASSERTION"}


def telecom(**options: object) -> OfficialDomain:
    return over("telecom", SMALL / "telecom", **options)


def sizes(domain: OfficialDomain) -> tuple[int, ...]:
    return tuple(len(domain.tasks(split)) for split in SPLITS)


def rewards(domain: OfficialDomain) -> list[float]:
    async def replayed() -> list[float]:
        return [(await replay_gold(domain, task)).reward for task in tasks_of(domain)]

    return asyncio.run(replayed())


def by_kind(domain: OfficialDomain, start: str) -> Task:
    return next(task for task in tasks_of(domain) if task.id.startswith(start))


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
    mix = {"retail": 1, "telecom": 1, "help_desk": 1}
    config = EnvironmentConfig.model_validate({"mix": mix, "data": SMALL, "options": options})
    domains = Selection.from_config(config).domains
    assert {name: len(domain.tasks("test")) for name, domain in domains.items()} == {
        "retail": 2,
        "telecom": 9,
        "help_desk": 512,
    }


def test_other_sets_are_the_test_split_when_they_are_asked_for():
    assert [task.id[:15] for task in telecom(split="small").tasks("test")] == ["[service_issue]"]
    refused(r"split: .*names no split 'huge'; it has: small, train, test, base, full", telecom, split="huge")
    refused(r"split 'full' names task '\[mms_issue\]one_that_.*does not have", telecom, split="full")


def copied(tmp_path: Path, name: str, **contents: str | None) -> Path:
    """The small folder with other texts in these files (``__`` in the names for the dot), or without them."""
    folder = tmp_path / name
    shutil.copytree(SMALL / name, folder)
    for file, text in contents.items():
        path = folder / file.replace("__", ".")
        path.unlink() if text is None else path.write_text(text)
    return folder


def having(name: str, file: str, **changes: object) -> str:
    """The JSON of a small folder's file with other values at these paths."""
    return json.dumps(changed(json.loads((SMALL / name / file).read_text()), changes))


def test_a_folder_without_a_file_of_splits_is_all_test_and_one_with_base_alone_too(tmp_path):
    bare = copied(tmp_path, "airline", split_tasks__json=None)
    assert sizes(over("airline", bare)) == (0, 0, 3)
    refused("it has: none, since the folder has no split_tasks", over, "airline", bare, split="base")
    (bare / "split_tasks.json").write_text('{"base": [0, "2"]}')
    assert [task.id for task in over("airline", bare).tasks("test")] == ["0", "2"]
    (bare / "split_tasks.json").write_text('{"dev": ["1"], "test": ["0"]}')
    assert sizes(over("airline", bare)) == (0, 1, 1)


@cases
def test_splits_that_lose_or_double_a_task_are_refused(tmp_path, splits, message):
    refused(message, over, "airline", copied(tmp_path, "airline", split_tasks__json=json.dumps(splits)))


@cases
def test_options_have_their_types(options, message):
    refused(message, over, "retail", SMALL / "retail", **options)


def test_two_tasks_with_one_id_are_refused(tmp_path):
    tasks = json.loads((SMALL / "airline/tasks.json").read_text())
    doubled = copied(tmp_path, "airline", tasks__json=json.dumps([*tasks, tasks[0]]))
    refused(r"tasks\.json, task 3: another task has the id '0' too", over, "airline", doubled)


def test_files_that_are_none_deep_or_large_are_refused_at_once(tmp_path, monkeypatch):
    folder = copied(tmp_path, "airline")
    (folder / "tasks.json").write_text('{"a": 1, "a": 2}')
    refused("the key 'a' appears twice", over, "airline", folder)
    (folder / "tasks.json").write_text("[" * 100_000)
    refused("nested too deeply", over, "airline", folder)
    (folder / "tasks.json").unlink()
    os.mkfifo(folder / "tasks.json")
    refused(r"tasks\.json: cannot be read as text: .*not a regular file", over, "airline", folder)
    monkeypatch.setattr("environments._tau.folder.MAX_BYTES", 1000)
    refused(r"db\.json: has more than 1,000 bytes", over, "airline", SMALL / "airline")


# ---- telecom: the tasks


def test_doing_nothing_and_telling_much_earn_nothing_in_any_task():
    domain = telecom()
    assert domain.noop_tasks("train") == domain.noop_tasks("test") == []
    for task in tasks_of(domain):
        assert judged(opened(task, domain), "roaming is enabled, all is well").reward == 0.0, task.id


def test_each_gold_call_is_needed():
    """Leaving out any one gold call costs the reward, so that nothing holds by accident."""
    domain = telecom()
    for task in tasks_of(domain):
        moves = list(domain.gold(task))
        for left_out in range(len(moves)):
            environment = opened(task, domain)
            _play(environment, [move for index, move in enumerate(moves) if index != left_out])
            texts = [move for index, move in enumerate(moves) if index != left_out and isinstance(move, str)]
            assert judged(environment, *texts).reward == 0.0, (task.id, moves[left_out])


def _play(environment: DatabaseEnvironment, moves: list[Move]) -> None:
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
    refused("policy: choose among manual, workflow", telecom, policy="solo")
    task = by_kind(domain, "[mobile_data_issue]bad_network")
    assert task.data["kind"] == "mobile_data_issue"
    assert domain.persona(task).startswith("Your character: You explain everything twice.")


def test_initial_data_replaces_lists_and_merges_the_user():
    domain = telecom()
    environment = opened(by_kind(domain, "[line]"), domain)
    assert json.loads(environment.call("get_details_by_id", {"id": "L1"}).text)["suspension_start_date"] == "2024-10-02"
    assert "battery 12%" in environment.user_call("check_status_bar", {}).text
    assert [tool.name for tool in environment.user_tools()] == ["check_status_bar"]
    assert environment.user_call("reboot_device", {}).error


def test_no_episode_writes_to_the_base_or_to_another():
    domain = telecom()
    before = digest_of(domain.desk.base.tables)
    for task in tasks_of(domain):
        _play(opened(task, domain), list(domain.gold(task)))
    assert digest_of(domain.desk.base.tables) == before
    assert set(rewards(domain)) == {1.0}


# ---- telecom: the tools


@pytest.fixture(name="phone")
def fixture_phone() -> Any:
    """Of a task that begins with nothing wrong."""
    domain = telecom()
    return opened(by_kind(domain, "[roaming]"), domain)


def did(environment: Any, name: str, **arguments: object) -> str:
    result = environment.user_call(name, arguments)
    assert isinstance(result, ToolResult)
    assert not result.error, result.text
    return result.text


def test_names_are_the_official_ones(phone):
    assert [tool.name for tool in phone.tools()] == TABLE["TOOLS"]
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

    found = asyncio.run(played_with(opened(task, domain), domain.scripted_user(task, 0), moves()))
    assert (found.reward, found.ended) == (1.0, True)


def test_a_conversation_with_the_user_by_rules_ends():
    domain = telecom()
    found = asyncio.run(demonstrate(domain, domain.tasks("train")[0], 0))
    assert 0 < len(found.messages[0]["content"]) < 0.5 * len(domain.tasks("train")[0].data["instruction"])


# ---- telecom: bad files


@cases
def test_what_is_wrong_with_a_file_is_named(tmp_path, file, old, new, message):
    """``old`` becomes ``new``: all of the text without an old one, an addition without a new one before it."""
    folder = copied(tmp_path, "telecom")
    text = (folder / file).read_text()
    if new is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(new if old == "all" else text.replace(old, new, 1) if old else text + new)
    refused(message, over, "telecom", folder)


def test_a_deep_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"db\.toml: is no TOML|nested too deeply"):
        over("telecom", copied(tmp_path, "telecom", db__toml="a = " + "[" * 100_000))


@cases
def test_what_is_wrong_with_a_task_is_named(tmp_path, path, value, message):
    with pytest.raises(ConfigError, match=message):
        over("telecom", copied(tmp_path, "telecom", tasks__json=having("telecom", "tasks.json", **{path: value})))


def test_an_initial_state_that_cannot_be_had_is_named_when_the_task_begins(tmp_path):
    data = {"agent_data": {"cars": []}, "user_data": None}
    tasks = having("telecom", "tasks.json", **{"0/initial_state/initialization_data": data})
    domain = over("telecom", copied(tmp_path, "telecom", tasks__json=tasks))
    with pytest.raises(ConfigError, match=r"initial_state cannot be had: agent_data: there is no list 'cars'"):
        opened(domain.tasks("train")[0], domain)


def test_the_databases_may_be_json(tmp_path):
    contents = {}
    for name in ("db", "user_db"):
        database = tomllib.loads((SMALL / f"telecom/{name}.toml").read_text())
        contents |= {f"{name}__json": json.dumps(database, default=str), f"{name}__toml": None}
    domain = over("telecom", copied(tmp_path, "telecom", **contents))
    assert domain.desk.base.digest() == telecom().desk.base.digest()
