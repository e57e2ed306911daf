"""Seconds of one weight sync from several layouts into one and two engines, against copying the same bytes.

Four gloo ranks hold a random float32 Qwen3 in each layout in turn (what the layout leaves over is data parallel, whose
second replica has nothing to do in a sync). Rank 0 owns real SGLang servers. The limit is what any transport through
shared memory must do: copy every byte into a shared buffer and out of it again, bucket by bucket, with one thread, in
the same run. Every figure is the best of the repetitions; a busy machine makes the others longer.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

from tools import kit

LAYOUTS: dict[str, dict[str, int]] = {
    "TP2": {"tensor_parallel": 2, "data_parallel": 2},
    "PP2": {"pipeline_parallel": 2, "data_parallel": 2},
    "TP2 PP2": {"tensor_parallel": 2, "pipeline_parallel": 2},
}
RANKS = 4
SECONDS = 900.0
"""Deadline of everything that waits."""


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--transport", choices=["colocated", "broadcast"], default="colocated")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--bucket-mib", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=512)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="mua-bench-") as scratch:
        folder = Path(scratch)
        hidden = arguments.hidden
        kit.random_qwen3(
            folder / "model", 1, vocab_size=32_000, hidden_size=hidden, intermediate_size=3 * hidden,
            num_hidden_layers=8, num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, head_dim=64,
            max_position_embeddings=512, tie_word_embeddings=False, eos_token_id=2,
        )  # fmt: skip
        ranks = [context.Process(target=run_rank, args=(rank, folder, arguments)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        try:
            for process in ranks:
                process.join(SECONDS)
        finally:
            for process in ranks:
                process.kill()
        sys.exit(max(abs(process.exitcode or 0) for process in ranks))


def run_rank(rank: int, folder: Path, arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timeout)
    if rank == 0:
        print(f"{os.cpu_count()} cores; {arguments.transport}, buckets of {arguments.bucket_mib} MiB\n")
        columns = "layout | engines | seconds | GB/s | limit GB/s | share | assembled | loaded | both at once | moved"
        print(kit.head(*columns.split(" | ")))
    for count in arguments.engines:
        if rank == 0:
            asyncio.run(lead(folder, count, arguments))
        else:
            follow(folder, count, arguments)
    dist.barrier()


def follow(folder: Path, count: int, arguments: argparse.Namespace) -> None:
    from mua.engine.engine_handle import EnginePlace

    places = [EnginePlace(0, place) for place in range(count)]
    for number, layout in enumerate(LAYOUTS.values(), start=1):
        source, built = make_source(folder, layout, engine_config(count, arguments))
        for _ in range(arguments.repeat + 1):
            source.follow(places, number if arguments.transport == "broadcast" else 0)
        built.close()


async def lead(folder: Path, count: int, arguments: argparse.Namespace) -> None:
    from mua.engine.pool import EnginePool

    config = engine_config(count, arguments)
    async with EnginePool(config, dtype="float32", context_length=512, seed=1, log_folder=folder) as pool:
        await pool.start(folder / "model")
        for name, layout in LAYOUTS.items():
            source, built = make_source(folder, layout, config)
            if pool._weight_groups is not None:
                pool._weight_groups.forget()  # the groups of the source before
            await pool.update_weights(source, pool.version + 1)  # plans the routes
            reports, limits = [], []
            for _ in range(arguments.repeat):
                reports.append(await pool.update_weights(source, pool.version + 1))
                limits.append(copy_seconds(reports[-1].bytes, config.bucket_bytes))
            best, limit = min(reports, key=lambda report: report.seconds), min(limits)
            built.close()
            moved = f"{best.moved / 1e6:.0f} of {best.bytes / 1e6:.0f} MB"
            cells = (
                name, count, f"{best.seconds:.3f}", f"{best.bytes / best.seconds / 1e9:.2f}",
                f"{best.bytes / limit / 1e9:.2f}", f"{limit / best.seconds:.0%}", f"{best.assemble_seconds:.3f}",
                f"{best.load_seconds:.3f}", f"{best.overlap_seconds:.3f}", moved,
            )  # fmt: skip
            print(kit.row(*cells), flush=True)


def copy_seconds(nbytes: int, bucket: int) -> float:
    """Copy ``nbytes`` into one shared buffer of ``bucket`` bytes and out of it again, with one thread."""
    import torch

    from mua.compat.shared_weights import shared_buffer

    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.ones(nbytes, dtype=torch.uint8)
    shared = shared_buffer(bucket, torch.device("cpu")).fill_(1)
    started = time.perf_counter()
    for start in range(0, nbytes, bucket):
        part = shared[: min(bucket, nbytes - start)]
        part.copy_(source[start : start + bucket])
        target[start : start + bucket].copy_(part)
    return time.perf_counter() - started


def engine_config(count: int, arguments: argparse.Namespace) -> Any:
    from mua.config.schema import EngineConfig

    return EngineConfig(
        count=count, transport=arguments.transport, dtype="float32", memory_fraction=0.5, max_total_tokens=4096,
        start_seconds=SECONDS / 2, health_seconds=120.0, bucket_bytes=arguments.bucket_mib * 1024 * 1024,
    )  # fmt: skip


def make_source(folder: Path, layout: dict[str, int], engine: Any) -> tuple[Any, Any]:
    """The source of a fresh policy in ``layout``, and its learner."""
    import torch.distributed as dist

    from megatron_bridge.plan import plan_model
    from mua.engine.cluster import Nodes
    from mua.engine.weight_sync import TrainerSource

    built = kit.bare_learner(folder / "model", 512, **layout)
    chunks = built.policy.chunks
    source = TrainerSource(
        lambda: nullcontext(plan_model(chunks)),
        engine,
        Nodes(0, (0,), (tuple(range(RANKS)),)),
        dist.group.WORLD,
        announce=lambda *_: None,
    )
    return source, built


if __name__ == "__main__":
    main()
