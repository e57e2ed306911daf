"""Domains by name: the packages under ``environments/`` and the entry points of group ``mua.environments``.

A folder there that is no package itself is a group: its packages are called ``group/name``. ``environments`` is a name
that other projects use too, so whose package it is is looked at before anything is read from it.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points, packages_distributions
from pathlib import Path

from mua.environment.domain import Domain
from mua.utils.errors import ConfigError
from mua.utils.hooks import is_hook, load_hook

ENTRY_POINT_GROUP = "mua.environments"
"""A third-party package registers ``name = "package.module"``; the module exports ``DOMAIN``, as ours do."""
_PACKAGE = "environments"
_NO_DOMAINS = ("kit", "servers")
"""What domains are made of, and tool servers; no domains."""


def domain_names() -> list[str]:
    """Names that :func:`get_domain` knows, sorted. Imports no domain."""
    return sorted(_modules())


def get_domain(name: str) -> Domain:
    """Import the domain's module and take its ``DOMAIN``.

    Raises :class:`ConfigError` for an unknown name, a module that lacks ``DOMAIN`` or whose imports
    are not installed. Any other exception of the module is its own fault and passes through.
    """
    if is_hook(name):
        domain: Domain = load_hook("environment.name", name)
        if domain.name != name:
            raise ConfigError(
                f"environment.name: {name!r}: the domain calls itself {domain.name!r}; its name, and the domain of its "
                "tasks, must be the path that the configuration names it by (docs/hooks.md)"
            )
        return domain
    modules = _modules()
    if name not in modules:
        nearest = difflib.get_close_matches(name, sorted(modules), n=1, cutoff=0.5)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(
            f"environment.name: unknown environment {name!r}; known: {', '.join(sorted(modules)) or 'none'}{hint}"
        )
    path = modules[name]
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise ConfigError(f"environment.name: {name!r} cannot be imported from {path}: {error}") from error
    found: Domain | None = getattr(module, "DOMAIN", None)
    if found is None:
        raise ConfigError(f"environment.name: module {path} of {name!r} has no DOMAIN; export the domain object there")
    if found.name != name:
        raise ConfigError(f"environment.name: {path}.DOMAIN calls itself {found.name!r} but is registered as {name!r}")
    return found


def _modules() -> dict[str, str]:
    """Module path by domain name."""
    try:
        own = importlib.import_module(_PACKAGE)
    except ImportError as error:
        raise ConfigError(f"environments: the domains that come with mua cannot be imported: {error}") from error
    if getattr(own, "PROJECT", None) != "mua":
        folder = next(iter(getattr(own, "__path__", ())), None) or own.__file__
        owners = sorted(set(packages_distributions().get(_PACKAGE, ())) - {"mua"})
        who = f", of {' and '.join(owners)}" if owners else ""
        raise ConfigError(
            f"environments: the package of that name that Python finds first is not mua's but {folder}{who}; take it "
            "off PYTHONPATH or out of the current folder, or give mua a virtual environment of its own"
        )
    folders = [Path(folder) for folder in own.__path__]
    modules = {name: f"{_PACKAGE}.{name}" for name in _packages(folders)}
    inner = [one for folder in folders for one in folder.iterdir() if one.is_dir() and one.name[0] not in "_."]
    for group in {one.name for one in inner if not (one / "__init__.py").exists()}:
        members = _packages([folder / group for folder in folders])
        modules |= {f"{group}/{name}": f"{_PACKAGE}.{group}.{name}" for name in members}
    for point in _registered(tuple(sys.path)):
        taken = modules.setdefault(point.name, point.value)
        if taken != point.value:
            raise ConfigError(
                f"two domains are called {point.name!r}: {taken} and {point.value} (entry point of group "
                f"{ENTRY_POINT_GROUP}); rename one or uninstall its package"
            )
    return modules


@lru_cache(maxsize=4)
def _registered(path: tuple[str, ...]) -> Sequence[EntryPoint]:
    """The entry points that packages on ``path`` have: metadata of some two hundred are read for them."""
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def _packages(folders: list[Path]) -> Iterator[str]:
    found = pkgutil.iter_modules([str(folder) for folder in folders])
    return (
        info.name for info in found if info.ispkg and info.name not in _NO_DOMAINS and not info.name.startswith("_")
    )
