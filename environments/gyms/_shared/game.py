"""One episode of a gym: the game that a gym writes, and the environment around it."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from environments.kit.options import Option, read_options
from mua.config.schema import EnvironmentConfig
from mua.environment.endpoint.services import ChatClient, Services
from mua.environment.protocol import Evaluation, Move, Task, ToolResult, Transcript
from mua.environment.tool_arguments import Checker, argument_checker
from mua.types import Json, ToolSchema
from mua.utils.errors import ConfigError, EnvironmentFault

# The reward's last step, the same in every gym: a scale, a cost for each step, a clip; all off by default.
#
# The form is UserRL's (arXiv 2509.19736)::
#
#     r = scale * base - penalty * (step index, from 1, or 1),     clipped to [0, 1] where normalised
#
# Its gyms intention, persuade and travel take the same penalty for each step, the others one that grows with the step.

SHAPING: Mapping[str, str | int | float | bool] = {
    "reward_scale": 1.0,
    "step_penalty": 0.0,
    "normalize_rewards": False,
}
"""Options that every gym has besides its own, and their defaults, under which a reward stays as it is."""
FLAT = frozenset({"gyms/intention", "gyms/persuade", "gyms/travel"})
"""Gyms whose step penalty does not grow."""


def checked(reward: object, game: str) -> float:
    """``reward`` as a game gave it; raises :class:`EnvironmentFault` unless it is a number, finite and not negative."""
    if not isinstance(reward, int | float) or not math.isfinite(reward) or reward < 0:
        raise EnvironmentFault(f"{game} gave the reward {reward!r}; a reward is a finite number of at least 0")
    return float(reward)


def shaped(base: float, step: int, flat: bool, options: Mapping[str, str | int | float | bool]) -> float:
    """What a call pays: ``base`` under ``options``, at the ``step``-th call of the episode (from 1; 0: no penalty).

    Negative where the penalty is higher and nothing is normalised; never otherwise.
    """
    given = {**SHAPING, **options}
    reward = float(given["reward_scale"]) * base - float(given["step_penalty"]) * (min(step, 1) if flat else step)
    return min(1.0, max(0.0, reward)) if given["normalize_rewards"] else reward


# What a gym is configured with: who answers and judges, whether rewards are shown, its own options.

Choice = Literal["action", "answer", "search", "finish"]
Role = Literal["user", "judge"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One gym's share of the section ``environment``."""

    oracle: Literal["rule", "llm"] = "rule"
    show_reward: bool = False
    options: Mapping[str, Option] = field(default_factory=dict)
    """Every option that the gym knows, its default where none is configured."""
    user: ChatClient | None = None
    """Plays the other side when ``oracle`` is llm."""
    judge: ChatClient | None = None
    """Judges answers when ``oracle`` is llm."""

    def whole(self, key: str) -> int:
        """An option that is a whole number; 0 where the gym does not have it."""
        return int(self.options.get(key, 0))


def setting_of(
    name: str, defaults: Mapping[str, Option], roles: Sequence[Role], config: EnvironmentConfig, services: Services
) -> Setting:
    """The setting of gym ``name`` under ``config``; raises :class:`ConfigError` for what it cannot do.

    In a mix, a gym without an LLM oracle keeps its rules under ``oracle: llm``.
    """
    alone = bool(config.name)
    if alone and config.reward != "all_or_nothing":
        raise ConfigError(f"environment.reward: {name!r} pays by turn and has no form {config.reward!r}; leave it out")
    oracle = config.oracle
    if oracle == "llm" and not roles:
        if alone:
            raise ConfigError(f"environment.oracle: {name!r} is decided by rules alone and has no llm oracle; use rule")
        oracle = "rule"
    if oracle == "llm":
        _need(name, roles, services)
    options = read_options(name, {**SHAPING, **defaults}, config)
    return Setting(oracle, config.show_reward, options, services.user, services.judge)


def _need(name: str, roles: Sequence[Role], services: Services) -> None:
    sections = {"user": "user.llm (with user.kind: llm)", "judge": "judge.llm"}
    for role in roles:
        if getattr(services, role) is None:
            raise ConfigError(f"environment.oracle: llm of {name!r} needs the section {sections[role]}; fill it in")


LONGEST_CONTENT = 2000
"""Characters of one content: long texts invite judges to find something in them, and cost."""
_BUDGETS: dict[Choice, str] = {"action": "max_actions", "answer": "max_answers", "search": "max_searches"}
_OVER = "The game is over. Nothing more can be done."
_DIGITS = 4


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back from the other side. ``error`` marks a call that was refused and spends no budget."""

    text: str
    reward: float = 0.0
    over: bool = False
    error: bool = False


class Game:
    """State and rules of one episode. A coroutine method a legal choice; :meth:`GymEnvironment.call` calls it.

    Whatever is random comes from ``rng``, which the task and the seed fix; nothing touches global state.
    """

    def __init__(self, setting: Setting, task: Task, seed: int) -> None:
        self.setting = setting
        self.task = task
        self.seed = seed
        self.rng = random.Random(f"{task.id}/{seed}")
        self.solved = False
        """Set by the game once the task is solved."""

    async def action(self, content: str) -> Reply:
        """Talk to the other side, or try something."""
        raise NotImplementedError(f"{type(self).__name__} lists the choice action but has no such method")

    async def answer(self, content: str) -> Reply:
        """Commit to an answer."""
        raise NotImplementedError(f"{type(self).__name__} lists the choice answer but has no such method")

    async def search(self, content: str) -> Reply:
        """Ask a source other than the other side."""
        raise NotImplementedError(f"{type(self).__name__} lists the choice search but has no such method")

    def details(self) -> Json:
        """What the evaluation reports besides counts and rewards; plain JSON."""
        return {}


def act(choice: Choice, content: str = "") -> Move:
    """A move of an expert or of gold."""
    return ("interact", {"choice": choice, "content": content})


def interact_schema(choices: Mapping[Choice, str]) -> ToolSchema:
    """The one tool of a gym with the choices that are legal there and what each does with ``content``."""
    lines = "; ".join(f"{choice}: {what}" for choice, what in choices.items())
    properties = {
        "choice": {"type": "string", "enum": list(choices), "description": lines},
        "content": {"type": "string", "description": "the text that goes with the choice; empty for finish"},
    }
    return ToolSchema(
        "interact",
        "Do one thing in the task and get the answer.",
        {
            "type": "object",
            "properties": properties,
            "required": ["choice", "content"],
            "additionalProperties": False,
        },
    )


class GymEnvironment:
    """Implements :class:`mua.environment.protocol.Environment` with coroutine methods."""

    _FAREWELL: ClassVar[str] = "You have finished."

    def __init__(
        self,
        make: Callable[[Task, int], Game],
        setting: Setting,
        schema: ToolSchema,
        decisive: Choice,
        check: Checker | None = None,
    ) -> None:
        """``decisive`` is the choice without whose budget the task can no longer be solved; ``check`` a prepared
        :func:`mua.environment.tool_arguments.argument_checker` of ``schema``."""
        self._make = make
        self._setting = setting
        self._schema = schema
        self._check = check or argument_checker(schema)
        self._decisive = decisive
        self._game: Game | None = None
        self._over = False
        self._used: Counter[str] = Counter()
        self._rewards: list[float] = []

    def reset(self, task: Task, seed: int) -> None:
        self._game = self._make(task, seed)
        self._over = False
        self._used = Counter()
        self._rewards = []

    def tools(self) -> Sequence[ToolSchema]:
        return (self._schema,)

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """One move of the policy; faults of LLMs leave as exceptions."""
        if name != self._schema.name:
            return _refused(f"there is no tool {name!r}; use {self._schema.name}")
        if (fault := self._check(arguments)) is not None:
            return _refused(fault)
        if self._over:
            return _refused(_OVER)
        choice: Choice = arguments["choice"]
        content: str = arguments["content"].strip()
        if (fault := self._fault(choice, content)) is not None:
            return _refused(fault)
        return self._settle(choice, await self._play(choice, content))

    async def evaluate(self, transcript: Transcript) -> Evaluation:
        """Adds nothing: the calls have been paid. ``success`` says whether the task was solved."""
        game = self.game
        total = round(sum(self._rewards), _DIGITS)
        details = {"reward": total, "used": dict(self._used), "over": self._over, **game.details()}
        return Evaluation(0.0, game.solved, details)

    def close(self) -> None:
        self._game = None

    @property
    def game(self) -> Game:
        """The game under way."""
        assert self._game is not None, "reset comes first"
        return self._game

    def _fault(self, choice: Choice, content: str) -> str | None:
        if choice == "finish":
            return None
        if not content:
            return f"content is empty; {choice} needs a text"
        if len(content) > LONGEST_CONTENT:
            return f"content has {len(content)} characters; at most {LONGEST_CONTENT} are read"
        return f"you have no {choice} left" if self._left(choice) == 0 else None

    def _left(self, choice: Choice) -> int | None:
        """How often ``choice`` may still be used; None where there is no limit."""
        limit = self._setting.whole(_BUDGETS[choice]) if choice in _BUDGETS else 0
        return limit - self._used[choice] if limit else None

    async def _play(self, choice: Choice, content: str) -> Reply:
        if choice == "finish":
            return Reply(self._FAREWELL, over=True)
        method: Callable[[str], object] = getattr(self.game, choice)
        reply = await method(content)  # type: ignore[misc]
        assert isinstance(reply, Reply), f"{type(self.game).__name__}.{choice} gave {type(reply).__name__}, not a Reply"
        return reply

    def _settle(self, choice: Choice, reply: Reply) -> ToolResult:
        if reply.error:
            return _refused(reply.text)
        reward = self._paid(choice, reply)
        self._used[choice] += 1
        self._rewards.append(reward)
        text = reply.text
        self._over = reply.over
        if not self._over and self._left(self._decisive) == 0:
            self._over = True
            text += f" That was the last {self._decisive} you had: the game is over."
        if self._setting.show_reward:
            text += f"\nReward: {round(reward, _DIGITS):g}"
        return ToolResult(text, terminal=self._over, reward=reward)

    def _paid(self, choice: Choice, reply: Reply) -> float:
        """The reward as configured; leaving costs no step. Raises :class:`EnvironmentFault`."""
        base = checked(reply.reward, f"{type(self.game).__name__}.{choice}")
        step = 0 if choice == "finish" else self._used.total() + 1
        return shaped(base, step, self.game.task.domain in FLAT, self._setting.options)


def _refused(text: str) -> ToolResult:
    return ToolResult(f"Error: {text}", error=True)
