"""Users, judges and demonstrators talk with a model that ``mua serve`` serves: SGLang's chat interface, over real HTTP.
Strangers are refused, and the server takes memory as its model does.

The model is tiny and random, so what it says means nothing: the protocol, the guards, the seeds and the metrics are
what is tested. Not covered: whether a real model plays its persona or judges well; CUDA.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
import pytest
from e2e_support import SECONDS
from key_support import answers_without, routes
from transformers import AutoModelForCausalLM, AutoTokenizer

from environments.help_desk import DOMAIN
from environments.help_desk.demonstrations import demonstrations
from environments.help_desk.tasks import generate
from mua.algorithms.losses import CrossEntropyLoss
from mua.config.schema import JudgeConfig, LlmConfig
from mua.environment.endpoint.services import ChatClient, Services
from mua.environment.protocol import ToolResult
from mua.environment.user import UserReply
from mua.launch.checks import node as checks
from mua.megatron.checkpoint import checkpoint_folder
from mua.rollout.runner import EpisodeRunner
from mua.types import Json, Outcome, ToolSchema, Trajectory
from mua.users.judge import Judge
from mua.users.llm import LlmUser
from mua.users.personas import style_of
from mua.utils.errors import MISTAKE, JudgeFault, UserFault, UserFaultKind
from tests import collect_support as collecting
from tests.distributed import run_distributed
from tests.judged_desk import SURE, JudgedDesk
from tests.megatron_support import backend, make_batch
from tests.rollout_fixtures import ScriptedSampler, call, experiment, lines, only
from tests.served_support import Served, random_model, serving
from tests.tokens_fixtures import chat_family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONTEXT = 8192


def save_checkpoint(model: str, folder: str) -> None:
    with backend(Path(model)) as built:
        built.train_step(make_batch(), CrossEntropyLoss())
        built.save(Path(folder), {})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first checkpoint of a random model's training."""
    folder = tmp_path_factory.mktemp("served")
    talks = demonstrations(60, 1, DOMAIN.system_prompt("short"), ["brief"])
    model = random_model(folder / "model", talks, CONTEXT)
    run_distributed(save_checkpoint, 1, str(model), str(checkpoint_folder(folder, 1)))
    return checkpoint_folder(folder, 1)


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[Served]:
    """A server of the checkpoint as it is."""
    with serving(checkpoint, checkpoint.parent, "--tool-call-parser=qwen") as found:
        yield found


def llm(served: Served, **settings: object) -> LlmConfig:
    return LlmConfig.model_validate(served.section(**settings))


async def test_a_checkpoint_says_in_sglang_what_it_says_in_transformers(checkpoint: Path, served: Served) -> None:
    assert checkpoint.name == "step_00000001"
    prompt = "Where is my parcel?"
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    headers = {"Authorization": f"Bearer {served.key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{served.url}/completions", json=body) as answer,
    ):
        (choice,) = (await answer.json())["choices"]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    said = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert choice["text"] == tokenizer.decode(said, skip_special_tokens=True)
    assert len(said) > 0


async def test_nobody_without_the_key_is_answered(served: Served) -> None:
    url = served.url.removesuffix("/v1")
    known = await routes(url, served.key)
    assert ("POST", "/v1/chat/completions") in known
    assert await answers_without(url, known, None) == {}


async def test_the_users_key_does_not_change_the_server(served: Served) -> None:
    """Another job's simulated user may ask for text; weights, memory and caches are nobody's but the server's."""
    url = served.url.removesuffix("/v1")
    known = [(method, path) for method, path in await routes(url, served.key) if CHANGES.search(path)]
    assert len(known) > 25
    assert await answers_without(url, known, f"Bearer {served.key}") == {}
    headers = {"Authorization": f"Bearer {served.key}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{url}/server_info") as answer:
        assert set(re.findall(r'"(?:admin_)?api_key": ?"([^"]*)"', await answer.text())) == {"<redacted>"}


def test_the_key_is_nowhere_another_user_can_look(served: Served) -> None:
    assert stat.S_IMODE(served.address.stat().st_mode) == 0o600
    assert len(served.processes) >= 5
    for process in served.processes:
        assert served.key not in " ".join(process.cmdline())
    shown = served.log.read_text() + served.log.with_name("stdout").read_text()
    assert "'api_key': '<redacted>'" in shown
    assert "'admin_api_key': '<redacted>'" in shown
    assert served.key not in shown


def test_memory_follows_the_model(served: Served) -> None:
    """SGLang alone takes most of the machine's memory for its cache, whatever the model."""
    resident = sum(process.memory_info().rss for process in served.processes)
    assert resident < 4 * 2**30, f"{resident / 2**30:.1f} GiB"
    (tokens,) = re.findall(r"max_total_num_tokens=(\d+)", served.log.read_text())
    assert int(tokens) == CONTEXT


CHANGES = re.compile(
    r"weight|memory|cache(?!\w*_layout)|profile|corpus|lora|pause|continue|abort|configure|internal_state|freeze|slow_down|record"
)


async def conversation(endpoint: ChatClient, seed: int) -> list[UserReply] | str:
    """Two utterances of a user, or why it cannot be used."""
    user = LlmUser(endpoint, "You are Ada Brown; your parcel 4711 is late.", seed, style_of(seed))
    return await utterances(user, "Which parcel is it?")


async def utterances(user: LlmUser, question: str) -> list[UserReply] | str:
    try:
        return [await user.open(), await user.reply(question)]
    except UserFault as fault:
        return str(fault)


async def test_users_speak_within_the_guards_and_repeat_by_seed(served: Served) -> None:
    endpoint = ChatClient(llm(served, price_per_million_out=1.0))
    seeds = (1, 2, 3, 4)
    first = [await conversation(endpoint, seed) for seed in seeds]
    metrics = endpoint.metrics()
    again = [await conversation(endpoint, seed) for seed in seeds]
    await endpoint.close()
    assert again == first
    assert len({str(said) for said in first}) == len(seeds)
    for said in first:
        assert "unusable reply" in said if isinstance(said, str) else all(reply.text for reply in said)
    assert metrics["requests"] >= 5
    assert metrics["tokens_in"] > metrics["tokens_out"] >= 24
    assert metrics["cost"] == pytest.approx(metrics["tokens_out"] / 1e6)
    assert 0 < metrics["latency_p50_seconds"] <= metrics["latency_p95_seconds"]


async def test_verdicts_are_held_to_their_schema_by_the_server(served: Served) -> None:
    endpoint = ChatClient(llm(served, max_tokens=300, max_retries=0), "judge")
    judge = Judge(endpoint)
    verdicts = [await judge.verdict("Is it so?", SURE, seed=seed) for seed in range(12)]
    again = [await judge.verdict("Is it so?", SURE, seed=seed) for seed in range(12)]
    assert verdicts == again
    assert {verdict["cancelled"] for verdict in verdicts} == {True, False}
    assert endpoint.metrics()["verdicts"] == 24
    short = Judge(ChatClient(llm(served, max_tokens=4, max_retries=0), "judge"))
    with pytest.raises(JudgeFault, match="no verdict that can be read"):
        await short.holds("It is so.", seed=1)
    await short._endpoint.close()
    await endpoint.close()


class Phone:
    """The user's tools; implements :class:`mua.environment.user.UserTools`."""

    def schemas(self) -> Sequence[ToolSchema]:
        mode = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
        return [ToolSchema("airplane_mode", "Switch it.", mode)]

    async def call(self, name: str, arguments: Json) -> ToolResult:
        return ToolResult("airplane mode is off")


async def test_offered_tools_are_called_and_their_answers_are_taken(served: Served) -> None:
    """The server is made to call one; what comes of it goes back to it in the conversation."""
    endpoint = ChatClient(llm(served, max_tokens=200))
    user = LlmUser(endpoint, "You are Ada Brown.", 1)
    user.take_tools(Phone())
    tools = [schema.openai() for schema in Phone().schemas()]
    ask = [{"role": "user", "content": "Switch it."}]
    reply = await endpoint.chat(ask, seed=1, tools=tools, tool_choice="required")
    assert {called.name for called in reply.calls} == {"airplane_mode"}
    await user._act(reply)
    assert [message["role"] for message in user._history] == ["system", "assistant", *["tool"] * len(reply.calls)]
    said = await utterances(user, "Do you see it?")
    assert "HTTP" not in str(said)  # nonsense, perhaps, but the server took the conversation
    await endpoint.close()


async def episodes(served: Served, **settings: object) -> list[Trajectory]:
    """Four episodes of a scripted policy, whose user and judge are the served model."""
    task, family = generate("train", 77, "cancel"), chat_family("qwen3", False)
    cancel = call("cancel_order", order=task.data["known"]["order"])
    user = {"kind": "llm", "llm": served.section(**settings)}
    config = experiment(user=user, rollout={"max_turns": 3, "max_retries": 1})
    services = Services.from_config(config.user, JudgeConfig(llm=llm(served, max_tokens=300, temperature=0.5)))
    assert services.judge is not None
    script = lines(cancel, "It is done.", "Bye.")
    runner = EpisodeRunner(
        config, only(JudgedDesk(Judge(services.judge))), family, ScriptedSampler(family, script), services
    )
    group = await runner.group(task, 0, 4, temperature=1.0)
    metrics = services.metrics()
    await runner.close()
    await services.close()
    judged = [t for t in group.trajectories if t.scored]
    assert metrics["judge/llm/requests"] >= len(judged)
    assert metrics["user/llm/requests"] >= 4
    return group.trajectories


WORDS = {"regex": "[a-z]{2,8}( [a-z]{2,8}){1,4}"}
"""SGLang holds a reply to it: what a random model writes by itself is no text."""


async def test_episodes_whose_user_babbles_are_its_fault_and_say_which(served: Served) -> None:
    trajectories = await episodes(served, temperature=2.0, max_retries=1)
    for trajectory in trajectories:
        kinds = {name.removeprefix("user_faults/") for name in trajectory.metrics if name.startswith("user_faults/")}
        assert trajectory.scored or kinds
        assert kinds <= set(UserFaultKind) - {UserFaultKind.UNREACHABLE}
    assert not all(t.scored for t in trajectories)


async def test_episodes_end_judged_or_as_the_users_fault(served: Served) -> None:
    trajectories = await episodes(served, extra=WORDS)
    assert {t.outcome for t in trajectories} <= {Outcome.MAX_TURNS, Outcome.USER_STOP, Outcome.USER_ERROR}
    judged = [t for t in trajectories if t.scored]
    assert judged
    for trajectory in judged:
        assert trajectory.reward in (0.0, 1.0)
        assert trajectory.success is (trajectory.reward == 1.0)


async def test_an_unknown_key_of_the_request_is_named_by_the_server(served: Served) -> None:
    trajectories = await episodes(served, extra={"temperature": "hot"}, max_retries=0)
    assert {t.outcome for t in trajectories} == {Outcome.USER_ERROR}
    assert "HTTP 4" in (trajectories[0].error or "")


def test_the_preflight_finds_the_served_model(served: Served) -> None:
    assert checks.check_endpoint(llm(served)).state == "ok"
    assert checks.check_endpoint(llm(served, model="huge"), "judge.llm").fix == "set judge.llm.model to: tiny"
    assert checks.check_endpoint(llm(served, api_key="none")).fix == "check user.llm.api_key"


def test_a_served_model_demonstrates_and_is_refused(served: Served, tmp_path: Path) -> None:
    policy = f"evaluation: {{policy: {{endpoint: {{api_key: {served.key}}}}}}}\n"
    (tmp_path / "collect.yaml").write_text(collecting.CONFIG + policy)
    arguments = [*collecting.policy_at(served.url, "tiny"), "--samples=2", "--tasks=4"]
    assert collecting.start(tmp_path, *arguments).wait(SECONDS) == MISTAKE
    assert "none of 8 episodes is a demonstration" in (tmp_path / "stderr").read_text()
    assert collecting.report(tmp_path)["episodes"] == sum(collecting.report(tmp_path)["refused"].values()) == 8
    assert not any(reason.startswith("not scored") for reason in collecting.report(tmp_path)["refused"])
    played = collecting.episodes(tmp_path)
    assert all(json.loads(line)["trajectory"]["metrics"]["completion_tokens"] > 0 for line in played)
    assert collecting.start(tmp_path, *arguments).wait(SECONDS) == MISTAKE
    assert collecting.episodes(tmp_path) == played, "what stands in the file is not played again"
