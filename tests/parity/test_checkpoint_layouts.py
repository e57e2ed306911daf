"""Checkpoints across layouts: saved under one, continued under another, exported, imported from Megatron-LM's.

Training of policy and critic that goes on under another layout must give the losses of an uninterrupted run of one
process; weights and optimizer state that were loaded and saved again must be those of the first checkpoint, bit for
bit, value head included, and so must exports and imports be. Two and four gloo processes. Single-process behavior is in
``tests/unit/test_megatron_checkpoint.py`` and ``test_megatron_offline.py``; nothing here runs on more than one machine.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_bridge.hf_folder import verify_hf_folder
from megatron_bridge.safetensors_io import SafetensorsWriter, TensorSink
from mua.algorithms.losses import CrossEntropyLoss, ValueLoss
from mua.config.schema import MegatronConfig
from mua.megatron import offline
from mua.megatron.checkpoint import checkpoint_folder, latest_checkpoint
from mua.trainer.learner import Learner
from mua.types import Float32Array
from mua.utils.errors import ModelError
from tests import layout_support
from tests.distributed import run_on_workers
from tests.megatron_support import backend, exported, make_batch, with_values, write_model
from tests.torch_dist import write_torch_dist

STEPS = 3
LAYERS, EXPERTS = 4, 4
EP2 = {"data_parallel": 2, "expert_parallel": 2}
DENSE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tensor_parallel": 2, "pipeline_parallel": 2}, {"tensor_parallel": 4}),
    ({"pipeline_parallel": 2, "virtual_pipeline": 2}, {}),
    ({"data_parallel": 2}, {"tensor_parallel": 2, "pipeline_parallel": 2}),
]
MOE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (EP2, {"data_parallel": 2}),
    ({"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1}, EP2),
    (EP2, {}),
]


ALWAYS = (MOE[1],)
"""The others are slow tests."""


def case(experts: int, saved: dict[str, Any], loaded: dict[str, Any]) -> Any:
    names = [" ".join(f"{name}{size}" for name, size in layout.items()) or "single" for layout in (saved, loaded)]
    marks = [] if (saved, loaded) in ALWAYS else [pytest.mark.slow]
    return pytest.param(experts, saved, loaded, marks=marks, id=f"{experts} experts {'->'.join(names)}")


CASES = [case(experts, *pair) for experts, pairs in ((0, DENSE), (EXPERTS, MOE)) for pair in pairs]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("models")
    for experts in (0, EXPERTS):
        write_model(root / str(experts), layers=LAYERS, experts=experts)
    return {experts: root / str(experts) for experts in (0, EXPERTS)}


@pytest.fixture(scope="module")
def straight(models: dict[int, Path]) -> dict[int, tuple[list[float], dict[str, Float32Array]]]:
    """Losses and final weights of the uninterrupted run of one process."""
    return {
        experts: run_on_workers(1, train, str(folder), None, None, 0, STEPS, {})[0]
        for experts, folder in models.items()
    }


def train(
    model: str, source: str | None, out: str | None, first: int, last: int, layout: dict[str, Any]
) -> tuple[list[float], dict[str, Float32Array]]:
    """Steps ``first`` to ``last`` of the run, from the checkpoint ``source`` on, which is saved again at once.

    Leaves ``out``, in the background.

    Losses of policy and critic in turns.
    """
    with backend(Path(model), critic=layout_support.CRITIC, **layout) as built:
        layout_support.give_heads_weights(built)
        if source is not None:
            assert built.load(Path(source)) == {"next": first}
            built.save(Path(source).with_name("again"), {"next": first})
        losses = []
        for step in range(first, last):
            batch = with_values(make_batch(seed=step))
            losses.append(built.train_step(batch, CrossEntropyLoss())["train/loss"])
            losses.append(built.train_values(batch, ValueLoss(0.2))["train/critic/vf_loss"])
        weights = exported(built)
        if out is not None:
            built.save(Path(out), {"next": last}, background=True)
            changed = [parameter.data for parameter in built.policy.parameters()] + moments(built)
            for tensor in changed:
                tensor.mul_(-1)  # what follows the call may change everything at once
            built.finish_save()
            for tensor in changed:
                tensor.mul_(-1)
            built.save_hf(Path(out).with_name("hf"))
        return losses, weights


def moments(built: Learner) -> list[torch.Tensor]:
    """Of the policy's optimizer on this rank."""
    return [
        value
        for part in built.policy.optimizer.megatron.chained_optimizers
        for state in part.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    ]


@pytest.mark.parametrize(("experts", "saved", "loaded"), CASES)
def test_training_goes_on_under_another_layout(
    models: dict[int, Path],
    straight: dict[int, tuple[list[float], dict[str, Float32Array]]],
    tmp_path: Path,
    experts: int,
    saved: dict[str, Any],
    loaded: dict[str, Any],
) -> None:
    model, (losses, final), checkpoint = str(models[experts]), straight[experts], checkpoint_folder(tmp_path, 1)
    first = run_on_workers(MegatronConfig(**saved).world_size, train, model, None, str(checkpoint), 0, 1, saved)
    assert latest_checkpoint(tmp_path) == checkpoint
    check_folders(checkpoint, tmp_path, first[0][1])
    rest = run_on_workers(MegatronConfig(**loaded).world_size, train, model, str(checkpoint), None, 1, STEPS, loaded)
    assert np.allclose(first[0][0] + rest[0][0], losses, rtol=0, atol=1e-5)
    assert rest[0][1].keys() == final.keys()
    for name, values in rest[0][1].items():
        assert np.allclose(values, final[name], rtol=0, atol=1e-3), name
    for part in (Path(), Path("critic")):
        given, found = stored(checkpoint / part), stored(tmp_path / "again" / part)
        assert {"model.norm.weight", "model.norm.weight/weight", "model.norm.weight/exp_avg_sq"} <= given.keys()
        assert bool(part.name) is any(name.startswith("value_head.weight/") for name in given)
        assert given.keys() == found.keys()
        for name, tensor in given.items():
            assert torch.equal(found[name], tensor), name


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint's network, those of its optimizer put together from their slices."""
    found = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for path in (folder / "optimizer").glob("*.safetensors"):
        for key, part in load_file(path).items():
            name, _, rectangle = key.removesuffix("]").rpartition("[")
            shape = found[name.rpartition("/")[0]].shape
            whole = found.setdefault(name, torch.full(shape, torch.nan)).view(shape[0], -1)
            rows, cols = (slice(*map(int, ends.split(":"))) for ends in rectangle.split(","))
            assert whole[rows, cols].isnan().all()
            whole[rows, cols] = part
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found


def check_folders(checkpoint: Path, folder: Path, weights: dict[str, Float32Array]) -> None:
    """The checkpoint, the folder written beside it and the one exported from it are the exported weights."""
    offline.convert_to_hf(checkpoint, folder / "offline")
    for path in (checkpoint, folder / "hf", folder / "offline"):
        found = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
        assert found.keys() == weights.keys()
        for name, values in weights.items():
            assert torch.equal(found[name], torch.from_numpy(values)), (path.name, name)
        assert verify_hf_folder(path) == len(weights)
    assert sorted(path.name for path in folder.iterdir()) == ["hf", "offline", checkpoint.name]


def written_by(model: str, out: str) -> dict[str, int]:
    """The weights that this rank wrote of a checkpoint, in bytes."""
    written: dict[str, int] = {}
    complete = SafetensorsWriter.complete

    def completed(self: SafetensorsWriter, sink: TensorSink) -> None:
        written[sink.place.spec.name] = sink.place.spec.nbytes
        complete(self, sink)

    with backend(Path(model), data_parallel=2) as built, pytest.MonkeyPatch.context() as patched:
        patched.setattr(SafetensorsWriter, "complete", completed)
        built.save(Path(out), {})
    return written


def test_data_parallel_ranks_share_the_writing(models: dict[int, Path], tmp_path: Path) -> None:
    parts = run_on_workers(2, written_by, str(models[0]), str(tmp_path / "step"))
    names = [name for part in parts for name in part]
    assert sorted(names) == sorted(load_file(tmp_path / "step" / "model.safetensors"))
    sizes = [sum(part.values()) for part in parts]
    assert max(sizes) < 1.2 * min(sizes)
    sizes = [path.stat().st_size for path in (tmp_path / "step" / "optimizer").glob("rank_*.safetensors")]
    assert len(sizes) == 2
    assert max(sizes) < 1.2 * min(sizes)


@pytest.mark.parametrize(
    ("experts", "layout"),
    [(0, {"tensor_parallel": 2}),
     pytest.param(EXPERTS, {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1},
                  marks=pytest.mark.slow)],
)  # fmt: skip
def test_what_megatron_wrote_under_a_layout_is_imported(
    models: dict[int, Path], tmp_path: Path, experts: int, layout: dict[str, int]
) -> None:
    run_on_workers(2, write_torch_dist, str(models[experts]), str(tmp_path / "upstreams"), layout)
    offline.convert_to_hf(tmp_path / "upstreams", tmp_path / "hf", models[experts])
    found, expected = (load_file(path / "model.safetensors") for path in (tmp_path / "hf", models[experts]))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_rank_that_cannot_write_is_told_by_all_and_leaves_nothing(models: dict[int, Path], tmp_path: Path) -> None:
    for messages in run_on_workers(2, fail_on_rank_1, str(models[0]), str(tmp_path)):
        for message in messages:
            assert "No space left on device" in message
            assert "\n" not in message
    assert not list(tmp_path.iterdir())


def fail_on_rank_1(model: str, root: str) -> list[str]:
    """The errors of a model folder and of a checkpoint in the background, neither of which rank 1 can write."""
    import torch.distributed as dist

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with backend(Path(model), tensor_parallel=2) as built, pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr("megatron_bridge.safetensors_io.os.pwrite", full)
        with pytest.raises(ModelError) as folder:
            built.save_hf(Path(root) / "hf")
        built.save(checkpoint_folder(Path(root), 1), {}, background=True)
        with pytest.raises(ModelError) as checkpoint:
            built.finish_save()
    return [str(folder.value), str(checkpoint.value)]


def test_damage_that_one_rank_meets_is_told_by_all(models: dict[int, Path], tmp_path: Path) -> None:
    checkpoint, folder = checkpoint_folder(tmp_path, 1), tmp_path / "hf"
    run_on_workers(1, train, str(models[0]), None, str(checkpoint), 0, 1, {})
    paths = (checkpoint / "optimizer/rank_00000.safetensors", folder / "model.safetensors")
    for path in paths:
        with path.open("r+b") as file:
            file.seek(-99, os.SEEK_END)
            file.write(b"\xff\xee")
    for messages in run_on_workers(2, refused, str(models[0]), str(checkpoint), str(folder)):
        assert [path.name in message for path, message in zip(paths, messages, strict=True)] == [True, True]


def refused(model: str, checkpoint: str, folder: str) -> list[str]:
    """The errors of loading a damaged checkpoint, and of starting from a damaged folder; each was met by one rank."""
    with backend(Path(model), tensor_parallel=2) as built, pytest.raises(ModelError) as first:
        built.load(Path(checkpoint))
    with pytest.raises(ModelError) as second, backend(Path(folder), tensor_parallel=2):
        pass
    return [str(first.value), str(second.value)]
