"""Seconds and bytes of a checkpoint that several ranks save and load, beside torch's own of the same tensors.

A random Qwen3 in bfloat16 with float32 weights and moments, which data-parallel ranks divide. The peer is
``torch.distributed.checkpoint``: every rank gives it the weights, which it saves once, and its own pieces of the
optimizer's state under names of its own. No other layout could load those, there are no checksums, and its index is a
pickle; ours are safetensors under Hugging Face names, and every byte is compared with its checksum when it is loaded.
Both flush to the disk. They take turns, in every repeat anew; seconds are those of the slowest rank, CPU seconds the
sum over ranks; of the repeats the least.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from mua.utils.collective import gathered
from tools import kit


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        measure(arguments.rank, arguments.ranks, arguments.repeat)
        return
    with tempfile.TemporaryDirectory(prefix="mua-bench-") as scratch:
        kit.random_qwen3(
            Path(scratch) / "model", 1, vocab_size=32768, hidden_size=1024, intermediate_size=3072,
            num_hidden_layers=arguments.layers, num_attention_heads=16, num_key_value_heads=8,
            head_dim=64, tie_word_embeddings=False,
        )  # fmt: skip
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
        subprocess.run([*command, "-m", "tools.bench.checkpoint", *sys.argv[1:], "--rank", scratch], check=True)


def measure(scratch: Path, ranks: int, repeat: int) -> None:
    """On every rank; the first prints."""
    warnings.filterwarnings("ignore")
    built = kit.bare_learner(scratch / "model", 512, dtype="bfloat16", data_parallel=ranks)
    from mua.compat.megatron_optimizer_state import parameter_states

    state: dict[str, Any] = {f"weight/{name}": p.data for name, p in built.policy.chunks[0].named_parameters()}
    for number, part in enumerate(parameter_states(built.policy.optimizer.megatron)):
        state |= {f"{kind}/{dist.get_rank()}/{number}": value.contiguous() for kind, value in part.read().items()}
    ours, peer = scratch / "step_00000001", scratch / "peer"
    methods: dict[str, tuple[Path, Callable[[], object], Callable[[], object]]] = {
        "mua": (ours, lambda: built.save(ours, {}), lambda: built.load(ours)),
        "torch.distributed.checkpoint": (
            peer, lambda: save(state, checkpoint_id=peer), lambda: load(state, checkpoint_id=peer),
        ),
    }  # fmt: skip
    taken = defaultdict[str, list[list[float]]](list)
    for name in [*methods] * repeat:
        folder, *both = methods[name]
        taken[name].append([seconds for method in both for seconds in timed(method)])
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        taken[name][-1].append(size / 2**20)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
    if dist.get_rank() == 0:
        least = {name: [min(column) for column in zip(*rows, strict=True)] for name, rows in taken.items()}
        print(f"\n{time.strftime('%Y-%m-%d')}, {kit.machine()}, {ranks} ranks\n")
        print(kit.head("", "save s", "CPU s", "load s", "CPU s", "MiB"))
        for name, columns in least.items():
            print(kit.row(name, *(f"{value:.2f}" for value in columns)))
    built.close()


def timed(method: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the slowest rank, and CPU seconds of all."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    method()
    cpu = time.process_time() - cpu
    dist.barrier()
    wall = time.perf_counter() - wall
    return wall, sum(gathered(cpu))


if __name__ == "__main__":
    main()
