"""UserRL's records through ``environment.data``, in all gyms: splits, gold and experts, oracles, bad files, mixes.

The files of tests/data/userrl have UserRL's form and were made by this project. Models and the search service are
scripted servers on this machine, which answer as a fair one would. Not covered: how well a real model judges; reading
files themselves (tests/unit/test_gym_records.py); parquet where pyarrow is not installed.

With ``MUA_USERRL`` naming a clone of UserRL, its own records are loaded and its rules played too.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from environments.gyms._shared import Gym, act
from environments.gyms._shared.official import LAYOUTS
from environments.gyms._shared.records import GymName
from environments.gyms.function.records import family
from environments.gyms.search import SearchGym
from environments.kit.demonstrate import demonstrate, replay_gold
from mua.config.schema import EnvironmentConfig, EvaluationConfig, LlmConfig
from mua.environment.endpoint.services import ChatClient, Services
from mua.environment.protocol import Task
from mua.environment.registry import get_domain
from mua.environment.selection import Selection, environment_of
from mua.environment.tool_arguments import argument_checker
from mua.types import Json
from mua.utils.errors import ConfigError, MuaError
from tests import tables
from tests.chat_server import serving
from tests.gyms_support import SPLITS, judged, modeled, opened, played, say, text_of, verdict
from tests.tables import refused

FOLDER = Path(__file__).parents[1] / "data/userrl"
BY_RULE: tuple[GymName, ...] = ("function", "search")
BY_MODEL: tuple[GymName, ...] = ("telepathy", "turtle", "intention", "travel", "persuade")
LOADING = (*BY_RULE, *BY_MODEL)
"""All gyms but tau, whose records need tau-bench's tables: it has tests of its own below."""
WEB = {"search_url": "http://127.0.0.1:9/search"}


def gym_of(name: GymName) -> Gym:
    gym = get_domain(f"gyms/{name}")
    assert isinstance(gym, Gym)
    return gym


def given(name: GymName, data: Path, **more: Any) -> Gym:
    """The gym over ``data``, with endpoints that nobody asks."""
    dead = ChatClient(LlmConfig(base_url="http://127.0.0.1:9", model="m"))
    oracle: Any = more.pop("oracle", "llm" if name in BY_MODEL else "rule")
    settings = {"options": WEB if name == "search" else {}, **more}
    config = EnvironmentConfig(name=f"gyms/{name}", data=data, oracle=oracle, **settings)
    return gym_of(name).configured(config, Services(user=dead, judge=dead))


def ids(gym: Gym) -> dict[str, list[str]]:
    return {split: [task.id.rpartition("/")[2] for task in gym.tasks(split)] for split in SPLITS}


def records(name: GymName) -> list[Json]:
    found = json.loads((FOLDER / f"{name}.json").read_text())
    return [{"id": key, **one} for key, one in found.items()] if isinstance(found, dict) else found


def clone(root: Path) -> Path:
    """The small files where UserRL has its own."""
    for name, layout in LAYOUTS.items():
        home = root / "gyms" / f"{name.capitalize()}Gym" / f"{name}gym" / "data"
        home.mkdir(parents=True)
        stem = layout.stems[0] if name != "tau" else "tau_train"
        shutil.copy(FOLDER / f"{name}.json", home / f"{stem}.json")
    return root


def table(path: Path, *changes: Callable[[Json], object], keep: Callable[[Json], bool] = lambda row: True) -> Path:
    """The small table with its rows changed."""
    rows = [json.loads(line) for line in (FOLDER / "train.jsonl").read_text().splitlines()]
    for row in rows:
        for change in changes:
            change(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if keep(row)))
    return path


def of_split(split: str) -> Callable[[Json], object]:
    return lambda row: row["extra_info"].update(split=split)


# ---- which records, and in which split


@pytest.mark.parametrize("name", LOADING)
def test_a_record_file_is_the_test_split_unless_its_name_says_another(tmp_path: Path, name: GymName):
    every = [one["id"] for one in records(name)]
    assert ids(given(name, FOLDER / f"{name}.json")) == {"train": [], "validation": [], "test": every}
    for word, split in (("train", "train"), ("val", "validation"), ("test", "test"), ("22", "test")):
        shutil.copy(FOLDER / f"{name}.json", file := tmp_path / f"{name}_{word}.json")
        assert ids(given(name, file))[split] == every


@pytest.mark.parametrize("name", LOADING)
def test_tables_deal_the_records_and_leave_out_what_they_do_not_name(name: GymName):
    named = [records(name)[0]["id"]]
    for data in (FOLDER, FOLDER / "train.jsonl"):
        gym = given(name, data)
        assert ids(gym) == {"train": named, "validation": [], "test": []}
        (task,) = gym.tasks("train")
        assert (task.domain, task.split, task.id) == (f"gyms/{name}", "train", f"gyms/{name}/train/{named[0]}")
        assert task.data["difficulty"] in ("easy", "medium", "hard")
        assert json.loads(json.dumps(task.data)) == task.data


@pytest.mark.parametrize("name", LOADING)
def test_a_clone_is_read_and_so_is_a_table_in_it(tmp_path: Path, name: GymName):
    root = clone(tmp_path / "UserRL")
    every, named = [one["id"] for one in records(name)], [records(name)[0]["id"]]
    assert ids(given(name, root)) == {"train": [], "validation": [], "test": every}
    merged = table(root / "data/alltrain_multiturn/train.jsonl")
    assert ids(given(name, merged))["train"] == named
    assert ids(given(name, merged.parent))["train"] == named
    table(root / "data" / LAYOUTS[name].tables / "train.jsonl")
    assert ids(given(name, root)) == {"train": named, "validation": [], "test": []}


def test_a_claims_table_holds_its_records_itself(tmp_path: Path):
    argument = {"argument": "It is safe."}
    alone = table(
        tmp_path / "test.jsonl",
        of_split("dev"),
        lambda row: row["extra_info"]["tools_kwargs"]["interact_with_env"]["create_kwargs"].update(argument),
    )
    (task,) = given("persuade", alone).tasks("validation")
    assert (task.data["claim"], task.data["argument"]) == ("Streets should be lit all night.", "It is safe.")


def test_a_parquet_table_is_read_as_its_rows_are(tmp_path: Path):
    tables, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in (FOLDER / "train.jsonl").read_text().splitlines()]
    shutil.copy(FOLDER / "function.json", tmp_path)
    parquet.write_table(tables.Table.from_pylist(rows), tmp_path / "train.parquet")
    assert ids(given("function", tmp_path))["train"] == ["func-1"]
    (tmp_path / "train.parquet").write_bytes(b"PAR1 and nothing else PAR1")
    refused(r"train\.parquet: cannot be read as parquet", given, "function", tmp_path)


@pytest.mark.parametrize("name", LOADING)
async def test_openings_prompts_and_users_are_the_gyms_own(name: GymName):
    gym = given(name, FOLDER / f"{name}.json")
    for task in gym.tasks("test"):
        assert len(set(gym.openings(task))) >= 2
        assert gym.persona(task)
        assert (await gym.scripted_user(task, 1).open()).text in gym.openings(task)
    for style in ("full", "short"):
        assert "interact" in gym.system_prompt(style)  # type: ignore[arg-type]
    legal = opened(gym, gym.tasks("test")[0]).tools()[0].parameters["properties"]["choice"]["enum"]
    page = gym.system_prompt("full")
    assert all(f"`{choice}`" in page for choice in legal)
    assert all(f"`{choice}`" not in page for choice in {"search", "answer", "action"} - set(legal))


# ---- by rule


async def test_rules_are_played_by_gold_and_by_an_expert_who_only_tries_points():
    gym = given("function", FOLDER / "function.json")
    for task in gym.tasks("test"):
        gold = await replay_gold(gym, task)
        assert (gold.reward, gold.evaluation.success, gold.ended) == (1.0, True, True)
        blind = Task(task.id, task.domain, task.split, {"expected": 0.0})  # the moves may look at nothing but answers
        environment, moves = opened(gym, task), gym.expert(blind, 0)  # type: ignore[attr-defined]
        answer: str | None = None
        while not (await judged(environment)).success:
            move = next(moves) if answer is None else moves.send(answer)
            answer = (await environment.call(*move)).text
        assert (await judged(environment)).details["reward"] == 1.0


async def test_a_rule_is_told_to_four_decimals_and_not_at_the_test_numbers():
    gym = given("function", FOLDER / "function.json")
    task = gym.tasks("test")[1]  # a ** 2 / b + c - d at 3 2 1 4
    moves = ["3 2 1 4", "1 3 0 0", "1 0 0 0", "2 1 0 0", "51 1 1 1"]
    results = await say(opened(gym, task), *moves)
    assert [one.error for one in results] == [True, False, False, False, True]
    assert [one.text for one in results][1:4] == ["0.3333", "The rule gives no number there.", "4"]
    environment = opened(gym, task)
    answers = await played(environment, *[act("answer", one) for one in ("1.4999", "1.5000001")])
    assert [one.reward for one in answers] == [0.0, 1.0]


async def test_a_rule_outside_the_family_makes_the_expert_leave(tmp_path: Path):
    record = {"id": "f", "rule": "a * 7 + b + c + d", "test_case": [1, 1, 1, 1], "expected_result": 10}
    (tmp_path / "function.json").write_text(json.dumps([record]))
    gym = given("function", tmp_path)
    demonstration = await demonstrate(gym, gym.tasks("test")[0], 0)
    assert (demonstration.reward, demonstration.ended) == (0.0, True)
    assert len(family()[1]) > 10_000


@pytest.mark.parametrize(("snippet", "reward"), [("It was by Ada Holt, in 1820.", 1.0), ("Nobody knows.", 0.0)])
async def test_a_question_is_looked_up_and_answered_once_the_answer_was_found(snippet: str, reward: float):
    async def answer(request: web.Request) -> web.Response:
        found = [{"link": "https://a.org/1", "title": "Almanacs", "snippet": snippet}]
        return web.json_response({"organic": found if "Marlow" in (await request.json())["q"] else []})

    async with serving(answer, path="/v1/search") as server:
        gym = given("search", FOLDER / "search.json", options={"search_url": f"{server.url}/search"})
        assert isinstance(gym, SearchGym)
        (task,) = gym.tasks("test")
        demonstration = await demonstrate(gym, task, 0)
        assert (demonstration.reward, demonstration.ended) == (reward, True)
        assert (await replay_gold(gym, task)).reward == 1.0
        (wrong,) = await played(opened(gym, task), act("answer", "Ada"))
        assert (wrong.reward, wrong.terminal) == (0.0, True)


def test_records_of_search_need_a_web_search():
    refused(r"gyms/search needs options\.search_url", given, "search", FOLDER / "search.json", options={})


# ---- by models


@pytest.mark.parametrize("name", BY_MODEL)
def test_what_the_rule_oracle_lacks_asks_for_the_llm_oracle(name: GymName):
    with pytest.raises(ConfigError, match=rf"environment\.oracle: UserRL's records of 'gyms/{name}' have no .*use llm"):
        given(name, FOLDER / f"{name}.json", oracle="rule")
    config = EnvironmentConfig(name=f"gyms/{name}", data=FOLDER, oracle="llm")
    refused(r"needs the section user\.llm", gym_of(name).configured, config, Services())


def material(body: Json, name: str) -> str:
    """What a judge is given to judge, by its name."""
    return text_of(body).partition(f"{name}:\n<<<\n")[2].partition("\n>>>")[0]


async def test_a_thing_of_the_records_is_asked_about_and_named():
    asked: list[str] = []

    def person(body: Json) -> str:
        asked.append(text_of(body))
        return "Yes"

    def judge(body: Json) -> str:
        return verdict("Yes" if "boiler" in material(body, "the guess") else "No")

    async with modeled(gym_of("telepathy"), person, judge, data=FOLDER) as gym:
        (task,) = gym.tasks("train")
        for demonstration in (await demonstrate(gym, task, 0), await replay_gold(gym, task)):
            assert (demonstration.reward, demonstration.evaluation.success) == (1.0, True)
        assert "Kettle (a pot with a spout that boils water)" in asked[0]
        assert "Is it an object?" in asked[0]
        for name, reward in (("a kettle", 1.0), ("water boiler", 1.0), ("a pot", 0.0)):
            (result,) = await played(opened(gym, task), act("answer", name))
            assert result.reward == reward
        (guess,) = await say(opened(gym, task), "Is it a kettle?")
        assert "choice answer" in guess.text
        assert len(asked) == 1


async def test_a_story_of_the_records_is_asked_about_and_told():
    def judge(body: Json) -> str:
        point = text_of(body).partition("this one point:")[2].partition("- full")[0].strip()
        told, confirmed = (
            material(body, name) for name in ("the explanation", "the questions that were answered with Yes")
        )
        return verdict("full" if point in told and point[1:].strip(".") in confirmed else "none")

    async with modeled(gym_of("turtle"), lambda body: "Yes", judge, data=FOLDER) as gym:
        (task,) = gym.tasks("train")
        for demonstration in (await demonstrate(gym, task, 0), await replay_gold(gym, task)):
            assert (demonstration.reward, demonstration.evaluation.success) == (1.0, True)
        story = " ".join(statement for _, statement in task.data["criteria"])
        environment = opened(gym, task)
        results = await played(environment, act("answer", story), act("action", "Is it true that the clapper went?"))
        assert (results[0].reward, results[1].text) == (0.0, "Yes.")  # a point counts once it was asked about
    async with modeled(gym_of("turtle"), lambda body: "No", data=FOLDER) as gym:
        demonstration = await demonstrate(gym, gym.tasks("train")[0], 0)
        assert (demonstration.reward, demonstration.ended) == (0.0, True)


async def test_a_request_of_the_records_is_asked_about():
    heard: list[str] = []

    def person(body: Json) -> str:
        heard.append(text_of(body))
        return "As I said."

    def judge(body: Json) -> str:
        question = material(body, "the assistant's question")
        numbers = [n for n, words in ((1, "face"), (2, "cost")) if words in question]
        return json.dumps({"reason": "r", "numbers": numbers})

    async with modeled(gym_of("intention"), person, judge, data=FOLDER) as gym:
        (task,) = gym.tasks("train")
        wishes = {one["description"]: one["preference"] for one in task.data["details"]}
        assert (wishes["Direction"] in ("north", "south"), wishes["Budget"] in ("little", "much")) == (True, True)
        for demonstration in (await demonstrate(gym, task, 0), await replay_gold(gym, task)):
            assert (demonstration.reward, demonstration.evaluation.success) == (pytest.approx(1.4), True)
        assert f"Direction: {wishes['Direction']}" in heard[0]  # the person is told what was asked for, and no more
        assert "Budget" not in heard[0]


TRAVEL_FACTS = {"hotel": ("Cork", "2025-05-13"), "flight": ("Cork",)}


def travel_judge(body: Json) -> str:
    """Reads queries and questions as the record means them."""
    text = text_of(body)
    if query := material(body, "the query"):
        fitting = [part for part, facts in TRAVEL_FACTS.items() if part in query and all(f in query for f in facts)]
        return verdict(fitting[0] if len(fitting) == 1 else "none")
    asked = material(body, "the agent's message")
    for number, wish in enumerate(("garden", "breakfast", "early", "aisle"), 1):
        lines = [line for line in text.splitlines() if wish in line and line.startswith("- wish")]
        words = {1: "view", 2: "food", 3: "time", 4: "seat"}[number]
        if lines and words in asked:
            return verdict(lines[0].removeprefix("- ").partition(":")[0])
    return verdict("vague" if "preferences" in asked else "miss")


async def test_a_trip_of_the_records_is_searched_asked_about_and_booked():
    async with modeled(gym_of("travel"), lambda body: "Well, let me put it so.", travel_judge, data=FOLDER) as gym:
        (task,) = gym.tasks("train")
        assert (task.data["kind"], task.data["difficulty"]) == ("22", "easy")
        assert (await replay_gold(gym, task)).reward == 2.0
        demonstration = await demonstrate(gym, task, 0)
        assert (demonstration.reward, demonstration.evaluation.success) == (pytest.approx(4 * 0.8 + 2), True)
        assert demonstration.evaluation.details["untold"] == 0


async def test_options_are_shown_without_what_tells_their_worth_and_pay_as_the_record_says():
    async with modeled(gym_of("travel"), lambda body: "Well.", travel_judge, data=FOLDER) as gym:
        (task,) = gym.tasks("train")
        environment = opened(gym, task)
        moves = [
            act("answer", "H2"),
            act("search", "a hotel"),
            act("search", "hotel in Cork from 2025-05-13"),
            act("answer", "H9"),
            act("answer", "H2"),
            act("search", "flight to Cork"),
            act("answer", "F1"),
        ]
        unseen, vague, listed, unknown, second, _, cheap = await played(environment, *moves)
        assert (unseen.error, unknown.error) == (True, True)
        assert "Nothing fits yet" in vague.text
        options = [json.loads(line) for line in listed.text.splitlines()[1:]]
        assert {one["id"] for one in options} == {"H1", "H2", "H3", "H4"}
        assert all("type" not in one for one in options)
        assert (second.reward, cheap.reward, cheap.terminal) == (0.8, 0.0, True)


async def test_a_wish_is_hinted_at_as_the_record_does_and_told_once():
    heard: list[str] = []

    def person(body: Json) -> str:
        heard.append(text_of(body))
        return "I wake early."

    async with modeled(gym_of("travel"), person, travel_judge, data=FOLDER) as gym:
        environment = opened(gym, gym.tasks("train")[0])
        results = await say(environment, *["Which view do you like?"] * 2)
        assert [one.reward for one in results] == [0.8, 0.0]
        assert "A way to let it be known: I like to wake up to birds." in heard[0]


async def test_a_claim_of_the_records_is_argued_about_and_paid_by_the_furthest_stance():
    stances = iter(("agree", "strongly agree", "undecided", "strongly disagree"))
    heard: list[str] = []

    def judge(body: Json) -> str:
        heard.append(text_of(body))
        return verdict(next(stances))

    async with modeled(gym_of("persuade"), lambda body: "Hm.", judge, data=FOLDER) as gym:
        (task,) = gym.tasks("train")
        environment = opened(gym, task)
        results = await say(environment, *[f"Because of reason {n}." for n in range(4)])
        assert [round(one.reward * 6) for one in results] == [1, 0, 2, 3]
        assert results[-1].terminal
        assert (await judged(environment)).success
        assert "People feel safe where they can see" in heard[0]
        with pytest.raises(MuaError, match="holds no argument against its claim"):
            gym.gold(task)
        (searched,) = await played(opened(gym, task), act("search", "safety"))
        assert searched.error  # there are no notes


# ---- tau


def shop(folder: Path) -> Path:
    """tau-bench's tables for one customer with one order, in ``folder/retail``."""
    return tables.write_files(folder, tables.table("gym_official")["SHOP"])


@pytest.mark.parametrize("form", ["beside", "named", "table"])
async def test_tau_records_are_tasks_over_tau_benchs_tables(tmp_path: Path, form: str):
    tables = shop(tmp_path / ("other" if form == "named" else "records"))
    home = tmp_path / "records"
    home.mkdir(exist_ok=True)
    shutil.copy(FOLDER / "tau.json", home / "tau_train.json")
    data = table(home / "train.jsonl") if form == "table" else home
    gym = given("tau", data, options={"tau_bench": str(tables)} if form == "named" else {})
    (task,) = gym.tasks("train")
    assert task.id == "gyms/tau/retail/train/retail-train-000"
    assert gym.tasks("test") == gym.tasks("validation") == ()
    gold = await replay_gold(gym, task)
    assert (gold.reward, gold.evaluation.success) == (1.0, True)
    (idle,) = await played(opened(gym, task), act("finish"))
    assert (idle.reward, idle.terminal) == (0.0, True)
    assert "Be kind." in gym.prompt_for(task, "full")  # type: ignore[attr-defined]


def test_tau_records_without_tables_say_where_to_put_them(tmp_path: Path):
    shutil.copy(FOLDER / "tau.json", tmp_path)
    refused(r"put tau-bench's data into .*/retail, or name .*options\.tau_bench", given, "tau", tmp_path)
    refused(r"options\.domains: the records are of retail", given, "tau", tmp_path, options={"domains": "airline"})


# ---- what is wrong


@pytest.mark.parametrize("name", LOADING)
def test_a_bad_record_is_named_with_its_file_and_key(tmp_path: Path, name: GymName):
    broken = [{**one, "id": ""} for one in records(name)]
    (tmp_path / f"{name}.json").write_text(json.dumps(broken))
    refused(rf"{name}\.json, record 0.*: id: ", given, name, tmp_path)
    (tmp_path / f"{name}.json").write_text("{")
    refused(rf"{name}\.json: is no JSON", given, name, tmp_path)


@pytest.mark.parametrize("name", [name for name in LOADING if name not in ("persuade", "search")])
def test_what_is_not_there_is_said(tmp_path: Path, name: GymName):
    refused("there is no such file or folder", given, name, tmp_path / "nowhere")
    refused(rf"no records of gyms/{name} there; expected ", given, name, tmp_path)
    with pytest.raises(ConfigError, match=r"its rows name records and do not hold them; put \w+\.json beside it"):
        given(name, table(tmp_path / "train.jsonl"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train": of_split("sometime")}, r"row 0: 'extra_info\.split' must be one of train, dev"),
        ({"train": of_split("train"), "test": of_split("test")}, r"test\.jsonl, row 0: .*'func-1' is named by .*train"),
    ],
)
def test_what_is_wrong_with_a_tables_splits_is_named(tmp_path: Path, files: dict[str, Any], message: str):
    shutil.copy(FOLDER / "function.json", tmp_path)
    for name, change in files.items():
        table(tmp_path / f"{name}.jsonl", change)
    refused(message, given, "function", tmp_path)


def test_tables_without_rows_of_the_gym_and_tables_in_two_forms_are_refused(tmp_path: Path):
    shutil.copy(FOLDER / "function.json", tmp_path)
    table(tmp_path / "train.jsonl", keep=lambda row: "function" not in row["data_source"])
    refused(r"train\.jsonl: no row is of gyms/function", given, "function", tmp_path)
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    refused(r"train\.parquet and train\.jsonl are one table twice", given, "function", tmp_path)


def test_one_id_in_two_files_is_refused(tmp_path: Path):
    for name in ("functions_train.json", "functions_test.json"):
        shutil.copy(FOLDER / "function.json", tmp_path / name)
    refused(r"functions_train\.json: the record 'func-1' stands in .*functions_test", given, "function", tmp_path)


# ---- mixes


async def mixed(data: Path, *names: str, **more: Any) -> dict[str, Any]:
    config = EnvironmentConfig(mix=dict.fromkeys(names, 1.0), data=data, **more)
    return dict(Selection.from_config(config).domains)


async def test_in_a_mix_a_gym_reads_the_folder_of_its_name_and_the_others_keep_their_own(tmp_path: Path):
    (tmp_path / "function").mkdir()
    shutil.copy(FOLDER / "function.json", tmp_path / "function")
    domains = await mixed(tmp_path, "gyms/function", "gyms/intention", "help_desk")
    assert ids(domains["gyms/function"])["test"] == ["func-1", "func-2"]
    assert list(domains["gyms/intention"].tasks("test")) == list(gym_of("intention").tasks("test"))


async def test_a_clone_or_a_table_is_for_every_gym_of_a_mix(tmp_path: Path):
    for data in (clone(tmp_path / "UserRL"), FOLDER / "train.jsonl"):
        domains = await mixed(data, "gyms/function", "gyms/search", options={"search.search_url": WEB["search_url"]})
        assert [len(ids(one)["train"]) + len(ids(one)["test"]) for one in domains.values()] in ([2, 1], [1, 1])
    domains = await mixed(FOLDER / "function.json", "gyms/function", "gyms/search")
    assert len(domains["gyms/function"].tasks("test")) == 2
    assert len(domains["gyms/search"].tasks("test")) == 180
    shutil.copy(FOLDER / "function.json", tmp_path / "mine.json")
    with pytest.raises(ConfigError, match="whose records these are its name does not tell; in a mix name a folder"):
        await mixed(tmp_path / "mine.json", "gyms/function", "gyms/search")
    with pytest.raises(ConfigError, match=r"no row is of gyms/function"):
        await mixed(table(tmp_path / "t.jsonl", keep=lambda row: row["extra_info"]["index"] == 5), "gyms/function")
    with pytest.raises(ConfigError, match=r"UserRL's records of 'gyms/turtle' have no .*use llm"):
        await mixed(FOLDER / "train.jsonl", "gyms/function", "gyms/turtle")


async def test_a_gym_that_is_only_evaluated_keeps_its_own_tasks_beside_a_record_file_of_the_trained_one():
    trained = EnvironmentConfig(name="gyms/function", data=FOLDER / "function.json")
    beside = environment_of(["gyms/search"], trained, EvaluationConfig(domains=["gyms/search"]))
    domains = Selection.from_config(beside).domains
    assert list(domains["gyms/search"].tasks("test")) == list(gym_of("search").tasks("test"))


# ---- UserRL's own


async def test_userrls_own_records_are_played():
    named = os.environ.get("MUA_USERRL")
    if not named:
        pytest.skip("needs a clone of UserRL; name it in MUA_USERRL")
    data = Path(named) / "gyms"
    rules = given("function", data / "FunctionGym/functiongym/data/functions.json")
    played_out = [await demonstrate(rules, task, 0) for task in rules.tasks("test")]
    assert sum(one.evaluation.success for one in played_out) == 537
    assert all([(await replay_gold(rules, task)).evaluation.success for task in rules.tasks("test")])
    for name, files, sizes in (
        ("telepathy", "TelepathyGym/telepathygym/data", (0, 401)),
        ("turtle", "TurtleGym/turtlegym/data", (0, 471)),
        ("intention", "IntentionGym/intentiongym/data", (1012, 95)),
        ("search", "SearchGym/searchgym/data", (0, 125)),
    ):
        gym = given(name, data / files)  # type: ignore[arg-type]
        assert (len(gym.tasks("train")), len(gym.tasks("test"))) == sizes
        check = argument_checker(opened(gym, gym.tasks("test")[0]).tools()[0])
        moves = [move for task in gym.tasks("test") for move in gym.gold(task)]
        assert all(check(move[1]) is None for move in moves)  # type: ignore[misc, arg-type]


def test_userrls_own_tables_deal_its_records_as_published():
    named = os.environ.get("MUA_USERRL")
    if not named:
        pytest.skip("needs a clone of UserRL; name it in MUA_USERRL")
    pytest.importorskip("pyarrow")
    published = {
        "function": (460, 78), "telepathy": (360, 41), "turtle": (423, 48), "intention": (380, 40),
        "persuade": (378, 42), "search": (0, 125),
    }  # fmt: skip
    for name, sizes in published.items():
        gym = given(name, Path(named))  # type: ignore[arg-type]
        assert (len(gym.tasks("train")), len(gym.tasks("test"))) == sizes, name
