"""Hooks: code of your own that a configuration names by import path, ``package.module:name`` (docs/hooks.md).

::

    algorithm.loss: my_research.losses:loss
                         │
        check_hooks ─────┤ before anything starts, on every rank and every elastic rollout worker
        hook_sources ────┤ into the record of the run: the file of each hook and its digest
        call_hook ───────┘ where the built-in would be called; what it raises or gives wrongly is one line

:data:`HOOKS` is all there is: the key of each kind, its parameters and what it gives. A value without ``:`` at such a
key is the name of something built in.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mua.utils.errors import ConfigError, MuaError, one_line


@dataclass(frozen=True, slots=True)
class HookKind:
    """What one key of the configuration expects."""

    key: str
    parameters: tuple[str, ...]
    """Names in order; empty where the object itself is used and not called."""
    gives: str
    """In words, for messages and the page."""
    may_wait: bool = False
    """Whether it may be a coroutine function."""
    attributes: tuple[str, ...] = ()
    """What the object has, or what the function gives."""
    of_episodes: bool = False
    """Whether it decides what an episode is, so that elastic rollout workers have it too."""

    @property
    def expected(self) -> str:
        """The end of every message about such a hook."""
        called = f"a function ({', '.join(self.parameters)}) that gives " if self.parameters else ""
        return f"expected {called}{self.gives} (docs/hooks.md)"


HOOKS: Mapping[str, HookKind] = {
    kind.key: kind
    for kind in (
        HookKind("algorithm.loss", ("logprobs", "entropy", "tokens", "config"), "a finite loss per token, tensor [N]"),
        HookKind("algorithm.advantage", ("scores", "trajectories", "config"), "a finite advantage per trajectory, [n]"),
        HookKind("algorithm.group_filter", ("group", "config"), "a list of those trajectories of the group that train"),
        HookKind(
            "algorithm.curriculum.kind", ("tasks", "rollouts", "successes", "config"),
            "a finite weight of at least 0 per task, [n], one of them above 0",
        ),
        HookKind(
            "environment.name", (), "a domain (mua.environment.domain.Domain)", of_episodes=True,
            attributes=("name", "tasks", "environment", "system_prompt", "persona", "scripted_user", "gold"),
        ),
        HookKind(
            "environment.reward", ("task", "messages", "evaluation"), "a finite number", may_wait=True, of_episodes=True
        ),
        HookKind(
            "environment.scorer.name", ("options", "services"), "a scorer (mua.users.scoring.scorer.Scorer)",
            attributes=("forms", "check", "correct", "score", "close"), of_episodes=True,
        ),
        HookKind(
            "user.kind", ("placement",), "a user (mua.environment.user.User)", attributes=("open", "reply", "close"),
            of_episodes=True,
        ),
        HookKind("agent.function", ("task",), "None, or what JSON can hold", may_wait=True, of_episodes=True),
        HookKind(
            "model.chat_family", (), "a class of chat families (mua.tokens.chat_family.ChatFamily)", of_episodes=True,
            attributes=("name", "control_tokens", "template", "opening_of", "history", "parse_text"),
        ),
        HookKind(
            "trainer.after_step", ("step", "metrics", "groups"), "None, or a mapping of new names to finite numbers"
        ),
    )
}  # fmt: skip
"""Every kind of hook, by its key."""


def is_hook(value: object) -> bool:
    """Whether a value of the configuration names a hook, and nothing built in."""
    return isinstance(value, str) and ":" in value


def hooks_of(config: Any) -> Iterator[tuple[str, str]]:
    """Key and path of every hook that a configuration names."""
    for key in HOOKS:
        value = config
        for name in key.split("."):
            value = getattr(value, name, None)
        values = [value]
        if key == "environment.name":
            values += [*config.environment.mix, *config.evaluation.domains]
        yield from ((key, path) for path in values if is_hook(path))


def check_hooks(config: Any, *, of_episodes: bool = False) -> None:
    """Import every hook of ``config`` and hold it against its kind; ``of_episodes``: only those that episodes need.

    Raises:
        ConfigError: a hook does not exist or has another signature; a line each.
    """
    wrong = []
    for key, path in hooks_of(config):
        try:
            if HOOKS[key].of_episodes or not of_episodes:
                load_hook(key, path)
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError("\n".join(dict.fromkeys(wrong)))


def hook_sources(config: Any, *, of_episodes: bool = False) -> dict[str, dict[str, str | None]]:
    """By path the ``key`` of each hook, the ``file`` that it stands in and the ``sha256`` of that file."""
    found: dict[str, dict[str, str | None]] = {}
    for key, path in hooks_of(config):
        if of_episodes and not HOOKS[key].of_episodes:
            continue
        module = inspect.getmodule(load_hook(key, path)) or importlib.import_module(path.partition(":")[0])
        file = Path(module.__file__ or "")
        digest = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
        found[path] = {"key": key, "file": str(file), "sha256": digest}
    return found


@lru_cache
def load_hook(key: str, path: str) -> Any:
    """The object that ``path`` names. Raises :class:`ConfigError` where it is not what ``key`` expects."""
    kind = HOOKS[key]
    module_name, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # the module is anybody's, and may raise anything
        raise _wrong(
            kind, path, f"{module_name} cannot be imported ({one_line(error)}); install its package, or put its folder "
            "on PYTHONPATH",
        ) from error  # fmt: skip
    if (found := getattr(found, name, None)) is None:
        raise _wrong(kind, path, f"module {module_name} has no {name!r}")
    if not kind.parameters:
        check_attributes(key, path, found)
    elif not callable(found):
        raise _wrong(kind, path, f"{name!r} cannot be called")
    elif inspect.iscoroutinefunction(found) and not kind.may_wait:
        raise _wrong(kind, path, f"{name!r} is async, and nobody awaits it")
    else:
        try:
            bound = inspect.signature(found).bind(*kind.parameters)
        except (TypeError, ValueError) as error:
            raise _wrong(
                kind, path, f"cannot be called with {len(kind.parameters)} arguments ({error})"
            ) from None  # fmt: skip
        for parameter, given in bound.arguments.items():  # of each parameter the expected name that its place has
            if isinstance(given, str) and parameter.lstrip("_") != given:
                raise _wrong(kind, path, f"has a parameter {parameter!r} in the place of {given!r}")
    return found


def call_hook(key: str, path: str, *arguments: Any) -> Any:
    """What the hook gives for ``arguments``. Raises :class:`MuaError` for whatever it raises that is none itself."""
    with _telling(key, path):
        return load_hook(key, path)(*arguments)


async def await_hook(key: str, path: str, *arguments: Any) -> Any:
    """As :func:`call_hook`: a coroutine function on this event loop, a plain one in a thread."""
    if not inspect.iscoroutinefunction(load_hook(key, path)):
        return await asyncio.to_thread(call_hook, key, path, *arguments)
    with _telling(key, path):
        return await load_hook(key, path)(*arguments)


@contextmanager
def _telling(key: str, path: str) -> Iterator[None]:
    try:
        yield
    except MuaError:
        raise
    except Exception as error:
        raise wrong_result(key, path, f"raised {one_line(error)}") from error


def wrong_result(key: str, path: str, what: str) -> MuaError:
    """The error of a hook that did ``what`` when it was called."""
    return MuaError(f"{key}: {path!r} {what}; {HOOKS[key].expected}")


def check_attributes(key: str, path: str, found: object) -> None:
    """Raise :class:`ConfigError` where an object lacks what its kind has."""
    if missing := [name for name in HOOKS[key].attributes if not hasattr(found, name)]:
        shown = found if isinstance(found, type) else type(found)
        raise _wrong(HOOKS[key], path, f"{shown.__name__} lacks {', '.join(missing)}")


def check_numbers(key: str, path: str, found: Any, count: int) -> npt.NDArray[np.float64]:
    """``found`` as float64 ``[count]``. Raises :class:`MuaError` for another shape, what is no number, and NaN."""
    try:
        values = np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError):
        raise wrong_result(key, path, f"gave {type(found).__name__}, which is no array of numbers") from None
    if values.shape != (count,):
        raise wrong_result(key, path, f"gave the shape {list(values.shape)} in place of [{count}]")
    if not np.isfinite(values).all():
        raise wrong_result(key, path, f"gave NaN or infinity at place {int(np.argmin(np.isfinite(values)))}")
    return values


def check_number(key: str, path: str, found: Any) -> float:
    """``found`` as one finite number; raises :class:`MuaError`."""
    number = found if isinstance(found, int | float | np.number) and not isinstance(found, bool) else math.nan
    if not math.isfinite(number):
        raise wrong_result(key, path, f"gave {str(found)[:60]!r}")
    return float(number)


def _wrong(kind: HookKind, path: str, what: str) -> ConfigError:
    return ConfigError(f"{kind.key}: {path!r}: {what}; {kind.expected}")
