"""Wishes that tau-bench's made instructions list by item: exchanges, modifications, returns, addresses, payments.

::

    Return #W1 via paypal_1: Tea Kettle; Desk Lamp;
    For #W2, exchange Tea Kettle {'material': 'glass'} to {'material': 'ceramic'}; via paypal_1.
    For #W2, change address to {'order_id': '#W2', 'address1': ...} (same as #W1). For #W2, change payment to paypal_2.
    Cancel order #W3 because no longer needed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from environments._tau.typed import Facts

_START = re.compile(
    r"(?=\bReturn #\w+ via |\bFor #\w+, (?:exchange"
    r"|modify) [A-Z][\w -]* \{|\bFor #\w+, change (?:address|payment) to |\bCancel order #\w+ because )"
)
_RETURN = re.compile(r"Return (?P<order>#\w+) via (?P<via>\w+): (?P<items>(?:[A-Z][^;{]*(?:\{[^}]*\})?; ?)+)")
_SWAP = re.compile(
    r"For (?P<order>#\w+), (?P<verb>exchange|modify) "
    r"(?P<items>(?:[A-Z][\w -]* \{[^}]*\} to \{[^}]*\}(?:; ?|(?=[,.]|$)))+)(?:via (?P<via>\w+)\. ?)?"
)
_ADDRESS = re.compile(
    r"For (?P<order>#\w+), change address to (?:(?P<address>\{[^}]*\})(?: \(same as (?P<like>#\w+)\))?|same as"
    r" (?P<same>#\w+))\. ?"
)
_PAYMENT = re.compile(r"For (?P<order>#\w+), change payment to (?P<via>\w+)\. ?")
_CANCEL = re.compile(r"Cancel order (?P<order>#\w+) because (?P<reason>no longer needed|ordered by mistake)\.? ?")
_ITEM = re.compile(r"([A-Z][\w -]*?) ?(\{[^}]*\})?(?: to (\{[^}]*\}))?(?:;|$|(?=,))")
_OPTIONS = re.compile(r"\{'[^{}]*\}")
_REASONS = {"no longer needed": "It is no longer needed.", "ordered by mistake": "I ordered it by mistake."}
_METHODS = {"credit_card": "my credit card", "gift_card": "my gift card", "paypal": "my PayPal account"}


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry of such a list."""

    opening: str
    text: str
    facts: Facts
    details: Mapping[str, str]


def listed_wishes(text: str) -> tuple[str, Sequence[Listed]]:
    """What remains of ``text``, and the wishes that stood in it in one of these forms."""
    rest, found = [], []
    for part in _START.split(text):
        for pattern, make in _MAKERS.items():
            if match := pattern.match(part):
                found.append(make(match))
                part = part[match.end() :]
                break
        rest.append(part)
    return _OPTIONS.sub(lambda braces: _traits(_options(braces[0])) or braces[0], " ".join(rest)), found


def _returned(found: re.Match[str]) -> Listed:
    items = [_worded(name, options) for name, options, _ in _items(found["items"])]
    names = _all([name for name, _, _ in _items(found["items"])])
    details = {
        "order": f"It is order {found['order']}.",
        "item": f"I want to return the {_all(items)}.",
        "payment": f"Please refund it to {_method(found['via'])}.",
    }
    opening = f"I want to return the {names}."
    return Listed(opening, _whole(opening, details), _facts(found), details)


def _swapped(found: re.Match[str]) -> Listed:
    verb, items = found["verb"], _items(found["items"])
    names = [f"the {name}" for name, _, _ in items]
    old = [_worded(name, old) if names.count(f"the {name}") > 1 else name for name, old, _ in items]
    swaps = [f"Instead of the {one} I would like {_instead(new)}." for one, (_, _, new) in zip(old, items, strict=True)]
    details = {
        "order": f"It is order {found['order']}.",
        "item": f"I want to {verb} {_all([f'the {_worded(name, old)}' for name, old, _ in items])}.",
        "wanted": " ".join(swaps),
    }
    if found["via"]:
        details["payment"] = f"Please use {_method(found['via'])}."
    opening = f"I want to {verb} {_all(names)}."
    return Listed(opening, _whole(opening, details), _facts(found), details)


def _addressed(found: re.Match[str]) -> Listed:
    like = found["like"] or found["same"]
    told = [_address(found["address"])] if found["address"] else []
    told += [f"the one of order {like}"] if like else []
    details = {"order": f"It is order {found['order']}.", "address": f"The new address is {', '.join(told)}."}
    opening = "I want to change the address of an order."
    return Listed(opening, _whole(opening, details), _facts(found), details)


def _paid(found: re.Match[str]) -> Listed:
    details = {"order": f"It is order {found['order']}.", "payment": f"Please change it to {_method(found['via'])}."}
    opening = "I want to change the payment method of an order."
    return Listed(opening, _whole(opening, details), _facts(found), details)


def _cancelled(found: re.Match[str]) -> Listed:
    details = {"order": f"It is order {found['order']}.", "reason": _REASONS[found["reason"]]}
    opening = "I want to cancel an order."
    return Listed(opening, _whole(opening, details), _facts(found), details)


_MAKERS: Mapping[re.Pattern[str], Callable[[re.Match[str]], Listed]] = {
    _RETURN: _returned,
    _SWAP: _swapped,
    _ADDRESS: _addressed,
    _PAYMENT: _paid,
    _CANCEL: _cancelled,
}


def _facts(found: re.Match[str]) -> Facts:
    groups = found.groupdict()
    return {"order": (found["order"],), **({"payment": (groups["via"],)} if groups.get("via") else {})}


def _whole(opening: str, details: Mapping[str, str]) -> str:
    told = [text for name, text in details.items() if name != "order"]
    return " ".join(told if "item" in details else [opening, *told])


def _items(text: str) -> list[tuple[str, Mapping[str, str], Mapping[str, str]]]:
    found = (match.groups() for match in _ITEM.finditer(text) if match[1].strip())
    return [(name.strip(), _options(old), _options(new)) for name, old, new in found]


def _options(text: str | None) -> Mapping[str, str]:
    try:
        value = ast.literal_eval(text or "{}")
    except (ValueError, SyntaxError):
        return {}
    return {str(key): str(one) for key, one in value.items()} if isinstance(value, dict) else {}


def _worded(name: str, options: Mapping[str, str]) -> str:
    return f"{name} ({_traits(options)})" if options else name


def _instead(options: Mapping[str, str]) -> str:
    return f"one with {_traits(options)}" if options else "another one just like it"


def _traits(options: Mapping[str, str]) -> str:
    return _all([f"{key} {value}" for key, value in options.items()])


def _all(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _address(text: str) -> str:
    keys = ("address1", "address2", "city", "state", "zip", "country")
    options = _options(text)
    return ", ".join(options[key] for key in keys if options.get(key))


def _method(name: str) -> str:
    kind = next((words for key, words in _METHODS.items() if name.startswith(key)), "my account")
    return f"{kind}, {name}"
