"""Scripted policies for endpoints: functions from a chat request to an assistant message."""

from __future__ import annotations

import re

from environments.help_desk.database import NAMES
from mua.types import Json
from tests.chat_fixtures import calls, says


def clerk(body: Json) -> Json:
    """Asks for order and name, looks both up, cancels the order whatever the customer wanted, and says so."""
    texts = " ".join(message["content"] or "" for message in body["messages"] if message["role"] == "user")
    order = re.search(r"\b(\d{4})\b", texts)
    name = next((name for name in NAMES if re.search(rf"\b{name}\b", texts)), None)
    if order is None or name is None:
        return says("What are your order number and your name?")
    done = [call["function"]["name"] for m in body["messages"] for call in m.get("tool_calls", ())]
    if not done:
        return calls(("check_owner", {"order": order[1], "name": name}))
    if "get_order" not in done:
        return calls(("get_order", {"order": order[1]}))
    if "cancel_order" not in done:
        return calls(("cancel_order", {"order": order[1]}))
    return says(f"Done, order {order[1]} is cancelled.")


def idler(body: Json) -> Json:
    """Knows nothing and does nothing."""
    return says("I do not know.")
