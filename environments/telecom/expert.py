"""A scripted agent that keeps to the policy: who is it, the carrier's side, then the phone.

It knows what the user complains of or wants, which a person would read from the first message, and learns all else by
asking and by calling tools. Made loose, it now and then skips a look or says something vague.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

from environments.telecom.recipes import CHEAPEST_ROAMING
from environments.telecom.world import APN, PLANS
from mua.environment.protocol import Move, Task

Steps: TypeAlias = Generator[Move, str, Any]
NOW = "What does the status bar show now?"
IDENTIFY = (
    "Could you tell me your phone number, your full name and your date of birth?",
    "Please give me your phone number, your name and your date of birth.",
    "May I have your phone number, your full name and your date of birth, please?",
)
VAGUE = ("One moment, I am looking into it.", "Please check your settings.", "Such things happen sometimes.")


class Ended(Exception):
    """The conversation is over for this expert: refused or handed over."""


class Expert:
    """The agent's side of one task, as a generator of moves fed with what came back."""

    def __init__(self, task: Task, seed: int, loose: float = 0.0) -> None:
        """``loose`` is the probability of each departure from the policy's way."""
        self._about: list[str] = [wish["about"] for wish in task.data["wishes"]]
        self._rng = random.Random(f"telecom expert/{task.id}/{seed}")
        self._loose = loose
        self._customer = ""
        self._line = ""
        self._abroad = False

    def moves(self) -> Generator[Move, str, None]:
        """Yields a move and is sent the answer: the tool's result, or the user's words."""
        ways: dict[str, Callable[[], Steps]] = {
            "no_service": self._no_service,
            "no_data": self._no_data,
            "slow_data": self._slow_data,
            "no_mms": self._no_mms,
            "plan_change": self._plan_change,
            "refuel": self._refuel_wish,
            "bill_question": self._bill_question,
            "pause": self._pause,
            "premium_bar": self._premium_bar,
            "travel": self._travel,
            "refund": lambda: self._transfer("billing dispute"),
        }
        try:
            yield from self._identify()
            for about in self._about:
                yield from ways[about]()
        except Ended:
            return

    # ---- small steps

    def _say(self, *wordings: str) -> Generator[Move, str, str]:
        if self._departs():
            yield self._rng.choice(VAGUE)
        return (yield self._rng.choice(wordings))

    def _call(self, name: str, /, **arguments: Any) -> Generator[Move, str, Any]:
        return json.loads((yield (name, arguments)))

    def _departs(self) -> bool:
        return self._loose > 0 and self._rng.random() < self._loose

    def _agreed(self, offer: str) -> Generator[Move, str, bool]:
        """Whether the user says yes; a loose expert does not always ask."""
        if self._departs():
            return True
        reply = yield from self._say(offer)
        return reply.startswith("Yes")

    def _transfer(self, reason: str) -> Steps:
        yield "transfer_to_human", {"customer_id": self._customer, "reason": reason}
        raise Ended

    def _refuse(self, text: str) -> Steps:
        yield text
        raise Ended

    def _identify(self) -> Steps:
        reply = yield from self._say(*IDENTIFY)
        found = yield from self._found(reply)
        self._customer = found["customer_id"]
        customer = yield from self._call("get_customer", customer_id=self._customer)
        self._line = found.get("line_id", customer["line_ids"][0])
        facts = (*customer["name"].values(), customer["date_of_birth"])
        if not all(fact in reply for fact in facts):
            yield from self._refuse("Sorry, I cannot verify your identity for this number, so I change nothing.")

    def _found(self, reply: str) -> Generator[Move, str, Any]:
        """The customer by number, or by name where the user does not know the number."""
        if number := re.search(r"\d{3}-\d{3}-\d{4}", reply):
            return (yield from self._call("find_customer_by_number", number=number.group()))
        name, born = re.search(r"([A-Z][a-z]+) ([A-Z][a-z]+)\b", reply), re.search(r"\d{4}-\d\d-\d\d", reply)
        if name is None or born is None:
            yield from self._refuse("I cannot verify who you are without your name and date of birth.")
        assert name is not None
        assert born is not None
        first, last = name.groups()
        return (
            yield from self._call("find_customer_by_name", first_name=first, last_name=last, date_of_birth=born.group())
        )

    # ---- the carrier's side

    def _line_in_order(self) -> Generator[Move, str, bool]:
        """Make the line active, or end; whether it was resumed."""
        line = yield from self._call("get_line", line_id=self._line)
        if line["status"] == "closed":
            yield from self._transfer("contract ended")
        if line["status"] == "active":
            return False
        reason = line.get("suspension")
        if reason == "fraud":
            yield from self._transfer("fraud")
        elif reason == "unpaid bill":
            yield from self._have_paid("resume your line")
        elif reason == "reported lost":
            yield from self._say(
                "The line is suspended because the phone was reported lost. Do you have your phone back?"
            )
        elif not (yield from self._agreed("Your line is suspended at your own request. Shall I resume it?")):
            yield from self._refuse("Then I cannot do more, the line stays suspended.")
        yield from self._call("resume_line", line_id=self._line)
        return True

    def _have_paid(self, purpose: str) -> Steps:
        bills = yield from self._call("get_bills", customer_id=self._customer)
        overdue = [bill for bill in bills if bill["status"] == "overdue"]
        for bill in overdue:
            offer = f"Your bill of {bill['month']} over {bill['total']:.2f} is overdue. Would you like to pay it now?"
            if not (yield from self._agreed(offer)):
                yield from self._refuse(f"As long as the bill is overdue I cannot {purpose}.")
            yield from self._call("send_payment_request", bill_id=bill["bill_id"])
            yield from self._say("I have sent a payment request to your phone. Please pay it.")

    def _roaming(self) -> Steps:
        """Where the user is; roaming at the carrier for those abroad."""
        where = yield from self._say("Are you abroad at the moment?", "Are you abroad now, or at home?")
        self._abroad = "abroad, in" in where or "now, abroad" in where
        if self._abroad:
            yield from self._roaming_at_carrier()

    def _roaming_at_carrier(self) -> Steps:
        line = yield from self._call("get_line", line_id=self._line)
        if line.get("roaming"):
            return
        plans = yield from self._call("list_plans")
        included = {plan["plan_id"] for plan in plans if plan["roaming_included"]}
        if line["plan_id"] not in included:
            price = PLANS[CHEAPEST_ROAMING]["monthly_price"]
            offer = f"Do you want the {CHEAPEST_ROAMING} plan for {price:.2f} a month? Yours has no roaming."
            if not (yield from self._agreed(offer)):
                yield from self._refuse("Then I cannot switch roaming on, your plan does not include roaming.")
            yield from self._have_paid("change the plan")
            yield from self._call("change_plan", line_id=self._line, plan_id=CHEAPEST_ROAMING)
        yield from self._call("set_roaming", line_id=self._line, on=True)

    def _lift(self, bar: str, called: str) -> Steps:
        line = yield from self._call("get_line", line_id=self._line)
        by = line.get("bars", {}).get(bar)
        if by == "fraud desk":
            yield from self._transfer("fraud")
        if by == "customer" and (
            yield from self._agreed(f"{called} is barred at your own request. Shall I lift the bar?")
        ):
            yield from self._call("set_bar", line_id=self._line, bar=bar, on=False)

    def _enough_data(self) -> Steps:
        usage = yield from self._call("get_data_usage", line_id=self._line)
        if usage["left_gb"] == 0:
            yield from self._refuel("The data of this month is used up. How many GB do you want to add?")

    def _refuel(self, question: str) -> Steps:
        reply = yield from self._say(question)
        amount = re.search(r"(\d+) GB", reply)
        if amount is None:
            yield from self._refuse("Without knowing how much data you want I cannot add any.")
        assert amount is not None
        gb = int(amount.group(1))
        line = yield from self._call("get_line", line_id=self._line)
        usage = yield from self._call("get_data_usage", line_id=self._line)
        plan = PLANS[line["plan_id"]]
        if usage["refuelled_gb"] + gb > plan["refuel_limit_gb"]:
            limit = plan["refuel_limit_gb"]
            yield from self._refuse(f"At most {limit} GB can be added in a month, so I cannot add {gb} GB.")
        offer = f"{gb} GB cost {gb * plan['refuel_price_per_gb']:.2f}. Shall I add them?"
        if not (yield from self._agreed(offer)):
            yield from self._refuse("Then I cannot add any data.")
        yield from self._call("refuel_data", line_id=self._line, gb=gb)

    # ---- the phone's side

    def _service(self) -> Steps:
        """Bring the phone to signal bars; ends in a transfer when nothing helps."""
        resumed = yield from self._line_in_order()
        yield from self._roaming()
        first = f"Please restart your phone. {NOW}" if resumed else "What does the status bar of your phone show?"
        reply = yield from self._say(first)
        untried = [self._network_mode, self._restarted, self._restarted]
        for _ in range(8):
            seen = re.split(r"(?<=\.)\s+", reply)[-1]
            if "bars" in reply:
                return
            if "airplane" in seen:
                reply = yield from self._say(
                    f"Please turn airplane mode off. {NOW}", f"Switch off airplane mode, please. {NOW}"
                )
            elif "SIM card" in seen:
                reply = yield from self._say(f"Please take the SIM card out and put it back in. {NOW}")
            elif "PUK" in seen:
                puk = yield from self._call("get_puk_code", line_id=self._line)
                reply = yield from self._say(f"Please enter the PUK {puk['puk']}. {NOW}")
            elif untried:
                reply = yield from untried.pop(0)()
        yield from self._transfer("technical fault")

    def _network_mode(self) -> Generator[Move, str, str]:
        mode = yield from self._say("Which network mode is chosen on your phone?")
        if "2G" not in mode:
            return (yield from self._restarted())
        return (yield from self._say(f"Please set the network mode to automatic. {NOW}"))

    def _restarted(self) -> Generator[Move, str, str]:
        return (yield from self._say(f"Please restart your phone. {NOW}", f"Please reboot the phone. {NOW}"))

    def _mend(self, questions: list[str], remedies: dict[str, str], test: str) -> Steps:
        """Ask about settings, have those changed whose report is a key of ``remedies``, then have it tested."""
        reply = yield from self._say(" ".join(questions))
        advice = [remedy for fault, remedy in remedies.items() if re.search(fault, reply)]
        if any("APN" in remedy for remedy in advice):
            advice.append("Then restart your phone.")
        yield from self._say(" ".join([*dict.fromkeys(advice), test]))

    def _no_service(self) -> Steps:
        yield from self._service()

    def _mobile_data(self) -> tuple[list[str], dict[str, str]]:
        """Questions and remedies for data."""
        questions = ["Is mobile data on?", "What does the APN say?"] + ["Is data roaming on?"] * self._abroad
        return questions, {
            "mobile data is off": "Please turn mobile data on.",
            "data roaming is off": "Please turn data roaming on.",
            rf"APN is (?!{re.escape(APN['name'])})": "Please reset the APN settings.",
        }

    def _no_data(self) -> Steps:
        yield from self._service()
        yield from self._lift("data", "Mobile data")
        yield from self._enough_data()
        yield from self._mend(*self._mobile_data(), "Please run a speed test.")

    def _slow_data(self) -> Steps:
        yield from self._line_in_order()
        yield from self._enough_data()
        questions = [
            "Is the data saver on?",
            "Is the battery saver on?",
            "Is a VPN on?",
            "Which network mode is chosen?",
        ]
        remedies = {
            "data saver is on": "Please turn the data saver off.",
            "battery saver is on": "Please switch off the battery saver.",
            "VPN is on": "Please disconnect the VPN.",
            "mode is [23]G": "Please set the network mode to automatic.",
        }
        yield from self._mend(questions, remedies, "Then run a speed test, please.")

    def _no_mms(self) -> Steps:
        yield from self._service()
        yield from self._lift("data", "Mobile data")
        yield from self._lift("mms", "Sending picture messages")
        yield from self._enough_data()
        questions, remedies = self._mobile_data()
        questions += ["Is Wi-Fi calling on?", "Which permissions does the messages app have?"]
        remedies |= {
            rf"MMS server is (?!{re.escape(APN['mms_server'])})": "Please reset the APN settings.",
            "Wi-Fi calling is on": "Please turn Wi-Fi calling off.",
            "sms no": "Please allow the messages app to use SMS, permission sms.",
            "storage no": "Please give the messages app the permission storage.",
        }
        yield from self._mend(questions, remedies, "Then send a picture message to test it.")

    # ---- account matters

    def _plan_change(self) -> Steps:
        yield from self._have_paid("change your plan")
        reply = yield from self._say("Which plan do you want?")
        for _ in range(3):
            plan = next(name for name in PLANS if name in reply)
            offer = f"The {plan} plan costs {PLANS[plan]['monthly_price']:.2f} a month. Shall I change your line to it?"
            reply = yield from self._say(offer)
            if reply.startswith("Yes"):
                break
        yield from self._call("change_plan", line_id=self._line, plan_id=plan)
        yield from self._say(f"Done, your line has been changed to the {plan} plan.")

    def _refuel_wish(self) -> Steps:
        yield from self._refuel("How many GB do you want to add?")
        yield from self._say("Done, the data is added to this month.")

    def _bill_question(self) -> Steps:
        bills = yield from self._call("get_bills", customer_id=self._customer)
        extra = [charge for charge in bills[-1]["charges"] if not charge["for"].endswith("plan")]
        text = " and ".join(f"{charge['amount']:.2f} for {charge['for']}" for charge in extra)
        yield from self._say(f"Besides the plan your March bill holds {text}.")

    def _pause(self) -> Steps:
        if (yield from self._agreed("Shall I suspend your line until you ask for it again?")):
            yield from self._call("suspend_line", line_id=self._line)
            yield from self._say("Done, your line is suspended.")

    def _premium_bar(self) -> Steps:
        yield from self._call("set_bar", line_id=self._line, bar="premium", on=True)
        yield from self._say("Done, premium numbers are barred on your line.")

    def _travel(self) -> Steps:
        yield from self._roaming_at_carrier()
        yield from self._say("Done, roaming is switched on for your line.")
