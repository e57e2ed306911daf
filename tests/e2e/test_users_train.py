"""RL steps with language models of the project's own as user and as judge, and with users who act on a phone.

Everything is real: ``mua train`` with its engine, users and judge behind SGLang servers that ``mua serve`` starts. The
models are tiny. One was fine-tuned to speak like a customer, so that there are conversations; it makes up numbers, and
is flagged for it. What has to hold whatever they say is tested: steps are taken, only the policy's tokens carry loss,
faults have a kind and are counted. Not covered: whether a policy learns from such users; CUDA.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_support import metrics_of, mua

from environments.kit.demonstrate import demonstrate, write_conversations
from mua.store.traces import read_traces
from mua.types import Json, Outcome, Provenance, Trajectory
from mua.utils.errors import UserFaultKind
from tests.served_support import PROMPT, Served, customers, random_model, serving

pytestmark = pytest.mark.timeout(1200)

STEPS = 2
RECIPE = """\
name: e2e
output: out
model: {{path: {model}, dtype: float32, max_length: {length}}}
environment: {{name: {domain}, prompt: short, call_seconds: 300, reset_seconds: 300}}
rollout:
  max_turns: 4
  max_tool_calls: 4
  max_turn_tokens: 32
  max_tokens: {tokens}
  max_retries: 2
  concurrency: 8
  generate_seconds: 300
  user_seconds: 300
  episode_seconds: 900
engine: {{max_total_tokens: 32768, max_running_requests: 16, memory_fraction: 0.5, health_seconds: 2, stop_seconds: 5}}
algorithm: {{group_size: 2, groups_per_step: 3}}
megatron: {{max_tokens_per_microbatch: {length}, threads: 1}}
optimizer: {{learning_rate: 1.0e-3, weight_decay: 0.0}}
trainer: {{steps: {steps}, save_every: {steps}}}
observe: {{traces: true}}
"""


def recipe(folder: Path, model: Path, domain: str, length: int, *, steps: int = STEPS, **sections: object) -> Path:
    """A configuration file; ``sections`` are written as JSON, which is YAML."""
    text = RECIPE.format(model=model, domain=domain, length=length, tokens=length - 200, steps=steps)
    path = folder / "recipe.yaml"
    path.write_text(text + "".join(f"{name}: {json.dumps(section)}\n" for name, section in sections.items()))
    return path


def tuned_on(conversations: list[list[Json]], folder: Path, domain: str, length: int) -> Path:
    """A model of the project's own, fine-tuned on these conversations: its Hugging Face folder."""
    model = random_model(folder / "random", conversations, 2048)
    data = folder / "conversations.jsonl"
    write_conversations(data, conversations)
    path = folder / "sft.yaml"
    sft = {"data": str(data), "batch_size": 16, "short_first_steps": 1000}
    path.write_text(
        f"name: tuned\noutput: out\nmodel: {{path: {model}, dtype: float32, max_length: {length}}}\n"
        f"environment: {{name: {domain}, prompt: short}}\nrollout: {{max_tokens: {length - 200}}}\n"
        "megatron: {max_tokens_per_microbatch: 4096, threads: 2}\n"
        "optimizer: {learning_rate: 5.0e-3, weight_decay: 0.0}\n"
        f"trainer: {{steps: 40, save_every: 40}}\nsft: {json.dumps(sft)}\n"
    )
    mua("sft", path, cwd=folder)
    return folder / "out" / "hf"


@pytest.fixture(scope="module")
def customer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model that speaks like the help desk's customers, served."""
    folder = tmp_path_factory.mktemp("customer")
    with serving(tuned_on(list(customers(200)), folder, "help_desk", 1024), folder / "served") as served:
        yield served


@pytest.fixture(scope="module")
def prompt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompt") / "user.txt"
    path.write_text(PROMPT)
    return path


def trained(output: Path, steps: int = STEPS) -> list[Trajectory]:
    """Every trajectory of a run whose steps were taken, with what must hold of each of them."""
    lines = metrics_of(output)
    assert [line["step"] for line in lines] == list(range(steps))
    for line in lines:
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float)), line
        assert line["rollout/trajectories/count"] == 6
    found = list(read_traces(output / "traces"))
    kinds = {f"user_faults/{kind}" for kind in UserFaultKind}
    for trajectory in found:
        faults = {name for name in trajectory.metrics if name.startswith("user_faults/")}
        assert faults <= kinds
        assert trajectory.outcome is not Outcome.USER_ERROR or faults, "a fault without a kind"
        assert math.isfinite(trajectory.reward)
        for segment in trajectory.segments:
            assert (segment.loss_mask == (segment.provenance == Provenance.SAMPLED)).all()
            assert (segment.version[~segment.loss_mask] < 0).all() or not segment.loss_mask.all()
    assert any(t.scored for t in found), "nobody could be talked with"
    assert any(line["train/grad_norm"] > 0 for line in lines)
    counted = {name: sum(t.metrics.get(name, 0) for t in found) for name in kinds}
    assert {name: sum(line.get(name, 0) for line in lines) for name in kinds} == counted
    return found


def assert_only_the_policy_is_trained(trajectories: list[Trajectory], model: Path, *others: Provenance) -> None:
    """Nothing that users or tools said carries loss, and all of it is there."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    seen = set()
    for trajectory in trajectories:
        for segment in trajectory.segments:
            said = [m["content"] for m in trajectory.messages if m["role"] == "user"]
            heard = tokenizer.decode(segment.ids[segment.provenance == Provenance.USER])
            assert all(text.strip() in heard for text in said), (said, heard)
            runs = itertools.groupby(zip(segment.loss_mask, segment.ids, strict=True), key=lambda pair: pair[0])
            turns = [tokenizer.decode([token for _, token in pairs]) for masked, pairs in runs if masked]
            assert len(turns) == len([m for m in trajectory.messages if m["role"] == "assistant"])
            seen |= {Provenance(kind) for kind in set(segment.provenance.tolist())}
    assert set(others) <= seen


@pytest.mark.slow
def test_a_policy_is_trained_with_a_served_user_and_a_served_judge(
    customer: Served, prompt: Path, tuned: Path, workshop: object, tmp_path: Path
) -> None:
    judge_model = random_model(tmp_path / "judge", customers(60), 8192)
    with serving(judge_model, tmp_path / "judging") as judging:
        asked = customer.section(temperature=0.7, max_retries=2)
        user = {"kind": "llm", "llm": asked, "check": "flag", "manners": False, "prompt": str(prompt)}
        judge = {"llm": judging.section(temperature=0.5, max_tokens=300)}
        path = recipe(tmp_path, tuned / "hf", "judged_help", 512, user=user, judge=judge)
        mua("train", path, cwd=tmp_path, seconds=900)
    found = trained(tmp_path / "out")
    assert_only_the_policy_is_trained(found, tuned / "hf", Provenance.USER)
    judged = [t for t in found if t.scored]
    assert all(t.details["judged"] is t.success for t in judged)
    lines = metrics_of(tmp_path / "out")
    assert sum(line["judge/llm/verdicts"] for line in lines) >= len(judged)
    assert sum(line["user/llm/requests"] for line in lines) >= len(found)
    flags = [flag["kind"] for t in judged for m in t.messages for flag in m.get("flags", ())]
    assert sum(v for line in lines for name, v in line.items() if name.startswith("user/flags/")) == len(flags)
    assert set(flags) <= set(UserFaultKind)


@pytest.fixture(scope="module")
def phone_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has seen telecom's expert: it asks who calls, and what the phone shows."""
    import asyncio

    from environments.telecom import DOMAIN

    folder = tmp_path_factory.mktemp("phone")
    tasks = [task for task in DOMAIN.tasks("train") if task.data["kind"] == "no_service"][:40]
    system = {"role": "system", "content": DOMAIN.system_prompt("short")}
    talks = [[system, *asyncio.run(demonstrate(DOMAIN, task, n)).messages] for n, task in enumerate(tasks)]
    # Questions alone: with the carrier's records a small context would be full before the phone is looked at.
    short = [[m for m in talk if m["role"] != "tool" and not m.get("tool_calls")] for talk in talks]
    return tuned_on(short, folder, "telecom", 2048)


@pytest.mark.slow
def test_a_policy_is_trained_with_users_who_act_on_their_phone(phone_policy: Path, tmp_path: Path) -> None:
    mua("train", recipe(tmp_path, phone_policy, "graded_phone", 2048), cwd=tmp_path)
    found = trained(tmp_path / "out")
    assert all(t.scored for t in found), [t.error for t in found]
    assert_only_the_policy_is_trained(found, phone_policy, Provenance.USER)
    acted = [m for t in found for m in t.messages if m.get("actions")]
    assert acted, "nobody was asked to look at the phone"
    assert all(m["role"] == "user" for m in acted)
    assert sum(t.metrics.get("user_actions", 0) for t in found) == sum(len(m["actions"]) for m in acted)
