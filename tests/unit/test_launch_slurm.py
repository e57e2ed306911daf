"""The rendered batch script: what is in its head, that the rest is the script in ``slurm/``, what is refused.

Without Slurm. That sbatch takes it and what it does is in ``tests/slurm``.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from mua.launch.slurm import (
    JobNodes,
    SlurmJob,
    Verb,
    place_job,
    read_job,
    render,
)  # fmt: skip
from mua.utils.errors import ConfigError
from mua.utils.source_state import shipped

BASE = """\
name: a name with spaces
output: {folder}/out put
model: {{path: {folder}/model}}
environment: {{name: help_desk}}
trainer: {{steps: 1}}
megatron: {{tensor_parallel: 4, pipeline_parallel: 2, data_parallel: 4}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE.format(folder=tmp_path))
    return path


def _job(recipe: Path, *overrides: str, verb: Verb = "train", **keys: str | int) -> SlurmJob:
    """``keys`` are of the section ``slurm``."""
    overrides += tuple(f"slurm.{key}={value}" for key, value in keys.items())
    return SlurmJob(read_job(recipe, overrides, verb).required(), recipe, overrides, verb)


def _options(text: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)


def test_the_head_says_what_was_asked_for(recipe: Path, tmp_path: Path) -> None:
    extra = 'slurm.extra=["--constraint=h200","--mem=0"]'
    text = render(_job(recipe, extra, "slurm.account=us", nodes=4, partition="gpu", time="2-00:00:00"))
    options = _options(text)
    assert {"--nodes=4", "--gpus-per-node=8", "--partition=gpu", "--account=us", "--time=2-00:00:00"} <= set(options)
    assert {"--job-name=a-name-with-spaces", "--signal=B:USR1@300", "--requeue", "--exclusive"} <= set(options)
    assert (options.count("--mem=0"), "--no-kill" in options) == (1, False)
    assert f'--output="{tmp_path}/out put/slurm"/%j.log' in options
    assert "MUA_RANKS_PER_NODE=8\n" in text
    assert f"MUA_LOGS='{tmp_path}/out put/slurm'/$SLURM_JOB_ID\n" in text


@pytest.mark.parametrize("verb", ["train", "engines"])
def test_the_rest_is_the_script_of_the_folder_slurm(recipe: Path, verb: Verb) -> None:
    job = _job(recipe, "placement=separate", "engine.nodes=1", verb=verb)
    rendered, template = render(job), job.template.read_text()
    tail = template.partition("# <<< head\n")[2]
    assert len(tail.splitlines()) > 10
    assert rendered.endswith("# <<< head\n" + tail)
    # Every setting that a person can give by hand is given by the launcher, so that nothing leaks in from outside.
    given = set(re.findall(r"^(\w+)=", rendered.partition("# <<< head")[0], re.MULTILINE))
    assert given == set(re.findall(r'^: "\$\{(\w+):=', template, re.MULTILINE))


@pytest.mark.parametrize("script", sorted(shipped("slurm").iterdir()), ids=lambda path: path.name)
def test_the_scripts_are_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)


def test_nodes_follow_from_the_layout(recipe: Path) -> None:
    assert place_job(_job(recipe).config) == JobNodes(4, 8)
    assert place_job(_job(recipe, gpus_per_node=4).config) == JobNodes(8, 4)
    assert place_job(_job(recipe, gpus_per_node=0, nodes=2).config) == JobNodes(2, 16)


def test_cores_are_asked_for_where_nodes_are_shared(recipe: Path) -> None:
    whole, shared = _options(render(_job(recipe))), _options(render(_job(recipe, "slurm.exclusive=false")))
    assert {"--exclusive", "--mem=0"} <= set(whole)
    assert not [option for option in whole if option.startswith("--cpus")]
    assert "--cpus-per-task=64" in shared
    assert not {"--exclusive", "--mem=0"} & set(shared)
    assert "--cpus-per-task=96" in _options(render(_job(recipe, exclusive="false", cpus_per_task=96)))


SEPARATE = ["placement=separate"]


def test_engines_have_nodes_of_their_own(recipe: Path) -> None:
    engines = [*SEPARATE, "engine.nodes=2", "engine.count=4", "engine.tensor_parallel=2"]
    text = render(_job(recipe, *engines))
    assert {"--nodes=6", "--no-kill"} <= set(_options(text))
    assert "MUA_ENGINE_NODES=2\n" in text
    assert "MUA_RANKS_PER_NODE=8\n" in text
    assert place_job(_job(recipe, *engines, nodes=6).config) == JobNodes(4, 8, 2)
    with pytest.raises(
        ConfigError, match=r"slurm.nodes 2: engine.nodes 2 of them have engines alone, .* none to train"
    ):
        render(_job(recipe, *engines, nodes=2))
    with pytest.raises(ConfigError, match=r"slurm.nodes 3 x slurm.gpus_per_node 8 are 24 GPUs"):
        render(_job(recipe, *engines, nodes=5))
    with pytest.raises(ConfigError, match=r"tensor_parallel 3 .* 8 GPUs of slurm.gpus_per_node; possible: 1, 2, 4, 8"):
        render(_job(recipe, *engines, "engine.tensor_parallel=3"))
    assert place_job(_job(recipe, *engines).config, "sft") == JobNodes(4, 8)


def test_other_nodes_for_engines_are_a_component_of_their_own(recipe: Path) -> None:
    engines = [*SEPARATE, "engine.nodes=2", "engine.count=4", "slurm.engine_partition=l40s", "slurm.partition=h200"]
    text = render(_job(recipe, *engines, "slurm.engine_gpus_per_node=4", 'slurm.engine_extra=["--constraint=b"]'))
    trainer, _, engine = "\n".join(_options(text)).partition("hetjob")
    assert {"--nodes=4", "--gpus-per-node=8", "--partition=h200"} <= set(trainer.split())
    assert {"--nodes=2", "--gpus-per-node=4", "--partition=l40s", "--constraint=b"} <= set(engine.split())
    assert ("--no-kill" in trainer, "--no-kill" in engine) == (False, True)
    assert "MUA_ENGINE_NODES=0\n" in text
    with pytest.raises(ConfigError, match=r"set engine.nodes"):
        render(_job(recipe, "slurm.engine_partition=l40s"))


def test_further_nodes_join_a_run(recipe: Path) -> None:
    job = _job(recipe, *SEPARATE, "engine.nodes=1", "engine.count=8", verb="engines", nodes=3, partition="spot")
    text = render(job)
    assert {"--nodes=3", "--partition=spot", "--job-name=a-name-with-spaces-engines"} <= set(_options(text))
    assert job.script.name == "engines.sbatch"
    with pytest.raises(ConfigError, match=r"--engines-only: .* placement: separate"):
        render(_job(recipe, verb="engines"))


def test_nodes_that_do_not_fit_the_layout_are_refused(recipe: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"slurm.nodes 3 x slurm.gpus_per_node 8 are 24 GPUs, but .* 32 ranks; .*4 x 8"
    ):
        render(_job(recipe, nodes=3))
    with pytest.raises(ConfigError, match="which 3 nodes cannot share evenly"):
        render(_job(recipe, nodes=3, gpus_per_node=0))


@pytest.mark.parametrize("override", ["slurm.time=tomorrow", "slurm.partition=a;b", 'slurm.extra=["constraint=h200"]'])
def test_what_an_sbatch_line_cannot_carry_is_refused(recipe: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        render(_job(recipe, override))


def test_the_users_address_is_the_jobs_to_find(recipe: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MUA_USER_BASE_URL", raising=False)
    llm = ["user.kind=llm", "user.llm.base_url=${MUA_USER_BASE_URL}", "user.llm.model=${MUA_USER_MODEL}"]
    text = render(_job(recipe, *llm, f"slurm.user_address={tmp_path}/user"))
    assert f"MUA_USER_ADDRESS={tmp_path}/user\n" in text
    assert "invalid" not in text
    with pytest.raises(ConfigError, match="name the address file"):
        _job(recipe, *llm)
