"""Whether the user of a recorded conversation gave away what it should not: its instructions, the policy's tools, or a
value of the solution that it cannot know."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mua.config.schema import EnvironmentConfig
from mua.environment.domain import Configurable, Domain, HasUserFacts
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Task
from mua.environment.registry import get_domain
from mua.observe.diagnosis.causes import DECLINES, THRESHOLDS
from mua.types import Json
from mua.users.utterance_check import LeakCheck
from mua.utils.strict_json import printable

_TOOL_NAME = re.compile(r"\b[a-z]+(?:_[a-z0-9]+)+\b")
_WORD = re.compile(r"\w+")
_CALL = re.compile(r"[\"']?(?:name|arguments|tool_call)[\"']?\s*:\s*[\"'{]")


@dataclass(frozen=True, slots=True)
class _Hidden:
    """What the user of a task must not say."""

    check: LeakCheck
    tools: frozenset[str]
    values: frozenset[str]
    """Of the gold moves, what neither persona nor the user's own knowledge holds."""
    answer: tuple[str, ...]
    """Texts of the gold moves, as runs of words."""


class UserLeaks:
    """Looks at conversations; domains and tasks are read once."""

    def __init__(self, config: Json) -> None:
        self._config = config
        self._domains: dict[str, Domain | None] = {}
        self._tasks: dict[str, dict[str, Task]] = {}
        self._hidden: dict[tuple[str, str], _Hidden | None] = {}
        self.unseen: list[str] = []

    def domain(self, name: str) -> Domain | None:
        """The domain as the run configured it; None, with a line in :attr:`unseen`, where it cannot be had."""
        if name not in self._domains:
            try:
                found: Any = get_domain(name)
                if isinstance(found, Configurable):
                    given = dict(self._config.get("environment") or {})
                    section = EnvironmentConfig.model_validate(given | {"name": name, "mix": {}, "mcp": []})
                    found = found.configured(section, Services(None, None))
                self._tasks[name] = {
                    task.id: task for split in ("train", "validation", "test") for task in found.tasks(split)
                }
                self._domains[name] = found
            except Exception as error:  # of a domain of others anything may go wrong, and the rest is still of use
                self.unseen.append(f"what users of {name} may know: {printable(' '.join(str(error).split()), 200)}")
                self._domains[name] = None
        return self._domains[name]

    def leak(self, domain: str, task: str, messages: Sequence[Json]) -> str | None:
        """What the user said that it should not have, in words; None for nothing."""
        for message in messages:
            for flag in message.get("flags") or ():
                if isinstance(flag, Mapping) and flag.get("kind") == "leaks_instruction":
                    return str(flag.get("reason") or "it quotes its instructions")
        if getattr(self.domain(domain), "user_in_tools", False):
            return None  # these words are the domain's own, which may say how its tools are to be used
        hidden = self._of(domain, task)
        calls = (call for message in messages for call in message.get("tool_calls") or () if isinstance(call, Mapping))
        functions = (call.get("function", call) for call in calls)
        called = {str(function.get("name", "")) for function in functions if isinstance(function, Mapping)}
        tools = {name for name in called if "_" in name} | (hidden.tools if hidden else frozenset())
        known, heard = " ".join(str(m.get("content") or "") for m in messages if m.get("role") == "system"), ""
        for message in messages:
            text = str(message.get("content") or "")
            if message.get("role") != "user" or message.get("forced"):
                if message.get("role") in ("assistant", "tool"):
                    heard += f" {text} {message.get('tool_calls') or ''}"
                continue
            if named := next((name for name in _TOOL_NAME.findall(text) if name in tools), None):
                return f"it names the policy's tool {named!r}"
            if _CALL.search(text):
                return "it writes a tool call"
            if hidden is not None:
                if (quoted := hidden.check.quotation(text)) is not None:
                    return f"it quotes its instructions ({quoted})"
                plain = f" {' '.join(_WORD.findall(text.casefold()))} "
                before = f" {' '.join(_WORD.findall(heard.casefold()))} "
                for answer in hidden.answer:
                    if f" {answer} " in plain and f" {answer} " not in before:
                        return f"it says the answer before anybody else ({answer[:80]})"
                for value in hidden.values:
                    if f" {value} " in plain and f" {value} " not in before and value not in known.casefold():
                        return f"it states {value!r}, which it cannot know and nobody had said"
        return None

    def to_decline(self, name: str, task_id: str) -> bool:
        """Whether the task's own solution declines what the user wants; False where nobody knows."""
        domain, task = self.domain(name), self._tasks.get(name, {}).get(task_id)
        try:
            moves = [] if domain is None or task is None else domain.gold(task)
        except Exception:  # said by :meth:`leak`, which asks the same
            return False
        own = [move for move in moves if not hasattr(move, "_fields")]  # a move of the user's own has a name
        return any(DECLINES.search(move if isinstance(move, str) else move[0]) for move in own)

    def _of(self, name: str, task_id: str) -> _Hidden | None:
        key = name, task_id
        if key not in self._hidden:
            self._hidden[key] = None
            domain = self.domain(name)
            task = self._tasks.get(name, {}).get(task_id)
            if domain is not None and task is not None:
                try:
                    self._hidden[key] = _hidden(domain, task)
                except Exception as error:
                    if not any(f"users of {name} " in said for said in self.unseen):
                        said = printable(" ".join(str(error).split()), 200)
                        self.unseen.append(f"what users of {name} may know of task {task_id}: {said}")
        return self._hidden[key]


def _hidden(domain: Domain, task: Task) -> _Hidden:
    """Of a domain that does not list what its users know, nobody can say which words of a persona are there to be
    told: then only the tools' names are hidden."""
    persona = domain.persona(task)
    if not isinstance(domain, HasUserFacts):
        names = frozenset(move[0] for move in domain.gold(task) if not isinstance(move, str))
        return _Hidden(LeakCheck(0, ""), names, frozenset(), ())
    knows = domain.known(task)
    stated = [text for texts in knows.values() for text in texts]
    own = " ".join([persona, *stated]).casefold()
    words = f" {' '.join(_WORD.findall(own))} "
    values, answers, tools = set(), [], set()
    for move in domain.gold(task):
        if isinstance(move, str):
            said = " ".join(_WORD.findall(move.casefold()))
            if len(said.split()) >= 4:
                answers.append(said)
        elif not hasattr(move, "_fields"):  # a move of the user's own has a name
            tools.add(move[0])
            for value in _leaves(move[1]):
                plain = " ".join(_WORD.findall(value.casefold()))
                if len(plain) >= 4 and any(c.isdigit() for c in plain) and f" {plain} " not in words:
                    values.add(plain)
    return _Hidden(
        LeakCheck(THRESHOLDS.leak_words, persona, stated=stated), frozenset(tools), frozenset(values), tuple(answers)
    )


def _leaves(data: Any) -> list[str]:
    if isinstance(data, Mapping):
        return [leaf for value in data.values() for leaf in _leaves(value)]
    if isinstance(data, list | tuple):
        return [leaf for value in data for leaf in _leaves(value)]
    return [str(data)] if isinstance(data, str | int | float) and not isinstance(data, bool) else []
