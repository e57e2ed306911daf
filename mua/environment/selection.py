"""The domains of one run: chosen and configured, their tasks filtered, each task's domain found again."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from mua.config.schema import EnvironmentConfig, EvaluationConfig, ExperimentConfig
from mua.environment.domain import Configurable, Domain, PerTaskPrompt
from mua.environment.endpoint.services import Services
from mua.environment.protocol import PromptStyle, Split, Task
from mua.environment.registry import get_domain
from mua.utils.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Selection:
    """One or several domains under one configuration."""

    domains: Mapping[str, Domain]
    config: EnvironmentConfig
    _prompts: dict[tuple[str, PromptStyle], str] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Instructions that are the same for all tasks of a domain: most domains read them from a file."""

    @classmethod
    def from_config(cls, config: EnvironmentConfig, services: Services | None = None) -> Self:
        """The domains that ``config`` names; raises :class:`ConfigError` for what cannot be had."""
        domains: dict[str, Domain] = {}
        defaults = {key: EnvironmentConfig.model_fields[key].default for key in ("oracle", "reward", "show_reward")}
        for name in config.shares:
            domain = domains[name] = get_domain(name)
            own = _share_of(domain, config.of_domains) if config.mix else config.of_domains
            if isinstance(domain, Configurable):
                domains[name] = domain.configured(own, services or Services())
                continue
            asked = [key for key in ("data", "options") if getattr(own, key)]
            asked += [key for key, default in defaults.items() if getattr(own, key) != default]
            if asked:
                raise ConfigError(f"environment.{asked[0]}: domain {name!r} has nothing to set there; leave it out")
        if config.scorer is not None and not any(getattr(one, "scores_answers", False) for one in domains.values()):
            named = ", ".join(map(repr, domains))
            raise ConfigError(f"environment.scorer: {named} scores by rules of its own and takes none; leave it out")
        return cls(domains, config)

    @classmethod
    def held_out(cls, config: ExperimentConfig, services: Services) -> Self | None:
        """Those of ``evaluation.domains`` that ``environment`` does not train on; None if there are none.

        Raises :class:`ConfigError` where one of them has no task in a split that training plays.
        """
        names = [name for name in config.evaluation.domains if name not in config.environment.shares]
        if not names:
            return None
        selection = cls.from_config(environment_of(names, config.environment, config.evaluation), services)
        for split in config.evaluated_splits:
            for name, (_, tasks) in zip(names, selection.shared_tasks(split), strict=True):
                if not tasks:
                    key = "split" if split == config.evaluation.split else "report_split"
                    raise ConfigError(
                        f"evaluation.domains: {name!r} has no {split} tasks of the chosen difficulties; "
                        f"leave it out, or choose another evaluation.{key}"
                    )
        return selection

    def beside(self, other: Self) -> Self:
        """This selection, which also finds the domains of ``other``; tasks and shares stay its own."""
        return replace(self, domains={**self.domains, **other.domains})

    def tasks(self, split: Split) -> list[Task]:
        """The tasks of a split, domain after domain."""
        return [task for _, tasks in self.shared_tasks(split) for task in tasks]

    def sampled_tasks(self, split: Split, count: int | None) -> list[Task]:
        """``count`` tasks of each domain (None: all), drawn as :func:`stratified` does."""
        return [task for _, tasks in self.shared_tasks(split) for task in stratified(tasks, count)]

    def shared_tasks(self, split: Split) -> list[tuple[float, Sequence[Task]]]:
        """Each domain's share and tasks."""
        found: list[tuple[float, Sequence[Task]]] = []
        wanted = self.config.difficulties
        for name, share in self.config.shares.items():
            tasks = self.domains[name].tasks(split)
            found.append((share, [t for t in tasks if t.data.get("difficulty") in wanted] if wanted else tasks))
        return found

    def domain(self, task: Task) -> Domain:
        """The domain that ``task`` belongs to."""
        return self.domains[task.domain]

    def system_prompt(self, task: Task, style: PromptStyle | None = None) -> str:
        """The agent's instructions for ``task``, in the configured style unless another is given."""
        domain, style = self.domain(task), style or self.config.prompt
        known = self._prompts.get((task.domain, style))
        if known is None:
            if isinstance(domain, PerTaskPrompt):
                return domain.prompt_for(task, style)
            known = self._prompts[task.domain, style] = domain.system_prompt(style)
        return known


def environment_of(
    names: Sequence[str], environment: EnvironmentConfig, evaluation: EvaluationConfig
) -> EnvironmentConfig:
    """``environment`` with the domains ``names``, alike in weight, in the place of its own.

    Of its options those of domains that stay are kept; those of the others come from ``evaluation.options``. Raises
    :class:`ConfigError` for an option that belongs to neither.
    """
    if len(set(names)) < len(names):
        raise ConfigError("evaluation.domains: a domain stands there twice; name each once")
    own = environment.shares
    owned = "" if environment.mix else f"{_short(environment.name)}."  # a mix names the owner of each option
    inherited = {owned + key: value for key, value in environment.options.items()}
    gone = _forms(set(own) - set(names))
    options = {key: value for key, value in inherited.items() if key.rpartition(".")[0] not in gone}
    new = _forms(set(evaluation.domains) - set(own))
    for key, value in evaluation.options.items():
        if (owner := key.rpartition(".")[0]) not in new:
            raise ConfigError(
                f"evaluation.options.{key}: {owner or 'nothing'} is none of evaluation.domains that environment does "
                "not have; write DOMAIN.OPTION, and options of domains that are trained on into environment.options"
            )
        if new[owner] in names:
            options[key] = value
    told = environment.model_dump() | {"name": "", "mix": dict.fromkeys(names, 1.0), "options": options}
    return EnvironmentConfig.model_validate(told)


def _forms(names: Iterable[str]) -> dict[str, str]:
    """Each domain by the names an option may call it."""
    return {form: name for name in names for form in (name, _short(name))}


def _share_of(domain: Domain, config: EnvironmentConfig) -> EnvironmentConfig:
    """What a mix says to one of its domains: its own options, and no setting that only others understand.

    In a mix an option is written with its owner, ``{turtle.max_words: 5}``.
    """
    own: dict[str, object] = {}
    owners = _forms(config.shares)
    for key, value in config.options.items():
        owner, dot, option = key.rpartition(".")
        if not dot:
            raise ConfigError(
                f"environment.options.{key}: say whose option it is in a mix, such as {_short(domain.name)}.{key}"
            )
        if owner not in owners:
            raise ConfigError(
                f"environment.options.{key}: no chosen environment is called {owner!r}; "
                f"there are {', '.join(sorted(map(_short, config.shares)))}"
            )
        if owners[owner] == domain.name:
            own[option] = value
    changed: dict[str, object] = {"options": own}
    if config.data is not None and (folder := config.data / _short(domain.name)).is_dir():
        changed["data"] = folder
    if not getattr(domain, "user_in_tools", False):
        changed |= {"oracle": "rule", "show_reward": False}
    if not isinstance(domain, Configurable):
        changed |= {"data": None, "reward": "all_or_nothing"}
    return config.model_copy(update=changed)


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def stratified(tasks: Sequence[Task], count: int | None) -> list[Task]:
    """``count`` of ``tasks`` (None, or more than there are: all), in their order.

    Places go to kinds by :func:`apportioned`, a kind's places to its difficulties likewise, and within those tasks are
    taken in the order of a digest of their domain and id: no seed, no position and no other task decides about one.
    Every kind has a place where there are as many places as kinds, and a smaller sample is part of a larger one.
    """
    if count is None or count >= len(tasks):
        return list(tasks)
    chosen: set[str] = set()
    for kind, places in _shares(tasks, "kind", count):
        for alike, seats in _shares(kind, "difficulty", places):
            drawn = sorted(alike, key=lambda t: hashlib.sha256(f"sample\0{t.domain}\0{t.id}".encode()).hexdigest())
            chosen.update(task.id for task in drawn[:seats])
    return [task for task in tasks if task.id in chosen]


def apportioned(sizes: Mapping[str, int], places: int) -> dict[str, int]:
    """How many of ``places`` each part gets, by its size; never more than it has.

    Sainte-Lague's method with one place for each part first, the largest first: the next place goes to the part with
    the largest ``size / (2 given + 1)``, ties to the name that comes first. One more place takes none away.
    """
    given = dict.fromkeys(sizes, 0)
    for _ in range(min(places, sum(sizes.values()))):
        open_ones = (name for name in sorted(sizes) if given[name] < sizes[name])
        given[max(open_ones, key=lambda name: (given[name] == 0, sizes[name] / (2 * given[name] + 1)))] += 1
    return given


def _shares(tasks: Sequence[Task], label: str, places: int) -> list[tuple[list[Task], int]]:
    """The tasks of each value of ``label``, with their part of ``places``."""
    parts: defaultdict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        parts[str(task.data.get(label, "-"))].append(task)
    given = apportioned({name: len(part) for name, part in parts.items()}, places)
    return [(part, given[name]) for name, part in parts.items()]
