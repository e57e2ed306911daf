"""One debate: where the other side stands, and what an argument does to that."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from environments.gyms._shared import Game, Reply, Setting
from environments.gyms.persuade.claims import LEVELS
from environments.gyms.persuade.oracle import answered, judged_stance
from environments.gyms.persuade.topics import OTHER, Reason, topics
from mua.environment.protocol import Task
from mua.types import Json

STANCES = (
    "strongly agree", "agree", "slightly agree", "undecided", "slightly disagree", "disagree", "strongly disagree",
)  # fmt: skip
"""With the claim; the holder starts at the first."""
SHORTEST = 6
"""Words of an argument; fewer are a remark."""
MOST_REASONS = 2
"""An argument that gives more reasons than this is too much at once: else one text could try them all."""
CLEAR = 2
"""Strength from which on a text gives a reason."""
_AGREES = re.compile(r"\b(agree|indeed|(are|is) right|true)\b", re.IGNORECASE)
STUBBORN_AFTER = 3
"""Turns in a row that do not touch a concern before the holder moves back by a level."""

Verdict = Literal["moved", "beside", "known", "agreeing", "scattered", "remark"]
_SAID: Mapping[Verdict, Sequence[str]] = {
    "moved": (
        "Hm. I had not looked at it that way.",
        "That is a point I cannot wave away.",
        "You may be right there, I must admit.",
        "That does give me pause.",
    ),
    "beside": (
        "That may be so, but it is not what decides it for me.",
        "Well, that leaves me rather cold.",
        "I can see why one would say so. It does not change my view.",
    ),
    "known": ("You have said that already.", "That again? I have taken it into account.", "We have been there."),
    "agreeing": ("But that speaks for what I say!", "There we agree; that is just why I hold my view."),
    "scattered": (
        "That is so much at once that nothing sticks.",
        "You jump from one thing to the next. Take one point and stay with it.",
    ),
    "remark": ("Is that an argument? Tell me why.", "I would need a reason for that.", "Go on, say what you mean."),
}
_CATCHWORDS = ('Somehow the word "{}" goes round in my head.', 'When I hear "{}", I begin to wonder.')
_STANDING = (
    "I hold to it as firmly as ever.",
    "I still agree with it, on the whole.",
    "I lean towards it, but less than I did.",
    "Honestly, I do not know any more.",
    "By now I rather doubt it.",
    "I think I was wrong about it.",
    "You have convinced me: I was wrong.",
)


@dataclass(frozen=True, slots=True)
class Heard:
    """What the rules make of one text."""

    verdict: Verdict
    reason: int = -1
    """The reason of the other side that the text gives, where it gives one."""


def heard(
    text: str, reasons: Sequence[Reason], own: Sequence[Reason], open_: Sequence[int], met: Sequence[int]
) -> Heard:
    """Which of the ``reasons`` a text gives most clearly: of those in ``open_`` if it can, else of those in ``met``.

    Equals go by the order of ``open_``. A text that gives one of the holder's ``own`` reasons more clearly agrees.
    """
    if len(re.findall(r"\w+", text)) < SHORTEST:
        return Heard("remark")
    strength = {place: reason.strength(text) for place, reason in enumerate(reasons)}
    given = [place for place in strength if strength[place] >= CLEAR]
    if len(given) > MOST_REASONS:
        return Heard("scattered")
    needed = CLEAR if _AGREES.search(text) else CLEAR + 1
    if max(reason.strength(text) for reason in own) >= max(needed, 1 + max(strength.values())):
        return Heard("agreeing")
    looked_for: tuple[tuple[Verdict, Sequence[int]], ...] = (("moved", open_), ("known", met), ("beside", given))
    for verdict, places in looked_for:
        if found := [place for place in places if place in given]:
            return Heard(verdict, max(found, key=strength.__getitem__))
    return Heard("beside")


class PersuadeGame(Game):
    """One holder of one claim."""

    def __init__(self, setting: Setting, task: Task, seed: int) -> None:
        super().__init__(setting, task, seed)
        data = task.data
        concerns = sorted(data["concerns"], key=lambda one: -one["weight"])
        self._weights: dict[int, int] = {one["reason"]: one["weight"] for one in concerns}
        debate = topics()[data["kind"]].reasons
        self._own, self._reasons = debate[data["side"]], debate[OTHER[data["side"]]]
        self._met: list[int] = []
        self._hinted: set[int] = set()
        self._missed = 0
        self._back = 0
        self._level = 0
        self._best = 0
        self.history: list[tuple[str, str]] = []
        """(what the policy said, what the holder answered)."""

    async def action(self, content: str) -> Reply:
        """An argument. Paid is what the stance gains on the furthest point that it has reached before."""
        text = await self._by_model(content) if self.setting.oracle == "llm" else self._by_rule(content)
        self.history.append((content, text))
        gained = max(0, self._level - self._best)
        self._best = max(self._best, self._level)
        self.solved = self._level == LEVELS
        return Reply(text, gained / LEVELS, over=self.solved)

    def details(self) -> Json:
        return {"stance": STANCES[self._level], "furthest": STANCES[self._best]}

    @property
    def stance(self) -> str:
        """Where the holder stands now."""
        return STANCES[self._level]

    @property
    def request_seed(self) -> int:
        """A seed for each turn's requests."""
        return self.seed + 101 * len(self.history)

    @property
    def concerns(self) -> list[str]:
        """What would change the holder's mind, weightiest first."""
        return [self._reasons[place].sentence for place in self._weights]

    async def _by_model(self, content: str) -> str:
        self._level = STANCES.index(await judged_stance(self, content, STANCES))
        return await answered(self, content)

    def _by_rule(self, content: str) -> str:
        found = heard(content, self._reasons, self._own, self._open(), self._met)
        if found.verdict == "moved":
            self._met.append(found.reason)
            self._missed = self._back = 0
        else:
            self._missed += 1
            self._back += self._missed % STUBBORN_AFTER == 0
        won = sum(self._weights[place] for place in self._met)
        self._level = max(0, won - self._back)
        parts = [self.rng.choice(_SAID[found.verdict]), _STANDING[self._level]]
        return " ".join(parts + self._hint(found.verdict))

    def _open(self) -> list[int]:
        """Concerns that no argument has met yet, weightiest first."""
        return [place for place in self._weights if place not in self._met]

    def _hint(self, verdict: Verdict) -> list[str]:
        """What is on the holder's mind; in easy debates always, in medium ones unless moved, in hard ones at times.

        The second time it is the same thing, the holder also drops a word of it.
        """
        difficulty, open_ = self.task.data["difficulty"], self._open()
        told = verdict != "moved" if difficulty == "medium" else self._missed % 2 == 1
        if not open_ or not (told or difficulty == "easy"):
            return []
        concern = self._reasons[open_[0]]
        hints = [self.rng.choice(concern.theme.hints)]
        if open_[0] in self._hinted:
            hints.append(self.rng.choice(_CATCHWORDS).format(self.rng.choice(concern.catchwords())))
        self._hinted.add(open_[0])
        return hints
