"""What people type who come from slime, verl, TRL or Megatron-LM, and what this configuration calls it.

Nothing here is accepted in place of a key or value: a run's record has one name for one thing. It only decides what an
error suggests.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence

_SAME: dict[str, str] = {
    "optimizer.learning_rate": "lr learning_rate max_lr peak_lr actor_lr",
    "optimizer.min_learning_rate": "min_lr lr_min final_lr",
    "optimizer.schedule": "lr_scheduler lr_schedule lr_scheduler_type lr_decay_style lr_decay scheduler warmup_style",
    "optimizer.warmup_steps": "warmup lr_warmup lr_warmup_steps num_warmup_steps lr_warmup_iters warmup_iters "
    "lr_warmup_fraction warmup_ratio lr_warmup_steps_ratio",
    "optimizer.weight_decay": "wd",
    "optimizer.beta1": "betas adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.epsilon": "eps adam_eps adam_epsilon",
    "optimizer.clip_grad": "max_grad_norm grad_clip clip_grad_norm gradient_clip gradient_clipping clip_gradient",
    "optimizer.cpu_offload_fraction": "optimizer_cpu_offload optimizer_offload offload_optimizer "
    "optimizer_offload_fraction",
    "optimizer.precision_aware": "use_precision_aware_optimizer",
    "critic.optimizer.learning_rate": "critic_lr",
    "critic.value_clip": "cliprange_value value_clip_range eps_clip_value",
    "critic.warmup_steps": "critic_warmup num_critic_only_steps",
    "megatron.pipeline_parallel": "pp pp_size pipeline_parallel_size pipeline_model_parallel_size",
    "megatron.virtual_pipeline": "vpp vpp_size virtual_pipeline_model_parallel_size "
    "num_layers_per_virtual_pipeline_stage virtual_pipeline_parallel",
    "megatron.context_parallel": "cp cp_size context_parallel_size sp_size ulysses_sequence_parallel_size",
    "megatron.expert_parallel": "ep ep_size expert_parallel_size expert_model_parallel_size",
    "megatron.expert_tensor_parallel": "etp etp_size expert_tensor_parallel_size",
    "megatron.data_parallel": "dp dp_size data_parallel_size replicas",
    "megatron.max_tokens_per_microbatch": "micro_batch_size mbs ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
    "per_device_train_batch_size max_tokens_per_gpu ppo_max_token_len_per_gpu tokens_per_row microbatch_size "
    "max_tokens_per_micro_batch max_token_len_per_gpu",
    "megatron.recompute": "gradient_checkpointing enable_gradient_checkpointing recompute_granularity "
    "activation_checkpointing recompute_activations",
    "megatron.distributed_optimizer": "use_distributed_optimizer zero_stage zero",
    "megatron.offload": "param_offload grad_offload optimizer_offload_cpu offload_train actor_offload",
    "megatron.moe_aux_loss": "moe_aux_loss_coeff aux_loss_coef router_aux_loss_coef",
    "megatron.moe_z_loss": "moe_z_loss_coeff",
    "megatron.routing_replay": "use_routing_replay router_replay r3 rollout_routing_replay",
    "megatron.grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
    "algorithm.group_size": "n num_generations n_samples n_samples_per_prompt num_return_sequences "
    "samples_per_prompt rollouts_per_prompt responses_per_prompt rollout_n",
    "algorithm.groups_per_step": "train_batch_size rollout_batch_size global_batch_size prompts_per_step "
    "num_prompts_per_step",
    "algorithm.minibatches": "mini_batch_size ppo_mini_batch_size num_minibatches num_mini_batch num_mini_batches "
    "num_steps_per_rollout minibatch_size",
    "algorithm.epochs": "ppo_epochs num_ppo_epochs num_iterations update_epochs",
    "algorithm.kl_coefficient": "kl_coef kl_coeff kl_loss_coef kl_loss_coeff init_kl_coef use_kl_loss kl_beta beta "
    "kl_weight kl_penalty_coef kl",
    "algorithm.kl_estimator": "kl_loss_type kl_penalty kl_type kl_penalty_type",
    "algorithm.kl_in": "use_kl_in_reward",
    "algorithm.entropy_coefficient": "entropy_coef entropy_coeff entropy_bonus ent_coef",
    "algorithm.clip_low": "clip_ratio_low eps_clip_low epsilon_low clip_low_ratio",
    "algorithm.clip_high": "clip_ratio_high eps_clip_high epsilon_high clip_high_ratio clip_higher",
    "algorithm.dual_clip": "clip_ratio_c eps_clip_c",
    "algorithm.advantage": "adv_estimator advantage_estimator adv estimator advantages algo algorithm_name",
    "algorithm.divide_by_std": "norm_adv_by_std_in_grpo grpo_std_normalization scale_rewards std_normalization",
    "algorithm.aggregation": "loss_agg_mode loss_aggregation",
    "algorithm.discount": "gamma",
    "algorithm.gae_lambda": "lam lambda lambd",
    "algorithm.loss": "policy_loss loss_mode objective policy_loss_type loss_fn",
    "algorithm.correction": "tis use_tis rollout_is importance_sampling_correction use_rollout_is",
    "algorithm.correction_high": "tis_imp_ratio_cap tis_clip rollout_is_threshold tis_clip_high",
    "algorithm.correction_low": "tis_clip_low",
    "algorithm.filters": "filter filter_groups dynamic_sampling_filter_path dynamic_sampling_filter",
    "algorithm.refill": "dynamic_sampling",
    "algorithm.refill.oversample": "over_sampling_batch_size oversampling",
    "algorithm.refill.most_extra_groups": "max_num_gen_batches",
    "algorithm.shaping.overlong_buffer": "overlong_buffer_len overlong_penalty",
    "algorithm.distillation": "teacher opd on_policy_distillation",
    "algorithm.distillation.base_url": "teacher_url teacher_base_url rm_url",
    "rollout.max_turn_tokens": "max_new_tokens max_response_length rollout_max_response_len max_completion_length "
    "response_length max_response_len max_completion_tokens max_output_tokens",
    "rollout.max_tokens": "max_episode_tokens max_trajectory_tokens max_segment_tokens",
    "rollout.max_turns": "max_assistant_turns max_user_turns num_turns turns max_steps_per_episode",
    "rollout.max_tool_calls": "max_parallel_calls max_tool_turns max_calls",
    "rollout.temperature": "rollout_temperature sampling_temperature temp",
    "rollout.top_p": "rollout_top_p",
    "rollout.top_k": "rollout_top_k",
    "rollout.concurrency": "sglang_server_concurrency max_concurrency num_workers max_concurrent_episodes",
    "evaluation.temperature": "eval_temperature",
    "evaluation.samples": "n_samples_per_eval_prompt eval_n val_n num_trials",
    "evaluation.tasks": "eval_tasks num_tasks max_examples limit",
    "evaluation.split": "eval_split val_split",
    "evaluation.domains": "eval_domains eval_datasets",
    "model.max_length": "max_model_len context_length max_seq_len max_seq_length seq_length max_prompt_length "
    "max_context_len max_position_embeddings max_sequence_length rollout_max_context_len context_window",
    "model.path": "hf_checkpoint model_path model_name model_name_or_path pretrained pretrained_model_name_or_path "
    "load ref_load checkpoint base_model actor_model tokenizer tokenizer_path policy",
    "model.dtype": "precision torch_dtype bf16 fp16 mixed_precision param_dtype params_dtype",
    "model.thinking": "enable_thinking reasoning think",
    "engine.memory_fraction": "gpu_memory_utilization mem_fraction_static sglang_mem_fraction_static mem_fraction",
    "engine.count": "num_engines rollout_num_engines engines num_servers servers",
    "engine.max_running_requests": "max_num_seqs sglang_max_running_requests",
    "engine.radix_cache": "enable_prefix_caching prefix_cache disable_radix_cache",
    "engine.bucket_bytes": "update_weight_buffer_size",
    "engine.extra": "sglang sglang_args engine_kwargs server_args vllm",
    "engine.memory_saver": "free_cache_engine sleep_mode enable_memory_saver offload_rollout enable_sleep_mode",
    "placement": "colocate colocated hybrid_engine disaggregate disaggregated",
    "trainer.steps": "num_rollout total_training_steps max_steps train_iters num_steps iterations num_iters iters "
    "total_steps training_steps total_epochs num_epochs num_train_epochs n_steps",
    "trainer.save_every": "save_interval save_freq save_steps checkpoint_every checkpoint_interval",
    "trainer.keep": "save_total_limit max_actor_ckpt_to_keep keep_last keep_checkpoints",
    "trainer.evaluate_every": "eval_interval test_freq eval_steps val_interval eval_every evaluation_steps eval_freq",
    "trainer.evaluate_first": "val_before_train eval_before_train eval_on_start",
    "trainer.resume": "resume_from resume_mode resume_from_checkpoint resume_from_path continue",
    "trainer.max_staleness": "staleness max_lag off_policy_steps max_async_level staleness_threshold "
    "max_head_offpolicyness async_level",
    "trainer.deterministic": "full_determinism deterministic_mode",
    "output": "save save_dir output_dir default_local_dir out_dir out save_path log_dir workdir",
    "name": "experiment_name run_name project_name exp_name experiment wandb_group",
    "seed": "random_seed rollout_seed",
    "environment.name": "env env_name environment_name domain task dataset gym env_id",
    "environment.mix": "environments envs domains datasets tasks names",
    "environment.data": "prompt_data data_path dataset_path data_source",
    "environment.difficulties": "difficulty",
    "environment.workers": "env_workers num_env_workers",
    "environment.call_seconds": "tool_timeout call_timeout",
    "environment.mcp": "mcp_servers mcpservers",
    "user.kind": "user_strategy user_type simulator user_kind",
    "user.llm.model": "user_model user_llm simulator_model",
    "user.llm.base_url": "user_url user_base_url user_endpoint",
    "user.llm.api_key": "user_api_key",
    "judge.llm.model": "judge_model grader_model",
    "judge.llm.base_url": "judge_url judge_base_url",
    "sft.data": "train_files train_data train_file training_data sft_data",
    "sft.validation": "val_files val_data validation_file validation_data eval_data eval_dataset val_size test_size "
    "validation_split",
    "sft.train_on": "train_on_last loss_on",
    "slurm.nodes": "nnodes num_nodes actor_num_nodes n_nodes",
    "slurm.gpus_per_node": "n_gpus_per_node num_gpus_per_node actor_num_gpus_per_node gpus ngpus num_gpus",
    "slurm.time": "time_limit walltime",
    "observe": "logging logger use_wandb report_to use_tensorboard",
    "store": "database db sqlite",
}  # fmt: skip
"""Names of other frameworks, or short ones, by the key they mean."""
_WITHIN: dict[str, str] = {
    "base_url": "url api_base openai_api_base base endpoint address server baseurl host",
    "api_key": "openai_api_key key token apikey",
    "max_tokens": "max_new_tokens max_completion_tokens max_output_tokens",
    "model": "model_name name model_id",
    "request_seconds": "timeout request_timeout",
    "call_seconds": "timeout",
    "episode_seconds": "timeout",
    "path": "name model_name name_or_path hf_path folder dir model_path",
    "data": "path file files dataset train_file train_files",
    "steps": "epochs",
    "command": "cmd program executable",
    "options": "kwargs params settings",
    "loss": "kind type name loss_type",
    "clip_low": "clip_ratio eps_clip cliprange clip_eps clip epsilon",
    "clip_high": "clip_ratio eps_clip cliprange clip_eps clip epsilon",
    "aggregation": "loss_type",
    "time": "timeout limit",
}
"""Names that mean a key of the section they stand in, where it has that key."""
_ANYWHERE: dict[str, tuple[str, ...]] = {
    "tp": ("megatron.tensor_parallel", "engine.tensor_parallel"),
    "clip_ratio": ("algorithm.clip_low", "algorithm.clip_high"),
    "batch_size": ("algorithm.groups_per_step", "sft.batch_size"),
    "epochs": ("algorithm.epochs", "trainer.steps"),
    "url": ("user.llm.base_url", "judge.llm.base_url"),
    "gradient_accumulation_steps": ("megatron.max_tokens_per_microbatch",),
}
for _alias in ("tp_size", "tensor_parallel_size", "tensor_model_parallel_size", "num_gpus_per_engine",
               "rollout_num_gpus_per_engine", "tensor_parallel"):  # fmt: skip
    _ANYWHERE[_alias] = _ANYWHERE["tp"]
for _alias in ("eps_clip", "cliprange", "clip_eps", "clip_range", "clip"):
    _ANYWHERE[_alias] = _ANYWHERE["clip_ratio"]
_ANYWHERE |= {"base_url": _ANYWHERE["url"], "gradient_accumulation": _ANYWHERE["gradient_accumulation_steps"]}
_MEANT: dict[str, tuple[str, ...]] = dict(_ANYWHERE)
for _key, _names in _SAME.items():
    for _alias in _names.split():
        _MEANT.setdefault(_alias, (_key,))
_LOCAL = {alias: [k for k, names in _WITHIN.items() if alias in names.split()] for names in _WITHIN.values()
          for alias in names.split()}  # fmt: skip

_NOTES: dict[str, str] = {
    "sequence_parallel": "it is on wherever megatron.tensor_parallel is above 1; leave it out",
    "gradient_accumulation_steps": "micro-batches are packed by tokens and accumulate by themselves",
    "micro_batch_size": "a budget of tokens",
    "warmup_ratio": "in steps",
    "warmup_fraction": "in steps",
    "mini_batch_size": "optimizer steps per pass",
    "global_batch_size": "tasks per step, each with algorithm.group_size episodes",
    "train_batch_size": "tasks per step, each with algorithm.group_size episodes",
    "num_epochs": "in steps",
    "num_train_epochs": "in steps",
    "total_epochs": "in steps",
}
"""What to know beside the right name."""

_COMMON = frozenset(
    {"enabled", "kind", "name", "path", "options", "domains", "data", "port", "host", "address", "extra"}
)
"""Names that many sections have: one under a wrong section is not likely to be meant for another."""

_VALUES: dict[str, dict[str, str]] = {
    "loss": {
        "ppo": "grpo, the clipped ratio; PPO is algorithm.loss=grpo with algorithm.advantage=gae",
        "clip": "grpo, the clipped ratio",
        "vanilla": "grpo, the clipped ratio",
        "policy_gradient": "reinforce",
        "pg": "reinforce",
        "dapo": "grpo with algorithm.clip_high=0.28, algorithm.aggregation=token_mean and a filter {kind: range}",
        "dr_grpo": "grpo with algorithm.divide_by_std=false and algorithm.aggregation=constant",
        "drgrpo": "grpo with algorithm.divide_by_std=false and algorithm.aggregation=constant",
        "rloo": "grpo or reinforce, with algorithm.advantage=rloo",
        "reinforce_plus_plus": "grpo, with algorithm.advantage=reinforce_plus_plus",
        "reinforce++": "grpo, with algorithm.advantage=reinforce_plus_plus",
        "sft": "cross_entropy",
        "ce": "cross_entropy",
        "nll": "cross_entropy",
        "gspo_token": "gspo",
    },
    "advantage": {
        "ppo": "gae",
        "critic": "gae",
        "reinforce++": "reinforce_plus_plus",
        "reinforce_plus_plus_baseline": "reinforce_plus_plus",
        "reinforce": "none, or grpo for a baseline",
        "dr_grpo": "grpo with algorithm.divide_by_std=false",
        "grpo_passk": "pass_at_k",
        "dapo": "grpo",
        "gspo": "grpo, with algorithm.loss=gspo",
    },
    "schedule": {"cosine_with_warmup": "cosine", "constant_with_warmup": "constant", "cosine_annealing": "cosine"},
    "dtype": {
        "bf16": "bfloat16", "half": "bfloat16", "fp16": "bfloat16", "float16": "bfloat16", "auto": "bfloat16",
        "fp32": "float32", "float": "float32", "full": "float32", "single": "float32", "torch_bfloat16": "bfloat16",
    },
    "aggregation": {
        "seq_mean_token_sum": "sequence_sum", "seq_mean_token_mean": "sequence_mean",
        "seq_mean_token_sum_norm": "constant", "dr_grpo": "constant", "mean": "token_mean",
    },
    "kl_estimator": {"low_var_kl": "k3", "kl": "k1", "abs": "k1", "mse": "k2", "full": "k3"},
    "correction": {"tis": "truncate", "clip": "truncate", "mis": "mask", "icepop": "mask", "true": "truncate"},
    "transport": {"nccl": "broadcast", "ipc": "colocated", "cuda_ipc": "colocated"},
    "placement": {"disaggregated": "separate", "disaggregate": "separate", "colocate": "colocated",
                  "hybrid": "colocated"},
    "recompute": {"true": "selective or full", "uniform": "full", "block": "full"},
    "split": {"val": "validation", "valid": "validation", "dev": "validation", "eval": "validation"},
    "report_split": {"val": "validation", "dev": "validation"},
    "kind": {"dapo": "range", "dynamic_sampling": "range", "zero_std": "range", "std": "range", "openai": "llm",
             "model": "llm", "gpt": "llm", "api": "endpoint", "openai_endpoint": "endpoint", "checkpoint": "engine"},
    "implementation": {"te": "transformer_engine", "mcore": "local"},
    "isolation": {"none": "inline", "subprocess": "process"},
    "gpu": {"a100": "A100-80", "h100_80": "H100"},
    "fp8": {"true": "hybrid", "blockwise": "e4m3"},
    "train_on": {"last_turn": "last", "assistant": "all"},
    "overlong": {"truncate": "skip, which leaves such conversations out: none is cut", "drop": "skip"},
}  # fmt: skip
"""What values of other frameworks mean, by the last name of the key."""


def plain(name: str) -> str:
    """A name as this configuration writes names."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip().lstrip("-"))
    return name.replace("-", "_").replace(" ", "_").lower()


def nearest_keys(key: Sequence[str], siblings: Sequence[str], everywhere: dict[str, str]) -> tuple[list[str], str]:
    """The keys that ``key`` may mean, best first, with a note; nothing where no name is near.

    Args:
        siblings: what the section of ``key`` has.
        everywhere: last names of all keys of the schema by their dotted paths.
    """
    name, above = plain(key[-1]), ".".join(key[:-1])
    note = _NOTES.get(name, "")
    beside = [".".join((*key[:-1], sibling)) for sibling in _siblings(name, above, siblings)]
    if beside:
        return beside, note
    if inside := [f"{above}.{path}" for path in _MEANT.get(name, ()) if f"{above}.{path}" in everywhere]:
        return inside, note
    if name in _MEANT:
        return _in_order([k for k in _MEANT[name] if k in everywhere], above), note
    if note:
        return [], note
    same = [path for path, last in everywhere.items() if last == name and (name not in _COMMON or not above)]
    if same:
        return _in_order(same, above)[:3], note
    # A path whose section is misspelled, or one that is written flat, such as rollout_temperature.
    joined = f"{above}.{name}".lstrip(".").replace(".", "_")
    flat = [path for path in everywhere if path.replace(".", "_") == joined]
    if flat:
        return flat[:2], note
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)
    if close:
        return [".".join((*key[:-1], close[0]))], note
    if name in _COMMON and above:
        return [], note
    last_names = difflib.get_close_matches(name, sorted(set(everywhere.values())), n=1, cutoff=0.8)
    if last_names:
        return _in_order([path for path, last in everywhere.items() if last == last_names[0]], above)[:3], note
    alias = difflib.get_close_matches(name, sorted(_MEANT), n=1, cutoff=0.85)
    return ([k for k in _MEANT[alias[0]] if k in everywhere], note) if alias else ([], note)


def _siblings(name: str, above: str, siblings: Sequence[str]) -> Iterator[str]:
    """Keys of the same section that ``name`` means or nearly spells."""
    meant = _MEANT.get(name, ())
    inside = [k.rpartition(".")[2] for k in meant if k.rpartition(".")[0] == above and k.rpartition(".")[2] in siblings]
    if inside:
        yield from inside
        return
    if close := difflib.get_close_matches(name, siblings, n=1, cutoff=0.9):
        yield from close
        return
    inside += [k for k in _LOCAL.get(name, ()) if k in siblings]
    if above:
        inside += [k.rpartition(".")[2] for k in meant if k.rpartition(".")[2] in siblings]
    inside += difflib.get_close_matches(name, siblings, n=1, cutoff=0.8)
    if len(name) > 2:
        inside += [s for s in siblings if s.startswith(f"{name}_")]
    yield from list(dict.fromkeys(k for k in inside if k in siblings))[:3]


def _in_order(paths: list[str], above: str) -> list[str]:
    """Those below the same first section first, then the sections people mean most often."""
    often = ("", "rollout", "trainer", "algorithm", "optimizer", "model", "megatron", "engine", "evaluation")
    first = above.partition(".")[0]

    def rank(path: str) -> tuple[bool, int]:
        section = path.rpartition(".")[0]
        return path.partition(".")[0] != first, often.index(section) if section in often else len(often)

    return sorted(paths, key=rank)


def nearest_value(key: str, value: str, choices: Sequence[str]) -> str | None:
    """What ``value`` of the key ``key`` (its last name) may mean; None where nothing is near."""
    name = plain(value)
    by_name = {plain(choice): choice for choice in choices}
    if name in by_name:
        return by_name[name]
    meant = _VALUES.get(key, {}).get(name)
    if meant and re.split(r"[ ,]", meant)[0] in choices:
        return meant
    close = difflib.get_close_matches(name, by_name, n=1)
    if close:
        return by_name[close[0]]
    parts = [choice for choice in choices if len(name) > 2 and (choice.startswith(name) or name.startswith(choice))]
    return parts[0] if parts else None
