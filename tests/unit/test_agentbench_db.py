"""AgentBench's database tasks: records, the verdict, the sandbox against statements that mean harm, bad files.

With ``MUA_DBBENCH`` naming AgentBench's data/dbbench, its published tasks are run too: SQLite meets 239 of the 240
digests that MySQL made. Agreement of the comparison with AgentBench's code was looked at by hand: it is not here.
What every domain must keep is in tests/contract.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from hashlib import md5
from pathlib import Path
from typing import Any

import pytest

from environments.agentbench_db import DOMAIN, PATIENCE, AgentBenchDatabase, opening, own
from environments.agentbench_db.dialect import for_sqlite
from environments.agentbench_db.episode import tables_digest, wanted_digest
from environments.agentbench_db.records import load
from environments.agentbench_db.sandbox import MAX_ROWS, MAX_TEXT, Sandbox, SqlError
from environments.agentbench_db.scoring import agrees, cleaned, joined, table_digest
from mua.config.schema import EnvironmentConfig
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Task, Transcript
from mua.types import Json
from mua.utils.errors import ConfigError
from tests.desk_support import opened
from tests.tables import cases_of, refused
from workbench.demonstrate import demonstrate, replay_gold

cases = cases_of("agentbench_db")

SMALL = Path(__file__).parents[1] / "data/agentbench_db/standard.jsonl"


def over(place: Path) -> AgentBenchDatabase:
    config = EnvironmentConfig.model_validate({"name": "agentbench_db", "data": place})
    domain = DOMAIN.configured(config, Services())
    assert isinstance(domain, AgentBenchDatabase)
    return domain


def record(**changes: Any) -> Json:
    return {**json.loads(SMALL.read_text().splitlines()[0]), **changes}


def written(tmp_path: Path, *records: Json) -> Path:
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def played(task: Task, *calls: tuple[str, Json]) -> float:
    environment = opened(task, DOMAIN)
    for name, arguments in calls:
        environment.call(name, arguments)
    try:
        return environment.evaluate(Transcript([])).reward
    finally:
        environment.close()


def execute(query: str) -> tuple[str, Json]:
    return "execute_sql", {"query": query}


def commit(*answers: str) -> tuple[str, Json]:
    return "commit_final_answer", {"answers": list(answers)}


# ---- tasks


def test_the_own_tasks_are_what_the_generator_makes():
    for split in own.SIZES:
        lines = (own.FOLDER / f"{split}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == list(own.records(split)), (
            "python -m environments.agentbench_db.own"
        )
        assert len(DOMAIN.tasks(split)) == own.SIZES[split]


def test_no_answer_is_right_for_many_tasks():
    for split in own.SIZES:
        tasks = DOMAIN.tasks(split)
        answers = Counter(tuple(task.data["label"]) for task in tasks if "label" in task.data)
        assert answers.most_common(1)[0][1] <= 0.035 * len(tasks) + 1, split


def test_gold_and_expert_earn_everything_of_all_own_tasks_and_of_the_small_file():
    async def rewards(domain: AgentBenchDatabase) -> set[float]:
        tasks = [task for split in own.SIZES for task in domain.tasks(split)]
        found = [(await replay_gold(domain, task)).reward for task in tasks]
        return {*found, *[(await demonstrate(domain, task, 0)).reward for task in tasks]}

    assert asyncio.run(rewards(DOMAIN)) == {1.0}
    assert asyncio.run(rewards(over(SMALL))) == {1.0}
    assert over(SMALL.parent).tasks("test") == over(SMALL).tasks("test")


def test_statements_of_own_questions_lead_to_their_labels():
    """What the statement gives, handed in as it is, is the answer: the labels are right, and the database is too."""
    for split in own.SIZES:
        for task in DOMAIN.tasks(split):
            if "label" not in task.data:
                continue
            environment = opened(task, DOMAIN)
            result = environment.call(*execute(task.data["gold"]))
            assert agrees([item.strip("',") for item in result.text.strip("[]()").split("), (")], task.data["label"])


def test_the_published_tasks():
    named = os.environ.get("MUA_DBBENCH")
    if not named:
        pytest.skip("needs AgentBench's data/dbbench; name it in MUA_DBBENCH")
    tasks = [task for found in load(Path(named)).values() for task in found]
    assert len(tasks) == 360
    lost = [task.id for task in tasks if played(task, *DOMAIN.gold(task)) != 1.0]  # type: ignore[arg-type]
    assert lost == ["agentbench_db/standard/0226"]
    assert [task.id for task in tasks if played(task, commit("done")) or played(task, commit())] == []


def test_doing_nothing_and_writing_the_wrong_thing_earn_nothing():
    for task in over(SMALL).tasks("test"):
        name = task.data["tables"][0]["name"]
        assert played(task) == played(task, commit("nothing of the sort")) == 0.0
        assert played(task, execute(f"DELETE FROM `{name}`"), commit("done")) == 0.0
        assert played(task, execute(f"DROP TABLE `{name}`"), commit("done")) == 0.0
        assert played(task, execute(task.data["gold"])) == 0.0, "nothing was handed in"


def test_several_tables_evidence_and_a_digest_by_statement(tmp_path):
    two = [record()["table"], {**record()["table"], "table_name": "Second"}]
    write = record(
        table=two, type=["UPDATE"], label=["UPDATE Second SET Berth = '9'"], evidence="Berths are numbers.", sql=None
    )
    (task,) = over(written(tmp_path, write)).tasks("test")
    assert opening(task).startswith("Known: Berths are numbers.\nAbout the tables: ")
    assert played(task, execute("UPDATE Second SET Berth = '9'"), commit()) == 1.0
    assert played(task, execute("UPDATE `Harbour Boats` SET Berth = '8'"), commit()) == 0.0
    assert played(task, execute("ALTER TABLE Second DROP COLUMN Berth"), commit()) == 0.0


def test_an_answer_is_handed_in_once():
    task = next(task for task in DOMAIN.tasks("test") if "label" in task.data)
    environment = opened(task, DOMAIN)
    assert environment.call(*commit("wrong")).terminal
    assert environment.call(*commit(*task.data["label"])).error
    assert environment.call(*execute("SELECT 1")).error
    assert environment.evaluate(Transcript([])).reward == 0.0
    for bad in ({"answers": "1"}, {"answers": [1]}, {"answer": ["1"]}, {}, None):
        assert environment.call("commit_final_answer", bad).error


def test_the_other_side_points_to_the_tools_and_leaves():
    async def talk() -> list[bool]:
        user = DOMAIN.scripted_user(DOMAIN.tasks("test")[0], 0)
        assert DOMAIN.tasks("test")[0].data["question"] in (await user.open()).text
        return [(await user.reply("I think it is 7.")).stop for _ in range(PATIENCE)]

    assert asyncio.run(talk()) == [False] * (PATIENCE - 1) + [True]


# ---- the verdict


@cases
def test_answers_are_compared_as_agentbench_compares_them(answer, label, agree):
    assert agrees(answer, label) is agree


def test_nothing_is_evaluated_as_code(tmp_path):
    trap = tmp_path / "trap"
    for text in (f"[open({str(trap)!r}, 'w')]", "[__import__('os').getcwd()]", "[" * 5000, "[1" * 3000 + "]"):
        cleaned(text)
    assert not trap.exists()


def test_a_table_digest_is_that_of_the_formula():
    """NULL is left out of a row; MySQL cuts the list of the rows' beginnings at 1,024 bytes."""
    beginnings = sorted(md5(row).hexdigest()[:5] for row in (b"c", b"a,b"))
    assert table_digest([("c", None), ("a", "b")]) == md5(",".join(beginnings).encode()).hexdigest()
    assert table_digest([]) == "None"
    assert table_digest([("a",), ("b",)]) == table_digest([("b",), ("a",)]) != table_digest([("a",)])
    many = [(str(number),) for number in range(400)]
    hashes = sorted(md5(row[0].encode()).hexdigest()[:5] for row in many)
    assert table_digest(many) == md5(",".join(hashes)[:1024].encode()).hexdigest()
    assert joined(["b", "a"]) == "a_b"


# ---- the sandbox


@pytest.fixture(name="sandbox")
def fixture_sandbox() -> Any:
    made = Sandbox("x")
    made.create("Harbour Boats", ["Boat", "Berth"], [["Éire", "9"], ["osprey", "10"], ["Tern", "2"]])
    yield made
    made.close()


@cases
def test_statements_mean_what_mysql_means(sandbox, sql, rows):
    assert sandbox.execute(sql) == rows


def test_names_that_begin_with_a_digit_and_what_is_not_ended():
    assert for_sqlite("SELECT 1e5, 0x1F, 12 FROM 1952_race") == 'SELECT 1e5, 0x1F, 12 FROM "1952_race"'
    for text in ("'open \\'", '"', "`x", "/* x", "SELECT 'a"):
        assert for_sqlite(text) == text


@cases
def test_what_reaches_outside_is_refused(sandbox, tmp_path, sql):
    file = tmp_path / "outside"
    with pytest.raises(SqlError):
        sandbox.execute(sql.replace("{file}", str(file)))
    assert not file.exists()
    assert len(sandbox.execute("SELECT * FROM `Harbour Boats`")) == 3


_COUNT = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c{limit}) "


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        (_COUNT.format(limit="") + "SELECT count(*) FROM c", "more than 5,000,000 steps"),
        (
            _COUNT.format(limit=" LIMIT 300000") + "SELECT x || '' AS z FROM c ORDER BY z COLLATE mysql",
            "5,000,000 steps",
        ),
        (_COUNT.format(limit="") + "INSERT INTO `Harbour Boats` SELECT hex(zeroblob(40000)), x FROM c", "full"),
        (_COUNT.format(limit=f" LIMIT {MAX_ROWS + 1}") + "SELECT x FROM c", "more than 5,000 rows"),
        ("SELECT zeroblob(100000000)", "too big"),
        (f"SELECT '{'x' * MAX_TEXT}'", "longer than 100,000 characters"),
        ("SELECT " + "(" * 400 + "1" + ")" * 400, "stack|depth|deep"),
    ],
)
def test_what_takes_too_much_is_refused_the_same_everywhere(sandbox, sql, message):
    with pytest.raises(SqlError, match=message):
        sandbox.execute(sql)
    assert sandbox.execute("SELECT count(*) FROM `Harbour Boats`") == [(3,)]


def test_episodes_share_nothing():
    task = next(task for task in DOMAIN.tasks("test") if task.data["kind"] == "UPDATE")
    one, other = opened(task, DOMAIN), opened(task, DOMAIN)
    one.call(*execute(f"DELETE FROM `{task.data['tables'][0]['name']}`"))
    result = other.call(*execute(f"SELECT count(*) FROM `{task.data['tables'][0]['name']}`"))
    assert result.text == f"[({len(task.data['tables'][0]['rows'])},)]"
    one.close(), other.close()


def test_chance_comes_from_the_seed_and_long_results_are_cut():
    def drawn(seed: int) -> str:
        environment = opened(DOMAIN.tasks("test")[0], DOMAIN, seed)
        return environment.call(*execute("SELECT random(), hex(randomblob(4)), rand()")).text

    assert drawn(1) == drawn(1) != drawn(2)
    environment = opened(DOMAIN.tasks("test")[0], DOMAIN)
    assert environment.call(*execute("SELECT hex(zeroblob(2000))")).text.endswith("0[TRUNCATED]")


def test_the_digest_of_a_write_is_known_without_the_policy():
    task = next(task for task in DOMAIN.tasks("test") if task.data["kind"] == "INSERT")
    environment = opened(task, DOMAIN)
    assert environment._sandbox is not None
    assert tables_digest(environment._sandbox, task) != wanted_digest(task)


# ---- bad files


@cases
def test_what_is_wrong_with_a_record_is_named(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message) as error:
        over(written(tmp_path, record(**change)))
    assert "some.jsonl, record 1" in str(error.value)


def test_what_is_wrong_with_a_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="the records of agentbench_db/some/0001 and agentbench_db/some/0002"):
        over(written(tmp_path, record(), record()))
    path = tmp_path / "bad.jsonl"
    for text, message in (("{", "bad.jsonl, line 1: is no JSON"), ("[]", "line 1: must be a JSON object")):
        path.write_text(text)
        refused(message, over, path)
    refused(r"nothing is no file and no folder with any of train\.jsonl", over, tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    refused("is no file and no folder with any of", over, tmp_path / "empty")
    config = EnvironmentConfig.model_validate({"name": "agentbench_db", "options": {"limit": 3}})
    refused("'agentbench_db' has no options", DOMAIN.configured, config, Services())
