"""Which faults strike a run, and when: drawn from a seed, so that a failed run can be repeated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

STEPS = 6
"""Of every run."""
SAVE_EVERY = 2


class Mode(StrEnum):
    """How the run trains."""

    SYNC = "sync"
    """Synchronous and deterministic, one process."""
    STALE = "stale"
    """``trainer.max_staleness=1``, with a language model as the user."""
    RANKS = "ranks"
    """Synchronous and deterministic, two trainer ranks."""


class Phase(StrEnum):
    """What a run is doing, in the order of one step."""

    START = "start-up"
    RESUME = "resume"
    ROLLOUT = "rollout"
    TRAIN = "scoring and training"
    SYNC = "sync"
    SAVE = "checkpoint"
    EXPORT = "export"

    @property
    def order(self) -> int:
        """Place within a step."""
        return list(Phase).index(self)


BEGINNING = frozenset({Phase.START, Phase.RESUME})


class Kind(StrEnum):
    """What happens."""

    KILL_TRAINER = "kill -9 of the trainer"
    STOP_TRAINER = "SIGSTOP of the trainer"
    KILL_RANK = "kill -9 of rank 1"
    STOP_RANK = "SIGSTOP of rank 1"
    KILL_ENGINE = "kill -9 of the engine"
    STOP_ENGINE = "SIGSTOP of the engine"
    KILL_WORKER = "kill -9 of an environment worker"
    STOP_WORKER = "SIGSTOP of an environment worker"
    KILL_USER = "kill -9 of the user endpoint"
    STOP_USER = "SIGSTOP of the user endpoint"
    DISK = "full disk"
    CHECKPOINT = "newest checkpoint truncated"
    PORT = "port taken"
    CLOCK = "clock put forward"


_ONLY = {
    Kind.KILL_RANK: Mode.RANKS,
    Kind.STOP_RANK: Mode.RANKS,
    Kind.KILL_USER: Mode.STALE,
    Kind.STOP_USER: Mode.STALE,
}
ENDS = frozenset({Kind.KILL_TRAINER, Kind.KILL_RANK, Kind.CHECKPOINT})
"""After these there is another attempt, whose beginning the next fault may strike."""
_LOOP = (Phase.ROLLOUT, Phase.TRAIN, Phase.SYNC, Phase.SAVE)
_PHASES = {
    Kind.KILL_WORKER: (Phase.ROLLOUT, Phase.ROLLOUT, Phase.TRAIN),
    Kind.STOP_WORKER: (Phase.ROLLOUT, Phase.ROLLOUT, Phase.TRAIN),
    Kind.KILL_USER: (Phase.ROLLOUT, Phase.ROLLOUT, Phase.TRAIN, Phase.SAVE),
    Kind.STOP_USER: (Phase.ROLLOUT, Phase.ROLLOUT, Phase.TRAIN, Phase.SAVE),
}
_NOT_AT_THE_BEGINNING = frozenset({Kind.KILL_WORKER, Kind.STOP_WORKER, Kind.CHECKPOINT})
_AT_THE_BEGINNING = 0.4
"""Share of the faults that strike a beginning, where there is one to strike."""


@dataclass(frozen=True)
class Fault:
    """One fault of a plan."""

    kind: Kind
    phase: Phase
    step: int
    """It strikes in ``phase`` of this step, or as soon after as there is an opportunity."""
    moment: float
    """Share of the phase that has passed by then."""
    seed: int
    """Decides the rest: which process, which file, how long."""

    @property
    def key(self) -> tuple[int, int]:
        """Orders the faults of a run."""
        return (self.step, self.phase.order)


def kinds_of(mode: Mode, *, disk: bool) -> list[Kind]:
    """What can strike a run of ``mode``; ``disk`` says whether its disk can be filled."""
    return [kind for kind in Kind if _ONLY.get(kind, mode) is mode and (disk or kind is not Kind.DISK)]


def draw(mode: Mode, count: int, seed: int, *, disk: bool = True) -> list[Fault]:
    """``count`` faults in the order in which they strike; no kind comes twice before all have come once."""
    random = Random(f"{mode}/{seed}")
    kinds: list[Kind] = []
    while len(kinds) < count:
        kinds += random.sample(deck := kinds_of(mode, disk=disk), min(len(deck), count - len(kinds)))
    faults = sorted((_placed(kind, random) for kind in kinds), key=lambda fault: (*fault.key, fault.moment))
    return _with_beginnings(faults, random)


def _placed(kind: Kind, random: Random) -> Fault:
    """Somewhere in the loop, or in the export at its end."""
    export = kind not in _PHASES and random.random() < 1 / (len(_LOOP) * STEPS)
    phase = Phase.EXPORT if export else random.choice(_PHASES.get(kind, _LOOP))
    first = SAVE_EVERY if kind is Kind.CHECKPOINT else 0  # there must be one
    steps = [step for step in range(first, STEPS) if phase is not Phase.SAVE or (step + 1) % SAVE_EVERY == 0]
    step = STEPS if export else random.choice(steps)
    return Fault(kind, phase, step, random.random(), random.randrange(2**32))


def _with_beginnings(faults: list[Fault], random: Random) -> list[Fault]:
    """Some of those that follow the end of an attempt, and the first, strike while the next is starting."""
    found: list[Fault] = []
    for fault in faults:
        after_an_end = not found or found[-1].kind in ENDS
        if after_an_end and fault.kind not in _NOT_AT_THE_BEGINNING and random.random() < _AT_THE_BEGINNING:
            step = found[-1].step if found else 0
            fault = replace(fault, phase=Phase.RESUME if found else Phase.START, step=step)
        found.append(fault)
    return found
