"""Runs of the real trainer, with a real store, in which what the policy says follows a script.

Megatron-Core trains a Qwen3 of 0.1 million parameters, episodes, users, verdicts, metrics and store are the project's
own. In the place of SGLang stands :class:`ScriptedEngine`: the texts are those of a :class:`Script`, the
log-probabilities those of the weights it was given, computed by transformers. A run takes some seconds, and many share
a process.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file

from environments.kit.demonstrate import write_conversations
from mua.config.load import load_config
from mua.config.schema import ExperimentConfig
from mua.engine import Pauses, SamplingParams
from mua.engine.weight_transfer import SyncReport
from mua.environment.domain import Domain, moves_of, unanswered
from mua.environment.protocol import Move, Task
from mua.environment.registry import get_domain
from mua.rollout.runner import EpisodeRunner, without_gc_pauses
from mua.rollout.service import RolloutService
from mua.store.recorder import current_episode
from mua.tokens.chat_family import ChatFamily
from mua.tokens.codec import fixed
from mua.trainer.learner import Learner
from mua.trainer.observers import RunRecord
from mua.trainer.preempt import Preemption
from mua.trainer.ranks import init_distributed
from mua.trainer.rl import Training
from mua.trainer.run_folder import Run
from mua.types import Generation, Int32Array, Json, Provenance
from mua.utils.seeds import derived_seed
from tools.tiny import SMALL, build_policy

SHAPE = SMALL | {"max_position_embeddings": 2048}
BASE = """\
model: {dtype: float32}
environment: {prompt: short}
rollout: {max_turns: 16, max_tool_calls: 16, max_turn_tokens: 300, concurrency: 64, max_retries: 1}
algorithm: {group_size: 4, groups_per_step: 4}
megatron: {threads: 1}
optimizer: {learning_rate: 3.0e-4, weight_decay: 0.0}
trainer: {save_every: 0}
observe: {tensorboard: false, progress: false}
"""
WINDOW = 3900
"""Tokens of an episode."""
WINDOWS = {"qa": 7900}
"""Of domains whose experts need more."""
LEADS = (
    "Let me look.", "One moment, please.", "I will check that now.", "Thank you for waiting.", "Certainly.",
    "Let me see what I can find.", "I am looking into it.", "Of course.",
)  # fmt: skip


@dataclass
class Situation:
    """What a script is told of an episode."""

    domain: Domain
    task: Task
    sample: int
    version: int
    steps: int
    """Of the run."""
    draw: random.Random
    evaluation: bool
    lead: str | None = None
    """What texts begin with, in place of one of :data:`LEADS`."""

    @property
    def progress(self) -> float:
        """From 0 at the first policy to 1 at the last."""
        return self.version / max(1, self.steps - 1)


Script = Callable[[Situation], Generator[Move, str, None]]
"""Yields moves and is sent what came back."""


def gold(s: Situation) -> list[Move]:
    """The gold moves that the policy makes."""
    return [move for move in s.domain.gold(s.task) if not hasattr(move, "_fields")]


def expert(s: Situation, said: Callable[[str], str] = lambda text: text) -> Generator[Move, str, None]:
    """Solves the task; its texts as ``said`` changes them."""
    moves, answer = moves_of(s.domain, s.task, s.draw.randrange(2**31)), None
    while True:
        try:
            move = next(moves) if answer is None else moves.send(answer)
        except StopIteration:
            return
        except (ValueError, LookupError):  # the expert cannot read what came back
            yield f"I am afraid that this does not work, see case {s.draw.randint(100, 999)}."
            return
        answer = yield said(move) if isinstance(move, str) else move


def careless(s: Situation) -> Generator[Move, str, None]:
    """Leaves out a call, or says something else at the end."""
    moves = gold(s)
    calls = [at for at, move in enumerate(moves) if not isinstance(move, str)]
    if len(calls) > 1 and s.draw.random() < 0.6:
        del moves[calls[-1]]
        moves[-1:] = [f"I have seen to it, the number is {s.draw.randint(100, 999)}."]
    else:
        moves = [
            *moves[: s.draw.randint(0, max(0, len(calls) - 1))],
            f"That is case {s.draw.randint(100, 999)}, and it is settled now.",
        ]
    yield from unanswered(moves)


def skilled(chance: Callable[[Situation], float]) -> Script:
    """Solves the task with this chance, and is careless otherwise."""

    def script(s: Situation) -> Generator[Move, str, None]:
        yield from (expert if s.draw.random() < chance(s) else careless)(s)

    return script


def learning(first: float = 0.2, last: float = 0.8) -> Script:
    """Becomes better over the run."""
    return skilled(lambda s: first + (last - first) * s.progress)


@dataclass
class Plan:
    """One run: its configuration over the base, and what its policy says."""

    script: Script = field(default_factory=learning)
    domain: str = "help_desk"
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 9
    start: str = "random"
    """random | sft: whether the policy was fine-tuned on conversations first."""
    lead: bool = True
    """Whether turns begin with one of :data:`LEADS` and a number, so that no two are the same."""
    logprobs: Callable[[np.ndarray, int, random.Random], np.ndarray] | None = None
    """What an engine that is wrong makes of the right log-probabilities at a version."""
    around: Callable[[], Any] | None = None
    """A context manager around the run: a fault of the program."""
    frozen_from: int | None = None
    """The version from which on the engine ignores new weights."""


class ScriptedEngine:
    """In the place of :class:`mua.engine.pool.EnginePool`."""

    failure = None
    released = False

    def __init__(self, model: Path, family: ChatFamily, plan: Plan) -> None:
        from transformers import AutoModelForCausalLM

        self.pauses = Pauses()
        self.awaiting_weights = asyncio.Event()
        self._family, self._plan = family, plan
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.version = 0
        self._sampled = 0
        self._loading = threading.Lock()

    async def start(self, model: Path) -> None: ...

    async def stop(self, *, finished: bool = False) -> None: ...

    def restart_clocks(self) -> None: ...

    def awaited(self, awaited: bool) -> None: ...

    def engines_up(self) -> int:
        return 1

    def describe(self) -> str:
        return "a scripted engine"

    def metrics(self) -> dict[str, float]:
        sampled, self._sampled = self._sampled, 0
        return {"engine/sampled_tokens": float(sampled)}

    def take(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """The weights of ``version``."""
        with self._loading:  # in asynchronous runs episodes go on in the other thread
            if self._plan.frozen_from is None or version < self._plan.frozen_from:
                self._model.load_state_dict(dict(tensors), strict=False)
            self.version = version

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str, deadline_s: float
    ) -> Generation:
        playing = _playing.get()
        text = playing.next(self._family.decode(prompt_ids), self.version)
        ids = self._encoded(text)[: params.max_new_tokens]
        whole = torch.tensor([[*prompt_ids, *ids.tolist()]])
        with self._loading, torch.inference_mode():
            logits = self._model(whole, logits_to_keep=len(ids) + 1).logits[0, :-1].float() / params.temperature
            version = self.version
        logprobs = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(ids).long()[:, None])[:, 0].numpy()
        if self._plan.logprobs is not None:
            logprobs = self._plan.logprobs(logprobs, version, playing.situation.draw).astype(np.float32)
        self._sampled += len(ids)
        whole_turn = len(ids) == len(self._encoded(text))
        versions = np.full(len(ids), version, np.int32)
        return Generation(ids, logprobs, "stop" if whole_turn else "length", version, versions, 0)

    def _encoded(self, text: str) -> Int32Array:
        return self._family.codec.encode([fixed(text + self._family.end_of_turn, Provenance.SAMPLED)])[0]


class _Playing:
    """The script's side of one episode."""

    def __init__(self, plan: Plan, situation: Callable[[int], Situation]) -> None:
        self._plan, self._make = plan, situation
        self._moves: Generator[Move, str, None] | None = None
        self.situation: Situation

    def next(self, prompt: str, version: int) -> str:
        answer = None
        if self._moves is None:
            self.situation = self._make(version)
            self._moves = self._plan.script(self.situation)
        else:
            said = prompt.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>")[0]
            answer = said.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
        try:
            move = next(self._moves) if answer is None else self._moves.send(answer)
        except StopIteration:
            move = "Goodbye."
        draw = self.situation.draw
        lead = f"{draw.choice(LEADS)} " if self._plan.lead and draw.random() < 0.7 else ""
        if self.situation.lead is not None:
            lead = f"{self.situation.lead} "
        if isinstance(move, str):
            return lead + move
        return f"{lead}<tool_call>\n{json.dumps({'name': move[0], 'arguments': move[1]})}\n</tool_call>"


_playing: ContextVar[_Playing] = ContextVar("playing")
_step: ContextVar[int] = ContextVar("step", default=0)


def step_now() -> int:
    """The step that the episode under way is for; of evaluations a large number."""
    return _step.get()


class _Service(RolloutService):
    """Hands weights to the scripted engine, without a server."""

    learner: Learner
    engine: ScriptedEngine

    def update_weights(self, weights: Any, version: int) -> SyncReport:
        self._weights, self._version = weights, version
        folder = self._config.output / "engine"
        self.learner.save_hf(folder)
        self.engine.take(load_file(folder / "model.safetensors"), version)
        return SyncReport(version=version)


@contextmanager
def _scripted(plan: Plan, config: ExperimentConfig, seed: int) -> Iterator[None]:
    """Episodes know the script whose moves they make."""
    attempt = EpisodeRunner._attempt

    async def attempted(self: EpisodeRunner, setting: Any, task: Task, session: str, own: int) -> Any:
        ordinal, sample = map(int, session.split("/")[:2])
        _step.set(ordinal // config.algorithm.groups_per_step)
        record = current_episode.get()
        evaluation = record is not None and record.key.round > 0

        def situation(version: int) -> Situation:
            draw = random.Random(derived_seed("planted", seed, own, version))
            return Situation(_domain(task.domain), task, sample, version, config.trainer.steps, draw, evaluation)

        _playing.set(_Playing(plan, situation))
        return await attempt(self, setting, task, session, own)

    with mock.patch.object(EpisodeRunner, "_attempt", attempted):
        yield


_domain = cache(get_domain)


@cache
def policy(root: Path, domains: tuple[str, ...], start: str) -> Path:
    """A small policy with a tokenizer of the domains' texts."""
    folder = root / f"{start}-{'-'.join(domains).replace('/', '_')}"
    said = [{"content": lead} for lead in LEADS]
    for domain in map(get_domain, domains):
        for task in list(domain.tasks("train"))[:60]:
            said.append({"content": domain.persona(task)})
            for move in domain.gold(task):
                text = move if isinstance(move, str) else json.dumps({"name": move[0], "arguments": move[1]})
                said.append({"content": text})
    build_policy(folder, [said], 1, 700, SHAPE)
    return folder if start == "random" else _fine_tuned(root, folder, domains)


def _fine_tuned(root: Path, folder: Path, domains: tuple[str, ...]) -> Path:
    """Supervised training by the project's own command, on gold conversations."""
    from environments.kit.demonstrate import replay_gold
    from mua.trainer.sft import fine_tune

    conversations = []
    for domain in map(get_domain, domains):
        for task in list(domain.tasks("train"))[60:180]:
            result = asyncio.run(replay_gold(domain, task))
            opening: Json = {"role": "user", "content": LEADS[0]}
            said: list[Json] = [{"role": "system", "content": domain.system_prompt("short")}, opening]
            for message in (m for m in result.messages if m["role"] in ("assistant", "tool", "user")):
                last = said[-1]
                if message["role"] == last["role"] == "assistant" and not last.get("tool_calls"):
                    # Gold moves may say two things in a row, where a conversation has the user's word between them.
                    said.append(opening)
                said.append(message)
            conversations.append(said)
    data, out = folder / "sft.jsonl", root / f"{folder.name}-tuned"
    write_conversations(data, conversations)
    tuning = {"sft.data": data, "sft.batch_size": 12, "sft.overlong": "skip", "optimizer.learning_rate": 3.0e-3}
    fine_tune(config_of(folder, out, domains, tuning, 40, 1))
    return out / "hf"


def config_of(
    model: Path, output: Path, domains: Sequence[str], more: Mapping[str, Any], steps: int, seed: int
) -> ExperimentConfig:
    """A run's configuration; ``more`` by dotted keys."""
    window = max(WINDOWS.get(domain, WINDOW) for domain in domains)
    length = window + 196
    shares = {"environment.name": domains[0]} if len(domains) == 1 else {"environment.mix": dict.fromkeys(domains, 1.0)}
    settings: dict[str, Any] = shares | {
        "name": output.name, "output": output, "seed": seed, "model.path": model, "model.max_length": length,
        "rollout.max_tokens": window, "megatron.max_tokens_per_microbatch": length, "trainer.steps": steps,
    } | dict(more)  # fmt: skip
    path = output.with_name(f".{output.name}.yaml")
    path.write_text(BASE, encoding="utf-8")
    return load_config(path, [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items()])


def made_run(plan: Plan, root: Path, output: Path, seed: int) -> Path:
    """Train by ``plan``; the output folder. A run that its own bounds stop is left as it is."""
    from mua.observe.output import output_of, prepare_output
    from mua.tokens.chat_family import load_family
    from mua.utils.errors import MuaError

    domains = tuple(plan.domain.split("+"))
    model = policy(root, domains, plan.start)
    config = config_of(model, output, domains, plan.settings, plan.steps, seed)
    family = load_family(model, thinking=config.model.thinking)
    engine = ScriptedEngine(model, family, plan)
    init_distributed(config)
    total, critic = config.optimizer_steps
    with ExitStack() as stack:
        stack.enter_context(output_of(config))
        prepare_output(config, "config.yaml")
        stack.enter_context(mock.patch("mua.rollout.service.EnginePool", return_value=engine))
        stack.enter_context(_scripted(plan, config, seed))
        if plan.around is not None:
            stack.enter_context(plan.around())
        try:
            learner = Learner(config, total_steps=total, with_reference=config.algorithm.kl_coefficient > 0,
                              critic_steps=critic)  # fmt: skip
            with learner, Run(config, learner) as run, RunRecord(config, run.step) as record, run.saved_on_leaving():
                run.store = record
                with _Service(config, recorder=record.recorder) as rollouts, without_gc_pauses():
                    rollouts.learner, rollouts.engine = learner, engine
                    Training(config, learner, run, rollouts, Preemption(), record).loop()
        except MuaError as error:
            (output / "stopped.txt").write_text(f"{error}\n")
    return output
