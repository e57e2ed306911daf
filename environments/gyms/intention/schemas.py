"""The kinds of tasks, read from ``schemas.yaml`` and checked, and the tasks made of them.

A request states what its kind could leave open and does not; the other details are missing. So what there is to ask
depends on the request and not on the kind alone, and the kinds of the test split stand in no other.
"""

from __future__ import annotations

import random
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml

from environments.gyms._shared import act, dealt
from environments.gyms._shared.game import Setting
from environments.gyms._shared.oracles import asked, chosen, is_list, pattern, spoken
from environments.gyms._shared.records import Detail as RecordDetail
from environments.gyms._shared.records import IntentionRecord
from mua.environment.protocol import Move, Split, Task
from mua.types import Json
from mua.utils.errors import MuaError
from mua.utils.strict_json import read_file

FILE = Path(__file__).with_name("schemas.yaml")
SIZES: dict[Split, int] = {"train": 380, "validation": 40, "test": 40}
Level = Literal["easy", "medium", "hard"]
COUNTS: dict[Level, tuple[int, int]] = {"easy": (2, 2), "medium": (3, 3), "hard": (4, 5)}
"""How many details are missing."""
COMMON = frozenset(
    re.findall(
        r"\w+",
        """
    about also always another anything around away because been best both come does done down each else ever every
    few find from give goes good have here into just kind last like long look made make many more most much must
    need never next none nothing only other over people please possible really same should some something still
    such than that their them then there these they thing things this those time used very want well were what
    when where which while whole will with work would your days week weeks first three four five seven eight nine
    twelve twenty thirty small least short lot help hardly think might
        """,
    )
)
"""Words that stand in questions of any kind."""
ASK = ("What about {}?", "Please tell me {}?", "Can you say something about {}?")
"""Questions that any topic can be asked with."""
VAGUE = ("Can you tell me more?", "Anything else?", "What do you want exactly?")
STATED = ("{0}: {1}.", "as for {0}: {1}.", "and {0}: {1}.")
"""How a request says what is not missing."""


@dataclass(frozen=True, slots=True)
class Detail:
    """Something the person has in mind and has not said."""

    key: str
    importance: int
    topic: str
    inquiry: str
    keywords: tuple[str, ...]
    options: tuple[str, ...]
    named: tuple[str, ...] = ()
    """Words of the options that no other detail of the kind has: who says one asks for this detail."""

    def found_in(self, question: str) -> bool:
        """Whether ``question`` contains a keyword or the word of an option."""
        return _pattern((*self.keywords, *self.named)).search(question) is not None

    def questions(self) -> list[str]:
        """Questions about this detail alone."""
        return [self.inquiry, *(form.format(self.topic) for form in ASK)]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of task: how it is asked for and what there is to know."""

    name: str
    category: str
    requests: tuple[str, ...]
    details: tuple[Detail, ...]
    unseen: bool
    """Stands in the test split, which has no other."""


_pattern = lru_cache(maxsize=1024)(pattern)


@lru_cache(maxsize=1)
def kinds() -> dict[str, Kind]:
    """All kinds; raises :class:`MuaError` that names the kind and detail which the file gets wrong."""
    raw = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    found = [_kind(name, given, raw["common"], False) for name, given in raw["kinds"].items()]
    unseen = [_kind(name, given, {}, True) for name, given in raw["unseen"].items()]
    _check_unseen(found, unseen)
    return {kind.name: kind for kind in (*found, *unseen)}


def _kind(name: str, given: Json, common: Mapping[str, Any], unseen: bool) -> Kind:
    try:
        details = _with_named([_detail(key, value, common) for key, value in given["details"].items()])
        requests = tuple(_filled(given["requests"], given.get("slots", {})))
    except (KeyError, ValueError, TypeError) as error:
        raise MuaError(f"{FILE}: kind {name!r}: {type(error).__name__}: {error}; see the head of the file") from error
    _check(name, details)
    return Kind(name, given["category"], requests, tuple(details), unseen)


def _with_named(details: Sequence[Detail]) -> list[Detail]:
    words = {detail.key: _long_words(" ".join(detail.options)) for detail in details}
    spoken = {d.key: _long_words(" ".join((*d.options, *d.keywords, *d.questions()))) for d in details}
    named = []
    for detail in details:
        others = set().union(*(spoken[other] for other in spoken if other != detail.key))
        own = {word for word in words[detail.key] - others - COMMON if not _near(word, others)}
        named.append(replace(detail, named=tuple(f"{word.removesuffix('s')}*" for word in sorted(own))))
    return named


def _near(word: str, others: set[str]) -> bool:
    """Whether ``word`` and one of ``others`` begin alike, as singular and plural do."""
    return any(word.startswith(other) or other.startswith(word.removesuffix("s")) for other in others)


def _long_words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]{4,}", text.lower()))


def _detail(key: str, given: Any, common: Mapping[str, Any]) -> Detail:
    if isinstance(given, str):
        *fixed, options = common[key]
        given = [*fixed, given or options]
    importance, topic, inquiry, keywords, options = given
    if importance not in (1, 2, 3):
        raise ValueError(f"{key}: importance {importance!r} is not 1, 2 or 3")
    return Detail(key, importance, topic, inquiry, tuple(keywords.split("|")), tuple(options.split("|")))


def _filled(requests: Sequence[str], slots: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for request in requests:
        slot = re.search(r"\{(\w+)\}", request)
        yield from [request.format(**{slot[1]: word}) for word in slots[slot[1]]] if slot else [request]


def _check(name: str, details: Sequence[Detail]) -> None:
    """Every detail's own questions cover it and nothing else."""
    for detail in details:
        for question in detail.questions():
            covered = [other.key for other in details if other.found_in(question)]
            if covered != [detail.key]:
                raise MuaError(f"{FILE}: kind {name!r}: {question!r} should cover {detail.key!r}, but covers {covered}")


def _check_unseen(seen: Sequence[Kind], unseen: Sequence[Kind]) -> None:
    """No question that belongs to a kind of the other splits covers anything here."""
    questions = {question for kind in seen for detail in kind.details for question in detail.questions()}
    for kind in unseen:
        for detail in kind.details:
            if (known := next((one for one in sorted(questions) if detail.found_in(one)), None)) is not None:
                raise MuaError(
                    f"{FILE}: kind {kind.name!r}: {known!r} covers {detail.key!r}, but belongs to a kind of the other "
                    "splits; choose other keywords, or another detail"
                )


def _tasks(unseen: bool, count: int) -> Iterator[tuple[str, Json]]:
    """Kinds in turn, levels in turn, no two tasks alike."""
    rng = random.Random(f"intention/tasks/{unseen}")
    seen: set[str] = set()
    every, levels = [kind for kind in kinds().values() if kind.unseen == unseen], list(COUNTS)
    while len(seen) < count:
        kind, level = every[len(seen) % len(every)], levels[len(seen) // len(every) % len(levels)]
        request = rng.choice(kind.requests)
        details = _missing(kind, level, rng)
        stated = _stated(kind, details, rng)
        mark = repr((request, [(d["key"], d["preference"]) for d in details]))
        if mark not in seen:
            seen.add(mark)
            said = " ".join([request, *(one["said"] for one in stated)])
            data = {"kind": kind.name, "difficulty": level, "request": said, "details": details}
            yield mark, {**data, "stated": [{key: one[key] for key in ("key", "preference")} for one in stated]}


def _stated(kind: Kind, missing: Sequence[Json], rng: random.Random) -> list[Json]:
    """Everything that is not missing, as the request says it."""
    keys = {one["key"] for one in missing}
    stated = []
    for detail in rng.sample(kind.details, len(kind.details)):
        if detail.key not in keys:
            preference = rng.choice(detail.options)
            said = rng.choice(STATED).format(detail.topic, preference)
            stated.append({"key": detail.key, "preference": preference, "said": said[0].upper() + said[1:]})
    return stated


def _missing(kind: Kind, level: Level, rng: random.Random) -> list[Json]:
    """The missing details in the order of the file; important ones are missing more often."""
    count = min(rng.randint(*COUNTS[level]), len(kind.details))
    ranked = sorted(kind.details, key=lambda d: rng.random() ** (1 / d.importance**2), reverse=True)
    chosen = [detail for detail in kind.details if detail in ranked[:count]]
    return [
        {
            "key": d.key,
            "description": d.topic,
            "importance": d.importance,
            "inquiry": d.inquiry,
            "options": list(d.options),
            "preference": rng.choice(d.options),
        }
        for d in chosen
    ]


@lru_cache(maxsize=1)
def _splits() -> dict[Split, list[tuple[str, Json]]]:
    seen: dict[Split, int] = {split: size for split, size in SIZES.items() if split != "test"}
    hands = dealt(_tasks(False, sum(seen.values())), seen, "intention/splits")
    return {**hands, **dealt(_tasks(True, SIZES["test"]), {"test": SIZES["test"]}, "intention/splits")}


def generate_tasks(split: Split) -> Iterator[Task]:
    """The tasks of a split."""
    for number, (_, data) in enumerate(_splits()[split]):
        yield Task(f"gyms/intention/{split}/{number:03d}", "gyms/intention", split, data)


# Who answers questions about a vague request: which details a question covers, and what the person says then.

_ASKING = re.compile(
    r"\?|\b(what|which|when|where|who|whom|whose|how|why|tell me|let me know|specify|describe|please give)\b",
    re.IGNORECASE,
)
_SAYINGS: Json = yaml.safe_load(read_file(Path(__file__).with_name("sayings.yaml")))
TOO_BROAD: Sequence[str] = _SAYINGS["too_broad"]
MOST_AT_ONCE = 2
"""A text that asks for more than this, of what its kind of request could leave open, covers nothing."""
MOST_OTHER_KINDS = 1
"""Kinds of requests, besides its own, that the words of one question may happen to belong to."""


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
    form = _SAYINGS["judge"].format(details=listed)
    return await chosen(setting.judge, form, len(details), {"the assistant's question": question}, seed)


def said_by_rule(task: Task, question: str, new: Sequence[Json], old: Sequence[Json], rng: random.Random) -> str:
    """The preferences of the details that were asked for, and nothing of any other."""
    if too_broad(task.data["kind"], question):
        return rng.choice(TOO_BROAD)
    old = [*old, *_asked_though_stated(task, question)]
    if not new and not old:
        return rng.choice(_SAYINGS["no_preference" if is_question(question) else "not_asked"])
    forms = [(rng.choice(_SAYINGS["told"]), d) for d in new] + [(rng.choice(_SAYINGS["again"]), d) for d in old]
    sentences = [form.format(d["description"], d["preference"]) for form, d in forms]
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


def _asked_though_stated(task: Task, question: str) -> list[Json]:
    """What ``question`` asks for although the request says it."""
    keys, topics = asked_for(task.data["kind"], question), {d.key: d.topic for d in kinds()[task.data["kind"]].details}
    stated = [one for one in task.data.get("stated", ()) if one["key"] in keys]
    return [{"description": topics[one["key"]], "preference": one["preference"]} for one in stated]


async def said_by_llm(setting: Setting, request: str, question: str, asked_for: Sequence[Json], seed: int) -> str:
    """The same by ``user``, which is told nothing but what was asked for; raises :class:`UserFault`."""
    known = "\n".join(f"- {d['description']}: {d['preference']}" for d in asked_for) or "(nothing)"
    return await asked(setting.user, _SAYINGS["person"].format(request=request, known=known), question, spoken, seed)


# UserRL's vague requests: details with options, of which the person has one in mind.
#
# The records do not say which option it is; the record's id picks it, so that it is the same in every episode.

_LEVELS: Mapping[int, str] = {1: "easy", 2: "easy", 3: "medium"}
"""By the number of details, as the gym's own; more are hard."""
ANY = "whatever is usual"
"""The wish where a detail has no options."""


def data_of(record: IntentionRecord) -> Json:
    """``data`` of a task."""
    rng = random.Random(f"intention/{record.id}")
    details = [_detail_of_record(detail, number, rng) for number, detail in enumerate(record.missing_details)]
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


def _detail_of_record(detail: RecordDetail, number: int, rng: random.Random) -> Json:
    return {
        "key": f"{number}: {detail.description}",
        "description": detail.description,
        "importance": detail.importance,
        "inquiry": detail.inquiry or f"What about the {detail.description.lower()}?",
        "options": list(detail.options),
        "preference": rng.choice(detail.options) if detail.options else ANY,
    }
