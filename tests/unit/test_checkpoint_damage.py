"""Damage and mistaken targets: every flipped bit is refused by the file it is in, and nothing foreign is replaced.

Bits are drawn in every file of a checkpoint and of an exported folder, small ones and some above 1 MiB, and met by
resuming, by conversion and by ``verify``. Also: files that disagree under checksums that fit, which older checkpoint is
offered, and what a conversion may replace. Ranks that share the reading, in processes of
their own, are in ``tests/parity/test_checkpoint_layouts.py``.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mua.config.schema import CriticConfig, ExperimentConfig
from mua.megatron import checkpoint_manifest, offline
from mua.megatron.checkpoint import checkpoint_folder, latest_checkpoint
from mua.megatron.offline import verify
from mua.trainer.learner import Learner
from mua.trainer.run_folder import Run
from mua.utils.errors import BridgeError, DamagedCheckpoint, ModelError
from tests.megatron_support import backend, reseal, write_model

BITS_PER_FILE = 6
LARGE = 1 << 20
SHARD = 500_000
SLICES = "optimizer/rank_00000.safetensors"
Refusals = (ModelError, BridgeError)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def model(root: Path) -> Path:
    write_model(root / "hf", hidden=512, tied=False)
    (root / "hf" / "tokenizer.json").write_text(json.dumps({"words": list(range(500))}))
    return root / "hf"


@pytest.fixture(scope="module")
def trained(model: Path, root: Path) -> Path:
    """The second of two training checkpoints, with a critic."""
    with backend(model, critic=CriticConfig()) as built:
        for step in (1, 2):
            built.save(checkpoint_folder(root, step), {"step": step})
    return checkpoint_folder(root, 2)


@pytest.fixture
def built(model: Path) -> Iterator[Learner]:
    with backend(model) as result:
        yield result


@pytest.fixture(scope="module")
def returned(trained: Path, root: Path) -> Path:
    """Exported, in several files."""
    offline.convert_to_hf(trained, root / "back", dtype="float32", shard_bytes=SHARD)
    assert len(list((root / "back").glob("*.safetensors"))) > 1
    return root / "back"


def copy(folder: Path, place: Path) -> Path:
    return Path(shutil.copytree(folder, place / folder.name))


def flip(path: Path, place: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        value = file.read(1)[0]
        file.seek(place)
        file.write(bytes([value ^ 1 << bit]))


def refuse_every_bit(folder: Path, meet: Callable[[], Any]) -> None:
    """Flip drawn bits of every file of ``folder``, one at a time, the first and the last of each among them."""
    drawn = random.Random(3)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        others = [(drawn.randrange(size), drawn.randrange(8)) for _ in range(BITS_PER_FILE)]
        for place, bit in [(0, 0), (size - 1, 7), *others]:
            flip(path, place, bit)
            with pytest.raises(Refusals) as caught:
                meet()
            assert path.name in str(caught.value), (path, place, bit)
            assert "\n" not in str(caught.value)
            flip(path, place, bit)
    meet()


def test_every_flipped_bit_is_refused_on_resume(built: Learner, trained: Path, tmp_path: Path) -> None:
    folder = copy(trained, tmp_path)
    assert all((folder / name).stat().st_size > LARGE for name in ("model.safetensors", SLICES))
    refuse_every_bit(folder, lambda: built.load(folder))


def test_every_flipped_bit_is_refused_on_conversion(trained: Path, tmp_path: Path) -> None:
    folder, out = copy(trained, tmp_path), tmp_path / "out"
    refuse_every_bit(folder, lambda: offline.convert_to_hf(folder, out))
    verify(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", folder.name]


@pytest.mark.parametrize("kind", ["trained", "returned"])
def test_every_flipped_bit_is_refused_by_verify(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = copy(request.getfixturevalue(kind), tmp_path)
    refuse_every_bit(folder, lambda: verify(folder))


def test_a_flipped_bit_of_an_export_is_refused_by_training(returned: Path, tmp_path: Path) -> None:
    folder = copy(returned, tmp_path)
    path = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    flip(path, path.stat().st_size // 2, 1)
    with pytest.raises(ModelError, match=rf"model\.path: .*{path.name}"), backend(folder):
        pass


@pytest.mark.parametrize("name", ["model.safetensors", SLICES, "config.json", "optimizer/random_00000.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_file_that_is_not_whole_is_named(
    built: Learner, trained: Path, tmp_path: Path, name: str, damage: str
) -> None:
    path = copy(trained, tmp_path) / name
    content = path.read_bytes()
    path.unlink()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DamagedCheckpoint, match=path.name):
        built.load(tmp_path / trained.name)
    with pytest.raises(ModelError, match="absent"):
        built.load(tmp_path / "absent")


def test_ranks_share_the_files_and_none_is_left_out(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained, tmp_path)
    content = checkpoint_manifest.read_manifest(folder)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        if path.name == checkpoint_manifest.NAME:
            continue
        last, found = path.stat().st_size - 1, 0
        flip(path, last, 0)
        for part in range(3):
            try:
                checkpoint_manifest.check_files(folder, content, part, 3)
            except DamagedCheckpoint as error:
                found += path.name in str(error)
        flip(path, last, 0)
        assert found == (3 if path.name == "checksums.jsonl" else 1), path


# ---- files that disagree, under checksums that fit


def changed_slices(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / SLICES)
    change(tensors)
    save_file(tensors, folder / SLICES)


NORM = "model.norm.weight/exp_avg"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop(f"{NORM}[0:512,0:1]"), NORM),
        (lambda tensors: tensors.update({f"{NORM}[3:4,0:1]": torch.zeros(1, 1)}), NORM),
        (lambda tensors: tensors.update({NORM: torch.zeros(1, 1)}), NORM),
    ],
    ids=["missing", "twice", "no slice"],
)
def test_slices_that_are_not_every_element_once_are_named(
    built: Learner, trained: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], named: str
) -> None:
    folder = copy(trained, tmp_path)
    changed_slices(folder, change)
    reseal(folder)
    verify(folder)
    with pytest.raises(DamagedCheckpoint) as caught:
        built.load(folder)
    assert {named, str(folder)} <= set(str(caught.value).replace(": ", " ").split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("dtype", "torch.bfloat16"), ("networks", {}), ("networks", {"policy": {"steps": -1, "skipped_steps": 0}}),
     ("data_position", None), ("layout", None), ("files", {"../x": {"bytes": 1, "xxh3_64": ""}})],
)  # fmt: skip
def test_a_manifest_that_disagrees_is_refused(
    built: Learner, trained: Path, tmp_path: Path, key: str, value: Any
) -> None:
    folder = copy(trained, tmp_path)
    reseal(folder, **{key: value})
    with pytest.raises(ModelError) as caught:
        built.load(folder)
    assert ("policy" if value == {} else key) in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- which older one is offered


@pytest.fixture
def config(model: Path, tmp_path: Path) -> ExperimentConfig:
    return ExperimentConfig(
        name="run",
        output=tmp_path / "a run",
        model={"path": model},
        environment={"name": "help_desk"},
        trainer={"steps": 4},
        observe={"tensorboard": False, "progress": False},
    )


@pytest.mark.parametrize("damage", ["a bit", "no manifest", "half a manifest", "a slice"])
def test_a_damaged_newest_checkpoint_offers_the_one_before(
    built: Learner, trained: Path, config: ExperimentConfig, damage: str
) -> None:
    checkpoints = config.output / "checkpoints"
    for step in (1, 2):
        shutil.copytree(checkpoint_folder(trained.parent, step), checkpoint_folder(checkpoints, step))
    newest = checkpoint_folder(checkpoints, 2)
    if damage == "a bit":
        flip(newest / "model.safetensors", LARGE, 2)
    elif damage == "no manifest":
        (newest / checkpoint_manifest.NAME).unlink()
    elif damage == "half a manifest":
        os.truncate(newest / checkpoint_manifest.NAME, 300)
    else:
        changed_slices(newest, lambda tensors: tensors.pop(f"{NORM}[0:512,0:1]"))
        reseal(newest)
    with pytest.raises(ModelError, match=r"step_00000001") as caught:
        Run(config, cast(Any, built))
    run_offered(str(caught.value))
    assert latest_checkpoint(checkpoints) == checkpoint_folder(checkpoints, 1)
    assert (checkpoints / "damaged_step_00000002" / "config.json").exists()
    with Run(config, cast(Any, built)) as run:
        assert run.step == 1


def run_offered(message: str) -> None:
    command = message.partition("run: ")[2].partition(" and then")[0]
    subprocess.run(command, shell=True, check=True, timeout=60)


def test_where_no_older_checkpoint_is_whole_all_are_moved_away(
    built: Learner, trained: Path, config: ExperimentConfig
) -> None:
    for step in (1, 2):
        folder = Path(shutil.copytree(trained, checkpoint_folder(config.output / "checkpoints", step)))
        (folder / SLICES).unlink()
    with pytest.raises(ModelError, match=SLICES) as caught:
        Run(config, cast(Any, built))
    run_offered(str(caught.value))
    with Run(config, cast(Any, built)) as run:
        assert run.step == 0


# ---- what a conversion may replace


@pytest.mark.parametrize("held", ["a model", "notes", "ours and notes", "ours, trained further"])
def test_a_target_with_anything_foreign_is_refused_and_stays(trained: Path, tmp_path: Path, held: str) -> None:
    out = tmp_path / "out"

    def convert(**settings: Any) -> None:
        offline.convert_to_hf(trained, out, dtype="bfloat16", **settings)

    if held == "a model":
        write_model(out)
    elif held == "notes":
        out.mkdir()
    else:
        convert()
    if held == "ours, trained further":
        flip(out / "model.safetensors", LARGE // 2, 0)
    else:
        (out / "notes.txt").write_text("years of work")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(BridgeError, match=r"out .*--force"):
        convert()
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    convert(force=True)
    assert not (out / "notes.txt").exists()
    convert()  # what it wrote itself may be replaced without a word
    verify(out)


@pytest.mark.parametrize("force", [False, True])
def test_targets_over_or_in_what_is_read_are_refused(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    checkpoint = copy(trained, tmp_path)
    (tmp_path / "link").symlink_to(checkpoint)
    inside = (tmp_path / "link", tmp_path / "link" / "x", checkpoint / ".." / checkpoint.name)
    for out in (checkpoint, checkpoint / "optimizer", tmp_path, *inside):
        with pytest.raises(BridgeError, match=checkpoint.name):
            offline.convert_to_hf(checkpoint, out, force=force)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("years of work")
    monkeypatch.chdir(tmp_path / "work")
    for out in (Path("."), tmp_path / "work"):  # the folder one stands in
        with pytest.raises(BridgeError):
            offline.convert_to_hf(trained, out, force=force)
    assert (tmp_path / "work" / "thesis.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", checkpoint.name, "work"]
    verify(checkpoint)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_named(model: Path, tmp_path: Path, value: float) -> None:
    folder = copy(model, tmp_path)
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    stored[name][3, 5] = value
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"model\.path: .*{name}"), backend(folder):
        pass
