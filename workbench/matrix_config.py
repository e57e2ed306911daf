"""The file of ``mua eval --matrix``: several policies, each evaluated with several populations of users."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationInfo, field_validator

from mua.config.load import load_config
from mua.config.schema import ExperimentConfig
from mua.config.section import Section
from mua.utils.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
_SECTIONS = {"policies": ("model", "engine", "evaluation.policy"), "users": ("user",)}

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

    @field_validator("policies", "users")
    @classmethod
    def _only_own_sections_differ(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        sections = _SECTIONS[str(info.field_name)]
        for name, changes in value.items():
            for key in [] if isinstance(changes, str) else _leaves(changes):
                if not any(key == section or key.startswith(f"{section}.") for section in sections):
                    raise ValueError(
                        f"{name}: {key[:100]!a} cannot differ within a matrix, only keys of {', '.join(sections)}; all "
                        "cells share the rest, so write it into the configuration"
                    )
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
            differing = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in {**own, **of_users}.items()]
            changes = [*overrides, *differing, f"output={base.output / policy / users}"]
            try:
                cells.setdefault(policy, {})[users] = load_config(config, changes)
            except ConfigError as error:
                where = f"{matrix}: policies.{policy} with users.{users}: "
                raise ConfigError("\n".join(where + line for line in str(error).splitlines())) from None
    return base, cells


def _leaves(changes: Changes, prefix: str = "") -> list[str]:
    """The keys of single values, with dots."""
    found = []
    for name, value in changes.items():
        key = f"{prefix}{name}"
        found += _leaves(value, f"{key}.") if isinstance(value, dict) and value else [key]
    return found
