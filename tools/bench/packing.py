"""Padding and balance of packed micro-batches, on lengths of real conversations.

    python -m tools.bench.packing [--groups 32] [--members 8]

Every task of a batch is played ``--members`` times by the domain's scripted expert, each time a little looser, against
its scripted user, and turned into token ids with a tokenizer trained on such conversations. Each batch, a mixture of
all, and one of drawn lengths is laid into micro-batches for several layouts, once in the order of arrival (next-fit, to
ranks in turn) and once each with ``megatron.balance`` by tokens and by operations. Nothing is trained: what is printed
follows from the plan (mua/megatron/packing.py).
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from environments.kit.demonstrate import demonstrate, spoken_text
from mua.config.load import load_config
from mua.config.schema import EnvironmentConfig, MegatronConfig
from mua.environment.protocol import PromptStyle, Task
from mua.environment.selection import Selection
from mua.types import Int32Array, Json
from tools import kit

RECIPES = {"help_desk": "configs/demo.yaml", "retail": "configs/qwen3-8b-1x8.yaml"}
"""Where a domain's max_tokens_per_microbatch comes from."""
ARCHITECTURES = {"dense": "configs/models/Qwen3-8B", "moe": "configs/models/Qwen3-30B-A3B"}
LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "DP1": ("dense", {}),
    "DP2": ("dense", {"data_parallel": 2}),
    "DP8": ("dense", {"data_parallel": 8}),
    "TP2 DP4": ("dense", {"tensor_parallel": 2, "data_parallel": 4}),
    "CP2 DP4": ("dense", {"context_parallel": 2, "data_parallel": 4}),
    "PP2 VPP2 DP4": ("dense", {"pipeline_parallel": 2, "virtual_pipeline": 2, "data_parallel": 4}),
    "DP8 EP8": ("moe", {"data_parallel": 8, "expert_parallel": 8}),
}
VOCABULARY = 8192
WAYS = ("arrival", "tokens", "flops")


@dataclass(frozen=True, slots=True)
class Found:
    """One batch in one layout, laid out one way."""

    microbatches: int
    padding: float
    """Share of computed positions."""
    ranks: float
    """Operations of the busiest rank over the mean."""
    together: float
    """Operations of the most expensive of micro-batches that run at the same time over their mean."""
    utilization: float


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    mixture: list[Int32Array] = []
    for domain, recipe in RECIPES.items():
        capacity = load_config(kit.ROOT / recipe).megatron.max_tokens_per_microbatch
        for prompt, ids in batches(domain, arguments.groups, arguments.members, arguments.seed):
            report(f"{domain}, {prompt} prompt", ids, capacity)
            mixture += ids
    np.random.default_rng(arguments.seed).shuffle(mixture)
    count = arguments.groups * arguments.members
    report("mixture", mixture[:count], capacity)
    drawn = np.minimum(np.random.default_rng(arguments.seed).lognormal(8.5, 0.8, count), capacity).astype(int)
    report("drawn (log-normal)", [np.zeros(length, dtype=np.int32) for length in drawn], capacity)


def report(title: str, ids: Sequence[Int32Array], capacity: int) -> None:
    """A table of one batch."""
    lengths = np.array([len(sequence) for sequence in ids])
    print(
        f"\n## {title}\n\n{len(ids)} conversations of {lengths.min():,} to {lengths.max():,} tokens "
        f"(mean {lengths.mean():,.0f}), micro-batches of {capacity:,}\n"
    )
    print_table(ids, capacity)


def batches(domain: str, groups: int, members: int, seed: int) -> Iterator[tuple[PromptStyle, list[Int32Array]]]:
    """The same conversations with the short and with the full prompt, tools included."""
    from workbench.tokenizer import train_tokenizer

    selection = Selection.from_config(EnvironmentConfig(name=domain))
    tasks = selection.tasks("train")[:groups]
    played = [
        (task, asyncio.run(demonstrate(selection.domain(task), task, seed + member, member / 20)).messages)
        for task in tasks
        for member in range(members)
    ]
    with tempfile.TemporaryDirectory(prefix="mua-bench-") as folder:
        described = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
        (Path(folder) / "config.json").write_text(json.dumps(described))
        spoken = spoken_text([messages for _, messages in played])
        train_tokenizer([selection.system_prompt(tasks[0], "full"), *spoken], Path(folder), vocab_size=VOCABULARY)
        styles: tuple[PromptStyle, ...] = ("short", "full")
        for style in styles:
            yield style, list(encoded(Path(folder), selection, played, style))


def encoded(
    folder: Path, selection: Selection, played: Sequence[tuple[Task, list[Json]]], style: PromptStyle
) -> Iterator[Int32Array]:
    """Token ids of every segment, as an episode would have left them."""
    from mua.tokens.chat_family import load_family
    from mua.tokens.conversation import Conversation

    family = load_family(folder, thinking=False)
    for task, messages in played:
        tools = selection.domain(task).environment().tools() if style == "full" else ()
        system: Json = {"role": "system", "content": selection.system_prompt(task, style)}
        conversation = Conversation.from_messages(family, [system, *messages], tools, train_on="all")
        for segment in conversation.segments():
            yield segment.ids


def print_table(ids: Sequence[Int32Array], capacity: int) -> None:
    """A line a layout; of each figure those of arrival order, of balance by tokens, and by operations."""
    print(kit.head("layout", "micro-batches", "padding", "busiest rank", "at the same time", "utilization"))
    for name in LAYOUTS:
        found = [measured(name, ids, capacity, way) for way in WAYS]
        counts = " / ".join(f"{one.microbatches}" for one in found)
        padding, used = (" / ".join(f"{getattr(one, key):.2%}" for one in found) for key in ("padding", "utilization"))
        ranks, together = (" / ".join(f"{getattr(one, key):.3f}" for one in found) for key in ("ranks", "together"))
        print(kit.row(name, counts, padding, ranks, together, used), flush=True)


def measured(name: str, ids: Sequence[Int32Array], capacity: int, way: str) -> Found:
    """One of :data:`LAYOUTS`, laid out one of :data:`WAYS`."""
    from megatron_bridge.hf_config import read_hf_config
    from mua.megatron.architecture import Architecture, Workload
    from mua.megatron.packing import Alignment, PlannedMicrobatch, load_balance, pack

    kind, sizes = LAYOUTS[name]
    interleaved = "virtual_pipeline" in sizes
    config = MegatronConfig.model_validate({"max_tokens_per_microbatch": capacity, "balance": "tokens", **sizes})
    alignment, multiple = Alignment.of(config), config.pipeline_parallel if interleaved else 1
    workload = Workload.of(Architecture.from_hf(read_hf_config(kit.ROOT / ARCHITECTURES[kind])))
    if way != "arrival":
        packed = pack(ids, config.model_copy(update={"balance": way}), workload)
        load, plan = packed.balance, packed.plan
        return Found(
            plan.count, plan.padding_share, load.imbalance_flops, load.microbatch_imbalance_flops, load.utilization
        )
    lengths = [len(sequence) for sequence in ids]
    filled = next_fit(lengths, capacity, config.data_parallel * multiple)
    padded = [sum(alignment.padded([lengths[index] for index in taken])) for taken in filled]
    least = max(padded) if interleaved else 0
    planned = [PlannedMicrobatch(tuple(taken), tuple(lengths[i] for i in taken)) for taken in filled]
    dealt = [planned[rank :: config.data_parallel] for rank in range(config.data_parallel)]
    load = load_balance(dealt, config, workload, least)
    padding = 1 - sum(lengths) / sum(max(size, least) for size in padded)
    return Found(len(filled), padding, load.imbalance_flops, load.microbatch_imbalance_flops, load.utilization)


def next_fit(lengths: Sequence[int], capacity: int, multiple: int) -> list[list[int]]:
    """Filled in the order of arrival, a new one where a sequence does not fit; a multiple of ``multiple``."""
    filled: list[list[int]] = [[]]
    for index, length in enumerate(lengths):
        if sum(lengths[i] for i in filled[-1]) + length > capacity:
            filled.append([])
        filled[-1].append(index)
    return filled + [[] for _ in range(-len(filled) % multiple)]


if __name__ == "__main__":
    main()
