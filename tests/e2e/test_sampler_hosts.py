"""Samplers on machines of their own: other networks, host names, process ids, files and clocks; one loses its network.

Emulated on this one (tests/hosts_support.py). What samplers do when they are killed, and a database or a trainer that
goes away, is in test_samplers.py. Not covered: the bandwidth and latency of a network, more than two machines.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa
from e2e_support import (
    DETERMINISTIC,
    SECONDS,
    STEPS,
    Command,
    assert_nothing_left,
    assert_same_run,
    ended,
    kill_group,
    running,
    until,
)

from mua.store.database import Store
from mua.store.tables import episodes, samplers
from tests.hosts_support import Host, hosts
from tests.postgres_support import postgres_server
from tests.sampler_support import QUICK, check_store

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

CLOCKS = (7200, -3600)
"""By so many seconds the clocks of the machines are wrong."""


def test_samplers_on_machines_with_wrong_clocks_of_which_one_loses_its_network(
    recipe: Path, tuned: Path, trained: Path, tmp_path: Path
) -> None:
    head = tmp_path / "head"
    head.mkdir()
    with ExitStack() as stack:
        net = stack.enter_context(hosts(len(CLOCKS)))
        server = stack.enter_context(postgres_server(net.head))
        url = server.database()
        command = (
            "train", recipe, f"trainer.steps={STEPS}", f"store.url={url}", f"samplers.address={net.head}",
            "samplers.inside=false", "rollout.concurrency=1", *QUICK, *DETERMINISTIC,
        )  # fmt: skip
        run = stack.enter_context(running(*command, cwd=head))
        players = [
            player(stack, host, url, tmp_path / host.name, tuned, [head], clock)
            for host, clock in zip(net.others, CLOCKS, strict=True)
        ]
        store = stack.enter_context(Store.open(url))
        cut = cut_off(store, net.others, run)
        cut.plug("up")
        ended(run, head, 0)
        for host, process in zip(net.others, players, strict=True):
            allowed = (0, 75) if host is cut else (0,)
            assert process.wait(120) in allowed, (tmp_path / host.name / "stderr").read_text()
        check_store(store)
        with store.read() as connection:
            played = connection.execute(sa.select(episodes.c.sampler)).scalars()
            assert set(map(host_of, played)) == {host.name for host in net.others}
            for name, began in connection.execute(sa.select(samplers.c.id, samplers.c.started_at)):
                wrong = CLOCKS[[host.name for host in net.others].index(host_of(name))]
                assert abs(began - wrong - time.time()) < 900, "the clock is not wrong"
    assert_same_run(head / "out", trained)
    assert_nothing_left(head)


def player(
    stack: ExitStack, host: Host, url: str, folder: Path, tuned: Path, hidden: list[Path], clock: int
) -> subprocess.Popen[str]:
    """A sampler on ``host``, with a copy of the policy of its own."""
    shutil.copytree(tuned / "hf", folder / "policy")
    process = host.start(
        "sample", url, f"model.path={folder}/policy", "rollout.concurrency=1", "--wait", str(SECONDS), cwd=folder,
        hidden=[tuned, *hidden], clock_seconds=clock,
    )  # fmt: skip
    stack.callback(process.wait)
    stack.callback(lambda: kill_group(process) if process.poll() is None else None)
    return process


def host_of(sampler: str) -> str:
    """Samplers are called KIND-HOST-PID-WORD, and hosts here have a dash."""
    return sampler.partition("-")[2].rsplit("-", 2)[0]


def cut_off(store: Store, machines: list[Host], run: Command) -> Host:
    """Pull the cable of the first machine that is at its second episode or a later one, and wait until another one has
    ended that. A result that was on its way when the cable was pulled may have arrived: then once more."""
    while True:
        cut = until(partial(at_a_second_episode, store, machines), run, "a second episode")
        cut.plug("down")
        left = places(store, cut, "leased")
        if left and cut.name not in until(partial(ended_by, store, left), run, "the end of what was cut off"):
            return cut
        cut.plug("up")


def at_a_second_episode(store: Store, machines: list[Host]) -> Host | None:
    """The first one that has ended an episode and has a lease on another."""
    return next((host for host in machines if places(store, host, "done") and places(store, host, "leased")), None)


def places(store: Store, host: Host, state: str) -> list[tuple[int, int]]:
    """Ordinal and sample of the episodes in ``state`` of the sampler of ``host``."""
    chosen = sa.select(episodes.c.ordinal, episodes.c.sample).where(
        episodes.c.state == state, episodes.c.sampler.contains(f"-{host.name}-")
    )
    with store.read() as connection:
        return [(row.ordinal, row.sample) for row in connection.execute(chosen)]


def ended_by(store: Store, episode_places: list[tuple[int, int]]) -> set[str]:
    """The machines that have ended these episodes; none until all are ended."""
    columns = (episodes.c.ordinal, episodes.c.sample, episodes.c.state, episodes.c.sampler)
    with store.read() as connection:
        rows = [row for row in connection.execute(sa.select(*columns)) if (row[0], row[1]) in episode_places]
    return {host_of(row.sampler) for row in rows} if all(row.state == "done" for row in rows) else set()
