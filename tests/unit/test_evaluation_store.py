"""The episodes of an evaluation on disk, and the digests that decide what may be used again.

Not covered: power failures, which may lose what the operating system had not written yet.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mua.trainer.evaluation.store import EpisodeStore, Key, folder_digest, policy_digest, policy_of, setting_of
from mua.types import Json, Outcome, Segment, Trajectory
from mua.utils.errors import ModelError, MuaError
from tests.rollout_fixtures import experiment

KEY = Key("desk", "t1", "abc", 0)


def store(path: Path, policy: str = "p", setting: str = "s") -> EpisodeStore:
    return EpisodeStore(path, policy=policy, setting=setting)


def trajectory(outcome: Outcome = Outcome.USER_STOP, reward: float = 1.0) -> Trajectory:
    n = 3
    segment = Segment(
        ids=np.arange(n, dtype=np.int32),
        provenance=np.array([0, 1, 4], np.uint8),
        logprobs=np.array([0, 0, -0.1], np.float32),
        version=np.array([-1, -1, 0], np.int32),
        turn=np.zeros(n, np.int32),
        experts=np.zeros((n, 4), np.uint8),
    )
    messages = [{"role": "assistant", "content": "\ud800 naïve\n"}]
    return Trajectory("t1", 7, 0, [segment], [reward], reward, True, outcome, messages, {"tool_calls": 1.0})


def test_what_is_added_is_there_again(tmp_path: Path) -> None:
    path = tmp_path / "out" / "episodes.jsonl"
    with store(path) as first:
        assert KEY not in first
        first.add(KEY, trajectory())
        first.add_roles({"user/llm/requests": 3.0, "user/llm/latency_p50_seconds": 1.0})
    with store(path) as again:
        assert KEY in again
        found = again.get(KEY)
        assert found is not None
        assert (found.messages, found.metrics) == (trajectory().messages, {"tool_calls": 1.0})
        np.testing.assert_array_equal(found.segments[0].ids, [0, 1, 2])
        assert found.segments[0].experts is None
        again.add_roles({"user/llm/requests": 2.0, "user/llm/latency_p50_seconds": 2.0})
        assert again.roles == {"user/llm/requests": 5.0, "user/llm/latency_p50_seconds": 2.0}


@pytest.mark.parametrize("other", [{"policy": "q"}, {"setting": "t"}])
def test_another_policy_or_setting_sees_nothing_of_it(
    tmp_path: Path, other: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "episodes.jsonl"
    with store(path) as first:
        first.add(KEY, trajectory())
        first.add_roles({"user/llm/requests": 3.0})
    with store(path, **other) as changed:
        assert (KEY in changed, changed.strange, changed.roles) == (False, 2, {})
        assert f"{path}: 2 lines of another policy or setting count nowhere" in caplog.text
        changed.add(KEY, trajectory(reward=0.5))
    with store(path) as again:
        assert again.get(KEY).reward == 1.0  # type: ignore[union-attr]


def test_an_unscored_episode_is_kept_until_a_scored_one_comes(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    with store(path) as first:
        first.add(KEY, trajectory(Outcome.ENGINE_ERROR))
        assert KEY not in first
        assert first.get(KEY).outcome is Outcome.ENGINE_ERROR  # type: ignore[union-attr]
        first.add(KEY, trajectory())
        first.add(KEY, trajectory(Outcome.TIMEOUT))
    with store(path) as again:
        assert KEY in again


def test_an_episode_that_only_lacks_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    with store(path) as first:
        first.add(KEY, trajectory())
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with store(path) as again:
        assert KEY in again
        again.add(KEY._replace(sample=1), trajectory())
    assert path.read_bytes().startswith(whole)
    assert path.read_bytes().count(b"\n") == 2


def test_the_half_line_of_a_killed_run_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    with store(path) as first:
        first.add(KEY, trajectory())
        first.add(KEY._replace(sample=1), trajectory())
    whole = path.read_bytes()
    for cut in (2, 40, 200):
        path.write_bytes(whole[:-cut])
        with store(path) as again:
            assert (KEY in again, KEY._replace(sample=1) in again) == (True, False)
            again.add(KEY._replace(sample=2), trajectory())
        with store(path) as last:
            assert KEY._replace(sample=2) in last
    path.write_bytes(b"x" * 200_000)
    with store(path) as empty:
        assert KEY not in empty
    assert path.read_bytes() == b""


@pytest.mark.parametrize("line", ["{}", "nonsense", "[1]", '{"policy": "p", "setting": "s", "domain": "d"}'])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(MuaError, match=r"episodes\.jsonl:1: not an episode"), store(path):
        pass


def test_two_runs_do_not_write_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    with store(path), pytest.raises(MuaError, match="another mua eval writes here"), store(path):
        pass
    with store(path):
        pass


def digests(**sections: Json) -> str:
    return json.dumps(setting_of(experiment(**sections)), sort_keys=True)


def test_only_what_changes_results_changes_the_setting() -> None:
    base = digests()
    llm = {"kind": "llm", "llm": {"base_url": "http://a/v1", "model": "m"}}
    for same in (
        {"rollout": {"concurrency": 3, "max_retries": 9, "generate_seconds": 5.0}},
        {"environment": {"max_instances": 3, "isolation": "thread", "difficulties": ["easy"]}},
        {"evaluation": {"tasks": 3, "samples": 2, "outputs": []}},
        {"trainer": {"steps": 9}},
    ):
        assert digests(**same) == base, same
    for other in (
        {"rollout": {"max_turns": 3}},
        {"environment": {"prompt": "full"}},
        {"environment": {"reward": "partial"}},
        {"evaluation": {"temperature": 0.5}},
        {"user": llm},
        {"agent": {"function": "tests.odd_agents:good"}},
        {"context": {"stop_on_repetition": 3}},
    ):
        assert digests(**other) != base, other
    agent: Json = {"command": ["agent"]}
    assert digests(agent={**agent, "port": 8000, "concurrency": 2}) == digests(agent=agent)
    assert digests(agent={**agent, "variables": {"DESK": "1"}}) != digests(agent=agent)
    faster = {**llm, "llm": {**llm["llm"], "concurrency": 2, "api_key": "k", "max_retries": 1, "request_seconds": 2.0}}
    assert digests(user=faster) == digests(user=llm)
    assert digests(user={**llm, "llm": {**llm["llm"], "temperature": 0.2}}) != digests(user=llm)


def test_a_policy_is_its_files_wherever_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    weights = rng.bytes(5 << 20)
    (tmp_path / "a" / "model.safetensors").write_bytes(weights)
    (tmp_path / "b" / "model.safetensors").write_bytes(weights)
    one, same = (policy_of(experiment(model={"path": str(tmp_path / name)})) for name in ("a", "b"))
    assert one["path"] != same["path"]
    assert policy_digest(one) == policy_digest(same)
    (tmp_path / "b" / "model.safetensors").write_bytes(rng.bytes(5 << 20))
    assert folder_digest(tmp_path / "b") != folder_digest(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text('{"x": 1}')
    assert folder_digest(tmp_path / "a") != one["weights"]
    with pytest.raises(ModelError, match=r"model\.path"):
        folder_digest(tmp_path / "none")


def test_an_endpoints_identity_holds_no_secret() -> None:
    endpoint = {"base_url": "http://me:pass@host/v1", "model": "m", "api_key": "sk-secret"}
    told = policy_of(experiment(evaluation={"policy": {"kind": "endpoint", "endpoint": endpoint}}))
    assert (told["base_url"], told["model"]) == ("http://**********@host/v1", "m")
    assert "secret" not in json.dumps(told)
    assert "pass" not in json.dumps(told)
