"""One trajectory: conversation, verdict, requests and uses; the tokens of a segment with all that is known of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from mua.store.blobs import message_lists, read_texts, unpack_arrays, unpack_messages
from mua.store.queries import as_dicts, lost_step, same_task
from mua.store.tables import passing_over, requests, scores, segments, steps, tasks, tool_calls, trajectories, uses
from mua.store.trajectories import segment_from_row
from mua.types import Json, Provenance
from mua.view.run_overview import kind_of
from mua.view.viewed_runs import NotThere, ViewedRun

PROVENANCE = [kind.name.lower() for kind in Provenance]
_OF_LOSS = ("weights", "advantages", "old_logprobs", "reference_logprobs", "values", "returns")


def trajectory(connection: Connection, run: ViewedRun, name: str) -> Json:
    """All of a trajectory but its tokens, which :func:`tokens` gives. Raises :class:`NotThere`."""
    t = trajectories.c
    row = connection.execute(sa.select(trajectories).where(t.id == name, t.run_id == run.id)).mappings().one_or_none()
    if row is None:
        raise NotThere(f"trajectory {name}: not in run {run.key}")
    labels = connection.execute(
        sa.select(tasks.c.details, tasks.c.split, tasks.c.taken_step)
        .select_from(trajectories.join(tasks, same_task()))
        .where(t.id == name)
    ).one_or_none()
    found: Json = dict(row) | {"kind": "-", "split": None, "step": None}
    if labels is not None:
        found |= {"kind": kind_of(labels.details), "split": labels.split, "step": labels.taken_step}
    messages = None
    with passing_over(f"messages of {name}"):
        messages = None if row["messages"] is None else unpack_messages(row["messages"], f"messages of {name}")
    found["messages"] = messages
    # As mua.environment.protocol.Transcript.told_user.
    hidden = ("tool_calls", "tool_call_errors", "truncated")
    told = (m for m in messages or () if m.get("role") == "assistant" and not any(map(m.get, hidden)))
    found["told_user"] = [message.get("content") for message in told]
    s = segments.c
    parts = sa.select(s.number, s.tokens, s.sampled_tokens, s.arrays.is_not(None).label("kept"))
    found["segment_list"] = list(as_dicts(connection, parts.where(s.trajectory_id == name).order_by(s.number)))
    c = tool_calls.c
    calls = list(as_dicts(connection, sa.select(tool_calls).where(c.trajectory_id == name).order_by(c.number)))
    texts: Json = {}
    with passing_over(f"results of tools in {name}"):
        texts = read_texts(connection, [row["result"] for row in calls if row["result"] is not None])
    shown = ("number", "turn", "name", "arguments", "error", "reward", "by_user", "seconds")
    found["tool_calls"] = [{n: row[n] for n in shown} | {"result": texts.get(row["result"])} for row in calls]
    found["requests"] = []
    with passing_over(f"requests of {name}"):
        found["requests"] = _requests(connection, name)
    verdict = sa.select(scores.c.scorer, scores.c.value, scores.c.details).where(scores.c.trajectory_id == name)
    found["scores"] = list(as_dicts(connection, verdict.order_by(scores.c.scorer)))
    found["uses"] = _uses(connection, name)
    siblings = sa.select(t.id, t.sample, t.attempt, t.outcome, t.reward, t.success, t.scored).where(
        t.run_id == run.id, t.round == row["round"], t.ordinal == row["ordinal"]
    )
    found["group"] = list(as_dicts(connection, siblings.order_by(t.sample, t.part, t.attempt)))
    found["tokenizer"] = run.token_texts.fault
    return found


def tokens(connection: Connection, run: ViewedRun, name: str, segment: int, use: int | None = None) -> Json:
    """The tokens of a segment as columns, each ``[T]``, with what the loss of a step read of them.

    ``use`` is that step, by default the newest; ``logprobs`` are the engine's, ``old_logprobs`` the trainer's where
    they were recorded, ``gap`` the trainer's less the engine's, on trained tokens. Null is: not known, or nothing
    sampled. Raises :class:`NotThere` for another segment, :class:`mua.store.faults.StoreError` for a pruned one.
    """
    c = segments.c
    chosen = sa.select(segments).where(c.trajectory_id == name, c.number == segment)
    row = connection.execute(chosen).mappings().one_or_none()
    if row is None:
        raise NotThere(f"trajectory {name}: has no segment {segment}")
    part = segment_from_row(dict(row))
    u = uses.c
    of_loss = sa.select(u.arrays, u.step).where(
        u.trajectory_id == name, u.segment == segment, u.epoch == 0, u.arrays.is_not(None)
    )
    if use is not None:
        of_loss = of_loss.where(u.step == use)
    read = connection.execute(of_loss.order_by(u.step.desc(), u.part.desc()).limit(1)).one_or_none()
    own, step = ({}, None) if read is None else (unpack_arrays(read[0], f"uses of {name}"), int(read[1]))
    mask = part.loss_mask
    columns: dict[str, Any] = {
        "ids": part.ids.tolist(),
        "texts": run.token_texts.pieces(part.ids.tolist()),
        "provenance": part.provenance.tolist(),
        "turn": part.turn.tolist(),
        "version": _where(part.version, mask),
        "logprobs": _where(part.logprobs, mask),
        "teacher_logprobs": None if part.teacher_logprobs is None else _where(part.teacher_logprobs, mask),
    }
    trained = own["weights"] != 0 if "weights" in own else np.zeros(len(part), bool)
    columns |= {key: _where(own[key], trained) if key in own else None for key in _OF_LOSS}
    gap = own["old_logprobs"] - part.logprobs if "old_logprobs" in own else None
    columns["gap"] = None if gap is None else _where(gap, trained)
    return {"id": name, "segment": segment, "step": step, "provenances": PROVENANCE, "columns": columns,
            "tokenizer": run.token_texts.fault}  # fmt: skip


def _where(array: npt.NDArray[Any], known: npt.NDArray[np.bool_]) -> list[Any]:
    """As a list; None where it is not ``known`` or no finite number. Nine digits are a float32 to the bit."""
    whole = array.dtype.kind in "iu"
    return [
        None if not good or value != value or abs(value) == np.inf else value if whole else float(f"{value:.9g}")
        for value, good in zip(array.tolist(), known.tolist(), strict=True)
    ]


def _requests(connection: Connection, name: str) -> list[Json]:
    """Every request of the attempt, with its whole messages where no segment holds them."""
    c = requests.c
    found = list(as_dicts(connection, sa.select(requests).where(c.trajectory_id == name).order_by(c.role, c.number)))
    by_role: defaultdict[str, list[Any]] = defaultdict(list)
    for row in found:
        by_role[row["role"]].append(row)
    lists = {role: message_lists(rows) for role, rows in by_role.items()}
    wanted = [h for of_role in lists.values() for hashes in of_role.values() for h in hashes]
    wanted += [row[key] for row in found for key in ("reply", "tools") if row[key] is not None]
    texts = read_texts(connection, wanted)
    kept = [column.name for column in c if column.name not in ("messages", "reply", "tools", "run_id", "id")]
    return [
        {key: row[key] for key in kept}
        | {
            "messages": [texts[h] for h in lists[row["role"]].get(row["number"], ())],
            "reply": texts.get(row["reply"]),
            "tools": texts.get(row["tools"]),
        }
        for row in found
    ]


def _uses(connection: Connection, name: str) -> list[Json]:
    """Which steps trained on it, the newest first, and whether each stands; a row a segment and epoch."""
    c = uses.c
    of_step = (steps.c.run_id == c.run_id) & (steps.c.step == c.step) & (steps.c.part == c.part)
    names = ("run_id", "step", "part", "epoch", "segment", "minibatch", "position", "tokens")
    chosen = (
        sa.select(*(c[n] for n in names), c.arrays.is_not(None).label("kept"), lost_step().label("lost"))
        .select_from(uses.join(steps, of_step))
        .where(c.trajectory_id == name)
        .order_by(c.step.desc(), c.part.desc(), c.epoch, c.segment)
    )
    return list(as_dicts(connection, chosen))


def advantage_by_turn(columns: Json) -> Sequence[tuple[int, float]]:
    """The mean advantage of the trained tokens of each assistant turn, of the ``columns`` of :func:`tokens`."""
    by_turn: defaultdict[int, list[float]] = defaultdict(list)
    for turn, value in zip(columns["turn"], columns["advantages"] or (), strict=False):
        if value is not None:
            by_turn[turn].append(value)
    return [(turn, sum(values) / len(values)) for turn, values in sorted(by_turn.items())]
