"""Checkpoints: Hugging Face model folders with the optimizer's state beside, whole or not at all, for any layout.

A checkpoint is a folder ``step_%08d``:

    model*.safetensors, config.json, tokenizer ...   the policy: transformers, SGLang and vLLM load the folder
    checksums.jsonl                                  of every tensor and file of those
    optimizer/rank_*.safetensors                     float32 weights and moments (mua.megatron.optimizer_files)
    optimizer/random_*.json                          random states, one file per rank
    critic/                                          the same of a critic, its value head among the weights
    manifest.json                                    written last (mua.megatron.checkpoint_manifest)

It is assembled in a hidden neighbor folder, flushed to disk and renamed, so a folder under its final name is always
whole. Nothing in it is a pickle.

    PendingSave():  folder; weights go to the ranks that write them; in the background, a copy    all ranks together
    thread:         this rank's tensors and slices, with their checksums                          each rank for itself
    finish():       wait, tell errors, checksums, manifest, rename                                all ranks together

Saving in the foreground is the same without the copy.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor

from megatron_bridge.convert import load_hf
from megatron_bridge.hf_folder import copy_other_files, main_dtype
from megatron_bridge.plan import plan_model
from megatron_bridge.save import ModelExport
from mua.config.schema import MegatronConfig
from mua.megatron import checkpoint_manifest, optimizer_files
from mua.megatron.network import Network
from mua.megatron.optimizer_files import OptimizerState
from mua.types import Json
from mua.utils.atomic import hidden_folder, publish_folder, replace_link
from mua.utils.checksums import digest_of_file
from mua.utils.collective import gathered, together
from mua.utils.errors import BridgeError, DamagedCheckpoint, ModelError, one_line
from mua.utils.strict_json import read_json_file

WRITE_SECONDS = 3600.0
"""Deadline of one rank's writing."""
POLICY = "policy"
"""Name of the network whose weights are the checkpoint's own; another's are in a folder of its name."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt")


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


class PendingSave:
    """A checkpoint that is being written; it exists once :meth:`finish` has returned. All methods are collective.

    Args:
        networks: by name: :data:`POLICY`, and any others of its model.
        extra: JSON-able and alike on every rank; :func:`load` gives it back.
        provenance: JSON-able, goes into the manifest: configuration, commit, versions.
        background: write in a thread, from a copy on the host, so that all tensors may change at once.
        model_files: a model folder that gives configuration and tokenizer.
        texts: files by name that stand in the checkpoint instead of those of ``model_files``.

    Raises:
        ModelError: it could not be written (disk full, no permission). Other checkpoints are as they were, and
            nothing of this one is left.
    """

    def __init__(
        self,
        folder: Path,
        networks: Mapping[str, Network],
        config: MegatronConfig,
        extra: Json,
        provenance: Json | None = None,
        *,
        background: bool,
        model_files: Path,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self._partial = folder, hidden_folder(folder)
        self._content = {
            "dtype": str(_dtype(networks[POLICY])),
            "layout": _layout(config),
            "networks": {
                name: {"steps": network.optimizer.steps - network.skipped_steps, "skipped_steps": network.skipped_steps}
                for name, network in networks.items()
            },
            "data_position": extra,
            **(provenance or {}),
        }
        self._digests: dict[str, str] = {}
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._exports: list[ModelExport] = []
        self._slices: dict[Path, Callable[[], str]] = {}
        folders = {name: self._partial if name == POLICY else self._partial / name for name in networks}
        if (older := latest_checkpoint(folder.parent)) is not None and not (model_files / "config.json").is_file():
            model_files = older  # the folder was moved since the run began: no reason to lose a checkpoint
        with self._whole_or_not_at_all():
            with _together(folder):
                if dist.get_rank() == 0:
                    shutil.rmtree(self._partial, ignore_errors=True)
                    for name, network in networks.items():
                        (folders[name] / optimizer_files.FOLDER).mkdir(parents=True)
                        copy_other_files(model_files, folders[name], _dtype(network), texts if name == POLICY else None)
            with _together(folder):
                random = self._partial / _random_file(dist.get_rank())
                random.write_text(json.dumps(_random_states()), encoding="utf-8")
                self._digests[_random_file(dist.get_rank())] = str(digest_of_file(random))
            for name, network in networks.items():
                with _together(folder):
                    state = OptimizerState(network.chunks, network.optimizer.megatron)
                    path = folders[name] / optimizer_files.FOLDER / f"rank_{dist.get_rank():05d}.safetensors"
                    self._slices[path] = state.save(path, keep=background)
                with _told(folder):
                    self._exports.append(ModelExport(network.chunks, folders[name], head=name != POLICY))
                    self._exports[-1].exchange(keep=background)
        if background:
            self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write()

    def done(self) -> bool:
        """Whether every rank has written its part."""
        finished = torch.tensor(int(self._thread is None or not self._thread.is_alive()))
        dist.all_reduce(finished, dist.ReduceOp.MIN)
        return bool(finished)

    def finish(self) -> None:
        """Waits for every rank's part and gives the checkpoint its name.

        Raises:
            ModelError: as the class.
        """
        with self._whole_or_not_at_all():
            with _together(self.folder):
                if self._thread is not None:
                    self._thread.join(WRITE_SECONDS)
                    if self._thread.is_alive():
                        raise ModelError(
                            f"checkpoint {self.folder}: rank {dist.get_rank()} has not written its part in time"
                        )
                if self._error is not None:
                    for export in self._exports:
                        export.close()
                    raise self._error
            for export in self._exports:
                with _told(self.folder):
                    export.finish()
            digests = {name: digest for part in gathered(self._digests) for name, digest in part.items()}
            with _together(self.folder):
                if dist.get_rank() == 0:
                    checkpoint_manifest.write_manifest(self._partial, self._content, digests)
                    publish_folder(self._partial, self.folder)

    def _write(self) -> None:
        """This rank's tensors and slices. An error is kept for :meth:`finish`: it may have come in a thread."""
        try:
            for path, write in self._slices.items():
                self._digests[str(path.relative_to(self._partial))] = write()
            for export in self._exports:
                export.write()
        except BaseException as error:
            self._error = error

    @contextmanager
    def _whole_or_not_at_all(self) -> Iterator[None]:
        """A block after whose failure nothing is left of the checkpoint."""
        try:
            yield
        except BaseException as error:
            if dist.get_rank() == 0:
                shutil.rmtree(self._partial, ignore_errors=True)
            if isinstance(error, ModelError):
                raise ModelError(f"{error}. Is the disk full? Older checkpoints are as they were") from error
            raise


def load(folder: Path, networks: Mapping[str, Network], config: MegatronConfig, model_files: Path) -> Json:
    """Restores weights, optimizers and schedules, and random states if the layout is the saved one; collective.

    What the checkpoint holds of other networks than ``networks`` is not read.

    Args:
        model_files: the model folder that the run starts from, whose tokenizer must be the checkpoint's.

    Returns:
        the ``extra`` given to :class:`PendingSave`.

    Raises:
        ModelError: the folder is missing or not whole, was saved from another model, or lacks a network.
    """
    with _together(folder, doing="loaded"):
        content = _check(folder, networks, model_files)
    for name, network in networks.items():
        own, counts = folder if name == POLICY else folder / name, content["networks"][name]
        with _told(folder, doing="loaded"):
            try:  # every byte is as it was written
                load_hf(network.chunks, own, backbone=name != POLICY, head=name != POLICY, verify=False)
            except BridgeError as error:
                raise ModelError(f"checkpoint {folder} is of another model than {model_files}: {error}") from error
        with _together(folder, doing="loaded"):
            OptimizerState(network.chunks, network.optimizer.megatron).load(
                own / optimizer_files.FOLDER, counts["steps"]
            )
        network.optimizer.continue_from(counts["steps"] + counts["skipped_steps"])
        network.skipped_steps = counts["skipped_steps"]
    with _together(folder, doing="loaded"):
        if content["layout"] == _layout(config):
            _restore_random_states(folder / _random_file(dist.get_rank()))
    extra: Json = content["data_position"]
    return extra


@contextmanager
def _together(folder: Path, doing: str = "written") -> Iterator[None]:
    """A block without communication, whose error on any rank is raised by all, about the checkpoint ``folder``."""
    with together(), _told(folder, doing):
        yield


@contextmanager
def _told(folder: Path, doing: str = "written") -> Iterator[None]:
    """Errors are told as :class:`ModelError` about the checkpoint ``folder``."""
    try:
        yield
    except BridgeError as error:
        raise DamagedCheckpoint(f"checkpoint {folder} could not be {doing}: {error}") from error
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"checkpoint {folder} could not be {doing} ({one_line(error)})") from error


def _dtype(network: Network) -> torch.dtype:
    return main_dtype(plan_model(network.chunks).tensors())


def _layout(config: MegatronConfig) -> dict[str, int]:
    sizes = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "data_parallel")
    return {name: getattr(config, name) for name in sizes} | {"virtual_pipeline": config.virtual_pipeline or 1}


def _check(folder: Path, networks: Mapping[str, Network], model_files: Path) -> Json:
    """The manifest of ``folder``. Raises ModelError unless it is whole and fits the model; ranks share the reading."""
    content = checkpoint_manifest.read_manifest(folder)
    checkpoint_manifest.check_files(folder, content, dist.get_rank(), dist.get_world_size())
    for name in sorted(networks.keys() - content["networks"].keys()):
        raise ModelError(
            f"checkpoint {folder} holds no {name}, which the configuration asks for; to begin one from these weights, "
            "start a new run with model.path there"
        )
    if content["dtype"] != str(_dtype(networks[POLICY])):
        raise ModelError(
            f"checkpoint {folder} was saved with dtype {content['dtype']}, configured is {_dtype(networks[POLICY])}"
        )
    for name in _TOKENIZER:
        ours, theirs = model_files / name, folder / name
        if ours.exists() and theirs.exists() and ours.read_bytes() != theirs.read_bytes():
            raise ModelError(f"checkpoint {folder} has another {name} than model.path {model_files}")
    return content


def _random_file(rank: int) -> str:
    return f"{optimizer_files.FOLDER}/random_{rank:05d}.json"


def _random_states() -> dict[str, str]:
    """This rank's generators by name, as base64."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    states |= {f"tracker/{name}": state for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()}
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def _restore_random_states(path: Path) -> None:
    states: dict[str, Tensor] = {
        name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        for name, text in read_json_file(path).items()
    }
    torch.set_rng_state(states.pop("cpu"))
    if "cuda" in states:
        torch.cuda.set_rng_state(states.pop("cuda"))
    tensor_parallel.get_cuda_rng_tracker().set_states(
        {name.removeprefix("tracker/"): state for name, state in states.items()}
    )
