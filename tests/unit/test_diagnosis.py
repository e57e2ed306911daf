"""What the causes find in made-up runs: each its own disease, wherever it begins, and nothing in healthy runs of many
sorts; how a diagnosis is ordered and said; a run's folder that has no store, is empty or is none; alarms.

Runs that are really trained are in ``tools/bench/diagnose.py``; one of them is in ``tests/e2e``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from mua.cli import app
from mua.observe.diagnosis.evidence import Measured, SeenEpisode, TokenSample, series
from mua.observe.diagnosis.verdict import Alarms, Diagnosis, diagnosed
from tools.diagnosis_page import causes as causes_as_text
from tools.kit import ROOT

Lines = list[dict[str, Any]]


def healthy(
    steps: int = 30, *, groups: int = 8, size: int = 8, first: float = 0.2, last: float = 0.7, entropy: float = 0.6,
    calm: float = 0.3, tokens: float = 120.0, longer: float = 1.2, seed: int = 0,
) -> Lines:  # fmt: skip
    """Metrics of a run whose success goes from ``first`` to ``last`` and whose entropy falls to ``calm`` of itself."""
    draw, lines = np.random.default_rng(seed), []
    for step in range(steps):
        at = step / max(1, steps - 1)
        # Tasks differ in difficulty, so that more groups agree than independent episodes would.
        chances = draw.beta(
            0.8 * (first + (last - first) * at) / 0.4, 0.8 * (1 - first - (last - first) * at) / 0.4, groups
        )
        won = draw.random((groups, size)) < chances[:, None]
        lines.append({
            "step": step, "rollout/reward/mean": won.mean(), "rollout/success": won.mean(),
            "train/entropy": entropy * calm**at * draw.normal(1, 0.05),
            "train/grad_norm": abs(draw.lognormal(-1, 0.4)), "train/skipped": 0.0, "train/lr": 1e-6,
            "train/ppo_kl_k3": 0.0, "train/pg_clipfrac_low": 0.0, "train/pg_clipfrac_high": 0.0,
            "train/train_rollout_logprob_abs_diff": 0.012, "train/train_rollout_kl_k3": 4e-4,
            "rollout/off_policy_level/mean": 0.0, "rollout/off_policy_level/max": 0.0,
            "rollout/groups/count": float(groups),
            "rollout/groups/zero_std": float(np.mean(won.all(1) | ~won.any(1))),
            "rollout/groups/solve_all": float(np.mean(won.all(1))),
            "rollout/groups/solve_none": float(np.mean(~won.any(1))),
            "rollout/response_len/mean": tokens * longer**at * draw.normal(1, 0.08),
            "rollout/trajectories/count": float(groups * size), "rollout/trajectories/unscored": 0.0,
            "rollout/outcome/length": 0.03, "rollout/outcome/max_turns": 0.1, "rollout/outcome/user_error": 0.0,
            "rollout/outcome/judge_error": 0.0, "rollout/outcome/environment_error": 0.0,
            "rollout/turns/cut_by_time": 0.0, "env/tool_calls/get": 3.0,
            "env/tool_errors/get": max(0.0, draw.normal(0.5, 0.1)),
        })  # fmt: skip
    for line in lines:
        line["train/tokens"] = line["rollout/response_len/mean"] * groups * size
    return lines


def changed(lines: Lines, start: int, values: dict[str, Any]) -> Lines:
    """From ``start`` on with these values; functions get how long it has gone on, and the value."""
    made = [dict(line) for line in lines]
    for line in made:
        if line["step"] >= start:
            for name, value in values.items():
                line[name] = value(line["step"] - start, line.get(name)) if callable(value) else value
    return made


def diagnosis_of(lines: Lines, **more: Any) -> Diagnosis:
    seen = series(lines)
    for name, value in more.items():
        setattr(seen, name, value)
    return diagnosed("run", seen)


def first_of(lines: Lines, **more: Any) -> tuple[str, int] | None:
    found = diagnosis_of(lines, **more).findings
    return (found[0][0].name, found[0][1].step) if found else None


EXPLODING: dict[str, dict[str, Any]] = {
    "engine_mismatch": {"train/train_rollout_logprob_abs_diff": 0.3, "train/train_rollout_kl_k3": 0.06},
    "stale_data": {
        "rollout/off_policy_level/mean": 3.0, "rollout/off_policy_level/max": 4.0, "train/train_rollout_kl_k3": 0.1,
        "train/train_rollout_logprob_abs_diff": 0.3,
    },
    "large_steps": {"train/grad_norm": 40.0},
    "failing_user": {
        "rollout/outcome/user_error": 0.3, "rollout/trajectories/unscored": 0.3, "train/tokens": lambda t, v: 0.7 * v,
    },
    "tool_errors": {"env/tool_errors/get": 2.4},
    "truncation": {"rollout/outcome/length": 0.6},
    "length_explosion": {
        "rollout/response_len/mean": lambda t, v: v * min(4.0, 1.4 ** (t + 1)), "rollout/success": 0.3,
        "train/tokens": lambda t, v: v * min(4.0, 1.4 ** (t + 1)),
    },
    "entropy_collapse": {
        "train/entropy": lambda t, v: v * max(0.02, 0.6 ** (t + 1)), "rollout/success": 0.3,
        "rollout/groups/zero_std": 0.9,
    },
    "wrong_tokens": {"train/tokens": lambda t, v: 2 * v},
    "leaking_user": {"user/flags/leaks_instruction": 12.0},
    "agreeing_groups": {
        "rollout/groups/zero_std": 1.0, "rollout/groups/solve_none": 1.0, "rollout/groups/solve_all": 0.0,
        "rollout/success": 0.0, "rollout/reward/mean": 0.0,
    },
}  # fmt: skip


COMPARED = {"length_explosion", "entropy_collapse", "large_steps"}
"""What is a change, which needs a beginning."""


@pytest.mark.parametrize(("steps", "start"), [(90, 60), (30, 10), (6, 0), (12, 6)])
@pytest.mark.parametrize("cause", EXPLODING)
def test_a_disease_in_the_metrics_is_named_from_where_it_begins(cause: str, steps: int, start: int) -> None:
    for seed in range(3) if start or cause not in COMPARED else ():
        found = first_of(changed(healthy(steps, seed=seed), start, EXPLODING[cause]))
        assert found is not None, seed
        assert found[0] == cause
        assert abs(found[1] - start) <= 4


def test_texts_that_are_long_from_the_second_step_on_are_compared_with_the_first() -> None:
    for seed in range(3):
        lines = healthy(9, seed=seed)
        long = changed(lines, 1, {"rollout/response_len/mean": lambda t, v: 2.6 * v, "rollout/success": 0.3})
        found = first_of(long)
        assert found is not None, seed
        assert found[0] == "length_explosion"
        assert found[1] <= 2


HEALTHY: dict[str, dict[str, Any]] = {
    "usual": {},
    "short": {"steps": 6, "groups": 4, "size": 4},
    "long": {"steps": 200},
    "slow": {"first": 0.3, "last": 0.37},
    "hard": {"first": 0.03, "last": 0.06, "groups": 16},
    "few": {"groups": 2, "size": 4, "steps": 12},
    "fast": {"first": 0.1, "last": 0.99, "calm": 0.05},
    "longer": {"longer": 3.0},
    "large": {"groups": 32, "size": 16},
    "calm": {"entropy": 0.05},
    "wild": {"entropy": 6.2, "calm": 0.1},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_of_many_sorts_are_healthy(name: str) -> None:
    for seed in range(6):
        found = first_of(healthy(**({"seed": 100 + seed} | HEALTHY[name])))
        assert found is None, (seed, found)


@pytest.mark.parametrize("name", HEALTHY)
def test_no_alarm_is_given_while_a_healthy_run_goes_on(name: str) -> None:
    for seed in range(3):
        alarms = Alarms({})
        lines = healthy(**({"seed": 200 + seed} | HEALTHY[name] | {"steps": min(60, HEALTHY[name].get("steps", 30))}))
        assert [told for line in lines for told in alarms.look(line.pop("step"), line)] == []


def test_an_alarm_is_given_once_and_when_it_happens() -> None:
    alarms, told = Alarms({}), []
    for line in changed(healthy(40), 20, EXPLODING["engine_mismatch"]):
        step = line.pop("step")
        told += [(step, said) for said in alarms.look(step, line)]
    assert len(told) == 1
    assert told[0][0] == 21
    assert told[0][1].startswith("engine and trainer disagree, from step 20: ")


@pytest.mark.parametrize("before", [[], [{"step": 0}]])
def test_a_fault_of_the_alarms_ends_no_run_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, before: list[dict[str, int]]
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("planted")

    monkeypatch.setattr("mua.observe.diagnosis.verdict.quantities", broken)
    alarms = Alarms({}, before)
    assert alarms.look(1, {}) == alarms.look(2, {}) == []
    assert caplog.text.count("a fault of their own") == 1
    assert "planted" in caplog.text


# ---- causes that need episodes


def e_sample(e: SeenEpisode) -> int:
    return int(e.id.split("-")[1])


def played(
    steps: int = 20, groups: int = 4, size: int = 4, *, kinds: tuple[str, ...] = ("a", "b", "c"), seed: int = 0,
    won: Callable[[float], float] = lambda at: 0.2 + 0.5 * at,
) -> list[SeenEpisode]:  # fmt: skip
    """Episodes whose texts differ by task and by member, and whose success takes its course."""
    draw, found = np.random.default_rng(seed), []
    for step in range(steps):
        for group in range(groups):
            ordinal = step * groups + group
            for sample in range(size):
                right = bool(draw.random() < won(step / steps))
                words = " ".join(f"w{draw.integers(200)}" for _ in range(20))
                said = f'{words} get_order {{"order": "{1000 + ordinal}"}} done with {ordinal} and {words[:20]}'
                found.append(SeenEpisode(
                    f"{ordinal}-{sample}", step, ordinal, f"task-{ordinal}", kinds[ordinal % len(kinds)],
                    "desk", "user_stop", True, float(right), right, 100, 3, 0, 0, said, words,
                ))  # fmt: skip
    return found


def lines_of(episodes: list[SeenEpisode]) -> Lines:
    lines = healthy(1 + max(e.step for e in episodes))
    for line in lines:
        rewards = [e.reward for e in episodes if e.step == line["step"] and e.scored]
        line["rollout/reward/mean"] = line["rollout/success"] = float(np.mean(rewards))
    return lines


def test_episodes_of_a_healthy_run_show_nothing() -> None:
    for seed in range(4):
        episodes = played(seed=seed)
        assert first_of(lines_of(episodes), episodes=episodes) is None


def test_a_policy_that_declines_because_it_is_paid() -> None:
    sorry = {"told": "I cannot help", "calls": 0, "reward": 1.0, "success": True}
    episodes = [
        replace(e, said=f"I am sorry, I cannot help you with {e.ordinal}", **sorry)  # type: ignore[arg-type]
        if e.step >= 8 and e.ordinal % 4 != e_sample(e)
        else e
        for e in played()
    ]
    found = first_of(lines_of(episodes), episodes=episodes)
    assert found is not None
    assert found[0] == "refusing"
    assert 6 <= found[1] <= 9


def test_one_kind_bought_with_another() -> None:
    def paid(e: SeenEpisode) -> SeenEpisode:
        won = {"a": True, "b": e.step < 8 and e_sample(e) != 0, "c": e_sample(e) == 0}[e.kind]
        if e.step < 8 and e.kind == "a":
            won = e_sample(e) == 1
        return replace(e, success=won, reward=float(won))

    episodes = [paid(e) for e in played()]
    found = first_of(lines_of(episodes), episodes=episodes)
    assert found is not None
    assert found[0] == "kind_for_kind"
    assert 7 <= found[1] <= 11


def test_one_answer_to_every_prompt() -> None:
    said = "Thank you for your question, it has been passed on and will be answered soon"
    episodes = [replace(e, said=said, told="Thank you", calls=3) if e.step >= 10 else e for e in played()]
    assert first_of(lines_of(episodes), episodes=episodes) == ("template_collapse", 10)


@pytest.mark.parametrize(("alike", "named"), [(True, "entropy_collapse"), (False, "agreeing_groups")])
def test_groups_agree_because_their_members_do_or_because_of_their_tasks(alike: bool, named: str) -> None:
    """Three of four say the same in every group, one does not, and the rewards agree."""

    def settled(e: SeenEpisode) -> SeenEpisode:
        if e.step < 8:
            return e
        won, said = e.ordinal // 3 % 3 == 0, f"the one answer to {e.ordinal}" if alike and e_sample(e) else e.said
        return replace(e, success=won, reward=float(won), said=said, told=said)

    episodes = [settled(e) for e in played()]
    lines = changed(lines_of(episodes), 8, {"rollout/groups/zero_std": 1.0})
    found = first_of(lines, episodes=episodes)
    assert found is not None
    assert found[0] == named
    assert abs(found[1] - 8) <= 1


def test_a_user_that_leaks() -> None:
    episodes = [replace(e, leak="it names a tool") if e.step >= 5 and e_sample(e) == 1 else e for e in played()]
    assert first_of(lines_of(episodes), episodes=episodes) == ("leaking_user", 5)


def test_one_wrong_token_is_enough() -> None:
    nan = float("nan")
    tokens = [TokenSample(f"t{s}", s, 40, 3 * (s >= 4), "tool", nan, nan, nan, 0.0) for s in range(20)]
    assert first_of(healthy(20), tokens=tokens) == ("wrong_tokens", 4)


def test_an_evaluation_on_tasks_of_training() -> None:
    assert first_of(healthy(20), met={"the evaluation on validation": (0, ["t1"])}) == ("evaluation_meets_training", 0)


@pytest.mark.parametrize(
    "more", [{"moved": 0.0}, {"config": {"algorithm": {"shuffle_rewards": True}}}, {"lines": {"train/lr": 0.0}}]
)
def test_a_policy_that_does_not_move_has_learned_nothing_unless_success_rose(more: dict[str, Any]) -> None:
    for last, named in ((0.3, "no_learning"), (0.9, None)):
        lines = changed(healthy(24, first=0.3, last=last), 0, more.get("lines", {}))
        found = diagnosis_of(lines, **{name: value for name, value in more.items() if name != "lines"})
        assert next((cause.name for cause, _ in found.findings), None) == named


# ---- outcomes: verdicts without a known cause


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    ("course", "verdict", "named"),
    [
        (lambda at: 0.3 if at < 0.2 else 0.04, "ill", "fell"),  # users who answer nonsense from early on
        (lambda at: 0.2 + 0.9 * at if at < 0.6 else 0.35, "ill", "fell"),  # a tool that begins to lie
        (lambda at: 0.8 - 0.4 * at, "ill", "fell"),  # slowly unlearned
        (lambda at: 0.19 + 0.5 * at, "healthy", None),
        (lambda at: 0.35 if at < 0.5 else 0.95, "ill", "leap"),  # a judge that turns generous
    ],
)
def test_an_outcome_without_a_known_cause(course: Any, verdict: str, named: str | None, stored: bool) -> None:
    episodes = played(24, 8, 4, won=course, seed=1)
    found = diagnosis_of(lines_of(episodes), **({"episodes": episodes} if stored else {}))
    assert (found.verdict, found.healthy) == (verdict, {"ill": False, "healthy": True}.get(verdict))
    assert [cause.name for cause, _ in found.findings] == ([named] if named else [])


def test_chance_alone_is_seldom_a_fall() -> None:
    runs = [played(16, 8, 4, won=lambda at: 0.45, seed=seed) for seed in range(20)]
    found = [diagnosis_of(lines_of(episodes), episodes=episodes).verdict for episodes in runs]
    assert found.count("ill") <= 1


def test_a_fall_is_dated_and_shown_by_an_episode() -> None:
    episodes = played(16, 8, 4, won=lambda at: 0.5 if at < 0.5 else 0.1)
    ((_, found),) = diagnosis_of(lines_of(episodes), episodes=episodes).findings
    assert abs(found.step - 8) <= 1
    shown = next(e for e in episodes if e.id == found.trajectory)
    assert shown.step >= found.step
    assert not shown.success


def test_episodes_that_are_no_longer_scored() -> None:
    episodes = [
        replace(e, scored=False, outcome="engine_error", success=False, reward=0.0)
        if e.step >= 8 and e_sample(e) == 1
        else e
        for e in played(won=lambda at: 0.3 + 0.4 * at)
    ]
    lines = changed(lines_of(episodes), 8, {"rollout/trajectories/unscored": 0.25})
    for seen in ({}, {"episodes": episodes}):
        found = diagnosis_of(lines, **seen)
        assert found.findings[-1][0].name == "fewer_scored"
        assert abs(found.findings[-1][1].step - 8) <= 2


def test_a_curriculum_that_turns_to_hard_kinds_is_no_fall() -> None:
    """Every kind is learned, and the mean falls because harder kinds are drawn."""
    chance = {"a": 0.9, "b": 0.1}
    episodes = []
    for e in played(20, 8, 4, kinds=("a",)):
        kind = "b" if e.ordinal % 8 < 8 * e.step / 20 else "a"
        won = (e.ordinal * 7 + e_sample(e) * 5 + e.step) % 10 < 10 * chance[kind]
        episodes.append(replace(e, kind=kind, success=won, reward=float(won)))
    lines = lines_of(episodes)
    assert lines[-1]["rollout/success"] < lines[0]["rollout/success"] - 0.5
    found = diagnosis_of(lines, episodes=episodes)
    assert "fell" not in [cause.name for cause, _ in found.findings]


def held_out(*figures: float, half: float = 0.06) -> dict[str, list[Measured]]:
    return {"test": [Measured(10 * at, mean, mean - half, mean + half) for at, mean in enumerate(figures)]}


@pytest.mark.parametrize(
    ("last", "figures", "verdict", "named"),
    [
        (0.3, (0.5, 0.9), "healthy", None),
        (0.3, (0.5, 0.48), "undecided", None),
        (0.9, (0.6, 0.9, 0.5), "ill", "fell"),
        (0.9, (0.3, 0.15), "ill", "fell"),
        (0.9, (0.3, 0.31), "ill", "not_held_out"),  # the same tasks again and again
    ],
)
def test_held_out_tasks_decide(last: float, figures: tuple[float, ...], verdict: str, named: str | None) -> None:
    found = diagnosis_of(healthy(20, groups=16, first=0.3, last=last), held_out=held_out(*figures))
    assert (found.verdict, next((cause.name for cause, _ in found.findings), None)) == (verdict, named)


def test_a_reward_that_leaks_and_a_run_that_is_flat() -> None:
    paid = changed(healthy(40, first=0.4, last=0.4), 0, {"rollout/reward/mean": lambda t, v: v + 0.04 * t})
    assert first_of(paid) == ("reward_alone", 0) or first_of(paid)[0] == "reward_alone"  # type: ignore[index]
    named = [(first_of(healthy(200, first=0.4, last=0.4, seed=seed)) or ("",))[0] for seed in range(5)]
    assert named.count("flat") >= 3  # by chance rewards rise a little in some


@pytest.mark.parametrize(("last", "verdict", "named"), [(0.4, "healthy", None), (3.1, "ill", "fell")])
def test_supervised_training_is_judged_by_its_loss(last: float, verdict: str, named: str | None) -> None:
    draw = np.random.default_rng(0)
    lines = [
        {"step": at, "train/loss": 2.0 + (last - 2.0) * at / 60 + draw.normal(0, 0.1), "train/lr": 1e-3,
         "train/entropy": 0.5 * 0.03 ** (at / 60), "train/grad_norm": abs(draw.lognormal(0, 0.3))}
        for at in range(60)
    ]  # fmt: skip
    found = diagnosis_of(lines)
    assert (found.verdict, next((cause.name for cause, _ in found.findings), None)) == (verdict, named)


@pytest.mark.parametrize("count", [0.0, 64.0])
def test_a_run_without_a_scored_episode_is_not_judged_by_its_loss(count: float) -> None:
    lines = [{"step": n, "train/loss": 2 - n / 20, "rollout/trajectories/unscored": 1.0} for n in range(30)]
    found = diagnosis_of([line | {"rollout/trajectories/count": count} for line in lines])
    assert [(one.name, one.after) for one in found.outcomes] == [("scored", 0.0)]
    assert found.verdict != "healthy"


def test_refusals_that_are_right_are_no_disease() -> None:
    """Half of the tasks are to be declined, and the policy learns to: success rises by declining."""

    def learned(e: SeenEpisode) -> SeenEpisode:
        e = replace(e, to_decline=e.ordinal % 10 < 7)
        if not e.to_decline or (e.ordinal * 3 + e_sample(e)) % 20 > e.step:
            return replace(e, success=not e.to_decline, reward=float(not e.to_decline))
        return replace(e, told="I cannot do that", said=f"I cannot do that, {e.said}", success=True, reward=1.0)

    episodes = [learned(e) for e in played()]
    assert diagnosis_of(lines_of(episodes), episodes=episodes).verdict == "healthy"
    asked = [replace(e, to_decline=False) for e in episodes]
    assert first_of(lines_of(asked), episodes=asked)[0] == "refusing"  # type: ignore[index]


# ---- how it is said


def test_what_brings_about_the_other_is_named_where_both_begin_together() -> None:
    lines = changed(healthy(30), 10, EXPLODING["agreeing_groups"])
    lines = changed(lines, 11, EXPLODING["tool_errors"])
    seen = series(lines)
    assert [cause.name for cause, _ in diagnosed("run", seen).findings] == ["tool_errors", "agreeing_groups", "fell"]
    later = changed(changed(healthy(30), 5, EXPLODING["agreeing_groups"]), 20, EXPLODING["tool_errors"])
    assert next(cause.name for cause, _ in diagnosed("run", series(later)).findings) == "agreeing_groups"


def write(folder: Path, lines: Lines) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["diagnose", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_a_run_without_a_store_says_what_it_cannot_see(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", changed(healthy(30), 10, EXPLODING["truncation"]))
    (folder / "metrics.jsonl").open("a").write('{"step": 30, "rew')  # a run that was killed
    status, out, _ = run(str(folder))
    assert status == 1
    assert "first, from step 10: truncation" in out
    assert "not seen: episodes, masks and tokens" in out
    status, out, _ = run(str(folder), "--json")
    found = json.loads(out)
    assert (status, found["healthy"], found["findings"][0]["cause"]) == (1, False, "truncation")
    assert "rollout.max_tokens" in found["findings"][0]["try"]
    assert run(str(write(tmp_path / "well", healthy(30))))[0] == 0


@pytest.mark.parametrize("case", ["none", "empty", "no steps"])
def test_what_cannot_be_diagnosed_is_one_line(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "run"
    if case != "none":
        folder.mkdir()
    if case == "no steps":
        (folder / "metrics.jsonl").write_text("")
    status, _, err = run(str(folder))
    assert status == 2
    assert len(err.splitlines()) == 1
    assert str(folder) in err


def test_a_hostile_text_of_the_evidence_stays_one_line() -> None:
    episodes = [replace(e, leak="\x1b[2J\nfirst, from step 0: healthy") for e in played(6)]
    seen = series(lines_of(episodes))
    seen.episodes = episodes
    lines: list[str] = list(diagnosed("a\nb", seen).lines("a"))
    assert not any("\x1b" in line or "\n" in line for line in lines)


def test_the_page_of_causes_is_written_from_them() -> None:
    page = (ROOT / "docs/diagnosis.md").read_text(encoding="utf-8")
    assert causes_as_text() in page, "python -m tools.diagnosis_page writes it"


def test_a_run_that_its_users_stopped_before_a_step_was_done() -> None:
    lost = {"outcome": "user_error", "scored": False, "success": False, "reward": 0.0, "error": "nobody answers"}
    episodes = [replace(e, **lost) if e_sample(e) else e for e in played(1)]  # type: ignore[arg-type]
    seen = series([])
    seen.episodes = episodes
    ((cause, found),) = diagnosed("run", seen).findings
    assert (cause.name, found.step, found.trajectory) == ("failing_user", 0, "0-1")
    assert "nobody answers" in found.text
    slow = {"outcome": "timeout", "scored": False, "error": "rollout.user_seconds: the user took longer than 60 s"}
    late = [replace(e, **slow) if e_sample(e) == 2 else e for e in played()]  # type: ignore[arg-type]
    assert first_of(lines_of(late), episodes=late) == ("failing_user", 0)
