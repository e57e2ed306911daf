"""The search gym: its world and questions, the index, answers, the expert over all questions, judge and web service.

Judge and web service are scripted servers on this machine, reached over HTTP. Not covered: a real search service and a
real judge; what the contract test asks of every domain; the canned policies (tests/contract/test_canned_policies.py).
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from pathlib import Path

import pytest
from aiohttp import web

from environments.gyms._shared import Setting, act
from environments.gyms.search import DOMAIN, SearchGym, index
from environments.gyms.search.answers import matches
from environments.gyms.search.documents import corpus, read
from environments.gyms.search.index import Index, shared_index
from environments.gyms.search.relations import relations
from environments.gyms.search.world import world
from mua.config.schema import EnvironmentConfig, LlmConfig
from mua.endpoint.services import ChatClient, Services
from mua.environment.protocol import Environment, Task, ToolResult, Transcript
from mua.errors import ConfigError, EnvironmentFault, JudgeFault
from tests.chat_fixtures import chat_server, says
from tests.counting import operations
from tests.tables import cases_of
from workbench.demonstrate import demonstrate, replay_gold

cases = cases_of("gym_search")

TEST = DOMAIN.tasks("test")


def opened(task: Task, gym: SearchGym = DOMAIN) -> Environment:
    environment = gym.environment()
    environment.reset(task, 0)
    return environment


async def played(environment: Environment, *moves: tuple[str, dict]) -> list[ToolResult]:
    return [await environment.call(*move) for move in moves]  # type: ignore[misc, arg-type]


def test_the_gym_is_held_out_and_large_enough():
    assert DOMAIN.held_out
    assert DOMAIN.tasks("train") == ()
    assert len(DOMAIN.tasks("validation")) == 60
    assert Counter(task.data["kind"] for task in TEST) == {"2_hops": 80, "3_hops": 80, "4_hops": 20}
    assert {task.data["difficulty"] for task in TEST} == {"easy", "medium", "hard"}


def test_every_relation_of_the_world_can_be_read_from_the_documents():
    assert len(corpus()) == len(world()) == 3500
    for document in corpus():
        entity = world()[document.title]
        assert {relation: read(document.text, relation) for relation in entity.facts} == dict(entity.facts)


def test_every_question_has_one_answer_that_no_document_on_its_way_gives():
    questions = [task.data for task in (*TEST, *DOMAIN.tasks("validation"))]
    texts = {document.title: document.text for document in corpus()}
    assert len({data["question"] for data in questions}) == len({data["start"] for data in questions}) == 240
    for data in questions:
        name = data["start"]
        for relation in data["chain"][:-1]:
            assert data["answer"] not in texts[name]
            name = world()[name].facts[relation]
        assert world()[name].facts[data["chain"][-1]] == data["answer"]
        assert data["answer"] not in data["question"]
        assert data["start"] in data["question"]


def test_the_splits_follow_different_relations():
    for split in ("validation", "test"):
        for task in DOMAIN.tasks(split):
            entity = world()[task.data["start"]]
            for name in task.data["chain"]:
                relation = relations()[entity.kind][name]
                assert relation.split == split
                entity = world().get(entity.facts[name], entity)


def test_documents_tell_several_things_of_a_sort_in_other_words_than_questions():
    common = {"which", "whom", "that", "town", "year", "person", "this", "with", "from", "their"}
    for kind, of_kind in relations().items():
        for target in ("person", "town", "year"):
            assert sum(one.target == target for one in of_kind.values()) in (0, 5)
        for name, one in of_kind.items():
            asked, told = (
                {word[:5] for word in re.findall(r"[a-z]{4,}", text.lower()) if word not in common}
                for text in (f"{one.noun} {one.question}".replace("{sort}", ""), " ".join(one.wordings))
            )
            assert not asked & told, (kind, name)
            assert len({of.split for of in of_kind.values()}) == 2


async def test_the_expert_answers_every_question_within_its_searches():
    for task in (*TEST, *DOMAIN.tasks("validation")):
        for loose in (0.0, 1.0):
            demonstration = await demonstrate(DOMAIN, task, 3, loose)
            assert demonstration.reward == 1.0, task.data
            assert demonstration.evaluation.success
            assert demonstration.ended
        assert (await replay_gold(DOMAIN, task)).reward == 1.0


async def test_finishing_at_once_pays_nothing_on_any_question():
    for task in (*TEST, *DOMAIN.tasks("validation")):
        environment = opened(task)
        (result,) = await played(environment, act("finish"))
        assert (result.reward, result.terminal) == (0.0, True)
        assert not (await environment.evaluate(Transcript([]))).success  # type: ignore[misc]


async def test_searches_are_counted_and_guessing_ends():
    environment = opened(TEST[0])
    results = await played(environment, *[act("search", "Zinstad")] * 6)
    assert [result.error for result in results] == [False] * 5 + [True]
    results = await played(environment, *[act("answer", guess) for guess in ("1800", "1801")])
    assert [result.reward for result in results] == [0.0] * 2
    assert [result.terminal for result in results] == [True, False]
    assert results[1].error


@cases
def test_answers_are_compared_once_normalised(given: str, accepted: str, same: bool):
    assert matches(given, [accepted]) is same


async def test_an_alias_is_an_answer():
    task = next(task for task in TEST if task.data["aliases"])
    (result,) = await played(opened(task), act("answer", task.data["aliases"][0]))
    assert result.reward == 1.0


def test_a_surname_that_several_bear_is_no_alias():
    people = [entity.name for entity in world().values() if entity.kind == "person"]
    surnames = Counter(name.split()[-1] for name in people)
    for task in TEST:
        assert all(surnames.get(alias, 1) == 1 for alias in task.data["aliases"])


def test_the_work_of_the_index_grows_with_its_documents_and_it_finds_by_words():
    index, documents = shared_index(), corpus()
    half, whole = (operations(partial(Index, documents[: len(documents) // part])) for part in (2, 1))
    assert half < whole < 2.5 * half
    assert whole < 100 * len(documents)
    assert index.search("Zinstad town", 3)[0].title == "Zinstad"
    assert index.search("xyzzy", 3) == index.search("the of", 3) == []
    assert shared_index() is shared_index()


async def test_building_the_index_does_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(index, "_built", lru_cache(threading.current_thread))
    assert await index.ready_index() is not threading.main_thread()
    assert await index.ready_index() is index.shared_index()


# The judge.


@asynccontextmanager
async def judged(verdict: str) -> AsyncIterator[SearchGym]:
    async with chat_server(lambda body: says(verdict)) as server:
        endpoint = ChatClient(LlmConfig(base_url=server.base_url, model="m", max_retries=0), "judge")
        config = EnvironmentConfig(name="gyms/search", oracle="llm")
        yield DOMAIN.configured(config, Services(judge=endpoint))
        await endpoint.close()


@pytest.mark.parametrize(("verdict", "reward"), [("Yes", 1.0), ("No", 0.0)])
async def test_a_judge_decides_where_words_differ(verdict: str, reward: float):
    async with judged(f'{{"reason": "r", "verdict": "{verdict}"}}') as gym:
        (result,) = await played(opened(TEST[0], gym), act("answer", "something like it"))
        assert result.reward == reward
        (exact,) = await played(opened(TEST[0], gym), act("answer", TEST[0].data["answer"]))
        assert exact.reward == 1.0


async def test_a_verdict_that_cannot_be_read_is_no_reward():
    async with judged("perhaps") as gym:
        with pytest.raises(JudgeFault):
            await played(opened(TEST[0], gym), act("answer", "something like it"))


def test_the_judge_has_to_be_configured():
    with pytest.raises(ConfigError, match=r"judge\.llm"):
        DOMAIN.configured(EnvironmentConfig(name="gyms/search", oracle="llm"), Services())


# The web service.

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/search", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/search"
    finally:
        await runner.cleanup()


def on_the_web(url: str, **more: str | float) -> SearchGym:
    options = {**DOMAIN.defaults, "search_url": url, **more}
    return SearchGym(Setting(options=options))


async def test_a_web_service_is_asked_with_the_key_and_its_results_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_SEARCH_KEY", "k-123")
    seen = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append((request.headers["X-API-KEY"], await request.json()))
        found = [{"title": f"T{number}", "snippet": f"S{number}"} for number in range(8)]
        return web.json_response({"organic": found})

    async with serving(handler) as url:
        gym = on_the_web(url, search_key_env="SOME_SEARCH_KEY")
        results = await played(opened(TEST[0], gym), act("search", "who"), act("search", "what"))
    assert seen == [("k-123", {"q": "who", "num": 5}), ("k-123", {"q": "what", "num": 5})]
    assert results[0].text.splitlines()[0] == "[1] T0: S0"
    assert len(results[0].text.splitlines()) == 5


async def slow(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.json_response({})


async def broken(_: web.Request) -> web.StreamResponse:
    return web.Response(status=503)


async def prose(_: web.Request) -> web.StreamResponse:
    return web.Response(text="hello")


async def other_shape(_: web.Request) -> web.StreamResponse:
    return web.json_response({"organic": [{"title": "T"}]})


async def no_list(_: web.Request) -> web.StreamResponse:
    return web.json_response(["organic"])


@pytest.mark.parametrize(
    ("handler", "said"),
    [(slow, "0.2 s"), (broken, "HTTP 503"), (prose, "no list"), (other_shape, "snippet"), (no_list, "no list")],
)
async def test_a_web_service_that_fails_is_a_fault_of_the_environment(
    handler: Handler, said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SOME_SEARCH_KEY", "k-123")
    async with serving(handler) as url:
        seconds = 0.2 if handler is slow else 30.0
        gym = on_the_web(url, search_seconds=seconds, search_key_env="SOME_SEARCH_KEY")
        with pytest.raises(EnvironmentFault, match=re.escape(said)) as raised:
            await played(opened(TEST[0], gym), act("search", "who"))
    assert "k-123" not in repr(raised.value)
    assert raised.value.__cause__ is None


async def test_a_service_that_is_not_there_is_a_fault_too():
    gym = on_the_web("http://127.0.0.1:9/search", search_seconds=30.0)
    with pytest.raises(EnvironmentFault, match="ConnectError"):
        await played(opened(TEST[0], gym), act("search", "who"))


def test_a_key_that_is_not_set_is_named():
    with pytest.raises(ConfigError, match="NOT_SET_HERE"):
        on_the_web("http://127.0.0.1:9", search_key_env="NOT_SET_HERE")


# Questions from a folder.


def given(folder: Path, **more: str) -> SearchGym:
    options = {"search_url": "http://127.0.0.1:9/search", **more}
    return DOMAIN.configured(EnvironmentConfig(name="gyms/search", data=folder, options=options), Services())


async def test_questions_of_a_folder_are_asked_instead(tmp_path: Path):
    lines = [
        '{"question": "Who?", "answer": "Ada King", "aliases": ["Ada"]}',
        '{"id": "b", "question": "Q", "answer": "A"}',
    ]
    (tmp_path / "test.jsonl").write_text("\n".join(lines))
    gym = given(tmp_path)
    assert [task.id for task in gym.tasks("test")] == ["gyms/search/test/1", "gyms/search/test/b"]
    assert gym.tasks("train") == ()
    (result,) = await played(opened(gym.tasks("test")[0], gym), act("answer", "ada"))
    assert result.reward == 1.0
    assert DOMAIN.tasks("test") is TEST


@cases
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: str, said: str):
    (tmp_path / "test.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=said):
        given(tmp_path)


def test_a_folder_needs_questions_and_a_web_search(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"test\.jsonl"):
        given(tmp_path)
    with pytest.raises(ConfigError, match="search_url"):
        given(tmp_path, search_url="")
