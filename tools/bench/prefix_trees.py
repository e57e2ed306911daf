"""What computing common prefixes once saves: time and memory of a step on trees against sequences side by side.

    python -m tools.bench.prefix_trees [group-8 group-16 turns-10 turns-30 turns-100]

Shapes: groups of n trajectories that share a long prompt, and one trajectory cut into a sample for each of its turns,
as a sampler does that keeps every request (system prompt, reply and observation of 2,000, 600 and 900 tokens).

A shape is run at a fraction of its size: tokens, rows, width, heads and MLP of Qwen3-8B are all multiplied by it, and
its vocabulary further by the share of layers that are left. Attention's share of the operations, which grows with
length over width, is then that of Qwen3-8B on the full lengths.

Two limits: the ratio of tokens, and that of operations, in which every branch pays for attention to what it shares and
every trained token for the output layer. The two sides are processes of one thread that take turns. Time is CPU time of
a step, the least of those measured. Memory is the most that is resident during a step beyond what is before it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tools import kit

SYSTEM, REPLY, OBSERVATION = 2000, 600, 900
PROMPT, ANSWER = 7000, 1000
ROW = 32768
REFERENCE = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
REFERENCE_LAYERS, REFERENCE_VOCABULARY, HEAD_DIM, LAYERS = 36, 151936, 128, 4
HEADINGS = (
    "shape", "size", "tokens", "computed", "limit by tokens", "by operations", "speed-up", "of tokens", "of operations",
    "CPU s apart", "merged", "MiB apart", "merged",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    title: str
    count: int
    grows: bool
    """Whether each sequence goes on where the one before ended."""
    scale: float


SHAPES = {
    "group-8": Shape("group of 8, prompt 7,000, answers 1,000", 8, grows=False, scale=1 / 8),
    "group-16": Shape("group of 16, prompt 7,000, answers 1,000", 16, grows=False, scale=1 / 8),
    "turns-10": Shape("10 turns, a sample each", 10, grows=True, scale=1 / 8),
    "turns-30": Shape("30 turns, a sample each", 30, grows=True, scale=1 / 16),
    "turns-100": Shape("100 turns, a sample each", 100, grows=True, scale=1 / 32),
}


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("shapes", nargs="*", default=["group-8", "group-16", "turns-10"], help=", ".join(SHAPES))
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each side, after one that is not")
    parser.add_argument("--size", type=int, help="run every shape at one part in so many; without it at its own")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{LAYERS} layers, one thread, {kit.machine()}\n\n{kit.head(*HEADINGS)}")
    for name in arguments.shapes:
        shape = replace(SHAPES[name], scale=1 / arguments.size) if arguments.size else SHAPES[name]
        print(row_of_table(shape, arguments.steps), flush=True)


def row_of_table(shape: Shape, steps: int) -> str:
    samples, config = list(sequences(shape)), model_config(shape.scale)
    tokens, operations = limits(samples, config)
    with tempfile.TemporaryDirectory(prefix="mua-bench-") as folder:
        kit.random_qwen3(Path(folder), 1, **config)
        apart, merged = measured(Path(folder), samples, int(ROW * shape.scale), steps)
    assert abs(apart["loss"] - merged["loss"]) < 1e-4, (apart, merged)
    count = sum(len(ids) for ids, _ in samples)
    gain = apart["seconds"] / merged["seconds"]
    cells = [
        shape.title, f"1/{1 / shape.scale:.0f}", f"{count:,}", f"{count / tokens:,.0f}", f"{tokens:.2f}",
        f"{operations:.2f}", f"{gain:.2f}", f"{gain / tokens:.0%}", f"{gain / operations:.0%}",
        *(f"{side['seconds']:.1f}" for side in (apart, merged)),
        *(f"{side['mebibytes']:.0f}" for side in (apart, merged)),
    ]  # fmt: skip
    return kit.row(*cells)


def sequences(shape: Shape) -> Iterator[tuple[np.ndarray, int]]:
    """For each sequence its ids and the first of its trained tokens."""
    random = np.random.default_rng(1)

    def text(length: int) -> np.ndarray:
        return random.integers(0, 1000, max(1, int(length * shape.scale))).astype(np.int32)

    history = text(SYSTEM if shape.grows else PROMPT)
    for _ in range(shape.count):
        reply = text(REPLY if shape.grows else ANSWER)
        yield np.concatenate([history, reply]), len(history)
        if shape.grows:
            history = np.concatenate([history, reply, text(OBSERVATION)])


def model_config(scale: float) -> dict[str, Any]:
    """The reference's config.json at a fraction of its width, with a few of its layers."""
    sizes = {key: max(1, int(value * scale)) for key, value in REFERENCE.items()}
    vocabulary = int(REFERENCE_VOCABULARY * scale * LAYERS / REFERENCE_LAYERS)
    positions = {"max_position_embeddings": 65536, "tie_word_embeddings": False}
    depth = {"num_hidden_layers": LAYERS, "vocab_size": max(1024, vocabulary), "head_dim": HEAD_DIM}
    return sizes | depth | positions


def limits(samples: list[tuple[np.ndarray, int]], config: dict[str, Any]) -> tuple[float, float]:
    """Tokens and operations of the sequences side by side over those of their tree."""
    from mua.megatron import trees

    width, heads, groups = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    weights = 2 * width * HEAD_DIM * (heads + groups) + 3 * width * config["intermediate_size"]
    output = sum(len(ids) - first for ids, first in samples) * 2 * width * config["vocab_size"]

    def operations(spans: list[tuple[int, int]]) -> float:
        pairs = sum(length * (start + (length + 1) / 2) for start, length in spans)
        return LAYERS * (2 * weights * sum(length for _, length in spans) + 4 * heads * HEAD_DIM * pairs) + output

    apart, merged = [(0, len(ids)) for ids, _ in samples], trees.merge_prefixes([ids for ids, _ in samples])
    tokens = sum(length for _, length in apart)
    return tokens / merged.tokens, operations(apart) / operations([(node.start, len(node)) for node in merged.nodes])


def measured(
    folder: Path, samples: list[tuple[np.ndarray, int]], row: int, steps: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of a step on sequences side by side and on trees, with ``seconds`` and ``mebibytes``."""
    found: list[list[dict[str, float]]] = [[], []]
    with side(folder, samples, row, False) as apart, side(folder, samples, row, True) as merged:
        for _, (steps_of, connection) in itertools.product(range(1 + steps), zip(found, (apart, merged), strict=True)):
            connection.send("step")
            steps_of.append(connection.recv())
    # Memory is that of the first step, before the allocator keeps anything for reuse; time that of a later one.
    first, second = (
        min(later, key=lambda step: step["seconds"]) | {"mebibytes": warm["mebibytes"]} for warm, *later in found
    )
    return first, second


@contextmanager
def side(folder: Path, samples: list[tuple[np.ndarray, int]], row: int, merge: bool) -> Iterator[Connection]:
    """A process that makes a step whenever it is told to."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there, folder, samples, row, merge))
    process.start()
    there.close()
    try:
        yield here
        here.send("stop")
        process.join(60)
    finally:
        process.kill()


def serve(connection: Connection, folder: Path, samples: list[tuple[np.ndarray, int]], row: int, merge: bool) -> None:
    from mua.algorithms.losses import PolicyLoss
    from mua.compat import megatron_cpu
    from mua.config.schema import AlgorithmConfig

    megatron_cpu.install()
    row = max(row, *(len(ids) for ids, _ in samples))
    settings = {"max_tokens_per_microbatch": row, "merge_prefixes": merge}
    built = kit.bare_learner(folder, 65536, learning_rate=0.0, **settings)
    loss, batch = PolicyLoss(AlgorithmConfig(epochs=2)), train_batch(samples)
    built.train_step(train_batch([(ids[:9], 8) for ids, _ in samples[:1]]), loss)  # the optimizer's state is made here
    while connection.recv() == "step":
        before, started = kit.resident(), time.process_time()
        kit.forget_peak()
        metrics = built.train_step(batch, loss)
        seconds, most = time.process_time() - started, kit.resident("VmHWM") - before
        connection.send({"loss": metrics["train/loss"], "seconds": seconds, "mebibytes": most / 2**20})
    built.close()


def train_batch(samples: list[tuple[np.ndarray, int]]) -> Any:
    from mua.types import TrainBatch, TrainSequence

    trained = sum(len(ids) - first for ids, first in samples)
    made = []
    for number, (ids, first) in enumerate(samples):
        mask = (np.arange(len(ids)) >= first).astype(np.float32)
        old = np.full(len(ids), -np.log(1000), np.float32)
        advantages = np.full(len(ids), (-1.0) ** number, np.float32)
        made.append(TrainSequence(ids, mask / np.float32(trained), advantages, old, old))
    return TrainBatch(made, 1.0, {"tokens": float(trained), "sequences": float(len(samples))})


if __name__ == "__main__":
    main()
