"""What a text is worth as an argument, by rules: structure first, then the note that it rests on.

An argument cites one note, its place and its two figures in the order of time with what they did ("rose from 12 to
31"), and draws a conclusion about the person's concern in a clause of its own. Words alone, in any order, are none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from environments.gyms._shared.questions import NEGATED
from environments.gyms.persuade.notes import Note, numbers
from environments.gyms.persuade.topics import Side

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
