"""What a run did as a whole: held-out success with intervals, curves, outcomes, tools, the time of stages, events; and
two runs side by side on the tasks that both met."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from statistics import fmean
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from mua.config.schema import EvaluationConfig
from mua.observe.catalog import described
from mua.observe.metrics_log import evaluation_of
from mua.observe.provenance import changed_keys
from mua.store.queries import as_dicts, changes, list_steps, lost_step, same_task
from mua.store.tables import parts, passing_over, requests, runs, steps, tasks, tool_calls, trajectories, versions
from mua.trainer.evaluation.estimators import paired_test
from mua.trainer.evaluation.report import interval_of
from mua.types import Json
from mua.view.viewed_runs import NotThere, ViewedRun

SHOWN_POINTS = 1000
"""Of one curve: more than a screen has columns are thinned out."""
FIRST_CURVES = (
    "rollout/success", "rollout/reward/mean", "train/entropy", "train/train_rollout_logprob_abs_diff",
    "train/train_rollout_kl", "train/grad_norm",
    "rollout/response_len/mean", "rollout/turns/mean", "rollout/off_policy_level/mean", "time/overlap_efficiency",
)  # fmt: skip
"""Drawn before anybody chooses, where the run has them."""
STAGES, EPISODE_STAGES = "time/", "time/episode_"


def overview(connection: Connection, run: ViewedRun) -> Json:
    """Everything of the first page of a run."""
    lines = step_lines(connection, run)
    row = connection.execute(sa.select(runs).where(runs.c.id == run.id)).mappings().one_or_none()
    if row is None:
        raise NotThere(f"run {run.key}: is gone from its store")
    names = sorted({name for line in lines for name in line if name != "step"})
    first = [name for name in FIRST_CURVES if name in names]
    return {
        "run": {name: row[name] for name in ("id", "name", "state", "output", "started_at", "ended_at", "provenance")},
        "key": run.key,
        "config": run.config,
        "evaluations": evaluations(connection, run),
        "kinds": training_kinds(connection, run.id),
        "outcomes": outcomes(connection, run.id),
        "tools": tools(connection, run.id),
        "endpoints": endpoints(connection, run.id),
        "events": list(events(connection, run, lines)),
        "metric_names": names,
        "meanings": {name: str(metric) for name in names if (metric := described(name)) is not None},
        "curves": curves(lines, first),
        "stages": stages(lines),
        "state": changes(connection, run.id),
    }


def step_lines(connection: Connection, run: ViewedRun) -> list[dict[str, Any]]:
    """The metrics of every step that stands, in order: those of the run's file, which has evaluations and checkpoints
    too, or else those that the store has."""
    if lines := run.metric_lines():
        return lines
    chosen = sa.select(steps.c.step, steps.c.metrics).where(steps.c.run_id == run.id, ~lost_step())
    found = {step: {"step": step} | (metrics or {}) for step, metrics in connection.execute(chosen)}
    v = versions.c
    evaluated = sa.select(v.version, v.metrics).where(v.run_id == run.id, v.metrics.is_not(None)).order_by(v.part)
    for version, metrics in connection.execute(evaluated):
        if held_out := evaluation_of(metrics or {}):
            found.setdefault(version, {"step": version}).update(held_out)
    return [found[step] for step in sorted(found)]


def curves(lines: Iterable[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[list[Any]]]:
    """``[steps, values]`` of each metric; of more than :data:`SHOWN_POINTS` every n-th step and the last."""
    lines = list(lines)
    found = {}
    for name in names:
        points = [(line["step"], _finite(line[name])) for line in lines if name in line]
        apart = math.ceil(len(points) / SHOWN_POINTS) or 1
        kept = points[::apart] + (points[-1:] if points and (len(points) - 1) % apart else [])
        found[name] = [[step for step, _ in kept], [value for _, value in kept]]
    return found


def stages(lines: Iterable[Mapping[str, Any]]) -> Json:
    """Seconds of the trainer's and of an episode's stages by step (docs/timeline.md), each as :func:`curves`."""
    lines = list(lines)
    whole = ("step", "episode", "episode_queued", "engine_generating")
    found = {name for line in lines for name in line if name.startswith(STAGES) and name.endswith("_seconds")}
    names = sorted(found - {f"{STAGES}{name}_seconds" for name in whole})
    episode = [name for name in names if name.startswith(EPISODE_STAGES)]
    return {"trainer": curves(lines, [n for n in names if n not in episode]), "episode": curves(lines, episode)}


def evaluations(connection: Connection, run: ViewedRun) -> list[Json]:
    """A row a round of evaluation: its policy version, and success of all tasks, by domain and by kind.

    The task is the unit, with the mean of its scored episodes (mua/trainer/evaluation/report.py); the level is
    ``evaluation.level``.
    """
    t = trajectories.c
    chosen = (
        sa.select(
            t.round, t.domain, t.task_id, tasks.c.split, tasks.c.details,
            sa.func.sum(_one(t.success & t.scored)), sa.func.sum(_one(t.scored)), sa.func.count(),
            sa.func.sum(sa.case((t.scored, t.reward), else_=0.0)), sa.func.max(t.version_high),
            sa.func.max(t.ended_at),
        )
        .select_from(trajectories.outerjoin(tasks, same_task()))
        .where(t.run_id == run.id, t.round > 0)
        .group_by(t.round, t.domain, t.task_id, tasks.c.split, tasks.c.details)
        .order_by(t.round)
    )  # fmt: skip
    chosen_settings = run.config.get("evaluation")
    settings = EvaluationConfig()  # also where others wrote the store
    if isinstance(chosen_settings, dict):
        own = {name: chosen_settings[name] for name in ("level", "resamples") if name in chosen_settings}
        with contextlib.suppress(ValueError):
            settings = EvaluationConfig.model_validate(own)
    rounds: defaultdict[int, list[Any]] = defaultdict(list)
    for row in connection.execute(chosen):
        rounds[row[0]].append(row)
    newest = max(rounds, default=0)
    return [_evaluation(number, rows, settings, number == newest) for number, rows in rounds.items()]


def _evaluation(number: int, rows: list[Any], settings: EvaluationConfig, newest: bool) -> Json:
    """Kinds have an interval in the ``newest`` round alone: resampling is what an overview spends its time on."""
    by_kind: defaultdict[str, list[float]] = defaultdict(list)
    by_domain: defaultdict[str, list[float]] = defaultdict(list)
    rewards = []
    for _, domain, _, _, details, won, scored, _, reward, *_ in rows:
        if scored:
            by_kind[kind_of(details)].append(won / scored)
            by_domain[domain].append(won / scored)
            rewards.append(reward / scored)
    everything = [value for values in by_domain.values() for value in values]

    def interval(values: list[float]) -> Json | None:
        return _interval(tuple(sorted(values)), settings.level, settings.resamples) if values else None

    episodes = sum(row[7] for row in rows)
    return {
        "round": number,
        "split": rows[0][3],
        "version": max((row[9] for row in rows if row[9] is not None), default=None),
        "ended_at": max(row[10] for row in rows),
        "tasks": len(rows),
        "episodes": episodes,
        "unscored": episodes - sum(row[6] for row in rows),
        "reward": fmean(rewards) if rewards else None,
        "success": interval(everything),
        "kinds": {
            kind: interval(values) if newest else {"mean": fmean(values), "tasks": len(values)}
            for kind, values in sorted(by_kind.items())
        },
        "domains": {domain: interval(values) for domain, values in sorted(by_domain.items())},
        "level": settings.level,
    }


def training_kinds(connection: Connection, run: str) -> list[Json]:
    """Success in training by domain and kind of task; episodes are the unit."""
    t = trajectories.c
    chosen = (
        sa.select(t.domain, tasks.c.details, sa.func.sum(_one(t.success & t.scored)), sa.func.sum(_one(t.scored)),
                  sa.func.count(), sa.func.avg(sa.case((t.scored, t.reward))))
        .select_from(trajectories.outerjoin(tasks, same_task()))
        .where(t.run_id == run, t.round == 0)
        .group_by(t.domain, tasks.c.details)
    )  # fmt: skip
    found: dict[tuple[str, str], Json] = {}
    for domain, details, won, scored, count, reward in connection.execute(chosen):
        row = found.setdefault(
            (domain, kind_of(details)),
            {"domain": domain, "kind": kind_of(details), "won": 0, "scored": 0, "episodes": 0, "rewards": 0.0},
        )
        row["won"], row["scored"], row["episodes"] = row["won"] + won, row["scored"] + scored, row["episodes"] + count
        row["rewards"] += (reward or 0.0) * scored
    rows = [found[key] for key in sorted(found)]
    for row in rows:
        total = row.pop("rewards")
        row["reward"] = total / row["scored"] if row["scored"] else None
    return rows


def kind_of(details: Any) -> str:
    """Of a task by the details of its row; ``-`` where it has none."""
    return str(details.get("kind", "-")) if isinstance(details, dict) else "-"


def outcomes(connection: Connection, run: str) -> list[Json]:
    """How episodes ended, training and evaluation apart."""
    t = trajectories.c
    evaluated = sa.case((t.round > 0, 1), else_=0).label("evaluation")
    chosen = (
        sa.select(evaluated, t.outcome, t.scored, sa.func.count(), sa.func.sum(_one(t.success)))
        .where(t.run_id == run)
        .group_by(evaluated, t.outcome, t.scored)
        .order_by(evaluated, sa.func.count().desc())
    )
    return [
        {"evaluation": bool(e), "outcome": outcome, "scored": scored, "episodes": count, "won": won}
        for e, outcome, scored, count, won in connection.execute(chosen)
    ]


def tools(connection: Connection, run: str) -> list[Json]:
    """Calls, failures and seconds by tool."""
    c = tool_calls.c
    chosen = (
        sa.select(c.name, c.by_user, sa.func.count().label("calls"), sa.func.count(c.error).label("errors"),
                  sa.func.avg(c.seconds).label("seconds"))
        .where(c.run_id == run)
        .group_by(c.name, c.by_user)
        .order_by(sa.func.count().desc())
    )  # fmt: skip
    return list(as_dicts(connection, chosen.limit(200)))


def endpoints(connection: Connection, run: str) -> list[Json]:
    """Requests, failures, seconds and tokens by role and endpoint."""
    c = requests.c
    chosen = (
        sa.select(c.role, c.endpoint, sa.func.count().label("requests"), sa.func.count(c.error).label("errors"),
                  sa.func.avg(c.seconds).label("seconds"), sa.func.sum(c.completion_tokens).label("tokens"))
        .where(c.run_id == run)
        .group_by(c.role, c.endpoint)
        .order_by(c.role, sa.func.count().desc())
    )  # fmt: skip
    return list(as_dicts(connection, chosen.limit(200)))


def events(connection: Connection, run: ViewedRun, lines: Iterable[Mapping[str, Any]]) -> Iterator[Json]:
    """Starts of the run, lost steps, checkpoints, restarts of engines, faults of the infrastructure; by time."""
    found = [*_starts(connection, run.id), *_faults(connection, run.id)]
    when = dict(connection.execute(sa.select(steps.c.step, steps.c.ended_at).where(steps.c.run_id == run.id)).all())
    before = 0.0
    for line in lines:
        if (now := line.get("engine/restarts")) is not None:
            if now > before:
                text = f"{now - before:.0f} engine restarts"
                found.append(_event("engine", when.get(line["step"]), line["step"], text))
            before = now  # a run that continues counts anew
    yield from sorted(found, key=lambda e: (e["at"] is None, e["at"] or 0.0, e["step"] or 0))


def _starts(connection: Connection, run: str) -> Iterator[Json]:
    before: Any = None
    for row in connection.execute(sa.select(parts).where(parts.c.run_id == run).order_by(parts.c.part)).mappings():
        begun = "started" if row["part"] == 1 else "restarted"
        where = f" on {row['host']} (process {row['pid']})" if row["host"] else ""
        yield _event("start" if row["part"] == 1 else "restart", row["started_at"], row["from_step"],
                     f"{begun}{where}, part {row['part']}, from step {row['from_step']}")  # fmt: skip
        if isinstance(before, dict) and isinstance(row["config"], dict):
            for change in changed_keys(before, row["config"]):
                yield _event("setting", row["started_at"], row["from_step"], f"since step {row['from_step']}: {change}")
        before = row["config"]
    lost = sa.select(steps.c.step, steps.c.part, steps.c.ended_at).where(steps.c.run_id == run, lost_step())
    for step, part, at in connection.execute(lost.order_by(steps.c.step)):
        yield _event("lost", at, step, f"step {step} of part {part} was lost and made again")
    ended = connection.execute(sa.select(runs.c.state, runs.c.ended_at).where(runs.c.id == run)).one()
    if ended.ended_at is not None:
        yield _event("end", ended.ended_at, None, f"ended: {ended.state}")
    c = versions.c
    saved = sa.select(c.version, c.checkpoint, c.synced_at).where(c.run_id == run, c.checkpoint.is_not(None))
    for version, name, at in connection.execute(saved.order_by(c.version)):
        yield _event("checkpoint", at, version - 1, f"checkpoint {name}")


def _faults(connection: Connection, run: str) -> Iterator[Json]:
    """Episodes that could not be scored, and those that were tried again, by policy version and outcome."""
    t = trajectories.c
    chosen = (
        sa.select(t.outcome, t.version_high, t.round, sa.func.count(), sa.func.max(t.ended_at), sa.func.min(t.error),
                  sa.func.min(t.id))
        .where(t.run_id == run, ~t.scored)
        .group_by(t.outcome, t.version_high, t.round)
        .limit(500)
    )  # fmt: skip
    for outcome, version, round_, count, at, error, name in connection.execute(chosen):
        where = "training" if round_ == 0 else f"evaluation {round_}"
        said = f": {error}" if error else ""
        yield _event("fault", at, version, f"{count} × {outcome} in {where}{said}") | {"trajectory": name}
    failed = (
        sa.select(requests.c.role, requests.c.error, sa.func.count(), sa.func.max(requests.c.started_at))
        .where(requests.c.run_id == run, requests.c.error.is_not(None))
        .group_by(requests.c.role, requests.c.error)
        .limit(200)
    )
    for role, error, count, at in connection.execute(failed):
        yield _event("fault", at, None, f"{count} failed requests to {role}, the last now: {error}")


def _event(kind: str, at: float | None, step: int | None, text: str) -> Json:
    return {"kind": kind, "at": at, "step": step, "text": text}


def step_list(connection: Connection, run: ViewedRun) -> list[Json]:
    """A row a step with the figures that a list needs; of an imported run those that its groups name."""
    lines = {line["step"]: line for line in step_lines(connection, run)}
    kept = ("rollout/success", "rollout/reward/mean", "train/loss", "train/grad_norm")
    rows = []
    for row in list_steps(connection, run.id):
        metrics = (row.pop("metrics") or {}) | lines.get(row["step"], {})
        rows.append(row | {name: _finite(metrics.get(name)) for name in kept})
    if rows:
        return rows
    t, c = trajectories.c, tasks.c
    imported = (
        sa.select(c.taken_step.label("step"), sa.func.count().label("trajectories"),
                  sa.func.sum(t.sampled_tokens).label("tokens"), sa.func.avg(t.reward).label("rollout/reward/mean"),
                  sa.func.avg(_one(t.success)).label("rollout/success"))
        .select_from(tasks.join(trajectories, same_task()))
        .where(c.run_id == run.id, c.taken_step.is_not(None))
        .group_by(c.taken_step).order_by(c.taken_step)
    )  # fmt: skip
    return [row | {"part": 1, "lost": False, "state": "done"} for row in as_dicts(connection, imported)]


def one_step(connection: Connection, run: ViewedRun, step: int) -> Json:
    """A step: its rows, metrics, and groups with their trajectories and what was trained on of each."""
    chosen = sa.select(steps, lost_step().label("lost")).where(steps.c.run_id == run.id, steps.c.step == step)
    rows = list(as_dicts(connection, chosen.order_by(steps.c.part.desc())))
    metrics = next((line for line in step_lines(connection, run) if line["step"] == step), {})
    named = next((row["details"]["groups"] for row in rows if "groups" in (row["details"] or {})), None)
    groups: list[Json] = []
    with passing_over(f"the groups of step {step}"):
        groups = _groups(connection, run, step, named)
    if not rows and not groups:
        raise NotThere(f"step {step} of run {run.key}: not in the store")
    shown = [{name: value for name, value in row.items() if name not in ("metrics", "details")} for row in rows]
    for row, whole in zip(shown, rows, strict=True):
        row["details"] = {name: value for name, value in (whole["details"] or {}).items() if name != "groups"}
    both = ((rows[0]["metrics"] or {}) if rows else {}) | metrics
    return {
        "step": step,
        "rows": shown,
        "groups": groups,
        "metrics": {name: _finite(value) for name, value in both.items()},
    }


def _groups(connection: Connection, run: ViewedRun, step: int, named: list[Any] | None) -> list[Json]:
    """The groups of a step with their trajectories. ``named`` are those of its row: ordinal, task, trajectories,
    whether it was trained on; None: those that its tasks say."""
    c, t = tasks.c, trajectories.c
    if named is None:
        taken = sa.select(c.ordinal).where(c.run_id == run.id, c.round == 0, c.taken_step == step)
        chosen = dict.fromkeys(connection.execute(taken.order_by(c.ordinal)).scalars(), True)
    else:
        chosen = {int(group[0]): bool(group[3]) for group in named}
    ids = None if named is None else {name for group in named for name in group[2]}
    found: dict[int, Json] = {
        ordinal: {"ordinal": ordinal, "trained": trained, "trajectories": []} for ordinal, trained in chosen.items()
    }
    columns = (t.id, t.ordinal, t.sample, t.outcome, t.scored, t.reward, t.success, t.turns, t.sampled_tokens)
    of_groups = (
        sa.select(*columns, t.task_id, t.domain, c.details)
        .select_from(trajectories.outerjoin(tasks, same_task()))
        .where(t.run_id == run.id, t.round == 0, t.ordinal.in_(list(chosen)))
        .order_by(t.ordinal, t.sample)
    )
    for row in connection.execute(of_groups).mappings():
        if ids is None or row["id"] in ids:
            group = found[row["ordinal"]]
            group["trajectories"].append({column.name: row[column.name] for column in columns})
            group |= {"task": row["task_id"], "domain": row["domain"], "kind": kind_of(row["details"])}
    return list(found.values())


@lru_cache(maxsize=4096)
def _interval(values: tuple[float, ...], level: float, resamples: int) -> Json:
    """The interval that the run itself reports for these tasks."""
    found = interval_of(EvaluationConfig(level=level, resamples=resamples), values)
    return {"mean": found.mean, "low": found.low, "high": found.high, "tasks": len(values)}


def _one(condition: Any) -> Any:
    return sa.case((condition, 1), else_=0)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


MOST_TASKS = 2000
"""Listed, those with the largest differences first; figures are of all."""


def compared(first: tuple[Connection, ViewedRun, int], second: tuple[Connection, ViewedRun, int]) -> Json:
    """Success and reward of both on every task that has a scored episode in both.

    Each side is a connection, a run and a round of evaluation (0: training). The task is the unit.
    """
    sides = [_by_task(connection, run.id, round_) for connection, run, round_ in (first, second)]
    common = [key for key in sides[0] if key in sides[1]]
    rows: list[Json] = []
    for key in common:
        row: Json = {"domain": key[0], "task": key[1], "kind": kind_of(sides[0][key]["details"])}
        for name, side in zip(("first", "second"), sides, strict=True):
            row[name] = {figure: float(side[key][figure]) for figure in ("success", "reward", "turns")}
            row[name] |= {"episodes": side[key]["episodes"], "id": side[key]["id"]}
        rows.append(row | {"difference": row["second"]["success"] - row["first"]["success"]})
    rows.sort(key=lambda row: (-abs(row["difference"]), row["domain"], row["task"]))
    test = None
    if rows:
        values = [[row[side]["success"] for row in rows] for side in ("first", "second")]
        verdict = paired_test(values[0], values[1], seed=0)
        test = {"name": verdict.name, "p_value": verdict.p_value}
    return {
        "tasks": rows[:MOST_TASKS],
        "common": len(common),
        "only_first": len(sides[0]) - len(common),
        "only_second": len(sides[1]) - len(common),
        "means": [fmean(row[side]["success"] for row in rows) if rows else None for side in ("first", "second")],
        "rewards": [fmean(row[side]["reward"] for row in rows) if rows else None for side in ("first", "second")],
        "better": sum(row["difference"] > 0 for row in rows),
        "worse": sum(row["difference"] < 0 for row in rows),
        "test": test,
    }


def _by_task(connection: Connection, run: str, round_: int) -> dict[tuple[str, str], Any]:
    t = trajectories.c
    chosen = (
        sa.select(t.domain, t.task_id, tasks.c.details, sa.func.count().label("episodes"),
                  sa.func.avg(sa.case((t.success, 1.0), else_=0.0)).label("success"),
                  sa.func.avg(t.reward).label("reward"), sa.func.avg(t.turns).label("turns"),
                  sa.func.max(t.id).label("id"))
        .select_from(trajectories.outerjoin(tasks, same_task()))
        .where(t.run_id == run, t.round == round_, t.scored)
        .group_by(t.domain, t.task_id, tasks.c.details)
    )  # fmt: skip
    return {(row["domain"], row["task_id"]): row for row in connection.execute(chosen).mappings()}
