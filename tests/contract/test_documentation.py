"""The pages hold together: links and anchors, commands, messages, README; code in docs/environments.md runs.

The site is built by `make lint` (``mkdocs build --strict``), the tutorials are run by tests/e2e/test_tutorials.py. That
new domains keep the whole contract is tested by tests/unit/test_environment_commands.py. Not covered: whether the prose
is true.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import page_commands
import pytest

from environments.kit.demonstrate import replay_gold
from mua.config.schema import EnvironmentConfig
from mua.environment.domain import Domain
from mua.environment.manager import EnvironmentManager
from mua.environment.protocol import Task, Transcript
from tools.commands_page import page as commands_page
from tools.site_hooks import on_page_markdown
from workbench.scaffold import source

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md"))]
PAGE = DOCS / "environments.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def domain_of(block: str) -> Domain:
    names: dict[str, object] = {"__name__": "page"}
    exec(compile(block, str(PAGE), "exec"), names)
    return names["DOMAIN"]  # type: ignore[return-value]


def test_the_page_shows_what_mua_env_new_writes() -> None:
    assert [source("theatre", gym=False), source("gyms/guess", gym=True)] == BLOCKS
    assert all(len([line for line in block.splitlines() if line.strip()]) < 50 for block in BLOCKS)


async def test_the_domain_of_the_page_can_be_solved() -> None:
    domain = domain_of(BLOCKS[0])
    task = domain.tasks("test")[0]
    manager = EnvironmentManager(domain, EnvironmentConfig(name="theatre"))
    user = domain.scripted_user(task, 0)
    async with manager.instance(task, seed=0) as instance:
        assert task.data["seat"] in (await user.open()).text
        assert "Ada" in (await user.reply("What is your name?")).text
        assert not (await instance.evaluate(Transcript([]))).success
        assert (await instance.call("book", {"seat": "Z1", "name": "Ada"})).error
        assert not (await instance.call("book", {"seat": task.data["seat"], "name": "Ada"})).error
        assert (await instance.call("book", {"seat": task.data["seat"], "name": "Bob"})).error
        text = f"Seat {task.data['seat']} is booked."
        assert (await instance.evaluate(Transcript([{"role": "assistant", "content": text}]))).reward == 1.0
    assert (await user.reply(text)).stop
    await manager.close()


async def test_the_gym_of_the_page_can_be_solved() -> None:
    domain = domain_of(BLOCKS[1])
    task: Task = next(iter(type(domain).generate("test")))  # type: ignore[attr-defined]
    assert (await replay_gold(domain, task)).reward == 1.0


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that a forge makes of a page's headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        number = next(n for n in range(1000) if (f"{anchor}-{n}" if n else anchor) not in found)
        found.add(f"{anchor}-{number}" if number else anchor)
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)", prose(page))
    targets = [((page.parent / link).resolve() if link else page, anchor) for link, anchor in links]
    assert [str(target) for target, _ in targets if not target.exists()] == []
    wanted = [(target, anchor) for target, anchor in targets if anchor and target.suffix == ".md"]
    assert [(target.name, anchor) for target, anchor in wanted if anchor not in anchors(target)] == []


def test_the_site_shows_files_of_the_repository_by_name_and_refuses_those_that_are_not_there(caplog) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="tutorials/page.md"))
    text = "[a](../users.md#x) [b](../../mua/utils/errors.py) [c](../../mua/none.py) `x`\n```\n[d](../../no.py)\n```\n"
    with caplog.at_level(logging.WARNING):
        shown = on_page_markdown(text, page, {"docs_dir": str(DOCS), "repo_url": None})
    assert shown == "[a](../users.md#x) b c `x`\n```\n[d](../../no.py)\n```\n"
    assert [record.getMessage() for record in caplog.records if "none.py" in record.getMessage()]
    assert len(caplog.records) == 1
    linked = on_page_markdown(
        "[b](../../mua/utils/errors.py)", page, {"docs_dir": str(DOCS), "repo_url": "https://x/y/"}
    )
    assert linked == "[b](https://x/y/blob/main/mua/utils/errors.py)"


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    named = set(re.findall(r"[\w/.-]+\.md", config))
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} == named


def test_readme_is_short_and_begins_with_two_commands() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 150
    first = lines.index("```")
    assert [line.split("#")[0].strip() for line in lines[first + 1 : first + 3]] == ["make demo", "make test"]
    assert "docs/images/reward.png" in "\n".join(lines[: lines.index("## What `make demo` does")])


def test_the_page_of_commands_is_current() -> None:
    assert (DOCS / "commands.md").read_text(encoding="utf-8") == commands_page(), "run `make docs` and commit the page"


LINES = [
    pytest.param(line, id=f"{page.stem}: {line[:60]}")
    for page in PAGES
    if page.name != "first-gpu-day.md" and page.parent.name != "tutorials"  # tested by files of their own
    for line in page_commands.commands(page)
    if page_commands.PROGRAM.match(line)
]


@pytest.mark.parametrize("line", LINES)
def test_commands_of_the_pages_are_taken_by_the_program(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration of the repository is loaded; CONFIG and RUN stand for the reader's own."""
    monkeypatch.chdir(ROOT)
    if re.search(r"\bconfigs/", line):
        page_commands.check(line)
    else:
        page_commands.parsed(line)


@cache
def messages() -> str:
    """Every text of the program's code, placeholders as ``…``, one per line."""
    found = []
    for path in [*ROOT.glob("mua/**/*.py"), *ROOT.glob("megatron_bridge/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def symptoms() -> Iterator[str]:
    """What troubleshooting.md quotes in the first column of its tables."""
    yield from re.findall(r"^\| `(.+?)` \|", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_troubleshooting_quotes_messages_that_the_program_has() -> None:
    quoted = list(symptoms())
    assert len(quoted) > 35
    parts = [(symptom, part.strip(" ;:,")) for symptom in quoted for part in re.split(r"…|\$\{…", symptom)]
    unknown = {symptom for symptom, part in parts if len(part) > 5 and part not in messages()}
    assert unknown == set()


def test_every_symptom_has_a_cause_and_something_to_do() -> None:
    tables = re.findall(r"^\| (?!symptom|---)(.+) \|$", prose(DOCS / "troubleshooting.md"), re.MULTILINE)
    rows = [re.split(r" \| ", row) for row in tables]
    assert [row for row in rows if len(row) != 3 or not all(cell.strip() for cell in row)] == []
