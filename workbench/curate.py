"""Which played conversations are worth learning from: refused, ranked, balanced.

::

    episodes ──► refusal ──► best of each task ──► balanced over domains, difficulties, kinds and outcomes ──► records

Pure functions over trajectories of any policy, whatever played it; :mod:`workbench.collect` plays and writes.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mua.environment.protocol import Task
from mua.tokens.parsing import CALL_OPEN, THINK_CLOSE, THINK_OPEN
from mua.types import Json, Outcome, ToolSchema, Trajectory

Item = TypeVar("Item")
Label = TypeVar("Label", str, tuple[str, str])

_ENDINGS = frozenset({Outcome.USER_STOP, Outcome.TERMINAL_TOOL})
_MARKUP = (CALL_OPEN, THINK_OPEN, THINK_CLOSE)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An episode with its task."""

    task: Task
    trajectory: Trajectory

    @property
    def labels(self) -> tuple[str, str, str]:
        """Difficulty and kind of the task ("-" where it has none), and how the episode ended."""
        data = self.task.data
        return str(data.get("difficulty", "-")), str(data.get("kind", "-")), str(self.trajectory.outcome)

    @property
    def quality(self) -> tuple[float, ...]:
        """Less is better: tool errors, then assistant turns, then tokens the policy wrote, then the sample."""
        episode = self.trajectory
        errors = sum(count for name, count in episode.metrics.items() if name.startswith("tool_errors/"))
        tokens = episode.sampled_tokens or episode.metrics.get("completion_tokens", 0.0)
        return errors, len(episode.turn_rewards), tokens, episode.sample


def refusal(trajectory: Trajectory, tools: Collection[str]) -> str | None:
    """Why a trajectory is no demonstration, in a few words; None where it is one.

    A demonstration succeeded by its environment's verdict, was ended by the user or a tool, made no call that is
    malformed, breaks a schema or names none of ``tools``, asked nothing again that had the same answer before, wrote no
    call or reasoning into its text, and its user kept its instructions to itself.
    """
    for reason, holds in _REFUSALS:
        if holds(trajectory, tools):
            return reason(trajectory) if callable(reason) else reason
    return None


def best_of_each_task(candidates: Iterable[Candidate], count: int) -> list[list[Candidate]]:
    """The best ``count`` of each task, best first."""
    by_task = _split(candidates, lambda c: (c.task.domain, c.task.id))
    return [sorted(members, key=lambda c: c.quality)[:count] for members in by_task.values()]


def balanced(tasks: Iterable[Sequence[Candidate]], shares: Mapping[str, float]) -> Iterator[Candidate]:
    """All candidates in such an order that every beginning of it is balanced, as far as the supply goes.

    Domains come by their ``shares``; within a domain every difficulty as often as the others, within that every kind of
    task, within that every way to end. Where one runs out the others go on. Of candidates alike in all that, each
    task's best come first, then the second best, and so on.

    Args:
        tasks: each task's candidates, best first.
        shares: weight of each domain, any positive numbers.
    """
    ranked = [(rank, candidate) for members in tasks for rank, candidate in enumerate(members)]
    ranked.sort(key=lambda pair: (pair[0], pair[1].quality))
    domains = _split((candidate for _, candidate in ranked), lambda c: c.task.domain)
    return _in_turn([(shares[name], _alike(members, 0)) for name, members in domains.items()])


def record(candidate: Candidate, tools: Sequence[ToolSchema], *, thinking: bool) -> Json:
    """The conversation in OpenAI form, with where it comes from.

    ``tools`` are those a policy sees in its prompt. Reasoning is kept if the policy to train is one that reasons.
    """
    difficulty, kind, outcome = candidate.labels
    source = {
        "domain": candidate.task.domain,
        "task": candidate.task.id,
        "sample": candidate.trajectory.sample,
        "difficulty": difficulty,
        "kind": kind,
        "outcome": outcome,
        "reward": candidate.trajectory.reward,
    }
    told = [_told(message, thinking) for message in candidate.trajectory.messages]
    shown = {"tools": [tool.openai() for tool in tools]} if tools else {}
    return {"messages": told, **shown, "source": source}


def _told(message: Json, thinking: bool) -> Json:
    kept = ("role", "content", "tool_calls", "tool_call_id", *(["reasoning_content"] if thinking else []))
    return {key: message[key] for key in kept if key in message}


def _alike(candidates: Sequence[Candidate], level: int) -> Iterator[Candidate]:
    """Candidates of one domain, those of each value of the label at ``level`` in turn."""
    if not candidates or level == len(candidates[0].labels):
        return iter(candidates)
    parts = _split(candidates, lambda c: c.labels[level])
    return _in_turn([(1.0, _alike(members, level + 1)) for members in parts.values()])


def _in_turn(parts: Sequence[tuple[float, Iterator[Item]]]) -> Iterator[Item]:
    """Items of all parts, each part's share of any beginning near its weight."""
    taken, running = [0] * len(parts), list(range(len(parts)))
    while running:
        index = min(running, key=lambda i: (taken[i] + 1) / parts[i][0])
        for item in itertools.islice(parts[index][1], 1):
            taken[index] += 1
            yield item
            break
        else:
            running.remove(index)


def _split(candidates: Iterable[Candidate], key: Callable[[Candidate], Label]) -> dict[Label, list[Candidate]]:
    """In the order of their first members."""
    parts: defaultdict[Label, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        parts[key(candidate)].append(candidate)
    return parts


def _calls(trajectory: Trajectory) -> Iterator[Json]:
    for message in trajectory.messages:
        yield from message.get("tool_calls", ())


def _unknown_tool(trajectory: Trajectory, tools: Collection[str]) -> bool:
    return any(call["function"]["name"] not in tools for call in _calls(trajectory))


def _markup_in_text(trajectory: Trajectory, tools: Collection[str]) -> bool:
    texts = (m["content"] or "" for m in trajectory.messages if m["role"] == "assistant")
    return any(tag in text for text in texts for tag in _MARKUP)


def _repeats(trajectory: Trajectory, tools: Collection[str]) -> bool:
    answers = {m["tool_call_id"]: m["content"] for m in trajectory.messages if "tool_call_id" in m}
    asked = [
        (call["function"]["name"], _canonical(call["function"]["arguments"]), answers.get(call["id"]))
        for call in _calls(trajectory)
    ]
    return len(set(asked)) < len(asked)


def _canonical(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True)


_REFUSALS: tuple[tuple[str | Callable[[Trajectory], str], Callable[[Trajectory, Collection[str]], bool]], ...] = (
    (lambda t: f"not scored ({t.outcome})", lambda t, _: not t.scored),
    ("not successful", lambda t, _: not t.success),
    (lambda t: f"ended by {t.outcome}", lambda t, _: t.outcome not in _ENDINGS),
    ("unknown tool", _unknown_tool),
    ("malformed call", lambda t, _: t.metrics.get("malformed", 0.0) > 0),
    ("call or reasoning in the text", _markup_in_text),
    ("same call, same answer", _repeats),
    ("the user told its instructions", lambda t, _: t.metrics.get("user_flags/leaks_instruction", 0.0) > 0),
)
