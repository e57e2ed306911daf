"""The gym of hidden functions: rules, points, answers, the refusals that close short cuts, the expert.

There is no LLM oracle, as arithmetic decides. Not covered: what all gyms share (test_gyms_base.py).
"""

from __future__ import annotations

import pytest

from environments.gyms._shared import act
from environments.gyms.function import DOMAIN, shown
from environments.gyms.function.rules import SIZES, at, fingerprint, operators, text, value, variables
from mua.environment.protocol import Task
from tests.gyms_support import (
    SPLITS,
    all_tasks,
    expert_wins,
    gold_wins,
    idling_loses,
    judged,
    opened,
    played,
    repeats_itself,
)

QUOTIENT = Task("q", "gyms/function", "test", {"rule": ["/", ["+", "a", "b"], ["-", "c", "d"]], "test": [1, 2, 6, 4]})


def test_the_splits_have_the_sizes_they_promise_and_no_rule_twice():
    assert {split: len(DOMAIN.tasks(split)) for split in SPLITS} == SIZES
    assert len(all_tasks(DOMAIN)) >= 540
    marks = [fingerprint(task.data["rule"]) for task in all_tasks(DOMAIN)]
    assert None not in marks
    assert len(set(marks)) == len(marks)
    used = {operator for task in all_tasks(DOMAIN) for operator in operators(task.data["rule"])}
    assert used == set("+-*/^")


def test_values_at_the_test_numbers_are_defined_and_bounded():
    for task in all_tasks(DOMAIN):
        result = at(task.data["rule"], task.data["test"])
        assert 0.05 <= abs(result) <= 1_000_000
        if task.data["difficulty"] == "easy":
            assert len(variables(task.data["rule"])) <= 2
            assert result == int(result)


def test_rules_are_evaluated_as_trees():
    assert value(["-", ["**", "a", 2], ["/", "b", 4]], {"a": 3, "b": 2}) == 8.5
    assert text(["-", ["**", "a", 2], 1]) == "((a ** 2) - 1)"
    with pytest.raises(ZeroDivisionError):
        at(["/", 1, "a"], [0, 0, 0, 0])
    with pytest.raises(AssertionError, match="unknown operator"):
        at(["exec", 1, 1], [0, 0, 0, 0])


@pytest.mark.parametrize(("number", "said"), [(7.0, "7"), (-0.00001, "0"), (1 / 3, "0.3333"), (-2.5, "-2.5")])
def test_values_are_shown_with_four_decimals(number: float, said: str):
    assert shown(number) == said


async def test_points_are_tried_and_the_test_numbers_shown():
    environment = opened(DOMAIN, QUOTIENT)
    moves = [act("search", "test"), act("action", "1, 2, 9 and 2"), act("action", "a=1 b=2 c=3 d=3")]
    results = await played(environment, moves)
    assert [r.text for r in results] == ["1 2 6 4", "0.4286", "There is no value at this point."]
    assert not any(r.reward or r.error or r.terminal for r in results)


@pytest.mark.parametrize(
    ("choice", "content"),
    [
        ("action", "1 2 6 4"),
        ("action", "1.0000001 2 6 4"),
        ("action", "1.4 1.6 6.4 3.6"),
        ("action", "1 2 3"),
        ("action", "1 2 3 4 5"),
        ("action", "1e9 1 1 1"),
        ("action", "what?"),
        ("search", "rule"),
        ("answer", "1 or 2"),
        ("answer", "one"),
    ],
)
async def test_short_cuts_and_nonsense_are_refused_for_free(choice: str, content: str):
    environment = opened(DOMAIN, QUOTIENT)
    (result,) = await played(environment, [act(choice, content)])  # type: ignore[arg-type]
    assert (result.error, result.reward, result.terminal) == (True, 0.0, False)
    assert (await judged(environment)).details["used"] == {}


async def test_one_changed_number_is_enough_to_be_another_point():
    (result,) = await played(opened(DOMAIN, QUOTIENT), [act("action", "1 2 6 4.5")])
    assert not result.error


@pytest.mark.parametrize(
    ("content", "right"), [("1.5", True), ("1.5000001", True), ("1.50001", False), ("-1.5", False)]
)
async def test_answers_are_right_to_a_millionth(content: str, right: bool):
    (result,) = await played(opened(DOMAIN, QUOTIENT), [act("answer", f"It is {content}.")])
    assert (result.reward, result.terminal) == (float(right), right)


async def test_after_five_wrong_answers_it_is_over():
    results = await played(opened(DOMAIN, QUOTIENT), [act("answer", str(i)) for i in range(2, 8)])
    assert [r.terminal for r in results] == [False] * 4 + [True, False]
    assert results[-1].error


async def test_finish_does_not_tell_the_value():
    for task in DOMAIN.tasks("test"):
        (result,) = await played(opened(DOMAIN, task), [act("finish")])
        assert shown(at(task.data["rule"], task.data["test"])) not in result.text


async def test_gold_earns_one_on_every_task():
    await gold_wins(DOMAIN, lambda task: 1.0)


async def test_idling_earns_nothing_on_any_task():
    await idling_loses(DOMAIN)


async def test_the_expert_finds_every_test_rule_by_probing():
    lengths = await expert_wins(DOMAIN)
    assert max(lengths) <= 9  # search, four changed numbers, three probes, an answer


async def test_episodes_repeat_themselves():
    await repeats_itself(DOMAIN)
