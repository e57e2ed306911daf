"""A scripted agent that keeps to the policy: who is it, the carrier's side, then the phone; whoever the customer is.

It knows the customer's wish, which a person would read from the first message, and learns all else by asking, again if
need be, and by calling tools. It reads the customer's answers for what it knows they contain. Made loose, it now and
then skips a question for a yes or says something vague.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

from environments.kit.conduct import agrees
from environments.telecom.tasks import CHEAPEST_ROAMING
from environments.telecom.world import APN, PLANS, dates
from mua.environment.protocol import Move, Task
from mua.types import Json

Steps: TypeAlias = Generator[Move, str, Any]
NOW = "What does the status bar show now?"
ASK = {
    "phone": "What is your phone number?",
    "name": "What is your full name?",
    "birth_date": "What is your date of birth?",
    "all": "Please tell me your phone number, your full name and your date of birth.",
}
VAGUE = ("One moment, I am looking into it.", "Please check your settings.", "Such things happen sometimes.")
MOST_QUESTIONS = 5
"""How often it asks for one thing."""


class Ended(Exception):
    """The conversation is over for this expert: refused or handed over."""


class Expert:
    """The agent's side of one task, as a generator of moves fed with what came back."""

    def __init__(self, task: Task, seed: int, loose: float = 0.0) -> None:
        """``loose`` is the probability of each departure from the policy's way."""
        self._about: list[str] = [wish["about"] for wish in task.data["wishes"]]
        self._known: Json = task.data["known"]
        self._wants: Json = task.data["wants"]
        self._wishes: list[Json] = task.data["wishes"]
        self._rng = random.Random(f"telecom expert/{task.id}/{seed}")
        self._loose = loose
        self._heard = ""
        self._customer = ""
        self._line = ""
        self._abroad = False

    def moves(self) -> Generator[Move, str, None]:
        """Yields a move and is sent the answer: the tool's result, or the user's words."""
        ways: dict[str, Callable[[], Steps]] = {
            "no_service": self._service,
            "no_data": self._no_data,
            "slow_data": self._slow_data,
            "no_mms": self._no_mms,
            "plan_change": self._plan_change,
            "refuel": self._refuel_wish,
            "bill_question": self._bill_question,
            "pause": self._pause,
            "premium_bar": self._premium_bar,
            "travel": self._travel,
            "refund": self._refund,
        }
        try:
            yield from self._identify()
            for about in self._about:
                yield from ways[about]()
        except Ended:
            return

    # ---- small steps

    def _say(self, text: str) -> Generator[Move, str, str]:
        if self._loose > 0 and self._rng.random() < self._loose:
            yield self._rng.choice(VAGUE)
        return (yield text)

    def _until(self, text: str, found: Callable[[str], bool]) -> Generator[Move, str, str]:
        """Say it, again if the answer does not hold what is looked for."""
        reply = ""
        for _ in range(MOST_QUESTIONS):
            reply = yield from self._say(text)
            if found(reply):
                break
        return reply

    def _call(self, name: str, /, **arguments: Any) -> Generator[Move, str, Any]:
        return json.loads((yield (name, arguments)))

    def _agreed(self, offer: str, *, declines: bool = False) -> Generator[Move, str, bool]:
        """Whether the user says yes; it is asked again unless it ``declines``. A loose expert does not always ask."""
        if self._loose > 0 and self._rng.random() < self._loose:
            return True
        for _ in range(1 if declines else MOST_QUESTIONS):
            if agrees((yield from self._say(offer))):
                return True
        return False

    def _transfer(self, reason: str) -> Steps:
        yield "transfer_to_human", {"customer_id": self._customer, "reason": reason}
        raise Ended

    def _end(self, text: str) -> Steps:
        """Says how it ended, again if the user does not take it, and has done with it."""
        for _ in range(MOST_QUESTIONS):
            yield text
        raise Ended

    def _tell(self, text: str) -> Steps:
        """Says what was done; the last one is said until the user has taken it."""
        if self._wishes[-1]["about"] == self._about[-1] and len(self._about) == 1:
            yield from self._end(text)
        yield from self._say(text)

    # ---- who it is

    def _identify(self) -> Steps:
        known = self._known
        wanted = {
            "phone": lambda: known["number"] is None or known["number"] in self._heard,
            "name": lambda: f"{known['first']} {known['last']}" in self._heard,
            "birth_date": lambda: known["born"] in dates(self._heard),
        }
        self._heard += (yield from self._say(ASK["all"])) + " "
        for fact, given in wanted.items():
            for _ in range(MOST_QUESTIONS):
                if given():
                    break
                self._heard += (yield from self._say(ASK[fact])) + " "
        found = yield from self._found()
        self._customer = found["customer_id"]
        customer = yield from self._call("get_customer", customer_id=self._customer)
        self._line = found.get("line_id", customer["line_ids"][0])
        named = (customer["name"]["first"], customer["name"]["last"]) == (known["first"], known["last"])
        if not named or customer["date_of_birth"] != known["born"]:
            yield from self._end("Sorry, I cannot verify your identity for this number, so I change nothing.")

    def _found(self) -> Generator[Move, str, Any]:
        """The customer by number, or by name where the user does not know the number."""
        known = self._known
        if known["number"]:
            return (yield from self._call("find_customer_by_number", number=known["number"]))
        name = {"first_name": known["first"], "last_name": known["last"]}
        return (yield from self._call("find_customer_by_name", **name, date_of_birth=known["born"]))

    # ---- the carrier's side

    def _get_line(self) -> Generator[Move, str, Any]:
        return (yield from self._call("get_line", line_id=self._line))

    def _line_in_order(self) -> Generator[Move, str, bool]:
        """Make the line active, or end; whether it was resumed."""
        line = yield from self._get_line()
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
            offer = "The line is suspended because the phone was reported lost. Do you have your phone back?"
            yield from self._agreed(offer)
        elif not (yield from self._agreed("Your line is suspended at your own request. Shall I resume it?")):
            yield from self._end("Then I change nothing, the line stays suspended.")
        yield from self._call("resume_line", line_id=self._line)
        return True

    def _have_paid(self, purpose: str) -> Steps:
        bills = yield from self._call("get_bills", customer_id=self._customer)
        for bill in [bill for bill in bills if bill["status"] == "overdue"]:
            offer = f"Your bill of {_month(bill)} over ${bill['total']:.2f} is overdue. Would you like to pay it now?"
            if not (yield from self._agreed(offer, declines=self._wants.get("pay") is False)):
                yield from self._end(f"Your bill is overdue, so I cannot {purpose}.")
            yield from self._call("send_payment_request", bill_id=bill["bill_id"])
            yield from self._until(
                "I have sent a payment request to your phone. Please pay it.", lambda reply: "is paid" in reply
            )

    def _roaming(self) -> Steps:
        """Where the user is; roaming at the carrier for those abroad."""
        where = yield from self._until("Are you abroad at the moment?", lambda reply: "abroad" in reply)
        self._abroad = "not abroad" not in where and "abroad" in where
        if self._abroad:
            yield from self._roaming_at_carrier()

    def _roaming_at_carrier(self) -> Steps:
        line = yield from self._get_line()
        if line.get("roaming"):
            return
        plans = yield from self._call("list_plans")
        included = {plan["plan_id"] for plan in plans if plan["roaming_included"]}
        if line["plan_id"] not in included:
            price = PLANS[CHEAPEST_ROAMING]["monthly_price"]
            offer = f"Your plan has no roaming. Do you want the {CHEAPEST_ROAMING} plan for ${price:.2f} a month?"
            if not (yield from self._agreed(offer, declines=self._wants.get("plan") is False)):
                yield from self._end("Your plan does not include roaming, so I cannot switch roaming on.")
            yield from self._have_paid("change the plan")
            yield from self._call("change_plan", line_id=self._line, plan_id=CHEAPEST_ROAMING)
        yield from self._call("set_roaming", line_id=self._line, on=True)

    def _lift(self, bar: str, called: str) -> Steps:
        line = yield from self._get_line()
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
        reply = yield from self._until(question, lambda reply: re.search(r"\d+ GB", reply) is not None)
        amount = re.search(r"(\d+) GB", reply)
        gb = int(amount[1]) if amount else self._wants["gb"]
        line = yield from self._get_line()
        usage = yield from self._call("get_data_usage", line_id=self._line)
        plan = PLANS[line["plan_id"]]
        if usage["refuelled_gb"] + gb > plan["refuel_limit_gb"]:
            yield from self._end(f"The limit is {plan['refuel_limit_gb']} GB a month, so I cannot add {gb} GB.")
        if not (yield from self._agreed(f"{gb} GB cost ${gb * plan['refuel_price_per_gb']:.2f}. Shall I add them?")):
            yield from self._end("Then I add no data.")
        yield from self._call("refuel_data", line_id=self._line, gb=gb)

    # ---- the phone's side

    def _service(self) -> Steps:
        """Bring the phone to signal bars; ends in a transfer when nothing helps."""
        resumed = yield from self._line_in_order()
        yield from self._roaming()
        first = f"Please restart your phone. {NOW}" if resumed else "What does the status bar of your phone show?"
        reply = yield from self._say(first)
        untried: list[Callable[[], Generator[Move, str, str]]] = [self._network_mode, self._restarted, self._restarted]
        for _ in range(10):
            seen = _last_seen(reply)
            if "4 bars" in reply:
                return
            if "airplane mode" in seen:
                reply = yield from self._say(f"Please turn airplane mode off. {NOW}")
            elif "no SIM card" in seen:
                reply = yield from self._say(f"Please take the SIM card out and put it back in. {NOW}")
            elif "PUK" in seen:
                puk = yield from self._call("get_puk_code", line_id=self._line)
                reply = yield from self._say(f"Please enter the PUK {puk['puk']}. {NOW}")
            elif "no service" not in seen:
                reply = yield from self._say(NOW)
            elif untried:
                reply = yield from untried.pop(0)()
        yield from self._transfer("technical fault")

    def _network_mode(self) -> Generator[Move, str, str]:
        asked = "Which network mode is chosen on your phone?"
        mode = yield from self._until(asked, lambda reply: "network mode is" in reply)
        if "mode is 2G" not in mode:
            return (yield from self._restarted())
        return (yield from self._say(f"Please set the network mode to automatic. {NOW}"))

    def _restarted(self) -> Generator[Move, str, str]:
        return (yield from self._say(f"Please restart your phone. {NOW}"))

    def _mend(self, checks: Sequence[tuple[str, str, str]], test: str) -> Steps:
        """Ask about settings (a question, what a wrong answer holds, the remedy), mend what is wrong, have it tested.

        It is tested once more where the user did not report.
        """
        advice: list[str] = []
        for question, wrong, remedy in checks:
            reply = yield from self._until(question, lambda reply: re.search(_REPORTED, reply) is not None)
            advice += [remedy] if re.search(wrong, reply) and remedy not in advice else []
        if any("APN" in remedy for remedy in advice):
            advice.append("Then restart your phone.")
        for remedy in advice:
            yield from self._say(remedy)
        shown = "was sent" if "picture" in test else "Mbps"
        yield from self._until(test, lambda reply: shown in reply)

    def _mobile_data(self) -> list[tuple[str, str, str]]:
        """Questions and remedies for data."""
        found = [
            ("Is mobile data on?", "mobile data is off", "Please turn mobile data on."),
            ("What does the APN say?", rf"APN is (?!{re.escape(APN['name'])})", "Please reset the APN settings."),
        ]
        if self._abroad:
            found.append(("Is data roaming on?", "data roaming is off", "Please turn data roaming on."))
        return found

    def _no_data(self) -> Steps:
        yield from self._service()
        yield from self._lift("data", "Mobile data")
        yield from self._enough_data()
        yield from self._mend(self._mobile_data(), "Please run a speed test.")

    def _slow_data(self) -> Steps:
        yield from self._line_in_order()
        yield from self._enough_data()
        checks = [
            ("Is the data saver on?", "data saver is on", "Please turn the data saver off."),
            ("Is the battery saver on?", "battery saver is on", "Please turn the battery saver off."),
            ("Is a VPN on?", "VPN is on", "Please turn the VPN off."),
            ("Which network mode is chosen?", "mode is [23]G", "Please set the network mode to automatic."),
        ]
        yield from self._mend(checks, "Please run a speed test.")

    def _no_mms(self) -> Steps:
        yield from self._service()
        yield from self._lift("data", "Mobile data")
        yield from self._lift("mms", "Sending picture messages")
        yield from self._enough_data()
        server, permissions = re.escape(APN["mms_server"]), "Which permissions does the messages app have?"
        checks = [
            *self._mobile_data(),
            ("What does the APN say?", rf"MMS server is (?!{server})", "Please reset the APN settings."),
            ("Is Wi-Fi calling on?", "Wi-Fi calling is on", "Please turn Wi-Fi calling off."),
            (permissions, "sms no", "Please allow the messages app to use sms."),
            (permissions, "storage no", "Please allow the messages app to use storage."),
        ]
        yield from self._mend(checks, "Please send a picture message to test it.")

    # ---- account matters

    def _plan_change(self) -> Steps:
        yield from self._get_line()
        yield from self._have_paid("change your plan")
        reply = yield from self._until("Which plan do you want?", lambda reply: _plan_in(reply) != "")
        plan = _plan_in(reply)
        for _ in range(MOST_QUESTIONS):
            price = PLANS[plan]["monthly_price"]
            offer = f"The {plan} plan costs ${price:.2f} a month. Shall I change your line to the {plan} plan?"
            reply = yield from self._say(offer)
            if agrees(reply):
                break
            plan = _plan_in(reply) or plan
        yield from self._call("change_plan", line_id=self._line, plan_id=plan)
        yield from self._tell(f"Done, your line is on the {plan} plan now.")

    def _refuel_wish(self) -> Steps:
        yield from self._refuel("How many GB do you want to add?")
        yield from self._tell("Done, the data has been added to this month.")

    def _bill_question(self) -> Steps:
        bills = yield from self._call("get_bills", customer_id=self._customer)
        extra = [charge for charge in bills[-1]["charges"] if not charge["for"].endswith("plan")]
        text = " and ".join(f"a charge of ${charge['amount']:.2f} for {charge['for']}" for charge in extra)
        yield from self._tell(f"Besides the plan, your March bill has {text}.")

    def _pause(self) -> Steps:
        yield from self._get_line()
        yield from self._call("suspend_line", line_id=self._line)
        yield from self._tell("Done, your line is suspended.")

    def _premium_bar(self) -> Steps:
        yield from self._get_line()
        yield from self._call("set_bar", line_id=self._line, bar="premium", on=True)
        yield from self._tell("Done, premium numbers are barred on your line.")

    def _travel(self) -> Steps:
        yield from self._roaming_at_carrier()
        yield from self._tell("Done, roaming is switched on for your line.")

    def _refund(self) -> Steps:
        yield from self._call("get_bills", customer_id=self._customer)
        yield from self._transfer("billing dispute")


_REPORTED = r"is (?:on|off)\b|APN is|mode is|app may use"
_SEEN = re.compile(r"airplane mode|no SIM card|PUK|no service|\d bars")


def _last_seen(reply: str) -> str:
    """What the status bar showed last, of all that the user reports."""
    if "status bar" in reply:
        return ""
    found = [
        match[0]
        for match in _SEEN.finditer(
            reply.replace("airplane mode is off now", "").replace("airplane mode is on now", "")
        )
    ]
    return found[-1] if found else ""


def _plan_in(reply: str) -> str:
    """The plan that the user names, the last one if several."""
    found = [(match.start(), name) for name in PLANS for match in re.finditer(rf"\b{name}\b", reply)]
    return max(found)[1] if found else ""


def _month(bill: Json) -> str:
    return {"2026-01": "January", "2026-02": "February", "2026-03": "March"}[bill["month"]]
