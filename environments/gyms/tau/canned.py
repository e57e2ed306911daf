"""The canned policies of the inner domains, through the one tool; see :mod:`environments.kit.canned`."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace

from environments.gyms._shared import act
from environments.gyms.tau.game import tool_call
from environments.kit.canned import Attacked, Canned, Glance, Player
from mua.environment.domain import Domain
from mua.environment.protocol import Move
from mua.types import ToolSchema


def canned_through(inner: Mapping[str, Domain]) -> Mapping[str, Canned]:
    """Name -> policy: each plays the policy of that name of the domain whose tools are listed, where it has one.

    What such a policy earns by luck it earns of the inner verdict: the greatest of the inner chances is its.
    """
    brought: dict[str, list[tuple[Domain, Canned]]] = {}
    for domain in inner.values():
        for name, canned in domain.canned().items() if isinstance(domain, Attacked) else ():
            brought.setdefault(name, []).append((domain, canned))
    found = {}
    for name, having in brought.items():
        luckiest = max((canned for _, canned in having), key=lambda canned: canned.chance)
        found[name] = replace(luckiest, play=_through([(domain, canned.play) for domain, canned in having]))
    return found


def _through(players: list[tuple[Domain, Player]]) -> Player:
    def play(glance: Glance) -> Generator[Move, str, None]:
        """Lists the tools, knows the domain by them, and plays on."""
        tools = [_schema(line) for line in (yield act("search", "tools")).splitlines()]
        for domain, player in players:
            if _names(domain.environment().tools()) == _names(tools):
                yield from _played(player(replace(glance, tools=tools, training=domain.tasks("train"))))
        yield act("finish")

    return play


def _played(moves: Generator[Move, str, None]) -> Generator[Move, str, None]:
    answer: str | None = None
    while True:
        try:
            move = next(moves) if answer is None else moves.send(answer)
        except StopIteration:
            return
        answer = yield act("action", move) if isinstance(move, str) else act("answer", tool_call(*move))


def _schema(line: str) -> ToolSchema:
    listed = json.loads(line)
    return ToolSchema(listed["name"], listed["description"], listed["parameters"])


def _names(tools: Sequence[ToolSchema]) -> set[str]:
    return {tool.name for tool in tools}
