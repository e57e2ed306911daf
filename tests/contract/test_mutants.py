"""The list of planted faults fits the tree, and the tool tells apart what is noticed, what is not, and what cannot be.

That all faults of the list are noticed is `make mutants`, which runs their tests.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import mutants
from tools.mutants import LIST, ROOT, Mutant, load

MUTANTS = load(LIST)
ROOMS = {
    "mua/algorithms/": 20,
    "mua/tokens/": 6,
    "mua/rollout/": 10,
    "mua/trainer/": 8,
    "mua/engine/": 8,
    "megatron_bridge/": 4,
    "mua/megatron/packing.py": 5,
    "mua/trainer/evaluation/": 8,
}
"""Where the faults lie, and how many there are at least."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_no_mutant_is_stale(mutant: Mutant) -> None:
    """Its text stands in its file once, what results is another program, and its tests exist."""
    mutant.applied((ROOT / mutant.file).read_text(encoding="utf-8"))
    for test in mutant.tests:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not name or re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), test


def test_the_list_covers_the_rooms_of_learning() -> None:
    assert len(MUTANTS) >= 60
    counts = {room: sum(mutant.file.startswith(room) for mutant in MUTANTS) for room in ROOMS}
    assert {room: count for room, count in counts.items() if count < ROOMS[room]} == {}


# ---- the tool, on a tree of its own

TREE = {
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = \"-m 'not slow'\"\nmarkers = ['slow']\n",
    "double.py": "def double(x):\n    return 2 * x  # two\n",
    "test_double.py": (
        "import pytest\nfrom double import double\n\n\ndef test_it_doubles():\n    assert double(3) == 6\n\n\n"
        "@pytest.mark.slow\ndef test_slowly():\n    assert double(1) == 2\n\n\ndef test_of_nothing():\n    pass\n"
    ),
}


def mutant_of(name: str, old: str, new: str, test: str = "test_it_doubles") -> Mutant:
    return Mutant(name, "double.py", old, new, (f"test_double.py::{test}",))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_became_of_each_mutant(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planted = [
        mutant_of("killed", "2 * x", "3 * x"),
        mutant_of("unnoticed", "2 * x", "3 * x", "test_of_nothing"),
        mutant_of("gone", "5 * x", "3 * x"),
        mutant_of("ambiguous", "x", "y"),
        mutant_of("a comment", "# two", "# three"),
        mutant_of("no Python", "2 * x", "2 *"),
        mutant_of("slow tests only", "2 * x", "3 * x", "test_slowly"),
        mutant_of("no import", "def double(x)", "raise OSError\ndef double(x)"),
        mutant_of("killed as well", "2 * x", "2 + x"),
    ]
    unharmed, judged = mutants.run(tree, planted, jobs=2, seconds=120.0, preloaded=("pytest",))
    verdicts = {finding.name: finding.verdict for finding in judged}
    assert verdicts == {
        "killed": "killed", "unnoticed": "SURVIVED", "gone": "STALE", "ambiguous": "STALE", "a comment": "STALE",
        "no Python": "STALE", "slow tests only": "ERROR", "no import": "ERROR",
        "killed as well": "killed",
    }  # fmt: skip
    assert [finding.verdict for finding in unharmed] == ["killed"]
    assert "test_double.py::test_it_doubles: " in judged[0].told
    assert {path.name: path.read_text() for path in tree.iterdir() if path.is_file()} == TREE, "the tree is as it was"
    assert not mutants.show(planted, unharmed, judged, 1.0)
    assert "2 of 9 mutants killed, 1 SURVIVED, 4 STALE, 2 ERROR, in 1 s" in capsys.readouterr().out


def test_a_mutant_that_outlives_its_deadline_is_not_taken_for_killed(tree: Path) -> None:
    endless = mutant_of("endless", "return 2 * x", "while True: pass")
    _, (found,) = mutants.run(tree, [endless], jobs=1, seconds=2.0, preloaded=("pytest",))
    assert (found.verdict, found.told) == ("DEADLINE", "still running after 2 s")


def test_a_test_that_fails_anyway_kills_nothing(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "test_double.py").write_text("def test_it_doubles():\n    assert False\n")
    planted = [mutant_of("killed", "2 * x", "3 * x")]
    unharmed, judged = mutants.run(tree, planted, jobs=1, seconds=120.0, preloaded=("pytest",))
    assert not mutants.show(planted, unharmed, judged, 1.0)
    assert "fails without any mutant, so that it proves nothing: test_double.py" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[mutant]]\nname = "x"\n', r"mutant 1: keys are file, name, new, old, tests; wrong or missing: \['file'"),
        ('[[mutant]]\nname = "x"\nfile = "f"\nold = "a"\nnew = "b"\ntests = []\n', "tests is empty"),
        ("[[mutant]\n", "Expected"),
        ('[[mutant]]\nname = "x"\nfile = "f"\nold = "a"\nnew = "b"\ntests = ["t"]\n' * 2, "two mutants are named 'x'"),
    ],
)
def test_a_broken_list_is_one_line(tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "list.toml"
    path.write_text(text)
    assert mutants.main(["--list", str(path)]) == 2
    assert re.search(says, capsys.readouterr().err)


def test_choosing_none_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["--only", "no such fault"]) == 2
    assert "no mutant of" in capsys.readouterr().err
