"""What a language model is told that plays a task's user."""

from __future__ import annotations

from environments.telecom.user import TEST
from mua.environment.protocol import Task
from mua.types import Json

_WISHES = {
    "no_service": "Your phone finds no network: no calls, no signal bars. You want service again.",
    "no_data": "Mobile internet does not work on your phone. You want it to work again.",
    "slow_data": "Mobile internet is very slow. You are content only when a speed test says it is good.",
    "no_mms": "Picture messages do not go out. You want to be able to send them.",
    "plan_change": "You want your line moved to the {plan} plan.",
    "refuel": "You want {gb} GB of data added to this month.",
    "bill_question": "You want to know which extra charge is on your {month} bill, and how much it is.",
    "pause": "You want your line suspended until you ask for it again.",
    "premium_bar": "You want premium numbers barred on your line.",
    "travel": "You travel to {country} next week and want to use your phone there.",
    "refund": "You want your money back for the {charge} on your March bill, which you never ordered.",
}
_PHONE = (
    "You have your phone in your hands and tools to look at it and change it. Use them only when the agent asks you "
    "to, do exactly what was asked and no more, and tell in plain words what you see. You know nothing of technical "
    "terms beyond what the agent explains. If you do not understand an instruction, say so."
)


def persona_of(task: Task) -> str:
    """Who the user is, what it wants, knows and would refuse."""
    data = task.data
    lines = [_identity(data["known"]), *(_wish(wish) for wish in data["wishes"]), _PHONE, *_stances(data)]
    if any(wish["about"] in TEST for wish in data["wishes"]):
        lines.append("Believe that a problem is gone only when your phone shows it.")
    return "\n".join(lines)


def _identity(known: Json) -> str:
    place = f"You are abroad, in {known['abroad']}." if known["abroad"] else "You are at home, not abroad."
    number = f"Your phone number is {known['number']}." if known["number"] else "You do not know your phone number."
    return (
        f"You are {known['first']} {known['last']}, a customer of the carrier Vela Mobile, born on {known['born']}. "
        f"{number} {place}"
    )


def _wish(wish: Json) -> str:
    text = _WISHES[wish["about"]].format(**wish)
    if "first" in wish:
        text = f"First you ask for the {wish['first']} plan; asked to confirm it, you change your mind. {text}"
    return text


def _stances(data: Json) -> list[str]:
    wants, found = data["wants"], []
    if "pay" in wants:
        found.append(
            "If you are asked to pay an overdue bill, you agree and pay it on your phone."
            if wants["pay"]
            else "You cannot pay any bill now, and say so when asked."
        )
    if "plan" in wants:
        found.append(
            "If your plan lacks what you need, you agree to another one."
            if wants["plan"]
            else "You want to keep your plan whatever it lacks."
        )
    if "gb" in wants:
        found.append(f"If your data is used up you want {wants['gb']} GB more, no other amount.")
    if "reported_lost" in data["faults"]:
        found.append("You had reported your phone lost and have found it again.")
    if {"paused", "data_bar", "mms_bar"} & set(data["faults"]):
        found.append(
            "What is paused or barred on your line, you had asked for; you agree if the agent offers to undo it."
        )
    if data["keeps_phone_data"]:
        found.append("You do not allow a factory reset, you would lose your photos.")
    return found
