"""The telecom domain: tasks and verdicts, the state that both sides share, the expert, prompts and configuration.

Does not cover the scripted user's ears (test_telecom_user.py), rollouts (test_telecom_rollout.py), canned policies
(tests/contract/test_canned_policies.py), nor what any domain must keep (tests/contract/test_domain_contract.py).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Generator
from datetime import date
from pathlib import Path
from typing import TypeAlias

import pytest
import yaml

from environments.kit.database import DatabaseEnvironment
from environments.kit.demonstrate import demonstrate
from environments.telecom import DOMAIN, TelecomDomain
from environments.telecom.faults import FAULTS, SOLVED
from environments.telecom.tasks import PINNED
from environments.telecom.world import PLANS, View
from mua.config.schema import EnvironmentConfig
from mua.environment.protocol import Evaluation, Move, Task, UserMove
from mua.environment.selection import Selection
from mua.rollout.episode import EpisodeResult
from mua.users.personas import PERSONAS
from tests.desk_support import Turn, conversation, played_with, reworded
from tests.tables import cases_of, table
from tests.telecom_support import ALL, agent, do, first, judged, opened, user, with_fault

cases = cases_of("telecom")
TABLE = table("telecom")

Moves: TypeAlias = Generator[Move, str, None]

PLAN = first("plan_change")

# ---- tasks and verdicts


def test_without_any_one_of_its_gold_actions_no_task_is_solved():
    """A restart aside: other ways of registering anew can stand for it."""
    for task in ALL:
        actions = task.data["actions"]
        for left_out in (action for action in actions if action["name"] != "restart_phone"):
            rest = [action for action in actions if action is not left_out]
            assert not judged(task, rest).success, (task.id, left_out)


def test_required_facts_are_required():
    told = [task for task in ALL if task.data["facts"]]
    assert len(told) > len(ALL) / 4
    for task in told:
        assert not judged(task, task.data["actions"], ["That is all for today."]).success, task.id


REASONS = TABLE["REASONS"]


@pytest.mark.parametrize("kind", sorted(REASONS))
def test_a_reason_that_does_not_hold_is_not_rewarded_and_all_of_them_at_once_neither(kind: str):
    task = first(kind)
    assert judged(task, [], [REASONS[kind]]).success
    for other in set(REASONS) - {kind}:
        verdict = judged(task, [], [REASONS[other]])
        assert not verdict.success, other
    verdict = judged(task, [], [" ".join(REASONS.values())])
    assert not verdict.success
    assert verdict.details["untrue"]


@cases
def test_a_lie_is_not_rewarded_whatever_was_done(lie: str):
    task = PLAN
    said = [fact["say"] for fact in task.data["facts"]]
    assert judged(task, task.data["actions"], said).success
    verdict = judged(task, task.data["actions"], [*said, lie])
    assert (verdict.reward, verdict.success) == (0.0, False)
    assert verdict.details["untrue"]
    partial = judged(task, task.data["actions"], [*said, lie], TelecomDomain("partial"))
    assert partial.reward == 0.0


# ---- the policy's order


def unmet(task: Task, moves: list[Move]) -> list[str]:
    verdict = conversation(task, moves)
    assert not verdict.success
    return list(verdict.details["unmet"])


def test_what_is_changed_was_read_before():
    task = first("plan_change")
    for read in ("find_customer_by_number", "get_customer", "get_line", "get_bills"):
        moves = [move for move in DOMAIN.gold(task) if isinstance(move, str) or move[0] != read]
        assert unmet(task, moves), read


def test_on_the_phone_only_what_was_seen_to_be_wrong_is_changed():
    task = with_fault("airplane")
    moves = list(DOMAIN.gold(task))
    assert unmet(task, [move for move in moves if move[0] != "check_airplane_mode"])
    blindly = UserMove("set_battery_saver", {"on": False})
    looked = [UserMove("check_battery_saver", {}), blindly]
    assert unmet(task, [*moves, blindly])
    assert unmet(task, [*moves, *looked])
    assert conversation(task, [*moves, UserMove("set_airplane_mode", {"on": True}), moves[-1]]).success


def told(*turns: Turn) -> Evaluation:
    """The verdict on a conversation about the first task that has its plan changed."""
    return conversation(PLAN, [{"user": "Hello."}, *turns])


WANTED = PLAN.data["wishes"][0]["plan"]
NAMED = "{number}, {first} {last}".format(**PLAN.data["known"])
READS = [move for move in DOMAIN.gold(PLAN) if move[0].startswith(("find_", "get_"))]
CHANGE = DOMAIN.gold(PLAN)[-2]
DONE: list[Turn] = [CHANGE, f"Your line is on the {WANTED} plan now.", {"user": "Thanks."}]


def test_identity_is_what_the_customer_gave():
    day = date.fromisoformat(PLAN.data["known"]["born"])
    offer = f"The {WANTED} plan is available. Shall I change your line to the {WANTED} plan?"

    def asked(answer: str) -> Evaluation:
        return told("Who are you, please?", {"user": answer}, *READS, offer, {"user": "Yes, please."}, *DONE)

    for born in (day.isoformat(), f"{day.day}. {day:%B %Y}", f"{day:%B} {day.day}, {day.year}", f"{day:%d/%m/%Y}"):
        assert asked(f"{NAMED}, {born}").success, born
    for wrong in (NAMED, f"{PLAN.data['known']['number']}, {day.isoformat()}", "Guess."):
        assert asked(wrong).details["unmet"], wrong


@pytest.mark.parametrize(
    ("offer", "answer", "success"),
    [
        (f"Shall I change your line to the {WANTED} plan?", "Yes, please.", True),
        (f"Shall I change your line to the {WANTED} plan?", "No, not yet.", False),
        ("Shall I change your plan?", "Yes, please.", False),
        ("Thank you.", "Sure.", False),
    ],
)
def test_a_change_needs_a_yes_to_what_is_changed(offer: str, answer: str, success: bool):
    who: list[Turn] = ["Who are you, please?", {"user": f"{NAMED}, {PLAN.data['known']['born']}"}]
    assert told(*who, *READS, offer, {"user": answer}, *DONE).success == success


def test_nothing_of_an_account_is_told_before_its_holder_is_known():
    task = first("stranger")
    known = task.data["known"]
    number = {"number": known["number"]}
    found = json.loads(opened(task).call("find_customer_by_number", number).text)
    begun: list[Turn] = [
        {"user": "Hello."},
        "Who are you, please?",
        {"user": f"{known['number']}, {known['first']} {known['last']}, {known['born']}"},
        ("find_customer_by_number", number),
        ("get_customer", {"customer_id": found["customer_id"]}),
    ]
    refused: list[Turn] = ["Sorry, I cannot verify your identity.", {"user": "Okay."}]
    line: list[Turn] = [("get_line", {"line_id": found["line_id"]}), "Your line is active.", {"user": "I see."}]
    assert conversation(task, [*begun, *refused]).success
    verdict = conversation(task, [*begun, *line, *refused])
    assert verdict.details["unmet"]
    assert not verdict.success


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
        [user("check_status_bar"), user("reseat_sim")],
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


@pytest.mark.parametrize("kind", ["fraud", "contract_ended", "will_not_pay"])
def test_a_line_that_may_not_be_resumed_can_be_and_that_is_wrong(kind: str):
    for task in [task for task in ALL if task.data["kind"] == kind]:
        line = task.data["initial"]["phone"]["phone"]["line_id"]
        verdict = judged(task, [agent("resume_line", line_id=line), *task.data["actions"]])
        assert not verdict.reward
        assert verdict.details["forbidden"] == [{"name": "resume_line", "arguments": {"line_id": line}}]


def test_partial_credit_counts_mended_assertions_among_what_was_due():
    task, partial = with_fault("unpaid"), TelecomDomain("partial")
    actions = task.data["actions"]
    rewards = [judged(task, actions[: count + 1], domain=partial).reward for count in range(len(actions))]
    # Due: the bill's status, the line's status and suspension, the service that the restart brings.
    assert rewards == [0.0, 1 / 4, 3 / 4, 1.0]


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


def test_bad_calls_of_the_user_are_error_results_that_change_nothing():
    environment = opened(ALL[0])
    for name, arguments in TABLE["test_bad_calls_of_the_user_are_error_results_that_change_nothing"]:
        assert environment.user_call(name, arguments).error, name
    assert environment.state.changes() == {}


# ---- the expert


@pytest.mark.parametrize("persona", PERSONAS)
def test_the_expert_solves_the_test_split_whoever_asks(persona: str):
    for task in PINNED.load("test"):
        played = conversed(task, persona)
        assert (played.reward, played.ended) == (1.0, True), (task.id, task.data["faults"], played.evaluation.details)
        assert sum(message["role"] == "assistant" for message in played.messages) <= 45, task.id


def conversed(task: Task, persona: str, agent: Callable[[Moves], Moves] = lambda moves: moves) -> EpisodeResult:
    environment = opened(task)
    user = DOMAIN.scripted_user(task, 0, [persona])
    return asyncio.run(played_with(environment, user, agent(DOMAIN.expert(task, 0))))


REWORDINGS = {
    re.compile(said): ways
    for said, ways in yaml.safe_load((Path(__file__).parents[1] / "data/rewordings/telecom.yaml").read_text()).items()
}


def in_other_words(text: str, way: int) -> str:
    """The text, every sentence put in another way."""
    return " ".join(another(sentence, way) for sentence in re.split(r"(?<=[.?]) (?=[A-Z\d])", text))


def another(sentence: str, way: int) -> str:
    for said, ways in REWORDINGS.items():
        if match := said.fullmatch(sentence):
            return match.expand(ways[way])
    raise AssertionError(f"no other wording of {sentence!r}")


@pytest.mark.parametrize("way", range(3))
def test_the_expert_succeeds_in_other_words(way: int):
    for task in PINNED.load("test"):
        played = conversed(task, "plain", lambda moves: reworded(moves, lambda text: in_other_words(text, way)))
        assert played.reward == 1.0, (task.id, [m["content"] for m in played.messages], played.evaluation.details)


async def test_user_actions_stand_in_the_messages_of_the_user():
    task = with_fault("airplane")
    messages = (await demonstrate(DOMAIN, task, 0)).messages
    acted = [message for message in messages if message.get("actions")]
    assert acted
    assert all(message["role"] == "user" for message in acted)
    names = [action["name"] for message in acted for action in message["actions"]]
    assert "set_airplane_mode" in names


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
    task = with_fault("unpaid")
    assert 0 < judged(task, task.data["actions"][:3], domain=domain(reward="partial")).reward < 1


def test_in_a_mix_settings_of_other_domains_are_left_to_them():
    config = EnvironmentConfig.model_validate(
        {"mix": {"telecom": 1, "gyms/turtle": 1}, "show_reward": True, "options": {"turtle.max_words": 9}}
    )
    assert Selection.from_config(config).domains["telecom"].name == "telecom"
