"""What every registered domain must keep: tasks, tools, environments and scripted users, through the protocol alone.

Arguments of tools are drawn from their schemas, with strings and numbers taken from the task, so that calls reach
rows that exist. Does not cover whether a task can be solved, or what a domain's policy says: that is the domain's own
test.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator

from mua.config.schema import EnvironmentConfig
from mua.environment.manager import EnvironmentManager
from mua.environment.protocol import Domain, Environment, Evaluation, Split, Task, ToolResult, ToolSchema, Transcript
from mua.environment.registry import domain_names, get_domain
from mua.users.protocol import STOP_SIGNAL, User

SPLITS: tuple[Split, ...] = get_args(Split)
SAMPLE = 8
"""Tasks of each split that tools are tried on."""
IDLE = (
    Transcript([]),
    Transcript([{"role": "user", "content": "Hi"}]),
    Transcript([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I am sorry, I cannot help."}]),
)


@pytest.fixture(params=[name for name in domain_names() if not getattr(get_domain(name), "needs_data", False)])
def domain(request: pytest.FixtureRequest) -> Domain:
    return get_domain(request.param)


def all_tasks(domain: Domain) -> list[Task]:
    return [task for split in SPLITS for task in domain.tasks(split)]


def some_tasks(domain: Domain) -> list[Task]:
    return [task for split in SPLITS for task in domain.tasks(split)[:SAMPLE]]


def opened(domain: Domain, task: Task, seed: int = 0) -> Environment:
    environment = domain.environment()
    environment.reset(task, seed)
    return environment


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def draw(schema: dict, pool: list[Any], rng: random.Random) -> Any:
    """A value that fits the common part of JSON Schema, from values of the task."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema.get("type", "string")
    if kind == "object":
        required = set(schema.get("required", ()))
        items = schema.get("properties", {}).items()
        return {name: draw(inner, pool, rng) for name, inner in items if name in required or rng.random() < 0.5}
    if kind == "array":
        count = rng.randint(schema.get("minItems", 1), schema.get("maxItems", 2))
        return [draw(schema.get("items", {}), pool, rng) for _ in range(count)]
    if kind == "boolean":
        return rng.random() < 0.5
    accepted = {"integer": int, "number": (int, float)}.get(kind, str)
    return rng.choice([v for v in pool if isinstance(v, accepted) and not isinstance(v, bool)] or [0])


def calls_for(task: Task, tools: Sequence[ToolSchema], seed: int, count: int = 60) -> list[tuple[str, dict]]:
    rng = random.Random(seed)
    pool = list(leaves(json.loads(json.dumps(task.data))))
    return [(tool.name, draw(tool.parameters, pool, rng)) for tool in (rng.choice(tools) for _ in range(count))]


def run(environment: Environment, calls: list[tuple[str, dict]]) -> tuple[list[ToolResult], Evaluation]:
    results = [environment.call(name, arguments) for name, arguments in calls]
    return results, environment.evaluate(IDLE[-1])


def test_some_domain_is_registered():
    assert domain_names()


def test_splits_are_disjoint_ids_unique_and_order_fixed(domain: Domain):
    tasks = all_tasks(domain)
    assert all(domain.tasks(split) for split in SPLITS)
    assert len({task.id for task in tasks}) == len(tasks)
    assert all(task.split == split and task.domain == domain.name for split in SPLITS for task in domain.tasks(split))
    assert [task.id for task in all_tasks(domain)] == [task.id for task in tasks]


def test_no_task_stands_in_two_splits_under_two_names(domain: Domain):
    contents = {split: {json.dumps(task.data, sort_keys=True) for task in domain.tasks(split)} for split in SPLITS}
    assert all(not contents[one] & contents[other] for one, other in itertools.combinations(SPLITS, 2))


def test_prompts_and_personas_are_texts(domain: Domain):
    full, short = domain.system_prompt("full"), domain.system_prompt("short")
    assert short.strip()
    assert len(full) >= len(short)
    assert all(domain.persona(task).strip() for task in some_tasks(domain))


def test_tools_are_valid_json_schema_objects(domain: Domain):
    for task in some_tasks(domain):
        environment = opened(domain, task)
        tools = environment.tools()
        environment.close()
        assert tools
        assert len({tool.name for tool in tools}) == len(tools)
        for tool in tools:
            assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", tool.name)
            assert tool.description.strip()
            assert tool.parameters["type"] == "object"
            Draft202012Validator.check_schema(tool.parameters)
            assert json.loads(json.dumps(tool.openai()))["function"]["parameters"] == tool.parameters


def test_an_unknown_tool_is_an_error_result(domain: Domain):
    environment = opened(domain, domain.tasks("train")[0])
    for arguments in ({}, {"x": 1}):
        result = environment.call("no_such_tool_here", arguments)
        assert isinstance(result, ToolResult)
        assert result.error
        assert result.text
    environment.close()


def bad_arguments(tool: ToolSchema, good: dict) -> Iterator[Any]:
    yield from ([], "text", None, 3)
    yield {name: value for name, value in good.items() if name not in tool.parameters.get("required", ())[:1]}
    for name in good:
        yield good | {name: {"unexpected": [None]}}
        yield good | {name: [[]]}
        yield good | {name: None}
    if tool.parameters.get("additionalProperties") is False:
        yield good | {"no_such_argument_here": 1}


def test_bad_arguments_are_error_results_that_change_nothing(domain: Domain):
    tried = 0
    for task in some_tasks(domain):
        environment = opened(domain, task)
        before = environment.evaluate(IDLE[0])
        for tool in environment.tools():
            good = draw(tool.parameters, list(leaves(task.data)), random.Random(0))
            for arguments in bad_arguments(tool, good):
                if Draft202012Validator(tool.parameters).is_valid(arguments):
                    continue
                result = environment.call(tool.name, arguments)
                assert result.error, f"{tool.name}({arguments!r}) of {task.id} gave {result.text!r}"
                assert not result.terminal
                tried += 1
        assert environment.evaluate(IDLE[0]) == before
        environment.close()
    assert tried > 0


def test_doing_nothing_never_pays(domain: Domain):
    """On every task of every split; this is also an evaluation before any call."""
    for task in all_tasks(domain):
        environment = opened(domain, task)
        for transcript in IDLE:
            verdict = environment.evaluate(transcript)
            assert isinstance(verdict, Evaluation)
            assert not verdict.success, task.id
            assert verdict.reward <= 0, task.id
        environment.close()


def test_evaluating_changes_nothing(domain: Domain):
    for task in some_tasks(domain):
        environment = opened(domain, task)
        _, verdict = run(environment, calls_for(task, environment.tools(), 1))
        assert environment.evaluate(IDLE[-1]) == verdict
        json.dumps(verdict.details)
        environment.close()


def test_the_same_task_seed_and_calls_give_the_same_episode(domain: Domain):
    succeeded = 0
    for task, seed in itertools.product(some_tasks(domain), (0, 7)):
        first, second = opened(domain, task, seed), opened(domain, task, seed)
        calls = calls_for(task, first.tools(), seed)
        outcome = run(first, calls)
        assert run(second, calls) == outcome
        first.close()
        second.close()
        succeeded += sum(not result.error for result in outcome[0])
    assert succeeded > 0


def test_environments_alive_together_share_no_state(domain: Domain):
    for task in some_tasks(domain):
        alone, one, other = (opened(domain, task) for _ in range(3))
        calls, disturbance = (calls_for(task, alone.tools(), seed) for seed in (1, 2))
        expected = run(alone, calls)
        results = []
        for (name, arguments), (other_name, other_arguments) in zip(calls, disturbance, strict=True):
            other.call(other_name, other_arguments)
            results.append(one.call(name, arguments))
        assert (results, one.evaluate(IDLE[-1])) == expected
        for environment in (alone, one, other):
            environment.close()


def test_a_reset_gives_fresh_state(domain: Domain):
    first, second = domain.tasks("train")[:2]
    fresh, used = opened(domain, second), opened(domain, first)
    run(used, calls_for(first, used.tools(), 1))
    used.reset(second, 0)
    calls = calls_for(second, fresh.tools(), 2)
    assert run(used, calls) == run(fresh, calls)
    fresh.close()
    used.close()


def test_an_environment_can_be_closed_before_it_was_reset(domain: Domain):
    domain.environment().close()


async def test_episodes_in_many_threads_equal_those_in_one(domain: Domain):
    """Through the manager, whose calls land in whatever thread is free."""
    manager = EnvironmentManager(domain, EnvironmentConfig(name=domain.name))

    async def episode(task: Task) -> tuple[list[ToolResult], Evaluation]:
        async with manager.lease(task, seed=0) as environment:
            calls = calls_for(task, environment.tools(), 3, count=12)
            return [await environment.call(*call) for call in calls], await environment.evaluate(IDLE[-1])

    tasks = some_tasks(domain)
    outcomes = await asyncio.gather(*(episode(task) for task in tasks))
    for task, outcome in zip(tasks, outcomes, strict=True):
        environment = opened(domain, task)
        assert run(environment, calls_for(task, environment.tools(), 3, count=12)) == outcome
        environment.close()
    assert manager.leases == manager.leaked_threads == 0
    await manager.close()


AGENT = ("How can I help you?", "What is your name?", "Which one do you mean?", "I did that for you.", "", "Sorry, no.")


async def conversation(domain: Domain, task: Task, seed: int) -> list[tuple[str, bool]]:
    user = domain.scripted_user(task, seed)
    assert isinstance(user, User)
    replies = [await user.open()]
    assert not replies[0].stop
    for text in AGENT:
        if replies[-1].stop:
            break
        replies.append(await user.reply(text))
    await user.close()
    return [(reply.text, reply.stop) for reply in replies]


async def test_the_scripted_user_opens_answers_and_marks_its_stop(domain: Domain):
    for task in some_tasks(domain):
        said = await conversation(domain, task, 0)
        assert len(said) > 1
        assert all(text.strip() for text, _ in said)
        assert all(stop == (STOP_SIGNAL in text) for text, stop in said)


async def test_the_scripted_user_repeats_itself_with_a_seed_and_varies_without(domain: Domain):
    task = domain.tasks("train")[0]
    assert await conversation(domain, task, 5) == await conversation(domain, task, 5)
    openings = {(await conversation(domain, task, seed))[0] for seed in range(20)}
    assert len(openings) > 1
