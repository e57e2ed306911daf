"""What must be left of a run, whatever struck it: no task lost, none trained twice, and where it can be, every bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from mua.observe.metrics_log import read_metrics
from mua.store.traces import read_traces
from mua.types import Json, Trajectory
from tools.faults.draw import STEPS
from tools.faults.workshop import GROUPS, SIZE, UPDATES

_WEIGHTS = Path("hf") / "model.safetensors"
_SAME = ("train/loss", "train/grad_norm", "train/tokens", "rollout/reward/mean", "train/entropy", "train/lr")
"""Metrics of a step that must agree bit for bit."""


def faults_of(output: Path, undisturbed: Path, *, bits: bool, staleness: int) -> list[str]:
    """What is wrong with a finished run, in words; ``undisturbed`` is the output of the same run without faults."""
    found = [*_stream(output, undisturbed), *_steps(output, staleness), *_state(output)]
    half_written = [*(output / "checkpoints").glob(".*"), *output.glob("**/*.new")]
    found += [f"{path} is left behind" for path in half_written]
    return found + list(_different(output, undisturbed)) if bits else found


def _stream(output: Path, undisturbed: Path) -> Iterator[str]:
    """Every episode of every task in the traces of one step, scored; the tasks are those of the undisturbed run."""
    expected = {(ordinal, sample) for ordinal in range(STEPS * GROUPS) for sample in range(SIZE)}
    tasks = {trajectory.ordinal: trajectory.task_id for trajectory in read_traces(undisturbed / "traces")}
    seen: dict[tuple[int, int], int] = {}
    for step, trajectory in _traces(output):
        place = (trajectory.ordinal, trajectory.sample)
        named = f"episode {place[1]} of task {place[0]}"
        if place in seen:
            yield f"{named} is trained twice: in steps {seen[place]} and {step}"
        seen[place] = step
        if not trajectory.scored:
            yield f"{named} is lost: {trajectory.outcome}, {trajectory.error}"
        if tasks.get(trajectory.ordinal) != trajectory.task_id:
            yield f"{named} is {trajectory.task_id}, not {tasks.get(trajectory.ordinal)}"
    for place in sorted(expected - seen.keys()):
        yield f"episode {place[1]} of task {place[0]} is in no step"


def _traces(output: Path) -> Iterator[tuple[int, Trajectory]]:
    for path in sorted((output / "traces").glob("step_*.jsonl")):
        for trajectory in read_traces(path):
            yield int(path.stem.removeprefix("step_")), trajectory


def _steps(output: Path, staleness: int) -> Iterator[str]:
    """One line of metrics for each step, in order, about exactly the episodes of its traces."""
    lines = list(read_metrics(output / "metrics.jsonl"))
    if (steps := [line["step"] for line in lines]) != list(range(STEPS)):
        yield f"metrics.jsonl has the steps {steps}"
    sampled = dict.fromkeys(range(STEPS), 0)
    for step, trajectory in _traces(output):
        sampled[step] = sampled.get(step, 0) + trajectory.sampled_tokens
    for line in lines:
        step = line["step"]
        if (count := line["rollout/response_len/mean"] * line["rollout/trajectories/count"]) != sampled.get(step):
            yield f"step {step} sampled {count:g} tokens, its traces hold {sampled.get(step)}"
        if line["rollout/off_policy_level/max"] > staleness:
            yield f"step {step} trained on weights {line['rollout/off_policy_level/max']:g} versions old"


def _state(output: Path) -> Iterator[str]:
    """The last checkpoint counts every step, task and optimizer step once."""
    folder = output / "checkpoints" / f"step_{STEPS:08d}"
    if not folder.is_dir():
        yield f"{folder} is missing"
        return
    content: Json = json.loads((folder / "manifest.json").read_text())
    state = content["data_position"]
    counted = (state["step"], state["position"]["next"], content["networks"]["policy"]["steps"])
    if counted != (expected := (STEPS, STEPS * GROUPS, STEPS * UPDATES)):
        yield f"{folder} counts {counted} steps, tasks and optimizer steps, not {expected}"


def _different(output: Path, undisturbed: Path) -> Iterator[str]:
    """Weights, tokens and metrics that are not bit for bit those of the undisturbed run."""
    if (output / _WEIGHTS).read_bytes() != (undisturbed / _WEIGHTS).read_bytes():
        yield f"{_WEIGHTS} differs from that of the undisturbed run"
    for (step, ours), (_, theirs) in zip(_traces(output), _traces(undisturbed), strict=False):
        if _sampled(ours) != _sampled(theirs):
            yield f"episode {ours.sample} of task {ours.ordinal} in step {step} differs from the undisturbed run"
    both = zip(read_metrics(output / "metrics.jsonl"), read_metrics(undisturbed / "metrics.jsonl"), strict=False)
    for mine, other in both:
        if different := [name for name in _SAME if mine.get(name) != other.get(name)]:
            yield f"step {mine['step']}: {', '.join(different)} differ from the undisturbed run"


def _sampled(trajectory: Trajectory) -> list[tuple[bytes, bytes]]:
    return [(segment.ids.tobytes(), segment.logprobs.tobytes()) for segment in trajectory.segments]
