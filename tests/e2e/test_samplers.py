"""Samplers apart from the trainer: real processes on a real PostgreSQL, engine and Megatron, killed at random.

In deterministic mode the run is bit for bit the one whose trainer rolls out itself, whoever played which episode.
Samplers on other machines are in test_sampler_hosts.py. Not covered: more than a handful of them.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import sqlalchemy as sa
from e2e_support import (
    DETERMINISTIC,
    GROUPS,
    SECONDS,
    STEPS,
    Command,
    assert_nothing_left,
    assert_same_run,
    ended,
    kill_group,
    metrics_of,
    refused,
    running,
    until,
)

from mua.config.load import load_config
from mua.observe.provenance import provenance
from mua.rollout.rollout_worker import made_with
from mua.store.database import Store
from mua.store.starts import router_row
from mua.store.tables import engines, episodes, parts, runs, samplers, tasks, uses
from mua.store.verification import verify
from mua.store.writer import Insert, execute
from mua.utils.ports import free_port
from tests.postgres_support import PostgresServer, postgres_server
from tests.sampler_support import QUICK, check_store

pytestmark = pytest.mark.timeout(900)

PLAYERS = 3


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """One that may be stopped."""
    with postgres_server() as started:
        yield started


def sampler(stack: ExitStack, folder: Path, url: str, wait: float = 90.0) -> Command:
    folder.mkdir(exist_ok=True)
    return stack.enter_context(running("sample", url, "--wait", str(wait), "--logs", folder, cwd=folder))


@pytest.mark.parametrize("most", [pytest.param(4, marks=pytest.mark.slow), pytest.param(40, marks=pytest.mark.grid)])
def test_samplers_killed_at_random_change_nothing(
    recipe: Path, trained: Path, tmp_path: Path, server: PostgresServer, most: int
) -> None:
    url, draw = server.database(), random.Random(3)
    output = tmp_path / "out"
    command = (
        "train", recipe, f"trainer.steps={STEPS}", f"store.url={url}", "samplers.inside=false",
        "rollout.concurrency=1", *QUICK, *DETERMINISTIC,
    )  # fmt: skip
    kills = 0
    with ExitStack() as stack:
        run = stack.enter_context(running(*command, cwd=tmp_path))
        with Store.open(url) as store:
            players = [sampler(stack, tmp_path / f"sampler-{n}", url) for n in range(PLAYERS)]
            while run.poll() is None:
                # The first is one that has played an episode and is at the next, so that another one has to go on.
                victim = draw.randrange(PLAYERS) if kills else player_at_a_second_episode(store, players)
                with store.read() as connection:
                    leased = connection.execute(
                        sa.select(episodes.c.sampler).where(episodes.c.state == "leased").limit(1)
                    ).scalar()
                if victim is None or leased is None or kills == most:
                    time.sleep(0.05)
                    continue
                time.sleep(draw.uniform(0.0, 0.4) if kills else 0.0)
                assert all(player.poll() is None for player in players) or run.poll() is not None
                players[victim].send_signal(signal.SIGKILL)
                players[victim].wait()
                kills += 1
                players[victim] = sampler(stack, tmp_path / f"sampler-{PLAYERS + kills}", url)
                time.sleep(draw.uniform(0.2, 1.0))
            ended(run, tmp_path, 0)
            # One that was started when the run was over has waited for another.
            assert {player.wait(120) for player in players} in ({0}, {0, 75})
            check_store(store)
    assert kills >= 3
    assert_same_run(output, trained)
    assert_nothing_left(tmp_path)


@pytest.mark.slow
def test_a_database_that_goes_away_and_a_trainer_that_is_killed(
    recipe: Path, trained: Path, tmp_path: Path, server: PostgresServer
) -> None:
    """The trainer rolls out too. Its start goes over to the next one, and so does the sampler, without being told."""
    url, output = server.database(), tmp_path / "out"
    command = (
        "train", recipe, f"trainer.steps={STEPS}", f"store.url={url}", "rollout.concurrency=1", *QUICK, *DETERMINISTIC,
    )  # fmt: skip
    with ExitStack() as stack:
        player = sampler(stack, tmp_path / "sampler-0", url, SECONDS)  # before there is a run
        with running(*command, cwd=tmp_path) as run:
            until(lambda: metrics_of(output), run, "a step")
            server.stop(signal.SIGQUIT)
            time.sleep(3)
            assert run.poll() is None
            assert player.poll() is None
            server.start()
            until(lambda: len(metrics_of(output)) > 1 and ended_ahead(url, output), run, "a group of a later step")
            kill_group(run)
        run = stack.enter_context(running(*command, cwd=tmp_path))
        with Store.open(url) as store:
            ended(run, tmp_path, 0)
            assert player.wait(60) == 0
            (log,) = (tmp_path / "sampler-0" / "logs").glob("sample-*.log")
            assert "sampling for run" in log.read_text()
            with store.read() as connection:
                played = connection.execute(sa.select(episodes.c.sampler)).scalars()  # null: taken over from before
                kinds = {name.partition("-")[0] for name in played if name is not None}
                assert kinds == {"trainer", "sampler"}
                assert list(verify(connection)) == []
                assert taken_over(connection)
    assert_same_run(output, trained)
    assert_nothing_left(tmp_path)


@pytest.mark.slow
def test_what_samplers_had_ended_ahead_is_trained_after_a_kill_within_its_bound_of_staleness(
    recipe: Path, tmp_path: Path, server: PostgresServer
) -> None:
    """Episodes run up to two versions ahead; the start that goes on takes them from the one that was killed."""
    url, output, steps = server.database(), tmp_path / "out", 8
    command = (
        "train", recipe, f"trainer.steps={steps}", "trainer.max_staleness=2", "algorithm.correction=truncate",
        "algorithm.old_logprobs=recompute", f"store.url={url}", "samplers.inside=false", *QUICK,
    )  # fmt: skip
    with ExitStack() as stack:
        players = [sampler(stack, tmp_path / f"sampler-{number}", url, SECONDS) for number in range(2)]
        with running(*command, cwd=tmp_path) as run:
            until(lambda: len(metrics_of(output)) > 1 and ended_ahead(url, output), run, "a group of a later step")
            kill_group(run)
        ended(stack.enter_context(running(*command, cwd=tmp_path)), tmp_path, 0)
        assert [player.wait(60) for player in players] == [0, 0]
    with Store.open(url) as store, store.read() as connection:
        assert taken_over(connection)
        last = sa.select(uses.c.step, sa.func.max(uses.c.part).label("part")).group_by(uses.c.step).subquery()
        kept = (
            sa.select(uses.c.step, uses.c.trajectory_id)
            .distinct()
            .join(last, (uses.c.step == last.c.step) & (uses.c.part == last.c.part))
        )
        names = [row.trajectory_id for row in connection.execute(kept)]
        assert len(names) == len(set(names)), "trained in two steps"
        ordinals = connection.execute(sa.select(tasks.c.ordinal).where(tasks.c.state == "taken")).scalars().all()
        assert len(ordinals) == len(set(ordinals)) == steps * GROUPS
        assert list(verify(connection)) == []
    assert [line["step"] for line in metrics_of(output)] == list(range(steps))
    assert 0 < max(line["rollout/off_policy_level/max"] for line in metrics_of(output)) <= 2
    assert_nothing_left(tmp_path)


@pytest.mark.slow
def test_what_cannot_be_sampled_is_refused(tmp_path: Path, server: PostgresServer) -> None:
    assert "no such file" in refused("sample", tmp_path / "store.sqlite", "--wait", "0", cwd=tmp_path)
    empty = server.database()
    assert "holds no store" in refused("sample", empty, "--wait", "0", cwd=tmp_path)
    Store.open(empty).close()
    assert "has no run 'x'" in refused("sample", empty, "--run", "x", cwd=tmp_path)
    found = refused("sample", empty, "--wait", "0.5", cwd=tmp_path, status=75)
    assert "no run that takes samplers goes on" in found
    assert "samplers.enabled: true" in found


@pytest.mark.slow
def test_a_router_out_of_reach_is_told(recipe: Path, tmp_path: Path) -> None:
    """As on another machine, where the default address is that machine's own."""
    loaded = load_config(recipe, ["samplers.lease_seconds=3", "samplers.heartbeat_seconds=1"])
    config = provenance(loaded)["config"]
    with Store.open(tmp_path / "store.sqlite") as store, store.begin() as connection:
        made = made_with(loaded)
        row = router_row(1, f"http://127.0.0.1:{free_port()}", "k", [], made, version=0, capacity=1)
        execute(connection, [
            Insert(runs, [{"id": "r", "output": "out", "state": "running", "started_at": 1.0}]),
            Insert(parts, [{"run_id": "r", "part": 1, "from_step": 0, "started_at": 1.0, "config": config}]),
            Insert(engines, [row | {"run_id": "r", "seen_at": time.time() + 3600}]),
        ])  # fmt: skip
    # This process does not have the package that brings the domain.
    found = refused("sample", tmp_path / "store.sqlite", "samplers.other_code=warn", cwd=tmp_path, status=75)
    assert "run r goes on, but its engines' router at http://127.0.0.1:" in found
    assert "set samplers.address" in found


def player_at_a_second_episode(store: Store, players: list[Command]) -> int | None:
    """The place in ``players`` of a sampler that has ended an episode and has a lease on another."""
    done = sa.select(episodes.c.sampler).where(episodes.c.state == "done")
    at_the_next = sa.select(samplers.c.pid).join(episodes, episodes.c.sampler == samplers.c.id)
    with store.read() as connection:
        pids = connection.execute(
            at_the_next.where(episodes.c.state == "leased", samplers.c.id.in_(done)).order_by(samplers.c.pid)
        ).scalars().all()  # fmt: skip
    return next((number for number, player in enumerate(players) if player.pid in pids), None)


def ended_ahead(url: str, output: Path) -> bool:
    """Whether a group has ended of a step that is not done."""
    with Store.open(url) as store, store.read() as connection:
        ended = sa.select(sa.func.count()).select_from(tasks).where(tasks.c.state.in_(("complete", "taken")))
        return bool(connection.execute(ended).scalar_one() > GROUPS * len(metrics_of(output)))


def taken_over(connection: sa.Connection) -> set[str]:
    """Trajectories of the first start that the second trained on."""
    trained = connection.execute(sa.select(uses.c.trajectory_id).where(uses.c.part == 2)).scalars()
    return {name for name in trained if name.split("/")[1] == "1"}
