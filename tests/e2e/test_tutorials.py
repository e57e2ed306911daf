"""The tutorials: their files are written, their commands run or are parsed, as docs/tutorials/index.md says.

All pages share one folder, which looks like a checkout. Not covered: that a policy learns from them, what is marked
``parsed`` or ``skipped``, and the domain of the second page, which tests/unit/test_environment_commands.py proves.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import page_commands
import pytest
from e2e_support import ROOT, metrics_of, mua

from environments.help_desk import DOMAIN
from mua.users.factory import Placement
from mua.utils.hooks import load_hook
from tests.agents_support import play
from tests.made_once import made_once

PAGES = {page.stem: page for page in sorted((ROOT / "docs/tutorials").glob("own-*.md"))}
FILE = re.compile(r"`([\w./-]+\.\w+)`[^`\n]*:\n\n```\w+\n(.*?)```", re.DOTALL)


class Line(NamedTuple):
    command: str
    remark: str
    """What CI makes of it: nothing (it runs), changes, ``parsed`` or ``skipped``."""


def lines(page: str) -> list[Line]:
    blocks = re.findall(r"```console\n(.*?)```", PAGES[page].read_text(encoding="utf-8"), re.DOTALL)
    found = [line[2:].partition("# CI: ") for block in blocks for line in block.splitlines()]
    return [Line(command.strip(), remark.strip()) for command, _, remark in found]


LINES = [pytest.param(line, id=f"{page}: {line.command[:60]}") for page in PAGES for line in lines(page)]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of all pages, beside the configurations and the policy of the repository."""

    def make(folder: Path) -> None:
        for name in ("configs", "tools", "slurm"):
            (folder / name).symlink_to(ROOT / name)
        for page in PAGES.values():
            for name, text in FILE.findall(page.read_text(encoding="utf-8")):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8")

    return made_once(tmp_path_factory, "tutorials", make)


def test_every_page_of_the_index_is_there() -> None:
    index = (ROOT / "docs/tutorials/index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\((own-\w+)\.md\)", index)) == set(PAGES)


@pytest.mark.parametrize("line", LINES)
def test_a_command_is_one_of_the_program_and_its_configuration_loads(
    line: Line, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout)
    if line.remark == "skipped" or line.command.startswith("mkdir "):
        assert not page_commands.PROGRAM.match(line.command)
    else:
        page_commands.check(line.command)


def test_the_user_of_the_page_talks(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(checkout)
    task = DOMAIN.tasks("train")[0]
    user = load_hook("user.kind", "my_users:InAHurry")(
        Placement(DOMAIN, task, 1, {"sigh": "I have a train to catch."}, None)
    )

    async def talk() -> None:
        assert (await user.open()).text.endswith("I have a train to catch.")
        assert (await user.reply("What is your name?")).text.endswith("I have a train to catch.")
        await user.close()

    asyncio.run(talk())


@pytest.mark.slow
def test_the_agent_of_the_page_serves_customers(checkout: Path) -> None:
    """The domain's expert speaks in the policy's place; gateway, process, user and environment are real."""
    tasks = dict(enumerate(list(DOMAIN.tasks("train"))[1:3]))
    played = play("help_desk", tasks, {"command": [sys.executable, str(checkout / "my_agent.py")]})
    assert [trajectory.error for trajectory in played if not trajectory.success] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", list(PAGES))
def test_what_ci_runs_of_a_page(page: str, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for command, remark in lines(page):
        if remark in ("parsed", "skipped"):
            continue
        if command.startswith("mkdir "):
            subprocess.run(command.split(), cwd=checkout, check=True)
        else:
            mua(*command.split()[1:], *remark.split(), cwd=checkout)
    if page == "own-data":
        (step,) = metrics_of(checkout / "runs/my-data")
        assert step["step"] == 0
    if page == "own-domain":
        assert (checkout / "my-theatre/theatre/__init__.py").exists()
