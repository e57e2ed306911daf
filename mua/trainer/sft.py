"""Supervised fine-tuning on recorded conversations, through the same token buffer, packing and backend as RL."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from mua.algorithms.batch import sft_batch
from mua.algorithms.losses import CrossEntropyLoss
from mua.config.schema import ExperimentConfig
from mua.environment.protocol import ToolSchema
from mua.errors import ConfigError
from mua.rollout.seeds import derived_seed
from mua.tokens.codec import ConversationError
from mua.tokens.conversation import Conversation
from mua.tokens.family import ChatFamily, load_family
from mua.trainer.launch import ensure_processes, leads
from mua.trainer.policy import Policy
from mua.trainer.preempt import Preemption
from mua.trainer.run import Run
from mua.types import Json, Segment


def fine_tune(config: ExperimentConfig, preemption: Preemption | None = None) -> None:
    """Fine-tune the policy of ``config`` and leave its Hugging Face folder in ``<output>/hf``.

    Raises :class:`Preempted` on every rank when ``preemption`` is requested before the last step is done; the same
    call continues the run.
    """
    preemption = preemption or Preemption()
    assert config.sft is not None, "the command line checks that the section is there"
    ensure_processes(config.megatron)
    policy = Policy(config, total_steps=config.trainer.steps)
    if not leads():
        policy.follow()
        preemption.check()
        return
    family = load_family(config.model.path, thinking=config.model.thinking)
    conversations = load_conversations(config.sft.data, family, config)
    with policy, Run(config, policy) as run:
        with run.saved_when_preempted():
            loop(config, policy, run, conversations, preemption)
        policy.save_hf(config.output / "hf")


def loop(
    config: ExperimentConfig, policy: Policy, run: Run, conversations: list[list[Segment]], preemption: Preemption
) -> None:
    """The run from ``run.step`` to its end, or to the safe point after ``preemption``.

    Batches walk through a fresh permutation each epoch.
    """
    assert config.sft is not None
    by_length = sorted(range(len(conversations)), key=lambda i: sum(len(s) for s in conversations[i]))
    short = by_length[: max(1, len(by_length) // 4)]
    with run.progress.stage("fine-tune", total=config.trainer.steps - run.step) as progress:
        for step in range(run.step, config.trainer.steps):
            preemption.check()
            pool = short if step < config.sft.short_first_steps else by_length
            chosen = [conversations[i] for i in _batch(pool, config.sft.batch_size, step, config.seed)]
            with run.timer.stage("train"):
                metrics = policy.train_step(sft_batch([s for segments in chosen for s in segments]), CrossEntropyLoss())
            run.log(step, metrics)
            if run.due(config.trainer.save_every, step):
                run.save(step)
            progress.advance(note=f"loss {metrics['loss']:.3f}")


def load_conversations(path: Path, family: ChatFamily, config: ExperimentConfig) -> list[list[Segment]]:
    """The segments of every conversation in a JSON-lines file.

    Raises :class:`ConfigError` naming file and line for what cannot be read, and for a conversation longer than
    ``model.max_length``.
    """
    try:
        # Only line feeds end a record: str.splitlines would also cut at U+2028, which JSON strings may hold as it is.
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise ConfigError(f"sft.data: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"sft.data: {path} is not UTF-8 text (byte {error.start + 1})") from None
    if lines == [""]:
        raise ConfigError(f"sft.data: {path} holds no conversation")
    conversations = []
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        try:
            segments = _conversation(line, family, config).segments()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ConversationError) as error:
            raise ConfigError(f"{where}: not a conversation: {_reason(error)}") from None
        if (longest := max(len(s) for s in segments)) > config.model.max_length:
            raise ConfigError(f"{where}: {longest} tokens exceed model.max_length {config.model.max_length}")
        conversations.append(segments)
    return conversations


def _conversation(line: str, family: ChatFamily, config: ExperimentConfig) -> Conversation:
    assert config.sft is not None
    record = json.loads(line)
    messages, tools = record["messages"], record.get("tools") or []
    if not isinstance(messages, list) or not all(isinstance(item, dict) for item in [*messages, *tools]):
        raise ConversationError('"messages" and "tools" must be arrays of objects')
    return Conversation.from_messages(family, messages, _tools(tools), train_on=config.sft.train_on)


def _reason(error: Exception) -> str:
    if isinstance(error, ConversationError | json.JSONDecodeError):
        return str(error)
    if isinstance(error, KeyError):
        return f"the key {error} is missing"
    return f"not in OpenAI form ({type(error).__name__}: {error})"


def _tools(tools: list[Json]) -> list[ToolSchema]:
    functions = [tool.get("function", tool) for tool in tools]
    return [ToolSchema(f["name"], f.get("description", ""), f.get("parameters", {})) for f in functions]


def _batch(pool: Sequence[int], size: int, step: int, seed: int) -> list[int]:
    """The members of one step: positions of an endless stream of shuffled passes over ``pool``."""
    chosen: list[int] = []
    while len(chosen) < size:
        epoch, start = divmod(step * size + len(chosen), len(pool))
        order = list(pool)
        random.Random(derived_seed("sft", seed, epoch)).shuffle(order)
        chosen += order[start : start + size - len(chosen)]
    return chosen
