"""``mua env list``, ``new`` and ``play``, driven as from a shell: what they print, write and refuse.

A new domain and a new gym are run through every check of the contract. Does not cover ``mua env replay``, which is
tested with the official data.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import itertools
import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import environments
import workbench.domains as listing
from environments.kit.database import DatabaseEnvironment, ServiceDesk, Tool, tool_of
from mua.cli import app
from mua.environment import registry
from mua.environment.registry import domain_names, get_domain
from workbench.scaffold import source

ROOT = Path(__file__).parents[2]
CONTRACT = importlib.import_module("contract.test_domain_contract")
CHECKS = [
    check
    for name, check in vars(CONTRACT).items()
    if name.startswith("test_") and "domain" in inspect.signature(check).parameters
]


def mua(*arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(app, ["env", *arguments], input=typed)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkout, and the current folder: its ``environments`` stands in front of the real one, which it includes, in
    this process and in workers."""
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "environments"
    package.mkdir()
    package.joinpath("__init__.py").write_text(
        f"import pkgutil\n__path__ = [*pkgutil.extend_path(__path__, __name__), {str(ROOT / 'environments')!r}]\n"
    )
    monkeypatch.setattr(environments, "__path__", [str(package), *environments.__path__])
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("environments."):
            del sys.modules[name]


def written(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(folder)): path.read_text(errors="surrogateescape") for path in files}


# ---- list


def test_the_list_shows_every_domain_with_counts():
    found = mua("list", "--json")
    assert found.exit_code == 0, found.output
    rows = {row["name"]: row for row in json.loads(found.stdout)}
    assert list(rows) == domain_names()
    desk = rows["help_desk"]
    assert desk["tasks"] == {
        split: len(get_domain("help_desk").tasks(split)) for split in ("train", "validation", "test")
    }
    assert (desk["group"], desk["isolation"], desk["held_out"], desk["fault"]) == ("domains", "inline", False, None)
    assert "get_order" in desk["tools"]
    assert len(desk["tools"]) == 7
    assert all(row["fault"] is None for row in rows.values())


BROKEN = {
    "no_package": "import no_such_package_here",
    "raises": "raise RuntimeError('at import')",
    "leaves": "raise SystemExit(3)",
    "no_domain": "",
    "no_tasks": "class D:\n    name = 'no_tasks'\n"
    "    def tasks(self, split): raise OSError('a file is missing')\nDOMAIN = D()\n",
    "no_data": "class D:\n    name = 'no_data'\n    needs_data = held_out = True\n    isolation = 'process'\n"
    "    def tasks(self, split): return ()\nDOMAIN = D()\n",
}


def test_a_broken_domain_is_shown_as_broken(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environments, "__path__", [str(folder / "environments")])
    monkeypatch.setattr(registry, "_registered", registry._registered.__wrapped__)
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    for name, text in BROKEN.items():
        path = folder / "environments" / name / "__init__.py"
        path.parent.mkdir()
        path.write_text(text)
    faults = {entry.name: entry.fault for entry in listing.entries()}
    assert "no_such_package_here" in (faults["no_package"] or "")
    assert faults["raises"] == "RuntimeError: at import"
    assert faults["leaves"] == "SystemExit: 3"
    assert "has no DOMAIN" in (faults["no_domain"] or "")
    assert faults["no_tasks"] == "OSError: a file is missing"
    assert faults["no_data"] is None
    found = mua("list")
    assert found.exit_code == 0
    assert "broken: RuntimeError: at import" in found.stdout
    assert all(json.loads(mua("list", "--json").stdout))


# ---- new


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        pytest.param(["theatre_b"], "theatre_b", marks=pytest.mark.slow),
        (["guess_b", "--gym"], "gyms/guess_b"),
    ],
)
def test_a_new_domain_keeps_the_whole_contract(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], name: str
):
    made = mua("new", *arguments)
    assert made.exit_code == 0, made.output
    paths = set(written(folder)) - {"environments/__init__.py", "pyproject.toml"}
    assert {str(Path(line).relative_to(folder)) for line in made.stdout.split()} == paths
    assert {f"environments/{name}/__init__.py", f"tests/unit/test_{name.replace('/', '_')}.py"} <= paths
    assert name in domain_names()
    assert len(CHECKS) > 15
    domain = get_domain(name)
    for check in CHECKS:
        run_check(check, domain, monkeypatch)
    own = folder / "tests" / "unit" / f"test_{name.replace('/', '_')}.py"
    names: dict[str, object] = {}
    exec(compile(own.read_text(), str(own), "exec"), names)
    for split in ("train", "validation", "test"):
        run_async(names["test_gold_solves_every_task"](split))  # type: ignore[operator]


def run_async(awaitable) -> None:  # type: ignore[no-untyped-def]
    asyncio.run(awaitable)


def run_check(check: Callable, domain: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        wanted = {"domain": domain, "monkeypatch": context}
        result = check(**{key: wanted[key] for key in inspect.signature(check).parameters})
        if inspect.isawaitable(result):
            run_async(result)


def in_project(folder: Path, *arguments: str) -> Result:
    """``mua env new`` below a project of somebody else's."""
    (folder / "deep").mkdir(exist_ok=True)
    with contextlib.chdir(folder / "deep"):
        return mua("new", *arguments)


@pytest.mark.parametrize(("arguments", "name"), [(["theatre_c"], "theatre_c"), (["guess_c", "--gym"], "guess_c")])
def test_in_another_project_a_domain_is_a_package_with_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], name: str
):
    before = written(ROOT / "environments") | written(ROOT / "tests" / "unit")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "theirs"\n# kept\n')
    made = in_project(tmp_path, *arguments)
    assert made.exit_code == 0, made.output
    found = written(tmp_path)
    gym = {f"{name}/policy.md", f"{name}/manifest.json"} if "--gym" in arguments else set()
    assert set(found) == {"pyproject.toml", f"{name}/__init__.py", f"tests/test_{name}.py"} | gym
    assert {str(Path(line).relative_to(tmp_path)) for line in made.stdout.split()} == set(found)
    assert "pip install -e ." in made.stderr
    project = tomllib.loads(found["pyproject.toml"])["project"]
    assert project == {"name": "theirs", "entry-points": {"mua.environments": {name: name}}}
    assert "# kept" in found["pyproject.toml"]
    assert written(ROOT / "environments") | written(ROOT / "tests" / "unit") == before
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_registered", registry._registered.__wrapped__)
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint(name, name, group)])
    assert name in domain_names()
    names: dict[str, object] = {}
    exec(found[f"tests/test_{name}.py"], names)
    run_async(names["test_gold_solves_every_task"]("test"))  # type: ignore[operator]
    assert in_project(tmp_path, f"{name}_d").exit_code == 0
    points = tomllib.loads(written(tmp_path)["pyproject.toml"])["project"]["entry-points"]["mua.environments"]
    assert points == {name: name, f"{name}_d": f"{name}_d"}
    sys.modules.pop(name, None)


def test_a_folder_given_is_the_project_and_gets_a_project_file(tmp_path: Path):
    assert mua("new", "florist", "--into", str(tmp_path)).exit_code == 0
    points = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    assert points["project"]["entry-points"] == {"mua.environments": {"florist": "florist"}}
    assert points["tool"]["setuptools"]["packages"] == ["florist"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("json", "", "is the name of another module"),
        ("shops/book", "", "give a name without /"),
        ("florist", "[project", "cannot be read"),
        ("florist", '[project]\nentry-points."mua.environments".a = "a"\n', "write its entry points under the line"),
    ],
)
def test_what_another_project_cannot_take_is_refused(tmp_path: Path, name: str, text: str, words: str):
    (tmp_path / "pyproject.toml").write_text(text)
    before = written(tmp_path)
    made = mua("new", name, "--into", str(tmp_path))
    assert made.exit_code == 2
    assert words in made.stderr
    assert written(tmp_path) == before


def test_an_installed_package_is_never_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = tmp_path / "lib" / "site-packages"
    (site / "environments").mkdir(parents=True)
    monkeypatch.setattr(environments, "__path__", [str(site / "environments"), *environments.__path__])
    for into in (site, site.parent):
        made = mua("new", "florist", "--into", str(into))
        if made.exit_code == 0:
            assert not list(site.rglob("florist*"))
        else:
            assert "holds the installed package" in made.stderr
    assert not list((site / "environments").iterdir())


FLAWS = {
    "test_splits_are_disjoint_ids_unique_and_order_fixed": ('"validation": {3}', '"validation": {2}'),
    "test_the_gold_moves_earn_everything": ('"statements": [[seat]]', '"statements": [["thanks"]]'),
    "test_doing_nothing_never_pays": ('[booked], "statements": [[seat]]', '[], "statements": []'),
    "test_tasks_are_json_and_name_their_kind_and_difficulty": ('"difficulty": "easy"', '"difficulty": ("easy",)'),
    "test_the_same_task_seed_and_calls_give_the_same_episode": (
        "return record",
        "return record | {'at': next(NUMBERS)}",
    ),
    "test_rollouts_write_neither_to_the_base_nor_to_their_task": (
        'database.edit("seats", seat)',
        "look(database, seat)",
    ),
    "test_interleaved_rollouts_equal_those_alone": ('database.edit("seats", seat)', "look(database, seat)"),
    "test_closing_frees_everything": ("return DatabaseEnvironment(self.desk)", "return kept(self.desk)"),
}
KEPT: list[DatabaseEnvironment] = []


def kept(desk: ServiceDesk) -> DatabaseEnvironment:
    KEPT.append(DatabaseEnvironment(desk))
    return KEPT[-1]


@pytest.mark.parametrize("name", FLAWS)
def test_the_contract_notices_a_flaw(name: str, monkeypatch: pytest.MonkeyPatch):
    good, bad = FLAWS[name]
    text = source("theatre_d", gym=False)
    assert good in text
    names: dict[str, object] = {"__name__": "flawed", "kept": kept, "NUMBERS": itertools.count()}
    exec(text.replace(good, bad), names)
    check = next(check for check in CHECKS if check.__name__ == name)
    with pytest.raises(AssertionError):
        run_check(check, names["DOMAIN"], monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["help_desk"], "a domain called 'help_desk' already"),
        (["Book-Shop"], "'Book-Shop' is no name"),
        (["../escape"], "is no name"),
        (["a/b/c"], "is no name"),
        (["shops/book", "--gym"], "a gym is in the group gyms"),
    ],
)
def test_a_name_that_cannot_be_is_refused_and_nothing_written(folder: Path, arguments: list[str], words: str):
    before = written(folder)
    made = mua("new", *arguments)
    assert made.exit_code == 2
    assert words in made.stderr
    assert written(folder) == before


@pytest.mark.parametrize("taken", ["environments/florist/notes.txt", "tests/unit/test_florist.py"])
def test_nothing_is_overwritten(folder: Path, taken: str):
    (folder / taken).parent.mkdir(parents=True)
    (folder / taken).write_text("mine")
    before = written(folder)
    made = mua("new", "florist")
    assert made.exit_code == 2
    assert "exists already" in made.stderr
    assert written(folder) == before


def test_a_tool_of_a_function_has_its_signature_as_schema():
    def sell(database: object, item: str, count: int, names: list[str], price: float = 1.0, gift: bool = False) -> str:
        """Sell something."""
        return f"{count} {item}"

    tool = tool_of(sell, terminal=True)
    assert (tool.schema.name, tool.schema.description, tool.terminal) == ("sell", "Sell something.", True)
    assert tool.schema.parameters["required"] == ["item", "count", "names"]
    assert tool.schema.parameters["properties"] == {
        "item": {"type": "string"},
        "count": {"type": "integer"},
        "names": {"type": "array", "items": {"type": "string"}},
        "price": {"type": "number"},
        "gift": {"type": "boolean"},
    }
    assert isinstance(tool, Tool)


# ---- play


TASK = get_domain("help_desk").tasks("test")[3]


def gold_lines() -> str:
    """The gold moves, after questions for what only the customer knows."""
    asked = ["Which order is it?", "What is your name?"]
    moves = get_domain("help_desk").gold(TASK)
    lines = [move if isinstance(move, str) else f"/{move[0]} {json.dumps(move[1])}" for move in moves]
    return "\n".join([*asked, *lines]) + "\n"


def test_a_person_who_makes_the_gold_moves_succeeds():
    found = mua("play", "help_desk", "--task", TASK.id, typed=gold_lines())
    assert found.exit_code == 0, found.output
    assert f"task {TASK.id} (test, {TASK.data['kind']}" in found.stdout
    assert "# Help desk policy" in found.stdout
    assert "user: " in found.stdout
    assert "\nreward 1, success\n" in found.stdout


def test_a_person_as_user_talks_with_the_expert_to_the_end():
    task = next(task for task in get_domain("help_desk").tasks("test") if task.data["kind"] == "cancel")
    known = task.data["known"]
    typed = f"Please cancel my order.\nIt is order {known['order']}.\nI am {known['name']}.\nThanks. ###STOP###\n"
    found = mua("play", "help_desk", "--as", "user", "--task", task.id, typed=typed)
    assert found.exit_code == 0, found.output
    assert known["name"] in found.stdout
    assert "agent: What" in found.stdout
    assert f'agent calls: cancel_order {{"order": "{known["order"]}"}}' in found.stdout
    assert "reward 1, success" in found.stdout


def test_a_person_as_user_has_the_users_tools_and_gold_moves_where_there_is_no_expert(folder: Path):
    assert mua("new", "theatre_c").exit_code == 0
    path = folder / "environments" / "theatre_c" / "__init__.py"
    text = path.read_text().replace("[tool_of(look), tool_of(book)]", "[tool_of(look), tool_of(book)], [tool_of(look)]")
    path.write_text(text)
    sys.modules.pop("environments.theatre_c", None)
    typed = 'A seat, please.\n/tools\n/look {"seat": "Z9"}\n/look {"seat": "1103"}\nOh, it is taken. ###STOP###\n'
    found = mua("play", "theatre_c", "--as", "user", typed=typed)
    assert found.exit_code == 0, found.output
    assert 'agent calls: book {"seat": "1103", "name": "Ada"}' in found.stdout
    assert "agent: Seat 1103 is booked." in found.stdout
    assert "look(seat)  Look a seat up." in found.stdout
    assert "tool: Error: there is no seat Z9" in found.stdout
    assert 'tool: {"holder": "Ada"}' in found.stdout
    assert "reward 1, success\n  database: equals gold" in found.stdout


def test_the_seed_chooses_the_task_and_unknown_ones_are_refused():
    first, second = (mua("play", "help_desk", "--split", "train", "--seed", seed, typed="").stdout for seed in "01")
    tasks = get_domain("help_desk").tasks("train")
    assert first.startswith(f"task {tasks[0].id} (train")
    assert second.startswith(f"task {tasks[1].id} (train")
    for arguments in (["help_desk", "--task", f"{TASK.id}0"], ["help_dsk"], ["help_desk", "--data", "."]):
        assert mua("play", *arguments).exit_code == 2
