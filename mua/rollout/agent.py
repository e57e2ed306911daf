"""Who acts in an episode: token ids through an engine, messages through a chat endpoint, or moves of other origin.

::

    Episode ──► Agent ──┬── TokenAgent      Conversation + Sampler: ids in, ids out, every token kept for training
                        ├── ChatAgent       OpenAI chat completions with native tool calls: text only, no segments
                        └── ScriptedAgent   expert's, gold, canned or a person's moves (environments/kit/demonstrate.py)

The episode asks for a turn, answers it with tool results or with the user's words, and never learns which it was.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter, time
from typing import Any, Protocol

from mua.config.rollout import ContextConfig
from mua.config.schema import RolloutConfig
from mua.engine import Sampler, SamplingParams, TurnCut
from mua.environment.endpoint.chat import ChatRequest, Completion
from mua.environment.endpoint.services import ChatClient, ContextLengthExceeded, PromptRefused
from mua.environment.protocol import Task
from mua.rollout.context import NOTES_KEY, ContextKeeper, with_notes, without_results
from mua.store.recorder import NotedRequest, current_episode
from mua.tokens.chat_family import ChatFamily
from mua.tokens.conversation import Conversation
from mua.tokens.parsing import AssistantTurn, ErrorKind, ToolCall, ToolCallError
from mua.types import Generation, Int32Array, Json, Segment, ToolSchema
from mua.utils.seeds import derived_seed
from mua.utils.strict_json import JsonError, read_json

log = logging.getLogger(__name__)

NEAR = 0.9
REMEMBERED = 256
ENOUGH = 32


@dataclass(frozen=True, slots=True)
class EpisodeSetting:
    """What all episodes of a run share."""

    budgets: RolloutConfig
    temperature: float
    system_prompt: Callable[[Task], str]
    show_tools: bool
    """Whether the tools' schemas stand in the system prompt."""
    deterministic: bool
    """Whether every request to the engine carries a seed of its own."""
    context: ContextConfig = field(default_factory=ContextConfig)
    """How a conversation that grows too long is rewritten."""
    reward: str | None = None
    """The hook that gives an episode's reward, in the place of the environment."""
    last_attempt: bool = False
    """Whether a fault that the policy brought about (``MuaError.by_policy``) is scored now, and not tried again."""
    order: int = 0
    """Where requests wait for a slot of an engine, those of episodes with a lower number go first."""


class Agent(Protocol):
    """The policy's side of one conversation.

    The order of calls is ``begin``, then any number of ``turn`` and one of ``add_tool_results`` or ``add_user``.
    """

    @property
    def messages(self) -> list[Json]:
        """OpenAI-style messages so far, as :class:`mua.tokens.conversation.Conversation` keeps them."""

    @property
    def turns(self) -> int:
        """Assistant turns so far."""

    def begin(self, system: str, tools: Sequence[ToolSchema], user: str) -> None:
        """Start with the instructions, the tools and the user's first message."""

    async def turn(self) -> AssistantTurn | None:
        """The policy's next turn; None when its context has no room for one.

        Raises :class:`EngineError` or :class:`DeadlineExceeded` when the policy could not be
        asked.
        """

    def add_tool_results(self, results: Sequence[str]) -> None:
        """Answer the last turn: the results of its calls in order, then one for each of its errors."""

    def add_user(self, text: str) -> None:
        """Answer the last turn with the user's words."""

    def add_tools(self, tools: Sequence[ToolSchema]) -> None:
        """There are further tools from now on; the user's last message tells of them."""

    def segments(self) -> list[Segment]:
        """The token streams; none where the policy is known by its text alone."""

    def counts(self) -> dict[str, float]:
        """Tokens as the requests tell them (``prompt_tokens``, ``cached_tokens``, ...), and ``policy_cost``."""


class Pace:
    """The turns that ended lately, over all episodes of a run; of one event loop.

    It says whose doing it is that a turn's time ran out: the policy's, which wrote on and on, or the engine's, which
    was slow. A turn that is still being written at ``rollout.generate_seconds`` is aborted, and the engine says what
    it had written. The policy answers for it (outcome ``length``, scored and trained on what it wrote) where that is

    - at least :data:`NEAR` of the tokens it was allowed (``rollout.max_turn_tokens``, or what is left of
      ``rollout.max_tokens``): the budget would have ended it a moment later; or
    - more than any of the last :data:`REMEMBERED` turns that ended by themselves, of which there must be
      :data:`ENOUGH`.

    An engine that is slow, stopped, paused or overloaded, for one request or for all, writes *less* by the deadline
    than what turns need that end; one that is dead or has the request in its queue says nothing. Both leave the turn
    unscored (``timeout``), and it is tried again. So a slow engine never makes a failure of the policy's, and a policy
    that runs on is told as soon as others of its turns end, or its budget is nearly used up.
    """

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=REMEMBERED)
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)
        self._warned = False

    def ended(self, tokens: int, seconds: float) -> None:
        """A turn of so many ``tokens`` ended by itself after ``seconds``."""
        self._lengths.append(tokens)
        self._seconds.append(seconds)

    def ran_on(self, tokens: int, allowed: int) -> bool:
        """Whether the policy answers for a turn that was cut after ``tokens`` of those it was ``allowed``."""
        return tokens >= NEAR * allowed or (len(self._lengths) >= ENOUGH and tokens > max(self._lengths))

    def warn_if_too_slow(self, max_turn_tokens: int, generate_seconds: float) -> None:
        """Say once that the longest allowed turn cannot be written before its deadline, if that is so."""
        if self._warned or len(self._lengths) < ENOUGH or not (seconds := sum(self._seconds)):
            return
        speed = sum(self._lengths) / seconds
        if max_turn_tokens > speed * generate_seconds:
            self._warned = True
            log.warning(
                "at the present %.3g tokens per second of a turn, one of rollout.max_turn_tokens %d takes %.0f s, more "
                "than rollout.generate_seconds %g: long turns end by time and not by length; raise the deadline, lower "
                "the tokens, or have fewer episodes at once (rollout.concurrency)",
                speed, max_turn_tokens, max_turn_tokens / speed, generate_seconds,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenPolicy:
    """A checkpoint through the engine."""

    family: ChatFamily
    sampler: Sampler
    record_experts: bool = False
    """Whether the engine tells which experts each token was routed to."""
    pace: Pace = field(default_factory=Pace)
    """What all episodes know of turns that ended."""

    def agent(self, setting: EpisodeSetting, *, session: str, seed: int) -> Agent:
        """The agent of the episode that ``session`` names; ``seed`` feeds the sampling seeds of its turns."""
        return TokenAgent(self, setting, session, seed)


async def sample_tokens(
    policy: TokenPolicy, setting: EpisodeSetting, talk: Conversation, prompt: Int32Array, room: int, *, session: str,
    seed: int, turn: Callable[[], int], counts: defaultdict[str, float], role: str = "policy",
) -> tuple[Generation, NotedRequest | None]:  # fmt: skip
    """What the policy says to ``prompt`` (ids, ``[tokens]``) in at most ``room`` tokens, and the recorded request.

    The record of the episode under way, if there is one, gets to know where the tokens are in ``talk``, not the tokens;
    ``turn`` gives the number of the turn that is being sampled. ``counts`` is added to. Raises :class:`EngineError` or
    :class:`DeadlineExceeded`.
    """
    budgets, greedy = setting.budgets, setting.temperature == 0
    ids, started, began = prompt.tolist(), perf_counter(), time()
    sampling = SamplingParams(
        temperature=setting.temperature,
        max_new_tokens=room,
        stop_token_ids=policy.family.stop_token_ids,
        top_p=1.0 if greedy else setting.budgets.top_p,
        top_k=-1 if greedy else setting.budgets.top_k,
        min_p=0.0 if greedy else setting.budgets.min_p,
        presence_penalty=setting.budgets.presence_penalty,
        frequency_penalty=setting.budgets.frequency_penalty,
        seed=seed if setting.deterministic else None,
        order=setting.order,
        experts_from=talk.routed if policy.record_experts else None,
    )

    def note(found: Generation | None, error: str | None = None) -> NotedRequest | None:
        if (record := current_episode.get()) is None:
            return None
        values: Json = {"endpoint": "engine"}
        if found is not None:
            new = len(found.ids)
            values = {
                "waited": found.waited, "version": found.version, "cached_tokens": found.cached_tokens,
                "completion_tokens": new, "finish": found.finish, "endpoint": found.engine,
            }  # fmt: skip
            if new and found.finish != "abort":
                values |= {"segment": talk.trained_segments, "token_start": len(ids), "token_end": len(ids) + new}
        told = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        return record.request(
            role, began, messages=list(talk.messages), conversation=talk.messages, turn=turn(), error=error,
            seconds=perf_counter() - started, prompt_tokens=len(ids), sampling=told | {"seed": sampling.seed}, **values,
        )  # fmt: skip

    try:
        generation = await policy.sampler.generate(ids, sampling, session=session, deadline_s=budgets.generate_seconds)
    except TurnCut as cut:
        if not policy.pace.ran_on(len(cut.partial.ids), room):
            note(None, "cut by its deadline")
            raise
        counts["cut_by_time"] += 1
        generation = replace(cut.partial, finish="length")  # the policy's doing: it ends as at its room of tokens
    except BaseException as error:
        note(None, type(error).__name__)
        raise
    noted = note(generation)
    if generation.finish == "stop":
        policy.pace.ended(len(generation.ids), perf_counter() - started)
        policy.pace.warn_if_too_slow(budgets.max_turn_tokens, budgets.generate_seconds)
    counts["prompt_tokens"] += len(ids)
    counts["cached_tokens"] += generation.cached_tokens
    counts["seconds/engine_slot"] += generation.waited
    return generation, noted


class TokenAgent:
    """Token in, token out: what :class:`Conversation` holds is exactly what the engine saw."""

    _talk: Conversation
    """From :meth:`begin` on."""

    def __init__(self, policy: TokenPolicy, setting: EpisodeSetting, session: str, seed: int) -> None:
        self.messages: list[Json] = []
        self._policy, self._setting, self._session, self._seed = policy, setting, session, seed
        self._told = 0
        """How many of the conversation's messages are in :attr:`messages`, or stand for those that are."""
        self._context = ContextKeeper(setting.context, setting.budgets.max_tokens)
        self._counts = defaultdict[str, float](float)

    @property
    def turns(self) -> int:
        return self._talk.turns

    def begin(self, system: str, tools: Sequence[ToolSchema], user: str) -> None:
        shown = tools if self._setting.show_tools else []
        self._talk = Conversation.begin(self._policy.family, system=system, tools=shown, user=user)
        self._tell()

    async def turn(self) -> AssistantTurn | None:
        if not await self._make_room():
            return None
        seed = derived_seed(self._seed, self._talk.turns)
        if (generation := await self._sample(self._setting.budgets.max_turn_tokens, seed)) is None:
            return None
        turn = self._talk.add_sampled(generation)
        self._tell()
        return turn

    async def _sample(self, most: int, seed: int, role: str = "policy") -> Generation | None:
        """At most ``most`` tokens; None where ``rollout.max_tokens`` leaves no room for one."""
        prompt = self._talk.prompt_ids()
        room = min(most, self._setting.budgets.max_tokens - len(prompt))
        if room < 1:
            return None
        generation, _ = await sample_tokens(
            self._policy, self._setting, self._talk, prompt, room, session=self._session, seed=seed,
            turn=lambda: self._talk.turns, counts=self._counts, role=role,
        )  # fmt: skip
        return generation

    async def _make_room(self) -> bool:
        """Rewrite the context where that is due; False: there is no room to do so."""
        talk, config = self._talk, self._setting.context
        reason, before = self._context.due(talk.length, talk.turns, self.messages), talk.length
        if reason is None:
            return True
        context: Json = {"reason": reason}
        messages = list(talk.messages)
        if config.takes_notes:  # the policy's notes for itself: their tokens count as part of its next turn
            talk.add_user(config.instruction)
            seed = derived_seed(self._seed, talk.turns, "notes")
            if (generation := await self._sample(config.summary_tokens, seed, "summary")) is None:
                return False
            self._context.counts["context/notes_tokens"] += len(generation.ids)
            context["notes"] = talk.add_aside(generation).content
            messages = with_notes(messages, context["notes"], users=config.strategy == "summarize")
        elif (messages := without_results(messages, config.keep_results)) == talk.messages:
            return True
        talk.rewrite(messages)
        self.messages[-1]["context"] = context
        self._told = len(talk.messages)
        self._context.rewritten(reason, talk.turns, before, talk.length)
        return True

    def add_tool_results(self, results: Sequence[str]) -> None:
        self._talk.add_tool_results(self._context.shorten(results, self._policy.family.codec))
        self._tell()

    def add_user(self, text: str) -> None:
        self._talk.add_user(text)
        self._tell()

    def add_tools(self, tools: Sequence[ToolSchema]) -> None:
        """Nothing: a token stream is never rewritten, and the message describes them."""

    def segments(self) -> list[Segment]:
        return self._talk.segments()

    def counts(self) -> dict[str, float]:
        return self._counts | {name: float(count) for name, count in self._context.counts.items()}

    def _tell(self) -> None:
        """Have :attr:`messages` hold what the conversation got since the last call."""
        self.messages += self._talk.messages[self._told :]
        self._told = len(self._talk.messages)


@dataclass(frozen=True, slots=True)
class ChatPolicy:
    """Whatever answers at an OpenAI-compatible endpoint."""

    client: ChatClient
    send_reasoning: bool = True
    """Whether the policy is given its reasoning back, as models that reason between tool calls expect."""

    def agent(self, setting: EpisodeSetting, *, session: str, seed: int) -> Agent:
        """As :meth:`TokenPolicy.agent`."""
        return ChatAgent(self, setting, seed)


class ChatAgent:
    """Native tool calls over chat completions.

    Two lists are kept: ``messages`` for the judge and the traces, and what goes over the wire, which holds nothing
    that the policy may not see (what the user did with tools of its own, say). A call whose arguments are no JSON
    object goes back as a call without arguments, because servers refuse to render anything else; its answer says
    what was wrong.
    """

    def __init__(self, policy: ChatPolicy, setting: EpisodeSetting, seed: int) -> None:
        self.messages: list[Json] = []
        self.turns = 0
        self._policy, self._setting, self._seed = policy, setting, seed
        self._wire: list[Json] = []
        self._tools: list[Json] = []
        self._owed: list[str] = []
        """Ids of the last turn's calls in the order in which results come: those that cannot be read are last."""
        self._used: set[str] = set()
        self._keeper = ContextKeeper(setting.context, setting.budgets.max_tokens)
        self._context = 0
        """Tokens of the conversation up to the last reply, as the endpoint counted them; after a rewrite a guess."""
        self._counts = defaultdict[str, float](float)

    def begin(self, system: str, tools: Sequence[ToolSchema], user: str) -> None:
        self._tools = [tool.openai() for tool in tools]
        self._add({"role": "system", "content": system})
        self.add_user(user)

    async def turn(self) -> AssistantTurn | None:
        budgets = self._setting.budgets
        if not await self._make_room():
            return None
        room = min(budgets.max_turn_tokens, budgets.max_tokens - self._context)
        if room < 1:
            return None
        reply = await self._ask(self._wire, self._tools, room, derived_seed(self._seed, self.turns))
        if reply is None:
            return None
        turn, calls, broken = turn_of(reply, self.turns, self._used)
        self._owed = [*(call.id for call in turn.tool_calls), *broken]
        self._used.update(calls)
        self.turns += 1
        self._context = sum(reply.usage.get(f"{side}_tokens", 0) for side in ("prompt", "completion"))
        self.messages.append(turn.message())
        self._wire.append(reply.sent_back(list(calls.values()), reasoning=self._policy.send_reasoning))
        return turn

    async def _ask(self, messages: Sequence[Json], tools: Sequence[Json], room: int, seed: int) -> Completion | None:
        """What the policy replies; None where the endpoint has no room for the conversation."""
        budgets, temperature = self._setting.budgets, self._setting.temperature
        # top_k and min_p are no fields of OpenAI's own endpoints.
        sampling = budgets.penalties | (budgets.truncations if temperature > 0 else {})
        sent = [{key: value for key, value in message.items() if key != NOTES_KEY} for message in messages]
        request = ChatRequest(sent, seed, temperature, room, list(tools), sampling=sampling, verbatim=True)
        try:
            reply = await self._policy.client.ask(request, budgets.generate_seconds)
        except ContextLengthExceeded:
            return None
        except PromptRefused as refused:  # the policy's doing: it says nothing, which ends the episode
            log.info("%s", refused)
            return Completion("")
        for name, value in (reply.usage | ({"policy_cost": reply.cost} if reply.cost else {})).items():
            self._counts[name] += value
        return reply

    async def _make_room(self) -> bool:
        """As a checkpoint's agent does it, with the tokens that the endpoint tells; between rewrites they are guessed
        by characters."""
        config, before = self._setting.context, self._context
        reason = self._keeper.due(before, self.turns, self.messages)
        if reason is None:
            return True
        context: Json = {"reason": reason}
        kept = self._wire
        if config.takes_notes:
            asked = [*kept, {"role": "user", "content": config.instruction}]
            room = min(config.summary_tokens, self._setting.budgets.max_tokens - before)
            seed = derived_seed(self._seed, self.turns, "notes")
            if room < 1 or (reply := await self._ask(asked, self._tools, room, seed)) is None:
                return False
            context["notes"] = reply.text or ""
            kept = with_notes(kept, context["notes"], users=config.strategy == "summarize")
        elif (kept := without_results(kept, config.keep_results)) == self._wire:
            return True
        self.messages[-1]["context"] = context
        self._context = before * _characters(kept) // max(1, _characters(self._wire))
        self._wire = kept
        self._keeper.rewritten(reason, self.turns, before, self._context)
        return True

    def add_tool_results(self, results: Sequence[str]) -> None:
        if len(results) != len(self._owed):
            raise RuntimeError(f"{len(self._owed)} calls of the last turn want answers, {len(results)} are given")
        shown = self._keeper.shorten(results, None)
        answers = [
            {"role": "tool", "tool_call_id": call_id, "content": result}
            for call_id, result in zip(self._owed, shown, strict=True)
        ]
        self.messages += answers
        told = [call["id"] for call in self._wire[-1].get("tool_calls", ())]  # in the order of the calls
        self._wire += sorted(map(dict, answers), key=lambda one: told.index(one["tool_call_id"]) if told else 0)
        self._owed = []

    def add_user(self, text: str) -> None:
        self._add({"role": "user", "content": text})

    def add_tools(self, tools: Sequence[ToolSchema]) -> None:
        self._tools += [tool.openai() for tool in tools]

    def segments(self) -> list[Segment]:
        return []

    def counts(self) -> dict[str, float]:
        return self._counts | {name: float(count) for name, count in self._keeper.counts.items()}

    def _add(self, message: Json) -> None:
        self.messages.append(message)
        self._wire.append(dict(message))


def _characters(messages: Sequence[Json]) -> int:
    return sum(len(str(message.get("content") or "")) for message in messages)


def turn_of(reply: Completion, number: int, used: Collection[str]) -> tuple[AssistantTurn, dict[str, Json], list[str]]:
    """The turn; its calls by id, as they go back to the endpoint; the ids of those that cannot be read, as its errors.

    An id that was used before is replaced: every call needs one of its own to be answered.
    """
    good: list[ToolCall] = []
    errors: list[ToolCallError] = []
    broken: list[str] = []
    wire: dict[str, Json] = {}
    for index, call in enumerate(reply.calls):
        call_id = f"call_{number}_{index}" if call.id in used or call.id in wire else call.id
        arguments: Any = None
        fault: tuple[ErrorKind, str] | None = None
        try:
            arguments = read_json(call.arguments or "{}")
        except JsonError as error:
            fault = ErrorKind.BAD_JSON, f"the arguments of {call.name} are not valid JSON: {error}"
        if not call.name:
            fault = ErrorKind.MISSING_NAME, "the tool call has no name"
        elif fault is None and not isinstance(arguments, dict):
            fault = ErrorKind.BAD_ARGUMENTS, f"the arguments of {call.name} must be a JSON object"
        wire[call_id] = call.openai(call_id, readable=fault is None)
        if fault is None:
            good.append(ToolCall(call_id, call.name, arguments))
        else:
            errors.append(ToolCallError(*fault, f"{call.name}({call.arguments})"))
            broken.append(call_id)
    return AssistantTurn(reply.text, reply.reasoning, good, errors, reply.truncated), wire, broken
