"""Asking LLMs to play the other side or to judge, with replies read strictly.

A reply that cannot be read is asked for again with another seed; after :data:`ATTEMPTS` it is the fault of whoever gave
it (:class:`UserFault` or :class:`JudgeFault`), which ends the episode unscored. No default answer
and no default score exists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from environments.gyms._shared.game import Game, Reply, Setting
from mua.environment.endpoint.services import ChatClient
from mua.environment.protocol import Task
from mua.types import Json
from mua.users.judge import Judge
from mua.utils.errors import JudgeFault, MuaError, UserFault
from mua.utils.strict_json import read_json

# Reading questions by rules: what several gyms' oracles need.

_YES_NO = re.compile(
    r"^(so |then |and |okay,? |ok,? |hm,? )?"
    r"(is|are|was|were|does|do|did|can|could|has|have|had|would|will|might|may|must|am)\b"
)
_JOINT = re.compile(r"[,;/|&\n]|\b(?:and|or)\b", re.IGNORECASE)
MOST_JOINTS = 4
"""Commas, conjunctions and the like in one question: "green, blue, or red?" has three."""
MOST_WORDS = 60
NEGATED = re.compile(r"\bnot\b|n't\b|\bnever\b|\bno\b|\bcannot\b")


def plain(text: str) -> str:
    """Lower case, single spaces, without punctuation at the end."""
    return " ".join(text.lower().replace("’", "'").split()).rstrip(" ?!.")


def is_yes_no(question: str) -> bool:
    """Whether ``question`` can be answered by yes or no."""
    return _YES_NO.match(plain(question)) is not None


def is_list(text: str) -> bool:
    """Whether ``text`` goes through a list, as somebody does who hopes that one of many words hits."""
    return len(_JOINT.findall(text)) > MOST_JOINTS or len(text.split()) > MOST_WORDS


def pattern(keywords: Sequence[str]) -> re.Pattern[str]:
    """Finds any of ``keywords`` as words; a star at the end stands for any ending."""
    forms = [re.escape(word.rstrip("*")) + (r"\w*" if word.endswith("*") else "") for word in keywords]
    return re.compile(r"\b(?:" + "|".join(forms) + r")(?!\w)", re.IGNORECASE)


T = TypeVar("T")
ATTEMPTS = 3
YES_NO_MAYBE = ("Yes", "No", "Maybe")
_FENCE = re.compile(r"\A```(?:json)?(.*)```\Z", re.DOTALL)


async def asked(chat: ChatClient | None, system: str, text: str, read: Callable[[str], T], seed: int) -> T:
    """What the LLM that plays the other side says to ``text``; ``read`` raises ValueError for what it cannot use."""
    return await _read(chat, system, text, read, seed, UserFault)


async def judged(chat: ChatClient | None, system: str, text: str, read: Callable[[str], T], seed: int) -> T:
    """The judge's verdict on ``text``; every fault is a :class:`JudgeFault`."""
    try:
        return await _read(chat, system, text, read, seed, JudgeFault)
    except UserFault as fault:
        # The endpoint does not know which role it plays.
        raise JudgeFault(str(fault), passing=fault.passing) from None


async def labeled(
    judge: ChatClient | None, question: str, labels: Sequence[str], material: Mapping[str, str], seed: int
) -> str:
    """Which of ``labels`` the judge gives; ``material`` is marked as such: nothing in it instructs the judge."""
    properties = {"reason": {"type": "string"}, "verdict": {"type": "string", "enum": list(labels)}}
    verdict = await _judge(judge).verdict(question, _form(properties), seed=seed, material=material)
    return str(verdict["verdict"])


async def chosen(
    judge: ChatClient | None, question: str, count: int, material: Mapping[str, str], seed: int
) -> list[int]:
    """Which of ``count`` things, numbered from 1, the judge chooses; indices from 0."""
    number = {"type": "integer", "minimum": 1, "maximum": count}
    properties = {"reason": {"type": "string"}, "numbers": {"type": "array", "items": number}}
    verdict = await _judge(judge).verdict(question, _form(properties), seed=seed, material=material)
    return sorted({given - 1 for given in verdict["numbers"]})


def _form(properties: Json) -> Json:
    return {"type": "object", "properties": properties}


def _judge(endpoint: ChatClient | None) -> Judge:
    assert endpoint is not None, "configured() has checked the roles"
    return Judge(endpoint)


def one_of(labels: Sequence[str]) -> Callable[[str], str]:
    """Reads exactly one of ``labels``, whatever its case and punctuation."""

    def read(reply: str) -> str:
        said = re.sub(r"[^a-z ]", "", reply.lower()).strip()
        for label in labels:
            if said == label.lower():
                return label
        raise ValueError(f"the reply must be one of {', '.join(labels)}")

    return read


def spoken(reply: str) -> str:
    """Reads any text on one line."""
    text = " ".join(reply.split())
    if not text:
        raise ValueError("the reply is empty")
    return text


def json_object(check: Callable[[Any], T]) -> Callable[[str], T]:
    """Reads one JSON value, fenced or bare, and hands it to ``check``, which raises for another shape."""

    def read(reply: str) -> T:
        fenced = _FENCE.match(reply.strip())
        try:
            return check(read_json(fenced.group(1) if fenced else reply))
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"the reply has another shape than asked for ({type(error).__name__}: {error})") from None

    return read


async def _read(
    chat: ChatClient | None, system: str, text: str, read: Callable[[str], T], seed: int, fault: type[MuaError]
) -> T:
    assert chat is not None, "configured() has checked the roles"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    reason = ""
    for attempt in range(ATTEMPTS):
        reply = (await chat.chat(messages, seed=seed + 7919 * attempt)).text
        try:
            return read(reply)
        except ValueError as error:
            reason = f"{error}; it said {reply[:200]!r}"
    raise fault(f"{chat!r}: no usable reply in {ATTEMPTS} attempts: {reason}; try another model")


# Games in which the other side answers yes/no questions about something hidden.

NO_QUESTION = "Please ask something that can be answered by yes or no."


class GuessingGame(Game):
    """Answers the choice ``action``, by the gym's rule or by an LLM that plays ``persona``."""

    def __init__(self, setting: Setting, task: Task, seed: int, persona: str) -> None:
        super().__init__(setting, task, seed)
        self._persona = persona
        self._calls = 0

    async def action(self, content: str) -> Reply:
        self._calls += 1
        if not is_yes_no(content):
            return Reply(NO_QUESTION)
        if self.setting.oracle == "llm":
            said = await asked(self.setting.user, self._persona, content, one_of(YES_NO_MAYBE), self._llm_seed())
            return Reply(f"{said}.")
        return Reply(f"{self.by_rule(content)}.")

    def by_rule(self, question: str) -> str:
        """Yes, No or Maybe, from the task's facts."""
        raise NotImplementedError(f"{type(self).__name__} has no rule for questions")

    def _llm_seed(self) -> int:
        """Another one for each call."""
        return self.seed * 1000 + self._calls
