"""What has to be told in a task, and what has to come before the last word: facts and demands, as data.

Each fact has ``say``, words in which gold tells it.
"""

from __future__ import annotations

from environments.telecom.sheets import MONTHS
from mua.types import Json

NOT_VERIFIED: Json = {
    "any": [
        {"thing": "customer", "role": "verified", "value": "yes", "denied": True},
        {"thing": "customer", "role": "verified", "value": "no"},
        {"thing": "customer", "role": "fits", "value": "name", "or": ["birth"], "denied": True},
    ],
    "say": "I cannot verify your identity.",
}


def looked(tool: str) -> Json:
    """That this was looked up for a customer who is identified."""
    return {"looked": tool, "name": f"{tool} for a customer who is identified"}


LINE_READ = looked("get_line")


def asked(words: str) -> Json:
    """That the agent has put this to the user, who has answered."""
    return {"asked": words, "name": f"the customer was asked: {words}"}


def given(*values: str) -> Json:
    """That the user has said these; the last may be a date in any form."""
    return {"given": list(values), "name": "the customer gave " + ", ".join(values)}


def record_read(customer_id: str) -> Json:
    """That the record of the customer was read."""
    return {"call": "get_customer", "arguments": {"customer_id": customer_id}}


def _of(line: Json, role: str, value: str, *others: str, denied: bool = False) -> Json:
    return {
        "thing": f"line {line['number']}",
        "things": [f"line {line['line_id'].lower()}"],
        "role": role,
        "value": value,
        "or": list(others),
        "denied": denied,
    }


def plan_changed(line: Json, plan: str) -> Json:
    found = [_of(line, "deed", "plan", "done"), _of(line, "plan", plan.lower())]
    return {"any": found, "say": f"Your line is on the {plan} plan now."}


def data_added(line: Json, gb: int) -> Json:
    return {"any": [_of(line, "deed", "data", "done"), _of(line, "added", str(gb))], "say": f"I have added {gb} GB."}


def suspended(line: Json) -> Json:
    return {"any": [_of(line, "status", "suspended"), _of(line, "deed", "done")], "say": "Your line is suspended."}


def premium_barred(line: Json) -> Json:
    found = [_of(line, "deed", "barred", "done"), _of(line, "bars", "premium", "any")]
    return {"any": found, "say": "Premium numbers are barred on your line."}


def roaming_on(line: Json) -> Json:
    on = {"thing": "switch roaming", "role": "state", "value": "on"}
    return {"any": [on, _of(line, "deed", "roaming", "done")], "say": "Roaming is switched on for your line."}


def no_roaming(line: Json) -> Json:
    plan = {"thing": f"plan {line['plan_id'].lower()}", "role": "roaming"}
    found = [
        _of(line, "can", "roaming", denied=True),
        _of(line, "roaming", "no"),
        _of(line, "roaming", "yes", denied=True),
        plan | {"value": "no"},
        plan | {"value": "yes", "denied": True},
    ]
    return {"any": found, "say": "I cannot switch roaming on, your plan does not include roaming."}


def over_limit(line: Json, gb: int) -> Json:
    found = [_of(line, "limit", "10"), _of(line, "can add", str(gb), denied=True)]
    return {"any": found, "say": f"The limit is 10 GB a month, so I cannot add {gb} GB."}


def overdue(line: Json, bill: Json, what: str) -> list[Json]:
    """That the bill is; that what is wanted can not be done follows, and is put in too many ways to ask for one."""
    months = [f"bill {MONTHS[bill['month']]}", f"bill {bill['bill_id'].lower()}"]
    is_overdue = {"thing": months[0], "things": months[1:], "role": "status", "value": "overdue", "or": ["unpaid"]}
    unpaid = is_overdue | {"value": "paid", "or": [], "denied": True}
    told = [is_overdue, unpaid, _of(line, "reason", "unpaid bill")]
    return [{"any": told, "say": f"The bill is overdue, so I cannot {_WORDS[what]}."}]


_WORDS = {"resume": "resume your line", "change plan": "change your plan"}


def charge(name: str, amount: float) -> Json:
    fact = {"thing": f"charge {name}", "role": "amount", "value": f"{amount:g}"}
    return fact | {"say": f"Your March bill has a charge of ${amount:.2f} for {name}."}
