"""The domains of one run: chosen and configured, their tasks filtered, each task's domain found again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mua.config.schema import EnvironmentConfig
from mua.environment.protocol import Configurable, Domain, PerTaskPrompt, PromptStyle, Split, Task
from mua.environment.registry import get_domain
from mua.errors import ConfigError
from mua.users.services import Services


@dataclass(frozen=True, slots=True)
class Selection:
    """One or several domains under one configuration."""

    domains: Mapping[str, Domain]
    config: EnvironmentConfig

    @classmethod
    def from_config(cls, config: EnvironmentConfig, services: Services | None = None) -> Selection:
        """The domains that ``config`` names; raises :class:`mua.errors.ConfigError` for what cannot be had."""
        return cls({name: _configured(name, config, services or Services()) for name in config.shares}, config)

    def tasks(self, split: Split) -> list[Task]:
        """The tasks of a split, domain after domain."""
        return [task for _, tasks in self.shared_tasks(split) for task in tasks]

    def first_tasks(self, split: Split, count: int | None) -> list[Task]:
        """The first ``count`` tasks of each domain (None: all)."""
        return [task for _, tasks in self.shared_tasks(split) for task in tasks[:count]]

    def shared_tasks(self, split: Split) -> list[tuple[float, Sequence[Task]]]:
        """Each domain's share and tasks."""
        return [(share, self._chosen(name, split)) for name, share in self.config.shares.items()]

    def domain(self, task: Task) -> Domain:
        """The domain that ``task`` belongs to."""
        return self.domains[task.domain]

    def system_prompt(self, task: Task, style: PromptStyle | None = None) -> str:
        """The agent's instructions for ``task``, in the configured style unless another is given."""
        domain, style = self.domain(task), style or self.config.prompt
        return domain.prompt_for(task, style) if isinstance(domain, PerTaskPrompt) else domain.system_prompt(style)

    def _chosen(self, name: str, split: Split) -> Sequence[Task]:
        tasks, wanted = self.domains[name].tasks(split), self.config.difficulties
        return [task for task in tasks if task.data.get("difficulty") in wanted] if wanted else tasks


def _configured(name: str, config: EnvironmentConfig, services: Services) -> Domain:
    domain = get_domain(name)
    config = _share_of(domain, config) if config.mix else config
    if isinstance(domain, Configurable):
        return domain.configured(config, services)
    asked = [key for key in ("data", "options") if getattr(config, key)]
    defaults = EnvironmentConfig(name=name)
    asked += [key for key in ("oracle", "reward", "show_reward") if getattr(config, key) != getattr(defaults, key)]
    if asked:
        raise ConfigError(f"environment.{asked[0]}: domain {name!r} has nothing to set there; leave it out")
    return domain


def _share_of(domain: Domain, config: EnvironmentConfig) -> EnvironmentConfig:
    """What a mix says to one of its domains: its own options, and no setting that only others understand."""
    changed: dict[str, object] = {"options": _own_options(domain.name, config)}
    if config.data is not None and (folder := config.data / _short(domain.name)).is_dir():
        changed["data"] = folder
    if not getattr(domain, "user_in_tools", False):
        changed |= {"oracle": "rule", "show_reward": False}
    if not isinstance(domain, Configurable):
        changed |= {"data": None, "reward": "all_or_nothing"}
    return config.model_copy(update=changed)


def _own_options(name: str, config: EnvironmentConfig) -> dict[str, str | int | float | bool]:
    """In a mix an option is written with its owner, ``{turtle.max_words: 5}``."""
    owners = {form: owner for owner in config.shares for form in (owner, _short(owner))}
    own = {}
    for key, value in config.options.items():
        owner, dot, option = key.rpartition(".")
        if not dot:
            raise ConfigError(
                f"environment.options.{key}: say whose option it is in a mix, such as {_short(name)}.{key}"
            )
        if owner not in owners:
            raise ConfigError(
                f"environment.options.{key}: no chosen environment is called {owner!r}; "
                f"there are {', '.join(sorted(map(_short, config.shares)))}"
            )
        if owners[owner] == name:
            own[option] = value
    return own


def _short(name: str) -> str:
    return name.rpartition("/")[2]
