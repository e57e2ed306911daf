"""Chat families over small tokenizers, and made-up generations, for any test module."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from mua.tokens.chat_family import ChatFamily, load_family
from mua.tokens.codec import content
from mua.types import FinishReason, Generation, Int32Array, Provenance, Segment
from workbench.tokenizer import train_tokenizer

MODEL_TYPES = {"qwen2.5": "qwen2", "qwen3": "qwen3"}
# Repeated often enough that the merges across message joints exist: line ends after line ends, after spaces and
# after punctuation, and the parts of control tokens spelt out.
CORPUS = [
    "user assistant system\n\n\nhello, where is my order 1234?\n \n\n",
    'tool_response>\n\n{"name": "look_up", "arguments": {"key": "value"}}\n</tool_response>\n<tool_response>\n',
    "<|im_start|> <|im_end|>\n <tool_call>\n</tool_call>\n <think>\n\n</think>\n\n",
    "订单已发货 🙂🙂 für Zoë\r\n\r\n",
] * 30

_ROOT = TemporaryDirectory(prefix="mua-tokens-")


def write_tokenizer(folder: Path, family: str) -> Path:
    """A model folder without weights: a small tokenizer of ``family`` and a config.json that names its type."""
    train_tokenizer(CORPUS, folder, family=family, vocab_size=480)
    (folder / "config.json").write_text(json.dumps({"model_type": MODEL_TYPES[family]}))
    return folder


@cache
def model_folder(family: str) -> Path:
    """Such a folder, shared by all tests of the session: do not write into it."""
    folder = Path(_ROOT.name) / family
    folder.mkdir()
    return write_tokenizer(folder, family)


@cache
def chat_family(name: str, thinking: bool) -> ChatFamily:
    """The chat family of :func:`model_folder`."""
    return load_family(model_folder(name), thinking=thinking)


def plain_ids(family: ChatFamily, text: str) -> Int32Array:
    """Ids of text that somebody wrote: control tokens spelt out in it stay text."""
    return family.codec.encode([content(text, Provenance.USER)])[0]


def generation(ids: Sequence[int] | Int32Array, finish: FinishReason = "stop", *, version: int = 3) -> Generation:
    """What an engine returns for sampled ``ids``: log-probabilities -0.5, -1.5, ... and one version."""
    n = len(ids)
    return Generation(
        ids=np.asarray(ids, np.int32),
        logprobs=-np.arange(n, dtype=np.float32) - 0.5,
        finish=finish,
        version=version,
        versions=np.full(n, version, np.int32),
        cached_tokens=0,
    )


def runs(family: ChatFamily, segment: Segment) -> list[tuple[str, str]]:
    """A segment as (provenance, text) of each stretch of one provenance, for tests written out by hand."""
    marks = zip(segment.ids, segment.provenance, strict=True)
    stretches = groupby(marks, key=lambda mark: int(mark[1]))
    return [(Provenance(who).name, family.decode([token for token, _ in run])) for who, run in stretches]
