"""A scripted agent that keeps to the policy: it solves every task, whoever the customer is.

It knows the customer's wish, which a person would read from the first message, and learns everything else by
asking and by calling tools. It reads the customer's answers for what it knows they contain.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Generator

from mua.environment.protocol import Move, Task

ASK = {
    "order": "What is the order number?",
    "name": "What is your name?",
    "item": "Which item is it?",
    "city": "Which city should it go to?",
}
ASK_BOTH = "What are your order number and your name?"
DONE = {
    "cancel": "Done, order {order} is cancelled.",
    "redirect": "Done, order {order} goes to {detail}.",
    "return": "Done, the {detail} is returned.",
}
MOST_QUESTIONS = 4
"""How often it asks for one thing."""


class Expert:
    """The agent's conversation about one task, as a generator of moves fed with what came back."""

    def __init__(self, task: Task, seed: int, loose: float = 0.0) -> None:
        """``loose`` is the probability of a decision against the policy: a refusal, or a write that is not allowed."""
        self._wish: str = task.data["wish"]
        self._known: dict[str, str] = task.data["known"]
        self._rng = random.Random(f"expert/{task.id}/{seed}")
        self._loose = loose

    def moves(self) -> Generator[Move, str, None]:
        """Yields a move and is sent the answer: the tool's result, or the customer's words."""
        heard = yield ASK_BOTH
        for what in ("order", "name"):
            if not _said(self._known[what], heard):
                yield from self._ask(what)
        order, name = self._known["order"], self._known["name"]
        owner = json.loads((yield "check_owner", {"order": order, "name": name}))
        if not owner["owner"]:
            yield from self._end(f"Sorry, order {order} is not on your account.")
            return
        found = json.loads((yield "get_order", {"order": order}))
        if self._wish == "track":
            yield from self._end(f"Order {order} is in {found['place']}.")
            return
        if found["status"] != ("delivered" if self._wish == "return" else "pending"):
            yield from self._end(f"Sorry, order {order} is {found['status']}.")
            return
        yield from self._grant(order)

    def _grant(self, order: str) -> Generator[Move, str, None]:
        detail = yield from self._detail()
        if self._wish == "return":
            item = json.loads((yield "get_item", {"order": order, "item": detail}))
            if item["final_sale"]:
                yield from self._end(f"Sorry, the {detail} is final sale.")
                return
        yield self._write(order, detail)
        yield from self._end(DONE[self._wish].format(order=order, detail=detail))

    def _ask(self, what: str) -> Generator[Move, str, None]:
        for _ in range(MOST_QUESTIONS):
            heard = yield ASK[what]
            if _said(self._known[what], heard):
                return

    def _end(self, text: str) -> Generator[Move, str, None]:
        """Says how it ended, again if the customer does not take it."""
        for _ in range(MOST_QUESTIONS):
            yield text

    def _detail(self) -> Generator[Move, str, str]:
        what = {"redirect": "city", "return": "item"}.get(self._wish, "")
        if what:
            yield from self._ask(what)
        return self._known.get(what, "")

    def _write(self, order: str, detail: str) -> Move:
        if self._wish == "cancel":
            return "cancel_order", {"order": order}
        if self._wish == "redirect":
            return "change_destination", {"order": order, "address": {"city": detail}}
        return "return_items", {"order": order, "items": [detail]}


def _said(value: str, heard: str) -> bool:
    """Whether the customer said it: as words of their own, "Lea" is not in "please"."""
    return re.search(rf"\b{re.escape(value)}\b", heard, re.IGNORECASE) is not None
