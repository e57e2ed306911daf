"""The scripted user of the telecom domain: what it understands, does, tells, declines, and when it leaves.

Does not cover whole conversations with the expert (test_telecom.py), nor an LLM in its place (test_telecom_rollout.py).
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.telecom.advice import requests
from environments.telecom.faults import SOLVED
from environments.telecom.user import PATIENCE, PhoneUser
from mua.environment.protocol import (
    Transcript,
)
from mua.environment.schema import validate_arguments
from mua.users.protocol import STOP_SIGNAL
from tests.telecom_support import ALL, Phone, do, first, gold_texts, opened, person, with_fault

# ---- the user


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
        ("- Turn **off** the *VPN*\n- Restart the phone", ["set_vpn(False)", "restart_phone()"]),
        ("Which icons do you see?", ["check_status_bar()"]),
        ("Do you have a signal now?", ["test()"]),
        ("Please try to open a web page.", ["run_speed_test()"]),
        ("Open Settings > Network > Access point names and choose reset to default.", ["reset_apn()"]),
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
