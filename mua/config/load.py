"""From a YAML file, what it extends, the environment and command-line overrides to one typed configuration.

The way of a key, in six stops::

    1 CONFIG.yaml, KEY=VALUE ─► 2 tree.py ─► 3 load.py ──────────────► 4 schema.py ─► 5 launch/checks ─► 6 its room
                                plain data,  extends, overrides,       types, rules   this machine,      config.trainer.
                                file:line    ${NAME}; here             of sections    this model         steps

What is wrong at stops 2 to 5 is told with file, line and key (:mod:`mua.config.messages`), all at once.

Order, later wins: the files named by ``extends`` (first to last), the file itself, the overrides. Mappings are
merged key by key; lists and scalars are replaced. ``${NAME}`` and ``${NAME:-default}`` in string values are filled
from the environment, after merging, so that a value nobody uses asks for no variable. Relative paths in values stay
relative to the working directory; only ``extends`` is relative to the file it stands in, and ``${MUA_HERE}`` is the
folder of that file. Where a file is asked for, the bare name of a recipe is one too (:func:`config_file`).
"""

from __future__ import annotations

import copy
import difflib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, overload

import yaml
from pydantic import ValidationError

from mua.config.messages import Problem, describe_errors, key_of_error
from mua.config.schema import ExperimentConfig, Section
from mua.config.section import KeyPath
from mua.config.tree import MAX_DEPTH, MAX_NAME, Tree, parse, parse_value, unusable_text
from mua.utils.errors import ConfigError
from mua.utils.masking import masked_tree, remember_secrets
from mua.utils.source_state import shipped
from mua.utils.strict_json import open_file

COMMAND_LINE = "command line"
MAX_BYTES = 1 << 20
"""Size of one file."""
MAX_FILES = 100
"""Files that one configuration may read by ``extends``, each as often as it is named."""
_LONGEST_NAME = 1000

_HERE = "${MUA_HERE}"
"""The folder of the file that it stands in."""
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|\$\{")

AnySection = TypeVar("AnySection", bound=Section)


@dataclass(frozen=True)
class Reading(Generic[AnySection]):
    """A configuration as it was read, with the place of every key."""

    config: AnySection | None
    """None where something is wrong."""
    problems: list[Problem]
    tree: Tree
    partial: AnySection | None = None
    """Where something is wrong: the configuration with defaults in the place of what is, to check the rest of it; None
    where there is none either."""

    @property
    def wrong(self) -> frozenset[str]:
        """The sections with problems, which ``partial`` has otherwise than they are meant."""
        return frozenset(section for problem in self.problems for section in problem.sections())

    def required(self) -> AnySection:
        """The configuration. Raises :class:`ConfigError` with all that is wrong, a line each."""
        if self.config is None:
            raise ConfigError("\n".join(map(str, self.problems)))
        return self.config

    def place(self, key: str) -> str:
        """File and line of a dotted key, or of what is around it."""
        return str(self.tree.place(tuple(key.split("."))))


@overload
def load_config(path: Path, overrides: Sequence[str] = ()) -> ExperimentConfig: ...
@overload
def load_config(path: Path, overrides: Sequence[str] = ..., schema: type[AnySection] = ...) -> AnySection: ...
def load_config(path: Path, overrides: Sequence[str] = (), schema: type[Section] = ExperimentConfig) -> Section:
    """Read and validate one configuration.

    ``overrides`` are ``key.path=value``; the value is YAML. Raises :class:`ConfigError` whose message has one line
    for each thing that is wrong: file, line, key, and what to write instead. Values of secrets are never repeated.
    """
    return read_config(path, overrides, schema).required()


def read_config(
    path: Path, overrides: Sequence[str], schema: type[AnySection], verb: str | None = None
) -> Reading[AnySection]:
    """As :func:`load_config`, with what is wrong as data.

    Args:
        verb: of the command line; ``sft`` plays no episodes, and their budgets are made to fit.

    Raises:
        ConfigError: a file cannot be read or is no YAML, or an override is none.
    """
    tree, problems = _read(config_file(path), (), []), list[Problem]()
    _override(tree, overrides)
    tree.data = _fill(tree.data, (), tree, problems)
    remember_secrets(tree.variables, tree.data)
    missing = [key for key, known in tree.filled.items() if not known]
    context: dict[str, Any] = {"verb": verb}
    try:
        config = schema.model_validate(tree.data, context=context)
    except ValidationError as error:
        missed = {".".join(key) for key in missing}
        problems += [problem for problem in describe_errors(error, tree, schema) if problem.key not in missed]
        wrong = [key_of_error(detail, tree.data) for detail in error.errors()]
        rest, by_place = Tree(copy.deepcopy(tree.data)), [key for key in (*missing, *wrong) if key]
        for key in sorted(by_place, key=lambda key: [f"{int(p):09}" if p.isdigit() else p for p in key], reverse=True):
            rest.remove(key)  # places of a list from its end
        with suppress(ValidationError):
            partial = schema.model_validate(rest.data, context=context | {"rules": False})
            return Reading(None, problems, tree, partial)
        return Reading(None, problems, tree)
    if problems:
        return Reading(None, problems, tree, config)
    return Reading(config, [], tree)


def _override(tree: Tree, overrides: Sequence[str]) -> None:
    faults = []
    for override in overrides:
        dotted, equals, value = override.partition("=")
        key: KeyPath = tuple(dotted.strip().split("."))
        if not equals or not all(key) or not dotted.isprintable() or max(map(len, key)) > MAX_NAME:
            # The text itself is not repeated: it may be a secret whose key was forgotten.
            named = ascii(dotted)[1:-1][:100] if equals else "an argument"
            faults.append(f"{COMMAND_LINE}: {named}: expected key.path=value")
            continue
        above = [(depth, tree.value(key[:depth])) for depth in range(1, min(len(key), MAX_DEPTH))]
        if found := [(depth, here) for depth, here in above if here is not None and not isinstance(here, dict)]:
            kind = "a list, which is replaced whole" if isinstance(found[0][1], list) else "a single value"
            faults.append(f"{COMMAND_LINE}: {dotted}: {'.'.join(key[: found[0][0]])} is {kind}, not a section")
            continue
        try:
            tree.merge(parse_value(value, key, COMMAND_LINE))
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))


def dump_config(config: Section) -> str:
    """The configuration as YAML that :func:`load_config` reads again, secrets and credentials in URLs masked."""
    return yaml.safe_dump(masked_tree(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True, width=120)


def _read(path: Path, parents: tuple[Path, ...], files: list[Path]) -> Tree:
    """``files`` grows by every file that is read."""
    asker = f" (named by extends in {parents[-1].name})" if parents else ""
    try:
        with open_file(path) as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path}: is larger than {MAX_BYTES} bytes{asker}: no configuration file")
        text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read{asker}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text (byte {error.start})") from None
    real = path.resolve()
    if real in parents:
        chain = " -> ".join(p.name for p in (*parents[parents.index(real) :], real))
        raise ConfigError(f"{path}: extends: the files extend each other in a circle: {chain}")
    files.append(real)
    if len(files) > MAX_FILES:
        raise ConfigError(f"{path}: extends: more than {MAX_FILES} files are read for one configuration")
    child = parse(text, str(path))
    tree = Tree({}, {(): child.places[()]})
    for base in _bases(path, child):
        tree.merge(_read(base, (*parents, real), files))
    tree.merge(child)
    return tree


def _bases(path: Path, tree: Tree) -> list[Path]:
    """Take ``extends`` out of the tree and give the files it names."""
    at = tree.place(("extends",))
    problems: list[Problem] = []
    named = _fill(tree.data.pop("extends", []), ("extends",), tree, problems)
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problems.append(Problem(str(at), "extends", f"expected a file name or a list of them, got {named!r:.200}"))
    elif not all(name.isprintable() and len(name) <= _LONGEST_NAME for name in names):
        text = f"a file name is too long or cannot be printed: {named!a:.200}"
        problems.append(Problem(str(at), "extends", text))
    if problems:
        raise ConfigError("\n".join(map(str, problems)))
    return [config_file(Path(name), path.parent) for name in names]


def _fill(value: Any, key: KeyPath, tree: Tree, problems: list[Problem]) -> Any:
    """``value`` with every variable in its strings replaced; what is missing is added to ``problems``."""
    if isinstance(value, dict):
        return {name: _fill(item, (*key, name), tree, problems) for name, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, (*key, str(i)), tree, problems) for i, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    place, dotted, before = tree.place(key), ".".join(key), len(problems)
    at = str(place)
    if place.line is not None:
        value = value.replace(_HERE, str(Path(place.source).parent))

    def variable(match: re.Match[str]) -> str:
        name, default = match.groups()
        found: str | None = os.environ.get(name, default) if name else None
        if name is None:
            problems.append(Problem(at, dotted, "'${' starts a variable; write ${NAME} or ${NAME:-default}"))
        elif found is None:
            text = f"the environment variable {name} is not set; export it or write ${{{name}:-default}}"
            problems.append(Problem(at, dotted, text))
        if name and name in os.environ:  # a default stands in the file, for all to read
            tree.variables[name] = found or ""
        return found or ""

    filled, variables = _VARIABLE.subn(variable, value)
    if fault := unusable_text(filled):  # a variable may hold bytes that are no UTF-8
        problems.append(Problem(at, dotted, fault))
    if variables:
        tree.filled[key] = len(problems) == before
    return filled


_SUFFIX = ".yaml"
_BASE = "base"
"""What recipes extend; no run by itself."""


class Recipe(NamedTuple):
    """One of them."""

    name: str
    about: str
    """The first line of its file."""
    path: Path


def recipes() -> list[Recipe]:
    """All, by name."""
    paths = sorted(shipped("configs").glob(f"*{_SUFFIX}"))
    return [
        Recipe(path.stem, path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# "), path)
        for path in paths
        if path.stem != _BASE
    ]


def config_file(named: Path, folder: Path = Path()) -> Path:
    """The file meant by ``named``, as seen from ``folder``: a recipe's where it is a recipe's bare name.

    A file of that name there comes first. Raises :class:`ConfigError` for a bare name that is neither.
    """
    here = folder / named
    if len(named.parts) != 1 or os.path.isfile(here):
        return here
    if os.path.isfile(found := shipped(f"configs/{named}{_SUFFIX}")):
        return found
    if named.suffix in (_SUFFIX, ".yml"):
        return here
    known = [recipe.name for recipe in recipes()]
    nearest = difflib.get_close_matches(str(named), known, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise ConfigError(f"{here}: neither a file nor a recipe; mua recipes lists those{hint}")
