"""Every checkpoint of a run as a model folder: ``checkpoints/step_*`` become ``hf-steps/step_*``.

A step counts as converted only if the folder was made from this very checkpoint and its weight files are whole. What an
interrupted call left is continued. A step folder that is half-written, damaged or of another model is a fault: the
others are converted all the same, and each fault is told at the end.
"""

from __future__ import annotations

from pathlib import Path

from mua.observe.progress import Progress
from mua.types import Json
from mua.utils.errors import ModelError, describe_error

FORMS = ("step_*", "iter_*", "global_step_*")
"""Names of step folders: ours, Megatron-LM's, MUA-RL's and verl's."""
ACTOR = Path("actor")
"""In a step folder of the last: ``dist_ckpt`` beside ``huggingface``, a folder with configuration and tokenizer."""


def convert_run(run: Path, out: Path | None = None, source: Path | None = None) -> Json:
    """Convert what is not converted; how many steps were, were already, and what is wrong with the others.

    Args:
        run: output folder of ``mua train`` or ``mua sft``.
        out: where the model folders go; None: its ``hf-steps``.
        source: folder with config.json and tokenizer, for checkpoints that Megatron-LM wrote; None: the one beside
            those that MUA-RL and verl wrote.

    Raises:
        ModelError: the folder has no checkpoints.
    """
    from mua.megatron import offline

    steps, out = step_folders(run), out or run / "hf-steps"
    faults: list[str] = []
    done = 0
    with Progress(True) as progress, progress.stage(f"checkpoints of {run}", total=len(steps)) as stage:
        for step in steps:
            theirs = step / ACTOR / "dist_ckpt"
            checkpoint, beside = (theirs, step / ACTOR / "huggingface") if theirs.is_dir() else (step, None)
            try:
                if not offline.is_exported(checkpoint, out / step.name):
                    offline.convert_to_hf(checkpoint, out / step.name, source or beside)
                    done += 1
            except Exception as error:  # the other steps are converted all the same; every fault is told below
                faults.append(f"{checkpoint}: {described(error)}")
            stage.advance(note=step.name)
    return {
        "written": str(out), "converted": done, "already": len(steps) - done - len(faults), "faults": faults,
    }  # fmt: skip


def step_folders(run: Path) -> list[Path]:
    """Every step folder of the run, whole or not, in order; one that still has its hidden name is half-written."""
    root = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    named = [path for form in FORMS for path in root.glob(form)]
    hidden = [path for path in root.glob(".step_*.partial") if root / path.name[1 : -len(".partial")] not in named]
    if not named and not hidden:
        raise ModelError(f"{root}: there is no step_* folder; name the output folder of a run")
    return sorted([*named, *hidden], key=lambda path: path.name.lstrip("."))


def described(error: Exception) -> str:
    """One line: the message of an error a person can fix, the kind and message of any other."""
    return " ".join(describe_error(error)) or " ".join(f"{type(error).__name__}: {error}".split())
