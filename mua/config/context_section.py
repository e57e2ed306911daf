"""The section ``context``: what becomes of a conversation that grows beyond what a policy can read."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mua.config.section import NonNegative, Positive, Section


class ContextConfig(Section):
    """Rewriting the policy's context in an episode, in training and evaluation alike (docs/context.md). Every rewrite
    is a new segment."""

    strategy: Literal["off", "discard_tool_results", "summarise", "digest"] = "off"
    """discard_tool_results: old results give way to a short mark. summarise: the policy writes notes; instructions,
    everything the user said, and the notes stay. digest: of what the user said only the first and an unanswered last
    message stay. Notes are sampled by the policy and trained with the turn that follows them."""
    share: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """A rewrite is due before a turn whose segment has at least this share of ``rollout.max_tokens``."""
    every_turns: Positive | None = None
    """One is due too after so many assistant turns since the last; null: never for that."""
    on_repetition: Annotated[int, Field(ge=2)] | None = None
    """And when the policy says the same (text and calls, white space aside) for so many times since the last; null:
    never for that."""
    keep_results: NonNegative = 1
    """Of discard_tool_results: the last so many turns whose results stay. Those that no turn has followed yet stay in
    any case."""
    summary_tokens: Positive = 512
    """Longest notes."""
    instruction: str = (
        "The conversation is too long to go on with. Write notes for yourself: what is asked for, what you have done "
        "and found out, with every name, number and identifier that is still needed, and what to do next. Call no "
        "tools."
    )
    """How notes are asked for, as a user's message that nobody else gets to see."""
    max_rewrites: Positive = 8
    """Rewrites of one episode; after them it ends as ``length`` when it no longer fits."""
    max_result_tokens: Positive | None = None
    """Longest result of one tool call in the policy's tokens (of an endpoint: four characters each); of longer ones
    beginning and end stay, and how much is left out is said between them. null: they are taken whole."""
    stop_on_repetition: Annotated[int, Field(ge=2)] | None = None
    """The episode ends as ``repetition``, which is scored, when the policy has said the same for so many times; null:
    never for that."""

    similarity: Annotated[float, Field(gt=0, le=1)] = 1.0
    """From which likeness on two turns count as the same, of 0 to 1 (normalised Indel similarity of text and calls); 1:
    only what is equal. Below 1 a policy that pages through results, or looks up one number after another, may count as
    repeating itself."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        if self.strategy == "off" and (self.every_turns is not None or self.on_repetition is not None):
            raise ValueError(
                "every_turns and on_repetition say when to rewrite, and strategy off never does; choose one"
            )
        if self.takes_notes and not self.instruction.strip():
            raise ValueError("instruction is empty: the policy would not know that notes are wanted")
        return self

    @property
    def takes_notes(self) -> bool:
        """Whether a rewrite is made of what the policy writes."""
        return self.strategy in ("summarise", "digest")
