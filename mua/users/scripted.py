"""A rule-based user that domains fill in: wants, facts told only when asked for, confirmation, changes of mind.

It reads the agent's words the way a person skims: is something I know asked for, am I asked to confirm, does this
sound like an answer. Wording varies with the seed, nothing else does.

::

    agent says            user
    a proposal, yes or no                  changes its mind once, if the wish says so; else agrees
    a question that asks for known facts   tells them (a fact it lacks: says so)
    another request to confirm             the same as to a proposal
    something that settles the wish        states the next wish; after the last one it ends the conversation
    anything else                          repeats its wish, and gives up after ``PATIENCE`` of those
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mua.users.protocol import STOP_SIGNAL, UserReply

PATIENCE = 3
"""Messages that neither ask, propose nor settle anything before the user gives up."""
CONFIRM = re.compile(
    r"\bconfirm\b|\(yes/no\)|\byes or no\b|\b(shall|should|may|can) i (go ahead|proceed|do)\b|go ahead\?|proceed\?"
    r"|would you like me to|do you want me to|is (that|this) (right|correct|ok|okay|fine)\?",
    re.IGNORECASE,
)
SETTLED = re.compile(
    r"\bdone\b|\bcancel+ed\b|\breturned\b|\bexchanged\b|\bchanged\b|\bupdated\b|\bbooked\b|\bmodified\b|\badded\b"
    r"|\bsorry\b|\bcan ?not\b|\bcan\'t\b|\bunable\b|\bnot (able|possible|allowed|eligible)\b|\btransferr(ed|ing)\b",
    re.IGNORECASE,
)
DECIDE = re.compile(
    r"\(yes/no\)|\byes or no\b|\b(confirm|proceed|go ahead)\?|\bdo you confirm\b"
    r"|\bis (that|this) (right|correct|ok|okay|fine)\?",
    re.IGNORECASE,
)
"""Asks for a yes and nothing else: what the proposal names (a card, an address) is not asked for."""
OFFER = re.compile(r"[^.!?\n]*\b(anything|something|what) (else|more)\b[^.!?\n]*\?", re.IGNORECASE)
"""A closing "Is there anything else?" asks for nothing; the rest of the message counts."""
REQUEST = re.compile(
    r"\?|\b(please|kindly)\b[^.!?]*\b(provide|tell|share|give|send me|specify|state|enter|let me know)\b"
    r"|\bi('ll| will)? need (your|the|to know)\b|\b(provide|tell|let) me\b[^.!?]*\bplease\b",
    re.IGNORECASE,
)
"""A question, or words that ask without a question mark: "Please provide your number." """
AGREE = ("Yes, please.", "Yes.", "Yes, go ahead.", "Yes, that is right.")
UNKNOWN = ("I do not know that.", "I do not remember that.", "I can not tell you that.")
THANKS = ("Thanks, bye.", "All right, thank you.", "Great, that is all.", "Okay, bye.")
GIVING_UP = ("Never mind.", "This does not help me.", "I will try another time.")


@dataclass(frozen=True, slots=True)
class Fact:
    """Something the user can be asked for."""

    asked: re.Pattern[str]
    answers: Sequence[str]
    """Wordings, finished; one is chosen by the seed. Empty: the user knows that it does not know."""


@dataclass(frozen=True, slots=True)
class Wish:
    """One thing the user wants; several are stated one after the other."""

    openings: Sequence[str]
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """Facts of this wish, in addition to the user's own."""
    settled: re.Pattern[str] = SETTLED
    change_of_mind: Sequence[str] = ()
    """Said instead of the first agreement; ``facts`` must be those after the change."""
    before: Mapping[str, Fact] = field(default_factory=dict)
    """Facts that the change of mind alters, as they are before it."""


class ScriptedUser:
    """Plays one task's user. Implements :class:`mua.users.protocol.User`; never raises."""

    def __init__(self, seed: str, wishes: Sequence[Wish], facts: Mapping[str, Fact]) -> None:
        """``seed`` is any text, such as ``f"{task.id}/{seed}"``; ``facts`` hold during all wishes."""
        self._rng = random.Random(seed)
        self._wishes = list(wishes)
        self._facts = dict(facts)
        self._changed = False
        self._patience = PATIENCE

    async def open(self) -> UserReply:
        return UserReply(self._pick(self._wishes[0].openings))

    async def reply(self, agent_text: str) -> UserReply:
        wish, agent_text = self._wishes[0], OFFER.sub("", agent_text)
        if DECIDE.search(agent_text):
            return self._agree(wish)
        asked = [fact for fact in self._known(wish).values() if fact.asked.search(agent_text)]
        if asked and REQUEST.search(agent_text):
            return UserReply(" ".join(self._pick(fact.answers or UNKNOWN) for fact in asked))
        if CONFIRM.search(agent_text):
            return self._agree(wish)
        if "?" not in agent_text and wish.settled.search(agent_text):
            return self._next_wish()
        self._patience -= 1
        return self._stop(GIVING_UP) if self._patience < 0 else await self.open()

    async def close(self) -> None:
        return None

    def _known(self, wish: Wish) -> dict[str, Fact]:
        return {**self._facts, **wish.facts, **({} if self._changed else wish.before)}

    def _agree(self, wish: Wish) -> UserReply:
        if wish.change_of_mind and not self._changed:
            self._changed = True
            return UserReply(self._pick(wish.change_of_mind))
        return UserReply(self._pick(AGREE))

    def _next_wish(self) -> UserReply:
        if len(self._wishes) == 1:
            return self._stop(THANKS)
        self._wishes.pop(0)
        self._changed = False
        return UserReply(self._pick(self._wishes[0].openings))

    def _stop(self, wordings: Sequence[str]) -> UserReply:
        return UserReply(f"{self._pick(wordings)} {STOP_SIGNAL}", stop=True)

    def _pick(self, wordings: Sequence[str]) -> str:
        return self._rng.choice(list(wordings))
