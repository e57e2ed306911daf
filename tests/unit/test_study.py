"""Study files and their report. Not covered: the runs themselves, which docs/benchmarks/learning.md shows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mua.config.load import load_config
from mua.utils.errors import ConfigError
from tests.tables import cases_of, refused, table
from tools import study as studies
from tools.study import SeedRuns, Study, load_study, over_seeds, report

cases = cases_of("study")
TABLE = table("study")

STUDIES = sorted(Path("configs/studies").glob("*.yaml"))
TWO_STAGES = TABLE["TWO_STAGES"]


def _written(folder: Path, content: Any) -> Path:
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_shipped_studies_load_and_so_do_their_configurations(path: Path) -> None:
    study = load_study(path)
    assert study.name == path.stem
    for stage in study.stages.values():
        if stage.kind == "rl":
            load_config(Path(study.config), ["model.path=/nowhere", *study.overrides, *stage.overrides])


@cases
def test_an_impossible_study_is_refused_with_the_file_and_the_key(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    path = _written(tmp_path, TWO_STAGES | change)
    with pytest.raises(ConfigError, match=told) as error:
        load_study(path)
    assert str(path) in str(error.value)


def test_the_interval_over_seeds_is_students() -> None:
    # Standard deviation 1/8; the 97.5 % quantile of Student's t with three degrees of freedom is 3.1824.
    assert over_seeds([0.2, 0.5, 0.35, 0.4]) == "0.362 (0.164 to 0.561)"
    assert over_seeds([0.25]) == "0.250"


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands that a study gives, none of which runs; it writes into ``tmp_path``."""
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(studies, "ROOT", tmp_path)
    monkeypatch.setattr(studies, "mua", lambda *arguments: commands.append(arguments))
    return commands


def with_stages(**stages: Any) -> Any:
    return TWO_STAGES["stages"] | stages


def test_a_finished_stage_is_not_repeated_and_a_changed_one_is_refused(ran: list[tuple[str, ...]]) -> None:
    study = Study.model_validate(TWO_STAGES)
    config = load_config(Path(study.config), [])
    data = studies.folder_of(study, 1, "start") / "conversations.jsonl"
    data.parent.mkdir(parents=True)
    data.write_text("{}\n")
    for _ in range(2):
        for stage in study.stages:
            SeedRuns(study, config, [], 1).finish(stage)
    assert [command[0] for command in ran] == ["sft", "eval", "train", "eval"]
    assert f"model.path={studies.folder_of(study, 1, 'start')}/run/hf" in ran[2]

    ran.clear()  # a stage with a seed of its own belongs to every seed: here all it needs is there
    shared = TWO_STAGES["stages"]["start"] | {"seed": 1}  # type: ignore[index]
    of_two = Study.model_validate(TWO_STAGES | {"name": "two", "stages": with_stages(start=shared)})
    data = studies.folder_of(of_two, 2, "start") / "conversations.jsonl"
    assert data.parent == studies.folder_of(of_two, 1, "start")
    data.parent.mkdir(parents=True)
    data.write_text("{}\n")
    for seed, stage in itertools.product((1, 2), of_two.stages):
        SeedRuns(of_two, config, [], seed).finish(stage)
    assert [command[0] for command in ran] == ["sft", "eval", "train", "eval", "train", "eval"]
    assert f"model.path={data.parent}/run/hf" in ran[4]
    assert "seed=2" in ran[4]

    start = TWO_STAGES["stages"]["start"] | {"with": ["trainer.steps=9"]}  # type: ignore[index]
    changed = Study.model_validate(TWO_STAGES | {"stages": with_stages(start=start)})
    with pytest.raises(ConfigError, match="another form"):  # even the stage after it, whose start it is
        SeedRuns(changed, config, [], 1).finish("rl")
    refused("another form", SeedRuns(study, config, ["rollout.max_turns=3"], 1).finish, "rl")


def test_the_first_stages_start_from_the_studys_model(ran: list[tuple[str, ...]]) -> None:
    stages = with_stages(more={"kind": "sft", "after": "start", "demonstrations": {"count": 4}})
    study = Study.model_validate(TWO_STAGES | {"stages": stages, "model": "tools/base"})
    config = load_config(Path(study.config), [])
    for stage in ("start", "more"):
        SeedRuns(study, config, [], 1).finish(stage)
    first = studies.folder_of(study, 1, "start")
    assert "model.path=tools/base" in ran[0]
    assert f"model.path={first}/run/hf" in ran[2]
    assert not (first / "init").exists()  # no tokenizer and no weights of its own
    other = Study.model_validate(TWO_STAGES | {"stages": stages, "model": "tools/other"})
    refused("another form", SeedRuns(other, config, [], 1).finish, "start")


def test_demonstrations_may_be_about_other_domains(ran: list[tuple[str, ...]]) -> None:
    taught = {"count": 4, "config": "configs/tiny-gyms.yaml"}
    stages = with_stages(start={"kind": "sft", "demonstrations": taught})
    study = Study.model_validate(TWO_STAGES | {"config": "configs/demo.yaml", "stages": stages, "vocabulary": 320})
    SeedRuns(study, load_config(Path(study.config), []), [], 1).finish("start")
    told = (studies.folder_of(study, 1, "start") / "conversations.jsonl").read_text().splitlines()
    assert len(told) == 4
    assert all("interact" in line for line in told)
    (mix,) = [argument for argument in ran[0] if argument.startswith("environment.mix=")]
    assert "gyms/intention" in mix
    assert ran[1][:2] == ("eval", "configs/demo.yaml")


@pytest.mark.usefixtures("ran")
def test_demonstrations_are_held_with_the_configurations_users(tmp_path: Path) -> None:
    shown: dict[str, list[str]] = {}
    for persona in ("brief", "talkative"):
        (tmp_path / f"{persona}.yaml").write_text(
            f"extends: {Path('configs/tiny-retail.yaml').resolve()}\nuser: {{personas: [{persona}]}}\n"
        )
        written = TWO_STAGES | {"name": persona, "config": str(tmp_path / f"{persona}.yaml"), "model": "tools/base"}
        study = Study.model_validate(written)
        SeedRuns(study, load_config(Path(study.config), []), [], 1).finish("start")
        lines = (studies.folder_of(study, 1, "start") / "conversations.jsonl").read_text().splitlines()
        shown[persona] = [json.loads(line)["messages"][1]["content"] for line in lines]
    brief, talkative = ([len(opening) for opening in shown[persona]] for persona in ("brief", "talkative"))
    assert max(brief) < 100  # "I have moved, please change the address in my profile."
    assert sum(talkative) > 2 * sum(brief)


@pytest.mark.usefixtures("ran")
def test_the_report_pairs_tasks_and_gives_intervals_over_seeds(tmp_path: Path) -> None:
    again = {"kind": "rl", "after": "start"}
    study = Study.model_validate(
        TWO_STAGES | {"stages": with_stages(again=again), "compare": [["start", "rl"], ["rl", "again"]]}  # type: ignore[operator]
    )
    for seed in (1, 2):
        for stage, successes, trained in (("start", seed, 0), ("rl", 3, 0.5 * seed), ("again", 3, 0.25)):
            folder = studies.folder_of(study, seed, stage)
            (folder / "evaluation").mkdir(parents=True)
            (folder / "evaluation" / "evaluation.json").write_text(json.dumps(_result(successes)))
            (folder / "run").mkdir()
            lines = [{"step": 0, "reward/mean": 0.25}, {"step": 1, "reward/mean": trained}, {"step": 2}]
            (folder / "run" / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    report(study, [1, 2])
    page = (tmp_path / "pair" / "report.md").read_text()
    gains = [0.5, 0.25]  # of four episodes three against one, and against two
    assert f"| rl less start | {over_seeds(gains)} | {over_seeds(gains)} |  | " in page
    assert f"| again less rl | {over_seeds([0, 0])} | {over_seeds([0, 0])} | {over_seeds([-0.25, -0.75])} |" in page
    assert f"| rl | {over_seeds([0.75, 0.75])} | {over_seeds([0.75, 0.75])} | {over_seeds([0.5, 1.0])} |" in page
    assert (tmp_path / "pair" / "rl.png").stat().st_size > 1000


def _result(successes: int) -> dict[str, Any]:
    share = {"mean": successes / 4, "low": 0.0, "high": 1.0}
    tasks = [
        {"domain": "d", "task": str(n), "digest": "x", "episodes": 4, "successes": successes, "reward": successes / 4}
        for n in range(5)
    ]
    return {"name": "x", "success": share, "domains": {"d": {"success": share}}, "per_task": tasks}
