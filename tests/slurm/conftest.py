"""A real Slurm of two nodes on this machine and a tiny random policy, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_support import ROOT, Jobs

from environments.help_desk import DOMAIN
from environments.help_desk.demonstrations import demonstrations
from environments.kit.demonstrate import write_conversations
from tools.slurm_cluster import Cluster, install
from tools.tiny import SMALL, build_policy


@pytest.fixture(scope="session")
def jobs() -> Iterator[Jobs]:
    """A cluster for all tests; none of its processes is left afterwards."""
    install()
    with Cluster() as cluster:
        yield Jobs(cluster)


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folder: the help desk's tokenizer and a random Qwen3 of 2 layers, hidden 64; conversations beside it."""
    folder = tmp_path_factory.mktemp("policy") / "policy"
    conversations = list(demonstrations(100, 1, DOMAIN.system_prompt("short"), ["brief"]))
    build_policy(folder, conversations, 1, 512, SMALL)
    write_conversations(folder.parent / "conversations.jsonl", conversations)
    return folder


@pytest.fixture(scope="session")
def recipe(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstration, shrunk: TP 2 x DP 2, a few short episodes a step, a domain whose rewards are graded."""
    path = tmp_path_factory.mktemp("recipe") / "two-nodes.yaml"
    path.write_text(
        f"""\
extends: {ROOT}/configs/demo.yaml
name: two nodes
output: out
model: {{path: {policy}}}
environment: {{name: graded_desk}}
rollout:
  {{max_turns: 3, max_tool_calls: 3, max_turn_tokens: 16, max_tokens: 200, concurrency: 2, generate_seconds: 600,
    user_seconds: 600, episode_seconds: 1200}}
engine: {{max_total_tokens: 8192, max_running_requests: 8, stop_seconds: 5}}
algorithm: {{group_size: 2, groups_per_step: 2, skip_zero_advantage: false}}
megatron: {{tensor_parallel: 2, data_parallel: 2, max_tokens_per_microbatch: 512, threads: 1}}
optimizer: {{learning_rate: 1.0e-3}}
trainer: {{steps: 12, save_every: 0, evaluate_first: false, evaluate_every: 0, export: last}}
sft: {{data: {policy.parent}/conversations.jsonl, batch_size: 8}}
slurm: {{gpus_per_node: 2, time: "0:30:00"}}
"""
    )
    return path
