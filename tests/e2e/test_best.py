"""What a run says of its policies, on a real engine: best by validation, a report on test, and mua eval that agrees.

One deterministic run of a policy that is far too small, whose numbers mean nothing: it is their agreement that is
tested. How the best is chosen, kept and found again after a kill is in tests/unit/test_trainer_best.py.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from e2e_support import DETERMINISTIC, evaluations_of, finish, metrics_of, mua, running

from mua.store.traces import read_traces

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

JUDGED = ("evaluation.tasks=6", "evaluation.samples=1", *DETERMINISTIC)


def test_mua_eval_of_the_best_checkpoint_repeats_what_training_said_of_it(recipe: Path, tmp_path: Path) -> None:
    steps = ["trainer.steps=3", "trainer.evaluate_every=1", "trainer.keep=1", "trainer.export=best"]
    said = mua("train", recipe, *steps, "evaluation.report_split=test", *JUDGED, cwd=tmp_path)
    out = tmp_path / "out"
    best = (out / "checkpoints" / "best").readlink().name
    step = int(best.removeprefix("step_"))
    curves = evaluations_of(out)
    found = {at: line["eval/validation_success"] for at, line in curves.items() if at}
    assert step == max(found, key=lambda at: (found[at], -at))
    assert {at for at, line in curves.items() if "eval/test_success" in line} == {0, step}
    assert {p.name for p in (out / "checkpoints").iterdir()} == {"best", best, "step_00000003"}
    report = json.loads((out / "report.json").read_text())
    assert (report["split"], report["first"]["step"], report["final"]["step"]) == ("test", 0, step)
    assert f"report on test, final policy (step {step})" in said

    weights = f"model.path={out}/checkpoints/best"
    for split in ("validation", "test"):
        folder = tmp_path / split
        mua("eval", recipe, weights, f"output={folder}", f"evaluation.split={split}", *JUDGED, cwd=tmp_path)
        result = json.loads((folder / "evaluation.json").read_text())
        said_then = curves[step] if split == "validation" else report["final"]
        numbers = [said_then[f"eval/{split}_success{end}"] for end in ("", "_low", "_high")]
        assert numbers == [result["success"][name] for name in ("mean", "low", "high")]
        in_training = read_traces(out / "evaluations" / split / f"step_{step:06d}.jsonl")
        played = [{(t.task_id, t.sample): (t.messages, t.outcome) for t in read} for read in
                  (in_training, read_traces(folder / "traces"))]  # fmt: skip
        assert played[0] == played[1]
        assert len(played[0]) == 6

    # The folder that the run hands over has the same weights, and a matrix takes either.
    recorded = tmp_path / "test" / "traces" / "step_000000.jsonl"
    (tmp_path / "matrix.yaml").write_text(
        f"policies: {{handed: {out}/hf, best: {out}/checkpoints/best}}\n"
        f"users: {{scripted: {{}}, recorded: {{user.kind: replay, user.replay: {recorded}}}}}\n"
    )
    split = "evaluation.split=test"
    mua("eval", "--matrix", "matrix.yaml", recipe, f"output={tmp_path}/matrix", split, *JUDGED, cwd=tmp_path)
    matrix = json.loads((tmp_path / "matrix" / "matrix.json").read_text())
    for policy in ("handed", "best"):
        for users in ("scripted", "recorded"):
            assert matrix["cells"][policy][users]["success"] == result["success"], (policy, users)


@pytest.mark.parametrize("slow", [True, False])
def test_a_run_whose_user_is_too_slow_or_dead_ends_with_the_reason(recipe: Path, tmp_path: Path, slow: bool) -> None:
    user = ["user.kind=llm", "user.llm.model=nobody", "user.llm.max_retries=0", "rollout.max_retries=0"]
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        if slow:
            held.listen(256)  # the system takes connections, and nobody answers on them
        url = f"http://127.0.0.1:{held.getsockname()[1]}/v1"
        asked = [*user, f"user.llm.base_url={url}", "user.llm.request_seconds=1.0"]
        with running("train", recipe, *asked, "trainer.steps=4", "trainer.save_every=1", cwd=tmp_path) as process:
            status, out, err = finish(process, tmp_path)
    assert status == 75
    (line,) = [line for line in err.splitlines() if line.startswith("mua: ")]
    assert "step 1: not one of 6 episodes could be scored; most ended as user_error" in line
    assert "(2 such steps in a row, trainer.max_unscored_steps); check whoever plays the user" in line
    assert "reward" not in out + err
    assert "success" not in out + err
    (step,) = metrics_of(tmp_path / "out")
    assert not [name for name in step if name.startswith("reward") or name == "success"]
    assert not (tmp_path / "out" / "hf").exists()
    assert not list((tmp_path / "out").glob("checkpoints/*"))
