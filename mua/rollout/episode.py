"""One episode: an agent, its tools and its user, as a state machine.

                 ┌──────────────────────────── results or errors appended ◄──┐
                 ▼                                                           │
    start ──► GENERATE ── tool calls, or malformed ones ──► TOOLS ───────────┤
                 ▲   │                                        │              │
                 │   └─ plain text ──► USER ─── stop ──► END  └─ terminal ──► END
                 │                      │
                 └───── user's reply ◄──┘      a budget is used up ──► END

The agent is whoever plays (:class:`mua.rollout.agent.Agent`): the policy in training and evaluation, rules, moves that
were written down or a person at the terminal in :mod:`environments.kit.demonstrate`. The last action is always
executed: a budget ends the episode when the agent would have to act again. Faults of the infrastructure leave as
exceptions; everything the agent did ends as a scored outcome.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter, time

from mua.environment.manager import EnvironmentInstance
from mua.environment.protocol import Evaluation, Transcript
from mua.environment.requests import checked_text
from mua.environment.tool_arguments import validate_arguments
from mua.environment.user import STOP_SIGNAL, ToolUser, User, UserReply
from mua.rollout.agent import Agent, EpisodeSetting
from mua.rollout.context import repetitions
from mua.store.recorder import arguments_text, current_episode
from mua.tokens.codec import ConversationError
from mua.tokens.parsing import AssistantTurn, ToolCall
from mua.types import Json, Outcome, Segment, ToolSchema
from mua.users.utterance_check import formless, unusable, with_signal
from mua.utils.errors import DeadlineExceeded, EnvironmentFault, MuaError, UserFault, UserFaultKind, one_line
from mua.utils.hooks import await_hook, check_number


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """What an episode that ran to its end leaves: everything of a trajectory but its place in the run."""

    outcome: Outcome
    segments: list[Segment]
    """None of an agent that is known by its text alone."""
    messages: list[Json]
    turn_rewards: list[float]
    evaluation: Evaluation
    metrics: dict[str, float]

    @property
    def reward(self) -> float:
        """Rewards of all calls and the evaluation's."""
        return sum(self.turn_rewards)

    @property
    def ended(self) -> bool:
        """Whether the user or a terminal tool ended it, rather than a budget or the agent."""
        return self.outcome in (Outcome.USER_STOP, Outcome.TERMINAL_TOOL)


class Episode:
    """Runs once."""

    def __init__(
        self,
        setting: EpisodeSetting,
        environment: EnvironmentInstance,
        user: User,
        agent: Agent,
        *,
        guarded: bool = True,
    ) -> None:
        """``guarded``: whether the user's words must be a user's in content too, and not a data set's."""
        self._setting = setting
        self._budgets = setting.budgets
        self._environment = environment
        self._user = user
        self._guarded = guarded
        self._agent = agent
        self._tools: dict[str, ToolSchema] = {schema.name: schema for schema in environment.tools()}
        self._turn = AssistantTurn("")
        self._outcome: Outcome | None = None
        self._turn_rewards: list[float] = []
        self._malformed = 0
        self._final = False
        """Whether the policy was told that its turns are over."""
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    async def run(self) -> EpisodeResult:
        """Play the episode and have it evaluated.

        Raises :class:`EngineError`, :class:`UserFault`,
        :class:`EnvironmentFault` or :class:`DeadlineExceeded` when something other than
        the agent failed.
        """
        await self._start()
        while self._outcome is None:
            await self._generate()
            if self._outcome is None:
                try:
                    await (self._call_tools() if self._turn.tool_calls or self._turn.errors else self._ask_user())
                except MuaError as fault:
                    self._end_by(fault)
        return await self._finish()

    async def _start(self) -> None:
        task, user, user_tools = self._environment.task, self._user, self._environment.user_tools

        async def open_with_tools() -> UserReply:
            if user_tools.schemas() and isinstance(user, ToolUser):
                user.take_tools(user_tools)
            return await user.open()

        opening = await self._hear(open_with_tools)
        if opening.stop:
            raise UserFault("the user ended the conversation before it began", UserFaultKind.ENDS_TOO_EARLY)
        try:
            self._agent.begin(self._setting.system_prompt(task), list(self._tools.values()), opening.text)
        except ConversationError as error:
            raise EnvironmentFault(f"task {task.id!r} cannot be told to the policy: {error}") from None
        self._note_user(opening)

    async def _generate(self) -> None:
        budgets = self._budgets
        if self._agent.turns >= self._budgets.max_turns or self._counts["tool_calls"] >= budgets.max_tool_calls:
            if self._final or not budgets.final_turn:
                return self._end(Outcome.MAX_TURNS)
            self._final = True
            self._agent.add_user(self._budgets.final_request)
            self._agent.messages[-1]["forced"] = True
            self._counts["final_turns"] += 1
        context, often = self._setting.context, self._setting.context.stop_on_repetition
        if often is not None and repetitions(self._agent.messages, similarity=context.similarity) >= often:
            return self._end(Outcome.REPETITION)
        with self._clock("generate"):
            turn = await self._agent.turn()
        if turn is None:
            return self._end(Outcome.LENGTH)
        self._turn = turn
        self._turn_rewards.append(0.0)
        if turn.truncated:
            self._end(Outcome.LENGTH)
        elif turn.tool_calls or turn.errors:
            if self._final:
                self._end(Outcome.MAX_TURNS)
        elif turn.empty:
            self._end(Outcome.MALFORMED)

    async def _call_tools(self) -> None:
        results = [await self._call(call) for call in self._turn.tool_calls]
        results += [f"error: {error.message}" for error in self._turn.errors]
        self._malformed += len(self._turn.errors)
        self._agent.add_tool_results(results)
        if self._malformed > self._budgets.max_malformed:
            self._end(Outcome.MALFORMED)

    async def _call(self, call: ToolCall) -> str:
        """Run one call; the text the agent gets to see."""
        if self._outcome is not None:
            return "error: not called, the conversation has ended"
        if (wrong := find_call_error(call, self._tools)) is not None:
            self._malformed += 1
            self._agent.messages[-1].setdefault("tool_call_errors", []).append(wrong)
            self._note_call(call, time(), 0.0, error=wrong["message"])
            return f"error: {wrong['message']}"
        self._counts["tool_calls"] += 1
        self._counts[f"tool_calls/{call.name}"] += 1
        began, started = time(), perf_counter()
        try:
            with self._clock("tools"):
                result = await self._environment.call(call.name, call.arguments)
            text = checked_text(call.name, result.text)
        except BaseException as error:
            self._note_call(call, began, perf_counter() - started, error=one_line(error))
            raise
        told = "the tool says that it failed" if result.error else None
        self._note_call(call, began, perf_counter() - started, text, error=told, reward=result.reward)
        self._counts[f"tool_errors/{call.name}"] += result.error
        self._turn_rewards[-1] += result.reward
        if result.terminal:
            self._end(Outcome.TERMINAL_TOOL)
        return text

    def _note_call(
        self, call: ToolCall, began: float, seconds: float, text: str | None = None, *, error: str | None = None,
        reward: float | None = None,
    ) -> None:  # fmt: skip
        """Have the record of the episode hold the call."""
        if (record := current_episode.get()) is not None:
            record.tool_call(
                began, text, turn=max(0, self._agent.turns - 1), name=call.name, seconds=seconds, error=error,
                arguments=arguments_text(call.arguments), reward=reward,
            )  # fmt: skip

    async def _ask_user(self) -> None:
        reply = await self._hear(lambda: self._user.reply(self._turn.content))
        self._agent.add_user(reply.text)
        if reply.tools:
            self._tools |= {schema.name: schema for schema in reply.tools}
            self._environment.know_tools(reply.tools)
            self._agent.add_tools(reply.tools)
        self._note_user(reply)
        if reply.stop:
            self._end(Outcome.USER_STOP)

    async def _hear(self, speak: Callable[[], Awaitable[UserReply]]) -> UserReply:
        """What the user says, if that can be a user's words.

        Raises :class:`UserFault` for whatever goes wrong with the user, :class:`DeadlineExceeded` when it
        takes too long; the faults of an environment whose tools it used, and mistakes of the configuration, stay what
        they are.
        """
        seconds = self._budgets.user_seconds
        try:
            with self._clock("user"):
                async with asyncio.timeout(seconds):
                    reply = await speak()
        except TimeoutError:
            raise DeadlineExceeded(f"rollout.user_seconds: the user took longer than {seconds:g} s") from None
        except MuaError:
            raise
        except Exception as error:
            raise UserFault(f"the user raised {one_line(error)}", UserFaultKind.CRASHED) from error
        if not isinstance(reply, UserReply):
            raise UserFault(f"the user gave {type(reply).__name__} instead of UserReply", UserFaultKind.CRASHED)
        refusal = formless(reply.text) or (unusable(reply.text) if self._guarded and not reply.tools else None)
        if refusal is not None:
            raise UserFault(refusal.reason, refusal.kind)
        text = with_signal(reply.text) if self._guarded else reply.text
        stop = reply.stop or (self._guarded and STOP_SIGNAL in text)
        return reply if (text, stop) == (reply.text, reply.stop) else replace(reply, text=text, stop=stop)

    def _note_user(self, reply: UserReply) -> None:
        """What the user did with tools of its own, and what is wrong with its words, stands in its message, where no
        template reads it."""
        if reply.flags:
            self._agent.messages[-1]["flags"] = [
                {"kind": flag.kind.value, "reason": flag.reason} for flag in reply.flags
            ]
        for flag in reply.flags:
            self._counts[f"user_flags/{flag.kind}"] += 1
        if actions := self._environment.user_tools.taken():
            self._agent.messages[-1]["actions"] = actions
            self._counts["user_actions"] += len(actions)

    def _end_by(self, fault: MuaError) -> None:
        """End by what the policy brought about, where it is not tried again; raises every other ``fault``."""
        if not (fault.by_policy and self._setting.last_attempt):
            raise fault
        self._agent.messages[-1]["fault"] = one_line(fault)
        self._counts["ended_by_fault"] += 1
        self._end(Outcome.MALFORMED)

    def _end(self, outcome: Outcome) -> None:
        """What ended it first counts."""
        self._outcome = self._outcome or outcome

    async def _finish(self) -> EpisodeResult:
        assert self._outcome is not None
        with self._clock("evaluate"):
            try:
                evaluation = await self._evaluate()
            except MuaError as fault:  # a judge that refuses what the policy wrote
                self._end_by(fault)
                evaluation = Evaluation(0.0, False, {"fault": one_line(fault)})
        rewards = self._turn_rewards or [0.0]
        rewards[-1] += evaluation.reward
        if not math.isfinite(sum(rewards)):
            raise EnvironmentFault(f"task {self._environment.task.id!r}: the rewards {rewards} have no finite sum")
        counts = {**self._counts, **self._agent.counts()}
        metrics = {name: float(count) for name, count in counts.items()}
        metrics["malformed"] = float(self._malformed)
        metrics |= {f"seconds/{stage}": seconds for stage, seconds in self._seconds.items()}
        return EpisodeResult(
            self._outcome, self._agent.segments(), list(self._agent.messages), rewards, evaluation, metrics
        )

    async def _evaluate(self) -> Evaluation:
        own = await self._environment.evaluate(Transcript(self._agent.messages))
        key, path = "environment.reward", self._setting.reward
        if path is None:
            return own
        found = await await_hook(key, path, self._environment.task, list(self._agent.messages), own)
        details = own.details | {"environment_reward": own.reward}
        return Evaluation(check_number(key, path, found), own.success, details)

    @contextmanager
    def _clock(self, stage: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self._seconds[stage] += perf_counter() - start


def find_call_error(call: ToolCall, tools: Mapping[str, ToolSchema]) -> Json | None:
    """What makes a well-formed call malformed, as ``tool_call_errors`` of a message has it: no such tool, or arguments
    that do not fit its schema."""
    schema = tools.get(call.name)
    fault = f"there is no tool {call.name!r}" if schema is None else validate_arguments(schema, call.arguments)
    kind = "unknown_tool" if schema is None else "invalid_arguments"
    return None if fault is None else {"kind": kind, "message": fault}


def find_turn_error(turn: AssistantTurn, tools: Mapping[str, ToolSchema] | None) -> str | None:
    """The first thing that an episode calls malformed in a turn, of a policy or of a demonstration.

    Without ``tools`` nothing is said of calls that are well-formed.
    """
    if turn.errors or turn.empty:
        return turn.errors[0].message if turn.errors else "it holds neither text nor a tool call"
    calls = turn.tool_calls if tools is not None else ()
    return next((error["message"] for call in calls if (error := find_call_error(call, tools or {}))), None)
