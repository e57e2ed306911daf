"""What runs leave behind and later commands read: traces, episodes of an evaluation, results, metrics, recordings.

Each damaged file is read, or refused in a line that names the file (and the damaged line); lines before the damage are
not lost, and what is read is fit to be used. Not covered: damage that leaves a file of another, possible content.
"""

from __future__ import annotations

import gzip
import json
import logging
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mua.observe.metrics_log import drop_from, read_metrics
from mua.observe.transcript import render_trajectory
from mua.store.traces import experts_file, read_traces, trace_file, write_traces
from mua.trainer.evaluation.store import EpisodeStore, Key
from mua.types import Outcome, Provenance, Segment, Trajectory
from mua.users.factory import load_recordings
from mua.utils.errors import ConfigError, MuaError
from tests.fuzz._mutate import drawn, mutated_bytes, mutated_json, mutated_lines, outcome, scratch
from workbench.compare import compared, comparison_page, load_result
from workbench.recordings import _recordings

CASES = 620
_TEXT = "Hello é 🙂\u2028\ud800"


def run(cases: int, seed: int) -> list[str]:
    """Faults of ``cases`` files, one line each."""
    logging.disable(logging.WARNING)  # an unfinished last line is told, a thousand times here
    failures = []
    for case, rng in drawn("traces", cases, seed):
        subject = rng.choice(_SUBJECTS)
        with scratch() as folder:
            failures += [f"{case} ({subject.__name__[1:]}): {fault}" for fault in subject(folder, rng)]
    logging.disable(logging.NOTSET)
    return failures


def _trajectory(number: int) -> Trajectory:
    n = 4
    provenance = np.asarray([Provenance.SYSTEM, Provenance.USER, Provenance.SAMPLED, Provenance.SAMPLED], np.uint8)
    zeros, experts = np.zeros(n, np.int32), np.arange(2 * n, dtype=np.uint8).reshape(n, 2)
    logprobs = np.full(n, -0.5, np.float32)
    segment = Segment(np.arange(n, dtype=np.int32), provenance, logprobs, zeros, zeros.copy(), experts=experts)
    call = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": _TEXT, "actions": [{"name": "restart", "arguments": {}, "answer": "done"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c0", "content": "1"},
        {"role": "user", "content": "Bye"},
    ]
    metrics, details = {"tool_calls": 1.0, "malformed": 0.0}, {"wrong": {"a": [1, {"b": None}]}}
    return Trajectory(
        f"task-{number}", number, 0, [segment], [0.0, 1.0], 1.0, True, Outcome.USER_STOP, messages, metrics, details
    )


@cache
def _trace() -> tuple[tuple[bytes, ...], bytes]:
    """The lines of a trace and its expert choices."""
    with scratch() as folder:
        path = trace_file(folder, 0)
        write_traces(path, [_trajectory(number) for number in range(4)])
        return tuple(path.read_bytes().splitlines()), experts_file(path).read_bytes()


def _damaged(lines: tuple[bytes, ...], rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return mutated_lines(list(lines), rng)
    at = rng.randrange(len(lines))
    line = mutated_json(json.loads(lines[at]), rng).encode("utf-8", "surrogatepass")
    return b"\n".join((*lines[:at], line.replace(b"\n", b" "), *lines[at + 1 :])) + b"\n"


def _whole_lines(data: bytes, lines: tuple[bytes, ...]) -> int:
    """How many lines at the beginning are as they were."""
    found = data.split(b"\n")[:-1]
    return next((n for n, line in enumerate(found) if n >= len(lines) or line != lines[n]), len(found))


def _named(path: Path, error: Exception | None, first: int) -> list[str]:
    """Whether the error names the file, and no line before the first damaged one."""
    if error is None:
        return []
    place, text = str(path), str(error)
    if place not in text:
        return [f"names no file: {text[:200]!a}"]
    number = text.partition(f"{place}:")[2].partition(":")[0]
    early = number.isdigit() and int(number) < first
    return [f"names line {number}, damaged is {first}: {text[:200]!a}"] if early else []


def _traces(folder: Path, rng: random.Random) -> list[str]:
    lines, experts = _trace()
    path, data = folder / "step_000000.jsonl", _damaged(lines, rng)
    path.write_bytes(data)
    if rng.random() < 0.9:
        changed = mutated_bytes(experts, rng) if rng.random() < 0.2 else experts
        experts_file(path).write_bytes(changed)
    # Where the file beside is damaged too, any line may be the first that cannot be read.
    intact = experts_file(path).exists() and changed == experts
    first, found = _whole_lines(data, lines) if intact else 0, []

    _, error, faults = outcome(lambda: found.extend(read_traces(path)), (MuaError,))
    faults = faults or _named(path, error, first + 1)
    if not faults and error is None and len(found) < first:
        faults = [f"{first} lines are whole, {len(found)} are read"]
    return faults or outcome(lambda: [_used(trajectory) for trajectory in found], ())[2]


def _used(trajectory: Trajectory) -> None:
    render_trajectory(trajectory, lambda ids: " ".join(map(str, ids)))
    sum([trajectory.reward, *trajectory.turn_rewards, *trajectory.metrics.values()])
    [message.get("role") for message in trajectory.messages]


def _recorded_users(folder: Path, rng: random.Random) -> list[str]:
    lines, _ = _trace()
    path, data = folder / "trace.jsonl", _damaged(lines, rng)
    path.write_bytes(data)
    found, error, faults = outcome(lambda: load_recordings(path), (ConfigError,))
    faults = faults or _named(path, error, _whole_lines(data, lines) + 1)
    if faults or error is not None:
        return faults
    turns = [turn for recordings in found.values() for turns in recordings for turn in turns]
    fit = all(
        isinstance(turn.text, str) and all(isinstance(a["arguments"], dict) for a in turn.actions) for turn in turns
    )
    return [] if fit else ["a recorded turn is of a wrong type"]


@cache
def _episodes() -> tuple[bytes, ...]:
    with scratch() as folder:
        path = folder / "episodes.jsonl"
        with EpisodeStore(path, policy="p", setting="s") as store:
            for number in range(4):
                store.add(Key("desk", f"task-{number}", "d", 0), _trajectory(number))
            store.add_roles({"user/llm/requests": 3.0, "user/llm/p50_seconds": 0.5})
        return tuple(path.read_bytes().splitlines())


def _evaluation(folder: Path, rng: random.Random) -> list[str]:
    path, lines = folder / "episodes.jsonl", _episodes()
    data = _damaged(lines, rng)
    path.write_bytes(data)

    def read() -> int:
        with EpisodeStore(path, policy="p", setting="s") as store:
            sum(store.roles.values())
            return len([_used(trajectory) for trajectory in store._found.values()])

    found, error, faults = outcome(read, (MuaError,))
    faults = faults or _named(path, error, _whole_lines(data, lines) + 1)
    if not faults and error is None and found < min(4, _whole_lines(data, lines)):
        faults = ["whole episodes are not read"]
    if not faults and error is not None and path.read_bytes() != data[: data.rfind(b"\n") + 1]:
        faults = [] if path.read_bytes().startswith(data) else ["a refused file was changed"]
    return faults


def _result() -> dict[str, Any]:
    tasks = [
        {"domain": "desk", "task": f"t{n}", "digest": "d", "episodes": 2, "successes": n % 3, "label": None}
        for n in range(6)
    ]
    return {"name": "x", "setting_digest": "s", "per_task": tasks, "episodes": 12}


def _comparison(folder: Path, rng: random.Random) -> list[str]:
    path = folder / "evaluation.json"
    text = mutated_json(_result(), rng).encode("utf-8", "surrogatepass")
    path.write_bytes(mutated_bytes(text, rng) if rng.random() < 0.4 else text)

    def read() -> str:
        one = load_result(path)
        result = compared(one, _result()) | {"first": one["name"], "second": "other"}
        return comparison_page(result)

    _, error, faults = outcome(read, (MuaError,))
    shares_none = error is not None and "share no scored task" in str(error)
    return faults or ([] if shares_none else _named(path, error, 1))


def _metrics(folder: Path, rng: random.Random) -> list[str]:
    lines = tuple(json.dumps({"step": n, "rollout/reward/mean": 0.5, "loss": None}).encode() for n in range(4))
    path, data = folder / "metrics.jsonl", _damaged(lines, rng)
    path.write_bytes(data)
    _, error, faults = outcome(lambda: [line["step"] + 1 for line in read_metrics(path)], (MuaError,))
    faults = faults or _named(path, error, _whole_lines(data, lines) + 1)
    if faults:
        return faults
    _, error, faults = outcome(lambda: drop_from(path, 2), (MuaError,))
    if error is not None and path.read_bytes() != data:
        faults = ["a refused file was changed"]
    return faults


def _recordings_of_tools(folder: Path, rng: random.Random) -> list[str]:
    step = {"name": "get_order", "arguments": {"order": "W1"}, "answer": '{"a": "x\u2028"}'}
    record = {
        "task": "retail-dev-0", "variant": 1, "steps": [step, step], "database_equals_gold": True,
        "database_equals_untouched": False,
    }  # fmt: skip
    lines = tuple(json.dumps(record, ensure_ascii=rng.random() < 0.5).encode() for _ in range(3))
    data = _damaged(lines, rng)
    path = folder / "recorded.jsonl"
    if rng.random() < 0.3:
        path, data = folder / "recorded.jsonl.gz", mutated_bytes(gzip.compress(data), rng)
    path.write_bytes(data)
    _, error, faults = outcome(lambda: list(_recordings(path)), (ConfigError,))
    if faults or error is None:
        return faults
    return [] if path.name in str(error) else [f"names no file: {str(error)[:200]!a}"]


_SUBJECTS: tuple[Callable[[Path, random.Random], list[str]], ...] = (
    _traces, _traces, _evaluation, _recorded_users, _comparison, _metrics, _recordings_of_tools,
)  # fmt: skip
