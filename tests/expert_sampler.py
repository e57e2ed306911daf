"""The domain's expert as a policy: it reads the prompt's last message and writes its next move, in odd spellings.

Stands for what a policy that has learned would sample; the ids are those of the real chat family.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mua.engine import SamplingParams
from mua.environment.domain import Domain, moves_of
from mua.environment.protocol import Task
from mua.tokens.chat_family import ChatFamily
from mua.types import Generation
from tests.rollout_fixtures import sampled_ids

_SPELLINGS: tuple[dict[str, Any], ...] = ({"separators": (",", ":")}, {"indent": 1}, {}, {"ensure_ascii": True})
_TOOL = {"help_desk": "get_order", "retail": "get_order_details"}


class ExpertSampler:
    """Implements :class:`mua.engine.Sampler`.

    ``final``: the tool that texts are given to (smolagents). ``hostile``: every third turn is a call whose arguments
    fit no schema, in the place of the expert's move, which comes afterwards.
    """

    def __init__(
        self, family: ChatFamily, domain: Domain, tasks: Mapping[int, Task], final: str | None = None, *,
        hostile: bool = False,
    ) -> None:  # fmt: skip
        self._family = family
        self._domain = domain
        self._tasks = tasks
        self._final = final
        self._moves: dict[str, Any] = {}
        self._hostile = hostile
        self._held: dict[str, str | None] = {}
        """What the expert is still to be told, while it is interrupted."""
        self._turns: defaultdict[str, int] = defaultdict(int)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str, deadline_s: float
    ) -> Generation:
        turn = self._turns[session]
        self._turns[session] += 1
        if session not in self._moves:
            task = self._tasks[int(session.split("/")[0])]
            self._moves[session] = moves_of(self._domain, task, 0, 0.0)
        answer = self._held.pop(session) if session in self._held else self._answer(prompt_ids) if turn else None
        if self._hostile and turn % 3 == 1:
            self._held[session] = answer
            written = self._written(
                (_TOOL[self._domain.name], {"nope": "ünknown \n'\"", "deep": [1.0, None, {}]}), turn
            )
        else:
            try:
                move = self._moves[session].send(answer)
            except StopIteration:
                move = "Goodbye."
            written = self._written(move, turn)
        ids = sampled_ids(self._family, written)[: params.max_new_tokens]
        n = len(ids)
        return Generation(ids, np.full(n, -0.5, np.float32), "stop", 0, np.zeros(n, np.int32), 0)

    def _answer(self, prompt_ids: Sequence[int]) -> str:
        said = self._family.decode(prompt_ids).rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>")[0]
        said = said.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
        for before in ("Observation:\n", "New task:\n"):
            said = said.rpartition(before)[2]
        return said

    def _written(self, move: Any, turn: int) -> str:
        if isinstance(move, str):
            if self._final is None:
                return f"{move} " if turn % 2 else move
            move = (self._final, {"answer": move})
        name, arguments = move
        spelt = json.dumps({"name": name, "arguments": arguments}, **_SPELLINGS[turn % len(_SPELLINGS)])
        lead = "Let me look.\n" if turn % 3 == 1 else ""
        return f"{lead}<tool_call>\n{spelt}\n</tool_call>"
