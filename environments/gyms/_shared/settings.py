"""What a gym is configured with: who answers and judges, whether rewards are shown, its own options."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from environments.gyms._shared.shaping import SHAPING
from mua.config.schema import EnvironmentConfig
from mua.environment.endpoint.services import ChatClient, Services
from mua.utils.errors import ConfigError

Choice = Literal["action", "answer", "search", "finish"]
Role = Literal["user", "judge"]
Option: TypeAlias = str | int | float | bool


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
    options = options_for(name, {**SHAPING, **defaults}, config)
    return Setting(oracle, config.show_reward, options, services.user, services.judge)


def options_for(name: str, defaults: Mapping[str, Option], config: EnvironmentConfig) -> dict[str, Option]:
    """``defaults`` with what ``environment.options`` says, which in a mix is what was said to this gym."""
    merged, short = dict(defaults), name.rpartition("/")[2]
    for key, value in config.options.items():
        option = key.removeprefix(f"{name}.").removeprefix(f"{short}.")
        merged[option] = _checked(key, option, value, defaults)
    return merged


def _checked(key: str, option: str, value: Option, defaults: Mapping[str, Option]) -> Option:
    if option not in defaults:
        near = difflib.get_close_matches(option, list(defaults), n=1)
        known = ", ".join(sorted(defaults)) or "none"
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"environment.options.{key}: unknown option; known: {known}{hint}")
    wanted = type(defaults[option])
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted or (isinstance(value, int | float) and value < 0):
        raise ConfigError(f"environment.options.{key}: {value!r} is no {wanted.__name__} of at least 0")
    return value


def _need(name: str, roles: Sequence[Role], services: Services) -> None:
    sections = {"user": "user.llm (with user.kind: llm)", "judge": "judge.llm"}
    for role in roles:
        if getattr(services, role) is None:
            raise ConfigError(f"environment.oracle: llm of {name!r} needs the section {sections[role]}; fill it in")
