"""Where the time of a run went: means of its ``time/...`` metrics, and its steps as bars.

The first steps, which warm up, are left out of the means. A bar is a step of the trainer, its phases in their order:

    . waits for episodes   m memory   b batch   l log-probabilities   O optimizer   s weight sync   e evaluation
    r records   c checkpoint of the step before   - rest

and under it the share of decoding slots that the engines used in that step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mua.observe.metrics_log import METRICS_FILE, read_metrics
from mua.observe.timeline import EngineActivity, TrainerPhase
from mua.trainer.evaluation.report import markdown_table
from mua.types import Json
from mua.utils.errors import MuaError

Step = Mapping[str, Any]

_ORDER = {
    TrainerPhase.CHECKPOINT: "c", TrainerPhase.WAIT: ".", TrainerPhase.MEMORY: "m", TrainerPhase.BATCH: "b",
    TrainerPhase.LOGPROBS: "l", TrainerPhase.OPTIMIZER: "O", TrainerPhase.SYNC: "s", TrainerPhase.EVALUATE: "e",
    TrainerPhase.RECORDS: "r", TrainerPhase.REST: "-",
}  # fmt: skip
EPISODE_PARTS = ("start", "generating", "engine_slot", "tools", "user", "scoring", "other")


def steps_of(run: Path) -> Sequence[Step]:
    """The lines of metrics of a run of ``mua train`` that say where the time went; :class:`MuaError` if
    none does."""
    steps = [line for line in read_metrics(run / METRICS_FILE) if "time/wait_seconds" in line]
    if not steps:
        raise MuaError(f"{run / METRICS_FILE}: no step has time/wait_seconds; name the output folder of mua train")
    return steps


def timeline(run: Path, skip: int, width: int = 100) -> str:
    """Tables of means but for the first ``skip`` steps, and bars of at most ``width`` characters."""
    steps = steps_of(run)
    return "\n".join([tables(steps[skip:] or steps), "", *bars(steps, width)])


def means(run: Path, skip: int) -> Json:
    """The means that the tables show, by name of the metric."""
    steps = steps_of(run)
    shown = steps[skip:] or steps
    names = sorted({name for step in shown for name in step if name.startswith("time/")})
    return {"steps": len(shown), "means": {name: mean(shown, name) for name in names}}


def mean(steps: Sequence[Step], name: str) -> float:
    """Of the steps' metric ``name``; a step without it counts as 0."""
    return sum(step.get(name) or 0.0 for step in steps) / len(steps)


def tables(steps: Sequence[Step]) -> str:
    """Means over ``steps``, as tables in Markdown."""
    whole = mean(steps, "time/step_seconds")
    phases = {phase.value: mean(steps, f"time/{phase}_seconds") for phase in TrainerPhase} | {"step": whole}
    rows = ((name, f"{s:.3f}", f"{s / whole:.1%}") for name, s in phases.items())
    trainer = markdown_table(("trainer", "seconds", "share"), rows)
    shares = {activity.value: mean(steps, f"time/engine_{activity}") for activity in EngineActivity}
    shares |= {"slots used": mean(steps, "time/engine_slots_used")}
    engines = markdown_table(("engines", "share"), ((name, f"{share:.1%}") for name, share in shares.items()))
    of_one = mean(steps, "time/episode_seconds")
    parts = {part: mean(steps, f"time/episode_{part}_seconds") for part in EPISODE_PARTS} | {"episode": of_one}
    rows = ((name, f"{s:.3f}", f"{s / of_one:.1%}" if of_one else "") for name, s in parts.items())
    episodes = markdown_table(("an episode", "seconds", "share"), rows)
    efficiency = f"max(generation, training) / step: {mean(steps, 'time/overlap_efficiency'):.1%}"
    return "\n\n".join((trainer, engines, episodes, efficiency))


def bars(steps: Sequence[Step], width: int) -> Iterator[str]:
    """Two lines a step; the longest is ``width`` characters wide."""
    longest = max(step["time/step_seconds"] for step in steps)
    for step in steps:
        drawn, seconds = "", 0.0
        for phase, letter in _ORDER.items():
            seconds += step.get(f"time/{phase}_seconds") or 0.0
            drawn += letter * (round(seconds / longest * width) - len(drawn))
        yield f"{step['step']:>6} |{drawn}| {step['time/step_seconds']:.2f} s"
        filled = round((step.get("time/engine_slots_used") or 0.0) * len(drawn))
        yield f"{'slots':>6} |{'#' * filled}{' ' * (len(drawn) - filled)}|"
