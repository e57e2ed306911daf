"""Bytes of a batch that each trainer rank gets in a step, by the plan, against the whole batch pickled to every rank.

    python -m tools.bench.batch_bytes [RECIPE ...]

A step scores its batch under the policy and trains on it once, as GRPO with recomputed log-probabilities does; the
engine's expert choices are replayed where the model has experts. Lengths are drawn (log-normal), as many sequences as
the recipe's step has. Nothing is sent: the figures are those of the arrays that ``mua/megatron/batch_sharder.py``
sends, which ``tests/unit/test_megatron_batch_sharder.py`` holds to what is sent between real ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mua.config.load import load_config
from mua.config.schema import MegatronConfig
from mua.megatron.architecture import Architecture, Workload
from mua.megatron.packing import Alignment, Packed, pack
from tools import kit

RECIPES = ("configs/qwen3-8b-1x8.yaml", "configs/qwen3-30b-a3b-2x8.yaml", "configs/qwen3-235b-a22b-16x8.yaml")
FLOAT = ID = 4
TRAINED = ("weights", "advantages", "behaviour", "old")
"""Columns of the loss; with a reference there is one more."""
ELSEWHERE = ("version", "turns")
"""Columns that were pickled and that no rank but 0 reads."""


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("recipes", nargs="*", type=Path, default=[kit.ROOT / recipe for recipe in RECIPES])
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(
        kit.head("recipe", "ranks", "tokens", "pickled, each rank", "all ranks", "shares, most to a rank", "all ranks")
    )
    for recipe in arguments.recipes:
        print(kit.row(*figures(recipe, arguments.seed)), flush=True)


def figures(recipe: Path, seed: int) -> Iterator[str]:
    """A line of the table."""
    from megatron_bridge.hf_config import read_hf_config

    config = load_config(recipe)
    megatron, algorithm = config.megatron, config.algorithm
    assert config.model.hf_config is not None, "a recipe names its model's shape"
    architecture = Architecture.from_hf(read_hf_config(config.model.hf_config.parent))
    count, most = algorithm.groups_per_step * algorithm.group_size, megatron.max_tokens_per_microbatch
    lengths = np.minimum(np.random.default_rng(seed).lognormal(8.5, 0.8, count), most).astype(int).tolist()
    ids = [np.zeros(length, dtype=np.int32) for length in lengths]
    packed = pack(ids, megatron.model_copy(update={"merge_prefixes": False}), Workload.of(architecture))
    choices = architecture.layers * architecture.top_k * bool(architecture.experts)
    pickled = sum(lengths) * (2 * (ID + choices + len(ELSEWHERE) * FLOAT) + (3 + 4) * FLOAT)
    shares = [*received(megatron, packed, lengths, architecture)]
    yield config.name
    yield f"{megatron.world_size}"
    yield f"{sum(lengths):,}"
    yield f"{pickled / 1e6:,.0f} MB"
    yield f"{pickled * (megatron.world_size - 1) / 1e9:,.1f} GB"
    yield f"{max(shares) / 1e6:,.1f} MB"
    yield f"{sum(shares[1:]) / 1e9:,.2f} GB"


def received(megatron: MegatronConfig, packed: Packed, lengths: list[int], of: Architecture) -> Iterator[int]:
    """Bytes of each rank in one step, those of data-parallel index 0 in the first stage first, headers aside."""
    stages, contexts, tensors = megatron.pipeline_parallel, megatron.context_parallel, megatron.tensor_parallel
    alignment = Alignment.of(megatron)
    for stage, layers in enumerate(layers_of(megatron, of.layers)):
        for own in packed.microbatches:
            tokens = sum(lengths[i] for one in own for i in one.sequences)
            padded = sum(sum(alignment.padded([n for _, n in one.spans], packed.plan.least)) for one in own)
            columns = ID * (stage in (0, stages - 1)) + FLOAT * len(TRAINED) * (stage == stages - 1)
            experts = padded // (contexts * tensors) * layers * of.top_k if of.experts else 0
            yield from [tokens * columns + experts] * (contexts * tensors)


def layers_of(megatron: MegatronConfig, layers: int) -> list[int]:
    """Layers of each pipeline stage."""
    first, last = megatron.first_stage_layers, megatron.last_stage_layers
    middle = megatron.pipeline_parallel - (first is not None) - (last is not None)
    even = (layers - (first or 0) - (last or 0)) // max(middle, 1)
    return [*([] if first is None else [first]), *[even] * middle, *([] if last is None else [last])]


if __name__ == "__main__":
    main()
