"""What a database makes of many samplers: episodes claimed and ended per second, and how long each of that takes.

    python -m tools.bench.leases STORE [--episodes 10000] [--samplers 1,8,64] [--claim 1] [--done 0]

STORE is an empty PostgreSQL database, or a file for SQLite. No engines and no episodes: processes, each with its own
connection, claim and end episodes by :mod:`mua.store.leases` alone, one after the other and as fast as they can, and
renew what they hold every 10 seconds as ever; the trainer's side looks meanwhile what has ended, every 50 ms. A run's
earlier episodes (``--done``) lie there, too. Nothing may be lost, ended twice or met by a deadlock. With
``--seconds-each`` a sampler waits so long between a claim and its result: then there are claimed rows beside open ones.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np
import sqlalchemy as sa

from mua.store.database import Store
from mua.store.leases import EpisodeLease, claim, deliver, ended_episodes, open_group, renew, tell_sampler
from mua.store.tables import episodes, runs, tasks
from mua.store.writer import Insert, execute
from mua.types import Json
from tools import kit

SIZE = 8
"""Episodes of a group."""
_LEASE_SECONDS, _BEAT_SECONDS, _LOOK_SECONDS = 60.0, 10.0, 0.05


def prepare(store: Store, run: str, count: int, done: int) -> None:
    """``count`` open episodes of ``run`` behind ``done`` that have ended, in groups of :data:`SIZE`."""
    with store.begin() as connection:
        execute(connection, [Insert(runs, [{"id": run, "output": "-", "state": "running", "started_at": 1.0}])])
        for ordinal in range((done + count) // SIZE):
            open_group(connection, {
                "run_id": run, "round": 0, "ordinal": ordinal, "kind": "train", "domain": "d", "task_id": f"t{ordinal}",
                "split": "train", "size": SIZE, "state": "open", "part": 1, "version": 0, "made_at": 1.0,
                "ended_at": None, "taken_step": None,
            })  # fmt: skip
        early = episodes.c.ordinal < done // SIZE
        of_run = episodes.c.run_id == run
        connection.execute(sa.update(episodes).where(of_run, early).values(state="done", trajectory_id="x"))
        early = tasks.c.ordinal < done // SIZE
        connection.execute(sa.update(tasks).where(tasks.c.run_id == run, early).values(state="taken"))


def sampler(url: str, run: str, name: str, count: int, seconds: float, start: Any, pipe: Pipe) -> None:
    """Claim ``count`` at a time and end each, until nothing is free; tell how long it took."""
    claims, results, faults, beaten = list[float](), list[float](), list[str](), 0.0
    with Store.open(url, create=False, migrate=False) as store:
        with store.read() as connection:
            connection.execute(sa.select(1))
        pipe.send("ready")
        start.wait()
        began = time.monotonic()

        @contextmanager
        def timed(into: list[float]) -> Iterator[Any]:
            at = time.perf_counter()
            try:
                with store.begin() as connection:
                    yield connection
            except Exception as error:
                faults.append(str(error)[:200])
                return
            into.append(time.perf_counter() - at)

        held: list[EpisodeLease] = []
        while True:
            with timed(claims) as connection:
                held = claim(connection, run, 1, name, count, _LEASE_SECONDS, 1)
            if not held:
                break
            if time.monotonic() - beaten > _BEAT_SECONDS:
                beaten = time.monotonic()
                with timed([]) as connection:
                    tell_sampler(connection, {
                        "id": name, "run_id": run, "host": "-", "pid": 0, "state": "running", "running": len(held),
                        "started_at": 1.0, "details": {},
                    })  # fmt: skip
                    renew(connection, held, _LEASE_SECONDS)
            time.sleep(seconds)
            for lease in held:
                with timed(results) as connection:
                    deliver(connection, lease, f"{name}-{lease.ordinal}-{lease.sample}")
    pipe.send((claims, results, faults, began, time.monotonic()))


def measure(url: str, samplers: int, count: int, at_once: int, done: int, seconds: float, limit: float) -> Json:
    """One run with so many samplers. Raises SystemExit where an episode was lost."""
    run = f"bench-{samplers}-{at_once}-{time.time_ns()}"
    with Store.open(url) as store:
        prepare(store, run, count, done)
        if store.postgres:  # as autovacuum does before long
            with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(sa.text("VACUUM ANALYZE"))
    context = multiprocessing.get_context("fork")
    start, pipes, players = context.Event(), list[Pipe](), list[Any]()
    for number in range(samplers):
        ours, theirs = context.Pipe()
        arguments = (url, run, f"s{number}", at_once, seconds, start, theirs)
        players.append(context.Process(target=sampler, args=arguments, daemon=True))
        pipes.append(ours)
        players[-1].start()
    for pipe in pipes:
        if not pipe.poll(limit) or pipe.recv() != "ready":
            raise SystemExit("a sampler does not start")
    looks: list[float] = []
    with Store.open(url) as store:
        start.set()
        until = time.monotonic() + limit
        wanted = range(done // SIZE, (done + count) // SIZE)
        while any(player.is_alive() for player in players) and not all(pipe.poll() for pipe in pipes):
            at = time.perf_counter()
            with store.read() as connection:
                ended_episodes(connection, run, wanted[-256:])  # as many groups as are ever offered
            looks.append(time.perf_counter() - at)
            time.sleep(_LOOK_SECONDS)
            if time.monotonic() > until:
                raise SystemExit(f"{samplers} samplers: not done after {limit:g} s")
        found = [pipe.recv() for pipe in pipes]
        with store.read() as connection:
            of_run = episodes.c.run_id == run
            ended = connection.execute(
                sa.select(sa.func.count(), sa.func.count(episodes.c.trajectory_id.distinct())).where(
                    of_run, episodes.c.state == "done", episodes.c.ordinal >= done // SIZE
                )
            ).one()
    for player in players:
        player.join(limit)
    if tuple(ended) != (count, count):
        raise SystemExit(f"{samplers} samplers: of {count} episodes {tuple(ended)} ended")
    took = max(one[4] for one in found) - min(one[3] for one in found)
    return {
        "per_second": count / took,
        "claims": np.concatenate([one[0] for one in found]) * 1000,
        "results": np.concatenate([one[1] for one in found]) * 1000,
        "looks": np.array(looks) * 1000,
        "faults": [fault for one in found for fault in one[2]],
    }


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("store")
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--samplers", default="1,8,64")
    parser.add_argument("--claim", type=int, default=1, help="episodes asked for at once")
    parser.add_argument("--done", type=int, default=0, help="episodes of the run that have ended before")
    parser.add_argument("--seconds-each", type=float, default=0.0, help="between a claim and its results")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one run")
    given = parser.parse_args()
    rows = []
    for number in map(int, given.samplers.split(",")):
        found = measure(
            given.store, number, given.episodes // SIZE * SIZE, given.claim, given.done // SIZE * SIZE,
            given.seconds_each, given.limit,
        )  # fmt: skip
        times = [f"{np.percentile(found[kind], at):.1f}" for kind in ("claims", "results", "looks") for at in (50, 99)]
        rows.append((number, f"{found['per_second']:.0f}", *times, len(found["faults"])))
        for fault in sorted(set(found["faults"]))[:3]:
            print(f"{number} samplers: {fault}")
    names = ("samplers", "episodes per second", "claim ms, median", "p99", "result ms, median", "p99",
             "trainer's look ms, median", "p99", "faults")  # fmt: skip
    print(kit.machine())
    print(kit.table(names, rows))


if __name__ == "__main__":
    main()
