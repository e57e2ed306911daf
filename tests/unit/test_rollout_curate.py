"""Curation as pure functions: what is refused and why, which of a task is best, what is written first.

Trajectories here are made up. Playing, resuming and files are covered by test_evaluation_collect.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mua.environment.protocol import Task
from mua.types import Json, Outcome, ToolSchema, Trajectory
from workbench.curate import Candidate, balanced, best_of_each_task, record, refusal

TOOLS = {"look_up", "cancel"}
SYSTEM, USER = {"role": "system", "content": "Help."}, {"role": "user", "content": "Where is W1?"}
BYE = {"role": "assistant", "content": "It is here."}


def asked(call_id: str, answer: str, name: str = "look_up", **arguments: object) -> list[Json]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": answer},
    ]


def trajectory(*messages: Json, **changes: object) -> Trajectory:
    made = Trajectory("t1", 0, 0, [], [0.0, 1.0], 1.0, True, Outcome.USER_STOP, [SYSTEM, USER, *messages])
    for name, value in changes.items():
        setattr(made, name, value)
    return made


GOOD = [
    trajectory(*asked("a", "on its way", key="W1"), BYE),
    trajectory(*asked("a", "on its way", key="W1"), *asked("b", "on its way", key="W2"), BYE),
    trajectory(*asked("a", "pending", key="W1"), *asked("b", "cancelled", key="W1"), BYE),  # things have changed
    trajectory(*asked("a", "done", "cancel", key="W1"), outcome=Outcome.TERMINAL_TOOL, metrics={"tool_errors/x": 1.0}),
]
BAD = [
    ("not scored (user_error)", trajectory(outcome=Outcome.USER_ERROR, success=False)),
    ("not successful", trajectory(BYE, success=False)),
    ("ended by max_turns", trajectory(BYE, outcome=Outcome.MAX_TURNS)),
    ("unknown tool", trajectory(*asked("a", "error: there is no tool", "find"), BYE, metrics={"malformed": 1.0})),
    ("malformed call", trajectory(BYE, metrics={"malformed": 1.0})),
    ("call or reasoning in the text", trajectory({**BYE, "content": "<tool_call>{}</tool_call>"})),
    ("call or reasoning in the text", trajectory({**BYE, "content": "Hm.</think> Yes."})),
    ("same call, same answer", trajectory(*asked("a", "x", k=1, j=2), BYE, USER, *asked("b", "x", j=2, k=1), BYE)),
    ("the user told its instructions", trajectory(BYE, metrics={"user_flags/leaks_instruction": 1.0})),
]


@pytest.mark.parametrize("kept", GOOD)
def test_what_is_a_demonstration(kept: Trajectory) -> None:
    assert refusal(kept, TOOLS) is None


@pytest.mark.parametrize(("reason", "refused"), BAD)
def test_what_is_refused_has_its_reason(reason: str, refused: Trajectory) -> None:
    assert refusal(refused, TOOLS) == reason


def candidate(task: str = "t1", domain: str = "shop", **more: object) -> Candidate:
    data = {name: more.pop(name) for name in ("difficulty", "kind") if name in more}
    return Candidate(Task(task, domain, "train", data), trajectory(BYE, **more))


def test_the_best_of_a_task_made_no_errors_then_took_fewer_turns_then_fewer_tokens() -> None:
    errors = candidate(metrics={"tool_errors/look_up": 1.0}, turn_rewards=[1.0])
    long = candidate(turn_rewards=[0.0] * 4, sample=1)
    wordy = candidate(metrics={"completion_tokens": 90.0}, sample=2)
    best = candidate(metrics={"completion_tokens": 40.0}, sample=3)
    (ranked,) = best_of_each_task([errors, long, wordy, best], 9)
    assert ranked == [best, wordy, long, errors]
    assert best_of_each_task([errors, long, wordy, best], 2) == [[best, wordy]]


def supply(*counts: tuple[dict[str, object], int]) -> list[list[Candidate]]:
    """So many tasks with these labels, one candidate each."""
    return [[candidate(f"{i}/{j}", **labels)] for i, (labels, count) in enumerate(counts) for j in range(count)]  # type: ignore[arg-type]


def counted(chosen: Iterable[Candidate], label: int | None = None) -> dict[str, int]:
    return dict(Counter(c.task.domain if label is None else c.labels[label] for c in chosen))


def test_domains_come_by_their_shares_and_whatever_is_left_fills_up() -> None:
    tasks = supply(({"domain": "shop"}, 100), ({"domain": "gym"}, 30))
    chosen = list(balanced(tasks, {"shop": 1.0, "gym": 2.0}))
    assert counted(chosen[:30]) == {"shop": 10, "gym": 20}
    assert counted(chosen[:45]) == {"shop": 15, "gym": 30}
    assert counted(chosen) == {"shop": 100, "gym": 30}


def test_a_rare_difficulty_kind_and_ending_are_not_drowned() -> None:
    tasks = supply(
        ({"difficulty": "easy", "kind": "track"}, 300),
        ({"difficulty": "easy", "kind": "cancel"}, 40),
        ({"difficulty": "hard", "kind": "track"}, 40),
        ({"difficulty": "hard", "kind": "track", "outcome": Outcome.TERMINAL_TOOL}, 5),
    )
    chosen = list(balanced(tasks, {"shop": 1.0}))[:40]
    assert counted(chosen, 0) == {"easy": 20, "hard": 20}
    assert counted([c for c in chosen if c.labels[0] == "easy"], 1) == {"track": 10, "cancel": 10}
    assert counted([c for c in chosen if c.labels[0] == "hard"], 2) == {"user_stop": 15, "terminal_tool": 5}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(1, 4)), min_size=1, max_size=20))
def test_nothing_is_lost_or_doubled_and_every_tasks_best_comes_before_its_others(made: list) -> None:
    tasks = [
        [candidate(str(i), domain, kind=kind, sample=sample) for sample in range(count)]
        for i, (domain, kind, count) in enumerate(made)
    ]
    chosen = list(balanced(tasks, {"a": 3.0, "b": 0.5}))
    assert sorted(map(id, chosen)) == sorted(id(c) for members in tasks for c in members)
    for members in tasks:
        assert [c for c in chosen if c.task is members[0].task] == members[:1]
        assert [c for c in chosen if c.task.id == members[0].task.id] == members


def test_a_record_holds_what_the_policy_saw_and_where_it_comes_from() -> None:
    message = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_call_errors": [],
        "truncated": False,
    }
    one = candidate("t7", difficulty="hard", kind="track", sample=2)
    one.trajectory.messages = [SYSTEM, {**USER, "actions": ["restarted the phone"]}, message, *asked("a", "x")[1:]]
    schema = ToolSchema("look_up", "Finds.", {"type": "object"})
    plain = record(one, [schema], thinking=False)
    assert plain["messages"] == [
        SYSTEM, USER, {"role": "assistant", "content": ""}, {"role": "tool", "tool_call_id": "a", "content": "x"}
    ]  # fmt: skip
    assert plain["tools"] == [schema.openai()]
    assert plain["source"] == {
        "domain": "shop", "task": "t7", "sample": 2, "difficulty": "hard", "kind": "track", "outcome": "user_stop",
        "reward": 1.0,
    }  # fmt: skip
    assert record(one, [], thinking=True)["messages"][2]["reasoning_content"] == "hm"
    assert "tools" not in record(one, [], thinking=True)
