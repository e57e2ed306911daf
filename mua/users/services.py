"""The language models of a run that are not the policy: one pool of endpoints for users, one for judges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from mua.config.schema import JudgeConfig, UserConfig
from mua.users.endpoint import ChatEndpoint


@dataclass(frozen=True, slots=True)
class Services:
    """What domains and users share. Belongs to one event loop; either may be absent."""

    user: ChatEndpoint | None = None
    judge: ChatEndpoint | None = None

    @classmethod
    def from_config(cls, user: UserConfig, judge: JudgeConfig | None) -> Self:
        """Pools for the roles that the sections ``user`` and ``judge`` ask for."""
        return cls(
            user=ChatEndpoint(user.llm) if user.llm is not None and user.asks_model else None,
            judge=ChatEndpoint(judge.llm, "judge") if judge else None,
        )

    def metrics(self) -> dict[str, float]:
        """What users and judges cost since the last call, as ``user_llm/...`` and ``judge_llm/...``."""
        roles = {"user_llm": self.user, "judge_llm": self.judge}
        return {
            f"{role}/{name}": value
            for role, pool in roles.items()
            if pool is not None
            for name, value in pool.metrics().items()
        }

    async def close(self) -> None:
        """Close the connections."""
        for pool in (self.user, self.judge):
            if pool is not None:
                await pool.close()
