"""What a private database for every rollout costs: time and memory, against re-reading JSON and copying everything.

    python -m tools.bench.environment_instances [--live 1 100 1000] [--instances 10000]

The database is tau-bench retail's where ``MUA_TAU_BENCH`` or ``../shared/data/tau-bench`` holds it, else a made one of
the same size. Every figure is measured in a process of its own: CPU time by ``process_time``, bytes by ``tracemalloc``
(in another run, because it slows the first down), resident memory from ``/proc/self/statm``. Ways to start a rollout:

json      parse the database's JSON text again
deepcopy  ``copy.deepcopy`` of the parsed database
overlay   an environment over the shared base (environments.kit.database)
manager   the same through an instance of the EnvironmentManager with inline isolation

A *gold rollout* makes all gold calls of a task, says what has to be said and takes the verdict; it is measured over all
tasks and for environments that stay alive. The verdict of the two copying ways would be a hash of the whole database,
which is a row of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import itertools
import json
import os
import random
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

from environments.kit.database import DatabaseEnvironment, ServiceDesk, Tool
from environments.kit.overlay import Base, Overlay, digest_of
from environments.kit.scripted import ScriptedUser
from mua.config.schema import EnvironmentConfig
from mua.environment.domain import Domain
from mua.environment.manager import EnvironmentManager
from mua.environment.protocol import Evaluation, Isolation, Move, PromptStyle, Split, Task, Transcript
from mua.environment.registry import get_domain
from mua.environment.user import User
from mua.types import Json, ToolSchema
from tools import kit

WAYS = ("json", "deepcopy", "overlay", "manager")
_FOLDER = os.environ.get("MUA_TAU_BENCH") or kit.ROOT.parent / "shared/data/tau-bench"
OFFICIAL = Path(_FOLDER) / "retail"


@dataclass(frozen=True)
class Subject:
    """A domain over one base, and the tasks that are rolled out."""

    name: str
    domain: Domain
    base: Base
    tasks: Sequence[Task]


class MadeShop:
    """A domain of tau-bench retail's size: 500 users, 1,000 orders, 50 products. Implements ``Domain``."""

    name = "made_shop"
    isolation: Isolation = "inline"

    def __init__(self) -> None:
        self.desk = ServiceDesk(Base(made_tables()), [_GET, _CANCEL])

    def tasks(self, split: Split) -> Sequence[Task]:
        return [self._task(index) for index in range(100)] if split == "train" else []

    def environment(self) -> DatabaseEnvironment:
        return DatabaseEnvironment(self.desk)

    def system_prompt(self, style: PromptStyle) -> str:
        return "Cancel what the user wants cancelled."

    def persona(self, task: Task) -> str:
        return "You want orders cancelled."

    def scripted_user(self, task: Task, seed: int) -> User:
        return ScriptedUser.simple(f"{task.id}/{seed}", ("Cancel my orders.",))

    def gold(self, task: Task) -> Sequence[Move]:
        return [(action["name"], action["arguments"]) for action in task.data["actions"]]

    def _task(self, index: int) -> Task:
        orders = [f"#W{(index * 7 + step) % 1000}" for step in range(3)]
        names = ("get_order", "cancel_order")
        actions = [{"name": name, "arguments": {"order": order}} for order in orders for name in names]
        return Task(f"{self.name}/{index}", self.name, "train", {"actions": actions, "statements": [["cancelled"]]})


def made_tables() -> dict[str, dict[str, Json]]:
    """Records shaped and sized like those of a shop: 2.3 MB as JSON text; always the same."""
    rng = random.Random(0)

    def words(count: int) -> str:
        return " ".join("".join(rng.choices("abcdefghij", k=6)) for _ in range(count))

    def variant() -> Json:
        options = {words(1): words(1) for _ in range(4)}
        return {"item_id": words(2), "options": options, "available": rng.random() < 0.8, "price": rng.random() * 100}

    def order(index: int) -> Json:
        address = {key: words(2) for key in ("address1", "address2", "city", "country", "state", "zip")}
        items = [variant() | {"name": words(2), "product_id": words(2)} for _ in range(3)]
        payments = [{"transaction_type": "payment", "amount": rng.random(), "payment_method_id": words(2)}]
        fields: Json = {"order_id": f"#W{index}", "user_id": words(2), "address": address, "items": items}
        return fields | {"fulfillments": [words(4)], "status": "pending", "payment_history": payments}

    users: dict[str, Json] = {
        f"user_{index}": {
            "name": {"first_name": words(1), "last_name": words(1)},
            "address": {key: words(2) for key in ("address1", "address2", "city", "country", "state", "zip")},
            "email": words(2),
            "payment_methods": {words(1): {"source": words(1), "id": words(2)} for _ in range(3)},
            "orders": [words(1) for _ in range(3)],
        }
        for index in range(500)
    }
    products: dict[str, Json] = {
        f"product_{index}": {"name": words(2), "variants": {words(2): variant() for _ in range(14)}}
        for index in range(50)
    }
    return {"orders": {f"#W{index}": order(index) for index in range(1000)}, "products": products, "users": users}


def _get(state: Overlay, order: str) -> Json:
    record = state.get("orders", order)
    assert record is not None, "the tasks name orders that there are"
    return record


def _cancel(state: Overlay, order: str) -> Json:
    record = state.edit("orders", order)
    record["status"] = "cancelled"
    record["payment_history"].append({"transaction_type": "refund", "amount": 1})
    return record


_ORDER: Json = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}
_GET = Tool(ToolSchema("get_order", "Look an order up.", _ORDER), _get)
_CANCEL = Tool(ToolSchema("cancel_order", "Cancel an order.", _ORDER), _cancel)


def made_subject() -> Subject:
    """The generated database."""
    domain = MadeShop()
    return Subject("made, of tau-bench retail's size", domain, domain.desk.base, domain.tasks("train"))


def subject() -> Subject:
    """Official data if it is there, else the made database."""
    if not OFFICIAL.is_dir():
        return made_subject()
    from mua.environment.endpoint.services import Services

    retail: Any = get_domain("retail")
    domain = retail.configured(EnvironmentConfig(name="retail", data=OFFICIAL), Services())
    tasks = [task for split in ("train", "validation", "test") for task in domain.tasks(split)]
    return Subject("tau-bench retail, official", domain, domain.desk.base, tasks)


def transcript_of(task: Task) -> Transcript:
    """An agent that says exactly what the user has to be told."""
    flat = [group if isinstance(group, str) else group[0] for said in task.data["statements"] for group in said]
    return Transcript([{"role": "assistant", "content": " ".join(flat)}])


def opened(given: Subject, task: Task) -> Any:
    """A fresh environment."""
    environment = given.domain.environment()
    environment.reset(task, 0)
    environment.tools()
    return environment


def play(environment: Any, task: Task) -> Evaluation:
    """The gold calls and the verdict; the environment stays open."""
    for action in task.data["actions"]:
        environment.call(action["name"], action["arguments"])
    evaluation: Evaluation = environment.evaluate(transcript_of(task))
    assert evaluation.success, f"the gold of {task.id} fails: {evaluation.details}"
    return evaluation


def started(way: str, given: Subject) -> Callable[[int], Any]:
    """What makes the state of rollout ``i`` in one of the first three ways."""
    if way == "json":
        text = json.dumps(given.base.tables)
        return lambda index: json.loads(text)
    if way == "deepcopy":
        return lambda index: copy.deepcopy(given.base.tables)
    return lambda index: opened(given, given.tasks[index % len(given.tasks)])


async def instance(given: Subject, count: int, gold: bool, keep: AsyncExitStack, manager: EnvironmentManager) -> None:
    """``count`` instances that stay open until ``keep`` is left."""
    for index in range(count):
        task = given.tasks[index % len(given.tasks)]
        instance = await keep.enter_async_context(manager.instance(task, 0))
        if gold:
            await managed_play(instance, task)


async def managed_play(instance: Any, task: Task) -> None:
    """:func:`play` through an instance."""
    for action in task.data["actions"]:
        await instance.call(action["name"], action["arguments"])
    assert (await instance.evaluate(transcript_of(task))).success


def manager_of(given: Subject) -> EnvironmentManager:
    """With inline isolation and room for all."""
    return EnvironmentManager(given.domain, EnvironmentConfig(name="bench", isolation="inline", max_instances=100_000))


class Meter:
    """CPU seconds and bytes between entering and :meth:`read`."""

    def __init__(self, traced: bool) -> None:
        self._traced = traced
        gc.collect()
        if traced:
            tracemalloc.start()
        self._resident = kit.resident()
        self._cpu = process_time()

    def read(self) -> dict[str, float]:
        cpu = process_time() - self._cpu
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] if self._traced else 0
        if self._traced:
            tracemalloc.stop()
        return {"cpu": cpu, "held": held, "resident": kit.resident() - self._resident}


def measure_live(way: str, count: int, gold: bool, traced: bool, given: Subject | None = None) -> dict[str, float]:
    """Totals over ``count`` rollouts that are all alive at the end."""
    given = given or subject()
    for task in given.tasks:  # the gold states of all tasks are the domain's to keep, once
        play(opened(given, task), task)
    if way == "manager":
        return asyncio.run(_measure_instances(given, count, gold, traced))
    make = started(way, given)
    make(0)
    meter = Meter(traced)
    alive = [make(index) for index in range(count)]
    if gold:
        for index, environment in enumerate(alive):
            play(environment, given.tasks[index % len(given.tasks)])
    found = meter.read()
    del alive
    return found


async def _measure_instances(given: Subject, count: int, gold: bool, traced: bool) -> dict[str, float]:
    manager = manager_of(given)
    async with AsyncExitStack() as keep:
        await instance(given, 1, gold, keep, manager)
    async with AsyncExitStack() as keep:
        meter = Meter(traced)
        await instance(given, count, gold, keep, manager)
        found = meter.read()
    await manager.close()
    return found


def measure_rollouts(rounds: int) -> dict[str, float]:
    """Milliseconds of CPU for one gold rollout, over all tasks: the first time (gold has to be found) and later."""
    given = subject()

    def straight(rounds: int) -> None:
        for _, task in itertools.product(range(rounds), given.tasks):
            environment = opened(given, task)
            play(environment, task)
            environment.close()

    def milliseconds(work: Callable[[], object], times: int) -> float:
        start = process_time()
        work()
        return (process_time() - start) / times * 1e3

    count = len(given.tasks)
    return {
        "first": milliseconds(lambda: straight(1), count),
        "later": milliseconds(lambda: straight(rounds), rounds * count),
        "managed": milliseconds(lambda: asyncio.run(many_instances(given, rounds * count)), rounds * count),
        "hash": milliseconds(lambda: [digest_of(given.base.tables) for _ in range(5)], 5),
        "tasks": count,
    }


def measure_growth(instances: int) -> dict[str, float]:
    """Bytes kept after ``instances`` gold rollouts through the manager that were all given back."""
    given = subject()
    asyncio.run(many_instances(given, len(given.tasks) + 500))
    meter = Meter(traced=True)
    asyncio.run(many_instances(given, instances))
    return meter.read()


async def many_instances(given: Subject, count: int) -> None:
    """``count`` gold rollouts, one instance after the other."""
    manager = manager_of(given)
    for index in range(count):
        task = given.tasks[index % len(given.tasks)]
        async with manager.instance(task, 0) as instance:
            await managed_play(instance, task)
    await manager.close()


def in_a_process(what: str, *arguments: object) -> dict[str, Any]:
    """One measurement in a fresh interpreter."""
    found: dict[str, Any] = kit.afresh("tools.bench.environment_instances", "--one", what, *arguments)
    return found


ONE: dict[str, Callable[..., dict[str, Any]]] = {
    "live": lambda way, count, gold, traced: measure_live(way, int(count), gold == "True", traced == "True"),
    "rollouts": lambda rounds: measure_rollouts(int(rounds)),
    "growth": lambda instances: measure_growth(int(instances)),
    "name": lambda: {"name": subject().name, "bytes": len(json.dumps(subject().base.tables))},
}


def live_row(way: str, count: int, gold: bool) -> str:
    """One line of the table of live rollouts, per rollout except for the last column."""
    plain = in_a_process("live", way, count, gold, False)
    # tracemalloc doubles what small objects take; of the copies a hundred say enough.
    counted = min(count, 100) if way in ("json", "deepcopy") else count
    traced = in_a_process("live", way, counted, gold, True)
    kind = "gold, alive" if gold else "untouched"
    cpu, held = plain["cpu"] / count * 1e6, traced["held"] / counted
    each = (f"{count:,}", f"{cpu:,.0f}", f"{held:,.0f}", f"{plain['resident'] / 2**20:,.1f}")
    return kit.row(way, kind, *each)


def main() -> None:
    """Print the tables."""
    parser = kit.parser(__doc__)
    parser.add_argument("--live", type=int, nargs="+", default=[1, 100, 1000], help="rollouts alive at once")
    parser.add_argument("--instances", type=int, default=10_000, help="instances after which nothing may have grown")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(ONE[options.one[0]](*options.one[1:])))
        return
    about = in_a_process("name")
    print(f"database: {about['name']} ({about['bytes'] / 1e6:.2f} MB of JSON)\n")
    print(kit.head("way", "rollout", "live", "CPU us each", "bytes each", "resident MiB in all"))
    for ways, gold in ((WAYS, False), (WAYS[2:], True)):
        for way, count in itertools.product(ways, options.live):
            print(live_row(way, count, gold), flush=True)
    found = in_a_process("rollouts", 5)
    rows = (
        ("environment, a task's first time (its gold state is found)", f"{found['first']:.3f}"),
        ("environment, afterwards", f"{found['later']:.3f}"),
        ("through the manager, afterwards", f"{found['managed']:.3f}"),
        ("for comparison: one hash of the whole database", f"{found['hash']:.1f}"),
    )
    title = f"gold rollout with verdict, mean over {found['tasks']:,} tasks"
    print(f"\n{kit.table((title, 'CPU ms'), rows)}")
    grown = in_a_process("growth", options.instances)
    print(f"\n{options.instances:,} instances, given back: {grown['held']:,.0f} bytes more held, ", end="")
    print(f"{grown['resident'] / 2**20:+.1f} MiB resident")


if __name__ == "__main__":
    main()
