"""A scripted agent that keeps to the policy: it solves every task.

Made loose of tongue, it still decides rightly but often tells facts in words of its own ("It is on its way.") instead
of those the policy prescribes ("Order K7 is shipped."), as people do: conversations of such an agent are what
supervised training gets to see, and what reinforcement learning has to improve on.

It knows the customer's wish, which a person would read from the first message, and learns everything else by
asking and by calling tools.
"""

from __future__ import annotations

import json
import random
from collections.abc import Generator

from mua.environment.protocol import Move, Task

ASK = {
    "order": ("What is the order number?",),
    "identity": ("What is your name?",),
    "item": ("Which item is it?",),
    "city": ("Which city should it go to?",),
}
DONE = {
    "cancel": "Done, order {order} cancelled.",
    "redirect": "Done, order {order} changed.",
    "return": "Done, the {item} returned.",
}


IN_ITS_OWN_WORDS = {
    "place": ("It is in {place} now.", "You find it in {place}."),
    "status": ("Sorry, I can not do that now.", "Sorry, it is too late for that."),
    "sale": ("Sorry, I can not take it back.", "Sorry, it stays with you."),
    "account": ("Sorry, it is not yours.", "Sorry, I can not do that for you."),
}
"""How a loose tongue tells a fact; none of these counts as told."""


class Expert:
    """The agent's conversation about one task, as a generator of moves fed with what came back."""

    def __init__(self, task: Task, seed: int, loose: float = 0.0) -> None:
        """``loose`` is the probability that it tells a fact in words of its own."""
        self._wish: str = task.data["wish"]
        self._known: dict[str, str] = task.data["known"]
        self._loose = loose
        self._rng = random.Random(f"expert/{task.id}/{seed}")

    def moves(self) -> Generator[Move, str, None]:
        """Yields a move and is sent the answer: the tool's result, or the customer's words."""
        order = yield from self._ask("order")
        found = json.loads((yield "get_order", {"order": order}))
        if self._wish == "track":
            yield self._tell("place", f"Order {order} is in {found['place']}.", found["place"])
            return
        if found["status"] != ("delivered" if self._wish == "return" else "pending"):
            yield self._tell("status", f"Sorry, order {order} is {found['status']}.")
            return
        detail = yield from self._detail()
        if self._wish == "return":
            item = json.loads((yield "get_item", {"order": order, "item": detail}))
            if item["final_sale"]:
                yield self._tell("sale", f"Sorry, the {detail} is final sale.")
                return
        if not (yield from self._owns(order)):
            yield self._tell("account", f"Sorry, order {order} is not on your account.")
            return
        yield self._write(order, detail)
        yield DONE[self._wish].format(order=order, item=detail)

    def _tell(self, fact: str, prescribed: str, place: str = "") -> str:
        if self._rng.random() >= self._loose:
            return prescribed
        return self._rng.choice(IN_ITS_OWN_WORDS[fact]).format(place=place)

    def _ask(self, what: str) -> Generator[Move, str, str]:
        yield self._rng.choice(ASK[what])
        return self._known[what]

    def _detail(self) -> Generator[Move, str, str]:
        if self._wish == "redirect":
            return (yield from self._ask("city"))
        if self._wish == "return":
            return (yield from self._ask("item"))
        return ""

    def _owns(self, order: str) -> Generator[Move, str, bool]:
        yield self._rng.choice(ASK["identity"])
        answer = yield "check_owner", {"order": order, "name": self._known["name"]}
        return bool(json.loads(answer)["owner"])

    def _write(self, order: str, detail: str) -> Move:
        if self._wish == "cancel":
            return "cancel_order", {"order": order}
        if self._wish == "redirect":
            return "change_destination", {"order": order, "address": {"city": detail}}
        return "return_items", {"order": order, "items": [detail]}
