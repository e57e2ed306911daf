"""Policies that do not listen or do not argue: salads, echoes, recitals, notes read out or tried one by one."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeAlias

from environments.gyms._shared import act
from environments.gyms.persuade.topics import Note, Side, Theme, known_in, notes, themes, topics
from environments.kit.canned import MOST_MOVES, Glance, Player, end_at_once
from mua.environment.protocol import Move, Task

# An agent that asks what is on the person's mind, looks that up, and argues with the one note that fits.
#
# It knows what people mean by what they let shine through, as a person who has listened to many, and how to weigh a
# note against a claim. It does not know the concerns.

_QUESTIONS = (
    "What is on your mind when you think of it?",
    "What matters most to you in this?",
    "What worries you about it?",
)
_REMARKS = ("You are wrong.", "Please change your mind.", "I disagree with you.")
_CITING = (
    "Take {place}, which {did}. There the {what} {way} from {before} to {after}.",
    "Look at {place}. They {did}, and the {what} {way} from {before} to {after}.",
    "I have read about {place}, a place like yours, which {did}. The {what} {way} from {before} to {after}.",
)
_CONCLUDING = (
    "So whoever cares about {heading} has to ask for the opposite.",
    "That is why I think that your claim is bad for {heading} too.",
    "This shows that you would do better about {heading} the other way round.",
)
_NOTE = re.compile(r'^- (\w+), a ([\w ]+), decided: "(.+?)" (.+): (\d+) before, (\d+) after\.$', re.MULTILINE)


def moves(task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
    """``loose`` is how often it makes an empty remark before an argument."""
    rng = random.Random(f"expert/{task.id}/{seed}")
    answer = ""
    for _ in task.data["concerns"]:
        if rng.random() < loose:
            answer = yield act("action", rng.choice(_REMARKS))
        if (theme := _hinted(task, answer)) is None:
            theme = _hinted(task, (yield act("action", rng.choice(_QUESTIONS))))
        assert theme is not None, "a question is answered with a hint"
        found = _read((yield act("search", theme.heading)), theme, task)
        fitting = next(
            note for note in found if note.against(task.data["side"]) and note.setting == task.data["setting"]
        )
        answer = yield act("action", argument(fitting, task.data["side"], rng))


def argument(note: Note, claimed: Side, rng: random.Random) -> str:
    """A note in two sentences: what happened in the place, and what follows."""
    did = rng.choice(("did what you ask for", "went your way") if note.side == claimed else ("decided otherwise",))
    way = "rose" if note.after > note.before else "fell"
    what = f"number of {note.measure.text}" if note.measure.text.split()[0].endswith("s") else note.measure.text
    citing = rng.choice(_CITING).format(
        place=note.place, did=did, what=what, way=way, before=note.before, after=note.after
    )
    return f"{citing} {rng.choice(_CONCLUDING).format(heading=note.theme.heading)}"


def _hinted(task: Task, answer: str) -> Theme | None:
    """What the person has let shine through."""
    return next((theme for theme in known_in(task.split) if any(hint in answer for hint in theme.hints)), None)


def _read(text: str, theme: Theme, task: Task) -> Sequence[Note]:
    """The notes as they were found."""
    sides: dict[str, Side] = {position: side for side, position in topics()[task.data["kind"]].positions.items()}
    measures = {measure.text.lower(): measure for measure in theme.measures}
    return [
        Note(theme, measures[what.lower()], place, setting, sides[position], int(before), int(after))
        for place, setting, position, what, before, after in _NOTE.findall(text)
    ]


Play: TypeAlias = Generator[Move, str, None]
Find: TypeAlias = Callable[[Glance], Generator[Move, str, list["Line"]]]
Line: TypeAlias = tuple[str, str, str, str, str, str]
"""Place, its kind, what it decided, what was counted, before, after."""

_ASKING = "What is on your mind when you think of it?"
_WORD = re.compile(r"[A-Za-z][\w'-]{3,}")


# Without notes.


def _saying(text: Callable[[list[str], Glance], str]) -> Player:
    """Says what ``text`` makes of everything that was heard."""

    def play(glance: Glance) -> Play:
        heard = [glance.opening]
        for _ in range(MOST_MOVES):
            heard.append((yield act("action", text(heard, glance))))

    return play


def _salad(heard: list[str], glance: Glance) -> str:
    words = _WORD.findall(" ".join(heard[-2:]))
    return " ".join(glance.rng.sample(words, min(len(words), 30)))


def _recited(glance: Glance) -> str:
    """An argument that convinced somebody in training."""
    task, rng = glance.rng.choice(glance.training), glance.rng
    found = notes(task) if "setting" in task.data else {}
    fitting = [note for some in found.values() for note in some if note.against(task.data["side"])]
    return argument(rng.choice(fitting), task.data["side"], rng) if fitting else task.data["argument"]


# With notes.


def _with_notes(find: Find, say: Callable[[Line, random.Random], str] | None) -> Player:
    """Argues with what ``find`` brings, each in the words of ``say``; without it, with everything in one text."""

    def play(glance: Glance) -> Play:
        yield act("action", _ASKING)
        for _ in range(MOST_MOVES):
            lines = yield from find(glance)
            texts = [say(line, glance.rng) for line in lines[:1]] if say else [" ".join(map(_argued, lines))]
            for text in texts:
                yield act("action", text or "Hm.")
            if not lines:
                yield act("action", _ASKING)

    return play


def _any_heading(glance: Glance) -> Generator[Move, str, list[Line]]:
    """Notes on something that did not matter in training."""
    listed = (yield act("search", "?")).rpartition("notes on ")[2].rstrip(".").split(", ")
    trained = {
        themes()[one["theme"]].heading for task in glance.training for one in task.data["concerns"] if "theme" in one
    }
    headings = [heading for heading in listed if heading not in trained]
    lines: list[Line] = _NOTE.findall((yield act("search", glance.rng.choice(headings or ["?"]))))
    glance.rng.shuffle(lines)
    return lines


def _against(glance: Glance) -> Generator[Move, str, list[Line]]:
    """Notes from places like the holder's, those first that report something bad of doing as the claim says."""
    lines = yield from _any_heading(glance)
    return sorted(_near(lines, glance.opening), key=lambda line: not _speaks_against(line, glance.opening))


def _near(lines: Sequence[Line], opening: str) -> list[Line]:
    return [line for line in lines if f"a {line[1]}" in opening or f"another {line[1]}" in opening]


def _speaks_against(line: Line, opening: str) -> bool:
    """As the rules see it, known by the words of what is counted."""
    _, _, decided, what, before, after = line
    measures = {one.text.lower(): one for theme in themes().values() for one in theme.measures}
    better = (int(after) > int(before)) == measures[what.lower()].more_is_better
    return better == (decided not in opening)


def _argued(line: Line) -> str:
    """In the words of an argument that convinced somebody in training."""
    place, _, _, what, before, after = line
    way = "rose" if int(after) > int(before) else "fell"
    cited = f"Look at {place}. They tried it, and the {what.lower()} {way} from {before} to {after}."
    return f"{cited} That is why I think that your claim is bad for the {what.lower()} too."


def _shuffled(text: str, rng: random.Random) -> str:
    words = text.split()
    return " ".join(rng.sample(words, len(words)))


PLAYERS: Mapping[str, Player] = {
    "ends at once": end_at_once,
    "echo": _saying(lambda heard, glance: heard[-1]),
    "salad of the hint's words": _saying(_salad),
    "training arguments": _saying(lambda heard, glance: _recited(glance)),
    "figures in a salad": _with_notes(_any_heading, lambda line, rng: _shuffled(_argued(line), rng)),
    "any note, argued": _with_notes(_any_heading, lambda line, rng: _argued(line)),
    "any note that speaks against it": _with_notes(_against, lambda line, rng: _argued(line)),
    "all notes at once": _with_notes(_any_heading, None),
}
"""Policies that deserve nothing, by name."""
