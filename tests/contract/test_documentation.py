"""The code in docs/ runs as it stands there.

Covers docs/environments.md only; commands quoted in prose are run by the end-to-end tests and by `make demo`. That new
domains keep the whole contract is tested by tests/unit/test_environment_commands.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mua.config.schema import EnvironmentConfig
from mua.environment.domain import Domain
from mua.environment.manager import EnvironmentManager
from mua.environment.protocol import Task, Transcript
from workbench.demonstrate import replay_gold
from workbench.scaffold import source

DOCS = Path(__file__).parents[2] / "docs"
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


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
