"""UserRL's vague requests: details with options, of which the person has one in mind.

The records do not say which option it is; the record's id picks it, so that it is the same in every episode.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping

from environments.gyms._shared import act
from environments.gyms._shared.questions import is_list
from environments.gyms._shared.records import Detail, IntentionRecord
from environments.gyms.intention.expert import VAGUE
from mua.environment.protocol import Move, Task
from mua.types import Json

_LEVELS: Mapping[int, str] = {1: "easy", 2: "easy", 3: "medium"}
"""By the number of details, as the gym's own; more are hard."""
ANY = "whatever is usual"
"""The wish where a detail has no options."""


def data_of(record: IntentionRecord) -> Json:
    """``data`` of a task."""
    rng = random.Random(f"intention/{record.id}")
    details = [_detail(detail, number, rng) for number, detail in enumerate(record.missing_details)]
    level = _LEVELS.get(len(details), "hard")
    told = {"kind": record.category, "category": record.category, "difficulty": level, "request": record.task}
    return {**told, "details": details}


def question_about(detail: Json) -> str:
    """The record's own question, or a plain one where that goes through a list."""
    return f"What about the {detail['description'].lower()}?" if is_list(detail["inquiry"]) else str(detail["inquiry"])


def record_moves(task: Task, seed: int, loose: float) -> Generator[Move, str, None]:
    """The important first; ``loose`` is how often it asks something vague before."""
    rng = random.Random(f"expert/{task.id}/{seed}")
    for detail in sorted(task.data["details"], key=lambda one: (-one["importance"], rng.random())):
        if rng.random() < loose:
            yield act("action", rng.choice(VAGUE))
        yield act("action", question_about(detail))


def _detail(detail: Detail, number: int, rng: random.Random) -> Json:
    return {
        "key": f"{number}: {detail.description}",
        "description": detail.description,
        "importance": detail.importance,
        "inquiry": detail.inquiry or f"What about the {detail.description.lower()}?",
        "options": list(detail.options),
        "preference": rng.choice(detail.options) if detail.options else ANY,
    }
