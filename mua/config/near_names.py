"""What an unknown key or value may mean: names of slime, verl and Megatron-LM that this configuration lacks, and near
spellings of its own.

Nothing here is accepted in place of a key or value: a run's record has one name for one thing. It only decides what an
error suggests.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

_TENSOR_PARALLEL = "megatron.tensor_parallel engine.tensor_parallel"
_CLIP = "algorithm.clip_low algorithm.clip_high"
_KEYS: dict[str, str] = {
    **dict.fromkeys(("lr", "max_lr", "actor_lr"), "optimizer.learning_rate critic.optimizer.learning_rate"),
    **dict.fromkeys(("max_grad_norm", "grad_clip"), "optimizer.clip_grad"),
    **dict.fromkeys(("tp", "tp_size", "tensor_model_parallel_size", "rollout_num_gpus_per_engine"), _TENSOR_PARALLEL),
    **dict.fromkeys(("pp", "pp_size", "pipeline_model_parallel_size"), "megatron.pipeline_parallel"),
    **dict.fromkeys(("cp", "cp_size", "context_parallel_size"), "megatron.context_parallel"),
    **dict.fromkeys(("ep", "ep_size", "expert_model_parallel_size"), "megatron.expert_parallel"),
    **dict.fromkeys(("micro_batch_size", "max_tokens_per_gpu"), "megatron.max_tokens_per_microbatch"),
    **dict.fromkeys(("n", "n_samples_per_prompt", "num_generations"), "algorithm.group_size"),
    **dict.fromkeys(("train_batch_size", "rollout_batch_size", "global_batch_size"), "algorithm.groups_per_step"),
    **dict.fromkeys(("ppo_mini_batch_size", "num_steps_per_rollout"), "algorithm.minibatches"),
    **dict.fromkeys(("kl_coef", "kl_loss_coef", "beta"), "algorithm.kl_coefficient"),
    **dict.fromkeys(("clip_ratio", "eps_clip", "cliprange"), _CLIP),
    **dict.fromkeys(("adv_estimator", "advantage_estimator"), "algorithm.advantage"),
    **dict.fromkeys(("max_new_tokens", "max_response_length"), "rollout.max_turn_tokens"),
    **dict.fromkeys(("max_model_len", "context_length", "seq_length"), "model.max_length"),
    **dict.fromkeys(("hf_checkpoint", "model_name", "name_or_path", "model_name_or_path"), "model.path"),
    **dict.fromkeys(("gpu_memory_utilization", "mem_fraction_static"), "engine.memory_fraction"),
    **dict.fromkeys(("num_rollout", "max_steps", "total_epochs", "num_train_epochs"), "trainer.steps"),
    **dict.fromkeys(("save_interval", "save_freq", "save_steps"), "trainer.save_every"),
    **dict.fromkeys(("eval_interval", "test_freq", "eval_steps"), "trainer.evaluate_every"),
    **dict.fromkeys(("env", "env_name", "domain", "task", "dataset"), "environment.name"),
    **dict.fromkeys(("url", "api_base", "endpoint"), "user.llm.base_url judge.llm.base_url"),
}
"""Keys of ours by the name that another framework has for them."""
_VALUES: dict[str, dict[str, str]] = {
    "loss": {"ppo": "grpo, the clipped ratio; PPO is algorithm.loss=grpo with algorithm.advantage=gae",
             "dapo": "grpo with algorithm.clip_high=0.28 and a filter {kind: range}", "sft": "cross_entropy"},
    "advantage": {"ppo": "gae", "dapo": "grpo", "dr_grpo": "grpo with algorithm.divide_by_std=false"},
    "dtype": {"bf16": "bfloat16", "fp16": "bfloat16", "fp32": "float32"},
    "kl_estimator": {"kl": "k1", "mse": "k2", "low_var_kl": "k3"},
    "aggregation": {"seq_mean_token_mean": "sequence_mean", "seq_mean_token_sum": "sequence_sum"},
    "placement": {"colocate": "colocated", "hybrid": "colocated", "disaggregated": "separate"},
}  # fmt: skip
"""What values of other frameworks mean, by the last name of the key."""


def plain_name(name: str) -> str:
    """A name as this configuration writes names."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip().lstrip("-"))
    return name.replace("-", "_").replace(" ", "_").lower()


def nearest_keys(key: Sequence[str], siblings: Sequence[str], everywhere: dict[str, str]) -> list[str]:
    """The keys that ``key`` may mean, best first; none where no name is near.

    Args:
        siblings: what the section of ``key`` has.
        everywhere: last names of all keys of the schema by their dotted paths.
    """
    name, above = plain_name(key[-1]), ".".join(key[:-1])
    meant = _KEYS.get(name, "").split()
    inside = [path for path in meant if above and path.startswith(f"{above}.")]
    if close := difflib.get_close_matches(name, siblings, n=1, cutoff=0.8):
        inside = inside or [".".join((*key[:-1], close[0]))]
    elif above and not inside:  # a name that many sections have, such as base_url
        last = {path.rpartition(".")[2] for path in meant}
        inside = [f"{above}.{one}" for one in siblings if one in last or one.startswith(f"{name}_")]
    if inside or meant:
        return inside or meant
    flat = [path for path in everywhere if path.replace(".", "_") == "_".join((*key[:-1], name))]
    same = sorted((path for path, last in everywhere.items() if last == name), key=lambda path: path.count("."))
    if flat or (same and (len(same) <= 3 or not above)):
        return flat or same[:3]
    if close := difflib.get_close_matches(name, siblings, n=1, cutoff=0.7):
        return [".".join((*key[:-1], close[0]))]
    near = difflib.get_close_matches(name, sorted(set(everywhere.values())), n=1, cutoff=0.8)
    return [path for path, last in everywhere.items() if last in near][:3]


def nearest_value(key: str, value: str, choices: Sequence[str]) -> str | None:
    """What ``value`` of the key ``key`` (its last name) may mean; None where nothing is near."""
    name, by_name = plain_name(value), {plain_name(choice): choice for choice in choices}
    meant = _VALUES.get(key, {}).get(name)
    if name not in by_name and meant and re.split(r"[ ,]", meant)[0] in choices:
        return meant
    near = difflib.get_close_matches(name, by_name, n=1) or [one for one in by_name if one.startswith(name)]
    return by_name[near[0]] if near and name else None
