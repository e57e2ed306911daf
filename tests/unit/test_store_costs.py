"""What lists and the page's poll cost must not grow with a run: counted in steps of SQLite's machine, and in rows that
PostgreSQL plans to read. Not here: overviews, which are of everything, and how long anything takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from mua.store.database import Store
from mua.store.queries import COUNTED, Order, TrajectoryFilter, changes, list_runs, list_trajectories
from mua.store.tables import trajectories
from mua.view.page_answers import Answers
from mua.view.viewed_runs import ViewedRuns
from tests.postgres_support import PostgresServer
from tests.store_support import write_run

FEW, MANY = 2_000, 40_000


def grow(store: Store, count: int) -> None:
    """Copies of one trajectory, the others' neighbors in every order."""
    own = [column.name for column in trajectories.c if column.name not in ("id", "ordinal", "ended_at", "reward")]
    numbers = (
        f"generate_series(100, {99 + count}) AS numbers(n)" if store.postgres else
        f"(WITH RECURSIVE up(n) AS (VALUES (100) UNION ALL SELECT n + 1 FROM up WHERE n < {99 + count}) "
        "SELECT n FROM up) AS numbers"
    )  # fmt: skip
    with store.begin() as connection:
        copied = (
            f"INSERT INTO trajectories (id, ordinal, ended_at, reward, {', '.join(own)}) "
            f"SELECT 'r/1/0/' || n || '/0/1', n, n % 7, n % 5, {', '.join(own)} FROM trajectories, {numbers} "
            "WHERE id = 'r/1/0/0/0/1'"
        )
        connection.execute(sa.text(copied))
        connection.exec_driver_sql("ANALYZE")


QUESTIONS: dict[str, dict[str, str]] = {
    "poll": {}, "runs": {},
    **{f"trajectories by {order}": {"order": order} for order in ("newest", "oldest", "reward", "tokens", "turns",
                                                                  "seconds")},
    "trajectories of training": {"round": "0"}, "trajectories that failed": {"success": "false"},
    "trajectories of one task": {"text": "task"},
}  # fmt: skip


@pytest.fixture(scope="module")
def steps_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[int]]]:
    """Steps of SQLite's machine, in hundreds, for a question to a short run and to a long one."""
    found, steps = [], [0]

    def tick() -> int:
        steps[0] += 1
        return 0

    for count in (FEW, MANY):
        folder = tmp_path_factory.mktemp("store")
        with Store.open(folder) as store:
            write_run(store)
            grow(store, count)
        store = Store.open(folder, write=False)
        sa.event.listen(store.engine, "checkout", lambda raw, *_: raw.set_progress_handler(tick, 100))
        found.append((store, Answers(ViewedRuns([(store, None)], None))))

    def asked(name: str) -> list[int]:
        costs = []
        for store, answers in found:
            steps[0] = 0
            with store.read() as connection:
                match name:
                    case "poll":
                        changes(connection, "r")
                    case "runs":
                        answers.answer("runs", {})
                        list(list_runs(connection))
                    case _:
                        page = answers.answer("trajectories", {"run": "r", **QUESTIONS[name]})
                        assert (page["total"], len(page["rows"])) == (COUNTED + 1, 50)
            costs.append(steps[0])
        return costs

    yield asked
    for store, _ in found:
        store.close()


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_costs_the_same_of_a_short_run_and_a_long_one(
    steps_of: Callable[[str], list[int]], name: str
) -> None:
    short, long = steps_of(name)
    assert long <= 1.1 * short + 20


@pytest.mark.parametrize("order", ["newest", "oldest", "reward", "tokens", "turns", "seconds"])
def test_postgresql_reads_a_page_from_an_index(postgres: PostgresServer, order: Order) -> None:
    with Store.open(postgres.database()) as store:
        write_run(store)
        grow(store, MANY // 4)
        statements: list[str] = []
        with store.begin() as connection:

            @sa.event.listens_for(connection, "before_execute", retval=False)
            def note(_: object, clause: sa.Select, *__: object) -> None:
                compiled = clause.compile(dialect=postgresql.dialect(), compile_kwargs={"literal_binds": True})
                statements.append(str(compiled))

            list(list_trajectories(connection, TrajectoryFilter(run="r"), 50, order=order))
            changes(connection, "r")
            for statement in list(statements):
                text = connection.exec_driver_sql("EXPLAIN (FORMAT JSON) " + statement.replace("%", "%%")).scalar()
                (plan,) = text if isinstance(text, list) else json.loads(str(text))
                assert plan["Plan"]["Total Cost"] < 300, plan  # to read them all costs 500
