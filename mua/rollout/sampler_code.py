"""What code a sampler and the trainer run, and whether the two may roll out for one run.

The trainer writes :func:`made_with` beside its router's address at each start; a sampler compares it with its own
before it leases anything. The package's version and :data:`mua.engine.router_client.CONTRACT` must agree. What a
commit, a changed file or another library may change of an episode, without either knowing, is refused or only told, as
``samplers.other_code`` says.
"""

from __future__ import annotations

import logging
from importlib.metadata import entry_points
from typing import Any, Literal

import mua
from mua.config.schema import ExperimentConfig
from mua.engine.router_client import CONTRACT
from mua.environment.registry import ENTRY_POINT_GROUP
from mua.types import Json
from mua.utils.errors import ConfigError
from mua.utils.hooks import hook_sources
from mua.utils.source_state import ROOT, code_digest, git_state, installed_version

log = logging.getLogger(__name__)
_OF_EPISODES = ("transformers", "tokenizers", "jinja2", "jsonschema-rs", "rapidfuzz", "sympy", "math-verify", "bm25s")
"""Packages whose other versions may give other tokens, observations or scores."""


def made_with(config: ExperimentConfig) -> Json:
    """What this process would roll out episodes of ``config`` with: ``mua``, ``contract``, ``code`` (a digest),
    ``commit`` (for people; None outside a repository), versions of ``packages``, and digests of ``hooks`` by path."""
    git = git_state(ROOT)
    packages = {name: installed_version(name) for name in _OF_EPISODES} | _of_others(set(config.environment.shares))
    return {
        "mua": mua.__version__,
        "contract": CONTRACT,
        "code": code_digest(),
        "commit": git and git["commit"][:12] + (" with changed files" if git["dirty"] else ""),
        "packages": packages,
        "hooks": {path: hook["sha256"] for path, hook in hook_sources(config, of_episodes=True).items()},
    }


def check_contract(run: str, theirs: Json) -> None:
    """Raise :class:`ConfigError` where the trainer, which said ``theirs``, is of another version or contract."""
    ours = {"mua": mua.__version__, "contract": CONTRACT}
    if not theirs:
        raise ConfigError(
            f"run {run}: its trainer's mua does not say its version, and this sampler is {_named(ours)}; install the "
            "same mua on both sides, then start the trainer again"
        )
    if any(theirs.get(key) != ours[key] for key in ("mua", "contract")):
        raise ConfigError(
            f"run {run}: its trainer is {_named(theirs)}, this sampler {_named(ours)}; install the trainer's mua here, "
            "or start the trainer again with this one"
        )


def check_code(run: str, theirs: Json, ours: Json, other_code: Literal["refuse", "warn"]) -> None:
    """Compare the code of both sides. Raises :class:`ConfigError` where it differs and ``other_code`` is refuse."""
    different = _differences(theirs, ours)
    if not different:
        return
    told = f"run {run}: this sampler would roll out with other code than its trainer: {'; '.join(different)}"
    if other_code == "refuse":
        raise ConfigError(
            f"{told}; bring both to the same, or set samplers.other_code=warn where that changes nothing of episodes"
        )
    log.warning("%s (samplers.other_code: warn)", told)


def _differences(theirs: Json, ours: Json) -> list[str]:
    found = []
    if theirs.get("code") != ours["code"]:
        sides = [f"{side.get('code')}{f' (commit {side["commit"]})' if side.get('commit') else ''}" for side in
                 (theirs, ours)]  # fmt: skip
        found.append(f"sources of mua and its environments: the trainer's {sides[0]}, here {sides[1]}")
    things: tuple[dict[str, Any], dict[str, Any]] = (
        (theirs.get("packages") or {}) | (theirs.get("hooks") or {}),
        ours["packages"] | ours["hooks"],
    )
    for name in dict.fromkeys([*things[0], *things[1]]):
        sides = [str(side.get(name) or "none") for side in things]
        if sides[0] != sides[1]:
            found.append(f"{name}: the trainer's {sides[0]}, here {sides[1]}")
    return found


def _named(side: Json) -> str:
    return f"mua {side.get('mua')} (sampler contract {side.get('contract')})"


def _of_others(domains: set[str]) -> dict[str, str | None]:
    """The versions of other projects' packages that bring these domains."""
    found = [point.dist for point in entry_points(group=ENTRY_POINT_GROUP) if point.name in domains]
    return {dist.name: dist.version for dist in found if dist is not None}
