"""Agent libraries on the real engine: whose tokens they are, how many calls stay in one segment, two RL steps.

    python -m tools.bench.agents_on_engine [--domain retail] [--library langgraph] [--tuning 60] [--folder DIR]

For each domain a policy of two layers is fine-tuned on the expert's conversations. The built-in agent and every
library's (tests/agents, unmodified libraries) then take two steps of ``mua train`` from it, in deterministic mode with
the same seeds: SGLang samples, Megatron trains. Rewards are the domain's plus the share of vowels, so that such a
policy's episodes differ. docs/benchmarks/gateway.md has the figures.

*In one segment*: of the requests for a turn that go on with an episode, those that were appended to its stream.
*Equal*: of the first step's episodes, those whose ids, provenance and log-probabilities are the built-in episode's up
to the first turn that a library answers in a way of its own (a turn that is no valid call, or that is cut off).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from environments.kit.demonstrate import demonstrate, write_conversations
from mua.environment.registry import get_domain
from mua.observe.metrics_log import read_metrics
from mua.store.traces import read_traces
from mua.types import Json, Trajectory
from tests.agents_support import LIBRARIES, agreed, command_of, differing
from tools import kit
from tools.bench.agent_libraries import shares
from tools.tiny import SMALL, build_policy

DOMAIN = {"help_desk": "graded_desk", "retail": "graded_shop"}
PLACE = {
    "help_desk": {"max_length": 1024, "max_tokens": 1000, "max_turn_tokens": 96},
    "retail": {"max_length": 3072, "max_tokens": 3000, "max_turn_tokens": 192},
}
"""Longest sequence and turn, in tokens of the small tokenizer: retail's answers of tools are long."""
CONVERSATIONS, GROUPS, SIZE = 200, 4, 4
RECIPE = """\
name: agents
output: out
model: {{path: {model}, dtype: float32, max_length: {max_length}}}
environment: {{name: {domain}, prompt: short}}
user: {{personas: [brief]}}
rollout:
  temperature: 0.7
  max_turns: 12
  max_tool_calls: 12
  max_turn_tokens: {max_turn_tokens}
  max_tokens: {max_tokens}
  concurrency: 16
  generate_seconds: 300
  episode_seconds: 600
engine: {{max_total_tokens: 65536, max_running_requests: 16, memory_fraction: 0.5, stop_seconds: 5}}
algorithm: {{group_size: {size}, groups_per_step: {groups}}}
megatron: {{max_tokens_per_microbatch: {max_length}, threads: 2}}
optimizer: {{learning_rate: 1.0e-3, weight_decay: 0.0}}
trainer: {{steps: 2, save_every: 9}}
sft: {{data: {data}, batch_size: 16}}
"""


def mua(*arguments: str | Path, cwd: Path) -> None:
    """Run a command that must succeed; what it says goes to files in ``cwd``."""
    paths = [str(kit.ROOT / "tests" / "e2e" / "domains"), str(kit.ROOT)]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    words = [str(argument) for argument in arguments]
    with (cwd / f"{words[0]}.out").open("w") as out, (cwd / f"{words[0]}.err").open("w") as err:
        command = [sys.executable, "-m", "mua.cli", *words]
        status = subprocess.run(command, cwd=cwd, env=variables, stdout=out, stderr=err, timeout=3600).returncode
    if status:
        raise SystemExit(f"mua {words[0]} ended with {status}: {(cwd / f'{words[0]}.err').read_text()[-3000:]}")


def tuned(domain_name: str, folder: Path, steps: int) -> Path:
    """The recipe of a fine-tuned policy, made in ``folder`` unless it is there."""
    done, recipe = folder / "tuned.yaml", folder / "recipe.yaml"
    if done.exists():
        return done
    domain, model, data = get_domain(domain_name), folder / "model", folder / "conversations.jsonl"
    system: Json = {"role": "system", "content": domain.system_prompt("short")}
    tasks = list(domain.tasks("train"))[:CONVERSATIONS]
    shown = [asyncio.run(demonstrate(domain, task, at, personas=["brief"])) for at, task in enumerate(tasks)]
    conversations = [[system, *one.messages] for one in shown]
    build_policy(model, conversations, 1, 768, SMALL | {"max_position_embeddings": PLACE[domain_name]["max_length"]})
    write_conversations(data, conversations)
    recipe.write_text(
        RECIPE.format(
            model=model, data=data, domain=DOMAIN[domain_name], size=SIZE, groups=GROUPS, **PLACE[domain_name]
        )
    )
    overrides = [f"trainer.steps={steps}", f"trainer.save_every={steps}", "optimizer.learning_rate=5.0e-3"]
    mua("sft", recipe, *overrides, cwd=folder)
    done.write_text(f"extends: {recipe}\nmodel: {{path: {folder}/out/hf}}\n")
    return done


def trained(recipe: Path, folder: Path, agent: Json | None) -> Path:
    """The output folder of two steps; a folder that holds some is made afresh."""
    folder.mkdir()
    section = [] if agent is None else [f"agent={json.dumps(agent)}"]
    deterministic = ("trainer.deterministic=true", "engine.deterministic=true")
    mua("train", recipe, *section, *deterministic, cwd=folder)
    return folder / "out"


def episodes(output: Path, step: int) -> dict[tuple[int, int], Trajectory]:
    """By ordinal and sample."""
    return {(t.ordinal, t.sample): t for t in read_traces(output / "traces" / f"step_{step:06d}.jsonl")}


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--domain", choices=tuple(DOMAIN))
    parser.add_argument("--library", choices=LIBRARIES[:3], help="smolagents' own instructions do not fit the policy")
    parser.add_argument("--tuning", type=int, default=60, help="steps of fine-tuning")
    parser.add_argument("--folder", type=Path, help="where the runs are kept, and a tuned policy is found again")
    options = parser.parse_args()
    root = (options.folder or Path(tempfile.mkdtemp(prefix="mua-agents-"))).resolve()
    names = ("domain", "agent", "episodes", "unscored", "turns", "tool calls", "follow-up calls", "in one segment")
    print(kit.head(*names, "equal", "tokens compared", "turns compared", "loss and gradient norm of steps"), flush=True)
    for domain in [options.domain] if options.domain else DOMAIN:
        folder = root / domain
        folder.mkdir(parents=True, exist_ok=True)
        recipe = tuned(domain, folder, options.tuning)
        runs = Path(tempfile.mkdtemp(prefix="runs-", dir=folder))
        built_in = episodes(trained(recipe, runs / "built_in", None), 0)
        told(domain, "built in", runs / "built_in" / "out", None)
        for library in [options.library] if options.library else LIBRARIES[:3]:
            told(domain, library, trained(recipe, runs / library, {"command": command_of(library)}), built_in)


def told(domain: str, agent: str, output: Path, built_in: dict[tuple[int, int], Trajectory] | None) -> None:
    """Print a row, and below it what was wrong."""
    played = [t for step in (0, 1) for t in episodes(output, step).values()]
    turns = sum(len(t.turn_rewards) for t in played)
    calls = sum(t.metrics.get("tool_calls", 0) for t in played)
    steps = "; ".join(
        f"{line['train/loss']:.4f}, {line['train/grad_norm']:.4f}" for line in read_metrics(output / "metrics.jsonl")
    )
    segments = equal = compared = ""
    wrong = []
    if built_in is not None:
        appended, follow_ups = shares(played)
        first = episodes(output, 0)
        differ = {place: differing(first[place], theirs) for place, theirs in built_in.items()}
        wrong = [f"    {place}: {what}" for place, what in differ.items() if what]
        segments = f"{follow_ups} | {appended / follow_ups:.1%}"
        equal = f"{len(differ) - len(wrong)} of {len(differ)}"
        ends = [(agreed(t), t.segments[0]) for t in built_in.values()]
        sampled = sum(int(segment.loss_mask[:end].sum()) for end, segment in ends)
        whole = sum(len(set(segment.turn[:end][segment.loss_mask[:end]].tolist())) for end, segment in ends)
        compared = f"{sum(end for end, _ in ends)} ({sampled} sampled) | {whole}"
    unscored = [t for t in played if not t.scored]
    cells = (domain, agent, len(played), len(unscored), turns, f"{calls:.0f}", segments or " | ", equal)
    print(kit.row(*cells, compared or " | ", steps), flush=True)
    print(*(wrong + [f"    {t.task_id}: {t.error}" for t in unscored]), sep="\n", end="\n" * bool(wrong or unscored))


if __name__ == "__main__":
    main()
