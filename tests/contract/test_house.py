"""The project's shape: no circles, no import that points up, no upstream's private names, no name twice in the core.

What is found in a tree that has each of these faults once is told, so that silence means something. Not covered: the
figures that ``python -m tools.house`` prints, but for lines of code.
"""

from __future__ import annotations

from tools.house import Source, circles, faults, private_names, sources

TREE = {
    "mua/utils/errors.py": "from mua.config.load import load\n",
    "mua/config/load.py": "import mua.config.tree\nclass Plan: ...\n",
    "mua/config/tree.py": "def late():\n    from mua.config import load\n    return load\n",
    "mua/engine/load.py": "import torch\nclass _Plan: ...\nx = torch.distributed._functional\n",
    "mua/compat/patch.py": "from torch._C import Graph\n",
    "mua/cellar/wine.py": "",
    "environments/shop.py": "import mua.trainer.rl\n",
    "mua/trainer/rl.py": "",
}
FOUND = [
    "a circle of files: mua.config.load, mua.config.tree",
    "environments.shop imports mua.trainer.rl, which environments must not",
    "mua.cellar.wine: the room mua.cellar has no floor in tools/house.py",
    "mua.utils.errors imports mua.config.load, which mua.utils must not",
    "mua/engine/load.py:3: torch.distributed._functional is private",
    "two modules load: mua/config/load.py, mua/engine/load.py",
    "two classes Plan: mua/config/load.py, mua/engine/load.py",
]


def test_the_project_is_as_it_promises() -> None:
    assert faults(sources()) == []


def test_each_fault_is_told() -> None:
    assert faults([Source(path, text) for path, text in TREE.items()]) == FOUND
    assert circles({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}) == [["a", "b", "c"]]
    assert list(private_names(Source("mua/x.py", "from torch._C import Graph\nimport os\nos._exit(1)\n"))) == [
        "mua/x.py: torch._C.Graph is private"
    ]


def test_lines_of_code_are_those_that_are_neither_blank_comment_nor_docstring() -> None:
    text = '"""It."""\n\n# Why.\nx = (\n    1,  # one\n)\n\n\ndef f():\n    """Says.\n\n    Twice."""\n    return x\n'
    assert Source("x.py", text).code == 3 + 2
