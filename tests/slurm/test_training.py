"""Two nodes train under a real Slurm: submitted, told to leave, requeued, continued, finished; or one trains and the
other has the engines.

Real: sbatch, srun, torchrun on each node, signals to every process of the step, the requeue, Megatron on gloo over both
nodes, the engine, the cores that Slurm binds to. Not covered: GPUs, containers, hosts of their own (both nodes are this
machine, and share its disk), heterogeneous jobs, NUMA nodes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from e2e_support import assert_nothing_left, metrics_of
from slurm_support import Jobs

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]

KINDS = {
    "bin/mua train": "rank",
    "sglang.launch_server": "engine",
    "sglang::scheduler": "scheduler",
    "mua.environment.worker": "environment",
}
"""Words of a command line, and what process it is."""
RANKS = [f"rank-{rank:05d}.log" for rank in range(4)]


class Run:
    """A run's configuration, which each attempt of its job reads: it has no end until the test says so."""

    def __init__(self, recipe: Path, folder: Path) -> None:
        self.recipe, self.output, self.config = recipe, folder / "out", folder / "run.yaml"
        self._write(1_000_000)

    def _write(self, steps: int) -> None:
        self.config.write_text(f"extends: {self.recipe}\ntrainer: {{steps: {steps}}}\n")

    @property
    def steps(self) -> int:
        """Those that are done."""
        return len(metrics_of(self.output))

    def finishes(self, jobs: Jobs, job: str, log: Path) -> None:
        """The job, which has been requeued, goes on for two more steps; each is there once."""
        steps = self.steps + 2
        self._write(steps)
        jobs.start_now(job)
        jobs.until(job, jobs.state(job, "COMPLETED"), "the end", log)
        assert [line["step"] for line in metrics_of(self.output)] == list(range(steps))


def test_a_run_told_to_leave_saves_is_requeued_and_finishes(jobs: Jobs, recipe: Path, tmp_path: Path) -> None:
    run = Run(recipe, tmp_path)
    job, log = jobs.launch(tmp_path, run.config, "slurm.nodes=2", "environment.isolation=process")
    jobs.until(job, lambda: run.steps >= 2, "two steps", log)
    everything = os.sched_getaffinity(0)
    jobs.until(job, lambda: _cores_by_kind(job).keys() == {*KINDS.values()}, "processes of each kind", log)
    assert {kind: [everything] for kind in KINDS.values()}.items() >= _cores_by_kind(job).items()
    # Slurm does bind here: a step that names one core has one, which is what every step of a job once named.
    one = jobs.cluster.call(
        "srun", f"--jobid={job}", "--overlap", "--ntasks=1", "--nodes=1", "--cpus-per-task=1", "nproc"
    )
    assert one.split() == ["1"]

    jobs.cluster.call("scancel", "--signal=USR1", "--batch", job)  # what --signal=B:USR1@300 makes Slurm send
    jobs.until(job, jobs.state(job, "PENDING"), "the requeue", log)
    # No checkpoint was due: this one is there because of the signal.
    assert [folder.name for folder in (run.output / "checkpoints").iterdir()] == [f"step_{run.steps:08d}"]
    assert "requeueing" in log.read_text()

    run.finishes(jobs, job, log)
    assert jobs.show(job)["Restarts"] == "1"
    assert (run.output / "hf" / "model.safetensors").is_file()
    for attempt in ("attempt-0", "attempt-1"):
        folder = log.with_suffix("") / attempt
        assert sorted(file.name for file in (folder / "train").glob("rank-*")) == RANKS
        assert {file.name for file in folder.glob("environment-*")} == {"environment-n1.json", "environment-n2.json"}
    assert "the same command continues it" in (log.with_suffix("") / "attempt-0/train/rank-00000.log").read_text()
    assert "nodes reach each other" in log.read_text()  # the preflight's table
    written = [file.read_text(errors="replace") for file in (run.output / "slurm").rglob("*") if file.is_file()]
    assert not [text for text in written if "sk-this-must-not-appear" in text]
    assert_nothing_left(tmp_path)


def test_engines_have_a_node_of_their_own(jobs: Jobs, recipe: Path, tmp_path: Path) -> None:
    run = Run(recipe, tmp_path)
    separate = ["placement=separate", "engine.nodes=1", "trainer.max_staleness=1", "algorithm.old_logprobs=engine"]
    job, log = jobs.launch(tmp_path, run.config, *separate, "megatron.data_parallel=1")
    jobs.until(job, lambda: run.steps >= 2, "two steps", log)
    assert _nodes_of(job, "bin/mua train") == {"n1"}
    assert _nodes_of(job, "sglang.launch_server") == {"n2"}

    _kill(job, "bin/mua engines")  # a new step takes its place, and the run fills and uses what it starts
    before = run.steps
    jobs.until(job, lambda: run.steps > before + 2, "steps with new engines", log)
    assert "engines of n2 ended with" in log.read_text()

    jobs.cluster.call("scancel", "--signal=USR1", "--batch", job)
    jobs.until(job, jobs.state(job, "PENDING"), "the requeue", log)
    run.finishes(jobs, job, log)
    assert jobs.show(job)["Restarts"] == "1"
    assert_nothing_left(tmp_path)


def test_a_dead_rank_and_a_dead_node_are_survived(jobs: Jobs, recipe: Path, tmp_path: Path) -> None:
    # The last test of all: what a killed slurmd leaves may keep its node from other jobs.
    # No GPUs: Slurm 22.05 grants those of a node that comes back only at the next try.
    run = Run(recipe, tmp_path)
    two = ["megatron.tensor_parallel=1", "slurm.gpus_per_node=0", "slurm.preflight=false"]
    job, log = jobs.launch(tmp_path, run.config, "--sft", *two, "trainer.save_every=2", "slurm.nodes=2")
    jobs.until(job, lambda: [*(run.output / "checkpoints").glob("step_*")], "a checkpoint", log)
    _kill_rank(job, 1)
    jobs.until(job, jobs.state(job, "PENDING"), "the requeue", log)
    assert "a fault" in log.read_text()
    jobs.start_now(job)

    before = run.steps
    jobs.until(job, lambda: run.steps > before + 2, "more steps", log)
    jobs.cluster.kill_node("n2")
    jobs.until(job, jobs.state(job, "PENDING"), "the requeue", log)
    jobs.cluster.start_node("n2")
    run.finishes(jobs, job, log)
    assert_nothing_left(tmp_path)


def _of_job(job: str, words: str) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """Processes of a job with ``words`` in their command line, and their variables."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            variables = process.environ()
            if variables.get("SLURM_JOB_ID") == job and words in " ".join(process.cmdline()):
                yield process, variables


def _nodes_of(job: str, words: str) -> set[str]:
    return {variables["SLURMD_NODENAME"] for _, variables in _of_job(job, words)}


def _kill(job: str, words: str) -> None:
    for process, _ in _of_job(job, words):
        with contextlib.suppress(psutil.Error):
            process.kill()


def _cores_by_kind(job: str) -> dict[str, list[set[int]]]:
    """The different sets of cores that the processes of each kind may use, of a job that trains."""
    found: dict[str, list[set[int]]] = {}
    for rank, _ in _of_job(job, "bin/mua train"):
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = rank.children(recursive=True)
        for process in [rank, *children]:
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                kind = next((kind for words, kind in KINDS.items() if words in command), None)
                cores = set(process.cpu_affinity())
                if kind is not None and cores not in found.setdefault(kind, []):
                    found[kind].append(cores)
    return found


def _kill_rank(job: str, rank: int) -> None:
    for process, variables in _of_job(job, ""):
        if variables.get("RANK") == str(rank):
            with contextlib.suppress(psutil.Error):
                process.kill()
