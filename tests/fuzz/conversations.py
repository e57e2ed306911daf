"""Files of conversations for supervised training, in OpenAI's and ShareGPT's form: read, or refused at the right line.

Not covered: whether what is read is a good demonstration; a tokenizer's own faults.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from mua.config.schema import ExperimentConfig
from mua.tokens.chat_family import ChatFamily
from mua.tokens.codec import Codec
from mua.tokens.qwen import Qwen3
from mua.trainer.conversations import load_conversations
from mua.utils.errors import ConfigError
from tests.fuzz._mutate import drawn, mutated_bytes, mutated_json, mutated_lines, outcome, scratch

CASES = 600
_CALL = {"type": "function", "id": "c", "function": {"name": "look_up", "arguments": '{"key": "v", "n": [1, 2.5]}'}}
_TOOL = {"type": "function", "function": {"name": "look_up", "description": "Finds.", "parameters": {"type": "object"}}}
_OPENAI: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Where is W1?"},
        {"role": "assistant", "content": "", "reasoning_content": "Look.", "tool_calls": [_CALL]},
        {"role": "tool", "content": '{"state": "sent"}'},
        {"role": "assistant", "content": "Sent 🙂.", "weight": 1},
    ],
    "tools": [_TOOL],
}
_SHAREGPT: dict[str, Any] = {
    "conversations": [
        {"from": "human", "value": "Where is W1?"},
        {"from": "function_call", "value": '{"name": "look_up", "arguments": {"key": "v"}}'},
        {"from": "observation", "value": "<tool_response>\nsent\n</tool_response>"},
        {"from": "gpt", "value": "<think>\nhm\n</think>\n\nSent.\n"},
    ],
    "system": "Be kind.",
    "tools": json.dumps([_TOOL]),
}


def run(cases: int, seed: int) -> list[str]:
    """Faults of ``cases`` files, one line each."""
    failures = []
    for case, rng in drawn("conversations", cases, seed):
        with scratch() as folder:
            first = _write(path := folder / "data.jsonl", rng)
            failures += [f"{case}: {fault}" for fault in _faults(path, first, rng)]
    return failures


def _write(path: Path, rng: random.Random) -> int | None:
    """Write a file with one damaged record; its line, where only that one is."""
    records = [json.dumps(rng.choice((_OPENAI, _SHAREGPT)), ensure_ascii=rng.random() < 0.5) for _ in range(4)]
    at = rng.randrange(4)
    if rng.random() < 0.3:
        path.write_bytes(mutated_lines([record.encode() for record in records], rng))
        return None
    damaged = mutated_json(json.loads(records[at]), rng)
    records[at] = _inside(records[at], rng) if rng.random() < 0.3 else damaged.replace("\n", " ")
    if rng.random() < 0.2:
        text = "[\n" + ",\n".join(records) + "\n]"
        data = text.encode("utf-8", "surrogatepass")
        path.write_bytes(mutated_bytes(data, rng) if rng.random() < 0.5 else data)
        return None
    path.write_bytes("\n".join(records).encode("utf-8", "surrogatepass") + b"\n")
    return at + 1


def _inside(record: str, rng: random.Random) -> str:
    """The record with JSON inside one of its strings damaged."""
    value = json.loads(record)
    if "messages" in value:
        function = value["messages"][2]["tool_calls"][0]["function"]
        function["arguments"] = mutated_json(json.loads(function["arguments"]), rng)
    else:
        entry = value["conversations"][1]
        entry["value"] = mutated_json(json.loads(entry["value"]), rng)
    return json.dumps(value)


@cache
def _config(overlong: str) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "name": "x", "output": "x", "model": {"path": "x", "max_length": 4096}, "rollout": {"max_tokens": 1},
            "environment": {"name": "help_desk"}, "trainer": {"steps": 1},
            "sft": {"data": "data.jsonl", "overlong": overlong},
        }
    )  # fmt: skip


@cache
def _family() -> ChatFamily:
    """Qwen3's over a tokenizer of single bytes, made without transformers, which takes seconds to import."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in Qwen3.control_tokens])
    return Qwen3(Codec(tokenizer, "fuzz"), thinking=True)


def _faults(path: Path, damaged: int | None, rng: random.Random) -> list[str]:
    family, config = _family(), _config(rng.choice(("skip", "refuse")))
    found, error, faults = outcome(lambda: load_conversations(path, family, config), (ConfigError,))
    if faults:
        return faults
    if error is None:
        kept = len(found) <= 5 and all(len(segment) for segments in found for segment in segments)
        return [] if kept else ["a conversation without tokens"]
    text = str(error)
    if str(path) not in text:
        return [f"names no file: {text[:200]!a}"]
    if damaged and f"{path}:{damaged}: " not in text:
        return [f"damaged is line {damaged}: {text[:200]!a}"]
    return []
