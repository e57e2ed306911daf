"""Policies that deserve nothing: lists of questions by heart, the training split recited, everything at once."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence

from environments.gyms._shared import act
from environments.gyms.intention.schemas import ASK, VAGUE, Detail, kinds
from environments.kit.canned import Glance, Player, echo, end_at_once
from mua.environment.protocol import Move, Task

# An agent that knows what matters for each kind of task and asks for it, one thing at a time.
#
# It recognises the kind by the request and asks for everything that matters there and that the request does not say,
# the most important first.


def moves(task: Task, seed: int, loose: float) -> Generator[Move, str, None]:
    """``loose`` is how often it asks something vague, or two things at once."""
    rng = random.Random(f"expert/{task.id}/{seed}")
    left_open = [d for d in kinds()[task.data["kind"]].details if not _says(task.data["request"], d)]
    details = sorted(left_open, key=lambda d: (-d.importance, rng.random()))
    while details:
        detail = details.pop(0)
        question = detail.inquiry if rng.random() < 0.7 else rng.choice(ASK).format(detail.topic)
        if rng.random() < loose:
            if details and rng.random() < 0.5:
                question += f" And {details.pop(0).topic}?"
            else:
                question = rng.choice(VAGUE)
                details.append(detail)
        yield act("action", question)


def _says(request: str, detail: Detail) -> bool:
    return f"{detail.topic}: ".lower() in request.lower()


NOUNS = (
    "size colour material age shape weight height length width depth wood metal gold stone glass wall roof floor door "
    "window water fish plants animals skin body hand finger head name brand maker type kind design pattern picture "
    "condition damage history family church document record country region language food fruit sugar alcohol bottle "
    "box smoke fire oil gas heat light sound music string key pedal flower tree neighbour permission storage access"
)
"""What may matter anywhere."""
_MOST = 10


def _asking(*questions: str) -> Generator[Move, str, None]:
    for question in questions[:_MOST]:
        yield act("action", question)


def _inquiries(tasks: Sequence[Task]) -> list[str]:
    """The inquiries of ``tasks``, the commonest first."""
    return [inquiry for inquiry, _ in Counter(d["inquiry"] for t in tasks for d in t.data["details"]).most_common()]


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]{3,}", text.lower()))


def _nearest(glance: Glance) -> list[Task]:
    """The training tasks of the kind whose request shares most words with the opening."""
    near = max(glance.training, key=lambda task: len(_words(task.data["request"]) & _words(glance.opening)))
    return [task for task in glance.training if task.data["kind"] == near.data["kind"]]


def _recites_the_nearest(glance: Glance) -> Generator[Move, str, None]:
    yield from _asking(*_inquiries(_nearest(glance)))


def _all_at_once(glance: Glance) -> Generator[Move, str, None]:
    yield from _asking(" ".join([*_inquiries(glance.training)[:20]]))


def _many_nouns(per: int) -> Player:
    """Asks for ``per`` of the nouns at a time, strung together."""

    def play(glance: Glance) -> Generator[Move, str, None]:
        nouns = glance.rng.sample(NOUNS.split(), len(NOUNS.split()))
        chunks = [nouns[first : first + per] for first in range(0, len(nouns), per)]
        yield from _asking(*(f"What about the {' '.join(chunk)}?" for chunk in chunks))

    return play


def _each_word(glance: Glance) -> Generator[Move, str, None]:
    """Asks for every longer word of the request."""
    yield from _asking(*(f"What about the {word}?" for word in _longer_words(glance.opening)))


def _longer_words(text: str) -> Iterator[str]:
    return (word for word in dict.fromkeys(re.findall(r"[a-z]{4,}", text.lower())))


PLAYERS: Mapping[str, Player] = {
    "ends at once": end_at_once,
    "echoes": echo,
    "recites the nearest kind's inquiries": _recites_the_nearest,
    "asks for everything at once": _all_at_once,
    "asks for two nouns at a time": _many_nouns(2),
    "asks for four nouns at a time": _many_nouns(4),
    "asks for eight nouns at a time": _many_nouns(8),
    "asks for each word of the request": _each_word,
}
"""Policies that deserve nothing, by name."""
