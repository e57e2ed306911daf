"""The scripted customer: says what it wants, reveals facts only when asked, and ends the conversation.

It reads the agent's words the way a person skims: which of the things it knows is asked for, or does this sound
like an answer. Wording varies with the seed.
"""

from __future__ import annotations

import random
import re

from mua.environment.protocol import Task
from mua.users.protocol import STOP_SIGNAL, UserReply

OPENINGS = {
    "track": ("Where is my order?", "Hi, where is my parcel now?", "I want to know where my order is."),
    "cancel": ("I want to cancel my order.", "Please cancel an order for me.", "Hi, cancel my order please."),
    "redirect": (
        "My order should go to another city.",
        "Hi, please send my order to another city.",
        "I want to change where my order goes.",
    ),
    "return": ("I want to return an item.", "Hi, I would like to send an item back.", "Please take an item back."),
}
ANSWERS = {
    "order": ("It is order {0}.", "Order {0}.", "The number is {0}."),
    "name": ("I am {0}.", "My name is {0}.", "{0}."),
    "item": ("The {0}.", "It is the {0}.", "My {0}."),
    "city": ("To {0}.", "It should go to {0}.", "{0}, please."),
}
ASKED = {
    "order": re.compile(r"order number|number of (the|your) order|which order|what order", re.IGNORECASE),
    "name": re.compile(r"\bname\b|who are you", re.IGNORECASE),
    "item": re.compile(r"(which|what) (item|product)", re.IGNORECASE),
    "city": re.compile(r"(which|what) (city|address|destination)|where (should|shall|do you want)", re.IGNORECASE),
}
SETTLED = re.compile(
    r"\bcancel+ed\b|\breturned\b|\bchanged\b|\bdone\b|\bsorry\b|\bcan ?not\b|\bunable\b|\bis in [a-z]+", re.IGNORECASE
)
UNKNOWN = ("I do not know that.", "I can not tell you that.", "I do not have that.")
THANKS = ("Thanks, bye.", "All right, thank you.", "Okay, bye.")
GIVING_UP = ("Never mind.", "This does not help me.")
PATIENCE = 2
"""Answers that neither ask nor settle anything before the customer gives up."""


class ScriptedCustomer:
    """Plays one task's customer. Implements :class:`mua.users.protocol.User`; never raises."""

    def __init__(self, task: Task, seed: int) -> None:
        self._known: dict[str, str] = task.data["known"]
        self._wish: str = task.data["wish"]
        self._rng = random.Random(f"{task.id}/{seed}")
        self._patience = PATIENCE

    async def open(self) -> UserReply:
        return UserReply(self._rng.choice(OPENINGS[self._wish]))

    async def reply(self, agent_text: str) -> UserReply:
        settled = "?" not in agent_text and SETTLED.search(agent_text) is not None
        asked = [fact for fact, pattern in ASKED.items() if pattern.search(agent_text)]
        if asked and not settled:
            return UserReply(" ".join(self._answer(fact) for fact in asked))
        if settled:
            return self._stop(THANKS)
        self._patience -= 1
        if self._patience < 0:
            return self._stop(GIVING_UP)
        return await self.open()

    async def close(self) -> None:
        return None

    def _answer(self, fact: str) -> str:
        if fact not in self._known:
            return self._rng.choice(UNKNOWN)
        return self._rng.choice(ANSWERS[fact]).format(self._known[fact])

    def _stop(self, wordings: tuple[str, ...]) -> UserReply:
        return UserReply(f"{self._rng.choice(wordings)} {STOP_SIGNAL}", stop=True)
