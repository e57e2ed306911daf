"""An episode that an agent of its own plays: a process or a function asks for turns, calls tools, speaks to the user.

The built-in episode asks its agent; here the agent asks the episode, over the gateway. What is the same is shared: the
user's words are checked, tools are called and counted, budgets end it, the environment evaluates. The transcript that
is evaluated holds what was done and said through the gateway, not what the agent believes to have done.

How it ends, and whose doing that is:

============================================================ ===================================================
the user stops; a terminal tool; a budget is used up          as in a built-in episode
the agent leaves with status 0                                ``agent_end``; ``length`` if its last turn was cut
the agent fails, and the last it got was a turn of the policy  ``malformed``: it could not bear what the policy said
the agent fails otherwise, by a signal, or before any turn     ``environment_error``: tried again, never scored
its deadline passes (``rollout.episode_seconds``)             ``timeout``
the policy, the user, the environment fail                    their own faults, whatever the agent makes of it
============================================================ ===================================================

Where ``agent.judge`` is set, the run's judge gives the episode a score as well::

    task, conversation ──► judge.llm ──► score ──► reward = weight · score + the environment's or the agent's own

The judge sees what the verdict of the environment rests on: what was done and told to the user through the gateway.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mua.config.rollout import AgentConfig, AgentJudgeConfig
from mua.environment.manager import EnvironmentInstance
from mua.environment.protocol import Evaluation
from mua.environment.requests import LARGEST_REWARD
from mua.environment.user import User
from mua.rollout.agent import EpisodeSetting, TokenPolicy, sample_tokens
from mua.rollout.episode import Episode, EpisodeResult
from mua.rollout.gateway.chat_calls import ChatCall, Refused, ServedTurn
from mua.rollout.gateway.serving import GatewayServer
from mua.rollout.gateway.session import GatewaySession, Seed, add_cut
from mua.store.recorder import NotedRequest, current_episode, noting
from mua.tokens.conversation import Conversation
from mua.tokens.parsing import AssistantTurn, ToolCall
from mua.types import Generation, Json, Outcome, Segment, ToolSchema
from mua.users.judge import Judge
from mua.utils.errors import ConfigError, EnvironmentFault, MuaError, one_line
from mua.utils.guarded import end_guarded, read_tail, start_guarded
from mua.utils.hooks import load_hook
from mua.utils.seeds import derived_seed
from mua.utils.strict_json import JsonError, read_json

_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ")
BY_SIGNAL = 128
"""A higher status is that of a signal, which no library raises on what a policy says."""
_LONGEST_NOTE = 200
"""Characters of what a client may write at will that are kept of a request."""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What an agent is told."""

    base_url: str
    """For OpenAI's clients."""
    api_key: str
    task: Json
    """``id``, ``domain``, ``instructions``, ``user`` (the first message), ``tools``."""

    @property
    def episode_url(self) -> str:
        """Where user, tools and report are."""
        return f"{self.base_url}/episode"


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How an agent ended by itself."""

    status: int
    """0, or what it failed with."""
    last_line: str
    """Of its standard output; what a function gave, as JSON."""
    error: str
    """The end of its standard error, or what it raised."""


def check_agent(config: AgentConfig) -> Callable[[AgentTask], Any] | None:
    """The function of ``agent.function``, if that is set. Raises :class:`ConfigError` for what cannot be run."""
    if config.command is not None:
        if shutil.which(config.command[0]) is None:
            raise ConfigError(
                f"agent.command: there is no program {config.command[0]!r}; give its path, or put it on PATH"
            )
        return None
    assert config.function is not None
    function: Callable[[AgentTask], Any] = load_hook("agent.function", config.function)
    return function


async def run_agent(config: AgentConfig, task: AgentTask, log_file: Path) -> AgentEnd:
    """Run until the agent ends by itself. When cancelled, its processes are killed, all of them, before this returns;
    a function in a thread is left alone, and its session's key serves it no more.

    A process is run by the guardian: a child which detaches itself (``setsid``, a double fork) is found and killed with
    the rest. Its variables are the gateway's, those of ``agent.variables`` and a few of the machine's; nothing else of
    the trainer's environment is told to it.
    """
    function = check_agent(config)
    if function is None:
        return await _run_process(config, task, log_file)
    try:
        given = function(task) if inspect.iscoroutinefunction(function) else await asyncio.to_thread(function, task)
        if inspect.isawaitable(given):
            given = await given
        return AgentEnd(0, "" if given is None else json.dumps(given), "")
    except Exception as error:
        return AgentEnd(1, "", one_line(error))


async def _run_process(config: AgentConfig, task: AgentTask, log_file: Path) -> AgentEnd:
    assert config.command is not None
    with tempfile.TemporaryDirectory(prefix="mua-agent-") as folder:
        task_file = Path(folder) / "task.json"
        task_file.write_text(json.dumps(task.task), encoding="utf-8")
        variables = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        variables |= {"PYTHONUNBUFFERED": "1"} | config.variables
        variables |= {
            "OPENAI_BASE_URL": task.base_url,
            "OPENAI_API_KEY": task.api_key,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "MUA_EPISODE_URL": task.episode_url,
            "MUA_TASK_FILE": str(task_file),
            "MUA_TASK_ID": str(task.task["id"]),
            "NO_PROXY": "127.0.0.1,localhost",
        }
        process = await start_guarded(*config.command, env=variables)
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None  # noqa: PT018
        process.stdin.close()
        try:
            out, error, status = await asyncio.gather(
                read_tail(process.stdout), read_tail(process.stderr, log_file), process.wait()
            )
        finally:
            await asyncio.shield(end_guarded(process))
    lines = out.decode(errors="replace").strip().splitlines()
    return AgentEnd(status, lines[-1] if lines else "", error.decode(errors="replace").strip())


class _TranscriptKeeper:
    """The agent as the shared half of an episode sees it: a transcript, and the session's streams."""

    def __init__(self, session: GatewaySession, counts: dict[str, float]) -> None:
        self.messages: list[Json] = []
        self._session = session
        self._counts = counts

    @property
    def turns(self) -> int:
        return self._session.turns

    def begin(self, system: str, tools: Sequence[ToolSchema], user: str) -> None:
        self.messages += [{"role": "system", "content": system}, {"role": "user", "content": user}]

    async def turn(self) -> AssistantTurn | None:
        raise RuntimeError("the agent asks for turns itself")

    def add_tool_results(self, results: Sequence[str]) -> None:
        calls = self.messages[-1]["tool_calls"]
        for call, result in zip(calls, results, strict=True):
            self.messages.append({"role": "tool", "content": result, "tool_call_id": call["id"]})

    def add_user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def add_tools(self, tools: Sequence[ToolSchema]) -> None:
        """The agent asks for its tools."""

    def segments(self) -> list[Segment]:
        return self._session.segments()

    def counts(self) -> dict[str, float]:
        return {**self._counts, **{name: float(count) for name, count in self._session.counts.items()}}


class ExternalEpisode(Episode):
    """Runs once. Is what the gateway calls the host of a session, and hears of its events."""

    def __init__(
        self, setting: EpisodeSetting, environment: EnvironmentInstance, user: User, policy: TokenPolicy, *,
        config: AgentConfig, session: str, seed: int, guarded: bool = True, judge: Judge | None = None,
    ) -> None:  # fmt: skip
        """``judge`` is there where the configuration has ``agent.judge``."""
        self._config = config
        self._judge = judge
        self._policy = policy
        self._name, self._seed = session, seed
        self._asked = defaultdict[str, float](float)
        self.session = GatewaySession(policy.family, self._ask, self, config, show_tools=setting.show_tools)
        super().__init__(setting, environment, user, _TranscriptKeeper(self.session, self._asked), guarded=guarded)
        self._turn_rewards = [0.0]
        self._fault: Exception | None = None
        self._over = asyncio.Event()
        self._acting = asyncio.Lock()
        self._heard_last = ""
        """What the agent got last: "turn", "tool" or "user"."""
        self._reported: Evaluation | None = None
        self._started_turns = 0
        self._record = current_episode.get()
        """What comes over the gateway comes in the server's context, not in the episode's."""
        self._noted: list[tuple[NotedRequest, Conversation]] = []

    async def play(self, server: GatewayServer, log_folder: Path) -> EpisodeResult:
        """Let the agent play, and have the episode evaluated; raises like :meth:`Episode.run`."""
        await self._start()
        key = server.open_session(self.session)
        task = AgentTask(f"{server.url}/v1", key, self.task())
        log_file = log_folder / f"{self._name.replace('/', '-')}.log"
        running = asyncio.create_task(run_agent(self._config, task, log_file))
        over = asyncio.create_task(self._over.wait())
        try:  # whichever is first; after the episode's end the agent gets a moment to leave
            await asyncio.wait({running, over}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done() and self._fault is None:
                await asyncio.wait({running}, timeout=self._config.stop_seconds)
            end = running.result() if running.done() else None
        finally:
            over.cancel()
            running.cancel()
            await asyncio.wait({running})
            await server.close_session(key)
        if self._fault is not None:
            raise self._fault
        if end is not None:
            if self._config.reward == "report" and self._reported is None and end.status == 0:
                self._read_last_line(end.last_line)
            if self._outcome is None:
                self._end(self._outcome_of(end))
        # The noted requests say where their tokens are among all of the session's segments.
        before = self.session.segments_before()
        for request, talk in self._noted:
            if request.values.get("segment") is not None:
                request.values["segment"] += before[talk]
        if not self.session.turns and self._outcome is Outcome.AGENT_END:
            raise EnvironmentFault(self._crash(end, "asked the policy for nothing"))
        return await self._finish()

    def _outcome_of(self, end: AgentEnd) -> Outcome:
        if end.status == 0:
            if self._heard_last == "turn" and self._turn.truncated:
                return Outcome.LENGTH
            if self._heard_last == "turn" and not self._turn.tool_calls and not self._turn.errors:
                self._agent.messages.append(self._turn.message())  # its last words are said, though nobody answers
            return Outcome.AGENT_END
        if self._heard_last == "turn" and end.status <= BY_SIGNAL:
            return Outcome.LENGTH if self._turn.truncated else Outcome.MALFORMED
        raise EnvironmentFault(self._crash(end, f"failed with status {end.status}"))

    def _crash(self, end: AgentEnd | None, what: str) -> str:
        error = " ".join((end.error if end else "").split())[-300:]
        return f"agent of task {self._environment.task.id!r} {what}" + (f": … {error}" if error else "")

    # ---- what the session tells

    def may_ask(self) -> Outcome | None:
        if self._fault is None and self._outcome is None:
            budgets = self._budgets
            used = self._started_turns >= budgets.max_turns or self._counts["tool_calls"] >= budgets.max_tool_calls
            if used:
                self._end(Outcome.MAX_TURNS)
            elif self._malformed > budgets.max_malformed:
                self._end(Outcome.MALFORMED)
            else:
                self._started_turns += 1
        return self._outcome

    def turned(self, turn: AssistantTurn, call: ChatCall, served: ServedTurn) -> None:
        if self._noted:  # the last is this one: nothing else has run since
            request, _ = self._noted[-1]
            request.reply, request.tools = served.message, [tool.openai() for tool in call.tools]
            told = {
                "placed": served.placed, "finish": served.finish, "model": call.model[:_LONGEST_NOTE],
                "overridden": list(call.overridden), "stop": [text[:_LONGEST_NOTE] for text in call.stop[:4]],
            }  # fmt: skip
            request.values["sampling"] |= {"gateway": told}
        if self.session.turns > 1:
            self._turn_rewards.append(0.0)
        self._turn, self._heard_last = turn, "turn"
        self._malformed += len(turn.errors)

    def ended(self, outcome: Outcome) -> None:
        self._end(outcome)

    def failed(self, fault: Exception) -> None:
        if isinstance(fault, MuaError) and fault.by_policy and self._setting.last_attempt:
            return self._end_by(fault)
        self._fault = self._fault or fault
        self._over.set()

    def _end(self, outcome: Outcome) -> None:
        self._over.set()
        super()._end(outcome)

    async def _ask(
        self, talk: Conversation, call: ChatCall, seed: Seed, number: Callable[[], int]
    ) -> tuple[AssistantTurn, Generation] | None:
        """A turn on one of the session's streams, as the built-in agent asks for its own; None without room."""
        prompt, budget = talk.prompt_ids(), self._budgets.max_turn_tokens
        most = budget if call.most_tokens is None else min(call.most_tokens, budget)
        room = min(most, self._budgets.max_tokens - len(prompt))
        if room < 1:
            return None
        with self._clock("generate"), noting(self._record):
            generation, noted = await sample_tokens(
                self._policy, self._setting, talk, prompt, room, session=self._name,
                seed=derived_seed(self._seed, *seed), turn=lambda: self.session.turns, counts=self._asked,
            )  # fmt: skip
        if noted is not None:
            self._noted.append((noted, talk))
        return add_cut(talk, generation, call.stop, number())

    # ---- what the agent asks for

    def task(self) -> Json:
        task, messages = self._environment.task, self._agent.messages
        return {
            "id": task.id,
            "domain": task.domain,
            "instructions": messages[0]["content"],
            "user": messages[1]["content"],
            "tools": [tool.openai() for tool in self.tools()],
        }

    def tools(self) -> list[ToolSchema]:
        return list(self._tools.values())

    async def call_tool(self, name: str, arguments: Json) -> Json:
        async with self._acting:
            if self._outcome is not None:
                return {"text": "error: not called, the conversation has ended", "error": True, "ended": True}
            call = ToolCall(f"done_{len(self._agent.messages)}", name, arguments)
            said: Json = {"role": "assistant", "content": "", "tool_calls": [call.openai()]}
            self._agent.messages.append(said)
            errors = self._counts[f"tool_errors/{name}"]
            try:
                with noting(self._record):
                    text = await self._call(call)
            except MuaError as fault:
                self.failed(fault)
                if self._fault is not None:
                    raise
                text = f"error: {fault}"
            self._agent.add_tool_results([text])
            self._heard_last = "tool"
            failed = "tool_call_errors" in said or self._counts[f"tool_errors/{name}"] > errors
            if self._malformed > self._budgets.max_malformed:
                self._end(Outcome.MALFORMED)
            return {"text": text, "error": failed, "ended": self._outcome is not None}

    async def tell_user(self, text: str) -> Json:
        if not text.strip():
            raise Refused(400, "text: say something to the user", param="text")
        async with self._acting:
            if self._outcome is not None:
                return {"text": "", "stop": True}
            self._agent.messages.append({"role": "assistant", "content": text})
            self._turn = replace(self._turn, content=text)
            try:
                with noting(self._record):
                    await self._ask_user()
            except MuaError as fault:
                self.failed(fault)
                if self._fault is not None:
                    raise
                return {"text": "", "stop": True}
            self._heard_last, stopped = "user", self._outcome is not None
            self._counts["gateway/told"] += 1
            if self._counts["gateway/told"] > self._budgets.max_turns:
                self._end(Outcome.MAX_TURNS)
            reply = self._agent.messages[-1]["content"]
            return {"text": reply, "stop": stopped}

    def report(self, report: Json) -> None:
        if self._config.reward != "report":
            raise Refused(400, f"agent.reward is {self._config.reward}; the agent's own report is not asked for")
        reward, success = report.get("reward"), report.get("success")
        number = math.nan if isinstance(reward, bool) or not isinstance(reward, int | float) else reward
        if not abs(number) <= LARGEST_REWARD:
            raise Refused(400, f"reward: {str(reward)[:40]!r} is no finite number", param="reward")
        if success is not None and not isinstance(success, bool):
            raise Refused(400, "success: true or false", param="success")
        self._reported = Evaluation(float(number), number > 0 if success is None else success, {"reported": True})

    def _read_last_line(self, line: str) -> None:
        try:
            found = read_json(line)
            if isinstance(found, dict) and "reward" in found:
                self.report(found)
        except JsonError:
            return
        except Refused as refused:
            raise EnvironmentFault(self._crash(None, f"reported what is no reward: {refused}")) from None

    async def _evaluate(self) -> Evaluation:
        """The environment's verdict or the agent's report, and the judge's, where ``agent.reward`` asks for them."""
        own: Evaluation | None = None
        if self._config.reward == "environment":
            own = await super()._evaluate()
        elif self._config.reward == "report":
            if self._reported is None and self._outcome is Outcome.AGENT_END:
                raise EnvironmentFault(self._crash(None, "left without a report, and agent.reward is report"))
            own = self._reported or Evaluation(0.0, False, {"reported": False})
        if self._judge is None:
            assert own is not None, "checked with the configuration"
            return own
        assert self._config.judge is not None
        seed = derived_seed(self._seed, "judge")
        found = await judge_agent(self._config.judge, self._judge, self._agent.messages, own, seed=seed)
        self._asked["gateway/judge_score"] = found.details["judge"]["score"]
        if own is not None:
            self._asked["gateway/own_reward"] = own.reward
        return found


_SHOWN = ("role", "content", "tool_calls")


async def judge_agent(
    how: AgentJudgeConfig, judge: Judge, messages: Sequence[Json], before: Evaluation | None, *, seed: int
) -> Evaluation:
    """The verdict ``before`` with the judge's score in its reward; None: the judge's verdict is the only one.

    Raises :class:`JudgeFault` where there is no verdict that can be read.
    """
    # A message as one line of JSON, so that no content can pass for a message of somebody else.
    lines = (json.dumps({key: m[key] for key in _SHOWN if m.get(key)}, ensure_ascii=False) for m in messages[1:])
    material = {
        "what the agent was told at the beginning": shorten_text(messages[0]["content"], how.max_characters),
        "the conversation, a message a line": shorten_text("\n".join(lines), how.max_characters),
    }
    question = f"{how.question}\n\nGive a score from {how.low:g} to {how.high:g}."
    score, reason = await judge.score(question, seed=seed, low=how.low, high=how.high, material=material)
    details: Json = {"score": score, "reason": reason, "weight": how.weight}
    if before is None:
        success = score >= (how.high if how.success_from is None else how.success_from)
        return Evaluation(how.weight * score, success, {"judge": details})
    details["beside"] = before.reward
    return Evaluation(before.reward + how.weight * score, before.success, before.details | {"judge": details})


def shorten_text(text: str, most: int) -> str:
    """``text``, or its beginning and end with a note of how much was left out between them."""
    if len(text) <= most:
        return text
    left_out = len(text) - most
    return f"{text[: most // 2]}[… {left_out} characters are left out here …]{text[len(text) - (most - most // 2) :]}"
