"""Four agent libraries from PyPI, unmodified, each playing episodes of the help desk as its users would write it.

The policy is the domain's expert behind the scripted engine; libraries, processes, gateway, users and environment are
real. Not covered: retail and more tasks (docs/benchmarks/gateway.md), the real engine (e2e/test_gateway.py,
which has openai-agents in CI).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mua.environment.registry import get_domain
from mua.types import Outcome
from tests.agents_support import LIBRARIES, command_of, play, same_tokens, shares
from tests.rollout_fixtures import lines
from tests.unit.test_gateway_episodes import ORDER, Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TASKS = dict(enumerate(list(get_domain("help_desk").tasks("train"))[1:3]))


@pytest.mark.parametrize(
    "library",
    [
        *LIBRARIES[1:],
        *(
            pytest.param(name, marks=pytest.mark.grid)
            for name in ("openai_agents", "openai_agents over responses", "openai_agents over streamed responses")
        ),
    ],
)
def test_a_library_plays_the_desk_in_one_segment(library: str) -> None:
    name, _, how = library.partition(" ")
    variables = {"DESK_API": "responses" if how else "chat", "DESK_STREAM": "1" if "streamed" in how else ""}
    agent = {"command": command_of(name), "variables": variables}
    tasks = TASKS if name == "smolagents" else dict([*TASKS.items()][:1])
    mine = play("help_desk", tasks, agent, final="final_answer" if name == "smolagents" else None)
    for trajectory in mine:
        assert trajectory.outcome is Outcome.USER_STOP, trajectory.error
        assert trajectory.success
    appended, calls = shares(mine)
    assert calls >= 3
    assert appended / calls >= 0.95
    if name != "smolagents":  # it has instructions of its own
        for ours, theirs in zip(mine, play("help_desk", tasks, None), strict=True):
            assert same_tokens(ours, theirs)
            assert ours.turn_rewards == theirs.turn_rewards


async def test_a_code_agent_plays_in_one_segment(tmp_path: Path) -> None:
    """It is sampled with stop strings, and tells its code again as a call of ``python_interpreter``."""

    def code(text: str) -> str:
        return f"Thought: go on.\n<code>\n{text}\n</code> What stands here was never asked for."

    acts = (f"print(get_order(order='{ORDER}'))", f"cancel_order(order='{ORDER}')", "final_answer('Done.')")
    agent = {"command": command_of("smolagents_code")}
    room = {"rollout": {"max_tokens": 30_000}, "model": {"max_length": 32_768}}  # its instructions are long
    (found,) = await Stage(tmp_path, lines(*map(code, acts)), agent, **room).play()
    assert (found.outcome, found.success) == (Outcome.USER_STOP, True), found.error
    (segment,) = found.segments
    assert found.metrics["gateway/appended"] == 2
    assert len(set(segment.turn[segment.loss_mask].tolist())) == 3
