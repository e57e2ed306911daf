"""Checkpoints of one process: whole or not at all, bit-for-bit resumption, and one clear error for each kind of damage.

Covers finding and pruning, float32 and bfloat16, both optimizers, a new process, a full disk, folders of another
model, missing, truncated and half-written files, a pickled index that names foreign classes, writing in the background,
and the manifest. Changes of layout
are in ``tests/parity/test_megatron_layouts.py``.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mua.algorithms.losses import CrossEntropyLoss
from mua.config.schema import ExperimentConfig
from mua.megatron import checkpoint_manifest
from mua.megatron.checkpoint import checkpoint_folder, latest_checkpoint, prune_checkpoints
from mua.observe.provenance import provenance
from mua.trainer.learner import Learner
from mua.types import Float32Array
from mua.utils.errors import ModelError
from mua.utils.source_state import git_state
from tests.distributed import run_distributed, run_on_workers
from tests.megatron_support import OPTIMIZER, backend, exported, make_batch, write_model

STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
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
    ("distributed_optimizer", "dtype"),
    [
        (True, "float32"),
        (False, "float32"),
        pytest.param(True, "bfloat16", marks=pytest.mark.slow),
        pytest.param(False, "bfloat16", marks=pytest.mark.grid),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    folder: Path, tmp_path: Path, dtype: str, distributed_optimizer: bool
) -> None:
    settings = {"dtype": dtype, "distributed_optimizer": distributed_optimizer}
    straight = run_on_workers(1, train, str(folder), str(tmp_path / "a"), 0, STEPS, settings)[0]
    for first, last in ((0, 1), (1, 3), (3, STEPS)):
        resumed = run_distributed(train, 1, str(folder), str(tmp_path / "b"), first, last, settings)[0]
    assert straight.keys() == resumed.keys()
    for name, values in straight.items():
        assert np.array_equal(values, resumed[name]), name


def test_a_checkpoint_before_the_first_step_continues_like_a_fresh_start(folder: Path, tmp_path: Path) -> None:
    with backend(folder) as built:
        built.save(checkpoint_folder(tmp_path, 0), {})
        built.train_step(make_batch(), CrossEntropyLoss())
        fresh = exported(built)
    with backend(folder) as built:
        built.load(checkpoint_folder(tmp_path, 0))
        built.train_step(make_batch(), CrossEntropyLoss())
        for name, values in exported(built).items():
            assert np.array_equal(values, fresh[name]), name


def test_load_returns_what_was_saved_and_restores_the_weights(built: Learner, checkpoint: Path) -> None:
    saved = exported(built)
    built.train_step(make_batch(seed=5), CrossEntropyLoss())
    assert any(not np.array_equal(values, saved[name]) for name, values in exported(built).items())
    assert built.load(checkpoint) == {"position": 7}
    for name, values in exported(built).items():
        assert np.array_equal(values, saved[name]), name


def test_the_configured_learning_rate_rules_after_loading(folder: Path, checkpoint: Path) -> None:
    slower = OPTIMIZER.model_copy(update={"learning_rate": 1e-4})
    with backend(folder, optimizer=slower) as other:
        other.load(checkpoint)
        assert other.train_step(make_batch(), CrossEntropyLoss())["train/lr"] == 1e-4


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


def test_a_missing_or_half_written_checkpoint_is_refused(built: Learner, checkpoint: Path) -> None:
    with pytest.raises(ModelError, match=r"absent does not exist"):
        built.load(checkpoint.with_name("absent"))
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(ModelError, match=r"not whole: it has no manifest\.json"):
        built.load(checkpoint)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"hidden": 48}, r"model.* is \[\d+, 32\] in the checkpoint and \[\d+, 48\] in model\.path"),
     ({"layers": 3}, r"model\.layers\.2\.\S+ is missing in the checkpoint and \[")],
)  # fmt: skip
def test_another_model_is_named_by_tensor_and_shapes(
    checkpoint: Path, tmp_path: Path, change: dict[str, int], message: str
) -> None:
    other = tmp_path / "other"
    write_model(other, **change)
    with backend(other) as built, pytest.raises(ModelError, match=message):
        built.load(checkpoint)


@pytest.mark.parametrize("setting", [{"dtype": "bfloat16"}, {"distributed_optimizer": False}])
def test_another_precision_or_optimizer_is_named(folder: Path, checkpoint: Path, setting: dict[str, Any]) -> None:
    with backend(folder, **setting) as built, pytest.raises(ModelError, match=rf"saved with {next(iter(setting))} "):
        built.load(checkpoint)


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


@pytest.mark.parametrize("limit", [20_000, 100], ids=["tensors", "everything"])
def test_a_disk_that_fills_up_leaves_the_previous_checkpoint_and_no_debris(
    folder: Path, tmp_path: Path, limit: int
) -> None:
    message, *left = run_distributed(save_on_a_small_disk, 1, str(folder), str(tmp_path), limit)[0]
    assert "step_00000002 could not be written" in message
    assert "Is the disk full? Older checkpoints are as they were" in message
    assert "\n" not in message
    assert left == ["step_00000001"]


def test_too_little_space_is_told_before_writing(
    built: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 10))
    with pytest.raises(ModelError, match=r"has 0\.00 GiB free, a checkpoint needs about"):
        built.save(checkpoint_folder(tmp_path, 1), {})
    assert not list(tmp_path.iterdir())


def test_state_that_is_no_json_is_refused(built: Learner, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        built.save(checkpoint_folder(tmp_path, 1), {"array": np.zeros(1)})
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_in_the_background_holds_the_weights_of_the_call(folder: Path, tmp_path: Path) -> None:
    with backend(folder) as built:
        built.train_step(make_batch(seed=1), CrossEntropyLoss())
        built.save(checkpoint_folder(tmp_path, 1), {"position": 1})
        saved = exported(built)
        built.save(checkpoint_folder(tmp_path, 2), {"position": 2}, background=True)
        for parameter in built.policy.parameters():
            parameter.data.fill_(7.0)
        built.finish_save()
        assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 2)
        assert built.load(checkpoint_folder(tmp_path, 2)) == {"position": 2}
        for name, values in exported(built).items():
            assert np.array_equal(values, saved[name]), name
        built.train_step(make_batch(seed=2), CrossEntropyLoss())
        after = exported(built)
        built.load(checkpoint_folder(tmp_path, 1))  # moments, too, are those of the call
        built.train_step(make_batch(seed=2), CrossEntropyLoss())
        for name, values in exported(built).items():
            assert np.array_equal(values, after[name]), name


def test_a_checkpoint_in_the_background_is_finished_by_a_later_step(folder: Path, tmp_path: Path) -> None:
    with backend(folder) as built:
        built.save(checkpoint_folder(tmp_path, 1), {}, background=True)
        assert built._pending is not None
        assert built._pending._thread is not None
        built._pending._thread.join(60)
        assert latest_checkpoint(tmp_path) is None  # no rank alone gives it its name
        prune_checkpoints(tmp_path, keep=1, writing=checkpoint_folder(tmp_path, 1))
        built.train_step(make_batch(), CrossEntropyLoss())
        assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 1)


def test_an_error_in_the_background_is_told_by_the_next_call(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with backend(folder) as built:
        with monkeypatch.context() as patched:
            patched.setattr("mua.megatron.checkpoint.write_bucket", full)
            built.save(checkpoint_folder(tmp_path, 1), {}, background=True)
            assert built._pending is not None
            assert built._pending._thread is not None
            built._pending._thread.join(60)
        with pytest.raises(ModelError, match=r"No space left on device\. Is the disk full\?"):
            built.train_step(make_batch(), CrossEntropyLoss())
        assert not list(tmp_path.iterdir())
        built.save(checkpoint_folder(tmp_path, 2), {})
        assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 2)


def test_the_manifest_tells_where_a_checkpoint_comes_from(built: Learner, tmp_path: Path) -> None:
    settings = {"name": "n", "output": "o", "environment": {"name": "help_desk"}, "trainer": {"steps": 3}}
    user = {"kind": "llm", "llm": {"base_url": "http://x/v1", "model": "m", "api_key": "sk-secret"}}
    config = ExperimentConfig(**settings, model={"path": "p"}, user=user)
    built.save(checkpoint_folder(tmp_path, 1), {"step": 1}, provenance(config))
    content = checkpoint_manifest.read_manifest(checkpoint_folder(tmp_path, 1))
    assert content["data_position"] == {"step": 1}
    assert content["config"]["trainer"]["steps"] == 3
    assert content["config"]["user"]["llm"]["model"] == "m"
    assert "sk-secret" not in json.dumps(content)
    assert content["versions"].keys() >= {"mua", "megatron-core", "torch", "sglang"}
    folder = checkpoint_folder(tmp_path, 1)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert set(content["files"]) == files - {checkpoint_manifest.NAME}
    assert "hf/config.json" in files  # with the tokenizer: it is converted from any folder


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
