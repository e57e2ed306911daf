"""The smaller jobs on a real Slurm: the simulated user's server and its address, evaluation, refused submissions.

Not covered: GPUs, containers; a server that moves while a training job runs (``test_faults.py``).
"""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
from e2e_support import assert_nothing_left
from slurm_support import SECONDS, Jobs

from tools.slurm_cluster import SHARED_PARTITION, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]


def test_a_job_finds_the_users_server_and_its_address_goes_with_it(
    jobs: Jobs, policy: Path, recipe: Path, tmp_path: Path
) -> None:
    address = tmp_path / "shared" / "user"
    cheap = ["--extra=--mem-fraction-static=0.2", "--extra=--max-total-tokens=4096", "--extra=--context-length=512"]
    server = jobs.sbatch("serve_user.sbatch", policy, address, "--name=customer", *cheap, cwd=tmp_path)
    server_log = tmp_path / f"mua-user-{server}.log"
    jobs.until(server, address.exists, "the address", server_log)
    found = dict(line.split("=", 1) for line in address.read_text().splitlines())
    assert found["MUA_USER_MODEL"] == "customer"
    assert _chat(found["MUA_USER_BASE_URL"], found["MUA_USER_API_KEY"])

    llm = tmp_path / "llm.yaml"
    key = "${MUA_USER_API_KEY}"
    user = f'{{base_url: "${{MUA_USER_BASE_URL}}", model: "${{MUA_USER_MODEL}}", api_key: "{key}", max_tokens: 8}}'
    llm.write_text(f"extends: {recipe}\nuser: {{kind: llm, llm: {user}}}\n")
    script = tmp_path / "find.sbatch"
    script.write_text(_only_preflight(jobs, llm, address, tmp_path))
    looked = jobs.sbatch(str(script), llm, "megatron.tensor_parallel=1", "megatron.data_parallel=1", cwd=tmp_path)
    log = tmp_path / "logs" / "look.log"
    jobs.until(looked, jobs.state(looked, "COMPLETED"), "the preflight's end", log)
    assert f"{found['MUA_USER_BASE_URL']} serves customer" in log.read_text()

    jobs.cluster.call("scancel", server)
    assert wait_until(lambda: not address.exists(), SECONDS)
    assert_nothing_left(tmp_path)


def _only_preflight(jobs: Jobs, config: Path, address: Path, folder: Path) -> str:
    """The training script as ``mua launch slurm`` prints it, left before it trains."""
    options = ["megatron.tensor_parallel=1", "megatron.data_parallel=1", f"slurm.user_address={address}"]
    options += ["slurm.nodes=1", "slurm.gpus_per_node=1"]
    text = jobs.mua("launch", "slurm", config, *options, "--dry-run", cwd=folder)
    (folder / "logs").mkdir()
    text = text.replace(f"{folder}/out/slurm/%j.log", f"{folder}/logs/look.log")
    assert "sk-this-must-not-appear" not in text
    training = 'if [ -z "$leaving$cancelled" ]; then'
    assert training in text
    return text[: text.index(training)] + '[ "$status" = 0 ]\n'


def _chat(base_url: str, key: str) -> str:
    """What the server answers to one message."""
    body = {"model": "customer", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        role: str = json.load(answer)["choices"][0]["message"]["role"]
    return role


def test_evaluation_is_a_job(jobs: Jobs, recipe: Path, tmp_path: Path) -> None:
    few = ["evaluation.tasks=2", "evaluation.split=validation"]
    job = jobs.sbatch("eval.sbatch", recipe, *few, cwd=tmp_path)
    log = tmp_path / f"mua-eval-{job}.log"
    jobs.until(job, jobs.state(job, "COMPLETED"), "the end", log)
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["episodes"] == 2
    assert "success on validation" in log.read_text()
    assert_nothing_left(tmp_path)


def test_a_conversion_that_fails_is_a_failed_job(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.sbatch("convert.sbatch", "megatron-to-hf", tmp_path / "nothing", tmp_path / "hf", cwd=tmp_path)
    log = tmp_path / f"mua-convert-{job}.log"
    jobs.until(job, jobs.state(job, "FAILED"), "the failure", log)
    assert f"{tmp_path}/nothing does not exist" in log.read_text()


def test_a_sampler_without_a_store_is_a_failed_job(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.sbatch("sample.sbatch", tmp_path / "store.sqlite", "--wait=0", cwd=tmp_path)
    log = tmp_path / f"mua-sample-{job}.log"
    jobs.until(job, jobs.state(job, "FAILED"), "the failure", log)
    assert "store.sqlite: no such file" in log.read_text()


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        ("nowhere", "invalid partition specified: nowhere"),
        (
            SHARED_PARTITION,
            "exclusive use of nodes is not allowed.*; for a part of each node set slurm.exclusive: false",
        ),
    ],
)
def test_slurms_own_words_about_a_partition(
    jobs: Jobs, recipe: Path, tmp_path: Path, partition: str, words: str
) -> None:
    said = jobs.mua("launch", "slurm", recipe, "slurm.nodes=2", f"slurm.partition={partition}", cwd=tmp_path, status=2)
    assert re.search(words, said, re.DOTALL)
    assert "Traceback" not in said
