"""Every kind of hook: the example of docs/hooks.md does what the page says, and a bad hook is one line.

Not covered: hooks in whole runs over several ranks and with elastic rollout workers, and
whole episodes: tests/unit/test_gateway_episodes.py plays the example of an agent, test_rollout_episode.py a reward.
"""

from __future__ import annotations

import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokens_fixtures import chat_family

from environments.help_desk import DOMAIN
from mua.algorithms.batch import filter_groups, make_batch
from mua.algorithms.losses import PolicyLoss, TokenTensors
from mua.config.load import dump_config, load_config
from mua.config.schema import AlgorithmConfig, CurriculumConfig, EnvironmentConfig, UserConfig
from mua.environment.endpoint.services import Services
from mua.environment.manager import EnvironmentManager
from mua.environment.protocol import Evaluation
from mua.environment.registry import get_domain
from mua.environment.selection import Selection
from mua.observe.provenance import provenance
from mua.rollout.curriculum import make_curriculum
from mua.rollout.rollout_worker import check_code, made_with
from mua.tokens.chat_family import family_class
from mua.trainer.observers import DoneStep, HookObserver, Learned
from mua.trainer.rl import train
from mua.types import Group, Outcome, Provenance, Segment, Trajectory
from mua.users.factory import UserFactory
from mua.users.scoring.scorer import Question, make_scorer
from mua.utils.errors import ConfigError, MuaError
from mua.utils.hooks import HOOKS, await_hook, check_hooks, check_number, hook_sources, load_hook

PAGE = Path(__file__).parents[2] / "docs" / "hooks.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
EXAMPLES = {
    "algorithm.loss": "loss", "algorithm.advantage": "advantage", "algorithm.group_filter": "group_filter",
    "algorithm.curriculum.kind": "curriculum", "environment.reward": "reward", "environment.scorer.name": "scorer",
    "agent.function": "rollout", "user.kind": "Impatient", "environment.name": "DESK", "model.chat_family": "Terse",
    "trainer.after_step": "after_step",
}  # fmt: skip
TASKS = DOMAIN.tasks("train")[:4]


def trajectory(sample: int, reward: float, tool_calls: float = 1.0) -> Trajectory:
    segment = Segment(
        ids=np.arange(4, dtype=np.int32),
        provenance=np.full(4, Provenance.SAMPLED, np.uint8),
        logprobs=np.full(4, -0.5, np.float32),
        version=np.zeros(4, np.int32),
        turn=np.zeros(4, np.int32),
    )
    return Trajectory(
        TASKS[0].id, 0, sample, [segment], [reward], reward, reward > 0, Outcome.USER_STOP,
        metrics={"tool_calls": tool_calls},
    )  # fmt: skip


GROUP = Group(0, TASKS[0].id, [trajectory(0, 1.0), trajectory(1, 0.0), trajectory(2, 0.0, tool_calls=0.0)])


def use_loss(path: str) -> Any:
    logprobs = torch.full((3,), -0.5, requires_grad=True)
    known = TokenTensors(torch.full((3,), 0.5), torch.ones(3), logprobs.detach(), logprobs.detach() - 0.1)
    terms = PolicyLoss(AlgorithmConfig(loss=path, epochs=2))(logprobs, torch.ones(3), known)
    terms.loss.backward()
    return terms.loss.item(), logprobs.grad


def use_advantage(path: str) -> Any:
    return [float(s.advantages[0]) for s in make_batch([GROUP], AlgorithmConfig(advantage=path), 1.0)]


def use_group_filter(path: str) -> Any:
    kept, shares = filter_groups([GROUP], AlgorithmConfig(group_filter=path))
    return [[t.sample for t in group.trajectories] for group in kept], shares


def use_curriculum(path: str) -> Any:
    order = make_curriculum(TASKS, 1, CurriculumConfig(kind=path))
    drawn = [order.task(position) for position in range(3)]
    order.observe(0, replace(GROUP, task_id=drawn[0].id))
    again = make_curriculum(TASKS, 1, CurriculumConfig(kind=path))
    again.restore(order.state())
    assert [again.task(position).id for position in range(3, 9)] == [order.task(p).id for p in range(3, 9)]
    return len({task.id for task in drawn})


async def use_reward(path: str) -> Any:
    messages = [{"role": "assistant", "tool_calls": [{}, {}]}]
    found = await await_hook("environment.reward", path, TASKS[0], messages, Evaluation(1.0, True))
    return check_number("environment.reward", path, found)


async def use_scorer(path: str) -> Any:
    scorer = make_scorer(path, {}, Services())
    question = Question("?", "listen")
    scorer.check(question)
    return (await scorer.score("silent", question)).right, (await scorer.score("no", question)).right


async def use_user(path: str) -> Any:
    config = UserConfig.model_validate({"kind": path, "options": {"patience": 1}})
    selection = Selection.from_config(EnvironmentConfig(name="help_desk"))
    user = UserFactory(config, selection, Services()).make(TASKS[0], 0)
    return (await user.open()).text, (await user.reply("Wait.")).stop


async def use_environment(path: str) -> Any:
    config = EnvironmentConfig(name=path)
    selection = Selection.from_config(config)
    task = selection.tasks("train")[0]
    manager = EnvironmentManager(selection.domain(task), config)
    async with manager.instance(task, 0) as instance:
        schemas = instance.tools()
    await manager.close()
    return len(selection.tasks("train")), bool(schemas)


def use_family(path: str) -> Any:
    known = chat_family("qwen3", False)
    family = family_class(path)(known.codec, thinking=False, opening=known.opening)
    return family.render([{"role": "system", "content": "Help."}], [], generate=False)


def use_after_step(path: str) -> Any:
    done = DoneStep(3, [GROUP], [], None, Learned(), metrics={"train/entropy": 1.0})
    HookObserver(path).stepped(done)
    return done.metrics


USES: dict[str, Callable[[str], Any]] = {
    "algorithm.loss": use_loss, "algorithm.advantage": use_advantage, "algorithm.group_filter": use_group_filter,
    "algorithm.curriculum.kind": use_curriculum, "environment.reward": use_reward,
    "environment.scorer.name": use_scorer, "agent.function": lambda path: load_hook("agent.function", path),
    "user.kind": use_user, "environment.name": use_environment, "model.chat_family": use_family,
    "trainer.after_step": use_after_step,
}  # fmt: skip


async def used(key: str, path: str) -> Any:
    found = USES[key](path)
    return await found if hasattr(found, "__await__") else found


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Makes a module of source text; its name."""

    def made(source: str) -> str:
        name = f"hooks_of_a_test_{len(sources)}"
        sources.append(source)
        found = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, found)
        exec(compile(source, name, "exec"), found.__dict__)
        return name

    sources: list[str] = []
    load_hook.cache_clear()
    yield made
    load_hook.cache_clear()


def test_every_kind_has_an_example_of_at_most_20_lines() -> None:
    assert EXAMPLES.keys() == HOOKS.keys() == USES.keys()
    assert len(BLOCKS) == len(HOOKS)
    assert all(len([line for line in block.splitlines() if line.strip()]) <= 20 for block in BLOCKS)
    table = dict(re.findall(r"^\| `([\w.]+)` \| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    told = {key: tuple(re.findall(r"`(\w+)`", cell)) for key, cell in table.items()}
    assert told == {key: kind.parameters for key, kind in HOOKS.items()}


EXPECTED: dict[str, Callable[[Any], bool]] = {
    "algorithm.loss": lambda found: np.isclose(found[0], 3 * 0.5 * (-np.exp(0.1) + 0.01 * 0.01), rtol=1e-3),
    "algorithm.advantage": lambda found: found[0] > 0 and found[1:] == [0.0, 0.0],
    "algorithm.group_filter": lambda found: found[0] == [[0, 1]] and found[1]["rollout/filters/hook"] == 1 / 3,
    "algorithm.curriculum.kind": lambda found: found == 3,
    "environment.reward": lambda found: np.isclose(found, 0.98),
    "environment.scorer.name": lambda found: found == (True, False),
    "agent.function": callable,
    "user.kind": lambda found: found == (f"About {TASKS[0].id}: please hurry.", True),
    "environment.name": lambda found: found == (10, True),
    "model.chat_family": lambda found: found.startswith("<|im_start|>system\nBe brief.\nHelp."),
    "trainer.after_step": lambda found: found == {"train/entropy": 1.0, "research/longest_episode": 1.0},
}


@pytest.mark.parametrize("key", HOOKS)
async def test_the_example_of_the_page_does_what_it_says(key: str, module: Callable[[str], str]) -> None:
    found = await used(key, f"{module(chr(10).join(BLOCKS))}:{EXAMPLES[key]}")
    assert EXPECTED[key](found), found


BAD = [
    # No such thing, or no function, whatever the kind.
    *[(key, "", "has no 'hook'") for key in HOOKS],
    *[(key, "hook = 3", "") for key in HOOKS],
    *[(key, "def hook(): ...", "") for key in HOOKS],
    *[(k, f"def hook({', '.join(reversed(v.parameters))}): ...", "place of") for k, v in HOOKS.items()
      if v.parameters[1:]],
    *[(k, f"async def hook({', '.join(v.parameters)}): ...", "async") for k, v in HOOKS.items()
      if v.parameters and not v.may_wait],
    *[(k, f"def hook({', '.join(v.parameters)}): raise KeyError('x')", "raised") for k, v in HOOKS.items()
      if v.parameters and k != "agent.function"],
    *[(k, f"def hook({', '.join(v.parameters)}): return 'a text'", "") for k, v in HOOKS.items()
      if v.parameters and k != "agent.function"],
    ("algorithm.loss", "def hook(logprobs, entropy, tokens, config): return logprobs.sum()", "shape []"),
    ("algorithm.loss", "def hook(logprobs, entropy, tokens, config): return logprobs * float('nan')", "NaN"),
    ("algorithm.loss", "def hook(logprobs, entropy, tokens, config): return logprobs.detach()", "without gradient"),
    ("algorithm.advantage", "def hook(scores, trajectories, config): return scores[1:]", "shape [2] in place of [3]"),
    ("algorithm.advantage", "def hook(scores, trajectories, config): return [0.0, float('nan'), 0.0]", "at place 1"),
    ("algorithm.group_filter", "def hook(group, config): return True", "bool"),
    ("algorithm.group_filter", "def hook(group, config): return [object()]", "list"),
    ("algorithm.curriculum.kind", "def hook(tasks, rollouts, successes, config): return [0, 0, 0, 0]", "weight"),
    ("algorithm.curriculum.kind", "def hook(tasks, rollouts, successes, config): return [1, 1, 1, -1]", "weight"),
    ("environment.reward", "async def hook(task, messages, evaluation): return float('inf')", "inf"),
    ("environment.reward", "async def hook(task, messages, evaluation): raise ValueError('no')", "raised"),
    ("environment.reward", "def hook(task, messages, evaluation): return True", "True"),
    ("trainer.after_step", "def hook(step, metrics, groups): return {'train/entropy': 1.0}", "already"),
    ("trainer.after_step", "def hook(step, metrics, groups): return {'a': float('nan')}", "nan"),
    ("trainer.after_step", "def hook(step, metrics, groups): return {1: 1.0}", "dict"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "source", "says"), BAD)
async def test_a_bad_hook_is_one_line(key: str, source: str, says: str, module: Callable[[str], str]) -> None:
    path = f"{module(source)}:hook"
    with pytest.raises(MuaError) as caught:
        await used(key, path)
    line = str(caught.value)
    assert line.startswith(f"{key}: {path!r}")
    assert line.endswith(HOOKS[key].expected)
    assert says in line
    assert "\n" not in line


def test_a_module_that_raises_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_hooks.py").write_text("raise RuntimeError('two\\nlines')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for path in ("broken_hooks:hook", "no_such_module_at_all:hook"):
        with pytest.raises(ConfigError) as caught:
            load_hook("algorithm.loss", path)
        assert "cannot be imported" in str(caught.value)
        assert "\n" not in str(caught.value)


CONFIG = """\
name: hooks
output: {folder}/out
model: {{path: {folder}, chat_family: "research_hooks:Terse"}}
environment: {{name: help_desk, reward: "research_hooks:reward"}}
user: {{kind: "research_hooks:Impatient"}}
algorithm:
  loss: research_hooks:loss
  advantage: research_hooks:advantage
  group_filter: research_hooks:group_filter
  curriculum: {{kind: "research_hooks:curriculum"}}
trainer: {{steps: 1, after_step: "research_hooks:after_step"}}
"""


@pytest.fixture
def research(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the examples of the page as a module, and a configuration that names them."""
    (tmp_path / "research_hooks.py").write_text("\n".join(BLOCKS))
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    load_hook.cache_clear()
    yield tmp_path
    sys.modules.pop("research_hooks", None)
    load_hook.cache_clear()


def test_hooks_reach_the_record_of_the_run_and_rollout_workers(research: Path, tmp_path: Path) -> None:
    config = load_config(research / "config.yaml")
    check_hooks(config)
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config
    recorded = provenance(config)["hooks"]
    assert {hook["key"] for hook in recorded.values()} == HOOKS.keys() - {
        "environment.name", "environment.scorer.name", "agent.function"
    }  # fmt: skip
    assert {hook["file"] for hook in recorded.values()} == {str(research / "research_hooks.py")}
    assert all(re.fullmatch("[0-9a-f]{64}", hook["sha256"]) for hook in recorded.values())
    of_episodes = {"research_hooks:Terse", "research_hooks:reward", "research_hooks:Impatient"}
    theirs = made_with(config)
    assert theirs["hooks"].keys() == hook_sources(config, of_episodes=True).keys() == of_episodes
    with (research / "research_hooks.py").open("a") as file:
        file.write("# changed\n")
    with pytest.raises(ConfigError, match=r"research_hooks:reward: the trainer's \w{64}, here \w{64}"):
        check_code("r", theirs, made_with(config), "refuse")


def test_every_rank_checks_and_finds_the_hooks(research: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 0 announces holds paths, which each rank imports by itself."""
    config = load_config(research / "config.yaml")
    sent = pickle.dumps(PolicyLoss(config.algorithm))
    load_hook.cache_clear()
    sys.modules.pop("research_hooks", None)
    logprobs = torch.full((2,), -1.0, requires_grad=True)
    tokens = TokenTensors(torch.ones(2), torch.ones(2), torch.full((2,), -1.0), torch.full((2,), -1.0))
    assert pickle.loads(sent)(logprobs, torch.ones(2), tokens).loss.item() == pytest.approx(-2.0)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    wrong = load_config(research / "config.yaml", ["algorithm.loss=research_hooks:gone"])
    with pytest.raises(ConfigError, match=r"^algorithm\.loss: 'research_hooks:gone': module research_hooks has no"):
        train(wrong)


def test_all_wrong_hooks_are_told_at_once(research: Path) -> None:
    text = (research / "config.yaml").read_text()
    (research / "config.yaml").write_text(text.replace("_hooks:loss", "_hooks:no").replace("_hooks:adv", "_hooks:x"))
    with pytest.raises(ConfigError) as caught:
        check_hooks(load_config(research / "config.yaml"))
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "algorithm.loss", "algorithm.advantage"
    ]  # fmt: skip


@pytest.mark.parametrize("value", ["a:", ":b", "a b:c", "a:b:c", "grop"])
def test_what_is_neither_a_name_nor_a_path_is_a_wrong_configuration(research: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.loss"):
        load_config(research / "config.yaml", [f"algorithm.loss='{value}'"])


def test_a_domain_that_is_not_named_by_its_path_is_refused(module: Callable[[str], str]) -> None:
    name = module("from environments.help_desk import DOMAIN")
    with pytest.raises(ConfigError, match="calls itself 'help_desk'"):
        get_domain(f"{name}:DOMAIN")
