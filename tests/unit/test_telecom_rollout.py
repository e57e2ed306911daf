"""Rollouts of the telecom domain: the user's actions kept and replayed, an LLM user with the phone's tools.

The policy is scripted (tests/rollout_fixtures.py). Does not cover verdicts (test_telecom.py).
"""

from __future__ import annotations

import json
from pathlib import Path

from environments.telecom import DOMAIN
from environments.telecom.tasks import PINNED
from environments.telecom.world import base
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Task, UserMove
from mua.environment.user import STOP_SIGNAL
from mua.rollout.runner import EpisodeRunner
from mua.store.traces import trace_file, write_traces
from mua.types import Json, Outcome, Trajectory
from tests.chat_fixtures import calls, chat_server, in_order, says
from tests.desk_support import played_with
from tests.rollout_fixtures import ScriptedSampler, call, experiment, lines, only
from tests.telecom_support import first, opened, with_fault
from tests.tokens_fixtures import chat_family

# ---- rollouts

FAMILY = chat_family("qwen3", False)


async def recorded(task: Task) -> list[str]:
    """The expert's side of a conversation with somebody brief, as a policy writes it."""
    said = []
    user = DOMAIN.scripted_user(task, 0, ["brief"])
    for message in (await played_with(opened(task), user, DOMAIN.expert(task, 0))).messages:
        if message["role"] == "assistant":
            calls = [made["function"] for made in message.get("tool_calls", [])]
            written = "".join(call(made["name"], **json.loads(made["arguments"])) for made in calls)
            said.append(written or message["content"])
    return said


async def rolled_out(task: Task, texts: list[str], **sections: Json) -> Trajectory:
    sections.setdefault("user", {"personas": ["brief"]})
    config = experiment(
        environment={"name": "telecom"},
        model={"max_length": 32_768},
        rollout={"max_tokens": 32_000, "max_retries": 0},
        **sections,
    )
    services = Services.from_config(config.user, None)
    runner = EpisodeRunner(config, only(DOMAIN), FAMILY, ScriptedSampler(FAMILY, lines(*texts)), services)
    try:
        return await runner.trajectory(task, 0, 0, temperature=1.0)
    finally:
        await runner.close()
        await services.close()


def actions_of(trajectory: Trajectory) -> list[list[tuple[str, Json]]]:
    said = [message for message in trajectory.messages if message["role"] == "user"]
    return [[(action["name"], action["arguments"]) for action in message.get("actions", [])] for message in said]


async def test_a_rollout_records_what_the_user_did_and_a_replayed_user_does_it_again(tmp_path: Path):
    task = next(
        task for task in PINNED.load("test") if task.data["kind"] == "no_service" and len(task.data["faults"]) > 1
    )
    texts = await recorded(task)
    first_run = await rolled_out(task, texts)
    assert (first_run.outcome, first_run.success) == (Outcome.USER_STOP, True), first_run.error
    done = [step for turn in actions_of(first_run) for step in turn]
    golden = [(move.name, move.arguments) for move in DOMAIN.gold(task) if isinstance(move, UserMove)]
    assert golden
    assert all(step in done for step in golden)
    assert first_run.metrics["user_actions"] == len(done)

    path = trace_file(tmp_path / "traces", 1)
    write_traces(path, [first_run])
    again = await rolled_out(task, texts, user={"kind": "replay", "replay": str(path)})
    assert (again.outcome, again.success) == (Outcome.USER_STOP, True), again.error
    assert actions_of(again) == actions_of(first_run)
    assert [m["content"] for m in again.messages] == [m["content"] for m in first_run.messages]

    trace = json.loads(path.read_text())
    for message in trace["messages"]:
        message.pop("actions", None)
    path.write_text(json.dumps(trace) + "\n")
    words_alone = await rolled_out(task, texts, user={"kind": "replay", "replay": str(path)})
    assert not words_alone.success


async def test_a_transfer_ends_a_rollout():
    task = first("fraud")
    trajectory = await rolled_out(task, await recorded(task))
    assert (trajectory.outcome, trajectory.success) == (Outcome.TERMINAL_TOOL, True), trajectory.error


async def test_a_language_model_with_the_tools_of_the_phone_is_a_user_too():
    task = with_fault("airplane")
    person = task.data["known"]
    replies = in_order(
        says("my phone has no network"),
        says(f"{person['number']}, {person['first']} {person['last']}, {person['born']}"),
        calls(("check_status_bar", {})),
        says("I see airplane mode."),
        calls(("set_airplane_mode", {"on": False}), ("check_status_bar", {})),
        says("It is off, and now I see four bars."),
        says(STOP_SIGNAL),
    )
    line_id = task.data["initial"]["phone"]["phone"]["line_id"]
    line = base().tables["lines"][line_id]
    policy = [
        "Who are you, please, and what is your number?",
        call("find_customer_by_number", number=person["number"]),
        call("get_customer", customer_id=line["customer_id"]),
        call("get_line", line_id=line_id),
        "What does the status bar show?",
        "Please turn airplane mode off and tell me what the status bar shows.",
        "Then your phone has service again.",
    ]
    async with chat_server(replies) as server:
        llm = {"base_url": server.base_url, "model": "m"}
        trajectory = await rolled_out(task, policy, user={"kind": "llm", "llm": llm})
    assert (trajectory.outcome, trajectory.success) == (Outcome.USER_STOP, True), trajectory.error
    assert actions_of(trajectory)[3] == [("set_airplane_mode", {"on": False}), ("check_status_bar", {})]
    offered = {tool["function"]["name"] for tool in server.requests[0]["tools"]}
    assert {"set_airplane_mode", "check_status_bar", "pay_bill"} <= offered
    assert not offered & {"resume_line", "get_puk_code"}
