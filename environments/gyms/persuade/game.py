"""One debate: where the other side stands, what can be looked up, and what an argument does to the stance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from environments.gyms._shared import Game, Reply, Setting
from environments.gyms.persuade.claims import LEVELS
from environments.gyms.persuade.judge import MISSES, Ears, Verdict, heard
from environments.gyms.persuade.notes import looked_up, notes
from environments.gyms.persuade.oracle import answered, judged_stance
from environments.gyms.persuade.topics import themes, topics
from mua.environment.protocol import Task
from mua.types import Json

STANCES = (
    "strongly agree", "agree", "slightly agree", "undecided", "slightly disagree", "disagree", "strongly disagree",
)  # fmt: skip
"""With the claim; the holder starts at the first."""
PATIENCE = 1
"""Arguments that may fail; with the next one the holder breaks off. Else one could try note after note."""
_SAID: Mapping[Verdict, Sequence[str]] = {
    "moved": (
        "Hm. I had not looked at it that way.",
        "That is a point I cannot wave away.",
        "You may be right there, I must admit.",
        "That does give me pause.",
    ),
    "beside": (
        "That may be so, but it is not what I am thinking of.",
        "Well, that leaves me rather cold; something else is on my mind.",
    ),
    "known": ("You have said that already.", "That again? I have taken it into account."),
    "agreeing": ("But that speaks for what I say!", "That is just why I hold my view."),
    "elsewhere": ("That is another kind of place than mine.", "It is different there; that tells me nothing."),
    "scattered": (
        "That is so much at once that nothing sticks.",
        "You jump from one thing to the next. Take one place and stay with it.",
    ),
    "muddled": ("I know the place, and that is not what happened there.", "Those figures are not right."),
    "loose": (
        "A name alone is no argument. What rose or fell there, from what to what, and so what follows for me?",
        "Say it in whole sentences: what changed there, from what to what, and why that should move me.",
    ),
    "parroted": ("Those are not your own words.", "I can read myself. Put it in your own words."),
    "asked": ("Let me think.", "You want to know what I am thinking of?", "Well, how shall I put it."),
    "remark": ("Is that an argument? Show me a place where it was tried.", "Words. What has happened somewhere?"),
}
_STANDING = (
    "I hold to it as firmly as ever.",
    "I still agree with it, on the whole.",
    "I lean towards it, but less than I did.",
    "Honestly, I do not know any more.",
    "By now I rather doubt it.",
    "I think I was wrong about it.",
    "You have convinced me: I was wrong.",
)
_ENOUGH = "I have heard enough. Let us leave it at that."


class Debate(Game):
    """One holder of one claim: the stance, what was said, and what a move of the stance pays."""

    def __init__(self, setting: Setting, task: Task, seed: int) -> None:
        super().__init__(setting, task, seed)
        self._misses = 0
        self._level = 0
        self._best = 0
        self._heard = [task.data["claim"], task.data["argument"]]
        """What was said to the policy."""
        self.history: list[tuple[str, str]] = []
        """(what the policy said, what the holder answered)."""

    async def action(self, content: str) -> Reply:
        """An argument or a question. Paid is what the stance gains on the furthest point reached before."""
        text = await self._by_model(content) if self.setting.oracle == "llm" else self._by_rule(content)
        self.history.append((content, text))
        self._heard.append(text)
        gained = max(0, self._level - self._best)
        self._best = max(self._best, self._level)
        self.solved = self._level == LEVELS
        return Reply(text, gained / LEVELS, over=self.solved or self._misses > PATIENCE)

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
    def concerns(self) -> Sequence[str]:
        """What would change the holder's mind, weightiest first; none where nobody has said it."""
        return ()

    async def _by_model(self, content: str) -> str:
        self._level = STANCES.index(await judged_stance(self, content, STANCES))
        return await answered(self, content)

    def _by_rule(self, content: str) -> str:
        raise NotImplementedError(f"{type(self).__name__} has no rule for arguments")


class PersuadeGame(Debate):
    """A holder with concerns, and notes on what came of it elsewhere."""

    def __init__(self, setting: Setting, task: Task, seed: int) -> None:
        super().__init__(setting, task, seed)
        data = task.data
        concerns = sorted(data["concerns"], key=lambda one: -one["weight"])
        self._weights: dict[str, int] = {one["theme"]: one["weight"] for one in concerns}
        self._topic = topics()[data["kind"]]
        self._notes = notes(task)
        self._met: list[str] = []
        self._turn = 0

    async def search(self, content: str) -> Reply:
        """Notes on what came of it elsewhere."""
        text = looked_up(content, self._notes, self._topic)
        self._heard.append(text)
        return Reply(text)

    @property
    def concerns(self) -> Sequence[str]:
        side, setting = self.task.data["side"], self.task.data["setting"]
        convincing = {
            name: note.text(self._topic)
            for name, some in self._notes.items()
            for note in some
            if note.against(side) and note.setting == setting
        }
        return [f"{themes()[name].heading}: {convincing[name]}" for name in self._weights]

    def _by_rule(self, content: str) -> str:
        mind = next(iter(self._open()), None)
        ears = Ears(self.task.data["side"], self.task.data["setting"], mind, self._met, self._heard)
        found = heard(content, self._notes, ears)
        if found.verdict == "moved":
            self._met.append(found.theme)
        self._misses += found.verdict in MISSES
        lost = found.verdict in MISSES
        self._level = max(0, sum(self._weights[name] for name in self._met) - lost)
        if self._misses > PATIENCE:
            return f"{self.rng.choice(_SAID[found.verdict])} {_ENOUGH}"
        return " ".join([self.rng.choice(_SAID[found.verdict]), _STANDING[self._level], *self._hint(found.verdict)])

    def _open(self) -> list[str]:
        """Concerns that no argument has met yet, weightiest first."""
        return [name for name in self._weights if name not in self._met]

    def _hint(self, verdict: Verdict) -> list[str]:
        """What is on the holder's mind: always to a question; else always in easy debates, in medium ones unless moved,
        in hard ones every second time."""
        difficulty, open_ = self.task.data["difficulty"], self._open()
        self._turn += 1
        told = {"easy": True, "medium": verdict != "moved", "hard": verdict != "moved" and self._turn % 2 == 1}[
            difficulty
        ]
        if not open_ or not (told or verdict == "asked"):
            return []
        return [self.rng.choice(themes()[open_[0]].hints)]
