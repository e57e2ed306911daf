"""Replayed users and the user factory. Does not cover what the trace writer puts into a trace beyond the two keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import SecretStr

from mua.config.schema import LlmConfig, UserConfig
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Task, ToolResult
from mua.environment.user import STOP_SIGNAL, ToolUser, User
from mua.types import Json, ToolSchema
from mua.users.factory import RecordedTurn, ReplayedUser, UserFactory, load_recordings, user_turns
from mua.users.llm import LlmUser
from mua.utils.errors import ConfigError, UserFault
from tests.rollout_fixtures import only

MESSAGES = [
    {"role": "system", "content": "policy"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "find", "arguments": "{}"}}]},
    {"role": "tool", "content": "found"},
    {"role": "assistant", "content": "done"},
    {"role": "user", "content": f"thanks {STOP_SIGNAL}"},
]


class Scripted:
    """Only what the factory asks of a domain."""

    name = "toy"

    def tasks(self, split: str) -> list[Task]:
        return [task("a"), task("b")]

    def persona(self, task: Task) -> str:
        return f"persona of {task.id}"

    def scripted_user(self, task: Task, seed: int) -> User:
        return ReplayedUser(task.id, [f"{task.id} {seed}"])


SCRIPTED = only(Scripted())


def task(identity: str) -> Task:
    return Task(identity, "toy", "train", {})


async def test_user_turns_come_back_in_order_with_the_stop():
    user = ReplayedUser("t", user_turns(MESSAGES))
    assert isinstance(user, User)
    first, second = await user.open(), await user.reply("anything")
    assert (first.text, first.stop) == ("hi", False)
    assert second.stop


async def test_going_beyond_the_recording_is_a_fault():
    user = ReplayedUser("t7", ["hi"])
    await user.open()
    for _ in range(2):
        with pytest.raises(UserFault, match=r"'t7'.*1 user turns"):
            await user.reply("more?")


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


class Phone:
    """Tools of a user; remembers what was called. Implements :class:`mua.environment.user.UserTools`."""

    def __init__(self) -> None:
        self.called: list[tuple[str, Json]] = []

    def schemas(self) -> list[ToolSchema]:
        return []

    async def call(self, name: str, arguments: Json) -> ToolResult:
        self.called.append((name, arguments))
        return ToolResult("another answer than the recorded one", error=True)


ACTED = [
    {"role": "user", "content": "no signal"},
    {"role": "assistant", "content": "Restart it."},
    {
        "role": "user",
        "content": "done",
        "actions": [
            {"name": "restart", "arguments": {}, "answer": "restarted"},
            {"name": "switch", "arguments": {"on": True}, "answer": "on"},
        ],
    },
]


async def test_what_the_user_did_is_done_again_before_it_speaks(tmp_path: Path):
    path = write(tmp_path / "trace.jsonl", {"task_id": "a", "messages": ACTED})
    phone, user = Phone(), UserFactory(UserConfig(kind="replay", replay=path), SCRIPTED, Services()).make(task("a"), 0)
    assert isinstance(user, ToolUser)
    user.take_tools(phone)
    assert (await user.open()).text == "no signal"
    assert phone.called == []
    assert (await user.reply("Restart it.")).text == "done"
    assert phone.called == [("restart", {}), ("switch", {"on": True})]


async def test_actions_without_tools_are_a_fault():
    user = ReplayedUser("t7", user_turns(ACTED))
    await user.open()
    with pytest.raises(UserFault, match=r"'t7'.*tools of its own"):
        await user.reply("Restart it.")


async def test_the_factory_replays_the_recordings_of_a_task_by_seed(tmp_path: Path):
    def line(identity: str, text: str) -> dict:
        return {"task_id": identity, "messages": [{"role": "user", "content": text}], "reward": 1}

    path = write(tmp_path / "trace.jsonl", line("a", "one"), "", line("b", "two"), line("a", "three"))
    factory = UserFactory(UserConfig(kind="replay", replay=path), SCRIPTED, Services())
    said = [(await factory.make(task("a"), seed).open()).text for seed in (0, 1, 2)]
    assert said == ["one", "three", "one"]
    with pytest.raises(ConfigError, match=r"trace\.jsonl has no recording of task 'z'"):
        factory.make(task("z"), 0)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{broken", r":2: not a trace line"),
        ("[" * 100_000, r":2: not a trace line \(nested too deeply"),
        ({"task_id": 7, "messages": []}, r":2: not a trace line"),
        ({"task_id": "a", "messages": [{"role": "user", "content": None}]}, r":2: not a trace line"),
        (
            {
                "task_id": "a",
                "messages": [{"role": "user", "content": "x", "actions": [{"name": "f", "arguments": 1}]}],
            },
            r":2: not a trace line",
        ),
        ({"task_id": "a"}, r":2: .*no key 'messages'"),
        ({"task_id": "a", "messages": [{"role": "user", "content": "x", "actions": [{}]}]}, r":2: .*no key 'name'"),
    ],
)
def test_a_broken_trace_line_is_named(tmp_path: Path, line: object, words: str):
    path = write(tmp_path / "trace.jsonl", {"task_id": "a", "messages": []}, line)
    with pytest.raises(ConfigError, match=words):
        load_recordings(path)


def test_an_unfinished_last_line_is_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write(tmp_path / "trace.jsonl", {"task_id": "a", "messages": MESSAGES})
    path.write_text(path.read_text() + '{"task_id": "b", "mess')
    assert list(load_recordings(path)) == ["a"]
    assert "trace.jsonl:2" in caplog.text


def test_a_folder_of_traces_is_read_in_order(tmp_path: Path):
    for step, text in ((2, "second"), (1, "first")):
        line = {"task_id": "a", "messages": [{"role": "user", "content": text}]}
        write(tmp_path / f"step_00000{step}.jsonl", line)
    assert load_recordings(tmp_path) == {"a": [[RecordedTurn("first")], [RecordedTurn("second")]]}


def test_a_missing_trace_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"user\.replay: cannot read .*nowhere\.jsonl"):
        UserFactory(UserConfig(kind="replay", replay=tmp_path / "nowhere.jsonl"), SCRIPTED, Services())


async def test_the_factory_makes_llm_users_that_share_one_endpoint():
    llm = LlmConfig(base_url="http://127.0.0.1:9/v1", model="m", api_key=SecretStr("sk-secret"))
    config = UserConfig(kind="llm", llm=llm)
    services = Services.from_config(config, None)
    factory = UserFactory(config, SCRIPTED, services)
    one, other = factory.make(task("a"), 1), factory.make(task("b"), 2)
    assert isinstance(one, LlmUser)
    assert isinstance(other, LlmUser)
    assert one._endpoint is other._endpoint
    await services.close()
