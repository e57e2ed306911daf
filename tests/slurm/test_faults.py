"""Faults that pass are followed by another attempt of the job, a person's mistake is not: by rank 0's exit status.

Real: Slurm, the scripts, the engine, every process. The simulated user is a small server of this test, reached by the
address file that ``mua serve`` leaves. Not covered: faults of the machines and of engines (``test_training.py``,
``tests/e2e/test_engine_lost.py``), more than one node.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from e2e_support import assert_nothing_left, metrics_of
from slurm_support import SECONDS, Jobs

from tests.chat_server import answering
from tools.slurm_cluster import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]

STEPS = 6
ONE_NODE = ("slurm.nodes=1", "slurm.gpus_per_node=1")
ONE_RANK = [
    "megatron.tensor_parallel=1", "megatron.data_parallel=1", "slurm.preflight=false", f"trainer.steps={STEPS}",
    "trainer.save_every=1",
]  # fmt: skip


def _comes_back_and_finishes(jobs: Jobs, job: str, log: Path, folder: Path) -> None:
    """The fault left with 75; the next attempt continues, and every step is there once."""
    jobs.until(job, jobs.state(job, "PENDING"), "the requeue", log)
    said = log.read_text()
    assert "train ended: rank 0 with 75" in said
    assert "a fault that may pass, after checkpoint step_" in said
    done = len(metrics_of(folder / "out"))
    assert 0 < done < STEPS
    jobs.start_now(job)
    jobs.until(job, jobs.state(job, "COMPLETED"), "the end", log)
    assert jobs.show(job)["Restarts"] == "1"
    assert [line["step"] for line in metrics_of(folder / "out")] == list(range(STEPS))
    assert_nothing_left(folder)


def test_a_user_server_that_moved_is_found_by_the_next_attempt(jobs: Jobs, recipe: Path, tmp_path: Path) -> None:
    address = tmp_path / "user"
    config = tmp_path / "llm.yaml"
    # One request is one fault: this user is not waited for.
    llm = '{base_url: "${MUA_USER_BASE_URL}", model: "${MUA_USER_MODEL}", max_retries: 0}'
    config.write_text(f"extends: {recipe}\nuser: {{kind: llm, check: off, llm: {llm}}}\n")
    user = _User(answers=16)
    with answering(user) as first, answering(_User(answers=1_000_000)) as second:
        _publish(address, first)
        job, log = jobs.launch(
            tmp_path, config, *ONE_NODE, *ONE_RANK, f"slurm.user_address={address}", "rollout.max_retries=0"
        )
        assert wait_until(user.gone.is_set, SECONDS)
        _publish(address, second)
        _comes_back_and_finishes(jobs, job, log, tmp_path)
        said = log.read_text()
        assert said.index(f"the user's server is at {first}") < said.index("episodes could be scored")
        assert said.index("episodes could be scored") < said.index(f"the user's server is at {second}")


def test_a_mistake_of_a_person_is_not_tried_again(jobs: Jobs, recipe: Path, tmp_path: Path) -> None:
    job = jobs.sbatch("train.sbatch", recipe, "trainer.step=1", cwd=tmp_path, options=("--export=ALL,MUA_PREFLIGHT=0",))
    log = tmp_path / f"mua-{job}.log"
    jobs.until(job, jobs.state(job, "FAILED"), "the failure", log)
    assert jobs.show(job)["Restarts"] == "0"
    assert "did you mean trainer.steps?" in log.read_text()
    assert "stopped by something a person has to fix" in log.read_text()


class _User:
    """A simulated user who is gone after so many answers: then it hangs up on everybody."""

    def __init__(self, answers: int) -> None:
        self.left = answers
        self.gone = threading.Event()
        message = {"role": "assistant", "content": "Where is my order W-1?"}
        self.body = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}).encode()

    def __call__(self) -> tuple[int, bytes] | None:
        self.left -= 1
        if self.left < 0:
            self.gone.set()
            return None
        return 200, self.body


def _publish(address: Path, url: str) -> None:
    address.write_text(f"MUA_USER_BASE_URL={url}\nMUA_USER_MODEL=customer\n")
