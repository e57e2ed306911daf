"""What to do when episodes could not be scored: count them, name the commonest reason, and what fixes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mua.types import Outcome, Trajectory
from mua.utils.errors import RunStopped

_FIXES = {
    Outcome.USER_ERROR: "check whoever plays the user: of user.llm that base_url, model and api_key are right and that "
    "it answers within request_seconds",
    Outcome.JUDGE_ERROR: "check that judge.llm answers (base_url, model, api_key, request_seconds) with verdicts that "
    "can be read",
    Outcome.ENVIRONMENT_ERROR: "fix the environment (mua env play shows one task), or raise environment.call_seconds "
    "or .reset_seconds if it is slow",
    Outcome.ENGINE_ERROR: "look at the engine's log in the folder logs of the output, or, of a policy at an endpoint, "
    "check evaluation.policy.endpoint",
    Outcome.TIMEOUT: "raise the deadline that is named, or give what it waits for less to do at once "
    "(rollout.concurrency, the endpoint's concurrency) or more machines",
}


@dataclass(frozen=True, slots=True)
class UnscoredEpisodes:
    """Episodes of which some could not be scored."""

    total: int
    unscored: int
    outcome: Outcome
    """The commonest of the unscored ones."""
    error: str | None
    """What the last of these met."""
    passing: bool
    """Whether it may pass by itself."""

    @property
    def fix(self) -> str:
        """What a person does about the commonest fault."""
        return _FIXES[self.outcome]

    def note(self) -> str:
        """A few words for a line of progress."""
        return f"{self.unscored} of {self.total} episodes failed, most as {self.outcome}"

    def reason(self, share: float = 0.0) -> str:
        """In a sentence how many could be scored, of which ``share`` should, and what became of the others."""
        if self.unscored == self.total:
            return f"not one of {self.total} episodes could be scored; most ended as {self.outcome}: {self.error}"
        return (
            f"only {self.total - self.unscored} of {self.total} episodes could be scored, and trainer.min_scored_share "
            f"is {share:g}; most of the others ended as {self.outcome}: {self.error}"
        )


def unscored_among(trajectories: Sequence[Trajectory]) -> UnscoredEpisodes | None:
    """What kept some of ``trajectories`` from being scored; None where all are."""
    unscored = [t for t in trajectories if not t.scored]
    if not unscored:
        return None
    ((outcome, passing), _) = Counter((t.outcome, t.passing) for t in unscored).most_common(1)[0]
    last = next(t for t in reversed(unscored) if (t.outcome, t.passing) == (outcome, passing))
    return UnscoredEpisodes(len(trajectories), len(unscored), outcome, last.error, passing)


def too_few_scored(trajectories: Sequence[Trajectory], share: float = 0.0) -> UnscoredEpisodes | None:
    """:func:`unscored_among`, where fewer than ``share`` of ``trajectories``, or none, could be scored; else None."""
    found = unscored_among(trajectories)
    if found is None or found.total - found.unscored >= max(1, share * found.total):
        return None
    return found


def require_scored(trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    """``trajectories``, of which at least one could be scored.

    Raises :class:`RunStopped`, with the commonest fault and what fixes it, where none could; it is passing if that is.
    """
    if (found := too_few_scored(trajectories)) is not None:
        raise RunStopped(f"{found.reason()}; {found.fix}", passing=found.passing)
    return trajectories
