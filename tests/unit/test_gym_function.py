"""The gym of hidden functions: rules, points, answers, the refusals that close short cuts, the expert.

There is no LLM oracle, as arithmetic decides. Not covered: what all gyms share (test_gyms_base.py), and
the canned policies (tests/contract/test_canned_policies.py).
"""

from __future__ import annotations

import pytest

from environments.gyms._shared import act
from environments.gyms.function import DOMAIN
from environments.gyms.function.rules import at, shape, text, value
from mua.environment.protocol import Task
from mua.types import Json
from tests.gyms_support import followed, judged, opened, played, scripts
from tests.tables import cases_of

cases = cases_of("gym_function")

RULE = ["-", ["%", ["+", ["*", 5, "a"], "b"], 41], "d"]
REST = Task("q", "gyms/function", "test", {"rule": RULE, "test": [61, 72, 83, 94]})


def test_rules_are_evaluated_as_trees():
    assert value(["-", ["max", "a", 2], ["%", "b", 4]], {"a": 3, "b": 6}) == 1
    assert text(["-", ["%", ["max", "a", "b"], 2], 1]) == "((max(a, b) % 2) - 1)"
    assert shape("k*max(x, y) % m") == ["%", ["*", "k", ["max", "x", "y"]], "m"]
    with pytest.raises(AssertionError, match="unknown operator"):
        at(["exec", 1, 1], [0, 0, 0, 0])


@scripts("function")
async def test_conversations(script: Json):
    await followed(opened(DOMAIN, REST), script)


@cases
async def test_short_cuts_and_nonsense_are_refused_for_free(choice: str, content: str):
    environment = opened(DOMAIN, REST)
    (result,) = await played(environment, act(choice, content))  # type: ignore[arg-type]
    assert (result.error, result.reward, result.terminal) == (True, 0.0, False)
    assert (await judged(environment)).details["used"] == {}


@pytest.mark.parametrize(("content", "right"), [("-86", True), ("-86.0", True), ("-86.1", False), ("86", False)])
async def test_answers_are_exact(content: str, right: bool):
    (result,) = await played(opened(DOMAIN, REST), act("answer", f"It is {content}."))
    assert (result.reward, result.terminal) == (float(right), right)


async def test_finish_does_not_tell_the_value():
    for task in DOMAIN.tasks("test"):
        (result,) = await played(opened(DOMAIN, task), act("finish"))
        assert str(at(task.data["rule"], task.data["test"])) not in result.text
