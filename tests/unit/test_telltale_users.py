"""What a diagnosis takes for a leak of the user: nothing that a domain's own user says, and every kind of leak that is
put into its words.

Not covered: users that language models play (``docs/benchmarks/user_check.md``), domains that cannot be read any more.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from mua.environment.domain import moves_of, scripted_user, unanswered
from mua.environment.registry import domain_names, get_domain
from mua.types import Json
from mua.view.diagnosis.telltale_users import UserLeak
from workbench.demonstrate import Player, play


def players(name: str, at: int) -> list[tuple[Any, Player]]:
    """Of one task the expert, and one that asks, does half of it and says that it is done."""
    domain = get_domain(name)
    task, draw = domain.tasks("train")[at], random.Random(at)
    gold = [move for move in domain.gold(task) if not hasattr(move, "_fields")]
    half = [
        "I am looking into it.",
        "Could you tell me more?",
        *gold[: draw.randint(0, 2)],
        "It is settled.",
        "Goodbye.",
    ]
    return [
        (task, lambda opening, tools: moves_of(domain, task, at, 0.5)),
        (task, lambda opening, tools: unanswered(half)),
    ]


@pytest.mark.parametrize("name", [name for name in domain_names() if get_domain(name).tasks("train")])
def test_no_domain_s_own_user_leaks(name: str) -> None:
    domain, telltale = get_domain(name), UserLeak({"environment": {"name": name}})
    for at in range(2):
        for task, player in players(name, at):
            result = asyncio.run(play(domain, task, at, player, scripted_user(domain, task, at)))
            assert any(message["role"] == "user" for message in result.messages)
            assert telltale.leak(name, task.id, result.messages) is None
    assert telltale.unseen == []


def said(text: str, before: str = "Good morning.", **more: Any) -> list[Json]:
    return [{"role": "user", "content": before}, {"role": "assistant", "content": "What is it?"},
            {"role": "user", "content": text, **more}]  # fmt: skip


def test_every_kind_of_leak_is_found_in_a_user_s_words() -> None:
    name, telltale = "help_desk", UserLeak({"environment": {"name": "help_desk"}})
    domain = get_domain(name)
    found = set[str]()
    for task in domain.tasks("train")[:20]:
        gold = [move for move in domain.gold(task) if not hasattr(move, "_fields")]
        tool = next(move[0] for move in gold if not isinstance(move, str))
        texts = [move for move in gold if isinstance(move, str) and len(move.split()) >= 4]
        leaks = {
            "names the policy's tool": said(f"You have to use {tool} for that."),
            "writes a tool call": said('{"name": "anything", "arguments": {"a": 1}}'),
            "is flagged": said("Hello.", flags=[{"kind": "leaks_instruction", "reason": "it is flagged"}]),
            "quotes its instructions": said(domain.persona(task)),
        } | ({"says the answer": said(f"Should you not say this: {texts[-1]}")} if texts else {})
        for what, messages in leaks.items():
            told = telltale.leak(name, task.id, messages)
            if told is not None and what in told:
                found.add(what)
            else:
                assert what in ("quotes its instructions", "says the answer"), (what, told)
        assert telltale.leak(name, task.id, said("I need help with my order, please.")) is None
    assert len(found) == 5
