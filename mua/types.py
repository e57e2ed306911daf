"""The data contract: what passes between rollout, algorithms and trainer.

Everything the loss needs is derived from :class:`Provenance`; no other mask exists. Arrays are indexed by
token: entry ``t`` of ``logprobs`` is the log-probability of ``ids[t]`` given ``ids[:t]``. The shift between
a token and the position that predicts it happens in one place, inside the training backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Int32Array: TypeAlias = npt.NDArray[np.int32]
UInt8Array: TypeAlias = npt.NDArray[np.uint8]
ExpertArray: TypeAlias = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
Float32Array: TypeAlias = npt.NDArray[np.float32]
Float64Array: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Json: TypeAlias = dict[str, Any]
EVALUATION_ORDINALS = 1 << 40
"""Evaluation episodes get ordinals from here on, so that their seeds and sessions never meet training's."""


class Provenance(IntEnum):
    """Who put a token into the stream. Stored as uint8."""

    SYSTEM = 0
    """Text of the system prompt, tools and policy included."""
    USER = 1
    """Text of the (simulated) user."""
    TOOL = 2
    """Text a tool returned."""
    TEMPLATE = 3
    """What the chat template adds: role headers, separators, and history it rewrote."""
    SAMPLED = 4
    """What the policy itself sampled (or, in supervised data, what the demonstrator wrote)."""


class Outcome(StrEnum):
    """Why an episode ended. ``scored`` outcomes are the policy's doing; the others are never trained on."""

    USER_STOP = "user_stop"
    TERMINAL_TOOL = "terminal_tool"
    MAX_TURNS = "max_turns"
    LENGTH = "length"
    MALFORMED = "malformed"
    AGENT_END = "agent_end"
    """An agent of its own process or function ended by itself; see docs/gateway.md."""
    REPETITION = "repetition"
    USER_ERROR = "user_error"
    ENVIRONMENT_ERROR = "environment_error"
    JUDGE_ERROR = "judge_error"
    ENGINE_ERROR = "engine_error"
    TIMEOUT = "timeout"

    @property
    def scored(self) -> bool:
        """Whether the policy answers for this outcome, so that it enters statistics and gradients."""
        return self in _SCORED


_SCORED = frozenset(
    {
        Outcome.USER_STOP,
        Outcome.TERMINAL_TOOL,
        Outcome.MAX_TURNS,
        Outcome.LENGTH,
        Outcome.MALFORMED,
        Outcome.AGENT_END,
        Outcome.REPETITION,
    }
)


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool as the model sees it. ``parameters`` is a full (nested) JSON Schema object, passed on whole but for its
    ``$schema``, the dialect in which arguments are checked."""

    name: str
    description: str
    parameters: Json

    def openai(self) -> Json:
        """The OpenAI function-calling form that chat templates render."""
        parameters = {key: value for key, value in self.parameters.items() if key != "$schema"}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


FinishReason: TypeAlias = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Generation:
    """What the engine sampled for one request. ``ids`` includes the stop token if sampling ended on one."""

    ids: Int32Array
    logprobs: Float32Array
    """Log-probabilities of ``ids`` under ``logits / temperature``, ``[n]``."""
    finish: FinishReason
    version: int
    """Policy version that finished the request."""
    versions: Int32Array
    """Policy version of each sampled token, ``[n]`` (differs from ``version`` after an in-flight update)."""
    cached_tokens: int
    """Prompt tokens served from the prefix cache."""
    experts: ExpertArray | None = None
    """Experts of the tokens from ``SamplingParams.experts_from`` to the last but one sampled, ``[n, layers * top k]``;
    the last sampled token was not routed yet."""
    waited: float = 0.0
    """Seconds before an engine took the request."""
    engine: str = "engine"
    """Which one answered; of a turn that several have sampled, all of them."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One token stream exactly as the engine saw it. All arrays have length ``T``.

    ``logprobs`` is 0 and ``version`` is -1 wherever ``provenance`` is not ``SAMPLED``. ``turn`` counts
    assistant turns of the trajectory from 0; the system prompt and first user message belong to turn 0.
    ``experts``, where the engine recorded them, is ``[T, layers * top k]``: the experts each token was routed to,
    layer by layer. Rows of tokens that the engine never took as input (the last sampled token and what follows) are 0.
    ``teacher_logprobs``, where there is a teacher, are its log-probabilities of the sampled tokens, 0 elsewhere.
    """

    ids: Int32Array
    provenance: UInt8Array
    logprobs: Float32Array
    version: Int32Array
    turn: Int32Array
    experts: ExpertArray | None = None
    teacher_logprobs: Float32Array | None = None

    def __post_init__(self) -> None:
        arrays = {name: getattr(self, name) for name in self.__slots__}
        lengths = {name: len(array) for name, array in arrays.items() if array is not None}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"arrays of one segment differ in length: {lengths}")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def loss_mask(self) -> BoolArray:
        """True where the policy sampled the token, ``[T]``."""
        return np.equal(self.provenance, Provenance.SAMPLED)


@dataclass(slots=True)
class Trajectory:
    """One rollout of one task: its token streams, rewards and how it ended."""

    task_id: str
    ordinal: int
    """Position of the task in the run's task stream; unique per group, never reused."""
    sample: int
    """Index of this trajectory within its group, 0-based."""
    segments: list[Segment]
    turn_rewards: list[float]
    """Reward received in each assistant turn; the final (outcome) reward is part of the last entry."""
    reward: float
    """Trajectory score used for group statistics."""
    success: bool
    outcome: Outcome
    messages: list[Json] = field(default_factory=list)
    """The conversation as OpenAI-style messages, for people, traces and replay."""
    metrics: dict[str, float] = field(default_factory=dict)
    details: Json = field(default_factory=dict)
    """What the environment's evaluation found (missing writes, unsaid facts, ...)."""
    attempts: int = 1
    """Tries until this trajectory: 1 plus the infrastructure faults that were retried."""
    error: str | None = None
    domain: str = ""
    """The task's domain, for metrics by environment."""
    sampling: Json = field(default_factory=dict)
    """Temperature, truncation and penalties it was sampled with; ``logprobs_of`` names the distribution that the
    segments' log-probabilities are of."""
    passing: bool = False
    """Of an unscored one: whether its fault may pass by itself, such as an endpoint that does not answer."""

    @property
    def scored(self) -> bool:
        return self.outcome.scored

    @property
    def sampled_tokens(self) -> int:
        return int(sum(segment.loss_mask.sum() for segment in self.segments))


@dataclass(slots=True)
class Group:
    """The trajectories of one task; advantages are computed within it, over members that acted only."""

    ordinal: int
    task_id: str
    trajectories: list[Trajectory]

    @property
    def scored(self) -> list[Trajectory]:
        return [t for t in self.trajectories if t.scored]

    @property
    def acted(self) -> list[Trajectory]:
        """Scored members that sampled a token: what became of the others says nothing of the policy."""
        return [t for t in self.scored if t.sampled_tokens]


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One segment, ready for the loss. All arrays ``[T]``; entries where ``weights`` is 0 are ignored."""

    ids: Int32Array
    weights: Float32Array
    """Per-token loss weight with the global denominator already divided in; 0 on tokens not trained."""
    advantages: Float32Array
    behavior_logprobs: Float32Array
    """Log-probabilities under the policy that sampled, as the engine reported them."""
    old_logprobs: Float32Array
    """Log-probabilities the clipped ratio is taken against (engine's, or recomputed by the trainer)."""
    reference_logprobs: Float32Array | None = None
    experts: ExpertArray | None = None
    """The engine's expert choices, ``[T, layers * top k]``; the last row is unknown (no token follows it)."""
    version: Int32Array | None = None
    """Policy version that sampled each token, -1 elsewhere; None where nobody asks for a token's age."""
    teacher_logprobs: Float32Array | None = None
    """The teacher's log-probabilities of sampled tokens; None without a teacher."""
    trajectory: int = 0
    """Which trajectory of the batch this is a segment of; its segments share a number."""
    turns: Int32Array | None = None
    """Assistant turn of every token, counted over the trajectory; advantages from a critic need it."""
    values: Float32Array | None = None
    """The critic's value of what comes before each token; None without a critic."""
    returns: Float32Array | None = None
    """What the critic's values are trained towards; None without a critic."""
    origin: tuple[int, int, int] | None = None
    """Ordinal and sample of the trajectory, and number of the segment there; None in supervised batches."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def trained(self) -> BoolArray:
        return self.weights != 0


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Everything one optimizer step needs, independent of any parallel layout.

    The loss of the batch is ``sum(weights * per_token_loss)`` over all sequences: because the denominators
    are inside the weights, no split over micro-batches or ranks can change it.
    """

    sequences: list[TrainSequence]
    temperature: float
    """Sampling temperature; log-probabilities are of ``logits / temperature``."""
    denominators: dict[str, float]
    """The global counts the weights were divided by (``tokens``, ``sequences``), for metrics."""
    turn_rewards: list[Float64Array] = field(default_factory=list)
    """By trajectory, the reward of each of its turns after shaping; empty unless advantages come from a critic."""

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[TrainSequence]:
        return iter(self.sequences)

    def with_advantages(self, advantages: Iterable[npt.NDArray[Any]]) -> TrainBatch:
        """With these advantages of its sequences, in order, made float32."""
        pairs = zip(self.sequences, advantages, strict=True)
        return replace(self, sequences=[replace(s, advantages=a.astype(np.float32)) for s, a in pairs])
