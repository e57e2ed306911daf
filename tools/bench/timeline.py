"""Simulated against measured: one run calibrates the simulation, which predicts the others.

    python -m tools.bench.timeline --policy FOLDER [--steps 9] [--out FOLDER] [--only RUN ...]

Every run is `mua train` with Megatron and SGLang on this machine, with the help desk whose tools and customers take
their time (tools/bench/slow_desk.py), a policy that is trained at a learning rate of next to nothing (so that its
episodes stay what they are), the trainer's ranks with rollout and environments on one core, the engines on another.

The first run is synchronous. From it come the engine's seconds per iteration and per prefilled token (least squares
over its requests), the episodes (turns with their tokens, seconds of tools and users; drawn anew), seconds of the
trainer per token, of a weight update and of the rest of a step. Nothing of the other runs is used to predict them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from mua.observe.metrics_log import METRICS_FILE, read_metrics
from mua.rollout.scheduler import StepDemand
from mua.store.traces import read_traces
from mua.types import Trajectory
from tools import kit
from tools.bench.placements import Setting, SimulatedEpisode, SimulatedTurn, simulate

GROUPS, SIZE, SLOTS, CONCURRENCY = 8, 4, 16, 256
OVERRIDES = (
    "environment.name=slow_desk", f"algorithm.groups_per_step={GROUPS}", f"algorithm.group_size={SIZE}",
    "algorithm.skip_zero_advantage=false", "algorithm.curriculum.kind=off", "algorithm.correction=truncate",
    f"engine.max_running_requests={SLOTS}", f"rollout.concurrency={CONCURRENCY}", "megatron.threads=1",
    "optimizer.learning_rate=1e-9", "optimizer.min_learning_rate=0", "optimizer.schedule=constant",
    "trainer.evaluate_every=0", "trainer.evaluate_first=false", "trainer.save_every=0", "trainer.export=last",
    "evaluation.report_split=null", "observe.tensorboard=false", "trainer.min_scored_share=0",
    "observe.traces=true",
)  # fmt: skip
REQUESTS = "requests.jsonl"
SHOWN = {
    "step, s": "time/step_seconds",
    "trainer waits, s": "time/wait_seconds",
    "trainer trains, s": "time/optimizer_seconds",
    "engine has requests": "time/engine_generating",
    "slots used": "time/engine_slots_used",
    "engine idle": "time/engine_idle_trainer_works",
    "lag of tokens": "mismatch/version_lag/mean",
}


@dataclass(frozen=True)
class Run:
    """One run of `mua train`, and what the simulation has to know of it."""

    name: str
    staleness: int
    engines: int = 1
    overrides: tuple[str, ...] = ()


RUNS = (
    Run("synchronous", 0),
    Run("asynchronous-1", 1),
    Run("asynchronous-2", 2),
    Run("separate-1", 1, engines=2, overrides=("placement=separate", "engine.count=2", "megatron.data_parallel=2")),
)
"""The first calibrates."""


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--policy", type=Path, default=Path("runs/demo/seed-1/sft/hf"))
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=[run.name for run in RUNS], help="make these runs and stop")
    parser.add_argument("--out", type=Path, help="folder for the runs; one that is there is not made again")
    arguments = parser.parse_args()
    if not arguments.policy.is_dir():
        sys.exit(f"--policy: {arguments.policy} is not there; `make demo` makes one (its seed-1/sft/hf)")
    with tempfile.TemporaryDirectory(prefix="mua-bench-") as scratch:
        out = arguments.out or Path(scratch)
        for run in RUNS:
            if arguments.only is None or run.name in arguments.only:
                make(run, out / run.name, arguments.policy, arguments.steps)
        if arguments.only is None:
            show(out)


def show(out: Path) -> None:
    """Every run beside what is foreseen for it."""
    found = calibrate(out / RUNS[0].name)
    print(found.describe())
    for run in RUNS:
        measured = steps_of(out / run.name, run.staleness)
        demand = StepDemand(GROUPS, 40, run.staleness)
        setting = replace(found.setting, demand=demand, engines=run.engines, engine_devices=1)
        speed = trainer_seconds(out / run.name, run.staleness) / trainer_seconds(out / RUNS[0].name, 0)
        predicted = [simulate(one) for one in (setting, slower(setting, speed))]
        print(f"\n### {run.name}, {len(measured)} steps; a token of training took {speed:.2f} times as long\n")
        print(compared(measured, *predicted))


def slower(setting: Setting, times: float) -> Setting:
    """The same on a machine that takes so many times as long for everything that it computes."""
    speed = setting.speed
    assert isinstance(speed, MeasuredEngine)
    engine = MeasuredEngine(*(times * getattr(speed, field.name) for field in fields(speed)))
    names = ("score_seconds", "train_seconds", "sync_seconds", "batch_seconds", "record_seconds")
    return replace(setting, speed=engine, **{name: times * getattr(setting, name) for name in names})


def steps_of(folder: Path, staleness: int) -> list[dict[str, Any]]:
    """Not those before engines and queues have settled, and not those for which nothing new starts."""
    lines = list(read_metrics(folder / METRICS_FILE))
    return lines[1 + (staleness > 0) : len(lines) - staleness]


def trainer_seconds(folder: Path, staleness: int) -> float:
    """Of the optimizer, per token: how fast the machine was, which others use too."""
    steps = steps_of(folder, staleness)
    tokens = sum(batch_tokens(folder, line["step"]) for line in steps)
    return float(sum(line["time/optimizer_seconds"] for line in steps)) / tokens


def compared(measured: Sequence[dict[str, Any]], predicted: dict[str, float], at_speed: dict[str, float]) -> str:
    """Means over the measured steps beside the predicted ones."""

    def error(found: float, real: float) -> str:
        return f"{found / real - 1:+.0%}" if real > 0.05 else ""

    rows = []
    for name, metric in SHOWN.items():
        real, one, other = fmean(line[metric] for line in measured), predicted[metric], at_speed[metric]
        rows.append((name, f"{real:.3f}", f"{one:.3f}", error(one, real), f"{other:.3f}", error(other, real)))
    names = ("mean of the steps", "measured", "simulated", "error", "simulated at this run's speed", "error")
    return kit.table(names, rows)


def make(run: Run, folder: Path, policy: Path, steps: int) -> None:
    """The run into ``folder``, unless it is there."""
    if (folder / "hf").is_dir():
        return
    shutil.rmtree(folder, ignore_errors=True)
    register(folder.parent)
    command = [sys.executable, "-m", "tools.bench.timeline_run", str(folder / REQUESTS), "train", "configs/demo.yaml"]
    own = [
        f"model.path={policy}",
        f"output={folder}",
        f"trainer.steps={steps}",
        f"trainer.max_staleness={run.staleness}",
    ]
    paths = os.pathsep.join([str(folder.parent), str(kit.ROOT)])
    variables = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *OVERRIDES, *run.overrides, *own], check=True, env=variables)


def register(folder: Path) -> None:
    """The domain as a third party's package, on a path of its own."""
    info = folder / "slow_desk-0.1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-desk\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[mua.environments]\nslow_desk = tools.bench.slow_desk\n")


@dataclass(frozen=True)
class MeasuredEngine:
    """Implements :class:`tools.bench.placements.EngineSpeed`. Seconds."""

    alone: float
    """Of an iteration, whoever runs."""
    each: float
    """Of an iteration, for every running request."""
    token: float
    """Of prefill."""
    request: float
    """Of every request: HTTP, tokens to text, the scheduler's turn."""

    def iteration(self, running: int, context: float) -> float:
        return self.alone + self.each * running

    def prefill(self, tokens: int) -> float:
        return self.request + self.token * tokens


@dataclass(frozen=True)
class Calibration:
    setting: Setting
    error: float
    """Of the requests' seconds by the fitted engine, root mean square over their mean."""

    def describe(self) -> str:
        engine, setting = self.setting.speed, self.setting
        assert isinstance(engine, MeasuredEngine)
        return (
            f"engine: {1e3 * engine.alone:.2f} ms per iteration + {1e3 * engine.each:.3f} ms per request; prefill "
            f"{1e3 * engine.token:.3f} ms per token + {1e3 * engine.request:.2f} ms per request "
            f"(residual {self.error:.0%})\ntrainer: {1e6 * setting.score_seconds:.0f} + "
            f"{1e6 * setting.train_seconds:.0f} us per token, sync {setting.sync_seconds:.3f} s, batch "
            f"{setting.batch_seconds:.3f} s, records {setting.record_seconds:.3f} s"
        )


def calibrate(folder: Path) -> Calibration:
    """Everything that the simulation needs, from one run."""
    lines = list(read_metrics(folder / METRICS_FILE))[1:]
    trajectories = [t for t in read_traces(folder / "traces") if t.scored]
    shared = common([t.segments[0].ids for t in trajectories])
    episodes = [replace(episode_of(t), shared=shared) for t in trajectories]
    requests = [json.loads(line) for line in (folder / REQUESTS).read_text().splitlines()]
    speed, error = engine_of(requests)
    # Episodes of a group begin alike, and the engine has what they share: less is prefilled than is new to an episode.
    new = sum(turn.prompt for episode in episodes for turn in episode.turns) - shared * len(episodes)
    speed = replace(speed, token=speed.token * sum(r["prompt"] - r["cached"] for r in requests) / new)
    tokens = fmean(batch_tokens(folder, line["step"]) for line in lines)
    mean = lambda *names: sum(fmean(line[f"time/{name}_seconds"] for line in lines) for name in names)  # noqa: E731

    def draw(ordinal: int, sample: int) -> SimulatedEpisode:
        return random.Random(1000 * ordinal + sample).choice(episodes)

    setting = Setting(
        StepDemand(GROUPS, 1), SIZE, draw, speed, engines=1, slots=SLOTS, concurrency=CONCURRENCY,
        score_seconds=mean("logprobs") / tokens, train_seconds=mean("optimizer") / tokens, sync_seconds=mean("sync"),
        batch_seconds=mean("batch", "memory"), record_seconds=mean("records", "checkpoint", "rest"),
    )  # fmt: skip
    return Calibration(setting, error)


def batch_tokens(folder: Path, step: int) -> int:
    """Of the step's batch, prompts included."""
    return sum(len(s) for t in read_traces(folder / "traces" / f"step_{step:06d}.jsonl") for s in t.segments)


def common(streams: Sequence[Any]) -> int:
    """Tokens that all ``streams`` begin with."""
    shortest = min(map(len, streams))
    same = np.all(np.stack([ids[:shortest] for ids in streams]) == streams[0][:shortest], axis=0)
    return shortest if same.all() else int(same.argmin())


def episode_of(trajectory: Trajectory) -> SimulatedEpisode:
    """Its turns with their tokens; seconds of tools and users spread evenly over its turns."""
    times = trajectory.metrics
    turn = np.concatenate([s.turn for s in trajectory.segments])
    mask = np.concatenate([s.loss_mask for s in trajectory.segments])
    count = int(turn.max()) + 1
    sampled = np.bincount(turn[mask], minlength=count)
    # What comes after the sampled tokens of a turn is the prompt of the next one.
    own = np.bincount(turn[~mask], minlength=count)
    pause = (times.get("seconds/tools", 0.0) + times.get("seconds/user", 0.0)) / count
    parts = sum(times.get(f"seconds/{name}", 0.0) for name in ("start", "generate", "tools", "user", "evaluate"))
    turns = [SimulatedTurn(int(p), int(s), pause) for p, s in zip(own, sampled, strict=True) if s]
    return SimulatedEpisode(turns, times["seconds/start"], times["seconds/episode"] - parts + times["seconds/evaluate"])


def engine_of(requests: Sequence[dict[str, float]]) -> tuple[MeasuredEngine, float]:
    """Seconds of an iteration and of prefill by least squares over requests; the residual.

    A request of n tokens runs through n iterations, each of which takes alone + each * (requests that run then), and
    waits for its own prefill and for that of all that begin while it runs.
    """
    begins = np.array([r["began"] + r["waited"] for r in requests])
    ends = np.array([r["ended"] for r in requests])
    sampled = np.array([r["sampled"] for r in requests])
    uncached = np.array([r["prompt"] - r["cached"] for r in requests])
    rows = []
    for begin, end, tokens in zip(begins, ends, sampled, strict=True):
        overlap = np.clip(np.minimum(ends, end) - np.maximum(begins, begin), 0, None)
        running = overlap.sum() / (end - begin)
        arriving = (begins >= begin) & (begins < end)
        rows.append((tokens, tokens * running, uncached[arriving].sum(), arriving.sum()))
    matrix, seconds = np.array(rows), ends - begins
    found = nonnegative_least_squares(matrix, seconds)
    error = float(np.sqrt(np.mean((matrix @ found - seconds) ** 2)) / seconds.mean())
    return MeasuredEngine(*map(float, found)), error


def nonnegative_least_squares(matrix: Any, values: Any) -> Any:
    """The solution without negative parts: those that would be are left out, one after the other."""
    kept = list(range(matrix.shape[1]))
    while True:
        found = np.zeros(matrix.shape[1])
        found[kept] = np.linalg.lstsq(matrix[:, kept], values, rcond=None)[0]
        if (found >= 0).all():
            return found
        kept.remove(int(found.argmin()))


if __name__ == "__main__":
    main()
