"""A run as evidence: its metrics, and from its store a fair sample of its episodes and of what its losses read.

Everything is only read; the run may go on meanwhile. What cannot be looked at is said, never guessed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from mua.observe.diagnosis.evidence import Evidence, SeenEpisode, TokenSample, series
from mua.observe.metrics_log import EVALUATIONS_FILE, METRICS_FILE, read_metrics
from mua.observe.output import CONFIG_FILE, REPORT_FILE
from mua.store.blobs import unpack_arrays, unpack_messages
from mua.store.faults import StoreError
from mua.store.queries import lost_step, same_task
from mua.store.tables import (
    passing_over,
    reading_on,
    requests,
    runs,
    segments,
    steps,
    tasks,
    tool_calls,
    trajectories,
    uses,
)
from mua.types import Json, Provenance
from mua.utils.errors import MuaError
from mua.utils.strict_json import JsonError, read_file, read_json
from mua.view.run_overview import kind_of, step_lines
from mua.view.user_leaks import UserLeaks
from mua.view.viewed_runs import ViewedRun, config_in, opened_runs

MOST_EPISODES = 12_000
"""Read with their conversations: those of evenly spread steps, all of a step, where a run has more."""
MOST_SEGMENTS = 600
"""Whose tokens are read, evenly spread over the steps."""
MOST_TEXT = 6000
"""Characters that are kept of what is said in one episode."""
PAIRS = 40
"""Segments of the first and of the last steps whose first sampled tokens are compared."""
UNCERTAIN = 0.05
"""Nats of a token that the policy could have replaced by another."""


@contextmanager
def evidence_of(place: str, run: str | None = None) -> Iterator[tuple[str, Evidence]]:
    """A block with the name and the evidence of the run at ``place``: an output folder, a store's file, or a URL.

    Raises :class:`MuaError` where there is nothing to diagnose: no such folder, no step and no episode.
    """
    folder = Path(place) if "://" not in place and Path(place).is_dir() else None
    known = (METRICS_FILE, CONFIG_FILE, "*.sqlite")
    if folder is not None and not any(path for name in known for path in folder.glob(name)):
        raise MuaError(f"{folder}: no run: it has neither {METRICS_FILE} nor a store; name the output folder of a run")
    try:
        with opened_runs([place]) as viewed:
            chosen = viewed.get(run)
            with reading_on() as damaged, chosen.store.read() as connection:
                seen = _with_store(connection, chosen)
            if damaged:
                seen.unseen.append(f"what stands in {', '.join(sorted(damaged))}: damaged (mua store verify)")
            yield chosen.key, _checked(place, seen)
            return
    except StoreError as error:
        if folder is None or not (folder / METRICS_FILE).is_file():
            raise
        reason = " ".join(str(error).split())
    seen = _of_folder(folder)
    seen.config = config_in(folder)
    seen.unseen.append(f"episodes, masks and tokens, for want of a store ({reason})")
    yield folder.resolve().name, _checked(place, seen)


def _checked(place: str, seen: Evidence) -> Evidence:
    if not seen.rows and not seen.episodes:
        raise MuaError(f"{place}: nothing to diagnose yet: no step is done and no episode has ended")
    return seen


def _of_folder(folder: Path) -> Evidence:
    """Metrics and evaluations, one line per step: of a step that was made again the last."""
    by_step: dict[int, dict[str, Any]] = {}
    for line in read_metrics(folder / METRICS_FILE) if (folder / METRICS_FILE).is_file() else ():
        by_step[line["step"]] = by_step.get(line["step"], {}) | line
    evaluations = list(read_metrics(folder / EVALUATIONS_FILE)) if (folder / EVALUATIONS_FILE).is_file() else []
    try:
        report = read_json(read_file(folder / REPORT_FILE))
        evaluations += [report[name] for name in ("first", "final") if name in report]
    except (OSError, JsonError):  # no report, or one that is being written
        pass
    return series([by_step[step] for step in sorted(by_step)], sorted(evaluations, key=lambda line: line["step"]))


def _with_store(connection: Connection, run: ViewedRun) -> Evidence:
    seen = Evidence([]) if run.folder is None else _of_folder(run.folder)
    if not seen.rows:
        seen = series(step_lines(connection, run))
    seen.config = run.config or ({} if run.folder is None else config_in(run.folder))
    seen.state = str(connection.execute(sa.select(runs.c.state).where(runs.c.id == run.id)).scalar() or "")
    if not seen.rows:
        seen.unseen.append("metrics: no step is done")
    seen.episodes = list(_episodes(connection, run.id, seen))
    if not seen.episodes:
        seen.unseen.append("episodes: the store has none of training")
        seen.episodes = None
    _look_for_leaks(connection, run.id, seen)
    seen.met = _met(connection, run.id, seen.config)
    seen.tokens = list(_tokens(connection, run.id))
    if not seen.tokens:
        seen.unseen.append("masks and log-probabilities of tokens: the store has none (pruned, or a run without steps)")
        seen.tokens = None
    else:
        seen.moved = _moved(connection, run.id)
    return seen


# ---- episodes


def _episodes(connection: Connection, run: str, seen: Evidence) -> Iterator[SeenEpisode]:
    """Episodes of training of evenly spread steps; those that no step took yet count for the step that would have."""
    t = trajectories.c
    groups = int(seen.setting("algorithm.groups_per_step", 1))
    step_of = sa.func.coalesce(tasks.c.taken_step, t.ordinal // groups).label("step")
    base = trajectories.outerjoin(tasks, same_task())
    counts: dict[int, int] = dict(
        connection.execute(
            sa.select(step_of, sa.func.count()).select_from(base).where(t.run_id == run, t.round == 0).group_by(step_of)
        ).all()
    )
    names = sorted(counts)
    every = max(1, math.ceil(sum(counts.values()) / MOST_EPISODES))
    kept = set(names[::every]) | set(names[-1:])
    if len(kept) < len(counts):
        seen.unseen.append(
            f"episodes of {len(counts) - len(kept)} of {len(counts)} steps: evenly spread ones were read"
        )
    calls = {
        name: row for name, *row in connection.execute(
            sa.select(tool_calls.c.trajectory_id, sa.func.count(), sa.func.count(tool_calls.c.error),
                      sa.func.max(tool_calls.c.error))
            .where(tool_calls.c.run_id == run, tool_calls.c.round == 0, ~tool_calls.c.by_user)
            .group_by(tool_calls.c.trajectory_id)
        )
    }  # fmt: skip
    chosen = (
        sa.select(t.id, t.ordinal, t.sample, t.domain, t.task_id, t.outcome, t.scored, t.reward, t.success,
                  t.sampled_tokens, t.error, t.messages, tasks.c.details, step_of)
        .select_from(base).where(t.run_id == run, t.round == 0)
        .order_by(step_of, t.ordinal, t.sample, t.part, t.attempt)
    )  # fmt: skip
    for row in connection.execute(chosen.execution_options(yield_per=500)).mappings():
        if row["step"] not in kept:
            continue
        made, failed, error = calls.get(row["id"], (0, 0, None))
        with passing_over(f"messages of {row['id']}"):
            messages = [] if row["messages"] is None else unpack_messages(row["messages"], f"messages of {row['id']}")
            said, told, own, cut = _spoken(messages)
            yield SeenEpisode(
                row["id"], int(row["step"]), row["ordinal"], row["task_id"],
                kind_of(row["details"]), row["domain"], row["outcome"], bool(row["scored"]), float(row["reward"]),
                bool(row["success"]), row["sampled_tokens"], made or own, failed, cut, said, told,
                error=row["error"] or error,
            )  # fmt: skip


def _spoken(messages: Sequence[Json]) -> tuple[str, str, int, int]:
    """What the policy said and called; what of it the user heard; its calls; its turns that were cut."""
    said, told, calls, cut = [], [], 0, 0
    for message in messages:
        if message.get("role") != "assistant":
            continue
        text = message.get("content") or ""
        functions = [c.get("function", c) for c in message.get("tool_calls") or () if isinstance(c, dict)]
        calls += len(functions)
        cut += bool(message.get("truncated"))
        said.append(str(text) + "".join(f" {f.get('name')} {f.get('arguments')}" for f in functions))
        if not functions and not message.get("tool_call_errors"):
            told.append(str(text))
    return "\n".join(said)[:MOST_TEXT], "\n".join(told)[:MOST_TEXT], calls, cut


def _look_for_leaks(connection: Connection, run: str, seen: Evidence) -> None:
    """Note in episodes whether their task is to be declined, and what their user gave away: in some of each step,
    which is enough for a share."""
    leaks = UserLeaks(seen.config)
    to_decline = cache(leaks.to_decline)
    for e in seen.episodes or ():
        e.to_decline = to_decline(e.domain, e.task)
    by_step = seen.by_step()
    wanted: dict[str, SeenEpisode] = {}
    per_step = max(4, 2000 // max(1, len(by_step)))
    for members in by_step.values():
        scored = [e for e in members if e.scored]
        for e in scored[:: max(1, len(scored) // per_step)]:
            wanted[e.id] = e
    ids = list(wanted)
    for at in range(0, len(ids), 500):
        chosen = sa.select(trajectories.c.id, trajectories.c.messages).where(trajectories.c.id.in_(ids[at : at + 500]))
        for name, blob in connection.execute(chosen):
            with passing_over(f"messages of {name}"):
                e = wanted[name]
                messages = [] if blob is None else unpack_messages(blob, f"messages of {name}")
                e.leak = leaks.leak(e.domain, e.task, messages)
    seen.unseen += leaks.unseen


# ---- evaluation and training


def _met(connection: Connection, run: str, config: Json) -> dict[str, tuple[int, list[str]]]:
    """Evaluations whose tasks are tasks of training: of its split, played in it, or with the same data as one."""
    mine = sa.select(tasks.c.domain, tasks.c.task_id).where(tasks.c.run_id == run, tasks.c.round == 0).distinct()
    trained = {(domain, task) for domain, task in connection.execute(mine)}
    chosen = (
        sa.select(tasks.c.round, tasks.c.domain, tasks.c.task_id, tasks.c.split)
        .where(tasks.c.run_id == run, tasks.c.round > 0).distinct().order_by(tasks.c.round)
    )  # fmt: skip
    version = sa.select(trajectories.c.round, sa.func.max(trajectories.c.version_high)).where(
        trajectories.c.run_id == run, trajectories.c.round > 0
    )
    versions = dict(connection.execute(version.group_by(trajectories.c.round)).all())
    rows, own = list(connection.execute(chosen)), {domain for domain, _ in trained}
    same, leaks = set[tuple[str, str]](), UserLeaks(config)  # tasks with the data of one of training
    for name in {row[1] for row in rows}:
        if (domain := leaks.domain(name)) is not None:
            known = {_digest(task.data) for task in domain.tasks("train")}
            held_out = (task for split in ("validation", "test") for task in domain.tasks(split))
            same |= {(name, task.id) for task in held_out if _digest(task.data) in known}
    found: dict[str, tuple[int, list[str]]] = {}
    for round_, of_domain, task, split in rows:
        pool = split == "train" and of_domain in own
        if pool or (of_domain, task) in trained or (of_domain, task) in same:
            told = f"the evaluation on {split or 'held-out tasks'}"
            _, names = found.setdefault(told, (max(0, (versions.get(round_) or 0) - 1), []))
            if task not in names:
                names.append(task)
    return found


def _digest(data: Json) -> bytes:
    kept = {name: value for name, value in data.items() if name not in ("id", "split")}
    return hashlib.blake2b(json.dumps(kept, sort_keys=True, default=str).encode(), digest_size=16).digest()


# ---- tokens


def _tokens(connection: Connection, run: str) -> Iterator[TokenSample]:
    """What the losses read of segments that are evenly spread over the steps that stand."""
    u = uses.c
    stands = (steps.c.run_id == u.run_id) & (steps.c.step == u.step) & (steps.c.part == u.part) & ~lost_step()
    where = (u.run_id == run) & (u.epoch == 0) & u.arrays.is_not(None) & u.source.is_(None)
    rows = connection.execute(
        sa.select(u.step, u.part, u.trajectory_id, u.segment, steps.c.version)
        .select_from(uses.join(steps, stands)).where(where).order_by(u.step, u.minibatch, u.position)
    ).all()  # fmt: skip
    by_step: defaultdict[int, list[Any]] = defaultdict(list)
    for row in rows:
        by_step[row[0]].append(row)
    names = sorted(by_step)
    apart = max(1, math.ceil(len(names) / (MOST_SEGMENTS // 4)))
    for step in sorted({*names[::apart], *names[-1:]}):
        members = by_step[step]
        for _, part, trajectory, number, version in members[:: max(1, len(members) // 4)][:4]:
            both = (u.trajectory_id == segments.c.trajectory_id) & (u.segment == segments.c.number)
            blobs = connection.execute(
                sa.select(u.arrays, segments.c.arrays).select_from(uses.join(segments, both)).where(
                    where, u.step == step, u.part == part, u.trajectory_id == trajectory, u.segment == number)
            ).first()  # fmt: skip
            if blobs is not None and blobs[1] is not None:
                spans = connection.execute(
                    sa.select(requests.c.token_start, requests.c.token_end).where(
                        requests.c.trajectory_id == trajectory, requests.c.role == "policy",
                        requests.c.segment == number, requests.c.token_start.is_not(None))
                ).all()  # fmt: skip
                with passing_over(f"tokens of {trajectory}"):
                    read = unpack_arrays(blobs[0], f"uses of {trajectory}")
                    own = unpack_arrays(blobs[1], f"segments of {trajectory}")
                    yield _sample(trajectory, step, version, read, own, [(start, end) for start, end in spans])


def _sample(
    trajectory: str, step: int, version: int, read: Mapping[str, Any], own: Mapping[str, Any],
    answers: Sequence[tuple[int, int]],
) -> TokenSample:  # fmt: skip
    """``answers`` are the places of what the engine answered, where the store knows them."""
    trained = read["weights"] != 0
    sampled = (own["provenance"] == Provenance.SAMPLED) & (own["version"] >= 0)
    if answers:
        answered = np.zeros(len(sampled), np.bool_)
        for start, end in answers:
            answered[start:end] = True
        sampled &= answered
    wrong = trained & ~sampled
    authors = own["provenance"][wrong]
    author = Provenance(int(np.bincount(authors).argmax())).name.lower() if len(authors) else ""
    if author == "sampled":
        author = "called sampled, but no engine answered them"
    ours = read.get("update_logprobs", read.get("old_logprobs"))
    kl = dict.fromkeys(("fresh", "stale"), (math.nan, math.nan))
    age = version - own["version"]
    if ours is not None:
        right = trained & sampled
        for name, chosen in (("fresh", right & (age <= 0)), ("stale", right & (age > 0))):
            if chosen.any():
                difference = np.clip((ours - own["logprobs"])[chosen].astype(np.float64), -20, 20)
                k3 = float((np.exp(difference) - difference - 1).mean())
                kl[name] = k3, float(np.abs(difference).mean())
    lag = float(age[trained & sampled].mean()) if (trained & sampled).any() else 0.0
    return TokenSample(
        trajectory, step, int(trained.sum()), int(wrong.sum()), author, *kl["fresh"], kl["stale"][0], lag
    )  # fmt: skip


def _moved(connection: Connection, run: str) -> float | None:
    """The largest change, from the first version that sampled to the last, of the engine's log-probability of a token
    after the same tokens; None where too few are the same, or all are certain: a certain token cannot change."""
    t = trajectories.c
    chosen = sa.select(t.id, segments.c.arrays).select_from(
        trajectories.join(segments, (segments.c.trajectory_id == t.id) & (segments.c.number == 0))
    )
    chosen = chosen.where(t.run_id == run, t.round == 0, t.scored, segments.c.arrays.is_not(None))
    first, last = ({}, {})  # type: dict[bytes, tuple[int, float]], dict[bytes, tuple[int, float]]
    for found, order in ((first, t.ordinal), (last, t.ordinal.desc())):
        for name, blob in connection.execute(chosen.order_by(order, t.sample).limit(PAIRS)):
            with passing_over(f"tokens of {name}"):
                own = unpack_arrays(blob, f"segments of {name}")
                places = np.flatnonzero((own["provenance"] == Provenance.SAMPLED) & (own["version"] >= 0))
                for at in places[:64].tolist():
                    key = hashlib.blake2b(own["ids"][: at + 1].tobytes(), digest_size=16).digest()
                    found.setdefault(key, (int(own["version"][at]), float(own["logprobs"][at])))
    both = [(first[key], last[key]) for key in first.keys() & last.keys() if first[key][1] < -UNCERTAIN]
    changes = [abs(late[1] - early[1]) for early, late in both if late[0] > early[0] + 3]
    return max(changes, default=None)
