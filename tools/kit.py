"""What tools share: arguments, tables in Markdown, the machine's name, memory, measurements in fresh processes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Of the command whose docstring ``description`` is."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def row(*cells: object) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def head(*names: str) -> str:
    """The first two lines of a table."""
    return f"{row(*names)}\n{row(*['---'] * len(names))}"


def table(names: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    return "\n".join([head(*names), *(row(*cells) for cells in rows)])


def machine() -> str:
    """Its cores and their kind."""
    return f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}"


def resident(mark: str = "VmRSS") -> int:
    """Bytes of this process in memory; ``VmHWM``: the most there were since :func:`forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{mark}:"))


def forget_peak() -> None:
    """The high-water mark of memory begins anew."""
    Path("/proc/self/clear_refs").write_text("5")


def afresh(module: str, *arguments: object, environment: Mapping[str, str] | None = None) -> Any:
    """What ``python -m module arguments`` prints last, as JSON: a measurement in an interpreter of its own."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
    return json.loads(done.stdout.splitlines()[-1])


def random_qwen3(folder: Path, seed: int, **shape: Any) -> Any:
    """Save a float32 Qwen3 with random weights; the model."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.save_pretrained(folder)
    return model


def bare_learner(folder: Path, max_length: int, learning_rate: float = 1e-6, **megatron: Any) -> Any:
    """A float32 learner of the model in ``folder``, of which nothing else of a run is configured."""
    from mua.config.schema import EngineConfig, ExperimentConfig, MegatronConfig, ModelConfig, OptimizerConfig
    from mua.trainer.learner import Learner

    config = ExperimentConfig.model_construct(
        model=ModelConfig(path=folder, dtype="float32", max_length=max_length),
        megatron=MegatronConfig(**megatron, threads=1),
        optimizer=OptimizerConfig(learning_rate=learning_rate),
        engine=EngineConfig(),
        seed=1,
    )
    return Learner(config, total_steps=100, driven=False)
