"""The telecom domain: derived state, tools of both sides, tasks and verdicts, the scripted user, the expert, a rollout.

All-task tests run over every split. Does not cover an LLM user with the phone's tools (test_users_llm.py) nor what any
domain must keep (tests/contract/test_domain_contract.py).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.telecom import DOMAIN, TelecomDomain, carrier_tools, phone_tools
from environments.telecom import tasks as tasks_module
from environments.telecom.advice import requests
from environments.telecom.faults import BY_NAME, FAULTS, SOLVED, WHICH
from environments.telecom.recipes import RECIPES
from environments.telecom.signals import View
from environments.telecom.tasks import SIZES, generate, load_split, write_manifest
from environments.telecom.user import PATIENCE, PhoneUser
from environments.telecom.world import CUSTOMERS, PLANS, base
from mua.config.schema import EnvironmentConfig
from mua.environment.database import DatabaseEnvironment
from mua.environment.demonstrate import Demonstration, demonstrate, replay_gold
from mua.environment.protocol import (
    Configurable,
    Domain,
    Environment,
    Evaluation,
    Expert,
    Split,
    Task,
    ToolResult,
    ToolSchema,
    Transcript,
    UserControlled,
    UserMove,
)
from mua.environment.schema import validate_arguments
from mua.environment.selection import Selection
from mua.errors import ConfigError, MuaError
from mua.observe.traces import TraceWriter
from mua.rollout.runner import EpisodeRunner
from mua.types import Json, Outcome, Trajectory
from mua.users.protocol import STOP_SIGNAL, ToolUser, User, UserReply
from mua.users.services import Services
from tests.rollout_fixtures import ScriptedSampler, call, experiment, lines, only
from tests.tokens_fixtures import chat_family

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
ALL = [task for split in SPLITS for task in load_split(split)]
KINDS = {recipe.kind for recipe in RECIPES}


def opened(task: Task, domain: TelecomDomain = DOMAIN) -> DatabaseEnvironment:
    environment = domain.environment()
    environment.reset(task, 0)
    assert isinstance(environment, DatabaseEnvironment)
    return environment


def first(kind: str, *faults: str) -> Task:
    """A task of this kind, with these faults among its own."""
    return next(task for task in ALL if task.data["kind"] == kind and set(faults) <= set(task.data["faults"]))


def with_fault(name: str) -> Task:
    return next(task for task in ALL if task.data["kind"] in SOLVED and task.data["faults"] == [name])


def do(environment: DatabaseEnvironment, action: Json) -> ToolResult:
    run = environment.user_call if action.get("requestor") == "user" else environment.call
    result = run(action["name"], action["arguments"])
    return result


def user(name: str, **arguments: Json | bool | str) -> Json:
    return {"requestor": "user", "name": name, "arguments": arguments}


def agent(name: str, **arguments: Json | bool | str | int) -> Json:
    return {"name": name, "arguments": arguments}


def gold_texts(task: Task) -> list[str]:
    return [move for move in DOMAIN.gold(task) if isinstance(move, str)]


def judged(task: Task, actions: Sequence[Json], texts: Sequence[str] | None = None) -> Evaluation:
    environment = opened(task)
    for action in actions:
        do(environment, action)
    said = gold_texts(task) if texts is None else texts
    return environment.evaluate(Transcript([{"role": "assistant", "content": text} for text in said]))


# ---- tasks and verdicts


def test_it_is_what_the_contracts_ask_for():
    assert isinstance(DOMAIN, Expert)
    assert isinstance(DOMAIN, Configurable)
    checked: Domain = DOMAIN
    environment: Environment = checked.environment()
    assert isinstance(environment, UserControlled)
    assert isinstance(PhoneUser(ALL[0], 0), User)
    assert isinstance(PhoneUser(ALL[0], 0), ToolUser)


def test_sizes_kinds_and_difficulties_of_every_split():
    for split, size in SIZES.items():
        tasks = load_split(split)
        assert len(tasks) == size
        assert {task.data["kind"] for task in tasks} == KINDS
        shares = Counter(task.data["difficulty"] for task in tasks)
        assert all(shares[level] >= size / 5 for level in ("easy", "medium", "hard"))
    assert sum(SIZES.values()) >= 300


def test_splits_share_no_customer():
    owners = [task.data["initial"]["phone"]["phone"]["line_id"] for task in ALL]
    assert len(set(owners)) == len(ALL)


def test_every_fault_occurs_in_training_and_those_of_a_task_go_together():
    found = {name for task in load_split("train") for name in task.data["faults"]}
    assert {fault.name for fault in FAULTS} <= found
    for task in ALL:
        faults = [BY_NAME[name] for name in task.data["faults"] if name in BY_NAME]
        assert not any(one.name in other.excludes for one in faults for other in faults if one is not other)
        if task.data["kind"] in SOLVED:
            assert {fault.causes for fault in faults} <= set(WHICH[task.data["kind"]])
            assert len(faults) in ({"easy": [1], "medium": [2], "hard": [3, 4]}[task.data["difficulty"]])


async def test_gold_replay_earns_1_on_every_task_in_both_forms_of_reward():
    for domain in (DOMAIN, TelecomDomain("partial")):
        for task in ALL:
            played = await replay_gold(domain, task)
            assert (played.reward, played.evaluation.success) == (1.0, True), (task.id, played.evaluation.details)


def test_doing_nothing_earns_0_on_every_task_in_both_forms_of_reward():
    for domain in (DOMAIN, TelecomDomain("partial")):
        for task in ALL:
            verdict = opened(task, domain).evaluate(Transcript([]))
            assert (verdict.reward, verdict.success) == (0.0, False), task.id


def test_without_any_one_of_its_gold_actions_no_task_is_solved():
    """A restart aside: other ways of registering anew can stand for it."""
    for task in ALL:
        actions = task.data["actions"]
        for left_out in (action for action in actions if action["name"] != "restart_phone"):
            rest = [action for action in actions if action is not left_out]
            assert not judged(task, rest).success, (task.id, left_out)


def test_no_gold_action_fails():
    for task in ALL:
        environment = opened(task)
        for action in task.data["actions"]:
            result = do(environment, action)
            assert not result.error, (task.id, action, result.text)


def test_required_statements_are_required():
    told = [task for task in ALL if task.data["statements"]]
    assert len(told) > len(ALL) / 8
    for task in told:
        assert not judged(task, task.data["actions"], []).success, task.id


def test_naming_every_reason_to_refuse_does_not_pay():
    everything = "I cannot verify you, your bill is overdue, roaming is impossible, 10 GB is the limit."
    refused = [task for task in ALL if task.data["false_statements"]]
    assert len(refused) > len(ALL) / 10
    for task in refused:
        assert not judged(task, task.data["actions"], [everything]).success
        assert judged(task, task.data["actions"]).success


def test_harmless_steps_on_the_phone_cost_nothing():
    looks = [
        user(tool.name) for tool in opened(ALL[0]).user_tools() if tool.name.startswith(("check_", "run_", "send_"))
    ]
    harmless = [*looks, user("restart_phone"), user("set_wifi", on=True), user("reset_apn"), user("restart_phone")]
    for task in ALL[::7]:
        assert judged(task, [*harmless, *task.data["actions"], *harmless]).success, task.id


def test_a_customer_may_not_know_the_number():
    forgetful = [task for task in ALL if task.data["known"]["number"] is None]
    assert len(forgetful) > 3
    assert {task.data["kind"] for task in forgetful} == {"forgotten_number"}


def test_equality_with_gold_looks_at_the_carrier_alone():
    task = with_fault("unpaid")
    environment = opened(task)
    assert environment.equals_untouched()
    assert not environment.equals_gold()
    for action in task.data["actions"]:
        do(environment, action)
    environment.user_call("set_wifi", {"on": True})
    assert environment.equals_gold()


def test_several_ways_lead_to_a_working_phone():
    task = with_fault("old_profile")
    for way in (
        [user("restart_phone")],
        [user("set_airplane_mode", on=True), user("set_airplane_mode", on=False)],
        [user("reseat_sim")],
    ):
        assert judged(task, way).success, way


def test_a_factory_reset_mends_and_is_not_rewarded():
    verdict = judged(with_fault("mode_2g"), [user("factory_reset")])
    assert not verdict.success
    assert list(verdict.details["database"]["wrong"]) == ["assertion/nothing_erased"]


def test_a_wrong_write_at_the_carrier_is_not_rewarded_though_the_phone_works():
    task = with_fault("airplane")
    line = task.data["initial"]["phone"]["phone"]["line_id"]
    verdict = judged(task, [*task.data["actions"], agent("refuel_data", line_id=line, gb=1)])
    assert (verdict.reward, verdict.success) == (0.0, False)
    assert list(verdict.details["database"]["extra"]) == [f"lines/{line}/data_refuelled_gb"]


@pytest.mark.parametrize("kind", ["fraud", "fraud_and_faults", "contract_ended", "will_not_pay"])
def test_a_line_that_may_not_be_resumed_can_be_and_that_is_wrong(kind: str):
    for task in [task for task in ALL if task.data["kind"] == kind]:
        line = task.data["initial"]["phone"]["phone"]["line_id"]
        verdict = judged(task, [agent("resume_line", line_id=line), *task.data["actions"]])
        assert not verdict.reward
        assert verdict.details["forbidden"] == [{"name": "resume_line", "arguments": {"line_id": line}}]


def test_partial_credit_counts_mended_assertions_among_what_was_due():
    task = with_fault("unpaid")
    environment = opened(task, TelecomDomain("partial"))
    rewards = []
    for action in task.data["actions"]:
        do(environment, action)
        rewards.append(environment.evaluate(Transcript([])).reward)
    # Due: the bill's status, the line's status and suspension, the service that the restart brings.
    assert rewards == [0.0, 1 / 4, 3 / 4, 1.0]


def test_the_manifest_pins_world_and_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    committed = tasks_module.MANIFEST.read_text()
    monkeypatch.setattr(tasks_module, "MANIFEST", tmp_path / "manifest.json")
    write_manifest()
    assert (tmp_path / "manifest.json").read_text() == committed
    (tmp_path / "manifest.json").write_text(committed.replace(json.loads(committed)["test"]["sha256"], "0" * 64))
    with pytest.raises(MuaError, match=r"manifest\.json: test: .*python -m environments\.telecom\.tasks"):
        load_split.__wrapped__("test")


def test_a_task_is_a_function_of_split_and_index():
    for split in SPLITS:
        assert generate(split, 17).data == load_split(split)[17].data


def test_numbers_and_identities_are_unique():
    tables = base().tables
    assert len({line["number"] for line in tables["lines"].values()}) == len(tables["lines"])
    people = {(*customer["name"].values(), customer["date_of_birth"]) for customer in tables["customers"].values()}
    assert len(people) == CUSTOMERS


# ---- one state for both sides


def view(environment: DatabaseEnvironment) -> View:
    return View.of(environment.state)


def test_what_the_carrier_changes_shows_on_the_phone_after_it_registers_anew():
    task = with_fault("paused")
    environment, line = opened(task), task.data["initial"]["phone"]["phone"]["line_id"]

    def seen() -> str:
        return environment.user_call("check_status_bar", {}).text

    assert seen() == "no service"
    environment.call("resume_line", {"line_id": line})
    assert seen() == "no service"
    environment.user_call("restart_phone", {})
    assert seen().startswith("4 bars")
    environment.call("suspend_line", {"line_id": line})
    assert seen() == "no service"


def test_data_added_at_the_carrier_speeds_the_phone_up_at_once():
    task = with_fault("used_up_slow")
    environment, line = opened(task), task.data["initial"]["phone"]["phone"]["line_id"]
    assert environment.user_call("run_speed_test", {}).text == "speed test shows 0.5 Mbps, poor"
    environment.call("refuel_data", {"line_id": line, "gb": 1})
    assert environment.user_call("run_speed_test", {}).text.endswith("good")


def test_what_the_user_does_shows_at_the_carrier():
    task = with_fault("unpaid")
    environment = opened(task)
    bill = task.data["actions"][0]["arguments"]["bill_id"]
    assert "no payment request" in environment.user_call("check_payment_requests", {}).text
    assert environment.user_call("pay_bill", {"bill_id": bill}).error
    environment.call("send_payment_request", {"bill_id": bill})
    assert bill in environment.user_call("check_payment_requests", {}).text
    environment.user_call("pay_bill", {"bill_id": bill})
    owner = next(record for key, record in environment.state.items("bills") if key == bill)["customer_id"]
    bills = json.loads(environment.call("get_bills", {"customer_id": owner}).text)
    assert [record["status"] for record in bills if record["bill_id"] == bill] == ["paid"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_alone_breaks_exactly_what_it_is_said_to(fault):
    """And nothing that comes before it: a phone with slow data still has data."""
    task = next(task for task in ALL if task.data["faults"] == [fault.name] and task.data["kind"] in SOLVED)
    assert task.data["kind"] == fault.causes
    now, works = view(opened(task)), {"no_service": 0, "no_data": 1, "slow_data": 2, "no_mms": 3}
    state = [now.no_service_because is None, now.data, now.mbps >= 20, now.picture_messages]
    assert not state[works[fault.causes]]
    if fault.causes != "no_service":
        assert state[0]
    if fault.causes in ("slow_data", "no_mms"):
        assert state[1]


def test_the_puk_comes_from_the_carrier_and_unlocks_the_phone():
    task = with_fault("sim_locked")
    environment, line = opened(task), task.data["initial"]["phone"]["phone"]["line_id"]
    puk = json.loads(environment.call("get_puk_code", {"line_id": line}).text)["puk"]
    assert puk not in environment.call("get_line", {"line_id": line}).text
    wrong = "0" * 8
    assert environment.user_call("enter_puk", {"code": wrong}).error
    assert view(environment).no_service_because == "SIM locked, PUK needed"
    assert not environment.user_call("enter_puk", {"code": puk}).error
    assert view(environment).no_service_because is None


def test_looking_changes_nothing():
    for task in ALL[::50]:
        environment = opened(task)
        line = task.data["initial"]["phone"]["phone"]["line_id"]
        for tool in environment.user_tools():
            if tool.name.startswith(("check_", "run_", "send_")):
                assert not environment.user_call(tool.name, {}).error
        for name in ("get_line", "get_data_usage", "get_device", "check_network", "get_puk_code"):
            assert not environment.call(name, {"line_id": line}).error
        assert environment.state.changes() == {}


def test_tools_of_the_two_sides_are_apart():
    environment = opened(ALL[0])
    own, users = {tool.name for tool in environment.tools()}, {tool.name for tool in environment.user_tools()}
    assert not own & users
    assert 13 <= len(own) <= 20
    assert 20 <= len(users) <= 35
    assert environment.call("restart_phone", {}).error
    assert environment.user_call("resume_line", {"line_id": "L20000"}).error


def test_bad_calls_of_the_user_are_error_results_that_change_nothing():
    environment = opened(ALL[0])
    for name, arguments in (
        ("no_such", {}),
        ("set_vpn", {}),
        ("set_vpn", {"on": "yes"}),
        ("set_network_mode", {"mode": "6G"}),
        ("enter_puk", {"code": "1"}),
        ("pay_bill", {"bill_id": "B1"}),
        ("grant_permission", {"permission": "camera"}),
        ("restart_phone", {"now": True}),
    ):
        assert environment.user_call(name, arguments).error, name
    assert environment.state.changes() == {}


def test_nothing_ever_writes_to_the_base():
    before = base().digest()
    for task in ALL[::11]:
        environment = opened(task)
        for action in task.data["actions"]:
            do(environment, action)
        environment.close()
    assert base().digest() == before
    assert json.loads(tasks_module.MANIFEST.read_text())["world"]["sha256"] == before


# ---- the expert


def test_the_expert_solves_every_task_of_every_split_by_conversation():
    async def all_of_them() -> list[Demonstration]:
        return [await demonstrate(DOMAIN, task, 0) for task in ALL]

    for task, played in zip(ALL, asyncio.run(all_of_them()), strict=True):
        assert (played.reward, played.ended) == (1.0, True), (task.id, task.data["faults"], played.evaluation.details)
        turns = sum(message["role"] == "assistant" for message in played.messages)
        assert turns <= 30, task.id


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_the_expert_solves_the_test_split_with_other_wordings(seed: int):
    for task in load_split("test"):
        assert (await demonstrate(DOMAIN, task, seed)).reward == 1.0, task.id


async def test_a_loose_expert_fails_sometimes_and_still_talks():
    played = [await demonstrate(DOMAIN, task, 0, loose=0.5) for task in load_split("validation")]
    won = sum(one.evaluation.success for one in played)
    assert 10 < won < len(played) - 5
    assert all(len(one.messages) > 2 for one in played)


async def test_user_actions_stand_in_the_messages_of_the_user():
    task = with_fault("airplane")
    messages = (await demonstrate(DOMAIN, task, 0)).messages
    acted = [message for message in messages if message.get("actions")]
    assert acted
    assert all(message["role"] == "user" for message in acted)
    names = [action["name"] for message in acted for action in message["actions"]]
    assert "set_airplane_mode" in names


# ---- the user


class Phone:
    """The user's side of an environment. Implements :class:`mua.users.protocol.UserTools`."""

    def __init__(self, environment: DatabaseEnvironment) -> None:
        self._environment = environment
        self.called: list[tuple[str, Json]] = []

    def schemas(self) -> Sequence[ToolSchema]:
        return self._environment.user_tools()

    async def call(self, name: str, arguments: Json) -> ToolResult:
        self.called.append((name, arguments))
        return self._environment.user_call(name, arguments)


def person(task: Task, seed: int = 0) -> tuple[PhoneUser, Phone]:
    who, phone = PhoneUser(task, seed), Phone(opened(task))
    who.take_tools(phone)
    return who, phone


def asked(text: str) -> list[str]:
    """What a message asks for, as text."""
    found = []
    for request in requests(text):
        values = ",".join(str(value) for value in request.arguments.values())
        found.append(f"{request.tool}({values})")
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Please turn airplane mode off.", ["set_airplane_mode(False)"]),
        (
            "Could you please switch off flight mode and then restart your phone?",
            ["set_airplane_mode(False)", "restart_phone()"],
        ),
        ("Toggle airplane mode, please.", ["set_airplane_mode(True)", "set_airplane_mode(False)"]),
        (
            "Turn airplane mode on, wait ten seconds, and turn it off again.",
            ["set_airplane_mode(True)", "set_airplane_mode(False)"],
        ),
        ("Is airplane mode on?", ["check_airplane_mode()"]),
        ("Please check whether airplane mode is switched off.", ["check_airplane_mode()"]),
        (
            "Please check that mobile data is on and, if it is not, turn it on.",
            ["check_mobile_data()", "set_mobile_data(True)"],
        ),
        ("Go to Settings > Network > Mobile data and turn it on.", ["set_mobile_data(True)"]),
        ("Make sure that data roaming is enabled on your phone.", ["set_data_roaming(True)"]),
        ("Please turn on mobile data and data roaming.", ["set_mobile_data(True)", "set_data_roaming(True)"]),
        ("Turn Wi-Fi calling off and Wi-Fi on.", ["set_wifi_calling(False)", "set_wifi(True)"]),
        ("What does the status bar show?", ["check_status_bar()"]),
        ("Can you tell me what you see at the top of your screen?", ["check_status_bar()"]),
        (
            "I have switched roaming on for your line. Please restart your phone and tell me whether it works now.",
            ["restart_phone()", "test()"],
        ),
        ("I'd like you to restart your phone.", ["restart_phone()"]),
        ("Turn your phone off and on again, please.", ["restart_phone()"]),
        ("1. Turn off the data saver.\n2. Disable the VPN.\n3. Run a speed test.",
         ["set_data_saver(False)", "set_vpn(False)", "run_speed_test()"]),
        ("Please take out the SIM card and put it back in.", ["reseat_sim()"]),
        ("Could you check whether the SIM card is detected?", ["check_sim()"]),
        ("The PUK is 12345678. Please enter it.", ["enter_puk(12345678)"]),
        ("Reset the APN settings and reboot.", ["reset_apn()", "restart_phone()"]),
        ("What APN is set on your phone?", ["check_apn()"]),
        ("Change your preferred network type to 4G/LTE.", ["set_network_mode(4G)"]),
        ("Which network mode is selected?", ["check_network_mode()"]),
        ("Please allow the messages app to use storage.", ["grant_permission(storage)"]),
        ("Which permissions does the messaging app have?", ["check_app_permissions()"]),
        ("Please open the payment request and pay it.", ["pay_bill()"]),
        ("Please try sending a picture message.", ["send_picture_message()"]),
        ("Does your mobile data work now?", ["test()"]),
        ("Please do a factory reset.", ["factory_reset()"]),
        ("Disable airplane mode if it is enabled.", ["set_airplane_mode(False)"]),
        ("If mobile data is off turn it on.", ["set_mobile_data(True)"]),
        ("Please turn off battery saver, data saver, and VPN.",
         ["set_battery_saver(False)", "set_data_saver(False)", "set_vpn(False)"]),
        ("Please remove and reinsert your SIM card.", ["reseat_sim()"]),
        ("Could you check if your SIM card is inserted properly?", ["check_sim()"]),
        ("Please fix the APN.", ["unclear()"]),
        ("Set mobile data.", ["unclear()"]),
    ],
)  # fmt: skip
def test_advice_in_plain_words_is_understood(text: str, expected: list[str]):
    assert asked(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "Shall I switch roaming on for your line?",
        "I have reset your APN on our side.",
        "We will restart your line now.",
        "Would you like to pay the bill now?",
        "Your line is active again, it should work after a restart.",
        "Your line is suspended because a bill is overdue.",
        "Please check your settings.",
        "Thank you for your patience.",
        "Did you pay the bill?",
        "Do not restart your phone yet.",
        "Roaming is now enabled on your line.",
    ],
)
def test_what_is_no_advice(text: str):
    assert asked(text) == []


VOCABULARY = (
    "please turn switch on off the your airplane mode mobile data roaming saver Wi-Fi calling VPN restart reset APN "
    "phone SIM card PUK 12345678 network automatic 4G 2G speed test picture message permission sms storage pay bill "
    "request check what does show is it work now if and then , . ? I we shall may back in out again status bar factory "
    "all whether"
)
WORDS = VOCABULARY.split()


@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=40))
def test_whatever_is_said_the_user_only_does_what_its_tools_allow(words: list[str]):
    schemas = {tool.name: tool for tool in opened(ALL[0]).user_tools()}
    for request in requests(" ".join(words)):
        if request.tool == "unclear":
            assert request.asks_back
        elif request.tool not in ("test", "pay_bill"):
            assert validate_arguments(schemas[request.tool], request.arguments) is None


@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=40), st.integers(0, len(ALL) - 1))
def test_whatever_is_said_the_user_says_something(words: list[str], index: int):
    who, _ = person(ALL[index])
    reply = asyncio.run(who.reply(" ".join(words)))
    assert reply.text.strip()
    assert reply.stop == (STOP_SIGNAL in reply.text)


async def test_the_user_does_what_it_is_told_and_nothing_else():
    who, phone = person(first("no_service", "airplane"))
    await who.open()
    for text in ("What is your phone number?", "Your line is fine.", "Shall I look at your bills?", "Hm."):
        await who.reply(text)
    assert phone.called == []
    said = await who.reply("Please turn airplane mode off.")
    assert phone.called == [("set_airplane_mode", {"on": False})]
    assert "airplane mode is off now" in said.text
    assert not said.stop


async def test_the_user_leaves_when_its_phone_shows_that_the_problem_is_gone():
    who, phone = person(with_fault("airplane"))
    assert not (await who.reply("Does it work now?")).stop
    assert not (await who.reply("Please turn airplane mode off.")).stop
    last = await who.reply("Is it working now?")
    assert last.stop
    assert last.text.endswith(STOP_SIGNAL)
    assert phone.called[-1] == ("check_status_bar", {})


async def test_the_user_goes_on_to_its_next_wish():
    who, _ = person(first("speed_and_bar"))
    assert not (await who.reply("Sorry, I cannot make it faster.")).stop
    last = await who.reply("Done, premium numbers are barred. Is there anything else I can help you with?")
    assert last.stop


async def test_a_user_may_decline_a_factory_reset():
    keeps = next(task for task in ALL if task.data["keeps_phone_data"])
    gives = next(task for task in ALL if not task.data["keeps_phone_data"])
    for task, expected in ((keeps, []), (gives, [("factory_reset", {})])):
        who, phone = person(task)
        said = await who.reply("Please do a factory reset of your phone.")
        assert phone.called == expected
        assert ("photos" in said.text) == (expected == []) or expected


async def test_unclear_words_are_asked_about_until_patience_ends():
    who, phone = person(first("no_data"))
    said = await who.reply("Please set mobile data.")
    assert "on or off" in said.text
    replies = [await who.reply("The antenna is in a certain state.") for _ in range(PATIENCE + 1)]
    assert [reply.stop for reply in replies] == [False] * PATIENCE + [True]
    assert phone.called == []


async def test_a_long_list_is_cut_and_the_user_says_so():
    who, phone = person(first("no_data"))
    said = await who.reply(" ".join(["Turn the VPN off. Turn Wi-Fi on."] * 5))
    assert len(phone.called) == 7
    assert "a lot at once" in said.text


async def test_the_user_changes_its_mind_and_keeps_to_amounts():
    task = first("plan_change_of_mind")
    who, _ = person(task)
    wish = task.data["wishes"][0]
    assert wish["first"] in (await who.open()).text
    assert wish["plan"] in (await who.reply(f"The {wish['first']} plan it is. Shall I change it?")).text
    assert (await who.reply(f"The {wish['plan']} plan then. Shall I change it?")).text.startswith("Yes")
    task = first("refuel")
    who, _ = person(task)
    gb = task.data["wants"]["gb"]
    assert f"{gb} GB" in (await who.reply(f"Shall I add {gb + 1} GB?")).text
    assert (await who.reply(f"Shall I add {gb} GB?")).text.startswith("Yes")


async def test_a_user_that_will_not_pay_does_not():
    who, phone = person(first("will_not_pay"))
    assert "cannot pay" in (await who.reply("Would you like to pay the bill now?")).text
    assert "cannot pay" in (await who.reply("Please pay the bill on your phone.")).text
    assert phone.called == []


async def test_facts_are_told_when_asked():
    for task in ALL[::40]:
        known = {**task.data["known"]}
        known["number"] = known["number"] or ""
        who, _ = person(task)
        said = (await who.reply("Please tell me your phone number, your full name and your date of birth.")).text
        assert all(known[fact] in said for fact in ("number", "first", "last", "born"))
        where = (await who.reply("Are you abroad?")).text
        assert (known["abroad"] or "home") in where


WORDINGS: dict[str, tuple[str, ...]] = {
    "restart_phone": (
        "Now restart the phone.",
        "Could you reboot your phone, please?",
        "Turn the phone off and on again.",
    ),
    "set_airplane_mode": (
        "Deactivate flight mode.",
        "Could you turn off airplane mode?",
        "Please put airplane mode off.",
    ),
    "set_mobile_data": ("Switch on mobile data.", "Please enable cellular data.", "Mobile data: please turn it on."),
    "set_data_roaming": ("Activate roaming on your phone.", "Turn data roaming on in the settings, please."),
    "set_data_saver": ("Please disable the data saver.", "Could you switch data saving off?"),
    "set_battery_saver": ("Turn off low power mode.", "Please deactivate the power saver."),
    "set_vpn": ("Disconnect your VPN, please.", "Switch the VPN off."),
    "set_wifi_calling": ("Please disable Wi-Fi calling.", "Turn wifi calls off."),
    "set_network_mode": (
        "Change the network mode to automatic.",
        "Please select automatic as the preferred network type.",
    ),
    "reseat_sim": (
        "Take your SIM card out and insert it again.",
        "Please reseat the SIM.",
        "Please re-insert the SIM card.",
    ),
    "enter_puk": ("The PUK is {code}, please type it in.", "Enter {code}: that is the PUK."),
    "reset_apn": ("Please restore the APN to its defaults.", "Reset the access point settings."),
    "grant_permission": (
        "Give the messages app the {permission} permission.",
        "Allow {permission} for the messaging app.",
    ),
    "pay_bill": ("Please pay the bill now.", "Open the payment request and accept the request, please."),
}


@pytest.mark.parametrize("seed", range(3))
async def test_every_gold_action_of_the_user_can_be_had_by_words(seed: int):
    """Whatever the user says: only its phone counts, and that it leaves once its problem is gone."""
    for task in ALL[seed::3]:
        environment = opened(task)
        who = PhoneUser(task, seed)
        phone = Phone(environment)
        who.take_tools(phone)
        for number, action in enumerate(task.data["actions"]):
            if action.get("requestor") == "user":
                ways = WORDINGS[action["name"]]
                await who.reply(ways[(number + seed) % len(ways)].format(**action["arguments"]))
                assert (action["name"], action["arguments"]) in phone.called, (task.id, action, phone.called)
            else:
                do(environment, action)
        said = Transcript([{"role": "assistant", "content": text} for text in gold_texts(task)])
        assert environment.evaluate(said).success, task.id
        if set(task.data["assertions"]) & set(SOLVED.values()):
            assert (await who.reply("Does it work now?")).stop or len(task.data["wishes"]) > 1


async def test_without_a_phone_in_its_hands_the_user_says_so():
    assert "do not have the phone" in (await PhoneUser(ALL[0], 0).reply("What does the status bar show?")).text


async def test_openings_vary_with_the_seed_and_give_no_identity_away():
    for task in ALL[::9]:
        texts = {(await PhoneUser(task, seed).open()).text for seed in range(12)}
        assert len(texts) > 1
        known = task.data["known"]
        assert not any((known["number"] or "555-") in text or known["last"] in text for text in texts)


# ---- prompts


def test_an_llm_user_is_told_what_the_scripted_one_knows():
    for task in ALL:
        persona, known = DOMAIN.persona(task), task.data["known"]
        assert all(known[fact] in persona for fact in ("first", "last", "born"))
        assert (known["number"] or "do not know your phone number") in persona
        assert (known["abroad"] or "at home") in persona
        assert "{" not in persona
        if "gb" in task.data["wants"]:
            assert f"{task.data['wants']['gb']} GB" in persona


def test_the_policy_page_has_the_words_that_count():
    page = DOMAIN.system_prompt("full")
    quoted = re.findall(r"`([^`]+)`", page)
    used = {
        action["arguments"]["reason"] for t in ALL for action in t.data["actions"] if "reason" in action["arguments"]
    }
    assert used <= set(quoted)
    assert set(carrier_tools.TRANSFER_REASONS) >= used
    assert {"overdue", "cannot", "roaming", "10 GB", "cannot verify"} <= set(quoted)
    assert "vela.web" in page
    assert "mms.vela.example" in page


# ---- configuration


def test_reward_form_and_compact_answers_by_configuration():
    def domain(**values: object) -> TelecomDomain:
        selection = Selection.from_config(EnvironmentConfig.model_validate({"name": "telecom", **values}))
        found = selection.domains["telecom"]
        assert isinstance(found, TelecomDomain)
        return found

    task = ALL[0]
    plain, terse = opened(task), opened(task, domain(options={"compact": True}))
    long, short = (environment.call("list_plans", {}).text for environment in (plain, terse))
    assert json.loads(short) == json.loads(long) == list(PLANS.values())
    assert len(short) < len(long)
    environment = opened(with_fault("unpaid"), domain(reward="partial"))
    for action in with_fault("unpaid").data["actions"][:2]:
        do(environment, action)
    assert 0 < environment.evaluate(Transcript([])).reward < 1


async def test_the_expert_also_reads_compact_answers():
    for task in load_split("test")[::3]:
        assert (await demonstrate(TelecomDomain(compact=True), task, 0)).reward == 1.0, task.id


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"options": {"compact": "yes"}}, r"environment\.options\.compact"),
        ({"options": {"terse": True}}, r"environment\.options\.terse"),
        ({"data": "elsewhere"}, r"environment\.data"),
        ({"oracle": "llm"}, r"environment\.oracle"),
    ],
)
def test_what_cannot_be_configured_is_named(values: Json, key: str):
    with pytest.raises(ConfigError, match=key):
        Selection.from_config(EnvironmentConfig.model_validate({"name": "telecom", **values}))


def test_in_a_mix_settings_of_other_domains_are_left_to_them():
    config = EnvironmentConfig.model_validate({"mix": {"telecom": 1}, "oracle": "llm", "options": {"other": 1}})
    assert Selection.from_config(config).domains["telecom"].name == "telecom"


# ---- rollouts

FAMILY = chat_family("qwen3", False)


async def recorded(task: Task) -> list[str]:
    """The expert's side of a conversation, as a policy writes it."""
    said = []
    for message in (await demonstrate(DOMAIN, task, 0)).messages:
        if message["role"] == "assistant":
            calls = [made["function"] for made in message.get("tool_calls", [])]
            written = "".join(call(made["name"], **json.loads(made["arguments"])) for made in calls)
            said.append(written or message["content"])
    return said


async def rolled_out(task: Task, texts: list[str], **sections: Json) -> Trajectory:
    config = experiment(
        environment={"name": "telecom"},
        model={"max_length": 32_768},
        rollout={"max_tokens": 32_000, "max_retries": 0},
        **sections,
    )
    runner = EpisodeRunner(config, only(DOMAIN), FAMILY, ScriptedSampler(FAMILY, lines(*texts)), Services())
    try:
        return await runner.trajectory(task, 0, 0, temperature=1.0)
    finally:
        await runner.close()


def actions_of(trajectory: Trajectory) -> list[list[tuple[str, Json]]]:
    said = [message for message in trajectory.messages if message["role"] == "user"]
    return [[(action["name"], action["arguments"]) for action in message.get("actions", [])] for message in said]


async def test_a_rollout_records_what_the_user_did_and_a_replayed_user_does_it_again(tmp_path: Path):
    task = next(
        task for task in load_split("test") if task.data["kind"] == "no_service" and len(task.data["faults"]) > 1
    )
    texts = await recorded(task)
    first_run = await rolled_out(task, texts)
    assert (first_run.outcome, first_run.success) == (Outcome.USER_STOP, True), first_run.error
    done = [step for turn in actions_of(first_run) for step in turn]
    golden = [(move.name, move.arguments) for move in DOMAIN.gold(task) if isinstance(move, UserMove)]
    assert golden
    assert all(step in done for step in golden)
    assert first_run.metrics["user_actions"] == len(done)

    path = TraceWriter(tmp_path / "traces").write(1, [first_run])
    again = await rolled_out(task, texts, user={"kind": "replay", "replay": str(path)})
    assert (again.outcome, again.success) == (Outcome.USER_STOP, True), again.error
    assert actions_of(again) == actions_of(first_run)
    assert [m["content"] for m in again.messages] == [m["content"] for m in first_run.messages]

    trace = json.loads(path.read_text())
    for message in trace["messages"]:
        message.pop("actions", None)
    path.write_text(json.dumps(trace) + "\n")
    words_alone = await rolled_out(task, texts, user={"kind": "replay", "replay": str(path)})
    assert not words_alone.success


async def test_a_transfer_ends_a_rollout():
    task = first("fraud")
    trajectory = await rolled_out(task, await recorded(task))
    assert (trajectory.outcome, trajectory.success) == (Outcome.TERMINAL_TOOL, True), trajectory.error


def test_replies_of_the_user_are_replies():
    assert isinstance(asyncio.run(PhoneUser(ALL[0], 0).open()), UserReply)
    assert phone_tools.TOOLS
