"""What happens in episodes, noted as it happens and written when an attempt ends.

    episode of the runner ──► EpisodeRecord (context variable) ◄── endpoint, agent, tools note what they did
                                    │ the attempt ends, whichever way
                                    ▼
                        one put: trajectory, segments, requests, texts, tool calls, scores   (mua.store.writer)

Noting keeps references and times; hashing, compression and SQL are the writer thread's. An attempt is written whole or
not at all: of one under way when a process is killed nothing is left, of one that failed everything but its tokens,
which no segment holds; what the policy wrote is then kept as text.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mua.store.blobs import text_inserts
from mua.store.tables import episodes, json_text, requests, scores, segments, tasks, tool_calls
from mua.store.trajectories import EpisodeKey, segment_row, trajectory_inserts, trajectory_size
from mua.store.writer import Insert, Update, Write, Writer
from mua.types import Group, Json, Trajectory

_NO_LABELS: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True)
class NotedRequest:
    """One request until its episode is written; what is not known at once may be set until then."""

    role: str
    started_at: float
    values: dict[str, Any]
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Json] = ()
    reply: Mapping[str, Any] | None = None
    conversation: Sequence[Mapping[str, Any]] | None = None
    """Of a policy at an engine: the messages that its reply comes into. Its own messages are kept only where no segment
    holds its tokens."""


class EpisodeRecord:
    """What one attempt of one episode did. Cheap to note into, from any thread."""

    def __init__(self, recorder: Recorder, key: EpisodeKey, sampling: Json) -> None:
        self.key, self.sampling = key, sampling
        self.started_at = time.time()
        self._recorder = recorder
        self._requests: list[NotedRequest] = []
        self._calls: list[tuple[float, dict[str, Any], str | None]] = []
        """When each began, its columns, its result."""
        self._size = 1024

    def request(
        self, role: str, started_at: float, *, messages: Sequence[Mapping[str, Any]] | None = None,
        tools: Sequence[Json] = (), reply: Json | None = None,
        conversation: Sequence[Mapping[str, Any]] | None = None, **values: Any,
    ) -> NotedRequest:  # fmt: skip
        """A request that was answered or failed. ``values`` are columns of the table ``requests``."""
        made = NotedRequest(role, started_at, values, messages, tools, reply, conversation)
        self._requests.append(made)
        self._size += 512
        return made

    def tool_call(self, started_at: float, result: str | None, **values: Any) -> None:
        """A call of a tool, by the policy or by the user. ``values`` are columns of ``tool_calls``."""
        self._calls.append((started_at, values, result))
        self._size += 512 + len(result or "")

    def failed(self) -> None:
        """The attempt is given up: what it did is written, without a trajectory."""
        self._recorder.writer.put(lambda: list(self._writes(None)), self._size)

    async def ended(self, trajectory: Trajectory, evaluation_reward: float | None) -> None:
        """The episode is over, as ``trajectory``."""
        ended = time.time()

        def made() -> Iterator[Write]:
            yield from trajectory_inserts(
                self.key, trajectory, ended_at=ended, started_at=self.started_at,
                sampling=self.sampling, sampler=self._recorder.sampler,
            )  # fmt: skip
            if evaluation_reward is not None:
                row = {"scorer": "environment", "value": evaluation_reward, "details": {"success": trajectory.success}}
                yield Insert(scores, [{"trajectory_id": self.key.trajectory_id, **row}])
            yield from self._writes(trajectory)

        size = self._size + trajectory_size(trajectory)
        await self._recorder.writer.put_from_loop(lambda: self._as_result(list(made())), size)

    # ---- in the writer's thread

    def _as_result(self, made: list[Write]) -> list[Write]:
        """``made`` in the form in which the end of an episode is written."""
        return made

    def _writes(self, trajectory: Trajectory | None) -> Iterator[Write]:
        name = None if trajectory is None else self.key.trajectory_id
        ids = self.key.columns() | {"trajectory_id": name}
        known, bodies = self._recorder.writer.known_texts, list[Insert]()
        if len(known) > _MOST_KNOWN_TEXTS:
            known.clear()

        def stored(value: Any) -> str | None:
            """The hash of a body, which is written if no put before has; whatever becomes of the rest."""
            if value is None:
                return None
            (name,), inserts = text_inserts([value], known)
            known.add(name)
            bodies.extend(inserts)
            return name

        rows = []
        numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        last: dict[str, tuple[int, Sequence[Mapping[str, Any]]]] = {}
        has_segments = trajectory is not None and bool(trajectory.segments)
        for request in self._requests:
            number = next(numbers[request.role])
            row: dict[str, Any] = ids | dict.fromkeys(_REQUEST_COLUMNS) | request.values
            messages, reply = request.messages, request.reply
            if request.conversation is not None and has_segments:
                messages = None
            elif request.conversation is not None:
                row |= {"segment": None, "token_start": None, "token_end": None}
                said, before = request.conversation, len(messages or ())
                if request.values.get("error") is None and len(said) > before and list(said[:before]) == messages:
                    reply = said[before]
            if messages is not None:
                follows, kept = None, 0
                if request.role in last:
                    before, earlier = last[request.role]
                    pairs = zip(earlier, messages, strict=False)
                    kept = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
                    follows = before if kept else None
                row |= {"follows": follows, "kept": kept if follows is not None else None}
                row["messages"] = [stored(message) for message in messages[kept:]]
                last[request.role] = number, messages
            row |= {"role": request.role, "number": number, "started_at": request.started_at}
            row |= {"tools": stored(list(request.tools) or None), "reply": stored(reply)}
            rows.append(row)
        calls = [
            ids | {"number": number, "started_at": started_at, "by_user": False, "result": stored(result)} | values
            for number, (started_at, values, result) in enumerate(self._calls)
        ]
        yield from bodies
        yield from (Insert(table, made) for table, made in ((requests, rows), (tool_calls, calls)) if made)


_REQUEST_COLUMNS = (
    "turn", "endpoint", "model", "seconds", "waited", "version", "prompt_tokens", "cached_tokens",
    "completion_tokens", "segment", "token_start", "token_end", "follows", "kept", "messages", "finish", "sampling",
    "error",
)  # fmt: skip

current_episode: ContextVar[EpisodeRecord | None] = ContextVar("current_episode", default=None)
"""Whose requests and calls are under way here; None: nobody records."""


@contextmanager
def noting(record: EpisodeRecord | None) -> Iterator[None]:
    """A block whose requests and calls are noted in ``record``; None: nowhere, whoever records around it."""
    token = current_episode.set(record)
    try:
        yield
    finally:
        current_episode.reset(token)


_MOST_KNOWN_TEXTS = 100_000
"""Some 15 MB of hashes."""


@dataclass
class Recorder:
    """Makes the records of one start of a run, and keeps its tasks. Safe in threads."""

    writer: Writer
    run_id: str
    part: int
    round: int = 0
    """Of the evaluation under way, counted from 1 over the run; 0: there was none."""
    sampler: str | None = None
    _attempts: dict[tuple[int, int, int], int] = field(default_factory=dict)
    _taken_over: dict[tuple[int, int], EpisodeKey] = field(default_factory=dict)
    """Of episodes of training that an earlier start has ended."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def episode(self, ordinal: int, sample: int, sampling: Json, *, evaluation: bool) -> EpisodeRecord:
        """The record of the next attempt of an episode; one that starts again counts on."""
        round_ = self.round if evaluation else 0
        with self._lock:
            attempt = self._attempts.get((round_, ordinal, sample), 0) + 1
            self._attempts[round_, ordinal, sample] = attempt
            if not evaluation:
                self._taken_over.pop((ordinal, sample), None)
        return EpisodeRecord(self, EpisodeKey(self.run_id, self.part, round_, ordinal, sample, attempt), sampling)

    def learned(self, ordinal: int, sample: int, attempt: int) -> None:
        """An episode of training was ended by another sampler, in this attempt."""
        with self._lock:
            self._attempts[0, ordinal, sample] = attempt
            self._taken_over.pop((ordinal, sample), None)

    def key(self, ordinal: int, sample: int, round_: int = 0) -> EpisodeKey:
        """Of the last attempt."""
        if round_ == 0 and (ordinal, sample) in self._taken_over:
            return self._taken_over[ordinal, sample]
        attempt = self._attempts.get((round_, ordinal, sample), 1)
        return EpisodeKey(self.run_id, self.part, round_, ordinal, sample, attempt)

    def opened(
        self, ordinal: int, domain: str, task_id: str, size: int, version: int, split: str | None,
        labels: Mapping[str, str] = _NO_LABELS,
    ) -> None:  # fmt: skip
        """A group of training begins, or begins again. ``labels`` are kind and difficulty of the task."""
        row = self.group_row(ordinal, domain, task_id, size, version, split, labels)
        self.writer.put([Insert(tasks, [row], "replace")])

    def group_row(
        self, ordinal: int, domain: str, task_id: str, size: int, version: int | None, split: str | None,
        labels: Mapping[str, str] = _NO_LABELS, round_: int = 0,
    ) -> dict[str, Any]:  # fmt: skip
        """The row of ``tasks`` of a group that begins now; of training it has the ``version`` of the policy."""
        return {
            "run_id": self.run_id, "round": round_, "ordinal": ordinal, "domain": domain, "task_id": task_id,
            "size": size, "split": split, "state": "open", "part": self.part, "made_at": time.time(), "ended_at": None,
            "taken_step": None, "kind": "evaluation" if round_ else "train", "version": version,
            "details": dict(labels) or None,
        }  # fmt: skip

    def completed(self, group: Group) -> None:
        """All episodes of a group have ended; they were given to :meth:`EpisodeRecord.ended` before."""
        rows = [
            {
                "run_id": self.run_id, "round": 0, "ordinal": group.ordinal, "sample": t.sample, "state": "done",
                "sampler": self.sampler, "attempts": t.attempts,
                "trajectory_id": self.key(group.ordinal, t.sample).trajectory_id,
            }
            for t in group.trajectories
        ]  # fmt: skip
        done = Update(tasks, self._named(group.ordinal), {"state": "complete", "ended_at": time.time()})
        self.writer.put([Insert(episodes, rows, "replace"), done])

    def took_over(
        self, group: Group, split: str | None, members: Sequence[EpisodeKey], version: int,
        labels: Mapping[str, str] = _NO_LABELS,
    ) -> None:  # fmt: skip
        """A group that an earlier start has ended, as ``members``, is this one's as it is."""
        with self._lock:
            self._taken_over |= {(member.ordinal, member.sample): member for member in members}
        first = group.trajectories[0]
        self.opened(group.ordinal, first.domain, group.task_id, len(members), version, split, labels)
        self.completed(group)

    def cancelled(self, ordinal: int) -> None:
        """A group of training is given up; it may begin again."""
        self.writer.put([Update(tasks, self._named(ordinal), {"state": "cancelled", "ended_at": time.time()})])

    def taught(self, group: Group, asked: Sequence[tuple[int, NotedRequest]]) -> None:
        """A teacher was ``asked``, by sample, about the segments of a group that is stored; where it has scored them,
        they say so."""
        keys = {t.sample: self.key(group.ordinal, t.sample) for t in group.trajectories}
        changed = [t for t in group.trajectories if any(s.teacher_logprobs is not None for s in t.segments)]

        def made() -> list[Write]:
            found: list[Write] = []
            for trajectory in changed:
                name = keys[trajectory.sample].trajectory_id
                for number, segment in enumerate(trajectory.segments):
                    row = segment_row(name, number, segment)
                    found.append(Update(segments, {"trajectory_id": name, "number": number}, {"arrays": row["arrays"]}))
            numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
            rows = [
                dict.fromkeys(_REQUEST_COLUMNS) | request.values | keys[sample].columns()
                | {"trajectory_id": keys[sample].trajectory_id, "role": request.role, "number": next(numbers[sample]),
                   "started_at": request.started_at, "tools": None, "reply": None}
                for sample, request in asked
            ]  # fmt: skip
            return [*found, Insert(requests, rows)] if rows else found

        self.writer.put(made, sum(trajectory_size(t) for t in changed) + 512 * len(asked))

    def evaluation(self, places: Sequence[tuple[int, str, str, str | None, Mapping[str, str]]]) -> None:
        """An evaluation begins: ordinal, domain, task, split and labels of the task of each of its episodes."""
        self.round += 1
        labels = {place[:4]: place[4] for place in places}
        sizes = Counter(place[:4] for place in places)
        rows = [
            self.group_row(*place[:3], sizes[place], None, place[3], own, self.round) for place, own in labels.items()
        ]
        self.writer.put([Insert(tasks, rows)] if rows else [])

    def evaluated(self) -> None:
        """All episodes of the evaluation under way have ended."""
        where = {"run_id": self.run_id, "round": self.round}
        self.writer.put([Update(tasks, where, {"state": "complete", "ended_at": time.time()})])

    def _named(self, ordinal: int) -> dict[str, Any]:
        return {"run_id": self.run_id, "round": 0, "ordinal": ordinal}


def arguments_text(arguments: Any) -> str:
    """The arguments of a call as JSON."""
    return arguments if isinstance(arguments, str) else json_text(arguments)
