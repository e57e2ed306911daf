"""What is known before anything is built: every class of mistake is found, all at once, and no valid run is refused.

The model is that of ``tools/base``, whole or with a file taken out. Not covered: machines with GPUs (their number is
set here), endpoints that are asked (tests/unit/test_launch_preflight.py), Slurm itself.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner, Result

from mua.cli import app
from mua.config.load import read_config
from mua.config.schema import ExperimentConfig
from mua.launch.checks import CHECKS, Start, Verb, configuration
from mua.launch.checks.configuration import Checked, check_reading, check_service, check_start, run_checks
from mua.launch.slurm import read_job

ROOT = Path(__file__).parents[2]
BASE = """\
name: x
output: out
model: {path: model, dtype: float32, max_length: 512}
environment: {name: help_desk, prompt: short}
rollout: {max_tokens: 448}
trainer: {steps: 10}
"""
ENDPOINT = (
    "evaluation.policy={kind: endpoint, endpoint: {base_url: 'http://somewhere:1/v1', model: m}}"
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK", *configuration.LONGER_CONTEXT):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "x.yaml").write_text(BASE, encoding="utf-8")
    (tmp_path / "model").mkdir()
    for path in (ROOT / "tools/base").iterdir():
        (tmp_path / "model" / path.name).symlink_to(path)
    (tmp_path / "d.jsonl").write_text('{"messages": []}', encoding="utf-8")
    return tmp_path


def mua(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checks that read tasks and templates."""
    monkeypatch.setattr(configuration, "CHECKS", [one for one in CHECKS if one.on != "late"])


def found(*overrides: str, verb: Verb = "train") -> Checked:
    return check_start(Path("x.yaml"), overrides, verb)


def problems(*overrides: str, verb: Verb = "train") -> list[str]:
    return [str(problem) for problem in found(*overrides, verb=verb).problems()]


def test_a_valid_run_passes_every_check_without_leaving_a_trace(folder: Path) -> None:
    for words in (["train"], ["sft", "sft.data=d.jsonl"], ["eval"], ["rollout"], ["gateway"]):
        result = mua(words[0], "x.yaml", *words[1:], "--check")
        assert result.exit_code == 0, result.output
        assert "ok       chat template" in result.stdout, result.stdout
    assert "help_desk: 2048 train" in mua("train", "x.yaml", "--check").stdout
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("environment.name=retial", r"environment.name: unknown environment 'retial'; .*did you mean 'retail'\?"),
        ("environment.name=retail,airline", r"several domains are a mix: environment.mix={retail: 1, airline: 1}"),
        ("environment.mix={retail: 1, airlnie: 1}", r"environment.mix: unknown .*'airlnie'.*'airline'\?"),
        ("environment.options={color: red}", r"environment.options: domain 'help_desk' has nothing to set there"),
        ("user.personas=[breif]", r"user.personas: there is no persona 'breif'"),
        ("user.prompt=nowhere.txt", r"user.prompt: cannot read nowhere.txt"),
        ("agent={command: [no-such-program]}", r"agent.command: there is no program 'no-such-program'"),
        ("environment.mcp=[{name: a, command: no-such}]", r"environment.mcp.0.command: .*no program 'no-such'"),
        ("model.path=/nope", r"model.path: /nope does not exist; give a Hugging Face model folder"),
        ("model.path=Qwen/Qwen3-8B", r"hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B, and set model.path="),
        ("model.max_length=5000", r"model.max_length: 5000 exceeds the 4096 positions"),
        ("megatron.tensor_parallel=16", r"megatron.tensor_parallel 16 does not divide the model's \d+ attention heads"),
        ("optimizer={schedule: cosine, warmup_steps: 10}", r"optimizer.warmup_steps: 10 leaves none of the run's 10"),
        ("rollout.top_p=0.9", r"rollout.top_p: rollout.top_p 0.9: the policy samples from another distribution"),
        ("output=x.yaml/out", r"output: .*x.yaml is a file"),
        ("user={kind: llm, llm: {base_url: 'ftp://a:pass@h', model: m}}", r"user.llm.base_url: (?!.*pass)"),
        ("user={kind: llm, llm: {base_url: 'http://h/v1', model: ' '}}", r"user.llm.model: is empty"),
        ("user={kind: llm, llm: {base_url: '${NOT_SET_HERE}', model: m}}", r"variable NOT_SET_HERE is not set"),
        ("offline={store: nowhere.sqlite}", r"offline.store: nowhere.sqlite does not exist"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("quick")
def test_one_mistake_is_one_line_with_place_key_and_fix(folder: Path, override: str, line: str) -> None:
    lines = [one for one in problems(override) if "allow_off_policy" not in one and "key-value heads" not in one]
    assert len(lines) == 1, lines
    assert re.search(line, lines[0]), lines[0]
    assert lines[0].startswith("command line: ")


def test_everything_that_is_wrong_is_said_at_once(folder: Path) -> None:
    text = BASE.replace("help_desk", "retial").replace("path: model", "path: /nope") + "optimizer: {lr: 1.0e-5}\n"
    Path("x.yaml").write_text("# one line more\n" + text)
    result = mua("train", "x.yaml", "megatron.tp=16", "output=x.yaml/out")
    assert result.exit_code == 2
    for line in (
        "x.yaml:8: optimizer.lr: unknown key; did you mean optimizer.learning_rate?",
        "command line: megatron.tp: unknown key; did you mean megatron.tensor_parallel?",
        "x.yaml:5: environment.name: unknown environment 'retial'",
        "x.yaml:4: model.path: /nope does not exist",
        "command line: output: ",
    ):
        assert f"mua: {line}" in result.stderr, line
    assert len(result.stderr.splitlines()) == 5, "nothing follows from a key that is wrong"


def test_a_section_that_is_wrong_by_itself_is_not_checked_against_defaults(folder: Path) -> None:
    lines = problems("model.max_length=many", "environment.name=retial")
    assert [line.partition(": expected")[0].partition(": unknown")[0] for line in lines] == [
        "command line: model.max_length", "command line: environment.name",
    ]  # fmt: skip


def test_json_says_what_the_table_says(folder: Path) -> None:
    result = mua("train", "x.yaml", "environment.name=retial", "--check", "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["ok"], [one["key"] for one in told["problems"]]) == (2, False, ["environment.name"])
    assert told["problems"][0]["at"] == "command line"
    assert {one["name"]: one["state"] for one in told["checks"]}["domain"] == "failure"
    assert json.loads(mua("eval", "x.yaml", "--check", "--json").stdout)["ok"]
    assert mua("train", "x.yaml", "--json").exit_code == 2


@pytest.mark.parametrize(
    ("broken", "line"),
    [
        (lambda m: (m / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda m: (m / "chat_template.jinja").unlink(), "the tokenizer has no chat template; copy that of"),
        (lambda m: (m / "model.safetensors").unlink(), "has no *.safetensors"),
        (lambda m: _rewrite(m / "config.json", model_type="mamba"), "model_type='mamba' is not supported"),
        (lambda m: _rewrite(m / "config.json", model_type="llama"), "no chat family for model_type 'llama'"),
        (lambda m: _replace(m / "model.safetensors", "version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (lambda m: _replace(m / "config.json", "{"), "config.json"),
        (lambda m: (m / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
         "lacks 1 of 1 weight files, such as b.safetensors"),
    ],
)  # fmt: skip
def test_n12_a_model_that_cannot_be_used_is_found_before_it_is_built(
    folder: Path, broken: Callable[[Path], object], line: str
) -> None:
    broken(Path("model"))
    lines = problems()
    assert any(line in one and "model.path" in one for one in lines), lines


def test_n12_a_template_of_another_family_is_found_too(folder: Path) -> None:
    _replace(Path("model/chat_template.jinja"), "{% for message in messages %}{{ message['content'] }}{% endfor %}")
    lines = problems()
    assert len(lines) == 1
    assert "model.path" in lines[0]
    assert "template" in lines[0]


def _rewrite(path: Path, **changes: object) -> None:
    _replace(path, json.dumps(json.loads(path.read_text()) | changes))


def _replace(path: Path, text: str) -> None:
    path.unlink()
    path.write_text(text)


def test_the_test_split_is_no_validation(folder: Path) -> None:
    split = ("evaluation.split=test", "trainer.evaluate_every=5")
    assert "set evaluation.split to validation" in problems(*split)[0]
    assert problems(*split, "evaluation.test_in_training=true") == []
    assert problems("evaluation.split=test", verb="eval") == []


def test_tasks_have_to_be_there_for_what_is_played(folder: Path) -> None:
    assert "environment: help_desk has no train tasks of difficulty hard" in problems(
        "environment.difficulties=[hard]"
    )[0]  # fmt: skip
    assert "gyms/search has no train tasks" in problems("environment={name: gyms/search}")[0]
    assert problems("environment={name: gyms/search}", "evaluation.split=test", verb="eval") == []


def test_supervised_runs_name_no_domain_and_others_do(folder: Path) -> None:
    Path("x.yaml").write_text("name: x\noutput: o\nmodel: {path: model}\nsft: {data: d.jsonl}\ntrainer: {steps: 1}\n")
    assert problems("model.max_length=4096", verb="sft") == []
    assert "environment.name: required by mua train" in problems("model.max_length=4096")[0]


def test_what_is_learned_from_has_to_be_there(folder: Path) -> None:
    assert "sft: required by mua sft, but not set" in problems(verb="sft")[0]
    assert "sft.data: nowhere.jsonl does not exist" in problems("sft.data=nowhere.jsonl", verb="sft")[0]
    Path("empty.jsonl").touch()
    lines = problems("sft={data: d.jsonl, validation: empty.jsonl}", verb="sft")
    assert [line.rpartition(": ")[2] for line in lines] == ["empty.jsonl is empty"]
    assert "hf download --repo-type dataset me/talks" in problems("sft.data=me/talks", verb="sft")[0]


def test_an_evaluation_of_an_endpoint_needs_no_model(folder: Path) -> None:
    """N3: preflight refused a valid one."""
    Path("x.yaml").write_text("name: x\noutput: out\nenvironment: {name: help_desk}\n")
    assert problems(ENDPOINT, verb="eval") == []
    assert problems(ENDPOINT.replace("m}", "''}"), verb="eval")
    result = mua("doctor", "preflight", "x.yaml", ENDPOINT, "--json")
    told = {one["name"]: one for one in json.loads(result.stdout)}
    assert {name for name, one in told.items() if one["state"] == "failure"} - {"endpoint", "open files"} == set()
    assert "evaluation.policy.endpoint.base_url" in told["endpoint"]["fix"], "nobody answers there"


def test_preflight_uses_the_same_list(folder: Path) -> None:
    """N3: preflight accepted environment.name=retial."""
    result = mua("doctor", "preflight", "x.yaml", "environment.name=retial", "model.path=/nope")
    assert result.exit_code == 2
    assert re.search(r"failure  domain +environment.name: unknown environment 'retial'", result.stdout)
    assert re.search(r"failure  model +model.path: /nope does not exist", result.stdout)


def test_launch_refuses_what_no_node_can_run(folder: Path) -> None:
    """N3: tensor_parallel=16 and model.path=/nope passed with status 0."""
    assert mua("launch", "slurm", "x.yaml", "slurm.gpus_per_node=0", "--dry-run").exit_code == 0
    for override, line in (
        ("megatron.tensor_parallel=16", "spans nodes of 8 GPUs"),
        ("model.path=/nope", "model.path: /nope does not exist"),
        ("environment.name=retial", "did you mean 'retail'?"),
        ("engine.count=9", "engine.count: engine.count 9 x engine.tensor_parallel 1 need 9 GPUs"),
        ("megatron.data_parallel=3", "nodes x GPUs could be"),
    ):
        result = mua("launch", "slurm", "x.yaml", "megatron.data_parallel=8", override, "--check")
        assert (result.exit_code, line in result.stdout) == (2, True), result.output
        assert mua("launch", "slurm", "x.yaml", override).exit_code == 2


def test_a_dry_run_shows_the_script_and_what_is_wrong(folder: Path) -> None:
    words = ("launch", "slurm", "x.yaml", "slurm.gpus_per_node=0", "model.path=/only/on/nodes", "--dry-run")
    result = mua(*words)
    assert (result.exit_code, result.stdout.startswith("#!/bin/bash")) == (2, True)
    assert "model.path: /only/on/nodes does not exist" in result.stderr
    assert mua(*words, "--unchecked").exit_code == 0


def test_n2_a_default_of_the_file_is_enough_to_launch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUA_USER_BASE_URL", raising=False)
    monkeypatch.chdir(ROOT)
    reading = read_job(Path("configs/qwen3-32b-4x8-h200.yaml"), [], "train")
    assert reading.problems == []
    told = check_reading(reading, "train", launched=True)
    assert [line for line in map(str, told.problems()) if "MUA_USER" in line] == []
    assert ["user.llm.base_url" in str(line) for line in told.problems("warning")] == [True], (
        "a node's own address is odd"
    )


@pytest.mark.parametrize("recipe", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.usefixtures("folder", "quick")
def test_no_recipe_is_refused_for_anything_but_its_model(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(configuration, "checkpoint_bytes", lambda _: 1)
    lines = [str(one) for one in check_start(recipe, (), "train").problems()]
    assert [line for line in lines if "model.path" not in line] == []
    sft = read_config(recipe, (), ExperimentConfig, "sft")
    if sft.config is not None and sft.config.sft is not None:
        told = check_reading(sft, "sft")
        assert [
            str(one) for one in told.problems() if one.key not in ("model.path", "sft.data", "sft.stored.store")
        ] == []


def test_gpus_of_this_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mua.engine.cluster.visible_gpus", lambda: 8)
    lines = problems("megatron.data_parallel=16")
    assert "needs 16 processes with a GPU each, and this machine shows 8" in lines[0]
    assert "engine.count: engine.count 9" in problems("megatron.data_parallel=8", "engine.count=9")[0]
    assert problems("megatron.data_parallel=8", "engine.count=8") == []
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "the layout needs 8 processes" in problems("megatron.data_parallel=8")[0]


def test_disk_must_hold_a_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(Path("x.yaml"), (), ExperimentConfig).required()
    one = configuration.checkpoint_bytes(config)
    weights = Path("model/model.safetensors").stat().st_size
    assert one == pytest.approx(weights / 2 * 16, rel=0.01), (
        "the folder is in bfloat16; a checkpoint has 4 and 12 bytes"
    )
    usage = shutil.disk_usage("/")
    for free, state in ((one * 3, "ok"), (one * 2, "warning"), (one - 1, "failure")):
        monkeypatch.setattr(configuration.shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        states = {check.name: check.state for check in run_checks(Start(config, "train"))}
        assert states["disk"] == state


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ZeroDivisionError("a bug"), "the check of domain failed itself: ZeroDivisionError: a bug"),
        (ModuleNotFoundError(name="torch"), "the check of domain cannot be made here: torch is not installed"),
    ],
)
@pytest.mark.usefixtures("folder", "quick")
def test_a_check_that_fails_itself_refuses_no_run(error: Exception, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mua.environment.registry.domain_names", Mock(side_effect=error))
    checked = found()
    assert checked.problems() == []
    assert [told in one.text for one in checked.problems("warning")] == [True]


def test_packages_of_tools_are_missed_before_anything_is_built(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    override = "environment.mcp=[{name: a, command: python}]"
    assert problems(override) == []
    monkeypatch.setattr("mua.utils.errors.find_spec", lambda name: None if name == "mcp" else name)
    (problem,) = found(override).problems()
    assert (problem.key, "mcp is not installed" in problem.text) == ("environment.mcp", True)


def test_longest_contexts_are_those_of_sglang() -> None:
    for rope, longest in (
        ({}, 100),
        ({"rope_scaling": {"factor": 4.0, "rope_type": "yarn", "original_max_position_embeddings": 100}}, 100),
        ({"rope_scaling": {"factor": 4.0, "type": "linear"}}, 400),
        ({"rope_scaling": {"factor": 8.0, "rope_type": "llama3"}}, 100),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 100),
    ):
        assert configuration.longest_context({"max_position_embeddings": 100} | rope) == longest
    assert configuration.longest_context({}) is None


def test_serve_checks_its_folder(folder: Path) -> None:
    assert check_service(Path("model"), 1) == []
    assert "does not divide" in check_service(Path("model"), 7)[0].text
    assert "does not exist" in check_service(Path("/nope"), 1)[0].text
    result = mua("serve", "/nope", "address")
    assert (result.exit_code, "/nope does not exist" in result.stderr) == (2, True)


def test_other_ranks_leave_the_checks_to_the_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    calls: list[ExperimentConfig] = []
    stand_in = types.ModuleType("mua.trainer.rl")
    stand_in.train = lambda config, _: calls.append(config)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mua.trainer.rl", stand_in)
    monkeypatch.setattr("mua.trainer.rl", stand_in, raising=False)
    assert mua("train", "x.yaml", "environment.name=retial").exit_code == 0
    assert len(calls) == 1
