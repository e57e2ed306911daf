"""The file of ``mua eval --matrix``: several policies, each evaluated with several populations of users."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pydantic import field_validator

from mua.config.load import load_config
from mua.config.schema import ExperimentConfig
from mua.config.section import Section
from mua.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
_OF_POLICIES = ("model", "engine", "evaluation.policy")
_OF_USERS = ("user",)

Changes = dict[str, Any]
"""Keys of the configuration, with dots or nested, and their values."""


class MatrixConfig(Section):
    """Which policies meet which users. Everything else, tasks and seeds too, is the configuration's and the same."""

    policies: dict[str, str | Changes]
    """By name a model folder or a checkpoint, or changes to ``model``, ``engine`` and ``evaluation.policy``."""
    users: dict[str, Changes]
    """By name changes to the section ``user``, such as ``{user.kind: llm}``; ``{}`` is the configuration's own."""

    @field_validator("policies", "users")
    @classmethod
    def _names_are_folders(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not value:
            raise ValueError("at least one is needed")
        for name in value:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"{name!a} cannot be a name, which is that of a folder too: write letters, digits, dots, dashes "
                    "and underscores, 64 at most"
                )
        return value

    @field_validator("policies")
    @classmethod
    def _policies_change_policies(cls, value: dict[str, str | Changes]) -> dict[str, str | Changes]:
        for name, changes in value.items():
            if not isinstance(changes, str):
                _only(name, changes, _OF_POLICIES)
        return value

    @field_validator("users")
    @classmethod
    def _users_change_users(cls, value: dict[str, Changes]) -> dict[str, Changes]:
        for name, changes in value.items():
            _only(name, changes, _OF_USERS)
        return value


def load_cells(
    config: Path, overrides: list[str], matrix: Path
) -> tuple[ExperimentConfig, dict[str, dict[str, ExperimentConfig]]]:
    """The configuration, and that of each policy with each population of users: ``cells[policy][users]``.

    A cell's output is ``<output>/<policy>/<users>``. Raises :class:`ConfigError` naming the file and the cell.
    """
    chosen, base = load_config(matrix, schema=MatrixConfig), load_config(config, overrides)
    cells: dict[str, dict[str, ExperimentConfig]] = {}
    for policy, of_policy in chosen.policies.items():
        own = {"model.path": of_policy} if isinstance(of_policy, str) else of_policy
        for users, of_users in chosen.users.items():
            changes = [*overrides, *_overrides({**own, **of_users}), f"output={base.output / policy / users}"]
            try:
                cells.setdefault(policy, {})[users] = load_config(config, changes)
            except ConfigError as error:
                where = f"{matrix}: policies.{policy} with users.{users}: "
                raise ConfigError("\n".join(where + line for line in str(error).splitlines())) from None
    return base, cells


def _only(name: str, changes: Changes, sections: tuple[str, ...]) -> None:
    """Raises ``ValueError`` for a key that lies in none of ``sections``."""
    for key in _leaves(changes):
        if not any(key == section or key.startswith(f"{section}.") for section in sections):
            raise ValueError(
                f"{name}: {key[:100]!a} cannot differ within a matrix, only keys of {', '.join(sections)}; all cells "
                "share the rest, so write it into the configuration"
            )


def _leaves(changes: Changes, prefix: str = "") -> list[str]:
    """The keys of single values, with dots."""
    found = []
    for name, value in changes.items():
        key = f"{prefix}{name}"
        found += _leaves(value, f"{key}.") if isinstance(value, dict) and value else [key]
    return found


def _overrides(changes: Changes) -> list[str]:
    """As on the command line; JSON is YAML."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in changes.items()]
