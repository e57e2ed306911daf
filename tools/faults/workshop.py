"""What a run starts from: a small random policy, its tokenizer, and a configuration for each mode."""

from __future__ import annotations

from pathlib import Path

from tools import kit
from tools.faults.draw import SAVE_EVERY, STEPS, Mode
from tools.tiny import SMALL, build_policy

DOMAINS = kit.ROOT / "tests" / "e2e" / "domains"
"""Holds ``graded_desk``, whose rewards differ even for a random policy: every step changes the weights."""
GROUPS, SIZE, UPDATES = 4, 2, 4
"""Of a step: tasks, episodes of each, optimizer steps."""
CONFIG = """\
name: chaos
output: disk/out
model: {{path: {model}, dtype: float32, max_length: 512}}
environment: {{name: graded_desk, prompt: short, isolation: process, workers: 2, call_seconds: 4, reset_seconds: 8}}
rollout:
  max_turns: 4
  max_tool_calls: 4
  max_turn_tokens: 24
  max_tokens: 200
  concurrency: 4
  generate_seconds: 120
  user_seconds: 60
  episode_seconds: 240
  max_retries: 6
engine:
  max_total_tokens: 16384
  max_running_requests: 16
  memory_fraction: 0.5
  health_seconds: 1
  control_seconds: 6
  start_seconds: 150
  stop_seconds: 5
algorithm: {{group_size: {size}, groups_per_step: {groups}, epochs: 2, minibatches: 2}}
megatron: {{max_tokens_per_microbatch: 512, threads: 1}}
optimizer: {{learning_rate: 1.0e-3, weight_decay: 0.0}}
trainer:
  {{steps: {steps}, save_every: {save_every}, keep: 2, silence_seconds: 8, min_scored_share: 1.0,
    max_unscored_steps: 1}}
observe: {{traces: true}}
"""
_DETERMINISTIC = ("trainer.deterministic=true", "engine.deterministic=true")
_USER = (
    "user.kind=llm",
    "user.check=off",  # the server says what it likes, whatever the task
    "user.llm={model: user, base_url: '${MUA_USER_BASE_URL}', request_seconds: 3, total_seconds: 12}",
)
OVERRIDES = {
    Mode.SYNC: _DETERMINISTIC,
    Mode.STALE: ("trainer.max_staleness=1", "algorithm.correction=truncate", "rollout.max_retries=2", *_USER),
    Mode.RANKS: ("megatron.data_parallel=2", *_DETERMINISTIC),
}
DETERMINISTIC = frozenset({Mode.SYNC, Mode.RANKS})


def build(folder: Path) -> Path:
    """The configuration that all runs share, in ``folder`` with its policy."""
    from environments.help_desk import DOMAIN
    from environments.help_desk.demonstrations import demonstrations

    model, config = folder / "model", folder / "chaos.yaml"
    if not config.exists():
        build_policy(model, demonstrations(200, 1, DOMAIN.system_prompt("short"), ["brief"]), 1, 512, SMALL)
        config.write_text(CONFIG.format(model=model, groups=GROUPS, size=SIZE, steps=STEPS, save_every=SAVE_EVERY))
    return config
