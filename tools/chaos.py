"""Faults drawn by seed strike runs of a tiny configuration, which must end as if nothing had happened.

    python -m tools.chaos [--faults 10] [--seed 1] [--mode sync stale ranks] [--write]

Every run is struck several times, also while it starts and resumes: processes are killed and stopped, the disk is
full, the newest checkpoint is damaged, a port is taken, the clock jumps (:mod:`tools.faults`). A supervisor does what
Slurm would, and what a person is asked for::

    attempt ends with 0 ─────────────────────────── the run is finished
    by a signal, or with 75 (a fault may pass) ──── the same command again
    with 2 on a full disk ───────────────────────── a person makes room; the same command again
    with 2 on a damaged checkpoint ──────────────── a person takes what the message offers
    with anything else, or no progress ──────────── the run has failed

At the end no task is lost and none trained twice, and the store is whole; in the deterministic modes weights, tokens
and metrics are bit for bit those of an undisturbed run. A run that fails leaves everything in ``runs/chaos/<run>``,
and the command that repeats its faults is printed. Status 1 if any failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import psutil

from mua.observe.metrics_log import read_metrics
from mua.store.database import Store
from mua.store.starts import missing_steps
from mua.store.traces import read_traces
from mua.store.verification import verify
from mua.types import Json, Trajectory
from mua.utils.run_identity import known_run
from tools import kit
from tools.faults import (
    ENDS,
    SAVE_EVERY,
    STEPS,
    Clock,
    Fault,
    Kind,
    Mode,
    Phase,
    Scene,
    User,
    draw,
    newest_step,
    strike,
)
from tools.tiny import SMALL, build_policy

PAGE = Path("docs/benchmarks/faults.md")
DOMAINS = kit.ROOT / "tests" / "e2e" / "domains"
"""Holds ``graded_desk``, whose rewards differ even for a random policy: every step changes the weights."""
GROUPS, SIZE, UPDATES = 4, 2, 4
"""Of a step: tasks, episodes of each, optimizer steps."""
CONFIG = """\
name: chaos
output: disk/out
model: {{path: {model}, dtype: float32, max_length: 512}}
environment: {{name: graded_desk, prompt: short, isolation: process, workers: 2, call_seconds: 4, reset_seconds: 8}}
rollout: {{max_turns: 4, max_tool_calls: 4, max_turn_tokens: 24, max_tokens: 200, concurrency: 4, max_retries: 6}}
engine: {{max_total_tokens: 16384, max_running_requests: 16, memory_fraction: 0.5, health_seconds: 1,
  control_seconds: 6, start_seconds: 150, stop_seconds: 5}}
algorithm: {{group_size: {size}, groups_per_step: {groups}, epochs: 2, minibatches: 2}}
megatron: {{max_tokens_per_microbatch: 512, threads: 1}}
optimizer: {{learning_rate: 1.0e-3, weight_decay: 0.0}}
trainer: {{steps: {steps}, save_every: {save_every}, keep: 2, silence_seconds: 8, min_scored_share: 1.0,
  max_unscored_steps: 1}}
observe: {{traces: true}}
"""
_DETERMINISTIC = ("trainer.deterministic=true", "engine.deterministic=true")
OVERRIDES = {
    Mode.SYNC: _DETERMINISTIC,
    Mode.STALE: (
        "trainer.max_staleness=1",
        "algorithm.correction=truncate",
        "rollout.max_retries=2",
        "user.kind=llm",
        "user.check=off",  # the server says what it likes, whatever the task
        "user.llm={model: user, base_url: '${MUA_USER_BASE_URL}', request_seconds: 3, total_seconds: 12}",
    ),
    Mode.RANKS: ("megatron.data_parallel=2", *_DETERMINISTIC),
}
SILENT_SECONDS = 300.0
"""Longer than any wait of the run's own: without progress for so long it hangs."""
LEFT_SECONDS = 30.0
"""In which everything that an attempt has started must be gone after it."""
VICTIM_SECONDS = 40.0
"""How long a fault waits for its victim to be there."""
POLL_S = 0.01
_FULL = re.compile(r"no space left|is the disk full|quota", re.IGNORECASE)
_OFFER = re.compile(r"run: (mv .+) and then the same command again")
_WENT_ON = "the run went on"
_ROLLED_OUT = re.compile(r"episodes of step (\d+) \d+/\d+")
_EPISODE = re.compile(r"Prefill batch, #new-seq: \d+, #new-token: [1-9]\d")
_FLUSHED = "Cache flushed successfully"
_INSIDE = "MUA_CHAOS_DISK"
"""Set where this process may mount file systems, which nobody else sees."""


class RunFailed(Exception):
    """What a run under faults did that it must not do."""


@dataclass
class Struck:
    """A fault that has happened."""

    fault: Fault
    phase: Phase
    step: int
    done: str
    survived: str = _WENT_ON


class Watch:
    """Where an attempt is, read from what it writes. Nothing in the run is changed for it::

    attempt begins ──────────────────────────────── start-up
    engine log: a prefill of an episode ─────────── rollout of the step that comes next
    stderr: "episodes of step 3 8/8" ────────────── scoring and training of step 3
    engine log: a cache was flushed ─────────────── sync of step 3
    checkpoints/.step_00000004.partial ──────────── checkpoint of step 3
    metrics.jsonl, and the checkpoint if it is due ─ rollout of step 4
    """

    def __init__(self, output: Path, stderr: Path) -> None:
        self._output, self._stderr = output, stderr
        self._read = {path: path.stat().st_size for path in (output / "logs").glob("engine-*.log")}
        self.phase, self.step, self.since = Phase.START, newest_step(output / "checkpoints"), monotonic()

    def look(self) -> None:
        """Bring phase and step up to date."""
        checkpoints = self._output / "checkpoints"
        if steps := _ROLLED_OUT.findall(self._stderr.read_text(errors="replace")):
            self._enter(Phase.TRAIN, int(steps[-1]))
        for line in self._engine_lines():
            if self.phase is Phase.START and _EPISODE.search(line):
                self._enter(Phase.ROLLOUT, self.step)
            elif self.phase is Phase.TRAIN and _FLUSHED in line:
                self._enter(Phase.SYNC, self.step)
        if self.phase in (Phase.TRAIN, Phase.SYNC) and (checkpoints / f".step_{self.step + 1:08d}.partial").exists():
            self._enter(Phase.SAVE, self.step)
        metrics = self._output / "metrics.jsonl"
        if self.phase is not Phase.START and metrics.exists():
            done = 1 + max(map(int, re.findall(r'^\{"step": (\d+)', metrics.read_text(), re.MULTILINE)), default=-1)
            due = done % SAVE_EVERY == 0 or done == STEPS
            if done > self.step and (not due or newest_step(checkpoints) >= done):
                self._enter(Phase.ROLLOUT, done)

    def _enter(self, phase: Phase, step: int) -> None:
        if (step, phase.order) > (self.step, self.phase.order):
            self.phase, self.step, self.since = phase, step, monotonic()

    def _engine_lines(self) -> Iterator[str]:
        for path in (self._output / "logs").glob("engine-*.log"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole) + len(newline)
            yield from whole.decode("utf-8", "replace").splitlines()


class Supervisor:
    """Has one run of ``mode`` survive ``faults`` in ``folder``, whose ``disk`` is a file system of its own."""

    def __init__(self, folder: Path, config: Path, mode: Mode, faults: Sequence[Fault]) -> None:
        self.folder, self.output = folder, folder / "disk" / "out"
        self.struck: list[Struck] = []
        self.attempts = 0
        self._config, self._mode, self._waiting = config, mode, list(faults)
        self._clock = Clock(folder / "clock")
        self._user = User(folder.parent) if mode is Mode.STALE else None
        self._later: list[tuple[float, Callable[[], None]]] = []

    def run(self) -> None:
        """Return when the run is finished and nothing of it runs any more. Raises :class:`RunFailed`."""
        if self._user is not None:
            self._user.start()
        try:
            while not self._attempt():
                if self.attempts > 2 * len(self.struck) + 3:
                    raise RunFailed(f"{self.attempts} attempts for {len(self.struck)} faults")
            deadline = monotonic() + LEFT_SECONDS
            while left := processes_in(self.folder):
                if monotonic() > deadline:
                    raise RunFailed(f"still running: {[' '.join(process.cmdline())[:120] for process in left]}")
                time.sleep(0.1)
        finally:
            if self._user is not None:
                self._user.stop()
            for process in processes_in(self.folder):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def _attempt(self) -> bool:
        """Whether the run was finished by this attempt."""
        self.attempts += 1
        log = self.folder / f"attempt-{self.attempts}.log"
        paths = [str(self._clock.folder), str(DOMAINS), str(kit.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
        variables |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        variables |= {} if self._user is None else {"MUA_USER_BASE_URL": self._user.url}
        command = [sys.executable, "-m", "mua.cli", "train", str(self._config), *OVERRIDES[self._mode]]
        with log.open("w") as said:
            trainer = subprocess.Popen(
                command, cwd=self.folder, env=variables, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                start_new_session=True,
            )  # fmt: skip
        try:
            status = self._watch(trainer, log)
        finally:
            if trainer.poll() is None:
                os.killpg(trainer.pid, signal.SIGKILL)
                trainer.wait()
            self._do_later(float("inf"))
        if status:
            self._answer(status, log.read_text(errors="replace"))
        return status == 0

    def _watch(self, trainer: subprocess.Popen[bytes], log: Path) -> int:
        """Strike until the attempt ends; its status."""
        watch = Watch(self.output, log)
        later = lambda seconds, action: self._later.append((monotonic() + seconds, action))  # noqa: E731
        scene = Scene(self.output, self._clock, self._user, trainer, later)
        since, ending = None, False
        try:
            while (status := trainer.poll()) is None:
                watch.look()
                now = monotonic()
                self._do_later(now)
                if self._waiting and not ending and (since or is_time(self._waiting[0], watch, now)):
                    since = since or now
                    fault = self._waiting[0]
                    done = strike(fault, scene)
                    if done is not None or now - since > VICTIM_SECONDS:
                        self._waiting.pop(0)
                        since = None
                    if done is not None:
                        ending = fault.kind in ENDS
                        self.struck.append(Struck(fault, watch.phase, watch.step, done))
                        print(f"  {watch.phase} of step {watch.step}: {fault.kind}, {done}", flush=True)
                if now - watch.since > SILENT_SECONDS:
                    raise RunFailed(f"no progress for {SILENT_SECONDS:g} s in {watch.phase} of step {watch.step}")
                time.sleep(POLL_S)
        finally:
            for taken in scene.held:
                taken.close()
        return status

    def _answer(self, status: int, said: str) -> None:
        """Do something about the end of an attempt, and note it with the fault behind it."""
        lines = said.strip().splitlines() or ["it said nothing"]
        message = " ".join(line for line in lines if line.startswith("mua")) or lines[-1]
        if not self.struck:
            raise RunFailed(f"it ended with status {status} before anything struck it: {message}")
        last = {struck.fault.kind: struck for struck in self.struck}
        if status == 2 and Kind.DISK in last and _FULL.search(message):
            last[Kind.DISK].survived = "room was made, the same command again"
        elif status == 2 and Kind.CHECKPOINT in last and (offer := _OFFER.search(message)):
            subprocess.run(["sh", "-euc", offer[1]], cwd=self.folder, check=True)
            anew = "begin the run anew" in message
            last[
                Kind.CHECKPOINT
            ].survived = f"{'a new beginning' if anew else 'the checkpoint before'}, offered by name"
        elif status == os.EX_TEMPFAIL or status < 0:
            why = f"status {status}" if status > 0 else signal.Signals(-status).name
            self.struck[-1].survived = f"the same command again ({why})"
        else:
            raise RunFailed(f"attempt {self.attempts} ended with status {status}: {message}")

    def _do_later(self, now: float) -> None:
        due = [action for at, action in self._later if at <= now]
        self._later = [entry for entry in self._later if entry[0] > now]
        for action in due:
            action()


def is_time(fault: Fault, watch: Watch, now: float) -> bool:
    """Whether the run is where ``fault`` strikes it, or behind."""
    at_start = watch.phase is Phase.START
    if fault.phase is watch.phase and (at_start or fault.step == watch.step):
        return now >= watch.since + fault.seconds
    if fault.phase is Phase.START:
        return watch.step > fault.step  # there was no beginning to strike
    return not at_start and (watch.step, watch.phase.order) > (fault.step, fault.phase.order)


def processes_in(folder: Path) -> list[psutil.Process]:
    """Whatever still runs in ``folder``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


# ---- what must be left of a run


def problems_of(output: Path, undisturbed: Path, *, bits: bool, staleness: int) -> Iterator[str]:
    """What is wrong with a finished run; ``undisturbed`` is the output of the same run without faults."""
    expected = {(ordinal, sample) for ordinal in range(STEPS * GROUPS) for sample in range(SIZE)}
    tasks = {trajectory.ordinal: trajectory.task_id for trajectory in read_traces(undisturbed / "traces")}
    seen: dict[tuple[int, int], int] = {}
    sampled = Counter[int]()
    for step, trajectory in trajectories(output):
        place = (trajectory.ordinal, trajectory.sample)
        named = f"episode {place[1]} of task {place[0]}"
        sampled[step] += trajectory.sampled_tokens
        if place in seen:
            yield f"{named} is trained twice: in steps {seen[place]} and {step}"
        seen[place] = step
        if not trajectory.scored:
            yield f"{named} is lost: {trajectory.outcome}, {trajectory.error}"
        if tasks.get(trajectory.ordinal) != trajectory.task_id:
            yield f"{named} is {trajectory.task_id}, not {tasks.get(trajectory.ordinal)}"
    for place in sorted(expected - seen.keys()):
        yield f"episode {place[1]} of task {place[0]} is in no step"
    lines = list(read_metrics(output / "metrics.jsonl"))
    if (steps := [line["step"] for line in lines]) != list(range(STEPS)):
        yield f"metrics.jsonl has the steps {steps}"
    for line in lines:
        step = line["step"]
        if (count := line["rollout/response_len/mean"] * line["rollout/trajectories/count"]) != sampled[step]:
            yield f"step {step} sampled {count:g} tokens, its traces hold {sampled[step]}"
        if line["rollout/off_policy_level/max"] > staleness:
            yield f"step {step} trained on weights {line['rollout/off_policy_level/max']:g} versions old"
    content: Json = json.loads((output / "checkpoints" / f"step_{STEPS:08d}" / "manifest.json").read_text())
    state = content["data_position"]
    counted = (state["step"], state["position"]["next"], content["networks"]["policy"]["steps"])
    if counted != (STEPS, STEPS * GROUPS, STEPS * UPDATES):
        yield f"the last checkpoint counts {counted} steps, tasks and optimizer steps"
    with Store.open(output, write=False) as store, store.read() as connection:
        yield from (f"the store: {finding}" for finding in verify(connection))
        if missing := missing_steps(connection, known_run(output) or "", STEPS):
            yield f"the store lacks the steps {missing}"
    yield from (f"{path} is left behind" for path in output.glob("checkpoints/.*"))
    yield from (f"{path} is left behind" for path in output.glob("**/*.new"))
    if bits:
        yield from differences(output, undisturbed)


def differences(output: Path, undisturbed: Path) -> Iterator[str]:
    """Weights, tokens and metrics that are not bit for bit those of the undisturbed run."""
    weights = Path("hf") / "model.safetensors"
    if (output / weights).read_bytes() != (undisturbed / weights).read_bytes():
        yield f"{weights} differs from that of the undisturbed run"
    for (step, ours), (_, theirs) in zip(trajectories(output), trajectories(undisturbed), strict=False):
        mine, other = ([(s.ids.tobytes(), s.logprobs.tobytes()) for s in t.segments] for t in (ours, theirs))
        if mine != other:
            yield f"episode {ours.sample} of task {ours.ordinal} in step {step} differs from the undisturbed run"
    same = ("train/loss", "train/grad_norm", "train/tokens", "rollout/reward/mean", "train/entropy", "train/lr")
    both = zip(read_metrics(output / "metrics.jsonl"), read_metrics(undisturbed / "metrics.jsonl"), strict=False)
    for line, theirs_line in both:
        if different := [name for name in same if line.get(name) != theirs_line.get(name)]:
            yield f"step {line['step']}: {', '.join(different)} differ from the undisturbed run"


def trajectories(output: Path) -> Iterator[tuple[int, Trajectory]]:
    """Each of the traces with its step."""
    for path in sorted((output / "traces").glob("step_*.jsonl")):
        for trajectory in read_traces(path):
            yield int(path.stem.removeprefix("step_")), trajectory


# ---- runs in turn


class Campaign:
    """Runs in turn in every mode, until so many faults have struck."""

    def __init__(self, folder: Path, *, short: bool) -> None:
        self._folder, self._short = folder, short
        self._references: dict[Mode, Path] = {}
        self.records: list[dict[str, Any]] = []
        folder.mkdir(parents=True)
        self._config = folder / "chaos.yaml"
        from environments.help_desk import DOMAIN
        from environments.help_desk.demonstrations import demonstrations

        shown = demonstrations(200, 1, DOMAIN.system_prompt("short"), ["brief"])
        build_policy(folder / "model", shown, 1, 512, SMALL)
        sizes = {"groups": GROUPS, "size": SIZE, "steps": STEPS, "save_every": SAVE_EVERY}
        self._config.write_text(CONFIG.format(model=folder / "model", **sizes))

    def run(self, modes: Sequence[Mode], count: int, seed: int, per_run: int) -> None:
        """Strike ``count`` faults."""
        while (left := count - sum(len(record["faults"]) for record in self.records)) > 0:
            index = len(self.records)
            self._strike(modes[index % len(modes)], seed + index, min(per_run, left))
            if len(self.records) > 2 * (count // per_run) + 8:
                break  # runs that fail at once strike nothing

    def _strike(self, mode: Mode, seed: int, count: int) -> None:
        undisturbed = self._reference(mode)
        again = f"python -m tools.chaos --mode {mode} --seed {seed} --faults {count} --per-run {count}"
        print(f"{mode}, seed {seed}", flush=True)
        folder, began = self._folder / f"{mode}-{seed}", monotonic()
        with own_disk(folder):
            supervisor = Supervisor(folder, self._config, mode, draw(mode, count, seed, disk=_INSIDE in os.environ))
            try:
                supervisor.run()
                bits = mode is not Mode.STALE and mode in self._references
                staleness = int(mode is Mode.STALE)
                failures = list(problems_of(supervisor.output, undisturbed, bits=bits, staleness=staleness))
            except RunFailed as error:
                failures = [str(error)]
            if failures:
                shutil.copytree(folder / "disk" / "out", folder / "evidence", dirs_exist_ok=True)
        if failures:
            print(*(f"  FAILED: {failure}" for failure in failures), f"  again: {again}", sep="\n", flush=True)
        else:
            print(f"  finished, {supervisor.attempts} attempts, {monotonic() - began:.0f} s", flush=True)
            shutil.rmtree(folder)
        faults = [
            {
                "kind": struck.fault.kind,
                "phase": struck.phase,
                "step": struck.step,
                "done": struck.done,
                "survived": struck.survived,
            }
            for struck in supervisor.struck
        ]
        self.records.append(
            {"mode": mode, "attempts": supervisor.attempts, "failures": failures, "again": again, "faults": faults}
        )

    def _reference(self, mode: Mode) -> Path:
        """Output of the undisturbed run; of a short campaign, that of the first mode serves all."""
        if self._short and self._references:
            return next(iter(self._references.values()))
        if mode not in self._references:
            folder = self._folder / f"{mode}-undisturbed"
            with own_disk(folder):
                supervisor = Supervisor(folder, self._config, mode, ())
                supervisor.run()
                staleness = int(mode is Mode.STALE)
                if found := list(problems_of(supervisor.output, supervisor.output, bits=False, staleness=staleness)):
                    raise RunFailed(f"the undisturbed run: {found}")
                shutil.copytree(supervisor.output, folder / "out")
            self._references[mode] = folder / "out"
        return self._references[mode]


@contextlib.contextmanager
def own_disk(folder: Path) -> Iterator[None]:
    """A block with an empty ``folder`` and, where that is allowed, a file system of its own as its ``disk``."""
    shutil.rmtree(folder, ignore_errors=True)
    disk = folder / "disk"
    disk.mkdir(parents=True)
    if _INSIDE in os.environ:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], check=True)
    try:
        yield
    finally:
        if _INSIDE in os.environ:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)


def table(records: Sequence[dict[str, Any]]) -> str:
    """Kind by mode: how many, and how they were survived."""
    modes = list(dict.fromkeys(record["mode"] for record in records))
    rows = []
    for kind in Kind:
        found = [(record["mode"], fault) for record in records for fault in record["faults"] if fault["kind"] == kind]
        counts, ways = Counter(mode for mode, _ in found), Counter(fault["survived"] for _, fault in found)
        told = ", ".join(f"{way} ({count})" for way, count in ways.most_common())
        rows += [(kind, *(counts[mode] for mode in modes), told)] if found else []
    phases = Counter(fault["phase"] for record in records for fault in record["faults"])
    moments = ", ".join(f"{phase} {phases[phase]}" for phase in Phase if phases[phase])
    return f"{kit.table(('fault', *modes, 'survived by'), rows)}\n\nWhat runs were doing: {moments}."


def report(records: Sequence[dict[str, Any]]) -> str:
    """What docs/benchmarks/faults.md has from a campaign."""
    struck = sum(len(record["faults"]) for record in records)
    failed = [f"- `{record['again']}`: {'; '.join(record['failures'])}" for record in records if record["failures"]]
    head = f"{datetime.now(UTC):%Y-%m-%d}, {kit.machine()}, no GPU: `python -m tools.chaos {' '.join(sys.argv[1:])}`"
    counts = f"{struck} faults struck {len(records)} runs of {STEPS} steps; {len(failed)} runs failed."
    return "\n\n".join([head, counts, table(records), *failed])


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--faults", type=int, default=10, help="faults in all")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each further one has the next")
    parser.add_argument("--mode", type=Mode, nargs="+", default=list(Mode), help="taken in turn")
    parser.add_argument("--per-run", type=int, default=8, help="faults in one run")
    parser.add_argument("--folder", type=Path, default=Path("runs/chaos"), help="must not be there, or is replaced")
    parser.add_argument("--short", action="store_true", help="one undisturbed run only: bits are compared in its mode")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}")
    arguments = parser.parse_args()
    unshare = ["unshare", "--mount", *(["--map-root-user"] if os.getuid() else [])]
    if _INSIDE not in os.environ and shutil.which("unshare") and not subprocess.run([*unshare, "true"]).returncode:
        os.environ[_INSIDE] = "1"
        os.execvp(unshare[0], [*unshare, sys.executable, "-m", __spec__.name, *sys.argv[1:]])
    shutil.rmtree(arguments.folder, ignore_errors=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the run that is under way, too
    campaign = Campaign(arguments.folder.resolve(), short=arguments.short)
    campaign.run(arguments.mode, arguments.faults, arguments.seed, arguments.per_run)
    (arguments.folder / "faults.json").write_text(json.dumps(campaign.records, indent=1) + "\n")
    print(f"\n{table(campaign.records)}")
    if arguments.write:
        PAGE.write_text(kit.with_part(PAGE, "faults", report(campaign.records), by=Path(__file__)))
    sys.exit(any(record["failures"] for record in campaign.records))


if __name__ == "__main__":
    main()
