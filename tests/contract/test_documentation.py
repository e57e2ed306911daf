"""The code in docs/ runs as it stands there.

Covers docs/add-a-domain.md only; commands quoted in prose are run by the end-to-end tests and by `make demo`.
"""

from __future__ import annotations

import re
from pathlib import Path

from mua.config.schema import EnvironmentConfig
from mua.environment.manager import EnvironmentManager
from mua.environment.protocol import Transcript

PAGE = Path(__file__).parents[2] / "docs" / "add-a-domain.md"


async def test_the_domain_of_the_page_can_be_solved_and_is_short() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) < 55
    names: dict[str, object] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    domain = names["DOMAIN"]
    task = domain.tasks("test")[0]  # type: ignore[attr-defined]
    manager = EnvironmentManager(domain, EnvironmentConfig(name="counter"))  # type: ignore[arg-type]
    user = domain.scripted_user(task, 0)  # type: ignore[attr-defined]
    async with manager.lease(task, seed=0) as leased:
        assert str(task.data["goal"]) in (await user.open()).text
        assert not (await leased.evaluate(Transcript([]))).success
        assert (await leased.call("set", {"value": "many"})).error
        assert not (await leased.call("set", {"value": task.data["goal"]})).error
        assert (await leased.evaluate(Transcript([]))).reward == 1.0
    assert (await user.reply("It is done.")).stop
    await manager.close()
