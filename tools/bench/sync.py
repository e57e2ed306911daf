"""How long a weight sync of a small policy keeps an engine from generating, and where the time goes.

One trainer process and one real SGLang server of one rank. Every update is made twice: of an idle engine, and of one
that decodes eight long requests, which are retracted and go on. The peer is the time of as many plain HTTP round trips
to the same server (``/model_info``) as the update makes, in the same run: no update through HTTP can be faster.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tools import kit

SECONDS = 600.0


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--bucket-mib", type=int, default=512)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mua-bench-") as scratch:
        folder, hidden = Path(scratch), arguments.hidden
        kit.random_qwen3(
            folder / "model", 1, vocab_size=4096, hidden_size=hidden, intermediate_size=3 * hidden,
            num_hidden_layers=4, num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, head_dim=32,
            max_position_embeddings=4096, tie_word_embeddings=False, eos_token_id=2,
        )  # fmt: skip
        asyncio.run(measure(folder, arguments))


async def measure(folder: Path, arguments: Any) -> None:
    from mua.config.schema import EngineConfig
    from mua.engine.pool import EnginePool

    config = EngineConfig(
        dtype="float32", memory_fraction=0.5, max_total_tokens=65536, start_seconds=SECONDS / 2,
        bucket_bytes=arguments.bucket_mib << 20,
    )  # fmt: skip
    built = kit.bare_learner(folder / "model", 4096)
    async with EnginePool(config, dtype="float32", context_length=4096, seed=1, log_folder=folder) as pool:
        await pool.start(folder / "model")
        await pool.update_weights(built.weights(), 1)  # plans the routes
        print(kit.head("engine", "MB", "requests", "pause s, median", "best", "parts of the median", "round trips s"))
        for running in (0, 8):
            reports, trips = [], []
            for _ in range(arguments.repeat):
                requests = [asyncio.create_task(decode(pool, number)) for number in range(running)]
                while pool.metrics()["engine/running"] < running:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.2)
                reports.append(await pool.update_weights(built.weights(), pool.version + 1))
                for request in requests:
                    request.cancel()
                await asyncio.gather(*requests, return_exceptions=True)
                trips.append(await round_trips(pool, 4 + reports[-1].buckets))
            reports.sort(key=lambda report: report.pause_seconds)
            middle = reports[len(reports) // 2]
            parts = {
                k.removeprefix("engine/sync/pause_"): f"{v:.4f}" for k, v in middle.metrics().items() if "pause_" in k
            }
            cells = ("decodes" if running else "idle", f"{middle.bytes / 1e6:.1f}", 4 + middle.buckets,
                     f"{middle.pause_seconds:.4f}", f"{reports[0].pause_seconds:.4f}",
                     ", ".join(f"{name} {value}" for name, value in parts.items() if name != "seconds"),
                     f"{statistics.median(trips):.4f}")  # fmt: skip
            print(kit.row(*cells), flush=True)
    built.close()


async def decode(pool: Any, number: int) -> None:
    from mua.engine import SamplingParams

    params = SamplingParams(temperature=1.0, max_new_tokens=3000, stop_token_ids=())
    await pool.generate([number + 3] * 16, params, session=str(number), deadline_s=SECONDS)


async def round_trips(pool: Any, count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        await pool._engines[0].client.answers("/model_info", 60.0)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
