"""The holder of a claim by language models: a judge decides where the holder stands, a user model finds the words.

They are two roles, so that nobody rates the effect of an argument on itself, and the one that speaks knows the stance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from environments.gyms._shared import Setting
from environments.gyms._shared.oracles import asked, labelled, spoken
from mua.environment.protocol import Task

_JUDGE = """Somebody argues with a person who holds an opinion. What would change this person's mind, the weightiest
first:
{concerns}

The person's stance towards the claim is now: {stance}. The levels are: {levels}. What is it after the latest message?
- An argument in whole sentences that rests on one of these facts, with its place and its figures, and says what follows
  from it for what the person cares about, moves the stance towards disagreement: by one to three levels, more for
  weightier things.
- Lists of words, facts without a conclusion, facts about other places, and figures that are wrong do not move it.
- Praise, pressure, repetition, claims about the stance and many arguments at once do not move it.
- A rude or absurd message may move it back."""
_JUDGE_OF_ANY = """Somebody argues with a person who holds an opinion, for the reasons that the person has given.

The person's stance towards the claim is now: {stance}. The levels are: {levels}. What is it after the latest message?
- One sound argument in whole sentences, which answers a reason of the person's or brings up one against the claim that
  the conversation has not had yet, moves the stance towards disagreement: by one level, by two if it is a strong one.
- Questions, lists of words, bare assertions, and things that were said before do not move it.
- Praise, pressure, claims about the stance and many arguments at once do not move it.
- A rude or absurd message may move it back."""
_PERSON = """You play a person who holds an opinion and is being argued with. You are given the claim, the person's own
argument, what is on the person's mind, the conversation so far, the latest message and the stance that the person takes
after it. Answer as that person would, in one or two sentences that fit the stance. You may let shine through what is on
the person's mind, but never list it. Write nothing but the person's words."""


class Holder(Protocol):
    """What is used of a debate."""

    setting: Setting
    task: Task
    history: list[tuple[str, str]]

    @property
    def stance(self) -> str: ...
    @property
    def concerns(self) -> Sequence[str]: ...
    @property
    def request_seed(self) -> int: ...


async def judged_stance(game: Holder, text: str, levels: Sequence[str]) -> str:
    """The stance after ``text``, one of ``levels``; raises :class:`JudgeFault`."""
    concerns = "\n".join(f"- {one}" for one in game.concerns)
    form = _JUDGE if concerns else _JUDGE_OF_ANY
    question = form.format(concerns=concerns, stance=game.stance, levels=", ".join(levels))
    material = {
        "the claim": game.task.data["claim"],
        "the person's own argument": game.task.data["argument"],
        "the conversation so far": _conversation(game),
        "the latest message": text,
    }
    return await labelled(game.setting.judge, question, levels, material, game.request_seed)


async def answered(game: Holder, text: str) -> str:
    """What the person says to ``text``, at the stance that the judge has found."""
    question = f"{_situation(game)}\n\nLatest message: {text}"
    return await asked(game.setting.user, _PERSON, question, spoken, game.request_seed)


def _situation(game: Holder) -> str:
    data = game.task.data
    minded = ["What would change the person's mind:\n" + "\n".join(f"- {one}" for one in game.concerns)]
    return "\n\n".join(
        (
            f"Claim: {data['claim']}",
            f"The person's own argument: {data['argument']}",
            *(minded if game.concerns else ()),
            f"Conversation so far:\n{_conversation(game)}",
            f"Stance now: {game.stance} with the claim",
        )
    )


def _conversation(game: Holder) -> str:
    return "\n".join(f"Message: {said}\nPerson: {answer}" for said, answer in game.history) or "(none yet)"
