"""What the preflight makes of a node's GPUs: parsed texts of ``nvidia-smi``, and each check's verdict and fix.

The texts are written after the documented formats of ``nvidia-smi`` (its man page, and ``topo -m`` and ``--version`` of
driver 550 to 580), not recorded: there was no GPU. Not covered: that a driver prints what is written here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mua.config.load import load_config
from mua.config.schema import ExperimentConfig
from mua.engine.server import for_engine, start_process, with_cuda_runtime
from mua.launch import gpus
from mua.launch.checks import Check
from mua.launch.checks import node as checks
from mua.launch.checks.node import RunNode
from mua.launch.gpus import GpuFacts, GpuHolder, NodeFacts, set_variables
from mua.megatron.settings import Capabilities
from mua.utils import cores

GPUS = """\
0, GPU-11111111-aaaa, NVIDIA H100 80GB HBM3, 9.0, 81559, 4, 580.82.07, 00000000:18:00.0, Disabled, Enabled
1, GPU-22222222-bbbb, NVIDIA H100 80GB HBM3, 9.0, 81559, 61000, 580.82.07, 00000000:2A:00.0, Disabled, Enabled
2, GPU-33333333-cccc, NVIDIA L40S, 8.9, 46068, 1, 580.82.07, 00000000:3A:00.0, [N/A], Disabled
3, GPU-44444444-dddd, NVIDIA H100 80GB HBM3, 9.0, 81559, 0, 580.82.07, 00000000:5D:00.0, Enabled, [N/A]
"""
HOLDERS = """\
GPU-22222222-bbbb, 4711, /usr/bin/python3
GPU-33333333-cccc, [N/A], [Insufficient Permissions]
"""
LINKS = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47,96-143\t0\t\tN/A
GPU1\tNV18\t X \tNODE\tSYS\t48-95\t1\t\tN/A
GPU2\tSYS\tNODE\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
ONE = "\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-15\t0\n"
VERSION = "NVIDIA-SMI version  : 580.82.07\nDRIVER version      : 580.82.07\nCUDA Version        : 13.0\n"
HEAD = "| NVIDIA-SMI 550.54.14              Driver Version: 550.54.14      CUDA Version: 12.4     |\n"

EXACT = ["trainer.deterministic=true", "engine.deterministic=true"]
H100 = GpuFacts(0, "GPU-1", "NVIDIA H100 80GB HBM3", (9, 0), 81559 << 20, 4 << 20, "580.82.07", False, True)


def node(count: int, link: str = "NV18", **changes: Any) -> NodeFacts:
    """A node of H100s, each of which is ``changes`` different."""
    all_gpus = tuple(replace(H100, index=index, uuid=f"GPU-{index}", **changes) for index in range(count))
    links = {(a, b): link for a in range(count) for b in range(count) if a != b}
    return NodeFacts(all_gpus, (13, 0), (), links)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., ExperimentConfig]:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"{{name: x, output: {tmp_path}, model: {{path: {tmp_path}}}, environment: {{name: help_desk}},"
        " trainer: {steps: 1}}"
    )
    return lambda *overrides: load_config(path, overrides)


def test_texts_of_nvidia_smi_are_read() -> None:
    found = gpus.parse_gpus(GPUS)
    assert [gpu.capability for gpu in found] == [(9, 0), (9, 0), (8, 9), (9, 0)]
    assert found[1].used == 61000 << 20
    assert [gpu.mig for gpu in found] == [False, False, False, True]
    assert [gpu.ecc for gpu in found] == [True, True, False, None]
    assert gpus.parse_holders(HOLDERS) == (GpuHolder("GPU-22222222-bbbb", 4711, "/usr/bin/python3"),)
    links = gpus.parse_links(LINKS)
    assert (links[0, 1], links[0, 2], links[2, 1], len(links)) == ("NV18", "SYS", "NODE", 6)
    assert gpus.parse_links(ONE) == gpus.parse_links("") == {}
    assert gpus.parse_cuda(VERSION) == (13, 0)
    assert gpus.parse_cuda(HEAD) == (12, 4)
    assert gpus.parse_cuda("no driver") is None


def test_only_the_gpus_of_the_job_count() -> None:
    found = gpus.parse_gpus(GPUS)
    assert [gpu.index for gpu in gpus.visible(found, "3,0")] == [3, 0]
    assert [gpu.index for gpu in gpus.visible(found, "GPU-2222")] == [1]
    assert gpus.visible(found, "") == ()
    assert gpus.visible(found, "MIG-5d") == gpus.visible(found, None) == found


HELD = replace(node(2, used=60 << 30), holders=(GpuHolder("GPU-1", 4711, "python3"),))


@pytest.mark.parametrize(
    ("check", "given", "state", "words"),
    [
        (checks.check_gpus, RunNode(facts=node(8), ranks=8), "ok", "8 x NVIDIA H100 80GB HBM3, 80 GiB, driver 580"),
        (checks.check_gpus, RunNode(), "ok", "what only GPUs have is not checked"),
        (checks.check_gpus, RunNode(facts=node(2), ranks=4), "failure", "4 processes of this node need one each"),
        (checks.check_gpus, RunNode(facts=node(2, mig=True), ranks=2), "failure", "cut by MIG; .*nvidia-smi -mig 0"),
        (checks.check_gpus, RunNode(facts=node(2, ecc=False), ranks=2), "warning", "without ECC"),
        (checks.check_gpus, RunNode(facts=HELD), "failure",
         r"held by others: GPU 0: 60 GiB, unknown; GPU 1: 60 GiB, python3 \(4711\)"),
        (checks.check_driver, RunNode(facts=node(1), cuda="13.0"), "ok", "CUDA 13.0, torch's is 13.0"),
        (checks.check_driver, RunNode(facts=node(1), cuda="13.2"), "warning", "update the driver"),
        (checks.check_driver, RunNode(facts=node(1), cuda="14.0"), "failure", "update the driver to one for CUDA 14"),
        (checks.check_driver, RunNode(facts=node(1)), "failure", "torch is a build without CUDA"),
        (checks.check_driver, RunNode(facts=node(1), cuda="13.0", usable=False), "failure", "torch finds no GPU"),
        (checks.check_links, RunNode(facts=node(8)), "ok", r"NVLink between all 8 GPUs \(NV18\)"),
        (checks.check_links, RunNode(facts=node(4, link="SYS")), "warning", "6 of 6 pairs without NVLink: 0-1 SYS"),
        (checks.check_links, RunNode(facts=replace(node(2), links={})), "warning", "topo -m says nothing"),
        (checks.check_cores, RunNode(facts=node(8), ranks=8, cores=(1, 192)), "failure", "1 of .* 192 .*exclusive"),
        (checks.check_cores, RunNode(facts=node(8), ranks=8, cores=(16, 192)), "warning", "slurm.cpus_per_task"),
        (checks.check_cores, RunNode(facts=node(8), ranks=8, cores=(96, 192)), "ok", "96"),
        (checks.check_cores, RunNode(ranks=2, cores=(2, 2)), "ok", "2"),
    ],
)  # fmt: skip
def test_verdicts_about_a_node(check: Callable[[RunNode], Check], given: RunNode, state: str, words: str) -> None:
    found = check(given)
    assert found.state == state, found
    assert re.search(words, found.line()), found.line()


def test_an_apex_that_is_not_nvidias_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, state in ((("fused_weight_gradient_mlp_cuda", "apex"), "ok"), (("apex",), "warning"), ((), "ok")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, there=there: name if name in there else None)
        assert checks.check_apex(RunNode()).state == state


def test_the_plan_must_fit_the_gpu_that_is_there() -> None:
    phase = SimpleNamespace(name="training", total=60 * 10**9)
    cluster = SimpleNamespace(gpu="H200")
    plan: Any = SimpleNamespace(phases=[phase], reserve=4 * 10**9, faults=list, config=SimpleNamespace(cluster=cluster))
    assert checks.check_plan(plan, node(8), "H100").text == "training needs 64.0 of 85.5 GB"
    small = checks.check_plan(plan, node(8, total=40 << 30), "H100")
    assert (small.state, small.text) == ("failure", "training needs 64.0 of 42.9 GB")
    unknown = checks.check_plan(plan, node(8, name="NVIDIA X"), None)
    assert (unknown.state, unknown.fix) == ("warning", "no figures of NVIDIA X; counted as H200 (cluster.gpu)")
    assert checks.gpu_type("NVIDIA A100-SXM4-80GB") == "A100-80"
    assert checks.gpu_type("NVIDIA A100-SXM4-40GB") is None


def test_the_plan_is_made_for_the_gpu_that_is_there(config: Callable[..., ExperimentConfig]) -> None:
    path = Path(__file__).parents[2] / "configs" / "qwen3-32b-4x8-h200.yaml"
    recipe = load_config(path)
    for total, name, state in ((143771, "NVIDIA H200", "ok"), (81559, "NVIDIA H100 80GB HBM3", "failure")):
        found = checks.check_memory(RunNode(recipe, node(8, total=total << 20, name=name)))
        assert found.state == state, found


def test_transformer_engine_of_a_wrong_version_is_named(config: Callable[..., ExperimentConfig]) -> None:
    gpu = Capabilities(cuda=True, compute=(9, 0), torch="2.14.1")
    assert checks.check_layers(RunNode(config(), machine=replace(gpu, transformer_engine="2.20.2"))).state == "ok"
    assert "is not installed" in checks.check_layers(RunNode(config(), machine=gpu)).text
    old = checks.check_layers(RunNode(config(), machine=replace(gpu, transformer_engine="1.13.0")))
    assert (old.state, "1.13.0" in old.text) == ("failure", True)
    ampere = replace(gpu, compute=(8, 0), transformer_engine="2.20.2")
    assert (
        "needs a GPU of compute capability 9.0"
        in checks.check_layers(RunNode(config("megatron.fp8=hybrid"), machine=ampere)).text
    )
    assert checks.check_layers(RunNode(config())).state == "ok"


def test_nodes_of_one_job_are_alike() -> None:
    def said(node: str, gpu: str, versions: str) -> list[tuple[str, Check]]:
        return [(node, Check("GPUs", "ok", gpu)), (node, Check("versions", "ok", versions))]

    assert checks.compare_nodes(said("n1", "8 x H100", "torch 2") + said("n2", "8 x H100", "torch 2")) == []
    found = checks.compare_nodes(said("n1", "8 x H100", "torch 2") + said("n2", "8 x H200", "torch 3"))
    assert [check.state for check in found] == ["failure", "warning"]
    assert found[1].text == "n1: 8 x H100, n2: 8 x H200"


@pytest.mark.parametrize(
    ("overrides", "capability", "variables", "state", "words"),
    [
        ([], (9, 0), {}, "ok", "none needed"),
        (["megatron.tensor_parallel=2"], (9, 0), {}, "ok", "CUDA_DEVICE_MAX_CONNECTIONS=1"),
        (["megatron.tensor_parallel=2"], (10, 0), {}, "ok", "none needed"),
        (["megatron.context_parallel=2"], (9, 0), {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "warning", "or set it to 1"),
        (["engine.transport=broadcast"], (9, 0), {}, "ok", "NCCL_CUMEM_ENABLE=0, NCCL_NVLS_ENABLE=0"),
        (["engine.transport=broadcast"], (9, 0), {"NCCL_CUMEM_ENABLE": "1"}, "ok", "NCCL_CUMEM_ENABLE=1"),
        (EXACT, (9, 0), {"NCCL_ALGO": "Tree"}, "failure", "unset NCCL_ALGO or set it to Ring"),
        (EXACT, (9, 0), {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, "ok", ":16:8"),
        ([], None, {"PYTORCH_ALLOC_CONF": "a:64, expandable_segments : True"}, "failure", "unset PYTORCH_ALLOC"),
        ([], (9, 0), {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "ok", "none needed"),
        ([], (9, 0), {"NVTE_FLASH_ATTN": "0"}, "failure", "Megatron-Core chooses the attention kernel"),
        ([], (9, 0), {"NVTE_FLASH_ATTN": "1"}, "ok", "none needed"),
        ([], None, {}, "ok", "skipped"),
    ],
)  # fmt: skip
def test_variables(
    config: Callable[..., ExperimentConfig], overrides: list[str], capability: gpus.Capability | None,
    variables: dict[str, str], state: str, words: str,
) -> None:  # fmt: skip
    facts = NodeFacts(() if capability is None else (replace(node(1).gpus[0], capability=capability),))
    found = checks.check_variables(RunNode(config(*overrides), facts), variables)
    assert found.state == state, found
    assert words in found.line()


def test_a_rank_gets_what_it_needs_and_an_engine_does_not_inherit_it(
    config: Callable[..., ExperimentConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "visible_capability", lambda: (9, 0))
    rank = {"NCCL_NVLS_ENABLE": "1", "HOME": "/x"}
    set_variables(config("megatron.tensor_parallel=2", "engine.transport=broadcast"), rank)
    assert rank == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1", "HOME": "/x"
    }  # fmt: skip
    assert for_engine(rank) == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1", "HOME": "/x"}
    assert for_engine({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}) == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    monkeypatch.setattr(gpus, "visible_capability", lambda: None)
    untouched: dict[str, str] = {}
    set_variables(config("megatron.tensor_parallel=2"), untouched)
    assert untouched == {}


def test_what_is_preloaded_finds_the_cuda_runtime_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "nvidia/cu13/lib"
    folder.mkdir(parents=True)
    (folder / "libcudart.so.13").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec if name == "nvidia" else None)
    assert with_cuda_runtime({}) == {"LD_LIBRARY_PATH": str(folder)}
    told = {"LD_LIBRARY_PATH": f"/own:{folder}"}
    assert with_cuda_runtime({"LD_LIBRARY_PATH": "/own"}) == with_cuda_runtime(told) == told
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert with_cuda_runtime({"A": "b"}) == {"A": "b"}


def test_a_rank_stays_near_its_gpu_and_what_it_starts_does_not(tmp_path: Path) -> None:
    given = os.sched_getaffinity(0)
    first = min(given)
    (tmp_path / "0000:17:00.0").mkdir()
    (tmp_path / "0000:17:00.0" / "local_cpulist").write_text(f"{first},4096-4099\n")
    try:
        assert cores.bind_near("0000:17:00.0", tmp_path) == {first} == os.sched_getaffinity(0)
        with (tmp_path / "log").open("wb") as log:
            start_process(["nproc"], log, {"PATH": os.environ["PATH"]}).wait(60)  # as every server is started
        assert (tmp_path / "log").read_text() == f"{len(given)}\n"
        assert os.sched_getaffinity(0) == {first}
        assert cores.bind_near("0000:99:00.0", tmp_path) == given
    finally:
        os.sched_setaffinity(0, given)
    assert cores.parse_cores("0-2,8\n") == {0, 1, 2, 8}
