"""The checks of ``mua doctor preflight`` that one node makes by itself. Each gives one :class:`Check`."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mua.config.schema import DistillationConfig, EndpointConfig, ExperimentConfig
from mua.launch.provenance import ROOT, installed_version
from mua.masking import below, mask_credentials

State = Literal["ok", "warning", "failure"]
PINNED = ("torch", "megatron-core", "sglang", "transformers", "safetensors", "numpy")
"""Packages whose versions belong together; the others' are recorded, not checked."""
SHARED_MEMORY_BYTES = 1 << 30
ENDPOINT_SECONDS = 20.0
OPTIMIZER_BYTES = 12
"""Of one parameter in a checkpoint: Adam's two moments and the main weight, float32 each."""


@dataclass(frozen=True)
class Check:
    """What a check found. ``fix`` says what to do about a warning or a failure."""

    name: str
    state: State
    text: str
    fix: str = ""

    def line(self) -> str:
        """For people."""
        return f"{self.state:8} {self.name:15} {self.text}" + (f"; {self.fix}" if self.fix else "")


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """The result of ``check``; whatever it raises is a failure, so that one check never hides the others."""
    try:
        return check()
    except Exception as error:
        return Check(name, "failure", f"could not be made: {type(error).__name__}: {error}")


def versions(cuda: bool) -> Check:
    """Installed versions against the constraints that were run together."""
    file = ROOT / "constraints" / ("gpu-py312-cu.txt" if cuda else "cpu-py312.txt")
    files = [file, file.with_name("cpu-py312-nodeps.txt")] if not cuda else [file]
    pins: dict[str, str] = {}
    for path in files:
        if path.is_file():
            pins |= dict(re.findall(r"^([\w.-]+)==([^\s;]+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    installed = {name: installed_version(name) for name in PINNED}
    shown = ", ".join(f"{name} {version or 'missing'}" for name, version in installed.items())
    if missing := [name for name in ("torch", "megatron-core", "sglang", "transformers") if installed[name] is None]:
        return Check("versions", "failure", shown, f"install {', '.join(missing)} with the pins of {file.name}")
    other = [
        f"{name} {pins[name]}"
        for name, version in installed.items()
        if name in pins and (version or "").partition("+")[0] != pins[name].partition("+")[0]
    ]
    if other:
        return Check("versions", "warning", shown, f"tested with {', '.join(other)} ({file.name})")
    return Check("versions", "ok", shown)


def free_gpus(wanted: int) -> Check:
    """``wanted`` ranks of this node have a GPU each, free of others."""
    import torch

    if not torch.cuda.is_available():
        if granted := int(os.environ.get("SLURM_GPUS_ON_NODE", "0")):
            fix = "everything runs on the CPU; check the driver, nvidia-smi and that torch is a build for CUDA"
            return Check("GPUs", "warning", f"Slurm granted {granted}, but torch finds none", fix)
        return Check("GPUs", "ok", "none; everything runs on the CPU")
    count = torch.cuda.device_count()
    free = [torch.cuda.mem_get_info(index) for index in range(count)]
    total = min(total for _, total in free)
    text = f"{count} x {torch.cuda.get_device_name(0)}, {total / 2**30:.0f} GiB each"
    if count < wanted:
        return Check("GPUs", "failure", text, f"{wanted} ranks of this node need one each; ask for more GPUs")
    if busy := [index for index, (left, size) in enumerate(free) if left < 0.9 * size]:
        return Check("GPUs", "warning", text, f"memory of {busy} is in use by others; see nvidia-smi")
    return Check("GPUs", "ok", text)


def open_files(config: ExperimentConfig | None) -> Check:
    """Episodes hold connections to engines and users."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 1024 + 8 * (config.rollout.concurrency if config else 64)
    text = f"ulimit -n is {soft}"
    if hard < needed:
        return Check("open files", "failure", text, f"raise the hard limit {hard} to at least {needed}")
    if soft < needed:
        return Check("open files", "warning", text, f"put `ulimit -n {needed}` into slurm.setup")
    return Check("open files", "ok", text)


def shared_memory(config: ExperimentConfig | None) -> Check:
    """Weights go to engines through /dev/shm on a CPU; NCCL and data loaders use it everywhere."""
    usage = shutil.disk_usage("/dev/shm")
    needed = SHARED_MEMORY_BYTES
    if config is not None:
        needed = max(needed, 2 * config.engine.bucket_bytes)
    text = f"/dev/shm has {usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    if usage.free < needed:
        return Check("shared memory", "warning", text, f"give it {needed / 2**30:.1f} GiB (containers: --shm-size)")
    return Check("shared memory", "ok", text)


def checkpoint_bytes(model: Path, dtype: str) -> int:
    """Bytes of one checkpoint of the policy in ``model``, from the headers of its safetensors files."""
    parameters = sum(_elements(file) for file in sorted(model.glob("*.safetensors")))
    return parameters * (OPTIMIZER_BYTES + (4 if dtype == "float32" else 2))


def _elements(file: Path) -> int:
    """Numbers in a safetensors file: its header is a length (uint64, little-endian) and that much JSON."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            size = 1
            for dimension in tensor["shape"]:
                size *= dimension
            total += size
    return total


def disk(config: ExperimentConfig) -> Check:
    """Room for the checkpoints that are kept and the one being written."""
    if not (config.model.path / "config.json").is_file():
        return Check("model", "failure", f"{config.model.path} is not a model folder here", "set model.path")
    one = checkpoint_bytes(config.model.path, config.model.dtype)
    config.output.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(config.output).free, one * (config.trainer.keep + 1)
    text = f"{free / 1e9:.1f} GB free at {config.output}; a checkpoint is about {one / 1e9:.3g} GB"
    if free < one:
        return Check("disk", "failure", text, "make room: not even one fits")
    if free < needed:
        return Check("disk", "warning", text, f"{config.trainer.keep} are kept beside the one being written: {needed}")
    return Check("disk", "ok", text)


def stand_in(model: EndpointConfig, name: str) -> Check:
    """An endpoint that is asked only while another cannot be: it may be away."""
    check = endpoint(model, name)
    return replace(check, state="warning") if check.state == "failure" else check


def teacher(config: DistillationConfig) -> Check:
    """The server of ``algorithm.distillation`` is there, SGLang's, and lets us in."""
    import httpx

    base = config.base_url.rstrip("/")
    headers = {"Authorization": f"Bearer {config.api_key.get_secret_value()}"}
    try:
        answer = httpx.get(f"{base}/model_info", headers=headers, timeout=ENDPOINT_SECONDS)
    except httpx.HTTPError as error:
        fix = "check algorithm.distillation.base_url and its server"
        return Check("teacher", "failure", f"{base}: {type(error).__name__}", fix)
    if answer.status_code in (401, 403):
        fix = "check algorithm.distillation.api_key"
        return Check("teacher", "failure", f"{base} answers {answer.status_code}", fix)
    try:
        return Check("teacher", "ok", f"{base} serves {answer.json()['model_path']}")
    except (ValueError, KeyError, TypeError):
        fix = "algorithm.distillation.base_url must be SGLang's own address, without /v1"
        return Check("teacher", "failure", f"{base}/model_info answers {answer.status_code}", fix)


def endpoint(model: EndpointConfig, name: str = "user.llm") -> Check:
    """The endpoint in the section ``name`` answers and knows its model."""
    import httpx

    shown = mask_credentials(model.base_url.rstrip("/"))
    headers = {"Authorization": f"Bearer {model.api_key.get_secret_value()}"}
    try:
        answer = httpx.get(below(model.base_url, "models"), headers=headers, timeout=ENDPOINT_SECONDS)
    except httpx.HTTPError as error:
        fix = f"check {name}.base_url and its server"
        return Check("endpoint", "failure", f"{shown}: {type(error).__name__}", fix)
    if answer.status_code in (401, 403):
        return Check("endpoint", "failure", f"{shown} answers {answer.status_code}", f"check {name}.api_key")
    try:
        known = [str(one["id"]) for one in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        known = []
    if not answer.is_success or not known:
        fix = f"it may still serve chats; check {name}.base_url (it usually ends in /v1)"
        return Check("endpoint", "warning", f"{shown}/models answers {answer.status_code} and names no models", fix)
    if model.model not in known:
        some = ", ".join(known[:5])
        return Check("endpoint", "failure", f"{shown} does not know {model.model!r}", f"set {name}.model to: {some}")
    return Check("endpoint", "ok", f"{shown} serves {model.model}")
