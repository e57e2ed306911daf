"""The options of a domain, ``environment.options``: one check for all domains."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from mua.config.schema import EnvironmentConfig
from mua.utils.errors import ConfigError

Option: TypeAlias = str | int | float | bool
_FORMS = {bool: "true or false", int: "a whole number of at least 0", float: "a number of at least 0", str: "a text"}


def read_options(name: str, defaults: Mapping[str, Option], config: EnvironmentConfig) -> dict[str, Option]:
    """``defaults`` of domain ``name`` with what ``config`` says; a value has the type of its default.

    Raises :class:`ConfigError` that names the key: for an option that there is not, and for a value of another type.
    """
    found = dict(defaults)
    for key, value in config.options.items():
        option = key.removeprefix(f"{name}.").removeprefix(f"{name.rpartition('/')[2]}.")
        if option not in defaults:
            near = difflib.get_close_matches(option, list(defaults), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            known = ", ".join(defaults) or "none"
            raise ConfigError(f"environment.options.{key}: {name!r} has no such option; known: {known}{hint}")
        wanted = type(defaults[option])
        given = float(value) if wanted is float and type(value) is int else value
        if type(given) is not wanted or (isinstance(given, int | float) and given < 0):
            raise ConfigError(f"environment.options.{key}: must be {_FORMS[wanted]}, not {value!r}")
        found[option] = given
    return found


def choices_in(key: str, given: Option, known: Sequence[str]) -> tuple[str, ...]:
    """The names in ``given``, separated by commas; raises :class:`ConfigError` for none, and for an unknown one."""
    chosen = tuple(filter(None, str(given).split(",")))
    if not chosen or not set(chosen) <= set(known):
        raise ConfigError(f"environment.options.{key}: choose among {', '.join(known)}, not {given!r}")
    return chosen
