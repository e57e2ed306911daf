"""Damage and mistaken targets: every flipped bit is refused by the file it is in, and nothing foreign is replaced.

Bits are drawn in every file of a checkpoint and of an exported folder, small ones and one above 4 MiB, and met by
resuming, by conversion and by ``verify``. Also: which older checkpoint is offered, a checkpoint of the old format, and
what a conversion may replace. What an attacker writes, with checksums that fit, is in ``test_checkpoint_attacks.py``;
ranks that share the reading, in processes of their own, in ``tests/parity/test_checkpoint_layouts.py``.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_bridge.hf_folder import verify_hf_folder
from mua.config.schema import ExperimentConfig
from mua.megatron import checkpoint_manifest, offline
from mua.megatron.checkpoint import checkpoint_folder, latest_checkpoint
from mua.megatron.offline import verify
from mua.trainer.run_folder import Run
from mua.utils.errors import BridgeError, DamagedCheckpoint, ModelError
from tests.megatron_support import backend, exported, write_model

BITS_PER_FILE = 6
LARGE = 4 << 20
SHARD = 5_000_000
Refusals = (ModelError, BridgeError)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def model(root: Path) -> Path:
    write_model(root / "hf", hidden=2048, tied=False)
    (root / "hf" / "tokenizer.json").write_text(json.dumps({"words": list(range(500))}))
    return root / "hf"


@pytest.fixture(scope="module")
def trained(model: Path, root: Path) -> Path:
    """The second of two training checkpoints."""
    with backend(model) as built:
        for step in (1, 2):
            built.save(checkpoint_folder(root, step), {"step": step})
    return checkpoint_folder(root, 2)


@pytest.fixture(scope="module")
def converted(model: Path, root: Path) -> Path:
    offline.hf_to_megatron(model, root / "meg")
    return root / "meg"


@pytest.fixture(scope="module")
def returned(model: Path, converted: Path, root: Path) -> Path:
    """Exported again, in several files."""
    offline.megatron_to_hf(converted, root / "back", source=model, max_shard_bytes=SHARD)
    sizes = [path.stat().st_size for path in (root / "back").glob("*.safetensors")]
    assert len(sizes) > 1
    assert max(sizes) > LARGE
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


def test_every_flipped_bit_is_refused_on_resume(model: Path, trained: Path, tmp_path: Path) -> None:
    folder = copy(trained, tmp_path)
    assert max(path.stat().st_size for path in folder.iterdir()) > LARGE
    with backend(model) as built:
        refuse_every_bit(folder, lambda: built.load(folder))


def test_every_flipped_bit_is_refused_on_conversion(model: Path, trained: Path, tmp_path: Path) -> None:
    folder, out = copy(trained, tmp_path), tmp_path / "out"

    def convert() -> None:
        offline.megatron_to_hf(folder, out, source=model)

    refuse_every_bit(folder, convert)
    assert verify_hf_folder(out) == len(load_file(model / "model.safetensors"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", folder.name]


@pytest.mark.parametrize("kind", ["trained", "converted", "returned"])
def test_every_flipped_bit_is_refused_by_verify(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = copy(request.getfixturevalue(kind), tmp_path)
    refuse_every_bit(folder, lambda: verify(folder))


def test_every_flipped_bit_of_an_export_is_refused_by_conversion(returned: Path, tmp_path: Path) -> None:
    folder = copy(returned, tmp_path)
    refuse_every_bit(folder, lambda: offline.hf_to_megatron(folder, tmp_path / "out"))


def test_a_flipped_bit_of_an_export_is_refused_by_training(returned: Path, tmp_path: Path) -> None:
    folder = copy(returned, tmp_path)
    path = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    flip(path, path.stat().st_size // 2, 1)
    with pytest.raises(ModelError, match=rf"model\.path: .*{path.name}: \S+ is not what was written"), backend(folder):
        pass


def test_ranks_share_the_files_and_none_is_left_out(trained: Path, tmp_path: Path) -> None:
    folder = copy(trained, tmp_path)
    content = checkpoint_manifest.read_manifest(folder)
    for name in content["files"]:
        flip(folder / name, 0, 0)
        found = 0
        for part in range(3):
            try:
                checkpoint_manifest.check_files(folder, content, part, 3)
            except DamagedCheckpoint as error:
                found += f" {name} " in str(error)
        assert found == 1, name
        flip(folder / name, 0, 0)


def test_shares_are_of_about_the_same_size() -> None:
    drawn = random.Random(1)
    files = {f"{number}.distcp": {"bytes": drawn.randrange(1 << 30)} for number in range(200)}
    shares = [checkpoint_manifest._share(files, part, 7) for part in range(7)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    sizes = [sum(files[name]["bytes"] for name in share) for share in shares]
    assert max(sizes) < 1.02 * min(sizes)


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


@pytest.mark.parametrize("damage", ["a bit", "no manifest", "half a manifest"])
def test_a_damaged_newest_checkpoint_offers_the_one_before(
    model: Path, trained: Path, config: ExperimentConfig, damage: str
) -> None:
    checkpoints = config.output / "checkpoints"
    for step in (1, 2):
        shutil.copytree(checkpoint_folder(trained.parent, step), checkpoint_folder(checkpoints, step))
    newest = checkpoint_folder(checkpoints, 2)
    if damage == "a bit":
        flip(newest / "__0_0.distcp", 4_000_000, 2)
    elif damage == "no manifest":
        (newest / checkpoint_manifest.NAME).unlink()
    else:
        os.truncate(newest / checkpoint_manifest.NAME, 300)
    with backend(model) as built:
        with pytest.raises(ModelError, match=r"to continue from .*step_00000001, the newest before it") as caught:
            Run(config, cast(Any, built))
        command = str(caught.value).partition("run: ")[2].partition(" and then")[0]
        subprocess.run(command, shell=True, check=True, timeout=60)
        assert latest_checkpoint(checkpoints) == checkpoint_folder(checkpoints, 1)
        assert (checkpoints / "damaged_step_00000002" / "state.json").exists()
        with Run(config, cast(Any, built)) as run:
            assert run.step == 1


def test_where_no_older_checkpoint_is_whole_all_are_moved_away(
    model: Path, trained: Path, config: ExperimentConfig
) -> None:
    checkpoints = config.output / "checkpoints"
    for step in (1, 2):
        folder = Path(shutil.copytree(trained, checkpoint_folder(checkpoints, step)))
        (folder / "state.json").unlink()
    with backend(model) as built:
        with pytest.raises(ModelError, match=r"state\.json is missing; to begin the run anew") as caught:
            Run(config, cast(Any, built))
        command = str(caught.value).partition("run: ")[2].partition(" and then")[0]
        subprocess.run(command, shell=True, check=True, timeout=60)
        with Run(config, cast(Any, built)) as run:
            assert run.step == 0


def test_a_checkpoint_of_the_old_megatron_core_is_named_as_such(model: Path, trained: Path, tmp_path: Path) -> None:
    folder = copy(trained, tmp_path)
    content = json.loads((folder / checkpoint_manifest.NAME).read_text())
    assert content["megatron_core"].startswith("0.19")
    del content["checksum"], content["megatron_core"]
    content |= {"format": 2, "versions": {"megatron-core": "0.16.1"}}
    (folder / checkpoint_manifest.NAME).write_text(json.dumps(content))
    for meet in (lambda: verify(folder), lambda: offline.megatron_to_hf(folder, tmp_path / "out", source=model)):
        with pytest.raises(ModelError, match=r"saved with Megatron-Core 0\.16\.1 \(format 2\).*mua convert"):
            meet()
    with backend(model) as built, pytest.raises(ModelError, match=r"Megatron-Core 0\.16\.1") as caught:
        built.load(folder)
    assert not isinstance(caught.value, DamagedCheckpoint)


# What a conversion may replace


def conversions(model: Path, converted: Path) -> dict[str, Callable[..., None]]:
    return {
        "to hf": lambda out, **settings: offline.megatron_to_hf(converted, out, source=model, **settings),
        "to megatron": lambda out, **settings: offline.hf_to_megatron(model, out, **settings),
    }


@pytest.mark.parametrize("direction", ["to hf", "to megatron"])
@pytest.mark.parametrize("held", ["a model", "notes", "ours and notes", "ours, trained further"])
def test_a_target_with_anything_foreign_is_refused_and_stays(
    model: Path, converted: Path, tmp_path: Path, held: str, direction: str
) -> None:
    convert, out = conversions(model, converted)[direction], tmp_path / "out"
    if held == "a model":
        write_model(out)
    elif held == "notes":
        out.mkdir()
    else:
        convert(out)
    if held == "ours, trained further":
        path = next(each for each in out.iterdir() if each.suffix in (".safetensors", ".distcp"))
        flip(path, path.stat().st_size // 2, 0)
    else:
        (out / "notes.txt").write_text("years of work")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(BridgeError, match=r"out holds what this command did not write .*--force"):
        convert(out)
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    convert(out, force=True)
    assert not (out / "notes.txt").exists()
    convert(out)  # what it wrote itself may be replaced without a word
    verify(out)


def test_an_interrupted_conversion_is_continued_into_a_target_of_ours(
    model: Path, converted: Path, tmp_path: Path
) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    convert, out = conversions(model, converted)["to hf"], tmp_path / "out"
    convert(out)
    with pytest.raises(KeyboardInterrupt):
        convert(out, on_bytes=interrupted, max_shard_bytes=SHARD)
    verify(out)
    convert(out, max_shard_bytes=SHARD)
    assert len(list(out.glob("*.safetensors"))) > 1


@pytest.mark.parametrize("force", [False, True])
def test_targets_over_or_in_what_is_read_are_refused(model: Path, converted: Path, tmp_path: Path, force: bool) -> None:
    source, checkpoint = copy(model, tmp_path), copy(converted, tmp_path)
    (tmp_path / "link").symlink_to(source)
    for out in (source, source / "meg", tmp_path, tmp_path / "link", tmp_path / "link" / "x", source / ".." / "hf"):
        with pytest.raises(BridgeError, match="would be written over or into"):
            offline.hf_to_megatron(source, out, force=force)
        with pytest.raises(BridgeError, match="would be written over or into"):
            offline.megatron_to_hf(checkpoint, out, source=source, force=force)
    for out in (checkpoint, checkpoint / "hf", checkpoint / "out"):
        with pytest.raises(BridgeError, match="would be written over or into"):
            offline.megatron_to_hf(checkpoint, out, source=source, force=force)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "link", "meg"]
    verify(checkpoint)


def test_force_never_replaces_the_folder_one_stands_in(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("years of work")
    monkeypatch.chdir(tmp_path / "work")
    for out in (Path("."), tmp_path, tmp_path / "work"):
        with pytest.raises(BridgeError, match="is never replaced"):
            offline.hf_to_megatron(model, out, force=True)
    assert (tmp_path / "work" / "thesis.txt").exists()


def test_weights_that_are_no_numbers_are_named(model: Path, tmp_path: Path) -> None:
    folder = copy(model, tmp_path)
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for value in (torch.nan, torch.inf):
        stored[name][3, 5] = value
        save_file(stored, folder / "model.safetensors")
        with pytest.raises(BridgeError, match=rf"{name} has values that are no finite numbers"):
            offline.hf_to_megatron(folder, tmp_path / "out")
        with pytest.raises(ModelError, match=rf"model\.path: .*{name} has values"), backend(folder):
            pass
    offline.hf_to_megatron(folder, tmp_path / "out", allow_nan=True)
    verify(tmp_path / "out")


def test_a_model_folder_that_is_whole_still_loads(model: Path, returned: Path) -> None:
    with backend(returned) as built:
        found = exported(built)
    assert all((found[name] == tensor.numpy()).all() for name, tensor in load_file(model / "model.safetensors").items())
