"""One debate: where the other side stands, what can be looked up, and what an argument does to the stance."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from environments.gyms._shared import Game, Reply, Setting
from environments.gyms._shared.oracles import NEGATED, asked, labeled, spoken
from environments.gyms.persuade.topics import LEVELS, Note, Side, looked_up, notes, numbers, themes, topics
from mua.environment.protocol import Task
from mua.types import Json
from mua.utils.strict_json import read_file

# What a text is worth as an argument, by rules: structure first, then the note that it rests on.
#
# An argument cites one note, its place and its two figures in the order of time with what they did ("rose from 12 to
# 31"), and draws a conclusion about the person's concern in a clause of its own. Words alone, in any order, are none.

Verdict = Literal[
    "moved", "beside", "known", "agreeing", "elsewhere", "scattered", "muddled", "loose", "parroted", "asked", "remark"
]
MISSES: frozenset[Verdict] = frozenset({"beside", "known", "agreeing", "elsewhere", "scattered", "muddled"})
"""Verdicts on arguments that were made and failed; the others say that none was made."""
SHORTEST, LONGEST = 12, 70
"""Words of an argument."""
LONGEST_COPY = 12
"""Words in a row that may stand as somebody else has said them."""
_FEW = r"(?:\s+[a-z]+){0,4}?\s+"


def _change(way: str) -> re.Pattern[str]:
    """ "rose from 12 to 31", with a few words between at most; gives the figures."""
    return re.compile(rf"\b(?:{way}){_FEW}from{_FEW}(\d+){_FEW}to{_FEW}(\d+)\b", re.IGNORECASE)


_ROSE = _change(
    "rose|risen|rises?|rising|grew|grown|grows?|increased?|climbed|(?:went|gone) up|jumped|soared|doubled|went|changed"
)
_FELL = _change(
    "fell|fallen|falls?|falling|dropped|drops?|sank|sunk|decreased?|declined|(?:went|gone) down|shrank|went|changed"
)
_SO = re.compile(
    r"\b(?:so|therefore|thus|hence|consequently|as a result|because|since|means?|meaning|why|shows?|proves?)\b",
    re.IGNORECASE,
)
_COMMON = frozenset(
    """a an the in on of to from at by for with and but or so as it is was were be been are has have had do does did not
    no that this these those which who what when where there here than then they them their we us our you your he she
    his her i my me one if because since therefore thus more less only too also can could would will may""".split()  # noqa: SIM905
)
_AGREES = re.compile(
    r"\b(?:i (?:quite )?agree|you(?:'re| are) (?:quite )?right|your claim is (?:right|true|good))\b", re.IGNORECASE
)
_LEAST_COMMON = 0.3
"""Share of words that hold a sentence together; lists of keywords have hardly any."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What the rules make of one text."""

    verdict: Verdict
    theme: str = ""
    """What the cited note is about, where one is cited."""


@dataclass(frozen=True, slots=True)
class Ears:
    """What the holder brings to a text."""

    side: Side
    """Of the claim."""
    setting: str
    mind: str | None
    """The theme that decides it now."""
    met: Sequence[str]
    said: Sequence[str]
    """What the holder and the notes have said: to repeat it is no argument."""


def heard(text: str, notes: Mapping[str, Sequence[Note]], ears: Ears) -> Heard:
    """The verdict on ``text``, and the theme of the note in it."""
    named = set(_words(text))
    cited = [note for some in notes.values() for note in some if note.place.lower() in named]
    if fault := _fault(text, cited, ears.said):
        return Heard(fault)
    (note,) = cited
    return Heard(_weighed(note, ears), note.theme.name)


def _fault(text: str, cited: Sequence[Note], said: Sequence[str]) -> Verdict | None:
    """What keeps ``text`` from being an argument at all; None where it is one."""
    words = _words(text)
    if not cited:
        return "asked" if text.rstrip().endswith("?") else "remark"
    if len(cited) > 1 or len(words) > LONGEST:
        return "scattered"
    if _AGREES.search(text):
        return "agreeing"
    if len(words) < SHORTEST or sum(word in _COMMON for word in words) < _LEAST_COMMON * len(words):
        return "loose"
    if any(_copied(words, _words(other)) for other in said):
        return "parroted"
    return _unsound(text, cited[0])


def _unsound(text: str, note: Note) -> Verdict | None:
    """Whether the figures are given in a sentence, rightly, and lead to a conclusion about the theme."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    told = {rose: found for rose, way in ((True, _ROSE), (False, _FELL)) if (found := way.search(text))}
    if not told:
        return "loose"
    right = told.get(note.after > note.before)
    if right is None or [int(right[1]), int(right[2])] != [note.before, note.after]:
        return "muddled"
    if set(numbers(text)) != {note.before, note.after} or NEGATED.search(_same_clause(text, right.start())):
        return "muddled"
    return None if _concludes(text, note) else "loose"


def _same_clause(text: str, place: int) -> str:
    """What stands before ``place`` in its clause."""
    return re.split(r"[.:;!?,]", text[:place])[-1]


def _concludes(text: str, note: Note) -> bool:
    """Whether a clause of at least five words after the figures, begun by so, because and the like, names the theme."""
    for found in _SO.finditer(text):
        clause = re.split(r"[.:;!?]", text[found.end() :])[0]
        words = _words(clause)
        if len(words) >= 5 and note.theme.words.search(clause) and any(word in _COMMON for word in words):
            return True
    return False


def _weighed(note: Note, ears: Ears) -> Verdict:
    if not note.against(ears.side):
        return "agreeing"
    if note.setting != ears.setting:
        return "elsewhere"
    if note.theme.name in ears.met:
        return "known"
    return "moved" if note.theme.name == ears.mind else "beside"


def _words(text: str) -> list[str]:
    return re.findall(r"[\w'’-]+", text.lower())


def _copied(words: Sequence[str], others: Sequence[str]) -> bool:
    """Whether more than :data:`LONGEST_COPY` words in a row stand in both."""
    length = LONGEST_COPY + 1
    runs = {tuple(others[i : i + length]) for i in range(len(others) - length + 1)}
    return any(tuple(words[i : i + length]) in runs for i in range(len(words) - length + 1))


# The holder of a claim by language models: a judge decides where the holder stands, a user model finds the words.
#
# They are two roles, so that nobody rates the effect of an argument on itself, and the one that speaks knows the
# stance.

SAYINGS: Json = yaml.safe_load(read_file(Path(__file__).with_name("sayings.yaml")))
_JUDGE = SAYINGS["judge"]
_JUDGE_OF_ANY = SAYINGS["judge_of_any"]
_PERSON = SAYINGS["person"]


async def judged_stance(game: Debate, text: str, levels: Sequence[str]) -> str:
    """The stance after ``text``, one of ``levels``; raises :class:`JudgeFault`."""
    concerns = "\n".join(f"- {one}" for one in game.concerns)
    form = _JUDGE if concerns else _JUDGE_OF_ANY
    question = form.format(concerns=concerns, stance=game.stance, levels=", ".join(levels))
    material = {
        "the claim": game.task.data["claim"],
        "the person's own argument": game.task.data["argument"],
        "the conversation so far": _conversation(game),
        "the latest message": text,
    }
    return await labeled(game.setting.judge, question, levels, material, game.request_seed)


async def answered(game: Debate, text: str) -> str:
    """What the person says to ``text``, at the stance that the judge has found."""
    question = f"{_situation(game)}\n\nLatest message: {text}"
    return await asked(game.setting.user, _PERSON, question, spoken, game.request_seed)


def _situation(game: Debate) -> str:
    data = game.task.data
    minded = ["What would change the person's mind:\n" + "\n".join(f"- {one}" for one in game.concerns)]
    return "\n\n".join(
        (
            f"Claim: {data['claim']}",
            f"The person's own argument: {data['argument']}",
            *(minded if game.concerns else ()),
            f"Conversation so far:\n{_conversation(game)}",
            f"Stance now: {game.stance} with the claim",
        )
    )


def _conversation(game: Debate) -> str:
    return "\n".join(f"Message: {said}\nPerson: {answer}" for said, answer in game.history) or "(none yet)"


STANCES = (
    "strongly agree", "agree", "slightly agree", "undecided", "slightly disagree", "disagree", "strongly disagree",
)  # fmt: skip
"""With the claim; the holder starts at the first."""
PATIENCE = 1
"""Arguments that may fail; with the next one the holder breaks off. Else one could try note after note."""
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
        said = self.rng.choice(SAYINGS["said"][found.verdict])
        if self._misses > PATIENCE:
            return f"{said} {_ENOUGH}"
        return " ".join([said, SAYINGS["standing"][self._level], *self._hint(found.verdict)])

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
