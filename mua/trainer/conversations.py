"""Recorded conversations from files: read, checked, and turned into token streams as an episode would have left them.

:mod:`mua.trainer.recorded_rows` says which files and folders there are, :mod:`mua.trainer.record_forms` which forms of
a record, told apart record by record.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from mua.config.schema import ExperimentConfig, StoredDemonstrations
from mua.store.database import Store
from mua.store.stored_groups import demonstrations, recorded_run
from mua.tokens.chat_family import ChatFamily
from mua.tokens.codec import ConversationError, check_recorded_tokenizer
from mua.tokens.conversation import Conversation
from mua.trainer.record_forms import messages_and_tools
from mua.trainer.recorded_rows import recorded_rows
from mua.types import Provenance, Segment, Trajectory
from mua.utils.errors import ConfigError
from mua.utils.seeds import derived_seed
from mua.utils.strict_json import printable

Conversations: TypeAlias = list[list[Segment]]
"""The segments of each conversation."""

log = logging.getLogger(__name__)


def load_sets(config: ExperimentConfig, family: ChatFamily) -> tuple[Conversations, Conversations]:
    """What ``sft.data`` or ``sft.stored`` trains on, and what ``sft.validation`` holds out or names (nothing if it is
    not set)."""
    assert config.sft is not None
    if config.sft.data is not None:
        name, conversations = str(config.sft.data), load_conversations(config.sft.data, family, config)
    else:
        assert config.sft.stored is not None
        name, conversations = load_stored(config.sft.stored, family, config)
    validation = config.sft.validation
    if validation is None:
        return conversations, []
    if isinstance(validation, Path):
        return conversations, load_conversations(validation, family, config, key="sft.validation")
    training, held_out = hold_out(conversations, validation, config.seed)
    if not training or not held_out:
        raise ConfigError(
            f"sft.validation: {validation:g} of the {len(conversations)} conversations in {name} leaves "
            f"{len(training)} to train on and {len(held_out)} to validate on; choose another share"
        )
    return training, held_out


def hold_out(conversations: Conversations, share: float, seed: int) -> tuple[Conversations, Conversations]:
    """Training and validation part, in the order given; the same for the same conversations, share and seed.

    Which part a conversation falls into is drawn by what it says, so that copies of one conversation, common in
    collected data, never stand on both sides. The validation part is the first to reach ``share`` of all.
    """

    def digest(segments: Sequence[Segment]) -> bytes:
        found = hashlib.sha256(str(seed).encode())
        for segment in segments:
            found.update(segment.ids.tobytes())
            found.update(segment.provenance.tobytes())
        return found.digest()

    digests = [digest(segments) for segments in conversations]
    chosen = set(sorted(digests)[: math.ceil(share * len(conversations))])
    parts: tuple[Conversations, Conversations] = ([], [])
    for conversation, drawn in zip(conversations, digests, strict=True):
        parts[drawn in chosen].append(conversation)
    return parts


def load_conversations(
    path: Path, family: ChatFamily, config: ExperimentConfig, *, key: str = "sft.data"
) -> Conversations:
    """The segments of every conversation in a file; ``key`` is the setting that names it.

    Raises :class:`ConfigError` naming file and line for what cannot be read, and for a conversation longer than
    ``model.max_length`` unless ``sft.overlong`` leaves it out.
    """
    assert config.sft is not None
    limit = config.model.max_length
    conversations, skipped = [], 0
    for where, record in recorded_rows(path, key):
        segments = _segments(where, record, family, config.sft.train_on)
        if (longest := max(len(s) for s in segments)) <= limit:
            conversations.append(segments)
        elif config.sft.overlong == "skip":
            skipped += 1
        else:
            raise ConfigError(
                f"{where}: {longest} tokens exceed model.max_length {limit}; raise it, or leave such "
                "conversations out with sft.overlong: skip"
            )
    if skipped:
        log.warning("%s: %d conversations are longer than model.max_length %d and left out", path, skipped, limit)
    if not conversations:
        raise ConfigError(f"{key}: {path} holds no conversation" + (f" of at most {limit} tokens" if skipped else ""))
    return conversations


def load_stored(
    source: StoredDemonstrations, family: ChatFamily, config: ExperimentConfig
) -> tuple[str, Conversations]:
    """The store's name for messages, and the segments of every episode of ``source``, token for token as it was
    sampled.

    Raises :class:`ConfigError` where there is none, where the policy has another tokenizer, and for an episode longer
    than ``model.max_length`` unless ``sft.overlong`` leaves it out; :class:`mua.store.faults.StoreError` where the
    store cannot be read.
    """
    assert config.sft is not None
    limit, size = config.model.max_length, family.codec.vocabulary_size
    conversations, skipped = [], 0
    with Store.open(source.store, create=False, write=False) as store, store.read() as connection:
        check_recorded_tokenizer(config.model.path, recorded_run(connection, source))
        for name, trajectory in demonstrations(connection, source):
            segments = _imitated(trajectory, config.sft.train_on)
            if not segments:
                continue
            if (largest := max(int(segment.ids.max()) for segment in segments)) >= size:
                raise ConfigError(f"sft.stored: trajectory {name} has the token id {largest}; the policy knows {size}")
            if (longest := max(map(len, segments))) <= limit:
                conversations.append(segments)
            elif config.sft.overlong == "skip":
                skipped += 1
            else:
                raise ConfigError(
                    f"sft.stored: trajectory {name}: {longest} tokens exceed model.max_length {limit}; raise it, or "
                    "leave such episodes out with sft.overlong: skip"
                )
    if skipped:
        log.warning("%s: %d episodes are longer than model.max_length %d and left out", store.name, skipped, limit)
    if not conversations:
        raise ConfigError(f"sft.stored: {store.name} holds no episode that this section asks for")
    log.info("%s: %d episodes", store.name, len(conversations))
    return store.name, conversations


def _imitated(trajectory: Trajectory, train_on: Literal["all", "last"]) -> list[Segment]:
    """The segments with sampled tokens; with ``last`` those of the last turn alone count as sampled."""
    segments = [segment for segment in trajectory.segments if segment.loss_mask.any()]
    if train_on == "all" or not segments:
        return segments
    last = max(int(segment.turn[segment.loss_mask].max()) for segment in segments)
    cut = []
    for segment in segments:
        earlier = segment.loss_mask & (segment.turn < last)
        provenance = np.where(earlier, np.uint8(Provenance.TEMPLATE), segment.provenance)
        cut.append(replace(segment, provenance=provenance))
    return [segment for segment in cut if segment.loss_mask.any()]


def batch_members(pool: Sequence[int], size: int, step: int, seed: int) -> list[int]:
    """The members of one step: positions of an endless stream of shuffled passes over ``pool``."""
    chosen: list[int] = []
    while len(chosen) < size:
        epoch, start = divmod(step * size + len(chosen), len(pool))
        order = list(pool)
        random.Random(derived_seed("sft", seed, epoch)).shuffle(order)
        chosen += order[start : start + size - len(chosen)]
    return chosen


def _segments(where: str, record: Any, family: ChatFamily, train_on: Literal["all", "last"]) -> list[Segment]:
    """The token streams of one record. Raises :class:`ConfigError` with ``where`` for what is no conversation."""
    try:
        messages, tools = messages_and_tools(record)
        return Conversation.from_messages(family, messages, tools, train_on=train_on).segments()
    except ConversationError as error:
        reason = str(error)
    except KeyError as error:
        reason = f"the key {error} is missing"
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = f"not in OpenAI form ({type(error).__name__}: {error})"
    raise ConfigError(f"{where}: not a conversation: {printable(reason)}")
