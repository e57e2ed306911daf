"""``model.shrink``: the same layout and the same code paths with a policy and budgets that a laptop can run.

The model keeps its family, its parallel layout and what makes it that architecture (grouped queries, experts, tied
embeddings); its sizes become the smallest that the layout divides. It gets random weights and a small tokenizer trained
on the domain's own text, written once under the output folder. Budgets become at most what is named here; the user
becomes the domain's scripted one. Nothing of this learns anything: it is for trying a recipe without its GPUs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mua.config.schema import ExperimentConfig
from mua.megatron.architecture import architecture_of
from mua.observe.output import prepare_output
from mua.trainer.ranks import is_rank0
from mua.utils.atomic import replacing
from mua.utils.errors import ModelError

VOCABULARY = 512
"""Tokens of the small tokenizer, and rows of the embedding before padding."""

_LENGTHS = {
    "max_turns": 3,
    "max_tool_calls": 4,
    "max_turn_tokens": 16,
    "max_tokens": 240,
    "concurrency": 16,
}
_MODEL = {"dtype": "float32", "max_length": 256, "hf_config": None, "shrink": False}
_ENGINE = {"count": 1, "tensor_parallel": 1, "max_total_tokens": 8192, "max_running_requests": 16}
_ENGINE_FIXED: dict[str, Any] = {"dtype": None, "memory_fraction": 0.5, "memory_saver": False, "extra": {}}
_HIDDEN, _HEAD = 64, 16
_EXPERTS = 4


def shrunk(config: ExperimentConfig) -> tuple[ExperimentConfig, dict[str, Any]]:
    """The small configuration, ``model.shrink`` off, and the config.json of its policy. Writes nothing.

    Raises:
        ModelError: no architecture to shrink.
    """
    architecture = shrunk_architecture(config)
    tree = config.model_dump()
    tree["model"] |= _MODEL | {"path": config.output / f"shrunk-{_digest(architecture, config)}"}
    tree["environment"]["prompt"] = "short"
    tree["user"] = {"kind": "scripted"} if config.user.asks_model else tree["user"]
    tree["rollout"] |= _at_most(tree["rollout"], _LENGTHS)
    tree["engine"] |= _at_most(tree["engine"], _ENGINE) | _ENGINE_FIXED
    minibatches = config.algorithm.minibatches
    tree["algorithm"] |= _at_most(tree["algorithm"], {"group_size": 2, "groups_per_step": 2 * minibatches})
    chunks = config.megatron.virtual_pipeline or 1
    ends = {f"{end}_stage_layers": tree["megatron"][f"{end}_stage_layers"] and chunks for end in ("first", "last")}
    tree["megatron"] |= {"max_tokens_per_microbatch": 256, "threads": 1} | ends
    tree["evaluation"] |= _at_most(tree["evaluation"], {"tasks": 2, "samples": 1})
    tree["cluster"] |= {"gpus_per_node": None, "nodes": 1, "episode_tokens": None}
    return ExperimentConfig.model_validate(tree), architecture


def _at_most(section: Mapping[str, Any], bounds: Mapping[str, int]) -> dict[str, int]:
    return {name: bound if section[name] is None else min(section[name], bound) for name, bound in bounds.items()}


def shrunk_architecture(config: ExperimentConfig) -> dict[str, Any]:
    """config.json of the small policy: the large one's, with every size replaced.

    Heads, widths and experts are multiples of the ranks that divide them; a pipeline stage has one layer a chunk.
    """
    large, layout = architecture_of(config.model), config.megatron
    tp, etp = layout.tensor_parallel, layout.expert_tensor_parallel or layout.tensor_parallel
    grouped = large.heads > large.kv_heads
    heads = math.lcm(tp, large.kv_heads) * (2 if grouped else 1)
    top_k = min(large.top_k, 2)
    experts = layout.expert_parallel * math.ceil(_EXPERTS / layout.expert_parallel)
    sizes = {
        "hidden_size": _HIDDEN,
        "intermediate_size": 64 * tp,
        "num_hidden_layers": layout.pipeline_parallel * (layout.virtual_pipeline or 1),
        "num_attention_heads": heads,
        "num_key_value_heads": large.kv_heads,
        "head_dim": _HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": _MODEL["max_length"],
        "initializer_range": 0.06,
        "moe_intermediate_size": 32 * etp,
        "shared_expert_intermediate_size": 32 * tp,
        "num_experts": experts,
        "num_local_experts": experts,
        "n_routed_experts": experts,
        "num_experts_per_tok": top_k,
        "first_k_dense_replace": 1,
        "mlp_only_layers": [],
    }
    kept = {key: value for key, value in large.hf_config.items() if key not in _DROPPED}
    replaced = {key: value for key, value in sizes.items() if key in kept or key in _ALWAYS}
    return kept | replaced | {"torch_dtype": "float32"}


_DROPPED = ("layer_types", "max_window_layers", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "auto_map")
"""Fields that name layers or tokens the small policy does not have."""
_ALWAYS = ("head_dim", "initializer_range")


def write_shrunk(config: ExperimentConfig, architecture: Mapping[str, Any]) -> None:
    """Writes weights and tokenizer to ``config.model.path``, unless they are there; whole or not at all.

    Args:
        config: the small configuration, from :func:`shrunk`.
        architecture: the small policy's config.json.

    Raises:
        ModelError: the domain's text is too small for the tokenizer.
    """
    folder = config.model.path
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(folder) as new:
            _write_tokenizer(new, config)
            _write_weights(new, architecture, config.seed)
    except OSError:
        if not folder.is_dir():  # else another process was faster, with the same bytes
            raise


def _write_tokenizer(folder: Path, config: ExperimentConfig) -> None:
    from transformers import AutoTokenizer

    from workbench.tokenizer import train_tokenizer

    train_tokenizer(_texts(config), folder, vocab_size=VOCABULARY)
    if (size := len(AutoTokenizer.from_pretrained(folder))) != VOCABULARY:
        raise ModelError(
            f"model.shrink: the texts of {', '.join(config.environment.shares)} yield a tokenizer of {size} tokens, "
            f"not {VOCABULARY}; give model.path a small model of your own instead"
        )


def _texts(config: ExperimentConfig) -> Iterator[str]:
    """What the domains say by themselves: prompts, personas and tools."""
    from mua.environment.selection import Selection

    selection = Selection.from_config(config.environment)
    for domain in selection.domains.values():
        tasks = domain.tasks("train")[:200]
        yield from (selection.system_prompt(tasks[0], style) for style in ("full", "short"))
        yield from (domain.persona(task) for task in tasks)
        environment = domain.environment()
        try:
            environment.reset(tasks[0], 0)
            yield from (json.dumps(tool.openai()) for tool in environment.tools())
        finally:
            environment.close()


def _write_weights(folder: Path, architecture: Mapping[str, Any], seed: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    end_of_turn = AutoTokenizer.from_pretrained(folder).eos_token_id
    fields = {key: value for key, value in architecture.items() if key not in ("architectures", "torch_dtype")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields, eos_token_id=end_of_turn)).save_pretrained(
            folder
        )


def _digest(architecture: Mapping[str, Any], config: ExperimentConfig) -> str:
    """Tells apart policies of different layouts, seeds and domains in one output folder."""
    known = json.dumps([architecture, config.seed, config.environment.shares], sort_keys=True)
    return hashlib.sha256(known.encode()).hexdigest()[:8]


def replaced(before: ExperimentConfig, after: ExperimentConfig, architecture: Mapping[str, Any]) -> Iterator[str]:
    """What :func:`shrunk` changed: a line ``key: old -> new`` each, those of the policy's config.json first."""
    large = architecture_of(before.model).hf_config
    common = {key: value for key, value in large.items() if key in architecture}
    yield from _differences(common, architecture, "config.json: ")
    yield from _differences(before.model_dump(mode="json"), after.model_dump(mode="json"), "")


def _differences(before: Mapping[str, Any], after: Mapping[str, Any], path: str) -> Iterator[str]:
    for name in before:
        old, new, key = before[name], after[name], f"{path}{name}"
        if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
            yield from _differences(old, new, f"{key}.")
        elif old != new:
            yield f"{key}: {_shown(old)} -> {_shown(new)}"


def _shown(value: Any) -> str:
    return "section" if isinstance(value, dict) and value else "null" if value is None else str(value)


def prepare_shrunk(config: ExperimentConfig, record: str) -> ExperimentConfig:
    """The small configuration, recorded in the output folder as ``record``, its policy written, the changes printed."""
    small, architecture = shrunk(config)
    if is_rank0():
        print("model.shrink replaces, to try the layout at toy size:")
        print("\n".join(f"  {line}" for line in replaced(config, small, architecture)))
    prepare_output(small, record)
    write_shrunk(small, architecture)
    return small
