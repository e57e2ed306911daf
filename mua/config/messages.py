"""What pydantic found wrong, as one line each: place, key, what was expected, what was given, nearest valid name.

What an unknown key or value may mean are near spellings of our own names, and names of slime, verl and Megatron-LM that
this configuration lacks. None is accepted in place of ours: a run's record has one name for one thing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import SecretStr, ValidationError
from pydantic_core import ErrorDetails

from mua.config.section import KeyPath, Section, all_keys, alternatives, fields_of
from mua.config.tree import Tree
from mua.utils.masking import mask_secrets

_KINDS = {int: "an integer", float: "a number", str: "a string", dict: "a section", list: "a list"}
_EXPECTED = {
    "model_type": "a section (keys and values)",
    "dict_type": "a section (keys and values)",
    "list_type": "a list",
    "string_type": "a string (in quotes, should it look like a number)",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "path_type": "a path",
}
_DOTTED = re.compile(r"\b[a-z_0-9-]+(?:\.[a-z_0-9-]+)+\b")

MAX_LINES = 20
"""Lines of one message; finding the nearest names of thousands of keys takes long, and nobody reads it."""
_LONGEST_VALUE = 200

Branches: TypeAlias = dict[KeyPath, list[ErrorDetails]]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration."""

    at: str
    """File and line, or the command line."""
    key: str
    """The dotted key; empty for a rule over several."""
    text: str
    """What is wrong, and what to write instead."""

    def __str__(self) -> str:
        return f"{self.at}: {self.key}: {self.text}" if self.key else f"{self.at}: {self.text}"

    def sections(self) -> set[str]:
        """First parts of the keys that are named."""
        return {self.key.partition(".")[0] if self.key else found.partition(".")[0] for found in
                ([self.key] if self.key else _DOTTED.findall(self.text))}  # fmt: skip


def describe_errors(error: ValidationError, tree: Tree, schema: type[Section]) -> list[Problem]:
    """One for each key that is wrong, in the order of the schema."""
    branches: Branches = {}
    for detail in error.errors():
        branches.setdefault(key_of_error(detail, tree.data), []).append(detail)
    found = []
    for key, details in list(branches.items())[:MAX_LINES]:
        found += _problems(key, details, tree, schema)
    if (more := len(branches) - MAX_LINES) > 0:
        found.append(Problem(str(tree.place(())), "", f"and {more} more keys are wrong"))
    return found


def key_of_error(detail: ErrorDetails, data: Any) -> KeyPath:
    """The key an error is about. To a location pydantic adds the names of a union's branches; those are left out."""
    key: list[str] = []
    parts = list(map(str, detail["loc"]))
    for place, part in enumerate(parts):
        if part == "[key]" or not (isinstance(data, dict) or (isinstance(data, list) and part.isdigit())):
            break
        if isinstance(data, dict) and part not in data and place < len(parts) - 1:
            continue
        key.append(part)
        data = data[int(part)] if isinstance(data, list) else data.get(part)
    return tuple(key)


def _problems(key: KeyPath, details: list[ErrorDetails], tree: Tree, schema: type[Section]) -> list[Problem]:
    detail, dotted, at = details[0], ".".join(key), str(tree.place(key))
    if detail["type"] == "value_error":  # rules over several keys, a line each
        found = []
        for line in detail["msg"].removeprefix("Value error, ").splitlines():
            own, named = (*key, line.split(" ", 1)[0]), (tuple(name.split(".")) for name in _DOTTED.findall(line))
            place = next((tree.places[name] for name in (own, *named) if name in tree.places), at)
            # At the first key it names that was written somewhere.
            found.append(Problem(str(place), ".".join(own) if key and own in tree.places else dotted, line))
        return found
    if detail["type"] == "extra_forbidden":  # the nearest name in the section, or anywhere, or the names that it has
        siblings = sorted(name for name, _ in fields_of(key[:-1], schema, tree.data))
        everywhere = {".".join(path): path[-1] for path in all_keys(schema)}
        near = nearest_keys(key, siblings, everywhere)
        advice = f"did you mean {' or '.join(near)}?" if near else f"this section has {', '.join(siblings)}"
        return [Problem(at, dotted, f"unknown key; {advice if near or siblings else 'leave it out'}")]
    if detail["type"] == "missing":
        inner = [name for name, _ in fields_of(key, schema)]
        advice = f"; set {dotted}.{inner[0]}" if inner else ""
        if key == ("environment",):
            advice = "; environment.name is a domain, such as retail: mua env list shows all"
        return [Problem(at, dotted, f"required, but not set{advice}")]
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        name = str(detail["ctx"]["discriminator"]).strip("'")
        value = detail["input"].get(name) if isinstance(detail["input"], dict) else None
        choices = re.findall(r"'([^']*)'", str(detail["ctx"].get("expected_tags", "")))
        text = "required, but not set: it says which of several sections this is"
        if choices:
            given = mask_secrets(repr(value))[:_LONGEST_VALUE]
            text = f"expected {' or '.join(map(repr, choices))}, got {given}{_near(name, value, choices)}"
        return [Problem(str(tree.place((*key, name))), f"{dotted}.{name}", text)]
    return [Problem(at, dotted, _of_value(key, details, tree, schema))]


def _near(name: str, value: Any, choices: Sequence[str]) -> str:
    near = nearest_value(name, value, choices) if isinstance(value, str) else None
    return f"; did you mean {near}?" if near else ""


def _of_value(key: KeyPath, details: list[ErrorDetails], tree: Tree, schema: type[Section]) -> str:
    """Expected and given."""
    detail, dotted = details[0], ".".join(key)
    texts = [_EXPECTED.get(d["type"], d["msg"].removeprefix("Input should be ")) for d in details]
    phrases = [f"a number {text}" if text.startswith(("greater", "less")) else text for text in texts]
    value = detail["input"]
    kind = _KINDS.get(type(value), type(value).__name__)
    secret = SecretStr in alternatives(dict(fields_of(key[:-1], schema, tree.data)).get(key[-1]) if key else None)
    if value is None or isinstance(value, bool):
        given = {None: "nothing (null)", True: "true", False: "false"}[value]
    elif detail["type"] == "model_type" or isinstance(value, dict | list) or secret:
        # A section given as one value may be a secret that slipped out by wrong indentation: only its kind is named.
        given = kind
    else:
        shown = mask_secrets(repr(value))
        given = f"{shown if len(shown) <= _LONGEST_VALUE else f'{shown[:_LONGEST_VALUE]}...'} ({kind})"
    line = f"expected {' or '.join(dict.fromkeys(phrases))}, got {given}"
    literal = next((d["ctx"]["expected"] for d in details if d["type"] == "literal_error"), "")
    if literal and not secret:
        line += _near(key[-1] if not key[-1].isdigit() else key[-2], value, re.findall(r"'([^']*)'", literal))
    elif isinstance(value, str) and tree.filled.get(key):
        line += f"; what ${{NAME}} fills in stays a string: give it on the command line ({dotted}=$NAME)"
    if isinstance(value, str | list) and key == ("environment", "mix"):
        line += "; several domains are written with their shares: {retail: 2, airline: 1}"
    return line


# ---- near names

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
