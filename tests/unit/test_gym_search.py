"""The search gym: its world and questions, the index, answers, judge and web service.

Judge and web service are scripted servers on this machine, reached over HTTP. Not covered: a real search service and a
real judge; what tests/contract asks of every domain and gym.
"""

from __future__ import annotations

import json
import re
import threading
from contextlib import AbstractAsyncContextManager
from functools import lru_cache, partial
from pathlib import Path

import pytest

from environments.gyms._shared import Gym, Setting, act
from environments.gyms.search import DOMAIN, SearchGym
from environments.gyms.search import world as search_world
from environments.gyms.search.world import corpus, matches, shared_index
from environments.kit.ranking import ranking
from mua.config.schema import EnvironmentConfig
from mua.environment.endpoint.services import Services
from mua.utils.errors import EnvironmentFault
from tests.chat_server import Handler, fails, never, raw, serving
from tests.counting import operations
from tests.gyms_support import modeled, opened, played, unasked
from tests.tables import cases_of, refused

cases = cases_of("gym_search")

TEST = DOMAIN.tasks("test")


async def test_searches_are_counted_and_guessing_ends():
    environment = opened(DOMAIN, TEST[0])
    results = await played(environment, *[act("search", "Zinstad")] * 6)
    assert [result.error for result in results] == [False] * 5 + [True]
    results = await played(environment, *[act("answer", guess) for guess in ("1800", "1801")])
    assert [result.reward for result in results] == [0.0] * 2
    assert [result.terminal for result in results] == [True, False]
    assert results[1].error


@cases
def test_answers_are_compared_once_normalized(given: str, accepted: str, same: bool):
    assert matches(given, [accepted]) is same


async def test_an_alias_is_an_answer():
    task = next(task for task in TEST if task.data["aliases"])
    (result,) = await played(opened(DOMAIN, task), act("answer", task.data["aliases"][0]))
    assert result.reward == 1.0


def test_the_work_of_the_index_grows_with_its_documents_and_it_finds_by_words():
    index, documents = shared_index(), corpus()
    half, whole = (operations(partial(ranking, documents[: len(documents) // part])) for part in (2, 1))
    assert half < whole < 2.5 * half
    assert whole < 100 * len(documents)
    assert index.best("Zinstad town", 3)[0].title == "Zinstad"
    assert index.best("xyzzy", 3) == index.best("the of", 3) == []
    assert shared_index() is shared_index()


async def test_building_the_index_does_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(search_world, "_built", lru_cache(threading.current_thread))
    assert await search_world.ready_index() is not threading.main_thread()
    assert await search_world.ready_index() is search_world.shared_index()


# The judge.


def judging(verdict: str) -> AbstractAsyncContextManager[Gym]:
    return modeled(DOMAIN, unasked, lambda body: verdict)


@pytest.mark.parametrize(("verdict", "reward"), [("Yes", 1.0), ("No", 0.0)])
async def test_a_judge_decides_where_words_differ(verdict: str, reward: float):
    async with judging(f'{{"reason": "r", "verdict": "{verdict}"}}') as gym:
        (result,) = await played(opened(gym, TEST[0]), act("answer", "something like it"))
        assert result.reward == reward
        (exact,) = await played(opened(gym, TEST[0]), act("answer", TEST[0].data["answer"]))
        assert exact.reward == 1.0


def test_the_judge_has_to_be_configured():
    refused(r"judge\.llm", DOMAIN.configured, EnvironmentConfig(name="gyms/search", oracle="llm"), Services())


# The web service.


def on_the_web(url: str, **more: str | float) -> SearchGym:
    options = {**DOMAIN.defaults, "search_url": url, **more}
    return SearchGym(Setting(options=options))


async def test_a_web_service_is_asked_with_the_key_and_its_results_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_SEARCH_KEY", "k-123")
    found = {"organic": [{"link": f"u:{n}", "title": f"T{n}", "snippet": f"S{n}"} for n in range(8)]}
    async with serving(raw(json.dumps(found)), path="/v1/search") as server:
        gym = on_the_web(f"{server.url}/search", search_key_env="SOME_SEARCH_KEY")
        results = await played(opened(gym, TEST[0]), act("search", "who"), act("search", "what"))
    assert [headers["X-API-KEY"] for headers in server.headers] == ["k-123", "k-123"]
    assert server.received == [{"q": "who", "num": 5}, {"q": "what", "num": 5}]
    assert results[0].text.splitlines()[0] == "[1] T0: S0"
    assert len(results[0].text.splitlines()) == 5


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (never, "0.2 s"),
        (fails(503), "status 503"),
        (raw("hello", "text/plain"), "no JSON"),
        (raw('{"organic": [{"title": "T"}]}'), "no address"),
        (raw('["organic"]'), "no list"),
    ],
    ids=["slow", "broken", "prose", "other_shape", "no_list"],
)
async def test_a_web_service_that_fails_is_a_fault_of_the_environment(
    handler: Handler, said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SOME_SEARCH_KEY", "k-123")
    async with serving(handler, path="/v1/search") as server:
        seconds = 0.2 if handler is never else 30.0
        gym = on_the_web(f"{server.url}/search", search_seconds=seconds, search_key_env="SOME_SEARCH_KEY")
        with pytest.raises(EnvironmentFault, match=re.escape(said)) as raised:
            await played(opened(gym, TEST[0]), act("search", "who"))
    assert "k-123" not in repr(raised.value)
    assert raised.value.__cause__ is None


def test_a_key_that_is_not_set_is_named():
    refused("NOT_SET_HERE", on_the_web, "http://127.0.0.1:9", search_key_env="NOT_SET_HERE")


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
    (result,) = await played(opened(gym, gym.tasks("test")[0]), act("answer", "ada"))
    assert result.reward == 1.0
    assert DOMAIN.tasks("test") is TEST


@cases
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: str, said: str):
    (tmp_path / "test.jsonl").write_text(line)
    refused(said, given, tmp_path)


def test_a_folder_needs_questions_and_a_web_search(tmp_path: Path):
    refused(r"test\.jsonl", given, tmp_path)
    refused("search_url", given, tmp_path, search_url="")
