"""One small policy, fine-tuned and trained once for all end-to-end tests of all processes, through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_support import BASE, DETERMINISTIC, Workshop, mua

from environments.help_desk import DOMAIN
from environments.help_desk.demonstrations import demonstrations
from environments.kit.demonstrate import write_conversations
from tests.made_once import made_once
from tools.tiny import SMALL, build_policy


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Tokenizer, 200 conversations of the scripted expert and a random Qwen3 of 2 layers, hidden 64."""

    def make(folder: Path) -> None:
        conversations = list(demonstrations(200, 1, DOMAIN.system_prompt("short"), ["brief"]))
        build_policy(folder / "model", conversations, 1, 512, SMALL)
        write_conversations(folder / "conversations.jsonl", conversations)
        (folder / "recipe.yaml").write_text(BASE.format(model=folder / "model", data=folder / "conversations.jsonl"))

    folder = made_once(tmp_path_factory, "workshop", make)
    return Workshop(folder / "model", folder / "conversations.jsonl", folder / "recipe.yaml")


@pytest.fixture(scope="session")
def tuned(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of ``mua sft``: enough steps that the policy ends its turns."""
    fast = ["optimizer.learning_rate=5.0e-3", "megatron.max_tokens_per_microbatch=4096", "megatron.threads=2"]
    judged = [f"sft.validation={workshop.conversations}", "sft.validate_every=12"]  # leaves the training set whole
    steps = ["trainer.steps=24", "trainer.save_every=12"]

    def make(folder: Path) -> None:
        mua("sft", workshop.recipe, f"output={folder}/out", *steps, *judged, *fast, cwd=folder)

    return made_once(tmp_path_factory, "sft", make) / "out"


@pytest.fixture(scope="session")
def recipe(workshop: Workshop, tuned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration that starts from the fine-tuned policy, for every run that follows."""

    def make(folder: Path) -> None:
        (folder / "tuned.yaml").write_text(f"extends: {workshop.recipe}\nmodel: {{path: {tuned}/hf}}\n")

    return made_once(tmp_path_factory, "recipe", make) / "tuned.yaml"


@pytest.fixture(scope="session")
def trained(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of ``mua train``: four uninterrupted steps in deterministic mode, every checkpoint kept."""

    def make(folder: Path) -> None:
        mua("train", recipe, "trainer.steps=4", "trainer.keep=9", *DETERMINISTIC, cwd=folder, fresh=True)

    return made_once(tmp_path_factory, "train", make) / "out"
