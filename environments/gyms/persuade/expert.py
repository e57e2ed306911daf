"""An agent that asks what is on the person's mind, looks that up, and argues with the one note that fits.

It knows what people mean by what they let shine through, as a person who has listened to many, and how to weigh a note
against a claim. It does not know the concerns.
"""

from __future__ import annotations

import random
import re
from collections.abc import Generator, Sequence

from environments.gyms._shared import act
from environments.gyms.persuade.notes import Note
from environments.gyms.persuade.topics import Side, Theme, known_in, topics
from mua.environment.protocol import Move, Task

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
