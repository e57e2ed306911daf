"""Users for planted runs: they talk too much, or fail. ``user.kind: tools.bench.planted_users:leaking``."""

from __future__ import annotations

import random
from typing import Any

from mua.environment.domain import scripted_user
from mua.environment.user import User, UserReply
from mua.users.factory import Placement
from mua.utils.errors import UserFault, UserFaultKind
from tools.bench.planted_runs import step_now


class _Spoilt:
    """A scripted user whose replies are changed. Implements :class:`mua.environment.user.User`."""

    def __init__(self, placement: Placement) -> None:
        self._user: User = scripted_user(placement.domain, placement.task, placement.seed)
        self._options: dict[str, Any] = dict(placement.options)
        self._draw = random.Random(placement.seed)
        moves = [move for move in placement.domain.gold(placement.task) if not hasattr(move, "_fields")]
        texts, calls = [m for m in moves if isinstance(m, str)], [m for m in moves if not isinstance(m, str)]
        self._leaks = {
            "answer": f"By the way, what I should hear is: {texts[-1]}" if texts else None,
            "tool": f"You have to use {calls[-1][0]} for that." if calls else None,
            "persona": placement.domain.persona(placement.task),
        }

    async def open(self) -> UserReply:
        return self._changed(await self._user.open())

    async def reply(self, agent_text: str) -> UserReply:
        return self._changed(await self._user.reply(agent_text))

    async def close(self) -> None:
        await self._user.close()

    def _changed(self, reply: UserReply) -> UserReply:
        if step_now() < self._options.get("from_step", 0) or self._draw.random() > self._options.get("share", 0.5):
            return reply
        if self._options["what"] == "nonsense":
            words = self._draw.choices(["the", "moon", "sings", "green", "because", "seven", "doors", "wander"], k=8)
            return UserReply(" ".join(words), reply.stop and self._draw.random() < 0.5)
        if self._options.get("what") == "fail":
            raise UserFault("the endpoint of the user does not answer", UserFaultKind.UNREACHABLE)
        said = self._leaks[self._options["what"]]
        return reply if said is None or reply.stop else UserReply(f"{reply.text} {said}", reply.stop, reply.tools)


def spoilt(placement: Placement) -> User:
    """By ``user.options``: ``what`` (answer, tool, persona, nonsense, fail), ``share`` of replies, ``from_step``."""
    return _Spoilt(placement)
