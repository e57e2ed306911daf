"""One list of checks: of a configuration on any machine, of a node and its GPUs, of services that are asked.

::

    mua VERB CONFIG            ─┐                                       ┌─► a failure refuses, all of them at once
    mua VERB CONFIG --check    ─┤  on "start", then "late":             ├─► a table, or JSON
    mua launch slurm CONFIG    ─┼─► configuration.py ─► made(start) ────┤   failures refuse the submission
    mua doctor preflight       ─┤                                       └─► lines of the node's table
                                └─► on "node", and "asked" by rank 0: node.py; between nodes: preflight.py

A check is a function below ``@listed``. What it raises for people is a failure; a fault of the check itself refuses no
run at its start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar

from mua.config.schema import EndpointConfig, ExperimentConfig
from mua.utils.errors import MuaError, advise_install, one_line
from mua.utils.masking import mask_secrets

State = Literal["ok", "warning", "failure"]
Verb: TypeAlias = Literal["train", "sft", "eval", "rollout", "gateway", "sync", "engines"]
Stage: TypeAlias = Literal["start", "late", "node", "asked"]
Function = TypeVar("Function", bound=Callable[..., Any])
_KEY = re.compile(r"([a-z_]+(?:\.[\w/-]+)*): ")


@dataclass(frozen=True)
class Check:
    """What a check found. ``fix`` says what to do about a warning or a failure."""

    name: str
    state: State
    text: str
    fix: str = ""
    key: str = ""
    """The key of the configuration that it is about."""

    @property
    def advice(self) -> str:
        """Key, text and fix, of which some may be empty."""
        told = f"{self.text}; {self.fix}" if self.fix else self.text
        return f"{self.key}: {told}" if self.key else told

    def line(self) -> str:
        """For people."""
        return f"{self.state:8} {self.name:15} {self.advice}"


@dataclass(frozen=True)
class Start:
    """What is to be started."""

    config: ExperimentConfig
    verb: Verb
    launched: bool = False
    """Whether it is to run on other machines, as the section ``slurm`` asks for them."""
    wrong: frozenset[str] = frozenset()
    """Sections of the configuration that are wrong by themselves: ``config`` has defaults there."""

    @property
    def offline(self) -> bool:
        """Whether stored groups are trained on."""
        return self.verb == "train" and self.config.offline is not None

    @property
    def plays(self) -> bool:
        """Whether episodes are played."""
        return self.verb in ("train", "eval", "rollout", "gateway", "sync") and not self.offline

    @property
    def has_model(self) -> bool:
        """Whether the policy is a folder of ours, and no endpoint."""
        return self.verb != "eval" or self.config.evaluation.policy.kind == "engine"

    @property
    def trains(self) -> bool:
        """Whether the section ``megatron`` is used."""
        return self.verb in ("train", "sft", "sync")

    @property
    def has_engines(self) -> bool:
        """Whether SGLang servers are started."""
        return self.has_model and (self.plays or self.verb == "engines")

    @property
    def endpoints(self) -> dict[str, EndpointConfig]:
        """Those that are asked, by section: user, judge, their stand-ins, and a policy that is no checkpoint."""
        found: dict[str, EndpointConfig] = {}
        for name, llm in self.config.language_models().items() if self.plays else ():
            found |= {name: llm} | {f"{name}.fallbacks.{place}": other for place, other in enumerate(llm.fallbacks)}
        if not self.has_model and (policy := self.config.evaluation.policy.endpoint) is not None:
            found["evaluation.policy.endpoint"] = policy
        return found


@dataclass(frozen=True)
class Listed:
    """One entry of the list."""

    name: str
    check: Callable[[Any], Any]
    """Of a :class:`Start`, several; of a node, one."""
    on: Stage
    reads: frozenset[str]
    """Sections that decide about its result."""
    applies: Callable[[Any], bool]


CHECKS: list[Listed] = []


def listed(
    name: str, *reads: str, on: Stage = "start", applies: Callable[[Any], bool] = lambda _: True
) -> Callable[[Function], Function]:
    """Put a function on the list. Those of stage ``late`` read much, and are made only where the others found
    nothing: the run reads the same afterwards."""

    def enter(function: Function) -> Function:
        CHECKS.append(Listed(name, function, on, frozenset(reads), applies))
        return function

    return enter


def ok(text: str) -> Check:
    """A check that found nothing wrong."""
    return Check("", "ok", text)


def failure(key: str, text: str, fix: str = "") -> Check:
    """A check that failed."""
    return Check("", "failure", text, fix, key)


def warning(key: str, text: str, fix: str = "") -> Check:
    """A check that found something odd, which may be meant."""
    return Check("", "warning", text, fix, key)


def raised(call: Callable[[], object]) -> Iterator[Check]:
    """The failures that ``call`` raises, if it does, so that others are found too."""
    try:
        call()
    except MuaError as error:
        yield from failures_of(error)


def failures_of(error: MuaError) -> Iterator[Check]:
    """One for each line of its message, with the key that the line begins with."""
    for line in str(error).splitlines():
        key = match[1] if (match := _KEY.match(line)) and is_key(match[1]) else ""
        yield failure(key, line[len(key) + 2 :] if key else line)


def is_key(text: str) -> bool:
    return text.partition(".")[0] in ExperimentConfig.model_fields


def run_check(name: str, check: Callable[[], Iterable[Check] | Check], broken: State = "failure") -> list[Check]:
    """What ``check`` found. What it raises for people is a failure, and ``broken`` is what a fault of its own is, so
    that one check never hides the others."""
    found = list[Check]()
    try:
        made = check()
        for one in [made] if isinstance(made, Check) else made:
            found.append(one)
    except MuaError as error:
        found += failures_of(error)
    except Exception as error:
        missing = advise_install(error)  # a login node that only submits needs no torch
        why = f"cannot be made here: {missing}" if missing else f"failed itself: {one_line(error)}"
        found.append(Check("", broken, f"the check of {name} {why}"))
    masked = ((one, mask_secrets(one.text), mask_secrets(one.fix)) for one in found)
    return [replace(one, name=one.name or name, text=text, fix=fix) for one, text, fix in masked]
