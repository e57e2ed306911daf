"""Checkpoints of one process: model folders, whole or not at all, from which a run goes on bit for bit.

Covers finding and pruning, float32 and bfloat16, both optimizers and the way from one to the other, a new process, a
full disk, writing in the background, and the manifest. Damage is in ``test_checkpoint_damage.py``, changes of layout
in ``tests/parity/test_checkpoint_layouts.py``.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from megatron_bridge.hf_folder import verify_hf_folder
from mua.algorithms.losses import CrossEntropyLoss, LossTerms
from mua.config.schema import ExperimentConfig
from mua.megatron import checkpoint_manifest
from mua.megatron.checkpoint import checkpoint_folder, latest_checkpoint, prune_checkpoints
from mua.observe.provenance import provenance
from mua.trainer.learner import Learner
from mua.types import Float32Array
from mua.utils.errors import DamagedCheckpoint, ModelError
from mua.utils.source_state import git_state
from tests.distributed import run_distributed, run_on_workers
from tests.megatron_support import OPTIMIZER, backend, exported, make_batch, write_model

STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture
def built(folder: Path) -> Iterator[Learner]:
    with backend(folder) as result:
        result.train_step(make_batch(), CrossEntropyLoss())
        yield result


@pytest.fixture
def checkpoint(built: Learner, tmp_path: Path) -> Path:
    path = checkpoint_folder(tmp_path, 1)
    built.save(path, {"position": 7})
    return path


def assert_same(found: dict[str, Float32Array], expected: dict[str, Float32Array]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name], values), name


def train(folder: str, root: str, first: int, last: int, settings: dict[str, Any]) -> dict[str, Float32Array]:
    """Steps ``first`` to ``last`` from the newest checkpoint, if there is one, with a checkpoint at the end."""
    with backend(Path(folder), total_steps=STEPS, **settings) as built:
        newest = latest_checkpoint(Path(root))
        if newest is not None:
            assert built.load(newest) == {"next": first}
        for step in range(first, last):
            built.train_step(make_batch(seed=step), CrossEntropyLoss())
        built.save(checkpoint_folder(Path(root), last), {"next": last})
        return exported(built)


@pytest.mark.parametrize(
    ("dtype", "distributed"),
    [
        ("float32", True),
        ("float32", False),
        pytest.param("bfloat16", True, marks=pytest.mark.slow),
        pytest.param("bfloat16", False, marks=pytest.mark.grid),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    folder: Path, tmp_path: Path, dtype: str, distributed: bool
) -> None:
    """Also where the other optimizer loads a checkpoint and writes it again, over it."""
    settings = {"dtype": dtype, "distributed_optimizer": distributed}
    other = settings | {"distributed_optimizer": not distributed}
    straight = run_on_workers(1, train, str(folder), str(tmp_path / "a"), 0, STEPS, settings)[0]
    for first, last, chosen in ((0, 1, settings), (1, 1, other), (1, 3, settings), (3, STEPS, settings)):
        resumed = run_distributed(train, 1, str(folder), str(tmp_path / "b"), first, last, chosen)[0]
    assert_same(resumed, straight)
    assert len(list((tmp_path / "b").iterdir())) == 3


@pytest.mark.parametrize("distributed_optimizer", [True, False])
def test_a_checkpoint_before_the_first_step_continues_like_a_fresh_start(
    folder: Path, tmp_path: Path, distributed_optimizer: bool
) -> None:
    with backend(folder, distributed_optimizer=distributed_optimizer) as built:
        built.save(checkpoint_folder(tmp_path, 0), {})
        built.train_step(make_batch(), CrossEntropyLoss())
        fresh = exported(built)
    with backend(folder, distributed_optimizer=distributed_optimizer) as built:
        built.load(checkpoint_folder(tmp_path, 0))
        built.train_step(make_batch(), CrossEntropyLoss())
        assert_same(exported(built), fresh)


def test_load_returns_what_was_saved_and_restores_weights_and_random_states(built: Learner, checkpoint: Path) -> None:
    saved, state = exported(built), torch.get_rng_state()
    built.train_step(make_batch(seed=5), CrossEntropyLoss())
    torch.rand(3)
    assert any(not np.array_equal(values, saved[name]) for name, values in exported(built).items())
    assert built.load(checkpoint) == {"position": 7}
    assert_same(exported(built), saved)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_configured_learning_rate_rules_after_loading(folder: Path, checkpoint: Path) -> None:
    slower = OPTIMIZER.model_copy(update={"learning_rate": 1e-4})
    with backend(folder, optimizer=slower) as other:
        other.load(checkpoint)
        assert other.train_step(make_batch(), CrossEntropyLoss())["train/lr"] == 1e-4


def test_transformers_loads_a_checkpoint_as_it_is(built: Learner, checkpoint: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    loaded = model.state_dict()
    for name, values in exported(built).items():
        assert np.array_equal(loaded[name].numpy(), values), name
    assert model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False).shape == (1, 7)


def test_a_run_starts_from_a_checkpoint_as_from_any_model_folder(checkpoint: Path, tmp_path: Path) -> None:
    with backend(checkpoint) as other:
        other.save(checkpoint_folder(tmp_path, 5), {"next": 5})
        assert other.load(checkpoint_folder(tmp_path, 5)) == {"next": 5}
        other.save_hf(tmp_path / "hf")
    assert (tmp_path / "hf/model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert verify_hf_folder(tmp_path / "hf") > 0
    assert not (tmp_path / "hf/manifest.json").exists()


def test_a_model_folder_that_is_gone_is_no_reason_to_lose_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(folder, tmp_path / "model"))
    with backend(moved) as other:
        other.save(checkpoint_folder(tmp_path, 1), {"next": 1})
        moved.rename(tmp_path / "elsewhere")
        other.save(checkpoint_folder(tmp_path, 2), {"next": 2})
    first, second = (verify_hf_folder(checkpoint_folder(tmp_path, step)) for step in (1, 2))
    assert first == second > 0


def test_no_file_of_a_checkpoint_is_a_pickle(checkpoint: Path) -> None:
    files = {str(path.relative_to(checkpoint)): path for path in checkpoint.rglob("*") if path.is_file()}
    assert files.keys() == {
        "checksums.jsonl", "config.json", "generation_config.json", "manifest.json", "model.safetensors",
        "optimizer/random_00000.json", "optimizer/rank_00000.safetensors", "tokenizer.json",
    }  # fmt: skip
    nonsense = (pickle.UnpicklingError, LookupError, EOFError, ValueError, RuntimeError)
    for path in files.values():
        for load in (pickle.load, lambda file: torch.load(file, weights_only=False)):
            with path.open("rb") as file, pytest.raises(nonsense):
                load(file)


def test_newest_is_found_and_old_ones_are_pruned(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "absent") is None
    for step in (2, 10, 9):
        checkpoint_folder(tmp_path, step).mkdir()
        (checkpoint_folder(tmp_path, step) / "manifest.json").write_text("{}")
    (tmp_path / ".step_00000012.partial").mkdir()
    assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 10)
    checkpoint_folder(tmp_path, 11).mkdir()  # has lost its manifest: damaged, and not passed over
    assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 11)
    prune_checkpoints(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000009", "step_00000010", "step_00000011"]


@pytest.mark.parametrize(
    ("change", "named"),
    [({"hidden": 48}, "hidden_size"), ({"layers": 3}, "num_layers"), ({"intermediate_size": 40}, "ffn_hidden_size")],
)
def test_another_model_is_refused(checkpoint: Path, tmp_path: Path, change: dict[str, int], named: str) -> None:
    write_model(tmp_path / "other", **change)
    with backend(tmp_path / "other") as built, pytest.raises(ModelError) as error:
        built.load(checkpoint)
    assert {str(checkpoint), str(tmp_path / "other")} <= set(str(error.value).replace(":", "").split())
    assert named in str(error.value)
    assert not isinstance(error.value, DamagedCheckpoint)


@pytest.mark.parametrize("other", ["dtype", "tokenizer.json"])
def test_another_dtype_or_tokenizer_is_refused(folder: Path, checkpoint: Path, tmp_path: Path, other: str) -> None:
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    (model / "tokenizer.json").write_text("{}" if other == "dtype" else '{"added_tokens": []}')
    with (
        backend(model, dtype="bfloat16" if other == "dtype" else "float32") as built,
        pytest.raises(ModelError) as error,
    ):
        built.load(checkpoint)
    assert other in str(error.value)
    assert not isinstance(error.value, DamagedCheckpoint)


def save_on_a_small_disk(folder: str, root: str, limit: int) -> list[str]:
    """The errors of two saves for which no file may grow beyond ``limit`` bytes, then what is in the folder."""
    with backend(Path(folder)) as built:
        built.save(checkpoint_folder(Path(root), 1), {})
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with pytest.raises(ModelError) as error:
            built.save(checkpoint_folder(Path(root), 2), {})
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        built.load(checkpoint_folder(Path(root), 1))
    return [str(error.value), *(path.name for path in Path(root).iterdir())]


@pytest.mark.parametrize("limit", [100_000, 20_000, 100], ids=["optimizer", "weights", "everything"])
def test_a_disk_that_fills_up_leaves_the_previous_checkpoint_and_no_debris(
    folder: Path, tmp_path: Path, limit: int
) -> None:
    message, *left = run_distributed(save_on_a_small_disk, 1, str(folder), str(tmp_path), limit)[0]
    assert "step_00000002" in message
    assert "Is the disk full?" in message
    assert "\n" not in message
    assert left == ["step_00000001"]


def test_a_checkpoint_in_the_background_holds_weights_and_moments_of_the_call(folder: Path, tmp_path: Path) -> None:
    with backend(folder) as built:
        built.train_step(make_batch(seed=1), CrossEntropyLoss())
        built.save(checkpoint_folder(tmp_path, 1), {"position": 1})
        saved = exported(built)
        built.save(checkpoint_folder(tmp_path, 2), {"position": 2}, background=True)
        (part,) = built.policy.optimizer.megatron.chained_optimizers
        states = [value for state in part.optimizer.state.values() for value in state.values()]
        for changed in [*built.policy.parameters(), *part.optimizer.state, *states]:
            changed.data.fill_(7.0)
        built.finish_save()
        assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 2)
        after = []
        for step in (2, 1):
            assert built.load(checkpoint_folder(tmp_path, step)) == {"position": step}
            assert_same(exported(built), saved)
            built.train_step(make_batch(seed=2), CrossEntropyLoss())
            after.append(exported(built))
        assert_same(*after)


def test_a_checkpoint_in_the_background_is_finished_by_a_later_step_or_the_end(folder: Path, tmp_path: Path) -> None:
    with backend(folder) as built:
        built.save(checkpoint_folder(tmp_path, 1), {}, background=True)
        assert built._pending is not None
        assert built._pending._thread is not None
        built._pending._thread.join(60)
        assert latest_checkpoint(tmp_path) is None  # no rank alone gives it its name
        prune_checkpoints(tmp_path, keep=1, writing=checkpoint_folder(tmp_path, 1))
        built.train_step(make_batch(), CrossEntropyLoss())
        assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 1)
        built.save(checkpoint_folder(tmp_path, 3), {}, background=True)
    assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 3)


def test_an_error_in_the_background_is_told_by_the_next_call(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with backend(folder) as built:
        with monkeypatch.context() as patched:
            patched.setattr("mua.utils.checksums.write_all", full)
            built.save(checkpoint_folder(tmp_path, 1), {}, background=True)
            assert built._pending is not None
            assert built._pending._thread is not None
            built._pending._thread.join(60)
        with pytest.raises(ModelError, match=r"No space left on device.*Is the disk full\?"):
            built.train_step(make_batch(), CrossEntropyLoss())
        assert not list(tmp_path.iterdir())
        built.save(checkpoint_folder(tmp_path, 2), {})
        assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 2)


def test_steps_that_change_nothing_keep_their_places_in_the_schedule(folder: Path, tmp_path: Path) -> None:
    """Of a gradient that is not finite, and of steps with nothing to learn from; Adam counts neither."""
    schedule = OPTIMIZER.model_copy(update={"schedule": "linear", "min_learning_rate": 1e-3, "warmup_steps": 2})

    def infinite(logprobs: torch.Tensor, *_: object) -> LossTerms:
        return LossTerms(logprobs.sum() * float("inf"), {}, {})

    with backend(folder, optimizer=schedule, total_steps=6) as built:
        rates = [built.train_step(make_batch(), infinite)["train/lr"]]
        built.skip_steps({"policy": 2})
        rates.append(built.train_step(make_batch(seed=1), CrossEntropyLoss())["train/lr"])
        built.save(checkpoint_folder(tmp_path, 4), {})
        rates.append(built.train_step(make_batch(seed=2), CrossEntropyLoss())["train/lr"])
        straight = exported(built)
    assert rates == pytest.approx([5e-3, 1e-2 - 2 * 1.8e-3, 1e-2 - 3 * 1.8e-3])
    counts = checkpoint_manifest.read_manifest(checkpoint_folder(tmp_path, 4))["networks"]["policy"]
    assert counts == {"steps": 1, "skipped_steps": 3}
    with backend(folder, optimizer=schedule, total_steps=6) as resumed:
        resumed.load(checkpoint_folder(tmp_path, 4))
        assert resumed.train_step(make_batch(seed=2), CrossEntropyLoss())["train/lr"] == rates[2]
        assert all(np.array_equal(values, straight[name]) for name, values in exported(resumed).items())


def test_the_manifest_tells_where_a_checkpoint_comes_from(built: Learner, tmp_path: Path) -> None:
    settings = {"name": "n", "output": "o", "environment": {"name": "help_desk"}, "trainer": {"steps": 3}}
    user = {"kind": "llm", "llm": {"base_url": "http://x/v1", "model": "m", "api_key": "sk-secret"}}
    config = ExperimentConfig(**settings, model={"path": "p"}, user=user)
    texts = {"README.md": "card"}
    built.save(checkpoint_folder(tmp_path, 1), {"step": 1}, provenance(config), texts=texts)
    content = checkpoint_manifest.read_manifest(checkpoint_folder(tmp_path, 1))
    assert content["data_position"] == {"step": 1}
    assert content["networks"] == {"policy": {"steps": 1, "skipped_steps": 0}}
    assert content["config"]["trainer"]["steps"] == 3
    assert content["config"]["user"]["llm"]["model"] == "m"
    assert "sk-secret" not in json.dumps(content)
    assert content["versions"].keys() >= {"mua", "megatron-core", "torch", "sglang"}
    assert set(content["files"]) == {
        "checksums.jsonl", "optimizer/random_00000.json", "optimizer/rank_00000.safetensors",
    }  # fmt: skip
    assert (checkpoint_folder(tmp_path, 1) / "README.md").read_text() == "card"


def test_the_commit_is_told_with_whether_files_differ_from_it(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x"]
    (tmp_path / "file").write_text("a")
    for arguments in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert git_state(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "file").write_text("b")
    assert git_state(tmp_path) == {"commit": commit, "dirty": True}
    (tmp_path / "inner").mkdir()
    assert git_state(tmp_path / "inner") is None  # a package installed inside another project's repository
