"""One small policy, fine-tuned and trained once for all end-to-end tests, through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_support import BASE, DETERMINISTIC, Workshop, mua

from environments.help_desk import DOMAIN
from environments.help_desk.demonstrations import demonstrations
from tools.tiny import SMALL, build_policy, write_conversations


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Tokenizer, 200 conversations of the scripted expert and a random Qwen3 of 2 layers, hidden 64."""
    folder = tmp_path_factory.mktemp("workshop")
    model, data, recipe = folder / "model", folder / "conversations.jsonl", folder / "recipe.yaml"
    conversations = list(demonstrations(200, 1, DOMAIN.system_prompt("short"), ["brief"]))
    build_policy(model, conversations, 1, 512, SMALL)
    write_conversations(data, conversations)
    recipe.write_text(BASE.format(model=model, data=data))
    return Workshop(model, data, recipe)


@pytest.fixture(scope="session")
def tuned(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of ``mua sft``: enough steps that the policy ends its turns."""
    folder = tmp_path_factory.mktemp("sft")
    fast = ["optimizer.learning_rate=5.0e-3", "megatron.max_tokens_per_microbatch=4096", "megatron.threads=2"]
    judged = [f"sft.validation={workshop.conversations}", "sft.validate_every=12"]  # leaves the training set whole
    steps = ["trainer.steps=24", "trainer.save_every=12"]
    mua("sft", workshop.recipe, f"output={folder}/out", *steps, *judged, *fast, cwd=folder)
    return folder / "out"


@pytest.fixture(scope="session")
def recipe(workshop: Workshop, tuned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration that starts from the fine-tuned policy, for every run that follows."""
    path = tmp_path_factory.mktemp("recipe") / "tuned.yaml"
    path.write_text(f"extends: {workshop.recipe}\nmodel: {{path: {tuned}/hf}}\n")
    return path


@pytest.fixture(scope="session")
def trained(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of ``mua train``: four uninterrupted steps in deterministic mode, every checkpoint kept."""
    folder = tmp_path_factory.mktemp("train")
    mua("train", recipe, "trainer.steps=4", "trainer.keep=9", *DETERMINISTIC, cwd=folder, fresh=True)
    return folder / "out"
