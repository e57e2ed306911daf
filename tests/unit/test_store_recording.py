"""What episodes leave in the store: requests, calls, failed attempts, groups that begin again, and no secret; runs that
are killed at drawn moments.

Runner, environment, chat endpoint over HTTP and store are real, the policy is scripted. Not here: a real engine and a
trainer's steps (tests/e2e/test_resume.py); 200 kills and PostgreSQL (docs/benchmarks/store.md).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from aiohttp import web

from environments.help_desk.tasks import generate
from mua.config.schema import DistillationConfig
from mua.environment.endpoint.services import Services
from mua.rollout import runner as runner_module
from mua.rollout.runner import EpisodeRunner
from mua.rollout.teacher import Teacher
from mua.store.blobs import check_text, message_lists, read_texts
from mua.store.database import Store
from mua.store.recorder import NotedRequest, Recorder, noting
from mua.store.starts import begin_part
from mua.store.tables import metadata, requests, tasks, texts, tool_calls, trajectories
from mua.store.trajectories import read_trajectories
from mua.store.verification import verify
from mua.store.writer import Writer
from mua.types import Group, Json
from mua.utils.errors import EngineError, UserFault
from tests.chat_server import asked, fails, serving
from tests.rollout_fixtures import Script, ScriptedSampler, TestDesk, call, experiment, lines, only
from tests.tokens_fixtures import chat_family

FAMILY = chat_family("qwen3", False)
TASK = generate("train", 77, "cancel")
SOLVED = lines(call("cancel_order", order=TASK.data["known"]["order"]), "Done.")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_FIRST_PAUSE_S", 0.0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path) as opened:
        yield opened


def rows(store: Store, chosen: sa.Select) -> list[Json]:
    with store.read() as connection:
        assert not list(verify(connection))
        return [dict(row) for row in connection.execute(chosen).mappings()]


async def play(
    store: Store, folder: Path, script: Script, size: int = 2, times: int = 1, **sections: Json
) -> list[Group]:
    """The same group so many times over, as one that is cancelled when it has ended and begins again."""
    run, part, _ = begin_part(store, folder, "test", {}, {}, from_step=0, seconds=5)
    groups = []
    with Writer(store, every_seconds=0.01) as writer:
        recorder = Recorder(writer, run, part)
        config = experiment(rollout={"max_retries": 2}, **sections).model_copy(update={"output": folder})
        sampler = ScriptedSampler(FAMILY, script)
        runner = EpisodeRunner(config, only(TestDesk()), FAMILY, sampler, Services(), recorder=recorder)
        for _ in range(times):
            sampler._turns.clear()
            recorder.opened(4, TASK.domain, TASK.id, size, 0, "train")
            groups.append(await runner.group(TASK, 4, size, temperature=1.0))
            recorder.completed(groups[-1])
        await runner.close()
    return groups


async def test_requests_say_where_their_tokens_are_and_calls_what_they_answered(store: Store, tmp_path: Path) -> None:
    (group,) = await play(store, tmp_path, SOLVED)
    found = rows(store, sa.select(requests).order_by(requests.c.sample, requests.c.number))
    assert [(row["sample"], row["role"], row["turn"]) for row in found] == [
        (sample, "policy", turn) for sample in range(2) for turn in range(2)
    ]
    for row in found:
        segment = group.trajectories[row["sample"]].segments[row["segment"]]
        place = slice(row["token_start"], row["token_end"])
        assert segment.loss_mask[place].all()
        assert not segment.loss_mask[row["token_end"] : row["token_end"] + 1].any()
        assert set(segment.version[place]) == {row["version"]}
        assert set(segment.turn[place]) == {row["turn"]}
        assert row["messages"] is None, "the policy's prompt is in its segment"
    calls = rows(store, sa.select(tool_calls).order_by(tool_calls.c.sample))
    assert [(c["name"], json.loads(c["arguments"])) for c in calls] == [
        ("cancel_order", {"order": TASK.data["known"]["order"]})
    ] * 2
    with store.read() as connection:
        result = read_texts(connection, [calls[0]["result"]])[calls[0]["result"]]
        assert result == group.trajectories[0].messages[3]["content"]
        again = list(read_trajectories(connection, [calls[0]["trajectory_id"]]))
    assert again[0].messages == group.trajectories[0].messages
    (task,) = rows(store, sa.select(tasks))
    assert (task["state"], task["size"]) == ("complete", 2)


@pytest.mark.parametrize("entry", ["good", "forks"])
async def test_requests_over_the_gateway_are_their_own_episodes(store: Store, tmp_path: Path, entry: str) -> None:
    agent = {"function": f"tests.odd_agents:{entry}", "stop_seconds": 0.5}
    script = SOLVED if entry == "good" else lambda session, turn: f"This is {turn} of {session}."
    (group,) = await play(store, tmp_path, script, size=3, agent=agent)
    found = rows(store, sa.select(requests).order_by(requests.c.sample, requests.c.number))
    for trajectory in group.trajectories:
        mine = [row for row in found if row["sample"] == trajectory.sample]
        assert [row["turn"] for row in mine] == list(range(len(trajectory.turn_rewards))) == [0, 1, 2, 3][: len(mine)]
        assert len(mine) == (4 if entry == "forks" else 2)
        sampled = {(n, at) for n, segment in enumerate(trajectory.segments) for at in segment.loss_mask.nonzero()[0]}
        told = {(row["segment"], at) for row in mine for at in range(row["token_start"], row["token_end"])}
        assert told == sampled, "every sampled token was asked for by one request of this episode"
        for row in mine:
            segment, place = trajectory.segments[row["segment"]], slice(row["token_start"], row["token_end"])
            assert set(segment.turn[place]) == {row["turn"]}
        placed = [row["sampling"]["gateway"]["placed"] for row in mine]
        assert placed == ["started", "started", "appended", "forked"] if entry == "forks" else ["started", "appended"]
        with store.read() as connection:
            replies = read_texts(connection, [row["reply"] for row in mine])
        assert all(replies[row["reply"]]["role"] == "assistant" for row in mine)
    if entry == "good":
        calls = rows(store, sa.select(tool_calls).order_by(tool_calls.c.sample))
        assert [(c["sample"], c["name"], c["turn"]) for c in calls] == [(n, "cancel_order", 0) for n in range(3)]
    else:
        assert found[0]["sampling"]["gateway"]["overridden"] == ["temperature", "stop"]
        assert len(found[0]["sampling"]["gateway"]["model"]) == 200


async def test_requests_of_a_teacher_are_those_of_the_segments(store: Store, tmp_path: Path) -> None:
    async def scores(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ids = body["input_ids"][body["logprob_start_len"] :]
        pairs = [[None if at == 0 else -token / 8, token, None] for at, token in enumerate(ids)]
        return web.json_response({"meta_info": {"input_token_logprobs": pairs, "cached_tokens": 7}})

    (group,) = await play(store, tmp_path, SOLVED)
    async with serving(fails(500), scores, path="/{any:.*}") as server:
        given = {"base_url": server.url.removesuffix("/v1"), "api_key": "sk-planted", "retry_seconds": 0.001}
        teacher = Teacher(DistillationConfig.model_validate(given | {"concurrency": 1}), FAMILY.codec)
        asked: list[tuple[int, NotedRequest]] = []
        await teacher.scored(group, lambda sample, request: asked.append((sample, request)))
        await teacher.close()
    part = rows(store, sa.select(trajectories))[0]
    with Writer(store, every_seconds=0.01) as writer:
        Recorder(writer, part["run_id"], part["part"]).taught(group, asked)
    found = rows(store, sa.select(requests).where(requests.c.role == "teacher"))
    assert sorted((row["sample"], row["number"], row["error"] is not None) for row in found) == [
        (0, 0, True), (0, 1, False), (1, 0, False),
    ]  # fmt: skip
    with store.read() as connection:
        stored = {t.sample: t for t in read_trajectories(connection, [row["trajectory_id"] for row in found])}
    for row in found:
        place = slice(row["token_start"], row["token_end"])
        segment = stored[row["sample"]].segments[row["segment"]]
        assert segment.teacher_logprobs is not None
        sampled = segment.loss_mask.nonzero()[0]
        assert (place.start, place.stop) == (sampled[0], sampled[-1] + 1)
        assert (segment.teacher_logprobs[sampled] == -segment.ids[sampled] / 8).all()
        assert row["endpoint"] == given["base_url"]
        assert row["cached_tokens"] == (None if row["error"] else 7)
        assert "sk-planted" not in repr(dict(row))


async def test_an_attempt_that_failed_leaves_what_was_said(store: Store, tmp_path: Path) -> None:
    def fails_once(session: str, turn: int) -> str:
        if session.endswith("/0") and turn == 1:
            raise EngineError("gone")
        return SOLVED(session, turn)

    await play(store, tmp_path, fails_once, size=1)
    found = rows(store, sa.select(requests).order_by(requests.c.attempt, requests.c.number))
    assert [(r["attempt"], r["number"], r["error"], r["trajectory_id"] is None) for r in found] == [
        (1, 0, None, True), (1, 1, "EngineError", True), (2, 0, None, False), (2, 1, None, False),
    ]  # fmt: skip
    failed = [row for row in found if row["attempt"] == 1]
    lists = message_lists(failed)
    with store.read() as connection:
        bodies = read_texts(connection, [*lists[1], failed[0]["reply"]])
    assert [bodies[name]["role"] for name in lists[1]] == ["system", "user", "assistant", "tool"]
    assert bodies[failed[0]["reply"]] == bodies[lists[1][2]]
    assert failed[1]["kept"] == 2, "of the second request only what is new is stored"


async def test_a_group_that_begins_again_is_kept_beside_the_first(store: Store, tmp_path: Path) -> None:
    await play(store, tmp_path, SOLVED, size=2, times=2)
    found = rows(store, sa.select(trajectories.c.attempt, trajectories.c.attempts))
    assert sorted((row["attempt"], row["attempts"]) for row in found) == [(1, 1), (1, 1), (2, 1), (2, 1)]


async def test_a_group_that_is_cancelled_leaves_its_requests(store: Store, tmp_path: Path) -> None:
    def hangs(session: str, turn: int) -> str:
        if turn == 1:
            raise asyncio.CancelledError
        return SOLVED(session, turn)

    with pytest.raises(asyncio.CancelledError):
        await play(store, tmp_path, hangs, size=1)
    (first, second) = rows(store, sa.select(requests).order_by(requests.c.number))
    assert (first["error"], second["error"]) == (None, "CancelledError")
    assert rows(store, sa.select(trajectories)) == []


async def test_no_secret_comes_into_the_store(store: Store, tmp_path: Path) -> None:
    planted = "sk-planted-4711-secret"
    run, part, _ = begin_part(store, tmp_path, "test", {}, {}, from_step=0, seconds=5)
    refusal = fails(400, body=json.dumps({"error": {"message": f"the key {planted} may not use this model"}}))
    async with asked(refusal, api_key=planted, max_retries=0) as (server, client):
        with Writer(store, every_seconds=0.01) as writer:
            record = Recorder(writer, run, part).episode(1, 0, {}, evaluation=False)
            with noting(record), pytest.raises(UserFault):
                await client.chat([{"role": "user", "content": "hello"}], seed=1)
            record.failed()
    (request,) = rows(store, sa.select(requests))
    assert request["error"] is not None
    assert "may not use this model" in request["error"]
    assert server.headers[0]["Authorization"] == f"Bearer {planted}", "it was really sent"
    with store.read() as connection:
        for table in metadata.sorted_tables:
            for row in connection.execute(sa.select(table)).mappings():
                whole = dict(row)
                if table is texts:
                    whole["body"] = check_text(row["hash"], row["body"])
                assert planted not in repr(whole), table.name
