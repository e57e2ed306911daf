"""The gym of hidden functions: rules, points, answers, the refusals that close short cuts, the expert.

There is no LLM oracle, as arithmetic decides. Not covered: what all gyms share (test_gyms_base.py), and
the canned policies (tests/contract/test_canned_policies.py).
"""

from __future__ import annotations

import re

import pytest

from environments.gyms._shared import act
from environments.gyms.function import DOMAIN
from environments.gyms.function.rules import SHAPES, SIZES, at, fingerprint, operators, plain_values, shape, text, value
from mua.environment.protocol import Task
from mua.types import Json
from tests.gyms_support import SPLITS, all_tasks, followed, judged, opened, played, scripts
from tests.tables import cases_of

cases = cases_of("gym_function")

RULE = ["-", ["%", ["+", ["*", 5, "a"], "b"], 41], "d"]
REST = Task("q", "gyms/function", "test", {"rule": RULE, "test": [61, 72, 83, 94]})


def test_the_splits_have_the_sizes_they_promise_and_no_rule_twice():
    assert {split: len(DOMAIN.tasks(split)) for split in SPLITS} == SIZES
    assert len(all_tasks(DOMAIN)) >= 540
    marks = [fingerprint(task.data["rule"]) for task in all_tasks(DOMAIN)]
    assert len(set(marks)) == len(marks)
    used = {operator for task in all_tasks(DOMAIN) for operator in operators(task.data["rule"])}
    assert used == {*"+-*%", "max"}


def test_no_shape_stands_in_two_splits():
    """Nor do those of two splits differ in the names of their variables and constants alone."""
    shapes = {split: {task.data["kind"] for task in DOMAIN.tasks(split)} for split in SPLITS}
    assert {split: set().union(*levels.values()) for split, levels in SHAPES.items()} == shapes
    name = re.compile(r"\b[a-z]\b")
    forms = [{name.sub(lambda one: "v" if one[0] in "xyzw" else "c", s) for s in shapes[split]} for split in SPLITS]
    assert sum(map(len, forms)) == len(set.union(*forms))


def test_test_numbers_are_out_of_reach_and_do_not_show_the_value():
    for task in all_tasks(DOMAIN):
        rule, numbers = task.data["rule"], task.data["test"]
        assert all(60 <= n <= 99 for n in numbers)
        assert at(rule, numbers) not in plain_values(numbers)
        assert "%" in operators(rule)


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
