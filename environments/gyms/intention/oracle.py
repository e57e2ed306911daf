"""Who answers questions about a vague request: which details a question covers, and what the person says then."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from environments.gyms._shared.oracles import asked, chosen, spoken
from environments.gyms._shared.questions import is_list
from environments.gyms._shared.settings import Setting
from environments.gyms.intention.schemas import kinds
from mua.environment.protocol import Task
from mua.types import Json

_ASKING = re.compile(
    r"\?|\b(what|which|when|where|who|whom|whose|how|why|tell me|let me know|specify|describe|please give)\b",
    re.IGNORECASE,
)
NOT_ASKED = ("What would you like to know?", "Is that a question?", "I do not see what you are asking.")
NO_PREFERENCE = (
    "I have nothing special in mind there.",
    "That does not matter to me.",
    "I have not thought about that.",
    "Could you ask about something more specific?",
)
TOO_BROAD = ("One thing at a time, please.", "That is too much at once; what first?", "Please ask for one thing.")
MOST_AT_ONCE = 2
"""A text that asks for more than this, of what its kind of request could leave open, covers nothing."""
MOST_OTHER_KINDS = 1
"""Kinds of requests, besides its own, that the words of one question may happen to belong to."""
SAYINGS = ("{0}: {1}.", "As for {0}: {1}.", "{0}, that would be: {1}.")
AGAIN = ("As I said, {0}: {1}.", "I told you, {0}: {1}.")

JUDGE = """An assistant asks a person a question. The person has these details in mind:
{details}

Which of the numbered details does the question ask for? It asks for a detail when the natural answer to it would be the
person's preference on that detail. A general question such as "What else?" asks for none of them, and so does something
that is not a question, or a text that asks for more than two things. Give the numbers; an empty list if there is none.
"""

PERSON = """You are a person who asked an assistant: "{request}"
The assistant asks you a question. Answer it in one short sentence, as yourself. This is all that you may tell:
{known}
Do not make up any other wish. If the list is empty, say that you have no preference there."""


def is_question(content: str) -> bool:
    """Whether ``content`` asks for something."""
    return _ASKING.search(content) is not None


def asked_for(kind: str, question: str) -> list[str]:
    """Keys of the details of ``kind`` whose keywords or options stand in ``question``; none where it is no question."""
    return (
        [detail.key for detail in kinds()[kind].details if detail.found_in(question)] if is_question(question) else []
    )


def too_broad(kind: str, question: str) -> bool:
    """Whether ``question`` asks for so much at once that nobody would answer it."""
    several = question.count("?") > MOST_AT_ONCE or len(asked_for(kind, question)) > MOST_AT_ONCE
    return several or is_list(question) or _of_other_kinds(kind, question) > MOST_OTHER_KINDS


def _of_other_kinds(kind: str, question: str) -> int:
    """How many other kinds of the test split have a detail that ``question`` names: words strung together name many.

    The other splits' kinds have so much in common that an honest question names a dozen.
    """
    if not kinds()[kind].unseen:
        return 0
    others = (other for other in kinds().values() if other.unseen and other.name != kind)
    return sum(any(detail.found_in(question) for detail in other.details) for other in others)


def covered_by_rule(kind: str, details: Sequence[Json], question: str) -> list[int]:
    """Indices of the ``details`` that ``question`` asks for; none where it asks for too much."""
    keys = [] if too_broad(kind, question) else asked_for(kind, question)
    return [i for i, detail in enumerate(details) if detail["key"] in keys]


async def covered_by_llm(setting: Setting, details: Sequence[Json], question: str, seed: int) -> list[int]:
    """The same by ``judge``; raises :class:`JudgeFault`."""
    listed = "\n".join(f"{i}. {d['description']} ({d['inquiry']})" for i, d in enumerate(details, start=1))
    form = JUDGE.format(details=listed)
    return await chosen(setting.judge, form, len(details), {"the assistant's question": question}, seed)


def said_by_rule(task: Task, question: str, new: Sequence[Json], old: Sequence[Json], rng: random.Random) -> str:
    """The preferences of the details that were asked for, and nothing of any other."""
    if too_broad(task.data["kind"], question):
        return rng.choice(TOO_BROAD)
    old = [*old, *_stated(task, question)]
    if not new and not old:
        return rng.choice(NO_PREFERENCE if is_question(question) else NOT_ASKED)
    forms = [(rng.choice(SAYINGS), d) for d in new] + [(rng.choice(AGAIN), d) for d in old]
    sentences = [form.format(d["description"], d["preference"]) for form, d in forms]
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


def _stated(task: Task, question: str) -> list[Json]:
    """What ``question`` asks for although the request says it."""
    keys, topics = asked_for(task.data["kind"], question), {d.key: d.topic for d in kinds()[task.data["kind"]].details}
    stated = [one for one in task.data.get("stated", ()) if one["key"] in keys]
    return [{"description": topics[one["key"]], "preference": one["preference"]} for one in stated]


async def said_by_llm(setting: Setting, request: str, question: str, asked_for: Sequence[Json], seed: int) -> str:
    """The same by ``user``, which is told nothing but what was asked for; raises :class:`UserFault`."""
    known = "\n".join(f"- {d['description']}: {d['preference']}" for d in asked_for) or "(nothing)"
    return await asked(setting.user, PERSON.format(request=request, known=known), question, spoken, seed)
