"""Checkpoints: written whole or not at all, readable under any tested layout, by the side of training if wanted.

A checkpoint is a folder ``step_%08d``: Megatron's ``torch_dist`` files (weights, moments, float32 weights, in
layout-independent shards; a critic's beside the policy's), ``state.json`` (schedules and the caller's state),
``rng_*.pt`` (one a rank) and, written last, ``manifest.json`` (:mod:`mua.megatron.checkpoint_manifest`). It is
assembled in a hidden neighbor folder, flushed to disk and renamed, so a folder under its final name is always whole.

    begin():   plan and, for writing in the background, a copy of every tensor          all ranks together
    thread:    this rank's files and their checksums                                    each rank for itself
    finish():  wait, tell errors, index, manifest, rename                               all ranks together

Saving in the foreground is the same without the copy. Writing happens in a thread, not in a forked process as upstream
does (:mod:`mua.compat.megatron_checkpoint`).

About pickle: the index of a checkpoint, its tensors, objects and random states are pickles. All of them are read as
plain data, by upstream too (:mod:`mua.compat.checkpoint_reading`): nothing that a checkpoint names is ever imported.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.distributed import DistributedDataParallel
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult

from megatron_bridge.hf_folder import copy_other_files
from megatron_bridge.plan import plan_model
from mua.compat.checkpoint_reading import check_pickles, forget_index, read_random_states
from mua.compat.megatron_checkpoint import Bucket, buckets_of, finish, write_bucket
from mua.config.schema import MegatronConfig
from mua.megatron import checkpoint_manifest
from mua.megatron.network import Network
from mua.types import Json
from mua.utils.atomic import hidden_folder, publish_folder, replace_link
from mua.utils.collective import gathered, together
from mua.utils.errors import DamagedCheckpoint, ModelError, one_line

log = logging.getLogger(__name__)

WRITE_SECONDS = 3600.0
"""Deadline of one rank's writing."""
_OPTIMIZER_BYTES = 12  # float32 weight and two moments
_EXTRA_STATE = "_extra_state"
POLICY = "policy"
"""Name of the network whose tensors are a checkpoint's plain ones."""


def latest_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint under ``root``, or None; half-written folders never count.

    A folder has its name only once it is whole. One that lost its manifest since is damaged, and is not passed over.
    """
    return max((folder for folder in root.glob("step_*") if folder.is_dir()), default=None)


def instead_of(damaged: Path) -> str:
    """What to do about a damaged checkpoint, in one sentence: which one before it is whole, and how to take it."""
    away = [damaged]
    for folder in sorted((each for each in damaged.parent.glob("step_*") if each < damaged), reverse=True):
        if checkpoint_manifest.has_files(folder):
            end = f"to continue from {folder}, the newest before it that has all of its files"
            break
        away.append(folder)
    else:
        end = "to begin the run anew, as no older one is whole"
    moves = [f"mv {shlex.quote(str(path))} {shlex.quote(str(path.with_name('damaged_' + path.name)))}" for path in away]
    return f"{end}, run: {' && '.join(moves)} and then the same command again"


def prune_checkpoints(
    root: Path, keep: int, *, writing: Path | None = None, spare: Collection[Path | None] = ()
) -> None:
    """Removes all but the newest ``keep`` checkpoints, and what interrupted saves left behind.

    Args:
        spare: checkpoints that stay beside the newest, however old they are.
        writing: a checkpoint that is being written in the background; it does not count before it is whole.
    """
    partial = None if writing is None else hidden_folder(writing)
    left = [path for path in root.glob(".step_*") if path != partial]
    whole = sorted(folder for folder in root.glob("step_*") if (folder / checkpoint_manifest.NAME).is_file())
    for folder in whole[: -keep or None]:
        if folder in spare:
            continue
        hidden = folder.with_name(f".{folder.name}.removed")  # so that no half-removed folder has a checkpoint's name
        folder.rename(hidden)
        left.append(hidden)
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)


BEST = "best"
"""Name of the link to the best checkpoint, beside the checkpoints."""


def point_to(root: Path, folder: Path) -> None:
    """Has :data:`BEST` under ``root`` be a link to the checkpoint ``folder`` there, at once and for good."""
    link = root / BEST
    if not link.is_symlink() or os.readlink(link) != folder.name:
        replace_link(link, folder.name)


def best_checkpoint(root: Path) -> Path | None:
    """The checkpoint under ``root`` that :data:`BEST` is a link to; None without one."""
    link = root / BEST
    return root / os.readlink(link) if link.is_symlink() else None


def checkpoint_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` lies."""
    return root / f"step_{step:08d}"


def begin(
    folder: Path,
    networks: Mapping[str, Network],
    config: MegatronConfig,
    extra: Json,
    provenance: Json | None = None,
    *,
    background: bool,
    model_files: Path | None = None,
) -> PendingSave:
    """Begins to write a checkpoint; collective. It exists once :meth:`PendingSave.finish` has returned.

    Args:
        networks: by name: :data:`POLICY`, whose tensors keep their plain names, and any others of its model.
        extra: JSON-able and alike on every rank; :func:`load` gives it back.
        provenance: JSON-able, goes into the manifest: configuration, commit, versions.
        background: write in a thread, from a copy of all tensors, which may change at once.
        model_files: a model folder whose configuration and tokenizer go into the checkpoint, so that it can be
            converted anywhere.

    Raises:
        ModelError: it could not be written (disk full, no permission). Other checkpoints are as they were, and
            nothing of this one is left.
    """
    partial = hidden_folder(folder)
    description = _describe(networks)
    state: Json = {"extra": extra}
    for name, network in networks.items():
        state |= dict(zip(_counts(name), (network.optimizer.steps, network.skipped_steps), strict=True))
    text = json.dumps(state)
    content = {
        **description,
        "distributed_optimizer": config.distributed_optimizer,
        "layout": _layout(config),
        "data_position": extra,
        **(provenance or {}),
    }
    with _cleaned_up(partial):
        with _together(folder):
            if dist.get_rank() == 0:
                _prepare(partial, description)
        with _together(folder):
            request = _plan(partial, networks, text)
            # After the plan: Megatron takes a folder that is not empty for the rest of a broken checkpoint.
            if model_files is not None and dist.get_rank() == 0:
                _copy_model_files(model_files, partial / checkpoint_manifest.HF_FILES)
        return PendingSave(folder, content, request, background=background)


class PendingSave:
    """A checkpoint that is being written from what upstream planned for this rank. All methods are collective."""

    def __init__(self, folder: Path, content: Json, request: AsyncRequest, *, background: bool) -> None:
        self.folder = folder
        self._partial, self._content, self._request = hidden_folder(folder), content, request
        self._results: dict[int, list[WriteResult]] = {}
        self._digests: dict[str, str] = {}
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

        buckets = buckets_of(request, copied=background)
        if background:
            self._thread = threading.Thread(target=self._write, args=(buckets,), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write(buckets)

    def done(self) -> bool:
        """Whether every rank has written its part."""
        writing = self._thread is not None and self._thread.is_alive()
        finished = torch.tensor(0 if writing else 1)
        dist.all_reduce(finished, dist.ReduceOp.MIN)
        return bool(finished)

    def finish(self) -> None:
        """Waits for every rank's part and gives the checkpoint its name.

        Raises:
            ModelError: as :func:`begin`.
        """
        with _cleaned_up(self._partial):
            with _together(self.folder):
                if self._thread is not None:
                    self._thread.join(WRITE_SECONDS)
                if self._thread is not None and self._thread.is_alive():
                    raise ModelError(
                        f"checkpoint {self.folder}: rank {dist.get_rank()} has not written its part in time"
                    )
                if self._error is not None:
                    raise self._error
            with _together(self.folder):
                finish(self._request, self._results)
            digests = {name: digest for part in gathered(self._digests) for name, digest in part.items()}
            with _together(self.folder):
                if dist.get_rank() == 0:
                    checkpoint_manifest.write_manifest(self._partial, self._content, digests)
                    publish_folder(self._partial, self.folder)

    def _write(self, buckets: Sequence[Bucket]) -> None:
        """This rank's files. An error is kept for :meth:`finish`: it may have come in a thread."""
        try:
            for number, bucket in enumerate(buckets):
                self._results[number], self._digests[bucket[1]] = write_bucket(bucket)
        except BaseException as error:
            self._error = error


@contextmanager
def _cleaned_up(partial: Path) -> Iterator[None]:
    """A block after whose failure nothing is left of a checkpoint."""
    try:
        yield
    except BaseException as error:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, ModelError):
            raise ModelError(f"{error}. Is the disk full? Older checkpoints are as they were") from error
        raise


def load(folder: Path, networks: Mapping[str, Network], config: MegatronConfig) -> Json:
    """Restores weights, optimizers and schedules, and random states if the layout is the saved one; collective.

    What the checkpoint holds of other networks than ``networks`` is not read.

    Returns:
        the ``extra`` given to :func:`begin`.

    Raises:
        ModelError: the folder is missing or not whole, was saved from a model of another shape, or lacks a network.
    """
    description = _describe(networks)
    with _together(folder, doing="loaded"):
        content = _check(folder, description, config)
    with _together(folder, doing="loaded"):
        counts = [count for name in networks for count in _counts(name)]
        state = checkpoint_manifest.read_state(folder, counts)
        if not isinstance(state.get("extra"), dict):
            raise DamagedCheckpoint(f"checkpoint {folder} is damaged: {checkpoint_manifest.STATE} has no 'extra'")
    with _together(folder, doing="loaded"):
        if content.get("weights_only"):
            _restore_weights(folder, networks[POLICY])
        else:
            loaded = dist_checkpointing.load(_sharded(networks, loading=True), str(folder))
            for name, network in networks.items():
                own = loaded if name == POLICY else loaded[name]
                for index, chunk in enumerate(network.wrapped):
                    _fill(chunk, own[_chunk_name(network.wrapped, index)], folder)
                network.optimizer.load_state_dict(own["optimizer"], state[_counts(name)[0]])
    with _together(folder, doing="loaded"):
        if not content.get("weights_only") and content["layout"] == _layout(config):
            random = read_random_states(folder / f"rng_{dist.get_rank():05d}.pt")
            torch.set_rng_state(random["cpu"])
            if random["cuda"] is not None:
                torch.cuda.set_rng_state(random["cuda"])
            tensor_parallel.get_cuda_rng_tracker().set_states(random["tracker"])
    forget_index()
    for name, network in networks.items():
        network.skipped_steps = state[_counts(name)[1]]
    extra: Json = state["extra"]
    return extra


def _restore_weights(folder: Path, policy: Network) -> None:
    """Weights alone; the optimizer starts from them."""
    loaded = dist_checkpointing.load(_without_extra_states(_sharded_models(policy.wrapped, _sharding())), str(folder))
    for index, chunk in enumerate(policy.wrapped):
        _fill(chunk, loaded[_chunk_name(policy.wrapped, index)], folder)
    policy.optimizer.megatron.reload_model_params()


def _fill(chunk: DistributedDataParallel, state: dict[str, Any], folder: Path) -> None:
    left = chunk.module.load_state_dict(state, strict=False)
    names = [name for name in (*left.missing_keys, *left.unexpected_keys) if not name.endswith(_EXTRA_STATE)]
    if names:
        raise ModelError(f"checkpoint {folder} is of another model: it does not fit {names[0]}")


def _without_extra_states(models: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What is loaded of models: modules' extra states hold nothing where fp8 is scaled by blocks, and which modules
    have one depends on whose layers they are."""
    return {
        model: {name: entry for name, entry in state.items() if not isinstance(entry, ShardedObject)}
        for model, state in models.items()
    }


@contextmanager
def _together(folder: Path, doing: str = "written") -> Iterator[None]:
    """A block whose error on any rank is raised by all, as a :class:`ModelError` about the checkpoint ``folder``."""
    with together():
        try:
            yield
        except (Exception, CheckpointException) as error:
            cause: BaseException = error
            if isinstance(error, CheckpointException) and error.failures:  # one of each rank, with its traceback
                cause = next(iter(error.failures.values()))[0]
            if isinstance(cause, ModelError):
                raise cause from None
            raise ModelError(f"checkpoint {folder} could not be {doing}: {one_line(cause)}") from error


def _copy_model_files(source: Path, folder: Path) -> None:
    if not (source / "config.json").is_file():  # moved since the run began: no reason to lose a checkpoint
        log.warning("%s: gone, so that the checkpoint has no tokenizer: mua convert needs --source for it", source)
        return
    folder.mkdir()
    copy_other_files(source, folder, None)


def _prepare(partial: Path, description: Json) -> None:
    """Makes the empty folder, if the disk has room for what will be written."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    itemsize = getattr(torch, description["dtype"].removeprefix("torch.")).itemsize
    elements = sum(math.prod(shape) for shape in description["tensors"].values())
    needed = elements * (itemsize + _OPTIMIZER_BYTES) * len(description["networks"])
    free = shutil.disk_usage(partial).free
    if free < needed:
        raise ModelError(
            f"checkpoint {partial.parent}: the disk has {free / 2**30:.2f} GiB free, a checkpoint needs about "
            f"{needed / 2**30:.2f} GiB"
        )


def _plan(partial: Path, networks: Mapping[str, Network], state: str) -> AsyncRequest:
    """Upstream's plan of what each rank writes, beside the small files, which are written at once."""
    content = {key: value for key, value in _sharding().items() if key != "dp_cp_group"}
    sharded = _sharded(networks, loading=False)
    request = dist_checkpointing.save(
        sharded, str(partial), content_metadata=content, async_sharded_save=True, async_strategy="mcore"
    )
    random = {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    torch.save(random, partial / f"rng_{dist.get_rank():05d}.pt")
    if dist.get_rank() == 0:
        (partial / checkpoint_manifest.STATE).write_text(state)
    return request


def _describe(networks: Mapping[str, Network]) -> Json:
    """Shapes of the whole policy under Hugging Face names, its dtype, and the names of all networks."""
    specs = plan_model([chunk.module for chunk in networks[POLICY].wrapped]).tensors()
    tensors = {spec.name: list(spec.shape) for spec in specs}
    return {"tensors": tensors, "dtype": str(specs[0].dtype), "networks": sorted(networks)}


def _layout(config: MegatronConfig) -> dict[str, int]:
    sizes = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "data_parallel")
    return {name: getattr(config, name) for name in sizes} | {"virtual_pipeline": config.virtual_pipeline or 1}


def _check(folder: Path, description: Json, config: MegatronConfig) -> Json:
    """The manifest of ``folder``. Raises ModelError unless it is whole and fits the model; ranks share the reading."""
    content = checkpoint_manifest.read_manifest(folder)
    checkpoint_manifest.check_files(folder, content, dist.get_rank(), dist.get_world_size())
    check_pickles(folder, dist.get_rank(), dist.get_world_size())
    saved, needed = content["tensors"], description["tensors"]
    for name in sorted(saved.keys() | needed.keys()):
        there, here = saved.get(name, "missing"), needed.get(name, "missing")
        if there != here:
            raise ModelError(
                f"checkpoint {folder} is of another model: {name} is {there} in the checkpoint and {here} in "
                "model.path; resume with the model it was trained from"
            )
    for name in sorted({*description["networks"]} - {*content.get("networks", [POLICY])}):
        raise ModelError(
            f"checkpoint {folder} holds no {name}, which the configuration asks for; to begin one from these weights, "
            "convert them with mua convert and start a new run with model.path there"
        )
    expected = {"dtype": description["dtype"]}
    if not content.get("weights_only"):
        expected["distributed_optimizer"] = config.distributed_optimizer
    for key, value in expected.items():
        if content[key] != value:
            raise ModelError(f"checkpoint {folder} was saved with {key} {content[key]}, configured is {value}")
    return content


def _counts(name: str) -> tuple[str, str]:
    """Keys of the state for a network's steps, which are its schedule's position, and for those that were skipped."""
    prefix = "" if name == POLICY else f"{name}_"
    return f"{prefix}steps", f"{prefix}skipped_steps"


def _chunk_name(chunks: Sequence[DistributedDataParallel], index: int) -> str:
    return "model" if len(chunks) == 1 else f"model{index}"


def _sharding() -> dict[str, Any]:
    """In which form state is saved: ``fully_reshardable`` is the one of the distributed optimizer for any layout."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _sharded(networks: Mapping[str, Network], *, loading: bool) -> dict[str, Any]:
    """Weights and optimizers in Megatron's sharded form; those of other networks than the policy under their names."""
    metadata, whole = _sharding(), dict[str, Any]()
    for name, network in networks.items():
        models = _sharded_models(network.wrapped, metadata)
        if loading:
            models = _without_extra_states(models)
        described = models["model"] if len(models) == 1 else models
        own = {**models, "optimizer": network.optimizer.sharded_state_dict(described, metadata, loading)}
        if name == POLICY:
            whole |= own
        else:
            add_prefix_for_sharding(own, f"{name}.")
            whole[name] = own
    return whole


def _sharded_models(chunks: Sequence[DistributedDataParallel], metadata: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        _chunk_name(chunks, index): chunk.module.sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(chunks)
    }
