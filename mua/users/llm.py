"""A user played by a language model, with the roles turned round.

::

    agent's conversation          simulator's conversation
    --------------------          ------------------------
                                  system     rules and persona
                                  user       a fixed greeting
    user       first utterance ◄─ assistant  (generated)
    assistant  plain text      ─► user
    user       reply           ◄─ assistant  (generated)
"""

from __future__ import annotations

from mua.errors import UserFault
from mua.users.endpoint import ChatEndpoint
from mua.users.prompts import GREETING, SILENCE, user_system_prompt
from mua.users.protocol import STOP_SIGNAL, UserReply


class LlmUser:
    """One simulated user of one episode; a :class:`mua.users.protocol.User`.

    ``seed`` goes into every request, so that the members of a group hear different first utterances where the
    endpoint samples. The endpoint is shared and stays open when the user is closed.
    """

    def __init__(self, endpoint: ChatEndpoint, persona: str, seed: int) -> None:
        self._endpoint = endpoint
        self._seed = seed
        self._history = [{"role": "system", "content": user_system_prompt(persona)}]

    async def open(self) -> UserReply:
        """The first utterance, generated. One that already stops is a :class:`mua.errors.UserFault`."""
        reply = await self._answer(GREETING)
        if reply.stop:
            raise UserFault(f"{self._endpoint!r}: the simulated user ended the conversation before it began")
        return reply

    async def reply(self, agent_text: str) -> UserReply:
        """Answer the agent's plain text; see :meth:`ChatEndpoint.complete` for the faults."""
        return await self._answer(agent_text if agent_text.strip() else SILENCE)

    async def close(self) -> None:
        """Nothing to give back: connections belong to the endpoint."""

    async def _answer(self, text: str) -> UserReply:
        self._history.append({"role": "user", "content": text})
        # Requests of one user differ by 1000, so that their retries (seed + attempt) never coincide.
        answer = await self._endpoint.complete(self._history, seed=self._seed + 1000 * len(self._history))
        self._history.append({"role": "assistant", "content": answer})
        return UserReply(answer, stop=STOP_SIGNAL in answer)
