"""Pages, messages and docstrings use the field's words: what tests/data/words.yaml lists does not occur.

Not covered: environments/, whose customers and desks speak as people do; identifiers and comments.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORDS = yaml.safe_load((ROOT / "tests/data/words.yaml").read_text(encoding="utf-8"))
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
CODE = ("mua", "megatron_bridge", "workbench", "tools")
DATA = {"mua/config/messages.py", "tools/nothing.py"}  # what others type, and a made-up vocabulary
GENERATED = {"configuration.md", "commands.md"}  # from docstrings and tables of the code


def found(text: str) -> list[str]:
    """The words of the list in a text, each with its surroundings and what to write."""
    text = re.sub(r"\s+", " ", text)
    return [
        f"…{text[max(0, match.start() - 30) : match.end() + 20]}…: write {entry['write']}"
        for entry in WORDS
        for match in re.finditer(entry["word"], text, re.IGNORECASE)
        if not re.search(entry.get("not", r"\Z\A"), text[max(0, match.start() - 20) : match.end() + 20], re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_uses_none_of_them(page: Path) -> None:
    if page.name not in GENERATED:
        assert found(page.read_text(encoding="utf-8")) == []


def texts(path: Path) -> Iterator[str]:
    """Docstrings and messages of a module; what is put into one stands as an ellipsis."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("room", CODE)
def test_messages_and_docstrings_use_none_of_them(room: str) -> None:
    paths = [path for path in sorted(ROOT.glob(f"{room}/**/*.py")) if str(path.relative_to(ROOT)) not in DATA]
    wrong = {str(path.relative_to(ROOT)): found(" . ".join(texts(path))) for path in paths}
    assert {path: words for path, words in wrong.items() if words} == {}


def test_the_list_finds_what_it_is_for() -> None:
    for text in (
        "what mends it",
        "Retry-After is heeded",
        "KV cache a GPU",
        "131,072 bytes a token",
        "5 tokens a second",
    ):
        assert found(text), text
    for text in ("which groups a step trains on", "tokens per second", "a judge scores", "root rank"):
        assert not found(text), text
