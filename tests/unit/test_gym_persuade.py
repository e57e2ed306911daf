"""The persuade gym: debates, claims, what moves the holder, rewards that can not be farmed, expert, model oracles.

Models are scripted servers on this machine, reached over HTTP; on the labelled set the judge's server gives the label.
Not covered: how well a real model plays the holder; what the contract test asks of every domain.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from environments.gyms._shared import Setting, act
from environments.gyms.persuade import DOMAIN, PersuadeGym
from environments.gyms.persuade.claims import LEVELS, SIZES
from environments.gyms.persuade.expert import argument
from environments.gyms.persuade.game import CLEAR, STANCES, PersuadeGame, heard
from environments.gyms.persuade.oracle import judged_stance
from environments.gyms.persuade.topics import OTHER, Reason, topics
from mua.config.schema import LlmConfig
from mua.environment.demonstrate import demonstrate, replay_gold
from mua.environment.protocol import Environment, Task, ToolResult, Transcript
from mua.errors import JudgeFault, UserFault
from mua.types import Json
from mua.users.endpoint import ChatEndpoint
from tests.gyms_support import modelled

TASKS = {split: DOMAIN.tasks(split) for split in SIZES}
_LABELS = Path(__file__).parents[1] / "data/gyms/persuade.jsonl"
LABELLED = [json.loads(line) for line in _LABELS.read_text(encoding="utf-8").splitlines()]


def opened(task: Task, gym: PersuadeGym = DOMAIN, seed: int = 0) -> Environment:
    environment = gym.environment()
    environment.reset(task, seed)
    return environment


async def say(environment: Environment, *texts: str) -> list[ToolResult]:
    return [await environment.call(*act("action", text)) for text in texts]  # type: ignore[misc, arg-type]


def others(task: Task) -> list[Reason]:
    return list(topics()[task.data["kind"]].reasons[OTHER[task.data["side"]]])


def met_by(task: Task) -> list[str]:
    """A sentence for each concern, in the task's order."""
    return [others(task)[one["reason"]].sentence for one in task.data["concerns"]]


def of(difficulty: str) -> Task:
    return next(task for task in TASKS["test"] if task.data["difficulty"] == difficulty)


def test_sizes_and_splits_that_share_no_topic():
    assert {split: len(tasks) for split, tasks in TASKS.items()} == SIZES
    assert SIZES == {"train": 378, "validation": 42, "test": 42}
    claims = [(task.data["claim"], task.data["argument"]) for tasks in TASKS.values() for task in tasks]
    assert len(set(claims)) == len(claims) == 462
    names = [{task.data["kind"] for task in tasks} for tasks in TASKS.values()]
    assert len(set.union(*names)) == sum(map(len, names)) == len(topics()) == 40


def test_every_reason_is_given_by_its_own_sentence_and_by_no_other_of_its_side():
    sentences = []
    for topic in topics().values():
        for side, reasons in topic.reasons.items():
            assert len(reasons) == 4
            assert topic.positions[side].endswith(".")
            for one in reasons:
                assert [reason for reason in reasons if reason.strength(one.sentence) >= CLEAR] == [one], one.sentence
                assert not re.search(r"[\[\]|]", one.sentence)
                sentences.append(one.sentence)
    assert len(set(sentences)) == 320


def test_concerns_add_up_to_the_way_from_agreement_to_disagreement():
    for tasks in TASKS.values():
        for task in tasks:
            concerns = task.data["concerns"]
            assert sum(one["weight"] for one in concerns) == LEVELS == len(STANCES) - 1
            assert len({one["reason"] for one in concerns}) == len(concerns)
            assert not any(sentence in task.data["argument"] for sentence in met_by(task))


async def test_the_expert_and_gold_convince_on_every_claim():
    for tasks in TASKS.values():
        for task in tasks:
            demonstration = await demonstrate(DOMAIN, task, 1, 0.3 if task.split == "train" else 0.0)
            assert demonstration.reward == pytest.approx(1.0), task.data
            assert demonstration.evaluation.success
            assert demonstration.ended
            gold = await replay_gold(DOMAIN, task)
            assert gold.reward == pytest.approx(1.0)


async def test_finishing_at_once_pays_nothing_on_any_claim():
    for tasks in TASKS.values():
        for task in tasks:
            environment = opened(task)
            result = await environment.call(*act("finish"))  # type: ignore[misc, arg-type]
            assert (result.reward, result.terminal) == (0.0, True)
            verdict = await environment.evaluate(Transcript([]))  # type: ignore[misc]
            assert (verdict.reward, verdict.success) == (0.0, False)


async def test_an_argument_earns_the_weight_of_the_concern_it_meets_once():
    for difficulty in ("easy", "medium", "hard"):
        task = of(difficulty)
        sentences = met_by(task)
        results = await say(opened(task), sentences[0], sentences[0], *sentences[1:])
        weights = [one["weight"] for one in task.data["concerns"]]
        assert [result.reward * LEVELS for result in results] == pytest.approx([weights[0], 0, *weights[1:]])
        assert [result.terminal for result in results] == [False] * len(weights) + [True]


async def test_swinging_the_stance_earns_nothing():
    """Lost ground is not paid again: an episode earns at most 1 whatever its turns."""
    task = of("easy")
    first, last = met_by(task)
    environment = opened(task)
    beside = [f"The weather number {number} was rather nice in the north last summer." for number in range(3)]
    results = await say(environment, first, *beside, *beside, last)
    assert results[0].reward > 0
    assert [result.reward for result in results[1:-1]] == [0.0] * 6
    assert len({result.text for result in results}) > 1
    assert sum(result.reward for result in results) == pytest.approx(1.0)
    assert results[-1].terminal


async def test_talking_past_the_holder_loses_ground():
    task = of("easy")
    environment = opened(task)
    await say(environment, met_by(task)[0])
    before = await environment.evaluate(Transcript([]))  # type: ignore[misc]
    await say(environment, *["I only think that you should come round to my view."] * 3)
    after = await environment.evaluate(Transcript([]))  # type: ignore[misc]
    stances = [STANCES.index(verdict.details["stance"]) for verdict in (before, after)]
    assert stances[1] == stances[0] - 1
    assert after.details["furthest"] == before.details["stance"]


async def test_random_talk_never_earns_more_than_one():
    rng = random.Random(5)
    for task in TASKS["test"]:
        pool = [*met_by(task), "No.", "I simply know that you are quite wrong about it.", task.data["argument"]]
        results = await say(opened(task), *rng.choices(pool, k=15))
        assert 0 <= sum(result.reward for result in results) <= 1 + 1e-9


async def test_all_reasons_at_once_and_bare_keywords_move_nobody():
    for task in TASKS["test"]:
        everything = " ".join(reason.sentence for reason in others(task))
        remark = "cost health fairness nature safety"
        results = await say(opened(task), everything, remark, task.data["argument"])
        assert [result.reward for result in results] == [0.0, 0.0, 0.0], task.data


async def test_the_turns_are_counted():
    results = await say(opened(of("easy")), *["You are wrong."] * 13)
    assert [result.terminal for result in results] == [False] * 11 + [True, False]
    assert results[-1].error


async def test_what_is_on_the_holders_mind_shines_through_by_difficulty():
    def hinted(task: Task, text: str) -> bool:
        return any(hint in text for reason in others(task) for hint in reason.theme.hints)

    for difficulty, expected in (("easy", [True, True, True]), ("medium", [True, True, True]), ("hard", [1, 0, 1])):
        task = of(difficulty)
        results = await say(opened(task), *["You are wrong."] * 3)
        assert [hinted(task, result.text) for result in results] == [bool(one) for one in expected]
    for difficulty, expected in (("easy", [True]), ("medium", [False]), ("hard", [False])):
        task = of(difficulty)
        results = await say(opened(task), met_by(task)[0])
        assert [hinted(task, result.text) for result in results] == expected


async def test_a_hint_that_is_not_taken_up_gets_clearer():
    task = of("medium")
    reason = others(task)[max(task.data["concerns"], key=lambda one: one["weight"])["reason"]]
    first, second = await say(opened(task), "You are wrong.", "You are wrong.")
    words = [f'"{word}"' for word in reason.catchwords()]
    assert len(words) == len(reason.keywords)
    assert not any(word in first.text for word in words)
    assert any(word in second.text for word in words)


async def test_the_same_seed_gives_the_same_conversation():
    for task in TASKS["test"][:10]:
        one, other = await demonstrate(DOMAIN, task, 5, 0.5), await demonstrate(DOMAIN, task, 5, 0.5)
        assert one.messages == other.messages


def test_the_opening_shows_claim_and_argument_but_no_concern():
    for task in TASKS["test"]:
        for text in DOMAIN.openings(task):
            assert task.data["claim"] in text
            assert task.data["argument"] in text
            assert not any(sentence in text for sentence in met_by(task))


# Rules and models.


def test_the_rules_agree_with_the_labels():
    assert len(LABELLED) >= 40
    assert {label["verdict"] for label in LABELLED} == {"reason", "none", "agreeing", "remark", "scattered"}
    names = {"moved": "reason", "beside": "none"}
    wrong = []
    for label in LABELLED:
        reasons = topics()[label["topic"]].reasons
        found = heard(label["text"], reasons[OTHER[label["side"]]], reasons[label["side"]], range(4), [])
        given = names.get(found.verdict, found.verdict)
        if given != label["verdict"] or (given == "reason" and found.reason != label["reason"]):
            wrong.append(label["text"])
    assert wrong == []


def verdict(stance: str) -> str:
    return json.dumps({"reason": "r", "verdict": stance})


def holder_of_one_concern(label: Json) -> Task:
    """A holder whose one concern is the labelled reason (or, without one, the first)."""
    topic = topics()[label["topic"]]
    data = {
        "kind": topic.name,
        "side": label["side"],
        "difficulty": "easy",
        "claim": topic.positions[label["side"]],
        "argument": topic.reasons[label["side"]][0].sentence,
        "concerns": [{"reason": label.get("reason", 0), "weight": LEVELS}],
    }
    return Task("t", "gyms/persuade", "test", data)


async def test_a_judge_that_gives_the_labels_moves_as_the_rules_do():
    def judge(body: Json) -> str:
        prompt = body["messages"][-1]["content"]
        text = re.search(r"the latest message:\n<<<\n(.*?)\n>>>", prompt, re.DOTALL)[1]  # type: ignore[index]
        label = next(label for label in LABELLED if label["text"] == text)
        return verdict(STANCES[LEVELS if label["verdict"] == "reason" else 0])

    async with modelled(DOMAIN, lambda body: "unused", judge) as gym:
        for label in LABELLED:
            task = holder_of_one_concern(label)
            by_judge = await judged_stance(PersuadeGame(gym.setting, task, 0), label["text"], STANCES)
            (by_rule,) = await say(opened(task), label["text"])
            assert (by_judge == STANCES[LEVELS]) == by_rule.terminal == (label["verdict"] == "reason"), label


@pytest.mark.skipif("MUA_JUDGE_BASE_URL" not in os.environ, reason="needs a judge's endpoint in MUA_JUDGE_BASE_URL")
async def test_the_llm_oracle_agrees_with_labels_and_rules():
    endpoint = ChatEndpoint(
        LlmConfig(
            base_url=os.environ["MUA_JUDGE_BASE_URL"],
            model=os.environ["MUA_JUDGE_MODEL"],
            api_key=os.environ.get("MUA_JUDGE_API_KEY", "none"),
            temperature=0.0,
        )
    )
    setting = Setting("llm", user=endpoint, judge=endpoint)
    same, as_ruled = [], []
    for label in LABELLED:
        task = holder_of_one_concern(label)
        stance = await judged_stance(PersuadeGame(setting, task, 0), label["text"], STANCES)
        (by_rule,) = await say(opened(task), label["text"])
        same.append((stance != STANCES[0]) == (label["verdict"] == "reason"))
        as_ruled.append((stance != STANCES[0]) == (by_rule.reward > 0))
    await endpoint.close()
    assert sum(same) / len(same) >= 0.8
    assert sum(as_ruled) / len(as_ruled) >= 0.8


async def test_with_models_too_only_the_gain_over_the_furthest_stance_is_paid():
    stances = ["agree", "undecided", "strongly agree", "undecided", "disagree", "strongly disagree"]
    answers = iter(stances)
    prompts = []

    def user(body: Json) -> str:
        prompts.append(body["messages"][-1]["content"])
        return f"answer {len(prompts)}"

    async with modelled(DOMAIN, user, lambda body: verdict(next(answers))) as gym:
        results = await say(opened(of("easy"), gym), *[f"argument number {n}" for n in range(6)])
    assert [round(result.reward * LEVELS) for result in results] == [1, 2, 0, 0, 2, 1]
    assert sum(result.reward for result in results) == pytest.approx(1.0)
    assert results[-1].terminal
    assert "Stance now: agree with" in prompts[0]
    assert all(f"argument number {n}" in prompts[-1] and f"answer {n + 1}" in prompts[-1] for n in range(5))


async def test_models_that_give_nothing_usable_are_faults_and_never_a_stance():
    for bad in ("rather disagree", verdict("neutral"), '{"verdict": "agree"}', ""):
        async with modelled(DOMAIN, lambda body: "hm", lambda body, bad=bad: bad) as gym:
            with pytest.raises(JudgeFault):
                await say(opened(of("easy"), gym), "An argument")
    async with modelled(DOMAIN, lambda body: "", lambda body: verdict("agree")) as gym:
        with pytest.raises(UserFault):
            await say(opened(of("easy"), gym), "An argument")


def test_arguments_vary_by_seed():
    reason = others(of("easy"))[0]
    assert len({argument(reason, random.Random(seed)) for seed in range(20)}) == 4
    assert Counter(task.data["difficulty"] for task in TASKS["test"]).keys() == {"easy", "medium", "hard"}
