"""One session: the token streams of one rollout, whoever asks for its turns.

::

    request ── messages ──► the longest recorded beginning, up to an assistant turn
                              │ it is the end of its stream ──► the new messages are appended      (appended)
                              │ it is an earlier point      ──► a copy of the tokens up to there   (forked)
                              └ none, or other tools,       ──► the family's rendering of it all   (rewritten;
                                or words of the client's own    started, where no assistant has spoken yet)

Recorded tokens are taken, never the client's copy of their text. A fork's copied tokens carry no loss a second time.
All sampled tokens of all streams are one trajectory: turns are numbered over the session, in the order they ended.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Protocol, TypeAlias

import numpy as np

from mua.config.rollout import AgentConfig
from mua.rollout.gateway.chat_calls import ChatCall, Refused, ServedTurn
from mua.tokens.chat_family import ChatFamily
from mua.tokens.codec import ConversationError
from mua.tokens.conversation import NO_VERSION, Conversation, Mark
from mua.tokens.parsing import THINK_CLOSE, AssistantTurn
from mua.types import Generation, Json, Outcome, Provenance, Segment, ToolSchema
from mua.utils.errors import DeadlineExceeded, EngineError
from mua.utils.strict_json import JsonError, read_json

_MOST_WAITING = 256
_LONGEST_FORM = 200_000


Seed: TypeAlias = tuple[int | str, ...]
"""What a turn's sampling seed is derived from, under the episode's."""
Ask: TypeAlias = Callable[
    [Conversation, ChatCall, Seed, Callable[[], int]], Coroutine[Any, Any, tuple[AssistantTurn, Generation] | None]
]
"""Samples the next turn of a conversation for a request, by the seed; the function gives the turn its number in the
session when it has ended. None when there is no room for a turn."""


class EpisodeHost(Protocol):
    """The episode: what it offers its agent beside the policy, and what it is told of its session.

    Raises :class:`Refused` for what cannot be served.
    """

    def task(self) -> Json:
        """``id``, ``domain``, ``instructions``, ``user`` (the first message) and ``tools`` in OpenAI's form."""

    def tools(self) -> list[ToolSchema]:
        """The tools of the domain, as they are now."""

    async def call_tool(self, name: str, arguments: Json) -> Json:
        """``text``, ``error`` and ``ended``: whether the episode is over by this call."""

    async def tell_user(self, text: str) -> Json:
        """The user's ``text``, and ``stop``: whether the conversation is over."""

    def report(self, report: Json) -> None:
        """Take the agent's own verdict."""

    def may_ask(self) -> Outcome | None:
        """Before a turn is sampled: what ends the episode instead."""

    def turned(self, turn: AssistantTurn, call: ChatCall, served: ServedTurn) -> None:
        """A turn was sampled for ``call``; the client is answered ``served``."""

    def ended(self, outcome: Outcome) -> None:
        """A budget was used up."""

    def failed(self, fault: Exception) -> None:
        """The policy could not be asked."""


@dataclass(slots=True)
class _Branch:
    conversation: Conversation
    tools: tuple[ToolSchema, ...]
    seen: list[Json]
    """The messages as the client knows them: its own, and what it was answered."""
    marks: list[tuple[int, Mark]] = field(default_factory=list)
    """How many messages were seen at the end of each turn sampled here, and the place."""
    busy: bool = False


class GatewaySession:
    """Belongs to one event loop. ``show_tools``: whether the template shows tools (``environment.prompt: full``)."""

    def __init__(
        self, family: ChatFamily, ask: Ask, host: EpisodeHost, limits: AgentConfig, *, show_tools: bool
    ) -> None:
        self.family, self.host = family, host
        self._ask, self._limits, self._show_tools = ask, limits, show_tools
        self.turns = 0
        """Turns sampled so far."""
        self.counts: Counter[str] = Counter()
        self.open = True
        self._branches: list[_Branch] = []
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._waiting = 0
        self._asked: dict[str, asyncio.Task[ServedTurn]] = {}
        self._repeats: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._done: dict[tuple[object, ...], tuple[Json, asyncio.Task[Json]]] = {}
        self._unheard: set[int] = set()
        """Numbers of the turns that no client has received."""

    def heard(self) -> None:
        """Count a request of any kind. Raises :class:`Refused` when there were too many, or the session is over."""
        self.counts["gateway/requests"] += 1
        if not self.open:
            raise Refused(401, "this session is over", "invalid_api_key")
        if self.counts["gateway/requests"] > self._limits.max_requests:
            self.host.ended(Outcome.MAX_TURNS)
            raise Refused(400, f"agent.max_requests: more than {self._limits.max_requests} requests", "session_limit")

    async def answer(self, call: ChatCall, *, retried: bool) -> ServedTurn:
        """The policy's turn. A request that a client's library sends again (``retried``) is answered as it was.

        Raises :class:`Refused`. A client that goes away does not end the sampling: its retry gets the answer.
        """
        task = self._asked.get(call.digest) if retried else None
        if task is None:
            if self._waiting >= _MOST_WAITING:
                raise Refused(429, f"{_MOST_WAITING} requests of this session wait already", "session_limit")
            task = self._asked[call.digest] = self._started(self._answer(call))
        else:
            self.counts["gateway/retried"] += 1
        return await asyncio.shield(task)

    async def do_once(
        self, key: tuple[object, ...], asked: Json, work: Callable[[], Coroutine[Any, Any, Json]]
    ) -> Json:
        """What ``work`` gives, which is done once for a ``key``: who sends it again gets the same answer.

        Raises :class:`Refused` where the key was used for something else than what is ``asked``.
        """
        if key not in self._done:
            self._done[key] = asked, self._started(work())
        before, task = self._done[key]
        if before != asked:
            raise Refused(409, f"the id {str(key[-1])[:80]!r} was used for another call", "id_used")
        return await asyncio.shield(task)

    def forget(self, *prefix: object) -> None:
        """Keys that begin so are unused from now on: another client counts from the beginning."""
        self._done = {key: done for key, done in self._done.items() if key[: len(prefix)] != prefix}

    def received(self, turn: ServedTurn) -> None:
        """A client has got the turn; what none has got is not trained."""
        self._unheard.discard(turn.number)

    def _started(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name="gateway")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Whoever waited has the fault; a client that left is none.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def close(self) -> None:
        """Nobody is answered any more; what is being sampled is given up."""
        self.open = False
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.counts["gateway/unheard"] += len(self._unheard)

    def segments(self) -> list[Segment]:
        """All token streams that hold sampled tokens, in the order in which they began."""
        streams = [segment for branch in self._branches for segment in branch.conversation.segments()]
        for segment in streams:
            unheard = segment.loss_mask & np.isin(segment.turn, list(self._unheard))
            segment.provenance[unheard] = Provenance.TEMPLATE
            segment.logprobs[unheard], segment.version[unheard] = 0.0, NO_VERSION
        return [segment for segment in streams if segment.loss_mask.any()] or streams[-1:]

    def segments_before(self) -> dict[Conversation, int]:
        """How many of :meth:`segments` are of the streams before each conversation."""
        found, count = {}, 0
        for branch in self._branches:
            found[branch.conversation] = count
            heard = [s.loss_mask & ~np.isin(s.turn, list(self._unheard)) for s in branch.conversation.segments()]
            count += sum(bool(mask.any()) for mask in heard)
        return found

    @property
    def tokens(self) -> int:
        """Tokens of the streams as they are now."""
        return sum(branch.conversation.length for branch in self._branches)

    async def _answer(self, call: ChatCall) -> ServedTurn:
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            outcome = self.host.may_ask()
            if outcome is None and self.tokens > self._limits.max_session_tokens:
                self.host.ended(outcome := Outcome.LENGTH)
            if outcome is not None:
                raise Refused(400, f"the episode is over ({outcome.value}); no further turn is sampled", "episode_over")
            branch, placed = self._place(call)
            branch.busy = True
            try:
                return await self._sampled(branch, call, placed)
            finally:
                branch.busy = False
        finally:
            self._slots.release()

    async def _sampled(self, branch: _Branch, call: ChatCall, placed: str) -> ServedTurn:
        talk = branch.conversation
        prompt_tokens = len(talk.prompt_ids())
        # The first stream's turns have the seeds that a built-in episode's have; others are told apart by what they
        # were asked and how often, so that requests that overtake each other change nothing.
        seed: Seed = (len(branch.marks),)
        if branch is not self._branches[0]:
            self._repeats[call.digest] += 1
            seed = call.digest, self._repeats[call.digest]

        def number() -> int:
            self.turns += 1
            self._unheard.add(self.turns - 1)
            return self.turns - 1

        try:
            found = await self._ask(talk, call, seed, number)
        except (EngineError, DeadlineExceeded) as fault:
            self.host.failed(fault)
            raise Refused(503, f"the policy could not be asked: {fault}", "engine_error") from fault
        except Exception as bug:  # no fault of the agent's or the policy's: the episode raises it
            self.host.failed(bug)
            raise
        if found is None:
            self.host.ended(Outcome.LENGTH)
            message = f"the conversation has {prompt_tokens} tokens, and rollout.max_tokens leaves no room for a turn"
            raise Refused(400, message, "context_length_exceeded", "messages")
        turn, generation = found
        served, finish = self._told(turn, generation, call)
        branch.seen = [*call.messages, served]
        branch.marks.append((len(branch.seen), talk.mark()))
        self.counts[f"gateway/{placed}"] += 1
        self.counts["gateway/overridden"] += bool(call.overridden)
        answer = ServedTurn(
            served, finish, prompt_tokens, len(generation.ids), generation.cached_tokens, self.turns - 1,
            int(time.time()), placed,
        )  # fmt: skip
        self.host.turned(turn, call, answer)
        return answer

    def _told(self, turn: AssistantTurn, generation: Generation, call: ChatCall) -> tuple[Json, str]:
        """The message for the client, and why it ended."""
        content, calls = turn.content, [one.openai() for one in turn.tool_calls]
        if calls and not call.calls_tools:
            ended = self.family.ended(generation.ids)
            content, calls = self.family.decode(generation.ids[:-1] if ended else generation.ids), []
        cuts = [at for stop in call.stop if (at := content.find(stop)) >= 0]
        if cuts:
            content, calls = content[: min(cuts)], []
        message: Json = {"role": "assistant", "content": content}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if calls:
            message["tool_calls"] = calls
        return message, "tool_calls" if calls else "length" if turn.truncated and not cuts else "stop"

    def _place(self, call: ChatCall) -> tuple[_Branch, str]:
        """Where the request goes on; everything is appended or rendered on return."""
        tools = call.tools if self._show_tools else ()
        found: tuple[_Branch, int, Mark] | None = None
        for candidate in self._branches:  # the longest recorded beginning
            if candidate.tools != tools or not candidate.marks:
                continue
            same = map(same_message, candidate.seen, call.messages)
            shared = min(sum(1 for _ in takewhile(bool, same)), len(call.messages) - 1)
            fitting = [(seen, mark) for seen, mark in candidate.marks if seen <= shared]
            if fitting and (found is None or fitting[-1][0] > found[1]):
                found = (candidate, *fitting[-1])
        try:
            if found is None:
                told = any(message["role"] == "assistant" for message in call.messages)
                return self._start(call.messages, tools), "rewritten" if told else "started"
            branch, seen, mark = found
            self._unheard -= {mark.turns - 1}  # who goes on from a turn has it, however it came there
            new = call.messages[seen:]
            roles = [message["role"] for message in new]
            results = [message for message in new if message["role"] == "tool"]
            others = roles[len(results) :]
            # What can stand behind an assistant's turn as it comes: tools' results, then users and systems.
            if not roles or roles[: len(results)] != ["tool"] * len(results) or {*others} - {"user", "system"}:
                recorded = branch.conversation.messages[: mark.messages]
                return self._start([*recorded, *new], tools), "rewritten"
            placed = "appended"
            if branch.busy or mark is not branch.marks[-1][1]:
                branch = _Branch(branch.conversation.fork(mark), tools, [])
                self._branches.append(branch)
                placed = "forked"
            talk = branch.conversation
            if results:
                calls = talk.messages[-1].get("tool_calls", ())
                order = {call["id"]: at for at, call in enumerate(calls)}
                results.sort(key=lambda result: order.get(result.get("tool_call_id"), len(order)))
                talk.add_tool_results([result["content"] for result in results])
            for message in new[len(results) :]:
                add = talk.add_user if message["role"] == "user" else talk.add_system
                add(message["content"])
        except ConversationError as error:
            raise Refused(400, str(error), param="messages") from None
        return branch, placed

    def _start(self, messages: Sequence[Json], tools: tuple[ToolSchema, ...]) -> _Branch:
        branch = _Branch(Conversation.from_history(self.family, messages, tools), tools, [])
        self._branches.append(branch)
        return branch


def cut_at_stop(family: ChatFamily, generation: Generation, stops: Sequence[str]) -> Generation:
    """``generation`` up to the first of ``stops`` in what it says beside reasoning and calls, as an engine would have
    ended it; the same object where there is none. What stands behind is as if it had never been sampled."""
    said = family.parse(generation.ids).content
    found = [said.find(stop) + len(stop) for stop in stops if stop in said]
    if not found:
        return generation
    ids, text, told = generation.ids, family.decode(generation.ids), said[: min(found)]
    begun = text.find(told, max(0, text.find(THINK_CLOSE)))
    end = max(0, begun) + len(told)
    kept = bisect_left(range(len(ids)), end, key=lambda count: len(family.decode(ids[:count])))
    while kept < len(ids) and not family.decode(ids[:kept]).startswith(text[:end]):
        kept += 1
    experts = generation.experts
    return replace(
        generation, ids=ids[:kept], logprobs=generation.logprobs[:kept], versions=generation.versions[:kept],
        finish="length", experts=None if experts is None else experts[: len(experts) - len(ids) + kept],
    )  # fmt: skip


def add_cut(
    talk: Conversation, generation: Generation, stops: Sequence[str], number: int
) -> tuple[AssistantTurn, Generation]:
    """Add a turn to ``talk``, up to the first of ``stops``; gives what was added."""
    kept = cut_at_stop(talk.family, generation, stops)
    turn = talk.add_sampled(kept, number)
    if kept is not generation:  # the client ended it, and no budget
        turn = replace(turn, truncated=False)
        talk.messages[-1].pop("truncated", None)
    return turn, kept


_ADDED = re.compile(
    r"\s*+(?:</code>|```|<end_code>)?\s*+(?:```|<end_code>)?\s*+(?:Calling tools:\s*+(?P<calls>\[.*\]))?\s*+", re.DOTALL
)
_THOUGHTS = re.compile(r"\A\s*(?:<think>)?(?:(?!</think>).)*</think>", re.DOTALL)


def same_message(held: Json, sent: Json) -> bool:
    """Whether ``sent`` is the client's copy of ``held``: what it sent before, or what it was answered.

    Agent libraries write the assistant's messages again before they send them back (measured with four of them in
    docs/benchmarks/gateway.md). What they change is only form, and is looked through: ids, reasoning, white space
    around the text, the spelling of the arguments' JSON, ``null`` for empty. A library that has calls as text
    (smolagents) is recognized by what the text must hold. Words of its own are another message, and a new segment.
    """
    if held["role"] != sent["role"]:
        return False
    if held["role"] != "assistant":
        return bool(held["content"].strip() == sent["content"].strip())
    mine, theirs = _spoken(held), _spoken(sent)
    if mine == theirs and _calls(held) == _calls(sent):
        return True
    if sent.get("tool_calls"):
        return False
    if held.get("tool_calls"):
        return _told(held, sent["content"])
    return bool(mine) and theirs.startswith(mine) and _only_form(theirs[len(mine) :], mine)


def _spoken(message: Json) -> str:
    text = message["content"]
    return str(_THOUGHTS.sub("", text, count=1) if "</think>" in text else text).strip()


def _calls(message: Json) -> list[tuple[str, str]]:
    """Names, and arguments in one spelling; what is no JSON stays as it is."""
    found = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        try:
            arguments = json.dumps(read_json(arguments or "{}"), sort_keys=True, ensure_ascii=False)
        except JsonError:
            arguments = arguments.strip()
        found.append((call["function"]["name"], arguments))
    return found


def _told(held: Json, text: str) -> bool:
    """Whether ``text`` tells all that the turn ``held`` says: its words, its calls' names and all their arguments."""
    if _spoken(held) not in text:
        return False
    for name, arguments in _calls(held):
        try:
            values = list(_leaves(read_json(arguments)))
        except ValueError:
            values = [arguments]
        for value in values:
            forms = [repr(value), json.dumps(value)]  # how Python and JSON write a plain value
            if isinstance(value, str):
                forms = [value, *(form[1:-1] for form in (*forms, json.dumps(value, ensure_ascii=False)))]
            if not any(form in text for form in forms):
                return False
        if name not in text:
            return False
    return True


def _only_form(added: str, said: str) -> bool:
    """Whether ``added``, which a library wrote behind what was ``said``, says nothing new: the end of a block of code
    that a stop string had cut off, and that block again as the call that it is (smolagents' CodeAgent)."""
    form = _ADDED.fullmatch(added[:_LONGEST_FORM])
    if form is None or len(added) > _LONGEST_FORM:
        return False
    try:
        calls = ast.literal_eval(form["calls"] or "[]")
        codes = [value for call in calls for value in _leaves(call["function"]["arguments"])]
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        return False
    return all(isinstance(code, str) and all(line.strip() in said for line in code.splitlines()) for code in codes)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value
