"""Tau gym: the service domains of this project (retail and airline) behind the one tool of the gyms.

::

    policy ── interact ──► search   tools of the inner domain with their schemas
                           answer   {"name", "arguments"} ──► inner environment
                           action   text ──► inner user
                           finish   ──► inner evaluation, paid once

The inner environment, user, tasks, expert and verdict are the domain's own, so that the tasks are pinned by its
manifest; the policy of the domain stands in the system prompt. ``environment.data`` may name a folder with official
data: a folder of each inner domain's name in it (``retail``, ``airline``) is loaded by that domain. Where it names
UserRL's records (:mod:`environments.gyms.tau.records`), these are the tasks over tau-bench's databases.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Self

from environments.gyms._shared import Choice, Game, Gym, Setting, act
from environments.gyms._shared.game import Role, setting_of
from environments.gyms.tau.canned import canned_through
from environments.gyms.tau.game import CustomerUser, NeutralUser, TauEnvironment, TauGame, tool_call
from environments.gyms.tau.records import checked_folder, databases, domains_of, own_records, tasks_of
from environments.kit.canned import Canned
from environments.kit.options import Option
from mua.config.schema import EnvironmentConfig
from mua.environment.domain import Configurable, Domain, Expert, PerTaskPrompt, moves_of
from mua.environment.endpoint.services import ChatClient, Services
from mua.environment.protocol import Environment, Move, PromptStyle, Split, Task, UserMove
from mua.environment.registry import get_domain
from mua.environment.user import User
from mua.types import Json
from mua.utils.errors import ConfigError, MuaError

NAME = "gyms/tau"
DOMAINS = "retail,airline"


class TauGym(Gym):
    """Implements :class:`mua.environment.domain.Domain` and ``PerTaskPrompt`` over inner domains."""

    name = NAME
    choices: ClassVar[Mapping[Choice, str]] = {
        "search": "the word tools, to be told which tools there are and what they take; once",
        "answer": 'a call of one of these tools as JSON: {"name": ..., "arguments": {...}}',
        "action": "a message to the customer",
        "finish": "end the conversation",
    }
    defaults: ClassVar[Mapping[str, Option]] = {
        "domains": DOMAINS,
        "compact": False,
        "skip_noop": False,
        "tau_bench": "",
    }
    llm_roles: ClassVar[tuple[Role, ...]] = ("user",)
    short_prompt = "Serve the customer with interact: search tools, answer tool calls as JSON, action to speak, finish."

    def __init__(
        self,
        setting: Setting | None = None,
        inner: Mapping[str, Domain] | None = None,
        endpoint: ChatClient | None = None,
    ) -> None:
        """``inner`` are the domains served, by name; by default those of the option ``domains``."""
        super().__init__(setting)
        self._given = inner
        self._endpoint = endpoint

    @cached_property
    def inner(self) -> Mapping[str, Domain]:
        """The domains served, by name; imported on first use."""
        return self._given or {name: get_domain(name) for name in _names(self.setting)}

    def configured(self, config: EnvironmentConfig, services: Services) -> Self:
        """This gym over its inner domains under ``config``, which get ``data`` and ``reward``."""
        own = config.model_copy(update={"data": None, "reward": "all_or_nothing"})
        setting = setting_of(self.name, self.defaults, self.llm_roles, own, services)
        inner = _over_records(config, setting, services) or {
            name: _configured(name, config, setting, services) for name in _names(setting)
        }
        return type(self)(setting, inner, services.user if setting.oracle == "llm" else None)

    @classmethod
    def generate(cls, split: Split) -> Iterable[Task]:
        """The tasks of the default inner domains."""
        return cls().tasks(split)

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    @cached_property
    def _tasks(self) -> Mapping[Split, Sequence[Task]]:
        splits: tuple[Split, ...] = ("train", "validation", "test")
        return {
            split: tuple(_wrapped(name, task) for name, domain in self.inner.items() for task in domain.tasks(split))
            for split in splits
        }

    @cached_property
    def _by_id(self) -> Mapping[str, Task]:
        """The inner tasks by the ids of the outer ones."""
        return {
            _wrapped(name, task).id: task
            for name, domain in self.inner.items()
            for split in self._tasks
            for task in domain.tasks(split)
        }

    def environment(self) -> Environment:
        return TauEnvironment(self.game, self.setting, self._schema, self.decisive)

    def game(self, task: Task, seed: int) -> Game:
        domain, inner = self._inner_of(task)
        return TauGame(self.setting, task, seed, domain, inner, self._endpoint)

    def prompt_for(self, task: Task, style: PromptStyle) -> str:
        """The gym's page and the inner domain's policy."""
        domain, inner = self._inner_of(task)
        policy = domain.prompt_for(inner, style) if isinstance(domain, PerTaskPrompt) else domain.system_prompt(style)
        return f"{self.system_prompt(style)}\n\n{policy}"

    def openings(self, task: Task) -> Sequence[str]:
        return (
            "A customer is waiting for you. Greet them with the tool interact and ask what they need.",
            "You have a new customer. Say hello by interact and find out what it is about.",
        )

    def scripted_user(self, task: Task, seed: int) -> User:
        """Opens with what the customer inside the tool says first; an LLM's first words come with the first action."""
        if self._endpoint is not None:
            return NeutralUser(f"{task.id}/{seed}", self.openings(task))
        domain, inner = self._inner_of(task)
        return CustomerUser(f"{task.id}/{seed}", self.openings(task), domain.scripted_user(inner, seed))

    def persona(self, task: Task) -> str:
        domain, inner = self._inner_of(task)
        return domain.persona(inner)

    def gold(self, task: Task) -> Sequence[Move]:
        """What the inner expert does with the customer of seed 0; without an expert, the inner gold.

        The customer inside of the tool is always there, so that what has to be asked has to be asked here too. Texts of
        an inner gold are said in one message, so that no reply ends it early.
        """
        domain, inner = self._inner_of(task)
        if isinstance(domain, Expert):
            return [*_moves_made(_conversation_of(domain, inner)), act("finish")]
        moves = [*domain.gold(inner)]
        if any(isinstance(move, UserMove) for move in moves):
            raise MuaError(f"{task.id}: the user of {domain.name} has to act with tools of its own; ask the expert")
        texts = [move for move in moves if isinstance(move, str)]
        calls = [act("answer", tool_call(move[0], move[1])) for move in moves if not isinstance(move, str)]
        said = [act("action", " ".join(texts))] if texts else []
        return [*calls, *said, act("finish")]

    def canned(self) -> Mapping[str, Canned]:
        """Those of the inner domains, through the tool."""
        return canned_through(self.inner)

    def expert(self, task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
        """The inner domain's expert, speaking through the tool."""
        domain, inner = self._inner_of(task)
        yield act("search", "tools")
        moves = moves_of(domain, inner, seed, loose)
        answer: str | None = None
        while True:
            try:
                move = next(moves) if answer is None else moves.send(answer)
            except StopIteration:
                break
            answer = yield act("action", move) if isinstance(move, str) else act("answer", tool_call(move[0], move[1]))
        yield act("finish")

    def _inner_of(self, task: Task) -> tuple[Domain, Task]:
        return self.inner[task.data["domain"]], self._by_id[task.id]


def _moves_made(messages: Sequence[Json]) -> Iterator[Move]:
    """The moves of a conversation, through the tool."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            yield act("answer", tool_call(call["function"]["name"], json.loads(call["function"]["arguments"])))
        if message["role"] == "assistant" and not message.get("tool_calls"):
            yield act("action", message["content"])


def _conversation_of(domain: Domain, task: Task) -> list[Json]:
    """The expert's, with the domain's user: both are rules, so that it waits for nobody."""
    from environments.kit.demonstrate import demonstrate  # an episode, which only gold moves need

    with ThreadPoolExecutor(1) as pool:  # a loop of its own, as this may be called from a running one
        return pool.submit(asyncio.run, demonstrate(domain, task, 0)).result().messages


def _names(setting: Setting) -> list[str]:
    names = [name.strip() for name in str(setting.options["domains"]).split(",") if name.strip()]
    if not names or NAME in names:
        raise ConfigError(f"environment.options.domains: name the domains to serve, such as {DOMAINS}")
    return names


def _wrapped(name: str, inner: Task) -> Task:
    kind = f"{name}/{inner.data['kind']}" if "kind" in inner.data else name
    data = {"kind": kind, "difficulty": inner.data.get("difficulty", "medium"), "domain": name, "task": inner.id}
    return Task(f"{NAME}/{name}/{inner.split}/{inner.id}", NAME, inner.split, data)


def _configured(name: str, config: EnvironmentConfig, setting: Setting, services: Services) -> Domain:
    """An inner domain under its share of ``config``."""
    domain = get_domain(name)
    if not isinstance(domain, Configurable):
        return domain
    data = None if config.data is None else config.data / name
    known = ("skip_noop",) if data is not None else ("compact",)
    options = {key: setting.options[key] for key in known if setting.options[key]}
    inner = config.model_copy(
        update={"name": name, "mix": {}, "data": data, "options": options, "oracle": "rule", "show_reward": False}
    )
    return domain.configured(inner, services)


def _over_records(config: EnvironmentConfig, setting: Setting, services: Services) -> dict[str, Domain] | None:
    """The inner domains over UserRL's records, if ``environment.data`` names any: those that there are records of."""
    if (records := own_records(config)) is None:
        return None
    base, skip = databases(config, str(setting.options["tau_bench"])), bool(setting.options["skip_noop"])
    names = [name for name in domains_of(records) if name in _names(setting)]
    if not names:
        raise ConfigError(
            f"environment.options.domains: the records are of {', '.join(domains_of(records))}; serve one of them"
        )
    plain = replace(setting, options={**setting.options, "skip_noop": False, "compact": False})
    inner: dict[str, Domain] = {}
    for name in names:
        folder = checked_folder(name, base).parent
        domain: Any = _configured(name, config.model_copy(update={"data": folder}), plain, services)
        inner[name] = domain.serving(tasks_of(name, records), skip_noop=skip)
    return inner


DOMAIN = TauGym()
