"""Convert every checkpoint of a run that is not yet converted: ``checkpoints/step_*`` become ``hf-steps/step_*``.

A step counts as converted only if the folder was made from this very checkpoint and its weight files are whole. What an
interrupted call left is continued. A step folder that is half-written, damaged or of another model is an error: the
others are converted all the same, each fault is named at the end, and the exit status is 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mua.cli import readable
from mua.errors import ModelError, MuaError
from mua.observe.progress import Progress
from tools import kit


def main(arguments: Sequence[str] | None = None) -> int:
    parser = kit.parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER", help="the output folder of mua train or mua sft")
    parser.add_argument("--out", type=Path, help="where the model folders go; by default RUN_FOLDER/hf-steps")
    parser.add_argument("--source", type=Path, help="folder with config.json and tokenizer; by default model.path")
    parsed = parser.parse_args(arguments)
    try:
        return convert_all(parsed.run, parsed.out or parsed.run / "hf-steps", parsed.source)
    except (MuaError, OSError) as error:
        print(f"merge_checkpoints: {error}", file=sys.stderr)
        return 1


def convert_all(run: Path, out: Path, source: Path | None) -> int:
    """Convert what is not converted; the exit status."""
    from mua.megatron import offline

    steps = step_folders(run)
    faults: list[str] = []
    done = 0
    with Progress(True) as progress, progress.stage(f"checkpoints of {run}", total=len(steps)) as stage:
        for checkpoint in steps:
            try:
                if not offline.is_converted(checkpoint, out / checkpoint.name):
                    convert(checkpoint, out / checkpoint.name, source, progress)
                    done += 1
            except Exception as error:  # the other steps are converted all the same; every fault is told below
                faults.append(f"{checkpoint}: {described(error)}")
            stage.advance(note=checkpoint.name)
    print(f"{out}: {done} converted, {len(steps) - done - len(faults)} were there already, {len(faults)} failed")
    for fault in faults:
        print(f"merge_checkpoints: {fault}", file=sys.stderr)
    return 1 if faults else 0


def step_folders(run: Path) -> list[Path]:
    """Every step folder of the run, whole or not, in order; one that still has its hidden name is half-written."""
    root = run / "checkpoints"
    named = list(root.glob("step_*"))
    hidden = [path for path in root.glob(".step_*.partial") if root / path.name[1 : -len(".partial")] not in named]
    if not named and not hidden:
        raise ModelError(f"{root}: there is no step_* folder; name the output folder of a run")
    return sorted([*named, *hidden], key=lambda path: path.name.lstrip("."))


def convert(checkpoint: Path, out: Path, source: Path | None, progress: Progress) -> None:
    """One checkpoint, with a bar of its own."""
    from mua.megatron import checkpoint_manifest, offline
    from mua.megatron.conversion import source_files

    total = len(checkpoint_manifest.read_manifest(checkpoint)["tensors"])
    with progress.stage(checkpoint.name, total=total) as tensors:
        files = source or source_files(checkpoint)
        offline.megatron_to_hf(checkpoint, out, source=files, on_bytes=lambda _: tensors.advance())


def described(error: Exception) -> str:
    """One line: the message of an error a person can fix, the kind and message of any other."""
    return " ".join(readable(error)) or " ".join(f"{type(error).__name__}: {error}".split())


if __name__ == "__main__":
    sys.exit(main())
