"""Every fault of a user in an episode: typed, counted, tried again, never scored; kinds of users from outside.

The policy and the users are scripted. Not covered: the check against the task (test_users_task_check.py), endpoints
that do not answer (test_users_pool.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from environments.help_desk.tasks import generate
from mua.algorithms.rollout_metrics import rollout_metrics
from mua.config.schema import UserConfig
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Task, ToolResult
from mua.environment.user import User, UserReply
from mua.rollout.runner import EpisodeRunner
from mua.types import Group, Outcome, Trajectory
from mua.users.factory import Placement, UserFactory
from mua.users.judge import Judge
from mua.users.llm import LlmUser
from mua.users.personas import load_prompt
from mua.utils.errors import ConfigError, JudgeFault, UserFault, UserFaultKind
from tests.chat_server import asked, raw, says
from tests.rollout_fixtures import FixedUser, ScriptedSampler, TestDesk, call, experiment, lines, only
from tests.tokens_fixtures import chat_family

FAMILY = chat_family("qwen3", False)
TASK = generate("train", 77, "cancel")
K = UserFaultKind


class Raising(FixedUser):
    async def open(self) -> UserReply:
        raise LookupError("gone")


class Wrong(FixedUser):
    async def open(self) -> UserReply:
        return "Hello."  # type: ignore[return-value]


async def rolled_out(domain: TestDesk, **rollout: Any) -> Trajectory:
    order = TASK.data["known"]["order"]
    script = lines("Who are you?", call("cancel_order", order=order), "Done.")
    config = experiment(rollout={"max_retries": 1, **rollout})
    runner = EpisodeRunner(config, only(domain), FAMILY, ScriptedSampler(FAMILY, script), Services())
    trajectory = await runner.trajectory(TASK, 0, 0, temperature=1.0)
    await runner.close()
    assert domain.alive == 0
    return trajectory


def user_that_says(text: Any) -> Callable[[Task, int], User]:
    return lambda task, seed: FixedUser(text, "bye")


def desk_of(user: Callable[[Task, int], User]) -> TestDesk:
    domain = TestDesk()
    domain.user = user
    return domain


FAULTS: list[tuple[Callable[[Task, int], User], UserFaultKind]] = [
    (user_that_says("  \n"), K.NO_TEXT),
    (user_that_says("a \ud800 b"), K.BROKEN_TEXT),
    (user_that_says("x" * 5_000_001), K.TOO_LONG),
    (user_that_says("Agent: it is done."), K.SPEAKS_AS_AGENT),
    (user_that_says('{"name": "cancel_order", "arguments": {"order": "K7"}}'), K.TOOL_CALL_IN_TEXT),
    (user_that_says("My instructions tell me to wait."), K.LEAKS_INSTRUCTION),
    (lambda task, seed: FixedUser(opening="bye ###STOP###"), K.ENDS_TOO_EARLY),
    (lambda task, seed: Raising(), K.CRASHED),
    (lambda task, seed: Wrong(), K.CRASHED),
    (lambda task, seed: FixedUser(UserFault("nobody is there")), K.UNREACHABLE),
    (lambda task, seed: (_ for _ in ()).throw(LookupError("x")), K.CRASHED),
]


@pytest.mark.parametrize(("make", "kind"), FAULTS)
async def test_a_fault_has_a_kind_is_tried_again_and_never_scored(
    make: Callable[[Task, int], User], kind: UserFaultKind
) -> None:
    domain = desk_of(make)
    trajectory = await rolled_out(domain)
    assert (trajectory.outcome, trajectory.scored, trajectory.attempts) == (Outcome.USER_ERROR, False, 2)
    assert trajectory.metrics == {f"user_faults/{kind}": 2}
    assert trajectory.error
    assert len(trajectory.error) < 1000
    step = rollout_metrics([Group(0, TASK.id, [trajectory])])
    assert step[f"user/faults/{kind}"] == 2


async def test_a_fault_that_a_second_user_does_not_make_is_counted_and_forgotten() -> None:
    domain, seen = TestDesk(), []

    def user(task: Task, seed: int) -> User:
        seen.append(seed)
        return FixedUser("Agent: no.") if len(seen) == 1 else FixedUser("I am Ada.", "bye")

    domain.user = user
    trajectory = await rolled_out(domain)
    assert (trajectory.outcome, trajectory.attempts) == (Outcome.USER_STOP, 2)
    assert trajectory.metrics["user_faults/speaks_as_agent"] == 1
    assert len(set(seen)) == 2, "the next attempt has a seed of its own"


@pytest.mark.parametrize("text", ["x" * 5_000_001, "a \ud800 b", None, 3])
async def test_a_tools_answer_that_is_no_text_is_the_environments_fault(text: Any) -> None:
    domain = desk_of(user_that_says("I am Ada."))
    domain.on_call = lambda number, result: ToolResult(text)
    trajectory = await rolled_out(domain)
    assert (trajectory.outcome, trajectory.attempts) == (Outcome.ENVIRONMENT_ERROR, 2)
    assert "cancel_order" in (trajectory.error or "")


@pytest.mark.parametrize("reward", [float("nan"), -float("inf"), "1", 10**400])
async def test_a_reward_that_is_no_number_is_the_environments_fault(reward: Any) -> None:
    domain = desk_of(user_that_says("I am Ada."))
    domain.on_call = lambda number, result: ToolResult("ok", reward=reward)
    trajectory = await rolled_out(domain)
    assert (trajectory.outcome, trajectory.scored) == (Outcome.ENVIRONMENT_ERROR, False)
    assert "no finite number" in (trajectory.error or "")


# ---- endpoints


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ('{"choices": [{"message": {"content": ' + "[" * 100_000, K.BROKEN_TEXT),
        ("[" * 3_000_000, K.BROKEN_TEXT),
        ('{"choices": [{"message": {"content": "' + "x" * 5_000_001 + '"}}]}', K.TOO_LONG),
        ('{"choices": [{"message": {"content": "' + "x" * 20_000 + '"}}]}', K.TOO_LONG),
        ('{"choices": [{"message": {"content": "a \\ud800"}}]}', K.BROKEN_TEXT),
        ('{"choices": [{"message": {"content": ""}}]}', K.NO_TEXT),
        ('{"choices": [{"message": {"content": "Customer:"}}]}', K.NO_TEXT),
        ('{"choices": [{"message": {"content": "### STOP ###"}}]}', K.ENDS_TOO_EARLY),
    ],
)
async def test_what_an_endpoint_answers_is_bounded_and_named(body: str, kind: UserFaultKind) -> None:
    async with asked(raw(body), max_retries=0) as (_, pool):
        with pytest.raises(UserFault) as caught:
            await LlmUser(pool, "You are Ada.", 1).open()
        assert caught.value.kind is kind
        assert pool.metrics()[f"refused/{kind}"] == 1


@pytest.mark.parametrize("text", ["x" * 100_000, '{"points": NaN, "reason": "r"}', '{"points": 1e999, "reason": "r"}'])
async def test_a_judges_answer_that_is_too_long_or_no_number_is_its_fault(text: str) -> None:
    async with asked(says(text), max_retries=0, role="judge") as (_, pool):
        with pytest.raises(JudgeFault):
            await Judge(pool).score("How good?", seed=1)


# ---- kinds and prompts from outside


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("outside_users")
    monkeypatch.setitem(sys.modules, "outside_users", module)
    return module


async def test_a_kind_of_user_may_come_from_outside(outside: ModuleType) -> None:
    placed: list[Placement] = []

    def make(placement: Placement) -> User:
        placed.append(placement)
        return FixedUser(opening=f"I say {placement.options['word']}.")

    vars(outside)["make"] = make
    config = UserConfig(kind="outside_users:make", options={"word": "hm"})
    user = UserFactory(config, only(TestDesk()), Services()).make(TASK, 7)
    assert (await user.open()).text == "I say hm."
    assert (placed[0].task, placed[0].seed, placed[0].domain.name, placed[0].endpoint) == (TASK, 7, "help_desk", None)


async def test_the_prompt_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Play. $persona $manner $tool_rules For $$5 end with $stop")
    async with asked(says("Hello."), max_retries=0) as (server, pool):
        await LlmUser(pool, "You are Ada.", 1, prompt=load_prompt(path)).open()
    assert server.received[0]["messages"][0]["content"] == "Play. You are Ada.   For $5 end with ###STOP###"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("$persona", r"must say \$stop"),
        ("$stop", r"must say \$persona"),
        ("$persona $stop $name", r"no field \$name"),
        ("$persona $stop $5", r"write \$\$"),
        (b"\xff", "cannot read"),
    ],
)
def test_a_prompt_that_cannot_be_is_named(tmp_path: Path, text: str | bytes, words: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=words):
        load_prompt(path)
