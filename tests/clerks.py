"""Scripted policies for endpoints: functions from a chat request to an assistant message."""

from __future__ import annotations

import re

from mua.types import Json
from tests.chat_fixtures import calls, says


def clerk(body: Json) -> Json:
    """Asks for the order, looks it up, cancels it whatever the customer wanted, and says so."""
    texts = " ".join(message["content"] or "" for message in body["messages"] if message["role"] == "user")
    order = re.search(r"\b([A-Z]\d+)\b", texts)
    if order is None:
        return says("What is the order number?")
    done = [call["function"]["name"] for m in body["messages"] for call in m.get("tool_calls", ())]
    if not done:
        return calls(("get_order", {"order": order[1]}))
    if "cancel_order" not in done:
        return calls(("cancel_order", {"order": order[1]}))
    return says(f"Done, order {order[1]} cancelled.")


def idler(body: Json) -> Json:
    """Knows nothing and does nothing."""
    return says("I do not know.")
