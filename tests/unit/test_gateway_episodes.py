"""Episodes of agents of their own, good and bad: how each ends, what it is scored, what is left of it.

Runner, environment, users, gateway, HTTP and processes are real; the policy is scripted. Not covered: agent libraries
(test_gateway_libraries.py), the engine and the trainer (e2e/test_gateway.py).
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest

from environments.help_desk.tasks import generate
from mua.algorithms.rollout_metrics import rollout_metrics
from mua.environment.endpoint.services import ChatClient, Services
from mua.rollout import runner as runner_module
from mua.rollout.external import AgentTask
from mua.rollout.gateway.chat_calls import ServedTurn, response_call, response_events
from mua.rollout.interactive import SessionDesk, interactive_config
from mua.rollout.runner import EpisodeRunner
from mua.types import Group, Json, Outcome, Trajectory
from mua.utils.errors import ConfigError, EngineError
from tests import odd_agents
from tests.chat_server import asked, fails, says
from tests.rollout_fixtures import Script, ScriptedSampler, TestDesk, call, experiment, lines, only
from tests.tokens_fixtures import chat_family

FAMILY = chat_family("qwen3", False)
TASK = generate("train", 77, "cancel")
ORDER = TASK.data["known"]["order"]
SOLVED = lines(call("cancel_order", order=ORDER), "Done.")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_FIRST_PAUSE_S", 0.0)
    odd_agents.SEEN.clear()


class Stage:
    """Plays episodes of one task with an agent."""

    judge: ChatClient | None = None

    def __init__(self, folder: Path, script: Script, agent: Json | None, **sections: Json) -> None:
        self.sampler = ScriptedSampler(FAMILY, script)
        self.domain = TestDesk()
        sections["rollout"] = {"max_retries": 0, "episode_seconds": 60.0, **sections.get("rollout", {})}
        config = experiment(**sections, **({} if agent is None else {"agent": {"stop_seconds": 0.5, **agent}}))
        self.config = config.model_copy(update={"output": folder})

    async def play(self, size: int = 1) -> list[Trajectory]:
        services = Services(judge=self.judge)
        runner = EpisodeRunner(self.config, only(self.domain), FAMILY, self.sampler, services)
        try:
            return (await runner.group(TASK, 4, size, temperature=1.0)).trajectories
        finally:
            await runner.close()
            assert self.domain.alive == 0


async def play(folder: Path, script: Script, entry: str, **sections: Any) -> Trajectory:
    agent = {"function": f"tests.odd_agents:{entry}", **sections.pop("agent", {})}
    return (await Stage(folder, script, agent, **sections).play())[0]


def endless(session: str, turn: int) -> str:
    return f"turn {turn}"


async def test_an_agent_that_asks_the_same_gets_the_built_in_episode(tmp_path: Path) -> None:
    script = lines(call("get_order", order=ORDER), call("launch"), call("cancel_order", order=ORDER), "Done.")
    for prompt in ("short", "full"):
        environment = {"name": "help_desk", "prompt": prompt}
        alone = await Stage(tmp_path, script, None, environment=environment).play(size=3)
        agent = {"function": "tests.odd_agents:good"}
        mine = await Stage(tmp_path, script, agent, environment=environment).play(size=3)
        for trajectory, built in zip(mine, alone, strict=True):  # each in a session of its own
            (ours,), (theirs,) = trajectory.segments, built.segments
            for name in ("ids", "provenance", "turn", "version"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name)[: len(ours)], err_msg=name)
            assert not theirs.loss_mask[len(ours) :].any()
            assert trajectory.turn_rewards == built.turn_rewards
            assert trajectory.reward == built.reward == 1.0
            assert (trajectory.outcome, trajectory.metrics["malformed"]) == (built.outcome, 1)
            roles = [(m["role"], m.get("content")) for m in built.messages]
            assert [(m["role"], m.get("content")) for m in trajectory.messages] == roles


async def test_the_agent_of_the_page_of_hooks_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def rollout(" in block]
    (tmp_path / "page_rollout.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = await Stage(tmp_path, lines("Your name?"), {"function": "page_rollout:rollout"}).play()
    assert found.error is None
    assert [m["content"] for m in found.messages if m["role"] == "assistant"] == ["Your name?"]


@pytest.mark.parametrize(
    ("entry", "outcome", "reward"),
    [
        ("crashes_on_a_turn", Outcome.MALFORMED, 0.0),
        ("crashes_on_a_tool", Outcome.ENVIRONMENT_ERROR, 0.0),
        ("leaves_early", Outcome.AGENT_END, 0.0),
        ("asks_on_and_on", Outcome.MAX_TURNS, 0.0),
    ],
)
async def test_whose_doing_an_end_is(tmp_path: Path, entry: str, outcome: Outcome, reward: float) -> None:
    trajectory = await play(tmp_path, endless, entry, rollout={"max_turns": 5})
    assert trajectory.outcome is outcome, trajectory.error
    assert trajectory.reward == reward
    if entry == "asks_on_and_on":
        assert odd_agents.SEEN == ["episode_over"]
        assert len(trajectory.turn_rewards) == len(trajectory.segments) == 5
    if entry == "leaves_early":
        assert trajectory.messages[-1]["content"] == "turn 0"


async def test_odd_requests_cost_nothing_and_an_answer_is_sampled_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path, endless, {"function": "tests.odd_agents:odd_requests"})
    (trajectory,) = await stage.play()
    refused = (401, "invalid_api_key")
    assert [refused, refused, refused, refused, 200, 200, 401, 413, 400, 404, 400, 200, 1] == odd_agents.SEEN
    assert trajectory.outcome is Outcome.AGENT_END, trajectory.error
    assert len(stage.sampler.requests) == 2, "the retry of the stream that was hung up is no further sample"


async def test_a_call_with_an_id_is_executed_once(tmp_path: Path) -> None:
    trajectory = await play(tmp_path, endless, "repeats_ids", rollout={"max_malformed": 99})
    assert trajectory.outcome is Outcome.AGENT_END, trajectory.error
    executed = trajectory.metrics["tool_calls/get_order"]
    first, other_type, other_call, other_client, plain, plain_other = odd_agents.SEEN
    assert len(set(first)) == 1
    assert other_type == first[0]
    assert "was used for another call" in other_call
    assert "was used" not in other_client
    assert (plain, plain_other) == ([200, 200], [409, 409])
    assert executed == 4, "of nine requests"


async def test_a_turn_whose_client_has_left_is_not_trained(tmp_path: Path) -> None:
    stage = Stage(tmp_path, endless, {"function": "tests.odd_agents:hangs_up"})
    generate, slow = stage.sampler.generate, asyncio.Event()

    async def late(*given: Any, **more: Any) -> Any:
        found = await generate(*given, **more)
        if not slow.is_set():
            slow.set()
            await asyncio.sleep(0.5)
        return found

    stage.sampler.generate = late  # type: ignore[method-assign]
    (trajectory,) = await stage.play()
    assert odd_agents.SEEN == ["left", "temperature, stop"]
    assert trajectory.metrics["gateway/unheard"] == 1
    assert [np.unique(s.turn[s.loss_mask]).tolist() for s in trajectory.segments] == [[1]]


async def test_other_tools_than_the_tasks_and_floods(tmp_path: Path) -> None:
    trajectory = await play(tmp_path, endless, "other_tools", rollout={"max_malformed": 2})
    assert trajectory.outcome is Outcome.MALFORMED
    assert odd_agents.SEEN[0] == {"text": "error: there is no tool 'launch'", "error": True, "ended": False}
    assert odd_agents.SEEN[2]["ended"]
    odd_agents.SEEN.clear()
    trajectory = await play(tmp_path, endless, "floods", agent={"max_requests": 20}, rollout={"max_malformed": 999})
    assert trajectory.outcome is Outcome.MAX_TURNS
    assert trajectory.scored
    assert {status for status, _ in odd_agents.SEEN} <= {200, 400, 401}


async def test_faults_of_the_policy_and_room(tmp_path: Path) -> None:
    def gone(session: str, turn: int) -> str:
        raise EngineError("the engine is gone")

    trajectory = await play(tmp_path, gone, "asks_on_and_on")
    assert (trajectory.outcome, trajectory.error) == (Outcome.ENGINE_ERROR, "the engine is gone")
    trajectory = await play(tmp_path, endless, "asks_on_and_on", rollout={"max_tokens": 30})
    assert (trajectory.outcome, trajectory.sampled_tokens) == (Outcome.LENGTH, 0)
    assert odd_agents.SEEN == ["context_length_exceeded"]
    trajectory = await play(tmp_path, endless, "asks_on_and_on", agent={"max_session_tokens": 200})
    assert trajectory.outcome is Outcome.LENGTH
    assert trajectory.scored

    def broken(session: str, turn: int) -> str:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ExceptionGroup) as raised:
        await play(tmp_path, broken, "asks_on_and_on")
    assert isinstance(raised.value.exceptions[0], ZeroDivisionError)


async def test_rewards_that_agents_report(tmp_path: Path) -> None:
    reported = {"reward": "report"}
    trajectory = await play(tmp_path, endless, "reports", agent=reported)
    assert (trajectory.reward, trajectory.success, trajectory.outcome) == (0.25, True, Outcome.AGENT_END)
    trajectory = await play(tmp_path, endless, "reports_no_number", agent=reported)
    assert odd_agents.SEEN == [400] * 5
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert "without a report" in (trajectory.error or "")


async def test_a_judge_beside_the_environment_or_in_its_place(tmp_path: Path) -> None:
    def writes(score: float) -> Any:
        return says(json.dumps({"reason": "It did.", "score": score}))

    async with asked(writes(0.5), writes(7), writes(0.5), writes(0.5), role="judge", max_retries=0) as (server, judge):

        async def judged(entry: str = "good", **agent: Any) -> Trajectory:
            question = {"question": "Was it polite?", "max_characters": 300}
            section = {"function": f"tests.odd_agents:{entry}"} | agent | {"judge": question | agent.get("judge", {})}
            stage = Stage(tmp_path, SOLVED, section, judge={"llm": {"base_url": server.url, "model": "m"}})
            stage.judge = judge
            return (await stage.play())[0]

        both = await judged(judge={"weight": -0.5})
        assert (both.reward, both.success, both.details["judge"]["beside"]) == (0.75, True, 1.0)
        assert both.metrics["gateway/judge_score"] == 0.5
        assert rollout_metrics([Group(0, TASK.id, [both])])["rollout/gateway/own_reward"] == 1.0
        assert both.details["judge"] == {"score": 0.5, "reason": "It did.", "weight": -0.5, "beside": 1.0}
        alone = await judged(reward="judge", judge={"high": 2.0})  # 7 is no score: it is asked again
        assert (alone.reward, alone.success, len(server.received)) == (0.5, False, 3)
        noted = await judged("reports", reward="report", judge={"weight": 0.0})
        assert (noted.reward, noted.details["judge"]["score"], noted.details["reported"]) == (0.25, 0.5, True)
        shown = server.received[0]["messages"][1]["content"]
        assert "Was it polite?" in shown
        assert "Give a score from 0 to 1." in shown
        assert '{"role": "assistant", "content": "Done."}' in shown
        assert "characters are left out here" in shown
        server.script[-1] = fails(500)
        fault = await judged()
        assert (fault.outcome, fault.scored) == (Outcome.JUDGE_ERROR, False)
    with pytest.raises(ValueError, match="reward judge needs"):
        Stage(tmp_path, SOLVED, {"function": "tests.odd_agents:good", "reward": "judge"})
    with pytest.raises(ValueError, match="add the section judge"):
        Stage(tmp_path, SOLVED, {"function": "tests.odd_agents:good", "judge": {"question": "?"}})
    with pytest.raises(ValueError, match="must be below high"):
        Stage(tmp_path, SOLVED, {"function": "tests.odd_agents:good", "judge": {"question": "?", "low": 1.0}})


async def test_clients_of_openai_and_mcp(tmp_path: Path) -> None:
    trajectory = await play(tmp_path, endless, "in_a_thread")
    assert trajectory.outcome is Outcome.AGENT_END, trajectory.error
    streamed = ("response.created", "response.completed", "turn 4")
    assert ["turn 0", "turn 1", True, "turn 2", "turn 3", streamed, "policy"] == odd_agents.SEEN
    assert [len(set(s.turn[s.loss_mask].tolist())) for s in trajectory.segments] == [1, 1, 2, 1]
    odd_agents.SEEN.clear()
    trajectory = await play(tmp_path, endless, "over_mcp")
    assert trajectory.outcome is Outcome.AGENT_END, trajectory.error
    assert "get_order" in odd_agents.SEEN[0]
    assert odd_agents.SEEN[1:] == ['{"error": "no such order"}', True] or odd_agents.SEEN[2]


def test_a_streamed_response_is_the_whole_one_in_openais_events() -> None:
    from openai.types.responses import ResponseStreamEvent
    from pydantic import TypeAdapter

    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": f"f{n}", "arguments": "{}" * n}} for n in range(3)
    ]
    message = {"role": "assistant", "content": "ä" * 1025, "reasoning_content": "Hm.", "tool_calls": calls}
    read = response_call(b'{"input": "Hello", "stream": true}', "override")
    assert read.stream
    events = list(response_events(ServedTurn(message, "length", 3, 4, 0, 7, 1, "started"), read))
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for number, event in enumerate(events):
        assert adapter.validate_python(event, strict=True).sequence_number == number
    whole = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    deltas: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    assert deltas == {"rs_7": "Hm.", "msg_7": "ä" * 1025, "fc_c1": "{}", "fc_c2": "{}{}"}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]


CALL = """
import json, os, urllib.request
task = json.load(open(os.environ["MUA_TASK_FILE"]))
def ask(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
def chat():
    return ask("/chat/completions", {"messages": [{"role": "user", "content": task["user"]}]})
"""
DETACHES = """
import sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(300)
    os._exit(0)
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read(): time.sleep(0.01)
"""


def process(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-S", "-c", CALL + code, *arguments]


@pytest.mark.parametrize(
    ("code", "outcome", "said"),
    [
        ("", Outcome.ENVIRONMENT_ERROR, "asked the policy for nothing"),
        ("raise SystemExit('no module named x')", Outcome.ENVIRONMENT_ERROR, "status 1: … no module named x"),
        ("chat(); os.kill(os.getpid(), 9)", Outcome.ENVIRONMENT_ERROR, "status 137"),
        ("chat(); print(json.dumps({'reward': float('nan')}))", Outcome.ENVIRONMENT_ERROR, "without a report"),
        ("chat(); print('log'); print(json.dumps({'reward': 0.5}))", Outcome.AGENT_END, None),
        ("chat(); assert not any(k.startswith('MUA_TRAINER') for k in os.environ); print('{\"reward\": 1}')",
         Outcome.AGENT_END, None),
    ],
)  # fmt: skip
async def test_processes(
    tmp_path: Path, code: str, outcome: Outcome, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUA_TRAINER_SECRET", "x")
    (trajectory,) = await Stage(tmp_path, endless, {"command": process(code), "reward": "report"}).play()
    assert trajectory.outcome is outcome, trajectory.error
    if said is not None:
        assert said in (trajectory.error or "")
    if said and "no module" in said:
        assert "no module named x" in (tmp_path / "logs" / "agents" / "4-0-0.log").read_text()


@pytest.mark.parametrize("last", ["chat()", "chat(); time.sleep(300)"])
async def test_nothing_of_an_agent_outlives_its_episode(tmp_path: Path, last: str) -> None:
    child, sleeps = tmp_path / "child", "sleep" in last
    agent = {"command": process(DETACHES + last, str(child))}
    for seconds in (3.0, 15.0, 60.0) if sleeps else (60.0,):  # a busy machine may need longer to come so far
        (trajectory,) = await Stage(tmp_path, endless, agent, rollout={"episode_seconds": seconds}).play()
        if child.exists() and child.read_text():
            break
    assert trajectory.outcome is (Outcome.TIMEOUT if sleeps else Outcome.AGENT_END), trajectory.error
    assert not psutil.pid_exists(int(child.read_text()))


async def test_a_session_dies_with_its_episode(tmp_path: Path) -> None:
    held: list[Any] = []

    async def keeps(task: Any) -> None:
        held.append(task)
        await odd_agents.good(task)

    odd_agents.keeps = keeps  # type: ignore[attr-defined]
    stage = Stage(tmp_path, SOLVED, {"function": "tests.odd_agents:keeps"})
    runner = EpisodeRunner(stage.config, only(stage.domain), FAMILY, stage.sampler, Services())
    await runner.group(TASK, 4, 1, temperature=1.0)
    async with aiohttp.ClientSession() as http:
        wire = odd_agents.Wire(held[0], http)
        assert (await wire.chat(*odd_agents.opening(held[0])))[0] == 401
        assert (await wire.post("/episode/user", {"text": "hello"}))[0] == 401
    await runner.close()
    assert len(stage.sampler.requests) == 2


async def test_a_person_opens_a_session_and_ends_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path, SOLVED, None)
    config, selection = interactive_config(stage.config), only(stage.domain)
    stage.domain.tasks = lambda split: [TASK] if split == "train" else []  # type: ignore[method-assign]
    runner = EpisodeRunner(config, selection, FAMILY, stage.sampler, Services())
    desk = SessionDesk(config, selection, runner)
    path = await desk.open()
    assert path.stat().st_mode & 0o777 == 0o600
    address = json.loads(path.read_text())
    async with aiohttp.ClientSession(base_url=address["url"]) as http:

        async def post(route: str, key: str = address["admin_key"], **body: Any) -> tuple[int, Any]:
            async with http.post(route, json=body, headers={"Authorization": f"Bearer {key}"}) as response:
                return response.status, await response.json()

        assert (await post("/sessions", "guess"))[0] == 401
        assert (await post("/sessions", task="none"))[0] == 404
        status, opened = await post("/sessions", task=TASK.id)
        assert status == 200
        await odd_agents.good(AgentTask(opened["base_url"], opened["api_key"], opened["task"]))
        assert (await post(f"/sessions/{opened['key']}/end", opened["api_key"]))[0] == 401
        _, result = await post(f"/sessions/{opened['key']}/end")
        assert (result["outcome"], result["reward"], len(result["segments"])) == ("user_stop", 1.0, 1)
        assert (await post("/v1/chat/completions", opened["api_key"], messages=[]))[0] == 401
        await post("/sessions")  # left open
    await desk.close()
    await runner.close()


def test_agents_that_cannot_be_run_are_mistakes_of_the_configuration(tmp_path: Path) -> None:
    for agent, said in (
        ({"command": ["no-such-program"]}, "no program"),
        ({"function": "tests.no_such:agent"}, "cannot be imported"),
        ({"function": "tests.odd_agents:nobody"}, "has no"),
    ):
        with pytest.raises(ConfigError, match=said):
            asyncio.run(Stage(tmp_path, endless, agent).play())
    for wrong in ({}, {"command": ["x"], "function": "a:b"}):
        with pytest.raises(ValueError, match="either command or function"):
            experiment(agent=wrong)
