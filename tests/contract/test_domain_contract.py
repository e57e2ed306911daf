"""What every registered domain must keep: tasks, tools, environments and scripted users, through the protocol alone.

Arguments of tools are drawn from their schemas, with strings and numbers taken from the task, so that calls reach
rows that exist. There are many domains with thousands of tasks, so that all but the cheapest checks look at a seeded
sample: what a domain promises of all its tasks (gold earns everything, doing nothing nothing) is tested by its own file
too, as is that its policy can be followed and its expert succeeds.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import json
import pickle
import random
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, get_args

import jsonschema_rs
import pytest

from environments.kit.database import DatabaseEnvironment
from environments.kit.demonstrate import replay_gold
from environments.kit.overlay import digest_of
from mua.config.schema import EnvironmentConfig
from mua.environment import processes
from mua.environment.domain import Domain
from mua.environment.manager import EnvironmentInstance, EnvironmentManager, isolation_of
from mua.environment.protocol import (
    Environment,
    Evaluation,
    Move,
    Split,
    Task,
    ToolResult,
    Transcript,
    UserControlled,
    UserMove,
)
from mua.environment.registry import domain_names, get_domain
from mua.environment.user import STOP_SIGNAL, User
from mua.environment.worker import Worker, configured_domain
from mua.types import ToolSchema

SPLITS: tuple[Split, ...] = get_args(Split)
SAMPLE = 8
"""Tasks of each split that costly checks look at."""
FEW = 3
"""The same, for the costliest."""
INTERLEAVED = 50
POOL = 400
"""Values of a task that arguments are drawn from, at most."""
IDLE = (
    Transcript([]),
    Transcript([{"role": "user", "content": "Hi"}]),
    Transcript([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I am sorry, I cannot help."}]),
)
Step: TypeAlias = tuple[bool, str, Any]
"""Whether the user acts, the tool, the arguments."""
Episode: TypeAlias = tuple[list[ToolResult], Evaluation]


@pytest.fixture(params=domain_names())
def domain(request: pytest.FixtureRequest) -> Domain:
    domain = get_domain(request.param)
    if getattr(domain, "needs_data", False) and not any(domain.tasks(split) for split in SPLITS):
        pytest.skip(f"{domain.name} has tasks only where environment.data names a folder or package of them")
    return domain


def all_tasks(domain: Domain) -> list[Task]:
    return [task for split in SPLITS for task in domain.tasks(split)]


def some_tasks(domain: Domain, count: int = SAMPLE) -> list[Task]:
    """The same ``count`` of each split every time."""
    found = []
    for split in SPLITS:
        tasks = domain.tasks(split)
        found += [
            tasks[index] for index in sorted(random.Random(split).sample(range(len(tasks)), min(count, len(tasks))))
        ]
    return found


def opened(domain: Domain, task: Task, seed: int = 0) -> Environment:
    environment = domain.environment()
    environment.reset(task, seed)
    return environment


async def value(given: Any) -> Any:
    """What a coroutine method gives in the end, or a plain one at once."""
    return await given if inspect.isawaitable(given) else given


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


@lru_cache(maxsize=64)
def pool_of(text: str) -> list[Any]:
    """A bounded choice of the values in a task's data, given as JSON."""
    found = list(itertools.islice(leaves(json.loads(text)), 50 * POOL))
    return found if len(found) <= POOL else random.Random(0).sample(found, POOL)


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


def random_steps(task: Task, environment: Environment | EnvironmentInstance, seed: int, count: int = 24) -> list[Step]:
    rng, pool = random.Random(seed), pool_of(json.dumps(task.data))
    tools: list[tuple[bool, ToolSchema]] = [(False, tool) for tool in environment.tools()]
    if isinstance(environment, UserControlled):
        tools += [(True, tool) for tool in environment.user_tools()]
    return [(by_user, tool.name, draw(tool.parameters, pool, rng)) for by_user, tool in rng.choices(tools, k=count)]


def gold_steps(domain: Domain, task: Task) -> tuple[list[Step], Transcript]:
    """The calls among the gold moves, and the conversation of all of them in order, as an episode would write it."""
    moves = domain.gold(task)
    steps = [(isinstance(move, UserMove), *move) for move in moves if not isinstance(move, str)]
    return steps, Transcript([_written(move) for move in moves])


def _written(move: Move | UserMove) -> dict[str, Any]:
    if isinstance(move, str):
        return {"role": "assistant", "content": move}
    if isinstance(move, UserMove):
        return {"role": "user", "content": "", "actions": [{"name": move.name, "arguments": move.arguments}]}
    function = {"name": move[0], "arguments": json.dumps(move[1])}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


async def run(environment: Environment, steps: Sequence[Step], said: Transcript = IDLE[-1]) -> Episode:
    results = []
    for by_user, name, arguments in steps:
        call = environment.user_call if by_user else environment.call  # type: ignore[attr-defined]
        results.append(await value(call(name, arguments)))
    return results, await value(environment.evaluate(said))


async def alone(domain: Domain, task: Task, steps: Sequence[Step], said: Transcript = IDLE[-1]) -> Episode:
    environment = opened(domain, task)
    try:
        return await run(environment, steps, said)
    finally:
        environment.close()


def test_splits_are_disjoint_ids_unique_and_order_fixed(domain: Domain):
    tasks = all_tasks(domain)
    held_out = getattr(domain, "held_out", False)
    assert all(domain.tasks(split) for split in SPLITS if not (held_out and split == "train"))
    assert len({task.id for task in tasks}) == len(tasks)
    assert all(task.split == split and task.domain == domain.name for split in SPLITS for task in domain.tasks(split))
    assert [task.id for task in all_tasks(domain)] == [task.id for task in tasks]


def test_no_task_stands_in_two_splits_under_two_names(domain: Domain):
    contents = {split: {json.dumps(task.data, sort_keys=True) for task in domain.tasks(split)} for split in SPLITS}
    assert all(not contents[one] & contents[other] for one, other in itertools.combinations(SPLITS, 2))


def test_tasks_are_json_and_name_their_kind_and_difficulty(domain: Domain):
    for task in some_tasks(domain):
        assert json.loads(json.dumps(task.data)) == task.data, f"{task.id} would change on the way to a worker process"
        assert task.data.get("difficulty", "easy") in ("easy", "medium", "hard")


def test_tools_are_valid_json_schema_objects(domain: Domain):
    seen: list[dict] = []
    for task in some_tasks(domain):
        environment = opened(domain, task)
        agents = environment.tools()
        users = environment.user_tools() if isinstance(environment, UserControlled) else ()
        environment.close()
        assert agents
        tools = [*agents, *users]
        assert len({tool.name for tool in tools}) == len(tools)
        for tool in tools:
            assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", tool.name)
            assert tool.description.strip()
            assert tool.parameters["type"] == "object"
            if tool.parameters not in seen:
                seen.append(tool.parameters)
                jsonschema_rs.meta.validate(tool.parameters)
            assert json.loads(json.dumps(tool.openai()))["function"]["parameters"] == tool.parameters


async def test_an_unknown_tool_is_an_error_result(domain: Domain):
    environment = opened(domain, some_tasks(domain, 1)[0])
    for arguments in ({}, {"x": 1}):
        results = [await value(environment.call("no_such_tool_here", arguments))]
        if isinstance(environment, UserControlled):
            results.append(environment.user_call("no_such_tool_here", arguments))
        for result in results:
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


async def test_bad_arguments_are_error_results_that_change_nothing(domain: Domain):
    tried = 0
    for task in some_tasks(domain, FEW):
        environment = opened(domain, task)
        before = await value(environment.evaluate(IDLE[0]))
        for tool in environment.tools():
            good = draw(tool.parameters, pool_of(json.dumps(task.data)), random.Random(0))
            fits = jsonschema_rs.Draft202012Validator(tool.parameters).is_valid
            for arguments in bad_arguments(tool, good):
                if fits(arguments):
                    continue
                result = await value(environment.call(tool.name, arguments))
                assert result.error, f"{tool.name}({arguments!r}) of {task.id} gave {result.text!r}"
                assert not result.terminal
                assert result.reward <= 0
                tried += 1
        assert await value(environment.evaluate(IDLE[0])) == before
        environment.close()
    assert tried > 0


async def test_the_gold_moves_earn_everything(domain: Domain):
    for task in some_tasks(domain):
        found = await replay_gold(domain, task)
        assert found.evaluation.success, f"{task.id}: {found.evaluation.details}"
        assert found.reward > 0, task.id
        if found.evaluation.reward:
            assert found.reward == 1.0, f"{task.id}: a verdict that pays pays 1 for all of it"


async def test_doing_nothing_never_pays(domain: Domain):
    """This is also an evaluation before any call."""
    for task in some_tasks(domain):
        environment = opened(domain, task)
        for transcript in IDLE:
            verdict = await value(environment.evaluate(transcript))
            assert isinstance(verdict, Evaluation)
            assert not verdict.success, task.id
            assert verdict.reward <= 0, task.id
        environment.close()


async def test_evaluating_changes_nothing(domain: Domain):
    for task in some_tasks(domain, FEW):
        environment = opened(domain, task)
        _, verdict = await run(environment, random_steps(task, environment, 1))
        assert await value(environment.evaluate(IDLE[-1])) == verdict
        assert json.loads(json.dumps(verdict.details)) == verdict.details, "details would change on their way"
        environment.close()


async def test_the_same_task_seed_and_calls_give_the_same_episode(domain: Domain):
    succeeded = 0
    for task, seed in itertools.product(some_tasks(domain, FEW), (0, 7)):
        first, second = opened(domain, task, seed), opened(domain, task, seed)
        steps = random_steps(task, first, seed, count=60)
        outcome = await run(first, steps)
        assert await run(second, steps) == outcome
        first.close()
        second.close()
        succeeded += sum(not result.error for result in outcome[0])
    assert succeeded > 0


async def test_a_reset_gives_fresh_state(domain: Domain):
    first, second = some_tasks(domain, 2)[-2:]
    fresh, used = opened(domain, second), opened(domain, first)
    await run(used, random_steps(first, used, 1))
    used.reset(second, 0)
    steps = random_steps(second, fresh, 2)
    assert await run(used, steps) == await run(fresh, steps)
    fresh.close()
    used.close()


async def episode_in_instance(
    manager: EnvironmentManager, task: Task, steps: Sequence[Step], said: Transcript
) -> Episode:
    async with manager.instance(task, seed=0) as instance:
        results = []
        for by_user, name, arguments in steps:
            await asyncio.sleep(0)  # everybody else's turn
            results.append(await (instance.user_call if by_user else instance.call)(name, arguments))
        return results, await instance.evaluate(said)


def mixed_steps(domain: Domain, task: Task, seed: int) -> tuple[list[Step], Transcript]:
    """Gold moves in every other episode, arbitrary calls in the rest."""
    if seed % 2:
        return gold_steps(domain, task)
    environment = opened(domain, task)
    steps = random_steps(task, environment, seed, count=10)
    environment.close()
    return steps, IDLE[-1]


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("something is pickled")


def without_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dumps", "loads", "dump", "load", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)


async def test_interleaved_rollouts_equal_those_alone(domain: Domain, monkeypatch: pytest.MonkeyPatch):
    """Fifty at once through the manager, several of the same task, where the domain says they run."""
    tasks = some_tasks(domain)
    chosen = [tasks[index % len(tasks)] for index in range(INTERLEAVED)]
    scripts = [mixed_steps(domain, task, index) for index, task in enumerate(chosen)]
    expected = [await alone(domain, task, *script) for task, script in zip(chosen, scripts, strict=True)]
    without_pickle(monkeypatch)
    manager = EnvironmentManager(domain, EnvironmentConfig(name=domain.name))
    pairs = zip(chosen, scripts, strict=True)
    found = await asyncio.gather(*(episode_in_instance(manager, task, *script) for task, script in pairs))
    await manager.close()
    assert found == expected
    assert manager.instances == manager.leaked_threads == 0
    assert any(evaluation.success for _, evaluation in found)


class WorkerHere:
    """A worker that is spared its process: what goes in and comes out are the lines that would cross the socket."""

    lost: str | None = None
    pid = 0

    def __init__(self, hello: bytes) -> None:
        message = json.loads(hello)
        self._worker = Worker(
            configured_domain(message["domain"], EnvironmentConfig.model_validate_json(message["config"]))
        )

    @classmethod
    async def start(cls, name: str, hello: bytes) -> WorkerHere:
        return cls(hello)

    async def ask(self, what: str, line: bytes, seconds: float) -> Any:
        return json.loads(await asyncio.to_thread(self._worker.answer, json.loads(line)))

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.close)  # a worker's own loop runs beside no other


IN_A_WORKER = """
import sys
from mua.config.schema import EnvironmentConfig
from mua.environment.worker import configured_domain
for name in sys.argv[1:]:
    configured_domain(name, EnvironmentConfig(name=name)).environment().close()
"""


@pytest.mark.slow
def test_every_domain_is_found_by_its_name_in_a_clean_interpreter():
    names = [name for name in domain_names() if not getattr(get_domain(name), "needs_data", False)]
    done = subprocess.run([sys.executable, "-c", IN_A_WORKER, *names], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


async def test_threads_and_worker_processes_give_the_same(domain: Domain, monkeypatch: pytest.MonkeyPatch):
    """A real process for domains that ask for one, and for the simplest; how processes fare is the same for all."""
    task = some_tasks(domain, 1)[0]
    script = gold_steps(domain, task)
    expected = await alone(domain, task, *script)
    without_pickle(monkeypatch)
    if domain.name != "help_desk" and isolation_of(domain, EnvironmentConfig(name=domain.name)) != "process":
        monkeypatch.setattr(processes, "WorkerProcess", WorkerHere)
    for isolation in ("thread", "process"):
        config = EnvironmentConfig(name=domain.name, isolation=isolation, workers=1)
        manager = EnvironmentManager(domain, config)
        assert await episode_in_instance(manager, task, *script) == expected
        await manager.close()
        assert manager.instances == manager.leaked_threads == 0


async def test_rollouts_write_neither_to_the_base_nor_to_their_task(domain: Domain):
    def shared() -> list[str]:
        environment = domain.environment()
        bases = [environment._desk.base.digest()] if isinstance(environment, DatabaseEnvironment) else []
        environment.close()
        return bases + [digest_of(task.data) for task in tasks]

    tasks = some_tasks(domain, FEW)
    before = shared()
    for seed, task in enumerate(tasks):
        for script in (gold_steps(domain, task), mixed_steps(domain, task, 2 * seed)):
            await alone(domain, task, *script)
    assert shared() == before


async def test_closing_frees_everything(domain: Domain):
    tasks = some_tasks(domain, 2)
    scripts = [mixed_steps(domain, task, index) for index, task in enumerate(tasks)]

    async def rollouts() -> list[weakref.ref[Environment]]:
        found = []
        for task, (steps, said) in zip(tasks, scripts, strict=True):
            environment = opened(domain, task)
            await run(environment, steps, said)
            environment.close()
            found.append(weakref.ref(environment))
            del environment
        return found

    await rollouts()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(5):
        gone = await rollouts()
    gc.collect()
    assert not any(reference() for reference in gone)
    assert sys.getallocatedblocks() - before < 1000


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
    for task in some_tasks(domain, FEW):
        said = await conversation(domain, task, 0)
        assert len(said) > 1
        assert all(text.strip() for text, _ in said)
        assert all(stop == (STOP_SIGNAL in text) for text, stop in said)


async def test_the_scripted_user_repeats_itself_with_a_seed_and_varies_without(domain: Domain):
    task = some_tasks(domain, 1)[0]
    assert await conversation(domain, task, 5) == await conversation(domain, task, 5)
    openings = {(await conversation(domain, task, seed))[0] for seed in range(20)}
    assert len(openings) > 1
