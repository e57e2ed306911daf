"""Contexts that are rewritten: when, what stays, and that no token is made up, lost or trained twice.

The policy is a script; environment, users, chat families and token streams are the real ones. Not covered: that notes
help a policy to succeed (docs/context.md says what is known of that), a real engine, whose prompts these are.
"""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from mua.algorithms.batch import make_batches
from mua.config.algorithm import AlgorithmConfig
from mua.config.rollout import ContextConfig
from mua.rollout import context as rules
from mua.rollout.context import REMOVED, ContextKeeper, repetitions, shorten_result, with_notes, without_results
from mua.rollout.episode import EpisodeResult
from mua.tokens.chat_family import ChatFamily
from mua.types import Group, Json, Outcome, Trajectory
from tests.chat_fixtures import completion
from tests.rollout_fixtures import FixedUser, ScriptedSampler, call
from tests.tokens_fixtures import chat_family
from tests.unit.test_rollout_agent import calls, in_order, says
from tests.unit.test_rollout_agent import play as play_chat
from tests.unit.test_rollout_episode import CANCELLED, NAME, ORDER, play

FAMILIES = [chat_family("qwen3", False), chat_family("qwen3", True), chat_family("qwen2.5", False)]
LOOK = call("get_order", order=ORDER)
OWNER = call("check_owner", order=ORDER, name=NAME)


async def rewritten(*texts: str, family: ChatFamily = FAMILIES[0], user: Any = None, **context: Any) -> Any:
    """One episode with the section ``context``, and what the sampler was asked; keys with a dot are budgets."""
    budgets = {name[2:]: context.pop(name) for name in list(context) if name.startswith("b_")}
    setting = {"context": ContextConfig.model_validate(context)}
    return await play(*texts, family=family, user=user, setting=setting, **budgets)


def check_streams(result: EpisodeResult, sampler: ScriptedSampler) -> None:
    """Every request's prompt and reply stand in a segment as they were, and nothing else is trained."""
    sampled = [segment.ids[segment.loss_mask] for segment in result.segments]
    assert np.concatenate(sampled).tolist() == [i for r in sampler.requests for i in r.generation.ids.tolist()]
    places = iter((s, start) for s in result.segments for start in turns_of(s))
    for request in sampler.requests:
        segment, start = next(places)
        assert segment.ids[:start].tolist() == request.prompt
        end = start + len(request.generation.ids)
        np.testing.assert_array_equal(segment.logprobs[start:end], request.generation.logprobs)
    for before, after in pairwise(result.segments):
        assert before.turn.max() <= after.turn[after.loss_mask].min()
    numbers = np.concatenate([segment.turn[segment.loss_mask] for segment in result.segments])
    assert set(numbers.tolist()) == set(range(len(result.turn_rewards)))


def turns_of(segment: Any) -> list[int]:
    """Where the sampled stretches of a segment begin."""
    mask = segment.loss_mask.astype(int)
    return np.flatnonzero(np.diff(mask, prepend=0) == 1).tolist()


async def test_old_results_give_way_to_a_mark_and_the_judge_sees_them_all() -> None:
    result, sampler = await rewritten(
        LOOK, OWNER, LOOK, CANCELLED, "Done.", strategy="discard_tool_results", every_turns=2, keep_results=1
    )
    assert (result.outcome, result.evaluation.success) == (Outcome.USER_STOP, True)
    check_streams(result, sampler)
    assert len(result.segments) == 3
    family, prompts = FAMILIES[0], [FAMILIES[0].decode(request.prompt) for request in sampler.requests]
    assert [prompt.count(REMOVED) for prompt in prompts] == [0, 0, 1, 1, 2]
    assert all("removed" not in message["content"] for message in result.messages)
    assert json.loads(result.messages[3]["content"])["status"] == "pending"
    assert family.decode(result.segments[1].ids[: len(sampler.requests[2].prompt)]) == prompts[2]
    assert result.metrics["context/rewrites"] == result.metrics["context/rewrites_by_turns"] == 2.0
    assert result.metrics["context/tokens_after"] < result.metrics["context/tokens_before"]


@pytest.mark.parametrize("strategy", ["summarize", "digest"])
async def test_notes_are_sampled_trained_with_the_next_turn_and_told_to_nobody(strategy: str) -> None:
    user = FixedUser("My name is Ada.", "bye")
    result, sampler = await rewritten(
        "Which order?", LOOK, "NOTES: order found", "Done.", strategy=strategy, every_turns=2, user=user
    )
    check_streams(result, sampler)
    assert user.told == ["Which order?", "Done."]
    assert all("NOTES" not in message["content"] for message in result.messages)
    assert [m["context"] for m in result.messages if "context" in m] == [
        {"reason": "turns", "notes": "NOTES: order found"}
    ]
    asked, after = (FAMILIES[0].decode(request.prompt) for request in sampler.requests[2:])
    assert ContextConfig().instruction in asked
    assert ContextConfig().instruction not in after
    assert "NOTES: order found" in after
    assert ("My name is Ada." in after) is (strategy == "summarize")
    assert '"status"' in asked
    assert '"status"' not in after
    (first, second), notes = result.segments, len(sampler.requests[2].generation.ids)
    assert first.turn[first.loss_mask][-notes:].tolist() == [2] * notes
    assert set(second.turn[second.loss_mask].tolist()) == {2}
    assert len(result.turn_rewards) == 3


@pytest.mark.parametrize("family", FAMILIES, ids=["qwen3", "qwen3 thinking", "qwen2.5"])
@pytest.mark.parametrize("strategy", ["discard_tool_results", "summarize", "digest"])
async def test_no_token_is_made_up_lost_or_trained_twice(family: ChatFamily, strategy: str) -> None:
    """Drawn conversations: parallel and malformed calls, reasoning, users in between, every trigger."""
    segments = 0
    for seed in range(6):
        draw = random.Random(f"{family.name}/{strategy}/{seed}")
        thought = "<think>\nhm\n</think>\n\n" if family.thinking else ""
        choices = [LOOK, f"{OWNER}\n{LOOK}", "Which one?", '<tool_call>\n{"name"\n</tool_call>', LOOK]
        texts = [thought + draw.choice(choices) for _ in range(60)]
        user = FixedUser(*[f"answer {n}" for n in range(60)])
        context = {"strategy": strategy, "every_turns": draw.choice([None, 2, 3]), "share": draw.choice([0.3, 0.5])}
        context |= {"on_repetition": draw.choice([None, 2]), "max_rewrites": 4, "summary_tokens": 60}
        result, sampler = await rewritten(
            *texts, family=family, user=user, **context, b_max_turns=9, b_max_tokens=1500, b_max_malformed=9
        )
        check_streams(result, sampler)
        segments += len(result.segments)
    assert segments > 12


async def test_a_rewrite_by_tokens_lets_an_episode_outlive_its_window() -> None:
    budgets, texts = {"b_max_tokens": 900, "b_max_turns": 30}, [LOOK] * 40
    whole, _ = await rewritten(*texts, **budgets)
    assert whole.outcome is Outcome.LENGTH
    kept, sampler = await rewritten(*texts, strategy="digest", share=0.5, summary_tokens=20, **budgets)
    check_streams(kept, sampler)
    assert len(kept.turn_rewards) > 2 * len(whole.turn_rewards)
    assert all(len(segment) <= 900 for segment in kept.segments)
    assert kept.metrics["context/rewrites_by_tokens"] > 4


async def test_rewrites_are_bounded_and_one_that_gains_nothing_is_none() -> None:
    result, sampler = await rewritten(*["Which order?"] * 5, strategy="discard_tool_results", every_turns=1,
                                      user=FixedUser(*"abcd", "bye"))  # fmt: skip
    assert (len(result.segments), "context/rewrites" in result.metrics) == (1, False)
    texts = ["Which order?", *["notes", "Which order?"] * 3, "Which order?"]
    result, sampler = await rewritten(*texts, strategy="digest", every_turns=1, max_rewrites=3,
                                      user=FixedUser(*"abcd", "bye"))  # fmt: skip
    check_streams(result, sampler)
    assert result.metrics["context/rewrites"] == 3.0


async def test_without_room_for_notes_the_episode_ends_by_length() -> None:
    result, sampler = await rewritten(LOOK, strategy="digest", share=0.2, summary_tokens=5, b_max_tokens=300)
    assert result.outcome is Outcome.LENGTH
    check_streams(result, sampler)


async def test_notes_that_no_turn_follows_are_trained_with_the_last_turn() -> None:
    """They fill the window, and what is written around them leaves no room behind."""
    result, sampler = await rewritten(
        "Which?", "short " * 60, strategy="summarize", every_turns=1, summary_tokens=400, instruction="N.",
        b_max_tokens=270, b_max_turn_tokens=64, user=FixedUser("a", "b"),
    )  # fmt: skip
    assert (result.outcome, len(result.turn_rewards), len(sampler.requests)) == (Outcome.LENGTH, 1, 2)
    check_streams(result, sampler)
    played = [
        Trajectory("t", 0, sample, result.segments, result.turn_rewards, float(sample), False, result.outcome)
        for sample in range(2)
    ]
    (batch,) = make_batches([[Group(0, "t", played)]], AlgorithmConfig(credit="reward_to_go"), 1.0)
    assert sum(int(s.trained.sum()) for s in batch) == sum(t.sampled_tokens for t in played)


async def test_a_policy_that_says_the_same_over_and_over_is_stopped_and_scored() -> None:
    result, sampler = await rewritten(*[LOOK] * 9, stop_on_repetition=3)
    assert (result.outcome, len(sampler.requests)) == (Outcome.REPETITION, 3)
    assert result.outcome.scored
    assert len([m for m in result.messages if m["role"] == "tool"]) == 3  # the last one was executed
    other = [LOOK, call("get_order", order="K1"), LOOK, call("get_order", order="K1"), CANCELLED, "Done."]
    result, _ = await rewritten(*other, stop_on_repetition=3)
    assert result.outcome is Outcome.USER_STOP


async def test_long_results_keep_their_beginning_and_end() -> None:
    result, sampler = await rewritten(LOOK, CANCELLED, "Done.", max_result_tokens=12)
    check_streams(result, sampler)
    cut = next(message["content"] for message in result.messages if message["role"] == "tool")
    assert "tokens left out]" in cut
    assert result.metrics["context/results_cut"] == 1.0
    assert cut in FAMILIES[0].decode(sampler.requests[1].prompt)


@pytest.mark.parametrize("text", ["", "short", "x" * 4000, "<|im_end|>" * 90, "订单🙂" * 300, "\x00\n" * 500])
@pytest.mark.parametrize("with_codec", [True, False])
def test_shortened_text_holds_what_it_may(text: str, with_codec: bool) -> None:
    codec = FAMILIES[0].codec if with_codec else None
    found = shorten_result(text, 40, codec)
    if found == text:
        return
    head, said, tail = found.rpartition("\n[")[0], "tokens left out]\n", found.rpartition("tokens left out]\n")[2]
    assert said in found
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(found) < len(text)


def test_what_counts_as_the_same() -> None:
    def said(text: str, order: str | None = None, number: int = 0) -> Json:
        called = {"id": f"c{number}", "function": {"name": "f", "arguments": json.dumps({"order": order})}}
        return {"role": "assistant", "content": text, **({"tool_calls": [called]} if order else {})}

    assert repetitions([]) == 0
    assert repetitions([said("a"), said("b"), said(" a\n"), said("a")]) == 3
    assert repetitions([said("a"), said("a"), said("a.")]) == 1  # one character is another text
    near = [said("I look at this order once more"), said("I look at this order once more!"), said("Done.")]
    assert [repetitions(near[:2], similarity=share) for share in (1.0, 0.95)] == [1, 2]
    assert repetitions(near, similarity=0.95) == 1
    assert repetitions([], similarity=0.95) == 0
    assert repetitions([said("", "K1", 1), said("", "K2", 2), said("", "K1", 3)]) == 2
    assert repetitions([said("a"), said("a"), said("a")], last=2) == 2


def test_what_stays() -> None:
    def message(role: str, text: str, **more: Any) -> Json:
        return {"role": role, "content": text, **more}

    long = "r" * 99
    before = [message("system", "s"), message("user", "u1"), message("assistant", ""), message("tool", long),
              message("tool", "tiny"), message("assistant", ""), message("tool", long)]  # fmt: skip
    found = without_results(before, 1)
    assert [m["content"] for m in found] == ["s", "u1", "", REMOVED, "tiny", "", long]
    assert without_results(before, 0) == found  # what no turn has followed yet was not read
    read = [*before, message("assistant", ""), message("tool", "new")]
    assert [m["content"] for m in without_results(read, 0)] == ["s", "u1", "", REMOVED, "tiny", "", REMOVED, "", "new"]
    assert without_results(before, 2) == before
    assert without_results(found, 1) == found
    once = with_notes([*before, message("user", "u2")], "one", users=True)
    assert [m["content"] for m in once] == ["s", "u1", rules.NOTES.format(notes="one"), "u2"]
    twice = with_notes([*once, message("assistant", "hm"), message("tool", "x")], " ", users=True)
    assert [m["content"] for m in twice] == ["s", "u1", "u2", rules.NOTES.format(notes=rules.NO_NOTES)]
    digest = with_notes([*once, message("assistant", "hm"), message("user", "u3")], "two", users=False)
    assert [m["content"] for m in digest] == ["s", "u1", rules.NOTES.format(notes="two"), "u3"]
    # Where the user says one thing alone, what is measured of one of the two holds for the other.
    assert with_notes(before, "n", users=True) == with_notes(before, "n", users=False)


async def test_a_policy_behind_an_endpoint_follows_the_same_rules() -> None:
    look = calls(("get_order", {"order": ORDER}))
    usage = {"prompt_tokens": 800, "completion_tokens": 30, "total_tokens": 830}
    replies = [completion(look, usage=usage), says("notes: found it"), calls(("cancel_order", {"order": ORDER}))]
    context = ContextConfig(strategy="digest", share=0.75, summary_tokens=100)
    result, server = await play_chat(in_order(*replies, says("Done.")), context=context, max_tokens=1024)
    assert (result.outcome, result.evaluation.success) == (Outcome.USER_STOP, True)
    asked, after = (request["messages"] for request in server.requests[1:3])
    assert asked[-1] == {"role": "user", "content": context.instruction}
    assert server.requests[1]["max_tokens"] == 100
    assert [m["role"] for m in after] == ["system", "user", "user"]
    assert after[-1]["content"] == rules.NOTES.format(notes="notes: found it")
    assert all(set(m) == {"role", "content"} for m in after)
    assert result.metrics["context/rewrites_by_tokens"] == 1.0
    kept = ContextConfig(strategy="discard_tool_results", every_turns=1, keep_results=0, max_result_tokens=5)
    _, server = await play_chat(in_order(look, look, says("Done.")), context=kept)
    results = [m["content"] for m in server.requests[-1]["messages"] if m["role"] == "tool"]
    assert results == [REMOVED, REMOVED] or all("left out" in r or r == REMOVED for r in results)


def test_a_keeper_waits_a_turn_between_rewrites() -> None:
    keeper = ContextKeeper(ContextConfig(strategy="digest", share=0.5), 100)
    assert keeper.due(49, 3, []) is None
    assert keeper.due(50, 3, []) == "tokens"
    keeper.rewritten("tokens", 3, 50, 60)  # what the user said is long
    assert keeper.due(60, 3, []) is None
    assert keeper.due(60, 4, []) == "tokens"
