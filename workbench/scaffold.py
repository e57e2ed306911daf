"""Write a new domain or gym that works, for a person to change into another one: ``mua env new``.

docs/environments.md shows what these templates make; tests run it through the contract of all domains.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from string import Template
from typing import NamedTuple

from mua.environment.domain import Domain
from mua.environment.registry import ENTRY_POINT_GROUP, domain_names, get_domain
from mua.utils.errors import ConfigError

GYMS = "gyms"
_NAME = re.compile(r"[a-z][a-z0-9_]*(/[a-z][a-z0-9_]*)?")

_DOMAIN = Template('''\
"""The seats of a theatre: an agent looks seats up and books one. Change it, part by part, into your own domain."""

from environments.kit.database import DatabaseEnvironment, ServiceDesk, ToolError, tool_of
from environments.kit.overlay import Base, Overlay
from environments.kit.scripted import ScriptedUser
from mua.environment.protocol import Isolation, Move, PromptStyle, Split, Task
from mua.types import Json

SEATS = {f"{row}{place:02}": {"holder": None} for row in range(11, 27) for place in range(1, 21)}
REMAINDERS: dict[Split, set[int]] = {"train": {0, 1, 2}, "validation": {3}, "test": {4}}


def look(database: Overlay, seat: str) -> Json:
    """Look a seat up."""
    if (record := database.get("seats", seat)) is None:
        raise ToolError(f"there is no seat {seat}")
    return record


def book(database: Overlay, seat: str, name: str) -> str:
    """Book a free seat."""
    if look(database, seat)["holder"]:
        raise ToolError(f"seat {seat} is taken")
    database.edit("seats", seat)["holder"] = name
    return f"seat {seat} is booked for {name}"


class ${class_name}:
    name = "$name"
    isolation: Isolation = "inline"
    desk = ServiceDesk(Base({"seats": SEATS}), [tool_of(look), tool_of(book)])

    def tasks(self, split: Split) -> list[Task]:
        seats = [seat for seat in SEATS if (int(seat[:2]) + int(seat[2:])) % 5 in REMAINDERS[split]]
        return [Task(f"{self.name}/{seat}", self.name, split, self._data(seat)) for seat in seats]

    def _data(self, seat: str) -> Json:
        booked = {"name": "book", "arguments": {"seat": seat, "name": "Ada"}}
        return {"kind": "book", "difficulty": "easy", "seat": seat, "actions": [booked], "statements": [[seat]]}

    def environment(self) -> DatabaseEnvironment:
        return DatabaseEnvironment(self.desk)

    def system_prompt(self, style: PromptStyle) -> str:
        return "You sell the seats of a theatre. Book what is asked for under the visitor's name, then name the seat."

    def persona(self, task: Task) -> str:
        return f"You are Ada. You want seat {task.data['seat']}, and tell your name when asked."

    def scripted_user(self, task: Task, seed: int) -> ScriptedUser:
        openings = (f"Book seat {task.data['seat']} for me, please.", f"Can I have {task.data['seat']}?")
        return ScriptedUser.simple(f"{task.id}/{seed}", openings, {"name": ("I am Ada.", "My name is Ada.")})

    def gold(self, task: Task) -> list[Move]:
        return [("book", {"seat": task.data["seat"], "name": "Ada"}), f"Seat {task.data['seat']} is booked."]


DOMAIN = ${class_name}()
''')

_GYM = Template('''\
"""Guess a number from hints. Change it, part by part, into your own game."""

from collections.abc import Iterator
from typing import ClassVar

from environments.gyms._shared import Choice, Game, Gym, Reply, act
from mua.environment.protocol import Move, Split, Task

FIRST: dict[Split, int] = {"train": 0, "validation": 100, "test": 200}


class ${class_name}Game(Game):
    async def action(self, content: str) -> Reply:
        if not content.isdecimal() or len(content) > 9:
            return Reply("an action is a whole number", error=True)
        return Reply("The number is higher." if int(content) < self.task.data["number"] else "It is not higher.")

    async def answer(self, content: str) -> Reply:
        if content != str(self.task.data["number"]):
            return Reply("No.")
        self.solved = True
        return Reply("Yes.", reward=1.0, over=True)


class ${class_name}(Gym):
    name = "$name"
    choices: ClassVar[dict[Choice, str]] = {
        "action": "a whole number: tells whether the hidden one is higher",
        "answer": "the hidden number",
        "finish": "give up",
    }
    defaults: ClassVar[dict[str, str | int | float | bool]] = {"max_actions": 12, "max_answers": 1}
    short_prompt = "Find the hidden number with the tool interact."

    @classmethod
    def generate(cls, split: Split) -> Iterator[Task]:
        for number in range(FIRST[split], FIRST[split] + 100):
            data = {"kind": "guess", "difficulty": "easy", "number": number}
            yield Task(f"{cls.name}/{number}", cls.name, split, data)

    def game(self, task: Task, seed: int) -> ${class_name}Game:
        return ${class_name}Game(self.setting, task, seed)

    def openings(self, task: Task) -> list[str]:
        return ["I think of a number below 300. Which one?", "Find my number; it is below 300."]

    def persona(self, task: Task) -> str:
        return f"You think of the number {task.data['number']} and answer in the tool alone."

    def gold(self, task: Task) -> list[Move]:
        return [act("answer", str(task.data["number"]))]


DOMAIN = ${class_name}()
''')

_POLICY = """\
# Guess the number

Somebody thinks of a whole number from 0 to 299. Use the tool `interact`: the choice `action` with a number tells you
whether the hidden number is higher than it, and the choice `answer` with a number ends the game. You have 12 actions
and one answer. Halve the range with every action, and answer when one number is left.
"""

_TEST = Template('''\
"""$name: what its own tasks must keep. What all domains keep is tested by tests/contract/test_domain_contract.py."""

from __future__ import annotations

import pytest

from $module import DOMAIN
from mua.environment.protocol import Split
from environments.kit.demonstrate import replay_gold


@pytest.mark.parametrize("split", ["train", "validation", "test"])
async def test_gold_solves_every_task(split: Split):
    for task in DOMAIN.tasks(split):
        found = await replay_gold(DOMAIN, task)
        assert found.evaluation.success, task.id
        assert found.reward == 1.0, task.id
''')

_PROJECT = Template("""\
[build-system]
requires = ["setuptools>=68"]
build-backend = "setuptools.build_meta"

[project]
name = "$name"
version = "0.1.0"
dependencies = ["mua"]

[tool.setuptools]
packages = ["$name"]

[tool.setuptools.package-data]
"*" = ["*.md", "*.json"]
""")


class Home(NamedTuple):
    """Where a new domain is written."""

    root: Path
    """The project's folder."""
    package: Path
    """The domain's own folder."""
    module: str
    name: str
    """What it is registered as."""
    test: Path
    own: bool
    """Whether the project is this one, whose domains are found by their folder; others register an entry point."""


def scaffold(name: str, gym: bool, into: Path | None = None) -> list[Path]:
    """Write a domain called ``name`` and a test of its own into a project; the paths written or changed.

    ``into`` is the project's folder; by default the one that the current folder is in, which is the nearest above with
    a ``pyproject.toml``, or else the current folder. In a checkout of this project the domain stands under
    ``environments/``, a gym as ``gyms/name``. In any other it is a package of its own, and ``pyproject.toml`` registers
    it. The installed package is never written to. Raises :class:`ConfigError` for a name that is taken or no
    identifier; overwrites nothing.
    """
    home = home_of(name, gym, into)
    _check(home)
    for path in (home.package, home.test):
        if path.exists():
            raise ConfigError(f"{path} exists already; choose another name, or remove it")
    registered = [] if home.own else [_registered(home)]
    written = [_write(home.package / "__init__.py", source(home.name, gym))]
    written.append(_write(home.test, test_source(home.name, home.module)))
    return [*written, *registered, *(_pinned(home) if gym else ())]


def home_of(name: str, gym: bool, into: Path | None) -> Home:
    """The place of a new domain; see :func:`scaffold`."""
    root = _project(Path.cwd()) if into is None else into.absolute()
    if into is not None and not into.is_dir():
        raise ConfigError(f"--into: {into} is no folder; give that of your project")
    installed = Path(importlib.import_module("environments").__path__[0]).absolute()
    bare = name.removeprefix(f"{GYMS}/") if gym else name
    if gym and "/" in bare:
        raise ConfigError(f"a gym is in the group {GYMS}; give its name alone, such as {bare.rpartition('/')[2]}")
    if root == installed.parent and (root / "pyproject.toml").exists():
        name = f"{GYMS}/{bare}" if gym else name
        module = f"environments.{name.replace('/', '.')}"
        test = root / "tests" / "unit" / f"test_{name.replace('/', '_')}.py"
        return Home(root, installed.joinpath(*name.split("/")), module, name, test, True)
    if root == installed.parent or (installed.is_relative_to(root) and "site-packages" in root.parts):
        raise ConfigError(
            f"{root} holds the installed package; go to a project of your own, or name its folder by --into"
        )
    source_folder = root / "src" if (root / "src").is_dir() else root
    return Home(root, source_folder / bare, bare, bare, root / "tests" / f"test_{bare}.py", False)


def _project(here: Path) -> Path:
    """The nearest folder from ``here`` upwards that is a project; ``here`` itself if none is."""
    return next((folder for folder in (here, *here.parents) if (folder / "pyproject.toml").exists()), here)


def _registered(home: Home) -> Path:
    """Enter the domain into the project's ``pyproject.toml``; made if there is none."""
    path = home.root / "pyproject.toml"
    head, line = f'[project.entry-points."{ENTRY_POINT_GROUP}"]', f'{home.name} = "{home.module}"'
    old = path.read_text(encoding="utf-8") if path.exists() else _PROJECT.substitute(name=home.name)
    try:
        tomllib.loads(old)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: {error}; fix it first") from error
    lines = old.splitlines()
    if head in lines:
        lines.insert(lines.index(head) + 1, line)
    elif ENTRY_POINT_GROUP in tomllib.loads(old).get("project", {}).get("entry-points", {}):
        raise ConfigError(f"{path}: write its entry points under the line {head}, so that {line} can be added there")
    else:
        lines += ["", head, line]
    return _write(path, "\n".join(lines) + "\n")


def source(name: str, gym: bool) -> str:
    """The module of a new domain."""
    return (_GYM if gym else _DOMAIN).substitute(name=name, class_name=_class_name(name))


def test_source(name: str, module: str) -> str:
    """The test file of a new domain, which stands in ``module``."""
    return _TEST.substitute(name=name, module=module)


def _check(home: Home) -> None:
    name = home.name
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name for a domain; use small letters, digits and _, such as book_shop")
    if not home.own and "/" in name:
        raise ConfigError(f"{name!r}: a domain of your own project is a package; give a name without /")
    if not home.own and (name in sys.stdlib_module_names or name in ("mua", "environments", "tests")):
        raise ConfigError(f"{name!r} is the name of another module; choose another one")
    if name in domain_names():
        raise ConfigError(f"there is a domain called {name!r} already; mua env list shows all")


def _pinned(home: Home) -> list[Path]:
    """The policy and the manifest of a gym."""
    policy = _write(home.package / "policy.md", _POLICY)
    importlib.invalidate_caches()
    from environments.gyms._shared import Gym

    gym = _loaded(home)
    assert isinstance(gym, Gym), "it was written from a gym's template"
    gym.pinned().pin()
    return [policy, home.package / "manifest.json"]


def _loaded(home: Home) -> Domain:
    """The new domain; that of another project is not installed yet, so it is loaded from its file."""
    if home.own:
        return get_domain(home.name)
    spec = importlib.util.spec_from_file_location(home.module, home.package / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[home.module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    domain: Domain = module.DOMAIN
    return domain


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.rpartition("/")[2].split("_"))
