"""What goes wrong outside the program: each gets one line a person can act on, and nothing is lost.

Not covered here but in the unit tests of the parts: configurations (test_start_checks.py), a tool that raises or hangs,
a disk that fills up while a checkpoint is written, an endpoint that answers 429, 500 or nothing.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from e2e_support import Workshop, assert_gone, ended, metrics_of, refused, running, shared_memory, until

from megatron_bridge.hf_folder import copy_other_files
from mua.store.traces import read_traces
from tests.chat_server import answering, nobody

pytestmark = pytest.mark.timeout(900)  # a busy machine; the fixtures' runs count too

SLOW_ROLLOUT = ("rollout.concurrency=2", "algorithm.groups_per_step=8", "algorithm.group_size=4")
"""Enough episodes, one after the other, that a rollout lasts for seconds and can be hit in its middle."""


# ---- what the configuration names is not there


@pytest.mark.slow
def test_a_missing_checkpoint_is_named(trained: Path, tmp_path: Path) -> None:
    missing = trained / "checkpoints" / "step_00000099"
    assert str(missing) in refused("convert", "megatron-to-hf", missing, tmp_path / "hf", cwd=tmp_path)
    assert not (tmp_path / "hf").exists()


@pytest.mark.slow
def test_a_checkpoint_of_another_shape_is_refused_and_kept(workshop: Workshop, trained: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, Qwen3ForCausalLM

    config = AutoConfig.from_pretrained(workshop.model)
    config.intermediate_size = 96
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "other")
    copy_other_files(
        workshop.model, tmp_path / "other", None, {"config.json": (tmp_path / "other/config.json").read_text()}
    )
    checkpoints = trained / "checkpoints"
    before = sorted(path.name for path in checkpoints.iterdir())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoints").symlink_to(checkpoints)
    line = refused("train", workshop.recipe, f"model.path={tmp_path}/other", "trainer.steps=9", cwd=tmp_path)
    assert line.startswith(f"mua: model.path: {tmp_path}/other has another model")
    assert sorted(path.name for path in checkpoints.iterdir()) == before


# ---- the user's endpoint


def ask(recipe: Path, verb: str, url: str, cwd: Path, status: int) -> str:
    """The line of a run whose customer is played by a model behind ``url``."""
    user = ["user.kind=llm", f"user.llm.base_url={url}", "user.llm.model=customer", "user.llm.api_key=sk-secret-4711"]
    quick = ["user.llm.max_retries=1", "rollout.max_retries=1"]
    line = refused(verb, recipe, *user, *quick, cwd=cwd, status=status)
    assert url in line
    for path in [*cwd.glob("std*"), *cwd.rglob("*.yaml"), *cwd.rglob("*.jsonl")]:
        assert "sk-secret-4711" not in path.read_text(), path
    return line


@pytest.mark.slow
def test_an_endpoint_that_refuses_the_key(recipe: Path, tmp_path: Path) -> None:
    body = json.dumps({"error": {"message": "bad key sk-secret-4711"}}).encode()
    with answering(lambda: (401, body)) as url:
        line = ask(recipe, "train", url, tmp_path, status=2)
    assert "not one of 6 episodes could be scored" in line
    assert "HTTP 401" in line
    assert "check user.llm.api_key" in line
    assert metrics_of(tmp_path / "out") == []


@pytest.mark.slow
def test_an_endpoint_that_babbles(recipe: Path, tmp_path: Path) -> None:
    with answering(lambda: (200, b"<html>no json")) as url:
        line = ask(recipe, "rollout", url, tmp_path, 2)
    assert "unusable reply" in line
    assert "after 2 requests" in line
    unscored = list(read_traces(tmp_path / "out" / "traces"))
    assert [(t.outcome, t.attempts) for t in unscored] == [("user_error", 2)] * 4


@pytest.mark.slow
def test_an_endpoint_that_is_not_there(recipe: Path, tmp_path: Path) -> None:
    with nobody() as address:
        line = ask(recipe, "rollout", f"http://{address}/v1", tmp_path, status=75)
    assert "connection failed" in line
    assert "check user.llm.base_url and that the server runs" in line


# ---- killed and interrupted


@pytest.mark.slow
def test_ctrl_c_in_a_rollout_ends_everything_and_keeps_the_checkpoint(recipe: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with running("train", recipe, "trainer.steps=50", *SLOW_ROLLOUT, cwd=tmp_path) as process:
        until((output / "checkpoints" / "step_00000001").is_dir, process, "the first checkpoint")
        log = output / "logs" / "engine-0.log"
        seen = log.read_text(errors="replace").count("Prefill batch")
        until(lambda: log.read_text(errors="replace").count("Prefill batch") > seen + 4, process, "the next episodes")
        used = shared_memory(tmp_path)
        process.send_signal(signal.SIGINT)
        assert ended(process, tmp_path, 130, seconds=60)[-1] == "mua: interrupted"
    assert_gone(used)
    newest = max((output / "checkpoints").glob("step_*"))
    for name, recorded in json.loads((newest / "manifest.json").read_text())["files"].items():
        assert (newest / name).stat().st_size == recorded["bytes"]
