"""Who opens the conversation outside the tool: the customer's first words, the same that the one inside has said."""

from __future__ import annotations

from collections.abc import Sequence

from environments.gyms._shared import OpeningUser
from mua.environment.user import User, UserReply

NeutralUser = OpeningUser
"""Opens without the customer's words, where they cannot be known twice."""


class CustomerUser(OpeningUser):
    """Opens with the first words of ``customer``, whom the seed makes the same inside and outside of the tool."""

    def __init__(self, seed: str, openings: Sequence[str], customer: User) -> None:
        super().__init__(seed, openings)
        self._customer = customer

    async def open(self) -> UserReply:
        return await self._customer.open()

    async def close(self) -> None:
        await self._customer.close()
