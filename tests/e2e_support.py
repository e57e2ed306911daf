"""Runs the command line as a person would, in a process group of its own, and looks for what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from mua.observe.metrics_log import read_metrics
from mua.store.traces import read_traces
from tests.forked_commands import FORKER, ForkedCommand
from tests.forked_engines import ADDRESS
from tests.forked_engines import FORKER as ENGINE_FORKER

Found = TypeVar("Found")
Command = subprocess.Popen[str] | ForkedCommand

DOMAINS = Path(__file__).with_name("e2e") / "domains"
ROOT = Path(__file__).parents[1]
SECONDS = 400.0
"""Deadline of one command. Generous: the machine may be busy."""
STEPS, GROUPS, SIZE = 4, 3, 2
"""Of the uninterrupted run that others are compared with (the fixture ``trained``)."""
DETERMINISTIC = ("trainer.deterministic=true", "engine.deterministic=true")

BASE = """\
name: e2e
output: out
model: {{path: {model}, dtype: float32, max_length: 512}}
environment: {{name: graded_desk, prompt: short}}
user: {{personas: [brief]}}
rollout:
  max_turns: 4
  max_tool_calls: 4
  max_turn_tokens: 24
  max_tokens: 200
  concurrency: 16
  generate_seconds: 300
  user_seconds: 60
  episode_seconds: 600
engine: {{max_total_tokens: 16384, max_running_requests: 16, memory_fraction: 0.5, health_seconds: 2, stop_seconds: 5}}
algorithm: {{group_size: 2, groups_per_step: 3}}
megatron: {{max_tokens_per_microbatch: 512, threads: 1}}
optimizer: {{learning_rate: 1.0e-3, weight_decay: 0.0}}
trainer: {{steps: 2, save_every: 1}}
evaluation: {{split: validation, tasks: 4}}
observe: {{traces: true}}
sft: {{data: {data}, batch_size: 16, short_first_steps: 1000}}
"""


@dataclass(frozen=True)
class Workshop:
    """What all end-to-end tests start from: a small random policy, its tokenizer and some conversations."""

    model: Path
    conversations: Path
    recipe: Path
    """A configuration every run extends by overrides."""


def environment() -> dict[str, str]:
    """The variables of a command: the test domains are found, nothing of an outer run leaks in."""
    clean = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "MUA_TRACEBACK")}
    paths = [str(DOMAINS), str(ROOT), *filter(None, [clean.get("PYTHONPATH")])]
    return clean | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def start(
    *arguments: str | Path, cwd: Path, fresh: bool = False, own_engine: bool = False, module: str = "mua.cli"
) -> Command:
    """``mua arguments`` in ``cwd``, by which everything it starts can be found; output to files there.

    Forked from an interpreter that has imported everything; ``fresh`` starts one of its own, as a person does. So are
    its engines, unless it has ``own_engine`` or is ``fresh``. A ``module`` in place of the command line is fresh.
    """
    if not fresh and module == "mua.cli":
        variables = environment()
        engines = {} if own_engine else {ADDRESS: ENGINE_FORKER.address(variables)}
        return FORKER.start([*map(str, arguments)], cwd, variables | engines)
    with (cwd / "stdout").open("w") as out, (cwd / "stderr").open("w") as err:
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=cwd, env=environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True,
            start_new_session=True,
        )  # fmt: skip


@contextmanager
def running(*arguments: str | Path, cwd: Path, **how: Any) -> Iterator[Command]:
    """:func:`start`, killed at the end of the block if it still runs. What it said is shown if the block fails."""
    process = start(*arguments, cwd=cwd, **how)
    try:
        yield process
    except BaseException:
        print((cwd / "stdout").read_text()[-2000:], (cwd / "stderr").read_text()[-6000:], sep="\n")
        raise
    finally:
        if process.poll() is None:
            kill_group(process)
        process.wait()


def finish(process: Command, cwd: Path, seconds: float = SECONDS) -> tuple[int, str, str]:
    """Wait for the command; its status, standard output and standard error."""
    status = process.wait(seconds)
    return status, (cwd / "stdout").read_text(), (cwd / "stderr").read_text()


def killed(*arguments: str | Path, cwd: Path, when: Callable[[], object]) -> None:
    """Run a command until ``when`` sees something, and kill it."""
    with running(*arguments, cwd=cwd) as process:
        until(when, process, "the moment of the kill")
        kill_group(process)
        assert finish(process, cwd)[0] != 0
    assert_nothing_left(cwd)


def ended(process: Command, cwd: Path, status: int, seconds: float = SECONDS) -> list[str]:
    """Wait for a command that must end with ``status``, without a traceback or a process left; its error lines."""
    found, _, err = finish(process, cwd, seconds)
    assert found == status, err
    assert "Traceback" not in err, err
    assert_nothing_left(cwd)
    return err.splitlines()


def mua(*arguments: str | Path, cwd: Path, seconds: float = SECONDS, **how: Any) -> str:
    """Run a command that must succeed and leave no process; its standard output."""
    with running(*arguments, cwd=cwd, **how) as process:
        status, out, err = finish(process, cwd, seconds)
    assert status == 0, f"mua {' '.join(map(str, arguments))} ended with {status}:\n{out[-2000:]}\n{err[-6000:]}"
    assert_nothing_left(cwd)
    return out


def replayed(output: Path, step: int, *overrides: str, cwd: Path) -> dict[str, Any]:
    """What ``mua replay`` finds: the same gradients and the same batch, bit for bit."""
    told = mua("replay", output, str(step), *overrides, "--json", cwd=cwd)
    found: dict[str, Any] = json.loads(told[told.index("{") :])
    assert found["same_gradients"] is True, found
    assert found["gradients"]["stored"] == found["gradients"]["replayed"]
    assert found["same_batch"] is True, found
    assert not found["drifted_steps"]
    return found


def refused(*arguments: str | Path, cwd: Path, status: int = 2) -> str:
    """Run a command that must fail as a person's mistake does, or with another ``status``; its one ``mua:`` line."""
    with running(*arguments, cwd=cwd) as process:
        (line,) = (line for line in ended(process, cwd, status) if line.startswith("mua: "))
    return line


def kill_group(process: Command) -> None:
    """kill -9 of the command and what shares its process group; engines have groups of their own."""
    os.killpg(process.pid, signal.SIGKILL)


def until(look: Callable[[], Found | None], process: Command, what: str) -> Found:
    """Look again and again, closely, until there is something; the command must not end before."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if found := look():
            return found
        assert process.poll() is None, f"the run ended (status {process.poll()}) before {what}"
        time.sleep(0.005)
    raise AssertionError(f"{what}: not seen within {SECONDS:g} s")


def processes_in(folder: Path) -> list[psutil.Process]:
    """Everything that runs in ``folder``: the command, its engines and their helpers."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder.resolve()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def launcher_in(folder: Path) -> psutil.Process:
    """SGLang's HTTP process there: the guardian's command line holds its own behind that of the guardian."""
    (found,) = [process for process in processes_in(folder) if process.cmdline()[1:3] == ["-m", "sglang.launch_server"]]
    return found


def assert_nothing_left(folder: Path, seconds: float = 30.0) -> None:
    """All processes of a command in ``folder`` are gone, within the time a guardian needs."""
    deadline = time.monotonic() + seconds
    while left := processes_in(folder):
        if time.monotonic() > deadline:
            raise AssertionError(f"still running: {[(p.pid, p.cmdline()) for p in left if p.is_running()]}")
        time.sleep(0.1)


def shared_memory(folder: Path) -> set[Path]:
    """Shared memory and semaphores that what runs in ``folder`` has mapped or open now."""
    found: set[str] = set()
    for process in processes_in(folder):
        with contextlib.suppress(psutil.Error, OSError):
            found |= {region.path for region in process.memory_maps()} | {file.path for file in process.open_files()}
    return {Path(name) for name in found if name.startswith("/dev/shm/") and Path(name).exists()}


def assert_gone(paths: set[Path], seconds: float = 30.0) -> None:
    """None of the files is there any more, within the time a guardian needs."""
    deadline = time.monotonic() + seconds
    while left := {path for path in paths if path.exists()}:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.2)


def whole_lines(path: Path) -> list[str]:
    """Of a file that may still be written: the last line may be half there, or stay so where the writer was killed."""
    written = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in written if line.endswith("\n")]


def metrics_of(output: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics file; none while there is no file."""
    path = output / "metrics.jsonl"
    return list(read_metrics(path)) if path.exists() else []


def evaluations_of(output: Path) -> dict[int, dict[str, Any]]:
    """Held-out figures by the number of steps that the policy had taken."""
    path = output / "evaluations.jsonl"
    return {line["step"]: line for line in read_metrics(path)} if path.exists() else {}


def assert_same_run(output: Path, uninterrupted: Path) -> None:
    """Weights, stream and metrics of both runs are the same."""
    assert [line["step"] for line in metrics_of(output)] == list(range(STEPS))
    trajectories = list(read_traces(output / "traces"))
    assert [(t.ordinal, t.sample) for t in trajectories] == [
        (ordinal, sample) for ordinal in range(STEPS * GROUPS) for sample in range(SIZE)
    ]
    for ours, theirs in zip(trajectories, read_traces(uninterrupted / "traces"), strict=True):
        assert ours.messages == theirs.messages
        for left, right in zip(ours.segments, theirs.segments, strict=True):
            assert left.ids.tobytes() == right.ids.tobytes()
            assert left.logprobs.tobytes() == right.logprobs.tobytes()
    weights = Path("hf") / "model.safetensors"
    assert (output / weights).read_bytes() == (uninterrupted / weights).read_bytes()
    assert not list((output / "checkpoints").glob(".*"))
