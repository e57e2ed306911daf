"""The checks of ``mua doctor preflight`` that one node makes by itself. Each gives one :class:`Check`."""

from __future__ import annotations

import re
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from mua.config.schema import DistillationConfig, EndpointConfig, ExperimentConfig
from mua.utils.masking import below, mask_credentials
from mua.utils.resources import shipped
from mua.utils.source_state import installed_version

if TYPE_CHECKING:
    import httpx
    from pydantic import SecretStr

State = Literal["ok", "warning", "failure"]
PINNED = ("torch", "megatron-core", "sglang", "transformers", "safetensors", "numpy")
"""Packages whose versions belong together; the others' are recorded, not checked."""
SHARED_MEMORY_BYTES = 1 << 30
ENDPOINT_SECONDS = 20.0


@dataclass(frozen=True)
class Check:
    """What a check found. ``fix`` says what to do about a warning or a failure."""

    name: str
    state: State
    text: str
    fix: str = ""
    key: str = ""
    """The key of the configuration that it is about."""

    @property
    def advice(self) -> str:
        """Key, text and fix, of which some may be empty."""
        said = f"{self.text}; {self.fix}" if self.fix else self.text
        return f"{self.key}: {said}" if self.key else said

    def line(self) -> str:
        """For people."""
        return f"{self.state:8} {self.name:15} {self.advice}"


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """The result of ``check``; whatever it raises is a failure, so that one check never hides the others."""
    try:
        return check()
    except Exception as error:
        return Check(name, "failure", f"could not be made: {type(error).__name__}: {error}")


def versions(cuda: bool) -> Check:
    """Installed versions against the constraints that were run together."""
    names = ("gpu-py312-cu.txt",) if cuda else ("cpu-py312.txt", "cpu-py312-nodeps.txt")
    pins: dict[str, str] = {}
    for path in (shipped(f"constraints/{name}") for name in names):
        if path.is_file():
            pins |= dict(re.findall(r"^([\w.-]+)==([^\s;]+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    installed = {name: installed_version(name) for name in PINNED}
    shown = ", ".join(f"{name} {version or 'missing'}" for name, version in installed.items())
    if missing := [name for name in ("torch", "megatron-core", "sglang", "transformers") if installed[name] is None]:
        return Check("versions", "failure", shown, f"install {', '.join(missing)} with the pins of {names[0]}")
    other = [
        f"{name} {pins[name]}"
        for name, version in installed.items()
        if name in pins and (version or "").partition("+")[0] != pins[name].partition("+")[0]
    ]
    if other:
        return Check("versions", "warning", shown, f"tested with {', '.join(other)} ({names[0]})")
    return Check("versions", "ok", shown)


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
    needed = max(SHARED_MEMORY_BYTES, 2 * config.engine.bucket_bytes if config else 0)
    text = f"/dev/shm has {usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    if usage.free < needed:
        return Check("shared memory", "warning", text, f"give it {needed / 2**30:.1f} GiB (containers: --shm-size)")
    return Check("shared memory", "ok", text)


def tool_servers(config: ExperimentConfig) -> Check:
    """Each server of ``environment.mcp`` opens one session and has the tools that the configuration names."""
    from mua.environment.mcp.inspection import inspected  # brings the SDK, which takes long to import

    found = inspected(config)
    text = ", ".join(f"{one.name}: {len(one.tools)} tools in {one.seconds:.1f} s" for one in found if not one.fault)
    if faults := [one.fault for one in found if one.fault]:
        return Check("tool servers", "failure", "; ".join(faults), "mua env servers CONFIG shows all")
    return Check("tool servers", "ok", text)


def stand_in(model: EndpointConfig, name: str) -> Check:
    """An endpoint that is asked only while another cannot be: it may be away."""
    check = endpoint(model, name)
    return replace(check, state="warning") if check.state == "failure" else check


def teacher(config: DistillationConfig) -> Check:
    """The server of ``algorithm.distillation`` is there, SGLang's, and lets us in."""
    base, section = config.base_url.rstrip("/"), "algorithm.distillation"
    answer = _get(f"{base}/model_info", config.api_key, "teacher", base, section)
    if isinstance(answer, Check):
        return answer
    try:
        return Check("teacher", "ok", f"{base} serves {answer.json()['model_path']}")
    except (ValueError, KeyError, TypeError):
        fix = f"{section}.base_url must be SGLang's own address, without /v1"
        return Check("teacher", "failure", f"{base}/model_info answers {answer.status_code}", fix)


def endpoint(model: EndpointConfig, name: str = "user.llm") -> Check:
    """The endpoint in the section ``name`` answers and knows its model."""
    shown = mask_credentials(model.base_url.rstrip("/"))
    answer = _get(below(model.base_url, "models"), model.api_key, "endpoint", shown, name)
    if isinstance(answer, Check):
        return answer
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


def _get(url: str, key: SecretStr, check: str, shown: str, section: str) -> httpx.Response | Check:
    """What a server answers; a failure of ``check`` where it is not there or does not let us in."""
    import httpx

    headers = {"Authorization": f"Bearer {key.get_secret_value()}"}
    try:
        answer = httpx.get(url, headers=headers, timeout=ENDPOINT_SECONDS)
    except httpx.HTTPError as error:
        return Check(check, "failure", f"{shown}: {type(error).__name__}", f"check {section}.base_url and its server")
    if answer.status_code in (401, 403):
        return Check(check, "failure", f"{shown} answers {answer.status_code}", f"check {section}.api_key")
    return answer
