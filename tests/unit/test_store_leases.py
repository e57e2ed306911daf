"""Leases on episodes: whatever samplers do, and however they die, each episode is ended once, by whoever holds it.

On SQLite and on PostgreSQL, by drawn histories and by processes that claim at the same time. Not here: episodes,
engines and whole runs (tests/e2e/test_samplers.py).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import mua
from mua.config.environment import EnvironmentConfig
from mua.engine.router_client import CONTRACT
from mua.rollout.rollout_worker import configuration_of, made_with, secrets_of
from mua.store import database, leases
from mua.store.database import Store
from mua.store.faults import StoreError, StoreUnreachable
from mua.store.leases import EpisodeLease, claim, deliver, end_groups, ended_episodes, give_back, open_group, renew
from mua.store.starts import find_part, router_row, state_of_run
from mua.store.tables import engines, episodes, parts, runs, tasks
from mua.store.writer import Insert, execute
from mua.utils.errors import ConfigError
from mua.utils.source_state import code_digest
from tests.postgres_support import PostgresServer

RUN, SIZE = "r", 3


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "store.sqlite")
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.database()


def group(ordinal: int, size: int = SIZE, part: int = 1) -> dict[str, Any]:
    return {
        "run_id": RUN, "round": 0, "ordinal": ordinal, "kind": "train", "domain": "help_desk", "task_id": f"t{ordinal}",
        "split": "train", "size": size, "state": "open", "part": part, "version": 0, "made_at": 1.0, "ended_at": None,
        "taken_step": None,
    }  # fmt: skip


def begin(store: Store, groups: int = 0, part: int = 1) -> None:
    with store.begin() as connection:
        now = leases.database_clock(connection)
        run = {"id": RUN, "output": "/nowhere", "state": "running", "started_at": 1.0}
        execute(connection, [
            Insert(runs, [run], "keep"),
            Insert(parts, [{"run_id": RUN, "part": part, "from_step": 0, "started_at": 1.0, "config": {}}]),
            Insert(engines, [router_row(part, "http://x", "k", [], {"mua": "1"}, version=0, capacity=4) | {
                "run_id": RUN, "seen_at": now}], "replace"),
        ])  # fmt: skip
        for ordinal in range(groups):
            open_group(connection, group(ordinal, part=part))


def test_the_first_groups_are_claimed_first_and_once(url: str) -> None:
    with Store.open(url) as store:
        begin(store, 3)
        with store.begin() as connection:
            first = claim(connection, RUN, 1, "a", 4, 60, 2)
            second = claim(connection, RUN, 1, "b", 99, 60, 2)
            assert not claim(connection, RUN, 1, "c", 99, 60, 2)
        assert [lease.place for lease in first] == [(0, 0), (0, 1), (0, 2), (1, 0)]
        assert [lease.place for lease in second] == [(1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
        with store.begin() as connection:
            assert not claim(connection, RUN, 2, "a", 9, 60, 2)  # of another start of the run
            give_back(connection, first[:2])
            again = claim(connection, RUN, 1, "b", 9, 60, 2)
            assert [lease.place for lease in again] == [(0, 0), (0, 1)]
            assert [lease.attempts for lease in again] == [2, 2]  # what the first holder may have written
            assert not deliver(connection, first[0], "x")
            assert deliver(connection, again[0], "y")
            assert not deliver(connection, again[0], "z")


def test_a_cancelled_or_reopened_group_takes_no_results(url: str) -> None:
    with Store.open(url) as store:
        begin(store, 2)
        with store.begin() as connection:
            held = claim(connection, RUN, 1, "a", 99, 60, 1)
        with store.begin() as connection:
            end_groups(connection, RUN, [0], "cancelled")
        with store.begin() as connection:
            kept = renew(connection, held, 60)
            assert kept == {lease.token for lease in held if lease.ordinal == 1}
            assert not deliver(connection, held[0], "x")
            open_group(connection, group(0))
            assert not deliver(connection, held[0], "x")
            fresh = claim(connection, RUN, 1, "b", 99, 60, 1)
            assert [lease.place for lease in fresh] == [(0, 0), (0, 1), (0, 2)]
            assert deliver(connection, fresh[0], "y")
            open_group(connection, group(1, part=2))  # the run was started again
            assert not deliver(connection, held[-1], "x")
            assert ended_episodes(connection, RUN, [0, 1]) == {(0, 0): "y"}


def test_a_lease_that_is_over_is_renewed_unless_it_was_taken(url: str) -> None:
    with Store.open(url) as store:
        begin(store, 1)
        with store.begin() as connection:
            (mine, other, *_) = claim(connection, RUN, 1, "a", 99, -1.0, 1)  # over at once
            assert renew(connection, [mine], 60) == {mine.token}
            taken = claim(connection, RUN, 1, "b", 99, 60, 1)
            assert [lease.place for lease in taken] == [(0, 1), (0, 2)]
            assert renew(connection, [mine, other], 60) == {mine.token}
            assert deliver(connection, mine, "x")
            assert not deliver(connection, other, "x")


def test_a_machine_suspended_within_a_transaction_holds_nothing_up(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL cannot tell it from one that vanished with its network: nothing more comes."""
    url = postgres.database()
    with Store.open(url) as ours:
        monkeypatch.setattr(database, "IDLE_SECONDS", 1)
        begin(ours, 1)
        found: list[EpisodeLease] = []

        def suspended(store: Store) -> None:
            with store.begin() as connection:
                assert len(claim(connection, RUN, 1, "a", 9, 60, 2)) == SIZE
                deadline = time.monotonic() + 30
                while not found and time.monotonic() < deadline:
                    time.sleep(0.05)
                    with ours.begin() as other:
                        found.extend(claim(other, RUN, 1, "b", 9, 60, 2))
                renew(connection, found, 60)

        with Store.open(url) as theirs, Store.open(url, write=False) as reader, reader.read() as reading:
            with pytest.raises(StoreUnreachable, match="does not answer"):
                suspended(theirs)
            assert [lease.attempts for lease in found] == [0] * SIZE  # as if the other had not been
            with theirs.begin() as connection:  # over a new connection
                assert renew(connection, found, 60) == {lease.token for lease in found}
            assert reading.execute(sa.select(sa.func.count()).select_from(episodes)).scalar_one() == SIZE
            assert reading.execute(sa.text("SHOW tcp_keepalives_idle")).scalar_one() == "30"


@pytest.mark.parametrize("seed", range(3))
def test_drawn_histories_end_every_episode_once(url: str, seed: int) -> None:
    """Claims, silence, heartbeats, results, cancellations and new starts in any order."""
    draw = random.Random(seed)
    with Store.open(url) as store:
        begin(store, 6)
        held: dict[str, list[EpisodeLease]] = {name: [] for name in "abc"}
        delivered: Counter[tuple[int, int]] = Counter()
        opened = Counter(dict.fromkeys(range(6), 1))
        attempts: set[tuple[tuple[int, int], int]] = set()
        for move in range(150):
            name = draw.choice("abc")
            mine = held[name]
            with store.begin() as connection:
                match draw.choice(["claim", "claim", "deliver", "deliver", "renew", "die", "leave", "reopen"]):
                    case "claim":
                        seconds = draw.choice([-1.0, 600.0])
                        found = claim(connection, RUN, 1, name, draw.randrange(1, 5), seconds, 2)
                        for lease in found:  # nobody else's attempts
                            assert (lease.place, lease.attempts) not in attempts
                            attempts.add((lease.place, lease.attempts))
                        mine += found
                    case "deliver" if mine:
                        lease = mine.pop(draw.randrange(len(mine)))
                        delivered[lease.place] += deliver(connection, lease, f"{name} {move}")
                    case "renew":
                        kept = renew(connection, mine, 600.0)
                        mine[:] = [lease for lease in mine if lease.token in kept]
                    case "die":  # its leases run out by themselves
                        for lease in mine:
                            connection.execute(
                                sa.update(episodes).where(episodes.c.lease == lease.token).values(lease_until=0.0)
                            )
                        mine.clear()
                    case "leave":
                        give_back(connection, mine)
                        mine.clear()
                    case "reopen" if move % 5 == 0:
                        ordinal = draw.randrange(6)
                        end_groups(connection, RUN, [ordinal], "cancelled")
                        open_group(connection, group(ordinal))
                        opened[ordinal] += 1
                        for sample in range(SIZE):
                            delivered[ordinal, sample] = 0
        with store.begin() as connection:
            connection.execute(sa.update(episodes).values(lease_until=0.0).where(episodes.c.state == "leased"))
            for lease in claim(connection, RUN, 1, "d", 99, 60, 2):
                delivered[lease.place] += deliver(connection, lease, f"d {lease.place}")
            found = ended_episodes(connection, RUN, range(6))
            end_groups(connection, RUN, range(6), "complete")
            assert set(connection.execute(sa.select(tasks.c.state)).scalars()) == {"complete"}
    assert set(found) == {(ordinal, sample) for ordinal in range(6) for sample in range(SIZE)}
    assert all(delivered[place] == 1 for place in found)
    assert len(set(found.values())) == len(found)


def _work(url: str, name: str, seed: int, dies: bool) -> None:
    draw = random.Random(seed)
    with Store.open(url) as store:
        for turn in range(10_000):
            mine = store.patiently(lambda connection: claim(connection, RUN, 1, name, 3, 0.5, 1), 30)
            if dies and turn == 1:
                with store.begin() as connection:  # in the middle of a transaction, with more claimed before
                    claim(connection, RUN, 1, name, 3, 0.5, 1)
                    os.kill(os.getpid(), signal.SIGKILL)
            with store.read() as connection:
                if (
                    not dies
                    and not mine
                    and not connection.execute(
                        sa.select(sa.func.count()).select_from(episodes).where(episodes.c.state != "done")
                    ).scalar()
                ):
                    return
            time.sleep(draw.uniform(0, 0.01))
            for lease in mine:
                store.patiently(partial(deliver, lease=lease, trajectory_id=lease.token), 30)


@pytest.mark.slow
def test_processes_that_claim_at_once_and_are_killed(url: str) -> None:
    with Store.open(url) as store:
        begin(store, 25)
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload([__name__])  # imported once for all of them
        workers = [server.Process(target=_work, args=(url, f"w{n}", n, n < 2)) for n in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
        assert [worker.exitcode for worker in workers] == [-9, -9, 0, 0]
        with store.read() as connection:
            found = ended_episodes(connection, RUN, range(25))
            by = set(connection.execute(sa.select(episodes.c.sampler)).scalars())
    assert len(found) == len(set(found.values())) == 25 * SIZE
    assert by & {"w2", "w3"}


def test_the_run_that_goes_on_is_found(url: str) -> None:
    with Store.open(url) as store:
        with store.read() as connection:
            assert find_part(connection, None) is None
            with pytest.raises(StoreError, match="has no run 'other'"):
                find_part(connection, "other")
        begin(store)
        with store.read() as connection:
            found = find_part(connection, None)
            assert found is not None
            assert (found.run_id, found.part, found.url, found.key) == (RUN, 1, "http://x", "k")
            assert state_of_run(connection, RUN) == "running"
        with store.begin() as connection:
            connection.execute(sa.update(engines).values(seen_at=engines.c.seen_at - 100))
        with store.read() as connection:
            assert find_part(connection, RUN) is None  # its trainer is silent
            assert find_part(connection, RUN, 200) is not None
        begin(store, part=2)
        with store.read() as connection:
            newest = find_part(connection, None)
            assert newest is not None
            assert newest.part == 2


CONFIG = """\
name: n
output: out
model: {{path: {model}}}
environment: {{name: help_desk}}
trainer: {{steps: 1}}
judge: {{llm: {{base_url: "http://127.0.0.1:1/v1", model: m, api_key: {key}}}}}
"""


def test_a_sampler_needs_the_configuration_of_the_run(tmp_path: Path) -> None:
    from mua.config.load import load_config
    from mua.observe.provenance import provenance
    from mua.store.starts import RunningPart

    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.format(model=tmp_path, key="secret-key"))
    config = load_config(file)
    stored = provenance(config)["config"]
    assert secrets_of(config) == ["judge.llm.api_key"]
    assert "secret-key" not in str(stored)

    def part(*secrets: str) -> RunningPart:
        return RunningPart(RUN, 1, "out", stored, {}, "http://x", "k", secrets, made_with(config))

    with pytest.raises(ConfigError, match=r"judge.llm.api_key.*--config"):
        configuration_of(part("judge.llm.api_key"), None, ())
    asked = configuration_of(part("judge.llm.api_key"), file, ["rollout.concurrency=3"]).judge
    assert asked is not None
    assert asked.llm.api_key.get_secret_value() == "secret-key"
    with pytest.raises(ConfigError, match=r"rollout.max_turns: the run has another value"):
        configuration_of(part(), None, ["rollout.max_turns=3"])
    with pytest.raises(ConfigError, match=r"engine.deterministic: the run has another"):
        configuration_of(part(), None, ["engine.deterministic=true"])


def test_a_sampler_of_another_mua_or_other_code_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mua.config.load import load_config
    from mua.observe.provenance import provenance
    from mua.rollout import rollout_worker
    from mua.store.starts import RunningPart

    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.format(model=tmp_path, key="none"))
    config = load_config(file)
    stored, ours = provenance(config)["config"], made_with(config)
    assert (ours["mua"], ours["contract"], len(ours["code"])) == (mua.__version__, CONTRACT, 16)

    def asked(made: dict[str, Any], *overrides: str) -> None:
        configuration_of(RunningPart(RUN, 1, "out", stored, {}, "http://x", "k", (), made), None, overrides)

    asked(ours)
    for made in (ours | {"mua": f"{mua.__version__}.post1"}, ours | {"contract": CONTRACT + 1}, {}):
        with pytest.raises(ConfigError, match="run r: "):
            asked(made, "samplers.other_code=warn")
    differing = ours | {"code": "0" * 16, "commit": "abc", "packages": ours["packages"] | {"transformers": "1.0"}}
    with pytest.raises(ConfigError, match=r"0{16} \(commit abc\).*transformers"):
        asked(differing)
    asked(differing, "samplers.other_code=warn")
    assert "transformers" in caplog.text

    class Dist:
        name, version = "books", "2.0"

    class Point:
        name, value, dist = "book_shop", "books.shop", Dist

    monkeypatch.setattr(rollout_worker, "entry_points", lambda group: [Point])
    with_books = config.model_copy(update={"environment": EnvironmentConfig(name="book_shop")})
    assert made_with(with_books)["packages"]["books"] == "2.0"
    assert "books" not in made_with(config)["packages"]


def test_the_digest_of_code_sees_changed_files(tmp_path: Path) -> None:
    (tmp_path / "mua" / "__pycache__").mkdir(parents=True)
    (tmp_path / "mua" / "a.py").write_text("1")

    def digest() -> str:
        return code_digest.__wrapped__(tmp_path)

    first = digest()
    (tmp_path / "mua" / "__pycache__" / "a.pyc").write_text("1")
    (tmp_path / "mua" / "a.md").write_text("1")
    assert digest() == first
    (tmp_path / "mua" / "a.py").write_text("2")
    second = digest()
    (tmp_path / "mua" / "a.py").rename(tmp_path / "mua" / "b.py")
    assert len({first, second, digest()}) == 3
