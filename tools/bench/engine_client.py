"""Tokens per second through EnginePool against SGLang's own in-process engine, same model, prompts and run.

    python -m tools.bench.engine_client [--concurrency 64] [--rounds 3] [--server key=value ...]

The model is a random Qwen3 of 1.7 M parameters (hidden 192, 4 layers, head_dim 32, vocabulary 600). Every request
has a prompt of 32 tokens and samples 128 at temperature 1 with log-probabilities. Each mode is run ``--rounds``
times and the best round counts. ``--server key=value`` passes a native argument to the pool's server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from mua.compat.sglang_cpu import cpu_environment
from mua.config.schema import EngineConfig
from mua.engine import SamplingParams
from mua.engine.pool import EnginePool
from tools import kit

PROMPT_TOKENS = 32
NEW_TOKENS = 128
VOCAB = 600


def prompts(n: int) -> list[list[int]]:
    """Distinct random prompts, so that the prefix cache does not help."""
    generator = random.Random(0)
    return [[generator.randrange(5, VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(n)]


def in_process(folder: Path, concurrency: int, rounds: int) -> float:
    """SGLang's Engine.generate on one batch, the upper bound of any client. Run under the CPU environment."""
    import sglang

    engine = sglang.Engine(
        model_path=str(folder), device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
        dtype="float32", mem_fraction_static=0.5, max_total_tokens=65536, max_running_requests=concurrency,
        disable_overlap_schedule=True, skip_tokenizer_init=True, log_level="error",
    )  # fmt: skip
    params = {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    best = 0.0
    for _ in range(rounds):
        began = perf_counter()
        engine.generate(input_ids=prompts(concurrency), sampling_params=params, return_logprob=True)
        best = max(best, concurrency * NEW_TOKENS / (perf_counter() - began))
    engine.shutdown()
    return best


async def through_pool(
    folder: Path, concurrency: int, rounds: int, *, deterministic: bool, extra: dict[str, Any]
) -> float:
    """The client path: one HTTP request per sample, all at once."""
    config = EngineConfig(
        dtype="float32", memory_fraction=0.5, max_total_tokens=65536, max_running_requests=concurrency,
        deterministic=deterministic, extra=extra,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as logs:
        async with EnginePool(config, dtype="float32", context_length=2048, seed=1, log_folder=Path(logs)) as pool:
            await pool.start(folder)
            return max([await _round(pool, concurrency, seed) for seed in range(rounds)])


async def _round(pool: EnginePool, concurrency: int, seed: int) -> float:
    began = perf_counter()
    work = []
    for index, prompt in enumerate(prompts(concurrency)):
        params = SamplingParams(1.0, NEW_TOKENS, (), seed=seed * 10_000 + index)
        work.append(pool.generate(prompt, params, session=str(index), deadline_s=600))
    found = await asyncio.gather(*work)
    return sum(len(generation.ids) for generation in found) / (perf_counter() - began)


def _value(text: str) -> str | int | bool:
    return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)


def main() -> None:
    """Print one JSON object with tokens per second of every mode."""
    parser = kit.parser(__doc__)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--server", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--in-process", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_process:
        print(in_process(options.in_process, options.concurrency, options.rounds))
        return
    extra = {key: _value(value) for key, _, value in (item.partition("=") for item in options.server)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        kit.random_qwen3(
            folder, 0, vocab_size=VOCAB, hidden_size=192, intermediate_size=512, num_hidden_layers=4,
            num_attention_heads=6, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
            tie_word_embeddings=True, eos_token_id=2, bos_token_id=None,
        )  # fmt: skip
        sizes = (options.concurrency, options.rounds)
        result = {"concurrency": options.concurrency, "server": extra, "load_before": os.getloadavg()[0]}
        again = [f"--in-process={folder}", f"--concurrency={sizes[0]}", f"--rounds={sizes[1]}"]
        result["in_process"] = kit.afresh(__spec__.name, *again, environment=cpu_environment())
        result["pool"] = asyncio.run(through_pool(folder, *sizes, deterministic=False, extra=extra))
        result["pool_deterministic"] = asyncio.run(through_pool(folder, *sizes, deterministic=True, extra=extra))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
