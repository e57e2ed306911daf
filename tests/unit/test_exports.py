"""What a run leaves in ``<output>/hf``, used as somebody else would: no stop token, no chat family, no setting given.

Tiny models of Qwen2.5's and Qwen3's shape, with files as base and instruction-tuned checkpoints have them, after SFT
and after RL. Not here: the models themselves, and what the card says (test_model_card.py).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from mua.config.schema import ExperimentConfig
from mua.store.database import Store
from mua.tokens.codec import tokenizer_digest
from mua.trainer.from_store import train_offline
from mua.trainer.sft import fine_tune
from tests.served_support import serving
from tests.store_support import spoil, write_run
from tests.tokens_fixtures import write_tokenizer

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "max_position_embeddings": 512}  # fmt: skip
MODELS = {
    "qwen2.5": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
FILES = ("base", "instruct")
TEMPLATE = "additional_chat_templates/rag.jinja"


def make_model(folder: Path, family: str, files: str) -> Path:
    """A model with random weights; of a base one the files name the end of a text alone."""
    write_tokenizer(folder, family)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    turn, text = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    config, model = MODELS[family]
    extra = {"head_dim": 16} if family == "qwen3" else {}
    torch.manual_seed(3)
    made = model(config(vocab_size=len(tokenizer), initializer_range=0.2, **SHAPE, **extra))
    made.config.eos_token_id = text if files == "base" else turn
    made.save_pretrained(folder)
    settings: dict[str, Any] = {"eos_token_id": text, "do_sample": False, "max_new_tokens": 2048}
    if files == "instruct":
        settings = {"eos_token_id": [turn, text], "pad_token_id": text, "do_sample": True, "temperature": 0.7,
                    "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(settings))
    if files == "base":
        told = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(told | {"eos_token": "<|endoftext|>"}))
    (folder / TEMPLATE).parent.mkdir()
    (folder / TEMPLATE).write_text("{{ messages }}")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    return folder


def config_of(model: Path, output: Path, **sections: Any) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "name": "export", "output": str(output), "environment": {"name": "help_desk"},
            "rollout": {"max_tokens": 64},
            "model": {"path": str(model), "dtype": "float32", "max_length": 128},
            "megatron": {"max_tokens_per_microbatch": 128, "threads": 1},
            "observe": {"tensorboard": False, "progress": False},
        }
        | sections
    )  # fmt: skip


def after_sft(model: Path, place: Path) -> Path:
    """A policy that answers with one word, as the exported folder."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "x.jsonl").write_text('{"prompt": "hello", "completion": "order"}\n')
    sft = {"data": str(place / "x.jsonl"), "batch_size": 1}
    fine_tune(
        config_of(model, place / "sft", sft=sft, optimizer={"learning_rate": 1e-2},
                  trainer={"steps": 25, "save_every": 0})
    )  # fmt: skip
    return place / "sft/hf"


def after_rl(model: Path, place: Path) -> Path:
    """The same policy, from stored episodes of another, at a rate that changes next to nothing."""
    start = after_sft(model, place)
    for name in ("generation_config.json", "tokenizer_config.json", "config.json"):
        shutil.copyfile(model / name, start / name)
    (start / "checksums.jsonl").unlink()
    with Store.open(place) as store:
        write_run(store, steps_done=2)
        spoil(store, "UPDATE runs SET provenance = ?", json.dumps({"tokenizer": tokenizer_digest(model)}))
    algorithm = {"group_size": 2, "groups_per_step": 2, "correction": "truncate"}
    train_offline(
        config_of(start, place / "rl", algorithm=algorithm, optimizer={"learning_rate": 1e-8},
                  offline={"store": str(place)}, trainer={"steps": 1, "save_every": 0})
    )  # fmt: skip
    return place / "rl/hf"


@pytest.fixture(scope="module", params=[f"{family} {files}" for family in MODELS for files in FILES])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, files = request.param.split()
    return make_model(tmp_path_factory.mktemp("export") / f"{family}-{files}", family, files)


@pytest.mark.parametrize("train", [after_sft, after_rl])
def test_an_export_ends_its_turns_for_transformers_and_keeps_the_bases_settings(
    model: Path, tmp_path: Path, train: Any
) -> None:
    folder = train(model, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = transformers.AutoModelForCausalLM.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, return_tensors="pt", return_dict=True,
        enable_thinking=False,
    )  # fmt: skip
    torch.manual_seed(0)
    said = found.generate(**asked, max_new_tokens=40)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(said) == "order<|im_end|>"
    before, after = (json.loads((one / "generation_config.json").read_text()) for one in (model, folder))
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert {**after, "transformers_version": ""} == {**before, "eos_token_id": ends, "transformers_version": ""}
    assert (folder / TEMPLATE).read_text() == "{{ messages }}"
    assert not (folder / "adapter_config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("train", [after_sft, after_rl])
def test_an_export_ends_its_turns_for_an_engine_that_is_told_nothing(model: Path, tmp_path: Path, train: Any) -> None:
    folder = train(model, tmp_path)
    with serving(folder, tmp_path / "served") as served:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 40,
                "chat_template_kwargs": {"enable_thinking": False}}  # fmt: skip
        key = {"Authorization": f"Bearer {served.key}"}
        answer = httpx.post(f"{served.url}/chat/completions", json=body, headers=key, timeout=240)
    (choice,) = answer.json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("order", "stop")
